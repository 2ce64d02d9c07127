"""The budget of a step that ran here: every operation has its kernels; skipped, by this name, without a GPU."""

from __future__ import annotations

import pytest
import torch

from mstar.loader import read_config
from mstar.scripts.make_checkpoint import make_config, write_virtual
from mstar.scripts.step_budget import make_report, measure
from mstar.scripts.step_floor import StepShape, step_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: no step is profiled here")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_operation_of_a_captured_step_has_its_kernels(tmp_path, batch):
    write_virtual(tmp_path, make_config("0.8B", layers=8), 0)
    config, shape = read_config(tmp_path), StepShape(batch, 200, "bf16")
    measured = measure(tmp_path, config, shape, 20, False, None)
    times = measured.times
    assert times.missed == set() and len(times.steps) >= 18 and times.gaps
    assert measured.context > 200 and set(times.kernels) == {times.kernels[0]}
    report = make_report("m", config, shape, measured, None)
    for op in step_ops(config, shape):
        assert op.name in times.ops, op.name
        assert len(times.ops[op.name].seconds) == len(times.steps)
    took = sum(row["us"] for row in report["ops"])
    assert took == pytest.approx(report["measured"]["step_us"], rel=0.1)
    assert took > report["floor_us"] * 0.9
