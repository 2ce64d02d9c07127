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


class Chain:
    """The head, its KV and what stays the same from step to step."""

    def __init__(self, head: Head, cache: AttentionCache, device: torch.device) -> None:
        self._head = head
        self.cache = cache
        self._device = device
        self._tables: tuple[tuple[int, list[int], int], torch.Tensor] | None = None

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
        count = sum(1 for sequence in part if sequence.drafts)
        last = self._head(*self._inputs(part, hidden), self.cache, rows)
        drafts: list[list[int]] = [[] for _ in following]
        if not count:
            return drafts
        rows = self._one_row_each(part, rows)
        depth = 1
        while True:
            last, rows = _first(last, rows, count)
            tokens = self._head.draft(last)
            for place, token in enumerate(tokens.tolist()):
                drafts[order[place]].append(token)
            count = sum(1 for sequence in part[:count] if sequence.drafts > depth)
            if not count:
                return drafts
            last, rows = _first(last, rows, count)
            last = self._head(tokens[:count], last, self.cache, rows)
            rows.starts.add_(1)
            depth += 1

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
        slots = [sequence.slot for sequence in part]
        furthest = max(s.start + len(s.next_ids) + max(0, s.drafts - 1) for s in part)
        index = torch.tensor(slots, device=self._device)
        return Rows(
            sequences=len(part),
            longest=max(len(sequence.next_ids) for sequence in part),
            rows_per_seq=0,
            cu_rows=torch.tensor(borders, device=self._device),
            starts=torch.tensor(starts, device=self._device),
            slots=index,
            fresh=index,
            block_tables=self._tables_of(slots, index, block_table, blocks_for(furthest), version),
            host_cu_rows=tuple(borders),
            host_starts=tuple(starts),
        )

    def _tables_of(
        self, slots: list[int], index: torch.Tensor, block_table: torch.Tensor, columns: int, version: int
    ) -> torch.Tensor:
        """[sequences, columns] int32."""
        columns = min(-(-columns // _COLUMN_STEP) * _COLUMN_STEP, block_table.shape[1])
        key = (version, slots, columns)
        if self._tables is None or self._tables[0] != key:
            self._tables = key, block_table[:, :columns].index_select(0, index)
        return self._tables[1]

    def _one_row_each(self, part: list[Following], rows: Rows) -> Rows:
        """The rows of pass 1 of all sequences."""
        starts = torch.tensor([s.start + len(s.next_ids) for s in part], device=self._device)
        cu_rows = torch.arange(len(part) + 1, device=self._device)
        return replace(
            rows, longest=1, rows_per_seq=1, cu_rows=cu_rows, starts=starts, host_cu_rows=(), host_starts=()
        )


# Block-table columns are read in steps of this (128 tokens): few shapes.
_COLUMN_STEP = 8


def _first(last: torch.Tensor, rows: Rows, count: int) -> tuple[torch.Tensor, Rows]:
    """The first sequences of one-row sequences."""
    if count == rows.sequences:
        return last, rows
    return last[:count], replace(
        rows,
        sequences=count,
        cu_rows=rows.cu_rows[: count + 1],
        starts=rows.starts[:count],
        slots=rows.slots[:count],
        fresh=rows.fresh[:count],
        block_tables=rows.block_tables[:count],
    )
