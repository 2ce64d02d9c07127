"""The descent over a step's linears, on a step whose time is a formula."""

from __future__ import annotations

import json
import time

from mstar.kernels.registry import GemmKey, KernelChoice, Table
from mstar.scripts.tune_step import Trying, descend, write_choices

A = GemmKey("norm", 1, 8224, 1024, "bf16")
B = GemmKey("residual", 1, 1024, 2048, "bf16")
FAST, SLOW, BROKEN = (KernelChoice("fma", (("BLOCK_N", n),)) for n in (4, 8, 16))


class Defaults:
    def default(self, key):
        return SLOW

    def candidates(self, key):
        return [SLOW, FAST, BROKEN]

    def launches(self, choice, key):
        return 1


def tuned(cost, until=None):
    table = Trying(Table(Defaults()), Defaults())

    def step_us():
        return sum(cost(key, table.choose(key)) for key in (A, A, B))

    step_us()
    said = []
    limit = time.monotonic() + 60 if until is None else until
    return table, descend(table, Defaults().candidates, step_us, limit, said.append), said


def cost(key, choice):
    if choice == BROKEN:
        raise RuntimeError("does not run")
    # alone FAST wins for both; in the step it costs the second size something
    return {A: {SLOW: 10.0, FAST: 7.0}, B: {SLOW: 5.0, FAST: 5.0}}[key][choice]


def test_a_size_moves_only_where_the_step_gets_faster():
    table, times, said = tuned(cost)
    assert (table.choose(A), table.choose(B)) == (FAST, SLOW)
    assert times[A] == {SLOW.name: 25.0, FAST.name: 19.0}
    assert times[B] == {SLOW.name: 19.0, FAST.name: 19.0}
    assert sum("RuntimeError" in line for line in said) == 2


def test_nothing_further_is_tried_when_the_time_is_over():
    table, times, _ = tuned(cost, until=time.monotonic() - 1)
    assert table.choose(A) == SLOW and list(times[A]) == [SLOW.name]


def test_a_table_takes_choices_and_knows_how_they_are_launched(tmp_path):
    path = tmp_path / "decode_gemm.json"
    entry = {"choice": SLOW.name, "candidates": {SLOW.name: {}, FAST.name: {}}}
    path.write_text(
        json.dumps({"entries": {A.name: entry, B.name: {**entry, "candidates": {SLOW.name: {}}}}})
    )
    found = {A: (FAST, {FAST.name: 1.0}), B: (FAST, {FAST.name: 2.0})}
    assert write_choices(path, found) == 2
    entries = json.loads(path.read_text())["entries"]
    assert entries[A.name]["choice"] == entries[B.name]["choice"] == FAST.name
    assert entries[A.name]["step_us"] == {FAST.name: 1.0}
    assert entries[B.name]["candidates"][FAST.name] == {"kernel": "fma", "params": {"BLOCK_N": 4}, "us": []}
