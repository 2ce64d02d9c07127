"""Runs a few requests of our own before the first client's: pages, thread pools and kernels are ready then."""

from __future__ import annotations

from collections.abc import Callable

from mstar.ranks.engine import Engine
from mstar.ranks.leader import Leader
from mstar.ranks.messages import SamplingParams, Submit
from mstar.ranks.sampler import Sampler
from mstar.ranks.scheduler import Limits, Scheduler

# Sequences at once in each round: one alone, then a batch. A whole chunk of the delta rule and a tail.
ROUNDS = (1, 4)
PROMPT_TOKENS = 70
TOKENS = 3


def warm_up(
    limits: Limits,
    sampler: Sampler,
    leader: Leader,
    progress: Callable[[str, int, int, str], None],
) -> int:
    """Runs greedy and sampled requests through a scheduler that is thrown away. Returns the next plan's number."""
    prompt = [0] * max(1, min(PROMPT_TOKENS, limits.max_seq - TOKENS))
    scheduler = Scheduler(limits, sampler)
    engine = Engine(scheduler, leader, lambda _: None)
    for done, count in enumerate(ROUNDS):
        progress("warmup", done, len(ROUNDS), "steps")
        for index in range(min(count, limits.max_num_seqs)):
            params = SamplingParams(max_tokens=TOKENS, seed=0, temperature=float(index % 2))
            engine.handle(Submit(index, prompt, params))
        while engine.step():
            pass
    progress("warmup", len(ROUNDS), len(ROUNDS), "steps")
    return scheduler.next_number
