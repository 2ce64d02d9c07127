"""Linear of 2 to 32 rows on the tensor cores with the weight in registers, without shared memory on its way.

The sum over k may run in any order, so each lane takes 16 bytes of a weight's row as they lie in memory and calls
them its part of the products; x is dealt alike. The warps of a program share k, and meet once, at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.linear.gpu.ahead import ask_ahead
from mstar.kernels.linear.gpu.dot import ARGUMENTS, PRODUCT_ALONE
from mstar.kernels.linear.gpu.epilogue import (
    known_squares,
    known_tile,
    multipliers,
    residual_tile,
    scale_and_store,
    touch,
)

MOST_ROWS = 32
MOST_UNROLLED = tl.constexpr(4)  # tiles of k that are written out, not a loop


@triton.jit(do_not_specialize=["rows", "n", "known_tiles", "ahead_lines", "ahead_first", "ahead_gap"])
def _mma(
    x, x_stride, weight, norm, known, eps, residual, residual_stride, out, sums, scaled, multiplier, scratch, counters,
    rows, n, known_tiles, ahead, ahead_lines, ahead_first, ahead_gap,
    K: tl.constexpr, KNOWN: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, PARTS: tl.constexpr, SOON: tl.constexpr, TOUCH: tl.constexpr,
    PRESCALE: tl.constexpr, UPCAST: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[:rows, :n] = epilogue(norm(x) W^T); x: [rows, K], weight: [n or 2n, K].

    PARTS: runs of k that warps of their own take, the program's warps. All else is as in `dot._dot`.
    """
    if PDL and SOON:
        tl.extra.cuda.gdc_launch_dependents()
    steps: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    whole: tl.constexpr = steps * BLOCK_K * SPLIT_K == K
    RUNS: tl.constexpr = BLOCK_K // (PARTS * 32)
    first = tl.program_id(1) * steps
    # Axes of a tile: 8 rows, a lane each; parts of k, a warp each; groups of 8 rows; runs of k, and 32 of a run, of
    # which each of four lanes has 8 side by side. Triton's coalescing deals them so: the contiguous axis to lanes,
    # then the others from the first one on.
    eight = tl.arange(0, 8)[:, None, None, None, None]
    k = tl.arange(0, PARTS)[None, :, None, None, None] * (RUNS * 32)
    k += tl.arange(0, RUNS)[None, None, None, :, None] * 32 + tl.arange(0, 32)[None, None, None, None, :]
    group = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N // 8)[None, None, :, None, None] * 8 + eight
    # Outputs and rows past the end read the last one's again and store nothing: loads need no mask for them.
    w_at = weight + tl.minimum(group, n - 1).to(tl.int64) * K
    u_at = w_at + n.to(tl.int64) * K
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = _tile(w_at, first, k, K, BLOCK_K, whole)
    u = _tile(u_at, first, k, K, BLOCK_K, whole) if GATED else w
    g = _norms(norm, first, K, BLOCK_K, PARTS, RUNS) if norm is not None else w
    m = multipliers(multiplier, outputs, n) if scaled is not None else w
    if PDL:
        if ahead is not None:
            ask_ahead(ahead, ahead_lines, ahead_first, ahead_gap, THREADS)
        tl.extra.cuda.gdc_wait()  # what is above reads weights alone; what is below, other kernels' results
        if not SOON:
            tl.extra.cuda.gdc_launch_dependents()
    line = tl.program_id(2) * ROWS + tl.arange(0, ROWS // 8)[None, None, :, None, None] * 8 + eight
    x_at = x + tl.minimum(line, rows - 1).to(tl.int64) * x_stride
    lines = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    acc_u = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([8, PARTS, ROWS // 8], tl.float32)
    f = _tile(x_at, first, k, K, BLOCK_K, whole)
    if PDL and TOUCH:
        touch(residual, residual_stride, multiplier, scaled, outputs, lines, rows, n)
    HELD: tl.constexpr = KNOWN * ROWS <= 16 * THREADS  # more a thread would spill
    part = acc
    if known is not None and HELD:
        part = known_tile(known, known_tiles, lines, rows, KNOWN)
    r = residual_tile(residual, residual_stride, outputs, lines, rows, n) if residual is not None else w
    if steps <= MOST_UNROLLED:
        for step in tl.static_range(steps):
            b, squares = _normed(f, g, norm, squares, PRESCALE, known is None)
            acc = _product(w, b, acc, PARTS, BLOCK_N, ROWS, RUNS, UPCAST)
            if GATED:
                acc_u = _product(u, b, acc_u, PARTS, BLOCK_N, ROWS, RUNS, UPCAST)
            if step + 1 < steps:
                w = _tile(w_at, first + step + 1, k, K, BLOCK_K, whole)
                u = _tile(u_at, first + step + 1, k, K, BLOCK_K, whole) if GATED else w
                g = _norms(norm, first + step + 1, K, BLOCK_K, PARTS, RUNS) if norm is not None else w
                f = _tile(x_at, first + step + 1, k, K, BLOCK_K, whole)
    else:
        for step in range(steps):
            # the next tiles are asked for before these are used; past the end, the last one again
            after = first + tl.minimum(step + 1, steps - 1)
            next_w = _tile(w_at, after, k, K, BLOCK_K, whole)
            next_u = _tile(u_at, after, k, K, BLOCK_K, whole) if GATED else next_w
            next_g = _norms(norm, after, K, BLOCK_K, PARTS, RUNS) if norm is not None else next_w
            next_f = _tile(x_at, after, k, K, BLOCK_K, whole)
            b, squares = _normed(f, g, norm, squares, PRESCALE, known is None)
            acc = _product(w, b, acc, PARTS, BLOCK_N, ROWS, RUNS, UPCAST)
            if GATED:
                acc_u = _product(u, b, acc_u, PARTS, BLOCK_N, ROWS, RUNS, UPCAST)
            w = next_w
            u = next_u
            g = next_g
            f = next_f
    y = tl.sum(acc, 0)
    up = tl.sum(acc_u, 0) if GATED else y
    square = y
    if known is not None:
        square = known_squares(part, known, known_tiles, lines, rows, KNOWN, HELD)
    elif norm is not None:
        square = tl.reshape(tl.permute(tl.sum(squares, 1), (1, 0)), [ROWS])
    scale_and_store(
        y, up, square, r, m, out, sums, scaled, scratch, counters, outputs, lines, rows, n, eps, K,
        norm is not None or known is not None, GATED, residual is not None, PRESCALE, SPLIT_K, BLOCK_N, ROWS,
    )  # fmt: skip


@triton.jit
def _tile(at, step, k, K: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """[8, PARTS, groups, RUNS, 32] of a weight or of x; `at`: where its rows begin."""
    k += step * BLOCK_K
    if WHOLE:
        return tl.load(at + k)
    return tl.load(at + k, mask=k < K, other=0.0)


@triton.jit
def _norms(norm, step, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, RUNS: tl.constexpr):
    """The norm's multipliers of a tile, [8, PARTS, 1, RUNS, 32], in the lanes that x's values are in.

    16 bytes are four of them, and a lane has eight: axes are the lanes of a run, those of rows, then as a tile's.
    """
    k = tl.arange(0, 4)[:, None, None, None, None, None] * 8
    k += tl.arange(0, 8)[None, :, None, None, None, None] * 0  # every row's lanes have the same
    k += tl.arange(0, PARTS)[None, None, :, None, None, None] * (RUNS * 32)
    k += tl.arange(0, RUNS)[None, None, None, :, None, None] * 32
    k += (
        tl.arange(0, 2)[None, None, None, None, :, None] * 4
        + tl.arange(0, 4)[None, None, None, None, None, :]
    )
    k += step * BLOCK_K
    g = tl.load(norm + k, mask=k < K, other=0.0)
    return tl.reshape(tl.permute(g, (1, 2, 3, 0, 4, 5)), [8, PARTS, 1, RUNS, 32])


@triton.jit
def _normed(f, g, norm, squares, PRESCALE: tl.constexpr, COUNT: tl.constexpr):
    """A tile of x times the norm's multipliers, in x's dtype, and the squares with the tile's added."""
    if norm is not None:
        value = f.to(tl.float32)
        if COUNT:
            squares += tl.sum(tl.sum(value * value, 4), 3)
        f = (value * g * PRESCALE).to(f.dtype)
    return f, squares


@triton.jit
def _dealt(tile, PARTS: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr):
    """[8, PARTS, ROWS / 8, RUNS, 32] as [PARTS, ROWS, RUNS * 32], k in the order in which mma's lanes hold it.

    Of a run's 32 values, lane t of four has 8t to 8t + 7: those become 2t, 2t + 1 and 8 further of two products.
    """
    tile = tl.reshape(tile, [8, PARTS, ROWS // 8, RUNS, 4, 4, 2])
    tile = tl.permute(tile, (1, 2, 0, 3, 5, 4, 6))
    return tl.reshape(tile, [PARTS, ROWS, RUNS * 32])


@triton.jit
def _product(
    w,
    b,
    acc,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    w = _dealt(w, PARTS, BLOCK_N, RUNS)
    b = tl.trans(_dealt(b, PARTS, ROWS, RUNS), (0, 2, 1))
    if UPCAST:
        w = w.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(w, b, acc, input_precision="ieee")


_CONSTANTS = (
    "K", "KNOWN", "ROWS", "GATED", "BLOCK_N", "BLOCK_K", "SPLIT_K", "PARTS", "SOON", "TOUCH", "PRESCALE", "UPCAST",
    "THREADS", "PDL",
)  # fmt: skip
_SIGNATURE = ARGUMENTS | dict.fromkeys(_CONSTANTS, "constexpr")
_TILE = {
    "K": 1024, "KNOWN": 1, "ROWS": 16, "GATED": False, "BLOCK_N": 16, "BLOCK_K": 1024, "SPLIT_K": 1, "PARTS": 4,
    "SOON": 0, "TOUCH": 0, "PRESCALE": 1.0, "UPCAST": False, "THREADS": 128,
}  # fmt: skip


def _case(absent: tuple[str, ...], out: str = "*bf16", **constants: object) -> AotCase:
    return AotCase(
        _mma,
        _SIGNATURE | dict.fromkeys(absent, "constexpr") | {"out": out},
        _TILE | dict.fromkeys(absent) | constants,
        num_stages=1,
        pdl=True,
        aligned=("x_stride",),
    )


AOT_CASES = [
    _case(("residual", "known", "sums", "scaled", "multiplier", "scratch", "counters")),
    _case(("residual", "sums", "scaled", "multiplier", "scratch", "counters"), KNOWN=64, GATED=True),
    _case(("norm", "residual", "sums", "scaled", "multiplier", "scratch", "counters"), KNOWN=64, GATED=True),
    _case(("norm", "known"), SPLIT_K=2, BLOCK_K=512, TOUCH=1, SOON=1),
    _case(PRODUCT_ALONE, "*fp32", SPLIT_K=2, BLOCK_K=512),
    _case(PRODUCT_ALONE, "*fp32", BLOCK_N=32),
]
