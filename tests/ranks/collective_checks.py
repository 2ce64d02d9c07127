"""What one rank of test_collectives.py runs. Prints what must be the same on every rank."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from mstar.ranks.collectives import Collective, CollectiveTimeout, ShmCollective, shm

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def given(mesh: Collective, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's input, known to all."""
    generators = [torch.Generator().manual_seed(seed * 64 + rank) for rank in range(mesh.size)]
    return [torch.randn(shape, generator=generator).to(dtype) for generator in generators]


def sums(mesh: Collective) -> None:
    digest = hashlib.sha256()
    for dtype, tolerance in TOLERANCE.items():
        # one element, odd counts, several pieces of the region
        for seed, shape in enumerate([(1,), (7, 3), (3, 100_001)]):
            parts = given(mesh, seed, shape, dtype)
            mine = parts[mesh.rank].clone()
            result = mesh.all_reduce(mine)
            assert result.data_ptr() == mine.data_ptr()
            exact = torch.stack(parts).double().sum(0)
            bound = tolerance * torch.stack(parts).double().abs().sum(0)
            assert ((mine.double() - exact).abs() <= bound).all(), (dtype, shape)
            digest.update(mine.view(torch.uint8).numpy().tobytes())
            assert torch.equal(mesh.all_gather(parts[mesh.rank]), torch.stack(parts))
            for root in range(mesh.size):
                assert torch.equal(mesh.broadcast(parts[mesh.rank].clone(), root), parts[root])
    ids = mesh.all_gather(torch.tensor([2**40 + mesh.rank]))
    assert ids.tolist() == [[2**40 + rank] for rank in range(mesh.size)]
    mesh.barrier()
    print(digest.hexdigest())


def rounding(mesh: Collective) -> None:
    """A bf16 sum is taken in float32 in rank order and rounded once."""
    parts = given(mesh, 5, (4096,), torch.bfloat16)
    parts[0][:3] = torch.tensor([float("inf"), float("nan"), 3.3e38])
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    mine = mesh.all_reduce(parts[mesh.rank].clone())
    assert torch.equal(mine.nan_to_num(7.0), total.to(torch.bfloat16).nan_to_num(7.0))
    assert mine[1].isnan()


def many(mesh: Collective) -> None:
    """Calls of changing kinds and lengths, with nothing else that would keep ranks together."""
    size, total = mesh.size, 0.0
    for step in range(400):
        x = torch.full((1 + step * 37 % 3000,), float(mesh.rank + step))
        mesh.all_reduce(x)
        assert x[0] == x[-1] == size * step + size * (size - 1) / 2
        token = torch.tensor([step if mesh.rank == step % size else -1])
        assert mesh.broadcast(token, step % size).item() == step
        if step % 5 == 0:
            assert mesh.all_gather(torch.tensor([mesh.rank, step]))[-1].tolist() == [size - 1, step]
        if step % 7 == 0:
            mesh.barrier()
        total += x.sum().item()
    print(total)


def forever(mesh: Collective) -> None:
    mesh.barrier()
    print("met", flush=True)
    try:
        while True:
            mesh.all_reduce(torch.ones(1000))
    except CollectiveTimeout as error:
        print(error)


def main() -> None:
    checks, backend, size, fd, run_dir, timeout_s, rank = sys.argv[1:]
    torch.set_num_threads(1)
    mesh: Collective
    if backend == "shm":
        library = shm.load()
        assert library is not None
        mesh = ShmCollective(library, int(fd), int(rank), int(size), float(timeout_s))
    else:
        from mstar.ranks.collectives.torch_dist import TorchCollective

        device = torch.device("cpu")
        mesh = TorchCollective(backend, Path(run_dir), int(rank), int(size), device, float(timeout_s))
    for name in checks.split(","):
        {"sums": sums, "rounding": rounding, "many": many, "forever": forever}[name](mesh)
    mesh.close()


if __name__ == "__main__":
    main()
