"""The load generator of the serving benchmark: a closed loop over one ZeroMQ socket, and its figures.

One thread, no event loop and no validation of events, so that on a small machine the client takes
little of what it measures; `client_cpu_pct` says how much it took.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import zmq

from mstar.scripts.harness_prompts import BUILT_IN

PING_EVERY_S = 5.0  # a daemon's lease is 30 s by default
LOST_S = 30.0
STALL_FACTOR = 5.0
ORDINARY_SHARE = 0.97  # special ids are at the end of the vocabulary; prompts are drawn below it


class BenchError(Exception):
    """The benchmark cannot go on; the message is for the person who runs it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one fixed shape, in tokens; or, with `chat`, the harness's prompts, answered to their own end."""

    name: str
    prompt_tokens: int
    output_tokens: int
    chat: bool = False


WORKLOADS = {
    w.name: w
    for w in (
        Workload("battery", 0, 1024, chat=True),
        Workload("text-chat-256", 64, 256),
        Workload("long-1k", 1024, 256),
        Workload("short-128", 16, 128),
    )
}


def parse_workload(text: str) -> Workload:
    """A workload by name, or one's own as IN:OUT tokens. Raises BenchError."""
    if text in WORKLOADS:
        return WORKLOADS[text]
    prompt, _, output = text.partition(":")
    if not (prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output)):
        raise BenchError(f"workload {text!r}: give IN:OUT in tokens, or one of {', '.join(WORKLOADS)}")
    return Workload(text, int(prompt), int(output))


def make_prompts(workload: Workload, count: int, vocab: int, seed: int) -> list[list[int]]:
    """`count` different prompts of random ordinary ids; the same for the same arguments."""
    draw = random.Random(f"{seed} {workload.name} {count}")
    top = max(1, int(vocab * ORDINARY_SHARE))
    return [[draw.randrange(top) for _ in range(workload.prompt_tokens)] for _ in range(count)]


def make_requests(workload: Workload, count: int, vocab: int, seed: int) -> list[dict[str, Any]]:
    """`count` `generate` requests without keys: greedy, and asking for ids, so that every token is seen.

    Of a fixed shape they ignore the end of sequence; the harness's prompts come in turn, seed or not.
    """
    shared = {"max_tokens": workload.output_tokens, "return_ids": True}
    if workload.chat:
        prompts = itertools.islice(itertools.cycle(BUILT_IN), count)
        return [{"messages": prompt.messages, **shared} for prompt in prompts]
    return [
        {"prompt_ids": ids, "ignore_eos": True, **shared}
        for ids in make_prompts(workload, count, vocab, seed)
    ]


@dataclass(slots=True)
class Trace:
    """What one request saw; times are seconds of one monotonic clock."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens) of each event
    ended: float = 0.0
    failure: str | None = None
    ids: list[int] = field(default_factory=list)
    done: dict[str, Any] = field(default_factory=dict)  # the `done` event

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def steps(self) -> int:
        """Decode steps; the token that prefill yields is of none."""
        counted = int(self.done.get("spec", {}).get("steps", 0))
        return counted or max(0, self.tokens - 1)

    @property
    def decode_ms(self) -> float:
        return float(self.done.get("timings", {}).get("decode_ms") or 0.0)

    def drafts(self, what: str) -> int:
        """`drafted` or `accepted` ones."""
        return int(self.done.get("spec", {}).get(what, 0))

    def gaps(self) -> Iterator[float]:
        """Seconds between tokens; an event of n tokens counts as n equal gaps."""
        for (before, _), (after, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield from [(after - before) / count] * count


@dataclass(slots=True)
class Run:
    """One timed run: all its requests, and what the client itself used."""

    traces: list[Trace]
    client_cpu_s: float = 0.0

    @property
    def wall_s(self) -> float:
        return max(t.ended for t in self.traces) - min(t.sent for t in self.traces)

    def failures(self) -> list[str]:
        return [t.failure for t in self.traces if t.failure is not None]

    def figures(self) -> dict[str, float]:
        """Flat figures by name, units in the names; percentiles are over the run's requests or gaps."""
        good = [t for t in self.traces if t.failure is None and t.arrivals]
        gaps = [gap for trace in good for gap in trace.gaps()]
        median_gap = statistics.median(gaps) if gaps else 0.0
        steps = max(1, sum(t.steps for t in good))
        return {
            "tok_s": sum(t.tokens for t in good) / self.wall_s,
            **_percentiles("ttft", [t.arrivals[0][0] - t.sent for t in good]),
            **_percentiles("itl", gaps),
            "ms_per_token": 1e3 * statistics.fmean(gaps) if gaps else float("nan"),
            **_percentiles("e2e", [t.ended - t.sent for t in good]),
            "stalls": float(sum(gap > STALL_FACTOR * median_gap for gap in gaps)),
            "failures": float(len(self.traces) - len(good)),
            "requests": float(len(self.traces)),
            "wall_s": self.wall_s,
            "client_cpu_pct": 100 * self.client_cpu_s / self.wall_s,
            "tokens_per_step": 1 + sum(t.drafts("accepted") for t in good) / steps,
            "drafts_per_step": sum(t.drafts("drafted") for t in good) / steps,
            "ms_per_step": sum(t.decode_ms for t in good) / steps,
        }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = np.percentile(seconds, [50, 95, 99]) * 1e3 if len(seconds) else [float("nan")] * 3
    return {f"{name}_p{p}_ms": float(v) for p, v in zip((50, 95, 99), values, strict=True)}


class DaemonLink:
    """A DEALER socket that speaks the protocol's raw maps."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)

    def close(self) -> None:
        self._socket.close()

    def send(self, message: dict[str, Any]) -> None:
        self._socket.send(msgpack.packb(message))

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next event, or None when there was none in that time."""
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            if not self._socket.poll(max(0, int(timeout_s * 1e3))):
                return None
            data = self._socket.recv()
        event: dict[str, Any] = msgpack.unpackb(data)
        return event

    def status(self, timeout_s: float) -> dict[str, Any] | None:
        """The daemon's `status`, or None when it does not answer in that time."""
        self.send({"type": "status"})
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            event = self.receive(left)
            if event is not None and event["type"] == "status":
                return event
        return None


def closed_loop(
    link: DaemonLink,
    prompts: Sequence[list[int]],
    output_tokens: int,
    concurrency: int,
    timeout_s: float = 600.0,
) -> Run:
    """`serve` of prompts in ids, each with exactly `output_tokens` to come."""
    shared = {"max_tokens": output_tokens, "ignore_eos": True, "return_ids": True}
    return serve(link, [{"prompt_ids": ids, **shared} for ids in prompts], concurrency, timeout_s)


def serve(
    link: DaemonLink, requests: Sequence[dict[str, Any]], concurrency: int, timeout_s: float = 600.0
) -> Run:
    """Keeps `concurrency` requests in flight until every one was served once.

    requests: `generate` fields without keys, that ask for ids so that every token shows as an event even where
    it has no text. A request that errs or ends short is a failure of its own; a daemon that leaves pings
    unanswered for LOST_S, or all requests for `timeout_s`, is a BenchError.
    """
    batch = uuid.uuid4().hex[:12]
    traces: dict[str, Trace] = {}
    expected: dict[str, int | None] = {}
    waiting = iter(enumerate(requests))
    live = 0
    cpu = time.process_time()

    def send_next() -> bool:
        entry = next(waiting, None)
        if entry is None:
            return False
        key = f"bench-{batch}-{entry[0]}"
        request = entry[1]
        expected[key] = request["max_tokens"] if request.get("ignore_eos") else None
        traces[key] = Trace(time.perf_counter())
        link.send({"type": "generate", "id": key, "attempt_id": 0, **request})
        return True

    while live < concurrency and send_next():
        live += 1
    alive = heard = pinged = time.perf_counter()
    while live:
        event = link.receive(PING_EVERY_S)
        now = time.perf_counter()
        if now - pinged > PING_EVERY_S:
            link.send({"type": "ping"})
            pinged = now
        trace = None
        if event is not None:
            alive = now
            trace = traces.get(event.get("id", ""))
        if event is None or trace is None:
            if now - alive > LOST_S:
                raise BenchError(f"the daemon is gone: it left pings unanswered for {LOST_S:.0f} s")
            if now - heard > timeout_s:
                raise BenchError(f"{live} requests heard nothing from the daemon for {timeout_s:.0f} s")
            continue
        heard = now
        kind = event["type"]
        if kind in ("token", "reasoning"):
            if event["ids"]:
                trace.arrivals.append((now, len(event["ids"])))
                trace.ids += event["ids"]
        elif kind in ("done", "error"):
            trace.ended = now
            trace.done = event
            trace.failure = _failure(event, trace, expected[event["id"]])
            live -= not send_next()
    return Run(list(traces.values()), time.process_time() - cpu)


def _failure(event: dict[str, Any], trace: Trace, expected: int | None) -> str | None:
    """expected: tokens that must come, where the request fixes them."""
    if event["type"] == "error":
        return f"{event['class']}: {event['message']}"
    counted = event["usage"]["completion_tokens"]
    if counted != trace.tokens or expected not in (None, counted):
        asked = "" if expected is None else f"{expected} tokens asked for, "
        return f"{asked}{counted} counted, {trace.tokens} received"
    return None
