"""Linear layers without bias, their prologue (norm of the input) and epilogue (residual, gate)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mstar.kernels.norm import rms_norm


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    out_f32: bool = False,
) -> torch.Tensor:
    """y = norm(x) W^T (+ residual): the reference.

    x: [rows, k]; weight: [n, k]; norm: [k] float32, the weight plus one; residual: [rows, n].
    Returns [rows, n] in x's dtype, or float32 (sums never rounded to x's dtype) with `out_f32`.
    """
    if norm is not None:
        x = rms_norm(x, norm, eps)
    if out_f32:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), weight.float())
    y = F.linear(x, weight)
    return y if residual is None else residual + y


def gated_linear(x: torch.Tensor, weight: torch.Tensor, *, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """silu(gate) * up of norm(x): the reference.

    x: [rows, k]; weight: [2 * n, k], gate's rows then up's; norm: [k] float32. Returns [rows, n] in x's dtype.
    """
    gate, up = F.linear(rms_norm(x, norm, eps), weight).chunk(2, -1)
    return F.silu(gate) * up
