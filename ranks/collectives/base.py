"""The few operations through which ranks meet. Every rank calls the same ones in the same order."""

from __future__ import annotations

from typing import Protocol

import torch


class CollectiveTimeout(RuntimeError):
    """Another rank did not come within the bound: it is gone or hangs, and this one must not go on alone."""


class Collective(Protocol):
    """Operations over all ranks of a mesh. Tensors have the same shape and dtype on every rank."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x in place over the ranks, in float32, and returns it: the same bits on every rank.

        x: contiguous, float32, bfloat16 or float16.
        """

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape], every rank's x in rank order. Any dtype."""

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Fills contiguous x with the root's, in place, and returns it. Any dtype."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def close(self) -> None:
        """Gives back what the collective holds; nothing may be called after it."""
