"""Root-mean-square norm of rows, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.launch import launch_options


def rms_norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`mstar.kernels.norm.rms_norm` of x [rows, dim], rows contiguous within; weight [dim] float32."""
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    _rms_norm_rows[(rows,)](
        x, x.stride(0), weight, out, dim, eps,
        BLOCK=triton.next_power_of_2(dim), num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _rms_norm_rows(x, stride, weight, out, dim, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(weight + columns, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()  # what is above reads weights alone; what is below, other kernels' results
    f = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(f * f, 0) / dim + eps)
    tl.store(out + row * dim + columns, (f * scale * w).to(out.dtype.element_ty), mask=inside)


AOT_CASES = [
    AotCase(
        _rms_norm_rows,
        {
            "x": "*bf16",
            "stride": "i64",
            "weight": "*fp32",
            "out": "*bf16",
            "dim": "i32",
            "eps": "fp32",
            "BLOCK": "constexpr",
            "PDL": "constexpr",
        },
        {"BLOCK": 1024},
        pdl=True,
    )
]
