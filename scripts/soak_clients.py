"""The clients of a soak, on both faces: those that read, those that are cut off, and those that never read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from mstar.scripts.soak_traffic import Ask, Draw, Ledger

PING_S = 5.0
SILENCE_S = 120.0  # a request that hears nothing for so long is lost
CUT_SHARE = 0.08
LINE_LIMIT_BYTES = 2**26
UNREAD_LIMIT_BYTES = 2**16  # asyncio reads twice as much ahead, whether or not somebody wants it
# What a client that never reads lets pile up beside its requests, a tenth of a second: within half a minute
# that is past every buffer and bound (4,096 events over ZeroMQ, 8 MiB over the line face).
FLOODS = {"zmq": (50, {"type": "ping"}), "line": (40, {"type": "status"})}
FLOOD_MOST = 20_000
FLOOD_PATIENCE_S = 5.0


class Gone(Exception):
    """The daemon closed the connection."""


class Connection(ABC):
    @abstractmethod
    async def send(self, message: dict[str, Any]) -> None: ...

    @abstractmethod
    async def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next event, None when none came in that time. Raises Gone."""

    @abstractmethod
    def cut(self) -> None:
        """Closes without a word."""


class ZmqConnection(Connection):
    def __init__(self, context: zmq.asyncio.Context, address: str, rcvhwm: int = 1000) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, rcvhwm)
        self._socket.connect(address)

    async def send(self, message: dict[str, Any]) -> None:
        await self._socket.send(msgpack.packb(message))

    async def receive(self, timeout_s: float) -> dict[str, Any] | None:
        if not await self._socket.poll(int(timeout_s * 1e3)):
            return None
        event: dict[str, Any] = msgpack.unpackb(await self._socket.recv())
        return event

    def cut(self) -> None:
        self._socket.close()


class LineConnection(Connection):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._line: asyncio.Task[bytes] | None = None

    @classmethod
    async def open(cls, address: str, limit: int = LINE_LIMIT_BYTES) -> LineConnection:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            return cls(*await asyncio.open_unix_connection(path, limit=limit))
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port), limit=limit))

    async def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise Gone(str(error)) from error

    async def receive(self, timeout_s: float) -> dict[str, Any] | None:
        if self._line is None:  # kept over a timeout, so that no byte is lost with it
            self._line = asyncio.ensure_future(self._reader.readline())
        done, _ = await asyncio.wait([self._line], timeout=timeout_s)
        if not done:
            return None
        line, self._line = self._line, None
        try:
            data = line.result()
        except ConnectionError as error:
            raise Gone(str(error)) from error
        if not data.endswith(b"\n"):
            raise Gone("the daemon closed the connection")
        event: dict[str, Any] = json.loads(data)
        return event

    def cut(self) -> None:
        if self._line is not None:
            self._line.cancel()
        self._writer.transport.abort()


@dataclass(slots=True)
class Stage:
    """What all clients share. until: time.monotonic() after which nothing new is asked."""

    zmq_address: str
    line_address: str | None
    ledger: Ledger
    until: float
    context: zmq.asyncio.Context
    most_tokens: int  # a never-read request asks for so many

    async def connect(self, face: str) -> Connection:
        if face == "line" and self.line_address is not None:
            return await LineConnection.open(self.line_address)
        return ZmqConnection(self.context, self.zmq_address)

    def over(self) -> bool:
        return time.monotonic() >= self.until


async def reading_client(stage: Stage, draw: Draw) -> None:
    """Connects, has a few conversations and leaves, in order or in the midst of one; over and over."""
    choose = draw.random
    while not stage.over():
        connection = await stage.connect(choose.choice(("zmq", "line")))
        try:
            for _ in range(choose.randrange(1, 7)):
                if stage.over():
                    break
                asks = [draw.ask() for _ in range(choose.choice((1, 1, 1, 2, 4)))]
                patience = choose.random() * 4 if choose.random() < CUT_SHARE else None
                await _converse(stage, connection, asks, patience)
                if patience is not None:
                    break
        finally:
            connection.cut()


async def _converse(stage: Stage, connection: Connection, asks: list[Ask], patience_s: float | None) -> None:
    """Sends requests and reads until each has ended, or, with `patience_s`, until that is over."""
    ledger = stage.ledger
    began = heard = pinged = time.monotonic()
    for ask in asks:
        ledger.open(ask, began)
        await connection.send(ask.message)
        if ask.abort_at == "at once":
            await _abort(connection, ask)
    try:
        while any(ask.open for ask in asks):
            now = time.monotonic()
            if patience_s is not None and now - began > patience_s:
                ledger.orphan(asks)
                return
            for ask in asks:
                if ask.abort_at == "later" and not ask.aborted and now - began > ask.abort_after:
                    await _abort(connection, ask)
            if now - pinged > PING_S:
                await connection.send({"type": "ping"})
                pinged = now
            event = await connection.receive(0.25)
            if event is None:
                if now - heard > SILENCE_S:
                    for ask in asks:
                        if ask.open:
                            ledger.problem(f"{ask.key}: nothing came for {SILENCE_S:.0f} s: {_short(ask)}")
                    ledger.orphan(asks)
                    return
                continue
            mine = ledger.take(event)
            if mine is not None:
                heard = now
                if _abort_due(mine):
                    await _abort(connection, mine)
    except Gone as error:
        ledger.problem(f"a client that reads was cut off: {error}")
        ledger.orphan(asks)


def _abort_due(ask: Ask) -> bool:
    if ask.aborted or ask.ends:
        return False
    if ask.abort_at == "started":
        return ask.started
    return ask.abort_at == "streaming" and ask.events >= ask.abort_after


async def _abort(connection: Connection, ask: Ask) -> None:
    ask.aborted = True
    id, attempt_id = ask.key
    await connection.send({"type": "abort", "id": id, "attempt_id": attempt_id})


async def silent_client(stage: Stage, draw: Draw, face: str, idle: asyncio.Event) -> None:
    """Asks for more and more and reads nothing until the soak is `idle`; then looks at what it was left.

    Over the line face it finds the connection closed. Over ZeroMQ each request must have its one end.
    """
    ledger = stage.ledger
    if face == "line" and stage.line_address is not None:
        connection: Connection = await LineConnection.open(stage.line_address, UNREAD_LIMIT_BYTES)
    else:
        connection = ZmqConnection(stage.context, stage.zmq_address, rcvhwm=1)
    asks = [draw.unread(stage.most_tokens) for _ in range(2)]
    for ask in asks:
        ledger.open(ask, time.monotonic())
        await connection.send(ask.message)
    with contextlib.suppress(Gone, TimeoutError):  # closed, or no longer read by the daemon: both are right
        await _flood(stage, connection, face)
        for ask in asks:
            await asyncio.wait_for(_abort(connection, ask), FLOOD_PATIENCE_S)
        while not idle.is_set():  # its lease must not end before the others do
            await asyncio.wait_for(connection.send({"type": "ping"}), FLOOD_PATIENCE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(idle.wait(), PING_S)
    await idle.wait()
    try:
        while any(ask.open for ask in asks):
            event = await connection.receive(5.0)
            if event is None:
                break
            ledger.take(event)
    except Gone:
        ledger.orphan(asks)
    if face == "line":
        ledger.orphan(asks)
    for ask in asks:
        if ask.open:
            ledger.problem(f"{ask.key} of a client that did not read has no end")
            ask.orphaned = True
    connection.cut()


async def _flood(stage: Stage, connection: Connection, face: str) -> None:
    """Lets answers pile up until the soak is over."""
    batch, question = FLOODS[face]
    sent = 0
    while not stage.over():
        for _ in range(batch if sent < FLOOD_MOST else 1):  # one goes on, for the lease
            await asyncio.wait_for(connection.send(question), FLOOD_PATIENCE_S)
        sent += batch
        await asyncio.sleep(0.1)


async def run_clients(stage: Stage, count: int, silent: bool, seed: int, draw: Callable[[str], Draw]) -> None:
    """Runs `count` clients (with `silent`, one of each face among them never reads) until all have ended."""
    faces = ["zmq", "line"] if stage.line_address is not None else ["zmq"]
    faces = faces[: count - 1] if silent else []
    idle = asyncio.Event()
    silents = [
        asyncio.create_task(silent_client(stage, draw(f"{seed} silent {face}"), face, idle)) for face in faces
    ]
    readers = [
        asyncio.create_task(reading_client(stage, draw(f"{seed} {number}")))
        for number in range(count - len(silents))
    ]
    for result in await asyncio.gather(*readers, return_exceptions=True):
        if isinstance(result, BaseException):
            stage.ledger.problem(f"a client failed: {type(result).__name__}: {result}")
    idle.set()
    for result in await asyncio.gather(*silents, return_exceptions=True):
        if isinstance(result, BaseException):
            stage.ledger.problem(f"a client that does not read failed: {type(result).__name__}: {result}")


def _short(ask: Ask) -> str:
    fields = {
        name: value for name, value in ask.message.items() if name not in ("prompt", "prompt_ids", "messages")
    }
    return f"{fields}, started {ask.started}, {ask.events} events, aborted {ask.aborted}"
