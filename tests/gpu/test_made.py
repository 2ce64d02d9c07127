"""Weights made on a GPU are those of the CPU, to the bit; skipped, by this name, where there is no GPU."""

from __future__ import annotations

import time

import pytest
import torch

from mstar.loader import read_config
from mstar.loader.checkpoint import load_shard
from mstar.loader.counter import Stream
from mstar.loader.head import load_head, load_vocab
from mstar.loader.sharding import shard_bytes
from mstar.scripts.make_checkpoint import make_config, write_virtual

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: making weights on one is not tested"
)


@pytest.mark.parametrize("acceptance", [None, 0.7])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_gpu_makes_the_bits_of_the_cpu(tmp_path, acceptance, dtype):
    write_virtual(tmp_path, make_config("4B", 4, dtype, acceptance, layers=4, vocab=6143), 3)
    config, gpu = read_config(tmp_path), torch.device("cuda")
    for size in (1, 2):
        for rank in range(size):
            here, there = (load_shard(tmp_path, config, rank, size, dtype, device=d) for d in (None, gpu))
            assert all(there[name].is_cuda and torch.equal(there[name].cpu(), here[name]) for name in here)
    here, there = (load_head(tmp_path, config, dtype, device=d) for d in (None, gpu))
    assert all(there[name].is_cuda and torch.equal(there[name].cpu(), here[name]) for name in here)
    for left, right in zip(
        load_vocab(tmp_path, config, dtype), load_vocab(tmp_path, config, dtype, device=gpu), strict=True
    ):
        assert (left is None and right is None) or torch.equal(left, right.cpu())


def test_places_past_many_pieces_are_the_cpus():
    rows, width = torch.arange(0, 248_320, 31), 5120
    here, there = (torch.empty(len(rows), width, dtype=torch.bfloat16, device=d) for d in ("cpu", "cuda"))
    for out in (here, there):
        Stream.of(1, "w").uniform_(out, rows, 0, width, 1.0, torch.bfloat16)
    assert torch.equal(here, there.cpu())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "limit_s"), [("0.8B", 5.0), ("27B", 15.0)])
def test_the_largest_size_is_made_in_seconds(tmp_path, size, limit_s):
    write_virtual(tmp_path, make_config(size), 0)
    config, device = read_config(tmp_path), torch.device("cuda")
    needed = 1.1 * shard_bytes(config, 1, "bf16")
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"{needed / 1e9:.0f} GB are not free")
    Stream.of(0, "warm").uniform_(
        torch.empty(8, 8, device=device), torch.arange(8), 0, 8, 1.0, torch.bfloat16
    )
    began = time.perf_counter()
    weights = load_shard(tmp_path, config, 0, 1, "bf16", device=device)
    torch.cuda.synchronize()
    taken = time.perf_counter() - began
    total = sum(value.nbytes for value in weights.values())
    print(f"{size}: {total / 1e9:.1f} GB in {taken:.2f} s")
    assert taken < limit_s
