"""The descent over a step's linears, on a step whose time is a formula."""

from __future__ import annotations

import json
import time

import pytest
from click import ClickException

from mstar.kernels.registry import GemmKey, KernelChoice, Table, read_table, stack
from mstar.scripts.tune_step import (
    Trying,
    check_table,
    descend,
    known_tiles,
    searched,
    start_together,
    take_back,
    write_choices,
)

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


def candidates(key, now):
    habits = [pair for pair in now.params if pair[0] != "BLOCK_N"]
    return [KernelChoice("fma", tuple(sorted([*each.params, *habits]))) for each in (SLOW, FAST, BROKEN)]


def variants(key, choice):
    params = dict(choice.params)
    switched = {**params, "SOON": 1 - params.get("SOON", 0)}
    asking = [{**params, "AHEAD": mebibytes} for mebibytes in (4, 8, 16)]
    return [KernelChoice("fma", tuple(sorted(each.items()))) for each in (switched, *asking)]


def tuned(cost, until=None, others=candidates, variants=variants):
    table = Trying(Table(Defaults()), Defaults())

    def step_us(limit):
        return sum(cost(key, table.choose(key)) for key in (A, A, B))

    step_us(0.0)
    said = []
    limit = time.monotonic() + 60 if until is None else until
    return table, descend(table, others, variants, step_us, limit, said.append), said


def cost(key, choice):
    params = dict(choice.params)
    if params["BLOCK_N"] == 16:
        raise RuntimeError("does not run")
    # alone FAST wins for both; in the step it costs the second size something
    us = {A: {4: 7.0, 8: 10.0}, B: {4: 5.5, 8: 5.0}}[key][params["BLOCK_N"]]
    # what the first asks for is worth most at 8 MiB, and SOON on top of it
    return us - (2.0 - abs(params.get("AHEAD", 0) - 8) / 4 + params.get("SOON", 0) if key == A else 0)


def test_a_size_moves_only_where_the_step_gets_faster():
    table, times, said = tuned(cost)
    both = KernelChoice("fma", (("AHEAD", 8), ("BLOCK_N", 4), ("SOON", 1)))
    assert (table.choose(A), table.choose(B)) == (both, SLOW)
    assert times[A][SLOW] == 25.0 and times[A][both] == min(times[A].values()) == 13.0
    assert sum("RuntimeError" in line for line in said) == 2


def test_with_habits_alone_every_size_keeps_its_tiles():
    others, firsts = searched(candidates, lambda key: FAST, habits_only=True)
    assert firsts(A) is None
    assert searched(candidates, firsts, habits_only=False) == (candidates, firsts)
    table, times, _ = tuned(cost, others=others)
    assert table.choose(A) == KernelChoice("fma", (("AHEAD", 8), ("BLOCK_N", 8), ("SOON", 1)))
    assert table.choose(B) == SLOW and min(times[A].values()) == 19.0


def test_every_habit_is_tried_however_many_there_are_beside_it():
    def rings(key, choice):
        params = dict(choice.params)
        stages = params.get("num_stages", 4)
        near = [
            {**params, "num_stages": other} for other in range(max(2, stages - 1), min(8, stages + 1) + 1)
        ]
        found = [each for each in near if each != params] + [{**params, "CARVEOUT": 57}]
        return [KernelChoice("fma", tuple(sorted(each.items()))) for each in found]

    def longest_ring(key, choice):
        params = dict(choice.params)
        return 10.0 - params.get("num_stages", 4) - (params.get("CARVEOUT", 0) == 57 and key == A)

    table, times, _ = tuned(longest_ring, others=lambda key, now: [], variants=rings)
    assert dict(table.choose(A).params) == {"BLOCK_N": 8, "num_stages": 8, "CARVEOUT": 57}
    assert dict(table.choose(B).params) == {"BLOCK_N": 8, "num_stages": 8}
    assert any(dict(choice.params).get("CARVEOUT") == 57 for choice in times[B])


def test_nothing_further_is_tried_when_the_time_is_over():
    table, times, _ = tuned(cost, until=time.monotonic() - 1)
    assert table.choose(A) == SLOW and list(times[A]) == [SLOW]


@pytest.mark.parametrize("together, moves", [(10.2, True), (10.4, False)])
def test_all_sizes_start_together_where_that_is_hardly_slower(together, moves):
    table = Trying(Table(Defaults()), Defaults())

    def step_us(limit):
        tried = {table.choose(key) for key in (A, B)}
        return together if tried == {FAST} else 10.0 if tried == {SLOW} else 99.0

    step_us(0.0)
    assert start_together(table, lambda key: FAST, step_us) == (10.0, moves)
    assert {table.choose(key) for key in (A, B)} == ({FAST} if moves else {SLOW})
    assert start_together(table, lambda key: None, step_us)[1] is False


def test_a_start_that_does_not_run_or_does_not_pay_leaves_the_tables_choices(tmp_path):
    table = Trying(Table(Defaults()), Defaults())

    def step_us(limit):
        if BROKEN in [table.choose(key) for key in (A, B)]:
            raise RuntimeError("does not fit this GPU")
        return 10.0

    step_us(0.0)
    assert start_together(table, lambda key: BROKEN, step_us) == (10.0, False)
    assert {table.choose(key) for key in (A, B)} == {SLOW}

    assert start_together(table, lambda key: FAST, step_us)[1]
    times = {key: {FAST: 11.0} for key in (A, B)}
    take_back(table, times, 10.0)
    assert {table.choose(key) for key in (A, B)} == {SLOW}
    path = tmp_path / "decode_gemm.json"
    write_choices(
        path, ("sm_90", "h200"), Defaults(), {key: (table.choose(key), times[key]) for key in (A, B)}
    )
    assert read_table(path, stack(), Defaults()).notes == ()


def test_tiles_of_squares_are_those_of_the_residuals_choices():
    table = Table(Defaults(), {B: FAST})
    assert known_tiles(table, [A, B]) == (256,)
    assert known_tiles(Table(Defaults(), {B: KernelChoice("cublas")}), [A, B]) == ()


def test_a_table_takes_choices_and_knows_how_they_are_launched(tmp_path):
    path = tmp_path / "decode_gemm.json"
    found = {A: (FAST, {SLOW: 2.0, FAST: 1.0}), B: (SLOW, {SLOW: 2.0})}
    assert write_choices(path, ("sm_90", "h200"), Defaults(), found) == 2
    assert write_choices(path, ("sm_90", "h200"), Defaults(), found) == 0
    read = read_table(path, stack(), Defaults())
    assert read.notes == () and (read.choose(A), read.choose(B)) == (FAST, SLOW)
    entry = json.loads(path.read_text())["entries"][A.name]
    assert entry["step_us"] == {FAST.name: 1.0, SLOW.name: 2.0} and entry["default"] == SLOW.name
    assert entry["candidates"][FAST.name] == {
        "kernel": "fma",
        "launches": 1,
        "params": {"BLOCK_N": 4},
        "us": [],
    }


def test_habits_tuned_later_leave_the_times_of_all_kernels_until_all_are_timed_again(tmp_path):
    path = tmp_path / "decode_gemm.json"
    where, defaults = ("sm_90", "h200"), Defaults()

    def entry():
        return json.loads(path.read_text())["entries"][A.name]

    write_choices(path, where, defaults, {A: (FAST, {SLOW: 2.0, FAST: 1.0})})
    for us in (9.0, 8.0):
        write_choices(path, where, defaults, {A: (FAST, {FAST: us})}, habits_only=True)
        assert entry()["step_us"] == {FAST.name: us}
        assert entry()["step_us_of_all"] == {FAST.name: 1.0, SLOW.name: 2.0}
    write_choices(path, where, defaults, {A: (SLOW, {SLOW: 3.0, FAST: 4.0})})
    assert "step_us_of_all" not in entry() and entry()["step_us"] == {FAST.name: 4.0, SLOW.name: 3.0}
    assert read_table(path, stack(), defaults).notes == ()


def test_a_table_of_another_device_or_stack_is_left_alone(tmp_path):
    path = tmp_path / "decode_gemm.json"
    check_table(path, ("sm_90", "h200"))
    write_choices(path, ("sm_90", "h200"), Defaults(), {A: (FAST, {FAST: 1.0})})
    check_table(path, ("sm_90", "h200"))
    with pytest.raises(ClickException, match="for device h200, and this is h100"):
        check_table(path, ("sm_90", "h100"))
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"stack": {"torch": "1.0", "triton": "1.0"}}))
    with pytest.raises(ClickException, match="for stack"):
        check_table(path, ("sm_90", "h200"))
