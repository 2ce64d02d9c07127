"""How much of a multiprocessor's first cache a kernel asks to have as shared memory: its carve-out.

One memory is both, and is divided anew only while nothing runs there: a kernel that wants another division waits for
the one before to leave, and what dependent launch would have hidden is lost. Triton asks for all of it for each
kernel of more than 48 KiB; those after it then find little cache left, and those that wait for their first loads are
slow.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, of CUDA's driver API
RESERVED = 1 << 10  # bytes that each program takes beside its own

_asked: dict[int, int] = {}  # by function, which lives as long as its process


def least_carveout(shared: int, whole: int) -> int:
    """Percent of a multiprocessor's shared memory that hold one program of `shared` bytes; whole: at most, bytes."""
    return min(100, -(-100 * (shared + RESERVED) // whole))


def prefer_carveout(launched: Any, percent: int | None = None) -> None:
    """From the next launch on, asks for so much of the multiprocessor's shared memory at least, or for one program's.

    launched: what a launch gave, a compiled kernel; nothing happens before it is loaded, or without CUDA. A
    preference: CUDA may divide otherwise, and a refusal costs time alone.
    """
    function = getattr(launched, "function", None)
    if function is None or torch.version.hip:
        return
    if percent is None:
        percent = least_carveout(launched.metadata.shared, _whole(torch.cuda.current_device()))
    if _asked.get(function) != percent:
        _asked[function] = percent
        refused = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, percent)
        if refused:
            log.warning(
                "%s: a carve-out of %d %% was refused: CUDA error %d", launched.name, percent, refused
            )


@functools.cache
def _whole(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # loaded already: torch runs on it
