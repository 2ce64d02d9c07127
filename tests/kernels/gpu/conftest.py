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
