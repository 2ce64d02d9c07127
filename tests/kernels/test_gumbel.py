"""The noise: published bits, the right distribution, and no dependence on anything but its three keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from mstar.kernels.gumbel import gumbel, gumbel_at, philox4x32, words, words_at
from mstar.kernels.native import load_library


def counter_words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    result = philox4x32(counter_words(*counter), counter_words(*key))
    assert tuple(int(word) for word in result) == expected


def test_noise_of_a_key_is_the_formula_of_its_philox_word():
    seed, position, token = 0x1234_5678_9ABC_DEF0, 77, 4001
    counter = counter_words(token // 4, position, 0, 0x746F6B6E)
    key = counter_words(seed & 0xFFFFFFFF, seed >> 32)
    word = int(philox4x32(counter, key)[token % 4])
    expected = -np.log(-np.log1p(-np.float64((word + 0.5) / 2**32)))
    noise = gumbel(torch.tensor([seed]), torch.tensor([position]), 5000)
    assert float(noise[0, token]) == pytest.approx(expected, rel=1e-5)


def test_noise_does_not_depend_on_the_batch_its_order_or_the_chunking():
    seeds = torch.tensor([5, -1, 2**62, 5, 9])
    positions = torch.tensor([0, 3, 2**33, 1, 4095])
    together = gumbel(seeds, positions, 70_001)
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(gumbel(seeds[order], positions[order], 70_001), together[order])
    for row in range(5):
        alone = gumbel(seeds[row : row + 1], positions[row : row + 1], 70_001)
        assert torch.equal(alone[0], together[row])
    assert torch.equal(gumbel(seeds, positions, 999), together[:, :999])


def test_noise_at_some_ids_is_the_noise_of_the_whole_vocabulary():
    seeds, positions = torch.tensor([11, 12, 13]), torch.tensor([7, 8, 9])
    ids = torch.tensor([[0, 1, 2, 3, 4], [999, 5, 500, 5, 42], [7, 6, 5, 4, 998]])
    assert torch.equal(gumbel_at(seeds, positions, ids), gumbel(seeds, positions, 1000).gather(1, ids))


def test_every_part_of_the_key_changes_the_noise():
    base = gumbel(torch.tensor([1]), torch.tensor([1]), 4096)
    for seed, position in ((2, 1), (1, 2), (1 + 2**32, 1), (1, 1 + 2**32), (-1, 1)):
        other = gumbel(torch.tensor([seed]), torch.tensor([position]), 4096)
        assert float((other == base).float().mean()) < 0.01


def test_noise_is_finite_and_gumbel_distributed():
    noise = gumbel(torch.arange(20), torch.arange(20) * 31, 10_000)
    assert bool(torch.isfinite(noise).all())
    assert stats.kstest(noise.flatten().double().numpy(), "gumbel_r").pvalue > 1e-3


def test_the_largest_values_do_not_tie():
    """1 - u in float32 would leave 2^-24 steps there: most of these maxima would share a few values."""
    best = gumbel(torch.zeros(64, dtype=torch.int64), torch.arange(64), 100_000).max(1).values
    assert best.unique().numel() == 64


def test_noise_is_independent_over_positions_and_over_ids():
    """Joint quartiles of neighbours, along both keys and inside a counter's four lanes, are uniform on 16."""
    noise = gumbel(torch.full((400,), 99), torch.arange(400), 400).double().numpy()
    quarter = np.floor(4 * stats.gumbel_r.cdf(noise)).astype(int)
    for a, b in (
        (quarter[::2], quarter[1::2]),
        (quarter[:, ::2], quarter[:, 1::2]),
        (quarter[:, 0::4], quarter[:, 3::4]),
        (quarter[:, :200], quarter[:, 200:]),
    ):
        joint = np.bincount((4 * a + b).ravel(), minlength=16)
        assert stats.chisquare(joint).pvalue > 1e-3


@pytest.mark.skipif(load_library("gumbel") is None, reason="no C compiler")
def test_native_words_are_those_of_the_torch_reference():
    seeds, positions = torch.tensor([1, -7, 2**40]), torch.tensor([0, 2**35 + 3, 17])
    reference = words(seeds, positions, 9_999)
    ids = torch.tensor([[0, 9998, 5], [4, 4, 7], [1, 2, 3]])
    assert torch.equal(words_at(seeds, positions, ids), reference.gather(1, ids))
    noise = -torch.log(-torch.log1p(-((reference + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)))
    assert torch.equal(gumbel(seeds, positions, 9_999), noise)
    assert torch.equal(gumbel_at(seeds, positions, ids), noise.gather(1, ids))


def test_noise_is_the_same_without_a_compiler(monkeypatch):
    seeds, positions = torch.tensor([1, -7]), torch.tensor([0, 2**35 + 3])
    ids = torch.tensor([[3, 2000], [0, 7]])
    native = gumbel(seeds, positions, 2001), gumbel_at(seeds, positions, ids)
    monkeypatch.setattr("mstar.kernels.gumbel._library", lambda: None)
    assert torch.equal(gumbel(seeds, positions, 2001), native[0])
    assert torch.equal(gumbel_at(seeds, positions, ids), native[1])
