"""What the sync and the async client share: one DEALER socket, its streams, its lease.

Everything here runs on one event loop. A request opens a `Stream`, events are routed to it by
(id, attempt_id), and a keeper pings while any stream is open, so that the lease holds and a daemon
that is gone is noticed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import sys
from collections import deque
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from mstar.daemon.codec import HARD_LIMIT_BYTES, decode_event_msgpack, encode_request_msgpack
from mstar.daemon.protocol import (
    Abort,
    Done,
    ErrorClass,
    ErrorEvent,
    Event,
    Generate,
    GenStart,
    LoadProgress,
    Ping,
    ProtocolError,
    Reasoning,
    Request,
    Token,
    parse_request,
)

log = logging.getLogger("mstar.client")

PING_S = 5.0  # a lease lasts 30 s: five pings may be lost
SILENCE_S = 25.0  # a daemon answers pings whatever it does; silent for so long it is gone
MAX_UNREAD_EVENTS = 16_384  # of one stream; past it that stream alone is given up
MAX_DRAIN = 256  # messages taken before other tasks of the loop get their turn
LINGER_MS = 500  # for the aborts of a client that closes

Key = tuple[str | int, int | None]
_STREAMED = (GenStart, Token, Reasoning, LoadProgress)


class DaemonError(Exception):
    """An `error` event, raised: its class, message, field and whether trying again may help."""

    def __init__(self, event: ErrorEvent) -> None:
        super().__init__(f"{event.error_class}: {event.message}")
        self.event = event
        self.error_class = event.error_class
        self.message = event.message
        self.field = event.field
        self.retryable = event.retryable


class NoDaemon(Exception):
    """Nothing answers at the address, or what answered is gone."""


class Stream:
    """The events of one request, in order, until its last one."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.finished = False
        self._events: deque[Event] = deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Event]:
        """The events at hand, at least one; empty once after the last. Raises DaemonError or NoDaemon."""
        while not self._events and not self.finished:
            if self._waiter is not None:
                raise RuntimeError("a stream has one reader")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._events:
            batch = list(self._events)
            self._events.clear()
            return batch
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return []

    def push(self, event: Event) -> bool:
        """Adds an event; False when the reader is too far behind for one more."""
        if len(self._events) >= MAX_UNREAD_EVENTS:
            return False
        self._events.append(event)
        self._wake()
        return True

    def finish(self, failure: Exception | None = None) -> None:
        """Nothing follows; a failure is raised to the reader after what it has not read yet."""
        self.finished = True
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Core:
    """One connection. address: the daemon's ZeroMQ face; timeout_s: bound of the connect check."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._streams: dict[Key, Stream] = {}
        self._context: zmq.Context[Any] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._checked = False
        self._closed = False
        self._connecting = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._last_heard_s = 0.0

    def new_id(self) -> str:
        """An id that no other client makes."""
        return f"{self._prefix}-{next(self._numbers)}"

    def request(self, kind: str, fields: dict[str, Any]) -> Any:
        """The typed request; raises DaemonError for fields that the daemon would refuse anyway."""
        try:
            return parse_request({"type": kind, "id": self.new_id(), **fields})
        except ProtocolError as error:
            raise DaemonError(error.event()) from None

    async def open(self, request: Request) -> Stream:
        """Sends a request, gives the stream of its events. Raises NoDaemon, or DaemonError `overloaded`."""
        async with self._connecting:
            if not self._checked:
                await self._check()
        return self._open(request)

    async def ask(self, request: Request, timeout_s: float) -> Event:
        """Sends a request that one event answers. Raises NoDaemon when none comes in time, DaemonError."""
        stream = await self.open(request)
        return await self._only(stream, timeout_s)

    def abort(self, id: str | int, attempt_id: int) -> None:
        """Asks the daemon to end a request; a no-op when there is no connection."""
        if self._socket is not None:
            self._send(Abort(id=id, attempt_id=attempt_id))

    async def close(self) -> None:
        """Aborts this client's live requests and closes the connection; twice is fine."""
        self._closed = True
        for id, attempt_id in list(self._streams):
            if attempt_id is not None:
                self.abort(id, attempt_id)
        self._fail_all(NoDaemon("the client was closed"))
        await self._disconnect()

    def _open(self, request: Request) -> Stream:
        assert request.id is not None
        key = (request.id, request.attempt_id if isinstance(request, Generate) else None)
        if key in self._streams:
            raise _error("validation", "the request is still live: take another id or attempt_id", key)
        stream = self._streams[key] = Stream(key)
        try:
            self._send(request)
        except BaseException:
            del self._streams[key]
            raise
        if self._keeper is None or self._keeper.done():
            self._last_heard_s = asyncio.get_running_loop().time()
            self._keeper = asyncio.create_task(self._keep_alive())
        return stream

    async def _only(self, stream: Stream, timeout_s: float) -> Event:
        try:
            async with asyncio.timeout(timeout_s):
                events = await stream.take()
        except TimeoutError:
            raise NoDaemon(f"no answer from {self.address} within {timeout_s:g} s") from None
        finally:
            self._streams.pop(stream.key, None)
        return events[-1]

    async def _check(self) -> None:
        """Connects and waits for one pong."""
        if self._closed:
            raise NoDaemon("the client is closed")
        if self._socket is None:
            self._connect()
        try:
            await self._only(self._open(Ping(id=self.new_id())), self.timeout_s)
        except NoDaemon:
            await self._disconnect()
            raise NoDaemon(f"no daemon answers at {self.address}: start one with mstar-daemon") from None
        self._checked = True

    def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, LINGER_MS)
            self._socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._context = self._socket = self._monitor = None
            raise NoDaemon(f"{self.address} is no address to connect to: {error}") from None
        loop.add_reader(self._socket.fileno(), self._drain)
        loop.add_reader(self._monitor.fileno(), self._watch)
        self._watch()  # a socket's descriptor signals nothing before the socket was found empty once

    async def _disconnect(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        context, socket, monitor = self._context, self._socket, self._monitor
        self._context = self._socket = self._monitor = None
        if context is None or socket is None or monitor is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(socket.fileno())
        loop.remove_reader(monitor.fileno())
        linger = LINGER_MS if self._checked else 0
        self._checked = False
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=linger)
        await asyncio.to_thread(context.term)

    def _send(self, request: Request) -> None:
        if self._socket is None:
            raise NoDaemon(f"the connection to {self.address} is closed")
        try:
            self._socket.send(encode_request_msgpack(request), zmq.NOBLOCK)
        except zmq.Again:
            raise _error("overloaded", "the daemon takes no more messages now: try again later") from None
        # the socket's descriptor signals edges, and sending may have swallowed one
        asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self, most: int = MAX_DRAIN) -> None:
        for _ in range(most):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_heard_s = asyncio.get_running_loop().time()
            try:
                event = decode_event_msgpack(data)
            except ProtocolError as error:
                log.warning("ignored a message from %s: %s", self.address, error)
                continue
            self._route(event)
        asyncio.get_running_loop().call_soon(self._drain)

    def _route(self, event: Event) -> None:
        id = event.id
        if id is None:
            if isinstance(event, ErrorEvent):
                log.warning("the daemon refused a message: %s: %s", event.error_class, event.message)
            return
        key = (id, getattr(event, "attempt_id", None))
        stream = self._streams.get(key)
        if stream is None:
            return  # what a finished or forgotten request still had on its way
        if isinstance(event, ErrorEvent):
            self._end(stream, DaemonError(event))
        elif not stream.push(event) and not isinstance(event, Done):
            if key[1] is not None:
                self.abort(id, key[1])
            self._end(stream, _error("overloaded", f"{MAX_UNREAD_EVENTS} events were left unread", key))
        elif not isinstance(event, _STREAMED):
            self._end(stream, None)

    def _end(self, stream: Stream, failure: Exception | None) -> None:
        self._streams.pop(stream.key, None)
        stream.finish(failure)

    def _watch(self) -> None:
        """A ROUTER does not know a client that comes back, so its requests are lost with the connection."""
        while self._monitor is not None:
            try:
                message = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if parse_monitor_message(message)["event"] == zmq.EVENT_DISCONNECTED:
                self._drain(sys.maxsize)  # what arrived before
                self._checked = False
                self._fail_all(NoDaemon(f"the connection to {self.address} was lost"))

    def _fail_all(self, failure: NoDaemon) -> None:
        for stream in list(self._streams.values()):
            self._end(stream, failure)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while self._streams:
            await asyncio.sleep(PING_S)
            if loop.time() - self._last_heard_s > SILENCE_S:
                self._checked = False
                self._fail_all(NoDaemon(f"nothing heard from {self.address} for {SILENCE_S:g} s"))
                return
            try:
                self._send(Ping())
            except (DaemonError, NoDaemon) as error:
                log.warning("ping: %s", error)


def _error(error_class: ErrorClass, message: str, key: Key | tuple[None, None] = (None, None)) -> DaemonError:
    """An error of this side, in the daemon's words."""
    return DaemonError(ProtocolError(error_class, message, id=key[0], attempt_id=key[1]).event())
