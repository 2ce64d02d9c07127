"""Prefill of a Gated DeltaNet layer's mixer on a GPU, chunks of several requests at once; four launches.

1. `conv_silu`, over chunks and heads: conv, silu, l2 norms' scales. It alone reads the ring of conv inputs.
2. `solve_chunks`, over chunks and value heads: gates and the triangular system of a chunk.
3. `walk_chunks`, over sequences, value heads and parts of the value dim: the state from chunk to chunk, in
   registers; the new state and the ring's new inputs.
4. `outputs`, over chunks and value heads: o and the gated norm.

Chunks of 64 rows begin at a sequence's first row. The scheduler cuts prompts at multiples of 64, so a prompt
run in parts has the chunks, and the bits, of one run whole.

Roundings: u = silu(conv) in the model dtype as the reference; q and k stay there, and their norms' scales go to
products as float32 factors; the state, gates and sums are float32 (sums of log decays float64). A bf16 model's
float32 operands go to the tensor cores in bf16 parts (`split`); other dtypes run IEEE float32 products.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from mstar.kernels.gdn.gpu.chunk import solve_chunks, walk_chunks
from mstar.kernels.gdn.gpu.conv import MAX_WIDTH, conv_silu
from mstar.kernels.gdn.gpu.output import outputs
from mstar.kernels.gdn.weights import GdnWeights
from mstar.kernels.rows import PREFILL_CHUNK as CHUNK
from mstar.kernels.rows import Rows, prefill_chunks

CONV_ROWS = 16  # rows of a program of the conv
FLOAT_WARPS = 8  # of float32 products: 4 spill kilobytes at head dims of 128, 8 little


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be changed without changing the meaning; `measure_prefill` tries others."""

    block_v: int = 0  # columns of the state a program walks with; 0: of `walk_shape`, and walk_stages too
    out_parts: int = 2  # bf16 parts of the states and deltas that o is computed from; 1 adds 10% to o's error
    solve_warps: int = 4
    walk_warps: int = 4
    walk_stages: int = 0
    out_warps: int = 4
    out_stages: int = 2


DEFAULT = Tuning()


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where the chunks of a pass are."""

    count: int
    table: torch.Tensor  # [count, 2] int32: sequence, first row
    borders: torch.Tensor  # [sequences + 1] int32: each sequence's first chunk


def unsupported(weights: GdnWeights) -> str | None:
    """Why these kernels cannot run a layer, or None."""
    for name, dim in (("key", weights.key_dim), ("value", weights.value_dim)):
        if dim not in (16, 32, 64, 128):
            return f"a linear {name} head dim of {dim}: kernels know 16, 32, 64 and 128"
    return None


def gdn_prefill_gpu(
    proj: torch.Tensor,
    weights: GdnWeights,
    state: torch.Tensor,
    conv: torch.Tensor,
    window: torch.Tensor,
    rows: Rows,
    tuning: Tuning = DEFAULT,
) -> torch.Tensor:
    """`mstar.kernels.gdn.reference.gdn_prefill` with the conv's inputs in rings by position.

    proj: [rows, proj_width], model dtype, rows contiguous within. state: [slots, value_heads, key_dim,
    value_dim] float32 and conv: [slots, ring, channels], model dtype, ring a power of two >= width - 1, both
    updated in place: the state of each sequence's slot, and its last `ring` inputs at position % ring. window
    is untouched: nothing is pending after prefill. Slots are distinct, but for the sink.
    Returns [rows, value_heads * value_dim] in the model dtype. Reads nothing back from the device.
    """
    walk = Prefill(proj, weights, state, conv, rows, tuning)
    if rows.chunk_table is not None or rows.host_cu_rows[-1]:
        for stage in walk.stages():
            stage()
    return walk.out


class Prefill:
    """One layer's call: its scratch and its launches, apart so that each can be timed."""

    def __init__(
        self,
        proj: torch.Tensor,
        weights: GdnWeights,
        state: torch.Tensor,
        conv: torch.Tensor,
        rows: Rows,
        tuning: Tuning,
    ):
        width, channels = weights.conv.shape
        ring = conv.shape[1]
        assert proj.stride(1) == 1 and state[0].is_contiguous() and conv[0].is_contiguous()
        assert 1 < width <= MAX_WIDTH, f"a conv of {width} taps"
        assert ring >= width - 1 and ring & (ring - 1) == 0, f"a ring of {ring} inputs"
        assert channels == conv.shape[2] == weights.channels and proj.shape[1] == weights.proj_width
        self.proj, self.weights, self.state, self.conv, self.rows = proj, weights, state, conv, rows
        self.split = proj.dtype == torch.bfloat16
        warps = FLOAT_WARPS
        self.tuning = (
            tuning if self.split else replace(tuning, solve_warps=warps, walk_warps=warps, out_warps=warps)
        )
        self.parts = tuning.out_parts if self.split else 1
        self.chunks = _padded_chunks(rows) or chunks_of(rows.host_cu_rows, proj.device, _stream(proj.device))
        total = proj.shape[0]
        heads, key_dim, value_dim = weights.value_heads, weights.key_dim, weights.value_dim
        part = torch.bfloat16 if self.split else torch.float32
        new, device = functools.partial(torch.empty, device=proj.device), proj.device
        self.u = new(total, channels, dtype=proj.dtype)
        self.scales = new(2 * weights.key_heads, total, dtype=torch.float32)
        self.totals = new(heads, total, dtype=torch.float64)
        self.new_k = new(heads, total, 2 if self.split else 1, key_dim, dtype=part)
        self.new_v = new(heads, total, value_dim, dtype=torch.float32)
        self.states = new(self.chunks.count, heads, self.parts, key_dim, value_dim, dtype=part)
        self.deltas = new(heads, total, self.parts, value_dim, dtype=part)
        self.out = new(total, heads * value_dim, dtype=proj.dtype)
        columns, walk_stages = 16, 2  # of float32; 32 spill
        if self.split:
            length = self.chunks.count / rows.sequences
            columns, walk_stages = walk_shape(rows.sequences * heads, length, value_dim, device)
        self.block_v, self.walk_stages = tuning.block_v or columns, tuning.walk_stages or walk_stages
        self.shape = {
            "key_heads": weights.key_heads, "value_heads": heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim,
            "CHUNK": CHUNK,
        }  # fmt: skip

    def stages(self):
        """The launches in order."""
        return self.convolve, self.solve, self.walk, self.output

    def convolve(self) -> None:
        w, rows = self.weights, self.rows
        grid = (2 * w.key_heads + w.value_heads, self.chunks.count * (CHUNK // CONV_ROWS))
        conv_silu[grid](
            self.proj, self.proj.stride(0), w.conv, self.conv, self.conv.stride(0), self.chunks.table,
            rows.cu_rows, rows.starts, rows.slots, rows.fresh, self.u, self.scales, self.proj.shape[0],
            **self.shape, BLOCK_R=CONV_ROWS, RING=self.conv.shape[1], WIDTH=w.conv.shape[0],
        )  # fmt: skip

    def solve(self) -> None:
        w = self.weights
        solve_chunks[(w.value_heads, self.chunks.count)](
            self.proj, self.proj.stride(0), w.decay, w.dt_bias, self.u, self.scales, self.chunks.table,
            self.rows.cu_rows, self.totals, self.new_k, self.new_v, self.proj.shape[0],
            **self.shape, SPLIT=self.split, num_warps=self.tuning.solve_warps,
        )  # fmt: skip

    def walk(self) -> None:
        w, rows = self.weights, self.rows
        splits = w.value_dim // self.block_v
        walk_chunks[(splits, w.value_heads, rows.sequences)](
            self.proj, self.proj.stride(0), self.conv, self.conv.stride(0), self.state, self.state.stride(0),
            self.u, self.scales, self.totals, self.new_k, self.new_v, self.chunks.borders, rows.cu_rows,
            rows.starts, rows.slots, rows.fresh, self.states, self.deltas, self.proj.shape[0],
            **self.shape, BLOCK_V=self.block_v, SPLIT=self.split, OUT_PARTS=self.parts,
            RING=self.conv.shape[1], STAGES=self.walk_stages, num_warps=self.tuning.walk_warps,
        )  # fmt: skip

    def output(self) -> None:
        w = self.weights
        outputs[(w.value_heads, self.chunks.count)](
            self.proj, self.proj.stride(0), w.norm, w.eps, self.u, self.scales, self.totals, self.states,
            self.deltas, self.chunks.table, self.rows.cu_rows, self.out, self.proj.shape[0],
            **self.shape, BLOCK_K=min(w.key_dim, 64 if self.split else 16), SPLIT=self.split,
            OUT_PARTS=self.parts, STAGES=self.tuning.out_stages, num_warps=self.tuning.out_warps,
        )  # fmt: skip


def scratch_bytes(rows: int, sequences: int, weights: GdnWeights, dtype: torch.dtype) -> int:
    """Most bytes a call takes beside its arguments and its result, freed when it returns."""
    chunks = rows // CHUNK + sequences
    per_row = weights.channels * dtype.itemsize + 8 * weights.key_heads
    per_row += weights.value_heads * (8 + 4 * weights.key_dim + 8 * weights.value_dim)
    return rows * per_row + chunks * weights.value_heads * weights.key_dim * weights.value_dim * 4


def walk_shape(heads: int, length: float, value_dim: int, device: torch.device) -> tuple[int, int]:
    """(columns of the state that a program walks with, chunks in flight).

    heads: of all sequences; length: chunks of a sequence. The walk is a chain of small products, so its time is one
    program's latency until the multiprocessors are full, and then what they load again for each part of the columns.
    On one H200, 18 layers of 0.8B: a sequence of 128 chunks took 0.246 ms a layer with (16, 3), 0.320 with (16, 2),
    and 16 of one chunk 0.035 with (64, 1), 0.047 with (32, 2). Three shapes, so that a load has compiled them all.
    """
    if heads * (value_dim // 16) <= 1.25 * _multiprocessors(device):
        return 16, 3
    return (min(value_dim, 64), 1) if length <= 2 else (min(value_dim, 32), 3)


def _padded_chunks(rows: Rows) -> Chunks | None:
    """The chunks of a padded pass; None: they are to be found by its borders on the host."""
    if rows.chunk_table is None or rows.chunk_borders is None:
        return None
    return Chunks(rows.chunk_table.shape[0], rows.chunk_table, rows.chunk_borders)


@functools.lru_cache(maxsize=4)  # a few passes in flight; every layer of a pass asks for the same
def chunks_of(host_cu_rows: tuple[int, ...], device: torch.device, stream: int) -> Chunks:
    """The chunks of a pass, sent once to the device in the order of `stream`; the host waits for nothing."""
    table, borders = prefill_chunks(host_cu_rows)
    # Triton compiles a kernel again for a pointer that is not a multiple of 16 bytes
    padded = table + [0] * (-len(table) % 4)
    sent = torch.tensor(padded + borders, dtype=torch.int32, pin_memory=device.type == "cuda")
    there = sent.to(device, non_blocking=True)
    return Chunks(borders[-1], there[: len(table)].view(-1, 2), there[len(padded) :])


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
