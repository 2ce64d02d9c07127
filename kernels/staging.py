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
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
