"""The sockets between ranks and to the daemon. No send blocks without a bound, and waits keep the pulse."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgpack
import zmq

from mstar.ranks import plan as plans
from mstar.ranks.lifeline import Pulse
from mstar.ranks.messages import Event
from mstar.ranks.messages import pack as pack_event

# A peer that takes nothing for this long hangs; the supervisor finds a stopped one by its heartbeat before.
SEND_LIMIT_S = 60.0
POLL_S = 1.0  # how often a waiting loop shows that it is alive
WAIT_LIMIT_S = 10.0  # what it promises meanwhile

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class LineDown(RuntimeError):
    """The other end does not take what it is sent."""


@dataclass(frozen=True, slots=True)
class Shake:
    """A follower can run: its shard is loaded, and it listens for plans."""

    rank: int
    budget_bytes: int  # what it may take for caches


def open_socket(context: Context, kind: int, address: str, *, bind: bool = False) -> Socket:
    """A socket that keeps unsent messages for 2 s when it closes."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)  # ms; peers of a load start together and bind in any order
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


def send_bounded(socket: Socket, data: bytes, pulse: Pulse, what: str) -> None:
    """Sends at once if the other end has room, else waits up to SEND_LIMIT_S, then raises LineDown."""
    deadline, promised = time.monotonic() + SEND_LIMIT_S, pulse.until
    while True:
        try:
            socket.send(data, zmq.NOBLOCK)
            pulse.keep(promised)
            return
        except zmq.Again:
            pulse.within(WAIT_LIMIT_S)
            if time.monotonic() > deadline:
                raise LineDown(f"{what} took nothing for {SEND_LIMIT_S:g} s") from None
            socket.poll(int(POLL_S * 1000), zmq.POLLOUT)


def receive(socket: Socket, pulse: Pulse) -> bytes:
    """The next message, however long it takes."""
    promised = pulse.until
    while True:
        pulse.within(WAIT_LIMIT_S)
        if socket.poll(int(POLL_S * 1000)):
            pulse.keep(promised)
            return socket.recv()


class EventLine:
    """This rank's events to the daemon."""

    def __init__(self, context: Context, address: str, pulse: Pulse) -> None:
        self._socket = open_socket(context, zmq.PUSH, address)
        self._pulse = pulse

    def send(self, event: Event) -> None:
        send_bounded(self._socket, pack_event(event), self._pulse, "the daemon")

    def close(self) -> None:
        self._socket.close()


class LeaderLine:
    """Rank 0's end towards the followers."""

    def __init__(self, context: Context, run_dir: Path, size: int, pulse: Pulse) -> None:
        self._pulse = pulse
        ranks = range(1, size)
        self._plans = {r: open_socket(context, zmq.PUSH, _plans(run_dir, r), bind=True) for r in ranks}
        self._shakes = open_socket(context, zmq.PULL, _shakes(run_dir), bind=True) if size > 1 else None

    def wait_for_followers(self) -> list[Shake]:
        """Returns when every follower has shaken hands: from then on no plan is lost."""
        shakes: dict[int, Shake] = {}
        while self._shakes is not None and len(shakes) < len(self._plans):
            shake = Shake(*msgpack.unpackb(receive(self._shakes, self._pulse)))
            shakes[shake.rank] = shake
        return list(shakes.values())

    def send(self, message: plans.Message) -> None:
        """Sends to every follower, in order."""
        if self._plans:
            data = plans.pack(message)
            for rank, socket in self._plans.items():
                send_bounded(socket, data, self._pulse, f"rank {rank}")

    def close(self) -> None:
        for socket in self._plans.values():
            socket.close()
        if self._shakes is not None:
            self._shakes.close()


class FollowerLine:
    """A follower's end towards rank 0."""

    def __init__(self, context: Context, run_dir: Path, rank: int, pulse: Pulse) -> None:
        self._rank = rank
        self._pulse = pulse
        self._plans = open_socket(context, zmq.PULL, _plans(run_dir, rank))
        self._shakes = open_socket(context, zmq.PUSH, _shakes(run_dir))

    def shake(self, budget_bytes: int) -> None:
        send_bounded(self._shakes, msgpack.packb([self._rank, budget_bytes]), self._pulse, "rank 0")

    def receive(self) -> plans.Message:
        """The next message of rank 0, however long it takes."""
        return plans.unpack(receive(self._plans, self._pulse))

    def close(self) -> None:
        self._plans.close()
        self._shakes.close()


def _plans(run_dir: Path, rank: int) -> str:
    return f"ipc://{run_dir}/plans-{rank}"


def _shakes(run_dir: Path) -> str:
    return f"ipc://{run_dir}/shakes"
