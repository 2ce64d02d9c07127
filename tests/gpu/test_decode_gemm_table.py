"""The device's table and the bench's rig; skipped, by this name, where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from mstar.kernels.registry import GemmKey, KernelChoice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: its table is not checked here")

KEY = GemmKey("norm", 4, 1024, 512, "bf16")


def rig(run_linear):
    from mstar.kernels.bench.measure import GpuRig

    return GpuRig(torch.device("cuda", torch.cuda.current_device()), run_linear)


def test_the_table_of_this_device_is_taken_whole():
    from mstar.kernels.registry import table_for

    table = table_for(torch.device("cuda", torch.cuda.current_device()))
    if not table.choices:
        pytest.skip(f"defaults run here: {table.notes}")
    assert table.notes == ()


@pytest.mark.timeout(1500)
def test_every_entry_of_the_table_has_parity_eager_and_from_a_graph_replay():
    from mstar.kernels.linear.gpu.run import run_linear
    from mstar.kernels.registry import table_for

    table = table_for(torch.device("cuda", torch.cuda.current_device()))
    if not table.choices:
        pytest.skip(f"defaults run here: {table.notes}")
    checked, failed = rig(run_linear), []
    # one size after another, so that weights are made once; "prepare" is the check
    for key, choice in sorted(table.choices.items(), key=lambda item: item[0].name):
        try:
            checked.prepare(key, choice)
        except Exception as error:  # all of them, not the first alone
            failed.append(f"{key.name} {choice.name}: {error}")
    checked.release()
    assert failed == []


def test_a_pass_times_a_call():
    from mstar.kernels.linear.gpu.run import run_linear

    one_pass = rig(run_linear).prepare(KEY, KernelChoice("cublas"))
    assert 0.3 < one_pass() < 500  # us: more than a node's start, less than a host's


def test_the_rig_refuses_a_wrong_result_and_a_graph_that_does_not_read_its_inputs():
    from mstar.kernels.bench.parity import Mismatch
    from mstar.kernels.linear.gpu.run import run_linear

    def scaled(*arguments, **options):
        return run_linear(*arguments, **options) * 1.02

    with pytest.raises(Mismatch, match="eager"):
        rig(scaled).prepare(KEY, KernelChoice("cublas"))

    frozen: list[torch.Tensor] = []

    def remembered(choice, x, weight, **options):
        # in the graph, the rows of the eager run before it
        if not torch.cuda.is_current_stream_capturing():
            frozen.append(x.clone())
        return run_linear(choice, frozen[-1], weight, **options)

    with pytest.raises(Mismatch, match="replay"):
        rig(remembered).prepare(KEY, KernelChoice("cublas"))
