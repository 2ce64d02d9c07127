"""The noise of mstar.kernels.gumbel on a GPU: equal words, and floats within a few ulps.

The Philox words are integers and the same bits everywhere. What turns them into noise is float32 log1p and log,
which libraries round differently in their last bit: libdevice (CUDA) and ocml (HIP) here, SLEEF in torch on a
CPU; in Triton's interpreter a float64 formula rounded to float32. So the noise differs by at most 2^-21 of
max(1, |noise|) between devices, and a draw differs from the CPU's only where the two best noised logits are
that close.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from mstar.kernels.aot import AotCase
from mstar.kernels.launch import interpreted, launch_options

# The counter's last word, _TOKEN_NOISE in kernels/gumbel.py.
TOKEN_NOISE = tl.constexpr(0x746F6B6E)
_BLOCK = 1024


def gumbel_gpu(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`mstar.kernels.gumbel.gumbel` in one launch. seeds, positions: [rows] int64. Returns [rows, vocab] float32."""
    rows = seeds.shape[0]
    out = torch.empty(rows, vocab_size, dtype=torch.float32, device=seeds.device)
    if rows:
        _gumbel_rows[(triton.cdiv(vocab_size, _BLOCK), rows)](
            seeds.contiguous(), positions.contiguous(), out, vocab_size,
            BLOCK=_BLOCK, NATIVE=not interpreted(), num_warps=4, **launch_options(seeds.device),
        )  # fmt: skip
    return out


def gumbel_at_gpu(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`mstar.kernels.gumbel.gumbel_at` in one launch. token_ids: [rows, n] int64. Returns [rows, n] float32."""
    rows, n = token_ids.shape
    out = torch.empty(rows, n, dtype=torch.float32, device=seeds.device)
    if rows and n:
        _gumbel_at[(triton.cdiv(n, _BLOCK), rows)](
            seeds.contiguous(), positions.contiguous(), token_ids.contiguous(), out, n,
            BLOCK=_BLOCK, NATIVE=not interpreted(), num_warps=4, **launch_options(seeds.device),
        )  # fmt: skip
    return out


@triton.jit
def log_f32(x, NATIVE: tl.constexpr):
    """The float32 logarithm, within 1 ulp: tl.log may be an approximation of the hardware."""
    if NATIVE:
        return libdevice.log(x)
    return tl.log(x.to(tl.float64)).to(tl.float32)


@triton.jit
def _log1p_f32(x, NATIVE: tl.constexpr):
    """log(1 + x) for -1 < x < 0, within 1 ulp.

    Without a library, Kahan's way in float64 (HP-15C Advanced Functions Handbook): the error of 1 + x cancels in
    log(1 + x) * x / ((1 + x) - 1). x is at least 2^-33 away from 0, so the divisor never is 0.
    """
    if NATIVE:
        return libdevice.log1p(x)
    wide = x.to(tl.float64)
    above = wide + 1.0
    return (tl.log(above) * (wide / (above - 1.0))).to(tl.float32)


@triton.jit
def to_gumbel(word, NATIVE: tl.constexpr):
    """`_to_gumbel` of kernels/gumbel.py, which says why. word: uint32. Returns float32."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    v = tl.minimum(v, 0.999999940395355224609375)  # 1 - 2^-24
    return -log_f32(-_log1p_f32(-v, NATIVE), NATIVE)


@triton.jit
def words_of_groups(seed, position, groups):
    """The Philox words of ids 4g..4g+3, one after another. groups: [n] int32. Returns [4 n] uint32."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, groups.to(tl.uint32), low, high, tl.full((), TOKEN_NOISE, tl.uint32))
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _gumbel_rows(seeds, positions, out, vocab, BLOCK: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    groups = tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    noise = to_gumbel(words_of_groups(tl.load(seeds + row), tl.load(positions + row), groups), NATIVE)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * vocab + ids, noise, mask=ids < vocab)


@triton.jit
def _gumbel_at(
    seeds, positions, token_ids, out, n, BLOCK: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    ids = tl.load(token_ids + row * n + columns, mask=inside, other=0)
    position = tl.load(positions + row)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    fixed = tl.full((), TOKEN_NOISE, tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds + row), (ids >> 2).to(tl.uint32), low, high, fixed)
    lane = ids & 3
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    tl.store(out + row * n + columns, to_gumbel(word, NATIVE), mask=inside)


_KEYS = {"seeds": "*i64", "positions": "*i64"}
_CONSTANTS = {"BLOCK": "constexpr", "NATIVE": "constexpr", "PDL": "constexpr"}
AOT_CASES = [
    AotCase(
        _gumbel_rows,
        {**_KEYS, "out": "*fp32", "vocab": "i32", **_CONSTANTS},
        {"BLOCK": _BLOCK, "NATIVE": True},
        pdl=True,
    ),
    AotCase(
        _gumbel_at,
        {**_KEYS, "token_ids": "*i64", "out": "*fp32", "n": "i32", **_CONSTANTS},
        {"BLOCK": _BLOCK, "NATIVE": True},
        pdl=True,
    ),
]
