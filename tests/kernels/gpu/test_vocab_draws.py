"""Draws by the kernels: the noise of mstar.kernels.gumbel, and the tokens that the torch rule takes with it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mstar.kernels.argmax import argmax_rows
from mstar.kernels.gumbel import gumbel, words, words_at
from mstar.kernels.vocab.gpu.draw import argmax_gpu, merge_draws, partial_draws, splits_of
from mstar.kernels.vocab.gpu.noise import gumbel_at_gpu, gumbel_gpu, words_of_groups
from mstar.ranks.plan import decode_buckets

# What noise.py promises: 2^-21 of max(1, |noise|).
NOISE_BOUND = 2.0**-21


@triton.jit
def _words(seeds, positions, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    groups = tl.arange(0, BLOCK // 4)
    ids = tl.arange(0, BLOCK)
    word = words_of_groups(tl.load(seeds + row), tl.load(positions + row), groups)
    tl.store(out + row * n + ids, word.to(tl.int64), mask=ids < n)


def keys(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions that use all of their 64 bits."""
    generator = torch.Generator().manual_seed(rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**20, (rows,), generator=generator)
    seeds[0], positions[-1] = -1, 2**35 + 3
    return seeds.to(device), positions.to(device)


def test_words_are_those_of_the_torch_reference(device):
    seeds, positions = keys(5, device)
    out = torch.full((5, 1999), -1, dtype=torch.int64, device=device)
    _words[(5,)](seeds, positions, out, 1999, BLOCK=2048)
    assert torch.equal(out.to(torch.float32), words(seeds, positions, 1999))
    ids = torch.arange(1999, device=device).expand(5, -1)
    assert torch.equal(out.to(torch.float32), words_at(seeds, positions, ids))


@pytest.mark.parametrize("vocab", [1000, 1024, 6145])
def test_noise_is_the_formula_in_float64_and_the_references(device, vocab):
    seeds, positions = keys(3, device)
    out = gumbel_gpu(seeds, positions, vocab)
    assert out.shape == (3, vocab) and out.dtype == torch.float32
    v = words(seeds, positions, vocab).double().cpu().numpy()
    v = np.minimum((v + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # the reference rounds v to float32 before the logarithms
    exact = torch.from_numpy(-np.log(-np.log1p(-v.astype(np.float32).astype(np.float64)))).to(device)
    near = NOISE_BOUND * exact.abs().clamp(min=1.0)
    assert bool(((out - exact).abs() <= near).all())
    assert bool(((out - gumbel(seeds, positions, vocab)).abs() <= near).all())


def test_noise_at_some_ids_is_bit_for_bit_that_of_the_whole(device):
    seeds, positions = keys(3, device)
    ids = torch.tensor([[0, 1, 2, 3, 4], [999, 5, 500, 5, 42], [7, 6, 5, 4, 998]], device=device)
    assert torch.equal(
        gumbel_at_gpu(seeds, positions, ids), gumbel_gpu(seeds, positions, 1000).gather(1, ids)
    )


class Registers:
    """A few slots: 0 and 1 greedy, the others at some temperature, 3 just at the least one."""

    def __init__(self, device: torch.device) -> None:
        self.temperature = torch.tensor([0.0, 0.9e-5, 1.0, 1e-5, 0.7, 1.9], device=device)
        self.seed = torch.tensor([3, 4, -5, 2**62 + 1, 12345678901, 6], device=device)


def noised(logits, slots, positions, registers, least=None):
    """The torch rule: mstar.ranks.sampler.sampler._draw_wide beside the argmax of greedy rows."""
    temperature = registers.temperature[slots.long()][:, None]
    sampled = temperature >= 1e-5
    scaled = logits / temperature
    values = scaled + gumbel(registers.seed[slots.long()], positions, logits.shape[1])
    if least is not None:
        values.masked_fill_(scaled < least[:, None], -torch.inf)
    return torch.where(sampled, values, logits)


def assert_drawn(values: torch.Tensor, tokens: torch.Tensor, expected: torch.Tensor) -> int:
    """Tokens are the expected argmax, or as good within the noise's bound; returns how many only that."""
    best = expected.amax(1)
    assert bool(((values - best).abs() <= 4 * NOISE_BOUND * best.abs().clamp(min=1.0)).all())
    differ = (tokens != expected.argmax(1)).nonzero().squeeze(1)
    for row in differ.tolist():
        gap = float(best[row] - expected[row, tokens[row]])
        assert gap <= 4 * NOISE_BOUND * max(1.0, abs(float(best[row]))), f"row {row} drew another token"
    return len(differ)


@pytest.mark.parametrize("vocab, rows, spread", [(1000, 36, 1.0), (6144, 6, 3.0), (6145, 2, 0.0)])
def test_draws_are_those_of_the_sampler_greedy_rows_among_them(device, vocab, rows, spread):
    generator = torch.Generator().manual_seed(vocab)
    wide = torch.full((rows, vocab + 24), torch.inf, device=device)  # columns that must not be looked at
    wide[:, :vocab] = (torch.randn(rows, vocab, generator=generator) * spread).to(device)
    logits = wide[:, : vocab + 8]
    slots = (torch.arange(rows) * 5 % 6).to(torch.int32).to(device)  # greedy and not, side by side
    positions = torch.randint(0, 2**40, (rows,), generator=generator).to(device)
    registers = Registers(device)
    parts = partial_draws(
        logits, slots, positions, registers.temperature, registers.seed, first_id=0, vocab=vocab
    )
    assert parts[0].shape == parts[1].shape == (splits_of(rows, vocab)[0], rows)
    assert parts[0].dtype == torch.float32 and parts[1].dtype == torch.int64
    values, tokens = merge_draws(*parts)
    expected = noised(wide[:, :vocab].clone(), slots, positions, registers)
    assert assert_drawn(values, tokens, expected) <= rows // 20
    greedy = slots < 2
    assert torch.equal(tokens[greedy], expected.argmax(1)[greedy])
    assert torch.equal(values[greedy], expected.amax(1)[greedy])


def test_many_seeds_and_positions_draw_the_references_tokens(device):
    rows, vocab = (300 if device.type == "cuda" else 80), 1000  # 0.05 s a row in the interpreter
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab, generator=generator).to(device)
    seed = torch.randint(-(2**63), 2**63 - 1, (rows + 1,), generator=generator).to(device)
    temperature = torch.full((rows + 1,), 1.3, device=device)
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    positions = torch.arange(rows, device=device) * 17
    parts = partial_draws(logits, slots, positions, temperature, seed, first_id=0, vocab=vocab)
    values, tokens = merge_draws(*parts)
    expected = logits / 1.3 + gumbel(seed[1:], positions, vocab)
    assert assert_drawn(values, tokens, expected) <= 1 + rows // 100
    assert tokens.unique().numel() > rows // 2


@pytest.mark.parametrize("borders", [(0, 512, 1000), (0, 1, 6, 335, 1000), (0, 250, 503, 1000, 1000)])
def test_parts_of_the_vocabulary_together_draw_what_the_whole_does(device, borders):
    """Also where a part begins inside a group of four ids, and where it has none."""
    rows, vocab = 6, 1000
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, vocab, generator=generator).to(device)
    slots = (torch.arange(rows, device=device) % 6).to(torch.int32)
    positions = torch.arange(rows, device=device) + 5
    registers = Registers(device)
    arguments = (slots, positions, registers.temperature, registers.seed)
    whole = merge_draws(*partial_draws(logits, *arguments, first_id=0, vocab=vocab))
    pairs = []
    for first, last in itertools.pairwise(borders):
        # each rank's part has two columns too many, as a padded one has
        part = torch.cat([logits[:, first:last], torch.full((rows, 2), torch.inf, device=device)], 1)
        limit = vocab if last == vocab else last
        pairs.append(merge_draws(*partial_draws(part, *arguments, first_id=first, vocab=limit)))
    values, ids = (torch.stack(each) for each in zip(*pairs, strict=True))
    merged = merge_draws(values, ids)
    assert torch.equal(merged[0], whole[0]) and torch.equal(merged[1], whole[1])


def test_ties_go_to_the_lowest_id_within_a_program_and_across(device):
    logits = torch.zeros(4, 5000, device=device)
    logits[0, [4999, 1023, 1024, 700]] = 3.0  # two of one tile, two of others
    logits[1] = -torch.inf
    logits[2, 4999] = logits[2, 4100] = 1.0
    logits[3] = -torch.inf
    logits[3, 4096:] = -3.0
    assert argmax_gpu(logits).tolist() == [700, 0, 4100, 4096]
    # sampled: the same noise cannot be had twice, but noise that is lost in a large logit can
    slots = torch.ones(1, dtype=torch.int32, device=device)
    zeros, ones = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(2, device=device)
    large = torch.zeros(1, 5000, device=device)
    large[0, [4000, 2500, 2501]] = 1e12
    seed = torch.zeros(2, dtype=torch.int64, device=device)
    assert (
        int(merge_draws(*partial_draws(large, slots, zeros, ones, seed, first_id=0, vocab=5000))[1]) == 2500
    )


def test_a_threshold_keeps_lower_logits_out(device):
    rows, vocab = 12, 1000
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocab, generator=generator).to(device)
    slots = (torch.arange(rows, device=device) % 6).to(torch.int32)
    positions = torch.arange(rows, device=device)
    registers = Registers(device)
    scaled = logits / registers.temperature[slots.long()][:, None]
    least = scaled.topk(7, dim=1).values[:, -1].contiguous()
    least[slots == 4] = -torch.inf  # a row without filters among them
    parts = partial_draws(
        logits, slots, positions, registers.temperature, registers.seed, first_id=0, vocab=vocab, least=least
    )
    values, tokens = merge_draws(*parts)
    assert assert_drawn(values, tokens, noised(logits, slots, positions, registers, least)) == 0
    free = noised(logits, slots, positions, registers)
    assert bool((tokens != free.argmax(1)).any()), "no threshold mattered"


def test_rows_of_one_sequence_draw_at_places_one_after_another(device):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 1000, generator=generator).to(device)
    slots = torch.tensor([4, 1], dtype=torch.int32, device=device)
    starts = torch.tensor([90, 7], device=device)
    registers = Registers(device)
    kinds = {"first_id": 0, "vocab": 1000}
    tables = (registers.temperature, registers.seed)
    many = partial_draws(logits, slots, starts, *tables, rows_per_seq=3, position_offset=1, **kinds)
    positions = torch.tensor([91, 92, 93, 8, 9, 10], device=device)
    each = partial_draws(logits, slots.repeat_interleave(3), positions, *tables, **kinds)
    assert torch.equal(many[0], each[0]) and torch.equal(many[1], each[1])
    moved = partial_draws(logits, slots, starts, *tables, rows_per_seq=3, position_offset=2, **kinds)
    assert not torch.equal(many[0][:, :3], moved[0][:, :3])


@pytest.mark.parametrize("rows, n", [(1, 1), (3, 1000), (2, 6144), (5, 3001)])
def test_argmax_is_that_of_torch(device, rows, n):
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(rows, n, generator=generator).to(torch.bfloat16).float().to(device)  # many ties
    expected = argmax_rows(logits.cpu())
    assert argmax_gpu(logits).tolist() == expected.tolist()


def test_how_a_row_is_split_changes_no_draw(device, monkeypatch):
    """Many rows make programs take several tiles each; ties over their tiles still go to the lowest id."""
    rows, vocab = 3, 5000
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(rows, vocab, generator=generator).to(device)
    logits[1:, [4117, 2 * 1024 + 17, 1024 + 17, 1024 + 500]] = 1e12  # noise is lost in these
    slots = torch.tensor([4, 4, 1], dtype=torch.int32, device=device)
    positions = torch.arange(rows, device=device)
    registers = Registers(device)
    arguments = (logits, slots, positions, registers.temperature, registers.seed)
    many = partial_draws(*arguments, first_id=0, vocab=vocab)
    monkeypatch.setattr("mstar.kernels.vocab.gpu.draw._PROGRAMS", 2)
    few = partial_draws(*arguments, first_id=0, vocab=vocab)
    assert many[0].shape[0] == 5 and few[0].shape[0] == 2
    values, tokens = merge_draws(*few)
    assert torch.equal(tokens, merge_draws(*many)[1]) and torch.equal(values, merge_draws(*many)[0])
    assert tokens[1:].tolist() == [1024 + 17] * 2


def test_many_rows_share_programs_by_longer_splits():
    assert splits_of(1, 248_320) == (243, 1)
    splits, tiles = splits_of(64, 248_320)
    assert tiles > 1 and (splits - 1) * tiles < 243 <= splits * tiles


@pytest.mark.parametrize("columns", [1000, 124_160, 248_320])
def test_any_number_of_rows_draws_with_what_some_bucket_was_compiled_for(columns):
    for most in (1, 3, 8, 20, 64, 200, 256):
        compiled = {splits_of(bucket, columns) for bucket in decode_buckets(most)}
        assert {splits_of(rows, columns) for rows in range(1, most + 1)} <= compiled
