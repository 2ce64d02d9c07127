"""How Triton kernels are launched here: whether they can be, and as what."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels may start before the one before them ended: programmatic dependent launch, Hopper on."""
    if interpreted() or device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def runs_gluon(device: torch.device) -> bool:
    """Whether kernels run that are written in Gluon for Hopper's units, which other GPUs have not."""
    if interpreted() or device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def launch_options(device: torch.device) -> dict[str, Any]:
    """PDL, and the launch option that goes with it; a kernel launched so waits with gdc_wait before it reads."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(device) else {"PDL": False}
