"""Draws over a part of the vocabulary: the best (value, id) of each split of each row, in one launch.

`finish_step` or `merge_draws` takes the best of the splits; ranks of a mesh, each with its part of the vocabulary,
take the best of theirs. Values of a row are comparable over splits and ranks; ties go to the lowest id
everywhere, so neither how a row is split nor what shares its batch changes a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels import step
from mstar.kernels.aot import AotCase
from mstar.kernels.launch import interpreted, launch_options
from mstar.kernels.vocab.gpu.noise import to_gumbel, words_of_groups

LEAST_TEMPERATURE = tl.constexpr(step.LEAST_TEMPERATURE)
# Stands for "no column": above any id.
NO_ID = tl.constexpr(2**31 - 1)
# Ids a program looks at in one go, and programs wanted before one takes several goes (an H200 has 132
# multiprocessors, each with room for eight programs of four warps).
_BLOCK = 1024
_PROGRAMS = 1024
_MOST_TILES = 16


def partial_draws(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    *,
    first_id: int,
    vocab: int,
    least: torch.Tensor | None = None,
    rows_per_seq: int = 1,
    position_offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of each split of each row.

    logits: [rows, n] float32 of ids first_id, first_id + 1, ...; the row stride may exceed n, ids from `vocab` on
    are not looked at. slots [B] int32 and positions [B] int64 with B * rows_per_seq = rows: row b * R + r is of
    slots[b] and draws the token that will stand at positions[b] + r + position_offset (begin_step's starts with
    an offset of 1 are the places of a decode step's draws). temperature [slots] float32, seed [slots] int64: the
    registers of mstar.ranks.sampler.

    A row whose temperature is below 1e-5 takes its largest logit; any other the largest of logit / temperature +
    noise, noise as mstar.kernels.gumbel has it, keyed by (seed, position, id). `least` [rows] float32: of the
    latter, ids whose logit / temperature is below it are out.

    Returns values [splits, rows] float32 and ids [splits, rows] int64. A split without any id has -inf.
    """
    rows = logits.shape[0]
    assert slots.shape[0] * rows_per_seq == rows and slots.is_contiguous() and positions.is_contiguous()
    return _partial(
        logits, first_id, vocab, slots, positions, temperature, seed, least, rows_per_seq, position_offset
    )


def partial_argmax(logits: torch.Tensor, *, first_id: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`partial_draws` where every row is greedy."""
    return _partial(logits, first_id, vocab, None, None, None, None, None, 1, 0)


def argmax_gpu(logits: torch.Tensor) -> torch.Tensor:
    """`mstar.kernels.argmax.argmax_rows`: logits [rows, n] float32 without NaN -> [rows] int64, lowest at ties."""
    return merge_draws(*partial_argmax(logits, first_id=0, vocab=logits.shape[1]))[1]


def merge_draws(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of several: values [splits, rows] float32, ids likewise int64 -> values and ids, [rows] each."""
    splits, rows = values.shape
    assert values.is_contiguous() and ids.is_contiguous()
    value = torch.empty(rows, dtype=torch.float32, device=values.device)
    id_ = torch.empty(rows, dtype=torch.int64, device=values.device)
    _merge_draws[(rows,)](
        values, ids, value, id_, rows, splits,
        SPLITS=triton.next_power_of_2(splits), num_warps=1, **launch_options(values.device),
    )  # fmt: skip
    return value, id_


def splits_of(rows: int, columns: int) -> tuple[int, int]:
    """(splits, tiles a split) of a launch over `rows` rows of `columns` ids.

    Tiles are a power of two: as the buckets of decode steps, each at most twice the one before, have every number of
    tiles that so many rows or fewer have, a load has compiled all that a part of prefill draws with.
    """
    tiles = triton.cdiv(columns, _BLOCK)
    each = max(1, rows * tiles // _PROGRAMS)
    each = min(_MOST_TILES, 1 << each.bit_length() - 1)
    return max(1, triton.cdiv(tiles, each)), each


def _partial(
    logits: torch.Tensor,
    first_id: int,
    vocab: int,
    slots: torch.Tensor | None,
    positions: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seed: torch.Tensor | None,
    least: torch.Tensor | None,
    rows_per_seq: int,
    position_offset: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    rows = logits.shape[0]
    columns = max(0, min(logits.shape[1], vocab - first_id))
    lead = first_id % 4  # the first group of four ids may begin before the part does
    splits, tiles = splits_of(rows, columns + lead)
    values = torch.empty(splits, rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(splits, rows, dtype=torch.int64, device=logits.device)
    _partial_draws[(rows, splits)](
        logits, slots, positions, temperature, seed, least, values, ids,
        logits.stride(0), columns, first_id // 4, rows, position_offset,
        SAMPLED=temperature is not None, FILTERED=least is not None, ROWS_PER_SEQ=rows_per_seq,
        LEAD=lead, BLOCK=_BLOCK, TILES=tiles, NATIVE=not interpreted(),
        num_warps=4, **launch_options(logits.device),
    )  # fmt: skip
    return values, ids


@triton.jit(do_not_specialize=["rows"])
def _partial_draws(
    logits, slots, positions, temperature, seed, least, values, ids,
    stride, columns, first_group, rows, position_offset,
    SAMPLED: tl.constexpr, FILTERED: tl.constexpr, ROWS_PER_SEQ: tl.constexpr,
    LEAD: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    # the head wrote the last ids last: they are what the second cache still holds of many rows
    split = tl.num_programs(1) - 1 - tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = logits + row.to(tl.int64) * stride
    first = split * (TILES * BLOCK)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    # A lane's first column stands for it while all it saw is -inf.
    column = first + lanes - LEAD
    where = tl.where((column >= 0) & (column < columns), column, NO_ID)
    heat = 0.0
    if SAMPLED:
        slot = tl.load(slots + row // ROWS_PER_SEQ).to(tl.int64)
        heat = tl.load(temperature + slot)
    if heat < LEAST_TEMPERATURE:
        for tile in range(TILES):
            column = first + tile * BLOCK + lanes - LEAD
            inside = (column >= 0) & (column < columns)
            x = tl.load(source + column, mask=inside, other=float("-inf"))
            where = tl.where(x > best, column, where)
            best = tl.where(x > best, x, best)
    else:
        if SAMPLED:
            key = tl.load(seed + slot)
            position = tl.load(positions + row // ROWS_PER_SEQ) + row % ROWS_PER_SEQ + position_offset
            bound = tl.load(least + row) if FILTERED else 0.0
            for tile in range(TILES):
                at = first + tile * BLOCK
                column = at + lanes - LEAD
                inside = (column >= 0) & (column < columns)
                x = tl.load(source + column, mask=inside, other=float("-inf"))
                # True division, as torch divides: `/` may be an approximation here.
                x = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + heat)
                groups = first_group + at // 4 + tl.arange(0, BLOCK // 4)
                noised = x + to_gumbel(words_of_groups(key, position, groups), NATIVE)
                if FILTERED:
                    noised = tl.where(x < bound, float("-inf"), noised)
                where = tl.where(noised > best, column, where)
                best = tl.where(noised > best, noised, best)
    value = tl.max(best, 0)
    column = tl.min(tl.where(best == value, where, NO_ID), 0)
    tl.store(values + split * rows + row, value)
    tl.store(ids + split * rows + row, column.to(tl.int64) + first_group * 4 + LEAD)


@triton.jit
def merged(values, ids, row, rows, splits, SPLITS: tl.constexpr):
    """The largest value of column `row` of values [splits, rows], and its id: the lowest of equal ones."""
    each = tl.arange(0, SPLITS)
    there = each < splits
    at = each * rows + row
    value = tl.load(values + at, mask=there, other=float("-inf"))
    id_ = tl.load(ids + at, mask=there, other=2**62)
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, id_, 2**62), 0)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_draws(values, ids, value, id_, rows, splits, SPLITS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best, token = merged(values, ids, row, rows, splits, SPLITS)
    tl.store(value + row, best)
    tl.store(id_ + row, token)


def _draw_case(sampled: bool, filtered: bool, lead: int) -> AotCase:
    register = {"slots": "*i32", "positions": "*i64", "temperature": "*fp32", "seed": "*i64"}
    signature: dict[str, str] = {"logits": "*fp32"}
    signature |= register if sampled else dict.fromkeys(register, "constexpr")
    signature |= {"least": "*fp32" if filtered else "constexpr", "values": "*fp32", "ids": "*i64"}
    signature |= dict.fromkeys(("stride", "columns", "first_group", "rows", "position_offset"), "i32")
    constants = {
        "SAMPLED": sampled,
        "FILTERED": filtered,
        "ROWS_PER_SEQ": 1,
        "LEAD": lead,
        "BLOCK": _BLOCK,
        "TILES": 4,
        "NATIVE": True,
    }
    signature |= dict.fromkeys((*constants, "PDL"), "constexpr")
    absent = {name: None for name, kind in signature.items() if kind == "constexpr" and name.islower()}
    return AotCase(_partial_draws, signature, {**absent, **constants}, pdl=True)


AOT_CASES = [
    _draw_case(sampled=False, filtered=False, lead=0),
    _draw_case(sampled=True, filtered=False, lead=0),
    _draw_case(sampled=True, filtered=True, lead=2),
    AotCase(
        _merge_draws,
        {
            "values": "*fp32",
            "ids": "*i64",
            "value": "*fp32",
            "id_": "*i64",
            "rows": "i32",
            "splits": "i32",
            "SPLITS": "constexpr",
            "PDL": "constexpr",
        },
        {"SPLITS": 256},
        num_warps=1,
        pdl=True,
    ),
]
