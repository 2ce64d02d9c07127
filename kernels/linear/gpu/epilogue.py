"""What follows the product of a linear: the roundings of the reference, and kernels for products of cuBLAS."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.launch import launch_options
from mstar.kernels.linear.gpu.arrivals import arrives_last

BLOCK = 1024


@triton.jit
def rounded(y, dtype: tl.constexpr):
    """y as the model's dtype holds it, float32 again for what follows."""
    return y.to(dtype).to(tl.float32)


@triton.jit
def gated_value(gate, up, dtype: tl.constexpr):
    """silu(gate) * up with the reference's roundings: the products, silu, and (by who stores it) the result."""
    gate = rounded(gate, dtype)
    return rounded(gate / (1.0 + tl.exp(-gate)), dtype) * rounded(up, dtype)


@triton.jit
def residual_tile(residual, stride, outputs, lines, rows, n):
    """The residual of a tile, [outputs, lines], asked for long before it is added."""
    inside = (outputs < n)[:, None] & (lines < rows)[None, :]
    return tl.load(residual + lines.to(tl.int64)[None, :] * stride + outputs[:, None], mask=inside, other=0.0)


@triton.jit
def multipliers(multiplier, outputs, n):
    """Of a tile's outputs, for the norm behind: [outputs] float32; weights, so they may be read before a wait."""
    return tl.load(multiplier + outputs, mask=outputs < n, other=0.0)


@triton.jit
def touch(residual, stride, multiplier, scaled, outputs, lines, rows, n):
    """Asks the first cache for a tile of the residual, and for the multipliers of what is stored.

    ptxas moves their loads down to where they are used, by the few threads that store; their way through memory
    would be waited for there. It leaves a prefetch where it stands.
    """
    if residual is not None:
        inside = (
            tl.minimum(lines, rows - 1).to(tl.int64)[None, :] * stride + tl.minimum(outputs, n - 1)[:, None]
        )
        _ask_first_cache(residual + inside)
    if scaled is not None:
        _ask_first_cache(multiplier + tl.minimum(outputs, n - 1))


@triton.jit
def _ask_first_cache(at):
    asm: tl.constexpr = "prefetch.global.L1 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [at.to(tl.int64)], tl.int32, is_pure=False, pack=1)


@triton.jit
def store_outputs(
    y, up, r, m, out, sums, scaled, outputs, lines, rows, n,
    GATED: tl.constexpr, ADD: tl.constexpr, PRESCALE: tl.constexpr,
):  # fmt: skip
    """Stores y, [outputs, lines] float32, as out[lines, outputs]: gate of `up`, or added to r, if so.

    sums: None, or [tiles of outputs, rows] float32, receives each row's squares of what this tile stored.
    scaled: None, or like out, receives what is stored times m and PRESCALE; m: of `multipliers`.
    """
    if GATED:
        y = gated_value(y, up, out.dtype.element_ty)
    if ADD:
        y = rounded(y, out.dtype.element_ty) + r.to(tl.float32)
    inside = (outputs < n)[:, None] & (lines < rows)[None, :]
    at = out + lines.to(tl.int64)[None, :] * n + outputs[:, None]
    y = y.to(out.dtype.element_ty)
    tl.store(at, y, mask=inside)
    if scaled is not None:
        product = y.to(tl.float32) * m[:, None] * PRESCALE
        to = scaled + lines.to(tl.int64)[None, :] * n + outputs[:, None]
        tl.store(to, product.to(scaled.dtype.element_ty), mask=inside)
    if sums is not None:
        f = tl.where(inside, y.to(tl.float32), 0.0)
        tl.store(sums + tl.program_id(0) * rows + lines, tl.sum(f * f, 0), mask=lines < rows)


@triton.jit
def known_tile(known, tiles, lines, rows, KNOWN: tl.constexpr):
    """Parts of rows' squares, as `store_outputs` left them: [KNOWN, lines] float32, to be added up along the first.

    Asked for long before they are needed.
    """
    return _known_part(known, 0, tiles, lines, rows, KNOWN)


@triton.jit
def known_squares(part, known, tiles, lines, rows, KNOWN: tl.constexpr, HELD: tl.constexpr):
    """The squares of rows: [lines] float32, of `known_tile`'s part (HELD), or read here where that is too much."""
    if HELD:
        square = tl.sum(part, 0)
    else:
        square = tl.zeros([lines.shape[0]], tl.float32)
        for first in range(0, KNOWN, 64):
            square += tl.sum(_known_part(known, first, tiles, lines, rows, 64), 0)
    return square


@triton.jit
def _known_part(known, first, tiles, lines, rows, COUNT: tl.constexpr):
    tile = first + tl.arange(0, COUNT)[:, None]
    inside = (tile < tiles) & (lines < rows)[None, :]
    return tl.load(known + tile * rows + lines[None, :], mask=inside, other=0.0)


@triton.jit
def scale_and_store(
    y, up, square, r, m, out, sums, scaled, scratch, counters, outputs, lines, rows, n, eps,
    K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, PRESCALE: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`store_outputs` of a tile, divided by the root of its rows' mean squares (NORM; square: [lines]).

    Of a tile that SPLIT_K programs have parts of, the last one to arrive adds them up, in order. Programs: tiles of
    outputs, parts, tiles of rows. scratch: a tile [BLOCK_N, ROWS] float32 a program; counters: [tiles of the output]
    int32 zeros, zeros again at the end. No counters: the parts stay, out[part, lines, outputs] float32.
    """
    if NORM:
        scale = tl.rsqrt(square / K + eps) / PRESCALE
        y = y * scale[None, :]
        up = up * scale[None, :]
    if SPLIT_K == 1:
        store_outputs(y, up, r, m, out, sums, scaled, outputs, lines, rows, n, GATED, ADD, PRESCALE)
    elif counters is None:
        inside = (outputs < n)[:, None] & (lines < rows)[None, :]
        at = out + tl.program_id(1).to(tl.int64) * rows * n
        tl.store(at + lines.to(tl.int64)[None, :] * n + outputs[:, None], y, mask=inside)
    else:
        # The parts of a tile lie side by side, each as its program holds it, surplus rows and outputs too.
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        part_size: tl.constexpr = BLOCK_N * ROWS
        part = scratch + tile.to(tl.int64) * (SPLIT_K * part_size)
        part += tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(part + tl.program_id(1) * part_size, y)
        if arrives_last(counters + tile, SPLIT_K):
            total = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for split in tl.static_range(SPLIT_K):
                # past the first cache, which other programs' stores do not reach
                total += tl.load(part + split * part_size, cache_modifier=".cg")
            store_outputs(total, up, r, m, out, sums, scaled, outputs, lines, rows, n, GATED, ADD, PRESCALE)
            tl.store(counters + tile, 0)


def silu_gated(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of both: [rows, 2 * n], gate then up, contiguous. Returns [rows, n]."""
    rows, n = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, n, dtype=both.dtype, device=both.device)
    _silu_gated[(triton.cdiv(n, BLOCK), rows)](
        both, out, n, BLOCK=BLOCK, num_warps=4, **launch_options(both.device)
    )
    return out


@triton.jit
def _silu_gated(both, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    gate = tl.load(both + row * 2 * n + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * n + n + columns, mask=inside, other=0.0).to(tl.float32)
    y = gated_value(gate, up, out.dtype.element_ty)
    tl.store(out + row * n + columns, y.to(out.dtype.element_ty), mask=inside)


AOT_CASES = [
    AotCase(
        _silu_gated,
        {"both": "*bf16", "out": "*bf16", "n": "i32", "BLOCK": "constexpr", "PDL": "constexpr"},
        {"BLOCK": BLOCK},
        pdl=True,
    ),
]
