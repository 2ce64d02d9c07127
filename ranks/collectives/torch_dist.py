"""torch.distributed behind the interface: nccl (rccl on ROCm) for GPUs, gloo for the rest."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Covers ranks that load at different speeds before they first meet.
TIMEOUT_S = 600.0


class TorchCollective:
    """The default process group of this process, which meets the others through a file in `run_dir`."""

    def __init__(
        self,
        backend: str,
        run_dir: Path,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.rank, self.size = rank, size
        self._backend = backend
        # Ranks share one machine. Gloo would otherwise look its host name up, which may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            backend,
            init_method=f"file://{run_dir.resolve()}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if backend == "nccl" else None,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._backend == "gloo" and x.dtype != torch.float32:
            # Gloo would round at every hop.
            wide = x.float()
            dist.all_reduce(wide)
            return x.copy_(wide)
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out.view(-1), x.view(-1))
        return out

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        dist.broadcast(x, root)
        return x

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()
