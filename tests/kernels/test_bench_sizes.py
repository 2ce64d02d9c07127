"""The sizes that the bench times are those that the model's layers ask for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mstar.arch import layers
from mstar.arch.caches import AttentionCache, GdnCache
from mstar.kernels.bench.__main__ import config_of
from mstar.kernels.bench.sizes import served_sizes
from mstar.kernels.ops import Ops
from mstar.kernels.registry import GemmKey
from mstar.loader.config import FULL, LINEAR
from mstar.loader.sharding import HEAD_RULES, local_shape, weights_of
from mstar.scripts.make_checkpoint import SIZES


class Recorder(Ops):
    """Runs no product: keeps the key of each linear, and gives zeros of its shape."""

    def __init__(self):
        self.keys: list[GemmKey] = []

    def linear(self, x, weight, *, norm=None, eps=0.0, residual=None, out_f32=False):
        kind = (
            "f32" if out_f32 else "norm" if norm is not None else "plain" if residual is None else "residual"
        )
        assert x.shape[1] == weight.inputs
        self.keys.append(GemmKey(kind, x.shape[0], weight.outputs, weight.inputs, "bf16"))
        return torch.zeros(x.shape[0], weight.outputs, dtype=torch.float32 if out_f32 else x.dtype)

    def gated_linear(self, x, weight, *, norm, eps):
        self.keys.append(GemmKey("gated", x.shape[0], weight.outputs // 2, weight.inputs, "bf16"))
        return torch.zeros(x.shape[0], weight.outputs // 2, dtype=x.dtype)

    def gdn(self, proj, weights, *caches_and_rows):
        return torch.zeros(proj.shape[0], weights.value_heads * weights.value_dim, dtype=proj.dtype)

    def attention(self, proj, weights, *caches_and_rows, **options):
        return torch.zeros(proj.shape[0], weights.q_heads * weights.head_dim, dtype=proj.dtype)


@dataclasses.dataclass
class Ranks:
    """A mesh that adds nothing."""

    size: int
    rank: int = 0

    def all_reduce(self, x):
        return x


def layer_keys(config, kind: str, tp: int, rows: int) -> set[GemmKey]:
    """Of one layer whose weights have the loader's shapes."""
    place = f"layers.{config.layer_types.index(kind)}."
    weights = {
        weight.name.removeprefix(place): torch.zeros(1, dtype=torch.bfloat16).expand(
            local_shape(weight, config, 0, tp)
        )
        for weight in weights_of(config)
        if weight.name.startswith(place)
    }
    ops = Recorder()
    layer = layers.Layer(config, kind, weights, tp, ops)
    cache_type = GdnCache if kind == LINEAR else AttentionCache
    cache = cache_type(*[torch.zeros(1) for _ in dataclasses.fields(cache_type)])
    layer(torch.zeros(rows, config.hidden_size, dtype=torch.bfloat16), cache, None, Ranks(tp))
    return set(ops.keys)


@pytest.mark.parametrize("size, tp", [("0.8B", 1), ("0.8B", 4), ("4B", 2)])
def test_sizes_are_what_the_layers_ask_for(size, tp):
    config, rows = config_of(size), 4
    asked = layer_keys(config, LINEAR, tp, rows) | layer_keys(config, FULL, tp, rows)
    asked |= layer_keys(config, FULL, 1, rows)  # the head's layer is whole
    fc = next(rule.shape(config) for rule in HEAD_RULES if rule.name == "fc.weight")
    asked.add(GemmKey("plain", rows, *fc, "bf16"))
    vocab = {config.local(tp).vocab, config.vocab_size}
    asked |= {GemmKey("f32", rows, n, config.hidden_size, "bf16") for n in vocab}
    assert set(served_sizes(config, tp, rows, "bf16")) == asked


def test_sizes_of_the_smallest_model_by_hand():
    named = {key.name: use for key, use in served_sizes(config_of("0.8B"), 1, 1, "bf16").items()}
    assert named == {
        "norm-r1-n8224-k1024-bf16": "gdn in_proj",
        "residual-r1-n1024-k2048-bf16": "gdn out_proj, attention out_proj",
        "norm-r1-n5120-k1024-bf16": "attention in_proj",
        "gated1-r1-n3584-k1024-bf16": "gate_up",
        "residual-r1-n1024-k3584-bf16": "down",
        "f32-r1-n248320-k1024-bf16": "lm_head",
        "plain-r1-n1024-k2048-bf16": "mtp fc",
    }


def test_every_published_size_has_sizes():
    assert all(len(served_sizes(config_of(size), 1, 1, "bf16")) >= 7 for size in SIZES)
