"""What one Gated DeltaNet layer's mixer needs beside its projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """One rank's part of a layer. The projection's columns are Q|K|V, z, b, a (`proj_width` of them)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: torch.Tensor  # [width, channels] float32, oldest tap first; channels are Q|K|V
    decay: torch.Tensor  # [value_heads] float32, -exp(A_log)
    dt_bias: torch.Tensor  # [value_heads] float32
    norm: torch.Tensor  # [value_dim] float32, not zero-centred
    eps: float

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def proj_width(self) -> int:
        return self.channels + self.value_heads * (self.value_dim + 2)
