"""Where a plain decode step's time goes: each operation's bytes, floor, time and kernels, and the gaps between steps.

    python -m mstar.scripts.step_budget /tmp/9B --batch 1 --context 512
    python -m mstar.scripts.step_budget /tmp/9B --batch 16 --context 512 --trace FILE   # of `mstar stats --trace FILE`

On a GPU it runs the model here and profiles some of its steps; elsewhere it prints the floors, or reads a trace that
was made on one. Floors are those of one H200 (`mstar.scripts.step_floor`).
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mstar.loader import LoadError, ModelConfig, read_config, resolve, resolve_dtype
from mstar.scripts.planted import planted_acceptance, planted_note
from mstar.scripts.step_floor import BYTES_PER_S, LAUNCH_S, StepShape, step_floor_s, step_ops, step_sequence
from mstar.scripts.step_trace import OTHER, StepTimes, TraceError, median, read_trace, step_times

GAP_LIMIT_S = 30e-6  # p50 between two steps
WARM_STEPS = 20
BUDGETS = (4096, 1024)  # prompt tokens of a step, as a rank on a GPU has them


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen on a device."""

    times: StepTimes
    context: int  # of a sequence in the middle of the profile
    wall_s: float = float("nan")  # of a step by the host's clock, without the profiler
    phases: dict[str, list[float]] = field(default_factory=dict)  # likewise; microseconds
    device: str = ""
    notes: list[str] = field(default_factory=list)


@click.command()
@click.argument("model")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1), help="Sequences of a step.")
@click.option("--context", default=512, show_default=True, type=click.IntRange(1), help="Tokens of each.")
@click.option("--dtype", default="auto", show_default=True, help="As `load` takes it.")
@click.option(
    "--tp", default=1, show_default=True, type=click.IntRange(1), help="Of a trace; runs are of one rank."
)
@click.option("--trace", type=click.Path(path_type=Path), help="Read this Chrome trace; run nothing.")
@click.option("--floor-only", is_flag=True, help="Run nothing on a GPU either.")
@click.option("--steps", default=50, show_default=True, type=click.IntRange(2), help="To profile.")
@click.option("--eager", is_flag=True, help="Without captured graphs.")
@click.option("--save-trace", type=click.Path(path_type=Path), help="Keep the profile, for Perfetto.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything to this file.")
def main(
    model: str,
    batch: int,
    context: int,
    dtype: str,
    tp: int,
    trace: Path | None,
    floor_only: bool,
    steps: int,
    eager: bool,
    save_trace: Path | None,
    json_path: Path | None,
) -> None:
    """Prints the budget of a decode step of MODEL."""
    console = Console(width=None if Console().is_terminal else 140)
    try:
        directory = resolve(model)
        config = read_config(directory)
        shape = StepShape(batch, context, resolve_dtype(dtype, config), tp=tp)
        measured = None
        if trace is not None:
            measured = Measured(step_times(read_trace(trace), step_sequence(config, shape)), context)
        elif not floor_only and has_gpu():
            measured = measure(directory, config, shape, steps, eager, save_trace)
            shape = StepShape(batch, measured.context, shape.dtype, tp=tp)
    except (LoadError, TraceError) as error:
        raise click.ClickException(str(error)) from error
    report = make_report(model, config, shape, measured, planted_acceptance(directory))
    print_budget(report, console)
    if measured is None and not floor_only:
        console.print("No GPU here: floors alone. Run this on one, or give it a trace made on one (--trace).")
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def measure(
    directory: Path, config: ModelConfig, shape: StepShape, steps: int, eager: bool, save_trace: Path | None
) -> Measured:
    """Runs `shape.sequences` requests on this process's GPU; profiles `steps` steps that all of them are in."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from mstar.ranks.messages import SamplingParams
    from mstar.scripts.offline_engine import OfflineEngine
    from mstar.scripts.offline_model import OfflineModel
    from mstar.scripts.serving_load import Workload, make_prompts

    if shape.tp != 1:
        raise TraceError("a run here is of one rank: take tp 2 and more from a daemon's trace (--trace)")
    most = WARM_STEPS + 2 * steps + 8
    # the first sequences decode while the last ones' prompts are read
    most += math.ceil(shape.sequences * shape.context / BUDGETS[1]) + shape.sequences
    model = OfflineModel(str(directory), shape.dtype, "cuda")
    engine = OfflineEngine(
        model,
        drafts=0,
        max_num_seqs=shape.sequences,
        max_seq=shape.context + most,
        eager=eager,
        budgets=BUDGETS,
    )
    prompts = make_prompts(Workload("budget", shape.context, most), shape.sequences, config.vocab_size, 0)
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, SamplingParams(max_tokens=most, seed=number))
    while len(engine.lengths()) < shape.sequences:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    wall_s = (time.perf_counter() - begun) / steps
    phases = engine.phases()
    lengths = [length for _, length in engine.lengths().values()]
    context = round(sum(lengths) / len(lengths)) + steps // 2
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = save_trace or Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        kernels = read_trace(path)
    times = step_times(kernels, step_sequence(config, shape))
    name = torch.cuda.get_device_name()
    return Measured(times, context, wall_s, phases, name, list(model.trunk.notes))


def make_report(
    model: str, config: ModelConfig, shape: StepShape, measured: Measured | None, planted: float | None
) -> dict[str, Any]:
    """Everything that is printed, in JSON's types; times in microseconds, figures a step."""
    rows: list[dict[str, Any]] = []
    times = measured.times if measured is not None else None
    for op in step_ops(config, shape):
        row: dict[str, Any] = {
            "op": op.name,
            "calls": op.calls,
            "weight_bytes": op.calls * op.weight_bytes,
            "kv_bytes": op.calls * op.kv_bytes,
            "state_bytes": op.calls * op.state_bytes,
            "activation_bytes": op.calls * op.activation_bytes,
            "launches": op.calls * op.launches,
            "floor_us": 1e6 * op.floor_s,
        }
        if times is not None and op.name in times.ops:
            seen = times.ops[op.name]
            took = 1e6 * median(seen.seconds)
            row |= {"us": took, "ratio": took / row["floor_us"], "kernels": median(seen.kernels)}
            row["kernel_names"] = sorted(seen.names)
        rows.append(row)
    if times is not None and OTHER in times.ops:
        seen = times.ops[OTHER]
        row = {"op": OTHER, "us": 1e6 * median(seen.seconds), "kernels": median(seen.kernels)}
        rows.append({**row, "kernel_names": sorted(seen.names)})
    floor_us = 1e6 * step_floor_s(config, shape)
    report: dict[str, Any] = {
        "schema": 1,
        "model": model,
        "planted": planted,
        "batch": shape.sequences,
        "context": shape.context,
        "dtype": shape.dtype,
        "tp": shape.tp,
        "bytes_per_s": BYTES_PER_S,
        "launch_us": 1e6 * LAUNCH_S,
        "floor_us": floor_us,
        "ops": rows,
    }
    if measured is not None and times is not None:
        gaps = sorted(times.gaps)
        report["measured"] = {
            "device": measured.device,
            "notes": measured.notes,
            "steps": len(times.steps),
            "step_us": 1e6 * median(times.steps),
            "kernels": median(times.kernels),
            "gaps": len(gaps),
            "gap_p50_us": 1e6 * median(gaps) if gaps else None,
            "gap_p95_us": 1e6 * gaps[round(0.95 * (len(gaps) - 1))] if gaps else None,
            "wall_us": 1e6 * measured.wall_s if math.isfinite(measured.wall_s) else None,
            "phases": measured.phases,
            "missed": sorted(times.missed),
        }
    return report


def print_budget(report: dict[str, Any], console: Console) -> None:
    """The table and what stands below it."""
    console.print(
        f"{report['model']}, {report['dtype']}, tp {report['tp']}: a plain step of {report['batch']} x "
        f"{report['context']} tokens{planted_note(report['planted'])}"
    )
    table = Table()
    table.add_column("op")
    headings = (
        "calls",
        "weights MB",
        "KV MB",
        "states MB",
        "acts MB",
        "floor us",
        "us",
        "x floor",
        "kernels",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in report["ops"]:
        sizes = (row.get(f"{what}_bytes") for what in ("weight", "kv", "state", "activation"))
        table.add_row(
            row["op"],
            str(row.get("calls", "")),
            *("" if size is None else f"{size / 1e6:.2f}" for size in sizes),
            _figure(row.get("floor_us"), 1),
            _figure(row.get("us"), 1),
            _figure(row.get("ratio"), 2),
            _figure(row.get("kernels"), 0),
        )
    console.print(table)
    launches = sum(row.get("launches", 0) for row in report["ops"])
    console.print(
        f"floor {report['floor_us']:.1f} us: weights, states and KV over {report['bytes_per_s'] / 1e12:g} TB/s, "
        f"and {launches} launches of {report['launch_us']:g} us (activations are in no floor)"
    )
    if "measured" in report:
        _print_measured(report, console)


def _print_measured(report: dict[str, Any], console: Console) -> None:
    seen = report["measured"]
    ratio = seen["step_us"] / report["floor_us"]
    console.print(
        f"step {seen['step_us']:.1f} us under the profiler ({ratio:.2f} x floor, median of {seen['steps']}), "
        f"{seen['kernels']:.0f} kernels"
    )
    if seen["wall_us"] is not None:
        ratio = seen["wall_us"] / report["floor_us"]
        console.print(f"step {seen['wall_us']:.1f} us by the host's clock without it ({ratio:.2f} x floor)")
    for phase in ("device", "gap"):
        if phase in seen["phases"]:
            p50, p95, _, count = seen["phases"][phase]
            console.print(
                f"{phase} by events, without it: p50 {p50:.1f} us, p95 {p95:.1f} us, {count:.0f} steps"
            )
    if seen["gap_p50_us"] is not None:
        fine = "under" if seen["gap_p50_us"] < 1e6 * GAP_LIMIT_S else "NOT under"
        console.print(
            f"gap between steps: p50 {seen['gap_p50_us']:.1f} us ({fine} {1e6 * GAP_LIMIT_S:g}), "
            f"p95 {seen['gap_p95_us']:.1f} us, {seen['gaps']} gaps"
        )
    for note in seen["notes"]:
        console.print(note)
    if seen["missed"]:
        console.print(
            f"[red]the trace is not of this model or shape, or of other kernels: none were seen for "
            f"{', '.join(seen['missed'])}; times of the operations may be wrong"
        )


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
