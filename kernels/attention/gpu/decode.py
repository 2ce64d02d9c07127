"""Attention of a few rows a sequence over its paged keys, split over programs by keys."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.attention.gpu.balance import attend_balanced
from mstar.kernels.attention.gpu.reduce import reduce_segments
from mstar.kernels.attention.gpu.segment import BLOCKS_ASKED, attend_segment, store_gated, store_part
from mstar.kernels.attention.gpu.walk import LOG2_E, ask_for_keys, keys_a_segment
from mstar.kernels.attention.weights import AttentionWeights
from mstar.kernels.launch import interpreted, launch_options
from mstar.kernels.rows import Rows

# Of a sequence and KV head, up to which one program a multiprocessor is better than two, whose parts take longer to
# merge.
FEW_PAIRS = 2
# From more pairs on than the first, keys are cut by the lengths, with larger tiles; from more than the second, only
# those of long sequences; from more than the third, two programs share a multiprocessor, with small tiles.
MANY_PAIRS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """How a call is cut: keys a tile and a segment's least, programs wanted a multiprocessor, and Triton's options.

    balanced: cut by the lengths, which the device knows, and not by shapes alone: for many sequences.
    """

    block_n: int = 32
    least_keys: int = 64
    programs: int = 2
    num_warps: int = 4
    num_stages: int = 4
    balanced: bool = False


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
        programs = 2 if block_m <= 32 else 1
        return DecodeChoice(32, least_keys, programs, num_warps, balanced=True)
    return DecodeChoice(64, least_keys, 1, num_warps, num_stages=3, balanced=True)


def segments(choice: DecodeChoice, programs: int, most_keys: int, device: torch.device) -> int:
    """Segments of the grid for `programs` pairs of a sequence and KV head, none longer than `most_keys` keys.

    Both count as the next power of two: kernels are compiled for a number of segments, and a table that grows with
    the context, or another number of sequences, is to need few of them.
    """
    programs, most_keys = triton.next_power_of_2(programs), triton.next_power_of_2(most_keys)
    wanted = -(-choice.programs * multiprocessors(device) // programs)
    return max(1, min(wanted, -(-most_keys // choice.least_keys)))


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
    own; without them the cut knows shapes alone. How many keys a sequence has is read on the device: the grid depends
    on shapes; with rows.settled it is read, and keys are asked for, before other kernels' results are waited for.
    Returns [rows, q_heads * head_dim], or [sequences, ...], in the model dtype.
    """
    dim, heads, device = weights.head_dim, weights.q_heads, proj.device
    per_seq = 1 if last_only else rows.rows_per_seq
    count = rows.sequences * per_seq
    group = heads // weights.kv_heads
    block_m = max(16, triton.next_power_of_2(group * per_seq))
    pairs = rows.sequences * weights.kv_heads
    choice = choice or default_choice(proj.dtype, block_m, pairs)
    most_keys = rows.block_tables.shape[1] * k_cache.shape[-1]
    options = {
        "GROUP": group, "KV_HEADS": weights.kv_heads, "DIM": dim, "BLOCK_SIZE": k_cache.shape[-1], "ROWS": per_seq,
        "TABLE_ROWS": rows.table_rows is not None, "LEAST": choice.least_keys, "BLOCK_M": block_m,
        "BLOCK_N": choice.block_n, "WIDE": interpreted() or proj.dtype == torch.float32,
        "SETTLED": rows.settled and not last_only, "THREADS": choice.num_warps * (64 if torch.version.hip else 32),
        "num_warps": choice.num_warps, "num_stages": choice.num_stages, **launch_options(device),
    }  # fmt: skip
    if choice.balanced and arrivals is not None and not last_only:
        programs = choice.programs * multiprocessors(device)
        return attend_balanced(q, proj, k_cache, v_cache, rows, arrivals, programs, options)
    cut = segments(choice, pairs, most_keys, device)
    out = torch.empty(count, heads * dim, dtype=proj.dtype, device=device)
    parts = torch.empty(count * heads * cut if cut > 1 else 0, dim, dtype=torch.float32, device=device)
    sums = torch.empty(parts.shape[0], dtype=torch.float32, device=device)
    table_rows = rows.starts if rows.table_rows is None else rows.table_rows
    _attend_decode[(cut, weights.kv_heads, rows.sequences)](
        q, proj, proj.stride(0), k_cache, v_cache, out, parts, sums,
        rows.cu_rows, rows.starts, rows.block_tables, rows.block_tables.stride(0), rows.block_tables.shape[1],
        table_rows, dim**-0.5 * LOG2_E, LAST_ONLY=last_only, SEGMENTS=cut, **options,
    )  # fmt: skip
    if cut > 1:
        reduce_segments(
            out, parts, sums, proj, rows, heads, per_seq, cut, choice.least_keys, most_keys, last_only
        )
    return out


@triton.jit(do_not_specialize=["table_stride", "columns"])
def _attend_decode(
    q, proj, proj_stride, k_cache, v_cache, out, parts, sums,
    cu_rows, starts, tables, table_stride, columns, table_rows, score_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    LAST_ONLY: tl.constexpr, TABLE_ROWS: tl.constexpr, SEGMENTS: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, SETTLED: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a segment of keys, KV head and sequence: all its rows and the q heads of the group at once.

    Writes the result to `out` if there is one segment, else to parts [rows, q_heads, SEGMENTS, DIM] and the
    logarithm (base 2) of its weights' sum to sums [rows, q_heads, SEGMENTS].
    """
    segment = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not SETTLED:
            tl.extra.cuda.gdc_wait()
    # before a wait, past the first cache: it may still hold what an earlier step read here
    start = tl.load(starts + sequence, cache_modifier=".cg")
    if LAST_ONLY:
        border = tl.load(cu_rows + sequence + 1)
        row0 = tl.maximum(border - 1, 0)
        start += border - 1 - tl.load(cu_rows + sequence)
    else:
        row0 = sequence * ROWS
    keys = tl.minimum(start + ROWS, columns * BLOCK_SIZE).to(tl.int32)
    share = keys_a_segment(keys, SEGMENTS, LEAST)
    begin = segment * share
    end = tl.minimum(begin + share, keys)
    table = tl.load(table_rows + sequence, cache_modifier=".cg").to(tl.int64) if TABLE_ROWS else sequence
    table = tables + table * table_stride
    k_head = k_cache + kv_head * (DIM * BLOCK_SIZE)
    v_head = v_cache + kv_head * (DIM * BLOCK_SIZE)
    if PDL and SETTLED:
        ask_for_keys(k_head, v_head, table, begin, end, BLOCKS_ASKED, KV_HEADS, DIM, BLOCK_SIZE, THREADS)
        tl.extra.cuda.gdc_wait()  # what is above was there before the step, or when the step had begun
    # the first one always runs: it is what a single segment writes, and what the reduction reads of no keys
    if begin < end or segment == 0:
        m = tl.arange(0, BLOCK_M)
        used = m < ROWS * GROUP
        acc, log = attend_segment(
            q, row0, kv_head, m, used, start, k_head, v_head, table, begin, end, score_scale,
            GROUP, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, WIDE,
        )  # fmt: skip
        if SEGMENTS == 1:
            store_gated(
                out, proj, proj_stride, row0, sequence * ROWS, kv_head, m, used, acc, GROUP, KV_HEADS, DIM
            )
        else:
            to = (sequence * ROWS + m // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
            store_part(parts, sums, to * SEGMENTS + segment, acc, log, used, DIM)


def _case(
    dim: int, group: int, rows: int, segments: int, pairs: int, last_only: bool = False, settled: bool = False
) -> AotCase:
    signature = dict.fromkeys(("q", "proj", "k_cache", "v_cache", "out"), "*bf16")
    signature |= {"parts": "*fp32", "sums": "*fp32", "cu_rows": "*i64", "starts": "*i64"}
    signature |= {"tables": "*i32", "table_rows": "*i32", "score_scale": "fp32"}
    signature |= dict.fromkeys(("proj_stride", "table_stride", "columns"), "i32")
    block_m = max(16, triton.next_power_of_2(group * rows))
    choice = default_choice(torch.bfloat16, block_m, pairs)
    constants = {
        "GROUP": group, "KV_HEADS": 2, "DIM": dim, "BLOCK_SIZE": 16, "ROWS": rows, "LAST_ONLY": last_only,
        "TABLE_ROWS": not last_only, "SEGMENTS": segments, "LEAST": choice.least_keys, "BLOCK_M": block_m,
        "BLOCK_N": choice.block_n, "WIDE": False, "SETTLED": settled, "THREADS": 32 * choice.num_warps,
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
    _case(256, 4, 1, 66, 2, settled=True), _case(256, 4, 1, 33, 8, settled=True), _case(256, 4, 4, 66, 4),
    _case(256, 6, 4, 33, 8), _case(256, 6, 9, 33, 8), _case(64, 4, 1, 1, 128), _case(64, 4, 4, 8, 32),
    _case(256, 4, 1, 66, 4, last_only=True), _case(256, 4, 1, 3, 64, last_only=True),
]  # fmt: skip
