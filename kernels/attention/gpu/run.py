"""Full attention on a GPU, between its projections: what `Ops.attention` does, in two or three launches."""

from __future__ import annotations

import torch

from mstar.kernels.attention.gpu.decode import attend_decode
from mstar.kernels.attention.gpu.prefill import attend_prefill
from mstar.kernels.attention.gpu.qkv import qkv_norm_rope_cache
from mstar.kernels.attention.weights import AttentionWeights
from mstar.kernels.rows import Rows


def attention_gpu(
    proj: torch.Tensor,
    weights: AttentionWeights,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: Rows,
    last_only: bool = False,
) -> torch.Tensor:
    """Prefill or decode, by `rows.rows_per_seq`; shapes and meaning as `mstar.kernels.attention`'s.

    proj: [rows, proj_width], columns side by side. A decode part is uniform: rows_per_seq rows for every sequence.
    last_only: all rows write their key and value, each sequence's last one attends: [sequences, ...].
    """
    arrivals = None
    if rows.rows_per_seq:
        arrivals = torch.empty(rows.sequences * weights.kv_heads, dtype=torch.int32, device=proj.device)
    q = qkv_norm_rope_cache(proj, weights, k_cache, v_cache, rows, arrivals)
    if rows.rows_per_seq or last_only:
        return attend_decode(q, proj, weights, k_cache, v_cache, rows, last_only, arrivals=arrivals)
    return attend_prefill(q, proj, weights, k_cache, v_cache, rows)
