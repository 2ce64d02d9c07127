"""The checks' own judgement: near-ties, exact draws, chi-square, and that a difference is found at all."""

import collections
import contextlib
import random
from types import SimpleNamespace

import pytest
import scipy.stats
import torch

from mstar.kernels.gumbel import gumbel_at
from mstar.loader import resolve
from mstar.ranks.messages import SamplingParams
from mstar.ranks.sampler import Sampler
from mstar.scripts import check_greedy, check_long, check_prompts
from mstar.scripts.arms import PLAIN, ArmError, parse_arms
from mstar.scripts.check_cells import CheckError, cells_of, tally, verdict_of
from mstar.scripts.check_client import Answer
from mstar.scripts.check_prompts import CheckPrompt
from mstar.scripts.check_sampled import SETTINGS
from mstar.scripts.chi_square import chi_square
from mstar.scripts.near_ties import allowed_gap, difference, first_difference, ulp
from mstar.scripts.offline_model import OfflineModel
from mstar.scripts.sampled_reference import Sampling, is_near_tie, probabilities, scaled_logits

VOCAB = 300


def test_arms_have_names_and_daemon_flags():
    plain, three = parse_arms("plain,mtp3")
    assert (plain.name, plain.daemon_flags) == ("plain", ["--mtp", "off"])
    assert (three.name, three.daemon_flags) == ("mtp3", ["--mtp", "on", "--mtp-k", "3"])
    (off,) = parse_arms("off3")
    assert (off.name, off.daemon_flags) == ("off3", three.daemon_flags)
    assert (off.request_fields, three.request_fields) == ({"spec": {"mtp": "off"}}, {})
    for text in ("", "mtp", "mtp0", "mtp9", "mtp1,mtp1", "Plain", "off", "off9"):
        with pytest.raises(ArmError):
            parse_arms(text)
    with pytest.raises(ArmError, match="off3"):
        cells_of("plain,off3", "1")


def test_the_reference_is_no_cell():
    assert [(arm.name, tp) for arm, tp in cells_of("plain", "1", elsewhere=True)] == [("plain", 1)]
    assert [(arm.name, tp) for arm, tp in cells_of("plain,mtp2", "1,2")] == [
        ("mtp2", 1),
        ("plain", 2),
        ("mtp2", 2),
    ]


@pytest.mark.parametrize("value", [1.0, 1.99, 0.3, 20.0, 31.9, 1e-3, 4096.0])
def test_ulp_is_the_step_to_the_next_bf16(value):
    rounded = torch.tensor(value, dtype=torch.bfloat16)
    above = (rounded.view(torch.int16) + 1).view(torch.bfloat16)
    assert ulp(float(rounded)) == float(above) - float(rounded)


def test_differences_are_found_in_tokens_and_in_lengths():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1], [1, 3]) == 1


def test_a_gap_is_known_where_each_token_is_in_the_others_best_two():
    a, b = [5, 1], [5, 2]
    known = difference(1, a, b, [(1, -0.1), (2, -0.3)], [(2, -0.1), (1, -0.2)])
    assert known.gap == pytest.approx(0.2)
    assert difference(1, a, b, [(1, -0.1), (2, -0.3)], [(2, -0.1), (9, -0.2)]).gap is None
    assert difference(1, [5], b, [], [(2, -0.1), (1, -0.2)]).gap is None
    assert allowed_gap("fp32", 20.0) == 1e-4
    assert allowed_gap("bf16", 20.0) == 2 * 0.125


def test_cells_count_differences_and_say_when_little_was_checked():
    (cell,) = cells_of("mtp3", "1")
    reference = [Answer([1, 2], "ab", "stop"), Answer([3], "c", "stop")]
    answers = [
        Answer([1, 2], "ab", "stop", steps=4, drafted=12, accepted=8),
        Answer([3], "c", "length", steps=4),
    ]
    result, differ = tally(cell, answers, reference)
    assert differ == [1] and result.equal == 1 and result.tau == 1.0
    assert not result.thin and result.drafts_per_step == 1.5
    assert verdict_of([result], strict=False) == "pass"
    result.add({"verdict": "near-tie"})
    assert verdict_of([result], strict=False) == "pass" and verdict_of([result], strict=True) == "fail"
    result.add({"verdict": "divergence"})
    assert verdict_of([result], strict=False) == "fail"
    assert verdict_of([], strict=False) == "fail"


class Served:
    """Scripted daemons for check_greedy: what each call of `ask_all` answers, and what it was asked."""

    def __init__(self, monkeypatch, devices, answers):
        self.asked = []
        devices, answers = iter(devices), iter(answers)

        @contextlib.contextmanager
        def launched(model, flags):
            loaded = {
                "device": next(devices),
                "dtype": "bf16",
                "fingerprint": "f",
                "spec": {"k": 0, "reason": ""},
            }
            yield SimpleNamespace(address=""), loaded

        def ask_all(address, requests, concurrency):
            self.asked.append(requests)
            return next(answers) if requests else []

        monkeypatch.setattr(check_greedy, "launched_daemon", launched)
        monkeypatch.setattr(check_greedy, "ask_all", ask_all)
        logits = SimpleNamespace(next_logits=lambda ids: torch.tensor([20.0]))
        monkeypatch.setattr(check_greedy, "OfflineModel", lambda *_: logits)

    def check(self, **given):
        check = check_greedy.Check("m", "bf16", [CheckPrompt("chat", [1, 2])], 8, 2, (), **given)
        check.ask_reference()
        result = check.run_cell((PLAIN, 1))
        check.judge([result])
        return result


def entries(*tops):
    return [(None, list(top)) for top in tops]


@pytest.mark.parametrize(("gap", "verdict"), [(0.2, "near-tie"), (0.3, "divergence")])
def test_on_a_gpu_the_token_at_the_difference_is_asked_for_alone(monkeypatch, gap, verdict):
    reference = Answer([5, 9], "ab", "stop", entries([(5, -0.1), (3, -4.0)], [(9, -0.5), (7, -0.6)]))
    behind = Answer([9], "b", "length", entries([(9, -0.5), (7, -0.5 - gap)]))
    answers = [[reference], [reference], [Answer([5, 7, 4], "ac", "stop")], [behind]]
    served = Served(monkeypatch, ["cpu (2 threads a rank)", "NVIDIA H200"], answers)
    result = served.check(reference_device="cpu")
    (asked,) = served.asked[-1]
    assert (asked["prompt_ids"], asked["max_tokens"], asked["logprobs"]) == ([1, 2, 5], 1, 2)
    assert [detail["verdict"] for detail in result.details] == [verdict]
    assert result.details[0]["gap"] == pytest.approx(max(gap, 0.1)) and result.details[0]["tokens"] == (7, 9)


def test_a_reference_on_a_gpu_is_refused(monkeypatch):
    served = Served(monkeypatch, ["NVIDIA H200"], [[Answer([5])], [Answer([5])]])
    with pytest.raises(CheckError, match="--reference-device cpu"):
        served.check()


def test_on_a_cpu_an_answer_that_parts_from_itself_is_a_divergence(monkeypatch):
    reference = Answer([5, 9], "ab", "stop", entries([(5, -0.1)], [(9, -0.5), (7, -0.6)]))
    again = Answer([5, 9], "ab", "stop", entries([(5, -0.1)], [(9, -0.5), (7, -0.6)]))
    answers = [[reference], [reference], [Answer([5, 7], "ac", "stop")], [again]]
    result = Served(monkeypatch, ["cpu (2 threads a rank)"] * 2, answers).check()
    assert [detail["why"] for detail in result.details] == ["another answer when asked again"]


def test_a_cell_whose_policy_drafted_little_is_no_pass():
    (cell,) = cells_of("mtp3", "1")
    answers = [Answer([1, 2], "ab", "stop", steps=4, drafted=1)]
    result, differ = tally(cell, answers, answers)
    assert differ == [] and result.thin
    assert verdict_of([result], strict=False) == "inconclusive"
    plain, _ = tally((PLAIN, 2), [Answer([1], "a", "stop")], [Answer([1], "a", "stop")])
    assert verdict_of([plain], strict=False) == "pass"


def sampler_draws(logits, sampling, prompt, output, seeds):
    """What the sampler draws with each seed, at the position after prompt and output."""
    sampler = Sampler(VOCAB, len(seeds) + 1, torch.device("cpu"))
    for slot, seed in enumerate(seeds, 1):
        params = SamplingParams(max_tokens=50, seed=seed, **sampling.fields())
        sampler.admit(slot, params, prompt, output)
    slots = torch.arange(1, len(seeds) + 1)
    positions = torch.full_like(slots, len(prompt) + len(output))
    return sampler.sample(logits.repeat(len(seeds), 1), slots, positions).tokens.tolist()


@pytest.mark.parametrize("sampling", [*SETTINGS, Sampling(temperature=2.0, top_k=8)])
def test_the_sampler_draws_from_the_references_distribution(sampling):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(VOCAB, generator=generator) * 3
    prompt, output = [5, 6, 7], [9, 9, 11]
    exact = probabilities(scaled_logits(logits, sampling, prompt, output), sampling)
    draws = collections.Counter(sampler_draws(logits, sampling, prompt, output, list(range(4000))))
    test = chi_square(draws, dict(enumerate(exact.tolist())))
    assert test.impossible == 0 and test.p_value > 1e-4
    # and the test has the power to tell: the distribution of another temperature fails
    other = Sampling(temperature=sampling.temperature * 1.5)
    wrong = probabilities(scaled_logits(logits, other, prompt, output), other)
    assert chi_square(draws, dict(enumerate(wrong.tolist()))).p_value < 1e-4


def test_chi_square_is_scipys():
    draw = random.Random(1)
    chances = {"a": 0.5, "b": 0.3, "c": 0.2}
    counts = collections.Counter(draw.choices(list(chances), list(chances.values()), k=1000))
    got = chi_square(counts, chances)
    seen, expected = (
        [table[k] for k in chances] for table in (counts, {k: v * 1000 for k, v in chances.items()})
    )
    want = scipy.stats.chisquare(seen, expected)
    assert (got.statistic, got.p_value) == pytest.approx((want.statistic, want.pvalue))


def test_rare_outcomes_share_a_bin_and_impossible_ones_are_counted():
    chances = {"a": 0.98, **{f"r{i}": 0.002 for i in range(10)}, "never": 0.0}
    counts = collections.Counter({"a": 970, "r1": 20, "never": 3, "unknown": 7})
    test = chi_square(counts, chances)
    assert (test.draws, test.bins, test.impossible) == (1000, 2, 10)


def test_near_ties_of_sampled_tokens_are_those_of_noised_values_and_filters():
    logits = torch.zeros(VOCAB)
    logits[[1, 2, 3]] = torch.tensor([5.0, 5.0, 4.0])
    narrow, seed, position = Sampling(top_k=2), 7, 4
    scaled = scaled_logits(logits, narrow, [], [])

    noise = gumbel_at(torch.tensor([seed]), torch.tensor([position]), torch.tensor([[1, 2]]))[0]
    scaled[1], scaled[2] = 5.0, 5.0 + float(noise[0] - noise[1]) + 1e-3
    wide = Sampling(top_k=3)
    assert is_near_tie(scaled, wide, seed, position, (1, 2), 2e-3)
    assert not is_near_tie(scaled, wide, seed, position, (1, 2), 5e-4)
    assert not is_near_tie(scaled, narrow, seed, position, (1, 2), 2e-3), "2 is filtered out"
    scaled[3] = scaled[2] + 1e-3
    assert is_near_tie(scaled, narrow, seed, position, (1, 2), 2e-3), "at the filter's edge"


def test_prompts_are_of_the_length_asked_for():
    path = resolve("builtin:tiny")
    assert all(len(p.ids) <= check_prompts.SHORT_TOKENS for p in check_prompts.short_prompts(path, 70, 1))
    longer = check_prompts.long_prompts(path, 2, 1000, 1)
    assert [len(p.ids) for p in longer] == [1000, 1000] and longer[0].ids != longer[1].ids


@pytest.fixture(scope="module")
def tiny():
    return OfflineModel("builtin:tiny", "fp32")


def test_long_runs_are_plain_ones_with_their_states(tiny, monkeypatch):
    monkeypatch.setattr(check_long, "COMPARED_EVERY", 20)
    prompts = check_prompts.short_prompts(tiny.path, 3, 2)
    rows = check_long.check_arm(tiny, prompts, 48, 3)
    assert [row["verdict"] for row in rows] == ["equal"] * 3
    assert all(len(row["states_at"]) >= 2 and row["state_difference"] == 0 for row in rows)
    assert all(row["tau"] > 0 for row in rows)


def test_a_wrong_state_and_a_wrong_token_are_divergences(tiny):
    (prompt,) = check_prompts.short_prompts(tiny.path, 1, 2)
    wanted = [[len(prompt.ids) + 10]]
    mine, theirs = (check_long.run(tiny, [prompt], 16, 0, wanted, exact=True)[0] for _ in range(2))
    assert check_long.compare(tiny, prompt, mine, theirs)["verdict"] == "equal"
    ((length, states),) = mine.states.items()
    mine.states[length] = states | {"layers.0.state": states["layers.0.state"] + 0.01}
    assert check_long.compare(tiny, prompt, mine, theirs)["verdict"] == "divergence"
    mine.states[length] = states
    mine.ids[12] += 1
    assert check_long.compare(tiny, prompt, mine, theirs)["verdict"] == "divergence"
    theirs.states.clear()
    mine.ids[12] -= 1
    assert check_long.compare(tiny, prompt, mine, theirs)["verdict"] == "divergence", "nothing was compared"
