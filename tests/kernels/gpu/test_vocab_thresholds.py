"""Filters by the kernels keep the tokens that the sampler's sort keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.kernels.vocab.filters import thresholds
from mstar.kernels.vocab.gpu.draw import merge_draws, partial_draws
from mstar.kernels.vocab.gpu.thresholds import filter_thresholds

# (temperature, top_k, top_p, min_p), a slot each behind the sink.
MIXES = [
    (1.0, 1, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.3, 700, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.1, 300, 0.5, 0.02),
    (0.7, 0, 0.999999, 0.0),
    (1.9, 0, 0.05, 0.0),
    (0.8, 0, 0.8, 0.3),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.1),
]
# What passes without a threshold: off, and greedy for all its filters.
UNFILTERED = [(1.0, 0, 1.0, 0.0), (0.0, 20, 0.9, 0.1), (0.9e-5, 0, 0.5, 0.0)]


class Filters:
    def __init__(self, mixes: list[tuple[float, int, float, float]], device: torch.device) -> None:
        rows = [(0.0, 0, 1.0, 0.0), *mixes]
        temperature, top_k, top_p, min_p = zip(*rows, strict=True)
        self.temperature = torch.tensor(temperature, device=device)
        self.top_k = torch.tensor(top_k, device=device)
        self.top_p = torch.tensor(top_p, device=device)
        self.min_p = torch.tensor(min_p, device=device)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p


def rows_of(kind: str, rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind) + vocab)
    x = torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        x[:, vocab // 3] += 14.0
        x[:, vocab // 2] += 13.0
    elif kind == "tied":
        x = (x * 2).round() / 2  # a dozen values, zeros of both signs
    elif kind == "flat":
        x = torch.full_like(x, -3.25)
    elif kind == "logits":
        x = x.to(torch.bfloat16).float() * 3 + 8
    elif kind == "holes":
        x[:, 40:] = -torch.inf
    elif kind == "negative":
        x = x * 20 - 900.0
    return x.to(device)


def sorted_least(logits: torch.Tensor, slots: torch.Tensor, filters: Filters) -> torch.Tensor:
    index = slots.long()
    scaled = logits / filters.temperature[index][:, None]
    registers = (filters.top_k[index], filters.top_p[index], filters.min_p[index])
    return thresholds(scaled, *registers, sort=True)


def exactly_kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The filters' definition in float64: bools over the vocabulary, and no sort's order in the result."""
    order = np.argsort(-scaled.astype(np.float64), kind="stable")
    ranked = scaled[order].astype(np.float64)
    kth = ranked[min(top_k, len(ranked)) - 1] if top_k else -np.inf
    mass = np.where(ranked >= kth, np.exp(ranked - ranked[0]), 0.0)
    kept = ranked >= kth
    if top_p < 1.0:
        before = np.cumsum(mass) - mass
        number = max(1, int((before < np.float64(np.float32(top_p)) * mass.sum())[kept].sum()))
        kept = ranked >= ranked[number - 1]
    kept &= np.exp(ranked - ranked[0]) >= np.float64(np.float32(min_p))
    result = np.zeros(len(scaled), dtype=bool)
    result[order[kept]] = True
    return result


# With room for 128 candidates most rows are read as a whole. The interpreter takes 0.25 s a row.
@pytest.mark.parametrize(
    "kind, candidates",
    [
        ("random", 16384),
        ("random", 128),
        ("peaked", 16384),
        ("tied", 16384),
        ("flat", 128),
        ("holes", 16384),
        ("negative", 128),
    ],
)
def test_every_mix_keeps_the_tokens_of_the_sort(device, kind, candidates):
    vocab = 1001
    # all mixes on random logits, some on every kind
    mixes = MIXES if kind == "random" else MIXES[3:6] + MIXES[8:9]
    filters = Filters(mixes, device)
    rows = len(mixes)
    wide = torch.full((rows, vocab + 3), torch.inf, device=device)  # columns that must not be looked at
    wide[:, :vocab] = rows_of(kind, rows, vocab, device)
    logits = wide[:, :vocab]
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    least = filter_thresholds(wide, slots, *filters.arguments(), vocab, candidates=candidates)
    assert least.shape == (rows,) and least.dtype == torch.float32
    scaled = logits / filters.temperature[1:, None]
    kept = scaled >= least[:, None]
    reference = sorted_least(logits, slots, filters)
    expected = scaled >= reference
    without_min_p = filters.min_p[1:] == 0
    assert torch.equal(least[without_min_p], reference[without_min_p, 0])  # the last one kept, to the bit
    assert kept.sum(1).tolist() == expected.sum(1).tolist() and torch.equal(kept, expected)
    assert bool((least <= scaled.amax(1)).all())
    if kind == "random":  # else everything might be compared with everything
        assert kept.sum(1).unique().numel() > 6
    for row, (_, top_k, top_p, min_p) in enumerate(mixes):
        exact = exactly_kept(scaled[row].cpu().numpy(), top_k, top_p, min_p)
        assert kept[row].tolist() == exact.tolist(), mixes[row]


def test_rows_without_filters_and_greedy_ones_keep_everything(device):
    filters = Filters([*UNFILTERED, (1.0, 3, 1.0, 0.0)], device)
    logits = rows_of("random", 5, 1001, device)
    slots = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32, device=device)
    least = filter_thresholds(logits, slots, *filters.arguments(), 1001).tolist()
    assert least[:4] == [-float("inf")] * 4
    assert least[4] == float(logits[4].topk(3).values[-1])


def test_a_threshold_does_not_depend_on_the_batch_or_on_where_a_row_stands(device):
    filters = Filters(MIXES, device)
    logits = rows_of("logits", 4, 1500, device)
    slots = torch.tensor([4, 10, 8, 9], dtype=torch.int32, device=device)

    def least(rows: list[int]) -> torch.Tensor:
        return filter_thresholds(logits[rows].contiguous(), slots[rows], *filters.arguments(), 1500)

    together = least([0, 1, 2, 3])
    assert torch.equal(least([2, 0, 3, 1]), together[[2, 0, 3, 1]])
    assert torch.equal(least([2]), together[2:3])
    two_a_sequence = filter_thresholds(
        logits[:2], slots[:1].contiguous(), *filters.arguments(), 1500, rows_per_seq=2
    )
    assert torch.equal(two_a_sequence, torch.cat([together[:1], two_a_sequence[1:]]))
    assert two_a_sequence[0] != two_a_sequence[1]


def test_draws_stay_among_what_the_filters_keep(device):
    filters = Filters([(1.0, 2, 1.0, 0.0)], device)
    logits = torch.zeros(8, 1001, device=device)
    logits[:, [7, 900]] = 0.5  # noise alone would draw others
    slots = torch.ones(8, dtype=torch.int32, device=device)
    least = filter_thresholds(logits, slots, *filters.arguments(), 1001)
    seed = torch.tensor([0, 77], device=device)
    positions = torch.arange(8, device=device)
    arguments = (logits, slots, positions, filters.temperature, seed)
    drawn = merge_draws(*partial_draws(*arguments, first_id=0, vocab=1001, least=least))[1]
    assert set(drawn.tolist()) == {7, 900}
    free = merge_draws(*partial_draws(*arguments, first_id=0, vocab=1001))[1]
    assert not set(free.tolist()) <= {7, 900}
