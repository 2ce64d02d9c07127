"""What a drawn token does to its request: ends, limits, thinking, logprobs, and slots that come and go."""

from __future__ import annotations

import random

import pytest
import torch

from mstar.ranks.messages import SamplingParams, TokenRun, Tokens, pack, unpack
from mstar.ranks.sampler import FINISH_REASONS, Sampler
from mstar.ranks.sampler.registers import Registers, _signed

CPU = torch.device("cpu")
VOCAB = 64


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10**9, "seed": 1, **fields})


def peaked(*tokens: int) -> torch.Tensor:
    """A row a token, each with its maximum there."""
    logits = torch.randn(len(tokens), VOCAB, generator=torch.Generator().manual_seed(0))
    logits[range(len(tokens)), list(tokens)] = 9.0
    return logits


def run(sampler: Sampler, slot: int, tokens: list[int]) -> tuple[list[int], list[str | None]]:
    """Feeds rows that want these tokens to one slot, until it finishes."""
    drawn, ends = [], []
    for position, token in enumerate(tokens):
        out = sampler.sample(peaked(token), torch.tensor([slot]), torch.tensor([position]))
        drawn.append(int(out.tokens))
        ends.append(FINISH_REASONS[int(out.finish)])
        if ends[-1]:
            break
    return drawn, ends


def admitted(**fields) -> Sampler:
    sampler = Sampler(VOCAB, 4, CPU)
    sampler.admit(1, params(**fields), [1, 2, 3])
    return sampler


# --- greedy -----------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_equal_maxima():
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 7, 13]] = 2.0
    assert int(admitted().sample(logits, torch.tensor([1]), torch.tensor([0])).tokens) == 7


def test_a_temperature_too_small_to_divide_by_is_greedy():
    sampler = admitted(temperature=1e-9)
    assert sampler.plain_greedy([1])
    assert run(sampler, 1, [5, 6]) == ([5, 6], [None, None])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logprobs": 0},
        {"min_tokens": 1, "eos_ids": (5,)},
        {"max_think_tokens": 3, "think_end_id": 9},
    ],
)
def test_only_requests_that_need_no_more_than_an_argmax_are_plain_greedy(fields):
    sampler = Sampler(VOCAB, 4, CPU)
    sampler.admit(1, params(eos_ids=(5,), top_k=3), [])
    sampler.admit(2, params(**fields), [])
    assert sampler.plain_greedy([0, 1])
    assert not sampler.plain_greedy([1, 2])
    sampler.release(2)
    assert sampler.plain_greedy([1, 2])


def test_accepting_tokens_drawn_elsewhere_ends_requests_as_sampling_does():
    together, apart = (Sampler(VOCAB, 4, CPU) for _ in range(2))
    for sampler in (together, apart):
        sampler.admit(1, params(max_tokens=2), [])
        sampler.admit(2, params(eos_ids=(5, 6)), [])
        sampler.admit(3, params(stop_ids=(8,), max_tokens=1), [])
    slots = torch.tensor([1, 2, 3, 0])
    for wanted in ([4, 6, 8, 0], [4, 4, 8, 0]):
        sampled = together.sample(peaked(*wanted), slots, torch.zeros(4, dtype=torch.int64))
        assert sampled.tokens.tolist() == wanted
        assert torch.equal(apart.commit(torch.tensor(wanted), slots, slots.tolist()), sampled.finish)
    assert sampled.finish.tolist() == [2, 0, 1, 0]


# --- ends -------------------------------------------------------------------------------------------------


def test_a_request_ends_with_a_stop_id_or_its_length_and_the_earliest_wins():
    assert run(admitted(eos_ids=(5,), max_tokens=9), 1, [4, 5, 5]) == ([4, 5], [None, "stop"])
    assert run(admitted(stop_ids=(7,)), 1, [4, 7]) == ([4, 7], [None, "stop"])
    assert run(admitted(eos_ids=(5,), max_tokens=2), 1, [4, 4, 5]) == ([4, 4], [None, "length"])
    assert run(admitted(eos_ids=(5,), max_tokens=2), 1, [4, 5]) == ([4, 5], [None, "stop"])
    assert run(admitted(max_tokens=1), 1, [4]) == ([4], ["length"])


def test_more_stop_ids_than_any_request_before_are_all_honoured():
    sampler = admitted(stop_ids=(3,))
    sampler.admit(2, params(stop_ids=tuple(range(20, 50)), eos_ids=(60,)), [])
    assert run(sampler, 2, [19, 49])[1] == [None, "stop"]
    assert run(sampler, 1, [4, 3])[1] == [None, "stop"]


def test_min_tokens_keeps_every_stop_id_back_until_it_is_reached():
    for temperature in (0.0, 1.0):
        sampler = admitted(eos_ids=(5,), stop_ids=(0,), min_tokens=3, temperature=temperature)
        drawn, ends = run(sampler, 1, [5, 0, 5, 5])
        assert ends == [None, None, None, "stop"]
        assert not {0, 5} & set(drawn[:3])


def test_min_tokens_leaves_token_0_alone_unless_it_is_a_stop_id():
    assert run(admitted(eos_ids=(5,), min_tokens=3), 1, [0, 0]) == ([0, 0], [None, None])


def test_padding_rows_change_no_request():
    sampler = admitted(temperature=1.0, presence_penalty=0.5, logprobs=1, max_tokens=3)
    alone = admitted(temperature=1.0, presence_penalty=0.5, logprobs=1, max_tokens=3)
    logits = torch.randn(3, VOCAB)
    for step in range(3):
        padded = sampler.sample(
            torch.cat([logits[step : step + 1], torch.full((3, VOCAB), torch.nan)]),
            torch.tensor([1, 0, 0, 0]),
            torch.tensor([step, 0, 0, 0]),
        )
        plain = alone.sample(logits[step : step + 1], torch.tensor([1]), torch.tensor([step]))
        assert int(padded.tokens[0]) == int(plain.tokens)
        assert padded.finish.tolist() == [int(plain.finish), 0, 0, 0]
        assert padded.logprobs == [*plain.logprobs, None, None, None]


def test_columns_past_the_vocabulary_are_never_drawn():
    wide = torch.cat([peaked(4), torch.full((1, 8), 99.0)], dim=1)
    for fields in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"logprobs": 3}):
        out = admitted(**fields).sample(wide, torch.tensor([1]), torch.tensor([0]))
        assert int(out.tokens) < VOCAB


def test_logits_are_not_written_to():
    logits = peaked(4, 5)
    before = logits.clone()
    sampler = admitted(
        temperature=1.0, top_p=0.9, repetition_penalty=1.5, min_tokens=2, eos_ids=(4,), logprobs=2
    )
    sampler.admit(2, params(frequency_penalty=0.5, min_tokens=1, eos_ids=(5,)), [])
    sampler.sample(logits, torch.tensor([1, 2]), torch.tensor([0, 0]))
    assert torch.equal(logits, before)


# --- slots ------------------------------------------------------------------------------------------------


def test_a_reused_slot_keeps_nothing_of_its_last_request():
    sampler = admitted(
        temperature=2.0,
        top_k=2,
        top_p=0.5,
        min_p=0.4,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        eos_ids=(4, 5, 6, 7, 8, 9),
        min_tokens=5,
        max_tokens=6,
        logprobs=4,
        starts_in_think=True,
        think_start_id=10,
        think_end_id=11,
        max_think_tokens=1,
    )
    run(sampler, 1, [20, 21, 22])
    sampler.release(1)
    for fields in (
        {},
        {"temperature": 1.0},
        {"frequency_penalty": 0.1},
        {"max_think_tokens": 2, "think_end_id": 11},
    ):
        sampler.admit(1, params(seed=6, **fields), [1])
        fresh = Sampler(VOCAB, 4, CPU)
        fresh.admit(1, params(seed=6, **fields), [1])
        wanted = [4, 5, 6, 20, 21, 22, 20, 4]
        assert run(sampler, 1, wanted) == run(fresh, 1, wanted)
        sampler.release(1)


# --- penalties --------------------------------------------------------------------------------------------


def test_penalties_count_the_output_as_it_grows_and_the_prompt_only_for_repetition():
    sampler = admitted(presence_penalty=4.0, frequency_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 9] = 10.0, 7.0  # 1 is in the prompt, which presence and frequency ignore
    drawn = [int(sampler.sample(logits, torch.tensor([1]), torch.tensor([step])).tokens) for step in range(4)]
    # 1: 10, then 10 - 4 - 2 = 4; 9: 7, then 1; 1 again: 4, then 2
    assert drawn == [1, 9, 1, 1]


# --- thinking ---------------------------------------------------------------------------------------------

THINK = {"think_start_id": 50, "think_end_id": 51, "max_think_tokens": 3}


def test_thinking_is_ended_at_its_cap_and_not_before():
    sampler = admitted(starts_in_think=True, **THINK)
    assert run(sampler, 1, [4, 5, 6, 7, 8])[0] == [4, 5, 6, 51, 8]


def test_thinking_that_ends_by_itself_is_left_alone_and_the_answer_is_not_capped():
    sampler = admitted(starts_in_think=True, **THINK)
    assert run(sampler, 1, [4, 51, 6, 7, 8, 9])[0] == [4, 51, 6, 7, 8, 9]


def test_a_thinking_span_that_the_model_opens_is_capped_too():
    assert run(admitted(**THINK), 1, [4, 50, 5, 6, 7, 8])[0] == [4, 50, 5, 6, 7, 51]
    assert run(admitted(starts_in_think=True, **{**THINK, "max_think_tokens": 0}), 1, [4, 5])[0] == [51, 5]


def test_thinking_goes_on_after_a_preemption_where_it_was():
    sampler = Sampler(VOCAB, 4, CPU)
    sampler.admit(2, params(starts_in_think=True, **THINK), [1], [4, 5])
    assert run(sampler, 2, [6, 7, 8])[0] == [6, 51, 8]
    sampler.admit(3, params(starts_in_think=True, **THINK), [1], [4, 5, 51, 6, 50])
    assert run(sampler, 3, [6, 7])[0] == [6, 51]


def test_the_cap_holds_for_sampled_requests_and_for_those_alone():
    sampler = admitted(starts_in_think=True, temperature=1.0, **THINK)
    sampler.admit(2, params(), [])
    for step in range(5):
        slots, positions = torch.tensor([2, 1]), torch.tensor([step, step])
        tokens = sampler.sample(peaked(7, 8), slots, positions).tokens.tolist()
        assert tokens[0] == 7
        assert (tokens[1] == 51) == (step == 3)


# --- logprobs ---------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_penalised_distribution_before_temperature_and_filters():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    fields = {"temperature": 0.3, "top_k": 4, "top_p": 0.5, "logprobs": 5, "presence_penalty": 1.5}
    fields |= {"min_tokens": 5, "eos_ids": (int(logits.argmax()),)}
    output = [8, 9]
    sampler = Sampler(VOCAB, 4, CPU)
    sampler.admit(1, params(**fields), [1], output)
    penalised = logits[0].double()
    penalised[output] -= 1.5
    reference = torch.log_softmax(penalised, 0)
    out = sampler.sample(logits, torch.tensor([1]), torch.tensor([2]))
    logprob, best = out.logprobs[0]
    assert logprob == pytest.approx(float(reference[int(out.tokens)]), abs=1e-5)
    values, ids = reference.topk(5)
    assert [pair[0] for pair in best] == ids.tolist()
    assert [pair[1] for pair in best] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_come_only_for_those_who_asked_as_many_as_they_asked():
    sampler = admitted(logprobs=0)
    sampler.admit(2, params(), [])
    sampler.admit(3, params(logprobs=2, temperature=1.0), [])
    out = sampler.sample(peaked(4, 5, 6), torch.tensor([3, 2, 1]), torch.zeros(3, dtype=torch.int64))
    assert len(out.logprobs[0][1]) == 2
    assert out.logprobs[1] is None
    assert out.logprobs[2][1] == []
    assert sampler.sample(peaked(5), torch.tensor([2]), torch.tensor([1])).logprobs is None
    run = TokenRun(1, [4], None, [out.logprobs[0]])
    assert unpack(pack(Tokens([run], 0.0))).runs[0].logprobs == [out.logprobs[0]]


def test_equal_logprobs_are_listed_by_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, [30, 12, 21]] = 5.0
    out = admitted(logprobs=3).sample(logits, torch.tensor([1]), torch.tensor([0]))
    assert [pair[0] for pair in out.logprobs[0][1]] == [12, 21, 30]
    assert int(out.tokens) == 12


def test_large_vocabularies_draw_the_same_in_parts():
    """16 rows of 100,000 ids are drawn in parts that fit the processor; a row's token does not show it."""
    vocab = 100_000
    sampler = Sampler(vocab, 17, CPU)
    for slot in range(1, 17):
        sampler.admit(slot, params(temperature=1.0, seed=slot, min_p=0.001 * (slot % 2)), [])
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(5))
    slots, positions = torch.arange(1, 17), torch.arange(16)
    together = sampler.draw(logits, slots, positions, slots.tolist())[0]
    for row in (0, 7, 15):
        at = slice(row, row + 1)
        assert int(sampler.draw(logits[at], slots[at], positions[at], [row + 1])[0]) == int(together[row])


def test_slots_that_come_and_go_together_have_each_their_own_registers():
    """Whoever was in a slot before, and whatever others have: stop ids of the longest list are gone with it."""
    rng = random.Random(3)
    registers = Registers(VOCAB, 9, CPU)
    held: dict[int, SamplingParams] = {}
    for _ in range(40):
        for slot in rng.sample(range(1, 9), rng.randrange(1, 9)):
            if held.pop(slot, None) is not None:
                registers.release(slot)
            if rng.random() < 0.7:
                stops = tuple(rng.sample(range(VOCAB), rng.choice((0, 1, 3, 11))))
                sampled = {
                    "temperature": rng.uniform(0.1, 2),
                    "top_p": rng.uniform(0.1, 1),
                    "min_p": rng.random(),
                }
                sampled |= {"top_k": rng.choice((0, 5, 2 * VOCAB)), "seed": rng.randrange(2**64)}
                more = sampled if rng.random() < 0.5 else {}
                held[slot] = params(
                    max_tokens=rng.randrange(5, 99), stop_ids=stops, eos_ids=(VOCAB + 1,), **more
                )
                registers.admit(slot, held[slot], [1, 2])
        registers.settle()
        for slot in range(9):
            given = held.get(slot)
            floats = [float(x[slot]) for x in (registers.temperature, registers.top_p, registers.min_p)]
            ints = [int(x[slot]) for x in (registers.left, registers.top_k, registers.seed)]
            stops = {token for token in registers.stop_ids[slot].tolist() if token >= 0}
            greedy = given is None or given.temperature == 0.0
            assert floats == pytest.approx(
                [0.0, 1.0, 0.0] if greedy else [given.temperature, given.top_p, given.min_p], rel=1e-6
            )
            assert ints[0] == (2**62 if given is None else given.max_tokens - 2)
            assert ints[1:] == ([0, 0] if greedy else [given.top_k % (2 * VOCAB), _signed(given.seed)])
            assert stops == (set() if given is None else set(given.stop_ids))


def test_more_stop_ids_than_a_captured_step_holds_are_their_own_requests_error():
    """A GPU's tensor of them cannot grow; here the limit is set by hand."""
    registers = Registers(VOCAB, 4, CPU)
    registers._most_stops = 4
    registers.admit(1, params(stop_ids=(1, 2, 3, 4)), [])
    with pytest.raises(ValueError, match="5 ids end the answer"):
        registers.admit(2, params(stop_ids=(1, 2, 3, 4, 5)), [])
    registers.release(2)
    registers.settle()
    assert registers.stop_ids[1].tolist() == [1, 2, 3, 4] and registers.stop_ids[2].max() == -1
