"""Norms and turns the rows' q and k, and writes their keys and values into the paged caches: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.attention.weights import AttentionWeights
from mstar.kernels.launch import launch_options
from mstar.kernels.rows import Rows


def qkv_norm_rope_cache(
    proj: torch.Tensor,
    weights: AttentionWeights,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: Rows,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """The q of every row, ready for the scores but for their scale; K and V go to the caches.

    proj: [rows, proj_width], model dtype, columns side by side; k_cache: [blocks, kv_heads, head_dim, block] and
    v_cache: [blocks, kv_heads, block, head_dim], model dtype, contiguous, updated in place. A position past the
    block table, and a row past `rows.cu_rows`, is written to the sink, block 0. arrivals: [sequences * kv_heads]
    int32, of a decode part, becomes zeros for `attend_decode`.
    Returns [rows, q_heads, head_dim] in the model dtype.
    """
    assert proj.stride(1) == 1 and rows.block_tables.stride(1) == 1
    count, dim = proj.shape[0], weights.head_dim
    q = torch.empty(count, weights.q_heads, dim, dtype=proj.dtype, device=proj.device)
    table_rows = rows.starts if rows.table_rows is None else rows.table_rows
    _qkv_norm_rope_cache[(count, weights.q_heads + weights.kv_heads)](
        proj, proj.stride(0), weights.q_norm, weights.k_norm, weights.inv_freq, weights.eps, q, k_cache, v_cache,
        rows.starts if arrivals is None else arrivals,
        rows.cu_rows, rows.starts, rows.block_tables, rows.block_tables.stride(0), rows.block_tables.shape[1],
        table_rows, rows.sequences,
        Q_HEADS=weights.q_heads, KV_HEADS=weights.kv_heads, DIM=dim, HALF=weights.inv_freq.shape[0],
        BLOCK_SIZE=k_cache.shape[-1], ROWS_PER_SEQ=rows.rows_per_seq,
        TABLE_ROWS=rows.table_rows is not None, ARRIVALS=arrivals is not None, SETTLED=rows.settled,
        num_warps=1 if dim <= 64 else 2, **launch_options(proj.device),
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["table_stride", "columns", "sequences"])
def _qkv_norm_rope_cache(
    proj, proj_stride, q_norm, k_norm, inv_freq, eps, q_out, k_cache, v_cache, arrivals,
    cu_rows, starts, tables, table_stride, columns, table_rows, sequences,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS_PER_SEQ: tl.constexpr, TABLE_ROWS: tl.constexpr, ARRIVALS: tl.constexpr,
    SETTLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and head: q heads first, then the K and V of each KV head. ROWS_PER_SEQ 0: prefill."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    d = tl.arange(0, DIM)
    low = d < HALF
    turned = d < 2 * HALF
    other = tl.where(low, d + HALF, tl.where(turned, d - HALF, d))  # the dim that is turned with this one
    is_q = head < Q_HEADS
    norm = q_norm if is_q else k_norm
    weight = tl.load(norm + d)
    other_weight = tl.load(norm + other)
    frequency = tl.load(inv_freq + d % HALF, mask=turned, other=0.0)
    kv_head = head - Q_HEADS
    column = head * 2 * DIM if is_q else 2 * Q_HEADS * DIM + kv_head * DIM
    source = proj + row * proj_stride + column
    if not SETTLED:
        if PDL:
            tl.extra.cuda.gdc_wait()
        x = tl.load(source + d).to(tl.float32)
        x_other = tl.load(source + other).to(tl.float32)

    # before a wait, past the first cache: it may still hold what an earlier step read here
    if ROWS_PER_SEQ > 0:
        sequence = row // ROWS_PER_SEQ
        known = True
        position = tl.load(starts + sequence, cache_modifier=".cg") + row % ROWS_PER_SEQ
    else:
        sequence = row * 0
        # how many end before this row; whatever their number, the kernel is one
        for first in range(0, sequences, 64):
            index = first + tl.arange(0, 64)
            ends = tl.load(cu_rows + 1 + index, mask=index < sequences, other=row + 1)
            sequence += tl.sum((ends <= row).to(tl.int64), 0)
        known = sequence < sequences
        sequence = tl.minimum(sequence, sequences - 1)
        position = tl.load(starts + sequence) + row - tl.load(cu_rows + sequence)
    angle = position.to(tl.float32) * frequency  # zero past the turned dims
    cosine = tl.cos(angle)
    sine = tl.sin(angle)
    if SETTLED:
        if PDL:
            tl.extra.cuda.gdc_wait()  # what is above was there before the step, or when the step had begun
        x = tl.load(source + d).to(tl.float32)
        x_other = tl.load(source + other).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    a = x * scale * weight
    b = x_other * scale * other_weight
    y = a * cosine + tl.where(low, -b, b) * sine

    if is_q:
        tl.store(q_out + (row * Q_HEADS + head) * DIM + d, y.to(q_out.dtype.element_ty))
    else:
        v = tl.load(source + KV_HEADS * DIM + d)
        table = tl.load(table_rows + sequence).to(tl.int64) if TABLE_ROWS else sequence
        block_column = position // BLOCK_SIZE
        known = known & (block_column < columns)
        block = tl.load(tables + table * table_stride + block_column, mask=known, other=0).to(tl.int64)
        at = (block * KV_HEADS + kv_head) * (DIM * BLOCK_SIZE)
        offset = position % BLOCK_SIZE
        tl.store(k_cache + at + d * BLOCK_SIZE + offset, y.to(k_cache.dtype.element_ty))
        tl.store(v_cache + at + offset * DIM + d, v)
        if ARRIVALS:
            tl.store(arrivals + sequence * KV_HEADS + kv_head, 0)


def _case(dim: int, half: int, rows_per_seq: int, settled: bool = False) -> AotCase:
    pointers = dict.fromkeys(("proj", "q_out", "k_cache", "v_cache"), "*bf16")
    pointers |= dict.fromkeys(("q_norm", "k_norm", "inv_freq"), "*fp32")
    pointers |= {
        "arrivals": "*i32",
        "cu_rows": "*i64",
        "starts": "*i64",
        "tables": "*i32",
        "table_rows": "*i32",
    }
    numbers = dict.fromkeys(("proj_stride", "table_stride", "columns", "sequences"), "i32") | {"eps": "fp32"}
    constants = {
        "Q_HEADS": 8, "KV_HEADS": 2, "DIM": dim, "HALF": half, "BLOCK_SIZE": 16, "ROWS_PER_SEQ": rows_per_seq,
        "TABLE_ROWS": rows_per_seq > 0, "ARRIVALS": rows_per_seq > 0, "SETTLED": settled,
    }  # fmt: skip
    names = dict.fromkeys([*constants, "PDL"], "constexpr")
    return AotCase(_qkv_norm_rope_cache, pointers | numbers | names, constants, num_warps=2, pdl=True)


AOT_CASES = [_case(256, 32, 1, settled=True), _case(256, 32, 4), _case(256, 32, 0), _case(64, 8, 4)]
