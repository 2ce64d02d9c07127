"""Kernels compiled side by side before they are needed: one by one, a cold start of a load takes over a minute."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

log = logging.getLogger(__name__)

MOST_THREADS = 16
TURN_S = 1.0  # how often a wait says how far it is


def compile_threads() -> ThreadPoolExecutor:
    """Threads to compile in: Triton's compiler leaves Python's lock for most of its time."""
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))


def compile_together(bodies: Iterable[Callable[[], object]], progress: Callable[[int, int], None]) -> None:
    """Calls the bodies with launches that compile and do not run, many at once; returns when all are compiled.

    What kernels would have written stays as it is there: a body may hand it on, but not index by it. A kernel that
    does not compile fails where it is launched later. progress: told how many of how many are compiled, at least
    every second, and nothing where all were.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction
    except ImportError as error:  # they are Triton's own: another version may have them elsewhere
        log.warning("kernels are compiled one by one: %s", error)
        return

    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):  # type: ignore[no-untyped-def]
        # the mode is this thread's: launches of other threads run
        return run(self, *args, grid=grid, warmup=warmup or active_mode.get() is mode, **kwargs)

    with compile_threads() as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)
        with mode:
            JITFunction.run = compile_only
            try:
                for body in bodies:
                    body()
                    if mode.raw_futures:
                        progress(0, len(mode.raw_futures))
            finally:
                JITFunction.run = run
            left = set(mode.raw_futures)
            while left:
                _, left = wait(left, timeout=TURN_S)
                progress(len(mode.raw_futures) - len(left), len(mode.raw_futures))
