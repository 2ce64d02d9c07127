"""Every Triton kernel compiles ahead of time, in a process of its own: this one may run the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_all_kernels_compile(target):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "mstar.kernels.aot", "--target", target],
        env=env,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
