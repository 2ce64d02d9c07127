"""Whether loads leave nothing behind: load, a few answers, unload, many times over on one daemon.

    python -m mstar.scripts.load_cycles --cycles 50 -- --tp 2 --mtp on

After each unload the daemon alone is looked at. The verdict is good when

- no process that it started is left;
- its resident memory is flat: the medians of the first and the last third of the cycles, the first few left out;
- its open descriptors and threads are as many as after the first unload;
- greedy answers are the same in every cycle, with drafts accepted where the load speculates;
- after its own end no rank and no folder of it is left.

It needs psutil, which the `test` extra brings. Exit code 0: good, 1: bad.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from mstar.scripts.check_cells import WIDTH
from mstar.scripts.growth import thirds
from mstar.scripts.harness_prompts import BUILT_IN
from mstar.scripts.serving_daemon import launched_daemon
from mstar.scripts.serving_load import BenchError, DaemonLink, serve
from mstar.scripts.serving_report import describe_machine, write_json

# Between the medians of the first and the last third: 50 cycles that leak 200 KB each would show 6 MB.
GROWTH_BYTES = 4 * 2**20
RAMP_SHARE = 0.2  # the allocator's arenas and caches fill first
LEAST_CYCLES = 12  # fewer say nothing about growth
LOAD_S, UNLOAD_S, GONE_S = 300.0, 60.0, 5.0  # bounds, not measures


@dataclass(frozen=True, slots=True)
class Cycle:
    """What one load and unload left. tau: accepted drafts a step of its answers."""

    rss_bytes: int
    descriptors: int
    threads: int
    children: int
    load_s: float
    unload_s: float
    tau: float


@click.command()
@click.option("--model", default="builtin:tiny", show_default=True, help="What is loaded.")
@click.option("--cycles", default=50, show_default=True, type=click.IntRange(1), help="Loads and unloads.")
@click.option("--max-tokens", default=32, show_default=True, type=click.IntRange(1), help="Of an answer.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything to this file.")
@click.argument("daemon_flags", nargs=-1, type=click.UNPROCESSED)
def main(
    model: str, cycles: int, max_tokens: int, json_path: Path | None, daemon_flags: tuple[str, ...]
) -> None:
    """Loads and unloads one model again and again. Flags after `--` go to mstar-daemon."""
    console = Console(stderr=True)
    try:
        report = run_cycles(model, cycles, max_tokens, daemon_flags, console)
    except BenchError as error:
        console.print(f"[red]{error}")
        raise SystemExit(1) from None
    report |= {
        "schema": 1,
        "command": shlex.join(["python", "-m", "mstar.scripts.load_cycles", *sys.argv[1:]]),
        **describe_machine(daemon_flags),
    }
    print_report(report, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    if json_path is not None:
        write_json(report, json_path)
    raise SystemExit(0 if report["verdict"] == "good" else 1)


def run_cycles(
    model: str, count: int, max_tokens: int, daemon_flags: Sequence[str], console: Console
) -> dict[str, Any]:
    """The cycles and what they come to. Raises BenchError."""
    cycles: list[Cycle] = []
    problems: list[str] = []
    with launched_daemon(model, ["--log-level", "warning", *daemon_flags]) as (link, loaded):
        daemon = _daemon_of(link)
        first = _answers(link, max_tokens)[0]
        _unload(link)  # the load that the daemon began with is none of the cycles
        for number in range(1, count + 1):
            cycle, answers = _cycle(link, daemon, loaded, max_tokens)
            cycles.append(cycle)
            if answers != first:
                problems.append(f"cycle {number}: greedy answers are not those of the first load")
            if loaded["spec"]["k"] and not cycle.tau:
                problems.append(f"cycle {number}: no draft was accepted")
            console.print(f"cycle {number}/{count}: {cycle.rss_bytes / 2**20:.1f} MiB", highlight=False)
        ranks = daemon.children(recursive=True)
    problems += judge(cycles) + _left_behind(daemon, ranks)
    return {
        "verdict": "bad" if problems else "good",
        "problems": problems,
        "model": loaded,
        "cycles": [asdict(cycle) for cycle in cycles],
        "rss": growth([cycle.rss_bytes for cycle in cycles]),
    }


def growth(rss: Sequence[int]) -> dict[str, int | None]:
    """Resident bytes: medians of the first and last third; None where there are too few cycles."""
    steady = rss[int(len(rss) * RAMP_SHARE) :]
    if len(rss) < LEAST_CYCLES:
        return {"first_bytes": None, "last_bytes": None, "growth_bytes": None, "bound_bytes": GROWTH_BYTES}
    first, last = thirds(steady)
    return {
        "first_bytes": first,
        "last_bytes": last,
        "growth_bytes": last - first,
        "bound_bytes": GROWTH_BYTES,
    }


def judge(cycles: Sequence[Cycle]) -> list[str]:
    """What is wrong with what the cycles left."""
    problems = []
    grown = growth([cycle.rss_bytes for cycle in cycles])["growth_bytes"]
    if grown is not None and grown > GROWTH_BYTES:
        problems.append(
            f"the daemon grew by {grown / 2**20:.1f} MiB, over the bound of {GROWTH_BYTES / 2**20:.1f}"
        )
    for what in ("descriptors", "threads"):
        before, after = (getattr(cycle, what) for cycle in (cycles[0], cycles[-1]))
        if after > before:
            problems.append(f"{before} {what} after the first unload, {after} after the last")
    problems += [
        f"cycle {number}: {cycle.children} processes are left"
        for number, cycle in enumerate(cycles, 1)
        if cycle.children
    ]
    return problems


def _cycle(
    link: DaemonLink, daemon: psutil.Process, loaded: dict[str, Any], max_tokens: int
) -> tuple[Cycle, list[list[int]]]:
    began = time.monotonic()
    event = _ask(link, {"type": "load", "model": loaded["model"]}, "loaded", LOAD_S)
    load_s = time.monotonic() - began
    if event["spec"] != loaded["spec"] or event["tp"] != loaded["tp"]:
        raise BenchError(f"the daemon loaded something else: {event}")
    answers, tau = _answers(link, max_tokens)
    began = time.monotonic()
    _unload(link)
    unload_s = time.monotonic() - began
    cycle = Cycle(
        rss_bytes=daemon.memory_info().rss,
        descriptors=daemon.num_fds(),
        threads=daemon.num_threads(),
        children=len(daemon.children(recursive=True)),
        load_s=round(load_s, 3),
        unload_s=round(unload_s, 3),
        tau=round(tau, 4),
    )
    return cycle, answers


def _answers(link: DaemonLink, max_tokens: int) -> tuple[list[list[int]], float]:
    """Greedy answers to the harness's prompts, all at once, and the drafts that a step accepted."""
    shared = {"max_tokens": max_tokens, "return_ids": True}
    run = serve(link, [{"messages": prompt.messages, **shared} for prompt in BUILT_IN], len(BUILT_IN))
    if run.failures():
        raise BenchError(f"an answer failed: {run.failures()[0]}")
    steps = sum(trace.steps for trace in run.traces)
    return [trace.ids for trace in run.traces], sum(t.drafts("accepted") for t in run.traces) / max(1, steps)


def _unload(link: DaemonLink) -> None:
    _ask(link, {"type": "unload"}, "unloaded", UNLOAD_S)


def _ask(link: DaemonLink, message: dict[str, Any], end: str, limit_s: float) -> dict[str, Any]:
    """The event of this type that answers. Raises BenchError for an error or silence."""
    link.send(message)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        event = link.receive(1.0)
        if event is not None and event["type"] == "error":
            raise BenchError(f"{message['type']}: {event['class']}: {event['message']}")
        if event is not None and event["type"] == end:
            return event
    raise BenchError(f"no answer to {message['type']} in {limit_s:.0f} s")


def _daemon_of(link: DaemonLink) -> psutil.Process:
    status = link.status(10.0)
    parent = psutil.Process(status["ranks"][0]["pid"]).parent() if status is not None else None
    if parent is None:
        raise BenchError("the daemon's process cannot be found")
    return parent


def _left_behind(daemon: psutil.Process, ranks: Sequence[psutil.Process]) -> list[str]:
    """What is there after the daemon's end. ranks: processes it still had before."""
    _, alive = psutil.wait_procs([daemon, *ranks], timeout=GONE_S)
    problems = [f"process {process.pid} is left" for process in alive]
    folders = Path(tempfile.gettempdir()).glob(f"mstar-{daemon.pid}-*")
    return problems + [f"{folder} is left" for folder in folders]


def print_report(report: dict[str, Any], console: Console) -> None:
    loaded, cycles = report["model"], report["cycles"]
    table = Table(
        title=f"{len(cycles)} loads of {loaded['model']}, tp {loaded['tp']}, {loaded['spec']['k']} drafts a step"
    )
    for column in ("after cycle", "MiB", "descriptors", "threads", "children", "load s", "unload s", "tau"):
        table.add_column(column, justify="right")
    shown = sorted({0, 1, 4, 9, *range(9, len(cycles), 10), len(cycles) - 1})
    for index in (i for i in shown if i < len(cycles)):
        cycle = cycles[index]
        counts = (str(cycle[name]) for name in ("descriptors", "threads", "children"))
        seconds = (f"{cycle[name]:.2f}" for name in ("load_s", "unload_s", "tau"))
        table.add_row(str(index + 1), f"{cycle['rss_bytes'] / 2**20:.1f}", *counts, *seconds)
    console.print(table)
    if report["rss"]["growth_bytes"] is not None:
        grown, bound = (report["rss"][name] / 2**20 for name in ("growth_bytes", "bound_bytes"))
        console.print(f"resident memory, first third to last: {grown:+.1f} MiB, bound {bound:.1f}")
    for problem in report["problems"]:
        console.print(f"  {problem}", style="red", markup=False)
    console.print(f"verdict: {report['verdict']}", style="green" if report["verdict"] == "good" else "red")


if __name__ == "__main__":
    main()
