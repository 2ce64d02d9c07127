"""Numbers from the host to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def staged(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` on the device, in stream order.

    From pinned memory, which torch hands out again only after the copy's event: a copy from pageable memory would
    make the host wait for everything before it.
    """
    return _on_host(values, dtype, device).to(device, non_blocking=True)


def stage_into(to: torch.Tensor, values: Sequence[Any]) -> None:
    """`staged`, into a tensor that is there."""
    to.copy_(_on_host(values, to.dtype, to.device), non_blocking=True)


def _on_host(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, pin_memory=device.type != "cpu")
