"""Pearson's chi-square test of counts against exact probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Outcome = TypeVar("Outcome", bound=Hashable)
LEAST_EXPECTED = 5.0  # of a bin; rarer outcomes share one


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """impossible: draws of outcomes whose probability is 0; one is a failure whatever the p-value."""

    draws: int
    bins: int
    statistic: float
    p_value: float
    impossible: int


def chi_square(counts: Counter[Outcome], probabilities: Mapping[Outcome, float]) -> ChiSquare:
    """Tests `counts` of draws against `probabilities`, which add up to 1."""
    draws = sum(counts.values())
    bins: list[tuple[float, int]] = []
    rest_expected, rest_seen = 0.0, 0
    for outcome, probability in probabilities.items():
        expected, seen = probability * draws, counts[outcome]
        if expected >= LEAST_EXPECTED:
            bins.append((expected, seen))
        else:
            rest_expected, rest_seen = rest_expected + expected, rest_seen + seen
    impossible = sum(seen for outcome, seen in counts.items() if probabilities.get(outcome, 0.0) <= 0)
    if rest_expected >= LEAST_EXPECTED or not bins:
        bins.append((rest_expected, rest_seen))
    elif rest_expected > 0:  # too rare for a bin of their own
        expected, seen = bins.pop()
        bins.append((expected + rest_expected, seen + rest_seen))
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in bins)
    freedom = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(freedom, half)) if len(bins) > 1 else 1.0
    return ChiSquare(draws, len(bins), statistic, p_value, impossible)
