"""The norm and the turn of a decode part's q and k, for the programs that attend with them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turns(start, inv_freq, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines of rows that stand at start, start + 1, ...: [ROWS, 1, 1, HALF] float32 each.

    Taken in one lane of four and added up over them: a sum is what Triton passes on to the threads that use it, where
    it would take a function of its own in each of them again, eight a thread.
    """
    row = tl.arange(0, ROWS)[:, None, None]
    d = tl.arange(0, HALF)[None, :, None]
    lane = tl.arange(0, 4)[None, None, :]
    angle = (start + row).to(tl.float32) * tl.load(inv_freq + d + 0 * lane)
    cosine = tl.sum(tl.where(lane == 0, tl.cos(angle), 0.0), 2)
    sine = tl.sum(tl.where(lane == 0, tl.sin(angle), 0.0), 2)
    return tl.reshape(cosine, [ROWS, 1, 1, HALF]), tl.reshape(sine, [ROWS, 1, 1, HALF])


@triton.jit
def multipliers(norm, DIM: tl.constexpr, HALF: tl.constexpr):
    """A norm's multipliers, and those of the dims that are turned with each: [1, 1, DIM / HALF, HALF] float32."""
    run = tl.arange(0, DIM // HALF)[None, None, :, None]
    d = tl.arange(0, HALF)[None, None, None, :]
    return tl.load(norm + run * HALF + d), tl.load(norm + tl.where(run < 2, 1 - run, run) * HALF + d)


@triton.jit
def turned_heads(
    at, row_stride, head_stride, weight, other_weight, eps, cosine, sine, ROWS: tl.constexpr, HEADS: tl.constexpr,
    ROWS_PAD: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Heads of rows, normed and turned: [ROWS_PAD, HEADS_PAD, DIM] float32, zeros where there are none.

    at: the first row's first head; weight, other_weight: of `multipliers`; cosine, sine: of `turns`, taken once for
    all heads of a row. The dims are runs of HALF, of which the first two are turned, one by the other.
    """
    row = tl.arange(0, ROWS_PAD)[:, None, None, None]
    head = tl.arange(0, HEADS_PAD)[None, :, None, None]
    run = tl.arange(0, DIM // HALF)[None, None, :, None]
    d = tl.arange(0, HALF)[None, None, None, :]
    there = (row < ROWS) & (head < HEADS)
    base = at + row * row_stride + head * head_stride + d
    x = tl.load(base + run * HALF, mask=there, other=0.0).to(tl.float32)
    x_other = tl.load(base + tl.where(run < 2, 1 - run, run) * HALF, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(x * x, 3), 2) / DIM + eps)[:, :, None, None]
    a = x * scale * weight
    b = x_other * scale * other_weight
    turned = a * cosine + tl.where(run == 0, -b, b) * sine
    return tl.reshape(tl.where(run < 2, turned, a), [ROWS_PAD, HEADS_PAD, DIM])


@triton.jit
def keep_new_keys(
    at, row_stride, value_at, norm, eps, cosine, sine, start, begin, end, k_head, v_head, table,
    ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the keys and values of the rows whose positions are in begin ... end - 1 to the caches.

    at: the first row's k; value_at: how far behind it v is. The program may read them from there on.
    """
    if start + ROWS > begin:
        weight, other_weight = multipliers(norm, DIM, HALF)
        k = turned_heads(
            at, row_stride, 0, weight, other_weight, eps, cosine, sine, ROWS, 1, ROWS_PAD, 1, DIM, HALF
        )
        k = tl.reshape(k, [ROWS_PAD, DIM])
        row = tl.arange(0, ROWS_PAD)
        d = tl.arange(0, DIM)[None, :]
        position = start + row
        mine = (row < ROWS) & (position >= begin) & (position < end)
        v = tl.load(at + value_at + row[:, None] * row_stride + d, mask=mine[:, None])
        block = tl.load(table + position // BLOCK_SIZE, mask=mine, other=0).to(tl.int64)
        to = (block * (KV_HEADS * DIM * BLOCK_SIZE))[:, None]
        offset = (position % BLOCK_SIZE)[:, None]
        tl.store(k_head + to + d * BLOCK_SIZE + offset, k.to(k_head.dtype.element_ty), mask=mine[:, None])
        tl.store(v_head + to + offset * DIM + d, v, mask=mine[:, None])
        tl.debug_barrier()  # other threads of the program read them


@triton.jit
def ask_for_keys(
    k_head, v_head, table, begin, end, MOST: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Asks the second cache for the keys and values begin ... end - 1, of at most MOST blocks."""
    LINE: tl.constexpr = 128 // (k_head.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = DIM * BLOCK_SIZE // LINE  # of a block's keys, and of its values
    thread = tl.arange(0, THREADS)
    last = tl.minimum(end, begin + MOST * BLOCK_SIZE)
    for first in range(begin, last, BLOCK_SIZE):
        block = tl.load(table + first // BLOCK_SIZE, cache_modifier=".cg").to(tl.int64)
        at = block * (KV_HEADS * DIM * BLOCK_SIZE)
        for line in tl.static_range(0, 2 * LINES, THREADS):
            which = tl.minimum(line + thread, 2 * LINES - 1)
            address = tl.where(
                which < LINES,
                (k_head + at + which * LINE).to(tl.int64),
                (v_head + at + (which - LINES) * LINE).to(tl.int64),
            )
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, is_pure=False, pack=1
            )
