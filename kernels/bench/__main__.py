"""`python -m mstar.kernels.bench decode_gemm --model 0.8B --model 9B --store DIR`: times what a model serves."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mstar.kernels.bench.sizes import served_sizes
from mstar.kernels.bench.store import Measured, Store, StoreError
from mstar.kernels.bench.tune import DeviceLost, Job, table_of, tune
from mstar.kernels.registry import OP, ROW_BUCKETS, device_name, linears, stack
from mstar.loader import LoadError, ModelConfig, check_tp, read_config, resolve, resolve_dtype
from mstar.loader.config import parse_config
from mstar.scripts.make_checkpoint import SIZES, make_config

MOST_WORKERS = 14


@click.group()
def main() -> None:
    """Times the candidates of an op and keeps the figures; mstar.kernels.promote makes a table of them."""


@main.command(OP)
@click.option("--model", "models", multiple=True, required=True, help="0.8B ... 27B, or what a load takes.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1), help="Ranks that share it.")
@click.option(
    "--dtype", default="auto", show_default=True, type=click.Choice(["auto", "bf16", "fp16", "fp32"])
)
@click.option("--rows", default=",".join(map(str, ROW_BUCKETS)), show_default=True, help="Row buckets.")
@click.option("--store", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--passes", default=3, show_default=True, type=click.IntRange(2))
@click.option("--budget-s", default=240.0, show_default=True, help="Starts no size after that time.")
@click.option("--workers", default=-1, help="Processes that compile; 0 for none. [default: by the cores]")
@click.option("--device", "gpu", default=0, show_default=True, type=click.IntRange(0))
def decode_gemm(
    models: tuple[str, ...],
    tp: int,
    dtype: str,
    rows: str,
    store: Path,
    passes: int,
    budget_s: float,
    workers: int,
    gpu: int,
) -> None:
    """Times the linears of a decode step: both mixers, gate and up, down, the vocabulary's head, the MTP fc.

    Sizes that STORE has are not measured again, so a bench that ran out of time goes on where it ended.
    """
    jobs = [job for model in models for job in jobs_of(model, tp, dtype, row_buckets(rows))]
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("no GPU here: times are taken on the device that they are for")
    from mstar.kernels.bench.measure import GpuRig
    from mstar.kernels.linear.gpu.run import run_linear

    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    under = Measured(*device_name(device), stack())
    kept = Store(store)
    if workers < 0:
        workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) - 2))
    rig = GpuRig(device, run_linear, workers)
    lost = None
    try:
        kept.check(under)
        tune(
            jobs,
            linears=linears(),
            rig=rig,
            store=kept,
            under=under,
            passes=passes,
            budget_s=budget_s,
            say=click.echo,
        )
    except StoreError as error:
        raise click.ClickException(str(error)) from error
    except DeviceLost as error:
        lost = error
    finally:
        rig.close()
    report(kept, jobs)
    if lost is not None:
        raise click.ClickException(f"the device is lost, run again without this candidate: {lost}")


def report(store: Store, jobs: list[Job]) -> None:
    """Prints what the store has of the jobs, and what it lacks."""
    measured = {name: size for _, content in store.files() for name, size in content["sizes"].items()}
    wanted = dict.fromkeys(job.key.name for job in jobs)
    for line in table_of({name: measured[name] for name in wanted if name in measured}):
        click.echo(line)
    missing = [name for name in wanted if name not in measured]
    click.echo(f"{len(wanted) - len(missing)} sizes measured, {len(missing)} left: {' '.join(missing[:6])}")


def row_buckets(text: str) -> list[int]:
    """The buckets of "1,4,16". Raises UsageError for others."""
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--rows takes numbers with commas between them, not {text!r}") from error
    if wrong := [row for row in rows if row not in ROW_BUCKETS]:
        raise click.UsageError(f"--rows takes {', '.join(map(str, ROW_BUCKETS))}, not {wrong[0]}")
    return rows


def jobs_of(model: str, tp: int, dtype: str, rows: list[int]) -> list[Job]:
    """A model's sizes. Raises ClickException for a model that cannot be loaded so."""
    try:
        config = config_of(model)
        check_tp(config, tp)
        used = resolve_dtype(dtype, config)
    except LoadError as error:
        raise click.ClickException(str(error)) from error
    file = f"{Path(model).name.replace(':', '-')}-tp{tp}"
    return [Job(file, key, use) for row in rows for key, use in served_sizes(config, tp, row, used).items()]


def config_of(model: str) -> ModelConfig:
    """A published size by its name, or the config of what a load would take."""
    if model in SIZES:
        return parse_config(make_config(model), {}, {})
    return read_config(resolve(model))


if __name__ == "__main__":
    main()
