"""Merges the segments of a split attention and gates the result."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.attention.gpu.balance import TILE, cut, merged
from mstar.kernels.attention.gpu.walk import gated
from mstar.kernels.rows import Rows

# Dims of a program where those of whole rows would leave the GPU idle: up to so many rows of q heads.
NARROW, FEW_ROWS = 64, 64


def reduce_segments(
    out: torch.Tensor,
    parts: torch.Tensor,
    sums: torch.Tensor,
    proj: torch.Tensor,
    rows: Rows,
    programs: int,
    shares: int,
    shape: dict[str, Any],
) -> None:
    """Writes out [rows, q_heads * head_dim] from what `_attend_decode` left of each segment; proj: the gates.

    programs: that filled the GPU there, of a KV head: few sequences have more segments, which come in turns. shares
    and shape: what that kernel was told, by which this one cuts the keys in the same way.
    """
    heads, dim = shape["KV_HEADS"] * shape["GROUP"], shape["DIM"]
    most = shape["PADDED"] * shape["ROWS"] * heads  # for all steps that one kernel serves
    width = dim if most > FEW_ROWS else min(dim, NARROW)
    _reduce_segments[(out.shape[0] * heads, dim // width)](
        out, parts, sums, proj, proj.stride(0), rows.cu_rows, rows.starts, rows.block_tables.shape[1], rows.sequences,
        shares, MOST=triton.next_power_of_2(programs), WIDTH=width, num_warps=4, **shape,
    )  # fmt: skip


@triton.jit(do_not_specialize=["columns", "sequences", "shares"])
def _reduce_segments(
    out, parts, sums, proj, proj_stride, cu_rows, starts, columns, sequences, shares,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    LAST_ONLY: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr, MOST: tl.constexpr,
    WIDTH: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row, q head and WIDTH of its dims."""
    at = tl.program_id(0)
    row = at // (KV_HEADS * GROUP)
    head = at % (KV_HEADS * GROUP)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    sequence = row // ROWS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not SETTLED:
            tl.extra.cuda.gdc_wait()
    _, count, first, _ = cut(
        starts, cu_rows, sequences, columns * BLOCK_SIZE, shares, ROWS, LAST_ONLY, LEAST, BLOCK_N, PADDED
    )
    if PADDED > 1:
        own = tl.arange(0, PADDED) == sequence
        count = tl.sum(tl.where(own, count, 0), 0)
        first = tl.sum(tl.where(own, first, 0), 0)
    if PDL and SETTLED:
        tl.extra.cuda.gdc_wait()  # there are no weights to read before
    from_row = tl.maximum(tl.load(cu_rows + sequence + 1) - 1, 0) if LAST_ONLY else row.to(tl.int64)
    gate = tl.load(proj + from_row * proj_stride + head * (2 * DIM) + DIM + d)
    CHUNK: tl.constexpr = min(MOST, TILE // WIDTH)
    stride = KV_HEADS * (ROWS * GROUP)
    held = (
        (first.to(tl.int64) * KV_HEADS + head // GROUP) * (ROWS * GROUP) + row % ROWS * GROUP + head % GROUP
    )
    r = tl.zeros((1,), tl.int32)
    acc = merged(parts, sums, held, count, stride, r, r == 0, d, 1, CHUNK, DIM, WIDTH)
    to = out + at.to(tl.int64) * DIM + d
    tl.store(to[None, :], gated(acc, gate[None, :], out.dtype.element_ty))


def _case(
    dim: int, rows: int, sequences: int, most: int, width: int, last_only: bool = False, settled: bool = False,
    group: int = 4,
) -> AotCase:  # fmt: skip
    signature = {"out": "*bf16", "parts": "*fp32", "sums": "*fp32", "proj": "*bf16", "proj_stride": "i32"}
    signature |= {"cu_rows": "*i64", "starts": "*i64", "columns": "i32", "sequences": "i32", "shares": "i32"}
    constants = {
        "GROUP": group, "KV_HEADS": 2, "DIM": dim, "BLOCK_SIZE": 16, "ROWS": rows, "LAST_ONLY": last_only, "LEAST": 32,
        "BLOCK_N": 32, "PADDED": sequences, "MOST": most, "WIDTH": width, "SETTLED": settled,
    }  # fmt: skip
    signature |= dict.fromkeys([*constants, "PDL"], "constexpr")
    return AotCase(_reduce_segments, signature, constants, pdl=True)


AOT_CASES = [
    _case(256, 1, 1, 128, 64, settled=True),
    _case(256, 4, 16, 256, 256),
    _case(64, 4, 4, 256, 64),
    _case(256, 1, 64, 128, 256, last_only=True),
    _case(256, 4, 2, 64, 64, group=6),
]
