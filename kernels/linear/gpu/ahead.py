"""Asks the second cache for weights that a later kernel reads, while the memory has little else to do.

A mixer between two linears reads next to nothing, and a kernel's end and the next one's start are gaps too: 4 to 8
microseconds of a layer in which the memory could have carried the next linear's weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LINE_BYTES = 128
LINES_PER_MIB = (1 << 20) // LINE_BYTES


@dataclass(frozen=True, slots=True)
class Ahead:
    """A weight that is read after a linear.

    halves: it is so many weights side by side, read at once. norm: [k] float32, what its inputs are normed with,
    and its eps.
    """

    weight: torch.Tensor
    halves: int = 1
    norm: torch.Tensor | None = None
    eps: float = 0.0

    def arguments(self, mebibytes: int) -> dict[str, int | torch.Tensor]:
        """What a kernel takes to ask for that much of it: its first part, or as much of each half."""
        lines = min(self.weight.nbytes // LINE_BYTES, mebibytes * LINES_PER_MIB)
        first = lines // self.halves
        gap = self.weight.nbytes // self.halves - first * LINE_BYTES if self.halves > 1 else 0
        return {"ahead": self.weight, "ahead_lines": lines, "ahead_first": first, "ahead_gap": gap}


NOTHING: dict[str, int | torch.Tensor | None] = {
    "ahead": None,
    "ahead_lines": 0,
    "ahead_first": 0,
    "ahead_gap": 0,
}
SIGNATURE = {"ahead": "*bf16", "ahead_lines": "i32", "ahead_first": "i32", "ahead_gap": "i64"}


@triton.jit
def ask_ahead(ahead, lines, first, gap, THREADS: tl.constexpr):
    """Shares `lines` lines from `ahead` on among the programs; those from `first` on lie `gap` bytes further."""
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(
        0
    )
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    for at in range(program * THREADS, lines, programs * THREADS):
        line = tl.minimum(at + tl.arange(0, THREADS), lines - 1)
        address = ahead.to(tl.int64) + line.to(tl.int64) * 128 + tl.where(line >= first, gap, 0)
        ask_second_cache(address)


@triton.jit
def ask_second_cache(address):
    """Asks the second cache for the lines of these addresses, int64."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_where(wanted, address):
    """`ask_second_cache`, of those addresses alone that are wanted."""
    asm: tl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    tl.inline_asm_elementwise(asm, "=r,l,r", [address, wanted.to(tl.int32)], tl.int32, is_pure=False, pack=1)
