"""How ranks meet: one interface, and a backend for what the mesh runs on (alone, shared memory, nccl, gloo).

`connect` chooses the same backend on every rank: it looks only at what all of them see alike.
"""

from __future__ import annotations

from pathlib import Path

import torch

from mstar.ranks.collectives import shm
from mstar.ranks.collectives.base import Collective, CollectiveTimeout
from mstar.ranks.collectives.shm import ShmCollective
from mstar.ranks.collectives.solo import SoloCollective

__all__ = ["Collective", "CollectiveTimeout", "ShmCollective", "SoloCollective", "connect"]


def connect(
    rank: int, size: int, device: torch.device, run_dir: Path, shm_fd: int | None
) -> tuple[Collective, str]:
    """This rank's end of the mesh, and which backend it is. Blocks until the others come (shm does not).

    shm_fd: the supervisor's region of SHM_REGION_BYTES, for CPU ranks.
    """
    if size == 1:
        return SoloCollective(), "solo"
    if device.type == "cpu" and shm_fd is not None:
        library = shm.load()
        if library is not None:
            return ShmCollective(library, shm_fd, rank, size), "shm"
    # torch.distributed takes about 0.3 s to import: only where it is used.
    from mstar.ranks.collectives.torch_dist import TorchCollective

    # nccl refuses two ranks on one GPU
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= size else "gloo"
    return TorchCollective(backend, run_dir, rank, size, device), backend
