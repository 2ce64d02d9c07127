"""Linear of 1 to 8 rows on the ordinary cores: the weight streams past once, each program owns whole outputs.

Products and sums are float32 and never rounded before the epilogue. Each thread adds up its own vectors of k, so
the shuffles of a reduction are paid once an output, not once a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.linear.gpu.ahead import SIGNATURE as AHEAD
from mstar.kernels.linear.gpu.ahead import ask_ahead
from mstar.kernels.linear.gpu.epilogue import multipliers, residual_tile, store_outputs, touch

MOST_ROWS = 8


@triton.jit(do_not_specialize=["rows", "n", "ahead_lines", "ahead_first", "ahead_gap"])
def _fma(
    x, x_stride, weight, norm, eps, residual, residual_stride, out, sums, scaled, multiplier, rows, n,
    ahead, ahead_lines, ahead_first, ahead_gap,
    K: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, UNROLL: tl.constexpr,
    SOON: tl.constexpr, PRELOAD: tl.constexpr, TOUCH: tl.constexpr, PRESCALE: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[:rows, :n] = epilogue(norm(x) W^T); x: [rows, K], weight: [n or 2n, K].

    ROWS: rows, or more, up to 8. VECTOR: values of 16 bytes. UNROLL: tiles of k are written out, not a loop.
    PRELOAD: all of k is asked for before the wait, too. TOUCH: see `touch`.
    sums: None, or where the squares of what is stored go, see `store_outputs`.
    ahead: None, or a weight to ask the second cache for, see `ask_ahead`.
    SOON: the next kernel may start with this one, not only once this one has waited for those before it.
    """
    if PDL and SOON:
        tl.extra.cuda.gdc_launch_dependents()
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs and rows past the end read the last one's again and store nothing: loads need no mask for them.
    w_at = weight + tl.minimum(outputs, n - 1).to(tl.int64)[:, None] * K
    u_at = w_at + n.to(tl.int64) * K
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    w = _weights(w_at, 0, K, BLOCK_K)
    u = _weights(u_at, 0, K, BLOCK_K) if GATED else w
    g = _norms(norm, 0, K, BLOCK_K) if norm is not None else w
    later = _later(w_at, u_at, norm, K, BLOCK_K, steps, GATED) if PRELOAD else ()
    m = multipliers(multiplier, outputs, n) if scaled is not None else w
    if PDL:
        if ahead is not None:
            ask_ahead(ahead, ahead_lines, ahead_first, ahead_gap, THREADS)
        tl.extra.cuda.gdc_wait()  # what is above reads weights alone; what is below, other kernels' results
        if not SOON:
            tl.extra.cuda.gdc_launch_dependents()
    lines = tl.arange(0, ROWS)
    if PDL and TOUCH:
        touch(residual, residual_stride, multiplier, scaled, outputs, lines, rows, n)
    r = residual_tile(residual, residual_stride, outputs, lines, rows, n) if residual is not None else w
    acc = _zeros(ROWS, BLOCK_N, BLOCK_K // VECTOR)
    acc_u = _zeros(ROWS if GATED else 0, BLOCK_N, BLOCK_K // VECTOR)
    squares = _zeros(ROWS if norm is not None else 0, 1, BLOCK_K // VECTOR)
    f = _inputs(x, x_stride, rows, 0, K, ROWS, BLOCK_K)
    inputs = ()
    if PRELOAD:
        for step in tl.static_range(1, steps):
            inputs += (_inputs(x, x_stride, rows, step, K, ROWS, BLOCK_K),)  # type: ignore[assignment]
    if UNROLL or PRELOAD:
        for step in tl.static_range(steps):
            values, squares = _normed(f, g, squares, ROWS, VECTOR)
            acc = _add(acc, values, w, ROWS, VECTOR)
            if GATED:
                acc_u = _add(acc_u, values, u, ROWS, VECTOR)
            if step + 1 < steps:
                if PRELOAD:
                    f = inputs[step]
                    w, u, g = later[step]
                else:
                    f = _inputs(x, x_stride, rows, step + 1, K, ROWS, BLOCK_K)
                    w = _weights(w_at, step + 1, K, BLOCK_K)
                    u = _weights(u_at, step + 1, K, BLOCK_K) if GATED else w
                    g = _norms(norm, step + 1, K, BLOCK_K) if norm is not None else w
    else:
        for step in range(steps):
            # the next tiles are asked for before these are used; past the end, the mask asks for nothing
            next_w = _weights(w_at, step + 1, K, BLOCK_K)
            next_u = _weights(u_at, step + 1, K, BLOCK_K) if GATED else next_w
            next_g = _norms(norm, step + 1, K, BLOCK_K) if norm is not None else next_w
            next_f = _inputs(x, x_stride, rows, step + 1, K, ROWS, BLOCK_K)
            values, squares = _normed(f, g, squares, ROWS, VECTOR)
            acc = _add(acc, values, w, ROWS, VECTOR)
            if GATED:
                acc_u = _add(acc_u, values, u, ROWS, VECTOR)
            w = next_w
            u = next_u
            g = next_g
            f = next_f
    y = tl.sum(_stacked(acc, ROWS), 1)
    up = tl.sum(_stacked(acc_u, ROWS), 1) if GATED else y
    if norm is not None:
        scale = tl.rsqrt(tl.sum(_stacked(squares, ROWS), 1) / K + eps)
        y = y * scale
        up = up * scale
    store_outputs(
        y, up, r, m, out, sums, scaled, outputs, lines, rows, n, GATED, residual is not None, PRESCALE
    )


@triton.jit
def _stacked(parts, ROWS: tl.constexpr):
    """A tuple by row of [A, B] as [A, B, ROWS]: one reduction for all rows, so that warps meet once."""
    if ROWS == 8:
        parts = _joined(parts, 4)
    if ROWS >= 4:
        parts = _joined(parts, 2)
    if ROWS >= 2:
        parts = _joined(parts, 1)
    return tl.reshape(parts[0], [parts[0].shape[0], parts[0].shape[1], ROWS])


@triton.jit
def _joined(parts, HALF: tl.constexpr):
    """Half as many parts, each of two that lie HALF apart, side by side in its last dimension."""
    joined = ()
    for part in tl.static_range(HALF):
        both = tl.join(parts[part], parts[part + HALF])
        if len(both.shape) == 4:
            both = tl.reshape(both, [both.shape[0], both.shape[1], both.shape[2] * 2])
        joined += (both,)  # type: ignore[assignment]
    return joined


@triton.jit
def _columns(step, BLOCK_K: tl.constexpr):
    return step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def _weights(at, step, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of weights, [BLOCK_N, BLOCK_K]; `at`: where its outputs' rows begin."""
    k = _columns(step, BLOCK_K)
    if K == BLOCK_K:
        return tl.load(at + k, eviction_policy="evict_first")
    return tl.load(at + k, mask=k < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _later(
    w_at, u_at, norm, K: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """All tiles of k but the first: a tuple of what `_weights` and `_norms` give for each."""
    tiles = ()
    for step in tl.static_range(1, STEPS):
        w = _weights(w_at, step, K, BLOCK_K)
        u = _weights(u_at, step, K, BLOCK_K) if GATED else w
        g = _norms(norm, step, K, BLOCK_K) if norm is not None else w
        tiles += ((w, u, g),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _norms(norm, step, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The norm's multipliers of a tile, [1, BLOCK_K]."""
    k = _columns(step, BLOCK_K)
    return tl.load(norm + k, mask=k < K, other=0.0, eviction_policy="evict_last")


@triton.jit
def _inputs(x, x_stride, rows, step, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of x: a tuple by row of [1, BLOCK_K]."""
    k = _columns(step, BLOCK_K)
    values = ()
    for row in tl.static_range(ROWS):
        at = x + tl.minimum(row, rows - 1) * x_stride
        values += (tl.load(at + k, mask=k < K, other=0.0, eviction_policy="evict_last"),)  # type: ignore[assignment]
    return values


@triton.jit
def _normed(f, g, squares, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """A tile of x in float32, times the norm's multipliers, and the squares with the tile's added."""
    values = ()
    sums = ()
    for row in tl.static_range(ROWS):
        value = f[row].to(tl.float32)
        if len(squares) > 0:
            sums += (squares[row] + by_vector(value * value, VECTOR),)  # type: ignore[assignment]
            value = value * g
        values += (value,)  # type: ignore[assignment]
    return values, sums


@triton.jit
def by_vector(products, VECTOR: tl.constexpr):
    """Sums of each thread's own vectors: [A, B] -> [A, B / VECTOR]; no thread asks another."""
    shape: tl.constexpr = products.shape
    return tl.sum(tl.reshape(products, [shape[0], shape[1] // VECTOR, VECTOR]), 2)


@triton.jit
def _zeros(COUNT: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (tl.zeros([A, B], tl.float32),)  # type: ignore[assignment]
    return zeros


@triton.jit
def _add(acc, values, w, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """Sums with the tile's added: a tuple by row of [BLOCK_N, BLOCK_K / VECTOR]."""
    f = w.to(tl.float32)
    sums = ()
    for row in tl.static_range(ROWS):
        sums += (acc[row] + by_vector(values[row] * f, VECTOR),)  # type: ignore[assignment]
    return sums


_SIGNATURE = {
    "x": "*bf16", "x_stride": "i32", "weight": "*bf16", "norm": "*fp32", "eps": "fp32",
    "residual": "*bf16", "residual_stride": "i32", "out": "*bf16", "sums": "*fp32", "scaled": "*bf16",
    "multiplier": "*fp32", "rows": "i32", "n": "i32",
    **AHEAD,
    **dict.fromkeys(
        (
            "K", "ROWS", "GATED", "BLOCK_N", "BLOCK_K", "VECTOR", "UNROLL", "SOON", "PRELOAD", "TOUCH", "PRESCALE",
            "THREADS", "PDL",
        ),
        "constexpr",
    ),
}  # fmt: skip
_TILE = {
    "K": 1024,
    "GATED": False,
    "BLOCK_N": 4,
    "VECTOR": 8,
    "SOON": 0,
    "PRELOAD": 0,
    "TOUCH": 0,
    "PRESCALE": 1.0,
    "THREADS": 128,
}
AOT_CASES = [
    AotCase(
        _fma,
        _SIGNATURE
        | {"residual": "constexpr", "sums": "constexpr", "scaled": "constexpr", "multiplier": "constexpr"},
        _TILE
        | {
            "residual": None,
            "sums": None,
            "scaled": None,
            "multiplier": None,
            "GATED": True,
            "ROWS": 1,
            "BLOCK_K": 1024,
            "UNROLL": 1,
        },
        pdl=True,
    ),
    AotCase(
        _fma,
        _SIGNATURE | {"norm": "constexpr"},
        _TILE | {"norm": None, "ROWS": 4, "BLOCK_K": 512, "UNROLL": 0, "TOUCH": 1},
        num_warps=2,
        pdl=True,
    ),
    AotCase(
        _fma,
        _SIGNATURE
        | {
            "norm": "constexpr",
            "residual": "constexpr",
            "sums": "constexpr",
            "scaled": "constexpr",
            "multiplier": "constexpr",
            "out": "*fp32",
        },
        _TILE
        | {
            "norm": None,
            "residual": None,
            "sums": None,
            "scaled": None,
            "multiplier": None,
            "ROWS": 2,
            "BLOCK_K": 512,
            "UNROLL": 1,
        },
        num_warps=2,
        pdl=True,
    ),
]
