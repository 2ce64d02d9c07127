"""The core with fake ranks: states, ends, refusals. What the faces do is test_faces.py's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.daemons import Client, LineClient, ZmqClient, classes, daemon, generate, run

SLOW = {"step_s": 0.01}


async def gone(pids: list[int]) -> bool:
    return not [pid for pid in pids if psutil.pid_exists(pid)]


def test_states_and_what_each_refuses() -> None:
    async def body() -> None:
        async with daemon({"ready_after_s": 0.3, **SLOW}) as server:
            client = ZmqClient(server)
            assert classes(await client.generate()) == ["no_model"]
            for kind in ("unload", "reset", "stats"):
                assert (await client.ask(type=kind, id=kind))["class"] == "no_model"
            assert (await client.ask(type="status"))["state"] == "empty"

            await client.send(type="load", model="builtin:tiny", id=1)
            await client.send(type="status")
            assert (await client.until("status"))[-1]["state"] == "loading"
            early = await client.ask(**generate())
            assert (early["class"], early["retryable"]) == ("no_model", True)
            assert (await client.ask(type="load", model="builtin:tiny", id=2))["class"] == "busy"
            events = await client.until("loaded")
            assert {event["id"] for event in events} == {1}
            assert events[0]["type"] == "load_progress" and events[0]["unit"] == "bytes"
            assert events[-1]["spec"]["mtp"] is True and events[-1]["spec"]["reason"] is None

            second = await client.load(id=3)
            assert (second["class"], second["id"], second["retryable"]) == ("busy", 3, False)
            await client.send(**generate(max_tokens=10_000))
            await client.until("token")
            assert (await client.load(id=4))["class"] == "busy"
            await client.send(type="reset", id=5)
            refused = (await client.until("error", "reset_done"))[-1]
            assert (refused["class"], refused["retryable"]) == ("busy", True)  # they end by themselves
            await client.send(type="unload", id=6)
            events = await client.until("unloaded")
            ends = [event for event in events if event["type"] in ("done", "error")]
            assert [end["finish_reason"] for end in ends] == ["abort"]  # running requests end first
            assert (await client.ask(type="unload", id=7))["class"] == "no_model"
            assert (await client.ask(type="status"))["state"] == "empty"
            client.close()

    run(body())


def test_a_refused_load_leaves_things_as_they_were(tmp_path) -> None:
    refusals: list[tuple[dict[str, Any], str, str]] = [
        ({"model": str(tmp_path / "nothing")}, "validation", "nothing"),
        ({"model": str(tmp_path)}, "validation", "config.json"),
        ({"model": "builtin:huge"}, "validation", "tiny"),
        ({"tp": 7}, "validation", "tp"),
        ({"spec": {"ngram": "on"}}, "unsupported", "ngram"),
        ({"kv_dtype": "q8"}, "unsupported", "q8"),
        ({"max_seq": 10_000_000}, "validation", "max_seq"),
        ({"overrides": {"hidden_size": -1}}, "validation", "hidden_size"),
    ]

    async def body() -> None:
        async with daemon() as server:
            client = await LineClient.connect(server)
            for fields, error_class, words in refusals:
                error = await client.load(**fields)
                assert (error["class"], words in error["message"]) == (error_class, True), error
                assert (await client.ask(type="status"))["state"] == "empty"
            assert (await client.load())["type"] == "loaded"
            client.close()

    run(body())


def test_a_load_that_its_ranks_refuse_fails_with_their_reason_and_the_next_one_works() -> None:
    fault = {"rank": 1, "error_class": "out_of_memory", "message": "3 GiB are missing"}

    async def body() -> None:
        async with daemon({"fail": fault}) as server:
            client = ZmqClient(server)
            error = await client.load(id="x", tp=2)
            assert (error["class"], error["message"], error["id"]) == ("out_of_memory", fault["message"], "x")
            status = await client.ask(type="status")
            assert (status["state"], status["reason"], status["ranks"]) == ("failed", fault["message"], [])
            assert (await client.load())["type"] == "loaded"  # tp 1 has no rank 1
            client.close()

    run(body())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_ends_every_request_once_and_a_new_load_works(rank) -> None:
    async def body() -> None:
        async with daemon(SLOW, max_waiting=64) as server:
            clients: list[Client] = [ZmqClient(server), await LineClient.connect(server)]
            await clients[0].load(tp=2)
            status = await clients[0].ask(type="status")
            pids = [state["pid"] for state in status["ranks"]]
            for number, client in enumerate(clients):
                for attempt in range(3):
                    await client.send(**generate(number, attempt_id=attempt, max_tokens=4000))
            for client in clients:
                await client.until("token")
            os.kill(pids[rank], signal.SIGKILL)
            for number, client in enumerate(clients):
                ends = []
                while len(ends) < 3:
                    ends.append((await client.until("done", "error"))[-1])
                assert {(e["class"], e["id"], e["retryable"]) for e in ends} == {("rank_lost", number, True)}
                assert sorted(end["attempt_id"] for end in ends) == [0, 1, 2]
                status = await client.ask(type="status")  # and nothing after them
                assert status["state"] == "failed" and f"rank {rank}" in status["reason"]
            assert (await clients[1].generate())[-1]["class"] == "no_model"
            assert (await clients[1].load())["type"] == "loaded"
            assert await gone(pids)
            assert (await clients[1].generate(max_tokens=2))[-1]["finish_reason"] == "length"
            for client in clients:
                client.close()

    run(body())


def test_a_failed_state_can_be_unloaded_too() -> None:
    async def body() -> None:
        async with daemon({"die_at_load": {"rank": 0}}) as server:
            client = ZmqClient(server)
            assert (await client.load())["class"] == "rank_lost"
            assert (await client.ask(type="unload"))["type"] == "unloaded"
            assert (await client.ask(type="status"))["state"] == "empty"
            client.close()

    run(body())


def test_shutdown_drains_what_runs_and_aborts_the_rest() -> None:
    async def body() -> None:
        for drain_s, reason in ((20.0, "length"), (0.05, "abort")):
            async with daemon(SLOW, drain_s=drain_s) as server:
                client, other = ZmqClient(server), await LineClient.connect(server)
                await client.load()
                await client.send(**generate(max_tokens=40))
                await client.until("token")
                assert (await other.ask(type="shutdown", id=1)) == {"type": "shutting_down", "id": 1}
                if drain_s > 1:
                    refused = (await other.generate("late"))[-1]
                    assert (refused["class"], refused["retryable"]) == ("busy", True)
                    assert (await other.load(id="late"))["class"] == "busy"
                assert (await client.until("done"))[-1]["finish_reason"] == reason
                with pytest.raises(ConnectionError):
                    await other.receive()
                client.close()

    run(body())


def test_a_second_stop_does_not_wait_for_the_drain() -> None:
    async def body() -> None:
        async with daemon(SLOW, drain_s=1000) as server:
            client = ZmqClient(server)
            await client.load()
            await client.send(**generate(max_tokens=4000))
            await client.until("token")
            server.stop()
            await asyncio.sleep(0.05)
            server.stop()
            assert (await client.until("done"))[-1]["finish_reason"] == "abort"
            client.close()

    run(body())


def test_a_load_under_way_is_given_up_at_the_end() -> None:
    async def body() -> None:
        async with daemon({"never_ready": True}) as server:
            client = ZmqClient(server)
            await client.send(type="load", model="builtin:tiny", id=1)
            await client.until("load_progress")
            await client.send(type="status")
            pids = [state["pid"] for state in (await client.until("status"))[-1]["ranks"]]
            server.stop()
            events = await client.until("error")
            assert (events[-1]["id"], "shutting down" in events[-1]["message"]) == (1, True)
            client.close()
        assert await gone(pids)

    run(body())


def test_the_control_process_never_imports_torch() -> None:
    script = """
import sys
from tests.support.daemons import ZmqClient, daemon, run

async def body():
    async with daemon() as server:
        client = ZmqClient(server)
        assert "torch" not in sys.modules and "transformers" not in sys.modules
        assert (await client.load())["type"] == "loaded"
        await client.generate(messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        client.close()
    assert "torch" not in sys.modules, "imported at load"

run(body())
"""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
