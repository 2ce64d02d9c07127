"""Whether two runs that differ differ for want of numerical precision alone.

At the first difference, each run's token must be among the other's best two, and within 2 bf16 units in the last
place of the largest logit (float32 runs: 1e-4): a near-tie. Anything else is a divergence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BF16_ULPS = 2
FP32_GAP = 1e-4
_BF16_BITS = 7  # of the mantissa, the leading one apart
_FP16_BITS = 10

Top = Sequence[tuple[int, float | None]]  # (token, logprob), best first


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part. gap: the larger of the two runs' own, in logits; None: not each other's best two."""

    index: int
    tokens: tuple[int | None, int | None]  # None: that run had ended
    gap: float | None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two runs differ; None for equal ones."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def difference(index: int, a: Sequence[int], b: Sequence[int], top_a: Top, top_b: Top) -> Difference:
    """The difference at `index`, where the runs' best two tokens are `top_a` and `top_b`.

    Differences of logprobs are differences of logits: one row's have the same normaliser.
    """
    left = a[index] if index < len(a) else None
    right = b[index] if index < len(b) else None
    gap: float | None = None
    if left is not None and right is not None:
        gaps = [_gap(top, left, right) for top in (top_a, top_b)]
        known = [value for value in gaps if value is not None]
        gap = max(known) if len(known) == 2 else None
    return Difference(index, (left, right), gap)


def _gap(top: Top, left: int, right: int) -> float | None:
    found = dict(top[:2])
    first, second = found.get(left), found.get(right)
    return None if first is None or second is None else abs(first - second)


def allowed_gap(dtype: str, top_logit: float) -> float:
    """The widest gap of a near-tie in a run of that dtype, whose largest logit at that place is `top_logit`."""
    if dtype == "fp32":
        return FP32_GAP
    return BF16_ULPS * ulp(top_logit, _BF16_BITS if dtype == "bf16" else _FP16_BITS)


def ulp(value: float, bits: int = _BF16_BITS) -> float:
    """The distance between neighbouring numbers around `value` with `bits` of mantissa."""
    _, exponent = math.frexp(value)  # value = m * 2^exponent, 0.5 <= |m| < 1
    return math.ldexp(1.0, exponent - 1 - bits)
