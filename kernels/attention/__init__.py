"""Gated full attention between its projections: q/k norm, partial rope, KV write, paged attention, gate."""

from mstar.kernels.attention.reference import attention_decode, attention_prefill
from mstar.kernels.attention.weights import AttentionWeights

__all__ = ["AttentionWeights", "attention_decode", "attention_prefill"]
