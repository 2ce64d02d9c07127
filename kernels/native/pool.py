"""The native operations' threads and what Python needs to call them."""

from __future__ import annotations

from mstar.kernels.native.build import load_library


def set_threads(count: int) -> None:
    """Uses `count` threads (the caller's included) for native operations of this process from now on."""
    library = load_library("cpu_ops")
    if library is not None:
        library.mstar_set_threads(count)
