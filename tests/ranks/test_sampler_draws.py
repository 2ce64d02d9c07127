"""What the sampler draws: exact probabilities, one stream a seed, the filters that users know."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mstar.kernels.vocab.filters import candidate_thresholds, nucleus_thresholds, thresholds
from mstar.ranks.messages import SamplingParams
from mstar.ranks.sampler import Sampler

CPU = torch.device("cpu")
DRAWS = 20_000


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10**9, "seed": 1, **fields})


def exact(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, prompt=(), output=(), **penalties):
    """The probabilities of a draw, in float64 numpy, token by token."""
    logits = np.asarray(logits, dtype=np.float64).copy()
    for token in range(len(logits)):
        if token in prompt or token in output:
            repetition = penalties.get("repetition_penalty", 1.0)
            logits[token] *= 1 / repetition if logits[token] > 0 else repetition
        logits[token] -= penalties.get("frequency_penalty", 0.0) * list(output).count(token)
        logits[token] -= penalties.get("presence_penalty", 0.0) * (token in output)
    p = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= top_p:
            p[token] = 0
        mass += p[token]
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def draw_many(logits, request: SamplingParams, prompt=(), output=()) -> np.ndarray:
    """Counts of DRAWS tokens drawn at as many positions, by rows of one slot without moving it."""
    sampler = Sampler(len(logits), 2, CPU)
    sampler.admit(1, request, list(prompt), list(output))
    counts = np.zeros(len(logits), dtype=int)
    for first in range(0, DRAWS, 1000):
        rows = torch.tensor(logits).repeat(1000, 1)
        positions = torch.arange(first, first + 1000)
        tokens, _ = sampler.draw(rows, torch.ones(1000, dtype=torch.int64), positions, [1] * 1000)
        counts += np.bincount(tokens.numpy(), minlength=len(logits))
    return counts


SETTINGS = {
    "temperature": {"temperature": 1.0},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.2, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.03},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.6},
    "presence": {"temperature": 1.0, "presence_penalty": 0.9},
    "frequency": {"temperature": 1.0, "frequency_penalty": 0.4},
    "all": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.03,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_the_exact_probabilities(name):
    logits = (np.random.default_rng(3).normal(size=40) * 1.5).astype(np.float32)
    prompt, output = [0, 5, 5, 9, 17], [5, 9, 9, 30, 2, 2, 2]
    settings = SETTINGS[name]
    probabilities = exact(logits, prompt=prompt, output=output, **settings)
    counts = draw_many(logits, params(**settings), prompt, output)
    assert counts[probabilities == 0].sum() == 0
    possible = probabilities > 0
    assert possible.sum() > 2
    expected = probabilities[possible] * DRAWS
    rare = expected < 5  # too few for a chi-square: taken as one
    observed = np.append(counts[possible][~rare], counts[possible][rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    filled = expected > 0
    assert stats.chisquare(observed[filled], expected[filled]).pvalue > 1e-3


def test_neighbouring_positions_draw_independently():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    sampler = Sampler(4, 2, CPU)
    sampler.admit(1, params(temperature=1.0, seed=8), [])
    rows = torch.tensor(logits).repeat(DRAWS, 1)
    ones = torch.ones(DRAWS, dtype=torch.int64)
    tokens = sampler.draw(rows, ones, torch.arange(DRAWS), [1] * DRAWS)[0].numpy()
    pairs = np.bincount(4 * tokens[::2] + tokens[1::2], minlength=16)
    p = np.array([0.4, 0.3, 0.2, 0.1])
    assert stats.chisquare(pairs, np.outer(p, p).ravel() * DRAWS / 2).pvalue > 1e-3


def test_seeds_draw_independently():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    sampler = Sampler(4, 1001, CPU)
    for slot in range(1, 1001):
        sampler.admit(slot, params(temperature=1.0, seed=slot), [])
    slots = torch.arange(1, 1001)
    counts = np.zeros(4)
    for position in range(5):
        rows = torch.tensor(logits).repeat(1000, 1)
        tokens = sampler.draw(rows, slots, torch.full((1000,), position), slots.tolist())[0]
        counts += np.bincount(tokens.numpy(), minlength=4)
    assert stats.chisquare(counts, np.array([0.4, 0.3, 0.2, 0.1]) * 5000).pvalue > 1e-3


def test_a_sampled_request_never_silently_goes_greedy():
    logits = torch.zeros(1, 100)
    for fields in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.5}, {"top_k": 50, "top_p": 0.9}):
        sampler = Sampler(100, 2, CPU)
        sampler.admit(1, params(temperature=1.0, **fields), [])
        assert not sampler.plain_greedy([1])
        drawn = {int(sampler.sample(logits, torch.tensor([1]), torch.tensor([p])).tokens) for p in range(40)}
        assert len(drawn) > 10


# --- one seed, one stream ---------------------------------------------------------------------------------

VOCAB = 3000
MIXED = [
    {"temperature": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1000, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {},
    {"frequency_penalty": 0.7, "logprobs": 2},
    {"temperature": 1.0, "top_k": 3, "min_p": 0.01, "frequency_penalty": 0.1},
]


def model(request: int, history: list[int]) -> torch.Tensor:
    """Logits that depend on the request and on all it drew, as a model's do."""
    generator = torch.Generator().manual_seed(request * 1_000_003 + hash(tuple(history)) % 1_000_003)
    return torch.randn(VOCAB, generator=generator) * 3


def streams(requests: list[int], steps: int, size: int, reverse: bool = False) -> dict[int, list[int]]:
    """Each request's tokens when at most `size` of them share a batch."""
    drawn: dict[int, list[int]] = {request: [] for request in requests}
    for first in range(0, len(requests), size):
        group = requests[first : first + size]
        sampler = Sampler(VOCAB, size + 1, CPU)
        slots = {request: size - i if reverse else i + 1 for i, request in enumerate(group)}
        for request in group:
            fields = {"seed": 1000 + request, **MIXED[request % len(MIXED)]}
            sampler.admit(slots[request], params(**fields), [1, 2, request])
        order = group[::-1] if reverse else group
        rows = torch.tensor([slots[request] for request in order])
        for step in range(steps):
            logits = torch.stack([model(request, drawn[request]) for request in order])
            positions = torch.tensor([3 + step] * len(order))
            for request, token in zip(order, sampler.sample(logits, rows, positions).tokens, strict=True):
                drawn[request].append(int(token))
    return drawn


def test_a_seed_gives_one_stream_whatever_shares_its_batch():
    requests = list(range(18))
    alone = streams(requests, 8, 1)
    assert streams(requests, 8, 3) == alone
    assert streams(requests, 8, 16) == alone
    assert streams(requests, 8, 16, reverse=True) == alone
    assert streams([*range(40, 49), 1, 5], 8, 16)[5] == alone[5]  # other neighbours


def test_draws_after_a_preemption_go_on_as_if_nothing_had_happened():
    fields = {
        "temperature": 0.9,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "seed": 5,
    }
    request = params(**fields, max_tokens=30)
    prompt, slot, other = [4, 5, 6], torch.tensor([1]), torch.tensor([2])
    whole = Sampler(VOCAB, 4, CPU)
    whole.admit(1, request, prompt)
    drawn: list[int] = []
    finishes = []
    for step in range(30):
        out = whole.sample(model(7, drawn).unsqueeze(0), slot, torch.tensor([3 + step]))
        drawn.append(int(out.tokens))
        finishes.append(int(out.finish))
    assert finishes == [0] * 29 + [2]

    torn = Sampler(VOCAB, 4, CPU)
    torn.admit(1, request, prompt)
    for step in range(11):
        torn.sample(model(7, drawn[:step]).unsqueeze(0), slot, torch.tensor([3 + step]))
    torn.release(1)
    torn.admit(
        1, params(temperature=2.0, seed=9, presence_penalty=1.0), [7, 8, 9]
    )  # its slot goes to another
    torn.sample(model(8, []).unsqueeze(0), slot, torch.tensor([3]))
    torn.admit(2, request, prompt, drawn[:11])
    for step in range(11, 30):
        out = torn.sample(model(7, drawn[:step]).unsqueeze(0), other, torch.tensor([3 + step]))
        assert (int(out.tokens), int(out.finish)) == (drawn[step], finishes[step])


def test_known_draws_stay_the_same():
    """A seed that a user kept gives the same text in the next release."""
    sampler = Sampler(100, 2, CPU)
    sampler.admit(1, params(temperature=1.0, seed=42), [])
    logits = torch.zeros(12, 100)
    tokens, _ = sampler.draw(logits, torch.ones(12, dtype=torch.int64), torch.arange(12), [1] * 12)
    assert tokens.tolist() == [4, 22, 55, 64, 10, 40, 70, 21, 16, 41, 62, 33]


# --- against transformers ---------------------------------------------------------------------------------


def kept(scores: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(scores)


@pytest.mark.parametrize("vocab", [50, 5000])
@pytest.mark.parametrize("top_k", [1, 5, 40])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3])
def test_filters_keep_what_transformers_warpers_keep(vocab, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(vocab + top_k)
    logits = torch.randn(6, vocab, generator=generator) * 4
    ks, ps, ms = torch.full((6,), top_k), torch.full((6,), top_p), torch.full((6,), min_p)

    def oracle(use_k: bool) -> torch.Tensor:
        scores = TemperatureLogitsWarper(0.7)(None, logits)
        if use_k:
            scores = TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1.0:
            scores = TopPLogitsWarper(top_p)(None, scores)
        return MinPLogitsWarper(min_p)(None, scores) if min_p else scores

    scaled = logits / 0.7
    assert torch.equal(scaled >= thresholds(scaled, ks, ps, ms, sort=True), kept(oracle(True)))
    best = scaled.topk(min(64, vocab)).values
    threshold, tied = candidate_thresholds(best, ks, ps, ms)
    assert torch.equal(scaled >= threshold, kept(oracle(True)))
    assert not bool(tied.any())
    assert torch.equal(scaled >= thresholds(scaled, 0 * ks, ps, ms, sort=True), kept(oracle(False)))
    assert torch.equal(scaled >= nucleus_thresholds(scaled, ps, ms), kept(oracle(False)))
    if top_p == 1.0:
        assert torch.equal(scaled >= thresholds(scaled, 0 * ks, ps, ms, sort=False), kept(oracle(False)))


def test_a_nucleus_wider_than_the_first_candidates_is_found():
    logits = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(1)) * 0.5
    top_p, min_p = torch.tensor([0.99, 0.3, 0.001]), torch.zeros(3)
    expected = torch.cat(
        [kept(TopPLogitsWarper(float(p))(None, logits[i : i + 1])) for i, p in enumerate(top_p)]
    )
    found = logits >= nucleus_thresholds(logits, top_p, min_p)
    assert int(expected[0].sum()) > 1024 > int(expected[2].sum())
    # transformers sums 20,000 float32 probabilities: a token or two at the border may differ
    assert int((found != expected).sum()) <= 4


def test_tokens_that_tie_with_the_last_one_kept_stay():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    expected = kept(TopKLogitsWarper(2)(None, logits))
    sampler = Sampler(6, 2, CPU)
    sampler.admit(1, params(temperature=1.0, top_k=2), [])
    slots = torch.ones(2000, dtype=torch.int64)
    tokens, _ = sampler.draw(logits.repeat(2000, 1), slots, torch.arange(2000), [1] * 2000)
    assert set(tokens.tolist()) == set(expected[0].nonzero().squeeze(1).tolist()) == {0, 2, 3, 4}


def test_repetition_penalty_is_that_of_transformers():
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(2))
    prompt, output = [3, 4, 5, 5], [6, 7, 7]
    oracle = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    sampler = Sampler(200, 2, CPU)
    sampler.admit(1, params(repetition_penalty=1.7), prompt, output)
    assert torch.equal(sampler._penalties.apply(logits, torch.tensor([1])), oracle)
