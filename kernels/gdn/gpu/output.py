"""What prefill's rows read from the state, and the gated norm of it."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.gdn.gpu.chunk import decay_between
from mstar.kernels.gdn.gpu.split import high, mma, operand, rest, to_bf16, to_model


@triton.jit(do_not_specialize=["total_rows"])
def outputs(
    proj, proj_stride, norm, eps, u, scales, totals, states, deltas, table, cu_rows, out, total_rows,
    key_heads, value_heads, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, OUT_PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: o from the chunk's state and deltas, then the gated norm.

    The norm's roundings are the reference's: o to the model dtype, normalised, rounded, times w rounded, times
    silu(z) in float32. out: [rows, value_heads * VALUE_DIM], model dtype.
    """
    channels = 2 * key_heads * KEY_DIM + value_heads * VALUE_DIM
    DTYPE: tl.constexpr = out.dtype.element_ty
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    seq = tl.load(table + 2 * chunk)
    row = tl.load(table + 2 * chunk + 1) + tl.arange(0, CHUNK)
    end = tl.load(cu_rows + seq + 1)
    inside = row < end
    rows = inside[:, None]
    at = row.to(tl.int64)
    key_head = head // (value_heads // key_heads)
    of_head = head.to(tl.int64) * total_rows + at
    column = tl.arange(0, VALUE_DIM)[None, :]

    keys = tl.arange(0, BLOCK_K)
    q_at = u + at[:, None] * channels + key_head * KEY_DIM + keys[None, :]
    state_at = states + (chunk.to(tl.int64) * value_heads + head) * (OUT_PARTS * KEY_DIM * VALUE_DIM)
    state_at += keys[:, None] * VALUE_DIM + column
    o = tl.zeros([CHUNK, VALUE_DIM], tl.float32)
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    for step in tl.range(0, KEY_DIM // BLOCK_K, num_stages=STAGES):
        q = operand(tl.load(q_at + step * BLOCK_K, mask=rows, other=0.0), SPLIT)
        k_at = q_at + key_heads * KEY_DIM + step * BLOCK_K
        k = operand(tl.load(k_at, mask=rows, other=0.0), SPLIT)
        products = mma(q, tl.trans(k), products)
        for part in tl.static_range(OUT_PARTS):
            o = mma(q, tl.load(state_at + (part * KEY_DIM + step * BLOCK_K) * VALUE_DIM), o)
    q_scale = tl.load(scales + key_head * total_rows + row, mask=inside, other=0.0)
    k_scale = tl.load(scales + (key_heads + key_head) * total_rows + row, mask=inside, other=0.0)
    # rows past the end: no decay, so that nothing overflows; of a part without rows the first one there is
    last = tl.maximum(tl.minimum(at, end - 1), 0)
    total = tl.load(totals + head.to(tl.int64) * total_rows + last)
    within = products * q_scale[:, None] * k_scale[None, :] * decay_between(total)
    o *= (q_scale * tl.exp(total.to(tl.float32)))[:, None]
    w0 = high(within, SPLIT)
    delta_at = deltas + of_head[:, None] * (OUT_PARTS * VALUE_DIM) + column
    d0 = tl.load(delta_at, mask=rows, other=0.0)
    if SPLIT:
        o = mma(to_bf16(rest(within, w0)), d0, o)
        if OUT_PARTS == 2:
            o = mma(w0, tl.load(delta_at + VALUE_DIM, mask=rows, other=0.0), o)
    o = mma(w0, d0, o)

    f = to_model(o, DTYPE).to(tl.float32)
    scale = tl.rsqrt(tl.sum(f * f, 1) / VALUE_DIM + eps)
    w = to_model(tl.load(norm + column), DTYPE).to(tl.float32)
    normed = to_model(f * scale[:, None], DTYPE).to(tl.float32)
    normed = to_model(normed * w, DTYPE).to(tl.float32)
    z_at = proj + at[:, None] * proj_stride + channels + head * VALUE_DIM + column
    z = tl.load(z_at, mask=rows, other=0.0).to(tl.float32)
    mixed = to_model(normed * (z / (1.0 + tl.exp(-z))), DTYPE)
    tl.store(out + at[:, None] * (value_heads * VALUE_DIM) + head * VALUE_DIM + column, mixed, mask=rows)


def _case(dtype: str, dim: int) -> AotCase:
    split = dtype == "bf16"
    part = "bf16" if split else "fp32"
    signature = {
        "proj": f"*{dtype}", "proj_stride": "i64", "norm": "*fp32", "eps": "fp32", "u": f"*{dtype}",
        "scales": "*fp32", "totals": "*fp64", "states": f"*{part}", "deltas": f"*{part}", "table": "*i32",
        "cu_rows": "*i64", "out": f"*{dtype}", "total_rows": "i32",
        "key_heads": "i32", "value_heads": "i32",
    }  # fmt: skip
    constants = {
        "KEY_DIM": dim, "VALUE_DIM": dim, "CHUNK": 64,
        "BLOCK_K": 64 if split else 16, "SPLIT": split, "OUT_PARTS": 2 if split else 1, "STAGES": 2,
    }  # fmt: skip
    return AotCase(
        outputs, signature | dict.fromkeys(constants, "constexpr"), constants, num_warps=4 if split else 8
    )


AOT_CASES = [_case("bf16", 128), _case("bf16", 64), _case("fp32", 128)]
