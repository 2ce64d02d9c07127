"""What decode does with a segment of one sequence's keys, however they were cut."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.attention.gpu.walk import gated, walk_keys

# Blocks of keys that a program asks the second cache for before its wait: all of a short context's, and of a long
# one's not so many that they push each other out.
BLOCKS_ASKED = tl.constexpr(8)


@triton.jit
def attend_segment(
    q, row0, kv_head, m, used, start, k_head, v_head, table, begin, end, score_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The rows of a sequence from row0 on, and the q heads of a group, over the keys begin ... end - 1.

    m: [BLOCK_M], row * GROUP + head of the group; used: those that there are. start: the first row's position.
    Returns the average of the values, [BLOCK_M, DIM], and log2 of the sum of weights, [BLOCK_M]: float32.
    """
    d = tl.arange(0, DIM)
    row = m // GROUP
    at = (row0 + row) * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
    tile = tl.load(q + at[:, None] * DIM + d[None, :], mask=used[:, None], other=0.0)
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc, top, total = walk_keys(
        tile, acc, top, total, start.to(tl.int32) + row,
        k_head, v_head, table, begin, end, score_scale, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N, True, True, WIDE,
    )  # fmt: skip
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # a row may see no key of this segment
    return acc, tl.log2(total) + top


@triton.jit
def store_gated(
    out, proj, proj_stride, row0, to0, kv_head, m, used, acc,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The result of a sequence's rows, of row0 on in proj and of to0 on in out; m, used and acc as above."""
    d = tl.arange(0, DIM)
    row, head = m // GROUP, kv_head * GROUP + m % GROUP
    gate_at = proj + (row0 + row) * proj_stride + head * (2 * DIM) + DIM
    gate = tl.load(gate_at[:, None] + d[None, :], mask=used[:, None], other=0.0)
    to = (to0 + row) * (KV_HEADS * GROUP) + head
    tl.store(out + to[:, None] * DIM + d[None, :], gated(acc, gate, out.dtype.element_ty), mask=used[:, None])


@triton.jit
def store_part(parts, sums, to, acc, log, used, DIM: tl.constexpr):
    """What one of several segments gives: parts [..., DIM], averages of values, and sums [...]."""
    d = tl.arange(0, DIM)
    tl.store(parts + to[:, None] * DIM + d[None, :], acc, mask=used[:, None])
    tl.store(sums + to, log, mask=used)
