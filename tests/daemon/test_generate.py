"""`generate` through a daemon with fake ranks: streams, ends, refusals, figures."""

from __future__ import annotations

import json
import shutil
import threading
from typing import Any

from mstar.daemon import generation
from mstar.loader import resolve
from tests.support.daemons import LineClient, ZmqClient, classes, daemon, generate, run, text_of

HOLD = {"hold": True}
SLOW = {"step_s": 0.01}


def test_a_request_streams_and_ends_with_its_figures() -> None:
    async def body() -> None:
        async with daemon() as server:
            client = ZmqClient(server)
            await client.load()
            events = await client.generate(max_tokens=5, return_ids=True, logprobs=1)
            assert classes(events) == ["gen_start", *["token"] * 5, "done"]
            assert [event["ids"] for event in events[1:-1]] == [[65], [66], [67], [65], [66]]
            assert events[1]["logprobs"] == [{"id": 65, "logprob": -0.65, "top": [[65, -0.65]]}]
            done = events[-1]
            assert done["finish_reason"] == "length"
            assert done["usage"] == {
                "prompt_tokens": events[0]["prompt_tokens"],
                "completion_tokens": 5,
                "reasoning_tokens": 0,
                "cached_tokens": 0,
            }
            timings = done["timings"]
            assert all(figure is not None and figure >= 0 for figure in timings.values())
            assert timings["ttft_ms"] >= timings["queue_ms"]
            stats = await client.ask(type="stats", id=9)
            assert (stats["requests"], stats["tokens"]["completion"], stats["id"]) == ({"length": 1}, 5, 9)
            assert (stats["blocks"]["used"], stats["slots"]["used"]) == (0, 0)
            client.close()

    run(body())


def test_texts_of_megabytes_leave_their_threads_to_shorter_ones(monkeypatch) -> None:
    encode, go = generation.prompt_ids, threading.Event()

    def slow(request, text):
        if len(request.prompt) > 1 << 18:
            go.wait(30.0)
        return encode(request, text)

    monkeypatch.setattr(generation, "prompt_ids", slow)

    async def body() -> None:
        async with daemon() as server:
            client = ZmqClient(server)
            await client.load()
            for number in range(3):
                await client.send(**generate(id=number, prompt="ab " * 100_000))
            shorter = (await client.generate(id="shorter", prompt="ab " * 10_000))[-1]
            assert (shorter["id"], shorter["class"]) == ("shorter", "context_length")
            go.set()
            ends = [(await client.until("error"))[-1] for _ in range(3)]
            assert [(end["id"], end["class"]) for end in ends] == [(n, "context_length") for n in range(3)]
            client.close()

    try:
        run(body())
    finally:
        go.set()


def test_seeds_are_the_clients_or_drawn_and_reported() -> None:
    async def body() -> None:
        async with daemon() as server:
            client = ZmqClient(server)
            await client.load()
            assert (await client.generate(seed=7, max_tokens=1))[0]["seed"] == 7
            drawn = {(await client.generate(max_tokens=1))[0]["seed"] for _ in range(3)}
            assert len(drawn) == 3
            client.close()

    run(body())


def test_bad_requests_are_answered_by_class_and_field(tmp_path) -> None:
    vocab = 6144
    bad: list[tuple[dict[str, Any], str, str | None]] = [
        ({"prompt_ids": [1, vocab]}, "validation", "prompt_ids[1]"),
        ({"prompt_ids": [-1]}, "validation", "prompt_ids[0]"),
        ({"stop_token_ids": [vocab]}, "validation", "stop_token_ids[0]"),
        ({"prompt_ids": [1] * 128}, "context_length", None),
        ({"prompt": "word " * 200}, "context_length", None),
        ({"prompt": "word " * 20_000}, "context_length", None),  # long enough for a thread
        ({"prompt": ""}, "validation", "prompt"),
        ({"prompt_ids": []}, "validation", "prompt_ids"),
        ({"prompt": "a", "prompt_ids": [1]}, "validation", "prompt_ids"),
        ({"messages": []}, "validation", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "unsupported", None),
        ({"tools": [{}]}, "unsupported", "tools"),
        ({"temperature": -1.0}, "validation", "temperature"),
        ({"max_tokens": 2**80}, "validation", "max_tokens"),
        ({"spec": {"mtp_k": 8}}, "validation", "spec.mtp_k"),
    ]

    async def body() -> None:
        async with daemon(max_seq=128) as server:
            client = await LineClient.connect(server)
            await client.load()
            for fields, error_class, field in bad:
                events = await client.generate("bad", **fields)
                error = events[-1]
                assert (classes(events), error["id"], error["attempt_id"]) == ([error_class], "bad", 0), error
                assert field is None or error["field"] == field
            long = (await client.generate(prompt_ids=[1] * 128))[-1]
            assert "128" in long["message"] and "127" in long["message"]
            fits = await client.generate(prompt_ids=[1] * 127, max_tokens=50)
            assert fits[-1]["usage"]["completion_tokens"] == 1  # cut to the room left
            client.close()

    run(body())


def test_a_chat_template_that_raises_is_the_messages_fault(tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve("builtin:tiny"), model)
    template = "{{ raise_exception('roles must alternate') }}"
    (model / "chat_template.jinja").write_text(template)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if "chat_template" in config:
        path.write_text(json.dumps({**config, "chat_template": template}))

    async def body() -> None:
        async with daemon() as server:
            client = ZmqClient(server)
            await client.load(model=str(model))
            error = (await client.generate(messages=[{"role": "user", "content": "hi"}]))[-1]
            assert (error["class"], error["field"]) == ("validation", "messages")
            assert "roles must alternate" in error["message"]
            assert (await client.generate(max_tokens=1))[-1]["type"] == "done"
            client.close()

    run(body())


def test_a_second_live_request_under_one_key_is_refused_and_the_first_goes_on() -> None:
    async def body() -> None:
        async with daemon(SLOW) as server:
            first, other = ZmqClient(server), await LineClient.connect(server)
            await first.load()
            await first.send(**generate(max_tokens=60))
            await first.until("token")
            refused = await other.ask(**generate())
            assert (refused["class"], refused["attempt_id"]) == ("validation", 0)
            await first.send(**generate())
            events = await first.until("done")
            refusals = [event for event in events if event["type"] == "error"]
            # On the same connection both keys would read as the live request's terminal event.
            assert len(refusals) == 1 and "attempt_id" not in refusals[0]
            await first.send(**generate(temperature="hot"))  # after its end the key is free
            assert (await first.receive())["attempt_id"] == 0
            other.close()
            first.close()

    run(body())


def test_any_connection_may_abort_by_key_and_nothing_is_not_an_error() -> None:
    async def body() -> None:
        async with daemon(SLOW) as server:
            asker, aborter = ZmqClient(server), await LineClient.connect(server)
            await asker.load()
            await asker.send(**generate("x", max_tokens=4000, stop=["never to be seen"]))
            await asker.until("token")
            for key in (
                {"id": "y", "attempt_id": 0},
                {"id": "x", "attempt_id": 1},
                {"id": "x", "attempt_id": 0},
            ):
                await aborter.send(type="abort", **key)
            events = await asker.until("done")
            assert events[-1]["finish_reason"] == "abort"
            await aborter.send(type="abort", id="x", attempt_id=0)
            assert (await aborter.ask(type="ping"))["type"] == "pong"  # no abort was answered
            assert (await asker.ask(type="ping"))["type"] == "pong"  # nothing after the end
            stats = await asker.ask(type="stats")
            assert stats["blocks"]["used"] == 0  # the engine was told
            asker.close()
            aborter.close()

    run(body())


def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    async def body() -> None:
        async with daemon(SLOW) as server:
            client = ZmqClient(server)
            await client.load()
            text = text_of(await client.generate(max_tokens=3))  # "bcd" with the built-in vocabulary
            events = await client.generate(max_tokens=4000, stop=[text[1:]])
            assert text_of(events) == text[:1]
            assert events[-1]["finish_reason"] == "stop"
            assert events[-1]["usage"]["completion_tokens"] == 3
            assert (await client.ask(type="stats"))["blocks"]["used"] == 0
            client.close()

    run(body())


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    async def body() -> None:
        for script in (HOLD, SLOW):
            async with daemon(script) as server:
                client = ZmqClient(server)
                await client.load()
                error = (await client.generate(max_tokens=4000, deadline_ms=100))[-1]
                assert (error["class"], error["field"]) == ("deadline", "deadline_ms")
                assert (await client.ask(type="stats"))["queues"]["waiting"] == 0
                client.close()

    run(body())


def test_what_the_engine_refuses_ends_with_its_class() -> None:
    async def body() -> None:
        async with daemon({"refuse": {"error_class": "context_length", "message": "never fits"}}) as server:
            client = ZmqClient(server)
            await client.load()
            events = await client.generate()
            assert (classes(events), events[0]["message"]) == (["context_length"], "never fits")
            client.close()

    run(body())


def test_too_many_live_requests_are_overload_and_end_frees_room() -> None:
    async def body() -> None:
        async with daemon(HOLD, max_waiting=3) as server:
            client = ZmqClient(server)
            await client.load()
            for attempt in range(3):
                await client.send(**generate(attempt_id=attempt))
            refused = await client.ask(**generate(attempt_id=3))
            assert (refused["class"], refused["retryable"], refused["attempt_id"]) == ("overloaded", True, 3)
            status = await client.ask(type="status")
            assert (status["running"], status["waiting"]) == (0, 3)
            await client.send(type="abort", id="a", attempt_id=1)
            assert (await client.receive())["finish_reason"] == "abort"
            await client.send(**generate(attempt_id=3))
            assert (await client.ask(type="ping"))["type"] == "pong"
            client.close()

    run(body())


def test_a_long_prompt_holds_up_nobody_and_can_be_aborted() -> None:
    async def body() -> None:
        async with daemon() as server:
            client = ZmqClient(server)
            await client.load()
            await client.send(**generate("long", prompt="many words " * 200_000))
            await client.send(type="abort", id="long", attempt_id=0)
            end = await client.receive()
            assert (end["finish_reason"], end["usage"]["prompt_tokens"]) == ("abort", 0)
            client.close()

    run(body())
