"""Ends inside an accepted run, through a daemon with real ranks: all that is told of an answer is plain decode's.

The model's own end, a stop id and a stop string, each at every depth of a step's window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.daemons import Client, ZmqClient, run, text_of
from tests.support.engines import tiny
from tests.support.live_daemon import LiveDaemon, live_daemon
from tests.support.tasks import chats

K = 3
LOAD = {"dtype": "fp32", "max_seq": 512, "max_num_seqs": 4, "spec": {"mtp": "on", "mtp_k": K}}
ASK = {"max_tokens": 60, "return_ids": True, "logprobs": 1}
PLAIN = {"spec": {"mtp": "off"}}
Events = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "mesh"])
def live(request: pytest.FixtureRequest) -> Iterator[LiveDaemon]:
    """A daemon whose load drafts K tokens in every step, over so many ranks."""
    with live_daemon("--mtp-fixed", "--tp", str(request.param)) as daemon:

        async def load() -> None:
            client = ZmqClient(daemon)
            loaded = await client.load(**LOAD)
            assert (loaded["tp"], loaded["spec"]["k"]) == (request.param, K), loaded
            client.close()

        run(load(), 90)
        yield daemon


def ids_of(events: Events) -> list[int]:
    return [token for event in events[1:-1] for token in event["ids"]]


def told(events: Events) -> dict[str, Any]:
    """All that must not depend on speculation. Logprobs are compared by themselves."""
    done = events[-1]
    assert done["type"] == "done", done
    return {
        "ids": ids_of(events),
        "text": text_of(events),
        "finish": done["finish_reason"],
        "usage": done["usage"],
        "scored": [entry["id"] for event in events[1:-1] for entry in event["logprobs"]],
    }


def scores_of(events: Events) -> list[float]:
    return [entry["logprob"] for event in events[1:-1] for entry in event["logprobs"]]


async def both_ways(client: Client, **fields: Any) -> Events:
    """The events of a request that speculates, which tell what those of plain decode tell."""
    events = await client.generate(**ASK, **fields)
    plain = await client.generate(**ASK, **(fields | PLAIN))
    assert told(events) == told(plain)
    assert told(events)["scored"] == ids_of(events)
    assert scores_of(events) == pytest.approx(scores_of(plain), abs=1e-4)
    assert events[-1]["usage"]["completion_tokens"] == len(ids_of(events))
    return events


def whole_windows(events: Events) -> list[int]:
    """Where the first token of each step stands that gave K + 1 of them: K accepted drafts and the bonus."""
    places, at = [], 0
    for event in events[1:-1]:
        if len(event["ids"]) == K + 1:
            places.append(at)
        at += len(event["ids"])
    return places


def test_the_models_own_end_at_each_depth(live: LiveDaemon) -> None:
    async def body() -> None:
        client = ZmqClient(live)
        depths: set[int] = set()
        for messages in chats(40, seed=2):
            if depths >= set(range(K + 1)):
                break
            events = await both_ways(client, messages=messages)
            if events[-1]["finish_reason"] == "stop" and events[-1]["spec"]["steps"]:
                spec, last = events[-1]["spec"], events[-2]["ids"]
                depths.add(len(last) - 1)
                assert spec["accepted"] + spec["steps"] + 1 >= len(ids_of(events))
        assert depths == set(range(K + 1))
        client.close()

    run(body(), 110)


@pytest.mark.parametrize("depth", range(K + 1))
def test_a_stop_id_and_a_stop_string_at_each_depth(live: LiveDaemon, depth: int) -> None:
    async def body() -> None:
        client = ZmqClient(live)
        tested = {"id": 0, "string": 0}
        for messages in chats(8, seed=3):
            whole = await client.generate(**ASK, messages=messages)
            ids, text = ids_of(whole), text_of(whole)
            for place in (first + depth for first in whole_windows(whole)):
                kept = ids[: place + 1]
                if ids[place] not in ids[:place] and not tested["id"]:
                    events = await both_ways(client, messages=messages, stop_token_ids=[ids[place]])
                    assert (ids_of(events), events[-1]["finish_reason"]) == (kept, "stop")
                    assert len(events[-2]["ids"]) == depth + 1
                    tested["id"] += 1
                before, upto = (tiny().tokenizer.decode(part) for part in (kept[:-1], kept))
                stop = upto[-3:]
                cut = len(upto) - len(stop)
                if len(upto) > len(before) and text.find(stop) == cut and not tested["string"]:
                    events = await both_ways(client, messages=messages, stop=["never said", stop])
                    assert (ids_of(events), text_of(events)) == (kept, upto[:cut])
                    assert events[-1]["finish_reason"] == "stop"
                    assert len(events[-2]["ids"]) == depth + 1
                    tested["string"] += 1
            if all(tested.values()):
                break
        assert all(tested.values()), tested
        stats = await client.ask(type="stats")
        assert stats["blocks"]["used"] == stats["slots"]["used"] == 0
        client.close()

    run(body(), 110)
