"""Gated DeltaNet between its projections: causal conv, gates, delta rule, gated norm."""

from mstar.kernels.gdn.reference import gdn_decode, gdn_prefill
from mstar.kernels.gdn.weights import GdnWeights

__all__ = ["GdnWeights", "gdn_decode", "gdn_prefill"]
