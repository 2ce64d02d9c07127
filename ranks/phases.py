"""How long the parts of a step take: the latest ones, kept always, since adding a figure costs less than asking."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

KEPT = 512  # steps that the percentiles are over


class Phases:
    """Durations by phase. `plan`, `launch`, `wait` (for the device) and `send` are the host's parts of a step."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[float]] = {}

    def add(self, phase: str, seconds: float) -> None:
        self._kept.setdefault(phase, deque(maxlen=KEPT)).append(seconds)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds what the block takes."""
        begun = time.perf_counter()
        yield
        self.add(phase, time.perf_counter() - begun)

    def report(self) -> dict[str, list[float]]:
        """[p50, p95, mean] in microseconds, and the count, of each phase."""
        result = {}
        for phase, kept in self._kept.items():
            ordered = sorted(kept)
            last = len(ordered) - 1
            p50, p95 = ordered[last // 2], ordered[round(last * 0.95)]
            figures = (p50, p95, sum(ordered) / len(ordered))
            result[phase] = [*(round(1e6 * figure, 1) for figure in figures), float(len(ordered))]
        return result
