"""Arms of the serving benchmark: figures of steps, ratios to plain, and passes that must be equal."""

import pytest
from click.testing import CliRunner

from mstar.scripts import bench_arms, bench_serving
from mstar.scripts.arms import parse_arms
from mstar.scripts.bench_arms import ArmCell, ArmPlan, arm_rows, arms_failed, measure_arms
from mstar.scripts.serving_load import Run, Trace, Workload, make_requests
from mstar.scripts.serving_report import Results


def trace(ids, seconds, steps=0, drafted=0, accepted=0, decode_ms=100.0):
    arrivals = [(seconds * (i + 1) / len(ids), 1) for i in range(len(ids))]
    spec = {"steps": steps, "drafted": drafted, "accepted": accepted}
    done = {"spec": spec, "timings": {"decode_ms": decode_ms}}
    return Trace(0.0, arrivals, seconds, ids=list(ids), done=done)


def test_figures_of_steps_are_the_daemons_counts():
    run = Run([trace(range(11), 1.0, steps=4, drafted=12, accepted=6), trace(range(5), 1.0, 1, 3, 3)])
    figures = run.figures()
    assert figures["tokens_per_step"] == pytest.approx(1 + 9 / 5)
    assert figures["drafts_per_step"] == pytest.approx(3)
    assert figures["ms_per_step"] == pytest.approx(40)


def test_a_plain_token_is_a_step_but_for_the_first():
    figures = Run([trace(range(11), 1.0)]).figures()
    assert (figures["tokens_per_step"], figures["ms_per_step"]) == (1.0, pytest.approx(10))


def test_the_battery_comes_in_turn_and_fixed_shapes_ignore_the_end():
    battery = make_requests(Workload("battery", 0, 64, chat=True), 6, vocab=100, seed=1)
    assert battery[0] == battery[5] and "ignore_eos" not in battery[0]
    assert len({str(request["messages"]) for request in battery}) == 5
    fixed = make_requests(Workload("w", 3, 5), 2, vocab=100, seed=1)
    assert all(request["ignore_eos"] and request["max_tokens"] == 5 for request in fixed)


def test_rows_have_ratios_to_plain_and_say_which_answers_are_plains():
    results, shape = Results(), Workload("w", 1, 4)
    for arm, seconds in (("plain", 1.0), ("mtp3", 0.5)):
        for _ in range(2):
            results.add(shape, 1, arm, 0, Run([trace(range(4), seconds), trace(range(4), seconds)]))
    cells = [
        ArmCell("w", 1, "plain", 0, True, [[1, 2], [3]]),
        ArmCell("w", 1, "mtp3", 3, False, [[1, 2], [4]]),
    ]
    plain, spec = arm_rows(results, cells)
    assert (plain["ratio"], spec["ratio"]) == (1.0, pytest.approx(2))
    assert (plain["equal_to_plain"], spec["equal_to_plain"], spec["answers"]) == (2, 1, 2)
    assert (plain["k"], spec["k"]) == (0, 3)
    assert arms_failed({"results": [spec]}) and not arms_failed({"results": [plain]})


def test_arms_take_turns_on_daemons_of_their_own_and_passes_are_compared(monkeypatch):
    launched, served = [], []

    class Daemon:
        def __init__(self, model, flags):
            launched.append(" ".join(flags))

        def __enter__(self):
            return None, {"vocab": 100, "spec": {"k": 1}}

        def __exit__(self, *_):
            return None

    def serve(link, requests, concurrency):
        served.append(len(requests))
        last = len(launched) == 4 and len(served) % 3 == 0
        return Run([trace([1, 2 + last], 1.0) for _ in requests])

    monkeypatch.setattr(bench_arms, "launched_daemon", Daemon)
    monkeypatch.setattr(bench_arms, "serve", serve)
    plan = ArmPlan([(Workload("w", 1, 2), 2)], parse_arms("plain,mtp1"), 2, 2, 2, 0, least_requests=3)
    results, cells = measure_arms("m", plan, ["--tp", "2"], lambda _: None)
    assert launched == ["--mtp off --tp 2", "--mtp on --mtp-k 1 --tp 2"] * 2
    assert served == [2, 4, 4] * 4
    assert [(cell.arm, cell.passes_equal) for cell in cells] == [("plain", True), ("mtp1", False)]
    assert [len(row["launches"]) for row in results.rows()] == [2, 2]


def test_arms_refuse_what_they_do_not_go_with():
    for options in (["--connect", "tcp://127.0.0.1:1"], ["--runs", "1"], ["--compare", "transformers"]):
        result = CliRunner().invoke(bench_serving.main, ["--arms", "plain,mtp1", *options])
        assert result.exit_code == 2 and "--arms takes" in result.output
    assert CliRunner().invoke(bench_serving.main, ["--arms", "mtp99"]).exit_code == 1
