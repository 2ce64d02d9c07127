"""Adds up what programs of a split linear left, and what follows: the residual and the norm behind it, in one launch.

A program has a whole row, so it can norm it: the linear behind reads normed rows, whatever runs it, and a norm's
kernel is saved. The last program of a tile could add up its parts, too (`epilogue.scale_and_store`): for few rows
that saves this launch, for many it is a long wait for few programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.launch import launch_options
from mstar.kernels.linear.gpu.epilogue import rounded

VALUES_A_WARP = 256  # of a row


def add_parts(
    parts: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of parts, in order, rounded, plus the residual; and with a norm, that sum normed.

    parts: [parts, rows, n] contiguous, float32 or the model dtype; residual: [rows, n], the model dtype, rows
    contiguous within; norm: [n] float32. Returns both as [rows, n] in the model dtype, rounded as
    `mstar.kernels.linear` and `rms_norm_rows` round.
    """
    count, rows, n = parts.shape
    assert parts.is_contiguous() and residual.shape == (rows, n) and residual.stride(1) == 1
    out = torch.empty(rows, n, dtype=residual.dtype, device=residual.device)
    normed = None if norm is None else torch.empty_like(out)
    block = triton.next_power_of_2(n)
    _add_parts[(rows,)](
        parts, residual, residual.stride(0), norm, eps, out, normed, n,
        PARTS=count, BLOCK=block, num_warps=min(16, max(1, block // VALUES_A_WARP)),
        **launch_options(out.device),
    )  # fmt: skip
    return out, normed


@triton.jit
def _add_parts(
    parts, residual, residual_stride, norm, eps, out, normed, n,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(norm + columns, mask=inside, other=0.0) if norm is not None else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()  # what is above reads weights alone; what is below, other kernels' results
    r = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    at = parts + row * n + columns
    y = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(PARTS):
        y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        at += tl.num_programs(0).to(tl.int64) * n
    stored = (rounded(y, out.dtype.element_ty) + r).to(out.dtype.element_ty)
    tl.store(out + row * n + columns, stored, mask=inside)
    if norm is not None:
        f = stored.to(tl.float32)
        scale = tl.rsqrt(tl.sum(f * f, 0) / n + eps)
        tl.store(normed + row * n + columns, (f * scale * w).to(normed.dtype.element_ty), mask=inside)


def _case(parts: int, kind: str, normed: bool = True) -> AotCase:
    signature = {
        "parts": kind, "residual": "*bf16", "residual_stride": "i64", "norm": "*fp32", "eps": "fp32", "out": "*bf16",
        "normed": "*bf16", "n": "i32", "PARTS": "constexpr", "BLOCK": "constexpr", "PDL": "constexpr",
    }  # fmt: skip
    constants: dict[str, object] = {"PARTS": parts, "BLOCK": 1024}
    if not normed:
        signature |= dict.fromkeys(("norm", "normed"), "constexpr")
        constants |= dict.fromkeys(("norm", "normed"))
    return AotCase(_add_parts, signature, constants, num_warps=4, pdl=True, aligned=("residual_stride", "n"))


AOT_CASES = [_case(8, "*fp32"), _case(1, "*bf16"), _case(4, "*fp32", normed=False)]
