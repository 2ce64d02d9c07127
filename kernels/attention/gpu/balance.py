"""Attention of many sequences, whose keys are cut by how many all of them have.

Cut by shapes alone, one sequence of 8,192 tokens among 63 of 200 kept a program busy for 250 us a layer of 2B, while
all others were done after 10.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.attention.gpu.segment import BLOCKS_ASKED, attend_segment, store_gated, store_part
from mstar.kernels.attention.gpu.walk import LOG2_E, ask_for_keys
from mstar.kernels.rows import Rows

# Numbers that who merges holds at once: 64 a thread of four warps.
TILE = tl.constexpr(8192)


def shares_of(sequences: int, programs: int) -> int:
    """Into how many equal shares all keys are cut; a sequence of more keys than one has several programs.

    Where two parts of each sequence find a program (of those of a KV head), that is what equal ones are cut into.
    With more of them, and until they outnumber the programs, parts would come after one another: those stay whole
    that have a quarter more than the mean at most.
    """
    most = max(1, programs * 7 // 8)
    return most if 2 * sequences <= programs else max(1, min(most, sequences * 4 // 5))


def attend_balanced(
    q: torch.Tensor,
    proj: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: Rows,
    arrivals: torch.Tensor,
    programs: int,
    options: dict[str, Any],
) -> torch.Tensor:
    """`attend_decode` of a decode part. programs: of all KV heads, one a pair if those are more.

    arrivals: [sequences * kv_heads] int32, zeros; they are counted up. options: of the kernel.
    """
    heads, dim = q.shape[1:]
    kv_heads = options["KV_HEADS"]
    programs = max(1, programs // kv_heads)
    shares = shares_of(rows.sequences, programs)
    held = (rows.sequences + shares) * options["ROWS"] * heads
    out = torch.empty(q.shape[0], heads * dim, dtype=proj.dtype, device=proj.device)
    parts = torch.empty(held, dim, dtype=torch.float32, device=proj.device)
    sums = torch.empty(held, dtype=torch.float32, device=proj.device)
    table_rows = rows.starts if rows.table_rows is None else rows.table_rows
    _attend_balanced[(kv_heads, max(rows.sequences, programs))](
        q, proj, proj.stride(0), k_cache, v_cache, out, parts, sums, arrivals,
        rows.starts, rows.block_tables, rows.block_tables.stride(0), rows.block_tables.shape[1],
        table_rows, rows.sequences, dim**-0.5 * LOG2_E,
        SHARES=shares, PADDED=triton.next_power_of_2(rows.sequences), **options,
    )  # fmt: skip
    return out


@triton.jit
def balanced_place(
    at, starts, sequences, most_keys,
    ROWS: tl.constexpr, SHARES: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The segment `at` of all: its sequence, place among that one's, how many those are, its keys, the start; and all.

    No segment has more keys than LEAST, or than a SHARES-th of all, whichever is more; all of a sequence's have as
    many but the last. There are at most sequences + SHARES, those of a sequence side by side, those of sequences with
    several before the others. PADDED: sequences, to a power of two.
    Returns sequence, segment, count, begin, end, start, segments: int32.
    """
    s = tl.arange(0, PADDED)
    # before a wait, past the first cache: it may still hold what an earlier step read here
    there = tl.load(starts + s, mask=s < sequences, other=0, cache_modifier=".cg").to(tl.int32)
    tiles = tl.where(s < sequences, tl.cdiv(tl.minimum(there + ROWS, most_keys), BLOCK_N), 0)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), SHARES), LEAST // BLOCK_N)
    counts = tl.cdiv(tiles, share)
    # two sums in one: of those with several above, of the others below
    both = tl.where(counts > 1, counts << 16, counts)
    ends = tl.cumsum(both, 0)
    total = tl.sum(both, 0)
    first = tl.where(counts > 1, ends >> 16, (total >> 16) + (ends & 0xFFFF)) - counts
    own = (at >= first) & (at < first + counts)
    known = tl.sum(tl.where(own, (first << 16) + s, 0), 0)
    start = tl.sum(tl.where(own, there, 0), 0)
    sequence, segment = known & 0xFFFF, at - (known >> 16)
    keys = tl.minimum(start + ROWS, most_keys)
    tiles_here = tl.cdiv(keys, BLOCK_N)
    count = tl.cdiv(tiles_here, share)
    each = tl.cdiv(tiles_here, count) * BLOCK_N
    end = tl.minimum((segment + 1) * each, keys)
    return sequence, segment, count, segment * each, end, start, (total >> 16) + (total & 0xFFFF)


@triton.jit
def _arrives_last(arrivals, count):
    """Whether the other programs of `count` have arrived here before, and what they stored may be read."""
    tl.debug_barrier()  # the atomic is one thread's; the others' stores come before it
    return tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1


@triton.jit
def _merged(
    parts, sums, first, count, stride, r, used,
    HELD: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """[HELD, DIM] float32, of `count` segments in their order, CHUNK at a time: the same bytes whoever merges.

    parts: [..., DIM], averages of values; sums: [...], log2 of the sums of weights; first: where the first segment
    is, each next one's a stride further. r: [HELD], rows; used: those that there are.
    """
    c = tl.arange(0, CHUNK)
    d = tl.arange(0, DIM)
    acc = tl.zeros((HELD, DIM), tl.float32)
    total = tl.zeros((HELD,), tl.float32)
    top = tl.full((HELD,), float("-inf"), tl.float32)
    for begin in range(0, count, CHUNK):
        at = first + (begin + c)[None, :] * stride + r[:, None]
        known = used[:, None] & (begin + c < count)[None, :]
        log = tl.load(sums + at, mask=known, other=float("-inf"), cache_modifier=".cg")
        part_at = parts + at[:, :, None] * DIM + d[None, None, :]
        part = tl.load(part_at, mask=known[:, :, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(log, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see no key of the first segments
        shrink = tl.exp2(top - base)
        weight = tl.exp2(log - base[:, None])
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        total = total * shrink + tl.sum(weight, 1)
        top = new_top
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["table_stride", "columns", "sequences"])
def _attend_balanced(
    q, proj, proj_stride, k_cache, v_cache, out, parts, sums, arrivals,
    starts, tables, table_stride, columns, table_rows, sequences, score_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TABLE_ROWS: tl.constexpr, SHARES: tl.constexpr, LEAST: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, SETTLED: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program of a KV head does a segment: one each where lengths are alike, two of some where they are not.

    parts: [segments of all, KV_HEADS, ROWS * GROUP, DIM]; who is the last of a sequence's programs merges them.
    """
    HELD: tl.constexpr = triton.next_power_of_2(ROWS * GROUP)
    CHUNK: tl.constexpr = max(1, TILE // (HELD * DIM))
    kv_head = tl.program_id(0)
    at = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not SETTLED:
            tl.extra.cuda.gdc_wait()
    most_keys = columns * BLOCK_SIZE
    k_head = k_cache + kv_head * (DIM * BLOCK_SIZE)
    v_head = v_cache + kv_head * (DIM * BLOCK_SIZE)
    # most often all sequences have one segment, and this is the program's
    guess = tl.minimum(at, sequences - 1)
    table = _table_of(guess, tables, table_stride, table_rows, TABLE_ROWS)
    if PDL and SETTLED:
        asked = tl.minimum(tl.load(starts + guess, cache_modifier=".cg").to(tl.int32) + ROWS, most_keys)
        asked = tl.where(at < sequences, asked, 0)
        ask_for_keys(k_head, v_head, table, 0, asked, BLOCKS_ASKED, KV_HEADS, DIM, BLOCK_SIZE, THREADS)
    sequence, segment, count, begin, end, start, segments = balanced_place(
        at, starts, sequences, most_keys, ROWS, SHARES, LEAST, BLOCK_N, PADDED
    )
    if sequence != guess:
        table = _table_of(sequence, tables, table_stride, table_rows, TABLE_ROWS)
    if PDL and SETTLED:
        tl.extra.cuda.gdc_wait()  # what is above was there before the step, or when the step had begun
    while at < segments:
        m = tl.arange(0, BLOCK_M)
        used = m < ROWS * GROUP
        row0 = sequence.to(tl.int64) * ROWS
        acc, log = attend_segment(
            q, row0, kv_head, m, used, start, k_head, v_head, table, begin, end, score_scale,
            GROUP, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, WIDE,
        )  # fmt: skip
        if count == 1:
            store_gated(out, proj, proj_stride, row0, row0, kv_head, m, used, acc, GROUP, KV_HEADS, DIM)
        else:
            held = (at.to(tl.int64) * KV_HEADS + kv_head) * (ROWS * GROUP)
            store_part(parts, sums, held + m, acc, log, used, DIM)
            if _arrives_last(arrivals + sequence * KV_HEADS + kv_head, count):
                stride = KV_HEADS * (ROWS * GROUP)
                r = tl.arange(0, HELD)
                own = r < ROWS * GROUP
                whole = _merged(parts, sums, held - segment * stride, count, stride, r, own, HELD, CHUNK, DIM)
                store_gated(out, proj, proj_stride, row0, row0, kv_head, r, own, whole, GROUP, KV_HEADS, DIM)
        # the second, if any, goes to who had the least before
        at = tl.where(at < tl.num_programs(1), 2 * tl.num_programs(1) - 1 - at, segments)
        if at < segments:
            sequence, segment, count, begin, end, start, segments = balanced_place(
                at, starts, sequences, most_keys, ROWS, SHARES, LEAST, BLOCK_N, PADDED
            )
            table = _table_of(sequence, tables, table_stride, table_rows, TABLE_ROWS)


@triton.jit
def _table_of(sequence, tables, table_stride, table_rows, TABLE_ROWS: tl.constexpr):
    row = tl.load(table_rows + sequence, cache_modifier=".cg") if TABLE_ROWS else sequence
    return tables + row.to(tl.int64) * table_stride


def _case(group: int, rows: int, sequences: int, kv_heads: int = 2, settled: bool = False) -> AotCase:
    signature = dict.fromkeys(("q", "proj", "k_cache", "v_cache", "out"), "*bf16")
    signature |= {"parts": "*fp32", "sums": "*fp32", "arrivals": "*i32", "starts": "*i64", "tables": "*i32"}
    signature |= {"table_rows": "*i32", "score_scale": "fp32"}
    signature |= dict.fromkeys(("proj_stride", "table_stride", "columns", "sequences"), "i32")
    block_m = max(16, triton.next_power_of_2(group * rows))
    small = sequences * kv_heads > 128 or block_m > 32
    warps = 4 if block_m <= 32 else 8
    constants = {
        "GROUP": group, "KV_HEADS": kv_heads, "DIM": 256, "BLOCK_SIZE": 16, "ROWS": rows, "TABLE_ROWS": True,
        "SHARES": 51, "LEAST": 512, "PADDED": sequences, "BLOCK_M": block_m, "BLOCK_N": 32 if small else 64,
        "WIDE": False, "SETTLED": settled, "THREADS": 32 * warps,
    }  # fmt: skip
    signature |= dict.fromkeys([*constants, "PDL"], "constexpr")
    stages = 4 if small else 3
    return AotCase(_attend_balanced, signature, constants, num_warps=warps, num_stages=stages, pdl=True)


AOT_CASES = [
    _case(4, 1, 32, settled=True),
    _case(4, 1, 64, settled=True),
    _case(4, 1, 64, 4, settled=True),
    _case(6, 4, 64),
    _case(6, 9, 64),
]
