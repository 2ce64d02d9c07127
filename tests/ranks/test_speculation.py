"""Speculation in the engine, over a model and a head that check their own caches.

The model knows every position's true token, so a wrong state, a hole in the head's KV or a block that nobody
reserved ends the test where it happens; a draft in four is wrong. Over a mesh, every rank checks its own caches.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.ranks.cache import BLOCK_SIZE
from mstar.ranks.messages import Abort, SamplingParams, Submit
from mstar.ranks.request import Request
from mstar.ranks.warmup import warm_up
from tests.support.engines import Bench, expected, prompts
from tests.support.shards import checking_over

KS = (1, 2, 3, 5, 8)


def all_free(bench: Bench) -> bool:
    stats = bench.stats()
    return (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)


@pytest.mark.parametrize(
    ("buckets", "kv_blocks"),
    [((1, 2, 4, 8), 200), ((1, 2, 4, 8), 20), ((), 20)],
    ids=["padded", "padded and preempted", "preempted"],
)
@pytest.mark.parametrize("k", KS)
def test_every_sequence_gets_its_own_tokens(
    k: int, kv_blocks: int, buckets: tuple[int, ...], ranks: int
) -> None:
    """Speculating or not, at most one draft or many, in slots that are reused many times over."""
    bench = checking_over(ranks, drafts=k, kv_blocks=kv_blocks, buckets=buckets)
    given = dict(enumerate(prompts(24), 1))
    for request_id, prompt in given.items():
        bench.submit(request_id, prompt, max_tokens=50, spec_k=(None, 0, None, 1)[request_id % 4])
    assert bench.run() == {request_id: expected(prompt, 50) for request_id, prompt in given.items()}
    stats = bench.stats()
    assert all_free(bench)
    assert (stats.preemptions > 0) == (kv_blocks == 20)
    assert stats.decode_tokens == 24 * 50 - 24 - stats.preemptions
    assert 0 < sum(stats.spec_accepted) < sum(stats.spec_drafted)
    assert stats.spec_steps < stats.decode_tokens


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize(("wrong_of", "accepts"), [(1, 0.0), (10**9, 1.0)], ids=["none", "all"])
def test_no_draft_accepted_still_gives_the_bonus_and_all_accepted_gives_k_more(
    k: int, wrong_of: int, accepts: float, ranks: int
) -> None:
    bench = checking_over(ranks, wrong_of, drafts=k)
    bench.submit(1, [1, 2, 3], max_tokens=60)
    assert bench.run() == {1: expected([1, 2, 3], 60)}
    stats = bench.stats()
    assert sum(stats.spec_accepted) == accepts * sum(stats.spec_drafted)
    runs = bench.runs(1)
    assert runs[0].drafted is None and len(runs[0].ids) == 1
    most = 1 + k if accepts else 1
    assert [len(run.ids) for run in runs[1:-1]] == [most] * (len(runs) - 2)


def test_a_prompt_or_chunk_tail_of_the_size_of_a_window_is_prefill(ranks: int) -> None:
    """By phase, never by how many rows there are: k + 1 tokens, beside requests that decode."""
    for k in KS:
        bench = checking_over(ranks, drafts=k)
        bench.submit(1, [9], max_tokens=40)
        bench.engine.step()
        bench.submit(2, [3] * (k + 1), max_tokens=20)
        bench.submit(3, [4] * (64 + k + 1), max_tokens=20)
        got = bench.run()
        assert got == {
            1: expected([9], 40),
            2: expected([3] * (k + 1), 20),
            3: expected([4] * (64 + k + 1), 20),
        }
        chunks = [len(chunk.token_ids) for plan in bench.plans for chunk in plan.chunks]
        assert sum(chunks) == 1 + k + 1 + 64 + k + 1


@pytest.mark.parametrize("k", (1, 3))
def test_max_tokens_cuts_at_every_offset_within_a_window(k: int, ranks: int) -> None:
    for most in range(1, 14):
        bench = checking_over(ranks, 10**9, drafts=k)
        bench.submit(1, [5, 6], max_tokens=most)
        assert bench.run() == {1: expected([5, 6], most)}
        assert bench.runs(1)[-1].finish == "length"
        assert all_free(bench)


@pytest.mark.parametrize("k", KS)
def test_max_seq_cuts_at_every_offset_within_a_window_and_the_head_stays_within_it(
    k: int, ranks: int
) -> None:
    """The last token needs no KV, so one block serves 17: the checking model would find a row or a guess past it."""
    for prompt in range(1, 17):
        bench = checking_over(ranks, 10**9, drafts=k, max_seq=17, max_num_seqs=1, kv_blocks=1)
        bench.submit(1, [7] * prompt, max_tokens=500)
        assert bench.run() == {1: expected([7] * prompt, 17 - prompt)}
        assert bench.runs(1)[-1].finish == "length"


@pytest.mark.parametrize("max_seq", [2, 3, 4, 16, 17])
@pytest.mark.parametrize("k", (1, 8))
def test_smallest_contexts_warm_up_and_serve(max_seq: int, k: int, ranks: int) -> None:
    bench = checking_over(ranks, max_seq=max_seq, max_num_seqs=1, kv_blocks=(max_seq + 15) // 16, drafts=k)
    warm_up(bench.scheduler.limits, bench.sampler, bench.leader, lambda *_: None)
    for prompt in range(1, max_seq):
        bench.submit(prompt, [4] * prompt, max_tokens=100)
        assert bench.run()[prompt] == expected([4] * prompt, max_seq - prompt)


@pytest.mark.parametrize("place", range(1, 14))
def test_stop_id_inside_a_run_cuts_it_and_what_is_said_of_it(place: int, ranks: int) -> None:
    """At each depth: the id itself is the last one, and drafts after it count as not accepted."""
    full = expected([1, 2, 3], 20)
    bench = checking_over(ranks, 10**9, drafts=5)
    bench.submit(1, [1, 2, 3], stop_ids=(full[place],))
    bench.submit(2, [8, 8], max_tokens=30)
    got = bench.run()
    assert got == {1: full[: full.index(full[place]) + 1], 2: expected([8, 8], 30)}
    last = bench.runs(1)[-1]
    assert last.finish == "stop"
    assert last.drafted is None or last.accepted in (len(last.ids), len(last.ids) - 1)
    assert all_free(bench)


def test_a_request_without_speculation_beside_others_decodes_plainly(ranks: int) -> None:
    bench = checking_over(ranks, drafts=3)
    bench.submit(1, [1], max_tokens=30, spec_k=0)
    bench.submit(2, [2], max_tokens=30)
    bench.submit(3, [3], max_tokens=30, spec_k=1)
    assert bench.run() == {n: expected([n], 30) for n in (1, 2, 3)}
    assert all((run.drafted or 0) == 0 and len(run.ids) == 1 for run in bench.runs(1))
    assert {run.drafted for run in bench.runs(3)} <= {None, 0, 1}
    assert max(run.drafted or 0 for run in bench.runs(2)) == 3
    # once it is alone, a plain request's steps are plain
    alone = checking_over(ranks, drafts=3)
    alone.submit(1, [1], max_tokens=30, spec_k=0)
    alone.run()
    assert not any(plan.told or plan.decode_counts for plan in alone.plans)


def test_steps_without_drafts_read_the_right_state_and_leave_no_hole(ranks: int) -> None:
    """Drafts in force go up and down under running requests, as a policy does; then one gives up for good."""
    bench = checking_over(ranks, drafts=3)
    policy = bench.scheduler.policy
    forced = iter([3, 0, 3, 3, 1, 0, 0, 2, 3, 0, 1] * 20)
    policy.plan = lambda sequences: next(forced)  # type: ignore[method-assign]
    bench.submit(1, [1], max_tokens=80)
    bench.submit(2, [2], max_tokens=80)
    for _ in range(12):
        bench.engine.step()
    policy.gives_up = lambda steps, drafted, accepted: steps == 32  # type: ignore[method-assign]
    bench.submit(3, [3], max_tokens=120)
    assert bench.run() == {1: expected([1], 80), 2: expected([2], 80), 3: expected([3], 120)}
    assert {run.drafted for run in bench.runs(3)} >= {0, 3}
    assert all(len(run.ids) == 1 for run in bench.runs(3)[-20:])
    for request_id in (1, 2):
        runs = bench.runs(request_id)
        after = [i for i, run in enumerate(runs[1:], 1) if run.drafted == 0 and runs[i - 1].accepted]
        assert any(run.accepted for i in after for run in runs[i + 1 :]), (
            "no zero-draft step behind accepted drafts"
        )


def test_a_request_that_skips_steps_goes_on_where_it_was(ranks: int) -> None:
    """Left out of steps in which others run, with accepted drafts not replayed yet."""
    bench = checking_over(ranks, drafts=3)
    scheduler, rng = bench.scheduler, random.Random(4)
    skips = [rng.random() < 0.5 for _ in range(200)]
    decodes, pending = scheduler._decodes, []

    def sometimes(request: Request) -> bool:
        if request.request_id == 1 and request.decoding and skips[scheduler.counters.steps]:
            pending.append(int(bench.executor.pending[request.slot]))
            return False
        return decodes(request)

    scheduler._decodes = sometimes  # type: ignore[method-assign]
    for request_id in (1, 2, 3):
        bench.submit(request_id, [request_id], max_tokens=60, spec_k=0 if request_id == 2 else None)
    assert bench.run() == {n: expected([n], 60) for n in (1, 2, 3)}
    assert max(pending) > 0
    assert any(len(plan.decode_slots) == 2 for plan in bench.plans)


def test_preemption_in_the_middle_of_a_window_drops_what_was_accepted_there(ranks: int) -> None:
    """The victim's last step accepted drafts that nobody has replayed; its next owner must not see them."""
    bench = checking_over(ranks, drafts=5, kv_blocks=12, max_num_seqs=3)
    scheduler, pending = bench.scheduler, []
    preempt = scheduler._preempt

    def watched(request: Request) -> None:
        pending.append(int(bench.executor.pending[request.slot]))
        preempt(request)

    scheduler._preempt = watched  # type: ignore[method-assign]
    for request_id in range(1, 7):
        bench.submit(request_id, [request_id] * 20, max_tokens=80)
    assert bench.run() == {n: expected([n] * 20, 80) for n in range(1, 7)}
    assert max(pending) > 0
    assert all_free(bench)


def test_slots_are_reused_after_an_abort_in_the_middle_of_a_window(ranks: int) -> None:
    bench = checking_over(ranks, 10**9, drafts=3, max_num_seqs=1)
    for request_id in range(1, 8):
        bench.submit(request_id, [request_id] * (15 + request_id), max_tokens=60)
        for _ in range(1 + request_id):
            bench.engine.step()
        assert int(bench.executor.pending[1]) == 3
        bench.engine.handle(Abort(request_id))
        assert all_free(bench)
    bench.submit(9, [9, 9], max_tokens=40)
    assert bench.run()[9] == expected([9, 9], 40)


def test_aborts_between_steps_disturb_nobody_and_free_everything(ranks: int) -> None:
    rng = random.Random(3)
    bench = checking_over(ranks, kv_blocks=30, drafts=3)
    given = dict(enumerate(prompts(25), 1))
    left = sorted(rng.sample(sorted(given), 12))
    aborted = set(left)
    for request_id, prompt in given.items():
        bench.submit(request_id, prompt, max_tokens=30)
    while bench.engine.step():
        if left and rng.random() < 0.4:
            bench.engine.handle(Abort(left.pop(rng.randrange(len(left)))))
    for request_id, tokens in bench.tokens().items():
        assert tokens == expected(given[request_id], 30)[: len(tokens)]
        assert request_id in aborted or len(tokens) == 30
    assert all_free(bench)


def test_a_then_b_then_a_again_gives_a_twice(ranks: int) -> None:
    bench = checking_over(ranks, drafts=3, max_num_seqs=1)
    for request_id, prompt in ((1, [1, 2]), (2, [5] * 70), (3, [1, 2])):
        bench.submit(request_id, prompt, max_tokens=40)
        bench.run()
    tokens = bench.tokens()
    assert tokens[1] == tokens[3] == expected([1, 2], 40)


def test_drafts_need_room_but_nobody_is_preempted_for_it(ranks: int) -> None:
    """KV for exactly what two requests need: they run side by side, with drafts where a block has room."""
    bench = checking_over(ranks, 10**9, drafts=8, kv_blocks=2 * 4, max_num_seqs=2)
    for request_id in (1, 2):
        bench.submit(request_id, [request_id] * 30, max_tokens=33)
    assert bench.run() == {n: expected([n] * 30, 33) for n in (1, 2)}
    assert bench.stats().preemptions == 0
    assert max(run.drafted or 0 for run in bench.runs()) == 8


class Traffic(RuleBasedStateMachine):
    """Any order of requests, steps and aborts: nothing leaks, and everybody's tokens are right."""

    ranks = 1

    def __init__(self) -> None:
        super().__init__()
        self.bench = checking_over(self.ranks, 3, drafts=3, kv_blocks=12, max_num_seqs=3, max_seq=120)
        self.bench.scheduler.policy.plan = lambda sequences: self.in_force  # type: ignore[method-assign]
        self.in_force = 3
        self.given: dict[int, tuple[list[int], int]] = {}
        self.aborted: set[int] = set()

    @rule(
        size=st.integers(1, 100),
        most=st.integers(1, 60),
        spec_k=st.sampled_from([None, None, 0, 1, 3]),
        way=st.sampled_from(["greedy", "penalty", "min_tokens"]),
    )
    def submit(self, size: int, most: int, spec_k: int | None, way: str) -> None:
        request_id = len(self.given) + 1
        prompt = [(request_id * 7 + i) % 97 for i in range(size)]
        fields: dict[str, Any] = {"penalty": {"presence_penalty": 1e-9}, "min_tokens": {"min_tokens": 1}}.get(
            way, {}
        )
        params = SamplingParams(max_tokens=most, seed=0, spec_k=spec_k, stop_ids=(96,), **fields)
        if way == "min_tokens" and expected(prompt, 1) == [96]:
            return
        self.given[request_id] = prompt, most
        self.bench.engine.handle(Submit(request_id, prompt, params))

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.engine.step()

    @rule(in_force=st.integers(0, 3))
    def lower(self, in_force: int) -> None:
        self.in_force = in_force

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.given)))
        self.aborted.add(request_id)
        self.bench.engine.handle(Abort(request_id))

    @invariant()
    def nothing_is_owned_twice_or_lost(self) -> None:
        scheduler = self.bench.scheduler
        owned = [block for request in scheduler.running for block in request.blocks]
        assert len(owned) == len(set(owned)) and 0 not in owned
        assert scheduler.blocks.free == scheduler.blocks.total - len(owned)
        for request in scheduler.running:
            if request.decoding:
                assert request.computed == request.tokens - 1
                assert request.computed <= len(request.blocks) * BLOCK_SIZE
                assert int(self.bench.executor.lengths[request.slot]) == request.computed

    def teardown(self) -> None:
        tokens = self.bench.run()
        for request_id, (prompt, most) in self.given.items():
            wanted = expected(prompt, min(most, 120 - len(prompt)))
            if 96 in wanted:
                wanted = wanted[: wanted.index(96) + 1]
            got = tokens.get(request_id, [])
            assert got == wanted[: len(got)]
            assert request_id in self.aborted or got == wanted
        assert all_free(self.bench)


class MeshTraffic(Traffic):
    ranks = 2


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMeshTraffic = MeshTraffic.TestCase
TestMeshTraffic.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
