"""`make demo`: a daemon of two ranks from start to clean end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from mstar.scripts.demo import PROMPT


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mstar.scripts.demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_demo_loads_answers_shows_figures_and_leaves_nothing():
    result = demo()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "reading" in result.stderr  # the progress of the load
    assert f"> {PROMPT}\nSunlight contains all colours." in result.stdout
    assert "finish: stop]" in result.stdout
    assert result.stdout.endswith("the daemon and its 2 ranks have ended, and nothing is left behind\n")


def test_demo_says_why_it_cannot():
    result = demo("--tp", "3")
    assert result.returncode == 1
    assert "tp can be 1, 2, 4" in result.stderr


def test_a_demo_that_is_terminated_ends_its_daemon_and_leaves_no_folder():
    command = [sys.executable, "-m", "mstar.scripts.demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()  # the daemon is started right after it
        folder = Path(re.search(r"ipc://(.*)/zmq", said)[1])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (started := children.read_text().split()):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not folder.exists()
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
