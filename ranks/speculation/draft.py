"""The chain of drafts: the MTP head over the rows that a step kept, then over its own guesses.

Pass 0 writes the head's KV of every position that the step gave a token, prompt chunks included, so that it has
no holes; its last row a sequence is the first draft. Each later pass runs one row a sequence, with the draft and
the output of the pass before, one position on. What those write is overwritten by the next step's pass 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from mstar.arch.caches import AttentionCache
from mstar.kernels.rows import Rows
from mstar.ranks.cache import blocks_for


class Head(Protocol):
    """mstar.arch.head.MtpHead."""

    def __call__(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, cache: AttentionCache, rows: Rows
    ) -> torch.Tensor: ...

    def draft(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Following:
    """Rows of one sequence for pass 0."""

    slot: int
    start: int  # tokens before the first row
    first_row: int  # of the step's hidden rows; the others lie behind it
    next_ids: list[int]  # the token after each row
    drafts: int  # to make
    draws: int = -1  # which of the sequences that draw this is, -1 for none of them


@dataclass(frozen=True, slots=True)
class _Steady:
    """Tensors that stay the same while the same sequences draft with the same blocks."""

    key: tuple[int, list[int], int]
    slots: torch.Tensor  # [sequences] int64
    tables: torch.Tensor  # [sequences, columns] int32
    cu_rows: torch.Tensor  # [sequences + 1] int64, of one row each


class Chain:
    """The head, its KV and what stays the same from step to step."""

    def __init__(self, head: Head, cache: AttentionCache, device: torch.device) -> None:
        self._head = head
        self.cache = cache
        self._device = device
        self._steady: _Steady | None = None

    def run(
        self,
        following: Sequence[Following],
        hidden: torch.Tensor,
        block_table: torch.Tensor,
        tables_version: int,
    ) -> list[list[int]]:
        """Follows the step's rows; returns each sequence's drafts, in the order of `following`.

        hidden: [rows, hidden] after the trunk's final norm. block_table: [slots, blocks] int32, the trunk's.
        """
        # Those that draft most come first: each pass runs the first so many.
        order = sorted(range(len(following)), key=lambda i: -following[i].drafts)
        part = [following[i] for i in order]
        rows = self._rows(part, block_table, tables_version)
        last = self._head(*self._inputs(part, hidden), self.cache, rows)
        drafts: list[list[int]] = [[] for _ in following]
        tokens = last.new_empty(0, dtype=torch.int64)
        for depth in range(part[0].drafts):
            count = sum(sequence.drafts > depth for sequence in part)
            last = last[:count]
            if depth:
                rows = self._one_row_each(rows, count) if depth == 1 else _next_rows(rows, count)
                last = self._head(tokens[:count], last, self.cache, rows)
            tokens = self._head.draft(last)
            for place, token in enumerate(tokens.tolist()):
                drafts[order[place]].append(token)
        return drafts

    def _inputs(self, part: list[Following], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens and hidden rows of pass 0."""
        ids = [token for sequence in part for token in sequence.next_ids]
        first = part[0].first_row
        at = [row for s in part for row in range(s.first_row, s.first_row + len(s.next_ids))]
        if at[-1] - first + 1 == len(at) and at == list(range(first, first + len(at))):
            picked = hidden[first : first + len(at)]
        else:
            picked = hidden.index_select(0, torch.tensor(at, device=self._device))
        return torch.tensor(ids, device=self._device), picked

    def _rows(self, part: list[Following], block_table: torch.Tensor, version: int) -> Rows:
        borders = [0]
        for sequence in part:
            borders.append(borders[-1] + len(sequence.next_ids))
        starts = [sequence.start for sequence in part]
        furthest = max(s.start + len(s.next_ids) + max(0, s.drafts - 1) for s in part)
        steady = self._steady_of([sequence.slot for sequence in part], block_table, furthest, version)
        return Rows(
            sequences=len(part),
            longest=max(len(sequence.next_ids) for sequence in part),
            rows_per_seq=0,
            cu_rows=torch.tensor(borders, device=self._device),
            starts=torch.tensor(starts, device=self._device),
            slots=steady.slots,
            fresh=steady.slots,
            block_tables=steady.tables,
            host_cu_rows=tuple(borders),
            host_starts=tuple(starts),
        )

    def _one_row_each(self, rows: Rows, count: int) -> Rows:
        """The rows of the pass after pass 0, of the first sequences."""
        assert self._steady is not None
        return Rows(
            sequences=count,
            longest=1,
            rows_per_seq=1,
            cu_rows=self._steady.cu_rows[: count + 1],
            starts=rows.starts[:count] + rows.cu_rows[1 : count + 1] - rows.cu_rows[:count],
            slots=rows.slots[:count],
            fresh=rows.fresh[:count],
            block_tables=rows.block_tables[:count],
        )

    def _steady_of(self, slots: list[int], block_table: torch.Tensor, tokens: int, version: int) -> _Steady:
        columns = blocks_for(tokens)
        columns = min(-(-columns // _COLUMN_STEP) * _COLUMN_STEP, block_table.shape[1])
        key = (version, slots, columns)
        if self._steady is None or self._steady.key != key:
            index = torch.tensor(slots, device=self._device)
            cu_rows = torch.arange(len(slots) + 1, device=self._device)
            self._steady = _Steady(key, index, block_table[:, :columns].index_select(0, index), cu_rows)
        return self._steady


# Block-table columns are read in steps of this (128 tokens): few shapes.
_COLUMN_STEP = 8


def _next_rows(rows: Rows, count: int) -> Rows:
    """One position on, of the first sequences."""
    rows.starts.add_(1)
    if count == rows.sequences:
        return rows
    return replace(
        rows,
        sequences=count,
        cu_rows=rows.cu_rows[: count + 1],
        starts=rows.starts[:count],
        slots=rows.slots[:count],
        fresh=rows.fresh[:count],
        block_tables=rows.block_tables[:count],
    )
