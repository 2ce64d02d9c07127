"""Exactly one terminal event for each key, and nothing kept after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mstar.daemon.peer import Peer
from mstar.daemon.protocol import Done, ErrorEvent, Generate, ProtocolError
from mstar.daemon.registry import LiveRequest, Registry


class FakePeer(Peer):
    def __init__(self, name: str = "peer") -> None:
        super().__init__(name)
        self.events: list[Any] = []

    def send(self, event: Any) -> None:
        self.events.append(event)


def registry(limit: int = 10) -> tuple[Registry, list[Any]]:
    ends: list[Any] = []
    return Registry(limit, lambda live, event: ends.append((live.key, event))), ends


def request(id: Any = "a", attempt_id: int = 0) -> Generate:
    return Generate(id=id, attempt_id=attempt_id, prompt="x")


def done(live: LiveRequest, reason: Any = "stop") -> Done:
    return Done(*live.key, reason, live.usage(), False, live.timings())


def test_only_the_first_terminal_event_is_sent() -> None:
    live_requests, ends = registry()
    peer = FakePeer()
    live = live_requests.add(request(), peer, 0.0)
    assert live_requests.end(live, done(live))
    assert not live_requests.end(live, done(live, "abort"))
    assert not live_requests.end(live, ErrorEvent("internal", "late", id="a", attempt_id=0))
    assert [event.finish_reason for event in peer.events] == ["stop"]
    assert len(ends) == 1 and live_requests.totals.ends == {"stop": 1}


def test_an_ended_request_is_found_by_nobody() -> None:
    live_requests, _ = registry()
    peer = FakePeer()
    live = live_requests.add(request(), peer, 0.0)
    assert live_requests.find(("a", 0)) is live
    assert live_requests.by_id(live.request_id) is live
    assert live_requests.of(peer) == [live]
    live_requests.end(live, done(live))
    assert len(live_requests) == 0
    assert live_requests.find(("a", 0)) is live_requests.by_id(live.request_id) is None
    assert live_requests.of(peer) == []
    assert not live_requests._by_peer


def test_a_live_key_is_refused_and_free_again_after_its_end() -> None:
    live_requests, _ = registry()
    live = live_requests.add(request(), FakePeer(), 0.0)
    with pytest.raises(ProtocolError, match="is live") as raised:
        live_requests.add(request(), FakePeer("another"), 0.0)
    assert (raised.value.error_class, raised.value.field) == ("validation", "attempt_id")
    live_requests.add(request(attempt_id=1), FakePeer(), 0.0)
    live_requests.add(request(id=0), FakePeer(), 0.0)
    live_requests.end(live, done(live))
    again = live_requests.add(request(), FakePeer(), 0.0)
    assert again.request_id != live.request_id  # late words of the engine about the first find nobody


def test_too_many_live_requests_are_overload() -> None:
    live_requests, _ = registry(limit=2)
    for attempt in range(2):
        live_requests.add(request(attempt_id=attempt), FakePeer(), 0.0)
    with pytest.raises(ProtocolError) as raised:
        live_requests.add(request(attempt_id=2), FakePeer(), 0.0)
    assert (raised.value.error_class, raised.value.retryable) == ("overloaded", True)


def test_figures_follow_from_the_stamps() -> None:
    live = registry()[0].add(request(), FakePeer(), 10.0)
    live.prompt_tokens, live.cached_tokens = 120, 20
    assert {getattr(live.timings(), name) for name in live.timings().__slots__} == {None}
    live.started_at, live.first_token_at, live.last_token_at = 10.5, 11.0, 13.0
    live.emitter = SimpleNamespace(completion_tokens=41, reasoning_tokens=5)  # type: ignore[assignment]
    timings = live.timings()
    assert (timings.queue_ms, timings.ttft_ms, timings.prefill_ms, timings.decode_ms) == (
        500,
        1000,
        500,
        2000,
    )
    assert timings.prefill_tok_s == 100 / 0.5
    assert timings.decode_tok_s == 40 / 2.0
    usage = live.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens) == (120, 41, 5)


def test_one_token_has_no_decode_rate() -> None:
    live = registry()[0].add(request(), FakePeer(), 0.0)
    live.started_at = live.first_token_at = live.last_token_at = 1.0
    live.emitter = SimpleNamespace(completion_tokens=1, reasoning_tokens=0)  # type: ignore[assignment]
    assert (live.timings().decode_ms, live.timings().decode_tok_s) == (0.0, None)
