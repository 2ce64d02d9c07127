"""Candidates compiled before they are timed, in threads in place of processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from mstar.kernels.bench import compile as bench
from mstar.kernels.registry import GemmKey, KernelChoice

KEY = GemmKey("norm", 1, 8224, 1024, "bf16")
JOBS = [(KEY, KernelChoice("fma", (("BLOCK_N", n),))) for n in (4, 8, 16)]


def test_what_has_begun_when_the_time_is_over_ends_before_anything_is_timed(monkeypatch):
    begun, ended = [], []

    def run_once(key, choice, known_tiles):
        begun.append(choice)
        threading.Event().wait(0.3)
        ended.append(choice)
        return "too slow"

    monkeypatch.setattr(bench, "run_once", run_once)
    pool = bench.CompilePool.__new__(bench.CompilePool)
    pool._pool, pool.failures = ThreadPoolExecutor(1), {}
    pool.compile(JOBS, 0.05)
    assert begun == ended == [JOBS[0][1]]
    assert pool.failures == {JOBS[0]: "too slow"}
    pool.close()
