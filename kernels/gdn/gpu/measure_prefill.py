"""Times one layer's prefill by stage: `python -m mstar.kernels.gdn.gpu.measure_prefill [--sweep]`.

A stage's time is a CUDA graph's of several calls of it alone. FLOPs are those of the formulas, a product of two
float32 operands counted once (three bf16 products do it); bytes are each array once. Where a stage's arrays fit
in the L2 (60 MB on an H200) its bytes/s may pass the memory's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import click
import torch

from mstar.kernels.gdn.gpu.prefill import DEFAULT, Prefill, Tuning, scratch_bytes
from mstar.kernels.gdn.weights import GdnWeights
from mstar.kernels.replays import replay_us
from mstar.kernels.rows import PREFILL_CHUNK as CHUNK
from mstar.kernels.rows import Rows

MODELS = {"0.8B": (16, 16), "9B": (16, 32), "27B": (16, 48)}
DIM, WIDTH, RING = 128, 4, 4
CALLS, REPLAYS = 10, 5


def make(model: str, rows: int, sequences: int, tuning: Tuning) -> Prefill:
    """A call of `rows` rows in all, random inputs in bfloat16 on the GPU."""
    keys, values = MODELS[model]
    device = torch.device("cuda")
    channels = (2 * keys + values) * DIM
    weights = GdnWeights(
        key_heads=keys,
        value_heads=values,
        key_dim=DIM,
        value_dim=DIM,
        conv=torch.randn(WIDTH, channels, device=device) * 0.5,
        decay=-torch.randn(values, device=device).exp(),
        dt_bias=torch.randn(values, device=device),
        norm=torch.rand(DIM, device=device) + 0.5,
        eps=1e-6,
    )
    borders = [rows * index // sequences for index in range(sequences + 1)]
    whole = Rows(
        sequences=sequences,
        longest=-(-rows // sequences),
        rows_per_seq=0,
        cu_rows=torch.tensor(borders, device=device),
        starts=torch.zeros(sequences, dtype=torch.int64, device=device),
        slots=torch.arange(1, sequences + 1, dtype=torch.int32, device=device),
        fresh=torch.ones(sequences, dtype=torch.uint8, device=device),
        block_tables=torch.zeros(sequences, 1, dtype=torch.int32, device=device),
        host_cu_rows=tuple(borders),
        host_starts=(0,) * sequences,
    )
    proj = torch.randn(rows, weights.proj_width, device=device).bfloat16()
    state = torch.zeros(sequences + 1, values, DIM, DIM, device=device)
    conv = torch.zeros(sequences + 1, RING, channels, dtype=torch.bfloat16, device=device)
    return Prefill(proj, weights, state, conv, whole, tuning)


def call_ms(*stages: Callable[[], None]) -> float:
    """Milliseconds of the stages one after another, the least of REPLAYS graphs of CALLS calls."""
    for stage in stages:
        stage()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            for stage in stages:
                stage()
    return min(replay_us(graph, REPLAYS)) / 1e3 / CALLS


def work(call: Prefill) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of each stage."""
    w, rows, chunks = call.weights, call.proj.shape[0], call.chunks.count
    heads, square = w.value_heads, chunks * w.value_heads * CHUNK * CHUNK
    passed = chunks * w.value_heads * CHUNK * DIM * DIM
    wide = rows * heads * DIM  # elements of an array of a row and value head
    keys = rows * w.key_heads * DIM
    states = call.states.nbytes
    return {
        "convolve": (rows * w.channels * 2 * WIDTH, rows * w.channels * 4),
        "solve": (square * 2 * (DIM + 2 * DIM + 10 * CHUNK), 2 * (keys + wide) + 8 * wide),
        "walk": (4 * passed, 2 * keys + 8 * wide + call.deltas.nbytes + states),
        "output": (2 * passed + 4 * square * DIM, 4 * keys + 4 * wide + call.deltas.nbytes + states),
    }


def tunings() -> Iterator[tuple[str, Tuning]]:
    """A stage's name and what to try of it, the other stages as they are."""
    for warps in (4, 8):
        yield "solve", replace(DEFAULT, solve_warps=warps)
    for block, warps, stages in itertools.product((16, 32, 64), (4, 8), (1, 2, 3)):
        if block * stages < 128:  # shared memory
            yield "walk", replace(DEFAULT, block_v=block, walk_warps=warps, walk_stages=stages)
    for parts, warps, stages in itertools.product((2, 1), (4, 8), (1, 2, 3)):
        yield "output", replace(DEFAULT, out_parts=parts, out_warps=warps, out_stages=stages)


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), help="All without any.")
@click.option("--rows", "sizes", multiple=True, type=int, default=(2048, 8192), show_default=True)
@click.option("--sequences", default=1, show_default=True, help="Sequences that the rows are of.")
@click.option("--sweep", is_flag=True, help="Also time every choice of `Tuning`, stage by stage.")
def main(models: tuple[str, ...], sizes: tuple[int, ...], sequences: int, sweep: bool) -> None:
    """Prints milliseconds a layer by stage, TFLOP/s and TB/s."""
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU: nothing to measure")
    for model, rows in itertools.product(models or MODELS, sizes):
        call = make(model, rows, sequences, DEFAULT)
        total = call_ms(*call.stages())
        scratch = scratch_bytes(rows, sequences, call.weights, torch.bfloat16) / 2**20
        click.echo(
            f"{model} {rows} rows, {sequences} sequences: {total:.3f} ms a layer, {scratch:.0f} MiB scratch"
        )
        amounts = work(call)
        for stage, (flops, size) in zip(call.stages(), amounts.values(), strict=True):
            name = stage.__name__
            ms = call_ms(stage)
            click.echo(f"  {name:9} {ms:7.3f} ms {flops / ms / 1e9:7.1f} TFLOP/s {size / ms / 1e9:6.2f} TB/s")
        if not sweep:
            continue
        for name, tuning in tunings():
            other = make(model, rows, sequences, tuning)
            stages = {stage.__name__: stage for stage in other.stages()}
            try:
                for stage in stages.values():
                    stage()
                ms = call_ms(stages[name])
            except Exception as error:  # a choice that takes too much shared memory is a result, too
                click.echo(f"    {name:7} {tuning}: {type(error).__name__}")
                continue
            click.echo(f"    {name:7} {ms:7.3f} ms  {tuning}")


if __name__ == "__main__":
    main()
