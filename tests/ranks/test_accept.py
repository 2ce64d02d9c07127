"""The accept rule on its own: what rows draw decides, whatever was drafted, on a device or a mesh."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mstar.ranks import speculation
from mstar.ranks.messages import SamplingParams
from mstar.ranks.sampler import LENGTH, RUNNING, STOP, Sampler
from mstar.ranks.speculation.accept import Accepted, Candidates, accept, longest_run

VOCAB = 50
CPU = torch.device("cpu")
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.7, "logprobs": 2},
    {"temperature": 1.1, "top_k": 5},
    {"logprobs": 0},
    {"repetition_penalty": 1.4},
    {"temperature": 1.0, "presence_penalty": 1.0, "logprobs": 1},
    {"stop_ids": (7, 8), "min_tokens": 3},
    {"think_start_id": 1, "think_end_id": 2, "starts_in_think": True, "max_think_tokens": 2},
    {"temperature": 1.3, "stop_ids": (9,)},
    {"max_tokens": 2},
]


def sampler(ways: list[dict[str, Any]]) -> Sampler:
    made = Sampler(VOCAB, len(ways) + 1, CPU)
    for slot, way in enumerate(ways, 1):
        made.admit(slot, SamplingParams(**({"max_tokens": 6, "seed": slot} | way)), [3, 4], [])
    return made


def draw_plainly(way: dict[str, Any], slot: int, logits: torch.Tensor, start: int) -> Accepted:
    """One request alone, a row a step, through the same logits, till it ends."""
    alone = sampler([{}] * (slot - 1) + [way])
    result = Accepted([[]], [0], [0], None)
    entries: list[Any] = []
    for row in range(logits.shape[0]):
        at = torch.tensor([slot])
        sampled = alone.sample(logits[row : row + 1], at, torch.tensor([start + row]), [slot])
        result.runs[0].append(int(sampled.tokens[0]))
        result.finish[0] = int(sampled.finish[0])
        entries += sampled.logprobs or []
        if result.finish[0]:
            break
    result.logprobs = [entries] if entries else None
    return result


@pytest.mark.parametrize("seed", range(12))
def test_every_sequence_gets_a_prefix_of_what_plain_decode_draws(seed: int) -> None:
    """Right drafts, wrong ones and none; every way to draw in one batch, in any order."""
    rng = random.Random(seed)
    ways = rng.sample(WAYS, len(WAYS))
    torch.manual_seed(seed)
    rows = [rng.randrange(1, 7) for _ in ways]
    logits = [torch.randn(count, VOCAB) * 3 for count in rows]
    starts = [rng.randrange(100) for _ in ways]
    wanted = [draw_plainly(way, slot, logits[slot - 1], starts[slot - 1]) for slot, way in enumerate(ways, 1)]
    drafts = []
    for count, plain in zip(rows, wanted, strict=True):
        right = (plain.runs[0] + [0] * count)[: count - 1]
        bad = rng.randrange(count + 2)
        drafts.append([token if i < bad else (token + 1) % VOCAB for i, token in enumerate(right)])
    order = list(range(len(ways)))
    candidates = Candidates([i + 1 for i in order], starts, drafts)
    got = accept(sampler(ways), candidates, None, torch.cat(logits))
    for i, plain in enumerate(wanted):
        run = got.runs[i]
        assert run == plain.runs[0][: len(run)]
        matching = longest_run(plain.runs[0], drafts[i][: len(plain.runs[0])])
        ended = len(plain.runs[0]) <= matching  # the run ends with an accepted draft
        assert got.accepted[i] == matching
        assert len(run) == (matching if ended else min(matching + 1, len(plain.runs[0])))
        assert got.finish[i] == (plain.finish[0] if len(run) == len(plain.runs[0]) else RUNNING)
        entries = got.logprobs[i] if got.logprobs else None
        assert entries == (plain.logprobs[0][: len(run)] if plain.logprobs and plain.logprobs[0] else None)


def test_registers_move_by_what_was_kept_and_the_next_step_goes_on_from_there() -> None:
    """Two speculative steps and plain decode of the same rows: counts, penalties and thinking carry over."""
    torch.manual_seed(1)
    for way in WAYS[:-1]:
        fields = {k: v for k, v in way.items() if k != "stop_ids"} | {"max_tokens": 8}
        logits = torch.randn(8, VOCAB) * 2
        plain = draw_plainly(fields, 1, logits, 5).runs[0]
        own = sampler([fields])
        got: list[int] = []
        for first in (0, 4):
            wrong = [(plain[first + 2] + 1) % VOCAB]
            drafts = plain[first : first + 2] + wrong
            result = accept(own, Candidates([1], [5 + first], [drafts]), None, logits[first : first + 4])
            assert result.accepted == [2] and result.finish == [RUNNING]
            got += result.runs[0]
            plain_row = accept(
                own, Candidates([1], [5 + first + 3], [[]]), None, logits[first + 3 : first + 4]
            )
            got += plain_row.runs[0]
            assert plain_row.finish == [LENGTH if first else RUNNING]
        assert got == plain


def test_greedy_rows_need_no_logits() -> None:
    best = torch.tensor([5, 6, 7, 8, 1, 9, 9])
    own = sampler([{}, {}, {"stop_ids": (9,)}])
    candidates = Candidates([1, 2, 3], [10, 20, 30], [[5, 6, 0], [], [9]])
    got = accept(own, candidates, best, None)
    assert got.runs == [[5, 6, 7], [1], [9]]
    assert got.accepted == [2, 0, 1]
    assert got.finish == [RUNNING, RUNNING, STOP]
    assert got.logprobs is None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
def test_longest_run_ends_before_the_first_draft_that_was_not_drawn(
    draws: list[int], data: st.DataObject
) -> None:
    drafts = data.draw(st.lists(st.integers(0, 2), max_size=len(draws) - 1))
    count = longest_run(draws, drafts)
    assert draws[:count] == drafts[:count]
    assert count == len(drafts) or draws[count] != drafts[count]


@pytest.mark.parametrize("name", ["accept", "stats", "route", "policy", "draft"])
def test_only_the_backend_knows_where_the_shards_are(name: str) -> None:
    source = (Path(speculation.__file__).parent / f"{name}.py").read_text()
    imported = {node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert not any("backend" in module or "collectives" in module for module in imported)
