"""What tests of the GPU's Gated DeltaNet decode share: weights, caches as rings, the recurrence in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mstar.kernels.gdn import GdnWeights
from mstar.kernels.rows import Rows

WIDTH = 4


def make_weights(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    generator: torch.Generator,
    device: torch.device,
) -> GdnWeights:
    channels = 2 * key_heads * key_dim + value_heads * value_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return GdnWeights(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=(normal(WIDTH, channels) * 0.5).to(device),
        decay=-(torch.rand(value_heads, generator=generator) * 4).to(device),
        dt_bias=normal(value_heads).to(device),
        norm=(torch.rand(value_dim, generator=generator) + 0.5).to(device),
        eps=1e-6,
    )


def make_rows(
    rows_per_seq: int,
    slots: list[int],
    starts: list[int],
    device: torch.device,
    pending: list[int] | None = None,
) -> Rows:
    """Rows of a uniform decode part; sequences on the sink are fresh, as padding is."""
    count = len(slots)
    int32 = {"dtype": torch.int32, "device": device}
    return Rows(
        sequences=count,
        longest=rows_per_seq,
        rows_per_seq=rows_per_seq,
        cu_rows=torch.arange(count + 1, device=device) * rows_per_seq,
        starts=torch.tensor(starts, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, **int32),
        fresh=torch.tensor([slot == 0 for slot in slots], dtype=torch.uint8, device=device),
        block_tables=torch.zeros(count, 1, **int32),
        pending=None if pending is None else torch.tensor(pending, **int32),
        committed=torch.ones(count, dtype=torch.int64, device=device),
    )


class Float64:
    """Sequences of Gated DeltaNet in float64 from the design's formulas, nothing rounded between.

    state: [seqs, value_heads, key_dim, value_dim]; taps: the last inputs of the conv, [seqs, width - 1, channels].
    """

    def __init__(self, w: GdnWeights, state: torch.Tensor, taps: torch.Tensor):
        self.w, self.state, self.taps = w, state.double(), taps.double()

    def row(self, proj: torch.Tensor, move: bool = True) -> torch.Tensor:
        """One row of each sequence, [seqs, proj_width] -> [seqs, value_heads * value_dim]."""
        w, p = self.w, proj.double()
        keys, values = w.key_heads * w.key_dim, w.value_heads * w.value_dim
        mixed, z, b, a = p.split([w.channels, values, w.value_heads, w.value_heads], -1)
        line = torch.cat([self.taps, mixed[:, None]], 1)
        u = (line * w.conv.double()).sum(1)
        q, k, v = (u * torch.sigmoid(u)).split([keys, keys, values], -1)
        heads = torch.arange(w.value_heads, device=p.device) // (w.value_heads // w.key_heads)
        q, k = (x.unflatten(-1, (w.key_heads, w.key_dim))[:, heads] for x in (q, k))
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / w.key_dim**0.5
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        v, z = (x.unflatten(-1, (w.value_heads, w.value_dim)) for x in (v, z))
        forget = torch.exp(w.decay.double() * F.softplus(a + w.dt_bias.double()))
        s = self.state * forget[..., None, None]
        d = torch.sigmoid(b)[..., None] * (v - (s * k[..., None]).sum(-2))
        s = s + k[..., None] * d[..., None, :]
        o = (s * q[..., None]).sum(-2)
        o = o / (o.square().mean(-1, keepdim=True) + w.eps).sqrt() * w.norm.double()
        if move:
            self.state, self.taps = s, line[:, 1:]
        return (o * z * torch.sigmoid(z)).flatten(1)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs and signed zeros compare too."""
    return x.contiguous().view(torch.uint8)
