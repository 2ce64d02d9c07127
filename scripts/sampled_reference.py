"""What a sampled request should draw, from exact logits, written without the sampler's own code.

Penalties, filters and their order are those of docs/protocol.md; the noise alone is shared with the sampler, since
equality under seeds is about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mstar.kernels.gumbel import gumbel_at


@dataclass(frozen=True, slots=True)
class Sampling:
    """Fields of `generate` that shape a draw."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def fields(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


def scaled_logits(
    logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """Logits after penalties, over the temperature: [vocab] float64."""
    values = logits.double()
    counts = torch.zeros_like(values)
    if output:
        counts += torch.bincount(torch.tensor(list(output)), minlength=values.shape[0]).double()
    seen = counts > 0
    seen[list(prompt)] = True
    repeated = torch.where(
        values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
    )
    values = torch.where(seen, repeated, values)
    values = values - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty
    return values / sampling.temperature


def least_kept(scaled: torch.Tensor, sampling: Sampling) -> float:
    """The least scaled logit that top-k, then top-p, then min-p keep; ties with it are kept."""
    ordered = scaled.sort(descending=True).values
    if sampling.top_k:
        ordered = ordered[ordered >= ordered[min(sampling.top_k, len(ordered)) - 1]]
    mass = ordered.softmax(0)
    before = mass.cumsum(0) - mass
    inside = int((before < sampling.top_p).sum()) if sampling.top_p < 1 else len(ordered)
    least = float(ordered[max(inside, 1) - 1])
    if sampling.min_p:
        best = float(ordered[0])
        least = max(least, best + float(torch.tensor(sampling.min_p, dtype=torch.float64).log()))
    return least


def probabilities(scaled: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that is drawn from: [vocab] float64."""
    kept = scaled >= least_kept(scaled, sampling)
    return scaled.masked_fill(~kept, float("-inf")).softmax(0)


def is_near_tie(
    scaled: torch.Tensor,
    sampling: Sampling,
    seed: int,
    position: int,
    tokens: tuple[int, int],
    allowed: float,
) -> bool:
    """Whether both tokens could be drawn here by runs whose scaled logits differ by `allowed` at most.

    Both must be in reach of the filters, and whatever has a noised value above theirs by more than that must be
    in reach of being filtered out.
    """
    noise = gumbel_at(torch.tensor([seed]), torch.tensor([position]), torch.arange(scaled.shape[0])[None])
    noised = scaled + noise[0].double()
    better = (noised > float(noised[list(tokens)].min()) + allowed).nonzero().flatten().tolist()
    return all(_kept(scaled, sampling, token, -allowed) for token in tokens) and not any(
        _kept(scaled, sampling, token, allowed) for token in better if _kept(scaled, sampling, token, 0.0)
    )


def _kept(scaled: torch.Tensor, sampling: Sampling, token: int, others: float) -> bool:
    """Whether filters keep a token when all others' scaled logits are higher by `others`."""
    values = scaled + others
    values[token] = scaled[token]
    return float(values[token]) >= least_kept(values, sampling)
