"""The clients against a scripted daemon: routing, errors, leases, aborts, lost daemons."""

import asyncio
import gc
import threading

import pytest

from mstar.daemon import client_core
from mstar.daemon.client import AsyncClient, Client, DaemonError, NoDaemon
from mstar.daemon.protocol import Done, GenStart, Loaded, Reasoning, Token
from tests.support.scripted_daemon import ScriptedDaemon


@pytest.fixture
def daemon():
    with ScriptedDaemon() as fake:
        yield fake


@pytest.fixture
def client(daemon):
    with Client(daemon.address, timeout_s=20) as c:
        yield c


def text_of(events) -> str:
    return "".join(e.text for e in events if isinstance(e, Token))


def test_generate_streams_typed_events_to_its_end(client, daemon):
    events = list(client.generate(prompt="one two", temperature=0.5, stop=["x"]))
    assert [type(e) for e in events] == [GenStart, Token, Token, Done]
    assert text_of(events) == "one two " and events[-1].usage.completion_tokens == 2
    (sent,) = daemon.wait_for("generate")
    assert sent["temperature"] == 0.5 and sent["stop"] == ["x"] and "top_p" not in sent


def test_reasoning_and_text_come_apart(client):
    answer = client.chat("think")
    assert (answer.text, answer.reasoning, answer.done.finish_reason) == ("think ", "hm", "stop")
    assert client.chat([{"role": "user", "content": "a b"}]).text == "a b "


def test_load_tells_its_progress_and_what_it_loaded(client, daemon):
    seen = []
    loaded = client.load("m", on_progress=seen.append, tp=2, spec={"mtp": "off"})
    assert isinstance(loaded, Loaded) and loaded.kv.tokens == 144
    assert [(e.stage, e.done) for e in seen] == [("read", 1 << 20), ("read", 2 << 20), ("warmup", 3)]
    assert daemon.wait_for("load")[0]["tp"] == 2


def test_every_other_request_has_its_answer(client):
    assert client.status().ranks[0].pid == 77 and client.stats().blocks.free == 7
    assert client.unload().type == "unloaded" and client.reset().type == "reset_done"
    assert client.ping().type == "pong" and client.shutdown().type == "shutting_down"


def test_error_events_are_raised_with_all_they_say(client, daemon):
    with pytest.raises(DaemonError) as caught:
        list(client.generate(prompt="fail"))
    error = caught.value
    assert (error.error_class, error.field, error.retryable) == ("context_length", "prompt", False)
    daemon.failing["load"] = {"class": "busy", "message": "unload first", "retryable": True}
    with pytest.raises(DaemonError, match="unload first") as caught:
        client.load("m")
    assert caught.value.retryable
    assert text_of(client.generate(prompt="still there")) == "still there "


def test_fields_that_would_be_refused_are_refused_with_their_name(client, daemon):
    for fields, field in [({"prompt": "x", "top_p": 2}, "top_p"), ({"prompt": "x", "foo": 1}, "foo")]:
        with pytest.raises(DaemonError) as caught:
            client.generate(**fields)
        assert (caught.value.error_class, caught.value.field) == ("validation", field)
    assert daemon.received == []


def test_without_a_daemon_no_daemon_is_raised_within_the_bound(tmp_path):
    for address in (f"ipc://{tmp_path}/none", "tcp://127.0.0.1:9", "nonsense", "tcp://nonsense"):
        with Client(address, timeout_s=0.2) as client, pytest.raises(NoDaemon):
            client.ping()


def test_a_client_that_found_no_daemon_finds_one_that_starts_later(daemon):
    daemon.silent = True
    with Client(daemon.address, timeout_s=0.2) as client:
        with pytest.raises(NoDaemon):
            client.generate(prompt="a")
        daemon.silent = False
        client._client._core.timeout_s = 20
        assert text_of(client.generate(prompt="a")) == "a "


def test_generations_at_once_are_routed_by_id_and_attempt(client):
    keys = [(id, attempt) for id in ("a", 7, "7") for attempt in (0, 1)]
    streams = [client.generate(id=i, attempt_id=n, prompt=f"for {i} {n}") for i, n in keys]
    for (id, attempt), stream in reversed(list(zip(keys, streams, strict=True))):
        events = list(stream)
        assert text_of(events) == f"for {id} {attempt} "
        assert {(e.id, e.attempt_id) for e in events} == {(id, attempt)}


def test_a_key_that_is_live_is_not_sent_twice(client, daemon):
    first = client.generate(id="a", prompt="hold")
    with pytest.raises(DaemonError, match="still live"):
        client.generate(id="a", prompt="b")
    first.abort()
    assert list(first)[-1].finish_reason == "abort"
    assert text_of(client.generate(id="a", prompt="b")) == "b "


def test_threads_share_a_client(client):
    results: dict[int, str] = {}

    def work(n: int) -> None:
        results[n] = text_of(client.generate(prompt=f"thread {n}"))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: f"thread {n} " for n in range(8)}


def test_abort_ends_a_request_with_done(client):
    generation = client.generate(prompt="hold")
    assert isinstance(next(generation), GenStart)
    generation.abort()
    events = list(generation)
    assert events[-1].finish_reason == "abort"
    generation.abort()  # of what has ended: nothing
    assert list(generation) == []


def test_abort_by_key_reaches_another_clients_request(client, daemon):
    with Client(daemon.address, timeout_s=20) as other:
        other.abort("someone", 3)
    assert daemon.wait_for("abort") == [{"type": "abort", "id": "someone", "attempt_id": 3}]


def test_closing_a_client_aborts_what_it_left(daemon):
    with Client(daemon.address, timeout_s=20) as client:
        generations = [client.generate(id=f"g{n}", prompt="hold") for n in range(3)]
        list(client.generate(id="finished", prompt="a"))
    assert sorted(m["id"] for m in daemon.wait_for("abort", 3)) == ["g0", "g1", "g2"]
    with pytest.raises(NoDaemon):
        client.ping()
    client.close()  # twice is fine
    del generations


def test_a_dropped_generation_is_aborted(client, daemon):
    generation = client.generate(id="dropped", prompt="hold")
    next(generation)
    del generation
    gc.collect()
    assert daemon.wait_for("abort")[0]["id"] == "dropped"


def test_leases_are_renewed_while_a_request_runs(client, daemon, monkeypatch):
    monkeypatch.setattr(client_core, "PING_S", 0.02)
    generation = client.generate(prompt="hold")
    before = daemon.pings
    while daemon.pings < before + 3:
        threading.Event().wait(0.01)
    generation.abort()
    assert list(generation)[-1].finish_reason == "abort"


def test_a_daemon_that_dies_ends_every_stream_with_no_daemon(daemon):
    with Client(daemon.address, timeout_s=20) as client:
        generations = [client.generate(prompt="hold") for _ in range(2)]
        for generation in generations:
            assert isinstance(next(generation), GenStart)
        daemon.stop()
        for generation in generations:
            with pytest.raises(NoDaemon):
                list(generation)


def test_a_daemon_that_falls_silent_is_noticed(client, daemon, monkeypatch):
    monkeypatch.setattr(client_core, "PING_S", 0.02)
    monkeypatch.setattr(client_core, "SILENCE_S", 0.2)
    generation = client.generate(prompt="hold")
    assert isinstance(next(generation), GenStart)
    daemon.silent = True
    with pytest.raises(NoDaemon):
        list(generation)


def test_a_stream_left_unread_is_given_up_alone(client, daemon, monkeypatch):
    monkeypatch.setattr(client_core, "MAX_UNREAD_EVENTS", 50)
    unread = client.generate(id="unread", prompt="flood 5000")
    assert text_of(client.generate(prompt="a b c")) == "a b c "
    assert daemon.wait_for("abort")[0]["id"] == "unread"
    with pytest.raises(DaemonError) as caught:
        list(unread)
    assert caught.value.error_class == "overloaded"


def test_an_unread_stream_that_still_fits_is_whole(client):
    unread = client.generate(prompt="flood 5000")
    client.ping()
    assert text_of(unread) == "x" * 5000


def test_async_client_does_the_same(daemon):
    async def work() -> None:
        async with AsyncClient(daemon.address, timeout_s=20) as client:
            assert (await client.load("m")).layers == 4

            async def one(n: int) -> str:
                return text_of([e async for e in await client.generate(prompt=f"number {n}")])

            assert await asyncio.gather(*map(one, range(50))) == [f"number {n} " for n in range(50)]
            held = await client.generate(prompt="hold")
            assert isinstance(await anext(held), GenStart)
            await held.abort()
            assert [e async for e in held][-1].finish_reason == "abort"
            with pytest.raises(DaemonError):
                await client.chat("fail")
            assert any(
                isinstance(e, Reasoning) for e in [e async for e in await client.generate(prompt="think")]
            )

    asyncio.run(work())


def test_a_cancelled_chat_is_aborted(daemon):
    async def work() -> None:
        async with AsyncClient(daemon.address, timeout_s=20) as client:
            await client.ping()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.chat("hold"), 0.3)

    asyncio.run(work())
    daemon.wait_for("abort")


def test_messages_that_are_no_events_are_ignored(client, daemon, monkeypatch):
    answers = daemon.answers
    junk = [{"type": "novel"}, {"a": 1}, 7, {"type": "token"}]
    monkeypatch.setattr(daemon, "answers", lambda peer, request: [*junk, *answers(peer, request)])
    assert text_of(client.generate(prompt="a")) == "a "
