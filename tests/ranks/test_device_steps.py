"""Steps that are launched before the one before them came back draw what waiting steps draw."""

from __future__ import annotations

import random

import pytest
import torch

from mstar.ranks.device_steps import Launched
from tests.support.engines import checking, expected, tiny

QUESTIONS = ["What is 12 + 30?", "Name three colours.", "Explain rainbows.", "Hi", "Sort 9, 4, 7."]


def submit_all(bench, **common):
    rng = random.Random(5)
    for index, question in enumerate(QUESTIONS):
        sampling = {"max_tokens": 5 + 9 * index, "seed": 40 + index}
        if index % 2:
            sampling["temperature"] = 0.8
        prompt = tiny().chat(question) * (1 + rng.randrange(3))
        bench.submit(index, prompt, **(sampling | common))


def ends(bench):
    return {run.request_id: run.finish for run in bench.runs() if run.finish}


@pytest.mark.parametrize(
    "common",
    [{}, {"eos_ids": (6137, 6139)}, {"top_k": 20}, {"top_p": 0.9, "min_p": 0.02}, {"logprobs": 2}],
)
def test_tokens_and_ends_are_those_of_steps_that_wait(common):
    waiting, ahead = tiny().bench(), tiny().bench(ahead=True)
    for bench in (waiting, ahead):
        submit_all(bench, **common)
        bench.run()
    assert ahead.tokens() == waiting.tokens()
    assert ends(ahead) == ends(waiting)
    assert len(ends(ahead)) == len(QUESTIONS)


def test_a_step_is_planned_while_another_is_under_way():
    bench = tiny().bench(ahead=True)
    bench.submit(0, tiny().chat("Hi"), max_tokens=6)
    seen = []
    while bench.engine.step():
        seen.append(bench.scheduler.steps_in_flight)
    assert len(bench.tokens()[0]) == 6
    assert bench.scheduler.idle and seen[-1] == 0


def test_padding_rows_leave_the_sink_and_other_slots_as_they_were():
    bench = tiny().bench(ahead=True)
    submit_all(bench)
    bench.run()
    executor = bench.executor
    assert int(executor.lengths[0]) == 0 and int(executor.ahead[0, 0]) == 0
    assert bench.scheduler.slots.free == bench.scheduler.slots.total


@pytest.mark.parametrize("kv_blocks", [60])
def test_preemption_waits_for_the_step_under_way(kv_blocks):
    waiting, ahead = tiny().bench(), tiny().bench(ahead=True, kv_blocks=kv_blocks)
    for bench in (waiting, ahead):
        for index in range(6):
            bench.submit(index, tiny().chat(QUESTIONS[index % 5]) * 3, max_tokens=120)
        bench.run()
    assert ahead.tokens() == waiting.tokens()
    assert ahead.scheduler.counters.preemptions > 0


def test_an_abort_drops_what_is_under_way_and_its_slot_is_used_again():
    bench = tiny().bench(ahead=True, max_num_seqs=1)
    bench.submit(0, tiny().chat("Explain rainbows."), max_tokens=50)
    for _ in range(4):
        bench.engine.step()
    bench.scheduler.abort(0)
    bench.submit(1, tiny().chat("Hi"), max_tokens=8)
    bench.run()
    alone = tiny().bench()
    alone.submit(1, tiny().chat("Hi"), max_tokens=8)
    assert bench.tokens()[1] == alone.run()[1]
    assert len(bench.tokens()[0]) < 50
    assert torch.equal(bench.executor.ahead[0], torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("length", [64, 65, 130, 200])
def test_a_prompt_in_chunks_leaves_no_hole_in_the_heads_kv(length):
    """A chunk that is not the last has drafts to follow, too: the model checks the head's KV at every pass."""
    bench = checking(ahead=True, drafts=3, prefill_budget=64)
    prompt = [(7 * place) % 97 for place in range(length)]
    bench.submit(0, prompt, max_tokens=20)
    assert bench.run()[0] == expected(prompt, 20)


def test_a_chunk_that_the_head_follows_beside_plain_decoding():
    bench = checking(ahead=True, drafts=3, mixed_budget=64)
    bench.submit(0, [1, 2, 3], max_tokens=40, spec_k=0)
    bench.engine.step()
    prompt = [(5 * place) % 97 for place in range(100)]
    bench.submit(1, prompt, max_tokens=20)
    tokens = bench.run()
    assert tokens == {0: expected([1, 2, 3], 40), 1: expected(prompt, 20)}


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_come_back_late_give_what_waiting_ones_do(seed, monkeypatch):
    """On a CPU a step is done when it was launched; here some are not, as on a device."""
    rng = random.Random(seed)
    monkeypatch.setattr(Launched, "done", property(lambda _: rng.random() < 0.4))
    bench = checking(ahead=True, drafts=seed % 2 * 3, kv_blocks=(16, 40)[seed // 2], max_num_seqs=4)
    wanted = {}
    for index in range(10):
        prompt = [rng.randrange(97) for _ in range(rng.choice((1, 2, 16, 33, 65, 100)))]
        count = rng.choice((1, 2, 17, 40))
        sampling = {} if index % 3 else {"logprobs": 1}
        bench.submit(index, prompt, max_tokens=count, **sampling)
        wanted[index] = expected(prompt, count)
    assert bench.run() == wanted
    scheduler = bench.scheduler
    assert scheduler.slots.free == scheduler.slots.total and scheduler.blocks.free == scheduler.blocks.total
