"""The live requests: who asked, how far they are, and exactly one terminal event for each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mstar.daemon.peer import Peer
from mstar.daemon.protocol import Done, ErrorEvent, Generate, ProtocolError, Timings, Usage
from mstar.daemon.speculation import SpecCounts
from mstar.daemon.text import Emitter

Key = tuple[str | int, int]  # (id, attempt_id), global to the daemon


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One `generate` between its arrival and its terminal event. Times are time.monotonic(), seconds."""

    request: Generate
    peer: Peer
    request_id: int  # the engine's name for it
    received_at: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seed: int = 0
    starts_in_think: bool = False
    emitter: Emitter | None = None  # set once the prompt is known
    spec: SpecCounts = field(default_factory=SpecCounts)
    submitted: bool = False  # the engine knows it
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    deadline: asyncio.TimerHandle | None = None
    preparing: asyncio.Task[None] | None = None
    ended: bool = False

    @property
    def key(self) -> Key:
        return (self.request.id, self.request.attempt_id)

    def usage(self) -> Usage:
        emitter = self.emitter
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=emitter.completion_tokens if emitter else 0,
            reasoning_tokens=emitter.reasoning_tokens if emitter else 0,
            cached_tokens=self.cached_tokens,
        )

    def timings(self) -> Timings:
        """What can be told so far; None where it was not reached."""
        started, first, last = self.started_at, self.first_token_at, self.last_token_at
        after_first = (self.emitter.completion_tokens if self.emitter else 0) - 1
        return Timings(
            queue_ms=_ms(self.received_at, started),
            ttft_ms=_ms(self.received_at, first),
            prefill_ms=_ms(started, first),
            prefill_tok_s=_rate(self.prompt_tokens - self.cached_tokens, started, first),
            decode_ms=_ms(first, last),
            decode_tok_s=_rate(after_first, first, last),
        )


@dataclass(slots=True)
class Totals:
    """Counts since the load, for `stats`."""

    ends: Counter[str] = field(default_factory=Counter)  # finish reasons and `error.<class>`
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Registry:
    """Live requests by key, by the engine's number and by peer.

    limit: most live requests. on_end: told of every end, after the event was sent.
    """

    def __init__(self, limit: int, on_end: Callable[[LiveRequest, Done | ErrorEvent], None]) -> None:
        self.totals = Totals()
        self._limit = limit
        self._on_end = on_end
        self._by_key: dict[Key, LiveRequest] = {}
        self._by_id: dict[int, LiveRequest] = {}
        self._by_peer: dict[Peer, dict[LiveRequest, None]] = {}  # a dict for its order
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_key.values()))

    def add(self, request: Generate, peer: Peer, now: float) -> LiveRequest:
        """Makes the request live. Raises ProtocolError: a second one under its key, or too many."""
        key = (request.id, request.attempt_id)
        if key in self._by_key:
            raise ProtocolError(
                "validation",
                f"a request with id {request.id!r} and attempt_id {request.attempt_id} is live: "
                "use another attempt_id, or abort that one",
                field="attempt_id",
            )
        if len(self._by_key) >= self._limit:
            raise ProtocolError("overloaded", f"{self._limit} requests are live already: try again later")
        self._last_id += 1
        live = LiveRequest(request, peer, self._last_id, now)
        self._by_key[key] = live
        self._by_id[live.request_id] = live
        self._by_peer.setdefault(peer, {})[live] = None
        return live

    def find(self, key: Key) -> LiveRequest | None:
        return self._by_key.get(key)

    def by_id(self, request_id: int) -> LiveRequest | None:
        return self._by_id.get(request_id)

    def of(self, peer: Peer) -> list[LiveRequest]:
        return list(self._by_peer.get(peer, ()))

    def end(self, live: LiveRequest, event: Done | ErrorEvent) -> bool:
        """Sends the request's terminal event and forgets it. False, and nothing is sent, if it had one."""
        if live.ended:
            return False
        live.ended = True
        del self._by_key[live.key], self._by_id[live.request_id]
        of_peer = self._by_peer[live.peer]
        del of_peer[live]
        if not of_peer:
            del self._by_peer[live.peer]
        if live.deadline is not None:
            live.deadline.cancel()
        if live.preparing is not None:
            live.preparing.cancel()
        self._count(live, event)
        live.peer.send(event)
        self._on_end(live, event)
        return True

    def _count(self, live: LiveRequest, event: Done | ErrorEvent) -> None:
        (usage, _), totals = told(live, event), self.totals
        totals.ends[end_name(event)] += 1
        totals.prompt_tokens += usage.prompt_tokens
        totals.completion_tokens += usage.completion_tokens
        totals.reasoning_tokens += usage.reasoning_tokens


def told(live: LiveRequest, event: Done | ErrorEvent) -> tuple[Usage, Timings]:
    """A request's counts and times as its end has told them, or as they are where it failed."""
    if isinstance(event, Done):
        return event.usage, event.timings
    return live.usage(), live.timings()


def end_name(event: Done | ErrorEvent) -> str:
    """How a request ended, for counters: its finish reason, or `error.<class>`."""
    return event.finish_reason if isinstance(event, Done) else f"error.{event.error_class}"


def _ms(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(max(0.0, end - begin) * 1e3, 3)


def _rate(count: int, begin: float | None, end: float | None) -> float | None:
    if begin is None or end is None or end <= begin or count <= 0:
        return None
    return round(count / (end - begin), 2)
