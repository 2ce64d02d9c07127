"""The head of a captured decode step: tokens become embedding rows, slots become places, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.aot import AotCase
from mstar.kernels.launch import launch_options
from mstar.kernels.step import PAGES

_BLOCK = 1024


def begin_step(
    slots: torch.Tensor,
    ahead: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    *,
    rows_per_seq: int,
    vocab_start: int = 0,
    vocab_local: int | None = None,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a decode step's layers start from.

    slots: [B] int32, slot 0 for padding. ahead: [slots, 1 + drafts] int64, each slot's newest token and the drafts
    after it; `rows_per_seq` (R) of them are run. lengths: [slots] int32, tokens in the KV cache. table:
    [vocab_local or more, hidden] model dtype, rows contiguous: this rank's part of the embedding, ids from
    `vocab_start` on.

    Returns x [B * R, hidden] (row b * R + r is the embedding of ahead[slot, r]; zeros where another rank holds
    the id, so that the ranks' sum is the embedding), starts [B] int64 = lengths[slot], fresh [B] uint8, 1 for
    slot 0. Ids out of the whole table's range (drafts that nobody made) are clamped into this part's range on a
    table that is whole, and zeros on a part: no load leaves the table. turn: [1] int64, moved on by one modulo PAGES.
    """
    sequences, width = slots.shape[0], ahead.shape[1]
    assert 1 <= rows_per_seq <= width, f"{rows_per_seq} rows a sequence of {width} tokens ahead"
    assert slots.is_contiguous()
    hidden = table.shape[1]
    local = table.shape[0] if vocab_local is None else vocab_local
    assert local <= table.shape[0] and ahead.stride(1) == 1 and table.stride(1) == 1
    x = torch.empty(sequences * rows_per_seq, hidden, dtype=table.dtype, device=table.device)
    starts = torch.empty(sequences, dtype=torch.int64, device=table.device)
    fresh = torch.empty(sequences, dtype=torch.uint8, device=table.device)
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    _begin_step[(sequences * rows_per_seq, triton.cdiv(hidden, block))](
        slots, ahead, lengths, table, x, starts, fresh, turn,
        ahead.stride(0), table.stride(0), hidden, vocab_start, local,
        ROWS_PER_SEQ=rows_per_seq, WHOLE=vocab_local is None, PAGES=0 if turn is None else PAGES, BLOCK=block,
        THREADS=128, num_warps=4, **launch_options(table.device),
    )  # fmt: skip
    return x, starts, fresh


@triton.jit
def _begin_step(
    slots, ahead, lengths, table, x, starts, fresh, turn,
    ahead_stride, table_stride, hidden, vocab_start, vocab_local,
    ROWS_PER_SEQ: tl.constexpr, WHOLE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    sequence = row // ROWS_PER_SEQ
    place = row % ROWS_PER_SEQ
    if PDL:
        # The slots are copied in, the rest is the last step's: nothing to load before. No kernel may start before
        # this one has ended: that is what `Rows.settled` promises.
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + sequence).to(tl.int64)
    token = tl.load(ahead + slot * ahead_stride + place) - vocab_start
    inside = tl.minimum(tl.maximum(token, 0), vocab_local - 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < hidden
    # A rank that does not hold the id reads nothing.
    held = there if WHOLE else there & (token == inside)
    value = tl.load(table + inside * table_stride + columns, mask=held, other=0.0)
    tl.store(x + row.to(tl.int64) * hidden + columns, value, mask=there)
    if (place == 0) & (tl.program_id(1) == 0):
        tl.store(starts + sequence, tl.load(lengths + slot).to(tl.int64))
        tl.store(fresh + sequence, (slot == 0).to(tl.uint8))
        if PAGES > 0 and row == 0:
            tl.store(turn, (tl.load(turn) + 1) % PAGES)
    if PDL:
        # A program that has ended has not yet been seen everywhere, and kernels behind may read before their wait.
        thread = tl.arange(0, THREADS)
        fence: tl.constexpr = "fence.acq_rel.gpu; mov.u32 $0, $1;"
        tl.inline_asm_elementwise(fence, "=r,r", [thread], tl.int32, is_pure=False, pack=1)


AOT_CASES = [
    AotCase(
        _begin_step,
        {
            "slots": "*i32",
            "ahead": "*i64",
            "lengths": "*i32",
            "table": "*" + dtype,
            "x": "*" + dtype,
            "starts": "*i64",
            "fresh": "*u8",
            "turn": "*i64" if paged else "constexpr",
            "ahead_stride": "i32",
            "table_stride": "i32",
            "hidden": "i32",
            "vocab_start": "i32",
            "vocab_local": "i32",
            "ROWS_PER_SEQ": "constexpr",
            "WHOLE": "constexpr",
            "PAGES": "constexpr",
            "BLOCK": "constexpr",
            "THREADS": "constexpr",
            "PDL": "constexpr",
        },
        {
            "ROWS_PER_SEQ": rows_per_seq,
            "WHOLE": whole,
            "BLOCK": _BLOCK,
            "THREADS": 128,
            **({"PAGES": PAGES} if paged else {"PAGES": 0, "turn": None}),
        },
        pdl=True,
    )
    for dtype, rows_per_seq, whole, paged in (
        ("bf16", 1, True, True),
        ("bf16", 4, False, False),
        ("fp32", 1, True, True),
    )
]
