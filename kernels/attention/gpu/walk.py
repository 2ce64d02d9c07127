"""What decode and prefill share on the device: softmax attention over a range of a sequence's paged keys."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.linear.gpu.ahead import ask_where

LOG2_E = 1.4426950408889634


@triton.jit
def walk_keys(
    q, acc, top, total, last, k_head, v_head, table, begin, end, score_scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, AHEAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds the keys begin ... end - 1 of a sequence to a running softmax; returns acc, top and total.

    q: [BLOCK_M, DIM]; acc: [BLOCK_M, DIM], top, total: [BLOCK_M], float32: sum of weights times values, the largest
    score (times log2 e) and the sum of weights. last: [BLOCK_M], the last key that each row sees.
    k_head, v_head: the caches at this KV head of block 0; table: the sequence's row of the block table.
    begin is a multiple of BLOCK_N. Without MASKED, all rows see all keys and end - begin is a multiple of
    BLOCK_N. WIDE: dots of float32 (float32 models and the interpreter), else of the model dtype.
    AHEAD: block numbers are loaded a tile ahead, so that the pipelined loads of K and V do not wait for them.
    """
    d = tl.arange(0, DIM)
    n = tl.arange(0, BLOCK_N)
    if AHEAD:
        column = (begin + n) // BLOCK_SIZE
        ahead = tl.load(table + column, mask=column * BLOCK_SIZE < end, other=0)
    for first in range(begin, end, BLOCK_N):
        key = first + n
        if AHEAD:
            block = ahead
            column = (key + BLOCK_N) // BLOCK_SIZE
            ahead = tl.load(table + column, mask=column * BLOCK_SIZE < end, other=0)
        else:
            column = key // BLOCK_SIZE
            block = tl.load(table + column, mask=column * BLOCK_SIZE < end, other=0)
        # whole blocks, so that a load of K keeps the width of a block; keys past the end get no weight below
        inside = key // BLOCK_SIZE * BLOCK_SIZE < end
        offset = key % BLOCK_SIZE
        at = block.to(tl.int64) * (KV_HEADS * DIM * BLOCK_SIZE)
        k_at = k_head + ((at + offset)[None, :] + d[:, None] * BLOCK_SIZE)
        v_at = v_head + ((at + offset * DIM)[:, None] + d[None, :])
        if MASKED:
            k = tl.load(k_at, mask=inside[None, :], other=0.0)
            v = tl.load(v_at, mask=(key < end)[:, None], other=0.0)  # zeros: no weight times NaN is NaN
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        if WIDE:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee") * score_scale
        else:
            scores = tl.dot(q, k) * score_scale
        if MASKED:
            scores = tl.where((key[None, :] <= last[:, None]) & (key < end)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if WIDE:
            acc = tl.dot(p.to(v.dtype).to(tl.float32), v.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(v.dtype), v, acc)
        top = new_top
    return acc, top, total


@triton.jit
def gated(out, gate, DTYPE: tl.constexpr):
    """out times sigmoid(gate) with the reference's roundings; out: float32; gate: model dtype. In DTYPE."""
    return (out.to(DTYPE).to(tl.float32) * tl.sigmoid(gate.to(tl.float32))).to(DTYPE)


@triton.jit
def ask_for_keys(
    k_head, v_head, table, begin, end, MOST: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Asks the second cache for the keys and values begin ... end - 1 of a sequence, of at most MOST blocks."""
    LINE: tl.constexpr = 128 // (k_head.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = DIM * BLOCK_SIZE // LINE  # of a block's keys, and of its values
    EACH: tl.constexpr = (
        THREADS // MOST
    )  # threads a block, so that no block's number is waited for behind another's
    thread = tl.arange(0, THREADS)
    first = begin // BLOCK_SIZE + thread // EACH
    wanted = first * BLOCK_SIZE < end
    block = tl.load(table + first, mask=wanted, other=0, cache_modifier=".cg").to(tl.int64)
    at = block * (KV_HEADS * DIM * BLOCK_SIZE)
    for line in tl.static_range(0, 2 * LINES, EACH):
        which = tl.minimum(line + thread % EACH, 2 * LINES - 1)
        key = (k_head + at + which * LINE).to(tl.int64)
        value = (v_head + at + (which - LINES) * LINE).to(tl.int64)
        ask_where(wanted, tl.where(which < LINES, key, value))
