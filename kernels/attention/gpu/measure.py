"""Times the attention kernels on this GPU: `python -m mstar.kernels.attention.gpu.measure`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import TypeVar

import click
import torch

from mstar.kernels.attention.gpu import decode, prefill
from mstar.kernels.attention.gpu.qkv import qkv_norm_rope_cache
from mstar.kernels.attention.gpu.run import attention_gpu
from mstar.kernels.attention.weights import AttentionWeights
from mstar.kernels.rows import Rows

BLOCK = 16
DIM = 256
MODELS = {"0.8B": (8, 2), "9B": (16, 4), "27B": (24, 4)}  # q and KV heads
DECODE = ((1, 512), (1, 8192), (4, 16384), (16, 1024), (64, 512))  # sequences and keys of each
BYTES_A_US = 4.2e6  # what a read of memory reaches here: design, section 9
# Caches of as many layers take turns, so that no call finds its keys in the 50 MB of L2.
COLD_BYTES = 400e6


def graph_us(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Microseconds a call, the calls captured one after another in one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / repeats / len(calls)


class Setting:
    """Sequences of equal length with random keys, in scattered blocks of the caches of a few layers."""

    def __init__(self, model: str, sequences: int, past: int, count: int, *, decode: bool) -> None:
        heads, kv_heads = MODELS[model]
        self.weights = AttentionWeights(
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=DIM,
            q_norm=torch.rand(DIM, device="cuda") + 0.5,
            k_norm=torch.rand(DIM, device="cuda") + 0.5,
            inv_freq=1e7 ** (-torch.arange(0, 64, 2, device="cuda") / 64),
            eps=1e-6,
        )
        need = -(-(past + count) // BLOCK)
        self.kv_bytes = 2 * sequences * (past + count) * kv_heads * DIM * 2
        layers = max(1, min(64, round(COLD_BYTES / self.kv_bytes)))
        blocks = 1 + sequences * need
        self.caches = [
            torch.randn(2, blocks, kv_heads, DIM * BLOCK, device="cuda").bfloat16() for _ in range(layers)
        ]
        tables = torch.zeros(sequences, need, dtype=torch.int32, device="cuda")
        tables[:, :need] = (torch.randperm(blocks - 1, device="cuda") + 1).view(sequences, need).int()
        self.rows = Rows(
            sequences=sequences,
            longest=count,
            rows_per_seq=count if decode else 0,
            cu_rows=torch.arange(sequences + 1, device="cuda") * count,
            starts=torch.full((sequences,), past, device="cuda"),
            slots=torch.arange(1, sequences + 1, dtype=torch.int32, device="cuda"),
            fresh=torch.zeros(sequences, dtype=torch.uint8, device="cuda"),
            block_tables=tables,
            host_cu_rows=tuple(index * count for index in range(sequences + 1)),
            host_starts=(past,) * sequences,
        )
        self.proj = torch.randn(sequences * count, self.weights.proj_width, device="cuda").bfloat16()

    def caches_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.caches[layer % len(self.caches)]
        return k.unflatten(-1, (DIM, BLOCK)), v.unflatten(-1, (BLOCK, DIM))

    def whole_us(self) -> float:
        """A layer's attention, all its launches."""
        return self._us(lambda k, v: attention_gpu(self.proj, self.weights, k, v, self.rows))

    def decode_us(self, choice: decode.DecodeChoice | None = None) -> float:
        """Without the norms, rope and writes."""
        q = qkv_norm_rope_cache(self.proj, self.weights, *self.caches_of(0), self.rows)
        run = decode.attend_decode
        return self._us(lambda k, v: run(q, self.proj, self.weights, k, v, self.rows, choice=choice))

    def prefill_us(self, choice: prefill.PrefillChoice | None = None) -> float:
        """Without the norms, rope and writes."""
        q = qkv_norm_rope_cache(self.proj, self.weights, *self.caches_of(0), self.rows)
        run = prefill.attend_prefill
        return self._us(lambda k, v: run(q, self.proj, self.weights, k, v, self.rows, choice=choice))

    def _us(self, call: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        layers = range(max(8, len(self.caches)))
        return graph_us([partial(call, *self.caches_of(layer)) for layer in layers])


def decode_choices() -> list[decode.DecodeChoice]:
    """What `--sweep` tries."""
    cuts = product((32, 64), (64, 128, 256), (1, 2, 3), (4, 8), (2, 3, 4), (False, True))
    every = [decode.DecodeChoice(*cut) for cut in cuts]
    return [choice for choice in every if choice.block_n * choice.num_stages <= 192]


def prefill_choices() -> list[prefill.PrefillChoice]:
    """What `--sweep` tries; the rest does not fit or spills."""
    cuts = ((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 32, 8, 3), (64, 64, 4, 2))
    return [prefill.PrefillChoice(*cut, ahead) for cut in cuts for ahead in (False, True)]


Choice = TypeVar("Choice")


def try_all(time_us: Callable[[Choice], float], choices: Sequence[Choice]) -> None:
    """Prints the five fastest; a choice that does not fit this GPU is left out."""
    times: list[tuple[float, Choice]] = []
    for choice in choices:
        try:
            times.append((time_us(choice), choice))
        except Exception as error:  # out of shared memory: Triton's own class, not public
            click.echo(f"    {choice}: {str(error).splitlines()[0]}")
    for us, choice in sorted(times, key=lambda time: time[0])[:5]:
        click.echo(f"    {us:8.2f} us  {choice}")


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), default=("0.8B", "9B"))
@click.option("--rows", "counts", multiple=True, type=int, default=(1, 4), help="Rows a sequence, decode.")
@click.option("--sweep", is_flag=True, help="Also tries other cuts, and prints the fastest.")
def main(models: tuple[str, ...], counts: tuple[int, ...], sweep: bool) -> None:
    """bfloat16, head_dim 256; the keys of every call come from memory, not from L2."""
    torch.manual_seed(0)
    for model, count, (sequences, keys) in product(models, counts, DECODE):
        setting = Setting(model, sequences, keys - count, count, decode=True)
        whole, attend = setting.whole_us(), setting.decode_us()
        click.echo(
            f"{model} decode {sequences:3} x {count} rows, {keys:5} keys: {whole:7.2f} us a layer, "
            f"attention alone {attend:7.2f} us, floor {setting.kv_bytes / BYTES_A_US:6.2f} us"
        )
        if sweep:
            try_all(setting.decode_us, decode_choices())
    for model, length in product(models, (2048, 8192)):
        setting = Setting(model, 1, 0, length, decode=False)
        operations = 4 * setting.weights.q_heads * DIM * length * (length + 1) / 2
        whole, attend = setting.whole_us(), setting.prefill_us()
        click.echo(
            f"{model} prefill {length} rows: {whole:8.1f} us a layer, attention alone {attend:8.1f} us, "
            f"{operations / attend / 1e6:.0f} TFLOP/s"
        )
        if sweep:
            try_all(setting.prefill_us, prefill_choices())


if __name__ == "__main__":
    main()
