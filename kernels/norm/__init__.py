"""Root-mean-square norm with a zero-centred weight."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dim, in float32, then cast to x's dtype.

    x: [..., dim]; weight: [dim] float32, the checkpoint's weight plus one where it is zero-centred.
    """
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
