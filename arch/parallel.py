"""What a layer needs of the other ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from mstar.kernels.ops import Ops, Packed


class Mesh(Protocol):
    """The part of a collective that layers use; `size` 1 makes every call a no-op."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks in place; every rank gets the same bits."""
        ...


def row_parallel(
    ops: Ops, mesh: Mesh, x: torch.Tensor, weight: Packed, residual: torch.Tensor
) -> torch.Tensor:
    """residual + x W^T with W cut along its inputs. x: [rows, k_local]; residual: [rows, n], model dtype.

    Parts meet in float32 and are rounded once, as on one rank.
    """
    if mesh.size == 1:
        return ops.linear(x, weight, residual=residual)
    part = mesh.all_reduce(ops.linear(x, weight, out_f32=True))
    return residual + part.to(residual.dtype)
