"""Tunes which kernel runs each linear layer inside a model's captured decode step.

    python -m mstar.scripts.tune_step MODEL --batch 1,16 --table FILE

A kernel that is fastest alone need not be fastest in a step, where it waits for the one before it and its weights are
read meanwhile. Each candidate of each size takes its turn in the whole step; one that makes the step faster stays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from mstar.kernels.registry import GemmKey, KernelChoice, Linears, Table, linears
from mstar.loader import LoadError
from mstar.ranks.cache import blocks_for
from mstar.ranks.plan import bucket_of
from mstar.scripts.offline_engine import OfflineEngine
from mstar.scripts.offline_model import OfflineModel

REPLAYS, SAMPLES = 10, 7  # steps a sample, and samples: the median counts
LEAST_GAIN = 0.003  # of the step: what the samples of one step differ by


class Trying(Table):
    """Remembers the sizes that a step asks for, and answers with what is being tried."""

    def __init__(self, base: Table, defaults: Linears):
        super().__init__(defaults, base.choices, base.notes)
        self.asked: dict[GemmKey, int] = {}
        self.tried: dict[GemmKey, KernelChoice] = {}

    def choose(self, key: GemmKey) -> KernelChoice:
        self.asked[key] = self.asked.get(key, 0) + 1
        return self.tried.get(key) or super().choose(key)


def descend(
    table: Trying,
    candidates: Callable[[GemmKey], list[KernelChoice]],
    step_us: Callable[[], float],
    until: float,
    say: Callable[[str], None],
) -> dict[GemmKey, dict[str, float]]:
    """Tries every candidate of every size in turn, those that the step runs most often first.

    step_us: captures and times the step with the table as it is; it may raise where a candidate does not run.
    until: of time.monotonic(). Returns the step's time with each candidate, and leaves the best in `table.tried`.
    """
    best = step_us()
    keys = sorted(table.asked, key=lambda key: -table.asked[key] * key.n * key.k)
    times: dict[GemmKey, dict[str, float]] = {}
    for key in keys:
        kept = table.choose(key)
        times[key] = {kept.name: best}
        for choice in candidates(key):
            if choice == kept or time.monotonic() > until:
                continue
            table.tried[key] = choice
            try:
                took = step_us()
            except Exception as error:
                say(f"{key.name} {choice.name}: {type(error).__name__}")
                continue
            times[key][choice.name] = took
            if took < best * (1 - LEAST_GAIN):
                say(f"{key.name}: {best:.1f} -> {took:.1f} us with {choice.name}")
                best, kept = took, choice
        table.tried[key] = kept
    return times


def write_choices(path: Path, found: dict[GemmKey, tuple[KernelChoice, dict[str, float]]]) -> int:
    """Moves sizes that a table has to the choices found. Returns how many moved."""
    table: dict[str, Any] = json.loads(path.read_text())
    moved = 0
    for key, (choice, times) in found.items():
        entry = table["entries"].get(key.name)
        if entry is None:
            continue
        entry["step_us"] = {name: round(us, 1) for name, us in sorted(times.items())}
        if entry["choice"] != choice.name:
            alone = {
                "kernel": choice.kernel,
                "params": dict(choice.params),
                "us": [],
            }  # not measured by itself
            entry["candidates"].setdefault(choice.name, alone).pop("error", None)
            entry["choice"] = choice.name
            moved += 1
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return moved


class Step:
    """A captured step of `batch` sequences at `context` tokens, and its time."""

    def __init__(self, model: OfflineModel, batch: int, context: int) -> None:
        rounded = -(-(context + REPLAYS * SAMPLES * 2 + 64) // 16) * 16
        self._engine = OfflineEngine(model, drafts=0, max_num_seqs=batch, max_seq=rounded, eager=True)
        assert self._engine.steps is not None, "a GPU's operations keep steps on the device"
        self._steps, executor = self._engine.steps, self._engine.executor
        self._lengths, self._context = executor.lengths, context
        blocks = blocks_for(rounded)
        table = torch.arange(1, batch * blocks + 1, dtype=torch.int32, device=executor.device)
        executor.block_table[1 : batch + 1, :blocks] = table.view(batch, blocks)
        self._batch, self._bucket = batch, bucket_of(batch)
        self._steps.place(list(range(1, batch + 1)), self._bucket)

    def us(self) -> float:
        """Captures the step and times it."""
        graph = self._steps.captured(self._bucket)
        samples: list[float] = []
        for sample in range(SAMPLES + 1):
            self._lengths[1 : self._batch + 1].fill_(self._context)
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(torch.cuda.current_stream())
            for _ in range(REPLAYS):
                graph.replay()
            ended.record(torch.cuda.current_stream())
            ended.synchronize()
            if sample:  # the first one warms up
                samples.append(float(1e3 * begun.elapsed_time(ended) / REPLAYS))
        return median(samples)

    def end(self) -> None:
        self._engine.end()


@click.command()
@click.argument("model")
@click.option("--batch", default="1,4,16,64", show_default=True, help="Sequences of a step, a list.")
@click.option("--context", type=click.IntRange(1), default=512, show_default=True, help="Tokens of each.")
@click.option("--dtype", default="auto", show_default=True, help="As `load` takes it.")
@click.option(
    "--table", "table_path", type=click.Path(dir_okay=False, path_type=Path), help="Move its choices."
)
@click.option(
    "--budget-s", type=float, default=300.0, show_default=True, help="Try nothing further after it."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all times.")
def main(
    model: str,
    batch: str,
    context: int,
    dtype: str,
    table_path: Path | None,
    budget_s: float,
    json_path: Path | None,
) -> None:
    """Tunes the linears of MODEL's decode step on this GPU."""
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU: there is no captured step to tune")
    try:
        loaded = OfflineModel(model, dtype, "cuda")
    except LoadError as error:
        raise click.ClickException(f"{error}") from error
    from mstar.kernels.linear.gpu.candidates import step_candidates  # Triton, which needs a GPU

    ops, defaults = loaded.trunk.ops, linears()
    until = time.monotonic() + budget_s
    report: dict[str, Any] = {}
    sizes = [int(size) for size in batch.split(",")]
    for place, size in enumerate(sizes):
        step = Step(loaded, size, context)
        table = Trying(ops.table, defaults)  # type: ignore[attr-defined]
        ops.table = table  # type: ignore[attr-defined]
        before = step.us()
        share = (until - time.monotonic()) / (len(sizes) - place)
        times = descend(table, step_candidates, step.us, time.monotonic() + share, click.echo)
        after = step.us()
        click.echo(f"batch {size}: {before:.1f} -> {after:.1f} us, {sum(map(len, times.values()))} tried")
        found = {key: (table.choose(key), each) for key, each in times.items()}
        report[str(size)] = {
            "before_us": before,
            "after_us": after,
            "sizes": {key.name: {"choice": c.name, "step_us": each} for key, (c, each) in found.items()},
        }
        if table_path is not None:
            click.echo(f"{table_path}: {write_choices(table_path, found)} sizes moved")
        step.end()
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
