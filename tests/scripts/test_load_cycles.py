"""Load and unload over and over: what the verdict finds, and a few cycles of a real daemon that speculates."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from mstar.scripts import load_cycles
from mstar.scripts.load_cycles import LEAST_CYCLES, Cycle, growth, judge

MIB = 2**20
GOOD = Cycle(90 * MIB, descriptors=14, threads=5, children=0, load_s=1.0, unload_s=0.1, tau=2.0)


def cycles(count, **last):
    return [GOOD] * (count - 1) + [dataclasses.replace(GOOD, **last)]


def test_cycles_that_leave_nothing_are_good():
    assert judge(cycles(50)) == []
    # one high sample is no growth
    assert judge(cycles(50, rss_bytes=120 * MIB)) == []


@pytest.mark.parametrize(
    ("left", "problem"),
    [
        ({"descriptors": 15}, "15 after the last"),
        ({"threads": 6}, "6 after the last"),
        ({"children": 1}, "cycle 50: 1 processes are left"),
    ],
)
def test_what_is_left_is_a_problem(left, problem):
    (found,) = judge(cycles(50, **left))
    assert problem in found


def test_a_leak_a_cycle_is_growth_and_the_first_cycles_are_not():
    leaking = [dataclasses.replace(GOOD, rss_bytes=(90 * 1024 + 200 * n) * 1024) for n in range(50)]
    assert "grew by" in judge(leaking)[0]
    warming = [dataclasses.replace(GOOD, rss_bytes=(60 + 3 * min(n, 10)) * MIB) for n in range(50)]
    assert judge(warming) == []
    assert growth([GOOD.rss_bytes] * (LEAST_CYCLES - 1))["growth_bytes"] is None


@pytest.mark.parametrize("tp", ["1", "2"])
def test_a_few_cycles_of_a_daemon_that_speculates_leave_nothing(tp, tmp_path):
    path = tmp_path / "cycles.json"
    flags = [
        "--device",
        "cpu",
        "--threads",
        "1",
        "--max-seq",
        "512",
        "--tp",
        tp,
        "--mtp",
        "on",
        "--mtp-fixed",
    ]
    arguments = ["--cycles", "2", "--max-tokens", "12", "--json", str(path), "--", *flags]
    ran = CliRunner().invoke(load_cycles.main, arguments)
    assert ran.exit_code == 0, ran.output
    report = json.loads(path.read_text())
    assert (report["verdict"], report["problems"]) == ("good", [])
    assert len(report["cycles"]) == 2 and report["model"]["tp"] == int(tp)
    assert all(cycle["tau"] > 0 and cycle["children"] == 0 for cycle in report["cycles"])
