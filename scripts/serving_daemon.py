"""A daemon of one's own for a benchmark: started on private sockets, waited for, ended in order."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from mstar.scripts.serving_load import BenchError, DaemonLink

STOP_S = 30.0
OWN_FLAGS = ("--bind", "--line", "--stdio")  # a daemon that is launched here is found by them


@contextmanager
def running_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the block, ended after it, and when SIGTERM ends this one: then the block gets SystemExit.

    options: of Popen. In another thread than the main one SIGTERM is left as it is.
    """
    came = inside = False

    def handle(number: int, frame: object) -> None:
        nonlocal came
        came = True
        if inside:  # elsewhere the process is being started, or ended already
            raise SystemExit(128 + number)

    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, handle) if here else None
    try:
        process = subprocess.Popen(command, **options)
        try:
            inside = True
            if came:
                raise SystemExit(128 + signal.SIGTERM)
            yield process
        finally:
            inside = False
            _stop(process)
        if came:  # meanwhile
            raise SystemExit(128 + signal.SIGTERM)
    finally:
        if here:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def launched_daemon(
    model: str, flags: Sequence[str] = (), ready_s: float = 300.0, line: str = "off"
) -> Iterator[tuple[DaemonLink, dict[str, Any]]]:
    """Runs `mstar-daemon --model MODEL FLAGS…` for the block; yields a link and what `loaded` said.

    line: where its line face listens.
    The daemon's log goes to a temporary file, whose end is in the BenchError of a daemon that does not
    come up, or that was given sockets among its flags.
    """
    own = [flag for flag in flags if flag.split("=")[0] in OWN_FLAGS]
    if own:
        raise BenchError(f"this script's daemon has sockets of its own: leave {', '.join(own)} out")
    with tempfile.TemporaryDirectory(prefix="mstar-bench-") as folder:
        address = f"ipc://{folder}/zmq"
        log_path = Path(folder) / "log"
        command = [sys.executable, "-m", "mstar.daemon.cli", "--model", model]
        command += ["--bind", address, "--line", line, *flags]
        with (
            log_path.open("wb") as log,
            running_process(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
            closing(DaemonLink(address)) as link,
        ):
            yield link, _wait_ready(link, process, log_path, ready_s)


@contextmanager
def running_daemon(address: str) -> Iterator[tuple[DaemonLink, dict[str, Any]]]:
    """A link to a daemon that someone else runs, and what its `loaded` said."""
    link = DaemonLink(address)
    try:
        status = link.status(timeout_s=5.0)
        if status is None:
            raise BenchError(f"no daemon answers at {address}")
        if status["state"] != "ready":
            raise BenchError(f"the daemon at {address} has no model ready: its state is {status['state']}")
        yield link, status["loaded"]
    finally:
        link.close()


def _wait_ready(
    link: DaemonLink, process: subprocess.Popen[bytes], log: Path, ready_s: float
) -> dict[str, Any]:
    deadline = time.monotonic() + ready_s
    reason = f"not ready after {ready_s:.0f} s"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            reason = f"it exited with {process.returncode}"
            break
        status = link.status(timeout_s=1.0)
        if status is not None and status["state"] == "ready":
            loaded: dict[str, Any] = status["loaded"]
            return loaded
        if status is not None and status["state"] == "failed":
            reason = str(status.get("reason"))
            break
        time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise BenchError(f"the daemon did not come up: {reason}\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
