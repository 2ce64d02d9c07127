"""`mstar` against a scripted daemon: what goes to stdout and stderr, and the exit codes."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from mstar.daemon.client_cli import main
from tests.support.scripted_daemon import ScriptedDaemon

COMMAND = [sys.executable, "-m", "mstar.daemon.client_cli"]


@pytest.fixture
def daemon():
    with ScriptedDaemon() as fake:
        yield fake


@pytest.fixture
def mstar(daemon):
    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(main, ["--connect", daemon.address, *arguments], input=stdin)

    return run


def run_in_terminal(*arguments: str, env: dict[str, str] | None = None) -> str:
    """What the command writes to a terminal that is its stdout and stderr."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=slave, stderr=slave, env={**os.environ, **(env or {})}
    )
    os.close(slave)
    written = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while block := os.read(master, 65536):
            written += block
    os.close(master)
    assert process.wait(30) == 0, written
    return written.decode()


def test_generate_streams_text_to_stdout_and_figures_to_stderr(mstar, daemon):
    result = mstar(
        "generate", "one two", "--temperature", "0.5", "--stop", "x", "--stop", "y", "--mtp", "off"
    )
    assert (result.exit_code, result.stdout) == (0, "one two \n")
    assert "3 prompt + 2 tokens (1 thinking), ttft 12 ms, 100.0 tok/s, finish: stop" in result.stderr
    (sent,) = daemon.wait_for("generate")
    del sent["id"]
    assert sent == {
        "type": "generate", "attempt_id": 0, "prompt": "one two", "temperature": 0.5, "stop": ["x", "y"],
        "spec": {"mtp": "off"},
    }  # fmt: skip


def test_generate_reads_stdin_where_there_is_no_prompt(mstar):
    assert mstar("generate", "-q", stdin="from stdin").stdout == "from stdin \n"
    assert mstar("generate", "-", "-q", stdin="from stdin").stdout == "from stdin \n"


def test_quiet_keeps_stderr_empty(mstar):
    for arguments in (("generate", "-q", "think"), ("load", "-q", "m"), ("chat", "-q")):
        result = mstar(*arguments, stdin="think\n")
        assert (result.exit_code, result.stderr) == (0, "")


def test_thinking_stays_out_of_a_stdout_that_is_no_terminal(mstar):
    result = mstar("generate", "think")
    assert result.stdout == "think \n" and "hm" in result.stderr


def test_template_options_make_the_prompt_a_message(mstar, daemon):
    mstar("generate", "a", "--system", "be brief", "--no-thinking")
    mstar("generate", "b", "--chat")
    first, second = daemon.wait_for("generate", 2)
    assert first["messages"] == [{"role": "user", "content": "a"}] and "prompt" not in first
    assert first["system"] == "be brief" and first["thinking"] is False
    assert second["messages"] == [{"role": "user", "content": "b"}]


def test_json_prints_the_raw_events_one_a_line(mstar):
    result = mstar("generate", "--json", "--id", "me", "think")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [e["type"] for e in events] == ["gen_start", "reasoning", "token", "done"]
    assert {e["id"] for e in events} == {"me"}
    result = mstar("load", "--json", "m")
    assert [json.loads(line)["type"] for line in result.stdout.splitlines()][-2:] == [
        "load_progress",
        "loaded",
    ]
    result = mstar("generate", "--json", "fail")
    assert result.exit_code == 1 and json.loads(result.stdout)["class"] == "context_length"


def test_load_tells_what_it_loaded(mstar, daemon):
    result = mstar("load", "m", "--tp", "2", "--mtp", "off", "--override", "a=[1]", "--override", "b=text")
    assert result.exit_code == 0 and "loaded m: 5.0 M parameters" in result.stdout
    assert "reading: 2.0/2.0 MiB" in result.stderr and "note: a note" in result.stderr
    (sent,) = daemon.wait_for("load")
    assert (sent["tp"], sent["spec"], sent["overrides"]) == (2, {"mtp": "off"}, {"a": [1], "b": "text"})


def test_chat_keeps_the_conversation(mstar, daemon):
    result = mstar("chat", "--max-tokens", "9", stdin="hello\n\nagain\n/clear\nnew\n/quit\nnot sent\n")
    assert (result.exit_code, result.stdout) == (0, "hello \nagain \nnew \n")
    turns = [[m["content"] for m in sent["messages"]] for sent in daemon.wait_for("generate", 3)]
    assert turns == [["hello"], ["hello", "hello ", "again"], ["new"]]
    assert all(sent["max_tokens"] == 9 for sent in daemon.wait_for("generate", 3))


def test_the_small_commands(mstar, daemon):
    assert mstar("ping").stdout.startswith("pong in ")
    assert mstar("unload").stdout == "unloaded\n" and mstar("reset").stdout == "reset\n"
    assert mstar("shutdown").stdout == "shutting down\n"
    assert mstar("abort", "me", "3").exit_code == 0 and mstar("abort", "7", "--integer").exit_code == 0
    aborts = [(m["id"], m["attempt_id"]) for m in daemon.wait_for("abort", 2)]
    assert aborts == [("me", 3), (7, 0)]


def test_status_and_stats_are_readable_and_raw(mstar):
    shown = mstar("status").stdout
    assert shown.startswith("ready\n") and "pid 77" in shown and "heartbeat 0.1 s ago" in shown
    assert json.loads(mstar("status", "--json").stdout)["ranks"][0]["pid"] == 77
    shown = mstar("stats").stdout
    assert "total 9, used 2, free 7" in shown
    assert json.loads(mstar("stats", "--json").stdout)["blocks"]["free"] == 7


def test_exit_code_1_for_an_error_event(mstar, daemon):
    result = mstar("generate", "fail")
    assert result.exit_code == 1 and "context_length: too long" in result.stderr
    daemon.failing["unload"] = {"class": "no_model", "message": "nothing is loaded"}
    assert mstar("unload").exit_code == 1
    assert mstar("generate", "x", "--top-p", "2").exit_code == 1
    assert mstar("load", "m", "--kv-dtype", "q8").exit_code == 1
    assert mstar("chat", stdin="fail\nmore\n").exit_code == 1


@pytest.mark.parametrize("flags", [(), ("-q",), ("--json",)])
def test_exit_code_1_for_an_answer_that_somebody_else_ends(mstar, flags):
    result = mstar("generate", "cut", *flags)
    assert result.exit_code == 1 and "cut " in result.stdout
    assert "the answer was aborted before its end" in result.stderr


def test_a_prompt_that_is_not_text_is_refused_in_the_users_words(daemon):
    command = [*COMMAND, "--connect", daemon.address, "generate", "-q"]
    result = subprocess.run(command, input=b"caf\xe9", capture_output=True, timeout=60)
    assert (
        result.returncode == 2
        and b"the prompt is not UTF-8: unexpected end of data at byte 3" in result.stderr
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",), ("generate", "a", "--what"), ("generate", "a", "--top-k", "many"), ("load",),
        ("load", "m", "--kv-dtype", "fp4"), ("load", "m", "--override", "a"), ("abort", "x", "--integer"),
        ("generate", "a", "--logprobs", "2"), ("generate", "a", "--return-ids"), ("chat", "--return-ids"),
    ],
)  # fmt: skip
def test_exit_code_2_for_usage(mstar, arguments):
    assert mstar(*arguments).exit_code == 2


def test_exit_code_3_without_a_daemon(tmp_path):
    result = CliRunner().invoke(main, ["ping", "--connect", f"ipc://{tmp_path}/none"])
    assert result.exit_code == 3 and "start one with mstar-daemon" in result.stderr


def test_ctrl_c_aborts_the_request_and_exits_130(daemon):
    process = subprocess.Popen(
        [*COMMAND, "--connect", daemon.address, "generate", "--id", "me", "hold"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    daemon.wait_for("generate")
    assert process.stdout is not None and process.stdout.read(4) == b"held"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert b"Traceback" not in process.communicate()[1]
    assert daemon.wait_for("abort")[0]["id"] == "me"


def test_thinking_is_dimmed_on_a_terminal_unless_no_color(daemon):
    plain = dict.fromkeys(("NO_COLOR",), "")
    assert "\x1b[2mhm\x1b[0m" in run_in_terminal("--connect", daemon.address, "generate", "think", env=plain)
    shown = run_in_terminal("--connect", daemon.address, "generate", "think", env={"NO_COLOR": "1"})
    assert "hm" in shown and "\x1b" not in shown


def test_load_shows_a_bar_on_a_terminal(daemon):
    shown = run_in_terminal("--connect", daemon.address, "load", "m", env={"TERM": "xterm", "COLUMNS": "100"})
    assert "reading" in shown and "2.0/2.0 MiB" in shown and "━" in shown
    assert "━" not in run_in_terminal("--connect", daemon.address, "load", "-q", "m", env={"TERM": "xterm"})


def test_a_load_says_at_once_that_ranks_start(daemon):
    shown = run_in_terminal("--connect", daemon.address, "load", "m", env={"TERM": "xterm", "COLUMNS": "100"})
    assert "starting" in shown and shown.index("starting") < shown.index("reading")


def test_ctrl_c_leaves_a_load_and_says_so(daemon):
    process = subprocess.Popen(
        [*COMMAND, "--connect", daemon.address, "load", "slow"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    daemon.wait_for("load")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert b"the load goes on; mstar status" in said and b"Traceback" not in said
    assert not [m for m in daemon.received if m["type"] == "unload"]


def test_ctrl_c_in_chat_ends_the_answer_and_not_the_chat(daemon):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--connect", daemon.address, "chat"], stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    os.write(master, b"hold\n")
    daemon.wait_for("generate")
    written = b""
    while b"held" not in written:
        written += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    while b"finish: abort" not in written:
        written += os.read(master, 65536)
    os.write(master, b"next\n")
    second = daemon.wait_for("generate", 2)[1]
    assert [m["content"] for m in second["messages"]] == ["hold", "held ", "next"]
    while b"finish: stop" not in written:
        written += os.read(master, 65536)
    os.write(master, b"/quit\n")
    assert process.wait(20) == 0
    os.close(master)
