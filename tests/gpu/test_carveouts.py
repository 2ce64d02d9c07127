"""Which functions ask for another carve-out on a GPU, as the driver has it."""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import pytest
import torch

from mstar.kernels.registry import GemmKey

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None,
    reason="no CUDA: nothing asks for a carve-out here",
)


@pytest.fixture
def preferred(monkeypatch):
    """What the driver holds of each function that asked since, in percent."""
    from mstar.kernels import carveout

    monkeypatch.setattr(carveout, "_asked", WeakKeyDictionary())

    def read() -> list[int]:
        driver, found = ctypes.CDLL("libcuda.so.1"), []
        for kernel in carveout._asked:
            value, function = ctypes.c_int(), ctypes.c_void_p(kernel.function)
            asked = driver.cuFuncGetAttribute(ctypes.byref(value), carveout.PREFERRED_CARVEOUT, function)
            assert asked == 0
            found.append(value.value)
        return found

    return read


@pytest.mark.parametrize(
    "starts, count, last_only",
    [([8191], 1, False), ([8191, 40], 1, False), ([8191], 4, False), ([8191], 4, True)],
)
def test_attention_of_one_row_leaves_the_cache_to_the_linears(preferred, starts, count, last_only):
    from mstar.kernels.attention.gpu.run import attention_gpu
    from tests.support.attention import paged, random_weights

    generator, device = torch.Generator().manual_seed(0), torch.device("cuda")
    case = paged(
        random_weights(8, 2, 256, 64, generator), starts, [count] * len(starts),
        dtype=torch.bfloat16, device=device, generator=generator, decode=True,
    )  # fmt: skip
    attention_gpu(case.proj, case.weights, case.k_cache, case.v_cache, case.rows, last_only)
    found = preferred()
    if len(starts) * count > 1:
        assert found == []
    else:
        whole = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
        tile = 32 * 256 * 2  # keys, dims, bytes: of keys and of values, three tiles or four are in flight
        (percent,) = found
        assert 6 * tile <= percent * whole // 100 <= 9 * tile


def test_a_stream_asks_for_what_its_choice_says_and_others_of_its_tiles_do_not(preferred):
    candidates = pytest.importorskip("mstar.kernels.linear.gpu.candidates")
    from mstar.kernels.linear.gpu.run import skinny_call

    choice = candidates.streaming(GemmKey("plain", 8, 1024, 1024, "bf16"))
    if choice is None:
        pytest.skip("stream runs on Hopper alone")
    x, weight = (torch.ones(rows, 1024, dtype=torch.bfloat16, device="cuda") for rows in (8, 1024))
    outs = []
    for percent in (0, 44, 72):
        call = skinny_call(candidates.with_params(choice, CARVEOUT=percent), x, weight, kind="plain")
        outs += [call.start().clone(), call.start().clone()]
    assert sorted(preferred()) == [44, 72]
    assert all(bool((out == 1024).all()) for out in outs)
