"""The linear operation on a CPU: right against float64, and a row's bits never depend on its batch."""

import pytest
import torch

from mstar.kernels.cpu import CpuOps
from mstar.kernels.ops import Ops

DTYPES = [torch.float32, torch.bfloat16]
# float32 sums of 300 products; bf16 keeps 8 bits of each result
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def ops_of(name: str) -> Ops:
    return CpuOps() if name == "native" else Ops()


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 63, 64, 65, 127, 128, 129, 256])
def test_linear_matches_float64_for_every_count_of_rows(name, dtype, rows):
    torch.manual_seed(rows)
    x = torch.randn(rows, 299).to(dtype)
    w = torch.randn(100, 299).to(dtype)  # no multiples of the panel, of a task or of a vector
    ops = ops_of(name)
    got = ops.linear(x, ops.pack_linear(w))
    assert relative(got, x.double() @ w.double().T) < BOUND[dtype]
    exact = ops.linear(x, ops.pack_linear(w), out_f32=True)
    assert exact.dtype == torch.float32
    assert relative(exact, x.double() @ w.double().T) < 2e-6


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 64, 65, 200])
def test_rms_norm_is_the_formula_for_rows_that_lie_apart(name, dtype, rows):
    torch.manual_seed(rows)
    x = torch.randn(rows, 96).to(dtype)[:, :80]
    weight = torch.rand(80) + 0.5
    d = x.double()
    want = d / (d.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    got = ops_of(name).rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype and relative(got, want) < BOUND[dtype]
    assert torch.equal(ops_of(name).rms_norm(x[-1:], weight, 1e-6), got[-1:])


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_residual_and_gate_are_those_of_the_formulas(name, dtype):
    torch.manual_seed(0)
    ops = ops_of(name)
    x = torch.randn(9, 64).to(dtype)
    norm = torch.rand(64) + 0.5
    residual = torch.randn(9, 80).to(dtype)
    w, gate, up = torch.randn(80, 64).to(dtype), torch.randn(48, 64).to(dtype), torch.randn(48, 64).to(dtype)
    d = x.double()
    normed = d / (d.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    got = ops.linear(x, ops.pack_linear(w), norm=norm, eps=1e-6, residual=residual)
    assert relative(got, normed @ w.double().T + residual.double()) < 2 * BOUND[dtype]
    gated = ops.gated_linear(x, ops.pack_gated(gate, up), norm=norm, eps=1e-6)
    want = torch.nn.functional.silu(normed @ gate.double().T) * (normed @ up.double().T)
    assert relative(gated, want) < 3 * BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(dtype):
    torch.manual_seed(1)
    ops = CpuOps()
    x = torch.randn(200, 272).to(dtype)
    norm = torch.rand(272) + 0.5
    packed = ops.pack_linear(torch.randn(144, 272).to(dtype))
    whole = ops.linear(x, packed, norm=norm, eps=1e-6)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 96, 97):
        for start in (0, 101):
            part = ops.linear(x[start : start + rows], packed, norm=norm, eps=1e-6)
            assert torch.equal(part, whole[start : start + rows])


def test_packed_rows_come_back_as_they_went_in():
    ops = CpuOps()
    w = torch.randn(100, 32).to(torch.bfloat16)
    ids = torch.tensor([0, 15, 16, 99, 3, 3])
    assert torch.equal(ops.unpacked_rows(ops.pack_linear(w), ids), w[ids])


def test_a_nan_and_an_infinity_survive_rounding_to_bf16():
    ops = CpuOps()
    x = torch.tensor([[float("nan")] * 16, [float("inf")] + [0.0] * 15], dtype=torch.bfloat16)
    out = ops.linear(x, ops.pack_linear(torch.ones(1, 16, dtype=torch.bfloat16)))
    assert torch.isnan(out[0, 0])
    assert torch.isinf(out[1, 0])
