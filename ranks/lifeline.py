"""A rank never outlives its daemon, and a rank that hangs is found: what the main loop cannot see to itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from mstar.ranks.messages import Heartbeat, pack

_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Ends this process when the daemon's does: at EOF of stdin, and by the kernel's signal where there is one.

    The signal ends a stopped process too. Ctrl-C and SIGTERM, which a terminal or a service manager sends to the
    whole group, are the daemon's business: it drains, then stops its ranks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_at_eof, name="lifeline", daemon=True).start()


def _exit_at_eof() -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    os._exit(1)


class Pulse:
    """What the main loop last promised. The heartbeat beats only while the promise holds."""

    def __init__(self) -> None:
        self._until = time.monotonic()
        self.running = 0
        self.waiting = 0

    def within(self, limit_s: float) -> None:
        """The main loop is alive, and says so again within `limit_s`."""
        self._until = time.monotonic() + limit_s

    @property
    def until(self) -> float:
        """What is promised, of time.monotonic()."""
        return self._until

    def keep(self, until: float) -> None:
        """A promise from before a wait, which promised less, holds again."""
        self._until = max(self._until, until)

    @property
    def fresh(self) -> bool:
        return time.monotonic() < self._until


def start_heartbeat(
    pulse: Pulse,
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    rank: int,
    interval_s: float,
    memory_bytes: Callable[[], int],
) -> Callable[[], None]:
    """Sends Heartbeats from a thread with its own socket; returns what ends it (before the context ends).

    memory_bytes: what the rank holds now, called on that thread.
    """
    ended = threading.Event()

    def beat_on() -> None:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        while not ended.wait(interval_s):
            if pulse.fresh:
                beat = Heartbeat(rank, memory_bytes(), pulse.running, pulse.waiting)
                # a full line means that the daemon is behind: the next beat says the same
                with contextlib.suppress(zmq.Again):
                    socket.send(pack(beat), zmq.NOBLOCK)
        socket.close()

    thread = threading.Thread(target=beat_on, name="heartbeat", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
