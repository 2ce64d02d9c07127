"""Prometheus text on a loopback port, from a registry that no other daemon shares."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mstar.daemon.addresses import AddressError
from mstar.daemon.metrics import Metrics, MetricsServer
from mstar.daemon.protocol import Done, ErrorEvent, Generate
from mstar.daemon.registry import Registry
from mstar.daemon.speculation import SpecCounts
from tests.daemon.test_registry import FakePeer


def values(server: MetricsServer) -> dict[str, float]:
    url = f"http://{server.address.host}:{server.address.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name + "".join(f"|{value}" for value in sample.labels.values())] = sample.value
    return found


def test_ended_requests_are_counted_and_gauges_are_read_when_asked() -> None:
    metrics = Metrics()
    live_now = 3
    metrics.watch(live=lambda: live_now, running=lambda: 2, waiting=lambda: 1, ready=lambda: 1)
    registry = Registry(10, metrics.request_ended)
    live = registry.add(Generate(id="a", attempt_id=0, prompt="x"), FakePeer(), 0.0)
    live.spec = SpecCounts(3, steps=4, drafted_by_depth=[4, 3, 2], accepted_by_depth=[3, 2, 0])
    live.prompt_tokens, live.started_at, live.first_token_at = 7, 0.5, 0.75
    registry.end(live, Done("a", 0, "length", live.usage(), False, live.timings()))
    live = registry.add(Generate(id="a", attempt_id=1, prompt="x"), FakePeer(), 0.0)
    registry.end(live, ErrorEvent("deadline", "late", id="a", attempt_id=1))
    server = MetricsServer(metrics, "127.0.0.1:0")
    try:
        found = values(server)
        assert found["mstar_requests_total|length"] == 1
        assert found["mstar_requests_total|error.deadline"] == 1
        assert found["mstar_tokens_total|prompt"] == 7
        assert found["mstar_ttft_seconds_sum"] == 0.75
        assert (found["mstar_spec_drafts_total|drafted"], found["mstar_spec_drafts_total|accepted"]) == (9, 5)
        assert found["mstar_spec_steps_total"] == 4
        assert (found["mstar_live_requests"], found["mstar_ready"]) == (3, 1)
        live_now = 5
        assert values(server)["mstar_live_requests"] == 5
        with pytest.raises(AddressError, match="cannot serve metrics"):
            MetricsServer(Metrics(), f"127.0.0.1:{server.address.port}")
    finally:
        server.close()
