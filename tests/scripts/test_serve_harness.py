"""The harness: what is wrong with an answer, prompts of a file, and its lines and exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from mstar.scripts import serve_harness
from mstar.scripts.harness_checks import is_attractor, md5_of, missing_substrings, repeated_share
from mstar.scripts.harness_prompts import BUILT_IN, PromptsError, read_prompts
from mstar.scripts.serving_daemon import running_process

WORDS = [f"w{i}" for i in range(1000)]


@pytest.mark.parametrize("flags", [["--bind", "ipc:///tmp/x"], ["--line=off"], ["--tp", "1", "--stdio"]])
def test_flags_that_would_hide_the_daemon_from_its_script_are_refused(flags):
    refused = CliRunner().invoke(serve_harness.main, ["--", *flags])
    own = next(flag for flag in flags if flag.startswith(("--bind", "--line", "--stdio")))
    assert refused.exit_code == 2
    assert f"has sockets of its own: leave {own} out" in refused.output


def text(words):
    return " ".join(words)


@pytest.mark.parametrize(
    ("words", "loops"),
    [
        (["ha"] * 23, False),
        (["ha"] * 24, True),
        (WORDS[:200], False),
        # 19 of the first 128 are different ones: 14.8 %; 20 are 15.6 %
        ((WORDS[:19] * 7)[:128] + WORDS[200:500], True),
        ((WORDS[:20] * 7)[:128] + WORDS[200:500], False),
        # one word is 65 of the first 128; 64 are half, not more
        (["x"] * 65 + WORDS[:63] + WORDS[200:500], True),
        (["x"] * 64 + WORDS[:64] + WORDS[200:500], False),
        # 38 of the last 128 are different ones: 29.7 %; 39 are 30.5 %
        (WORDS[200:600] + (WORDS[:38] * 4)[:128], True),
        (WORDS[200:600] + (WORDS[:39] * 4)[:128], False),
        (WORDS[:400] + ["x"] * 65 + WORDS[400:463], True),
        # 3-grams of the second half alone
        (WORDS[:300] + WORDS[500:600] * 3, True),
        (WORDS[500:600] * 3 + WORDS[:300], False),
    ],
)  # fmt: skip
def test_attractors_are_what_the_rules_say(words, loops):
    assert is_attractor(text(words)) is loops


def test_repeated_share_counts_all_but_first_occurrences():
    assert repeated_share(["a", "b", "c", "a", "b", "c"]) == pytest.approx(0.25)
    assert repeated_share(["a", "b"]) == 0


def test_substrings_are_looked_for_whatever_their_case():
    assert missing_substrings("The Tilt of its axis", ["tilt", "sun"]) == ["sun"]


def test_md5_of_a_map_does_not_depend_on_its_order():
    assert md5_of({"a": 1, "b": "é"}) == md5_of({"b": "é", "a": 1}) != md5_of({"a": 1})
    assert md5_of("") == "d41d8cd98f00b204e9800998ecf8427e"


def test_prompts_file_replaces_the_prompts(tmp_path):
    file = tmp_path / "p.json"
    file.write_text(json.dumps([{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}]))
    (prompt,) = read_prompts(file)
    assert (prompt.messages[0]["content"], prompt.max_tokens, prompt.expected_substrings) == ("hi", 7, [])


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({}, "a list of prompts"),
        ([], "one prompt at least"),
        ([{"messages": []}], r"\[0\].messages"),
        ([{"messages": [{}], "expected": []}], "unknown field 'expected'"),
        ([{"messages": [{}], "max_tokens": True}], "max_tokens"),
        ([{"messages": [{}], "expected_substrings": [""]}], "expected_substrings"),
    ],
)
def test_prompts_files_are_refused_by_field(tmp_path, entries, named):
    file = tmp_path / "p.json"
    file.write_text(json.dumps(entries))
    with pytest.raises(PromptsError, match=named):
        read_prompts(file)


class FakeLineDaemon(threading.Thread):
    """Answers status, and each generate with the next of `answers`: a list of events without keys."""

    def __init__(self, path, answers):
        super().__init__(daemon=True)
        self.answers = iter(answers)
        self.requests = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()

    def run(self):
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rwb") as stream:
            for line in stream:
                message = json.loads(line)
                keys = {}
                if message["type"] == "status":
                    spec = {"mtp": True, "k": 3, "draft_head": "bf16", "reason": None}
                    loaded = {"model": "m", "fingerprint": "f" * 64, "dtype": "bf16", "tp": 2, "spec": spec}
                    events = [{"type": "status", "state": "ready", "loaded": loaded | {"device": "cpu"}}]
                else:
                    self.requests.append(message)
                    keys = {"id": message["id"], "attempt_id": message["attempt_id"]}
                    events = next(self.answers)
                for event in events:
                    if event is None:
                        return
                    stream.write(json.dumps(keys | event).encode() + b"\n")
                stream.flush()
        self._listener.close()


def answer(visible, finish="stop", thinking=""):
    spec = {
        "mtp": True,
        "k": 3,
        "steps": 10,
        "drafted": 30,
        "accepted": 25,
        "tau": 2.5,
        "tokens_per_step": 3.5,
    }
    return [
        {"type": "gen_start", "prompt_tokens": 20, "cached_tokens": 0},
        *([{"type": "reasoning", "text": thinking}] if thinking else []),
        {"type": "token", "text": visible},
        {
            "type": "done",
            "finish_reason": finish,
            "usage": {"completion_tokens": 36},
            "open_think": False,
            "timings": {"prefill_tok_s": 1000.0, "decode_tok_s": 300.0},
            "spec": spec,
        },
    ]


GOOD = [answer(text(prompt.expected_substrings)) for prompt in BUILT_IN]


def harness(tmp_path, answers, *arguments):
    daemon = FakeLineDaemon(tmp_path / "line", answers)
    daemon.start()
    result = CliRunner().invoke(
        serve_harness.main, [*arguments, "--connect", f"unix:{tmp_path}/line", "--timeout-s", "5"]
    )
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return result.exit_code, lines, daemon.requests


def test_good_answers_give_a_line_each_and_a_summary(tmp_path):
    code, (*rows, summary), requests = harness(tmp_path, GOOD, "--request", '{"spec": {"mtp": "off"}}')
    assert code == 0 and len(rows) == 5
    for row, request in zip(rows, requests, strict=True):
        assert (row["finish"], row["gen"], row["ctx"], row["cached"]) == ("stop", 36, 20, 0)
        assert (row["tau"], row["tokens_per_step"], row["prefill_tok_s"]) == (2.5, 3.5, 1000.0)
        assert row["saw_done"] and row["ttft_ms"] > 0 and row["retrieval_missing"] == []
        assert not (row["attractor"] or row["empty"] or row["runaway"] or row["open_think"])
        assert row["content_md5"] == md5_of(row["assistant_content"])
        assert request["spec"] == {"mtp": "off"} and len(request["messages"]) == 1
    assert len({row["request_md5"] for row in rows}) == len({row["prompt_md5"] for row in rows}) == 5
    assert (summary["stops"], summary["failed"], summary["tau"]) == (5, 0, 2.5)
    assert summary["fingerprint"] == "f" * 64 and summary["load"]["tp"] == 2


def test_chain_feeds_visible_answers_back(tmp_path):
    answers = [answer(text(prompt.expected_substrings), thinking="hm") for prompt in BUILT_IN]
    code, (*rows, _), requests = harness(tmp_path, answers, "--mode", "chain")
    assert code == 0
    assert [len(request["messages"]) for request in requests] == [1, 3, 5, 7, 9]
    assert requests[1]["messages"][1] == {"role": "assistant", "content": rows[0]["assistant_content"]}
    assert "hm" not in rows[0]["assistant_content"]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (answer("def return " + "again " * 200), "attractor"),
        (answer("def return", thinking="again " * 200), "attractor"),
        (answer("  \n"), "empty"),
        (answer("no code here"), "retrieval_missing"),
        ([{"type": "error", "class": "rank_lost", "message": "gone"}], "failure"),
    ],
)
def test_a_bad_answer_fails_the_run_and_the_others_are_still_asked(tmp_path, bad, named):
    code, (*rows, summary), _ = harness(tmp_path, [bad, *GOOD[1:]])
    assert code == 1 and len(rows) == 5 and summary["failed"] == 1
    assert rows[0][named] and not any(row[named] for row in rows[1:])


def test_a_lost_daemon_is_a_missing_terminal_event(tmp_path):
    code, (*rows, summary), _ = harness(tmp_path, [[GOOD[0][0], None]])
    assert code == 1 and summary["failed"] == 5
    assert not rows[0]["saw_done"] and rows[0]["finish"] is None


def test_a_runaway_alone_does_not_fail(tmp_path):
    code, (*rows, summary), _ = harness(tmp_path, [answer("def return", finish="length"), *GOOD[1:]])
    assert code == 0 and rows[0]["runaway"] and summary["runaways"] == 1


def test_no_daemon_is_another_exit_code(tmp_path):
    result = CliRunner().invoke(serve_harness.main, ["--connect", f"unix:{tmp_path}/nobody"])
    assert result.exit_code == serve_harness.NO_DAEMON


def test_sigterm_while_a_process_is_being_ended_is_not_forgotten():
    slow = "import signal, time; signal.signal(15, lambda *_: None); print(flush=True); time.sleep(0.5)"
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(SystemExit) as left,
        running_process([sys.executable, "-c", slow], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()  # from now on it takes half a second to end
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert left.value.code == 128 + signal.SIGTERM
    assert process.returncode == 0 and signal.getsignal(signal.SIGTERM) == before
    process.stdout.close()
