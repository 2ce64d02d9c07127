"""The line face: one JSON object a line, over TCP or a Unix socket.

A connection that closes aborts its requests; one that does not read is closed at a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable

from mstar.daemon import codec
from mstar.daemon.addresses import AddressError, TcpAddress, UnixAddress, claim_unix_socket, parse_address
from mstar.daemon.peer import BACKLOG_BYTES, Core, Peer
from mstar.daemon.protocol import Event, ProtocolError

log = logging.getLogger("mstar.line")

# Lines handled before other connections get their turn.
_BURST = 32
_CLOSE_LIMIT_S = 1.0
_HTTP = re.compile(rb"[A-Z]+ \S* ?HTTP/\d")


class LineSplitter:
    """Bytes in, lines out; a line over the size limit is refused once and skipped up to its newline."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0  # bytes of the buffer known to hold no newline
        self._skipped = 0  # bytes of the line being skipped

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next line without its newline, or None until more bytes come.

        Raises ProtocolError (`malformed`) once for a line over the limit, and ValueError past the
        hard limit, where the connection must be closed.
        """
        while True:
            end = self._buffer.find(b"\n", self._scanned)
            length = len(self._buffer) if end < 0 else end
            if self._skipped:
                self._skipped += length
                del self._buffer[: length + 1]
                self._scanned = 0
                if self._skipped > codec.HARD_LIMIT_BYTES:
                    raise ValueError(f"a line of more than {codec.HARD_LIMIT_BYTES} bytes")
                if end < 0:
                    return None
                self._skipped = 0
            elif length > codec.MAX_MESSAGE_BYTES:
                del self._buffer[: length + 1]
                self._scanned = 0
                self._skipped = 0 if end >= 0 else length
                raise codec.too_large(length)
            elif end < 0:
                self._scanned = length
                return None
            else:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._scanned = 0
                return line


class LineInput:
    """Handles the lines of one connection, a few at a time so that no client keeps the loop to itself.

    pause: called with True when input should wait, with False when it may go on.
    close: called with the reason when the connection must be closed.
    """

    def __init__(
        self, core: Core, peer: Peer, pause: Callable[[bool], None], close: Callable[[str], None]
    ) -> None:
        self._core, self._peer, self._pause, self._close = core, peer, pause, close
        self._splitter = LineSplitter()
        self._paused = False
        self._loop = asyncio.get_running_loop()

    @property
    def busy(self) -> bool:
        """Whether lines wait for their turn."""
        return self._paused and not self._peer.gone

    def feed(self, data: bytes) -> None:
        self._splitter.feed(data)
        if not self._paused:
            self._work()

    def _work(self) -> None:
        for _ in range(_BURST):
            if self._peer.gone:
                return
            try:
                line = self._splitter.next()
                if line is None:
                    if self._paused:
                        self._paused = False
                        self._pause(False)
                    return
                if _HTTP.match(line):
                    # A web page can make a browser post to a loopback port; its body must not be obeyed.
                    self._core.refuse(self._peer, ProtocolError("malformed", "HTTP is not spoken here"))
                    self._close("spoke HTTP")
                    return
                if line and not line.isspace():
                    self._core.receive(self._peer, codec.decode_json(line))
            except ProtocolError as error:
                self._core.refuse(self._peer, error)
            except ValueError as error:
                self._core.refuse(
                    self._peer, ProtocolError("malformed", f"{error}: the connection is closed")
                )
                self._close(str(error))
                return
        if not self._paused:
            self._paused = True
            self._pause(True)
        self._loop.call_soon(self._work)


class LinePeer(Peer, asyncio.Protocol):
    """One socket connection."""

    def __init__(self, face: LineFace) -> None:
        super().__init__(f"line {face.next_number()}")
        self._face = face
        self._core = face.core

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._input = LineInput(self._core, self, self._pause, self.close)
        self._face.peers.add(self)

    def data_received(self, data: bytes) -> None:
        self._input.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        self._face.peers.discard(self)
        self._core.peer_gone(self, f"closed ({error})" if error else "closed")

    def send(self, event: Event) -> None:
        if self.gone:
            return
        self.transport.write(codec.encode_json(event))
        if self.transport.get_write_buffer_size() > BACKLOG_BYTES:
            log.warning("%s does not read and is cut off", self.name)
            self.gone = True
            self.transport.abort()  # connection_lost follows and aborts its requests

    def close(self, why: str) -> None:
        """Ends the connection after what was written."""
        log.info("%s is closed: %s", self.name, why)
        self.transport.close()

    def _pause(self, pause: bool) -> None:
        if pause:
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.resume_reading()


class LineFace:
    """Bound by `start`; `address` then says where."""

    def __init__(self, core: Core, address: str) -> None:
        self.address = address
        self.core = core
        self.peers: set[LinePeer] = set()
        self._count = 0
        self._unix: UnixAddress | None = None

    def next_number(self) -> int:
        self._count += 1
        return self._count

    async def start(self) -> None:
        """Raises AddressError where the address cannot be bound."""
        loop = asyncio.get_running_loop()
        address = parse_address(self.address)
        if isinstance(address, TcpAddress):
            try:
                self._server = await loop.create_server(lambda: LinePeer(self), address.host, address.port)
            except OSError as error:
                reason = error.strerror or error
                raise AddressError(f"cannot listen on {address}: {reason}") from error
            host, port = self._server.sockets[0].getsockname()[:2]
            self.address = str(TcpAddress(host, port))
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with claim_unix_socket(address):
                listener.bind(str(address.path))
            self._unix = address
            self._server = await loop.create_unix_server(lambda: LinePeer(self), sock=listener)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """Ends the face; what was written still reaches clients that read, for a second."""
        self._server.close()
        for peer in list(self.peers):
            peer.transport.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CLOSE_LIMIT_S
        while self.peers and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for peer in list(self.peers):
            peer.transport.abort()
        if self._unix is not None:
            with contextlib.suppress(FileNotFoundError):
                self._unix.path.unlink()
