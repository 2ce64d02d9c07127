"""The scheduler as pure logic: order, budgets, admission, preemption, abort, and that nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.ranks.cache import BLOCK_SIZE, Pool, blocks_for
from mstar.ranks.messages import Refused, SamplingParams, Submit, TokenRun
from mstar.ranks.plan import Setup, StepPlan, StopPlan, bucket_of, pack, unpack
from mstar.ranks.scheduler import Drawn, Limits, Scheduler

RUNNING, STOP = 0, 1


class Slots:
    """A sampler that only checks that slots are told about in order."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[list[int], list[int]]] = {}
        self.greedy = True

    def admit(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> None:
        assert slot not in self.held
        self.held[slot] = (list(prompt_ids), list(output_ids))

    def release(self, slot: int) -> None:
        del self.held[slot]

    def plain_greedy(self, slots: Sequence[int]) -> bool:
        assert set(slots) <= set(self.held)
        return self.greedy


def make(**changes: int) -> Scheduler:
    limits = {
        "max_seq": 4096,
        "max_num_seqs": 8,
        "kv_blocks": 1000,
        "prefill_budget": 512,
        "mixed_budget": 128,
    }
    return Scheduler(Limits(**(limits | changes)), Slots())


def submit(scheduler: Scheduler, request_id: int, prompt: int, max_tokens: int = 100) -> Refused | None:
    ids = [request_id * 10_000 + i for i in range(prompt)]
    return scheduler.submit(Submit(request_id, ids, SamplingParams(max_tokens=max_tokens, seed=0)))


def step(scheduler: Scheduler, finish: int = RUNNING) -> tuple[StepPlan, list[TokenRun]]:
    plan = scheduler.plan()
    assert plan is not None
    rows = sum(chunk.final for chunk in plan.chunks) + len(plan.decode_slots)
    return plan, scheduler.commit(plan, Drawn([[7]] * rows, [finish] * rows))


def drain(scheduler: Scheduler) -> None:
    while (plan := scheduler.plan()) is not None:
        rows = sum(chunk.final for chunk in plan.chunks) + len(plan.decode_slots)
        scheduler.commit(plan, Drawn([[7]] * rows, [RUNNING] * rows))
    assert scheduler.idle
    assert scheduler.blocks.free == scheduler.limits.kv_blocks
    assert scheduler.slots.free == scheduler.limits.max_num_seqs


def test_long_prompt_goes_in_chunks_that_end_at_multiples_of_64_but_the_last() -> None:
    scheduler = make()
    submit(scheduler, 1, 1100)
    chunks = [step(scheduler)[0].chunks for _ in range(3)]
    assert [(c.start, len(c.token_ids), c.final) for part in chunks for c in part] == [
        (0, 512, False),
        (512, 512, False),
        (1024, 76, True),
    ]
    assert [i for part in chunks for c in part for i in c.token_ids] == [10_000 + i for i in range(1100)]


def test_running_decodes_go_on_in_every_step_of_a_long_prompt() -> None:
    scheduler = make()
    submit(scheduler, 1, 5)
    step(scheduler)
    submit(scheduler, 2, 1000)
    for _ in range(8):
        plan, runs = step(scheduler)
        assert len(plan.decode_slots) == 1
        assert 1 in [run.request_id for run in runs]
        assert 0 < sum(len(c.token_ids) for c in plan.chunks) <= 128
    assert len(step(scheduler)[0].decode_slots) == 2


@pytest.mark.parametrize("prompt", [1, 2, 63, 64, 65, 128, 129])
def test_rows_are_prefill_or_decode_by_phase_at_every_length(prompt: int) -> None:
    """A one-token prompt is a prefill, and so is a chunk tail of one token."""
    scheduler = make(prefill_budget=64)
    submit(scheduler, 1, prompt, max_tokens=3)
    seen = []
    while not seen or not seen[-1].final:
        plan, _ = step(scheduler)
        assert plan.decode_bucket == 0
        seen += plan.chunks
    assert sum(len(chunk.token_ids) for chunk in seen) == prompt
    plan, _ = step(scheduler)
    assert plan.chunks == [] and len(plan.decode_slots) == 1
    drain(scheduler)


def test_first_come_is_first_served_and_short_prompts_share_a_step() -> None:
    scheduler = make()
    for request_id in range(1, 7):
        submit(scheduler, request_id, 100)
    plan, runs = step(scheduler)
    assert [run.request_id for run in runs] == [1, 2, 3, 4, 5]
    assert [r.request_id for r in scheduler.admitted] == [1, 2, 3, 4, 5]
    # 12 tokens of budget are left, which do not reach the next border
    assert sum(len(c.token_ids) for c in plan.chunks) == 500
    plan, runs = step(scheduler)
    assert [run.request_id for run in runs] == [6, 1, 2, 3, 4, 5]


def test_prompt_without_room_for_an_answer_is_refused_before_anything_is_taken() -> None:
    scheduler = make(max_seq=64)
    refused = submit(scheduler, 1, 64)
    assert refused is not None and refused.error_class == "context_length"
    assert "64" in refused.message
    assert submit(scheduler, 2, 63) is None
    empty = submit(scheduler, 3, 0)
    assert empty is not None and empty.error_class == "validation"
    drain(scheduler)


def test_request_that_the_kv_can_never_hold_is_refused_and_one_that_fits_exactly_runs() -> None:
    scheduler = make(kv_blocks=4)
    refused = submit(scheduler, 1, 40, max_tokens=26)
    assert refused is not None and refused.error_class == "context_length"
    # 65 tokens, the last of which is never fed: 64 of KV
    assert submit(scheduler, 2, 40, max_tokens=25) is None
    drain(scheduler)
    assert scheduler.counters.decode_tokens == 24


def test_request_that_does_not_fit_now_waits_and_keeps_its_place() -> None:
    scheduler = make(kv_blocks=8)
    submit(scheduler, 1, 90, max_tokens=10)
    submit(scheduler, 2, 90, max_tokens=10)
    submit(scheduler, 3, 1, max_tokens=1)
    step(scheduler)
    assert [r.request_id for r in scheduler.running] == [1]
    assert [r.request_id for r in scheduler.waiting] == [2, 3]
    drain(scheduler)


def test_sequence_ends_with_length_at_max_seq() -> None:
    scheduler = make(max_seq=20)
    submit(scheduler, 1, 16)
    runs = [step(scheduler)[1][0] for _ in range(4)]
    assert [run.finish for run in runs] == [None, None, None, "length"]
    assert scheduler.idle


def test_youngest_is_preempted_and_comes_back_first_with_its_output() -> None:
    scheduler = make(kv_blocks=6)
    for request_id in (1, 2):
        submit(scheduler, request_id, 30, max_tokens=40)
    step(scheduler)
    submit(scheduler, 3, 1, max_tokens=5)
    while not scheduler.counters.preemptions:
        step(scheduler)
    assert [r.request_id for r in scheduler.running] == [1]
    assert [r.request_id for r in scheduler.waiting] == [2, 3]
    output = len(scheduler.waiting[0].output_ids)
    assert output > 0
    while not scheduler.admitted and len(scheduler.running) < 2:
        plan, _ = step(scheduler)
    again = next(r for r in scheduler.running if r.request_id == 2)
    assert scheduler.admitted == [] or scheduler.admitted[0].request_id != 2
    assert plan.chunks[0].token_ids == again.prompt_ids + again.output_ids[:output]
    sampler = scheduler._sampler
    assert isinstance(sampler, Slots)
    assert sampler.held[again.slot] == (again.prompt_ids, again.output_ids[:output])
    drain(scheduler)


def test_abort_in_every_phase_gives_everything_back() -> None:
    scheduler = make(kv_blocks=80, max_num_seqs=2)
    for request_id in (1, 2, 3):
        submit(scheduler, request_id, 600)
    step(scheduler)
    step(scheduler)
    assert scheduler.waiting  # 3 has no slot
    for request_id in (3, 2, 1, 1, 99):
        scheduler.abort(request_id)
    assert scheduler.idle
    assert scheduler.blocks.free == 80 and scheduler.slots.free == 2


def test_slot_of_a_request_aborted_in_flight_is_free_only_after_its_results() -> None:
    scheduler = make(max_num_seqs=1)
    submit(scheduler, 1, 5)
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort(1)
    submit(scheduler, 2, 5)
    assert scheduler.slots.free == 0 and scheduler.plan() is None
    assert scheduler.commit(plan, Drawn([[7]], [RUNNING])) == []
    assert scheduler.slots.free == 1
    assert step(scheduler)[1][0].request_id == 2


def test_plan_ahead_of_a_step_that_ends_its_request_is_dropped() -> None:
    scheduler = make()
    submit(scheduler, 1, 5, max_tokens=50)
    first = scheduler.plan()
    second = scheduler.plan()
    assert first is not None and second is not None and second.decode_slots == [first.chunks[0].slot]
    assert scheduler.commit(first, Drawn([[7]], [STOP])) == [TokenRun(1, [7], "stop")]
    assert scheduler.blocks.free < scheduler.blocks.total
    assert scheduler.commit(second, Drawn([[9]], [RUNNING])) == []
    drain(scheduler)


def test_whole_logits_are_gathered_only_when_a_row_needs_them() -> None:
    scheduler = make()
    submit(scheduler, 1, 600)
    sampler = scheduler._sampler
    assert isinstance(sampler, Slots)
    sampler.greedy = False
    assert not step(scheduler)[0].gather_logits  # no row draws
    assert step(scheduler)[0].gather_logits
    sampler.greedy = True
    assert not step(scheduler)[0].gather_logits


def test_plan_of_a_steady_decode_step_is_small_and_survives_the_wire() -> None:
    scheduler = make()
    for request_id in range(1, 9):
        submit(scheduler, request_id, 20)
    first, _ = step(scheduler)
    assert unpack(pack(first)) == first
    steady, _ = step(scheduler)
    assert steady.tables == [] and unpack(pack(steady)) == steady
    assert len(pack(steady)) < 40
    assert unpack(pack(Setup(5, 6))) == Setup(5, 6)
    assert unpack(pack(StopPlan())) == StopPlan()


def test_buckets_hold_their_sequences_with_little_padding() -> None:
    assert bucket_of(0) == 0
    for sequences in range(1, 300):
        assert sequences <= bucket_of(sequences) < 2 * sequences + 1
    assert [bucket_of(n) for n in (1, 3, 16, 17, 64, 65)] == [1, 4, 16, 24, 64, 128]


def test_pool_refuses_to_free_what_nobody_owns() -> None:
    pool = Pool(2)
    taken = pool.take_many(2)
    assert sorted(taken) == [1, 2] and pool.free == 0
    pool.give_back(taken)
    with pytest.raises(ValueError, match="nobody owns"):
        pool.give_back([1])


class Traffic(RuleBasedStateMachine):
    """Random submits, aborts, steps up to two ahead, and ends, over few blocks and slots."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = Slots()
        limits = Limits(max_seq=200, max_num_seqs=3, kv_blocks=14, prefill_budget=128, mixed_budget=64)
        self.scheduler = Scheduler(limits, self.sampler)
        self.next_id = 1
        self.live: dict[int, int] = {}  # request: tokens got
        self.started: list[int] = []
        self.ended: set[int] = set()
        self.flights: list[StepPlan] = []
        self.in_use: list[set[int]] = []  # slots of each flight
        self.tables: dict[int, dict[int, int]] = {}  # as an executor would hold them

    @rule(prompt=st.integers(1, 199), max_tokens=st.integers(1, 60))
    def submit(self, prompt: int, max_tokens: int) -> None:
        if submit(self.scheduler, self.next_id, prompt, max_tokens) is None:
            self.live[self.next_id] = 0
        self.next_id += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.abort(request_id)
        del self.live[request_id]
        self.ended.add(request_id)

    @precondition(lambda self: len(self.flights) < 2)
    @rule()
    def plan(self) -> None:
        plan = self.scheduler.plan()
        self.started += [request.request_id for request in self.scheduler.admitted]
        if plan is None:
            # never stuck: what has to wait, waits for results
            assert self.flights or not self.live
            return
        for update in plan.tables:
            table = self.tables.setdefault(update.slot, {})
            if update.column == 0:
                table.clear()
            table.update({update.column + i: block for i, block in enumerate(update.blocks)})
        owners = {r.slot: r for r in self.scheduler.running}
        assert sum(len(c.token_ids) for c in plan.chunks) <= 128
        slots = [c.slot for c in plan.chunks] + plan.decode_slots
        assert len(slots) == len(set(slots)) and 0 not in slots
        for slot in slots:
            request = owners[slot]
            held = [self.tables[slot][column] for column in range(blocks_for(request.computed))]
            assert held == request.blocks[: len(held)]
        for chunk in plan.chunks:
            assert chunk.final or (chunk.start + len(chunk.token_ids)) % 64 == 0
        self.flights.append(plan)
        self.in_use.append(set(slots))

    @precondition(lambda self: self.flights)
    @rule(stop=st.integers(0, 20))
    def commit(self, stop: int) -> None:
        plan = self.flights.pop(0)
        self.in_use.pop(0)
        rows = sum(chunk.final for chunk in plan.chunks) + len(plan.decode_slots)
        finish = [STOP if stop == row else RUNNING for row in range(rows)]
        for run in self.scheduler.commit(plan, Drawn([[row] for row in range(rows)], finish)):
            assert run.request_id not in self.ended
            self.live[run.request_id] += len(run.ids)
            if run.finish is not None:
                del self.live[run.request_id]
                self.ended.add(run.request_id)

    @invariant()
    def nothing_is_owned_twice_or_lost(self) -> None:
        scheduler = self.scheduler
        owned = [block for request in scheduler.running for block in request.blocks]
        assert len(owned) == len(set(owned)) and 0 not in owned
        slots = {request.slot for request in scheduler.running}
        assert len(slots) == len(scheduler.running)
        assert slots <= set(self.sampler.held)
        assert len(self.sampler.held) == scheduler.slots.total - scheduler.slots.free
        if not self.flights:
            assert scheduler.blocks.free == scheduler.blocks.total - len(owned)
            assert set(self.sampler.held) == slots
        for used in self.in_use:  # a slot in flight has not been given away
            assert used <= set(self.sampler.held)

    @invariant()
    def first_come_is_first_started(self) -> None:
        assert self.started == sorted(self.started)

    def teardown(self) -> None:
        """With no more stops from the model, everyone still ends."""
        while self.flights:
            self.commit(stop=99)
        for _ in range(5000):
            if not self.live:
                break
            self.plan()
            self.commit(stop=99)
        assert not self.live
        assert self.scheduler.idle
        assert self.scheduler.blocks.free == self.scheduler.blocks.total
        assert self.scheduler.slots.free == self.scheduler.slots.total
        assert self.sampler.held == {}


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)

assert BLOCK_SIZE == 16  # what the numbers above count in
