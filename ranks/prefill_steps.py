"""Prefill parts of a few prompts as captured graphs: a small model's prompt takes the host far longer than the device.

A part is padded to a shape, rows and sequences, and everything that says where its rows belong is on the device.
Padding rows belong to no sequence and write to the sink, padding sequences have no rows. What is drawn after it
is launched as ever. Parts that fit no shape, or that keep the device busy for longer than the host takes to launch
them, run as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mstar.arch.caches import LayerCache
from mstar.arch.inputs import PaddedPrefill
from mstar.kernels.rows import PREFILL_CHUNK, prefill_chunks
from mstar.kernels.staging import stage_into
from mstar.ranks.executor import Executor, row_borders
from mstar.ranks.plan import StepPlan

ROWS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SEQUENCES = (1, 4, 16, 64)
ROWS_A_SEQUENCE = 4  # of a shape, at least: more and shorter prompts take the next larger one
# Operations up to which a part is captured: at 500 TFLOP/s 40 ms, what the host takes for 32 to 64 layers.
MOST_OPERATIONS = 2e13


class PrefillModel(Protocol):
    """What runs; mstar.arch.trunk.Trunk."""

    @property
    def params(self) -> int: ...

    def prefill_step(
        self, inputs: PaddedPrefill, block_table: torch.Tensor, caches: list[LayerCache]
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Rows and sequences that a part is padded to."""

    rows: int
    sequences: int

    @property
    def chunks(self) -> int:
        """The most chunks of PREFILL_CHUNK rows that so many sequences of so many rows in all have."""
        return self.rows // PREFILL_CHUNK + self.sequences


def shapes(params: int) -> list[Shape]:
    """What is captured for a model of so many parameters, the smallest first."""
    return [
        Shape(rows, sequences)
        for rows in ROWS
        for sequences in SEQUENCES
        if rows >= ROWS_A_SEQUENCE * sequences and 2.0 * params * rows <= MOST_OPERATIONS
    ]


class PrefillSteps:
    """The prefill parts of one rank's executor that fit a shape. eager: run them without graphs."""

    def __init__(self, executor: Executor, eager: bool) -> None:
        self._executor = executor
        self._model: PrefillModel = executor.model  # type: ignore[assignment]
        self._eager = eager
        self.shapes = shapes(self._model.params)
        self._parts = {shape: _Part(shape, executor.device) for shape in self.shapes}

    def shape_of(self, plan: StepPlan) -> Shape | None:
        """The smallest shape that holds the plan's prefill part."""
        rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        for shape in self.shapes:
            if plan.chunks and rows <= shape.rows and len(plan.chunks) <= shape.sequences:
                return shape
        return None

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """As `Executor.prefill`: [final chunks, hidden], None where no chunk is final. Valid until the next call."""
        executor, shape = self._executor, self.shape_of(plan)
        if shape is None:
            return executor.prefill(plan)
        part = self._parts[shape]
        executor.update_tables(plan)
        part.fill(plan)
        if part.graph is None:
            part.hidden = self._body(part)
        else:
            part.graph.replay()
        assert part.hidden is not None
        return executor.final_rows(plan, part.hidden[: len(plan.chunks)], every_row=False)

    def capture(self, shape: Shape, pool: Any) -> None:
        """Captures a shape, or with `eager` runs it once. pool: of graphs that never run at once."""
        part = self._parts[shape]
        self.try_shape(shape)
        if self._eager:
            return
        torch.cuda.synchronize(self._executor.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            part.hidden = self._body(part)
        part.graph = graph

    def try_shape(self, shape: Shape) -> None:
        """Runs a shape's part without chunks: of what outlives it, the sinks alone are written."""
        self._body(self._parts[shape])

    def free(self) -> None:
        """Drops the graphs, which hold the caches' addresses."""
        for part in self._parts.values():
            part.graph = part.hidden = None

    def _body(self, part: _Part) -> torch.Tensor:
        executor = self._executor
        slots = part.inputs.slots.long()
        executor.lengths.index_copy_(0, slots, part.ends)
        executor.pending.index_fill_(0, slots, 0)
        return self._model.prefill_step(part.inputs, executor.block_table, executor.caches)


class _Part:
    """A shape's inputs, in two tensors that a call fills with a copy each, and its graph."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        sequences, chunks = shape.sequences, shape.chunks
        self._wide = torch.zeros(shape.rows + 3 * sequences + 1, dtype=torch.int64, device=device)
        # Triton compiles a kernel again for a pointer that is not a multiple of 16 bytes
        sizes = [-(-size // 4) * 4 for size in (2 * chunks, sequences + 1, sequences, sequences)]
        self._narrow = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._sizes = sizes
        rows, starts, last, borders = self._wide.split([shape.rows, sequences, sequences, sequences + 1])
        table, chunk_borders, slots, ends = self._narrow.split(sizes)
        self.ends = ends[:sequences]
        self.inputs = PaddedPrefill(
            token_ids=rows,
            cu_rows=borders,
            starts=starts,
            last_rows=last,
            slots=slots[:sequences],
            chunk_table=table[: 2 * chunks].view(chunks, 2),
            chunk_borders=chunk_borders[: sequences + 1],
        )
        self.hidden: torch.Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, plan: StepPlan) -> None:
        """Puts the plan's chunks where the kernels look for them."""
        shape, chunks = self.shape, plan.chunks
        borders = row_borders(plan)
        table, chunk_borders = prefill_chunks(borders)
        empty = shape.sequences - len(chunks)
        # a chunk of padding begins past the last row of the sequence that it names
        table += [0, shape.rows] * (shape.chunks - len(table) // 2)
        wide = [token for chunk in chunks for token in chunk.token_ids]
        wide += [0] * (shape.rows - len(wide))
        wide += [*(chunk.start for chunk in chunks), *[0] * empty]
        wide += [*(end - 1 for end in borders[1:]), *[0] * empty]
        wide += [*borders, *[borders[-1]] * empty]
        narrow: list[int] = []
        parts = (
            table,
            [*chunk_borders, *[chunk_borders[-1]] * empty],
            [*(chunk.slot for chunk in chunks), *[0] * empty],
            [*(chunk.start + len(chunk.token_ids) for chunk in chunks), *[0] * empty],
        )
        for values, size in zip(parts, self._sizes, strict=True):
            narrow += [*values, *[0] * (size - len(values))]
        stage_into(self._wide, wide)
        stage_into(self._narrow, narrow)
