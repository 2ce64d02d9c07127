"""What a request is answered depends on nothing but the request: not on ranks, neighbours, chunks or preemption."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import Client, ZmqClient, generate, run, text_of
from tests.support.live_daemon import LiveDaemon, live_daemon
from tests.support.tasks import chats, long_prompt

MAX_TOKENS = 20
LONG = 3000
CHUNK = 128  # prompt tokens that a step takes at most beside running streams, on CPUs
GREEDY = [{"messages": messages, "max_tokens": MAX_TOKENS} for messages in chats(12)]
SAMPLED = [
    {
        "messages": messages,
        "max_tokens": 10,
        "ignore_eos": True,
        "seed": 11 * number,
        **({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "top_k": 40})[
            number % 3
        ],
    }
    for number, messages in enumerate(chats(16, seed=1))
]
SMALL_KV = (sys.executable, str(Path(__file__).parent.parent / "support" / "small_kv.py"))
Request = dict[str, Any]


async def answers(client: Client, requests: Sequence[Request], at_once: int) -> list[str]:
    """The texts of some requests, `at_once` of them at a time."""
    texts: list[str] = []
    for first in range(0, len(requests), at_once):
        texts += await together(client, requests[first : first + at_once])
    return texts


async def together(client: Client, requests: Sequence[Request]) -> list[str]:
    """The texts of requests that are sent with one breath."""
    for number, request in enumerate(requests):
        await client.send(**generate(number, **request))
    events: list[list[dict[str, Any]]] = [[] for _ in requests]
    for _ in requests:
        batch = await client.until("done", "error")
        assert batch[-1]["type"] == "done", batch[-1]
        for event in batch:
            events[event["id"]].append(event)
    return [text_of(own) for own in events]


async def loaded(live: LiveDaemon, **fields: Any) -> ZmqClient:
    """A client of a daemon that has just loaded the built-in model so."""
    client = ZmqClient(live)
    if (await client.ask(type="status"))["state"] == "ready":
        await client.ask(type="unload")
    event = await client.load(max_num_seqs=16, **fields)
    assert event["type"] == "loaded", event
    return client


@pytest.fixture(scope="module")
def alone(live: LiveDaemon) -> list[str]:
    """The greedy answers on one rank in float32, one request after the other. Leaves that load."""

    async def ask() -> list[str]:
        client = await loaded(live, tp=1, dtype="fp32")
        texts = await answers(client, GREEDY, 1)
        client.close()
        return texts

    return asyncio.run(ask())


def long_request(**fields: Any) -> Request:
    return {
        "prompt_ids": long_prompt(LONG),
        "max_tokens": 4,
        "ignore_eos": True,
        "return_ids": True,
        **fields,
    }


def test_greedy_text_is_the_same_alone_in_a_batch_and_beside_a_chunked_prompt(live, alone):
    async def test() -> None:
        client = ZmqClient(live)
        assert await together(client, GREEDY) == alone
        long_alone = await together(client, [long_request()])
        beside = await together(client, [*GREEDY[:6], long_request(), *GREEDY[6:]])
        assert beside == [*alone[:6], *long_alone, *alone[6:]]
        client.close()

    assert len(set(alone)) == len(alone) and all(alone)
    run(test(), 90)


def test_long_prompt_stops_nobodys_stream(live, alone):
    async def test() -> None:
        client = ZmqClient(live)
        await client.send(**generate("stream", max_tokens=400, ignore_eos=True, return_ids=True))
        await client.until("token")
        await client.send(**generate("long", **long_request()))
        seen = []
        while not any(event["type"] == "token" and event["id"] == "long" for event in seen):
            seen.append(await client.receive())
        begin = next(
            i for i, event in enumerate(seen) if (event["type"], event["id"]) == ("gen_start", "long")
        )
        streamed = [event for event in seen[begin:] if (event["type"], event["id"]) == ("token", "stream")]
        # a step between two chunks gives the stream its token
        assert len(streamed) >= LONG // CHUNK - 1
        await client.send(type="abort", id="stream", attempt_id=0)
        ends = [await client.until("done", "error") for _ in range(2)]
        assert {end[-1]["id"] for end in ends} == {"stream", "long"}
        client.close()

    run(test(), 90)


@pytest.mark.parametrize("tp", [2, 4])
def test_greedy_text_is_the_same_on_more_ranks(live, alone, tp):
    async def test() -> None:
        client = await loaded(live, tp=tp, dtype="fp32")
        assert await together(client, GREEDY) == alone
        assert await answers(client, GREEDY[:2], 1) == alone[:2]
        client.close()

    run(test(), 110)


def test_preempted_requests_answer_as_if_they_had_never_waited():
    growing = [{**request, "max_tokens": 44, "ignore_eos": True} for request in GREEDY[:3]]

    async def test(live: LiveDaemon) -> None:
        # KV for 128 tokens: the three begin together and outgrow it
        client = await loaded(live, tp=2, dtype="fp32", max_seq=128)
        one_by_one = await answers(client, growing, 1)
        assert (await client.ask(type="stats"))["preemptions"] == 0
        assert await together(client, growing) == one_by_one
        stats = await client.ask(type="stats")
        assert stats["preemptions"] > 0
        assert (stats["blocks"]["used"], stats["blocks"]["total"]) == (0, 8)
        client.close()

    with live_daemon(command=SMALL_KV) as live:
        run(test(live), 90)


def test_seeded_streams_are_the_same_at_any_batch_size_in_bf16(live):
    async def test() -> None:
        client = await loaded(live, tp=1, dtype="bf16", max_seq=256)
        streams = await answers(client, SAMPLED, 16)
        assert await answers(client, SAMPLED[4:], 3) == streams[4:]
        assert await answers(client, SAMPLED[:4], 1) == streams[:4]
        assert len(set(streams)) == len(streams)
        client.close()

    run(test(), 90)
