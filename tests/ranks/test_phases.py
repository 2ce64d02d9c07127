"""The parts of a step are timed, and steps can be profiled into a file."""

from __future__ import annotations

import json

from mstar.ranks import trace as traces
from mstar.ranks.messages import EngineStats, QueryStats
from mstar.ranks.phases import KEPT, Phases
from tests.support.engines import checking, prompts


def test_a_report_has_percentiles_of_the_latest_steps_alone():
    phases = Phases()
    for _ in range(100):
        phases.add("plan", 5.0)
    for index in range(KEPT):
        phases.add("plan", (index + 1) * 1e-6)
    p50, p95, mean, count = phases.report()["plan"]
    assert count == KEPT
    assert abs(p50 - KEPT / 2) <= 1 and abs(p95 - 0.95 * KEPT) <= 1 and abs(mean - (KEPT + 1) / 2) < 0.1


def test_every_step_is_in_the_phases():
    bench = checking()
    bench.submit(0, prompts(1)[0], max_tokens=6)
    bench.run()
    phases = bench.stats().phases
    assert set(phases) == {"plan", "launch", "wait", "send"}
    assert all(figures[3] == bench.stats().steps for figures in phases.values())


def test_a_trace_is_answered_when_its_file_is_there(tmp_path):
    bench, path = checking(), tmp_path / "trace.json"
    path.touch()  # as the daemon makes it
    bench.submit(0, prompts(1)[0], max_tokens=10)
    bench.engine.step()
    bench.engine.handle(QueryStats(7, str(path), 3))
    assert not any(isinstance(event, EngineStats) for event in bench.events)
    bench.run()
    (stats,) = [event for event in bench.events if isinstance(event, EngineStats)]
    assert (stats.query_id, stats.trace_path) == (7, str(path))
    assert json.loads(path.read_text())["traceEvents"]
    assert path.stat().st_mode & 0o077 == 0


def test_a_trace_whose_file_is_gone_is_not_written(tmp_path):
    bench, path = checking(), tmp_path / "trace.json"
    bench.submit(0, prompts(1)[0], max_tokens=10)
    bench.engine.handle(QueryStats(7, str(path), 3))
    bench.run()
    (stats,) = [event for event in bench.events if isinstance(event, EngineStats)]
    assert stats.trace_path == "" and not path.exists()


def test_a_trace_without_steps_is_given_up_and_another_may_follow(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "ARMED_S", 0.0)
    bench = checking()
    bench.engine.handle(QueryStats(1, str(tmp_path / "a.json"), 3))
    bench.engine.handle(QueryStats(2, str(tmp_path / "b.json"), 3))
    answered = [(e.query_id, e.trace_path) for e in bench.events if isinstance(e, EngineStats)]
    assert answered == [(1, "")]
    bench.submit(0, prompts(1)[0], max_tokens=4)
    bench.run()
    answered = [(e.query_id, e.trace_path) for e in bench.events if isinstance(e, EngineStats)]
    assert answered == [(1, ""), (2, "")], "the steps came too late for the second one, too"
