"""The ranks of one load: spawn, readiness, heartbeat, death, and an orderly end.

A mesh is all or nothing. The first rank that dies, hangs or reports a failure ends all of
them with SIGKILL, and the failure is reported once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from mstar.daemon.rank_process import RankProcess
from mstar.daemon.run_dir import create_run_dir, remove_run_dir
from mstar.daemon.zmq_reader import ZmqReader
from mstar.ranks import messages
from mstar.ranks.messages import Command, EngineStats, Event, LoadSpec, QueryStats, Submit

log = logging.getLogger("mstar.supervisor")

DEFAULT_COMMAND = (sys.executable, "-m", "mstar.ranks.worker")

# An interpreter that imports torch from a cold disk, eight times at once, says nothing for a while.
_HELLO_LIMIT_S = 180.0
_STAGE_LIMIT_S = 1800.0  # without any progress
_STOP_LIMIT_S = 10.0
_KILL_LIMIT_S = 10.0
_COMMANDS_HWM = 4096
_EVENTS_HWM = 8192
_FLUSH_S = 0.01


class MeshFailure(Exception):
    """Why a mesh ended: a protocol error class, and a message for people."""

    def __init__(self, error_class: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.message = message
        self.field = field


@dataclasses.dataclass(slots=True)
class RankState:
    """What is known of one rank."""

    rank: int
    process: RankProcess
    heard_at: float  # time.monotonic()
    hello: bool = False
    memory_bytes: int = 0

    @property
    def heartbeat_age_s(self) -> float:
        return max(0.0, time.monotonic() - self.heard_at)


class Mesh:
    """Use once: `await start()`, then `send`, then `await stop()` (or `kill`).

    on_event: progress and everything that the engine says about requests.
    on_failure: called once if the mesh fails after `start` returned; the processes have
    been sent SIGKILL by then, and `await wait_ended()` says when they are gone.
    """

    def __init__(
        self,
        spec: LoadSpec,
        *,
        on_event: Callable[[Event], None],
        on_failure: Callable[[MeshFailure], None],
        command: Sequence[str] | None = None,
        heartbeat_lost_s: float = 10.0,
    ) -> None:
        self.ranks: list[RankState] = []
        self.last_stats: EngineStats | None = None
        self.failure: MeshFailure | None = None
        self._run_dir = create_run_dir()
        self._spec = dataclasses.replace(spec, run_dir=str(self._run_dir))
        self._command = tuple(command or DEFAULT_COMMAND)
        self._on_event = on_event
        self._on_failure = on_failure
        self._heartbeat_lost_s = heartbeat_lost_s
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._ready: asyncio.Future[messages.Ready] = loop.create_future()
        self._ended: asyncio.Task[None] | None = None
        self._stopping = False
        self._progress_at = time.monotonic()
        self._unsent: deque[bytes] = deque()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._queries: dict[int, asyncio.Future[EngineStats]] = {}
        self._next_query = 0
        self._watch: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._bind(zmq.PULL, "events")
        self._events.setsockopt(zmq.RCVHWM, _EVENTS_HWM)
        self._commands = self._bind(zmq.PUSH, "commands")
        self._reader = ZmqReader(self._events, self._receive)

    # Life

    async def start(self) -> messages.Ready:
        """Spawns the ranks and waits until they can run a step.

        Raises MeshFailure, and then nothing of the mesh is left.
        """
        try:
            self._spawn()
            self._watch = self._loop.create_task(self._watch_heartbeats())
            ready = await asyncio.shield(self._ready)
            # Its Ready can overtake the connection that it opened for commands.
            while not int(self._commands.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                if self.failure is not None:
                    raise self.failure
                await asyncio.sleep(0.001)
            return ready
        except BaseException:
            await self.kill()
            raise

    async def stop(self) -> None:
        """Ends the ranks in order: rank 0 stops its followers; what is left after 10 s is killed."""
        if self._ended is None and not self._stopping and self._ready.done():
            self._stopping = True
            self.send(messages.Stop())
            exits = [state.process.wait() for state in self.ranks]
            try:
                await asyncio.wait_for(asyncio.gather(*exits), _STOP_LIMIT_S)
            except TimeoutError:
                log.warning("ranks did not stop within %.0f s and are killed", _STOP_LIMIT_S)
            for state in self.ranks:
                if state.process.returncode not in (0, None):
                    log.warning("rank %d %s while stopping", state.rank, state.process.describe_exit())
        await self.kill()

    async def kill(self) -> None:
        """Ends the ranks at once and waits until nothing of them is left."""
        self._end()
        await self.wait_ended()

    async def wait_ended(self) -> None:
        if self._ended is not None:
            await asyncio.shield(self._ended)

    # Commands

    def send(self, command: Command) -> bool:
        """Hands a command to the engine. Never blocks.

        Returns False for a Submit that the full queue cannot take; other commands are kept and
        sent as soon as there is room (there are never more of them than live requests).
        """
        if self._ended is not None:
            return False
        data = messages.pack(command)
        if not self._unsent:
            try:
                self._commands.send(data, zmq.NOBLOCK)
                return True
            except zmq.Again:
                pass
        if isinstance(command, Submit):
            return False
        self._unsent.append(data)
        self._schedule_flush()
        return True

    async def query_stats(self, limit_s: float, trace_steps: int = 0) -> EngineStats | None:
        """The engine's counters now, or the last known ones where it does not answer in time.

        trace_steps: further steps to profile first, into a file beside the system's temporary ones.
        """
        self._next_query += 1
        query_id = self._next_query
        answer: asyncio.Future[EngineStats] = self._loop.create_future()
        self._queries[query_id] = answer
        path, written = _trace_path() if trace_steps else "", False
        try:
            if self.send(QueryStats(query_id, path, trace_steps)):
                stats = await asyncio.wait_for(answer, limit_s)
                written = bool(stats.trace_path)
                self.last_stats = dataclasses.replace(stats, trace_path="")
                return stats
        except TimeoutError:
            pass
        finally:
            self._queries.pop(query_id, None)
            if path and not written:
                Path(path).unlink(missing_ok=True)
        return self.last_stats

    # Helpers

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _COMMANDS_HWM)
        socket.setsockopt(zmq.RCVHWM, _EVENTS_HWM)
        socket.bind(f"ipc://{self._run_dir}/{name}")
        return socket

    def _spawn(self) -> None:
        spec_path = self._run_dir / "load.bin"
        spec_path.write_bytes(messages.pack(self._spec))
        shm_fd = _anonymous_memory(messages.SHM_REGION_BYTES)
        try:
            for rank in range(self._spec.tp_size):
                argv = [
                    *self._command,
                    "--rank",
                    str(rank),
                    "--spec",
                    str(spec_path),
                    "--shm-fd",
                    str(shm_fd),
                ]
                process = RankProcess(rank, argv, pass_fds=(shm_fd,), on_exit=self._exited)
                self.ranks.append(RankState(rank, process, time.monotonic()))
        except OSError as error:
            raise MeshFailure("internal", f"a rank could not be started: {error}") from error
        finally:
            os.close(shm_fd)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            event = messages.unpack(frames[0])
        except Exception:
            log.exception("a rank sent something unreadable")
            self._fail(MeshFailure("internal", "a rank sent a message that the daemon cannot read"))
            return
        self._handle(event)

    def _handle(self, event: Any) -> None:
        kind = type(event)
        if kind is messages.Tokens:  # first: it is nearly all of the traffic
            self._on_event(event)
        elif kind is messages.Heartbeat:
            state = self._heard(event.rank)
            state.memory_bytes = event.memory_bytes
        elif kind is messages.Hello:
            self._heard(event.rank).hello = True
        elif kind is messages.Progress:
            self._progress_at = self._heard(event.rank).heard_at
            self._on_event(event)
        elif kind is messages.Ready:
            if not self._ready.done():
                self._ready.set_result(event)
        elif kind is messages.Failed:
            self._fail(MeshFailure(event.error_class, event.message, event.field))
        elif kind is messages.EngineStats:
            answer = self._queries.get(event.query_id)
            if answer is not None and not answer.done():
                answer.set_result(event)
        else:
            self._on_event(event)

    def _heard(self, rank: int) -> RankState:
        state = self.ranks[rank]
        state.heard_at = time.monotonic()
        return state

    def _exited(self, process: RankProcess) -> None:
        if self._stopping or self._ended is not None:
            return
        # What it sent before it ended explains more than its exit code does.
        self._reader.drain()
        self._fail(
            MeshFailure("rank_lost", f"rank {process.rank} (pid {process.pid}) {process.describe_exit()}")
        )

    async def _watch_heartbeats(self) -> None:
        interval_s = min(1.0, self._heartbeat_lost_s / 4)
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            if now - slept_at > interval_s + self._heartbeat_lost_s / 2:
                # The daemon itself was stopped or starved: the ranks' heartbeats are still in the queue.
                for state in self.ranks:
                    state.heard_at = now
                continue
            for state in self.ranks:
                limit_s = self._heartbeat_lost_s if state.hello else _HELLO_LIMIT_S
                if now - state.heard_at > limit_s:
                    what = "sent no heartbeat" if state.hello else "did not start"
                    name = f"rank {state.rank} (pid {state.process.pid})"
                    self._fail(MeshFailure("rank_lost", f"{name} {what} for {limit_s:.3g} s"))
                    return
            if not self._ready.done() and now - self._progress_at > _STAGE_LIMIT_S:
                self._fail(MeshFailure("internal", f"the load made no progress for {_STAGE_LIMIT_S:.0f} s"))
                return

    def _fail(self, failure: MeshFailure) -> None:
        if self.failure is not None or self._stopping or self._ended is not None:
            return
        self.failure = failure
        log.error("the ranks are ended: %s", failure.message)
        was_ready = self._ready.done()
        self._end()
        if was_ready:
            self._on_failure(failure)
        else:
            self._ready.set_exception(failure)

    def _end(self) -> None:
        if self._ended is None:
            for state in self.ranks:
                state.process.kill()
            self._ended = self._loop.create_task(self._clean_up())

    async def _clean_up(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        for answer in self._queries.values():
            if not answer.done():  # with what is known: the ranks say nothing more
                answer.set_exception(TimeoutError("the mesh has ended"))
        self._reader.close()
        try:
            exits = [state.process.wait() for state in self.ranks]
            await asyncio.wait_for(asyncio.gather(*exits), _KILL_LIMIT_S)
        except TimeoutError:  # uninterruptible in the kernel: a dead disk or driver
            log.error("ranks are still there %.0f s after SIGKILL", _KILL_LIMIT_S)
        self._context.destroy(linger=0)
        remove_run_dir(self._run_dir)
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen, whether or not somebody waits
        self._ready.cancel()

    def _schedule_flush(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(_FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        with contextlib.suppress(zmq.Again):
            while self._unsent:
                self._commands.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        if self._unsent:
            self._schedule_flush()


def _anonymous_memory(size_bytes: int) -> int:
    """A file without a name, shared by descriptor: nothing that a killed daemon could leave behind."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("mstar")
    else:
        with tempfile.TemporaryFile(dir=Path(tempfile.gettempdir())) as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size_bytes)
    return fd


def _trace_path() -> str:
    """An empty file that only this user reads, for a rank to fill."""
    descriptor, path = tempfile.mkstemp(prefix="mstar-trace-", suffix=".json")
    os.close(descriptor)
    return path
