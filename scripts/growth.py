"""Whether a figure that is sampled over time has grown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def thirds(steady: Sequence[int]) -> tuple[int, int]:
    """The medians of the first and the last third of at least three samples."""
    third = len(steady) // 3
    return int(statistics.median(steady[:third])), int(statistics.median(steady[-third:]))
