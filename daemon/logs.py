"""Logging to stderr that never blocks: a thread writes, and a reader that stalls costs lines, not service."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Iterator

_QUEUE_LINES = 10_000


class _DroppingHandler(logging.handlers.QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """As it is: the writer formats it, and nobody waits for that. What is logged must not change afterwards."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


@contextlib.contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """`mstar`'s log on stderr while inside. level: debug, info, warning or error."""
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_QUEUE_LINES)
    listener = logging.handlers.QueueListener(lines, writer)
    handler = _DroppingHandler(lines)
    root = logging.getLogger()
    logging.getLogger("mstar").setLevel(level.upper())
    root.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        # Not for ever: stderr may be a pipe that nobody reads.
        if _drained(lines):
            listener.stop()


def _drained(lines: queue.Queue[logging.LogRecord]) -> bool:
    """Whether all lines are taken, within a second."""
    for _ in range(50):
        if lines.empty():
            return True
        time.sleep(0.02)
    return False
