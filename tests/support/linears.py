"""The formula of a linear layer in float64, which kernels are held to."""

from __future__ import annotations

import torch


def exact(kind: str, x, weight, norm, eps, residual) -> torch.Tensor:
    """The formula in float64, nothing rounded."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    y = x @ weight.double().T
    if kind == "gated":
        gate, up = y.chunk(2, -1)
        return gate / (1 + (-gate).exp()) * up
    return y if residual is None else y + residual.double()
