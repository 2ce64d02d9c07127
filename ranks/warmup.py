"""Runs a few requests of our own before the first client's, and measures what steps with drafts cost.

Pages, thread pools and kernels are ready then, and the policy knows how many drafts a step are worth it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mstar.ranks.engine import Engine
from mstar.ranks.leader import Leader
from mstar.ranks.messages import SamplingParams, Submit
from mstar.ranks.sampler import Sampler
from mstar.ranks.scheduler import Limits, Scheduler
from mstar.ranks.speculation.policy import Costs, Policy

# Sequences at once and tokens of their prompts: one alone, then a batch. A whole chunk of the delta rule and a tail.
ROUNDS = ((1, 70), (4, 70))
# A GPU's kernels are compiled for what divides their sizes and for how many sequences share a pass: prompts of one
# row, of whole and broken tiles, alone and in batches.
GPU_ROUNDS = ((1, 1), (1, 64), (1, 70), (1, 500), (2, 33), (4, 64), (8, 70), (16, 17), (32, 64), (64, 70))
TOKENS = 3

# Batches and drafts of which steps are timed. Rows are cheap up to about 4 on the CPU at hand and cost by number
# from 16 on. Plain steps and those with drafts take turns, and the fastest of each counts: what else the machine
# does for a moment would make one look slow beside the other.
TIMED_BATCHES = (1, 4, 16, 64)
TIMED_DRAFTS = (0, 1, 2, 3, 5, 8)
TIMED_ROUNDS = 3
TIMED_STEPS = 2
TIMED_PROMPT = 8
# A larger batch is not tried when the ones before it took this long: it is taken for the largest that was.
TIMED_LIMIT_S = 1.0

Progress = Callable[[str, int, int, str], None]


def warm_up(
    limits: Limits, sampler: Sampler, leader: Leader, progress: Progress, costs: bool = True
) -> tuple[int, Costs]:
    """Runs greedy and sampled requests through schedulers that are thrown away.

    Returns the next plan's number, and of a load that speculates what its steps cost; without `costs` none are
    measured, and its k stays in force.
    """
    scheduler = Scheduler(limits, sampler)
    engine = Engine(scheduler, leader, lambda _: None)
    rounds = GPU_ROUNDS if leader.steps_ahead else ROUNDS
    for done, (count, tokens) in enumerate(rounds):
        progress("warmup", done, len(rounds), "steps")
        prompt = [0] * max(1, min(tokens, limits.max_seq - TOKENS))
        for index in range(min(count, limits.max_num_seqs)):
            params = SamplingParams(max_tokens=TOKENS, seed=0, temperature=float(index % 2))
            engine.handle(Submit(index, prompt, params))
        while engine.step():
            pass
    progress("warmup", len(rounds), len(rounds), "steps")
    number = scheduler.next_number
    if not limits.drafts or not costs:
        return number, Costs()
    return _measure(limits, sampler, leader, number)


class _Forced(Policy):
    """As many drafts as the measurement asks for."""

    def plan(self, sequences: int) -> int:
        return self.in_force

    def starts(self, sequences: int = 1, tokens: int = 0) -> bool:
        return True


def _measure(limits: Limits, sampler: Sampler, leader: Leader, number: int) -> tuple[int, Costs]:
    """Times plain steps and steps with drafts of a few batches; returns the next plan's number and the costs."""
    drafts = sorted({k for k in TIMED_DRAFTS if k < limits.drafts} | {limits.drafts})
    tokens = (TIMED_STEPS + 2) * sum(k + 1 for k in drafts)
    measured: dict[int, dict[int, float]] = {}
    begun = time.perf_counter()
    for size in TIMED_BATCHES:
        if size > limits.max_num_seqs or TIMED_PROMPT + tokens >= limits.max_seq:
            break
        if measured and time.perf_counter() - begun > TIMED_LIMIT_S:
            break
        times: dict[int, float] = {}
        for ks, spec_k in (([-1], 0), (drafts, None)) * TIMED_ROUNDS:
            scheduler = Scheduler(limits, sampler, number, _Forced(limits.drafts))
            params = SamplingParams(max_tokens=tokens, seed=0, spec_k=spec_k)
            for index in range(size):
                scheduler.submit(Submit(index, [index] * TIMED_PROMPT, params))
            for k, took in _times(scheduler, leader, size, ks).items():
                times[k] = min(took, times.get(k, took))
            number = scheduler.next_number
        if len(times) > len(drafts):
            measured[size] = {k: times[k] / times[-1] for k in drafts}
    return number, Costs(measured)


def _times(scheduler: Scheduler, leader: Leader, size: int, ks: list[int]) -> dict[int, float]:
    """Seconds of the fastest step of a batch that checks k drafts of each, by k; then ends all."""
    fastest: dict[int, float] = {}
    scheduler.policy.in_force = max(0, ks[0])
    while any(not request.decoding for request in scheduler.running) or scheduler.waiting:
        plan = scheduler.plan()
        if plan is None:
            break
        scheduler.commit(plan, leader.launch(plan).wait())
    for k in ks:
        scheduler.policy.in_force = max(0, k)
        for _ in range(1 + TIMED_STEPS):
            begun = time.perf_counter()
            plan = scheduler.plan()
            if plan is None:
                break
            scheduler.commit(plan, leader.launch(plan).wait())
            took = time.perf_counter() - begun
            counts = plan.decode_counts or [1] * len(plan.decode_slots)
            # the first step after a change checks what was made before it
            if counts == [1 + max(0, k)] * size and not plan.chunks:
                fastest[k] = min(took, fastest.get(k, took))
    for index in range(size):
        scheduler.abort(index)
    return fastest
