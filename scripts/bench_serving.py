"""How fast the daemon serves: a closed loop at given concurrencies, with figures as table, JSON and plot.

    python -m mstar.scripts.bench_serving --workload text-chat-256 --concurrency 1,4,16 -- --tp 2
    python -m mstar.scripts.bench_serving --workload battery --arms plain,mtp1,mtp2,mtp3 --launches 3

What the columns mean is in docs/benchmarks.md.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mstar.loader.errors import LoadError
from mstar.loader.resolve import resolve
from mstar.scripts.arms import Arm, ArmError, parse_arms
from mstar.scripts.bench_arms import ArmCell, ArmPlan, arm_rows, arms_failed, measure_arms, print_arms
from mstar.scripts.harness_prompts import BUILT_IN
from mstar.scripts.planted import planted_acceptance
from mstar.scripts.serving_daemon import launched_daemon, running_daemon
from mstar.scripts.serving_floor import add_floors, served_config
from mstar.scripts.serving_load import (
    BenchError,
    DaemonLink,
    Run,
    Workload,
    make_requests,
    parse_workload,
    serve,
)
from mstar.scripts.serving_report import Results, describe_machine, plot, print_report, write_json
from mstar.scripts.transformers_peer import Cell, TransformersPeer

OURS = "mstar"
WARMUP_TOKENS = 32
FILE_WIDTH = 160  # columns of a table that goes to a file or a pipe
MIN_REQUESTS = 4  # of a timed run, so that one request at a time still has percentiles
CELLS = [Cell(dtype, threads) for dtype in ("bf16", "fp32") for threads in (1, 2)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one launch measures."""

    workloads: list[Workload]
    concurrencies: list[int]
    runs: int
    rounds: int
    seed: int

    def points(self) -> Iterator[tuple[Workload, int]]:
        for workload in self.workloads:
            for concurrency in self.concurrencies:
                yield workload, concurrency

    def requests(self, concurrency: int) -> int:
        return max(self.rounds * concurrency, MIN_REQUESTS)

    def of_arms(self, arms: list[Arm], launches: int) -> ArmPlan:
        """The same for a comparison of arms, whose passes are the runs."""
        # every prompt of the battery is in a pass
        least = max(MIN_REQUESTS, len(BUILT_IN))
        return ArmPlan(list(self.points()), arms, self.runs, self.rounds, launches, self.seed, least)


@click.command()
@click.option("--model", default="builtin:tiny", show_default=True, help="What the daemon loads.")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    default=("text-chat-256",),
    show_default=True,
    help="battery, text-chat-256, long-1k, short-128, or IN:OUT tokens; may be given more than once.",
)
@click.option("--concurrency", default="1,4,16", show_default=True, help="Requests in flight, a list.")
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1), help="Timed runs a launch.")
@click.option(
    "--rounds",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Requests of a run, in multiples of the concurrency.",
)
@click.option(
    "--launches",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Fresh daemons; figures are then medians of launches.",
)
@click.option("--seed", default=0, show_default=True, help="Of the prompts.")
@click.option("--connect", metavar="ADDRESS", help="Measure the daemon at this ZeroMQ address.")
@click.option("--compare", type=click.Choice(["transformers"]), help="Run the same work through this, too.")
@click.option(
    "--arms",
    help="Compare plain decode and speculation, as in plain,mtp1,mtp3,off3 (off: loaded, the requests decline).",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything to this file.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Write a PNG.")
@click.argument("daemon_flags", nargs=-1, type=click.UNPROCESSED)
def main(
    model: str,
    workloads: tuple[str, ...],
    concurrency: str,
    runs: int,
    rounds: int,
    launches: int,
    seed: int,
    connect: str | None,
    compare: str | None,
    arms: str | None,
    json_path: Path | None,
    plot_path: Path | None,
    daemon_flags: tuple[str, ...],
) -> None:
    """Benchmarks serving. Flags after `--` go to mstar-daemon."""
    if connect and (daemon_flags or launches > 1):
        raise click.UsageError("--connect measures a daemon as it runs: no --launches, no daemon flags")
    if arms and (connect or compare or plot_path or runs < 2):
        raise click.UsageError("--arms takes two --runs or more, and no --connect, --compare or --plot")
    console = Console(stderr=True)
    try:
        counts = _parse_counts(concurrency)
        plan = Plan([parse_workload(text) for text in workloads], counts, runs, rounds, seed)
        if compare and any(workload.chat for workload in plan.workloads):
            raise BenchError(f"--compare {compare} takes workloads of a fixed shape")
        cells: list[ArmCell] = []
        if arms:
            arm_plan = plan.of_arms(parse_arms(arms), launches)
            results, cells = measure_arms(model, arm_plan, daemon_flags, console.print)
        else:
            results = _measure(plan, launches, model, connect, compare, daemon_flags, console)
    except (ArmError, BenchError, LoadError) as error:
        console.print(f"[red]{error}")
        raise SystemExit(1) from None
    report = {
        "schema": 1,
        "command": shlex.join(["python", "-m", "mstar.scripts.bench_serving", *sys.argv[1:]]),
        "model": {"name": model if not connect else results.loaded.get("model"), **results.loaded},
        "planted": None if connect else planted_acceptance(resolve(model)),
        **describe_machine(daemon_flags),
        "plan": {"runs": runs, "rounds": rounds, "launches": launches, "seed": seed},
        "results": arm_rows(results, cells) if arms else results.rows(),
        "comparison": results.comparison(OURS),
    }
    if not arms:
        add_floors(report["results"], results.loaded, served_config(str(report["model"]["name"])), OURS)
    output = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    if arms:
        print_arms(report, output)
    else:
        print_report(report, output)
    if json_path is not None:
        write_json(report, json_path)
    if plot_path is not None:
        plot(report, plot_path)
    if arms_failed(report) if arms else any(row["failures"]["max"] for row in report["results"]):
        raise SystemExit(1)


def _measure(
    plan: Plan,
    launches: int,
    model: str,
    connect: str | None,
    compare: str | None,
    daemon_flags: Sequence[str],
    console: Console,
) -> Results:
    open_daemon = _opener(model, connect, daemon_flags)
    return measure(plan, launches, open_daemon, model if compare else None, console.print)


OpenDaemon = Callable[[], AbstractContextManager[tuple[DaemonLink, dict[str, Any]]]]


def measure(
    plan: Plan,
    launches: int,
    open_daemon: OpenDaemon,
    peer_model: str | None,
    say: Callable[[str], None],
) -> Results:
    """Runs the plan on each of `launches` daemons, with the peer's cells in turn where it has a model."""
    results = Results()
    for launch in range(launches):
        with ExitStack() as stack:
            link, results.loaded = stack.enter_context(open_daemon())
            systems: dict[str, Callable[[list[dict[str, Any]], int], Run]] = {
                OURS: lambda requests, count, link=link: serve(link, requests, count)  # type: ignore[misc]
            }
            if peer_model is not None:
                peer = TransformersPeer(resolve(peer_model))
                stack.callback(peer.close)
                for cell in CELLS:
                    systems[cell.name] = lambda requests, count, cell=cell, peer=peer: peer.run(  # type: ignore[misc]
                        cell, [r["prompt_ids"] for r in requests], requests[0]["max_tokens"], count
                    )
            for workload, concurrency in plan.points():
                say(f"launch {launch + 1}/{launches}: {workload.name}, {concurrency} at once")
                _measure_point(plan, launch, workload, concurrency, systems, results)
    return results


def _measure_point(
    plan: Plan,
    launch: int,
    workload: Workload,
    concurrency: int,
    systems: dict[str, Callable[[list[dict[str, Any]], int], Run]],
    results: Results,
) -> None:
    """A warm-up and the timed runs of one point; the systems take turns, so that drift meets all alike."""
    vocab = results.loaded["vocab"]
    for run in range(-1, plan.runs):
        count = concurrency if run < 0 else plan.requests(concurrency)
        requests = make_requests(workload, count, vocab, plan.seed * 1000 + launch * 100 + run)
        if run < 0:
            requests = [{**r, "max_tokens": min(r["max_tokens"], WARMUP_TOKENS)} for r in requests]
        for system, run_requests in systems.items():
            served = run_requests(requests, concurrency)
            if run >= 0:
                results.add(workload, concurrency, system, launch, served)


def _opener(model: str, connect: str | None, flags: Sequence[str]) -> OpenDaemon:
    if connect is not None:
        address = connect
        return lambda: running_daemon(address)
    return lambda: launched_daemon(model, flags)


def _parse_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise BenchError(f"--concurrency {text!r}: give positive numbers, as in 1,4,16")
    return counts


if __name__ == "__main__":
    main()
