"""Which logits of a row can be above its threshold: a histogram, and the logits that it cannot rule out.

The steps before the last of mstar.kernels.vocab.gpu.thresholds, which says what the whole does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from mstar.kernels.aot import AotCase
from mstar.kernels.vocab.gpu.draw import LEAST_TEMPERATURE

# Bins of the distance below the maximum: an eighth each, so the last holds what is e^-31.9 as likely, or less.
BINS = tl.constexpr(256)
BINS_A_UNIT = tl.constexpr(8.0)
# Units of a mass of 1. Sums of 2^20 of them stay below 2^63.
ONE = tl.constexpr(float(2**42))
MOST_IDS = 2**20


@triton.jit
def row_best(maxima, row, rows, splits, heat, SPLITS: tl.constexpr):
    each = tl.arange(0, SPLITS)
    best = tl.max(tl.load(maxima + each * rows + row, mask=each < splits, other=float("-inf")), 0)
    return tl.div_rn(best, heat)  # division keeps the order, so this is the largest scaled logit


@triton.jit
def _bins(scaled, best):
    """Which bin each scaled logit is in; never smaller for a smaller one."""
    return tl.minimum((best - scaled) * BINS_A_UNIT, 1.0 * (BINS - 1)).to(tl.int32)


@triton.jit
def masses(scaled, best, NATIVE: tl.constexpr):
    """exp(scaled - best) in units of 2^-42, int64."""
    x = scaled - best
    if NATIVE:
        return (libdevice.exp(x) * ONE).to(tl.int64)
    return (tl.exp(x.to(tl.float64)).to(tl.float32) * ONE).to(tl.int64)


@triton.jit(do_not_specialize=["rows", "splits"])
def row_maxima(
    logits, slots, temperature, top_k, top_p, min_p, maxima, counts, total, found,
    stride, columns, rows, splits, SPLITS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    ROWS_PER_SEQ: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The maximum of each split's logits; the row's counters begin at 0."""
    split = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row // ROWS_PER_SEQ).to(tl.int64)
    heat = tl.load(temperature + slot)
    filtered = (tl.load(top_k + slot) > 0) | (tl.load(top_p + slot) < 1.0) | (tl.load(min_p + slot) > 0.0)
    if filtered & (heat >= LEAST_TEMPERATURE):
        source = logits + row.to(tl.int64) * stride
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for tile in range(TILES):
            column = (split * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(source + column, mask=column < columns, other=float("-inf")))
        tl.store(maxima + split * rows + row, tl.max(best, 0))
        if split == 0:
            tl.store(counts + row * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
            tl.store(total + row, tl.zeros((), tl.int64))
            tl.store(found + row, 0)


@triton.jit(do_not_specialize=["rows", "splits"])
def count_bins(
    logits, slots, temperature, top_k, top_p, min_p, maxima, counts, total,
    stride, columns, rows, splits, SPLITS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    ROWS_PER_SEQ: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds a split's logits to the row's histogram, and to its mass where only top-p wants that."""
    split = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row // ROWS_PER_SEQ).to(tl.int64)
    heat = tl.load(temperature + slot)
    k = tl.load(top_k + slot)
    if ((k > 0) | (tl.load(top_p + slot) < 1.0)) & (heat >= LEAST_TEMPERATURE):
        best = row_best(maxima, row, rows, splits, heat, SPLITS)
        source = logits + row.to(tl.int64) * stride
        histogram = tl.zeros((BINS,), tl.int32)
        mass = tl.zeros((BLOCK,), tl.int64)
        for tile in range(TILES):
            column = (split * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
            inside = column < columns
            x = tl.load(source + column, mask=inside, other=float("-inf"))
            scaled = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + heat)
            histogram += tl.histogram(_bins(scaled, best), BINS, mask=inside)
            if k <= 0:
                mass += masses(scaled, best, NATIVE)
        at = counts + row * BINS + tl.arange(0, BINS)
        tl.atomic_add(at, histogram, mask=histogram > 0, sem="relaxed")
        if k <= 0:
            tl.atomic_add(total + row, tl.sum(mass, 0), sem="relaxed")


@triton.jit
def _last_bin(counts, total, row, k, p):
    """The last bin that may hold a logit that the filters keep.

    With top-k, that of the k-th. With top-p alone, the first bin behind which there is so little mass, each
    logit's taken as that of its bin's upper end, that top_p of the whole is reached before. The millionth of the
    whole covers what `total` is short of.
    """
    each = tl.arange(0, BINS)
    count = tl.load(counts + row * BINS + each)
    if k > 0:
        last = tl.sum((tl.cumsum(count.to(tl.int64), 0) < k).to(tl.int32), 0)
    else:
        mass = count.to(tl.float64) * tl.exp(each.to(tl.float64) * (-1.0 / BINS_A_UNIT))
        whole = tl.load(total + row).to(tl.float64) / ONE
        behind = tl.sum(mass, 0) - tl.cumsum(mass, 0)
        last = tl.sum((behind > whole * (1.0 - p.to(tl.float64) - 1e-6)).to(tl.int32), 0)
    return last


@triton.jit(do_not_specialize=["rows", "splits"])
def collect(
    logits, slots, temperature, top_k, top_p, min_p, maxima, counts, total, found, kept,
    stride, columns, rows, splits, room, SPLITS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    ROWS_PER_SEQ: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gathers the scaled logits that may be kept, in any order."""
    split = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row // ROWS_PER_SEQ).to(tl.int64)
    heat = tl.load(temperature + slot)
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    if ((k > 0) | (p < 1.0)) & (heat >= LEAST_TEMPERATURE):
        best = row_best(maxima, row, rows, splits, heat, SPLITS)
        last = _last_bin(counts, total, row, k, p)
        source = logits + row.to(tl.int64) * stride
        for tile in range(TILES):
            column = (split * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
            inside = column < columns
            x = tl.load(source + column, mask=inside, other=float("-inf"))
            scaled = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + heat)
            wanted = (inside & (_bins(scaled, best) <= last)).to(tl.int32)
            number = tl.sum(wanted, 0)
            if number > 0:
                base = tl.atomic_add(found + row, number, sem="relaxed")
                at = base + tl.cumsum(wanted, 0) - 1
                tl.store(kept + row.to(tl.int64) * room + at, scaled, mask=(wanted > 0) & (at < room))


KINDS = {
    "logits": "*fp32",
    "slots": "*i32",
    "temperature": "*fp32",
    "top_k": "*i64",
    "top_p": "*fp32",
    "min_p": "*fp32",
    "maxima": "*fp32",
    "counts": "*i32",
    "total": "*i64",
    "found": "*i32",
    "kept": "*fp32",
    "least": "*fp32",
}


def aot_case(kernel, constants, num_warps):
    """A kernel of these steps; its arguments are named by what they are."""
    constants = {"SPLITS": 64, "ROWS_PER_SEQ": 1, "NATIVE": True, **constants}
    signature = {}
    for name in kernel.arg_names:
        signature[name] = KINDS.get(name, "constexpr" if name.isupper() else "i32")
    return AotCase(kernel, signature, constants, num_warps=num_warps, pdl=True)


AOT_CASES = [
    aot_case(kernel, {"BLOCK": 1024, "TILES": 4}, num_warps=4) for kernel in (row_maxima, count_bins, collect)
]
