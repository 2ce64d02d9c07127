"""Linear of 2 to 64 rows on the tensor cores: W tile [BLOCK_N, BLOCK_K] times x^T tile [BLOCK_K, ROWS].

The weight is the side that the tensor cores want in 16s or 64s, so few rows waste little. Where the outputs alone
are too few programs for a GPU, k is split over programs; the last of them to arrive adds up, in order, or `add_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.linear.gpu.ahead import SIGNATURE as AHEAD
from mstar.kernels.linear.gpu.ahead import ask_ahead
from mstar.kernels.linear.gpu.epilogue import (
    known_squares,
    known_tile,
    multipliers,
    residual_tile,
    scale_and_store,
    touch,
)
from mstar.kernels.linear.gpu.fma import by_vector

MOST_ROWS = 64


def block_rows(rows: int) -> int:
    """Rows of a tile for so many rows of x: 8 is what mma and wgmma take at least, 16 what AMD's units do."""
    return max(16 if torch.version.hip else 8, min(MOST_ROWS, 1 << (rows - 1).bit_length()))


@triton.jit(do_not_specialize=["rows", "n", "known_tiles", "ahead_lines", "ahead_first", "ahead_gap"])
def _dot(
    x, x_stride, weight, norm, known, eps, residual, residual_stride, out, sums, scaled, multiplier, scratch, counters,
    rows, n, known_tiles, ahead, ahead_lines, ahead_first, ahead_gap,
    K: tl.constexpr, KNOWN: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, PREFETCH: tl.constexpr,
    SOON: tl.constexpr, TOUCH: tl.constexpr, VECTOR: tl.constexpr, PRESCALE: tl.constexpr, UPCAST: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[:rows, :n] = epilogue(norm(x) W^T); x: [rows, K], weight: [n or 2n, K].

    known: None, or [known_tiles, rows] float32, whose columns add up to the squares of x's rows; KNOWN: at least
    known_tiles, a power of two. sums: None, or where the squares of what is stored go, see `store_outputs`.
    scratch, counters: of `scale_and_store`. VECTOR: values of 16 bytes.
    ahead: None, or a weight to ask the second cache for, see `ask_ahead`.
    SOON: the next kernel may start with this one, not only once this one has waited for those before it. TOUCH: see
    `touch`.
    PREFETCH: the first tile of weights is asked for before the kernel ahead ended. PRESCALE: what x * norm is
    multiplied by before it is rounded to the model's dtype, so that fp16 holds it; the result is divided by it.
    UPCAST: products of float32 copies, for the interpreter, which has no bf16.
    """
    if PDL and SOON:
        tl.extra.cuda.gdc_launch_dependents()
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    # Outputs and rows past the end read the last one's again and store nothing: loads need no mask for them.
    w_at = weight + tl.minimum(outputs, n - 1).to(tl.int64)[:, None] * K
    u_at = w_at + n.to(tl.int64) * K
    x_at = x + tl.minimum(lines, rows - 1).to(tl.int64)[:, None] * x_stride
    steps: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    whole: tl.constexpr = steps * BLOCK_K * SPLIT_K == K
    first = tl.program_id(1) * steps
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    acc_u = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K // VECTOR], tl.float32)
    if PREFETCH:
        w = _tile(w_at, first, K, BLOCK_K, whole)
        u = _tile(u_at, first, K, BLOCK_K, whole) if GATED else w
    m = multipliers(multiplier, outputs, n) if scaled is not None else acc
    if PDL:
        if ahead is not None:
            ask_ahead(ahead, ahead_lines, ahead_first, ahead_gap, THREADS)
        tl.extra.cuda.gdc_wait()  # what is above reads weights alone; what is below, other kernels' results
        if not SOON:
            tl.extra.cuda.gdc_launch_dependents()
    if PDL and TOUCH:
        touch(residual, residual_stride, multiplier, scaled, outputs, lines, rows, n)
    HELD: tl.constexpr = KNOWN * ROWS <= 16 * THREADS  # more a thread would spill
    part = acc
    if known is not None and HELD:
        part = known_tile(known, known_tiles, lines, rows, KNOWN)
    r = residual_tile(residual, residual_stride, outputs, lines, rows, n) if residual is not None else acc
    if PREFETCH:
        b, squares = _inputs(x_at, first, norm, squares, K, BLOCK_K, whole, VECTOR, PRESCALE, known is None)
        acc = _product(w, b, acc, UPCAST)
        if GATED:
            acc_u = _product(u, b, acc_u, UPCAST)
    for step in range(1 if PREFETCH else 0, steps):
        w = _tile(w_at, first + step, K, BLOCK_K, whole)
        b, squares = _inputs(
            x_at, first + step, norm, squares, K, BLOCK_K, whole, VECTOR, PRESCALE, known is None
        )
        acc = _product(w, b, acc, UPCAST)
        if GATED:
            u = _tile(u_at, first + step, K, BLOCK_K, whole)
            acc_u = _product(u, b, acc_u, UPCAST)
    square = acc
    if known is not None:
        square = known_squares(part, known, known_tiles, lines, rows, KNOWN, HELD)
    elif norm is not None:
        square = tl.sum(squares, 1)
    scale_and_store(
        acc, acc_u, square, r, m, out, sums, scaled, scratch, counters, outputs, lines, rows, n, eps, K,
        norm is not None or known is not None, GATED, residual is not None, PRESCALE, SPLIT_K, BLOCK_N, ROWS,
    )  # fmt: skip


@triton.jit
def _tile(at, step, K: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of weights, [BLOCK_N, BLOCK_K]; `at`: where its outputs' rows begin."""
    k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    if WHOLE:
        return tl.load(at + k, eviction_policy="evict_first")
    return tl.load(at + k, mask=k < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _inputs(
    at, step, norm, squares,
    K: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, VECTOR: tl.constexpr, PRESCALE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """A tile of x, [ROWS, BLOCK_K], times the norm's multipliers, and the squares with (COUNT) the tile's added."""
    k = step * BLOCK_K + tl.arange(0, BLOCK_K)
    if WHOLE:
        b = tl.load(at + k[None, :])
    else:
        b = tl.load(at + k[None, :], mask=(k < K)[None, :], other=0.0)
    if norm is not None:
        f = b.to(tl.float32)
        if COUNT:
            squares += by_vector(f * f, VECTOR)
        g = tl.load(norm + k, mask=k < K, other=0.0, eviction_policy="evict_last") * PRESCALE
        b = (f * g[None, :]).to(b.dtype)
    return b, squares


@triton.jit
def _product(w, b, acc, UPCAST: tl.constexpr):
    if UPCAST:
        w = w.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(w, tl.trans(b), acc, input_precision="ieee")


_CONSTANTS = (
    "K", "KNOWN", "ROWS", "GATED", "BLOCK_N", "BLOCK_K", "SPLIT_K", "PREFETCH", "SOON", "TOUCH", "VECTOR",
    "PRESCALE", "UPCAST", "THREADS", "PDL",
)  # fmt: skip
# of `mma` too
ARGUMENTS = {
    "x": "*bf16", "x_stride": "i32", "weight": "*bf16", "norm": "*fp32", "known": "*fp32", "eps": "fp32",
    "residual": "*bf16", "residual_stride": "i32", "out": "*bf16", "sums": "*fp32", "scaled": "*bf16",
    "multiplier": "*fp32", "scratch": "*fp32",
    "counters": "*i32", "rows": "i32", "n": "i32", "known_tiles": "i32",
    **AHEAD,
}  # fmt: skip
# what the product alone has not: logits, and a split whose parts a kernel of their own adds up
PRODUCT_ALONE = ("norm", "known", "residual", "sums", "scaled", "multiplier", "scratch", "counters")
_SIGNATURE = ARGUMENTS | dict.fromkeys(_CONSTANTS, "constexpr")
_TILE = {
    "K": 1024, "KNOWN": 1, "ROWS": 16, "GATED": False, "BLOCK_N": 32, "BLOCK_K": 128, "SPLIT_K": 1, "PREFETCH": 1,
    "SOON": 0, "TOUCH": 0, "VECTOR": 8, "PRESCALE": 1.0, "UPCAST": False, "THREADS": 128,
}  # fmt: skip


def _case(absent: tuple[str, ...], out: str = "*bf16", **constants: object) -> AotCase:
    return AotCase(
        _dot,
        _SIGNATURE | dict.fromkeys(absent, "constexpr") | {"out": out},
        _TILE | dict.fromkeys(absent) | constants,
        num_stages=3,
        pdl=True,
    )


AOT_CASES = [
    _case(("residual", "known", "sums", "scaled", "multiplier", "scratch", "counters")),
    _case(("residual", "sums", "scaled", "multiplier", "scratch", "counters"), KNOWN=64),
    _case(("norm", "residual", "sums", "scaled", "multiplier", "scratch", "counters"), KNOWN=64, SOON=1),
    _case(
        ("norm", "residual", "sums", "scaled", "multiplier", "scratch", "counters"), KNOWN=1024, GATED=True
    ),
    _case(
        ("residual", "known", "sums", "scaled", "multiplier", "scratch", "counters"),
        GATED=True,
        ROWS=32,
        PREFETCH=0,
        BLOCK_K=64,
    ),
    _case(("norm", "known"), SPLIT_K=4, TOUCH=1),
    _case(PRODUCT_ALONE, "*fp32", SPLIT_K=4, BLOCK_N=64),
    _case(PRODUCT_ALONE, "*fp32", BLOCK_N=64),
]
