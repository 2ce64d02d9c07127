"""Inputs of a size, its result in float64, and how far a candidate may be from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mstar.kernels.registry import GemmKey, KernelChoice

EPS = 1e-6
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SLICE = 16384  # outputs of the reference at once: a head in float64 takes gigabytes

# Of the error: its norm over the result's, and its largest part over the result's root mean square, the latter
# after taking off a share of the value itself. Half types allow a few roundings: the norm's rows, the product,
# what follows. A float32 result of half inputs allows tensor cores, which truncate as they add, and not one
# rounding to bf16 (1e-3). A wrong element is off by about 1.
BOUNDS = {
    "bf16": (6e-3, 8e-2, 2.0**-6),
    "fp16": (1e-3, 1.6e-2, 2.0**-9),
    "fp32": (1e-5, 1e-4, 2.0**-16),
    "f32": (1e-4, 1e-3, 2.0**-12),
}

# (choice, x, weight, *, kind, norm, eps, residual) -> result: `run_linear` of kernels/linear/gpu/run.py
RunLinear = Callable[..., torch.Tensor]


class Mismatch(Exception):
    """A candidate's result is not the reference's."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """x: [rows, k]; norm: [k] float32, or None; residual: [rows, n], or None."""

    kind: str
    x: torch.Tensor
    norm: torch.Tensor | None
    residual: torch.Tensor | None

    def run(self, run_linear: RunLinear, choice: KernelChoice, weight: torch.Tensor) -> torch.Tensor:
        return run_linear(
            choice, self.x, weight, kind=self.kind, norm=self.norm, eps=EPS, residual=self.residual
        )

    def rows(self) -> list[torch.Tensor]:
        """What differs from call to call: x, and the residual where there is one."""
        return [self.x] if self.residual is None else [self.x, self.residual]


def make_inputs(key: GemmKey, device: torch.device, generator: torch.Generator) -> Inputs:
    """Normal rows, and a norm of about one."""

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    dtype = TORCH_DTYPES[key.dtype]
    norm = None
    if key.kind in ("norm", "gated"):
        norm = normal(key.k, dtype=torch.float32).mul_(0.1).add_(1.0)
    residual = normal(key.rows, key.n, dtype=dtype) if key.kind == "residual" else None
    return Inputs(key.kind, normal(key.rows, key.k, dtype=dtype), norm, residual)


def make_weight(key: GemmKey, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """[n, k], or [2n, k] of a gated one: products of about one."""
    weight = torch.empty(key.weight_shape, dtype=TORCH_DTYPES[key.dtype], device=device)
    return weight.normal_(generator=generator).mul_(key.k**-0.5)


def reference(inputs: Inputs, weight: torch.Tensor) -> torch.Tensor:
    """The result in float64, nothing rounded on the way: [rows, n]."""
    x = inputs.x.double()
    if inputs.norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * inputs.norm.double()
    y = torch.cat([x @ part.double().t() for part in weight.split(_SLICE)], -1)
    if inputs.kind == "gated":
        gate, up = y.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up
    return y if inputs.residual is None else inputs.residual.double() + y


def check(key: GemmKey, out: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Raises Mismatch for another dtype or shape, and for errors past BOUNDS."""
    dtype = torch.float32 if key.kind == "f32" else TORCH_DTYPES[key.dtype]
    if out.dtype != dtype or out.shape != expected.shape:
        raise Mismatch(f"{where}: {out.dtype} {tuple(out.shape)}, not {dtype} {tuple(expected.shape)}")
    halves_summed = key.kind == "f32" and key.dtype != "fp32"
    norm_bound, element_bound, share = BOUNDS["f32" if halves_summed else key.dtype]
    difference = (out.double() - expected).abs_()
    error = float(difference.norm() / expected.norm())
    scale = float(expected.square().mean().sqrt())
    worst = float(((difference - share * expected.abs()) / scale).max())
    # written so that NaN fails
    if not (error <= norm_bound and worst <= element_bound):
        raise Mismatch(
            f"{where}: error {error:.2g} of {norm_bound:g}, worst {worst:.2g} of {element_bound:g}"
        )


def same_bytes(outs: list[torch.Tensor], expected: torch.Tensor) -> bool:
    """Whether all results have the bytes of `expected`: one comparison, as there may be hundreds."""
    return bool((torch.stack(outs).view(torch.uint8) == expected.contiguous().view(torch.uint8)).all())
