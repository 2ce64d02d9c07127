"""Reads a ZeroMQ socket from asyncio, without the futures that `zmq.asyncio` makes for each message.

A ZeroMQ file descriptor is edge-triggered: it may stay quiet although messages wait, after a
send on the same socket too. So the socket's own EVENTS decide, and they are asked again until
nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

# Messages handled before other callbacks get their turn.
_BURST = 64


class ZmqReader:
    """Calls `on_message(frames)` for each message of `socket`, on the running loop."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled: asyncio.Handle | None = None
        self._closed = False
        self._loop.add_reader(self._fd, self._drain)
        self.poke()

    def poke(self) -> None:
        """Looks again soon; needed after each send on the same socket."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._drain)

    def drain(self) -> None:
        """Handles what has already arrived, now."""
        self._drain()

    def close(self) -> None:
        """Stops reading. The socket stays the caller's."""
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _drain(self) -> None:
        self._scheduled = None
        for _ in range(_BURST):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)
        self.poke()
