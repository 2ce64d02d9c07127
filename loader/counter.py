"""Random numbers that are a function of a name and an index: on any device and for any part of a matrix the same.

A 32-bit counter (the element's place in the matrix, times an odd number of the stream's own, plus another one)
goes through two rounds of shift, xor and multiply, with the constants of Chris Wellons' "hash prospector"
(lowbias32, https://nullprogram.com/blog/2018/07/31/): a bijection of 32 bits. Integers wrap alike everywhere, and
what follows is one conversion and one product in float32, so that bits are equal on CPU and GPU.
"""

from __future__ import annotations

import hashlib
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

_MASK = (1 << 32) - 1
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
# The top bits of a number that become its float: as many as a float32 holds exactly.
_BITS = 24
# Elements made at once, in three buffers of four bytes each. On a CPU what a core's cache holds, and no more than
# torch gives to one thread: threads that meet after each of 12 short operations wait for each other on a busy
# machine, so that each has rows of its own instead. On a GPU what makes launches few.
_CPU_PIECE, _GPU_PIECE = 1 << 15, 1 << 22
_ROWS_OF_A_THREAD = 1 << 20  # elements, from which on a second thread is worth it


@dataclass(frozen=True, slots=True)
class Stream:
    """The numbers of one name. Past 2**32 elements they repeat."""

    multiplier: int  # odd
    offset: int

    @classmethod
    def of(cls, seed: int, name: str) -> Stream:
        first, second = struct.unpack("<II", hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8])
        return cls(first | 1, second)

    def permutation(self, length: int) -> torch.Tensor:
        """[length] int64 on the CPU: the indices in the order of their numbers, which differ all."""
        return torch.argsort(self.integers(length))

    def integers(self, length: int) -> torch.Tensor:
        """[length] int32 on the CPU: the numbers of 0 to length - 1."""
        counters = _wrapped(torch.arange(length) * self.multiplier + self.offset)
        return _mix(counters, torch.empty_like(counters))

    def uniform_(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        first_column: int,
        width: int,
        bound: float,
        stored: torch.dtype,
    ) -> None:
        """Fills `out` with numbers in [-bound, bound) of a matrix of `width` columns.

        out: [n, columns], any float dtype and strides. rows: [n] int64, the matrix's row of each of out's.
        first_column: the matrix's column of out's first. stored: the dtype to which a number, a float32 product,
        is rounded before it becomes out's.
        """
        columns = out.shape[1]
        if out.numel() == 0:
            return
        device = out.device
        row_terms = _wrapped(rows.to(device) * (width * self.multiplier & _MASK) + self.offset)
        places = torch.arange(first_column, first_column + columns, device=device)
        column_terms = _wrapped(places * self.multiplier)
        fill = partial(_fill, column_terms, scale=_float32(bound / (1 << (_BITS - 1))), stored=stored)
        threads = min(torch.get_num_threads(), out.numel() // _ROWS_OF_A_THREAD)
        if device.type != "cpu" or threads < 2:
            fill(row_terms, out)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, row_terms.chunk(threads), out.chunk(threads)))


@torch.inference_mode()  # whatever mode the caller is in: other threads would refuse its tensors
def _fill(
    column_terms: torch.Tensor, row_terms: torch.Tensor, out: torch.Tensor, scale: float, stored: torch.dtype
) -> None:
    count, columns = out.shape
    piece = _CPU_PIECE if out.device.type == "cpu" else _GPU_PIECE
    step = min(count, max(1, piece // columns))
    counters = torch.empty(step, columns, dtype=torch.int32, device=out.device)
    scratch = torch.empty_like(counters)
    numbers = torch.empty_like(counters, dtype=torch.float32)
    for first in range(0, count, step):
        n = min(step, count - first)
        part = torch.add(row_terms[first : first + n, None], column_terms, out=counters[:n])
        _mix(part, scratch[:n]).bitwise_right_shift_(32 - _BITS)
        value = numbers[:n].copy_(part).mul_(scale)
        out[first : first + n].copy_(value if stored == torch.float32 else value.to(stored))


def _mix(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Mixes int32 numbers in place. The last round's shift is left out: it would mend the low bits alone."""
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        # a shift of int32 carries the sign along
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
        x.mul_(_signed(factor))
    return x


def _wrapped(values: torch.Tensor) -> torch.Tensor:
    """int64 to the int32 of its low 32 bits."""
    return ((values + (1 << 31) & _MASK) - (1 << 31)).to(torch.int32)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
