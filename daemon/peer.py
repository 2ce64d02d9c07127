"""A connection as the rest of the daemon sees it, whichever face it came through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from mstar.daemon.protocol import Event, ProtocolError, Request

# Events that wait for one client, past the sockets' own buffers; then it is cut off.
BACKLOG_EVENTS = 4096
BACKLOG_BYTES = 8 * 2**20


class Peer(ABC):
    """One client's connection."""

    __slots__ = ("gone", "name")

    def __init__(self, name: str) -> None:
        self.name = name  # for the log
        self.gone = False  # nothing is sent any more

    @abstractmethod
    def send(self, event: Event) -> None:
        """Hands an event over. Never blocks, never raises; to a peer that is gone it does nothing."""


class Core(Protocol):
    """What a face tells the server."""

    def receive(self, peer: Peer, request: Request) -> None:
        """A request arrived."""

    def refuse(self, peer: Peer, error: ProtocolError) -> None:
        """Something arrived that is no request."""

    def peer_gone(self, peer: Peer, why: str) -> None:
        """The connection ended, or its lease: its requests are aborted."""

    def peer_cut_off(self, peer: Peer) -> None:
        """The client does not read: its requests end with an error."""
