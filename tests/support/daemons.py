"""An in-process daemon on random ports with fake ranks, and plain clients for both faces."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgpack
import zmq
import zmq.asyncio

from mstar.daemon.server import Server
from mstar.daemon.settings import load_settings
from tests.support import fake_rank

TERMINAL = ("done", "error")


def run(test: Any, limit_s: float = 90) -> None:
    """Runs a coroutine to its end."""
    asyncio.run(asyncio.wait_for(test, limit_s))


@contextlib.asynccontextmanager
async def daemon(script: dict[str, Any] | None = None, **flags: Any) -> AsyncIterator[Server]:
    """A server whose ranks are fake ones; ends with it, in order."""
    defaults = {
        "bind": "tcp://127.0.0.1:0",
        "line": "tcp://127.0.0.1:0",
        "device": "cpu",
        "heartbeat_s": 0.1,
        "heartbeat_lost_s": 5.0,
        "drain_s": 0.0,
    }
    settings = load_settings({**defaults, **flags})
    server = Server(settings, rank_command=fake_rank.command(**(script or {})))
    await server.start()
    serving = asyncio.create_task(server.serve())
    try:
        yield server
    finally:
        # A context that is left open after a failure would block the interpreter in its destructor.
        for client in ZmqClient.opened:
            client.close()
        ZmqClient.opened.clear()
        server.stop()
        await serving


class Client:
    """What the two faces' clients share."""

    async def send(self, **message: Any) -> None:
        raise NotImplementedError

    async def receive(self) -> dict[str, Any]:
        raise NotImplementedError

    async def ask(self, **message: Any) -> dict[str, Any]:
        """Sends, and returns the next event."""
        await self.send(**message)
        return await self.receive()

    async def until(self, *types: str) -> list[dict[str, Any]]:
        """Events up to the first of these types."""
        events = [await self.receive()]
        while events[-1]["type"] not in types:
            events.append(await self.receive())
        return events

    async def load(self, **fields: Any) -> dict[str, Any]:
        """Loads the built-in model; returns `loaded` or `error`."""
        await self.send(**{"type": "load", "model": "builtin:tiny", **fields})
        return (await self.until("loaded", "error"))[-1]

    async def generate(self, id: Any = "a", **fields: Any) -> list[dict[str, Any]]:
        """Generates; returns all events with the terminal one."""
        await self.send(**generate(id, **fields))
        return await self.until(*TERMINAL)


def generate(id: Any = "a", **fields: Any) -> dict[str, Any]:
    prompt = {} if {"prompt", "messages", "prompt_ids"} & fields.keys() else {"prompt": "Hello"}
    return {"type": "generate", "id": id, "attempt_id": 0, **prompt, **fields}


def classes(events: list[dict[str, Any]]) -> list[str]:
    return [event.get("class", event["type"]) for event in events]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] == "token")


class ZmqClient(Client):
    opened: ClassVar[list[ZmqClient]] = []

    def __init__(self, server: Server, **options: Any) -> None:
        assert server.zmq_face is not None
        self.opened.append(self)
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name.upper()), value)
        self.socket.connect(server.zmq_face.address)

    async def send(self, **message: Any) -> None:
        await self.socket.send(msgpack.packb(message))

    async def send_raw(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def receive(self) -> dict[str, Any]:
        return msgpack.unpackb(await self.socket.recv())

    def close(self) -> None:
        self.context.destroy(linger=0)


class LineClient(Client):
    """Use `await LineClient.connect(server)`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, server: Server) -> LineClient:
        assert server.line_face is not None
        address = server.line_face.address
        if address.startswith("unix:"):
            return cls(*await asyncio.open_unix_connection(address.removeprefix("unix:"), limit=2**26))
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port), limit=2**26))

    async def send(self, **message: Any) -> None:
        await self.send_raw(json.dumps(message).encode() + b"\n")

    async def send_raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> dict[str, Any]:
        line = await self.reader.readline()
        if not line:
            raise ConnectionError("the daemon closed the connection")
        return json.loads(line)

    def close(self) -> None:
        self.writer.close()


async def connect(server: Server, face: str) -> Client:
    return ZmqClient(server) if face == "zmq" else await LineClient.connect(server)
