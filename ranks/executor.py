"""Runs step plans on one rank: the same code on rank 0 and its followers.

Values that steps hand to each other stay in registers by slot: `ahead`, `lengths`, `pending`, `block_table`. A
plan names slots; nothing of a steady decode step is looked up or copied on the host. What rows draw is decided
elsewhere (mstar.ranks.leader) and comes back as a `Moves`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mstar.arch.caches import LayerCache
from mstar.arch.inputs import DecodeInputs, PrefillInputs
from mstar.kernels.staging import staged
from mstar.ranks.cache import blocks_for
from mstar.ranks.plan import StepPlan


class Model(Protocol):
    """What the executor runs; mstar.arch.trunk.Trunk."""

    def prefill(
        self, inputs: PrefillInputs, caches: list[LayerCache], every_row: bool = False
    ) -> torch.Tensor: ...

    def decode(self, inputs: DecodeInputs, caches: list[LayerCache]) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step's rows gave, before anything is drawn."""

    hidden: (
        torch.Tensor | None
    )  # [rows that draw, hidden]: the final chunks', the decode part's, the padding's
    chunk_hidden: torch.Tensor | None  # [chunk rows, hidden], where the head follows a chunk
    # the decode part without padding, slot after slot: None without one
    token_ids: torch.Tensor | None  # [rows] int64, newest tokens and drafts
    seq_lens: torch.Tensor | None  # [sequences] int32, length with the newest token


@dataclass(frozen=True, slots=True)
class Moves:
    """How far the sequences that drew have come, in the plan's order; alike on every rank."""

    kept: torch.Tensor | None  # [sequences] int32, tokens each got; None: one
    ahead: torch.Tensor  # [sequences, 1 + drafts] int64: the newest token, the drafts after it


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """Tensors of a decode part that stay the same while the same slots decode with the same blocks."""

    key: tuple[Any, ...]
    index: torch.Tensor  # [bucket] int64 slots
    slots: torch.Tensor  # [bucket] int32
    tables: torch.Tensor  # [bucket, columns] int32
    tokens: torch.Tensor  # [rows] int64, where in `ahead` each row's token is
    counts: tuple[int, ...] | None  # [bucket] rows; None: one each
    rows: int  # without the padding's
    # [rows] int64, which of the rows that ran these are, where every sequence runs as many; None: all, in order
    among: torch.Tensor | None


class Executor:
    """One rank's model, caches and registers.

    slots: the sink included. drafts: the most that a step checks for a sequence; 0 for a load without speculation.
    uniform: every sequence of a decode part runs as many rows as the one with the most: what the others have too
    much stands behind their drafts, and nobody keeps it.
    """

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        *,
        slots: int,
        max_seq: int,
        device: torch.device,
        drafts: int = 0,
        uniform: bool = False,
    ) -> None:
        self.model = model
        self._uniform = uniform
        self.max_seq = max_seq
        self.slots = slots
        self.drafts = drafts
        self.device = device
        self.caches = caches
        # A slot's newest token, whose KV is not there yet, and the drafts of the tokens after it.
        self.ahead = torch.zeros(slots, 1 + drafts, dtype=torch.int64, device=device)
        # Tokens whose KV is in the caches. The sink's stays 0, so padding rows stand at position 0.
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        # Of these, the newest ones that a slot's GDN states are behind by: accepted drafts, replayed by the next step.
        self.pending = torch.zeros(slots, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(slots, blocks_for(max_seq), dtype=torch.int32, device=device)
        self.tables_version = 0  # moves with every change of `block_table`
        self._decode_rows: _DecodeRows | None = None

    def run(self, plan: StepPlan) -> Ran:
        """Runs a step's rows. Lengths of slots in prefill move here, those of decoding ones in `move`."""
        self.update_tables(plan)
        hidden: list[torch.Tensor] = []
        chunk_hidden = token_ids = seq_lens = None
        if plan.chunks:
            every_row = any(chunk.head for chunk in plan.chunks)
            out = self._prefill(plan, every_row)
            chunk_hidden = out if every_row else None
            finals = self.final_rows(plan, out, every_row)
            if finals is not None:
                hidden.append(finals)
        if plan.decode_bucket:
            rows = self._rows_of(plan)
            token_ids = self.ahead.view(-1).index_select(0, rows.tokens)
            seq_lens = self.lengths.index_select(0, rows.index).add_(1)
            decoded = self._decode(rows, token_ids, seq_lens)
            if rows.among is not None:
                decoded = decoded.index_select(0, rows.among)
                token_ids = token_ids.index_select(0, rows.among)
            hidden.append(decoded)
            token_ids, seq_lens = token_ids[: rows.rows], seq_lens[: len(plan.decode_slots)]
        return Ran(
            hidden[0] if len(hidden) == 1 else torch.cat(hidden) if hidden else None,
            chunk_hidden,
            token_ids,
            seq_lens,
        )

    def prefill(self, plan: StepPlan) -> torch.Tensor | None:
        """A plan's block tables and prefill part alone: [final chunks, hidden], None where no chunk is final."""
        self.update_tables(plan)
        if not plan.chunks:
            return None
        return self.final_rows(plan, self._prefill(plan, every_row=False), every_row=False)

    def move(self, plan: StepPlan, moves: Moves) -> None:
        """Takes the results of the step that ran last."""
        slots = [chunk.slot for chunk in plan.chunks if chunk.final]
        finals = len(slots)
        if not plan.decode_slots:
            index = self._tensor(slots, torch.int64)
        else:
            index = decoding = self._rows_of(plan).index[: len(plan.decode_slots)]
            if finals:
                index = torch.cat([self._tensor(slots, torch.int64), decoding])
            if moves.kept is None:
                self.lengths.index_add_(0, decoding, torch.ones_like(decoding, dtype=torch.int32))
                if self.drafts:
                    self.pending.index_fill_(0, decoding, 0)
            else:
                kept = moves.kept[finals:]
                self.lengths.index_add_(0, decoding, kept)
                if self.drafts:
                    self.pending.index_copy_(0, decoding, kept - 1)
        self.ahead[:, : moves.ahead.shape[1]].index_copy_(0, index, moves.ahead)

    def free(self) -> None:
        """Drops the caches."""
        self.caches = []
        self._decode_rows = None

    def _prefill(self, plan: StepPlan, every_row: bool) -> torch.Tensor:
        """[chunks, hidden], each chunk's last row, or every row; sets the lengths of the chunks' slots."""
        chunks = plan.chunks
        ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        slots = self._tensor([chunk.slot for chunk in chunks], torch.int64)
        ranges = [torch.arange(c.start, end, device=self.device) for c, end in zip(chunks, ends, strict=True)]
        inputs = PrefillInputs(
            token_ids=self._tensor([token for chunk in chunks for token in chunk.token_ids], torch.int64),
            positions=torch.cat(ranges),
            slots=slots.to(torch.int32),
            block_tables=self.block_table[:, : plan.chunk_columns].index_select(0, slots),
            cu_rows=tuple(row_borders(plan)),
            starts=tuple(chunk.start for chunk in chunks),
        )
        self.lengths.index_copy_(0, slots, self._tensor(ends, torch.int32))
        self.pending.index_fill_(0, slots, 0)
        return self.model.prefill(inputs, self.caches, every_row=every_row)

    def final_rows(self, plan: StepPlan, out: torch.Tensor, every_row: bool) -> torch.Tensor | None:
        """Of what `_prefill` gave, the rows that draw: the final chunks' last ones; None where no chunk is final."""
        finals = [i for i, chunk in enumerate(plan.chunks) if chunk.final]
        if every_row:
            borders = row_borders(plan)
            finals = [borders[i + 1] - 1 for i in finals]
        if not finals:
            return None
        return out if len(finals) == len(out) else out.index_select(0, self._tensor(finals, torch.int64))

    def _decode(self, rows: _DecodeRows, token_ids: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], the padding's included."""
        inputs = DecodeInputs(
            token_ids=token_ids,
            seq_lens=seq_lens,
            slots=rows.slots,
            block_tables=rows.tables,
            counts=rows.counts,
            pending=self.pending.index_select(0, rows.index) if self.drafts else None,
        )
        return self.model.decode(inputs, self.caches)

    def _rows_of(self, plan: StepPlan) -> _DecodeRows:
        """Made once for steps alike."""
        last = self._decode_rows
        key = (plan.decode_slots, plan.decode_counts, plan.decode_bucket, plan.decode_columns)
        if last is not None and last.key == key:
            return last
        padding = [0] * (plan.decode_bucket - len(plan.decode_slots))
        slots = plan.decode_slots + padding
        counts = plan.decode_counts + [1] * len(padding) if plan.decode_counts else None
        among = None
        kept = len(slots) if counts is None else sum(counts)
        if counts is not None and self._uniform and min(counts) < max(counts):
            most = max(counts)
            at = [index * most + row for index, count in enumerate(counts) for row in range(count)]
            among = self._tensor(at, torch.int64)
            counts = [most] * len(slots)
        width = 1 + self.drafts
        tokens = [
            slot * width + row
            for slot, count in zip(slots, counts or [1] * len(slots), strict=True)
            for row in range(count)
        ]
        index = self._tensor(slots, torch.int64)
        self._decode_rows = _DecodeRows(
            key,
            index,
            index.to(torch.int32),
            self.block_table[:, : plan.decode_columns].index_select(0, index),
            self._tensor(tokens, torch.int64),
            None if counts is None else tuple(counts),
            kept - len(padding),
            among,
        )
        return self._decode_rows

    def update_tables(self, plan: StepPlan) -> None:
        """Takes the plan's new blocks."""
        if not plan.tables:
            return
        self._decode_rows = None
        self.tables_version += 1
        width = self.block_table.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        new = [update.slot for update in plan.tables if update.column == 0]
        for update in plan.tables:
            first = update.slot * width + update.column
            places.extend(range(first, first + len(update.blocks)))
            blocks.extend(update.blocks)
        sizes = [len(new), len(places), len(blocks)]
        slots, at, values = self._tensor(new + places + blocks, torch.int64).split(sizes)
        if new:
            self.block_table.index_fill_(0, slots, 0)  # of the slots' last owners
        self.block_table.view(-1).index_copy_(0, at, values.to(torch.int32))

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return staged(values, dtype, self.device)


def row_borders(plan: StepPlan) -> list[int]:
    """[chunks + 1], where each chunk's rows begin."""
    borders = [0]
    for chunk in plan.chunks:
        borders.append(borders[-1] + len(chunk.token_ids))
    return borders
