"""How much of a multiprocessor's first cache a kernel asks to have as shared memory: its carve-out.

One memory is both, and CUDA divides it for each kernel; where a kernel behind wants another division, the start of
that one may wait for the end of this one ("may insert a synchronization point", says CUDA's driver API of preferences
that differ). Left to itself, a kernel of much shared memory gets more than it needs, and linears behind it that read
through the first cache are slower: docs/benchmarks.md has what was measured.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch

log = logging.getLogger(__name__)

PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, of CUDA's driver API
RESERVED = 1 << 10  # bytes that each program takes beside its own

# What each compiled kernel asked for. Triton may unload one, and CUDA give its function's place to another.
_asked: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()


def least_carveout(shared: int, most: int) -> int:
    """Percent of a multiprocessor's shared memory that one program of `shared` bytes takes; most: all of it, bytes."""
    return min(100, -(-100 * (shared + RESERVED) // most))


def prefer_carveout(launched: Any, percent: int | None = None) -> None:
    """From a function's next launch on, asks for so much shared memory, or, at None, for what one program takes.

    launched: what a launch gave, a compiled kernel; nothing happens before it is loaded, or without CUDA. percent: of
    what a multiprocessor may have; CUDA takes the next division up (an H200's: 0, 8, 16, 32, 64, 100, 132, 164, 196
    and 228 KiB), may take another, and a refusal costs time alone.
    """
    function = getattr(launched, "function", None)
    if function is None or torch.version.hip or _asked.get(launched, -1) == percent:
        return
    _asked[launched] = percent
    if percent is None:
        percent = least_carveout(launched.metadata.shared, _most(torch.cuda.current_device()))
    refused = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, percent)
    if refused:
        log.warning("%s: a carve-out of %d %% was refused: CUDA error %d", launched.name, percent, refused)


@functools.cache
def _most(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # loaded already: torch runs on it
