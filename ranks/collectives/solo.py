"""The mesh of one rank: nothing to wait for."""

from __future__ import annotations

import torch


class SoloCollective:
    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        return x

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return
