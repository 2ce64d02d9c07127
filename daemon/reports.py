"""What `status`, `stats` and the log say, put together from what the daemon's parts know."""

from __future__ import annotations

import functools
import importlib.metadata

from mstar.daemon.loading import ModelHost
from mstar.daemon.protocol import Done, ErrorEvent, Pool, RankStatus, SpecStats, StatsEvent, StatusEvent
from mstar.daemon.registry import LiveRequest, Registry, told
from mstar.daemon.speculation import mean_accepted
from mstar.ranks.messages import EngineStats


def depths(registry: Registry) -> tuple[int, int]:
    """Requests that the engine has begun, and those that wait for it."""
    started = sum(live.started_at is not None for live in registry)
    return started, len(registry) - started


def status_event(host: ModelHost, registry: Registry, id: str | int | None) -> StatusEvent:
    loaded = host.model.loaded if host.model is not None else None
    device = loaded.device if loaded is not None else host.device
    ranks = [
        RankStatus(
            rank=state.rank,
            pid=state.process.pid,
            device=device,
            memory_bytes=state.memory_bytes,
            last_heartbeat_ms=round(state.heartbeat_age_s * 1e3, 1) if state.hello else None,
        )
        for state in host.ranks
    ]
    running, waiting = depths(registry)
    return StatusEvent(
        state=host.state,
        running=running,
        waiting=waiting,
        ranks=ranks,
        loaded=loaded,
        reason=host.reason,
        version=_version(),
        id=id,
    )


def stats_event(engine: EngineStats | None, registry: Registry, id: str | int | None) -> StatsEvent:
    """engine: its counters, or None where it has never answered: its figures are zeros then."""
    totals = registry.totals
    running, waiting = depths(registry)
    event = StatsEvent(
        requests=dict(totals.ends),
        tokens={
            "prompt": totals.prompt_tokens,
            "completion": totals.completion_tokens,
            "reasoning": totals.reasoning_tokens,
        },
        steps=0,
        preemptions=0,
        blocks=Pool(0, 0, 0),
        slots=Pool(0, 0, 0),
        queues={"live": len(registry), "running": running, "waiting": waiting},
        id=id,
    )
    if engine is not None:
        event.steps, event.preemptions = engine.steps, engine.preemptions
        event.blocks = _pool(engine.blocks_total, engine.blocks_free)
        event.slots = _pool(engine.slots_total, engine.slots_free)
        event.queues.update(running=engine.running, waiting=engine.waiting)
        tau = mean_accepted(sum(engine.spec_accepted), engine.spec_steps)
        event.spec = SpecStats(
            k=engine.spec_k,
            steps=engine.spec_steps,
            drafted=engine.spec_drafted,
            accepted=engine.spec_accepted,
            tau=tau,
            tokens_per_step=round(tau + 1, 4),
        )
        event.engine = {
            "prefill_tokens": engine.prefill_tokens,
            "decode_tokens": engine.decode_tokens,
            **engine.extra,
        }
        event.phases = engine.phases
        event.trace = engine.trace_path or None
    return event


class RequestLine:
    """The log's one line about a finished request, made by the thread that writes it.

    It keeps what the line says and nothing of the request: lines may wait, and prompts are long.
    """

    __slots__ = ("_how", "_key", "_peer", "_spec", "_timings", "_usage")

    def __init__(self, live: LiveRequest, event: Done | ErrorEvent) -> None:
        self._key, self._peer = live.key, live.peer.name
        self._usage, self._timings = told(live, event)
        if isinstance(event, Done):
            self._how, self._spec = str(event.finish_reason), event.spec
        else:
            self._how, self._spec = f"{event.error_class} ({event.message})", live.spec.report()

    def __str__(self) -> str:
        (id, attempt_id), usage, timings, spec = self._key, self._usage, self._timings, self._spec
        steps = f", {spec.tokens_per_step:.2f} tokens a step" if spec.steps else ""
        return (
            f"id={id!r} attempt={attempt_id} {self._how}: prompt {usage.prompt_tokens}, "
            f"completion {usage.completion_tokens}, queue {_shown(timings.queue_ms)} ms, "
            f"ttft {_shown(timings.ttft_ms)} ms, prefill {_shown(timings.prefill_tok_s)} tok/s, "
            f"decode {_shown(timings.decode_tok_s)} tok/s{steps} ({self._peer})"
        )


def _pool(total: int, free: int) -> Pool:
    return Pool(total, total - free, free)


def _shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.1f}"


@functools.cache  # reading it takes 2 ms of files, and clients may ask often
def _version() -> str:
    try:
        return importlib.metadata.version("mstar")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
