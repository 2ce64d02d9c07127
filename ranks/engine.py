"""The engine on rank 0: commands in, a plan a step, tokens out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from mstar.ranks.leader import InFlight, Leader
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
from mstar.ranks.phases import Phases
from mstar.ranks.plan import StepPlan
from mstar.ranks.scheduler import Scheduler
from mstar.ranks.trace import Trace


class Engine:
    """Decides on rank 0 what runs next, and has it run.

    emit: sends an event to the daemon.
    """

    def __init__(self, scheduler: Scheduler, leader: Leader, emit: Callable[[Event], None]) -> None:
        self._scheduler = scheduler
        self._leader = leader
        self._emit = emit
        self._flights: deque[tuple[StepPlan, InFlight, Trace | None]] = deque()  # oldest first
        self._phases = Phases()
        self._trace: Trace | None = None

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
            self._query(command)
        else:
            return False
        return True

    def step(self) -> bool:
        """Plans and launches a step, and sends what the oldest one gave; False when there was nothing to run.

        On a device the step launched here runs while the next call plans another.
        """
        scheduler, phases = self._scheduler, self._phases
        begun = time.perf_counter()
        plan = scheduler.plan()
        started = time.monotonic()
        # a device has something to do meanwhile; a launch that runs the step would keep clients from the news
        news = bool(scheduler.admitted or scheduler.failed)
        behind = news and plan is not None and self._leader.runs_ahead(plan)
        if not behind:
            self._announce(started)
        if plan is not None:
            phases.add("plan", time.perf_counter() - begun)
            if self._trace is not None and not self._trace.before_step():
                self._end_trace()
            with phases.timed("launch"):
                self._flights.append((plan, self._leader.launch(plan), self._trace))
        if behind:
            self._announce(started)
        ahead = 0 if plan is None else self._leader.steps_ahead
        collected = bool(scheduler.failed)
        while self._flights and (len(self._flights) > ahead or self._flights[0][1].done):
            self._collect(*self._flights.popleft())
            collected = True
        return plan is not None or collected

    def _announce(self, at: float) -> None:
        """Sends who was admitted by the latest plan, and who could not be."""
        for request in self._scheduler.admitted:
            self._emit(Started(request.request_id, cached_tokens=0, at=at))
        for refused in self._scheduler.failed:
            self._emit(refused)

    def _collect(self, plan: StepPlan, flight: InFlight, trace: Trace | None) -> None:
        with self._phases.timed("wait"):
            drawn = flight.wait()
        for phase, seconds in flight.device_times():
            self._phases.add(phase, seconds)
        with self._phases.timed("send"):
            runs = self._scheduler.commit(plan, drawn)
            if runs:
                self._emit(Tokens(runs, at=time.monotonic()))
        if trace is not None and trace is self._trace and trace.after_step():
            self._end_trace()

    def _query(self, command: QueryStats) -> None:
        if self._trace is not None and self._trace.expired:
            self._end_trace()
        if command.trace_path and self._trace is None:
            self._trace = Trace(Path(command.trace_path), command.trace_steps, command.query_id)
        else:
            self._emit(self._stats(command.query_id))

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            written = trace.end()
            self._emit(self._stats(trace.query_id, str(trace.path) if written else ""))

    def _stats(self, query_id: int, trace_path: str = "") -> EngineStats:
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
            spec_k=scheduler.policy.in_force,
            spec_steps=scheduler.spec.steps,
            spec_drafted=list(scheduler.spec.drafted),
            spec_accepted=list(scheduler.spec.accepted),
            phases=self._phases.report(),
            trace_path=trace_path,
        )
