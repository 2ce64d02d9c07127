"""The daemon's core: requests in from any face, each handed to who answers it, and the way to the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from mstar.daemon import reports
from mstar.daemon.addresses import AddressError
from mstar.daemon.generation import Generations
from mstar.daemon.line_face import LineFace
from mstar.daemon.loading import ModelHost
from mstar.daemon.metrics import Metrics, MetricsServer
from mstar.daemon.peer import Peer
from mstar.daemon.protocol import (
    Abort,
    Done,
    ErrorEvent,
    Event,
    Generate,
    Load,
    Ping,
    Pong,
    ProtocolError,
    Request,
    Reset,
    ResetDone,
    Shutdown,
    ShuttingDown,
    Stats,
    Status,
    Unload,
    Unloaded,
)
from mstar.daemon.registry import LiveRequest, Registry, Totals
from mstar.daemon.run_dir import sweep_run_dirs
from mstar.daemon.settings import Settings
from mstar.daemon.stdio_face import StdioPeer
from mstar.daemon.zmq_face import ZmqFace

log = logging.getLogger("mstar.server")

_STATS_LIMIT_S = 2.0
_TRACE_LIMIT_S = 90.0  # a rank gives up after 60 s without steps


class StartupLoadError(Exception):
    """The model of `--model` could not be loaded."""


class Server:
    """One daemon. `await start()`, then `await serve()` until `stop()` has done its work.

    rank_command: replaces the ranks' program, for tests.
    """

    def __init__(self, settings: Settings, *, rank_command: Sequence[str] | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.registry = Registry(settings.max_waiting, self._request_ended)
        self.host = ModelHost(
            settings,
            on_engine_event=lambda event: self.generations.on_event(event),
            on_lost=self._ranks_lost,
            rank_command=rank_command,
        )
        self.generations = Generations(self.registry, lambda: self.host.model)
        self.zmq_face: ZmqFace | None = None
        self.line_face: LineFace | None = None
        self.metrics_server: MetricsServer | None = None
        self._stdio: StdioPeer | None = None
        self._tracing = False  # a profile is taken
        self._tasks: set[asyncio.Task[None]] = set()
        self._load: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()
        self._idle = asyncio.Event()
        self._startup_failure: str | None = None
        self._handlers: dict[type[Any], Callable[[Peer, Any], None]] = {
            Generate: self._generate,
            Abort: self._abort,
            Load: self._load_model,
            Unload: self._unload,
            Reset: self._reset,
            Ping: lambda peer, request: peer.send(Pong(id=request.id)),
            Status: self._status,
            Stats: self._stats,
            Shutdown: self._shutdown,
        }

    # Life

    async def start(self, stdio: tuple[int, int] | None = None) -> None:
        """Binds the faces; stdio: descriptors to serve the line face on. Raises AddressError."""
        settings = self.settings
        for path in sweep_run_dirs():
            log.info("removed %s, left by a daemon that was killed", path)
        try:
            if settings.bind != "off":
                face = ZmqFace(self, settings.bind, settings.lease_s)
                await face.start()
                self.zmq_face = face
                log.info("listening for ZeroMQ on %s", face.address)
            if settings.line != "off":
                line = LineFace(self, settings.line)
                await line.start()
                self.line_face = line
                log.info("listening for JSON lines on %s", line.address)
            if settings.metrics is not None:
                self.metrics_server = MetricsServer(self.metrics, settings.metrics)
                log.info("metrics on http://%s/metrics", str(self.metrics_server.address)[len("tcp://") :])
        except AddressError:
            await self._close_faces()
            raise
        self.metrics.watch(
            live=lambda: len(self.registry),
            running=lambda: reports.depths(self.registry)[0],
            waiting=lambda: reports.depths(self.registry)[1],
            ready=lambda: self.host.state == "ready",
        )
        if stdio is not None:
            self._stdio = StdioPeer(self, *stdio, on_end=self.stop)
        if settings.model is not None:
            self._load = self._spawn(self._load_at_start(settings.model))

    def stop(self) -> None:
        """Begins the end: nothing new is accepted, what runs may finish for `drain_s`. Twice: at once."""
        if self._stopping.is_set():
            self._hurried.set()
        self._stopping.set()

    async def serve(self) -> None:
        """Runs until stopped, then ends everything in order. Raises StartupLoadError."""
        await self._stopping.wait()
        log.info("shutting down")
        await self._drain()
        for live in self.registry:
            self.generations.abort(live)
        if self._load is not None:
            self._load.cancel()
            await asyncio.gather(self._load, return_exceptions=True)
        if self.host.model is not None:
            await self.host.begin_unload(hurry=self._hurried.is_set())
        await self.host.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.generations.close()
        await self._close_faces()
        log.info("ended")
        if self._startup_failure is not None:
            raise StartupLoadError(self._startup_failure)

    # What the faces tell

    def receive(self, peer: Peer, request: Request) -> None:
        try:
            self._handlers[type(request)](peer, request)
        except ProtocolError as error:
            self._answer_error(peer, request, error)
        except Exception as error:
            self._answer_fault(peer, request, error)

    def refuse(self, peer: Peer, error: ProtocolError) -> None:
        event = error.event()
        if event.id is not None and event.attempt_id is not None:
            live = self.registry.find((event.id, event.attempt_id))
            if live is not None and live.peer is peer:
                # With both keys it would read as the live request's terminal event.
                event.attempt_id = None
        peer.send(event)

    def peer_gone(self, peer: Peer, why: str) -> None:
        requests = self.registry.of(peer)
        if requests:
            log.info("%s %s: %d requests are aborted", peer.name, why, len(requests))
        for live in requests:
            self.generations.abort(live)

    def peer_cut_off(self, peer: Peer) -> None:
        log.warning("%s does not read and is cut off", peer.name)
        for live in self.registry.of(peer):
            message = "the connection does not read its events: read faster, or ask for less at once"
            self.generations.fail(live, ProtocolError("overloaded", message))

    # Requests

    def _generate(self, peer: Peer, request: Generate) -> None:
        self._check_accepting()
        model = self.host.model
        if model is None:
            loading = self.host.state == "loading"
            why = "a load is under way: wait for its end" if loading else "no model is loaded: load one first"
            if self.host.state == "failed":
                why = f"no model is loaded ({self.host.reason}): load again"
            raise ProtocolError("no_model", why, retryable=loading)
        self._idle.clear()
        self.generations.start(request, peer, model)

    def _abort(self, peer: Peer, request: Abort) -> None:
        live = self.registry.find((request.id, request.attempt_id))
        if live is not None:
            self.generations.abort(live)

    def _load_model(self, peer: Peer, request: Load) -> None:
        self._check_accepting()
        self.host.check_can_load()
        if len(self.registry):
            raise ProtocolError("busy", "requests run: wait for their end", retryable=True)
        self.registry.totals = Totals()
        self._load = self._answer(peer, request, self.host.begin_load(request, peer.send))

    def _unload(self, peer: Peer, request: Unload) -> None:
        for live in self.registry:
            self.generations.abort(live)

        ending = self.host.begin_unload()

        async def unload() -> Event:
            await ending
            return Unloaded(id=request.id)

        self._answer(peer, request, unload())

    def _reset(self, peer: Peer, request: Reset) -> None:
        if self.host.model is None:
            raise ProtocolError("no_model", "no model is loaded")
        if len(self.registry):
            running = f"{len(self.registry)} requests run: wait for their end, or abort them"
            raise ProtocolError("busy", running, retryable=True)
        peer.send(ResetDone(id=request.id))  # prefixes are not cached yet, so there is nothing to drop

    def _status(self, peer: Peer, request: Status) -> None:
        peer.send(reports.status_event(self.host, self.registry, request.id))

    def _stats(self, peer: Peer, request: Stats) -> None:
        model = self.host.model
        if model is None:
            raise ProtocolError("no_model", "no model is loaded")
        if request.trace_steps and self._tracing:
            raise ProtocolError(
                "busy", "steps are profiled already: ask again when that is over", retryable=True
            )
        if request.trace_steps:
            self._tracing = True

        async def stats() -> Event:
            try:
                limit_s = _TRACE_LIMIT_S if request.trace_steps else _STATS_LIMIT_S
                engine = await model.mesh.query_stats(limit_s, request.trace_steps)
            finally:
                if request.trace_steps:
                    self._tracing = False
            event = reports.stats_event(engine, self.registry, request.id)
            if event.trace is not None and peer.gone:
                Path(event.trace).unlink(missing_ok=True)  # nobody will fetch it
            return event

        self._answer(peer, request, stats())

    def _shutdown(self, peer: Peer, request: Shutdown) -> None:
        peer.send(ShuttingDown(id=request.id))
        self.stop()

    # Helpers

    def _check_accepting(self) -> None:
        if self._stopping.is_set():
            raise _shutting_down()

    def _answer(self, peer: Peer, request: Request, work: Coroutine[Any, Any, Event]) -> asyncio.Task[None]:
        """Runs `work` and sends what it returns, or the error that it raises."""

        async def run() -> None:
            try:
                peer.send(await work)
            except ProtocolError as error:
                self._answer_error(peer, request, error)
            except asyncio.CancelledError:
                self._answer_error(peer, request, _shutting_down())
                raise
            except Exception as error:
                self._answer_fault(peer, request, error)

        return self._spawn(run())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _answer_error(self, peer: Peer, request: Request, error: ProtocolError) -> None:
        error.id = request.id
        error.attempt_id = request.attempt_id if isinstance(request, Generate | Abort) else None
        if isinstance(request, Load):
            log.warning("load of %s refused: %s", request.model, error.message)
        self.refuse(peer, error)

    def _answer_fault(self, peer: Peer, request: Request, error: Exception) -> None:
        log.error("a %s failed", request.type, exc_info=error)
        message = f"a fault of the daemon: {type(error).__name__}: {error}"
        self._answer_error(peer, request, ProtocolError("internal", message))

    async def _load_at_start(self, model: str) -> None:
        def tell(event: Event) -> None:
            log.debug("%s", event)

        try:
            loaded = await self.host.begin_load(Load(model=model), tell)
        except ProtocolError as error:
            self._startup_failure = f"{model} could not be loaded: {error.message}"
            self.stop()
            return
        log.info("loaded %s in %.0f ms", loaded.model, loaded.load_ms)

    def _ranks_lost(self, error: ProtocolError) -> None:
        self.metrics.ranks_lost.inc()
        for live in self.registry:
            self.generations.fail(live, error)

    def _request_ended(self, live: LiveRequest, event: Done | ErrorEvent) -> None:
        self.metrics.request_ended(live, event)
        if not len(self.registry):
            self._idle.set()
        log.info("%s", reports.RequestLine(live, event))

    async def _drain(self) -> None:
        """Waits for live requests: all ended, or `drain_s` over, or hurried."""
        if not len(self.registry):
            return
        log.info("%d requests may finish for %.3g s", len(self.registry), self.settings.drain_s)
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._hurried)]
        await asyncio.wait(waits, timeout=self.settings.drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _close_faces(self) -> None:
        for face in (self.zmq_face, self.line_face, self._stdio):
            if face is not None:
                await face.close()
        if self.metrics_server is not None:
            await asyncio.to_thread(self.metrics_server.close)


def _shutting_down() -> ProtocolError:
    return ProtocolError("busy", "the daemon is shutting down", retryable=True)
