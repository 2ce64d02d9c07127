"""The line face over the daemon's own stdin and stdout, for a parent process that drives it.

Threads do the reading and writing: stdin and stdout may be pipes, files or terminals, and the
event loop can wait for the first kind only. The end of stdin shuts the daemon down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable

from mstar.daemon import codec
from mstar.daemon.line_face import LineInput
from mstar.daemon.peer import BACKLOG_BYTES, Core, Peer
from mstar.daemon.protocol import Event

_CLOSE_LIMIT_S = 1.0


class StdioPeer(Peer):
    """input_fd, output_fd: read and written from here on. on_end: the input ended."""

    def __init__(self, core: Core, input_fd: int, output_fd: int, on_end: Callable[[], None]) -> None:
        super().__init__("stdio")
        self._core = core
        self._fds = input_fd, output_fd
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._input = LineInput(core, self, self._pause, lambda why: self._lost(why))
        self._may_read = threading.Event()
        self._handled = threading.Event()
        self._may_read.set()
        self._unwritten: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._unwritten_bytes = 0
        threading.Thread(target=self._read, name="stdin", daemon=True).start()
        self._writer = threading.Thread(target=self._write, name="stdout", daemon=True)
        self._writer.start()

    def send(self, event: Event) -> None:
        if self.gone:
            return
        data = codec.encode_json(event)
        self._unwritten_bytes += len(data)
        if self._unwritten_bytes > BACKLOG_BYTES:
            self._lost("does not read and is cut off")
            return
        self._unwritten.put(data)

    async def close(self) -> None:
        self._unwritten.put(None)
        await asyncio.to_thread(self._writer.join, _CLOSE_LIMIT_S)

    def _read(self) -> None:
        while True:
            self._may_read.wait()
            try:
                data = os.read(self._fds[0], 65536)
            except OSError:
                data = b""
            self._handled.clear()
            try:
                self._loop.call_soon_threadsafe(self._take, data)
            except RuntimeError:  # the loop has ended
                return
            if not data:
                return
            self._handled.wait()

    def _take(self, data: bytes) -> None:
        if data:
            self._input.feed(data)
            self._handled.set()
        else:
            self._input.feed(b"\n")  # a last line without a newline counts
            self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self._input.busy:
            self._loop.call_soon(self._end_when_idle)
        else:
            self._on_end()

    def _pause(self, pause: bool) -> None:
        if pause:
            self._may_read.clear()
        else:
            self._may_read.set()

    def _write(self) -> None:
        while (data := self._unwritten.get()) is not None:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fds[1], view) :]
            except OSError as error:
                self._tell(self._lost, f"closed ({error.strerror})")
                return
            self._tell(self._written, len(data))

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, *args)

    def _written(self, size: int) -> None:
        self._unwritten_bytes -= size

    def _lost(self, why: str) -> None:
        if not self.gone:
            self.gone = True
            self._loop.call_soon(self._core.peer_gone, self, why)
            self._loop.call_soon(self._on_end)
