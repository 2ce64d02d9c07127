"""Programs of one launch that count themselves: the one that comes last may read what the others stored."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrives_last(counter, programs):
    """Whether all others of so many programs have been here before, and what they stored may be read.

    counter: of these programs alone, int32, 0 before the first of them. Loads go past the first cache, which other
    programs' stores do not reach.
    """
    tl.debug_barrier()  # every thread's stores come before the one thread's count
    return tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
