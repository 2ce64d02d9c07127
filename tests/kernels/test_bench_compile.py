"""Candidates compiled before they are timed, in threads in place of processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mstar.kernels.bench import compile as bench
from mstar.kernels.registry import GemmKey, KernelChoice

KEY = GemmKey("norm", 1, 8224, 1024, "bf16")
JOBS = [(KEY, KernelChoice("fma", (("BLOCK_N", n),))) for n in (4, 8, 16)]


@pytest.fixture
def slow(monkeypatch):
    """A pool of one worker whose jobs take until they are let go, and which of them began and ended."""
    begun, ended, go = [], [], threading.Event()

    def run_once(key, choice, known_tiles):
        begun.append(choice)
        go.wait(30.0)
        ended.append(choice)
        return "too slow"

    monkeypatch.setattr(bench, "run_once", run_once)
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    pool = bench.CompilePool(1)
    yield pool, begun, ended, go
    go.set()
    pool.close()


def test_what_runs_when_the_time_is_over_ends_before_anything_is_timed(slow):
    pool, begun, ended, go = slow
    threading.Timer(0.3, go.set).start()
    pool.compile(JOBS, 0.05)
    assert begun == ended == [JOBS[0][1]]
    assert pool.failures == {JOBS[0]: "too slow"}


def test_what_does_not_end_is_said(slow, monkeypatch, caplog):
    pool, begun, ended, _ = slow
    monkeypatch.setattr(bench, "BEGUN_S", 0.05)
    pool.compile(JOBS, 0.05)
    assert len(begun) == 1 and ended == []
    assert [record.getMessage()[:40] for record in caplog.records] == [
        "1 candidates are still being compiled: w"
    ]


def test_in_no_time_nothing_is_compiled(slow):
    pool, begun, _, _ = slow
    pool.compile(JOBS, 0.0)
    assert begun == [] and pool.failures == {}
