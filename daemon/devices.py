"""Which kind of device the ranks will use, found out without importing torch.

The daemon holds no device state, and importing torch costs seconds that a start does not
have; torch's own version file says what it was built for.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Literal

Platform = Literal["cpu", "cuda", "rocm"]


def detect_platform(device: str) -> Platform:
    """The platform behind `device` ("auto", "cpu" or "cuda"; ROCm's torch calls its devices "cuda" too)."""
    if device == "cpu":
        return "cpu"
    build = _torch_build()
    if device == "cuda":
        return "rocm" if build == "rocm" else "cuda"
    if build == "cuda" and _any_device("/dev/nvidia[0-9]*") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        return "cuda"
    if build == "rocm" and _any_device("/dev/kfd"):
        return "rocm"
    return "cpu"


def usable_cores() -> int:
    """CPU cores that this process may use: the affinity mask, cut by a cgroup's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def _any_device(pattern: str) -> bool:
    path = Path(pattern)
    return any(path.parent.glob(path.name))


def _torch_build() -> Platform:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "cpu"
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return "cpu"
    for name, platform in (("hip", "rocm"), ("cuda", "cuda")):
        if re.search(rf"^{name}\b[^=]*= *'", text, re.MULTILINE):
            return platform  # type: ignore[return-value]
    return "cpu"
