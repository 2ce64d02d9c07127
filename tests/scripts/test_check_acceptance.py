"""Acceptance through daemons: what the verdict finds, and a short run of it."""

import json

import pytest
from click.testing import CliRunner

from mstar.loader import resolve
from mstar.scripts import check_acceptance
from mstar.scripts.check_acceptance import Counts, judge, make_requests


def counts(*accepted, at_once=1, drafted=2000):
    return Counts(1, at_once, drafted, [drafted] * len(accepted), list(accepted))


def test_shares_are_of_the_steps_that_checked_a_draft_there():
    cell = Counts(1, 1, 10, [10, 8, 0], [9, 4, 0])
    assert cell.rates() == [0.9, 0.5, 0.0]
    assert cell.tokens_per_step == pytest.approx(2.3)


def test_batches_that_accept_differently_are_a_problem():
    assert judge([counts(1800, 1600), counts(1770, 1610, at_once=16)], None) == []
    (found,) = judge([counts(1800, 1600), counts(1810, 1500, at_once=16)], None)
    assert "depth 2" in found


@pytest.mark.parametrize(
    ("accepted", "depths"), [((1600, 1280, 1024), []), ((1620, 1330, 1024), []), ((1600, 1180, 900), [2, 3])]
)
def test_planted_shares_are_held_to_their_powers(accepted, depths):
    found = judge([counts(*accepted)], 0.8)
    assert [f"depth {depth}:" in problem for depth, problem in zip(depths, found, strict=True)] == [
        True
    ] * len(depths)


def test_prompts_of_a_planted_text_end_differently():
    """It depends on their last token alone: alike, all answers would be one."""
    path = resolve("builtin:tiny")
    last = {request["prompt_ids"][-1] for request in make_requests(path, True, 50, 8, 1)}
    assert len(last) > 45
    chats = make_requests(path, False, 5, 8, 1)
    assert [request["ignore_eos"] for request in chats] == [False] * 5


def test_a_short_run_says_pass(tmp_path):
    path = tmp_path / "acceptance.json"
    arguments = ["--prompts", "6", "--max-tokens", "24", "--at-once", "1,4", "--json", str(path)]
    ran = CliRunner().invoke(check_acceptance.main, [*arguments, "--", "--device", "cpu", "--threads", "1"])
    assert ran.exit_code == 0, ran.output
    report = json.loads(path.read_text())
    one, four = report["cells"]
    assert (one["at_once"], four["at_once"], report["verdict"]) == (1, 4, "pass")
    assert one["drafted"][0] > 10 and one["acceptance"][0] > 0.8
