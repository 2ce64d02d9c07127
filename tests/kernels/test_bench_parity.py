"""What the bench holds candidates to: the torch reference passes, and what is slightly wrong does not."""

from __future__ import annotations

import pytest
import torch

from mstar.kernels.bench.parity import (
    EPS,
    TORCH_DTYPES,
    Inputs,
    Mismatch,
    check,
    make_inputs,
    make_weight,
    reference,
    same_bytes,
)
from mstar.kernels.linear import gated_linear, linear
from mstar.kernels.registry import DTYPES, KINDS, GemmKey, KernelChoice, linears

CPU = torch.device("cpu")


def run_reference(choice, x, weight, *, kind, norm, eps, residual):
    """`run_linear` on the torch reference."""
    if kind == "gated":
        return gated_linear(x, weight, norm=norm, eps=eps)
    return linear(x, weight, norm=norm, eps=eps, residual=residual, out_f32=kind == "f32")


def made(kind: str, dtype: str) -> tuple[GemmKey, Inputs, torch.Tensor, torch.Tensor]:
    key = GemmKey(kind, 3, 160, 96, dtype)
    generator = torch.Generator().manual_seed(3)
    inputs = make_inputs(key, CPU, generator)
    weight = make_weight(key, CPU, generator)
    return key, inputs, weight, inputs.run(run_reference, KernelChoice("reference"), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_torch_reference_passes_for_every_kind(kind, dtype):
    key, inputs, weight, out = made(kind, dtype)
    assert EPS > 0 and inputs.x.dtype == TORCH_DTYPES[dtype]
    check(key, out, reference(inputs, weight), "eager")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's; tests/gpu has the GPU's")
@pytest.mark.parametrize("rows, dtype", [(2, "fp16"), (8, "fp32")])  # it cuts bf16 off instead of rounding
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_kernels_pass_in_the_interpreter(kind, rows, dtype):
    pytest.importorskip("triton")
    from mstar.kernels.linear.gpu.run import run_linear

    key = GemmKey(kind, rows, 32, 512, dtype)
    generator = torch.Generator().manual_seed(rows)
    inputs, weight = make_inputs(key, CPU, generator), make_weight(key, CPU, generator)
    choice = linears().default(key)
    assert choice.kernel != "cublas"
    check(key, inputs.run(run_linear, choice, weight), reference(inputs, weight), "eager")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_element_fails(kind, dtype):
    key, inputs, weight, out = made(kind, dtype)
    expected = reference(inputs, weight)
    out[1, 7] += 0.3 * float(expected.square().mean().sqrt()) + 0.02 * float(expected[1, 7].abs())
    with pytest.raises(Mismatch, match="replay"):
        check(key, out, expected, "replay")


def test_another_dtype_shape_or_nan_fails():
    key, inputs, weight, out = made("f32", "bf16")
    expected = reference(inputs, weight)
    for wrong in (out.bfloat16(), out[:, :-1], out.bfloat16().float(), torch.full_like(out, float("nan"))):
        with pytest.raises(Mismatch):
            check(key, wrong, expected, "eager")


def test_a_forgotten_norm_residual_or_gate_fails():
    for kind in ("norm", "residual", "gated"):
        key, inputs, weight, _ = made(kind, "bf16")
        plain = linear(inputs.x, weight)[:, : key.n]
        with pytest.raises(Mismatch):
            check(key, plain, reference(inputs, weight), "eager")


def test_one_differing_byte_of_any_result_shows():
    outs = [torch.ones(2, 4, dtype=torch.bfloat16) for _ in range(3)]
    expected = outs[0].clone()
    assert same_bytes(outs, expected)
    outs[2][1, 3] = 1.0078125  # the next bf16
    assert not same_bytes(outs, expected)
