"""What a profiler's trace says of decode steps: each operation's time and kernels, and the gaps between steps.

A step on a device is what lies from its first kernel (`_begin_step`) to its last (`_finish_step`). Many operations
share their kernels' names (all linears do), so that a kernel belongs to an operation by its place: a step's kernels
are read in order beside the operations of the model (`mstar.scripts.step_floor`). Kernels may start before the one
before them has ended (programmatic dependent launch), so a kernel's time is what passed since then, not its own
duration: times add up to the step's.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mstar.scripts.step_floor import StepOp

# Kinds of kernels by name, the first that is found in it. Those of one linear are a norm before, a product, and
# what comes after it, as cuBLAS has them; a fused kernel is the product alone.
KERNELS: tuple[tuple[str, str], ...] = (
    ("begin", r"^_begin_step"),
    ("finish", r"^_finish_step"),
    ("draw", r"^(_partial_draws|_merge_draws|row_maxima|count_bins|collect|_select)\b"),
    ("prefill", r"^(_attend_prefill|conv_silu|solve_chunks|walk_chunks|outputs|keep_inputs)\b"),
    ("noise", r"^_gumbel_(rows|at)\b"),
    ("gdn", r"^_gdn_decode\b"),
    ("qkv", r"^_qkv_norm_rope_cache\b"),
    ("attention", r"^(_attend_decode|_reduce_segments)\b"),
    ("norm", r"^_rms_norm_rows\b"),
    ("after", r"^(_silu_gated|_add_parts)\b|splitKreduce|reduce_1Block_kernel"),
    ("linear", r"^(_fma|_dot|_mma|_stream)\b|gemm|gemv|nvjet|cutlass|cublas|Cijk_"),
    ("collective", r"nccl|all_?reduce|AllReduce"),
)
_PATTERNS = [(kind, re.compile(pattern)) for kind, pattern in KERNELS]
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
OTHER = "other"


class TraceError(Exception):
    """The trace holds no step that fits; the message is for the person who asked."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch on the device; times in seconds."""

    name: str
    begun: float
    ended: float


@dataclass(slots=True)
class OpTimes:
    """What the operations of one name took, a step at a time."""

    seconds: list[float] = field(default_factory=list)
    kernels: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


@dataclass(slots=True)
class StepTimes:
    """What a trace's steps took; times in seconds."""

    steps: list[float] = field(default_factory=list)
    gaps: list[float] = field(
        default_factory=list
    )  # between a step and the next one, with nothing in between
    kernels: list[int] = field(default_factory=list)
    ops: dict[str, OpTimes] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)  # operations of the model that some step has no kernel for


def kind_of(name: str) -> str | None:
    """What kind of kernel that name is of."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)


def read_trace(path: Path) -> list[Kernel]:
    """The device's launches in a torch profiler's Chrome trace, in order. Raises TraceError."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    events = data.get("traceEvents", []) if isinstance(data, dict) else data
    return kernels_of(event for event in events if isinstance(event, dict))


def kernels_of(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """Of a Chrome trace's events, whose times are in microseconds."""
    kernels = [
        Kernel(str(event["name"]), event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _DEVICE
    ]
    return sorted(kernels, key=lambda kernel: (kernel.begun, kernel.ended))


def step_times(kernels: Sequence[Kernel], sequence: Sequence[StepOp]) -> StepTimes:
    """Reads the steps among the kernels. sequence: a step's operations in order. Raises TraceError for none."""
    found = StepTimes()
    ended: float | None = None  # of the step before, with nothing since
    for step, between in _steps(kernels):
        if ended is not None and not between:
            found.gaps.append(max(0.0, step[0].begun - ended))
        ended = max(kernel.ended for kernel in step)
        found.steps.append(ended - step[0].begun)
        found.kernels.append(len(step))
        _read_step(step, sequence, found)
    if not found.steps:
        raise TraceError("the trace has no decode step: none of its kernels is _begin_step … _finish_step")
    return found


def _steps(kernels: Sequence[Kernel]) -> Iterator[tuple[list[Kernel], bool]]:
    """(a step's kernels, whether other work than copies came before it)."""
    step: list[Kernel] | None = None
    between = False
    for kernel in kernels:
        kind = kind_of(kernel.name)
        if kind == "begin":
            step = []
        if step is None:
            between = between or kind is not None
            continue
        step.append(kernel)
        if kind == "finish":
            yield step, between
            step, between = None, False


def _read_step(step: Sequence[Kernel], sequence: Sequence[StepOp], found: StepTimes) -> None:
    """Adds one step's times to those of its operations."""
    took: dict[str, float] = {}
    count: dict[str, int] = {}
    before = step[0].begun
    at = 0  # in `sequence`
    current = OTHER  # the operation that the latest kernel was of
    kinds = [kind_of(kernel.name) for kernel in step]
    previous: str | None = None
    for index, (kernel, kind) in enumerate(zip(step, kinds, strict=True)):
        if kind == "norm":
            # of the linear that follows; it begins that one
            follows = next((k for k in kinds[index + 1 :] if k is not None), None)
            wanted = follows == "linear"
        else:
            wanted = kind is not None and kind != "after"
        same = kind == previous and kind not in ("linear", "norm", None)
        begun_by_norm = kind == "linear" and previous == "norm"
        if wanted and not same and not begun_by_norm:
            target = "linear" if kind == "norm" else kind
            if at < len(sequence) and sequence[at].kind == target:
                current = sequence[at].name
                at += 1
            else:
                current = OTHER
        elif kind is None:
            current = OTHER
        times = found.ops.setdefault(current, OpTimes())
        times.names.add(kernel.name)
        took[current] = took.get(current, 0.0) + max(0.0, kernel.ended - before)
        count[current] = count.get(current, 0) + 1
        before = max(before, kernel.ended)
        previous = kind or previous  # a copy in between changes nothing
    found.missed.update(op.name for op in sequence[at:])
    for name, seconds in took.items():
        found.ops[name].seconds.append(seconds)
        found.ops[name].kernels.append(count[name])


def median(values: Sequence[float]) -> float:
    """NaN of none."""
    return statistics.median(values) if values else float("nan")
