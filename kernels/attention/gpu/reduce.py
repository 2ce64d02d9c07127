"""Merges the segments of a split attention and gates the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.attention.gpu.walk import gated, keys_a_segment
from mstar.kernels.launch import launch_options
from mstar.kernels.rows import Rows

# Numbers a program holds at once: 64 a thread of four warps.
TILE = 8192


def reduce_segments(
    out: torch.Tensor,
    parts: torch.Tensor,
    sums: torch.Tensor,
    proj: torch.Tensor,
    rows: Rows,
    q_heads: int,
    per_seq: int,
    segments: int,
    least: int,
    most_keys: int,
    last_only: bool,
) -> None:
    """Writes out [rows, q_heads * head_dim] from what `_attend_decode` left of each segment.

    parts: [rows * q_heads * segments, head_dim] float32, averages of values; sums: [rows * q_heads * segments]
    float32, log2 of the sums of weights; only the segments that a sequence's length uses are read. proj: the gates.
    """
    dim = parts.shape[1]
    padded = triton.next_power_of_2(segments)
    width = max(16, min(dim, TILE // padded))
    _reduce_segments[(out.shape[0] * q_heads, dim // width)](
        out, parts, sums, proj, proj.stride(0), rows.cu_rows, rows.starts, most_keys,
        Q_HEADS=q_heads, DIM=dim, ROWS=per_seq, LAST_ONLY=last_only, SEGMENTS=segments, PADDED=padded, LEAST=least,
        WIDTH=width, SETTLED=rows.settled and not last_only, num_warps=4, **launch_options(out.device),
    )  # fmt: skip


@triton.jit
def _reduce_segments(
    out, parts, sums, proj, proj_stride, cu_rows, starts, most_keys,
    Q_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, LAST_ONLY: tl.constexpr, SEGMENTS: tl.constexpr,
    PADDED: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr, SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row, q head and WIDTH of its dims."""
    at = tl.program_id(0).to(tl.int64)
    row = at // Q_HEADS
    head = at % Q_HEADS
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    sequence = row // ROWS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not SETTLED:
            tl.extra.cuda.gdc_wait()
    # before a wait, past the first cache: it may still hold what an earlier step read here
    keys = tl.load(starts + sequence, cache_modifier=".cg") + ROWS
    if PDL and SETTLED:
        tl.extra.cuda.gdc_wait()  # there are no weights to read before
    if LAST_ONLY:
        border = tl.load(cu_rows + sequence + 1)
        row = tl.maximum(border - 1, 0)
        keys += border - 1 - tl.load(cu_rows + sequence)
    keys = tl.minimum(keys, most_keys).to(tl.int32)
    used = tl.maximum(tl.cdiv(keys, keys_a_segment(keys, SEGMENTS, LEAST)), 1)
    s = tl.arange(0, PADDED)
    logs = tl.load(sums + at * SEGMENTS + s, mask=s < used, other=float("-inf"))
    part_at = parts + (at * SEGMENTS + s)[:, None] * DIM + d[None, :]
    part = tl.load(part_at, mask=(s < used)[:, None], other=0.0)
    gate = tl.load(proj + row * proj_stride + head * (2 * DIM) + DIM + d)
    weight = tl.exp2(logs - tl.max(logs, 0))
    merged = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + at * DIM + d, gated(merged, gate, out.dtype.element_ty))


def _case(dim: int, rows: int, segments: int, last_only: bool = False, settled: bool = False) -> AotCase:
    signature = {"out": "*bf16", "parts": "*fp32", "sums": "*fp32", "proj": "*bf16", "proj_stride": "i32"}
    signature |= {"cu_rows": "*i64", "starts": "*i64", "most_keys": "i32"}
    padded = triton.next_power_of_2(segments)
    constants = {
        "Q_HEADS": 8, "DIM": dim, "ROWS": rows, "LAST_ONLY": last_only, "SEGMENTS": segments, "PADDED": padded,
        "LEAST": 64, "WIDTH": max(16, min(dim, TILE // padded)), "SETTLED": settled,
    }  # fmt: skip
    signature |= dict.fromkeys([*constants, "PDL"], "constexpr")
    return AotCase(_reduce_segments, signature, constants, pdl=True)


AOT_CASES = [
    _case(256, 1, 132, settled=True),
    _case(256, 4, 33),
    _case(64, 4, 8),
    _case(256, 1, 66, last_only=True),
]
