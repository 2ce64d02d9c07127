"""Kernels that are compiled side by side are not run, and need not be compiled again."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: kernels are not compiled side by side here"
)


def test_a_body_compiles_and_does_not_run():
    from triton import knobs

    from mstar.kernels.compiling import compile_together
    from mstar.kernels.norm.gpu.rows import rms_norm_rows

    device = torch.device("cuda")
    weight = torch.ones(80, device=device)
    inputs = [
        torch.full((3, 80), 2.0, dtype=dtype, device=device) for dtype in (torch.float16, torch.float32)
    ]
    said: list[tuple[int, int]] = []
    compile_together(
        [lambda x=x: rms_norm_rows(x, weight, 0.0) for x in [*inputs, *inputs]], lambda *n: said.append(n)
    )
    assert said[-1] == (2, 2)  # one for each dtype, however often it is called
    compiled: list[object] = []
    knobs.runtime.jit_cache_hook = lambda **what: compiled.append(what["repr"])
    try:
        for x in inputs:
            assert torch.equal(rms_norm_rows(x, weight, 0.0), torch.ones_like(x))
    finally:
        knobs.runtime.jit_cache_hook = None
    assert not compiled
