"""The torch reference: chunked delta rule for prefill, recurrent for decode. Formulas: design, section 4.

The chunked form is the one of Yang et al., "Gated Delta Networks" (2024): within a chunk the updates solve
a unit lower triangular system, between chunks the state moves once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mstar.kernels.gdn.weights import GdnWeights
from mstar.kernels.rows import Rows

CHUNK = 64  # rows solved at once; the triangular system grows with its square


def gdn_prefill(
    proj: torch.Tensor, weights: GdnWeights, state: torch.Tensor, conv: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Runs chunks of prompts; moves each sequence's state and conv inputs past its rows.

    proj: [rows, proj_width], model dtype; state: [slots, value_heads, key_dim, value_dim] float32;
    conv: [slots, width - 1, channels], model dtype, both updated in place.
    Returns [rows, value_heads * value_dim] in the model dtype.
    """
    outputs = []
    slots = rows.slots.tolist()
    fresh = rows.fresh.tolist()
    for index, slot in enumerate(slots):
        part = proj[rows.host_cu_rows[index] : rows.host_cu_rows[index + 1]]
        if fresh[index]:
            state[slot].zero_()
            conv[slot].zero_()
        inputs = torch.cat([conv[slot], part[:, : weights.channels]])
        conv[slot] = inputs[-conv.shape[1] :]
        q, k, v = _split(_conv(inputs, weights), weights)
        beta, log_decay = _gates(part, weights)
        out, state[slot] = chunked_delta_rule(q, k, v, beta, log_decay, state[slot])
        outputs.append(_gated_norm(out.to(proj.dtype), part, weights))
    return torch.cat(outputs)


def gdn_decode(
    proj: torch.Tensor,
    weights: GdnWeights,
    state: torch.Tensor,
    conv: torch.Tensor,
    window: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """A few rows a sequence, row by row, all sequences at once; slots are distinct, but for the sink.

    Runs what is pending in the window, then the committed rows, keeps state and conv inputs, then runs the
    drafts on a copy and leaves their inputs in the window. window: [slots, drafts, channels + 2 * value_heads],
    model dtype (Q|K|V before the conv, b, a); proj, state, conv and the result as for `gdn_prefill`.
    """
    slots = rows.slots.long()
    kept = rows.fresh == 0
    s = torch.where(kept[:, None, None, None], state[slots], 0)
    taps = torch.where(kept[:, None, None], conv[slots], 0)
    channels, gates = weights.channels, proj.shape[1] - 2 * weights.value_heads
    counts = rows.cu_rows.diff()
    committed = counts if rows.committed is None else torch.minimum(rows.committed, counts)
    if rows.pending is not None:
        pending = rows.pending * kept
        for index in range(window.shape[1]):
            inputs = window[slots, index]
            s, taps, _ = _step(inputs[:, :channels], inputs[:, channels:], weights, s, taps, pending > index)
    out = proj.new_zeros(proj.shape[0], weights.value_heads * weights.value_dim)
    kept_s, kept_taps = s, taps
    for index in range(rows.rows_per_seq):
        active = counts > index
        at = torch.where(active, rows.cu_rows[:-1] + index, 0)
        part = proj[at]
        s, taps, o = _step(part[:, :channels], part[:, gates:], weights, s, taps, active)
        mixed = _gated_norm(o.to(proj.dtype), part, weights)
        out[at[active]] = mixed[active]
        moved = active & (committed > index)
        kept_s = torch.where(moved[:, None, None, None], s, kept_s)
        kept_taps = torch.where(moved[:, None, None], taps, kept_taps)
        if window.shape[1] == 0:
            continue
        drafts = active & ~moved
        place = (index - committed)[drafts]
        window[slots[drafts], place] = torch.cat([part[:, :channels], part[:, gates:]], 1)[drafts]
    state[slots] = kept_s
    conv[slots] = kept_taps
    return out


def _step(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    weights: GdnWeights,
    state: torch.Tensor,
    taps: torch.Tensor,
    active: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row of every sequence; those not active keep state and taps.

    inputs: [seqs, channels]; gates: [seqs, 2 * value_heads], b|a; state: [seqs, value_heads, key_dim, value_dim];
    taps: [seqs, width - 1, channels]. Returns (state, taps, o [seqs, value_heads, value_dim]).
    """
    line = torch.cat([taps, inputs[:, None]], 1)
    u = (line.float() * weights.conv).sum(1).to(inputs.dtype)
    q, k, v = _split(F.silu(u), weights)
    beta, log_decay = _gates(gates, weights)
    moved = state * log_decay.exp()[..., None, None]
    delta = beta[..., None] * (v - torch.einsum("shkv,shk->shv", moved, k))
    moved = moved + k[..., None] * delta[:, :, None, :]
    out = torch.einsum("shkv,shk->shv", moved, q)
    state = torch.where(active[:, None, None, None], moved, state)
    taps = torch.where(active[:, None, None], line[:, 1:], taps)
    return state, taps, out


def chunked_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    state: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = e^g S_{t-1} + k beta (v - e^g S_{t-1}^T k)^T and o_t = S_t^T q_t, by chunks, in float32.

    q, k: [rows, heads, key_dim], normalised, q scaled; v: [rows, heads, value_dim]; beta, log_decay:
    [rows, heads]; state: [heads, key_dim, value_dim]. Returns ([rows, heads, value_dim], the state after).
    """
    length = q.shape[0]
    pad = -length % chunk  # padded rows have beta 0 and decay 1: they move nothing
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(0, (-1, chunk)).permute(2, 0, 1, 3).contiguous()
        for x in (q, k, v)
    )
    beta, log_decay = (
        F.pad(x, (0, 0, 0, pad)).unflatten(0, (-1, chunk)).permute(2, 0, 1) for x in (beta, log_decay)
    )
    total = log_decay.cumsum(-1)  # [heads, chunks, chunk]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    system = (k * beta[..., None]) @ k.transpose(-1, -2) * decay
    # the solve reads the strict lower part and takes the diagonal as one; powers of `system` would overflow
    right = torch.cat([v * beta[..., None], k * (beta * total.exp())[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_v, new_k = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = q @ k.transpose(-1, -2) * decay
    from_state = q * total.exp()[..., None]
    into_state = k * (total[..., -1:] - total).exp()[..., None]
    outputs = []
    for index in range(q.shape[1]):
        delta = new_v[:, index] - new_k[:, index] @ state
        outputs.append(from_state[:, index] @ state + within[:, index] @ delta)
        carried = total[:, index, -1].exp()[:, None, None] * state
        state = carried + into_state[:, index].transpose(-1, -2) @ delta
    return torch.cat(outputs, 1)[:, :length].transpose(0, 1), state


def _conv(inputs: torch.Tensor, weights: GdnWeights) -> torch.Tensor:
    """silu of the causal depthwise conv; inputs: [width - 1 + rows, channels] -> [rows, channels]."""
    taps = weights.conv.shape[0]
    rows = inputs.shape[0] - taps + 1
    f = inputs.float()
    summed = f[:rows] * weights.conv[0]
    for tap in range(1, taps):
        summed = summed + f[tap : tap + rows] * weights.conv[tap]
    return F.silu(summed.to(inputs.dtype))


def _split(u: torch.Tensor, weights: GdnWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K (one per value head, l2-normalised, q scaled) and V, float32, [rows, value_heads, dim]."""
    keys = weights.key_heads * weights.key_dim
    q, k, v = u.float().split([keys, keys, weights.value_heads * weights.value_dim], -1)
    group = weights.value_heads // weights.key_heads
    heads = []
    for x, scale in ((q, weights.key_dim**-0.5), (k, 1.0)):
        x = x.unflatten(-1, (weights.key_heads, weights.key_dim))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * scale
        heads.append(x.repeat_interleave(group, 1))
    return heads[0], heads[1], v.unflatten(-1, (weights.value_heads, weights.value_dim))


def _gates(proj: torch.Tensor, weights: GdnWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """beta and log decay, float32, [rows, value_heads]. The last columns of `proj` are b|a."""
    b, a = proj[:, -2 * weights.value_heads :].float().chunk(2, -1)
    return b.sigmoid(), weights.decay * F.softplus(a + weights.dt_bias)


def _gated_norm(out: torch.Tensor, proj: torch.Tensor, weights: GdnWeights) -> torch.Tensor:
    """rms norm over the value dim, cast, times w, times silu(z) in float32, cast. out: [rows, heads, dim]."""
    z = proj[:, weights.channels : weights.channels + weights.value_heads * weights.value_dim].float()
    f = out.float()
    normed = (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + weights.eps)).to(out.dtype)
    normed = (normed * weights.norm.to(out.dtype)).float()
    return (normed * F.silu(z).view_as(normed)).to(out.dtype).flatten(1)
