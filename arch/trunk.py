"""The text trunk: embedding, decoder layers, final norm, lm_head; one rank's shard of it."""

from __future__ import annotations

import functools
import itertools

import torch

from mstar.arch.caches import LayerCache
from mstar.arch.inputs import DecodeInputs, PaddedPrefill, PrefillInputs
from mstar.arch.layers import Layer, Weights, sub_weights, zero_centred
from mstar.arch.parallel import Mesh
from mstar.kernels.ops import select_ops
from mstar.kernels.rows import Rows
from mstar.kernels.staging import staged
from mstar.kernels.step import StepRegisters
from mstar.loader.config import ModelConfig


class Trunk:
    """Runs the rows of a step on this rank; all ranks of a mesh call it with the same inputs, in lockstep."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        collective: Mesh,
        block_size: int = 16,
    ):
        """weights: the rank's slices as `mstar.loader.checkpoint.load_shard` names them; emptied on the way."""
        self.config = config
        self.mesh = collective
        self.device = device
        self.dtype = dtype
        dims = (config.hidden_size, config.head_dim, config.linear_key_head_dim, config.linear_value_head_dim)
        self.ops, self.notes = select_ops(device, dtype, block_size, dims)
        local = config.local(collective.size)
        self.vocab_start = collective.rank * local.vocab
        self.vocab_local = local.vocab
        self.layers = [
            Layer(config, kind, sub_weights(weights, f"layers.{index}."), collective.size, self.ops)
            for index, kind in enumerate(config.layer_types)
        ]
        self.norm = zero_centred(weights.pop("norm.weight"))
        embedding = weights.pop("embed_tokens.weight")
        self.embedding = self.ops.pack_linear(embedding) if config.tie_word_embeddings else embedding
        head = weights.pop("lm_head.weight", None)
        if isinstance(self.embedding, torch.Tensor):
            assert head is not None, "an untied model has an lm_head: the loader checks it"
            self.lm_head = self.ops.pack_linear(head)
        else:
            self.lm_head = self.embedding
        self.ops.read_in_order(
            [each for layer in self.layers for each in layer.in_order] + [(self.lm_head, None)],
            config.rms_norm_eps,
        )
        assert not weights, f"weights that no layer took: {sorted(weights)}"

    def prefill(
        self, inputs: PrefillInputs, caches: list[LayerCache], every_row: bool = False
    ) -> torch.Tensor:
        """Runs chunks of prompts; returns rows after the final norm.

        Each chunk's last row, [chunks, hidden], or with `every_row` all of them, [rows, hidden].
        """
        rows = prefill_rows(inputs, self.device)
        x = self._run(self._embed(inputs.token_ids), rows, caches)
        if not every_row:
            x = x[rows.cu_rows[1:] - 1]
        return self.ops.rms_norm(x, self.norm, self.config.rms_norm_eps)

    def prefill_step(
        self, inputs: PaddedPrefill, block_table: torch.Tensor, caches: list[LayerCache]
    ) -> torch.Tensor:
        """`prefill` of padded chunks, fit for capture: nothing of it is read by the host.

        block_table: [slots, blocks] int32, of all slots. Returns [sequences, hidden] after the final norm, each
        chunk's last row; of a surplus sequence any row's.
        """
        rows = Rows(
            sequences=inputs.slots.shape[0],
            longest=inputs.token_ids.shape[0],
            rows_per_seq=0,
            cu_rows=inputs.cu_rows,
            starts=inputs.starts,
            slots=inputs.slots,
            fresh=(inputs.starts == 0).to(torch.uint8),
            block_tables=block_table,
            table_rows=inputs.slots,
            chunk_table=inputs.chunk_table,
            chunk_borders=inputs.chunk_borders,
        )
        x = self._run(self._embed(inputs.token_ids), rows, caches).index_select(0, inputs.last_rows)
        return self.ops.rms_norm(x, self.norm, self.config.rms_norm_eps)

    def decode(self, inputs: DecodeInputs, caches: list[LayerCache]) -> torch.Tensor:
        """Runs every sequence's newest token and drafts; returns all rows after the final norm, [rows, hidden]."""
        seqs = inputs.slots.shape[0]
        counts = inputs.counts
        if counts is None or max(counts) == 1:
            borders, longest, committed = self._one_row_each(seqs), 1, None
        else:
            borders = staged((0, *itertools.accumulate(counts)), torch.int64, self.device)
            longest, committed = max(counts), self._ones(seqs)
        rows = Rows(
            sequences=seqs,
            longest=longest,
            rows_per_seq=longest,
            cu_rows=borders,
            starts=(inputs.seq_lens - 1).to(torch.int64),
            slots=inputs.slots,
            fresh=(inputs.slots == 0).to(torch.uint8),
            block_tables=inputs.block_tables,
            pending=inputs.pending,
            committed=committed,
        )
        x = self._run(self._embed(inputs.token_ids), rows, caches)
        return self.ops.rms_norm(x, self.norm, self.config.rms_norm_eps)

    def step(
        self,
        slots: torch.Tensor,
        registers: StepRegisters,
        block_table: torch.Tensor,
        caches: list[LayerCache],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`decode` of one row a sequence from registers alone, fit for capture: nothing of it is read by the host.

        slots: [seqs] int32, padded with 0; block_table: [slots, blocks] int32, of all slots.
        Returns rows after the final norm, [seqs, hidden], and where each row stands, [seqs] int64.
        """
        seqs = slots.shape[0]
        x, starts, fresh = self.ops.begin_step(
            slots, registers, self.embedding, self.vocab_start, self.vocab_local
        )
        if self.mesh.size > 1:
            x = self.mesh.all_reduce(x)
        # kernels find a sequence's row of the table themselves; references want the rows in order
        by_slot = self.ops.uniform
        tables = block_table if by_slot else block_table.index_select(0, slots.long())
        rows = Rows(
            sequences=seqs,
            longest=1,
            rows_per_seq=1,
            cu_rows=self._one_row_each(seqs),
            starts=starts,
            slots=slots,
            fresh=fresh,
            block_tables=tables,
            pending=None if registers.pending is None else registers.pending.index_select(0, slots),
            table_rows=slots if by_slot else None,
            settled=registers.pending is None,  # which a kernel behind `begin_step` gathers
        )
        x = self._run(x, rows, caches)
        return self.ops.rms_norm(x, self.norm, self.config.rms_norm_eps), starts

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary: [rows, vocab_local] float32; ids past the vocabulary are -inf."""
        logits = self.ops.linear(hidden, self.lm_head, out_f32=True)
        present = self.config.vocab_size - self.vocab_start
        if present < self.vocab_local:
            logits[:, max(present, 0) :] = float("-inf")
        return logits

    @functools.cached_property
    def params(self) -> int:
        """Parameters of the whole trunk, over all ranks; a tied embedding counts once."""
        return count_params(self.config)

    def _run(self, x: torch.Tensor, rows: Rows, caches: list[LayerCache]) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, rows, self.mesh)
        return x

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.mesh.size == 1:
            return self.ops.embedding_rows(self.embedding, token_ids)
        # one rank holds the row, the others add zeros: exact in any dtype
        return self.mesh.all_reduce(
            self.ops.embed(token_ids, self.embedding, self.vocab_start, self.vocab_local)
        )

    @functools.cache  # noqa: B019 - a trunk lives as long as its process
    def _one_row_each(self, seqs: int) -> torch.Tensor:
        return torch.arange(seqs + 1, dtype=torch.int64, device=self.device)

    @functools.cache  # noqa: B019
    def _ones(self, seqs: int) -> torch.Tensor:
        return torch.ones(seqs, dtype=torch.int64, device=self.device)


def prefill_rows(inputs: PrefillInputs, device: torch.device) -> Rows:
    """How the rows of chunks belong to sequences."""
    starts = staged(inputs.starts, torch.int64, device)
    return Rows(
        sequences=len(inputs.starts),
        longest=max(end - start for start, end in itertools.pairwise(inputs.cu_rows)),
        rows_per_seq=0,
        cu_rows=staged(inputs.cu_rows, torch.int64, device),
        starts=starts,
        slots=inputs.slots,
        fresh=(starts == 0).to(torch.uint8),
        block_tables=inputs.block_tables,
        host_cu_rows=inputs.cu_rows,
        host_starts=inputs.starts,
    )


def count_params(config: ModelConfig) -> int:
    """Parameters of the text trunk, from its shape alone."""
    hidden, dim = config.hidden_size, config.head_dim
    whole = config.local(1)
    values = config.linear_num_value_heads * config.linear_value_head_dim
    linear = hidden * (whole.conv_channels + 2 * values + 2 * config.linear_num_value_heads)
    linear += whole.conv_channels * config.linear_conv_kernel_dim
    linear += 2 * config.linear_num_value_heads + config.linear_value_head_dim
    heads = 3 * config.num_attention_heads + 2 * config.num_key_value_heads
    full = hidden * dim * heads + 2 * dim
    shared = 3 * hidden * config.intermediate_size + 2 * hidden
    mixers = sum(full if kind == "full_attention" else linear for kind in config.layer_types)
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return mixers + shared * len(config.layer_types) + embeddings + hidden
