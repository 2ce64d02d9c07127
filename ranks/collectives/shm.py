"""CPU ranks of one machine over shared memory: about 5 us an operation where gloo takes 300."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from mstar.kernels.native import load_library
from mstar.ranks.collectives.base import CollectiveTimeout
from mstar.ranks.messages import SHM_REGION_BYTES

# A rank that lags behind by this has hung; one that died is found much earlier, by the supervisor.
TIMEOUT_S = 60.0


def load() -> ctypes.CDLL | None:
    """kernels/native/shm_collective.c with its signatures, or None where it cannot be built."""
    library = load_library("shm_collective")
    if library is None:
        return None
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.shm_group_bytes.restype = ctypes.c_int64
    library.shm_group_init.argtypes = [address, address, count, number, number, number, ctypes.c_double]
    library.shm_late_rank.argtypes = [address]
    library.shm_barrier.argtypes = [address]
    library.shm_all_reduce_f32.argtypes = [address, address, count]
    library.shm_all_reduce_bf16.argtypes = [address, address, count]
    library.shm_all_gather.argtypes = [address, address, address, count]
    library.shm_broadcast.argtypes = [address, address, count, number]
    return library


class ShmCollective:
    """One rank's end of a zeroed region of SHM_REGION_BYTES that all ranks of the load map.

    fd: of the region; it is mapped here and may be closed by the caller afterwards.
    timeout_s: how long an operation waits for another rank before CollectiveTimeout.
    """

    def __init__(
        self, library: ctypes.CDLL, fd: int, rank: int, size: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._library = library
        self._region = mmap.mmap(fd, SHM_REGION_BYTES)
        self._view = ctypes.c_char.from_buffer(self._region)
        self._memory = ctypes.create_string_buffer(library.shm_group_bytes())
        self._group = ctypes.addressof(self._memory)
        base = ctypes.addressof(self._view)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if library.shm_group_init(self._group, base, SHM_REGION_BYTES, rank, size, cores, timeout_s):
            raise ValueError(f"a shared region of {SHM_REGION_BYTES} bytes does not serve {size} ranks")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        _check(x)
        if x.dtype == torch.bfloat16:
            self._done(self._library.shm_all_reduce_bf16(self._group, x.data_ptr(), x.numel()))
        elif x.dtype == torch.float32:
            self._done(self._library.shm_all_reduce_f32(self._group, x.data_ptr(), x.numel()))
        elif x.dtype == torch.float16:
            x.copy_(self.all_reduce(x.float()))
        else:
            raise TypeError(f"all_reduce sums floats, not {x.dtype}")
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        _check(x)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._done(self._library.shm_all_gather(self._group, x.data_ptr(), out.data_ptr(), x.nbytes))
        return out

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        _check(x)
        self._done(self._library.shm_broadcast(self._group, x.data_ptr(), x.nbytes, root))
        return x

    def barrier(self) -> None:
        self._done(self._library.shm_barrier(self._group))

    def close(self) -> None:
        del self._view
        self._region.close()

    def _done(self, code: int) -> None:
        if code:
            late = self._library.shm_late_rank(self._group)
            raise CollectiveTimeout(f"rank {self.rank} waited {self._timeout_s:g} s for rank {late}")


def _check(x: torch.Tensor) -> None:
    if x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError("shared-memory collectives take contiguous CPU tensors")
