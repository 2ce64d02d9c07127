"""`mstar-daemon` as a process of its own with real ranks, on Unix sockets, ended with SIGTERM and looked after."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil

WAIT_S = 60.0  # a bound, not a measure
DAEMON = (sys.executable, "-m", "mstar.daemon.cli")


class LiveDaemon:
    """A running daemon. Passes for a Server in the clients of tests.support.daemons."""

    def __init__(self, folder: Path, flags: Sequence[str], command: Sequence[str]) -> None:
        self.zmq_face = SimpleNamespace(address=f"ipc://{folder}/zmq")
        self.line_face = SimpleNamespace(address=f"unix:{folder}/line")
        self.log = folder / "log"
        faces = ["--bind", self.zmq_face.address, "--line", self.line_face.address]
        limits = ["--device", "cpu", "--threads", "1", "--drain-s", "0", "--log-level", "warning"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *faces, *limits, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},  # a model that is not there is looked for nowhere
            )

    def wait_until_it_listens(self) -> None:
        sockets = [
            Path(face.address.split(":", 1)[1].removeprefix("//")) for face in (self.zmq_face, self.line_face)
        ]
        deadline = time.monotonic() + WAIT_S
        while not all(path.exists() for path in sockets):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def live_daemon(*flags: str, command: Sequence[str] = DAEMON) -> Iterator[LiveDaemon]:
    """A daemon for the block. After it, the daemon has exited with 0 and nothing of it is left."""
    # not pytest's folder: a socket's path is short
    with tempfile.TemporaryDirectory(prefix="mstar-live-") as name:
        folder = Path(name)
        live = LiveDaemon(folder, flags, command)
        children: list[psutil.Process] = []
        try:
            live.wait_until_it_listens()
            yield live
            children = live.children()
            live.process.send_signal(signal.SIGTERM)
            assert live.process.wait(WAIT_S) == 0, live.log.read_text()
            assert [child for child in children if child.is_running()] == []
            assert [path.name for path in folder.iterdir()] == ["log"]
            assert list(Path(tempfile.gettempdir()).glob(f"mstar-{live.process.pid}-*")) == []
        finally:
            if live.process.poll() is None:  # its ranks end with it
                live.process.kill()
                live.process.wait()
