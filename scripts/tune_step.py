"""Tunes which kernel runs each linear layer inside a model's captured decode step.

    python -m mstar.scripts.tune_step MODEL --batch 1,16 --table FILE

A kernel that is fastest alone need not be fastest in a step, where it waits for the one before it and its weights are
read meanwhile. Each candidate of each size takes its turn in the whole step; one that makes the step faster stays.
"""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import torch

from mstar.kernels.bench.compile import CompilePool
from mstar.kernels.registry import OP, GemmKey, KernelChoice, Linears, Table, device_name, linears, stack
from mstar.loader import LoadError
from mstar.ranks.cache import blocks_for
from mstar.ranks.plan import bucket_of
from mstar.scripts.offline_engine import OfflineEngine
from mstar.scripts.offline_model import OfflineModel

if TYPE_CHECKING:
    from mstar.kernels.triton_ops import TritonOps

REPLAYS, SAMPLES = 10, 7  # steps a sample at most, and samples: the median counts
SAMPLE_US = 8000.0  # that a sample takes, if that is two steps or more
LEAST_GAIN = 0.003  # of the step: what the samples of one step differ by
LOST = 1.01  # a step slower than the best by this after one sample is not measured further
COMPILE_SHARE = 0.4  # of a batch size's time
# Linears that all stream hide each other's reads, and no one of them shows it alone: a step of them is where the
# descent starts if it is at most so much slower than the table's before anything of it was tuned.
WORTH_A_START = 1.03


Tries = Callable[[GemmKey, KernelChoice], list[KernelChoice]]  # of a size and what it has now
Firsts = Callable[[GemmKey], KernelChoice | None]
# of a size: its choice, and the step's time in microseconds with each candidate
Found = dict[GemmKey, tuple[KernelChoice, dict[KernelChoice, float]]]


class Trying(Table):
    """Remembers the sizes that a step asks for, and answers with what is being tried."""

    def __init__(self, base: Table, defaults: Linears):
        super().__init__(defaults, base.choices, base.notes)
        self.asked: dict[GemmKey, int] = {}
        self.tried: dict[GemmKey, KernelChoice] = {}

    def choose(self, key: GemmKey) -> KernelChoice:
        self.asked[key] = self.asked.get(key, 0) + 1
        return self.tried.get(key) or super().choose(key)


def sizes_by_worth(asked: dict[GemmKey, int]) -> list[GemmKey]:
    """The sizes of a step, those that read most first; but residuals', in whose tiles the others' squares are, lead."""
    return sorted(asked, key=lambda key: (key.kind != "residual", -asked[key] * key.n * key.k))


def descend(
    table: Trying,
    candidates: Tries,
    variants: Tries,
    step_us: Callable[[float], float],
    until: float,
    say: Callable[[str], None],
) -> dict[GemmKey, dict[KernelChoice, float]]:
    """Tries every candidate of every size in turn, `sizes_by_worth`, and before and after that the choices' variants.

    candidates, variants: of a size, beside what it has now; variants one after another, each of what is best by then.

    step_us: captures and times the step with the table as it is; it may raise where a candidate does not run, and
    stop early where the step takes longer than its argument. until: of time.monotonic(). Returns the step's time
    with each candidate, and leaves the best in `table.tried`.
    """
    best = step_us(math.inf)
    keys = sizes_by_worth(table.asked)
    times: dict[GemmKey, dict[KernelChoice, float]] = {key: {table.choose(key): best} for key in keys}

    def try_all(key: GemmKey, choices: list[KernelChoice]) -> None:
        nonlocal best
        kept = table.choose(key)
        for choice in choices:
            if choice == kept or time.monotonic() > until:
                continue
            table.tried[key] = choice
            try:
                took = step_us(best * LOST)
            except Exception as error:
                say(f"{key.name} {choice.name}: {type(error).__name__}")
                continue
            times[key][choice] = took
            if took < best * (1 - LEAST_GAIN):
                say(f"{key.name}: {best:.1f} -> {took:.1f} us with {choice.name}")
                best, kept = took, choice
        table.tried[key] = kept

    def try_variants(key: GemmKey) -> None:
        # parameters' values that are in, or were tried on top of what was
        known: set[tuple[str, int]] = set()
        while True:
            now = table.choose(key)
            moves = [(changed(now, each), each) for each in variants(key, now)]
            left = [(move, each) for move, each in moves if move and move not in known]
            if not left:
                return
            move, each = left[0]
            known |= {move, (move[0], dict(now.params).get(move[0], 0))}
            try_all(key, [each])

    for key in keys:
        try_variants(key)
    for key in keys:
        try_all(key, candidates(key, table.choose(key)))
    for key in keys:
        try_variants(key)
    return times


def changed(now: KernelChoice, other: KernelChoice) -> tuple[str, int] | None:
    """The first parameter of a choice's variant that is another, and its value, 0 if it is left out; or None."""
    old, new = dict(now.params), dict(other.params)
    return next(
        ((name, new.get(name, 0)) for name in {**old, **new} if old.get(name, 0) != new.get(name, 0)), None
    )


def searched(candidates: Tries, firsts: Firsts, habits_only: bool) -> tuple[Tries, Firsts]:
    """The kernels that a descent tries beside habits, and those that it may start from; none with habits_only."""
    if habits_only:
        return lambda key, now: [], lambda key: None
    return candidates, firsts


def start_together(table: Trying, firsts: Firsts, step_us: Callable[[float], float]) -> tuple[float, bool]:
    """Puts all sizes to their first choice of a kind at once where that is no worse than WORTH_A_START.

    firsts: of a size, or None. Returns the step's time with the table as it was, and whether the start moved.
    """
    was = step_us(math.inf)
    found = {key: first for key in table.asked if (first := firsts(key)) is not None}
    kept = dict(table.tried)
    table.tried.update(found)
    try:
        if found and step_us(was * WORTH_A_START) < was * WORTH_A_START:
            return was, True
    except Exception as error:  # one of them does not run here
        click.echo(f"not from all streaming: {type(error).__name__}: {error}")
    table.tried = kept
    return was, False


def take_back(table: Trying, times: dict[GemmKey, dict[KernelChoice, float]], before: float) -> None:
    """Puts a step that ended slower than it was to the table's own choices, whose time was `before`."""
    table.tried = {}
    for key, each in times.items():
        each[table.choose(key)] = before


def known_tiles(table: Table, keys: Iterable[GemmKey]) -> tuple[int, ...]:
    """In how many tiles a step's residual linears leave the squares of a row."""
    found = set()
    for key in keys:
        params = dict(table.choose(key).params)
        width = params.get("BLOCK_N")
        if key.kind == "residual" and width and not params.get("SUM_AFTER"):
            found.add(-(-key.n // width))
    return tuple(sorted(found))


def jobs_of(
    table: Trying, candidates: Tries, variants: Tries, with_params: Callable[..., KernelChoice]
) -> Iterator[tuple[GemmKey, KernelChoice]]:
    """What may be tried: each candidate of a residual with and without a kernel that adds up and norms after it."""
    for key in sizes_by_worth(table.asked):
        for tries in (variants, candidates):
            for choice in tries(key, table.choose(key)):
                yield key, choice
                if key.kind == "residual" and choice.kernel != "cublas":
                    yield key, with_params(choice, SUM_AFTER=1 - dict(choice.params).get("SUM_AFTER", 0))


def write_choices(
    path: Path, where: tuple[str, str], defaults: Linears, found: Found, habits_only: bool = False
) -> int:
    """Puts what was found into a device's table, a new one if there is none. Returns how many choices moved.

    where: architecture and device. Every candidate is kept beside the choice with its step's time; with habits_only
    also the times of the tuning before that tried all, of another step and so not to be compared with the new ones.
    """
    table: dict[str, Any] = {"op": OP, "arch": where[0], "device": where[1], "stack": stack(), "entries": {}}
    if path.exists():
        table = json.loads(path.read_text())
    moved = 0
    for key, (choice, times) in found.items():
        empty = {"choice": "", "default": defaults.default(key).name, "use": "", "candidates": {}}
        entry = table["entries"].setdefault(key.name, empty)
        for tried in times:
            alone = {
                "kernel": tried.kernel,
                "launches": defaults.launches(tried, key),
                "params": dict(tried.params),
            }
            entry["candidates"].setdefault(tried.name, {**alone, "us": []}).pop("error", None)
        if habits_only and "step_us" in entry:
            entry.setdefault("step_us_of_all", entry["step_us"])
        elif not habits_only:
            entry.pop("step_us_of_all", None)
        entry["step_us"] = {tried.name: round(us, 1) for tried, us in times.items()}
        moved += entry["choice"] != choice.name
        entry["choice"] = choice.name
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return moved


def check_table(path: Path, where: tuple[str, str]) -> None:
    """Raises ClickException where a table is another device's, or was measured on another stack."""
    if not path.exists():
        return
    table = json.loads(path.read_text())
    ours = {"arch": where[0], "device": where[1], "stack": stack()}
    for name, value in ours.items():
        if table[name] != value:
            raise click.ClickException(
                f"{path} is for {name} {table[name]}, and this is {value}: name another file"
            )


class Step:
    """A captured step of `batch` sequences at `context` tokens, and its time."""

    def __init__(self, model: OfflineModel, batch: int, context: int) -> None:
        rounded = -(-(context + REPLAYS * SAMPLES * 2 + 64) // 16) * 16
        buckets = (bucket_of(batch),)
        self._engine = OfflineEngine(
            model, drafts=0, max_num_seqs=batch, max_seq=rounded, eager=True, buckets=buckets
        )
        assert self._engine.steps is not None, "a GPU's operations keep steps on the device"
        self._steps, executor = self._engine.steps, self._engine.executor
        self._ops: TritonOps = model.trunk.ops  # type: ignore[assignment]
        self._lengths, self._context = executor.lengths, context
        blocks = blocks_for(rounded)
        table = torch.arange(1, batch * blocks + 1, dtype=torch.int32, device=executor.device)
        executor.block_table[1 : batch + 1, :blocks] = table.view(batch, blocks)
        self._batch, self._bucket = batch, buckets[0]
        self._replays = REPLAYS
        self._steps.place(list(range(1, batch + 1)), self._bucket)

    def us(self, limit: float) -> float:
        """Captures the step and times it; by one sample where that is above the limit.

        Raises RuntimeError where a kernel that is being tried does not fit the GPU.
        """
        known = set(self._ops.refused)
        graph = self._steps.captured(self._bucket)
        if self._ops.refused - known:
            raise RuntimeError("does not fit this GPU")
        samples: list[float] = []
        for sample in range(SAMPLES + 1):
            self._lengths[1 : self._batch + 1].fill_(self._context)
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(torch.cuda.current_stream())
            for _ in range(self._replays):
                graph.replay()
            ended.record(torch.cuda.current_stream())
            ended.synchronize()
            took = float(1e3 * begun.elapsed_time(ended) / self._replays)
            self._replays = max(2, min(REPLAYS, int(SAMPLE_US / took)))
            if sample:  # the first one warms up
                samples.append(took)
                if samples[0] > limit:
                    break
        return median(samples)

    def end(self) -> None:
        self._engine.end()


@click.command()
@click.argument("model")
@click.option("--batch", default="1,4,16,64", show_default=True, help="Sequences of a step, a list.")
@click.option("--context", type=click.IntRange(1), default=512, show_default=True, help="Tokens of each.")
@click.option("--dtype", default="auto", show_default=True, help="As `load` takes it.")
@click.option(
    "--table", "table_path", type=click.Path(dir_okay=False, path_type=Path), help="Write its choices."
)
@click.option(
    "--budget-s", type=float, default=300.0, show_default=True, help="Try nothing further after it."
)
@click.option("--habits-only", is_flag=True, help="Keep each size's kernel and tiles.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all times.")
def main(
    model: str,
    batch: str,
    context: int,
    dtype: str,
    table_path: Path | None,
    budget_s: float,
    habits_only: bool,
    json_path: Path | None,
) -> None:
    """Tunes the linears of MODEL's decode step on this GPU."""
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU: there is no captured step to tune")
    try:
        loaded = OfflineModel(model, dtype, "cuda")
    except LoadError as error:
        raise click.ClickException(f"{error}") from error
    # Triton, which needs a GPU
    from mstar.kernels.linear.gpu.candidates import step_candidates, streaming, variants, with_params

    others, firsts = searched(step_candidates, streaming, habits_only)
    where = device_name(loaded.device)
    if table_path is not None:
        check_table(table_path, where)
    ops, defaults = loaded.trunk.ops, linears()
    until = time.monotonic() + budget_s
    pool = CompilePool(max(1, (os.cpu_count() or 2) - 2))
    gc.freeze()  # a capture collects garbage first, through all that torch and Triton are made of
    report: dict[str, Any] = {}
    sizes = [int(size) for size in batch.split(",")]
    for place, size in enumerate(sizes):
        step = Step(loaded, size, context)
        table = Trying(ops.table, defaults)  # type: ignore[attr-defined]
        ops.table = table  # type: ignore[attr-defined]
        step.us(math.inf)  # the table learns the sizes
        share = (until - time.monotonic()) / (len(sizes) - place)
        end = time.monotonic() + share
        jobs = list(dict.fromkeys(jobs_of(table, others, variants, with_params)))
        skinny = [job for job in jobs if job[1].kernel != "cublas"]
        pool.compile(skinny, share * COMPILE_SHARE, known_tiles(table, table.asked))
        before, moved = start_together(table, firsts, step.us)
        times = descend(table, others, variants, step.us, end, click.echo)
        after = step.us(math.inf)
        if moved and after > before:
            take_back(table, times, before)
            after = before
        started = ", from all streaming" if moved else ""
        click.echo(
            f"batch {size}{started}: {before:.1f} -> {after:.1f} us, {sum(map(len, times.values()))} tried"
        )
        found = {key: (table.choose(key), each) for key, each in times.items()}
        report[str(size)] = {
            "before_us": before,
            "after_us": after,
            "sizes": {
                key.name: {"choice": choice.name, "step_us": {tried.name: us for tried, us in each.items()}}
                for key, (choice, each) in found.items()
            },
        }
        if table_path is not None:
            moved_sizes = write_choices(table_path, where, defaults, found, habits_only)
            click.echo(f"{table_path}: {moved_sizes} sizes moved")
        step.end()
    pool.close()
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
