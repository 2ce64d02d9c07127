"""Times the decode step of one layer by CUDA graph: `python -m mstar.kernels.gdn.gpu.measure`.

Each call of a graph works on slots of its own, more bytes of them than the L2 holds, as the layers of a model do.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import click
import torch

from mstar.kernels.gdn.gpu.decode import gdn_decode_gpu
from mstar.kernels.gdn.rings import ring_rows
from mstar.kernels.gdn.weights import GdnWeights
from mstar.kernels.replays import replay_us
from mstar.kernels.rows import Rows

HEADS = {"0.8B": (16, 16), "9B": (16, 32)}
SEQUENCES = (1, 4, 16, 64)
WARPS = (2, 4, 8)
DIM, WIDTH = 128, 4
BYTES_A_US = 4.2e6  # what copies reach on an H200
COLD_BYTES = 200e6  # four times its L2
MAX_CALLS = 128
REPLAYS = 11  # their median counts


def floor_us(heads: int, sequences: int) -> float:
    """The time of the state's bytes alone, read and written once."""
    return 2 * sequences * heads * DIM * DIM * 4 / BYTES_A_US


def call_us(model: str, sequences: int, count: int, num_warps: int) -> float:
    """Time of one call; count: rows a sequence, of more than one all drafts of the step before are replayed."""
    key_heads, heads = HEADS[model]
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    channels = 2 * key_heads * DIM + heads * DIM
    w = GdnWeights(
        key_heads, heads, DIM, DIM, normal(WIDTH, channels) * 0.5, -torch.rand(heads, device=device),
        normal(heads), normal(DIM), 1e-6,
    )  # fmt: skip
    calls = min(MAX_CALLS, max(4, int(COLD_BYTES // (sequences * heads * DIM * DIM * 4))))
    slots = 1 + calls * sequences
    ring = ring_rows(count - 1)
    state = torch.zeros(slots, heads, DIM, DIM, device=device)
    conv = normal(slots, ring, channels, dtype=torch.bfloat16)
    window = normal(slots, ring if count > 1 else 0, 2 * heads, dtype=torch.bfloat16)
    proj = normal(sequences * count, w.proj_width, dtype=torch.bfloat16)
    parts = []
    for call in range(calls):
        numbers = 1 + call * sequences + torch.randperm(sequences, generator=generator, device=device)
        parts.append(
            Rows(
                sequences=sequences,
                longest=count,
                rows_per_seq=count,
                cu_rows=torch.arange(sequences + 1, device=device) * count,
                starts=torch.full((sequences,), 1000, device=device),
                slots=numbers.int(),
                fresh=torch.zeros(sequences, dtype=torch.uint8, device=device),
                block_tables=torch.zeros(sequences, 1, dtype=torch.int32, device=device),
                pending=None if count == 1 else torch.full((sequences,), count - 1, device=device).int(),
            )
        )

    def run() -> None:
        for rows in parts:
            gdn_decode_gpu(proj, w, state, conv, window, rows, num_warps=num_warps)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median(replay_us(graph, REPLAYS)) / calls


def cases(counts: tuple[int, ...]) -> Iterator[tuple[str, int, int, int]]:
    for model in HEADS:
        for count in counts:
            for sequences in SEQUENCES:
                for num_warps in WARPS:
                    yield model, count, sequences, num_warps


@click.command()
@click.option("--rows", "counts", type=int, multiple=True, default=(1, 4), help="Rows a sequence.")
def main(counts: tuple[int, ...]) -> None:
    """One line a model, batch and number of warps: us a call, and over the floor of the state's bytes."""
    click.echo(f"{torch.cuda.get_device_name()}; us a call")
    click.echo(f"{'model':6}{'rows':>5}{'seqs':>6}{'warps':>7}{'us':>9}{'floor':>8}{'ratio':>7}")
    for model, count, sequences, num_warps in cases(counts):
        us = call_us(model, sequences, count, num_warps)
        floor = floor_us(HEADS[model][1], sequences)
        click.echo(f"{model:6}{count:5}{sequences:6}{num_warps:7}{us:9.2f}{floor:8.2f}{us / floor:7.2f}")


if __name__ == "__main__":
    main()
