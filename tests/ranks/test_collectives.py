"""Collectives between real processes: sums against float64, the same bits everywhere, and bounded waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from mstar.ranks.collectives import SoloCollective, shm
from mstar.ranks.messages import SHM_REGION_BYTES

HERE = Path(__file__).resolve().parent


def spawn(checks: str, backend: str, size: int, tmp_path: Path, timeout_s: float) -> list[subprocess.Popen]:
    """Ranks of one mesh, each a fresh interpreter, running functions of collective_checks.py in order."""
    if backend == "shm" and shm.load() is None:
        pytest.skip("no C compiler")
    with tempfile.TemporaryFile() as region:
        os.ftruncate(region.fileno(), SHM_REGION_BYTES)
        command = [sys.executable, str(HERE / "collective_checks.py"), checks, backend, str(size)]
        command += [str(region.fileno()), str(tmp_path), str(timeout_s)]
        return [
            subprocess.Popen(
                [*command, str(rank)],
                pass_fds=[region.fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]


@pytest.mark.parametrize(("backend", "size"), [("shm", 2), ("shm", 4), ("gloo", 2)])
def test_sums_are_right_the_same_bits_on_every_rank_and_ranks_stay_in_step(
    backend: str, size: int, tmp_path: Path
) -> None:
    """4 ranks have fewer cores than ranks on a small machine."""
    checks = "sums,rounding,many" if backend == "shm" else "sums"
    processes = spawn(checks, backend, size, tmp_path, timeout_s=60)
    results = [process.communicate(timeout=100) for process in processes]
    for process, (_, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err
    assert len({out for out, _ in results}) == 1


def test_killed_rank_ends_the_others_wait_by_the_bound(tmp_path: Path) -> None:
    # the bound holds for their first meeting too, and interpreters with torch start seconds apart on a busy machine
    processes = spawn("forever", "shm", 3, tmp_path, timeout_s=8)
    assert processes[1].stdout is not None
    assert processes[1].stdout.readline() == "met\n"
    processes[1].send_signal(signal.SIGKILL)
    for rank in (0, 2):
        out, err = processes[rank].communicate(timeout=60)
        assert processes[rank].returncode == 0, err
        assert f"rank {rank} waited 8 s for rank" in out
    processes[1].communicate()


def test_one_rank_is_alone() -> None:
    x = torch.ones(3)
    solo = SoloCollective()
    assert solo.all_reduce(x) is x
    assert solo.all_gather(x).shape == (1, 3)
