"""How decode's keys are cut into segments, by how many all sequences of a step have, and merged again.

Cut by shapes alone, one sequence of 8,192 tokens among 63 of 200 kept a program busy for 250 us a layer of 2B, while
all others were done after 10.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers that who merges holds at once, 64 a thread of four warps, but where the rows of one segment are more.
TILE = tl.constexpr(8192)


def shares_of(sequences: int, programs: int) -> int:
    """Into how many equal shares all keys are cut: a sequence of more keys than one share has several segments.

    programs: of a KV head. Where two segments of each sequence find one, there are as many shares as leave no program
    with two segments, whatever the lengths, or as few more as cut equal sequences, or not quite equal ones, into what
    finds one. With more sequences, segments come after one another: those stay whole then that have a quarter more
    than the mean at most.
    """
    if 2 * sequences <= programs:
        return max(programs - sequences + 1, programs // sequences * sequences * 7 // 8)
    return max(1, sequences * 4 // 5)


@triton.jit
def cut(
    starts, cu_rows, sequences, most_keys, shares,
    ROWS: tl.constexpr, LAST_ONLY: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Of each sequence: the position of its first row that attends, its segments, and the first of them; and of all.

    No segment has more keys than LEAST, or than one of `shares_of`, whichever is more. There are at most sequences +
    shares, each sequence's side by side, those of sequences with several before the others. PADDED: sequences, to a
    power of two. Returns start, count, first: [PADDED] int32, numbers if PADDED is 1, and how many segments there are.
    """
    s = tl.arange(0, PADDED) if PADDED > 1 else 0
    there = s < sequences
    # before a wait, past the first cache: it may still hold what an earlier step read here
    start = tl.load(starts + s, mask=there, other=0, cache_modifier=".cg").to(tl.int32)
    if LAST_ONLY:
        rows = tl.load(cu_rows + s + 1, mask=there, other=0) - tl.load(cu_rows + s, mask=there, other=0)
        start += rows.to(tl.int32) - 1
    tiles = tl.cdiv(tl.minimum(start + ROWS, most_keys), BLOCK_N)
    tiles = tl.where(there, tl.maximum(tiles, 1), 0)  # a padding sequence of a prefill part has no key at all
    keys = tl.sum(tiles, 0) if PADDED > 1 else tiles
    count = tl.cdiv(tiles, tl.maximum(tl.cdiv(keys, shares), LEAST // BLOCK_N))
    first, segments = tl.zeros((), tl.int32), count
    if PADDED > 1:
        # two sums in one: of those with several segments above, of the others below
        both = tl.where(count > 1, count << 16, count)
        ends = tl.cumsum(both, 0)
        total = tl.sum(both, 0)
        first = tl.where(count > 1, ends >> 16, (total >> 16) + (ends & 0xFFFF)) - count
        segments = (total >> 16) + (total & 0xFFFF)
    return start, count, first, segments


@triton.jit
def segment_at(
    at, starts, cu_rows, sequences, most_keys, shares,
    ROWS: tl.constexpr, LAST_ONLY: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The segment `at` of `cut`: its sequence, place among that one's, how many those are, its keys, start; and all.

    All segments of a sequence have as many keys but the last. Returns sequence, segment, count, begin, end, start,
    segments: int32; of a surplus place, a sequence that there is.
    """
    start, count, first, segments = cut(
        starts, cu_rows, sequences, most_keys, shares, ROWS, LAST_ONLY, LEAST, BLOCK_N, PADDED
    )
    known = tl.zeros((), tl.int32)
    if PADDED > 1:
        own = (at >= first) & (at < first + count)
        known = tl.sum(tl.where(own, (first << 16) + tl.arange(0, PADDED), 0), 0)
        count = tl.sum(tl.where(own, count, 0), 0)
        start = tl.sum(tl.where(own, start, 0), 0)
    segment = at - (known >> 16)
    keys = tl.minimum(start + ROWS, most_keys)
    each = tl.cdiv(tl.cdiv(keys, BLOCK_N), tl.maximum(count, 1)) * BLOCK_N
    return (
        known & 0xFFFF,
        segment,
        count,
        segment * each,
        tl.minimum((segment + 1) * each, keys),
        start,
        segments,
    )


@triton.jit
def merged(
    parts, sums, first, count, stride, r, used, d,
    HELD: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """[HELD, WIDTH] float32, of `count` segments in their order, CHUNK at a time: the same bytes whoever merges.

    parts: [..., DIM], averages of values; sums: [...], log2 of the sums of weights; first: where the first segment
    is, each next one's a stride further. r: [HELD], rows; used: those that there are; d: [WIDTH], dims.
    """
    c = tl.arange(0, CHUNK)
    acc = tl.zeros((HELD, WIDTH), tl.float32)
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
