"""The sampler on a GPU draws what it draws on the CPU: no request goes greedy there, and seeds keep their text."""

from __future__ import annotations

import pytest
import torch

from mstar.kernels.gumbel import gumbel, words
from mstar.ranks.messages import SamplingParams
from mstar.ranks.sampler import Sampler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

VOCAB = 20_001
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1000, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {"frequency_penalty": 0.7, "logprobs": 2},
    {"temperature": 1.0, "max_think_tokens": 4, "think_end_id": 9, "starts_in_think": True},
    {"temperature": 1.0, "min_tokens": 5, "eos_ids": (3, 4, 5, 6, 7)},
]


def test_noise_has_the_same_bits_and_values_within_rounding():
    seeds, positions = torch.tensor([1, -7, 2**40]), torch.tensor([0, 2**35 + 3, 17])
    there = seeds.cuda(), positions.cuda()
    assert torch.equal(words(*there, VOCAB).cpu(), words(seeds, positions, VOCAB))
    torch.testing.assert_close(
        gumbel(*there, VOCAB).cpu(), gumbel(seeds, positions, VOCAB), rtol=1e-6, atol=1e-6
    )


def test_draws_are_those_of_the_cpu():
    samplers = [Sampler(VOCAB, 10, torch.device(device)) for device in ("cpu", "cuda")]
    for slot, fields in enumerate(SETTINGS, 1):
        for sampler in samplers:
            sampler.admit(slot, SamplingParams(max_tokens=40, seed=slot, **fields), [1, 2, 3], [5, 5, 8])
    slots = torch.arange(1, 10)
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        logits = torch.randn(9, VOCAB, generator=generator) * 3
        positions = torch.full((9,), step)
        here = samplers[0].sample(logits, slots, positions)
        there = samplers[1].sample(logits.cuda(), slots.cuda(), positions.cuda(), slots.tolist())
        assert here.tokens.tolist() == there.tokens.tolist()
        assert here.finish.tolist() == there.finish.tolist()
        assert here.logprobs[6][0] == pytest.approx(there.logprobs[6][0], abs=1e-5)
