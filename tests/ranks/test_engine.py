"""The engine in one process: a model that checks its own caches, then the real one in float32.

Whatever shares the batch, and however a request is chunked, preempted or placed, its tokens are the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mstar.arch.caches import allocate_caches
from mstar.arch.inputs import DecodeInputs, PrefillInputs
from mstar.arch.trunk import Trunk
from mstar.loader import read_config, resolve
from mstar.loader.checkpoint import load_shard
from mstar.ranks.cache import BLOCK_SIZE
from mstar.ranks.collectives import SoloCollective
from mstar.ranks.engine import Engine
from mstar.ranks.executor import Executor
from mstar.ranks.leader import Leader
from mstar.ranks.messages import (
    Abort,
    EngineStats,
    Event,
    QueryStats,
    Refused,
    SamplingParams,
    Started,
    Stop,
    Submit,
    Tokens,
)
from mstar.ranks.plan import Drawn, StepPlan, pack, unpack
from mstar.ranks.sampler import Sampler
from mstar.ranks.scheduler import Limits, Scheduler
from mstar.ranks.speculation.backend import SlotBackend
from mstar.ranks.warmup import warm_up

VOCAB = 97
PRIME = 2_147_483_647
CPU = torch.device("cpu")


def fold(state: int, token: int) -> int:
    return (state * 31 + token + 1) % PRIME


def expected(prompt: list[int], count: int) -> list[int]:
    """What the checking model says, from the tokens alone."""
    tokens = list(prompt)
    state = 0
    for token in prompt:
        state = fold(state, token)
    for _ in range(count):
        tokens.append(state % VOCAB)
        state = fold(state, tokens[-1])
    return tokens[len(prompt) :]


class CheckingModel:
    """Next token = a hash of the sequence, kept both in paged 'KV' and in a slot's 'state', which must agree."""

    def __init__(self, blocks: int, slots: int) -> None:
        self.kv = torch.full((blocks, BLOCK_SIZE), -1, dtype=torch.int64)
        self.state = [12345] * slots  # never cleared by anyone but a sequence's start
        self.decode_shapes: set[int] = set()

    def prefill(self, inputs: PrefillInputs, caches: list[Any], every_row: bool = False) -> torch.Tensor:
        assert caches == [] and not every_row
        hidden = []
        for index, start in enumerate(inputs.starts):
            first, end = inputs.cu_rows[index], inputs.cu_rows[index + 1]
            tokens = inputs.token_ids[first:end].tolist()
            positions = inputs.positions[first:end].tolist()
            assert positions == list(range(start, start + len(tokens)))
            slot = int(inputs.slots[index])
            if start == 0:
                self.state[slot] = 0
            for token, position in zip(tokens, positions, strict=True):
                self._put(slot, inputs.block_tables[index], position, token)
            hidden.append(self._read(slot, inputs.block_tables[index], start + len(tokens)))
        return torch.tensor(hidden, dtype=torch.float64).unsqueeze(1)

    def decode(self, inputs: DecodeInputs, caches: list[Any]) -> torch.Tensor:
        self.decode_shapes.add(len(inputs.slots))
        hidden = []
        for index, slot in enumerate(inputs.slots.tolist()):
            length = int(inputs.seq_lens[index])
            if slot == 0:
                assert length == 1 and not inputs.block_tables[index].any()
                hidden.append(0)
                continue
            self._put(slot, inputs.block_tables[index], length - 1, int(inputs.token_ids[index]))
            hidden.append(self._read(slot, inputs.block_tables[index], length))
        return torch.tensor(hidden, dtype=torch.float64).unsqueeze(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -(torch.arange(VOCAB) - hidden % VOCAB).abs().float()

    def _put(self, slot: int, table: torch.Tensor, position: int, token: int) -> None:
        assert 0 <= token < VOCAB
        block = int(table[position // BLOCK_SIZE])
        assert block != 0
        self.kv[block, position % BLOCK_SIZE] = token
        self.state[slot] = fold(self.state[slot], token)

    def _read(self, slot: int, table: torch.Tensor, length: int) -> int:
        state = 0
        for token in self.kv[table.long()].view(-1)[:length].tolist():
            state = fold(state, token)
        assert state == self.state[slot], "KV and state tell of different sequences"
        return state


class Recording(Leader):
    """Plans go over the wire's codec, and are kept."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> Drawn:
        self.plans.append(plan)
        return super().execute(unpack(pack(plan)))


class Bench:
    """An engine whose plans go over the wire's codec, and what it said."""

    def __init__(self, limits: Limits, model: Any, caches: list[Any], vocab: int) -> None:
        slots = limits.max_num_seqs + 1
        self.sampler = Sampler(vocab, slots, CPU)
        executor = Executor(model, caches, slots=slots, max_seq=limits.max_seq, device=CPU)
        self.leader = Recording(SlotBackend(executor, vocab), self.sampler)
        self.plans = self.leader.plans
        self.scheduler = Scheduler(limits, self.sampler)
        self.events: list[Event] = []
        self.engine = Engine(self.scheduler, self.leader, self.events.append)

    def submit(self, request_id: int, prompt: list[int], **sampling: Any) -> None:
        params = SamplingParams(**({"max_tokens": 20, "seed": request_id} | sampling))
        assert self.engine.handle(Submit(request_id, prompt, params))

    def run(self) -> dict[int, list[int]]:
        while self.engine.step():
            pass
        return self.tokens()

    def tokens(self) -> dict[int, list[int]]:
        got: dict[int, list[int]] = {}
        ended = set()
        for event in self.events:
            for run in event.runs if isinstance(event, Tokens) else []:
                assert run.request_id not in ended
                got.setdefault(run.request_id, []).extend(run.ids)
                if run.finish is not None:
                    ended.add(run.request_id)
        return got

    def stats(self) -> EngineStats:
        self.engine.handle(QueryStats(1))
        stats = self.events[-1]
        assert isinstance(stats, EngineStats)
        return stats


def checking(**changes: int) -> Bench:
    fields = {"max_seq": 300, "max_num_seqs": 6, "kv_blocks": 200, "prefill_budget": 128, "mixed_budget": 64}
    limits = Limits(**(fields | changes))
    return Bench(limits, CheckingModel(limits.kv_blocks + 1, limits.max_num_seqs + 1), [], VOCAB)


def prompts(count: int, longest: int = 200) -> list[list[int]]:
    rng = random.Random(count)
    sizes = [1, 2, 16, 17, 64, 65, longest, *(rng.randint(1, longest) for _ in range(count))][:count]
    return [[rng.randrange(VOCAB) for _ in range(size)] for size in sizes]


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
    number = warm_up(bench.scheduler.limits, bench.sampler, bench.leader, lambda *stage: stages.append(stage))
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


def test_steady_decode_step_makes_no_new_tables() -> None:
    bench = checking()
    for request_id in range(1, 4):
        bench.submit(request_id, [request_id] * 2, max_tokens=12)
    bench.run()
    steady = [plan for plan in bench.plans if not plan.chunks]
    assert len(steady) == 11
    assert all(plan.tables == [] and plan.decode_bucket == 4 for plan in steady)


# The real model.

Tiny = tuple[Any, Trunk]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = resolve("builtin:tiny")
    config = read_config(path)
    weights = load_shard(path, config, 0, 1, "fp32")
    with torch.inference_mode():
        trunk = Trunk(config, weights, dtype=torch.float32, device=CPU, collective=SoloCollective())
    yield config, trunk
    torch.set_num_threads(threads)


def real(tiny: Tiny, **changes: int) -> Bench:
    config, trunk = tiny
    fields = {"max_seq": 400, "max_num_seqs": 8, "kv_blocks": 200, "prefill_budget": 512, "mixed_budget": 128}
    limits = Limits(**(fields | changes))
    caches = allocate_caches(
        config,
        1,
        blocks=limits.kv_blocks + 1,
        block_size=BLOCK_SIZE,
        slots=limits.max_num_seqs + 1,
        dtype=torch.float32,
        device=CPU,
    )
    return Bench(limits, trunk, caches, config.vocab_size)


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
def alone(tiny: Tiny) -> dict[int, list[int]]:
    """Each request by itself, its prompt in one piece."""
    result = {}
    for request_id, (prompt, sampling) in real_requests().items():
        bench = real(tiny)
        bench.submit(request_id, prompt, **sampling)
        result |= bench.run()
    return result


@pytest.mark.parametrize(
    "changes",
    [{}, {"prefill_budget": 64, "mixed_budget": 64}, {"kv_blocks": 28}, {"max_num_seqs": 2}],
    ids=["batched", "chunked", "preempted", "slots reused"],
)
def test_text_is_the_same_batched_chunked_preempted_and_in_reused_slots(
    tiny: Tiny, alone: dict[int, list[int]], changes: dict[str, int]
) -> None:
    bench = real(tiny, **changes)
    for request_id, (prompt, sampling) in real_requests().items():
        bench.submit(request_id, prompt, **sampling)
        bench.engine.step()
    assert bench.run() == alone
    assert (bench.stats().preemptions > 0) == ("kv_blocks" in changes)
