"""Ranks, the daemon and clients that are killed or stopped in the middle of work, with real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.daemons import Client, LineClient, ZmqClient, generate, run
from tests.support.live_daemon import DAEMON, WAIT_S, LiveDaemon, live_daemon

LOAD = {"dtype": "fp32", "max_seq": 2048, "max_num_seqs": 2}
LONG = {"prompt": "Count from 3 to 40.", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveDaemon]:
    with live_daemon("--heartbeat-s", "0.3", "--heartbeat-lost-s", "3") as daemon:
        yield daemon


async def load(client: Client, tp: int) -> list[psutil.Process]:
    """Loads the built-in model and returns its ranks' processes."""
    loaded = await client.load(tp=tp, **LOAD)
    assert loaded["type"] == "loaded", loaded
    status = await client.ask(type="status")
    return [psutil.Process(rank["pid"]) for rank in status["ranks"]]


def assert_gone(processes: list[psutil.Process], limit_s: float = 10) -> None:
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    # Orphans of a killed daemon are reaped by whoever adopts them, which in a container may be nobody.
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_rank_ends_each_request_once_and_the_daemon_serves_on(live, rank, number) -> None:
    async def body() -> None:
        clients: list[Client] = [ZmqClient(live), await LineClient.connect(live)]
        ranks = await load(clients[0], tp=2)
        for name, client in enumerate(clients):
            for attempt in range(2):
                await client.send(**generate(name, attempt_id=attempt, **LONG))
            if name == 0:  # its two run, and the other's two wait
                await client.until("token", "reasoning")
        os.kill(ranks[rank].pid, number)
        for client in clients:
            ends: list[dict[str, Any]] = []
            while len(ends) < 2:
                ends.append((await client.until("done", "error"))[-1])
            assert {(end.get("class"), end.get("retryable")) for end in ends} == {("rank_lost", True)}, ends
            assert sorted(end["attempt_id"] for end in ends) == [0, 1]
            status = await client.ask(type="status")  # the next event: there was no second end
            assert (status["state"], status["ranks"]) == ("failed", [])
            assert f"rank {rank}" in status["reason"]
        assert_gone(ranks)
        # That the next load works is what the next of these tests begins with.
        for client in clients:
            client.close()

    run(body(), 90)


def test_killed_clients_leave_no_block_and_no_slot(live) -> None:
    script = """
import sys, time
from tests.support.daemons import *
from types import SimpleNamespace
server = SimpleNamespace(zmq_face=SimpleNamespace(address=sys.argv[1]), line_face=SimpleNamespace(address=sys.argv[2]))

async def body():
    client = await connect(server, sys.argv[3])
    for attempt in range(4):  # two run, two wait
        await client.send(**generate("k" + sys.argv[3], attempt_id=attempt, prompt="Count.", max_tokens=2000, ignore_eos=True))
    await client.until("token", "reasoning")
    print("streams", flush=True)
    await client.until("never")

run(body(), 1000)
"""  # noqa: E501

    async def body() -> None:
        client = ZmqClient(live)
        await load(client, tp=1)
        before = await client.ask(type="stats")
        for face in ("zmq", "line"):
            killed = subprocess.Popen(
                [sys.executable, "-c", script, live.zmq_face.address, live.line_face.address, face],
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[2],
            )
            assert killed.stdout and killed.stdout.readline() == b"streams\n"
            killed.kill()
            killed.wait()
            killed.stdout.close()
            # The waiting ones get no events that could find the client gone: the running ones do.
            while (await client.ask(type="stats"))["queues"]["live"]:
                pass
        after = await client.ask(type="stats")
        assert after["requests"] == {"abort": 8}
        assert (after["blocks"], after["slots"]) == (before["blocks"], before["slots"])
        assert (await client.generate(max_tokens=2, prompt="Hi"))[-1]["type"] == "done"
        assert (await client.ask(type="unload"))["type"] == "unloaded"
        client.close()

    run(body(), 60)


def start(folder: Path, *flags: str) -> LiveDaemon:
    live = LiveDaemon(folder, flags, DAEMON)
    live.wait_until_it_listens()
    return live


def test_a_killed_daemon_takes_its_ranks_along_and_the_next_one_cleans_up() -> None:
    with tempfile.TemporaryDirectory(prefix="mstar-live-") as name:
        live = start(Path(name))
        ranks: list[psutil.Process] = []

        async def body() -> None:
            client = ZmqClient(live)
            ranks.extend(await load(client, tp=2))
            await client.send(**generate(**LONG))
            await client.until("token", "reasoning")
            for rank in ranks:  # nothing with a name is shared, so nothing can be left in /dev/shm
                assert not [m.path for m in rank.memory_maps() if m.path.startswith("/dev/shm/")]
            client.close()

        try:
            run(body(), 60)
            ranks[1].suspend()  # a stopped one cannot notice anything by itself
        finally:
            live.process.kill()
            live.process.wait()
        assert_gone(ranks, limit_s=3)
        pattern = f"mstar-{live.process.pid}-*"
        again = start(Path(name))  # on the same sockets, which the killed one left too

        async def ping() -> None:
            client = ZmqClient(again)
            assert (await client.ask(type="ping"))["type"] == "pong"
            client.close()

        run(ping(), 60)
        assert not list(Path(tempfile.gettempdir()).glob(pattern))
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(WAIT_S) == 0, again.log.read_text()


def test_sigterm_under_load_lets_requests_end_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="mstar-live-") as name:
        live = start(Path(name), "--drain-s", "20", "--model", "builtin:tiny", "--tp", "2")
        children: list[psutil.Process] = []

        async def body() -> None:
            client, other = ZmqClient(live), await LineClient.connect(live)
            while (await client.ask(type="status"))["state"] != "ready":
                pass
            children.extend(live.children())
            assert len(children) == 2
            await client.send(**generate("long", **LONG))
            await other.send(**generate("short", prompt="Hi", max_tokens=30, ignore_eos=True))
            await client.until("token", "reasoning")
            live.process.send_signal(signal.SIGTERM)
            short = (await other.until("done", "error"))[-1]
            assert short["finish_reason"] == "length"  # it was given the time
            live.process.send_signal(signal.SIGTERM)  # hurry: the long one is not waited for
            end = (await client.until("done", "error"))[-1]
            assert end["finish_reason"] in ("abort", "length")
            client.close()
            other.close()

        run(body(), 60)
        assert live.process.wait(WAIT_S) == 0, live.log.read_text()
        assert_gone(children, limit_s=0.1)
        assert [path.name for path in Path(name).iterdir()] == ["log"]
        assert not list(Path(tempfile.gettempdir()).glob(f"mstar-{live.process.pid}-*"))
