"""Triton kernels against their references: in the interpreter without a GPU, compiled with one."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def scalars_as_bounds_of_loops():
    """Triton 3.6's interpreter holds scalars as arrays of one element, which numpy 2.4 no longer makes an int."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


@pytest.fixture(scope="session", autouse=True)
def masks_of_splatted_scalars():
    """Triton 3.9's interpreter makes a tile of a scalar condition int8, and then refuses it as a mask."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask):
        mask.data = mask.data.astype(bool, copy=False)
        return mask

    builder.create_masked_load = lambda self, ptrs, mask, *rest: load(self, ptrs, boolean(mask), *rest)
    builder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(
        self, ptrs, value, boolean(mask), *rest
    )
