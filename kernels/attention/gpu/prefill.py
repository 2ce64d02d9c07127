"""Attention of chunks of prompts over their paged keys: tiles of rows, each walking the keys it sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.attention.gpu.walk import LOG2_E, gated, walk_keys
from mstar.kernels.attention.weights import AttentionWeights
from mstar.kernels.launch import interpreted, launch_options
from mstar.kernels.rows import Rows


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """A tile: pairs of a row and a q head of the group, keys a step, and Triton's options."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 2
    ahead: bool = False  # with it, ptxas 12.8 waits for every wgmma of tiles of 64 keys


def default_choice(dtype: torch.dtype) -> PrefillChoice:
    """Float32 has no tensor cores in IEEE arithmetic: small tiles of scalar products."""
    if interpreted():
        return PrefillChoice(block_m=32, block_n=32)
    if dtype == torch.float32:
        return PrefillChoice(block_m=32, block_n=16)
    return PrefillChoice()


def attend_prefill(
    q: torch.Tensor,
    proj: torch.Tensor,
    weights: AttentionWeights,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: Rows,
    choice: PrefillChoice | None = None,
) -> torch.Tensor:
    """Attention and gate of all rows of a prefill part, each over the keys up to its own.

    q: [rows, q_heads, head_dim] of `qkv_norm_rope_cache`, which also wrote these rows' keys; proj: its input, for
    the gates. Returns [rows, q_heads * head_dim] in the model dtype.
    """
    dim, heads = weights.head_dim, weights.q_heads
    group = heads // weights.kv_heads
    choice = choice or default_choice(proj.dtype)
    out = torch.empty(proj.shape[0], heads * dim, dtype=proj.dtype, device=proj.device)
    tiles = -(-rows.longest // (choice.block_m // group))
    _attend_prefill[(weights.kv_heads, rows.sequences, tiles)](
        q, proj, proj.stride(0), k_cache, v_cache, out, rows.cu_rows, rows.starts,
        rows.block_tables, rows.block_tables.stride(0),
        rows.starts if rows.table_rows is None else rows.table_rows, dim**-0.5 * LOG2_E,
        GROUP=group, KV_HEADS=weights.kv_heads, DIM=dim, BLOCK_SIZE=k_cache.shape[-1],
        TABLE_ROWS=rows.table_rows is not None, BLOCK_M=choice.block_m, BLOCK_N=choice.block_n,
        AHEAD=choice.ahead, WIDE=interpreted() or proj.dtype == torch.float32,
        num_warps=choice.num_warps, num_stages=choice.num_stages, **launch_options(proj.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _attend_prefill(
    q, proj, proj_stride, k_cache, v_cache, out, cu_rows, starts, tables, table_stride, table_rows, score_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TABLE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a tile of rows with all q heads of a KV head, so that they share its keys."""
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # later rows see more keys: they start first
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # there are no weights to read before
    TILE_ROWS: tl.constexpr = BLOCK_M // GROUP
    row0 = tl.load(cu_rows + sequence)
    count = (tl.load(cu_rows + sequence + 1) - row0).to(tl.int32)
    first = tile * TILE_ROWS
    if first < count:
        start = tl.load(starts + sequence).to(tl.int32)
        table = tl.load(table_rows + sequence).to(tl.int64) if TABLE_ROWS else sequence
        table_at = tables + table * table_stride
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, DIM)
        row = first + m // GROUP
        head = kv_head * GROUP + m % GROUP
        used = (m < TILE_ROWS * GROUP) & (row < count)
        at = ((row0 + row) * (KV_HEADS * GROUP) + head) * DIM
        queries = tl.load(q + at[:, None] + d[None, :], mask=used[:, None], other=0.0)
        acc = tl.zeros((BLOCK_M, DIM), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        k_head = k_cache + kv_head * (DIM * BLOCK_SIZE)
        v_head = v_cache + kv_head * (DIM * BLOCK_SIZE)
        seen_by_all = (start + first + 1) // BLOCK_N * BLOCK_N
        end = start + tl.minimum(first + TILE_ROWS, count)
        acc, top, total = walk_keys(
            queries, acc, top, total, start + row, k_head, v_head, table_at, 0, seen_by_all, score_scale,
            KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N, False, AHEAD, WIDE,
        )  # fmt: skip
        acc, top, total = walk_keys(
            queries, acc, top, total, start + row, k_head, v_head, table_at, seen_by_all, end, score_scale,
            KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N, True, AHEAD, WIDE,
        )  # fmt: skip
        acc = acc / total[:, None]  # every row sees its own key
        gate_at = proj + (row0 + row) * proj_stride + head * (2 * DIM) + DIM
        gate = tl.load(gate_at[:, None] + d[None, :], mask=used[:, None], other=0.0)
        tl.store(out + at[:, None] + d[None, :], gated(acc, gate, out.dtype.element_ty), mask=used[:, None])


def _case(dim: int, group: int, choice: PrefillChoice) -> AotCase:
    signature = dict.fromkeys(("q", "proj", "k_cache", "v_cache", "out"), "*bf16")
    signature |= {"cu_rows": "*i64", "starts": "*i64", "tables": "*i32", "table_rows": "*i32"}
    signature |= {"proj_stride": "i32", "table_stride": "i32", "score_scale": "fp32"}
    constants = {
        "GROUP": group, "KV_HEADS": 2, "DIM": dim, "BLOCK_SIZE": 16, "TABLE_ROWS": True,
        "BLOCK_M": choice.block_m, "BLOCK_N": choice.block_n, "AHEAD": choice.ahead,
        "WIDE": False,
    }  # fmt: skip
    signature |= dict.fromkeys([*constants, "PDL"], "constexpr")
    return AotCase(_attend_prefill, signature, constants, choice.num_warps, choice.num_stages, pdl=True)


AOT_CASES = [_case(dim, group, PrefillChoice()) for dim, group in ((256, 4), (256, 6), (64, 4))]
