"""The causal depthwise conv of prefill with its silu, and the scales of the l2 norms of queries and keys."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.gdn.gpu.split import to_model

MAX_WIDTH = 4  # taps of the conv that a program carries, here and in decode


@triton.jit(do_not_specialize=["total"])
def conv_silu(
    proj, proj_stride, weight, ring, ring_stride, table, cu_rows, starts, slots, fresh, u, scales, total,
    key_heads, value_heads, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_R: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One head's channels of BLOCK_R rows of a chunk: Q heads, then K heads, then V heads.

    The inputs before the sequence's first row come from the ring, which nothing writes before this kernel ended.
    u: [rows, channels], model dtype. scales: [2 * key_heads, total] float32, what a row of Q or K is multiplied
    by to be l2-normalised (and, Q, scaled): kept beside u, because u is exact in the model dtype and u * scale
    is not.
    """
    DIM: tl.constexpr = max(KEY_DIM, VALUE_DIM)
    channels = 2 * key_heads * KEY_DIM + value_heads * VALUE_DIM
    head = tl.program_id(0)
    block = tl.program_id(1)
    chunk = block // (CHUNK // BLOCK_R)
    seq = tl.load(table + 2 * chunk)
    row0 = tl.load(table + 2 * chunk + 1) + (block % (CHUNK // BLOCK_R)) * BLOCK_R
    first = tl.load(cu_rows + seq).to(tl.int32)
    end = tl.load(cu_rows + seq + 1).to(tl.int32)
    if row0 < end:
        is_key = head < 2 * key_heads
        begin = tl.where(is_key, head * KEY_DIM, 2 * key_heads * KEY_DIM + (head - 2 * key_heads) * VALUE_DIM)
        column = tl.arange(0, DIM)
        channel = (begin + column)[None, :]
        wanted = (column < tl.where(is_key, KEY_DIM, VALUE_DIM))[None, :]
        row = (row0 + tl.arange(0, BLOCK_R))[:, None]
        inside = (row < end) & wanted
        # all loads are asked for before any is used: each would wait for memory in turn
        at = proj + row.to(tl.int64) * proj_stride + channel
        x3 = tl.load(at, mask=inside, other=0.0)
        x2 = tl.load(at - proj_stride, mask=inside & (row - 1 >= first), other=0.0)
        x1 = tl.load(at - 2 * proj_stride, mask=inside & (row - 2 >= first), other=0.0)
        x0 = tl.load(at - 3 * proj_stride, mask=inside & (row - 3 >= first), other=0.0)
        SKIP: tl.constexpr = 4 - WIDTH  # a narrower conv has zeros before
        tap = weight - SKIP * channels + channel
        w0 = tl.load(tap, mask=wanted & (SKIP < 1), other=0.0)
        w1 = tl.load(tap + channels, mask=wanted & (SKIP < 2), other=0.0)
        w2 = tl.load(tap + 2 * channels, mask=wanted, other=0.0)
        w3 = tl.load(tap + 3 * channels, mask=wanted, other=0.0)
        if row0 == first:
            kept = inside & (tl.load(fresh + seq) == 0)
            of_slot = ring + tl.load(slots + seq).to(tl.int64) * ring_stride + channel
            shift = tl.load(starts + seq) - first
            x2 += _before(of_slot, row - 1, first, shift, kept, channels, RING)
            x1 += _before(of_slot, row - 2, first, shift, kept, channels, RING)
            x0 += _before(of_slot, row - 3, first, shift, kept, channels, RING)
        acc = x0.to(tl.float32) * w0
        acc = tl.fma(x1.to(tl.float32), tl.broadcast_to(w1, acc.shape), acc)
        acc = tl.fma(x2.to(tl.float32), tl.broadcast_to(w2, acc.shape), acc)
        acc = tl.fma(x3.to(tl.float32), tl.broadcast_to(w3, acc.shape), acc)
        summed = to_model(acc, u.dtype.element_ty).to(tl.float32)
        y = to_model(summed / (1.0 + tl.exp(-summed)), u.dtype.element_ty)
        tl.store(u + row.to(tl.int64) * channels + channel, y, mask=inside)
        if is_key:
            f = y.to(tl.float32)
            scale = tl.rsqrt(tl.sum(f * f, 1) + 1e-6) * tl.where(head < key_heads, KEY_DIM**-0.5, 1.0)
            rows = row0 + tl.arange(0, BLOCK_R)
            tl.store(scales + head * total + rows, scale, mask=rows < end)


@triton.jit
def _before(of_slot, source, first, shift, kept, channels, RING: tl.constexpr):
    """The ring's inputs of rows before a sequence's first one here; zeros of other rows, and before its begin."""
    position = source + shift
    at = of_slot + (position & (RING - 1)) * channels
    return tl.load(at, mask=kept & (source < first) & (position >= 0), other=0.0)


@triton.jit
def keep_inputs(
    proj, proj_stride, ring, ring_stride, slot, start, first, end, share, shares, channels,
    RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies one of `shares` parts of the channels of a sequence's last RING rows to the ring, by position.

    Only in a launch after `conv_silu`, which reads what is overwritten here.
    """
    row = (end - RING + tl.arange(0, RING))[:, None]
    place = (start + row - first) & (RING - 1)
    for begin in tl.range(share * BLOCK, channels, shares * BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        kept = (row >= first) & (column < channels)
        x = tl.load(proj + row.to(tl.int64) * proj_stride + column, mask=kept)
        tl.store(ring + slot * ring_stride + place * channels + column, x, mask=kept)


def _case(dtype: str, dim: int, ring: int) -> AotCase:
    signature = {
        "proj": f"*{dtype}", "proj_stride": "i64", "weight": "*fp32", "ring": f"*{dtype}", "ring_stride": "i64",
        "table": "*i32", "cu_rows": "*i64", "starts": "*i64", "slots": "*i32", "fresh": "*u8",
        "u": f"*{dtype}", "scales": "*fp32", "total": "i32", "key_heads": "i32", "value_heads": "i32",
    }  # fmt: skip
    constants = {"KEY_DIM": dim, "VALUE_DIM": dim, "CHUNK": 64, "BLOCK_R": 16, "RING": ring, "WIDTH": 4}
    return AotCase(conv_silu, signature | dict.fromkeys(constants, "constexpr"), constants)


AOT_CASES = [_case("bf16", 128, 4), _case("bf16", 64, 16), _case("fp32", 128, 4)]
