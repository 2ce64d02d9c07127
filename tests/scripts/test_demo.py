"""`make demo`: a daemon of two ranks from start to clean end."""

from __future__ import annotations

import subprocess
import sys

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
