"""How many drafts a daemon accepts, by depth: the same at any batch size, and as planted where it was planted.

    python -m mstar.scripts.check_acceptance --model builtin:tiny --at-once 1,16 --tp 1,2

Every cell, a number of requests at once at a tp, is a daemon of its own whose k is held (`--mtp-fixed`), and all of
them get the same requests. Figures are from `stats`: of the steps that checked a draft at a depth, the share that
accepted it and all before it. The verdict is "pass" when

- no depth's share differs by more than 0.02 between two cells;
- of a planted checkpoint, each is within 4 standard deviations of a, a^2, a^3 (`mstar.scripts.make_checkpoint`);
- `stats` counts what the answers' `done` say.

Exit code 0: pass, 1: not.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mstar.loader import LoadError, read_config, resolve
from mstar.scripts.arms import Arm
from mstar.scripts.check_cells import WIDTH, CheckError, cell_flags, check_loaded
from mstar.scripts.check_prompts import short_prompts
from mstar.scripts.planted import planted_acceptance, planted_note
from mstar.scripts.serving_daemon import launched_daemon
from mstar.scripts.serving_load import BenchError, DaemonLink, Workload, make_prompts, serve
from mstar.scripts.serving_report import describe_machine, write_json

LARGEST_DIFFERENCE = 0.02
DEVIATIONS = 4.0
STATS_S = 10.0
PLANTED_PROMPT = 8  # tokens


@dataclass(frozen=True, slots=True)
class Counts:
    """What a cell's daemon counted: drafts checked, and accepted with all before them, by depth."""

    tp: int
    at_once: int
    steps: int
    drafted: list[int]
    accepted: list[int]

    def rates(self) -> list[float]:
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(self.accepted) / max(1, self.steps)


@click.command()
@click.option("--model", default="builtin:tiny", show_default=True, help="What the daemons load.")
@click.option("--dtype", default="auto", show_default=True, help="auto, bf16, fp16 or fp32.")
@click.option("--mtp-k", "k", default=3, show_default=True, type=click.IntRange(1, 8), help="Drafts a step.")
@click.option("--at-once", default="1,16", show_default=True, help="Requests at once, a list.")
@click.option("--tp", "tps", default="1", show_default=True, help="Tensor parallel sizes, a list.")
@click.option("--prompts", "count", default=64, show_default=True, type=click.IntRange(1), help="Requests.")
@click.option("--max-tokens", default=96, show_default=True, type=click.IntRange(1), help="Of an answer.")
@click.option("--seed", default=1, show_default=True, help="Of the prompts.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything to this file.")
@click.argument("daemon_flags", nargs=-1, type=click.UNPROCESSED)
def main(
    model: str,
    dtype: str,
    k: int,
    at_once: str,
    tps: str,
    count: int,
    max_tokens: int,
    seed: int,
    json_path: Path | None,
    daemon_flags: tuple[str, ...],
) -> None:
    """Measures acceptance through daemons. Flags after `--` go to them."""
    progress = Console(stderr=True)
    cells: list[Counts] = []
    try:
        path = resolve(model)
        planted = planted_acceptance(path)
        requests = make_requests(path, planted is not None, count, max_tokens, seed)
        for tp in map(int, tps.split(",")):
            for together in map(int, at_once.split(",")):
                progress.print(f"tp {tp}, {together} at once", highlight=False)
                flags = cell_flags((Arm(k), tp), dtype, daemon_flags)
                with launched_daemon(model, flags) as (link, loaded):
                    check_loaded((Arm(k), tp), loaded)
                    cells.append(measure(link, requests, tp, together))
    except (BenchError, CheckError, LoadError, ValueError) as error:
        raise click.ClickException(f"{error}") from error
    problems = judge(cells, planted)
    report = {
        "schema": 1,
        "check": "acceptance",
        "command": shlex.join(["python", "-m", "mstar.scripts.check_acceptance", *sys.argv[1:]]),
        "model": model,
        "fingerprint": loaded["fingerprint"],
        "planted": planted,
        "dtype": loaded["dtype"],
        "k": k,
        "prompts": count,
        "max_tokens": max_tokens,
        "seed": seed,
        "cells": [
            {**asdict(c), "acceptance": c.rates(), "tokens_per_step": c.tokens_per_step} for c in cells
        ],
        "verdict": "fail" if problems else "pass",
        "problems": problems,
        **describe_machine(daemon_flags),
    }
    print_report(report, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    if json_path is not None:
        write_json(report, json_path)
    if problems:
        raise SystemExit(1)


def make_requests(path: Path, planted: bool, count: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Greedy requests for tasks that the built-in model knows.

    A planted text depends on the prompt's last token alone and has no end: there, prompts are random ids, which end
    differently, where those of a chat template all end alike.
    """
    shared = {"max_tokens": max_tokens, "return_ids": True, "ignore_eos": planted}
    if planted:
        workload = Workload("planted", PLANTED_PROMPT, max_tokens)
        ids = make_prompts(workload, count, read_config(path).vocab_size, seed)
    else:
        ids = [prompt.ids for prompt in short_prompts(path, count, seed)]
    return [{"prompt_ids": prompt, **shared} for prompt in ids]


def measure(link: DaemonLink, requests: Sequence[dict[str, Any]], tp: int, at_once: int) -> Counts:
    """Serves the requests on a daemon that has served none, and reads its counters. Raises CheckError."""
    run = serve(link, requests, at_once)
    if run.failures():
        raise CheckError(f"an answer failed: {run.failures()[0]}")
    link.send({"type": "stats"})
    event = link.receive(STATS_S)
    if event is None or event["type"] != "stats":
        raise CheckError(f"no answer to `stats`: {event}")
    spec = event["spec"]
    counts = Counts(tp, at_once, spec["steps"], list(spec["drafted"]), list(spec["accepted"]))
    said = [sum(trace.drafts(what) for trace in run.traces) for what in ("drafted", "accepted")]
    if said != [sum(counts.drafted), sum(counts.accepted)]:
        raise CheckError(f"the answers say {said} drafted and accepted, `stats` says {counts}")
    return counts


def judge(cells: Sequence[Counts], planted: float | None) -> list[str]:
    """What is wrong with the cells' figures."""
    problems = []
    for depth, rates in enumerate(zip(*(cell.rates() for cell in cells), strict=True), 1):
        if max(rates) - min(rates) > LARGEST_DIFFERENCE:
            problems.append(f"depth {depth}: from {min(rates):.3f} to {max(rates):.3f}, by the cell")
    for cell in cells:
        for depth, (rate, steps) in enumerate(zip(cell.rates(), cell.drafted, strict=True), 1):
            if planted is None:
                break
            wanted = planted**depth
            bound = DEVIATIONS * math.sqrt(wanted * (1 - wanted) / max(1, steps))
            if abs(rate - wanted) > bound:
                problems.append(
                    f"tp {cell.tp}, {cell.at_once} at once, depth {depth}: {rate:.3f} is not within "
                    f"{bound:.3f} of the planted {wanted:.3f}"
                )
    return problems


def print_report(report: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"drafts accepted by depth: {report['model']} ({report['fingerprint'][:12]}), {report['dtype']}, "
        f"{report['prompts']} prompts{planted_note(report['planted'])}"
    )
    for column in ("tp", "at once", "steps", *(f"first {depth + 1}" for depth in range(report["k"]))):
        table.add_column(column, justify="right")
    table.add_column("tokens a step", justify="right")
    for cell in report["cells"]:
        rates = [f"{rate:.4f}" for rate in cell["acceptance"]]
        table.add_row(
            *(str(cell[name]) for name in ("tp", "at_once", "steps")),
            *rates,
            f"{cell['tokens_per_step']:.3f}",
        )
    if report["planted"] is not None:
        wanted = [f"{report['planted'] ** (depth + 1):.4f}" for depth in range(report["k"])]
        table.add_row("planted", "", "", *wanted, f"{1 + sum(map(float, wanted)):.3f}")
    console.print(table)
    for problem in report["problems"]:
        console.print(f"  {problem}", style="red", markup=False)
    console.print(f"verdict: {report['verdict']}", highlight=False)


if __name__ == "__main__":
    main()
