"""What one full-attention layer's mixer needs beside its projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One rank's part of a layer. The projection's columns are q|gate for each q head, then K, then V."""

    q_heads: int
    kv_heads: int
    head_dim: int
    q_norm: torch.Tensor  # [head_dim] float32, the weight plus one
    k_norm: torch.Tensor  # [head_dim] float32, the weight plus one
    inv_freq: torch.Tensor  # [rotary_dim / 2] float32, theta^(-2i / rotary_dim)
    eps: float

    @property
    def proj_width(self) -> int:
        return (2 * self.q_heads + 2 * self.kv_heads) * self.head_dim
