"""Attention of a few rows a sequence over its paged keys, cut into segments that programs share out among them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.attention.gpu.balance import TILE, merged, segment_at, shares_of
from mstar.kernels.attention.gpu.reduce import reduce_segments
from mstar.kernels.attention.gpu.segment import BLOCKS_ASKED, attend_segment, store_gated, store_part
from mstar.kernels.attention.gpu.walk import LOG2_E, ask_for_keys
from mstar.kernels.attention.weights import AttentionWeights
from mstar.kernels.carveout import prefer_carveout
from mstar.kernels.launch import interpreted, launch_options
from mstar.kernels.linear.gpu.arrivals import arrives_last
from mstar.kernels.rows import Rows

# Of a sequence and KV head, up to which one program a multiprocessor is better than two, whose parts take longer to
# merge.
FEW_PAIRS = 2
# From more pairs on than the first, segments have larger tiles, one program a multiprocessor, and are merged by the
# last of them; from more than the second, short sequences stay whole; from more than the third, two programs share a
# multiprocessor, with small tiles.
MANY_PAIRS = (32, 64, 128)
# Rows of a step up to which attention asks for the shared memory of one program, and leaves the rest of it to the first
# cache, through which most linears of one row read. At two it gives and takes; from four on it mostly costs.
CACHED_ROWS = 1


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """How a call is cut: keys a tile and a segment's least, programs wanted a multiprocessor, and Triton's options.

    apart: a kernel of its own merges the segments of a sequence, and not the program that ends last.
    """

    block_n: int = 32
    least_keys: int = 64
    programs: int = 2
    num_warps: int = 4
    num_stages: int = 4
    apart: bool = True


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs fill the device once; 4 in the interpreter, so that tests see several segments."""
    return 4 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


def default_choice(dtype: torch.dtype, block_m: int, pairs: int) -> DecodeChoice:
    """For tiles of block_m rows, and so many pairs of a sequence and KV head.

    Float32 tiles take twice the shared memory, and their dots are scalar products: smaller and fewer in flight.
    Segments of one tile make a short context faster while the GPU has room for them: a step of 0.8B on one H200 took
    582 us with 32 keys and 590 with 64 at one sequence of 200 tokens, 942 and 949 at 16, 1,744 and 1,740 at 64.
    One program a multiprocessor in place of two: 2B, of two KV heads, 1,173 us in place of 1,200 at one sequence of
    8,192 tokens; 9B, of four, 4,227 in place of 4,210. Whole keys where there are many pairs, at 200 and 2,048 tokens:
    0.8B at 32 1,151 / 1,411 in place of 1,156 / 1,434, at 64 1,689 / 2,076 of 1,706 / 2,159; 8 layers of 9B at 64
    2,055 / 2,287 of 2,074 / 2,307.
    """
    if dtype == torch.float32:
        return DecodeChoice(block_n=16, num_stages=2, num_warps=4 if block_m <= 16 else 8)
    num_warps = 4 if block_m <= 32 else 8
    if pairs <= MANY_PAIRS[0]:
        return DecodeChoice(least_keys=32, programs=1 if pairs <= FEW_PAIRS else 2, num_warps=num_warps)
    least_keys = 128 if pairs <= MANY_PAIRS[1] else 512
    # many rows need the shared memory that larger tiles would take, and AMD's units have little
    if pairs > MANY_PAIRS[2] or block_m > 32 or torch.version.hip:
        return DecodeChoice(32, least_keys, 2 if block_m <= 32 else 1, num_warps, apart=False)
    return DecodeChoice(64, least_keys, 1, num_warps, num_stages=3, apart=False)


def attend_decode(
    q: torch.Tensor,
    proj: torch.Tensor,
    weights: AttentionWeights,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: Rows,
    last_only: bool = False,
    choice: DecodeChoice | None = None,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention and gate of `rows.rows_per_seq` rows a sequence, or of each sequence's last row with last_only.

    q: [rows, q_heads, head_dim] of `qkv_norm_rope_cache`, which also wrote these rows' keys; proj: its input, for
    the gates. With last_only the part may be prefill. arrivals: [sequences * kv_heads] int32 zeros, of this call's
    own; without them segments are merged apart. How many keys a sequence has is read on the device: the grid depends
    on shapes; with rows.settled it is read, and keys are asked for, before other kernels' results are waited for.
    Returns [rows, q_heads * head_dim], or [sequences, ...], in the model dtype.
    """
    dim, heads, device = weights.head_dim, weights.q_heads, proj.device
    per_seq = 1 if last_only else rows.rows_per_seq
    group = heads // weights.kv_heads
    block_m = max(16, triton.next_power_of_2(group * per_seq))
    choice = choice or default_choice(proj.dtype, block_m, rows.sequences * weights.kv_heads)
    # compiled for AMD, the last program could come before the others' stores: docs/kernels.md
    apart = choice.apart or arrivals is None or torch.version.hip is not None
    programs = max(1, choice.programs * multiprocessors(device) // weights.kv_heads)
    shares = shares_of(rows.sequences, programs)
    held = (rows.sequences + shares) * per_seq * heads
    out = torch.empty(rows.sequences * per_seq, heads * dim, dtype=proj.dtype, device=device)
    parts = torch.empty(held, dim, dtype=torch.float32, device=device)
    sums = torch.empty(held, dtype=torch.float32, device=device)
    shape = {
        "GROUP": group, "KV_HEADS": weights.kv_heads, "DIM": dim, "BLOCK_SIZE": k_cache.shape[-1], "ROWS": per_seq,
        "LAST_ONLY": last_only, "SETTLED": rows.settled and not last_only,
        "LEAST": choice.least_keys, "BLOCK_N": choice.block_n, "PADDED": triton.next_power_of_2(rows.sequences),
        **launch_options(device),
    }  # fmt: skip
    launched = _attend_decode[(weights.kv_heads, max(rows.sequences, programs))](
        q, proj, proj.stride(0), k_cache, v_cache, out, parts, sums, rows.starts if arrivals is None else arrivals,
        rows.cu_rows, rows.starts, rows.block_tables, rows.block_tables.stride(0), rows.block_tables.shape[1],
        rows.starts if rows.table_rows is None else rows.table_rows, rows.sequences, shares, dim**-0.5 * LOG2_E,
        TABLE_ROWS=rows.table_rows is not None, APART=apart, BLOCK_M=block_m,
        WIDE=interpreted() or proj.dtype == torch.float32,
        THREADS=choice.num_warps * (64 if torch.version.hip else 32),
        num_warps=choice.num_warps, num_stages=choice.num_stages, **shape,
    )  # fmt: skip
    if rows.sequences * per_seq <= CACHED_ROWS and not last_only:
        prefer_carveout(launched)
    if apart:
        reduce_segments(out, parts, sums, proj, rows, programs, shares, shape)
    return out


@triton.jit(do_not_specialize=["table_stride", "columns", "sequences", "shares"])
def _attend_decode(
    q, proj, proj_stride, k_cache, v_cache, out, parts, sums, arrivals,
    cu_rows, starts, tables, table_stride, columns, table_rows, sequences, shares, score_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    LAST_ONLY: tl.constexpr, TABLE_ROWS: tl.constexpr, LEAST: tl.constexpr, PADDED: tl.constexpr, APART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, SETTLED: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program of a KV head does a segment of `balance.cut`, all its rows and the q heads of the group at once.

    That is one each where lengths are alike, and two of some programs where they are not. Writes parts [segments of
    all, KV_HEADS, ROWS * GROUP, DIM], averages of values, and sums [segments of all, KV_HEADS, ROWS * GROUP], log2 of
    the sums of weights. Without APART, who ends last of a sequence merges them, and one of a whole sequence writes
    `out` alone.
    """
    kv_head = tl.program_id(0)
    at = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not SETTLED:
            tl.extra.cuda.gdc_wait()
    most_keys = columns * BLOCK_SIZE
    k_head = k_cache + kv_head * (DIM * BLOCK_SIZE)
    v_head = v_cache + kv_head * (DIM * BLOCK_SIZE)
    sequence, segment, count, begin, end, start, segments = segment_at(
        at, starts, cu_rows, sequences, most_keys, shares, ROWS, LAST_ONLY, LEAST, BLOCK_N, PADDED
    )
    table = _table_of(sequence, tables, table_stride, table_rows, TABLE_ROWS)
    if PDL and SETTLED:
        ask_for_keys(k_head, v_head, table, begin, end, BLOCKS_ASKED, KV_HEADS, DIM, BLOCK_SIZE, THREADS)
        tl.extra.cuda.gdc_wait()  # what is above was there before the step, or when the step had begun
    while at < segments:
        m = tl.arange(0, BLOCK_M)
        used = m < ROWS * GROUP
        to0 = sequence.to(tl.int64) * ROWS
        row0 = tl.maximum(tl.load(cu_rows + sequence + 1) - 1, 0) if LAST_ONLY else to0
        acc, log = attend_segment(
            q, row0, kv_head, m, used, start, k_head, v_head, table, begin, end, score_scale,
            GROUP, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, WIDE,
        )  # fmt: skip
        held = (at.to(tl.int64) * KV_HEADS + kv_head) * (ROWS * GROUP)
        if APART:
            store_part(parts, sums, held + m, acc, log, used, DIM)
        elif count == 1:
            store_gated(out, proj, proj_stride, row0, to0, kv_head, m, used, acc, GROUP, KV_HEADS, DIM)
        else:
            store_part(parts, sums, held + m, acc, log, used, DIM)
            if arrives_last(arrivals + sequence * KV_HEADS + kv_head, count):
                HELD: tl.constexpr = triton.next_power_of_2(ROWS * GROUP)
                CHUNK: tl.constexpr = max(1, TILE // (HELD * DIM))
                r = tl.arange(0, HELD)
                own = r < ROWS * GROUP
                stride = KV_HEADS * (ROWS * GROUP)
                first = held - segment * stride
                whole = merged(
                    parts, sums, first, count, stride, r, own, tl.arange(0, DIM), HELD, CHUNK, DIM, DIM
                )
                store_gated(out, proj, proj_stride, row0, to0, kv_head, r, own, whole, GROUP, KV_HEADS, DIM)
        # the second segment, if any, goes to who had the least before
        at = tl.where(at < tl.num_programs(1), 2 * tl.num_programs(1) - 1 - at, segments)
        if at < segments:
            sequence, segment, count, begin, end, start, segments = segment_at(
                at, starts, cu_rows, sequences, most_keys, shares, ROWS, LAST_ONLY, LEAST, BLOCK_N, PADDED
            )
            table = _table_of(sequence, tables, table_stride, table_rows, TABLE_ROWS)


@triton.jit
def _table_of(sequence, tables, table_stride, table_rows, TABLE_ROWS: tl.constexpr):
    row = tl.load(table_rows + sequence, cache_modifier=".cg") if TABLE_ROWS else sequence
    return tables + row.to(tl.int64) * table_stride


def _case(
    dim: int,
    group: int,
    rows: int,
    sequences: int,
    kv_heads: int = 2,
    last_only: bool = False,
    settled: bool = False,
    prefill: bool = False,
) -> AotCase:
    signature = dict.fromkeys(("q", "proj", "k_cache", "v_cache", "out"), "*bf16")
    signature |= {"parts": "*fp32", "sums": "*fp32", "arrivals": "*i32", "cu_rows": "*i64", "starts": "*i64"}
    signature |= {"tables": "*i32", "table_rows": "*i32", "score_scale": "fp32"}
    signature |= dict.fromkeys(("proj_stride", "table_stride", "columns", "sequences", "shares"), "i32")
    block_m = max(16, triton.next_power_of_2(group * rows))
    choice = default_choice(torch.bfloat16, block_m, sequences * kv_heads)
    constants = {
        "GROUP": group, "KV_HEADS": kv_heads, "DIM": dim, "BLOCK_SIZE": 16, "ROWS": rows, "LAST_ONLY": last_only,
        "TABLE_ROWS": not prefill, "LEAST": choice.least_keys, "PADDED": sequences,
        "APART": choice.apart or prefill, "BLOCK_M": block_m, "BLOCK_N": choice.block_n, "WIDE": False,
        "SETTLED": settled, "THREADS": 32 * choice.num_warps,
    }  # fmt: skip
    signature |= dict.fromkeys([*constants, "PDL"], "constexpr")
    return AotCase(
        _attend_decode,
        signature,
        constants,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        pdl=True,
    )


AOT_CASES = [
    _case(256, 4, 1, 1, settled=True), _case(256, 4, 1, 4, 4, settled=True), _case(256, 4, 4, 2),
    _case(256, 6, 4, 1, 4), _case(256, 6, 9, 4, 4), _case(64, 4, 1, 1), _case(64, 4, 4, 16),
    _case(256, 4, 1, 2, last_only=True, prefill=True), _case(256, 4, 1, 64, last_only=True, prefill=True),
    _case(256, 4, 1, 64, last_only=True),
    _case(256, 4, 1, 32, settled=True), _case(256, 4, 1, 64, settled=True), _case(256, 6, 4, 32, 4),
    _case(256, 6, 9, 32, 4), _case(256, 4, 1, 64, 4, settled=True),
]  # fmt: skip
