"""What rank 0 decides for one step. Every rank, rank 0 included, does what the plan says and nothing else.

Shapes and block numbers are in the plan; values that a step computes (next tokens, lengths) are not: they
live in registers by slot on every rank, so the plan of a steady decode step is a few dozen bytes, and a plan
can be made before the step ahead of it has given its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgpack

# Sequences that a decode part is padded to where steps are captured by shape. Close together where padding would
# cost most of a step (a row is a row of weights' reuse up to about 8), then by 8: at most 7 are for nothing.
DECODE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
BUCKET_STEP = 64  # past the last bucket: multiples of it


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's tokens, known to the host (prompt, or prompt and output after a preemption)."""

    slot: int
    start: int  # tokens of the sequence before the chunk
    token_ids: list[int]
    final: bool  # the chunk's last row draws the sequence's next token
    head: bool = False  # the MTP head runs over the chunk too
    next_id: int = 0  # the known token after a chunk that is not final


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Blocks `blocks` become entries `column`, `column + 1`, ... of the slot's block table."""

    slot: int
    column: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: block-table updates, then the prefill part, then the decode part, then sampling.

    Sequences that draw, in this order: the final chunks', then the decode part's. A row is prefill or decode
    because the plan says so, never because of how many tokens it has.
    """

    number: int  # 1, 2, 3, ... without gaps within a load
    tables: list[TableUpdate]
    chunks: list[Chunk]
    chunk_columns: int  # block-table columns that the prefill part reads
    decode_slots: list[int]
    decode_bucket: (
        int  # sequences of the decode part, `len(decode_slots)` padded with sinks; 0 = no decode part
    )
    decode_columns: int
    gather_logits: bool  # rank 0 needs whole logits; else one (value, id) pair a row and rank is enough
    # Rows of each decode slot: its newest token and the drafts behind it that are checked. Empty: one each.
    decode_counts: list[int] = field(default_factory=list)
    # Of each sequence that draws, in order: the most drafts to make for its next step, and the length of the
    # sequence that they must not pass; -1 where the head does not follow the sequence. Empty: it follows none.
    draft_most: list[int] = field(default_factory=list)
    draft_ends: list[int] = field(default_factory=list)

    @property
    def draws(self) -> int:
        """Sequences that draw."""
        return sum(chunk.final for chunk in self.chunks) + len(self.decode_slots)

    @property
    def drafts(self) -> int:
        """The most drafts that this step makes for a sequence."""
        return max(0, *self.draft_most) if self.draft_most else 0

    @property
    def told(self) -> bool:
        """Whether ranks hear what was drawn from rank 0; else each finds it by itself."""
        return self.gather_logits or bool(self.draft_most) or bool(self.decode_counts)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step gave on rank 0: an entry a sequence that draws, in the plan's order."""

    runs: list[list[int]]
    finish: list[int]  # of a run's last token: 0 none, 1 stop, 2 length
    logprobs: list[list[Any] | None] | None = None
    accepted: Sequence[int] = ()  # the first so many tokens of a run are drafts; empty: none anywhere
    drafts: Sequence[int] = ()  # made for the next step; empty: none


@dataclass(frozen=True, slots=True)
class Setup:
    """Rank 0's word on what every rank allocates, once all have loaded their shard."""

    kv_blocks: int  # the sink included
    slots: int  # the sink included


@dataclass(frozen=True, slots=True)
class StopPlan:
    """The last message: followers end."""


Message = Setup | StepPlan | StopPlan

_TYPES: tuple[type[Any], ...] = (Setup, StepPlan, StopPlan)
_TAG = {cls: index for index, cls in enumerate(_TYPES)}
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in (*_TYPES, Chunk, TableUpdate)}


def _flat(message: Any) -> list[Any]:
    return [getattr(message, name) for name in _FIELDS[type(message)]]


def pack(message: Message) -> bytes:
    """Encodes a message to the followers."""
    return bytes(msgpack.packb([_TAG[type(message)], *_flat(message)], default=_flat))


def unpack(data: bytes) -> Message:
    """Decodes what `pack` made."""
    tag, *values = msgpack.unpackb(data)
    cls = _TYPES[tag]
    if cls is StepPlan:
        values[1] = [TableUpdate(*update) for update in values[1]]
        values[2] = [Chunk(*chunk) for chunk in values[2]]
    message: Message = cls(*values)
    return message


def decode_buckets(most: int) -> tuple[int, ...]:
    """The buckets of loads of up to `most` sequences."""
    largest = bucket_of(most)
    further = range(max(DECODE_BUCKETS) + BUCKET_STEP, largest, BUCKET_STEP)
    return (*(bucket for bucket in (*DECODE_BUCKETS, *further) if bucket < largest), largest)


def bucket_of(sequences: int, buckets: Sequence[int] = DECODE_BUCKETS) -> int:
    """The decode bucket that holds this many sequences; 0 for none. No buckets: their exact count."""
    if sequences == 0 or not buckets:
        return sequences
    for bucket in buckets:
        if sequences <= bucket:
            return bucket
    return -(-sequences // BUCKET_STEP) * BUCKET_STEP
