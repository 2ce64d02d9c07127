"""The torch reference: gathers a sequence's keys and values from their blocks and attends in float32."""

from __future__ import annotations

import torch

from mstar.kernels.attention.weights import AttentionWeights
from mstar.kernels.norm import rms_norm
from mstar.kernels.rows import Rows


def attention_prefill(
    proj: torch.Tensor, weights: AttentionWeights, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Runs chunks of prompts against their own earlier blocks; writes the rows' keys and values.

    proj: [rows, proj_width], model dtype; k_cache: [blocks, kv_heads, head_dim, block_size] and
    v_cache: [blocks, kv_heads, block_size, head_dim], model dtype, updated in place.
    Returns [rows, q_heads * head_dim] in the model dtype.
    """
    outputs = []
    for index in range(rows.sequences):
        begin, end = rows.host_cu_rows[index : index + 2]
        start = rows.host_starts[index]
        positions = torch.arange(start, start + end - begin, device=proj.device)
        blocks = -(-int(start + end - begin) // k_cache.shape[-1])
        table = rows.block_tables[index : index + 1, :blocks]
        part = proj[begin:end]
        q, gate = _write(part, weights, k_cache, v_cache, positions, table.long().expand(end - begin, -1))
        out = _attend(q[None], k_cache, v_cache, table, positions[None])[0]
        outputs.append(_gate(out, gate, proj.dtype))
    return torch.cat(outputs)


def attention_decode(
    proj: torch.Tensor, weights: AttentionWeights, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """A few rows a sequence, all sequences at once; same shapes as `attention_prefill`."""
    counts = rows.cu_rows.diff()
    owner = torch.repeat_interleave(
        torch.arange(rows.sequences, device=proj.device), counts, output_size=proj.shape[0]
    )
    index = torch.arange(proj.shape[0], device=proj.device) - rows.cu_rows[owner]
    positions = rows.starts[owner] + index
    tables = rows.block_tables.long()
    q, gate = _write(proj, weights, k_cache, v_cache, positions, tables[owner])
    padded = q.new_zeros(rows.sequences, rows.rows_per_seq, *q.shape[1:])
    padded[owner, index] = q
    at = rows.starts[:, None] + torch.arange(rows.rows_per_seq, device=proj.device)
    out = _attend(padded, k_cache, v_cache, tables, at)
    return _gate(out[owner, index], gate, proj.dtype)


def rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Turns the first 2 * len(inv_freq) dims (NeoX halves). x: [rows, heads, dim] float32; angles in float32."""
    half = inv_freq.shape[0]
    angle = positions[:, None].float() * inv_freq
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    low, high, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def _write(
    proj: torch.Tensor,
    weights: AttentionWeights,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms and turns q and k, writes keys and values; tables: [rows, blocks]. Returns q and gate by head."""
    dim, heads = weights.head_dim, weights.q_heads
    q_gate, k, v = proj.split([2 * heads * dim, weights.kv_heads * dim, weights.kv_heads * dim], -1)
    q, gate = q_gate.unflatten(-1, (heads, 2 * dim)).chunk(2, -1)
    q = rope(rms_norm(q.float(), weights.q_norm, weights.eps), positions, weights.inv_freq).to(proj.dtype)
    k = rms_norm(k.unflatten(-1, (-1, dim)).float(), weights.k_norm, weights.eps)
    k = rope(k, positions, weights.inv_freq).to(proj.dtype)
    block_size = k_cache.shape[-1]
    block = tables.gather(1, (positions // block_size)[:, None])[:, 0]
    offset = positions % block_size
    k_cache[block, :, :, offset] = k
    v_cache[block, :, offset] = v.unflatten(-1, (-1, dim))
    return q, gate


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """q: [seqs, rows, q_heads, dim]; positions: [seqs, rows], each row sees keys up to its own."""
    seqs, _, heads, dim = q.shape
    tables = tables.long()
    k = k_cache[tables].permute(0, 2, 3, 1, 4).flatten(3).float()  # [seqs, kv_heads, dim, keys]
    v = v_cache[tables].transpose(1, 2).flatten(2, 3).float()  # [seqs, kv_heads, keys, dim]
    kv_heads, keys = k.shape[1], k.shape[3]
    grouped = q.float().transpose(1, 2).reshape(seqs, kv_heads, heads // kv_heads, -1, dim) * dim**-0.5
    scores = grouped @ k[:, :, None]
    hidden = torch.arange(keys, device=q.device) > positions[:, None, None, :, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out: torch.Tensor = weights @ v[:, :, None]  # [seqs, kv_heads, group, rows, dim]
    return out.flatten(1, 2).transpose(1, 2)


def _gate(out: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (out.to(dtype).float() * gate.float().sigmoid()).to(dtype).flatten(1)
