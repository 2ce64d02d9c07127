"""The ZeroMQ face: a ROUTER, one msgpack map a message.

Sends never block. With ROUTER_MANDATORY an unreachable client is an error and means that it
is gone, a full high-water mark means that it does not read: its events wait here, up to a
bound. A DEALER that leaves says nothing, so clients also hold a lease that any message renews.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

import zmq

from mstar.daemon import codec
from mstar.daemon.addresses import AddressError, TcpAddress, UnixAddress, claim_unix_socket, parse_address
from mstar.daemon.peer import BACKLOG_BYTES, BACKLOG_EVENTS, Core, Peer
from mstar.daemon.protocol import Done, ErrorEvent, Event, ProtocolError
from mstar.daemon.zmq_reader import ZmqReader

log = logging.getLogger("mstar.zmq")

_HWM = 1000
_RETRY_S = 0.005
_RETRY_MAX_S = 0.1
_RETRY_BURST = 256
_LINGER_MS = 1000  # for the last events of a daemon that ends
# Made once: a token's way out is a few microseconds, and as flags of an enum they took as long as the rest of it.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_TERMINAL = (Done, ErrorEvent)


class ZmqPeer(Peer):
    __slots__ = ("backlog", "backlog_bytes", "cut", "face", "identity", "seen_at")

    def __init__(self, face: ZmqFace, identity: bytes) -> None:
        super().__init__(f"zmq {identity.hex()[:16]}")
        self.face = face
        self.identity = identity
        self.seen_at = time.monotonic()
        self.backlog: deque[tuple[bytes, bool]] = deque()  # encoded event, whether it is a terminal one
        self.backlog_bytes = 0
        self.cut = False  # does not read: only terminal events are kept for it

    def send(self, event: Event) -> None:
        if not self.gone:
            self.face.send(self, codec.encode_msgpack(event), isinstance(event, _TERMINAL))


class ZmqFace:
    """Bound by `start`; `address` then says where."""

    def __init__(self, core: Core, address: str, lease_s: float) -> None:
        self.address = address
        self._core = core
        self._lease_s = lease_s
        self._peers: dict[bytes, ZmqPeer] = {}
        self._waiting: dict[ZmqPeer, None] = {}  # peers with a backlog
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = _RETRY_S
        self._unix: UnixAddress | None = None

    async def start(self) -> None:
        """Raises AddressError where the address cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.LINGER, _LINGER_MS),
            (zmq.SNDHWM, _HWM),
            (zmq.RCVHWM, _HWM),
            (zmq.MAXMSGSIZE, codec.HARD_LIMIT_BYTES),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._bind(parse_address(self.address))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._reader = ZmqReader(self._socket, self._receive)
        self._leases = self._loop.create_task(self._watch_leases())

    async def close(self) -> None:
        """Ends the face; events that clients are reading still reach them."""
        self._leases.cancel()
        if self._retry is not None:
            self._retry.cancel()
        self._flush()
        if self._retry is not None:
            self._retry.cancel()
        self._reader.close()
        self._socket.close()
        await asyncio.to_thread(self._context.term)
        if self._unix is not None:
            self._unix.path.unlink(missing_ok=True)

    def send(self, peer: ZmqPeer, data: bytes, terminal: bool) -> None:
        if not peer.backlog:
            try:
                self._socket.send(peer.identity, _MORE)  # what may not block: the data follows it at once
                self._socket.send(data, _NOBLOCK)
                self._reader.poke()
                return
            except zmq.Again:
                pass
            except zmq.ZMQError as error:
                self._lose(peer, f"unreachable ({error})")
                return
        if peer.cut and not terminal:
            return
        peer.backlog.append((data, terminal))
        peer.backlog_bytes += len(data)
        self._waiting[peer] = None
        if len(peer.backlog) > BACKLOG_EVENTS or peer.backlog_bytes > BACKLOG_BYTES:
            self._cut_off(peer)
        self._schedule_retry()

    def _bind(self, address: TcpAddress | UnixAddress) -> None:
        try:
            if isinstance(address, UnixAddress):
                with claim_unix_socket(address):
                    self._socket.bind(f"ipc://{address.path}")
                self._unix = address
                return
            port = "*" if address.port == 0 else address.port
            host = address.host
            if ":" in host:
                self._socket.setsockopt(zmq.IPV6, 1)
                host = f"[{host}]"
            self._socket.bind(f"tcp://{host}:{port}")
            self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            raise AddressError(f"cannot listen on {address}: {error.strerror}") from error

    def _receive(self, frames: list[bytes]) -> None:
        identity = frames[0]
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._peers[identity] = ZmqPeer(self, identity)
        peer.seen_at = time.monotonic()
        if len(frames) != 2:
            problem = f"a message is one frame, not {len(frames) - 1} (a REQ socket adds one: use a DEALER)"
            self._core.refuse(peer, ProtocolError("malformed", problem))
            return
        try:
            request = codec.decode_msgpack(frames[1])
        except ProtocolError as error:
            self._core.refuse(peer, error)
            return
        self._core.receive(peer, request)

    def _lose(self, peer: ZmqPeer, why: str) -> None:
        if peer.gone:
            return
        peer.gone = True
        peer.backlog.clear()
        self._waiting.pop(peer, None)
        if self._peers.get(peer.identity) is peer:
            del self._peers[peer.identity]
        # Soon, not now: a send can come from the midst of the server's own work on that peer.
        self._loop.call_soon(self._core.peer_gone, peer, why)

    def _cut_off(self, peer: ZmqPeer) -> None:
        if peer.cut and len(peer.backlog) > BACKLOG_EVENTS:
            self._lose(peer, "does not read, and its terminal events alone fill the backlog")
            return
        if peer.cut:
            return
        peer.cut = True
        peer.backlog = deque(entry for entry in peer.backlog if entry[1])
        peer.backlog_bytes = sum(len(data) for data, _ in peer.backlog)
        self._loop.call_soon(self._core.peer_cut_off, peer)

    def _schedule_retry(self) -> None:
        if self._retry is None and self._waiting:
            self._retry = self._loop.call_later(self._retry_s, self._flush)

    def _flush(self) -> None:
        self._retry = None
        moved = False
        for peer in list(self._waiting):
            moved = self._flush_peer(peer) or moved
        self._retry_s = _RETRY_S if moved else min(2 * self._retry_s, _RETRY_MAX_S)
        self._schedule_retry()

    def _flush_peer(self, peer: ZmqPeer) -> bool:
        sent = 0
        while peer.backlog and sent < _RETRY_BURST:
            data, _ = peer.backlog[0]
            try:
                self._socket.send_multipart((peer.identity, data), zmq.NOBLOCK)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                self._lose(peer, f"unreachable ({error})")
                break
            peer.backlog.popleft()
            peer.backlog_bytes -= len(data)
            sent += 1
        if not peer.backlog:
            peer.backlog_bytes = 0
            peer.cut = False
            self._waiting.pop(peer, None)
        if sent:
            self._reader.poke()
        return sent > 0

    async def _watch_leases(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(self._lease_s / 4)
                deadline = time.monotonic() - self._lease_s
                for peer in list(self._peers.values()):
                    if peer.seen_at < deadline:
                        self._expire(peer)

    def _expire(self, peer: ZmqPeer) -> None:
        # It may be there and only have forgotten to ping: it is told how its requests ended.
        self._core.peer_gone(peer, f"said nothing for {self._lease_s:.3g} s")
        self._lose(peer, "lease expired")
