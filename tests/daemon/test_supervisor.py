"""The mesh: ready, fails, hangs and ends as a whole, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mstar.daemon.run_dir import sweep_run_dirs
from mstar.daemon.supervisor import Mesh, MeshFailure
from mstar.ranks import messages
from tests.support import fake_rank


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 90))


MADE: list[Mesh] = []


@pytest.fixture(autouse=True)
def no_rank_outlives_a_test_that_fails() -> Iterator[None]:
    yield
    while MADE:
        for state in MADE.pop().ranks:
            state.process.kill()


def load_spec(tp: int = 2, heartbeat_s: float = 0.1) -> messages.LoadSpec:
    return messages.LoadSpec("model", tp, "cpu", "fp32", 128, 4, 0.9, {}, 1, "", heartbeat_s)


class Recorder:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.failures: list[MeshFailure] = []
        self.changed = asyncio.Event()

    def mesh(self, tp: int = 2, lost_s: float = 5.0, **script: Any) -> Mesh:
        mesh = Mesh(
            load_spec(tp),
            on_event=self.on_event,
            on_failure=self.on_failure,
            command=fake_rank.command(**script),
            heartbeat_lost_s=lost_s,
        )
        MADE.append(mesh)
        return mesh

    def on_event(self, event: Any) -> None:
        self.events.append(event)
        self.changed.set()

    def on_failure(self, failure: MeshFailure) -> None:
        self.failures.append(failure)
        self.changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def until_all_said_hello(self, tp: int = 2) -> None:
        """Rank 0 of the fakes is ready by itself: on a loaded machine others may not have begun."""
        await self.until(lambda: len({event.rank for event in self.of(messages.Progress)}) == tp)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def submit(request_id: int = 1, max_tokens: int = 3) -> messages.Submit:
    return messages.Submit(request_id, [1, 2], messages.SamplingParams(max_tokens, seed=0))


def assert_gone(mesh: Mesh, pids: list[int]) -> None:
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not mesh._run_dir.exists()


def pids_of(mesh: Mesh) -> list[int]:
    return [state.process.pid for state in mesh.ranks]


def test_a_mesh_becomes_ready_generates_and_stops_in_order() -> None:
    async def body() -> None:
        recorder = Recorder()
        mesh = recorder.mesh(talk="hello from a rank")
        ready = await mesh.start()
        assert (ready.params, ready.device) == (1234, "fake")
        await recorder.until_all_said_hello()
        assert mesh._run_dir.stat().st_mode & 0o777 == 0o700
        assert mesh.send(submit())
        await recorder.until(lambda: len(recorder.of(messages.Tokens)) == 3)
        assert [run.ids for event in recorder.of(messages.Tokens) for run in event.runs] == [[65], [66], [67]]
        stats = await mesh.query_stats(2.0)
        assert stats is not None and (stats.steps, stats.blocks_free) == (3, 100)
        await mesh.stop()
        assert [state.process.returncode for state in mesh.ranks] == [0, 0]
        assert "hello from a rank" in mesh.ranks[1].process.tail
        assert recorder.failures == []
        assert_gone(mesh, pids_of(mesh))

    run(body())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_mesh_once_with_its_reason(rank) -> None:
    async def body() -> None:
        recorder = Recorder()
        mesh = recorder.mesh(die_after={"rank": rank, "steps": 2})
        await mesh.start()
        mesh.send(submit(max_tokens=100))
        await recorder.until(lambda: recorder.failures)
        await mesh.wait_ended()
        assert len(recorder.failures) == 1
        failure = recorder.failures[0]
        assert failure.error_class == "rank_lost"
        assert f"rank {rank}" in failure.message and "SIGKILL" in failure.message
        assert not mesh.send(submit(2))
        assert_gone(mesh, pids_of(mesh))

    run(body())


def test_a_stopped_rank_is_found_by_its_heartbeat() -> None:
    async def body() -> None:
        recorder = Recorder()
        mesh = recorder.mesh(lost_s=2, step_s=0.02)
        await mesh.start()
        mesh.send(submit(max_tokens=100_000))
        await recorder.until_all_said_hello()
        os.kill(mesh.ranks[1].process.pid, signal.SIGSTOP)
        await recorder.until(lambda: recorder.failures)
        await mesh.wait_ended()
        assert "rank 1" in recorder.failures[0].message and "heartbeat" in recorder.failures[0].message
        assert_gone(mesh, pids_of(mesh))

    run(body())


@pytest.mark.parametrize(
    ("script", "error_class", "words"),
    [
        ({"die_at_load": {"rank": 1, "code": 3}}, "rank_lost", "code 3; its last words: no luck today"),
        (
            {
                "fail": {
                    "rank": 1,
                    "error_class": "validation",
                    "message": "tensor x is missing",
                    "field": "model",
                }
            },
            "validation",
            "tensor x is missing",
        ),
    ],
)
def test_a_rank_that_cannot_load_says_why(script, error_class, words) -> None:
    async def body() -> None:
        recorder = Recorder()
        mesh = recorder.mesh(**script)
        with pytest.raises(MeshFailure) as raised:
            await mesh.start()
        assert raised.value.error_class == error_class
        assert words in raised.value.message
        assert recorder.failures == []
        assert_gone(mesh, pids_of(mesh))

    run(body())


def test_a_command_that_does_not_exist_is_a_failure_not_a_crash() -> None:
    async def body() -> None:
        recorder = Recorder()
        mesh = Mesh(
            load_spec(),
            on_event=recorder.on_event,
            on_failure=recorder.on_failure,
            command=["/no/such/program"],
        )
        with pytest.raises(MeshFailure, match="could not be started"):
            await mesh.start()
        assert not mesh._run_dir.exists()

    run(body())


def test_a_load_can_be_given_up() -> None:
    async def body() -> None:
        recorder = Recorder()
        mesh = recorder.mesh(never_ready=True)
        starting = asyncio.create_task(mesh.start())
        await recorder.until(lambda: len(recorder.of(messages.Progress)) == 4)
        pids = pids_of(mesh)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert_gone(mesh, pids)

    run(body())


def test_what_a_rank_started_ends_with_it() -> None:
    async def body() -> None:
        recorder = Recorder()
        mesh = recorder.mesh(tp=1, child=True)
        await mesh.start()
        child = psutil.Process(mesh.ranks[0].process.pid).children()[0]
        await mesh.stop()
        _, alive = psutil.wait_procs([child], timeout=5)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []

    run(body())


def test_ranks_that_ignore_stop_are_killed(monkeypatch) -> None:
    monkeypatch.setattr("mstar.daemon.supervisor._STOP_LIMIT_S", 0.3)

    async def body() -> None:
        mesh = Recorder().mesh(deaf=True)
        await mesh.start()
        await mesh.stop()
        assert {state.process.returncode for state in mesh.ranks} == {-signal.SIGKILL}
        assert_gone(mesh, pids_of(mesh))

    run(body())


def test_an_engine_that_does_not_answer_stats_is_not_waited_for() -> None:
    async def body() -> None:
        mesh = Recorder().mesh(tp=1, mute_stats=True)
        await mesh.start()
        assert await mesh.query_stats(0.1) is None
        await mesh.stop()

    run(body())


def test_a_full_command_queue_refuses_work_but_keeps_aborts(monkeypatch) -> None:
    monkeypatch.setattr("mstar.daemon.supervisor._COMMANDS_HWM", 4)

    async def body() -> None:
        recorder = Recorder()
        mesh = recorder.mesh(tp=1)
        await mesh.start()
        os.kill(mesh.ranks[0].process.pid, signal.SIGSTOP)
        big = messages.Submit(1, list(range(1_000_000)), messages.SamplingParams(1, seed=0))
        started = time.monotonic()
        sent = [mesh.send(big) for _ in range(20)]
        assert False in sent
        assert time.monotonic() - started < 5  # would be for ever if a send could block
        assert mesh.send(messages.Abort(1))
        assert not mesh.send(submit(2))  # no overtaking
        os.kill(mesh.ranks[0].process.pid, signal.SIGCONT)
        while mesh._unsent:
            await asyncio.sleep(0.01)
        assert mesh.send(submit(2))
        await mesh.stop()

    run(body())


def test_run_dirs_of_dead_daemons_are_swept_and_others_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    dead = Path(tempfile.mkdtemp(prefix="mstar-4194999-"))  # above the largest pid
    mine = Path(tempfile.mkdtemp(prefix=f"mstar-{os.getpid()}-"))
    other = Path(tempfile.mkdtemp(prefix="mstar-notes-"))
    try:
        assert dead in sweep_run_dirs()
        assert not dead.exists() and mine.exists() and other.exists()
    finally:
        mine.rmdir()
        other.rmdir()
