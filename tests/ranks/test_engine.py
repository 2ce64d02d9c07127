"""The engine in one process: a model that checks its own caches, then the real one in float32.

Whatever shares the batch, and however a request is chunked, preempted or placed, its tokens are the same.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from mstar.ranks.leader import InFlight
from mstar.ranks.messages import Abort, Event, Refused, SamplingParams, Started, Stop, Tokens
from mstar.ranks.plan import StepPlan
from mstar.ranks.warmup import warm_up
from tests.support.engines import checking, expected, prompts, tiny


@pytest.mark.parametrize("kv_blocks", [200, 20])
def test_registers_tables_and_slots_serve_every_sequence_its_own_tokens(kv_blocks: int) -> None:
    """Slots are reused many times over; with 20 blocks most requests are preempted."""
    bench = checking(kv_blocks=kv_blocks)
    given = prompts(30)
    for request_id, prompt in enumerate(given, 1):
        bench.submit(request_id, prompt, max_tokens=50)
    got = bench.run()
    assert got == {request_id: expected(prompt, 50) for request_id, prompt in enumerate(given, 1)}
    stats = bench.stats()
    assert (stats.preemptions > 0) == (kv_blocks == 20)
    assert (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)
    assert (stats.running, stats.waiting) == (0, 0)
    started = [event.request_id for event in bench.events if isinstance(event, Started)]
    assert started == list(range(1, 31))


def test_steps_of_one_token_to_one_request_do_not_depend_on_shape() -> None:
    """A one-token prompt beside a decode row, and a chunk tail of one token."""
    bench = checking()
    bench.submit(1, [5], max_tokens=30)
    bench.engine.step()
    bench.submit(2, [6], max_tokens=30)
    bench.submit(3, [7] * 65, max_tokens=30)
    assert bench.run() == {1: expected([5], 30), 2: expected([6], 30), 3: expected([7] * 65, 30)}


def test_aborts_in_every_phase_disturb_nobody_and_free_everything() -> None:
    rng = random.Random(3)
    bench = checking(kv_blocks=30)
    given = dict(enumerate(prompts(25), 1))
    aborted = set(rng.sample(sorted(given), 12))
    for request_id, prompt in given.items():
        bench.submit(request_id, prompt, max_tokens=30)
    left = sorted(aborted)
    while bench.engine.step():
        if left and rng.random() < 0.3:
            bench.engine.handle(Abort(left.pop(rng.randrange(len(left)))))
    for request_id, tokens in bench.tokens().items():
        assert tokens == expected(given[request_id], 30)[: len(tokens)]
        assert request_id in aborted or len(tokens) == 30
    stats = bench.stats()
    assert (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)


@pytest.mark.parametrize("failing", [{2}, {1, 2, 3}], ids=["one", "all"])
def test_a_request_that_the_sampler_cannot_take_fails_alone(failing: set[int]) -> None:
    """Its error is its own end; what it held is free, and its neighbours and followers in its slot are served."""
    bench = checking(max_num_seqs=2)
    admit = bench.sampler.admit

    def picky(slot: int, params: SamplingParams, *rest: Any) -> None:
        if params.seed in failing:
            raise ValueError("not today")
        admit(slot, params, *rest)

    bench.sampler.admit = picky  # type: ignore[method-assign]
    for request_id in (1, 2, 3, 4):
        bench.submit(request_id, [request_id] * 20, max_tokens=10)
    good = {1, 2, 3, 4} - failing
    assert bench.run() == {n: expected([n] * 20, 10) for n in good}
    refused = [event for event in bench.events if isinstance(event, Refused)]
    assert {event.request_id for event in refused} == failing
    assert {(event.error_class, "not today" in event.message) for event in refused} == {("internal", True)}
    assert {event.request_id for event in bench.events if isinstance(event, Started)} == good
    stats = bench.stats()
    assert (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)
    assert (stats.running, stats.waiting) == (0, 0)


def test_stop_id_max_tokens_and_max_seq_end_a_request_in_their_step() -> None:
    bench = checking()
    full = expected([1, 2, 3], 20)
    bench.submit(1, [1, 2, 3], stop_ids=(full[4],))
    bench.submit(2, [1, 2, 3], max_tokens=7)
    bench.submit(3, [1] * 290, max_tokens=500)
    bench.run()
    ends = {
        run.request_id: run for e in bench.events if isinstance(e, Tokens) for run in e.runs if run.finish
    }
    assert {request_id: run.finish for request_id, run in ends.items()} == {
        1: "stop",
        2: "length",
        3: "length",
    }
    tokens = bench.tokens()
    assert tokens[1] == full[: full.index(full[4]) + 1]
    assert tokens[2] == full[:7]
    assert tokens[3] == expected([1] * 290, 10)


def test_refusals_are_events_and_stop_is_the_end() -> None:
    bench = checking()
    bench.submit(1, [1] * 300)
    assert isinstance(bench.events[-1], Refused)
    bench.engine.handle(Abort(1))
    assert bench.engine.idle
    assert not bench.engine.handle(Stop())


def test_warm_up_leaves_no_trace_but_the_plan_number() -> None:
    bench = checking(max_num_seqs=3)
    stages: list[tuple[Any, ...]] = []
    number, _ = warm_up(
        bench.scheduler.limits, bench.sampler, bench.leader, lambda *stage: stages.append(stage)
    )
    assert [plan.number for plan in bench.plans] == list(range(1, number))
    assert stages[-1] == ("warmup", 2, 2, "steps")
    bench.submit(1, [4, 5], max_tokens=9)
    assert bench.run() == {1: expected([4, 5], 9)}


@pytest.mark.parametrize("max_seq", [2, 3, 16, 17])
def test_smallest_contexts_warm_up_and_serve(max_seq: int) -> None:
    bench = checking(max_seq=max_seq, max_num_seqs=1, kv_blocks=(max_seq + 15) // 16)
    warm_up(bench.scheduler.limits, bench.sampler, bench.leader, lambda *_: None)
    bench.submit(1, [4] * (max_seq - 1))
    assert bench.run() == {1: expected([4] * (max_seq - 1), 1)}


@pytest.mark.parametrize(("buckets", "rows"), [((1, 2, 4), 4), ((), 3)])
def test_steady_decode_step_makes_no_new_tables(buckets: tuple[int, ...], rows: int) -> None:
    bench = checking(buckets=buckets)
    for request_id in range(1, 4):
        bench.submit(request_id, [request_id] * 2, max_tokens=12)
    bench.run()
    steady = [plan for plan in bench.plans if not plan.chunks]
    assert len(steady) == 11
    assert all(plan.tables == [] and plan.decode_bucket == rows for plan in steady)


# The real model.


def real_requests() -> dict[int, tuple[list[int], dict[str, Any]]]:
    rng = random.Random(7)
    requests: dict[int, tuple[list[int], dict[str, Any]]] = {}
    for request_id, size in enumerate([1, 3, 64, 65, 150, 260, 40, 90], 1):
        sampling: dict[str, Any] = {"max_tokens": 40}
        if request_id % 2 == 0:
            sampling |= {"temperature": 0.9, "top_p": 0.95, "seed": 100 + request_id}
        if request_id % 4 == 0:
            sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
        requests[request_id] = ([rng.randrange(1, 6000) for _ in range(size)], sampling)
    return requests


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Each request by itself, its prompt in one piece."""
    result = {}
    for request_id, (prompt, sampling) in real_requests().items():
        bench = tiny().bench()
        bench.submit(request_id, prompt, **sampling)
        result |= bench.run()
    return result


@pytest.mark.parametrize(
    "changes",
    [{}, {"prefill_budget": 64, "mixed_budget": 64}, {"kv_blocks": 28}, {"max_num_seqs": 2}, {"buckets": ()}],
    ids=["batched", "chunked", "preempted", "slots reused", "not padded"],
)
def test_text_is_the_same_batched_chunked_preempted_and_in_reused_slots(
    alone: dict[int, list[int]], changes: dict[str, Any]
) -> None:
    bench = tiny().bench(**changes)
    for request_id, (prompt, sampling) in real_requests().items():
        bench.submit(request_id, prompt, **sampling)
        bench.engine.step()
    assert bench.run() == alone
    assert (bench.stats().preemptions > 0) == ("kv_blocks" in changes)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_start_is_told_before_a_step_that_is_waited_for_and_before_its_tokens_always(ahead: bool) -> None:
    """A device computes while the news goes out; elsewhere the launch is the step, and clients would wait for it."""
    bench = checking(ahead=ahead)
    launch, seen = bench.leader.launch, []

    def told(plan: StepPlan) -> InFlight:
        seen.append([event.request_id for event in bench.events if isinstance(event, Started)])
        return launch(plan)

    bench.leader.launch = told  # type: ignore[method-assign]
    bench.submit(1, [1, 2, 3], max_tokens=3)
    bench.submit(2, [4, 5, 6], max_tokens=3, logprobs=1 if ahead else None)
    bench.run()
    assert seen[0] == [1, 2]  # a request that asks for logprobs is waited for
    bench.submit(3, [7, 8, 9], max_tokens=3)
    bench.run()
    assert seen[-3] == ([1, 2] if ahead else [1, 2, 3])
    kinds = [
        (type(e), r) for e in bench.events for r in ([e.request_id] if isinstance(e, Started) else _ids(e))
    ]
    for request_id in (1, 2, 3):
        assert [kind for kind, named in kinds if named == request_id] == [Started] + 3 * [Tokens]


def _ids(event: Event) -> list[int]:
    return [run.request_id for run in event.runs] if isinstance(event, Tokens) else []
