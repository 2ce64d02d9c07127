"""Whatever arrives, the answer has the right class, and a request that streams on another connection ends well."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest

from mstar.loader import resolve
from tests.support.daemons import LineClient, ZmqClient, connect, generate, run, text_of
from tests.support.live_daemon import LiveDaemon, live_daemon
from tests.support.refusals import alive, bad, refused

MAX_SEQ = 256
VOCAB = 6144
NINE_MIB = 9 * 2**20
CONTROL = {"prompt": "Count from 3 to 40.", "max_tokens": 24, "ignore_eos": True, "return_ids": True}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveDaemon, tuple[str, list[int]]]]:
    """A daemon that serves the built-in model, whose template raises at "boom"; and the control's tokens."""
    model = tmp_path_factory.mktemp("model")
    for file in resolve("builtin:tiny").iterdir():
        if file.is_file():
            shutil.copyfile(file, model / file.name)
    config = json.loads((model / "tokenizer_config.json").read_text())
    trap = "{% if 'boom' in messages[0].content %}{{ raise_exception('no boom here') }}{% endif %}"
    config["chat_template"] = trap + config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))

    async def start(live: LiveDaemon) -> tuple[str, list[int]]:
        client = ZmqClient(live)
        event = await client.load(model=str(model), max_seq=MAX_SEQ, max_num_seqs=4)
        assert event["type"] == "loaded", event
        control = await client.generate("alone", **CONTROL)
        client.close()
        return tokens_of(control)

    with live_daemon() as live:
        yield live, asyncio.run(start(live))


def tokens_of(events: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """Text and ids; which of them share an event is no promise."""
    return text_of(events), [i for event in events if event["type"] == "token" for i in event["ids"]]


@asynccontextmanager
async def while_another_streams(loaded: Any) -> AsyncIterator[LiveDaemon]:
    """A control streams before, while and after what the block does, and ends as it does alone."""
    live, alone = loaded
    control = ZmqClient(live)
    await control.send(**generate("control", **CONTROL))
    events = await control.until("token", "error")
    yield live
    events += await control.until("done", "error")
    assert events[-1]["type"] == "done" and events[-1]["finish_reason"] == "length", events[-1]
    assert tokens_of(events) == alone
    assert (await control.ask(type="ping"))["type"] == "pong"
    control.close()


TURN = [{"role": "user", "content": "Hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


@pytest.mark.parametrize(
    ("error_class", "field", "fields"),
    [
        bad("validation", "nonsense", nonsense=1),
        bad("validation", "spec.nonsense", spec={"nonsense": 1}),
        bad("validation", "messages[0].name", messages=[{**TURN[0], "name": "x"}]),
        # wrong types
        bad("validation", "prompt", prompt=3),
        bad("validation", "messages", messages="Hi"),
        bad("validation", "prompt_ids[1]", prompt_ids=[1, "2"]),
        bad("validation", "prompt_ids[0]", prompt_ids=[True]),
        bad("validation", "prompt_ids[0]", prompt_ids=[1.5]),
        bad("validation", "max_tokens", max_tokens="3"),
        bad("validation", "max_tokens", max_tokens=True),
        bad("validation", "max_tokens", max_tokens=None),
        bad("validation", "temperature", temperature="hot"),
        bad("validation", "stop", stop="one"),
        bad("validation", "stop[0]", stop=[""]),
        bad("validation", "stop", stop=["a"] * 17),
        bad("validation", "ignore_eos", ignore_eos=1),
        bad("validation", "spec", spec=[]),
        bad("validation", "attempt_id", attempt_id="0"),
        bad("validation", "id", id=["a"]),
        # negative and huge numbers
        bad("validation", "attempt_id", attempt_id=-1),
        bad("validation", "max_tokens", max_tokens=0),
        bad("validation", "max_tokens", max_tokens=-5),
        bad("validation", "max_tokens", max_tokens=2**40),
        bad("validation", "temperature", temperature=-0.1),
        bad("validation", "temperature", temperature=1e30),
        bad("validation", "top_p", top_p=0),
        bad("validation", "top_p", top_p=1.01),
        bad("validation", "top_k", top_k=-1),
        bad("validation", "min_p", min_p=2),
        bad("validation", "repetition_penalty", repetition_penalty=0),
        bad("validation", "presence_penalty", presence_penalty=1e9),
        bad("validation", "seed", seed=-1),
        bad("validation", "logprobs", logprobs=21),
        bad("validation", "deadline_ms", deadline_ms=0),
        bad("validation", "spec.mtp_k", spec={"mtp_k": 9}),
        # what does not go together
        bad("validation", "messages", prompt="Hi", messages=TURN),
        bad("validation", "prompt_ids", prompt="Hi", prompt_ids=[1]),
        bad("validation", "thinking", prompt="Hi", thinking=True),
        bad("validation", "min_tokens", min_tokens=5, max_tokens=4),
        # prompts
        bad("validation", "prompt", prompt=""),
        bad("validation", "messages", messages=[]),
        bad("validation", "prompt_ids", prompt_ids=[]),
        bad("validation", "prompt_ids[1]", prompt_ids=[1, VOCAB]),
        bad("validation", "prompt_ids[0]", prompt_ids=[-1]),
        bad("validation", "prompt_ids[0]", prompt_ids=[2**62]),
        bad("validation", "stop_token_ids[0]", stop_token_ids=[VOCAB]),
        bad("context_length", None, prompt_ids=[7] * MAX_SEQ),
        bad("context_length", None, prompt="river " * 2000),
        bad("context_length", None, messages=[{"role": "user", "content": "stone " * 500}]),
        bad("validation", "messages", messages=[{"role": "user", "content": "boom"}]),
        # not built yet
        bad("unsupported", "tools", messages=TURN, tools=[{"type": "function"}]),
        bad("unsupported", "messages[0].content[0]", messages=IMAGE),
        bad("unsupported", "messages[0].role", messages=[{"role": "tool", "content": "3"}]),
    ],
)
def test_bad_generate_is_refused_by_name(loaded, error_class, field, fields):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            for face in ("zmq", "line"):
                client = await connect(live, face)
                event = await refused(client, error_class, field, **asked(fields))
                if not {"id", "attempt_id"} & fields.keys():
                    assert (event["id"], event["attempt_id"]) == ("bad", 0)
                client.close()

    run(test())


def asked(fields: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in fields.items() if name != "id"}
    return {**generate("bad", **rest), **fields}


def test_neither_prompt_nor_messages_is_refused(loaded):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            for face in ("zmq", "line"):
                client = await connect(live, face)
                await refused(client, "validation", "prompt", type="generate", id="bad", attempt_id=0)
                await refused(client, "validation", "attempt_id", type="generate", id="bad", prompt="Hi")
                client.close()

    run(test())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_number_that_is_none_is_refused(loaded, value):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            client, line = ZmqClient(live), await LineClient.connect(live)
            await refused(client, "validation", "temperature", **generate("bad", temperature=value))
            # JSON has no word for it: the line is no JSON
            await refused(line, "malformed", **generate("bad", temperature=value))
            client.close()
            line.close()

    run(test())


@pytest.mark.parametrize("kind", [None, 3, "", "genarate", "token", ["generate"]])
def test_unknown_type_is_refused(loaded, kind):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            for face in ("zmq", "line"):
                client = await connect(live, face)
                await refused(client, "validation", "type", type=kind, id="bad")
                client.close()

    run(test())


GOOD = generate("bad", **CONTROL)
LINES = {
    "no JSON": b"hello",
    "half an object": json.dumps(GOOD).encode()[:-5],
    "a list": b'["generate"]',
    "text": b'"generate"',
    "a number": b"7",
    "no UTF-8": b'{"type": "ping", "id": "\xff\xfe"}',
    "two objects": b'{"type": "ping"} {"type": "ping"}',
    "an unpaired surrogate": b'{"type": "ping", "id": "\\ud800"}',
    "a NUL": b"\0",
    "nested deeply": b"[" * 100_000,
    "nine MiB": b'{"type": "generate", "prompt": "' + b"a" * NINE_MIB + b'"}',
}
FRAMES = {
    "nothing": [b""],
    "no msgpack": [b"\xc1"],
    "half a map": [msgpack.packb(GOOD)[:-5]],
    "a map and more": [msgpack.packb({"type": "ping"}) + b"\x01"],
    "a list": [msgpack.packb(["generate"])],
    "a number": [b"\x07"],
    "keys that are no text": [msgpack.packb({1: 2})],
    "an extension": [msgpack.packb({"type": msgpack.ExtType(5, b"x")})],
    "no UTF-8": [b"\x81\xa4type\xa2\xff\xfe"],
    "the header of a huge array": [b"\xdd\xff\xff\xff\xff"],
    "two frames": [msgpack.packb({"type": "ping"}), b""],
    "JSON": [json.dumps(GOOD).encode()],
    "nine MiB": [msgpack.packb({"type": "generate", "prompt": "a" * NINE_MIB})],
}


@pytest.mark.parametrize("case", LINES)
def test_malformed_line_is_refused_and_the_connection_stays(loaded, case):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            client = await LineClient.connect(live)
            await client.send_raw(LINES[case] + b"\n")
            event = await client.receive()
            assert (event["type"], event.get("class")) == ("error", "malformed"), event
            await alive(client)
            client.close()

    run(test())


@pytest.mark.parametrize("case", FRAMES)
def test_malformed_frame_is_refused_and_the_connection_stays(loaded, case):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            client = ZmqClient(live)
            await client.send_raw(*FRAMES[case])
            event = await client.receive()
            assert (event["type"], event.get("class")) == ("error", "malformed"), event
            await alive(client)
            client.close()

    run(test())


def test_line_that_never_ends_is_dropped_with_its_connection(loaded):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            client = await LineClient.connect(live)
            await client.send_raw(json.dumps(generate("half", prompt="Hi")).encode()[:-1])
            client.writer.write_eof()
            assert await client.reader.read() == b""
            client.close()

    run(test())


def test_load_is_refused_while_one_is_loaded_and_while_requests_run(loaded):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            for face in ("zmq", "line"):
                client = await connect(live, face)
                await refused(client, "busy", type="load", model="builtin:tiny", id="second")
                await refused(client, "busy", type="reset")
                await refused(
                    client, "unsupported", "kv_dtype", type="load", model="builtin:tiny", kv_dtype="q8"
                )
                status = await client.ask(type="status")
                assert (status["state"], status["running"]) == ("ready", 1)
                client.close()

    run(test())


def test_abort_of_nothing_is_ignored(loaded):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            for face in ("zmq", "line"):
                client = await connect(live, face)
                await client.send(type="abort", id="nobody", attempt_id=0)
                await client.send(type="abort", id="control", attempt_id=1)
                await alive(client)
                await refused(client, "validation", "attempt_id", type="abort", id="control")
                client.close()

    run(test())


def test_bad_request_under_the_key_of_a_live_one_leaves_that_alone(loaded):
    async def test() -> None:
        async with while_another_streams(loaded) as live:
            for face in ("zmq", "line"):
                client = await connect(live, face)
                await refused(client, "validation", "attempt_id", **generate("control"))
                await refused(client, "validation", "top_k", **generate("control", top_k=-1))
                client.close()

    run(test())


def test_nothing_is_held_after_bad_input(loaded):
    async def test() -> None:
        live, _ = loaded
        client = ZmqClient(live)
        await client.send(**generate("bad", prompt_ids=[VOCAB]))
        await client.until("error")
        stats = await client.ask(type="stats")
        assert (stats["blocks"]["used"], stats["slots"]["used"]) == (0, 0)
        assert set(stats["queues"].values()) == {0}
        client.close()

    run(test())
