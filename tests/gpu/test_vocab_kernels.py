"""The vocabulary's kernels at a served size on a GPU: draws, filters, and the edges of a captured step."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from mstar.kernels.gumbel import gumbel
from mstar.kernels.step import StepRegisters, draw_step
from mstar.kernels.vocab.filters import thresholds
from mstar.kernels.vocab.gpu.begin import begin_step
from mstar.kernels.vocab.gpu.draw import argmax_gpu, merge_draws, partial_draws
from mstar.kernels.vocab.gpu.finish import finish_step
from mstar.kernels.vocab.gpu.noise import gumbel_gpu
from mstar.kernels.vocab.gpu.thresholds import filter_thresholds

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

VOCAB = 248_320
DEVICE = torch.device("cuda")
ROWS = [1, 16, 64]


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    """A bulk, some hundreds of better ids, a few much better: as bf16 rounds them, so with ties."""
    generator = torch.Generator().manual_seed(rows + 1000 * seed)
    x = torch.randn(rows, VOCAB, generator=generator) * 2.0
    for number, lift in ((400, 6.0), (12, 12.0)):
        at = torch.randint(0, VOCAB, (rows, number), generator=generator)
        x.scatter_add_(1, at, torch.rand(rows, number, generator=generator) * lift)
    return x.to(torch.bfloat16).float().to(DEVICE)


def step_registers(slots: int, seed: int) -> StepRegisters:
    """Greedy, hot and filtered slots in turn; some stop or run out soon."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.arange(slots)
    cycle = lambda *values: torch.tensor(values)[number % len(values)].to(DEVICE)  # noqa: E731
    lengths = torch.randint(1, 9000, (slots,), generator=generator).to(torch.int32)
    temperature = cycle(0.0, 1.0, 0.6, 1.5)
    temperature[0] = 0.0
    lengths[0] = 0
    return StepRegisters(
        temperature=temperature,
        seed=torch.randint(-(2**63), 2**63 - 1, (slots,), generator=generator).to(DEVICE),
        top_k=cycle(0, 0, 20, 0, 50),
        top_p=cycle(1.0, 0.9, 0.95),
        min_p=cycle(0.0, 0.0, 0.0, 0.05),
        left=cycle(2, 2**40, 5),
        stop_ids=torch.randint(0, VOCAB, (slots, 5), generator=generator).to(DEVICE),
        ahead=torch.randint(0, VOCAB, (slots, 1), generator=generator).to(DEVICE),
        lengths=lengths.to(DEVICE),
    )


def copy_of(registers: StepRegisters) -> StepRegisters:
    names = registers.__dataclass_fields__
    values = {name: getattr(registers, name) for name in names}
    return StepRegisters(**{name: None if v is None else v.clone() for name, v in values.items()})


def test_noise_is_that_of_the_cpu():
    seeds, positions = torch.tensor([5, -1, 2**62]), torch.tensor([0, 3, 2**33])
    expected = gumbel(seeds, positions, VOCAB)
    out = gumbel_gpu(seeds.to(DEVICE), positions.to(DEVICE), VOCAB).cpu()
    assert bool(((out - expected).abs() <= 2.0**-21 * expected.abs().clamp(min=1.0)).all())
    assert float((out == expected).float().mean()) > 0.5


@pytest.mark.parametrize("rows", ROWS)
def test_argmax_is_that_of_the_cpu_with_ties(rows):
    logits = logits_of(rows)
    logits[:, [200_000, 100_000, 100_001]] = logits.amax(1, keepdim=True) + 1.0
    assert argmax_gpu(logits).tolist() == [100_000] * rows
    plain = logits_of(rows, seed=1)
    assert argmax_gpu(plain).tolist() == plain.cpu().argmax(1).tolist()


@pytest.mark.parametrize("rows", ROWS)
def test_draws_are_those_of_the_cpus_noise(rows):
    logits = logits_of(rows)
    registers = step_registers(rows + 1, rows)
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
    positions = registers.lengths[1:].long() + 1
    parts = partial_draws(
        logits, slots, positions, registers.temperature, registers.seed, first_id=0, vocab=VOCAB
    )
    tokens = merge_draws(*parts)[1].cpu()
    heat = registers.temperature[1:, None].cpu()
    host = logits.cpu()
    noised = torch.where(
        heat >= 1e-5, host / heat + gumbel(registers.seed[1:].cpu(), positions.cpu(), VOCAB), host
    )
    best = noised.amax(1)
    taken = noised.gather(1, tokens[:, None]).squeeze(1)
    assert bool((best - taken <= 2.0**-19 * best.abs().clamp(min=1.0)).all())
    assert int((tokens != noised.argmax(1)).sum()) <= 1


@pytest.mark.parametrize("kept", [None, 8])
def test_twenty_thousand_draws_have_the_exact_probabilities(kept):
    """Chi-square over the twelve likeliest ids and all others together; one row of logits, read 20,000 times."""
    draws = 20_000
    logits = torch.full((1, VOCAB), -12.0)
    likely = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:12].sort().values
    logits[0, likely] = torch.tensor([1.0, 0.4, 0.9, -0.5, 0.0, 1.2, -1.0, 0.7, 0.2, -0.2, 0.5, -0.8])
    logits = logits.to(DEVICE)
    ones = torch.ones(2, device=DEVICE)
    slots = torch.ones(draws, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(draws, device=DEVICE)
    seed = torch.tensor([0, 2026], device=DEVICE)
    least = None
    exact = logits[0].cpu().double() / 1.3
    if kept is not None:
        top_k = torch.tensor([0, kept], device=DEVICE)
        least = filter_thresholds(logits, slots[:1], ones * 1.3, top_k, ones, ones * 0, VOCAB)
        assert int((logits[0] / 1.3 >= least).sum()) == kept
        exact.masked_fill_(exact < exact.topk(kept).values[-1], -torch.inf)
        least = least.expand(draws).contiguous()
    arguments = (logits.expand(draws, -1), slots, positions, ones * 1.3, seed)
    tokens = merge_draws(*partial_draws(*arguments, first_id=0, vocab=VOCAB, least=least))[1].cpu()
    probabilities = exact.softmax(0)
    seen = torch.tensor([int((tokens == token).sum()) for token in likely])
    expected = probabilities[likely] * draws
    possible = expected > 0
    assert not seen[~possible].any()
    seen, expected = seen[possible].double(), expected[possible]
    rest = draws * (1.0 - float(probabilities[likely].sum()))
    if rest > 1e-6 * draws:
        seen = torch.cat([seen, torch.tensor([draws - float(seen.sum())])])
        expected = torch.cat([expected, torch.tensor([rest])])
    assert float(expected.min()) > 50
    assert float(seen.sum()) == draws
    # the sums are equal up to rounding, which scipy wants exactly
    assert stats.chisquare(seen.numpy(), (expected * (draws / expected.sum())).numpy()).pvalue > 1e-3


FILTERS = [
    (1.0, 20, 1.0, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 0, 0.95, 0.02),
    (1.0, 0, 1.0, 0.1),
    (3.0, 0, 0.99, 0.0),
    (1.0, 30_000, 1.0, 0.0),
    (2.0, 50_000, 0.8, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.6, 0, 0.2, 0.0),
    (1.0, 0, 1.0, 0.0),
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["logits", "flat", "random"])
def test_thresholds_keep_what_a_sort_keeps(rows, kind):
    logits = logits_of(rows)
    if kind == "flat":
        logits.fill_(2.5)
    elif kind == "random":
        logits.normal_(generator=torch.Generator(DEVICE).manual_seed(rows))
    for shift in range(0, len(FILTERS), 1 if rows == 1 else 5):
        mixes = list(itertools.islice(itertools.cycle(FILTERS), shift, shift + rows))
        heat, k, p, m = (
            torch.tensor([0, *each], device=DEVICE, dtype=dtype)
            for each, dtype in zip(
                zip(*mixes, strict=True),
                (torch.float32, torch.int64, torch.float32, torch.float32),
                strict=True,
            )
        )
        slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
        least = filter_thresholds(logits, slots, heat, k, p, m, VOCAB)
        again = filter_thresholds(logits, slots, heat, k, p, m, VOCAB)
        assert torch.equal(least, again)
        for row in range(rows):
            scaled = logits[row : row + 1] / heat[row + 1]
            reference = thresholds(
                scaled, k[row + 1 : row + 2], p[row + 1 : row + 2], m[row + 1 : row + 2], sort=True
            )
            kept, expected = scaled >= least[row], scaled >= reference
            if torch.equal(kept, expected):
                continue
            # else top-p's mass must end right there: 1e-6 of the whole, as the module says
            mass = (scaled - scaled.amax()).double().exp()
            apart = float(mass[kept != expected].sum())
            inside = (
                float(mass[scaled >= scaled.flatten().kthvalue(VOCAB - int(k[row + 1]) + 1).values].sum())
                if (int(k[row + 1]))
                else float(mass.sum())
            )
            before = float(mass[kept & expected].sum())
            one = float(mass[kept != expected].max())
            assert apart <= one * (1 + 1e-9), f"{mixes[row]}: cuts differ by more than one value"
            assert abs(before - float(p[row + 1]) * inside) <= 2e-6 * inside, mixes[row]


@pytest.mark.parametrize("rows", ROWS)
def test_a_captured_step_moves_registers_as_eager_calls_and_the_reference_do(rows):
    """Steps of begin, filters, draw and finish; without waiting for the device, and a padding row beside."""
    hidden = 1024
    logits = torch.cat([logits_of(rows), logits_of(1)])
    table = (
        torch.randn(VOCAB, hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(DEVICE)
    )
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(2)) + 1
    slots = torch.cat([order, torch.zeros(1, dtype=torch.int64)]).to(torch.int32).to(DEVICE)
    out = torch.zeros(rows + 1, 2, dtype=torch.int64, device=DEVICE)

    def step(registers: StepRegisters) -> tuple[torch.Tensor, ...]:
        x, starts, fresh = begin_step(slots, registers.ahead, registers.lengths, table, rows_per_seq=1)
        heat = registers.temperature
        least = filter_thresholds(
            logits, slots, heat, registers.top_k, registers.top_p, registers.min_p, VOCAB
        )
        values, ids = partial_draws(
            logits,
            slots,
            starts,
            heat,
            registers.seed,
            first_id=0,
            vocab=VOCAB,
            least=least,
            position_offset=1,
        )
        finish_step(
            values, ids, slots, registers.ahead, registers.lengths, registers.left, registers.stop_ids, out
        )
        return x, starts, fresh

    eager = step_registers(rows + 1, rows)
    captured, reference, spare = copy_of(eager), copy_of(eager), copy_of(eager)
    step(spare)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_x, graph_starts, graph_fresh = step(captured)
    differ = 0
    for _ in range(6):
        ids = eager.ahead[slots.long(), 0]
        torch.cuda.set_sync_debug_mode("error")
        try:
            x, starts, fresh = step(eager)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        wanted = out.clone()
        out.fill_(-7)
        graph_x.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)
        assert torch.equal(x, table[ids]) and torch.equal(graph_x, x)
        assert torch.equal(graph_starts, starts) and torch.equal(graph_fresh, fresh)
        for name in ("ahead", "lengths", "left"):
            assert torch.equal(getattr(captured, name), getattr(eager, name)), name
        least = filter_thresholds(
            logits, slots, eager.temperature, eager.top_k, eager.top_p, eager.min_p, VOCAB
        )
        expected = torch.zeros_like(out)
        draw_step(logits, slots, starts, reference, expected, least)
        differ += int((expected[:-1] != wanted[:-1]).any(1).sum())
        assert int(wanted[-1, 1]) == 0
    # the reference adds the same noise in another kernel: equal here, where no two ids are within an ulp
    assert differ == 0
    for registers in (eager, captured):
        assert int(registers.lengths[0]) == 0 and torch.equal(registers.ahead[0], spare.ahead[0])
    assert torch.equal(eager.lengths[1:], reference.lengths[1:])
    assert torch.equal(eager.left[1:], reference.left[1:])
