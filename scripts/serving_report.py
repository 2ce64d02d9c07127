"""The serving benchmark's results: medians with their range, comparison, table and plot."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mstar.daemon.devices import usable_cores
from mstar.scripts.planted import planted_note
from mstar.scripts.serving_load import BenchError, Run, Workload
from mstar.scripts.step_floor import BYTES_PER_S, LAUNCH_S

PACKAGES = ("mstar", "torch", "transformers", "tokenizers", "pyzmq", "numpy")
TIMES = ("ttft", "itl", "e2e")


@dataclass(slots=True)
class Results:
    """Every run's figures, by workload, concurrency and system, then by launch."""

    loaded: dict[str, Any] = field(default_factory=dict)  # what the daemon's `loaded` said
    _runs: dict[tuple[str, int, str], list[list[dict[str, float]]]] = field(default_factory=dict)
    _failures: dict[tuple[str, int, str], list[str]] = field(default_factory=dict)
    _shapes: dict[str, Workload] = field(default_factory=dict)

    def add(self, workload: Workload, concurrency: int, system: str, launch: int, run: Run) -> None:
        key = (workload.name, concurrency, system)
        self._shapes[workload.name] = workload
        launches = self._runs.setdefault(key, [])
        if launch == len(launches):
            launches.append([])
        launches[launch].append(run.figures())
        self._failures.setdefault(key, []).extend(run.failures())

    def rows(self) -> list[dict[str, Any]]:
        """One row a point and system: {median, min, max} of every figure, and the runs behind it."""
        rows = []
        for (name, concurrency, system), launches in self._runs.items():
            shape = self._shapes[name]
            rows.append(
                {
                    "workload": name,
                    "prompt_tokens": shape.prompt_tokens,
                    "output_tokens": shape.output_tokens,
                    "concurrency": concurrency,
                    "system": system,
                    **summarise(launches),
                    "errors": sorted(set(self._failures[name, concurrency, system]))[:10],
                    "launches": launches,
                }
            )
        return rows

    def comparison(self, ours: str) -> list[dict[str, Any]]:
        """Ours over the best other cell of each point: above 1 is better, for rates and times alike."""
        rows = self.rows()
        compared = []
        for row in (r for r in rows if r["system"] == ours):
            point = ("workload", "concurrency")
            others = [r for r in rows if r["system"] != ours and all(r[k] == row[k] for k in point)]
            if not others:
                continue
            fastest = max(others, key=lambda r: float(r["tok_s"]["median"]))
            first = min(others, key=lambda r: float(r["ttft_p50_ms"]["median"]))
            compared.append(
                {
                    "workload": row["workload"],
                    "concurrency": row["concurrency"],
                    "tok_s_ratio": row["tok_s"]["median"] / fastest["tok_s"]["median"],
                    "tok_s_best": fastest["system"],
                    "ttft_ratio": first["ttft_p50_ms"]["median"] / row["ttft_p50_ms"]["median"],
                    "ttft_best": first["system"],
                }
            )
        return compared


def summarise(launches: Sequence[Sequence[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """{median, min, max} of each figure: over the launches' medians, or over the runs of a single launch."""
    summary = {}
    for name in launches[0][0]:
        values = [statistics.median(run[name] for run in runs) for runs in launches]
        if len(launches) == 1:
            values = [run[name] for run in launches[0]]
        summary[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return summary


def describe_machine(daemon_flags: Sequence[str]) -> dict[str, Any]:
    """When, where and with which versions the figures were taken."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "machine": {
            "cpu": _cpu_model(),
            "cores": usable_cores(),
            "system": platform.platform(),
            "daemon_flags": list(daemon_flags),
        },
    }


def write_json(report: dict[str, Any], path: Path) -> None:
    """Writes the report; figures that do not exist (no request succeeded) become null."""
    path.write_text(json.dumps(_finite(report), indent=1, allow_nan=False) + "\n")


def print_report(report: dict[str, Any], console: Console) -> None:
    """The table: medians, with the range of tok/s beside it."""
    model, machine, versions = report["model"], report["machine"], report["versions"]
    console.print(
        f"{model['name']} ({model['fingerprint'][:12]}), {model['dtype']}, tp {model['tp']}, "
        f"{model['device']}; {machine['cpu']}, {machine['cores']} cores; torch {versions['torch']}, "
        f"mstar {versions['mstar']}{planted_note(report.get('planted'))}"
    )
    table = Table()
    for column in ("workload", "at once", "system", "tok/s", "min-max"):
        table.add_column(column, justify="left" if column in ("workload", "system") else "right")
    for name in TIMES:
        table.add_column(f"{name} p50/p95/p99 ms", justify="right")
    table.add_column("stalls", justify="right")
    table.add_column("failed", justify="right")
    floors = any("floor_ms" in row for row in report["results"])
    for column in ("ms/token", "floor ms", "x floor") if floors else ():
        table.add_column(column, justify="right")
    for row in report["results"]:
        tok_s = row["tok_s"]
        table.add_row(
            row["workload"],
            str(row["concurrency"]),
            row["system"],
            f"{tok_s['median']:.1f}",
            f"{tok_s['min']:.1f}-{tok_s['max']:.1f}",
            *(" / ".join(_short(row[f"{name}_p{p}_ms"]["median"]) for p in (50, 95, 99)) for name in TIMES),
            f"{row['stalls']['median']:.0f}",
            f"{row['failures']['max']:.0f}",
            *(_floor_cells(row) if floors else ()),
        )
    console.print(table)
    if floors:
        console.print(
            "ms/token: mean gap between tokens; x floor: itl p50 over the floor of a plain step, which is weights, "
            f"states and KV over {BYTES_PER_S / 1e12:g} TB/s and {LAUNCH_S * 1e6:g} us a launch (one H200)"
        )
    for row in report["results"]:
        for error in row["errors"]:
            console.print(f"[red]{row['workload']} at {row['concurrency']}: {error}")
    for point in report["comparison"]:
        console.print(
            f"{point['workload']} at {point['concurrency']}: {point['tok_s_ratio']:.2f}x the tok/s of "
            f"{point['tok_s_best']}, first token {point['ttft_ratio']:.2f}x as fast as {point['ttft_best']}"
        )


def plot(report: dict[str, Any], path: Path) -> None:
    """A PNG: tok/s, time to first token and time between tokens over concurrency. Raises BenchError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'mstar[plot]'") from None
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("tok_s", "tok/s"),
        ("ttft_p50_ms", "first token, p50, ms"),
        ("itl_p50_ms", "token gap, p50, ms"),
    )
    series: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report["results"]:
        series.setdefault((row["workload"], row["system"]), []).append(row)
    for axis, (name, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for (workload, system), rows in series.items():
            middle = [row[name]["median"] for row in rows]
            spread = [
                [m - row[name]["min"] for m, row in zip(middle, rows, strict=True)],
                [row[name]["max"] - m for m, row in zip(middle, rows, strict=True)],
            ]
            counts = [row["concurrency"] for row in rows]
            axis.errorbar(counts, middle, yerr=spread, marker="o", capsize=3, label=f"{workload}, {system}")
        axis.set_xlabel("requests at once")
        axis.set_title(title)
        axis.set_xscale("log", base=2)
        ticks = sorted({row["concurrency"] for row in report["results"]})
        axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    model = report["model"]
    figure.suptitle(f"{model['name']}, {model['dtype']}, tp {model['tp']}, {report['machine']['cpu']}")
    figure.savefig(path, dpi=120, format="png")


def _floor_cells(row: dict[str, Any]) -> list[str]:
    ms, floor, ratio = row["ms_per_token"]["median"], row.get("floor_ms"), row.get("floor_ratio")
    return [
        f"{ms:.3f}",
        *("" if value is None else f"{value:{form}}" for value, form in ((floor, ".3f"), (ratio, ".2f"))),
    ]


def _short(value: float) -> str:
    """Three significant digits, and no exponent."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
