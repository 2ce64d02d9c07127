"""Every candidate at the family's sizes on a GPU: against float64, and its graph's bytes against its eager ones."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from mstar.kernels.registry import GemmKey, KernelChoice, row_bucket
from tests.support.linears import exact

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU: the linears' candidates at the family's sizes are not tested here",
)

EPS = 1e-6
# What a decode step of 0.8B and of 9B runs, the head cut to an eighth of the vocabulary: the tiles are the same.
SIZES = {
    "0.8B gdn in": ("norm", 8224, 1024),
    "0.8B attention in": ("norm", 5120, 1024),
    "0.8B out": ("residual", 1024, 2048),
    "0.8B gate and up": ("gated", 3584, 1024),
    "0.8B down": ("residual", 1024, 3584),
    "0.8B fc": ("plain", 1024, 2048),
    "0.8B head": ("f32", 31040, 1024),
    "9B gdn in": ("norm", 12352, 4096),
    "9B gate and up": ("gated", 12288, 4096),
    "9B down": ("residual", 4096, 12288),
    "9B fc": ("plain", 4096, 8192),
}
# neither tiles of outputs nor of k are whole
ODD = {
    "odd in": ("norm", 1000, 1048),
    "odd gate and up": ("gated", 1000, 1048),
    "odd down": ("residual", 1000, 1048),
}
# Roundings to bf16, each up to 2^-8 and 0.0017 of the norm on average: the result, and in turn what is multiplied,
# the sum before the residual, gate, up and silu. Tensor cores cut off what they add to float32 sums.
BOUNDS = {"plain": 3e-3, "norm": 4e-3, "residual": 4e-3, "gated": 8e-3, "f32": 1e-4}


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 16, 33, 64, 65])
@pytest.mark.parametrize("size", SIZES)
def test_the_default_is_the_formula_and_its_graph_gives_its_bytes(size, rows):
    from mstar.kernels.linear.gpu.candidates import CUBLAS, default

    key = key_of(size, rows)
    assert faults(key, rows, {default(key), CUBLAS}) == []


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 33, 64])
@pytest.mark.parametrize("size", [*SIZES, *ODD])
def test_stream_is_the_formula_and_its_graph_gives_its_bytes(size, rows):
    from mstar.kernels.linear.gpu.candidates import with_params

    key = key_of(size, rows)
    found = streams(key)
    tried = found[:: max(1, len(found) // 3)]
    assert faults(key, rows, [*tried, with_params(found[0], SOON=1, CARVEOUT=58)]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiles", [1, 64, 700])
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
@pytest.mark.parametrize("kind", ["norm", "gated"])
def test_stream_takes_the_products_that_a_residual_left(kind, rows, tiles, dtype):
    from mstar.kernels.linear.gpu.run import Prepared, _prescale, run_linear

    generator = torch.Generator("cuda").manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    x, norm = random(rows, 1048).to(dtype), random(1048).abs() + 0.5
    weight = (random(2 * 1000 if kind == "gated" else 1000, 1048) / 32).to(dtype)
    shares = torch.rand(tiles, rows, generator=generator, device="cuda")
    squares = x.float().square().sum(1) * shares / shares.sum(0)
    known = Prepared(squares, (x.float() * norm * _prescale(dtype)).to(dtype), norm)
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    choice = streams(GemmKey(kind, row_bucket(rows) or 0, 1000, 1048, name))[0]
    given = {"kind": kind, "norm": norm, "eps": EPS}
    got = run_linear(choice, x, weight, known=known, **given)
    want = exact(x=x, weight=weight, residual=None, **given)
    assert float((got.double() - want).norm() / want.norm()) < BOUNDS[kind]
    # they are what is used; those of another norm are not
    other = run_linear(choice, x, weight, known=Prepared(4 * squares, known.scaled, norm), **given)
    assert float((other.double() - want).norm() / want.norm()) > 0.4
    alien = run_linear(choice, x, weight, known=Prepared(4 * squares, known.scaled, norm.clone()), **given)
    assert float((alien.double() - want).norm() / want.norm()) < BOUNDS[kind]


@pytest.mark.slow  # a minute or two of compiling; the bench checks every candidate of every size so
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("size", ["0.8B attention in", "0.8B gate and up", "0.8B down", "0.8B head"])
def test_every_candidate_is_the_formula_and_its_graph_gives_its_bytes(size, rows):
    from mstar.kernels.linear.gpu.candidates import candidates

    key = key_of(size, rows)
    assert faults(key, rows, candidates(key)) == []


def streams(key: GemmKey) -> list[KernelChoice]:
    """The candidates of "stream" for a size; skips a test on a GPU that it is not for."""
    from mstar.kernels.linear.gpu import stream
    from mstar.kernels.linear.gpu.candidates import default, step_candidates

    if not stream.usable():
        pytest.skip("stream is for Hopper's GPUs, and this is none")
    found = [choice for choice in step_candidates(key, default(key)) if choice.kernel == "stream"]
    assert found
    return found


def key_of(size: str, rows: int) -> GemmKey:
    kind, n, k = {**SIZES, **ODD}[size]
    bucket = row_bucket(rows)
    assert bucket is not None
    return GemmKey(kind, bucket, n, k, "bf16")


def faults(key: GemmKey, rows: int, choices: Iterable[KernelChoice]) -> list[str]:
    """What is wrong with each choice, for so many rows of the key's bucket."""
    from mstar.kernels.linear.gpu.run import run_linear

    kind, n, k = key.kind, key.n, key.k
    generator = torch.Generator("cuda").manual_seed(rows)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    x = random(rows, k + 16)[:, :k]
    weight = random(2 * n if kind == "gated" else n, k) / k**0.5
    given = {
        "norm": random(k, dtype=torch.float32).abs() + 0.5 if kind in ("norm", "gated") else None,
        "eps": EPS,
        "residual": random(rows, n) if kind == "residual" else None,
    }
    failed = []
    for choice in choices:
        try:
            run_linear(choice, x, weight, kind=kind, **given)  # compiles, and makes a split's counters
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run_linear(choice, x, weight, kind=kind, **given)
            x.copy_(random(rows, k))  # not what was captured
            want = exact(kind, x, weight, **given)
            eager = run_linear(choice, x, weight, kind=kind, **given)
            for _ in range(3):
                captured.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize()
                if not torch.equal(captured, eager):
                    failed.append(f"{choice}: a replay gives other bytes")
            error = float((eager.double() - want).norm() / want.norm())
            if not error < BOUNDS[kind]:
                failed.append(f"{choice}: error {error:.2e}")
        except Exception as raised:
            failed.append(f"{choice}: {type(raised).__name__}: {str(raised)[:200]}")
    return failed


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_calls_of_one_graph_in_a_row_do_not_overtake_each_other(rows):
    """A chain as a layer has it, each call reading what the one before wrote, in dependent launches."""
    from mstar.kernels.linear.gpu import stream
    from mstar.kernels.linear.gpu.candidates import candidates, default, with_params
    from mstar.kernels.linear.gpu.run import run_linear

    generator = torch.Generator("cuda").manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

    x, norm = random(rows, 1024), torch.ones(1024, device="cuda")
    both, down = random(2 * 3584, 1024) / 32, random(1024, 3584) / 60
    gated = GemmKey("gated", rows, 3584, 1024, "bf16")
    key = GemmKey("residual", rows, 1024, 3584, "bf16")
    splits = [choice for choice in candidates(key) if dict(choice.params).get("SPLIT_K", 1) > 1]

    def chain(first, choice, wait: bool) -> torch.Tensor:
        y = x
        for _ in range(12):
            h = run_linear(first, y, both, kind="gated", norm=norm, eps=EPS)
            if wait:
                torch.cuda.synchronize()
            y = run_linear(choice, h, down, kind="residual", residual=y)
            if wait:
                torch.cuda.synchronize()
        return y

    pairs = [(default(gated), choice) for choice in (default(key), *splits[:2])]
    if stream.usable():
        pairs += [(streams(gated)[place], streams(key)[place]) for place in (0, 1)]
        pairs += [tuple(with_params(choice, SOON=1) for choice in pair) for pair in pairs[-2:]]
    for first, choice in pairs:
        want = chain(first, choice, wait=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(first, choice, wait=False)
        for _ in range(20):
            got.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(got, want), (first, choice)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_stream_reads_what_the_kernel_before_it_prepared(rows):
    """The squares and products of a residual's kernel, in dependent launches: never those of the step before."""
    from mstar.kernels.linear.gpu.ahead import Ahead
    from mstar.kernels.linear.gpu.candidates import candidates
    from mstar.kernels.linear.gpu.run import Prepared, run_linear, run_residual

    generator = torch.Generator("cuda").manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

    x, norm = random(rows, 1024), torch.rand(1024, generator=generator, device="cuda") + 0.5
    both, down = random(2 * 3584, 1024) / 32, random(1024, 3584) / 60
    first = streams(GemmKey("gated", rows, 3584, 1024, "bf16"))[0]
    key = GemmKey("residual", rows, 1024, 3584, "bf16")
    second = next(choice for choice in candidates(key) if choice.kernel == ("fma" if rows == 1 else "dot"))
    ahead = Ahead(both, halves=2, norm=norm, eps=EPS)

    def chain(wait: bool) -> torch.Tensor:
        y, made = x, None
        for _ in range(12):
            h = run_linear(first, y, both, kind="gated", norm=norm, eps=EPS, known=made)
            if wait:
                torch.cuda.synchronize()
            y, made = run_residual(second, h, down, y, ahead, scaled=True)
            if wait:
                torch.cuda.synchronize()
            assert isinstance(made, Prepared) and made.scaled is not None
        return y

    want = chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(wait=False)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
