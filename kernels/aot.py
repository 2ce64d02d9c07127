"""Compiles the Triton kernels ahead of time, without a GPU: `python -m mstar.kernels.aot --target gfx942`.

A module with kernels lists what it is compiled for in `AOT_CASES`. Compiled is not run: no AMD card was at hand.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from mstar.kernels.compiling import compile_threads

# Architecture names as users give them, and (backend, architecture, threads of a warp) as Triton's.
TARGETS: Mapping[str, tuple[str, int | str, int]] = {
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
    "gfx1201": ("hip", "gfx1201", 32),
}


@dataclass(frozen=True, slots=True)
class AotCase:
    """One specialisation of a kernel.

    signature: argument types by name as Triton writes them ("*bf16", "fp32", "i32", "constexpr").
    constants: values of the constexpr arguments. pdl: whether a GPU of CUDA launches it as a dependent; the
    constant PDL is set accordingly, and is false elsewhere. aligned: numbers that are multiples of 16; addresses are.
    targets: those that it is for, where its language is one architecture's.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    pdl: bool = False
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = tuple(TARGETS)


def kernel_modules() -> Iterator[str]:
    """Names of the modules under mstar.kernels that hold Triton kernels."""
    import mstar.kernels as root

    for info in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
        if ".gpu." in info.name:
            yield info.name


def compile_case(case: AotCase, target: str) -> Any:
    """The compiled kernel of Triton for one of TARGETS. Raises Triton's CompilationError."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, warp = TARGETS[target]
    constants = dict(case.constants)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    if "PDL" in case.signature:
        constants["PDL"] = case.pdl and backend == "cuda"
        if constants["PDL"]:
            options["launch_pdl"] = True
    # as torch allocates them, and as Triton therefore specialises launches
    aligned = [*(name for name, kind in case.signature.items() if kind.startswith("*")), *case.aligned]
    attributes = {(case.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    if case.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    source = ASTSource(fn=case.kernel, signature=dict(case.signature), constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)


@click.command()
@click.option("--target", "targets", multiple=True, type=click.Choice(list(TARGETS)), help="All without any.")
def main(targets: tuple[str, ...]) -> None:
    """Compiles every kernel for the targets; fails with what did not compile."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise click.ClickException("TRITON_INTERPRET is set: nothing would be compiled")
    cases: list[tuple[str, AotCase]] = []
    for name in kernel_modules():
        cases += [(name, case) for case in getattr(importlib.import_module(name), "AOT_CASES", [])]
    failures = 0
    for target in targets or TARGETS:
        its = [(name, case) for name, case in cases if target in case.targets]
        click.echo(f"{target}: {len(its)} to compile, a minute or more")
        failed = 0
        with compile_threads() as pool:
            futures = [pool.submit(compile_case, case, target) for _, case in its]
        for (name, case), future in zip(its, futures, strict=True):
            error = future.exception()
            if error is not None:
                failed += 1
                click.echo(f"{name}: {case.kernel.__name__} for {target}: {error}", err=True)
        click.echo(f"{target}: {len(its) - failed} compiled, {failed} failed")
        failures += failed
    if failures or not cases:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
