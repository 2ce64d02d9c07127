"""The chunked delta rule of prefill: what a chunk does by itself, and the walk of the state over the chunks.

The form of Yang et al., "Gated Delta Networks" (2024), as `mstar.kernels.gdn.reference.chunked_delta_rule`
has it: within a chunk the updates solve a unit lower triangular system, between chunks the state moves once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.gdn.gpu.conv import keep_inputs
from mstar.kernels.gdn.gpu.split import high, mma, mma_both, mma_left, mma_right, operand, rest, to_bf16


@triton.jit
def softplus(x):
    """log(1 + e^x), also where 1 + e^x rounds (Kahan's log1p)."""
    e = tl.exp(-tl.abs(x))
    y = 1.0 + e
    rounded = y == 1.0
    return tl.maximum(x, 0.0) + tl.where(rounded, e, tl.log(y) * (e / tl.where(rounded, 1.0, y - 1.0)))


@triton.jit
def decay_between(total):
    """exp(total[i] - total[j]) for i >= j, else 0; total: [CHUNK] float64, sums of log decays.

    Sums of strong decays are large, their differences may be small: float32 would lose these.
    """
    first = total.to(tl.float32)
    second = (total - first.to(tl.float64)).to(tl.float32)
    difference = (first[:, None] - first[None, :]) + (second[:, None] - second[None, :])
    at = tl.arange(0, total.shape[0])
    return tl.exp(tl.where(at[:, None] >= at[None, :], difference, float("-inf")))


@triton.jit
def inverse(system, CHUNK: tl.constexpr, SPLIT: tl.constexpr):
    """(I + system)^-1, system: [CHUNK, CHUNK] float32, read below its diagonal only.

    By blocks of 1, 2, 4, ...: [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]], all blocks of a size at
    once. Every number on the way is an entry of an inverse or of L P^-1: no powers, which could overflow.
    """
    LEVELS: tl.constexpr = 6
    tl.static_assert(CHUNK == 1 << LEVELS)
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    below = (row > column) & ((row >> 1) == (column >> 1))
    inv = tl.where(row == column, 1.0, 0.0) - tl.where(below, system, 0.0)
    for level in tl.range(1, LEVELS):  # a loop of the device: unrolled, it spills and compiles for a minute
        below = (row > column) & ((row >> level) != (column >> level))
        below = below & ((row >> (level + 1)) == (column >> (level + 1)))
        zero = tl.zeros([CHUNK, CHUNK], tl.float32)
        right = mma_both(tl.where(below, system, 0.0), inv, zero, SPLIT)
        inv -= mma_both(inv, right, zero, SPLIT)
    return inv


@triton.jit(do_not_specialize=["total_rows"])
def solve_chunks(
    proj, proj_stride, decay, dt_bias, u, scales, table, cu_rows, totals, new_k, new_v, total_rows,
    key_heads, value_heads, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: gates, triangular system, and the rows that the walk takes.

    totals: [value_heads, rows] float64, log decays summed from the chunk's first row on. new_k: [value_heads,
    rows, parts, KEY_DIM], bf16 parts (SPLIT) or one float32 part; new_v: [value_heads, rows, VALUE_DIM] float32.
    """
    channels = 2 * key_heads * KEY_DIM + value_heads * VALUE_DIM
    gates_at = channels + value_heads * VALUE_DIM
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    seq = tl.load(table + 2 * chunk)
    row = tl.load(table + 2 * chunk + 1) + tl.arange(0, CHUNK)
    inside = row < tl.load(cu_rows + seq + 1)  # rows past the end have beta 0 and decay 1: they move nothing
    at = row.to(tl.int64)
    key_head = head // (value_heads // key_heads)

    gates = proj + at * proj_stride + gates_at + head
    b = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gates + value_heads, mask=inside, other=0.0).to(tl.float32)
    beta = tl.where(inside, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    log_decay = tl.load(decay + head) * softplus(a + tl.load(dt_bias + head))
    total = tl.cumsum(tl.where(inside, log_decay, 0.0).to(tl.float64), 0)
    of_head = head.to(tl.int64) * total_rows + at
    tl.store(totals + of_head, total, mask=inside)

    column = tl.arange(0, KEY_DIM)[None, :]
    k_at = u + at[:, None] * channels + (key_heads + key_head) * KEY_DIM + column
    k = operand(tl.load(k_at, mask=inside[:, None], other=0.0), SPLIT)
    scale = tl.load(scales + (key_heads + key_head) * total_rows + row, mask=inside, other=0.0)
    products = mma(k, tl.trans(k), tl.zeros([CHUNK, CHUNK], tl.float32))
    system = products * (beta * scale)[:, None] * scale[None, :] * decay_between(total)
    inv = inverse(system, CHUNK, SPLIT)

    from_v = inv * beta[None, :]
    column = tl.arange(0, VALUE_DIM)[None, :]
    v_at = u + at[:, None] * channels + 2 * key_heads * KEY_DIM + head * VALUE_DIM + column
    v = operand(tl.load(v_at, mask=inside[:, None], other=0.0), SPLIT)
    out = mma_left(from_v, v, tl.zeros([CHUNK, VALUE_DIM], tl.float32), SPLIT)
    tl.store(new_v + of_head[:, None] * VALUE_DIM + column, out, mask=inside[:, None])

    from_k = inv * (beta * scale * tl.exp(total.to(tl.float32)))[None, :]
    column = tl.arange(0, KEY_DIM)[None, :]
    out = mma_left(from_k, k, tl.zeros([CHUNK, KEY_DIM], tl.float32), SPLIT)
    first = high(out, SPLIT)
    if SPLIT:
        to = new_k + of_head[:, None] * (2 * KEY_DIM) + column
        tl.store(to + KEY_DIM, to_bf16(rest(out, first)), mask=inside[:, None])
    else:
        to = new_k + of_head[:, None] * KEY_DIM + column
    tl.store(to, first, mask=inside[:, None])


@triton.jit(do_not_specialize=["total_rows"])
def walk_chunks(
    proj, proj_stride, ring, ring_stride, state, state_stride, u, scales, totals, new_k, new_v,
    chunk_borders, cu_rows, starts, slots, fresh, states, deltas, total_rows,
    key_heads, value_heads, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT: tl.constexpr, OUT_PARTS: tl.constexpr,
    RING: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one value head's state, through the chunks of one sequence in order.

    Leaves the state after the last row in its slot, and each chunk's state before its first row and its rows'
    deltas for `outputs`: states [chunks, value_heads, OUT_PARTS, KEY_DIM, VALUE_DIM] and deltas [value_heads,
    rows, OUT_PARTS, VALUE_DIM], bf16 parts (SPLIT) or float32. Also keeps the conv's last inputs.
    """
    channels = 2 * key_heads * KEY_DIM + value_heads * VALUE_DIM
    SPLITS: tl.constexpr = VALUE_DIM // BLOCK_V
    K_PARTS: tl.constexpr = 2 if SPLIT else 1
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    head = tl.program_id(1)
    seq = tl.program_id(2)
    slot = tl.load(slots + seq).to(tl.int64)
    begin = tl.load(chunk_borders + seq)
    chunks = tl.load(chunk_borders + seq + 1) - begin
    first = tl.load(cu_rows + seq).to(tl.int32)
    end = tl.load(cu_rows + seq + 1).to(tl.int32)
    key_head = head // (value_heads // key_heads)
    keys = tl.arange(0, KEY_DIM)
    entry = keys[:, None] * VALUE_DIM + column
    home = state + slot * state_stride + head * (KEY_DIM * VALUE_DIM) + entry
    s = tl.load(home, mask=tl.load(fresh + seq) == 0, other=0.0)
    k_at = u + (key_heads + key_head) * KEY_DIM + keys[None, :]
    of_scales = scales + (key_heads + key_head) * total_rows
    of_head = head.to(tl.int64) * total_rows
    for index in tl.range(0, chunks, num_stages=STAGES):
        row = first + index * CHUNK + tl.arange(0, CHUNK)
        inside = row < end
        at = row.to(tl.int64)
        last = tl.minimum(first + (index + 1) * CHUNK, end) - 1

        s0 = high(s, SPLIT)
        kept = states + ((begin + index).to(tl.int64) * value_heads + head) * (
            OUT_PARTS * KEY_DIM * VALUE_DIM
        )
        tl.store(kept + entry, s0)
        nk_at = new_k + (of_head + at)[:, None] * (K_PARTS * KEY_DIM) + keys[None, :]
        nk = operand(tl.load(nk_at, mask=inside[:, None], other=0.0), SPLIT)
        taken = mma(nk, s0, tl.zeros([CHUNK, BLOCK_V], tl.float32))
        if SPLIT:
            s1 = to_bf16(rest(s, s0))
            if OUT_PARTS == 2:
                tl.store(kept + KEY_DIM * VALUE_DIM + entry, s1)
            taken = mma(nk, s1, taken)
            taken = mma(tl.load(nk_at + KEY_DIM, mask=inside[:, None], other=0.0), s0, taken)
        nv = tl.load(new_v + (of_head + at)[:, None] * VALUE_DIM + column, mask=inside[:, None], other=0.0)
        delta = nv - taken

        d0 = high(delta, SPLIT)
        kept = deltas + (of_head + at)[:, None] * (OUT_PARTS * VALUE_DIM) + column
        tl.store(kept, d0, mask=inside[:, None])
        if SPLIT and OUT_PARTS == 2:
            tl.store(kept + VALUE_DIM, to_bf16(rest(delta, d0)), mask=inside[:, None])

        total = tl.load(totals + of_head + tl.minimum(at, last))
        whole = tl.load(totals + of_head + last)
        scale = tl.load(of_scales + row, mask=inside, other=0.0) * tl.exp((whole - total).to(tl.float32))
        k = operand(tl.load(k_at + at[:, None] * channels, mask=inside[:, None], other=0.0), SPLIT)
        s = mma_right(tl.trans(k), delta * scale[:, None], s * tl.exp(whole.to(tl.float32)), SPLIT)
    tl.store(home, s)
    keep_inputs(
        proj, proj_stride, ring, ring_stride, slot, tl.load(starts + seq), first, end,
        head * SPLITS + tl.program_id(0), value_heads * SPLITS, channels, RING, 64,
    )  # fmt: skip


def _case(kernel, arguments: dict[str, str], dtype: str, dim: int, **constants: int) -> AotCase:
    split = dtype == "bf16"
    names = {"model": dtype, "part": "bf16" if split else "fp32"}
    signature = {
        name: "*" + names.get(kind[1:], kind[1:]) if kind[0] == "*" else kind
        for name, kind in arguments.items()
    }
    constants |= {"KEY_DIM": dim, "VALUE_DIM": dim, "CHUNK": 64, "SPLIT": split}
    signature |= dict.fromkeys(constants, "constexpr")
    return AotCase(kernel, signature, constants, num_warps=4 if split else 8)


_SOLVE = {
    "proj": "*model", "proj_stride": "i64", "decay": "*fp32", "dt_bias": "*fp32", "u": "*model",
    "scales": "*fp32", "table": "*i32", "cu_rows": "*i64", "totals": "*fp64", "new_k": "*part",
    "new_v": "*fp32", "total_rows": "i32", "key_heads": "i32", "value_heads": "i32",
}  # fmt: skip
_WALK = {
    "proj": "*model", "proj_stride": "i64", "ring": "*model", "ring_stride": "i64", "state": "*fp32",
    "state_stride": "i64", "u": "*model", "scales": "*fp32", "totals": "*fp64", "new_k": "*part",
    "new_v": "*fp32", "chunk_borders": "*i32", "cu_rows": "*i64", "starts": "*i64", "slots": "*i32",
    "fresh": "*u8", "states": "*part", "deltas": "*part", "total_rows": "i32",
    "key_heads": "i32", "value_heads": "i32",
}  # fmt: skip

AOT_CASES = [
    _case(solve_chunks, _SOLVE, "bf16", 128),
    _case(solve_chunks, _SOLVE, "bf16", 64),
    _case(solve_chunks, _SOLVE, "fp32", 128),
    _case(walk_chunks, _WALK, "bf16", 128, BLOCK_V=16, OUT_PARTS=2, RING=16, STAGES=2),
    _case(walk_chunks, _WALK, "bf16", 128, BLOCK_V=32, OUT_PARTS=2, RING=4, STAGES=2),
    _case(walk_chunks, _WALK, "bf16", 64, BLOCK_V=16, OUT_PARTS=2, RING=4, STAGES=2),
    _case(walk_chunks, _WALK, "fp32", 128, BLOCK_V=16, OUT_PARTS=1, RING=4, STAGES=2),
]
