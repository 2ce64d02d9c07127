"""Prometheus metrics of one daemon, in a registry of their own, served on a loopback address."""

from __future__ import annotations

import threading
from collections.abc import Callable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from mstar.daemon.addresses import AddressError, TcpAddress, parse_host_port
from mstar.daemon.protocol import Done, ErrorEvent
from mstar.daemon.registry import LiveRequest, end_name, told

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """What is counted. Names follow Prometheus' conventions; times are in seconds."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "mstar_requests",
            "Ended requests by finish reason or error.<class>",
            ["end"],
            registry=registry,
        )
        tokens = Counter("mstar_tokens", "Tokens of ended requests", ["kind"], registry=registry)
        # found once: what a request's end takes, the next request waits for
        self._prompt, self._completion, self._reasoning = (
            tokens.labels(kind) for kind in ("prompt", "completion", "reasoning")
        )
        drafts = Counter(
            "mstar_spec_drafts",
            "Drafts of ended requests: drafted, and of these accepted",
            ["kind"],
            registry=registry,
        )
        self._drafted, self._accepted = (drafts.labels(kind) for kind in ("drafted", "accepted"))
        self.spec_steps = Counter("mstar_spec_steps", "Verify steps of ended requests", registry=registry)
        self.queue = Histogram(
            "mstar_queue_seconds", "Arrival to admission", buckets=_SECONDS, registry=registry
        )
        self.ttft = Histogram(
            "mstar_ttft_seconds", "Arrival to the first token", buckets=_SECONDS, registry=registry
        )
        self.per_token = Histogram(
            "mstar_token_seconds",
            "Time a token after the first, mean of a request",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.ranks_lost = Counter(
            "mstar_mesh_failures", "Times that the ranks died, hung or gave up", registry=registry
        )
        self._live = Gauge("mstar_live_requests", "Requests without a terminal event yet", registry=registry)
        self._running = Gauge("mstar_running_requests", "Requests in the batch", registry=registry)
        self._waiting = Gauge(
            "mstar_waiting_requests", "Requests that wait for room in the engine", registry=registry
        )
        self._ready = Gauge("mstar_ready", "1 while a model is loaded and serves", registry=registry)

    def watch(
        self,
        live: Callable[[], float],
        running: Callable[[], float],
        waiting: Callable[[], float],
        ready: Callable[[], float],
    ) -> None:
        """Gauges ask these when they are read (from the server's thread)."""
        for gauge, source in (
            (self._live, live),
            (self._running, running),
            (self._waiting, waiting),
            (self._ready, ready),
        ):
            gauge.set_function(source)

    def request_ended(self, live: LiveRequest, event: Done | ErrorEvent) -> None:
        self.requests.labels(end_name(event)).inc()
        usage, timings = told(live, event)
        self._prompt.inc(usage.prompt_tokens)
        self._completion.inc(usage.completion_tokens)
        self._reasoning.inc(usage.reasoning_tokens)
        if live.spec.steps:
            self._drafted.inc(live.spec.drafted)
            self._accepted.inc(live.spec.accepted)
            self.spec_steps.inc(live.spec.steps)
        if timings.queue_ms is not None:
            self.queue.observe(timings.queue_ms / 1e3)
        if timings.ttft_ms is not None:
            self.ttft.observe(timings.ttft_ms / 1e3)
        if timings.decode_tok_s:
            self.per_token.observe(1 / timings.decode_tok_s)


class MetricsServer:
    """Serves `/metrics` from a thread of its own; `address` says where."""

    def __init__(self, metrics: Metrics, host_port: str) -> None:
        """Raises AddressError where the address cannot be bound."""
        wanted = parse_host_port(host_port)
        try:
            started = start_http_server(wanted.port, wanted.host, registry=metrics.registry)
        except OSError as error:
            raise AddressError(f"cannot serve metrics on {host_port}: {error.strerror or error}") from error
        self._server: WSGIServer = started[0]
        self._thread: threading.Thread = started[1]
        self.address = TcpAddress(wanted.host, self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
