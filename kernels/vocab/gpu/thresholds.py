"""Top-k, top-p and min-p of rows as thresholds, without a sort: `mstar.kernels.vocab.filters.thresholds`.

Four launches. The row's maximum; a histogram of how far below it the scaled logits are; the logits that the
histogram cannot rule out, gathered; and one program a row that finds the k-th of these, and where the mass
ends: of few by comparing each with each, of many bit by bit. A row's usual candidates are some hundreds of its
248,320 logits; rows with more than fit are read as a whole instead, which takes longer and gives the same.

Counts and masses are integers (a mass is exp(scaled - best) in units of 2^-42), so no sum depends on its order,
on the batch, or on how a row is split. Against the reference, whose masses are float64, an exp is wrong by 2^-23
of itself and what lies below 2^-42 of the best is lost, so a cut differs only where the mass before a token is
within 1e-6 of top_p's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.launch import interpreted, launch_options
from mstar.kernels.vocab.gpu.candidates import (
    BINS,
    MOST_IDS,
    aot_case,
    collect,
    count_bins,
    masses,
    row_best,
    row_maxima,
)
from mstar.kernels.vocab.gpu.draw import LEAST_TEMPERATURE, splits_of
from mstar.kernels.vocab.gpu.noise import log_f32

_BLOCK = 1024
# The last launch has one program a row: 16 warps with eight logits each hide more of a load's way than fewer.
_SELECT_BLOCK = 4096
# Up to so many candidates are compared each with each: 512 * 512 pairs cost less than the 32 passes of the others.
_FEW = 512
# Candidates that have room: 16,384 float32 are 64 KiB a row.
CANDIDATES = 16384


def filter_thresholds(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    vocab: int,
    *,
    rows_per_seq: int = 1,
    candidates: int = CANDIDATES,
) -> torch.Tensor:
    """The least scaled logit that each row's filters keep, for `partial_draws`.

    logits: [rows, vocab or more] float32, columns from `vocab` on not looked at; -inf is allowed. slots [B] int32,
    B * rows_per_seq = rows. The sampler's registers by slot: temperature, top_p (1 for off) and min_p (0 for off)
    float32, top_k int64 (0 for off). A scaled logit is logit / temperature. candidates: how many of a row's logits
    have room before the whole row is read (tests set it; no result depends on it).

    Returns [rows] float32: at most the row's largest scaled logit, -inf for rows without filters and greedy ones.
    """
    rows = logits.shape[0]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and slots.shape[0] * rows_per_seq == rows
    assert slots.is_contiguous()
    assert 0 < vocab <= min(logits.shape[1], MOST_IDS)
    splits, tiles = splits_of(rows, vocab)

    def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    maxima = scratch(torch.float32, splits, rows)
    counts = scratch(torch.int32, rows, BINS.value)
    total = scratch(torch.int64, rows)
    found = scratch(torch.int32, rows)
    kept = scratch(torch.float32, rows, candidates)
    least = scratch(torch.float32, rows)
    registers = (slots, temperature, top_k, top_p, min_p)
    shape = (logits.stride(0), vocab, rows, splits)
    options = {"ROWS_PER_SEQ": rows_per_seq, "NATIVE": not interpreted(), **launch_options(logits.device)}
    wide = {"SPLITS": triton.next_power_of_2(splits), "BLOCK": _BLOCK, "TILES": tiles, "num_warps": 4}
    row_maxima[(splits, rows)](logits, *registers, maxima, counts, total, found, *shape, **wide, **options)
    count_bins[(splits, rows)](logits, *registers, maxima, counts, total, *shape, **wide, **options)
    collect[(splits, rows)](
        logits, *registers, maxima, counts, total, found, kept, *shape, candidates, **wide, **options
    )
    _select[(rows,)](
        logits, *registers, maxima, total, found, kept, least, *shape, candidates,
        SPLITS=wide["SPLITS"], BLOCK=min(_SELECT_BLOCK, triton.next_power_of_2(vocab)), FEW=_FEW,
        num_warps=16, **options,
    )  # fmt: skip
    return least


@triton.jit
def _keys(x):
    """float32 as uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _value(key):
    """The float32 of a key; -inf for 0, which is below every number."""
    bits = tl.where((key >> 31) != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _largest(
    source, heat, number, target, best, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr
):
    """The largest key with at least `target` (float64) logits or mass at or above it, two bits a pass."""
    key = tl.full((), 0, tl.uint32)
    shift = tl.full((), 30, tl.int32)
    for _ in range(16):
        unit = tl.full((), 1, tl.uint32) << shift.to(tl.uint32)
        one = tl.zeros((BLOCK,), tl.int64)  # what is at or above key + 1, 2 and 3 units
        two = tl.zeros((BLOCK,), tl.int64)
        three = tl.zeros((BLOCK,), tl.int64)
        start = number * 0
        while start < number:  # the interpreter's range takes no bound of a tensor
            column = start + tl.arange(0, BLOCK)
            inside = column < number
            x = tl.load(source + column, mask=inside, other=float("-inf"))
            scaled = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + heat)
            keys = tl.where(inside, _keys(scaled), 0)  # 0 is never at or above
            if WEIGHTED:
                weight = masses(scaled, best, NATIVE)
            else:
                weight = tl.full((BLOCK,), 1, tl.int64)
            one += tl.where(keys >= key + unit, weight, 0)
            two += tl.where(keys >= key + unit * 2, weight, 0)
            three += tl.where(keys >= key + unit * 3, weight, 0)
            start += BLOCK
        enough = (tl.sum(one, 0).to(tl.float64) >= target).to(tl.uint32)
        enough += (tl.sum(two, 0).to(tl.float64) >= target).to(tl.uint32)
        enough += (tl.sum(three, 0).to(tl.float64) >= target).to(tl.uint32)
        key += enough * unit
        shift -= 2
    return key


@triton.jit
def _mass_from(source, heat, number, key, best, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    """The mass of the logits at or above a key, int64."""
    mass = tl.zeros((BLOCK,), tl.int64)
    start = number * 0
    while start < number:
        column = start + tl.arange(0, BLOCK)
        x = tl.load(source + column, mask=column < number, other=float("-inf"))
        scaled = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + heat)
        mass += tl.where(_keys(scaled) >= key, masses(scaled, best, NATIVE), 0)
        start += BLOCK
    return tl.sum(mass, 0)


@triton.jit
def _among_few(source, number, k, p, total, best, FEW: tl.constexpr, NATIVE: tl.constexpr):
    """The key of the threshold of at most FEW scaled logits, each compared with each in one pass."""
    each = tl.arange(0, FEW)
    x = tl.load(source + each, mask=each < number, other=float("-inf"))
    keys = tl.where(each < number, _keys(x), 0)
    above = tl.zeros((FEW,), tl.int32)  # how many are above each, and their mass
    before = tl.zeros((FEW,), tl.int64)
    start = number * 0
    while start < number:
        column = start + tl.arange(0, 32)
        y = tl.load(source + column, mask=column < number, other=float("-inf"))
        higher = tl.where(column < number, _keys(y), 0)[None, :] > keys[:, None]
        above += tl.sum(higher.to(tl.int32), 1)
        before += tl.sum(tl.where(higher, masses(y, best, NATIVE)[None, :], 0), 1)
        start += 32
    key = tl.full((), 0, tl.uint32)
    whole = total
    if k > 0:
        key = tl.min(tl.where((keys > 0) & (above < k), keys, 0xFFFFFFFF), 0)
        whole = tl.sum(tl.where(keys >= key, masses(x, best, NATIVE), 0), 0)
    if p < 1.0:
        target = p.to(tl.float64) * whole.to(tl.float64)
        inside = (keys > 0) & (keys >= key) & (before.to(tl.float64) < target)
        key = tl.min(tl.where(inside, keys, 0xFFFFFFFF), 0)
    return key


@triton.jit(do_not_specialize=["rows", "splits"])
def _select(
    logits, slots, temperature, top_k, top_p, min_p, maxima, total, found, kept, least,
    stride, columns, rows, splits, room, SPLITS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
    ROWS_PER_SEQ: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Top-k, then top-p over what it left, then min-p: a row's threshold from its candidates."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row // ROWS_PER_SEQ).to(tl.int64)
    heat = tl.load(temperature + slot)
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    floor = tl.load(min_p + slot)
    bound = tl.full((), float("-inf"), tl.float32)
    if ((k > 0) | (p < 1.0) | (floor > 0.0)) & (heat >= LEAST_TEMPERATURE):
        best = row_best(maxima, row, rows, splits, heat, SPLITS)
        if (k > 0) | (p < 1.0):
            number = tl.load(found + row)
            whole = tl.zeros((), tl.int64)
            if k <= 0:
                whole = tl.load(total + row)
            if (number <= room) & (number <= FEW):
                key = _among_few(kept + row.to(tl.int64) * room, number, k, p, whole, best, FEW, NATIVE)
            else:
                source = kept + row.to(tl.int64) * room
                divisor = heat * 0.0 + 1.0  # candidates are scaled already
                if number > room:
                    source = logits + row.to(tl.int64) * stride
                    number = columns + number * 0
                    divisor = heat
                key = tl.full((), 0, tl.uint32)
                if k > 0:
                    key = _largest(source, divisor, number, k.to(tl.float64), best, False, BLOCK, NATIVE)
                if p < 1.0:
                    if k > 0:
                        whole = _mass_from(source, divisor, number, key, best, BLOCK, NATIVE)
                    target = p.to(tl.float64) * whole.to(tl.float64)
                    key = _largest(source, divisor, number, target, best, True, BLOCK, NATIVE)
            # with top_p at 0 any key has mass enough: the best is always in
            bound = tl.minimum(_value(tl.minimum(key, _keys(best))), best)
        if floor > 0.0:
            bound = tl.maximum(bound, best + log_f32(floor, NATIVE))
    tl.store(least + row, bound)


AOT_CASES = [aot_case(_select, {"BLOCK": _SELECT_BLOCK, "FEW": _FEW}, num_warps=16)]
