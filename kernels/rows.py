"""How the rows of one forward pass belong to sequences: made once a pass, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

# Rows of a chunk of prefill's delta rule. Chunks begin at a sequence's first row.
PREFILL_CHUNK = 64


def prefill_chunks(borders: Sequence[int]) -> tuple[list[int], list[int]]:
    """The chunks of sequences whose rows begin at `borders`.

    Returns the sequence and first row of each, one after another, and each sequence's first chunk, [sequences + 1].
    """
    table: list[int] = []
    first = [0]
    for sequence, (begin, end) in enumerate(pairwise(borders)):
        for row in range(begin, end, PREFILL_CHUNK):
            table += (sequence, row)
        first.append(len(table) // 2)
    return table, first


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of `sequences` sequences, one sequence after another.

    Prefill parts know their borders on the host (`host_cu_rows`, `host_starts`), or, padded ones, have their chunks
    on the device (`chunk_table`, `chunk_borders`), where rows past the last sequence's are nobody's. Decode parts
    have up to `rows_per_seq` rows a sequence: the first is a token of the sequence, the others are drafts to be
    checked.
    """

    sequences: int
    longest: int  # most rows of one sequence
    rows_per_seq: int  # most rows of a decode part's sequences; 0 for a prefill part
    cu_rows: torch.Tensor  # [sequences + 1] int64
    starts: torch.Tensor  # [sequences] int64, tokens of the sequence before its first row here
    slots: torch.Tensor  # [sequences] int32, GDN slots
    fresh: torch.Tensor  # [sequences] uint8, 1 where the state starts cleared (first chunk, or a padding row)
    block_tables: torch.Tensor  # [sequences, blocks] int32, or all slots' where `table_rows` says which
    pending: torch.Tensor | None = None  # [sequences] int32, accepted rows that the GDN states are behind by
    committed: torch.Tensor | None = None  # [sequences] int64, rows that move the GDN states; None: all
    host_cu_rows: tuple[int, ...] = ()
    host_starts: tuple[int, ...] = ()
    table_rows: torch.Tensor | None = None  # [sequences] int32, rows of block_tables; None: in order
    # [chunks, 2] int32, each chunk's sequence and first row; surplus ones begin past the sequence's last row
    chunk_table: torch.Tensor | None = None
    chunk_borders: torch.Tensor | None = None  # [sequences + 1] int32, each sequence's first chunk
    # Of a step that `Ops.begin_step` began: the tensors above, and all that earlier steps left in states and keys,
    # were written by kernels that had ended before any kernel behind it could start. Those may read them at once.
    settled: bool = False
