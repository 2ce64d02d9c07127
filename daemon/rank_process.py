"""One rank's process: its pipes, its last lines of output, and its exit.

Built on `subprocess` and a pidfd: `asyncio.subprocess` ties the end of a process to the end
of its pipes, which a grandchild can hold open for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence

log = logging.getLogger("mstar.rank")

_TAIL_LINES = 20
_EXIT_POLL_S = 0.05  # where there are no pidfds (macOS, some sandboxes)


class RankProcess:
    """Started by the constructor, in a session of its own so that Ctrl-C reaches the daemon alone.

    `on_exit` is called once, on the loop, after the process was reaped and what is left of
    its group was killed.
    """

    def __init__(
        self,
        rank: int,
        argv: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        on_exit: Callable[[RankProcess], None],
    ) -> None:
        self.rank = rank
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,  # held open; its end tells the rank that the daemon is gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            # OpenMP threads that spin while they wait would take the cores from the other ranks.
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        assert self._popen.stdout is not None
        self._output_fd = self._popen.stdout.fileno()
        self._partial = b""
        os.set_blocking(self._output_fd, False)
        self._loop.add_reader(self._output_fd, self._read_output)
        self._pidfd: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(self._popen.pid)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._check_exit)
        else:
            self._loop.call_later(_EXIT_POLL_S, self._poll_exit)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._popen.returncode

    def kill(self) -> None:
        """SIGKILL to the process and whatever it started; a stopped process ends too."""
        if self._popen.returncode is None:
            self._kill_group()

    async def wait(self) -> int:
        await self._exited.wait()
        assert self._popen.returncode is not None
        return self._popen.returncode

    def describe_exit(self) -> str:
        """How it ended, as a sentence's end, with the last line that it said."""
        code = self._popen.returncode
        if code is None:
            return "still runs"
        if code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        else:
            how = f"exited with code {code}"
        return f"{how}; its last words: {self.tail[-1]}" if self.tail and code > 0 else how

    def _poll_exit(self) -> None:
        self._check_exit()
        if self._popen.returncode is None:
            self._loop.call_later(_EXIT_POLL_S, self._poll_exit)

    def _check_exit(self) -> None:
        if self._exited.is_set() or self._popen.poll() is None:
            return
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._kill_group()  # children that it left behind
        self._read_output()
        self._close_output()
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        self._exited.set()
        self._on_exit(self)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _read_output(self) -> None:
        if self._popen.stdout is None or self._popen.stdout.closed:
            return
        for _ in range(16):  # 1 MiB a turn, so that a rank that floods its output delays nobody
            try:
                data = os.read(self._output_fd, 65536)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._close_output()
                return
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._partial = self._partial[-65536:]
            for line in lines:
                self._say(line)

    def _close_output(self) -> None:
        if self._popen.stdout is None or self._popen.stdout.closed:
            return
        self._loop.remove_reader(self._output_fd)
        self._popen.stdout.close()
        if self._partial:
            self._say(self._partial)
            self._partial = b""

    def _say(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            self.tail.append(text[:1000])
            log.info("[rank %d] %s", self.rank, text)
