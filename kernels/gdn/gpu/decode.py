"""Gated DeltaNet's decode step in one launch: conv, gates, replay of accepted drafts, recurrence, gated norm.

A program owns one value head of one sequence: it holds S in registers, runs what is pending, then the committed
row, writes S once, and runs the drafts on what it holds. Programs of one key head share its channels; that needs
no order among them because the conv's inputs live in rings by position: position p is at p % ring, a step writes
at its own rows' positions alone, and what it reads before them is written by nobody (`ring_rows`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.gdn.gpu.conv import MAX_WIDTH
from mstar.kernels.gdn.gpu.recurrence import (
    advance,
    conv_silu,
    gated_norm,
    gates,
    inputs_before,
    load_gates,
    load_taps,
    unit_keys,
)
from mstar.kernels.gdn.rings import ring_rows
from mstar.kernels.gdn.weights import GdnWeights
from mstar.kernels.launch import launch_options
from mstar.kernels.rows import Rows

# Of a program, each with its columns of S. In a step of 0.8B on one H200: 577 us with four and one sequence, 589 with
# eight; 764 and 767 with four, 953 and 1,040 with 16 (docs/measurements/h200_0.8B_variants.json).
NUM_WARPS = 4


def gdn_decode_gpu(
    proj: torch.Tensor,
    weights: GdnWeights,
    state: torch.Tensor,
    conv: torch.Tensor,
    window: torch.Tensor,
    rows: Rows,
    *,
    num_warps: int = NUM_WARPS,
) -> torch.Tensor:
    """`rows.rows_per_seq` rows of each sequence: the first moves the state, the others are drafts.

    proj: [sequences * rows_per_seq, proj_width], model dtype, rows contiguous within.
    state: [slots, value_heads, key_dim, value_dim] float32; holds S after position starts - 1 - pending, and after
        the first row on return.
    conv: [slots, ring, channels], model dtype, position p's input of the conv at p % ring.
    window: [slots, ring, 2 * value_heads], model dtype, b|a of a position likewise; no rows: a load without drafts.
    rows.pending: the positions right before `starts` that the state is behind by; None: none anywhere. Only
        sequences, rows_per_seq, starts, slots, fresh, pending and settled are read: a decode part is uniform.
    Returns [rows, value_heads * value_dim] in the model dtype.

    Slots are distinct but for the sink, whose sequences are fresh; its S is not written, its rings are.
    Raises ValueError for what the kernel is not built for: a wide conv, a ring too small or not a power of two.
    """
    heads, k_dim, v_dim = weights.value_heads, weights.key_dim, weights.value_dim
    count, ring, width = rows.rows_per_seq, conv.shape[1], weights.conv.shape[0]
    _check(proj, weights, state, conv, window, rows)
    k_pad, v_pad = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
    columns, lanes = _tile(k_pad, v_pad, num_warps)
    out = torch.empty(proj.shape[0], heads * v_dim, dtype=proj.dtype, device=proj.device)
    pending = rows.pending
    _gdn_decode[(rows.sequences, heads)](
        proj, proj.stride(0), out, state, conv, window, weights.conv, weights.decay, weights.dt_bias,
        weights.norm, rows.slots, rows.starts, rows.fresh, rows.slots if pending is None else pending, weights.eps,
        KEY_HEADS=weights.key_heads, VALUE_HEADS=heads, K=k_dim, V=v_dim, RING=ring, WIDTH=width, ROWS=count,
        PENDING=pending is not None, WINDOW=window.shape[1] > 0, SETTLED=rows.settled,
        K_PAD=k_pad, V_PAD=v_pad, LANES=lanes, COLUMNS=columns,
        num_warps=num_warps, **launch_options(proj.device),
    )  # fmt: skip
    return out


def _tile(
    k_pad: int, v_pad: int, num_warps: int, warp: int = 64 if torch.version.hip else 32
) -> tuple[int, int]:
    """(columns of S that a warp holds, lanes that its rows are dealt to): each lane holds 16 bytes of a row."""
    columns = max(1, v_pad // num_warps)
    return columns, min(k_pad, max(1, warp // max(1, columns // 4)))


def _check(
    proj: torch.Tensor,
    weights: GdnWeights,
    state: torch.Tensor,
    conv: torch.Tensor,
    window: torch.Tensor,
    rows: Rows,
) -> None:
    count, ring, width = rows.rows_per_seq, conv.shape[1], weights.conv.shape[0]
    if not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"conv of {width} taps: the GPU's decode carries 2 to {MAX_WIDTH}")
    drafts = count - 1
    if ring & (ring - 1) or ring < ring_rows(drafts):
        raise ValueError(
            f"ring of {ring} rows for {drafts} drafts: needs a power of two from {ring_rows(drafts)}"
        )
    if (drafts or rows.pending is not None) and window.shape[1] != ring:
        raise ValueError(f"drafts need the gates' ring: window has {window.shape[1]} rows, conv {ring}")
    assert proj.shape == (rows.sequences * count, weights.proj_width) and proj.stride(1) == 1
    assert state.is_contiguous() and conv.is_contiguous() and window.is_contiguous()


@triton.jit
def _gdn_decode(
    proj, stride, out, state, conv, window, conv_w, decay, dt_bias, norm, slots, starts, fresh, pending, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PENDING: tl.constexpr, WINDOW: tl.constexpr, SETTLED: tl.constexpr,
    K_PAD: tl.constexpr, V_PAD: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * K
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * V
    Z_AT: tl.constexpr = CHANNELS
    GATES_AT: tl.constexpr = CHANNELS + VALUE_HEADS * V
    DTYPE: tl.constexpr = proj.dtype.element_ty

    # S as [lanes, warps, registers, columns]: rows of S by lane and register, columns by warp, four a lane, so that
    # a load is 16 bytes a lane and the sums over key_dim end within a warp, without a barrier. The order of the
    # axes is how Triton's coalescing deals them: the contiguous one to lanes, then from the first one on.
    i0 = tl.arange(0, LANES)[:, None, None, None]
    i1 = tl.arange(0, V_PAD // COLUMNS)[None, :, None, None]
    i2 = tl.arange(0, K_PAD // LANES)[None, None, :, None]
    i3 = tl.arange(0, COLUMNS)[None, None, None, :]
    # q and k as one: [2, K] is as many elements as eight warps have threads. With fewer than threads Triton takes
    # their loads for cheap and does the conv anew in each warp (3.6: more registers than there are)
    which = tl.arange(0, 2)[:, None]
    key = tl.arange(0, K_PAD)[None, :]
    value = tl.arange(0, V_PAD // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_k = key < K
    in_v = value < V
    first = head * V
    key_at = which * KEYS + head // GROUP * K + key
    v_at = 2 * KEYS + first + value

    wk = load_taps(conv_w, key_at, in_k, CHANNELS, WIDTH)
    wv = load_taps(conv_w, v_at, in_v, CHANNELS, WIDTH)
    head_decay = tl.load(decay + head)
    head_bias = tl.load(dt_bias + head)
    w_norm = tl.load(norm + value, mask=in_v, other=0.0)

    if PDL and not SETTLED:
        tl.extra.cuda.gdc_wait()  # what is above reads weights alone; what is below, other kernels' results
    # before a wait, past the first cache: it may still hold what an earlier step read here
    slot = tl.load(slots + sequence, cache_modifier=".cg").to(tl.int64)
    start = tl.load(starts + sequence, cache_modifier=".cg")
    kept = tl.load(fresh + sequence, cache_modifier=".cg") == 0
    row_of_s = i0 * (K_PAD // LANES) + i2
    column_of_s = i1 * COLUMNS + i3
    in_s = (row_of_s < K) & (column_of_s < V)
    s_at = state + (slot * VALUE_HEADS + head) * K * V + row_of_s * V + column_of_s
    s = tl.load(s_at, mask=in_s & kept, other=0.0, cache_modifier=".cg")

    ring = conv + slot * RING * CHANNELS
    gate_ring = window + slot * RING * (2 * VALUE_HEADS)
    back = start * 0
    if PENDING:
        back = tl.where(kept, tl.load(pending + sequence, cache_modifier=".cg"), 0).to(tl.int64)
    k0, k1, k2 = inputs_before(ring, start - back, key_at, in_k, kept, RING, CHANNELS)
    v0, v1, v2 = inputs_before(ring, start - back, v_at, in_v, kept, RING, CHANNELS)
    if PDL and SETTLED:
        tl.extra.cuda.gdc_wait()  # what is above was there before the step, or when the step had begun

    # inputs are loaded one row ahead: a row's work hides the latency of the next one's
    if PENDING:
        place = (start - back) & (RING - 1)
        there = back > 0
        k3 = tl.load(ring + place * CHANNELS + key_at, mask=in_k & there, other=0.0)
        v3 = tl.load(ring + place * CHANNELS + v_at, mask=in_v & there, other=0.0)
        b, a = load_gates(gate_ring + place * (2 * VALUE_HEADS) + head, there, VALUE_HEADS)
        for index in range(back.to(tl.int32)):
            beta, forget = gates(b, a, head_decay, head_bias)
            kh = conv_silu(k0, k1, k2, k3, wk, DTYPE)
            vh = conv_silu(v0, v1, v2, v3, wv, DTYPE)
            k0, k1, k2 = k1, k2, k3
            v0, v1, v2 = v1, v2, v3
            place = (start - back + index + 1) & (RING - 1)
            there = index + 1 < back
            k3 = tl.load(ring + place * CHANNELS + key_at, mask=in_k & there, other=0.0)
            v3 = tl.load(ring + place * CHANNELS + v_at, mask=in_v & there, other=0.0)
            b, a = load_gates(gate_ring + place * (2 * VALUE_HEADS) + head, there, VALUE_HEADS)
            q, k, _ = unit_keys(kh, which, K)
            s, _ = advance(s, q, k, vh, 0.0, beta, forget, False)

    row = sequence.to(tl.int64) * ROWS
    line = proj + row * stride
    k3 = tl.load(line + key_at, mask=in_k, other=0.0)
    v3 = tl.load(line + v_at, mask=in_v, other=0.0)
    z = tl.load(line + Z_AT + first + value, mask=in_v, other=0.0)
    b, a = load_gates(line + GATES_AT + head, True, VALUE_HEADS)
    for index in range(ROWS):
        place = (start + index) & (RING - 1)
        if WINDOW:
            tl.store(gate_ring + place * (2 * VALUE_HEADS) + head, b)
            tl.store(gate_ring + place * (2 * VALUE_HEADS) + VALUE_HEADS + head, a)
        tl.store(ring + place * CHANNELS + key_at, k3, mask=in_k)
        tl.store(ring + place * CHANNELS + v_at, v3, mask=in_v)
        beta, forget = gates(b, a, head_decay, head_bias)
        kh = conv_silu(k0, k1, k2, k3, wk, DTYPE)
        vh = conv_silu(v0, v1, v2, v3, wv, DTYPE)
        gate = z
        if ROWS > 1:
            k0, k1, k2 = k1, k2, k3
            v0, v1, v2 = v1, v2, v3
            line += stride
            there = index + 1 < ROWS
            k3 = tl.load(line + key_at, mask=in_k & there, other=0.0)
            v3 = tl.load(line + v_at, mask=in_v & there, other=0.0)
            z = tl.load(line + Z_AT + first + value, mask=in_v & there, other=0.0)
            b, a = load_gates(line + GATES_AT + head, there, VALUE_HEADS)
        q, k, along = unit_keys(kh, which, K)
        s, o = advance(s, q, k, vh, along, beta, forget, True)
        if index == 0:
            tl.store(s_at, s, mask=in_s & (slot != 0))
        o = gated_norm(o, gate, w_norm, in_v, V, eps, DTYPE)
        tl.store(out + (row + index) * (VALUE_HEADS * V) + first + value, o.to(DTYPE), mask=in_v)


def _case(rows: int, pending: bool, dim: int, num_warps: int = NUM_WARPS, settled: bool = False) -> AotCase:
    """A specialisation as a load of bf16 launches it: 16 key heads, 32 value heads of `dim`."""
    pointers = {"proj": "bf16", "out": "bf16", "state": "fp32", "conv": "bf16"}
    pointers |= {"window": "bf16", "conv_w": "fp32", "decay": "fp32", "dt_bias": "fp32", "norm": "fp32"}
    pointers |= {"slots": "i32", "starts": "i64", "fresh": "u8", "pending": "i32"}
    columns, lanes = _tile(dim, dim, num_warps)
    constants = {
        "KEY_HEADS": 16, "VALUE_HEADS": 32, "K": dim, "V": dim, "RING": ring_rows(rows - 1), "WIDTH": 4,
        "ROWS": rows, "PENDING": pending, "WINDOW": pending, "SETTLED": settled, "K_PAD": dim,
        "V_PAD": dim, "LANES": lanes, "COLUMNS": columns,
    }  # fmt: skip
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | {"stride": "i64", "eps": "fp32"}
    signature |= dict.fromkeys([*constants, "PDL"], "constexpr")
    ordered = {name: signature[name] for name in _gdn_decode.arg_names}
    return AotCase(_gdn_decode, ordered, constants, num_warps=num_warps, pdl=True)


AOT_CASES = [
    _case(1, False, 128, settled=True),
    _case(4, True, 128),
    _case(1, False, 128, num_warps=8, settled=True),
    _case(4, True, 128, num_warps=8, settled=True),
    _case(1, False, 64),
    _case(4, True, 64),
]
