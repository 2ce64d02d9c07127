"""How the linears of a step know of each other: what is read next, and what a residual prepares for the norm behind."""

from __future__ import annotations

import pytest
import torch

from mstar.kernels.ops import Ops
from mstar.kernels.registry import Table

HIDDEN, INNER, EPS = 128, 192, 1e-6


@pytest.fixture
def chain(device, monkeypatch):
    """TritonOps with the weights of a layer and a head, in order, and the calls that they make."""
    from mstar.kernels import triton_ops
    from mstar.kernels.linear.gpu import candidates

    ops = triton_ops.TritonOps(device, Table(candidates))
    calls = []
    residual, linear = triton_ops.run_residual, triton_ops.run_linear

    def run_residual(choice, x, weight, added, ahead=None, scaled=False):
        calls.append(("residual", ahead, scaled))
        return residual(choice, x, weight, added, ahead, scaled)

    def run_linear(choice, x, weight, **given):
        calls.append((given["kind"], given["ahead"], given["known"]))
        return linear(choice, x, weight, **given)

    monkeypatch.setattr(triton_ops, "run_residual", run_residual)
    monkeypatch.setattr(triton_ops, "run_linear", run_linear)
    generator = torch.Generator().manual_seed(3)

    def weight(n, k):
        return (torch.randn(n, k, generator=generator) / k**0.5).to(torch.bfloat16).to(device)

    out, gated = (
        ops.pack_linear(weight(HIDDEN, 64)),
        ops.pack_gated(weight(INNER, HIDDEN), weight(INNER, HIDDEN)),
    )
    down, head = ops.pack_linear(weight(HIDDEN, INNER)), ops.pack_linear(weight(160, HIDDEN))
    norm = (torch.rand(HIDDEN, generator=generator) + 0.5).to(device)
    ops.read_in_order([(out, None), (gated, norm), (down, None), (head, None)], EPS)
    return ops, (out, gated, down, head), norm, calls


@pytest.mark.parametrize("rows", [1, 5, 16, 20])
def test_a_residual_prepares_for_the_norm_that_follows_where_its_kernel_takes_it(chain, device, rows):
    ops, (out, gated, down, head), norm, calls = chain
    generator = torch.Generator().manual_seed(rows)
    x, mixed = (torch.randn(rows, n, generator=generator).to(torch.bfloat16).to(device) for n in (HIDDEN, 64))
    reference = Ops()

    def layer(use):
        y = use.linear(mixed, out, residual=x)
        inner = use.gated_linear(y, gated, norm=norm, eps=EPS)
        return use.linear(use.linear(inner, down, residual=y), head, out_f32=True)

    got, want = layer(ops), layer(reference)
    assert float((got - want).norm() / want.norm()) < 2e-2

    (
        (first, after_out, prepared),
        (second, after_gated, known),
        (third, after_down, nothing),
        (_, _, unknown),
    ) = calls
    assert (first, second, third) == ("residual", "gated", "residual")
    assert (
        after_out.weight is gated.data
        and after_out.halves == 2
        and after_out.norm is norm
        and after_out.eps == EPS
    )
    assert after_gated.weight is down.data and after_down.weight is head.data
    takes = ops.table.choose(next(key for key in ops.table._chosen if key.kind == "gated")).kernel in (
        "dot",
        "mma",
    )
    assert takes == (rows > 2)
    assert prepared == takes and known.squares.shape[1] == rows
    assert (known.scaled is not None) == takes and (not takes or known.multiplier is norm)
    assert not nothing  # no norm follows
    assert unknown.scaled is None  # what down left is of squares alone


def test_rows_of_another_kernel_are_not_taken_for_the_last_residuals(chain, device):
    ops, (out, gated, _, _), norm, calls = chain
    x = torch.randn(16, HIDDEN).to(torch.bfloat16).to(device)
    y = ops.linear(torch.randn(16, 64).to(torch.bfloat16).to(device), out, residual=x)
    ops.gated_linear(y.clone(), gated, norm=norm, eps=EPS)
    assert calls[-1][2] is None
