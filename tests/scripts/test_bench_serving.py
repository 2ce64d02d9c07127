"""The serving benchmark: what its figures mean, on hand-made traces and a daemon of a few lines."""

import io
import json
import math
import threading

import msgpack
import pytest
import zmq
from click.testing import CliRunner
from rich.console import Console

from mstar.loader.config import parse_config
from mstar.scripts import bench_serving, serving_load
from mstar.scripts.make_checkpoint import make_config
from mstar.scripts.serving_floor import add_floors, served_config
from mstar.scripts.serving_load import (
    BenchError,
    DaemonLink,
    Run,
    Trace,
    Workload,
    closed_loop,
    make_prompts,
    parse_workload,
)
from mstar.scripts.serving_report import Results, describe_machine, plot, print_report, summarise
from mstar.scripts.step_floor import StepShape, step_floor_s
from mstar.scripts.transformers_peer import Cell


class FakeDaemon(threading.Thread):
    """Answers the requests that it has as soon as no more come, so that a closed loop fills up first."""

    def __init__(self, address, answer):
        super().__init__(daemon=True)
        self.answer = answer
        self.pongs = True
        self.live_at_most = 0
        self.seen = []
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(address)
        self._over = threading.Event()

    def run(self):
        live = []
        while not self._over.is_set():
            if self._socket.poll(20 if live else 100):
                peer, data = self._socket.recv_multipart()
                message = msgpack.unpackb(data)
                if message["type"] == "ping" and self.pongs:
                    self._socket.send_multipart([peer, msgpack.packb({"type": "pong"})])
                if message["type"] == "generate":
                    self.seen.append(message)
                    live.append((peer, message))
                    self.live_at_most = max(self.live_at_most, len(live))
                continue
            for peer, message in live:
                for event in self.answer(message):
                    keys = {"id": message["id"], "attempt_id": message["attempt_id"]}
                    self._socket.send_multipart([peer, msgpack.packb(keys | event)])
            live.clear()
        self._socket.close(0)

    def end(self):
        self._over.set()
        self.join(5)


@pytest.fixture
def serve(tmp_path):
    """A link to a fake daemon with the given way to answer, and the daemon."""
    opened = []

    def start(answer):
        address = f"ipc://{tmp_path}/z"
        daemon = FakeDaemon(address, answer)
        daemon.start()
        link = DaemonLink(address)
        opened.extend([link.close, daemon.end])
        return link, daemon

    yield start
    for close in opened:
        close()


def whole_answer(message):
    count = message["max_tokens"]
    yield {"type": "gen_start", "prompt_tokens": len(message["prompt_ids"])}
    for token in range(count):
        yield {"type": "token", "text": "", "ids": [token]}
    yield {"type": "done", "usage": {"completion_tokens": count}}


def test_closed_loop_keeps_its_concurrency_and_serves_every_prompt_once(serve):
    link, daemon = serve(whole_answer)
    prompts = make_prompts(Workload("w", 3, 5), 7, vocab=100, seed=1)
    run = closed_loop(link, prompts, 5, concurrency=3)
    assert daemon.live_at_most == 3
    assert sorted(m["prompt_ids"] for m in daemon.seen) == sorted(prompts)
    assert all(m["ignore_eos"] and m["max_tokens"] == 5 for m in daemon.seen)
    assert [trace.tokens for trace in run.traces] == [5] * 7
    assert run.figures()["failures"] == 0


def test_errors_and_short_answers_are_failures_and_do_not_stop_the_rest(serve):
    def answer(message):
        number = int(message["id"].rsplit("-", 1)[1])
        if number == 1:
            return [{"type": "error", "class": "overloaded", "message": "full"}]
        if number == 2:
            return [*list(whole_answer(message))[:-2], {"type": "done", "usage": {"completion_tokens": 4}}]
        return whole_answer(message)

    link, _ = serve(answer)
    run = closed_loop(link, [[1]] * 6, 5, concurrency=2)
    assert run.figures()["failures"] == 2
    assert run.figures()["requests"] == 6
    assert run.failures() == ["overloaded: full", "5 tokens asked for, 4 counted, 4 received"]


@pytest.mark.parametrize(("alive", "message"), [(True, "heard nothing"), (False, "is gone")])
def test_daemon_that_does_not_answer_is_an_error_and_not_a_wait_for_ever(serve, monkeypatch, alive, message):
    monkeypatch.setattr(serving_load, "PING_EVERY_S", 0.02)
    monkeypatch.setattr(serving_load, "LOST_S", 0.5)
    link, daemon = serve(lambda message: [])
    daemon.pongs = alive
    with pytest.raises(BenchError, match=message):
        closed_loop(link, [[1]], 5, 1, timeout_s=1.0)


def test_figures_are_those_of_the_traces():
    steady = Trace(0.0, [(0.1, 1), (0.11, 1), (0.12, 1), (0.13, 1)], ended=0.13)
    stalled = Trace(0.0, [(0.2, 1), (0.22, 2), (0.3, 1)], ended=0.3)
    figures = Run([steady, stalled], client_cpu_s=0.03).figures()
    assert figures["tok_s"] == pytest.approx(8 / 0.3)
    assert figures["ttft_p50_ms"] == pytest.approx(150)
    assert figures["itl_p50_ms"] == pytest.approx(10), "an event of two tokens is two gaps of half its time"
    assert figures["e2e_p50_ms"] == pytest.approx(215)
    assert figures["stalls"] == 1
    assert figures["client_cpu_pct"] == pytest.approx(10)


def test_run_of_failures_alone_still_has_figures():
    figures = Run([Trace(0.0, ended=1.0, failure="rank_lost: gone")]).figures()
    assert (figures["tok_s"], figures["failures"]) == (0, 1)
    assert math.isnan(figures["ttft_p50_ms"])


def test_prompts_are_seeded_different_and_below_the_special_ids():
    shape = Workload("w", 50, 1)
    prompts = make_prompts(shape, 20, vocab=6144, seed=3)
    assert prompts == make_prompts(shape, 20, vocab=6144, seed=3)
    assert prompts != make_prompts(shape, 20, vocab=6144, seed=4)
    assert len({tuple(prompt) for prompt in prompts}) == 20
    assert max(map(max, prompts)) < 6137


def test_workloads_have_names_or_sizes():
    assert parse_workload("long-1k") == Workload("long-1k", 1024, 256)
    assert parse_workload("2000:8") == Workload("2000:8", 2000, 8)
    for text in ("nothing", "5", "0:3", "a:b", "5:"):
        with pytest.raises(BenchError, match="IN:OUT"):
            parse_workload(text)


def test_one_launch_is_summarised_over_its_runs_and_several_over_their_medians():
    runs = [[{"x": 1.0}, {"x": 9.0}, {"x": 2.0}], [{"x": 4.0}, {"x": 5.0}, {"x": 60.0}]]
    assert summarise(runs[:1])["x"] == {"median": 2.0, "min": 1.0, "max": 9.0}
    assert summarise(runs)["x"] == {"median": 3.5, "min": 2.0, "max": 5.0}


def results_of(speeds):
    """One request of 11 tokens for each system; `speeds` are seconds a token."""
    results = Results()
    for system, gap in speeds.items():
        arrivals = [(gap * (i + 1), 1) for i in range(11)]
        results.add(Workload("w", 1, 11), 1, system, 0, Run([Trace(0.0, arrivals, arrivals[-1][0])]))
    return results


def test_comparison_is_against_the_best_other_cell():
    (point,) = results_of({"mstar": 0.01, "slow": 0.09, "best": 0.02}).comparison("mstar")
    assert point["tok_s_best"] == point["ttft_best"] == "best"
    assert point["tok_s_ratio"] == pytest.approx(2)
    assert point["ttft_ratio"] == pytest.approx(2)


def test_plot_is_a_png(tmp_path):
    results = results_of({"mstar": 0.01, "peer": 0.02})
    report = {
        "results": results.rows(),
        "model": {"name": "m", "dtype": "bf16", "tp": 1},
        "machine": {"cpu": "c"},
    }
    plot(report, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_concurrencies_are_positive_numbers():
    assert bench_serving._parse_counts("1,4,16") == [1, 4, 16]
    for text in ("", "0", "1,x", "-2"):
        with pytest.raises(BenchError, match="concurrency"):
            bench_serving._parse_counts(text)


GPU = {"model": "m", "device": "NVIDIA H200", "dtype": "bf16", "tp": 1, "fingerprint": "f" * 64}


def served(workload, concurrency, gap_s, drafts=0):
    """Rows of one point at which every token but the first came `gap_s` after the one before it."""
    arrivals = [(1 + gap_s * i, 1) for i in range(workload.output_tokens)]
    done = {"spec": {"steps": 1, "drafted": drafts, "accepted": 0}}
    results = Results()
    results.add(workload, concurrency, "mstar", 0, Run([Trace(0.0, arrivals, arrivals[-1][0], done=done)]))
    return results.rows()


def config_27b():
    return parse_config(make_config("27B"), {}, {})


@pytest.mark.parametrize(("prompt", "concurrency"), [(512, 1), (8192, 1), (8192, 64)])
def test_rows_of_a_gpu_have_the_floor_of_their_step(prompt, concurrency):
    rows = served(Workload("w", prompt, 256), concurrency, 0.02)
    add_floors(rows, GPU, config_27b(), "mstar")
    (row,) = rows
    floor_ms = 1e3 * step_floor_s(config_27b(), StepShape(concurrency, prompt + 128, "bf16"))
    assert row["floor_ms"] == pytest.approx(floor_ms)
    assert row["ms_per_token"]["median"] == pytest.approx(20)
    assert row["floor_ratio"] == pytest.approx(20 / floor_ms)


def test_there_is_no_floor_for_cpus_peers_chats_and_drafts():
    shape = Workload("w", 512, 256)
    for rows, loaded, config, system in (
        (served(shape, 1, 0.02), {**GPU, "device": "cpu (2 threads a rank)"}, config_27b(), "mstar"),
        (served(shape, 1, 0.02), GPU, None, "mstar"),
        (served(shape, 1, 0.02), GPU, config_27b(), "another"),
    ):
        add_floors(rows, loaded, config, system)
        assert "floor_ms" not in rows[0]
    chat = Workload("battery", 0, 256, chat=True)
    for rows in (served(chat, 1, 0.02), served(shape, 1, 0.02, drafts=3)):
        add_floors(rows, GPU, config_27b(), "mstar")
        assert rows[0]["floor_ms"] is rows[0]["floor_ratio"] is None


@pytest.mark.parametrize("gpu", [True, False])
def test_the_table_has_the_floors_of_a_gpu_alone(gpu):
    rows = [row for count in (1, 4) for row in served(Workload("512:256", 512, 256), count, 0.025)]
    rows += served(Workload("battery", 0, 16, chat=True), 1, 0.025)
    loaded = GPU if gpu else {**GPU, "device": "cpu (2 threads a rank)"}
    add_floors(rows, loaded, config_27b(), "mstar")
    report = {
        "model": {"name": "m", **loaded},
        **describe_machine([]),
        "planted": 0.7,
        "results": rows,
        "comparison": [],
    }
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(report, console)
    text = console.export_text()
    assert ("x floor" in text) is ("4.2 TB/s" in text) is gpu
    assert "PLANTED" in text
    if gpu:
        floor_ms = 1e3 * step_floor_s(config_27b(), StepShape(1, 640, "bf16"))
        assert f"{floor_ms:.3f}" in text and f"{25 / floor_ms:.2f}" in text and "25.000" in text


def test_a_long_prompt_over_a_large_vocabulary_is_made_and_served(serve):
    link, daemon = serve(whole_answer)
    requests = serving_load.make_requests(parse_workload("8192:256"), 4, 248_320, 1)
    run = serving_load.serve(link, requests, 4)
    assert run.figures()["failures"] == 0
    assert [len(message["prompt_ids"]) for message in daemon.seen] == [8192] * 4
    assert max(max(message["prompt_ids"]) for message in daemon.seen) > 200_000


def test_a_model_elsewhere_has_no_config_here(tmp_path):
    assert served_config("builtin:tiny") is not None
    assert served_config("Qwen/Qwen3.5-0.8B") is None, "nothing is fetched for a column"
    assert served_config(str(tmp_path)) is None


@pytest.mark.slow
def test_small_run_of_a_real_daemon_against_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_serving, "CELLS", [Cell("bf16", 1)])
    json_path, png_path = tmp_path / "r.json", tmp_path / "r.png"
    arguments = ["--workload", "12:6", "--concurrency", "1,2", "--runs", "1", "--rounds", "1"]
    arguments += ["--compare", "transformers", "--json", str(json_path), "--plot", str(png_path)]
    daemon_flags = ["--device", "cpu", "--threads", "1", "--max-num-seqs", "2", "--max-seq", "128"]
    ran = CliRunner().invoke(bench_serving.main, [*arguments, "--", *daemon_flags])
    assert ran.exit_code == 0, ran.output
    report = json.loads(json_path.read_text())
    assert [(row["system"], row["concurrency"]) for row in report["results"]] == [
        ("mstar", 1),
        ("transformers bf16 1t", 1),
        ("mstar", 2),
        ("transformers bf16 1t", 2),
    ]
    for row in report["results"]:
        assert row["failures"]["max"] == 0 and row["errors"] == []
        assert row["tok_s"]["median"] > 0
    assert [point["concurrency"] for point in report["comparison"]] == [1, 2]
    assert len(report["model"]["fingerprint"]) == 64
    assert report["versions"]["torch"] and report["versions"]["mstar"]
    assert report["machine"]["daemon_flags"] == daemon_flags
    assert png_path.read_bytes().startswith(b"\x89PNG")
