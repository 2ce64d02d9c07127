"""The passes over a size's candidates, and the sizes in the order of what they are worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from mstar.kernels.bench.store import Json, Measured, Store
from mstar.kernels.registry import GemmKey, KernelChoice, Linears

# Of the first pass, these many of the fastest go on, and the default.
KEPT = 4
# One request first, then what small groups make; sizes between them last.
ROWS_BY_WORTH = (1, 4, 16, 64, 2, 8, 32, 128, 256)

Pass = Callable[[], float]  # one pass over a candidate: microseconds a call


class DeviceLost(Exception):
    """The device answers nothing any more: a candidate wrote where it must not. Nothing after it can be timed."""


class Rig(Protocol):
    """What checks and times candidates; `measure.GpuRig` on a GPU."""

    def compile(self, jobs: list[tuple[GemmKey, KernelChoice]], seconds: float) -> None:
        """Makes ready what can be made ready for many at once, in that time at most."""
        ...

    def prepare(self, key: GemmKey, choice: KernelChoice) -> Pass:
        """Checks a candidate, eager and from a graph. Raises for one that fails, saying how; or DeviceLost."""
        ...

    def release(self) -> None:
        """Frees what the prepared candidates of a size hold."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One size of one model."""

    model: str  # the store's file
    key: GemmKey
    use: str


def measure_size(key: GemmKey, linears: Linears, rig: Rig, passes: int) -> Json:
    """A size's entry of the store.

    All candidates run in turn in each pass, every other pass backwards, so that a device that drifts does so
    for all of them.
    """
    default = linears.default(key)
    choices = {choice.name: choice for choice in [default, *linears.candidates(key)]}
    entries: dict[str, Json] = {}
    ready: dict[str, Pass] = {}
    for name, choice in choices.items():
        entries[name] = {
            "kernel": choice.kernel,
            "params": dict(choice.params),
            "launches": linears.launches(choice, key),
        }
        try:
            ready[name] = rig.prepare(key, choice)
        except DeviceLost:
            raise
        except Exception as error:  # of any kind: a candidate's failure is a result
            entries[name]["error"] = _first_line(error)
    times: dict[str, list[float]] = {name: [] for name in ready}
    running = list(ready)
    for number in range(passes):
        for name in running if number % 2 == 0 else reversed(running):
            times[name].append(round(ready[name](), 3))
        if number == 0:
            fastest = sorted(running, key=lambda name: times[name][0])[:KEPT]
            running = [name for name in running if name in fastest or name == default.name]
    ready.clear()
    rig.release()
    for name, us in times.items():
        entries[name]["us"] = us
    return {"default": default.name, "candidates": entries}


def tune(
    jobs: Iterable[Job],
    *,
    linears: Linears,
    rig: Rig,
    store: Store,
    under: Measured,
    passes: int,
    budget_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[dict[str, Json], list[Job]]:
    """Measures what the store lacks until the time is up: new sizes by name, and the jobs left.

    Raises DeviceLost; what was measured before is in the store.
    """
    end = clock() + budget_s
    known = store.sizes()
    left = [job for job in jobs if job.key.name not in known]
    left.sort(key=lambda job: ROWS_BY_WORTH.index(job.key.rows))
    done: dict[str, Json] = {}
    compiled = 0  # rows whose candidates are compiled
    while left and clock() < end:
        job = left[0]
        if job.key.rows != compiled:
            compiled, started = job.key.rows, clock()
            same = dict.fromkeys(other.key for other in left if other.key.rows == compiled)
            pairs = [(key, choice) for key in same for choice in linears.candidates(key)]
            rig.compile(pairs, end - started)
            say(f"rows {compiled}: {len(pairs)} candidates, compiled in {clock() - started:.1f} s")
            if clock() >= end:
                break
        left.pop(0)
        name = job.key.name
        if name in known:
            continue
        started = clock()
        done[name] = {"use": job.use, **measure_size(job.key, linears, rig, passes)}
        store.add(job.model, under, name, done[name])
        known.add(name)
        say(f"{name} ({job.use}): {clock() - started:.1f} s, {len(left)} left, {end - clock():.0f} s")
    return done, left


def table_of(sizes: Mapping[str, Json]) -> list[str]:
    """Lines of a compact table: each size's default and best in us, median over the passes."""
    lines = [f"{'size':<34}{'default':>9}{'best':>9}  TB/s  candidate"]
    for name, size in sizes.items():
        key = GemmKey.parse(name)
        timed = {each: median(entry["us"]) for each, entry in size["candidates"].items() if entry.get("us")}
        failed = len(size["candidates"]) - len(timed)
        if not timed:
            lines.append(f"{name:<34}all {failed} failed")
            continue
        # one that fell out after its first pass has no other to be held to
        passes = max(len(entry.get("us", ())) for entry in size["candidates"].values())
        best = min((us, each) for each, us in timed.items() if len(size["candidates"][each]["us"]) == passes)
        outputs, inputs = key.weight_shape
        rate = outputs * inputs * (4 if key.dtype == "fp32" else 2) / best[0] / 1e6
        default = f"{timed[size['default']]:9.2f}" if size["default"] in timed else f"{'failed':>9}"
        lost = f", {failed} failed" if failed else ""
        lines.append(f"{name:<34}{default}{best[0]:9.2f}{rate:6.2f}  {best[1]}{lost}")
    return lines


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]
