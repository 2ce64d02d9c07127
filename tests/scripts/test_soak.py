"""The soak: what it counts as broken, on hand-made events, and a short run of it against a real daemon."""

import json

import psutil
import pytest
from click.testing import CliRunner

from mstar.scripts import soak
from mstar.scripts.soak import Memory
from mstar.scripts.soak_traffic import Ask, Draw, Ledger, Shape

MIB = 2**20


def booked(*events, **fields):
    """A ledger with one request, `r`, that got these events."""
    ledger = Ledger()
    ask = Ask({"type": "generate", "id": "r", "attempt_id": 0, "max_tokens": 4, **fields})
    ledger.open(ask, 0.0)
    for event in events:
        ledger.take({"id": "r", "attempt_id": 0, **event})
    return ledger, ask


START = {"type": "gen_start"}
TOKEN = {"type": "token", "text": "a", "ids": [1]}


def done(reason="stop", completion=1):
    usage = {"prompt_tokens": 1, "completion_tokens": completion, "reasoning_tokens": 0}
    return {"type": "done", "finish_reason": reason, "usage": usage}


def error(kind):
    return {"type": "error", "class": kind, "message": "m"}


def test_request_that_ends_once_is_no_problem():
    ledger, ask = booked(START, TOKEN, done())
    assert (ledger.problems, ledger.unended(), ask.ends) == ([], [], ["stop"])
    assert ledger.counts() == {"stop": 1}


@pytest.mark.parametrize(
    ("events", "fields", "problem"),
    [
        ([START, done(), done()], {}, "after its end"),
        ([START, done(), TOKEN], {}, "after its end"),
        ([START, done(), error("internal")], {}, "after its end"),
        ([TOKEN, done()], {}, "before gen_start"),
        ([START, START, done()], {}, "started twice"),
        ([START, error("internal")], {}, "internal"),
        ([START, error("deadline")], {}, "deadline"),
        ([START, error("overloaded")], {}, "overloaded"),
        ([START, done("abort")], {}, "nobody aborted"),
        ([START, done("length", 5)], {}, "4 asked for"),
        ([START, done("length", 3)], {}, "length after 3"),
        ([START, TOKEN, TOKEN, done("stop", 1)], {"return_ids": True}, "2 ids came"),
        ([{"type": "loaded"}], {}, "no event of a generation"),
    ],
)
def test_broken_promise_is_a_problem(events, fields, problem):
    ledger, _ = booked(*events, **fields)
    assert any(problem in text for text in ledger.problems), ledger.problems
    assert ledger.broken == len(ledger.problems)


def test_request_without_an_end_is_told_unless_its_connection_was_cut():
    ledger, ask = booked(START, TOKEN)
    assert ledger.unended() == [ask]
    ledger.orphan([ask])
    assert (ledger.unended(), ledger.counts()) == ([], {"cut off": 1})


def test_event_of_a_request_that_nobody_sent_is_a_problem():
    ledger, _ = booked({"type": "token", "id": "other", "text": ""})
    assert "no request" in ledger.problems[0]


def test_draws_repeat_with_their_seed_and_cover_the_protocol():
    shape = Shape(longest=300)
    first, second, other = (Draw(seed, shape).ask() for seed in ("1", "1", "2"))
    assert first == second != other
    draw = Draw("cover", shape)
    asks = [draw.ask() for _ in range(600)]
    assert len({ask.key for ask in asks}) == 600
    assert 0.25 < sum(ask.abort_at is not None for ask in asks) / 600 < 0.42
    assert {ask.abort_at for ask in asks} == {None, "at once", "started", "streaming", "later"}
    fields = {name for ask in asks for name in ask.message}
    assert {"prompt", "messages", "prompt_ids", "temperature", "stop", "logprobs", "deadline_ms"} <= fields
    assert {"max_think_tokens", "repetition_penalty", "seed", "thinking"} <= fields
    lengths = [len(ask.message["prompt_ids"]) for ask in asks if "prompt_ids" in ask.message]
    assert min(lengths) < 10 and 200 < max(lengths) <= 300


@pytest.mark.parametrize(("growth", "over"), [(0, False), (20, False), (400, True)])
def test_growth_is_between_the_medians_of_the_first_and_last_third(growth, over):
    ramp = [10 * MIB] * 6
    steady = [(100 + growth * i // 29) * MIB for i in range(30)]
    report = Memory("rank 0", psutil.Process(), ramp + steady).report()
    assert report["growth_bytes"] >= 0
    assert (report["growth_bytes"] > report["bound_bytes"]) == over


def test_few_samples_say_nothing_about_growth():
    assert Memory("rank 0", psutil.Process(), [MIB] * 5).report()["growth_bytes"] is None


def test_short_soak_of_a_real_daemon_is_good(tmp_path):
    path = tmp_path / "soak.json"
    arguments = ["--clients", "4", "--seconds", "3", "--seed", "5", "--longest", "400", "--json", str(path)]
    flags = ["--device", "cpu", "--threads", "1", "--max-seq", "512", "--max-num-seqs", "4"]
    ran = CliRunner().invoke(soak.main, [*arguments, "--", *flags])
    assert ran.exit_code == 0, ran.output
    report = json.loads(path.read_text())
    assert (report["verdict"], report["problems"]) == ("good", [])
    assert report["requests"] >= 4 and sum(report["ends"].values()) == report["requests"]
    assert set(report["memory"]) == {"daemon", "rank 0"}
    unknown = any(entry["growth_bytes"] is None for entry in report["memory"].values())
    assert unknown and "memory was not compared" in ran.output  # three seconds are too few
    assert report["stats_after"]["blocks"]["used"] == 0
