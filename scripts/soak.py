"""Whether the daemon stands a crowd: many clients for a while, each end counted, every leak looked for.

    python -m mstar.scripts.soak --clients 64 --seconds 60 --seed 1 -- --tp 2

Clients of both faces ask for everything that the protocol knows, a third of it is aborted at random
moments, some connections are cut, and one of each face never reads. The verdict is good when

- every request of a living connection had exactly one terminal event, of a kind that it was meant for;
- `stats` is back where it began: no block, slot or request is held;
- the resident memory of daemon and ranks is flat, and no file descriptor is left open;
- greedy answers are the same as before.

It needs psutil, which the `test` extra brings.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
import zmq.asyncio
from rich.console import Console
from rich.table import Table

from mstar.scripts.growth import thirds
from mstar.scripts.serving_daemon import launched_daemon, running_daemon
from mstar.scripts.serving_load import BenchError, DaemonLink
from mstar.scripts.serving_report import describe_machine, write_json
from mstar.scripts.soak_clients import Stage, run_clients
from mstar.scripts.soak_traffic import QUESTIONS, Draw, Ledger, Shape

# Growth of a process's resident memory between the medians of the first and the last third of the soak
# (its first seconds left out: caches, pools and the allocator's arenas fill then).
GROWTH_BYTES = 32 * 2**20
GROWTH_SHARE = 0.05
RAMP_SHARE = 0.2
FILE_WIDTH = 160  # columns of a table that goes to a file or a pipe
LEAST_SAMPLES = 12  # fewer say nothing about growth
DESCRIPTORS_SLACK = 2
# A ZeroMQ client that was cut while its request waits is found by its lease, 30 s by default.
SETTLE_S = 60.0
STATS_S = 10.0


@dataclass(slots=True)
class Memory:
    """Resident bytes of one process, a sample a second."""

    name: str
    process: psutil.Process
    samples: list[int] = field(default_factory=list)

    def sample(self) -> None:
        self.samples.append(self.process.memory_info().rss)

    def report(self) -> dict[str, Any]:
        """Medians of the first and last third; `growth_bytes` is None where there are too few samples."""
        steady = self.samples[int(len(self.samples) * RAMP_SHARE) :]
        if len(steady) < LEAST_SAMPLES:
            return {"first_bytes": None, "last_bytes": None, "growth_bytes": None, "bound_bytes": None}
        first, last = thirds(steady)
        bound = max(GROWTH_BYTES, int(GROWTH_SHARE * first))
        return {"first_bytes": first, "last_bytes": last, "growth_bytes": last - first, "bound_bytes": bound}


@click.command()
@click.option("--model", default="builtin:tiny", show_default=True, help="What the daemon loads.")
@click.option("--clients", default=64, show_default=True, type=click.IntRange(1), help="Clients at once.")
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(0.1), help="Of asking.")
@click.option("--seed", default=0, show_default=True, help="Of what is asked.")
@click.option(
    "--longest", default=3000, show_default=True, type=click.IntRange(5), help="Longest prompt, tokens."
)
@click.option("--connect", metavar="ADDRESS", help="Use the daemon at this ZeroMQ address.")
@click.option("--connect-line", metavar="ADDRESS", help="Its line face.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything to this file.")
@click.argument("daemon_flags", nargs=-1, type=click.UNPROCESSED)
def main(
    model: str,
    clients: int,
    seconds: float,
    seed: int,
    longest: int,
    connect: str | None,
    connect_line: str | None,
    json_path: Path | None,
    daemon_flags: tuple[str, ...],
) -> None:
    """Soaks a daemon. Flags after `--` go to mstar-daemon."""
    if connect and daemon_flags:
        raise click.UsageError("--connect takes a daemon as it runs: no daemon flags")
    console = Console(stderr=True)
    try:
        with _daemon(model, connect, connect_line, daemon_flags) as (link, loaded, line_address):
            console.print(
                f"{clients} clients for {seconds:g} s on {loaded['model']}, tp {loaded['tp']}, seed {seed}"
            )
            report = _soak(link, line_address, loaded, clients, seconds, seed, longest)
    except BenchError as error:
        console.print(f"[red]{error}")
        raise SystemExit(1) from None
    report |= {
        "schema": 1,
        "command": shlex.join(["python", "-m", "mstar.scripts.soak", *sys.argv[1:]]),
        "model": loaded,
        **describe_machine(daemon_flags),
        "plan": {"clients": clients, "seconds": seconds, "seed": seed, "longest": longest},
    }
    _print(report, Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH))
    if json_path is not None:
        write_json(report, json_path)
    raise SystemExit(0 if report["verdict"] == "good" else 1)


@contextmanager
def _daemon(
    model: str, connect: str | None, connect_line: str | None, flags: Sequence[str]
) -> Iterator[tuple[DaemonLink, dict[str, Any], str | None]]:
    if connect is not None:
        with running_daemon(connect) as (link, loaded):
            yield link, loaded, connect_line
        return
    with tempfile.TemporaryDirectory(prefix="mstar-soak-") as folder:
        line = f"unix:{folder}/line"
        quiet = ["--log-level", "warning", *flags]
        with launched_daemon(model, quiet, line=line) as (link, loaded):
            yield link, loaded, line


def _soak(
    link: DaemonLink,
    line_address: str | None,
    loaded: dict[str, Any],
    clients: int,
    seconds: float,
    seed: int,
    longest: int,
) -> dict[str, Any]:
    status = link.status(STATS_S)
    if status is None:
        raise BenchError("the daemon does not answer `status`")
    processes = _processes(status)
    memory = [Memory(name, process) for name, process in processes.items()]
    answers = _answers(link)
    before = _stats(link)
    descriptors = {name: process.num_fds() for name, process in processes.items()}
    shape = Shape(
        longest=min(longest, loaded["max_seq"] - 8), vocab=loaded["vocab"], max_seq=loaded["max_seq"]
    )
    ledger = Ledger()
    began = time.monotonic()
    asyncio.run(_crowd(link.address, line_address, ledger, clients, seconds, seed, shape, memory))
    crowd_s = time.monotonic() - began
    after, settle_s = _settle(link, before)
    problems = _problems(ledger, memory, before, after, processes, descriptors)
    if _answers(link) != answers:
        problems.append("greedy answers are not what they were before")
    ends = ledger.counts()
    return {
        "verdict": "bad" if problems or ledger.broken else "good",
        "problems": problems + ledger.problems,
        "requests": len(ledger.asks),
        "ends": ends,
        "fates": ledger.fates(),
        "seconds": round(crowd_s, 1),
        "drain_s": round(max(0.0, crowd_s - seconds), 1),
        "settle_s": round(settle_s, 1),
        "stats_before": before,
        "stats_after": after,
        "tokens": after["tokens"]["completion"] - before["tokens"]["completion"],
        "preemptions": after["preemptions"] - before["preemptions"],
        "memory": {entry.name: entry.report() for entry in memory},
    }


async def _crowd(
    address: str,
    line_address: str | None,
    ledger: Ledger,
    clients: int,
    seconds: float,
    seed: int,
    shape: Shape,
    memory: list[Memory],
) -> None:
    context = zmq.asyncio.Context()
    until = time.monotonic() + seconds
    stage = Stage(address, line_address, ledger, until, context, most_tokens=shape.max_seq - 8)
    watching = asyncio.create_task(_watch(memory, stage))
    try:
        await run_clients(stage, clients, clients > 2, seed, lambda name: Draw(name, shape))
    finally:
        watching.cancel()
        context.destroy(linger=0)


async def _watch(memory: list[Memory], stage: Stage) -> None:
    """Samples while requests come in; the quiet at the end would hide growth."""
    while not stage.over():
        for entry in memory:
            try:
                entry.sample()
            except psutil.Error as error:
                stage.ledger.problem(f"{entry.name} is gone: {error}")
                return
        await asyncio.sleep(1.0)


def _processes(status: dict[str, Any]) -> dict[str, psutil.Process]:
    ranks = {f"rank {rank['rank']}": psutil.Process(rank["pid"]) for rank in status["ranks"]}
    daemon = ranks["rank 0"].parent()
    if daemon is None:
        raise BenchError("rank 0 has no parent")
    return {"daemon": daemon, **ranks}


def _ask(link: DaemonLink, message: dict[str, Any], *ends: str) -> list[dict[str, Any]]:
    """The events up to one of these types. Raises BenchError after a minute."""
    link.send(message)
    events: list[dict[str, Any]] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        event = link.receive(1.0)
        if event is not None:
            events.append(event)
            if event["type"] in ends:
                return events
    raise BenchError(f"no answer to {message['type']} in 60 s")


def _stats(link: DaemonLink) -> dict[str, Any]:
    return _ask(link, {"type": "stats"}, "stats", "error")[-1]


def _answers(link: DaemonLink) -> list[str]:
    """Greedy answers to a few questions, one after the other."""
    answers = []
    for number, question in enumerate(QUESTIONS[:4]):
        message = {
            "type": "generate",
            "id": f"soak-answer-{time.monotonic_ns()}-{number}",
            "attempt_id": 0,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 32,
        }
        events = _ask(link, message, "done", "error")
        answers.append("".join(event["text"] for event in events if event["type"] == "token"))
    return answers


def _held(stats: dict[str, Any]) -> dict[str, int]:
    """What requests hold, by name; all zero when nothing runs."""
    return {
        "blocks": stats["blocks"]["used"],
        "slots": stats["slots"]["used"],
        **{f"{name} requests": count for name, count in stats["queues"].items()},
    }


def _settle(link: DaemonLink, before: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Waits until nothing more is held than before; the last `stats` either way, and the seconds waited."""
    began = time.monotonic()
    while True:
        stats = _stats(link)
        waited = time.monotonic() - began
        if _held(stats) == _held(before) or waited > SETTLE_S:
            return stats, waited
        time.sleep(0.25)


def _problems(
    ledger: Ledger,
    memory: list[Memory],
    before: dict[str, Any],
    after: dict[str, Any],
    processes: dict[str, psutil.Process],
    descriptors: dict[str, int],
) -> list[str]:
    found = [f"{ask.key} has no terminal event" for ask in ledger.unended()]
    if _held(after) != _held(before):
        found.append(f"held after {SETTLE_S:.0f} s: {_held(after)}, before: {_held(before)}")
    booked = sum(after["requests"].values()) - sum(before["requests"].values())
    # what a cut connection had not sent yet never arrived
    orphans = sum(ask.orphaned for ask in ledger.asks.values())
    if not len(ledger.asks) - orphans <= booked <= len(ledger.asks):
        found.append(f"{len(ledger.asks)} requests were sent, the daemon counted {booked} ends")
    for entry in memory:
        report = entry.report()
        if report["growth_bytes"] is not None and report["growth_bytes"] > report["bound_bytes"]:
            grown, bound = (report[name] / 2**20 for name in ("growth_bytes", "bound_bytes"))
            found.append(f"{entry.name} grew by {grown:.1f} MiB, over the bound of {bound:.1f}")
    for name, process in processes.items():
        if not process.is_running():
            found.append(f"{name} is gone")
        elif process.num_fds() > descriptors[name] + DESCRIPTORS_SLACK:
            found.append(f"{name} has {process.num_fds()} open descriptors, {descriptors[name]} before")
    return found


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table("memory, MiB", "first third", "last third", "growth", "bound")
    for name, entry in report["memory"].items():
        cells = [entry[f"{part}_bytes"] for part in ("first", "last", "growth", "bound")]
        table.add_row(name, *("-" if cell is None else f"{cell / 2**20:.1f}" for cell in cells))
    console.print(table)
    for title in ("fates", "ends"):
        console.print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in report[title].items()))
    console.print(
        f"{report['requests']} requests, {report['tokens']} tokens, {report['preemptions']} preemptions, "
        f"{report['seconds']} s (drained for {report['drain_s']}, settled in {report['settle_s']})"
    )
    if any(entry["growth_bytes"] is None for entry in report["memory"].values()):
        console.print("memory was not compared: too few samples, give it more --seconds", style="yellow")
    for problem in report["problems"]:
        console.print(f"  {problem}", style="red", markup=False)
    console.print(f"verdict: {report['verdict']}", style="green" if report["verdict"] == "good" else "red")


if __name__ == "__main__":
    main()
