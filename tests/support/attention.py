"""Paged attention to test kernels on: random histories in scattered blocks, and their float64 results."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mstar.kernels.attention import AttentionWeights
from mstar.kernels.rows import Rows

BLOCK = 16


def random_weights(
    q_heads: int, kv_heads: int, dim: int, rotary: int, generator: torch.Generator, theta: float = 1e7
) -> AttentionWeights:
    """Norms that make a row prefer few of its keys: scores of a deviation of about 2."""
    return AttentionWeights(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        q_norm=torch.rand(dim, generator=generator) * 2 + 1,
        k_norm=torch.rand(dim, generator=generator) + 0.5,
        inv_freq=1.0 / (theta ** (torch.arange(0, rotary, 2).float() / rotary)),
        eps=1e-6,
    )


def weights_to(weights: AttentionWeights, device: torch.device) -> AttentionWeights:
    return replace(
        weights,
        q_norm=weights.q_norm.to(device),
        k_norm=weights.k_norm.to(device),
        inv_freq=weights.inv_freq.to(device),
    )


def normed_and_turned(
    x: torch.Tensor, norm: torch.Tensor, positions: torch.Tensor, weights: AttentionWeights
) -> torch.Tensor:
    """x: [rows, heads, dim] -> float64; the angles are float32 products, their cosines float64."""
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + weights.eps).sqrt() * norm.double()
    half = weights.inv_freq.shape[0]
    angle = (positions[:, None].float() * weights.inv_freq).double()[:, None]
    low, high = x[..., :half], x[..., half : 2 * half]
    turned = (low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin())
    return torch.cat([*turned, x[..., 2 * half :]], -1)


@dataclass
class Paged:
    """Sequences with a history in the caches and rows to come. Blocks that no sequence owns hold NaN."""

    weights: AttentionWeights
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    rows: Rows
    proj: torch.Tensor  # [rows, proj_width], a part of wider rows
    past: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each history, [tokens, kv_heads, dim]

    def parts(self, sequence: int) -> tuple[torch.Tensor, ...]:
        """q, gate, k, v of a sequence's rows in float64, and their positions."""
        w = self.weights
        begin, end = self.rows.host_cu_rows[sequence : sequence + 2]
        proj = self.proj[begin:end]
        positions = self.rows.host_starts[sequence] + torch.arange(end - begin, device=proj.device)
        q_gate = proj[:, : 2 * w.q_heads * w.head_dim].unflatten(1, (w.q_heads, 2, w.head_dim))
        k, v = proj[:, 2 * w.q_heads * w.head_dim :].unflatten(1, (2, w.kv_heads, w.head_dim)).unbind(1)
        q = normed_and_turned(q_gate[:, :, 0], w.q_norm, positions, w)
        return (
            q,
            q_gate[:, :, 1].double(),
            normed_and_turned(k, w.k_norm, positions, w),
            v.double(),
            positions,
        )

    def expected(self, sequence: int) -> torch.Tensor:
        """[rows of the sequence, q_heads * dim] float64, from q and k as the model dtype holds them."""
        w = self.weights
        q, gate, k, v, positions = self.parts(sequence)
        q, k = q.to(self.proj.dtype).double(), k.to(self.proj.dtype).double()
        k = torch.cat([self.past[sequence][0].double(), k])
        v = torch.cat([self.past[sequence][1].double(), v])
        hidden = torch.arange(k.shape[0], device=k.device) > positions[:, None]
        heads = []
        for head in range(w.q_heads):
            kv_head = head // (w.q_heads // w.kv_heads)
            scores = q[:, head] @ k[:, kv_head].T / w.head_dim**0.5
            weight = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            heads.append(weight @ v[:, kv_head] * torch.sigmoid(gate[:, head]))
        return torch.cat(heads, 1)


def paged(
    weights: AttentionWeights,
    starts: list[int],
    counts: list[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    decode: bool,
    columns: int = 0,
    padding: int = 0,
    slots: bool = False,
) -> Paged:
    """Sequences of `starts` tokens with `counts` rows to come, and `padding` sequences on the sink after them.

    columns: width of the block table, or what the longest needs; slots: the table is larger, `table_rows` says which.
    """
    heads, dim = weights.kv_heads, weights.head_dim
    needed = [-(-(start + count) // BLOCK) for start, count in zip(starts, counts, strict=True)]
    columns = columns or max(needed)
    blocks = 1 + sum(needed) + 3
    order = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()
    k_cache = torch.full((blocks, heads, dim, BLOCK), float("nan"))
    v_cache = torch.full((blocks, heads, BLOCK, dim), float("nan"))
    k_cache[0], v_cache[0] = 0.5, 0.5
    tables = torch.zeros(len(starts) + padding, columns, dtype=torch.int32)
    past = []
    for index, (start, need) in enumerate(zip(starts, needed, strict=True)):
        own = torch.tensor([order.pop() for _ in range(need)])
        tables[index, :need] = own[:columns].to(torch.int32)
        k = torch.randn(start, heads, dim, generator=generator).to(dtype)
        v = torch.randn(start, heads, dim, generator=generator).to(dtype)
        at = torch.arange(start)
        k_cache[own[at // BLOCK], :, :, at % BLOCK] = k.float()
        v_cache[own[at // BLOCK], :, at % BLOCK] = v.float()
        past.append((k.to(device), v.to(device)))
    counts = counts + [counts[0] if decode else 0] * padding
    starts = starts + [0] * padding
    borders = [0]
    for count in counts:
        borders.append(borders[-1] + count)
    table_rows = None
    if slots:  # the other rows of the larger table name a block that is nobody's
        where = torch.randperm(len(starts) + 2, generator=generator)[: len(starts)]
        larger = torch.full((len(starts) + 2, columns), blocks - 1, dtype=torch.int32)
        larger[where] = tables
        tables, table_rows = larger, where.to(torch.int32).to(device)
    rows = Rows(
        sequences=len(starts),
        longest=max(counts),
        rows_per_seq=counts[0] if decode else 0,
        cu_rows=torch.tensor(borders).to(device),
        starts=torch.tensor(starts).to(device),
        slots=torch.arange(1, len(starts) + 1, dtype=torch.int32).to(device),
        fresh=torch.zeros(len(starts), dtype=torch.uint8).to(device),
        block_tables=tables.to(device),
        host_cu_rows=tuple(borders),
        host_starts=tuple(starts),
        table_rows=table_rows,
    )
    wide = torch.randn(borders[-1], weights.proj_width + 16, generator=generator)
    proj = wide.to(dtype).to(device)[:, : weights.proj_width]
    return Paged(
        weights_to(weights, device),
        k_cache.to(dtype).to(device),
        v_cache.to(dtype).to(device),
        rows,
        proj,
        past,
    )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest of the rows' errors, each relative to the norm of the row. NaN counts as infinite."""
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    return float(error.nan_to_num(nan=float("inf")).max())
