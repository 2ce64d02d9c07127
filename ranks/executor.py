"""Runs step plans on one rank: the same code on rank 0 and its followers.

Values that steps hand to each other stay in registers by slot: `next_token`, `lengths`, `block_table`. A plan
names slots; nothing of a steady decode step is looked up or copied on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mstar.arch.caches import LayerCache
from mstar.arch.inputs import DecodeInputs, PrefillInputs
from mstar.ranks.argmax import argmax_rows, merged_maxima, shard_maxima
from mstar.ranks.cache import blocks_for
from mstar.ranks.collectives import Collective
from mstar.ranks.plan import StepPlan
from mstar.ranks.sampler import Sampled


class Model(Protocol):
    """What the executor runs; mstar.arch.trunk.Trunk."""

    def prefill(self, inputs: PrefillInputs, caches: list[LayerCache]) -> torch.Tensor: ...

    def decode(self, inputs: DecodeInputs, caches: list[LayerCache]) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class TokenSampler(Protocol):
    """What draws on rank 0; mstar.ranks.sampler.Sampler."""

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_slots: Sequence[int] | None = None,
    ) -> Sampled: ...

    def accept_greedy(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """Tensors of a decode part that stay the same while the same slots decode with the same blocks."""

    decode_slots: list[int]
    bucket: int
    columns: int
    index: torch.Tensor  # [bucket] int64 slots
    slots: torch.Tensor  # [bucket] int32
    tables: torch.Tensor  # [bucket, columns] int32


class Executor:
    """One rank's model, caches and registers.

    slots: the sink included. sampler: on rank 0, None on followers, who get the tokens from it.
    """

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        collective: Collective,
        *,
        slots: int,
        max_seq: int,
        vocab_size: int,
        device: torch.device,
        sampler: TokenSampler | None,
    ) -> None:
        self._model = model
        self._caches = caches
        self._mesh = collective
        self._sampler = sampler
        self._device = device
        self._vocab_size = vocab_size
        self.next_token = torch.zeros(slots, dtype=torch.int64, device=device)
        # Tokens whose KV and state are in the caches. The sink's stays 0, so padding rows stand at position 0.
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(slots, blocks_for(max_seq), dtype=torch.int32, device=device)
        self._decode_rows: _DecodeRows | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sampled | None:
        """Runs one step. On rank 0 returns the tokens of the rows that draw, in the plan's order."""
        self._update_tables(plan)
        hidden: list[torch.Tensor] = []
        drawing: list[torch.Tensor] = []  # [rows] int64 slots
        if plan.chunks:
            last_rows = self._prefill(plan)
            finals = [i for i, chunk in enumerate(plan.chunks) if chunk.final]
            if finals:
                hidden.append(last_rows if len(finals) == len(plan.chunks) else last_rows[finals])
                drawing.append(self._tensor([plan.chunks[i].slot for i in finals], torch.int64))
        if plan.decode_bucket:
            rows = self._rows_of(plan)
            hidden.append(self._decode(rows))
            drawing.append(rows.index)
            if len(plan.decode_slots) < plan.decode_bucket:
                self.lengths[0] = 0
        if not hidden:
            return None
        slots = drawing[0] if len(drawing) == 1 else torch.cat(drawing)
        logits = self._model.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
        return self._draw(plan, logits, slots)

    def _draw(self, plan: StepPlan, logits: torch.Tensor, slots: torch.Tensor) -> Sampled | None:
        """logits: [rows, vocab_local]; slots: [rows]; padding rows come last and draw nothing."""
        host_slots = [chunk.slot for chunk in plan.chunks if chunk.final] + plan.decode_slots
        real = len(host_slots)
        sampled: Sampled | None = None
        if plan.gather_logits:
            logits = self._whole(logits)
            tokens = torch.zeros_like(slots)
            if self._sampler is not None and real:
                at = slots[:real]
                positions = self.lengths.index_select(0, at).to(torch.int64)
                sampled = self._sampler.sample(logits[:real], at, positions, host_slots)
                tokens[:real] = sampled.tokens
            self._mesh.broadcast(tokens)
        else:
            tokens = self._merged_argmax(logits)
            if self._sampler is not None and real:
                mine = tokens[:real]
                sampled = Sampled(mine, self._sampler.accept_greedy(mine, slots[:real]), None)
        self.next_token.index_copy_(0, slots, tokens)
        return sampled

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size] from every rank's [rows, vocab_local]."""
        if self._mesh.size > 1:
            logits = self._mesh.all_gather(logits).transpose(0, 1).flatten(1)
        return logits[:, : self._vocab_size]

    def _merged_argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows] int64, the id of the largest logit over all ranks, ties to the lowest id; alike on every rank."""
        if self._mesh.size == 1:
            return argmax_rows(logits)
        pairs = shard_maxima(logits, self._mesh.rank * logits.shape[1])
        return merged_maxima(self._mesh.all_gather(pairs))

    def _prefill(self, plan: StepPlan) -> torch.Tensor:
        """[chunks, hidden], each chunk's last row; sets the lengths of the chunks' slots."""
        chunks = plan.chunks
        ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        slots = self._tensor([chunk.slot for chunk in chunks], torch.int64)
        borders = [0]
        for chunk in chunks:
            borders.append(borders[-1] + len(chunk.token_ids))
        ranges = [
            torch.arange(c.start, end, device=self._device) for c, end in zip(chunks, ends, strict=True)
        ]
        inputs = PrefillInputs(
            token_ids=self._tensor([token for chunk in chunks for token in chunk.token_ids], torch.int64),
            positions=torch.cat(ranges),
            slots=slots.to(torch.int32),
            block_tables=self.block_table[:, : plan.chunk_columns].index_select(0, slots),
            cu_rows=tuple(borders),
            starts=tuple(chunk.start for chunk in chunks),
        )
        self.lengths.index_copy_(0, slots, self._tensor(ends, torch.int32))
        return self._model.prefill(inputs, self._caches)

    def _decode(self, rows: _DecodeRows) -> torch.Tensor:
        """[bucket, hidden]; moves the lengths of the bucket's slots one on."""
        lengths = self.lengths.index_select(0, rows.index).add_(1)
        self.lengths.index_copy_(0, rows.index, lengths)
        inputs = DecodeInputs(
            token_ids=self.next_token.index_select(0, rows.index),
            seq_lens=lengths,
            slots=rows.slots,
            block_tables=rows.tables,
        )
        return self._model.decode(inputs, self._caches)

    def _rows_of(self, plan: StepPlan) -> _DecodeRows:
        last = self._decode_rows
        if (
            last is not None
            and last.decode_slots == plan.decode_slots
            and last.bucket == plan.decode_bucket
            and last.columns == plan.decode_columns
        ):
            return last
        padding = [0] * (plan.decode_bucket - len(plan.decode_slots))
        index = self._tensor(plan.decode_slots + padding, torch.int64)
        tables = self.block_table[:, : plan.decode_columns].index_select(0, index)
        self._decode_rows = _DecodeRows(
            plan.decode_slots, plan.decode_bucket, plan.decode_columns, index, index.to(torch.int32), tables
        )
        return self._decode_rows

    def _update_tables(self, plan: StepPlan) -> None:
        if not plan.tables:
            return
        self._decode_rows = None
        width = self.block_table.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for update in plan.tables:
            if update.column == 0:
                self.block_table[update.slot].zero_()  # of the slot's last owner
            first = update.slot * width + update.column
            places.extend(range(first, first + len(update.blocks)))
            blocks.extend(update.blocks)
        at = self._tensor(places, torch.int64)
        self.block_table.view(-1).index_copy_(0, at, self._tensor(blocks, torch.int32))

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)
