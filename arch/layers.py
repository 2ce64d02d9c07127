"""One decoder layer: a mixer (Gated DeltaNet or gated full attention) and a gated MLP, each with its norm."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from mstar.arch.caches import AttentionCache, GdnCache, LayerCache
from mstar.arch.parallel import Mesh, row_parallel
from mstar.kernels.attention import AttentionWeights
from mstar.kernels.gdn import GdnWeights
from mstar.kernels.ops import Ops, Packed
from mstar.kernels.rows import Rows
from mstar.loader.config import FULL, ModelConfig

Weights = MutableMapping[str, torch.Tensor]


def zero_centred(weight: torch.Tensor) -> torch.Tensor:
    """A norm's multiplier, float32: the checkpoint keeps its distance from one."""
    return weight.float() + 1.0


class GdnMixer:
    """Gated DeltaNet. One projection for Q|K|V, z, b and a: they read the same rows."""

    def __init__(self, config: ModelConfig, weights: Weights, tp_size: int, ops: Ops):
        local = config.local(tp_size)
        parts = [weights.pop(f"in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")]
        self.ops = ops
        self.in_proj = ops.pack_linear(torch.cat(parts))
        self.out_proj = ops.pack_linear(weights.pop("out_proj.weight"))
        self.weights = GdnWeights(
            key_heads=local.linear_key_heads,
            value_heads=local.linear_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv=weights.pop("conv1d.weight")[:, 0].t().float().contiguous(),
            decay=-weights.pop("A_log").float().exp(),
            dt_bias=weights.pop("dt_bias").float(),
            norm=weights.pop("norm.weight").float(),
            eps=config.rms_norm_eps,
        )

    def __call__(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, cache: LayerCache, rows: Rows, mesh: Mesh
    ) -> torch.Tensor:
        """x: [rows, hidden] -> x + mixer(norm(x))."""
        assert isinstance(cache, GdnCache)
        proj = self.ops.linear(x, self.in_proj, norm=norm, eps=eps)
        mixed = self.ops.gdn(proj, self.weights, cache.state, cache.conv, cache.window, rows)
        return row_parallel(self.ops, mesh, mixed, self.out_proj, x)


class AttentionMixer:
    """Gated full attention over paged KV."""

    def __init__(self, config: ModelConfig, weights: Weights, tp_size: int, ops: Ops):
        local = config.local(tp_size)
        self.ops = ops
        self.in_proj = ops.pack_linear(torch.cat([weights.pop(f"{part}_proj.weight") for part in "qkv"]))
        self.out_proj = ops.pack_linear(weights.pop("o_proj.weight"))
        q_norm = zero_centred(weights.pop("q_norm.weight"))
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=q_norm.device)
        self.weights = AttentionWeights(
            q_heads=local.q_heads,
            kv_heads=local.kv_heads,
            head_dim=config.head_dim,
            q_norm=q_norm,
            k_norm=zero_centred(weights.pop("k_norm.weight")),
            inv_freq=1.0 / (config.rope_theta ** (exponents / config.rotary_dim)),
            eps=config.rms_norm_eps,
        )

    def __call__(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, cache: LayerCache, rows: Rows, mesh: Mesh
    ) -> torch.Tensor:
        """x: [rows, hidden] -> x + mixer(norm(x))."""
        assert isinstance(cache, AttentionCache)
        proj = self.ops.linear(x, self.in_proj, norm=norm, eps=eps)
        mixed = self.ops.attention(proj, self.weights, cache.k, cache.v, rows)
        return row_parallel(self.ops, mesh, mixed, self.out_proj, x)


class Layer:
    """Mixer and MLP with their norms and residuals."""

    def __init__(self, config: ModelConfig, kind: str, weights: Weights, tp_size: int, ops: Ops):
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.input_norm = zero_centred(weights.pop("input_layernorm.weight"))
        self.post_norm = zero_centred(weights.pop("post_attention_layernorm.weight"))
        self.mixer: GdnMixer | AttentionMixer
        if kind == FULL:
            self.mixer = AttentionMixer(config, sub_weights(weights, "self_attn."), tp_size, ops)
        else:
            self.mixer = GdnMixer(config, sub_weights(weights, "linear_attn."), tp_size, ops)
        self.gate_up = ops.pack_gated(weights.pop("mlp.gate_proj.weight"), weights.pop("mlp.up_proj.weight"))
        self.down = ops.pack_linear(weights.pop("mlp.down_proj.weight"))
        # as a step reads them, and the norms of their inputs
        self.in_order: tuple[tuple[Packed, torch.Tensor | None], ...] = (
            (self.mixer.in_proj, self.input_norm),
            (self.mixer.out_proj, None),
            (self.gate_up, self.post_norm),
            (self.down, None),
        )

    def __call__(self, x: torch.Tensor, cache: LayerCache, rows: Rows, mesh: Mesh) -> torch.Tensor:
        """x: [rows, hidden], model dtype."""
        x = self.mixer(x, self.input_norm, self.eps, cache, rows, mesh)
        gated = self.ops.gated_linear(x, self.gate_up, norm=self.post_norm, eps=self.eps)
        return row_parallel(self.ops, mesh, gated, self.down, x)


def sub_weights(weights: Weights, prefix: str) -> Weights:
    """Moves the weights under `prefix` to a dict of their own, so that each is freed once packed."""
    return {name[len(prefix) :]: weights.pop(name) for name in list(weights) if name.startswith(prefix)}
