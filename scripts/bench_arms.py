"""The serving benchmark's comparison of plain decode and speculation: an arm's every cell is a fresh daemon.

Arms take turns at each point, so that a machine that drifts does so for all of them. A cell serves the same
requests in two passes or more, and every pass must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from mstar.scripts.arms import PLAIN, Arm
from mstar.scripts.planted import planted_note
from mstar.scripts.serving_daemon import launched_daemon
from mstar.scripts.serving_load import Run, Workload, make_requests, serve
from mstar.scripts.serving_report import Results

Point = tuple[Workload, int]  # and the requests at once


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """What is measured. rounds: requests of a pass, in multiples of the concurrency."""

    points: Sequence[Point]
    arms: Sequence[Arm]
    passes: int
    rounds: int
    launches: int
    seed: int
    least_requests: int

    def requests(self, concurrency: int) -> int:
        return max(self.rounds * concurrency, self.least_requests)


@dataclass(slots=True)
class ArmCell:
    """What the passes of one arm at one point gave, over all launches."""

    workload: str
    concurrency: int
    arm: str
    k: int  # drafts a step as loaded
    passes_equal: bool
    contents: list[list[int]]  # tokens of each request


def measure_arms(
    model: str, plan: ArmPlan, daemon_flags: Sequence[str], say: Callable[[str], None]
) -> tuple[Results, list[ArmCell]]:
    """Runs every arm at every point on a daemon of its own. Raises BenchError."""
    results = Results()
    cells: dict[tuple[str, int, str], ArmCell] = {}
    for launch in range(plan.launches):
        for workload, concurrency in plan.points:
            for arm in plan.arms:
                say(
                    f"launch {launch + 1}/{plan.launches}: {workload.name}, {concurrency} at once, {arm.name}"
                )
                runs, k = _run_cell(model, plan, (workload, concurrency), arm, daemon_flags, results)
                for run in runs:
                    results.add(workload, concurrency, arm.name, launch, run)
                contents = [[trace.ids for trace in run.traces] for run in runs]
                key = (workload.name, concurrency, arm.name)
                first = cells[key].contents if key in cells else contents[0]
                equal = all(content == first for content in contents)
                if key in cells:
                    cells[key].passes_equal &= equal
                else:
                    cells[key] = ArmCell(*key, k=k, passes_equal=equal, contents=first)
    return results, list(cells.values())


def _run_cell(
    model: str, plan: ArmPlan, point: Point, arm: Arm, daemon_flags: Sequence[str], results: Results
) -> tuple[list[Run], int]:
    """The timed passes on a fresh daemon, behind one that is not timed; and the k that was loaded."""
    workload, concurrency = point
    with launched_daemon(model, [*arm.daemon_flags, *daemon_flags]) as (link, results.loaded):
        vocab, count = results.loaded["vocab"], plan.requests(concurrency)
        fields = arm.request_fields
        warming = make_requests(workload, concurrency, vocab, plan.seed - 1)
        serve(link, [request | fields for request in warming], concurrency)
        requests = [request | fields for request in make_requests(workload, count, vocab, plan.seed)]
        runs = [serve(link, requests, concurrency) for _ in range(plan.passes)]
        return runs, int(results.loaded["spec"]["k"])


def arm_rows(results: Results, cells: Sequence[ArmCell]) -> list[dict[str, Any]]:
    """The results' rows with `k`, `ratio` to plain, `passes_equal`, and how many answers are plain's."""
    plain = {(cell.workload, cell.concurrency): cell for cell in cells if cell.arm == PLAIN.name}
    by_key = {(cell.workload, cell.concurrency, cell.arm): cell for cell in cells}
    rows = results.rows()
    speeds = {(row["workload"], row["concurrency"], row["system"]): row["tok_s"]["median"] for row in rows}
    for row in rows:
        point = (row["workload"], row["concurrency"])
        cell = by_key[(*point, row["system"])]
        base = speeds.get((*point, PLAIN.name))
        row |= {
            "k": cell.k,
            "ratio": row["tok_s"]["median"] / base if base else None,
            "passes_equal": cell.passes_equal,
            "answers": len(cell.contents),
            "equal_to_plain": None,
        }
        if point in plain:
            pairs = zip(cell.contents, plain[point].contents, strict=True)
            row["equal_to_plain"] = sum(mine == theirs for mine, theirs in pairs)
    return rows


def print_arms(report: dict[str, Any], console: Console) -> None:
    """The table: medians, with the range of tok/s beside it."""
    model, machine = report["model"], report["machine"]
    table = Table(
        title=f"{model['name']} ({model['fingerprint'][:12]}), {model['dtype']}, tp {model['tp']}, "
        f"{model['device']}; {machine['cpu']}, {machine['cores']} cores{planted_note(report['planted'])}"
    )
    for column in ("workload", "at once", "arm", "k", "tok/s", "min-max", "x plain", "tokens a step"):
        table.add_column(column, justify="left" if column in ("workload", "arm") else "right")
    for column in ("drafts a step", "ms a step", "passes", "as plain", "failed"):
        table.add_column(column, justify="right")
    for row in report["results"]:
        tok_s, as_plain = row["tok_s"], row["equal_to_plain"]
        table.add_row(
            row["workload"],
            str(row["concurrency"]),
            row["system"],
            str(row["k"]),
            f"{tok_s['median']:.1f}",
            f"{tok_s['min']:.1f}-{tok_s['max']:.1f}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{row['tokens_per_step']['median']:.2f}",
            f"{row['drafts_per_step']['median']:.2f}",
            f"{row['ms_per_step']['median']:.2f}",
            "equal" if row["passes_equal"] else "DIFFER",
            "" if as_plain is None else f"{as_plain}/{row['answers']}",
            f"{row['failures']['max']:.0f}",
        )
    console.print(table)
    for row in report["results"]:
        for error in row["errors"]:
            console.print(f"[red]{row['workload']} at {row['concurrency']}, {row['system']}: {error}")


def arms_failed(report: dict[str, Any]) -> bool:
    """Whether a request failed or two passes of a cell gave other tokens."""
    return any(row["failures"]["max"] or not row["passes_equal"] for row in report["results"])
