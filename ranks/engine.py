"""The engine on rank 0: commands in, a plan a step, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable

from mstar.ranks.executor import Executor
from mstar.ranks.messages import (
    Abort,
    Command,
    EngineStats,
    Event,
    QueryStats,
    Started,
    Submit,
    Tokens,
)
from mstar.ranks.plan import StepPlan
from mstar.ranks.scheduler import Drawn, Scheduler


class Engine:
    """Scheduler and executor of rank 0.

    share: hands a plan to the followers before it is executed here. emit: sends an event to the daemon.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        share: Callable[[StepPlan], None],
        emit: Callable[[Event], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._share = share
        self._emit = emit

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def handle(self, command: Command) -> bool:
        """Takes one command between steps; False for Stop."""
        if isinstance(command, Submit):
            refused = self._scheduler.submit(command)
            if refused is not None:
                self._emit(refused)
        elif isinstance(command, Abort):
            self._scheduler.abort(command.request_id)
        elif isinstance(command, QueryStats):
            self._emit(self._stats(command.query_id))
        else:
            return False
        return True

    def step(self) -> bool:
        """Plans and runs one step, and sends what it gave; False when there was nothing to run."""
        scheduler = self._scheduler
        plan = scheduler.plan()
        for request in scheduler.admitted:
            self._emit(Started(request.request_id, cached_tokens=0, at=time.monotonic()))
        if plan is None:
            return False
        self._share(plan)
        runs = scheduler.commit(plan, self._run(plan))
        if runs:
            self._emit(Tokens(runs, at=time.monotonic()))
        return True

    def _run(self, plan: StepPlan) -> Drawn:
        sampled = self._executor.execute(plan)
        if sampled is None:
            return Drawn([], [])
        return Drawn(sampled.tokens.tolist(), sampled.finish.tolist(), sampled.logprobs)

    def _stats(self, query_id: int) -> EngineStats:
        scheduler = self._scheduler
        counters = scheduler.counters
        return EngineStats(
            query_id=query_id,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=counters.steps,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            preemptions=counters.preemptions,
            blocks_total=scheduler.blocks.total,
            blocks_free=scheduler.blocks.free,
            slots_total=scheduler.slots.total,
            slots_free=scheduler.slots.free,
        )
