"""Microseconds a call of everything here, in a CUDA graph: `python -m mstar.kernels.vocab.gpu.measure`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import torch

from mstar.kernels.replays import replay_us
from mstar.kernels.vocab.gpu.begin import begin_step
from mstar.kernels.vocab.gpu.draw import argmax_gpu, merge_draws, partial_argmax, partial_draws
from mstar.kernels.vocab.gpu.finish import finish_step
from mstar.kernels.vocab.gpu.noise import gumbel_gpu
from mstar.kernels.vocab.gpu.thresholds import filter_thresholds

CALLS = 20
REPLAYS = 15


def microseconds(call: Callable[[], object]) -> float:
    """The median over replays of a graph of CALLS calls, a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return median(replay_us(graph, REPLAYS)) / CALLS


def pieces(rows: int, vocab: int, hidden: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Every call that is measured, on logits that look like a model's."""
    generator = torch.Generator(device).manual_seed(rows)
    logits = torch.randn(rows, vocab, device=device, generator=generator) * 2.5
    logits[:, :: vocab // 100] += 9.0
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    positions = torch.full((rows,), 8192, dtype=torch.int64, device=device)
    seed = torch.arange(rows + 1, device=device) * 7919
    ones, zeros = torch.ones(rows + 1, device=device), torch.zeros(rows + 1, device=device)
    off = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    table = torch.randn(vocab, hidden, device=device, generator=generator).to(torch.bfloat16)
    ahead = torch.randint(0, vocab, (rows + 1, 4), device=device, generator=generator)
    lengths = torch.ones(rows + 1, dtype=torch.int32, device=device)
    stops = torch.full((rows + 1, 8), -1, dtype=torch.int64, device=device)
    left = torch.full((rows + 1,), 2**40, device=device)
    out = torch.zeros(rows, 2, dtype=torch.int64, device=device)
    pairs = partial_argmax(logits, first_id=0, vocab=vocab)

    def draws(heat: torch.Tensor, least: torch.Tensor | None = None) -> Callable[[], object]:
        return lambda: partial_draws(
            logits, slots, positions, heat, seed, first_id=0, vocab=vocab, least=least, position_offset=1
        )

    def filters(k: int, p: float, m: float, heat: float = 1.0) -> Callable[[], object]:
        registers = (ones * heat, off + k, ones * p, ones * m)
        return lambda: filter_thresholds(logits, slots, *registers, vocab)

    return {
        "begin_step": lambda: begin_step(slots, ahead, lengths, table, rows_per_seq=1),
        "begin_step, 4 rows": lambda: begin_step(slots, ahead, lengths, table, rows_per_seq=4),
        "partial_draws, greedy": draws(zeros),
        "partial_draws, temperature": draws(ones),
        "partial_draws, threshold": draws(ones, torch.full((rows,), 8.0, device=device)),
        "merge_draws": lambda: merge_draws(*pairs),
        "finish_step": lambda: finish_step(*pairs, slots, ahead, lengths, left, stops, out),
        "argmax_gpu": lambda: argmax_gpu(logits),
        "torch argmax": lambda: logits.argmax(1),
        "gumbel_gpu": lambda: gumbel_gpu(seed[1:], positions, vocab),
        "thresholds, off": filters(0, 1.0, 0.0),
        "thresholds, min_p": filters(0, 1.0, 0.05),
        "thresholds, top_k 20": filters(20, 1.0, 0.0),
        "thresholds, top_k 20 top_p 0.95": filters(20, 0.95, 0.0),
        "thresholds, top_p 0.95": filters(0, 0.95, 0.0),
        "thresholds, top_p 0.95, temperature 3": filters(0, 0.95, 0.0, 3.0),
        "torch sort": lambda: logits.sort(dim=1, descending=True),
    }


@click.command()
@click.option("--vocab", default=248_320, show_default=True)
@click.option("--hidden", default=1024, show_default=True)
@click.option("--rows", "row_list", multiple=True, type=int, default=(1, 16, 64), show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also write the figures there.")
def main(vocab: int, hidden: int, row_list: tuple[int, ...], path: Path | None) -> None:
    """Measures every piece at some numbers of rows."""
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU: nothing is measured")
    device = torch.device("cuda")
    figures: dict[str, dict[int, float]] = {}
    for rows in row_list:
        for name, call in pieces(rows, vocab, hidden, device).items():
            figures.setdefault(name, {})[rows] = round(microseconds(call), 2)
    click.echo(f"{'us a call, rows':40}" + "".join(f"{rows:>10}" for rows in row_list))
    for name, by_rows in figures.items():
        click.echo(f"{name:40}" + "".join(f"{by_rows[rows]:>10.2f}" for rows in row_list))
    if path is not None:
        path.write_text(json.dumps({"vocab": vocab, "hidden": hidden, "us": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
