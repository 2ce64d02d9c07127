"""Counts that change from step to step are no part of what a kernel is compiled for: no request waits for that."""

from __future__ import annotations

import importlib

import pytest

from mstar.kernels.aot import kernel_modules

COUNTS = {"rows", "splits", "sequences", "total", "total_rows", "known_tiles", "shares"}


@pytest.mark.parametrize("name", sorted(kernel_modules()))
def test_no_kernel_is_compiled_again_for_another_count(name):
    for case in getattr(importlib.import_module(name), "AOT_CASES", []):
        kernel = case.kernel
        numbers = {arg for arg, kind in case.signature.items() if kind in ("i32", "i64") and arg in COUNTS}
        # of the interpreter's functions, and of compiled ones
        kept = kernel.kwargs["do_not_specialize"] if hasattr(kernel, "kwargs") else kernel.do_not_specialize
        assert numbers <= set(kept or ()), f"{kernel.fn.__name__}: {sorted(numbers - set(kept or ()))}"
