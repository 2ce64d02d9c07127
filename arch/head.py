"""The multi-token-prediction head: one decoder layer of its own that guesses the token after the next.

Slot i of the head holds `fc[norm(embedding(t_{i+1})) | norm(h_i)]`, where h_i is the trunk's row i after the
final norm, or, in a chain, the head's own output one position before. It is not sharded: one rank drafts.
"""

from __future__ import annotations

import torch

from mstar.arch.caches import AttentionCache
from mstar.arch.layers import AttentionMixer, Layer, Weights, sub_weights, zero_centred
from mstar.kernels.argmax import argmax_rows
from mstar.kernels.ops import Ops, Packed
from mstar.kernels.rows import Rows
from mstar.loader.config import FULL, ModelConfig


class MtpHead:
    """Runs the head's layer over its own KV, in the block table of the trunk's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        embedding: torch.Tensor | Packed,
        lm_head: Packed,
    ):
        """weights: as `mstar.loader.head.load_head` names them; emptied on the way.

        embedding, lm_head: the whole vocabulary's, packed by `ops` or as the trunk holds them; shared with the
        trunk where that is on one rank.
        """
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.vocab_size = config.vocab_size
        self.embedding = embedding
        self.lm_head = lm_head
        self.embedding_norm = zero_centred(weights.pop("pre_fc_norm_embedding.weight"))
        self.hidden_norm = zero_centred(weights.pop("pre_fc_norm_hidden.weight"))
        self.fc = ops.pack_linear(weights.pop("fc.weight"))
        self.layer = Layer(config, FULL, sub_weights(weights, "layers.0."), 1, ops)
        self.norm = zero_centred(weights.pop("norm.weight"))
        ops.read_in_order([(self.fc, None), *self.layer.in_order], self.eps)
        assert not weights, f"weights that the head did not take: {sorted(weights)}"

    def __call__(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, cache: AttentionCache, rows: Rows
    ) -> torch.Tensor:
        """Writes the rows' keys and values; returns each sequence's last row after the head's norm.

        token_ids: [rows] int64, the token after each row's position; hidden: [rows, hidden], model dtype.
        Returns [sequences, hidden].
        """
        layer, mixer = self.layer, self.layer.mixer
        assert isinstance(mixer, AttentionMixer)
        known = torch.cat(
            [
                self.ops.rms_norm(
                    self.ops.embedding_rows(self.embedding, token_ids), self.embedding_norm, self.eps
                ),
                self.ops.rms_norm(hidden, self.hidden_norm, self.eps),
            ],
            -1,
        )
        x = self.ops.linear(known, self.fc)
        proj = self.ops.linear(x, mixer.in_proj, norm=layer.input_norm, eps=self.eps)
        mixed = self.ops.attention(proj, mixer.weights, cache.k, cache.v, rows, last_only=True)
        if rows.longest > 1:
            x = x[rows.cu_rows[1:] - 1]
        x = self.ops.linear(mixed, mixer.out_proj, residual=x)
        gated = self.ops.gated_linear(x, layer.gate_up, norm=layer.post_norm, eps=self.eps)
        x = self.ops.linear(gated, layer.down, residual=x)
        return self.ops.rms_norm(x, self.norm, self.eps)

    def draft(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest next token of rows that `__call__` returned, ties to the lowest id: [rows] int64."""
        return argmax_rows(self.ops.linear(hidden, self.lm_head, out_f32=True)[:, : self.vocab_size])
