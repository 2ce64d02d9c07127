"""`mstar-daemon`'s own words: exit codes, refusals at start, the log's one line a request."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mstar.daemon.cli import main
from mstar.daemon.settings import Settings
from tests.support.daemons import generate

ROOT = Path(__file__).parents[2]
RANDOM_PORTS = ("--bind", "tcp://127.0.0.1:0", "--line", "tcp://127.0.0.1:0")


def fake_daemon(*flags: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.fake_daemon", "{}", *flags]
    return subprocess.run(command, cwd=ROOT, input=lines, capture_output=True, text=True, timeout=60)


def test_every_setting_has_a_flag() -> None:
    flags = {parameter.name for parameter in main.params}
    assert set(Settings.model_fields) <= flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bind", "tcp://0.0.0.0:1"], "loopback"),
        (["--tp", "0"], "tp"),
        (["--mtp", "maybe"], "maybe"),
        (["--config", "/no/such/file.toml"], "/no/such/file.toml"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what(flags, words) -> None:
    result = CliRunner().invoke(main, flags)
    assert (result.exit_code, words in result.output) == (2, True), result.output


def test_a_model_that_cannot_be_loaded_at_start_exits_with_1() -> None:
    result = fake_daemon(*RANDOM_PORTS, "--model", "builtin:huge")
    assert result.returncode == 1
    assert "builtin:huge could not be loaded" in result.stderr and "tiny" in result.stderr


def test_a_taken_port_exits_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        result = fake_daemon("--bind", "off", "--line", address)
    assert (result.returncode, "cannot listen on" in result.stderr) == (1, True)


def test_the_log_has_one_line_for_each_finished_request() -> None:
    requests = "".join(json.dumps(generate(id)) + "\n" for id in ("one", "two"))
    result = fake_daemon("--stdio", lines=requests)
    assert [json.loads(line)["class"] for line in result.stdout.splitlines()] == ["no_model", "no_model"]
    assert result.returncode == 0
