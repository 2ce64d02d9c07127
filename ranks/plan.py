"""What rank 0 decides for one step. Every rank, rank 0 included, does what the plan says and nothing else.

Shapes and block numbers are in the plan; values that a step computes (next tokens, lengths) are not: they
live in registers by slot on every rank, so the plan of a steady decode step is a few dozen bytes, and a plan
can be made before the step ahead of it has given its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgpack

# Sizes a decode part is padded to. Close together where padding would cost most of a step (a row is a row of
# weights' reuse up to about 8), then by 8, so that at most 7 rows are for nothing.
DECODE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
BUCKET_STEP = 64  # past the last bucket: multiples of it


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's tokens, known to the host (prompt, or prompt and output after a preemption)."""

    slot: int
    start: int  # tokens of the sequence before the chunk
    token_ids: list[int]
    final: bool  # the chunk's last row draws the sequence's next token


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Blocks `blocks` become entries `column`, `column + 1`, ... of the slot's block table."""

    slot: int
    column: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: block-table updates, then the prefill part, then the decode part, then sampling.

    Rows that draw a token, in this order: the final chunks', then the decode part's. A row is prefill or
    decode because the plan says so, never because of how many tokens it has.
    """

    number: int  # 1, 2, 3, ... without gaps within a load
    tables: list[TableUpdate]
    chunks: list[Chunk]
    chunk_columns: int  # block-table columns that the prefill part reads
    decode_slots: list[int]
    decode_bucket: int  # rows of the decode part, `len(decode_slots)` padded with sinks; 0 = no decode part
    decode_columns: int
    gather_logits: bool  # rank 0 needs whole logits; else one (value, id) pair a row and rank is enough


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


def bucket_of(sequences: int) -> int:
    """The decode bucket that holds this many sequences; 0 for none."""
    if sequences == 0:
        return 0
    for bucket in DECODE_BUCKETS:
        if sequences <= bucket:
            return bucket
    return -(-sequences // BUCKET_STEP) * BUCKET_STEP
