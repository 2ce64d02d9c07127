"""How many drafts are in force: by what steps cost and by what is accepted, never slower than plain for long."""

from __future__ import annotations

import random

import pytest

from mstar.ranks.messages import SamplingParams, Submit
from mstar.ranks.scheduler import REVIEW_STEPS
from mstar.ranks.speculation.policy import LONG_REQUEST, PLAIN_REQUESTS, Costs, Policy
from mstar.ranks.speculation.stats import SpecStats
from mstar.ranks.warmup import warm_up
from tests.support.engines import checking, expected

# as measured on two cores with the built-in model: rows are cheap at one request, and cost by number at 16
COSTS = Costs(
    {
        1: {0: 1.2, 1: 1.5, 2: 1.9, 3: 2.2},
        4: {0: 1.2, 1: 2.0, 2: 2.7, 3: 3.5},
        16: {0: 1.1, 1: 1.7, 2: 2.6, 3: 3.6},
    }
)


def run(policy: Policy, rate: float, steps: int, sequences: int = 1, seed: int = 0) -> list[int]:
    """Drafts in force in each of so many steps, each draft accepted with probability `rate`."""
    rng = random.Random(seed)
    seen = []
    for _ in range(steps):
        k = policy.plan(sequences)
        seen.append(k)
        for _ in range(sequences):
            accepted = 0
            while accepted < k and rng.random() < rate:
                accepted += 1
            policy.count(k, accepted)
    return seen


def test_without_measured_costs_the_loads_k_stays() -> None:
    policy = Policy(3)
    assert set(run(policy, 0.0, 500)) == {3}
    assert not policy.gives_up(32, 96, 0)
    assert policy.starts()


def test_costs_between_measured_batches_and_drafts_are_interpolated_and_level_outside() -> None:
    costs = Costs({1: {0: 1.0, 2: 2.0}, 5: {0: 1.0, 2: 4.0}})
    assert costs.of(1, 1) == 1.5
    assert costs.of(2, 3) == 3.0
    assert costs.of(1, 3) == 2.0
    assert costs.of(2, 100) == 4.0
    assert costs.of(8, 1) == 2.0
    assert Costs().of(3, 7) == 1.0


def test_one_request_with_good_acceptance_keeps_the_loads_k() -> None:
    assert set(run(Policy(3, COSTS), 0.95, 1000)) == {3}


@pytest.mark.parametrize("sequences", (1, 4, 16))
def test_low_acceptance_ends_in_plain_decode_soon(sequences: int) -> None:
    seen = run(Policy(3, COSTS), 0.05, 200, sequences)
    assert seen.index(0) <= 64
    assert set(seen[-50:]) == {0}


def test_a_bad_stretch_lowers_k_and_a_good_one_raises_it_again() -> None:
    policy = Policy(3, Costs({1: {0: 1.1, 1: 1.2, 2: 1.4, 3: 1.6}}))
    assert run(policy, 0.3, 600)[-1] == 1
    assert run(policy, 0.95, 600)[-1] == 3


def test_a_batch_that_computes_lowers_k_and_one_request_raises_it_again() -> None:
    policy = Policy(3, COSTS)
    assert run(policy, 0.9, 400)[-1] == 3
    assert run(policy, 0.9, 200, 16)[-1] in (1, 2)
    assert run(policy, 0.9, 200)[-1] == 3


def test_after_some_plain_requests_the_load_tries_again_and_keeps_what_works() -> None:
    policy = Policy(3, COSTS)
    run(policy, 0.0, 300)
    assert policy.in_force == 0
    tries = [policy.starts() for _ in range(PLAIN_REQUESTS + 1)]
    assert tries == [False] * PLAIN_REQUESTS + [True]
    assert set(run(policy, 0.95, 300)) == {3}
    assert policy.starts()


def test_a_large_batch_keeps_nobody_from_starting() -> None:
    policy = Policy(3, Costs({1: {0: 1.1, 3: 2.2}, 8: {0: 1.1, 3: 5.0}}))
    assert run(policy, 0.9, 50, 8)[-1] == 0
    assert all(policy.starts(8) for _ in range(20))
    assert set(run(policy, 0.95, 100)) == {3}


def test_a_short_request_in_a_batch_that_decodes_plainly_does_not_follow_for_nothing() -> None:
    policy = Policy(3, Costs({1: {0: 1.1, 3: 2.2}, 8: {0: 1.1, 3: 5.0}}))
    run(policy, 0.9, 50, 8)
    assert not policy.starts(8, tokens=128)
    assert policy.starts(8, tokens=LONG_REQUEST)
    assert policy.starts(1, tokens=128)


def test_a_request_whose_drafts_fail_gives_up_and_others_go_on() -> None:
    policy = Policy(3, COSTS)
    run(policy, 0.95, 100)
    assert policy.gives_up(32, 96, 10)
    assert not policy.gives_up(32, 96, 80)
    assert policy.gives_up(32, 0, 0)  # followed for nothing: the head's pass alone costs


def test_engine_stops_drafting_where_drafts_are_wrong_and_text_stays() -> None:
    bench = checking(1, drafts=3, max_seq=400, kv_blocks=400)
    bench.scheduler.policy = Policy(3, COSTS)
    for request_id in (1, 2):
        bench.submit(request_id, [request_id], max_tokens=150)
    got = bench.run()
    bench.submit(3, [3], max_tokens=30)
    assert bench.run() == got | {3: expected([3], 30)}
    assert got == {n: expected([n], 150) for n in (1, 2)}
    drafted = [run_.drafted for run_ in bench.runs(1)]
    assert drafted[1] == 3 and set(drafted[REVIEW_STEPS * 3 :]) == {0}
    assert not any(run_.drafted for run_ in bench.runs(3))
    assert bench.stats().spec_k == 0


def test_warm_up_measures_costs_of_batches_that_fit_and_leaves_no_trace() -> None:
    bench = checking(drafts=3, max_num_seqs=5)
    number, costs = warm_up(bench.scheduler.limits, bench.sampler, bench.leader, lambda *_: None)
    assert [plan.number for plan in bench.plans] == list(range(1, number))
    assert set(costs.measured) == {1, 4}
    assert all(set(steps) == {0, 1, 2, 3} and min(steps.values()) > 0 for steps in costs.measured.values())
    bench.engine.handle(Submit(9, [4, 5], SamplingParams(max_tokens=9, seed=0)))
    assert bench.run() == {9: expected([4, 5], 9)}
    plain = checking(max_num_seqs=5)
    assert warm_up(plain.scheduler.limits, plain.sampler, plain.leader, lambda *_: None)[1].measured == {}


def test_stats_count_by_depth() -> None:
    stats = SpecStats(3)
    for drafted, accepted in ((3, 2), (3, 0), (1, 1), (0, 0)):
        stats.count(drafted, accepted)
    assert (stats.steps, stats.drafted, stats.accepted) == (4, [3, 2, 2], [2, 1, 0])


def test_a_load_with_a_fixed_k_measures_nothing_and_keeps_it() -> None:
    bench = checking(wrong_of=1)  # every draft is wrong: any measured policy would lower k
    _, costs = warm_up(bench.scheduler.limits, bench.sampler, bench.leader, lambda *_: None, costs=False)
    policy = Policy(bench.scheduler.limits.drafts, costs)
    for _ in range(200):
        policy.count(drafted=policy.k, accepted=0)
        assert policy.plan(16) == policy.k
    assert policy.starts()
    assert not policy.gives_up(32, 32 * policy.k, 0)
