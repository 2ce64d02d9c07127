"""The norm's kernel against float64."""

import pytest
import torch

from mstar.kernels.norm.gpu.rows import rms_norm_rows


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("rows, dim", [(1, 64), (3, 1000), (7, 256)])
def test_rms_norm_rows(device, rows, dim, dtype, bound):
    generator = torch.Generator().manual_seed(rows)
    whole = torch.randn(rows, dim + 8, generator=generator).to(dtype).to(device)
    x = whole[:, :dim]  # rows need not lie side by side
    weight = torch.randn(dim, generator=generator).to(device)
    f = x.double()
    expected = f / (f.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = rms_norm_rows(x, weight, 1e-6)
    assert out.dtype == dtype
    assert (out.double() - expected).norm() / expected.norm() < bound
