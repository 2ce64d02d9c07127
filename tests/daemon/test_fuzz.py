"""Whatever bytes arrive at either face of a live daemon, it answers typed errors and serves on."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, get_args

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstar.daemon.protocol import REQUESTS, ErrorClass
from mstar.daemon.server import Server
from tests.support.daemons import LineClient, daemon

CLASSES = set(get_args(ErrorClass))
COMMON = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
# Everything but what would end the daemon or its model; `max_tokens` is small unless it is nonsense.
types = st.sampled_from([name for name in REQUESTS if name not in ("shutdown", "unload")])
fields = st.sampled_from(
    sorted({name for model in REQUESTS.values() for name in model.model_fields} - {"type", "model"})
)


@st.composite
def messages(draw: Any) -> dict[str, Any]:
    """A request that is right, with some fields replaced by anything."""
    message: dict[str, Any] = {"type": draw(types)}
    if message["type"] in ("generate", "abort"):
        message.update(id=draw(st.integers(0, 3)), attempt_id=draw(st.integers(0, 3)))
    if message["type"] == "generate":
        message.update(prompt="Hello", max_tokens=3)
    message.update(draw(st.dictionaries(fields, values, max_size=3)))
    return message


def cut(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes, cut short or with one of them replaced."""
    at = st.integers(0, max(0, len(data) - 1))
    return st.one_of(
        st.just(data),
        at.map(lambda i: data[:i]),
        st.tuples(at, st.integers(0, 255)).map(lambda p: data[: p[0]] + bytes([p[1]]) + data[p[0] + 1 :]),
    )


def pack(message: dict[str, Any]) -> bytes:
    return msgpack.packb(message, unicode_errors="replace")


class Live:
    """A daemon with a loaded model in a thread, and a connection to each face that is reopened if closed."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)
        self.thread.start()
        assert self.ready.wait(60)
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.RCVTIMEO, 20_000)
        self.dealer.connect(self.server.zmq_face.address)
        self.pings = 0
        self.connect_line()

    async def serve(self) -> None:
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        async with daemon(lease_s=1000) as server:
            self.server: Server = server
            client = await LineClient.connect(server)
            assert (await client.load())["type"] == "loaded"
            client.close()
            self.ready.set()
            await self.over.wait()

    def connect_line(self) -> None:
        host, port = self.server.line_face.address.removeprefix("tcp://").rsplit(":", 1)
        self.line = socket.create_connection((host, int(port)), timeout=20)
        self.lines = self.line.makefile("rb")

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.lines.close()
        self.line.close()
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(20)

    def check(self, event: dict[str, Any]) -> bool:
        """Whether it is the answer to the last ping; any other event must be one of the protocol."""
        if event["type"] == "pong":
            return event.get("id") == f"fuzz {self.pings}"
        if event["type"] == "error":
            assert event["class"] in CLASSES - {"internal"}, event
            assert event["message"]
        return False

    def send_zmq(self, *frames: bytes) -> None:
        """Sends, and reads until a ping that follows is answered."""
        self.pings += 1
        self.dealer.send_multipart(frames)
        self.dealer.send(msgpack.packb({"type": "ping", "id": f"fuzz {self.pings}"}))
        while not self.check(msgpack.unpackb(self.dealer.recv())):
            pass

    def send_line(self, data: bytes) -> None:
        self.pings += 1
        self.line.sendall(data + b'\n{"type":"ping","id":"fuzz %d"}\n' % self.pings)
        while True:
            line = self.lines.readline()
            if not line:  # closed: the bytes looked like HTTP
                self.lines.close()
                self.line.close()
                self.connect_line()
                return
            if self.check(json.loads(line)):
                return


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    served = Live()
    yield served
    served.close()


@COMMON
@given(frames=st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_any_frames(live: Live, frames: list[bytes]) -> None:
    live.send_zmq(*frames)


@COMMON
@given(data=st.binary(max_size=200))
def test_any_line(live: Live, data: bytes) -> None:
    live.send_line(data)


@COMMON
@given(data=messages().map(pack).flatmap(cut))
def test_nearly_right_frames(live: Live, data: bytes) -> None:
    live.send_zmq(data)


@COMMON
@given(data=messages().map(lambda message: json.dumps(message).encode()).flatmap(cut))
def test_nearly_right_lines(live: Live, data: bytes) -> None:
    live.send_line(data)


def test_after_all_that_it_still_generates(live: Live) -> None:
    async def body() -> None:
        client = await LineClient.connect(live.server)
        assert (await client.generate("after", max_tokens=3))[-1]["finish_reason"] == "length"
        client.close()

    asyncio.run(asyncio.wait_for(body(), 20))
