"""How a mesh cuts the weights: one table that says, for every weight, which rows or columns a rank holds.

A weight is cut along one dimension, which is a sequence of parts, and every part is cut on its own by whole
units (heads, channels, vocabulary rows): a fused projection of Q, K and V is never cut at its midpoint.
No torch here: the daemon checks a tp before any process is started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mstar.loader.config import FULL, LINEAR, ModelConfig
from mstar.loader.errors import LoadError, shown

MAX_TP = 16


@dataclass(frozen=True, slots=True)
class Part:
    """`units` of `width` neighbouring rows (or columns) that stay together.

    With more ranks than units, neighbouring ranks hold the same unit (kv heads). `padded` parts need not
    divide: every rank holds the same number of units and the last ones hold zeros past the end (vocabulary).
    """

    units: int
    width: int = 1
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank takes of a weight along `dim`: [start, stop) ranges in order, then `padding` of zeros."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.ranges) + self.padding


@dataclass(frozen=True, slots=True)
class WeightRule:
    """One row of the table. shape: of the whole weight. dim: the one that is cut, None if none is."""

    name: str  # as in checkpoints, without prefix; {i} is the layer
    layers: str | None  # LINEAR, FULL or "any" for layers' weights; None for the model's own
    shape: Callable[[ModelConfig], tuple[int, ...]]
    dim: int | None = None
    parts: Callable[[ModelConfig], tuple[Part, ...]] | None = None
    float32: bool = False  # kept in float32 whatever the load's dtype


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of one config: its canonical name, whole shape and rule."""

    name: str
    shape: tuple[int, ...]
    rule: WeightRule


def _vocab(c: ModelConfig) -> tuple[Part, ...]:
    return (Part(c.vocab_size, padded=True),)


def _q_heads(c: ModelConfig) -> tuple[Part, ...]:
    return (Part(c.num_attention_heads, c.head_dim),)


def _gated_q_heads(c: ModelConfig) -> tuple[Part, ...]:
    return (Part(c.num_attention_heads, 2 * c.head_dim),)  # [q | gate] of one head are neighbours


def _kv_heads(c: ModelConfig) -> tuple[Part, ...]:
    return (Part(c.num_key_value_heads, c.head_dim),)


def _value_heads(c: ModelConfig) -> tuple[Part, ...]:
    return (Part(c.linear_num_value_heads),)


def _value_channels(c: ModelConfig) -> tuple[Part, ...]:
    return (Part(c.linear_num_value_heads, c.linear_value_head_dim),)


def _qkv_channels(c: ModelConfig) -> tuple[Part, ...]:
    keys = Part(c.linear_num_key_heads, c.linear_key_head_dim)
    return (keys, keys, *_value_channels(c))


def _intermediate(c: ModelConfig) -> tuple[Part, ...]:
    return (Part(c.intermediate_size),)


def _total(parts: Callable[[ModelConfig], tuple[Part, ...]], c: ModelConfig) -> int:
    return sum(part.units * part.width for part in parts(c))


def _columns(name: str, layers: str | None, parts: Callable[[ModelConfig], tuple[Part, ...]]) -> WeightRule:
    """A column-parallel projection: [outputs, hidden], the outputs cut."""
    return WeightRule(name, layers, lambda c: (_total(parts, c), c.hidden_size), 0, parts)


def _rows(name: str, layers: str, parts: Callable[[ModelConfig], tuple[Part, ...]]) -> WeightRule:
    """A row-parallel projection: [hidden, inputs], the inputs cut; an all-reduce adds the ranks' outputs."""
    return WeightRule(name, layers, lambda c: (c.hidden_size, _total(parts, c)), 1, parts)


def _per_value_head(name: str) -> WeightRule:
    """[value heads], in float32: the decay is exponential in it."""
    return WeightRule(name, LINEAR, lambda c: (c.linear_num_value_heads,), 0, _value_heads, float32=True)


def _whole(name: str, layers: str | None, length: Callable[[ModelConfig], int]) -> WeightRule:
    return WeightRule(name, layers, lambda c: (length(c),))


_LAYER = "layers.{i}."
RULES: tuple[WeightRule, ...] = (
    _columns("embed_tokens.weight", None, _vocab),
    _whole(_LAYER + "input_layernorm.weight", "any", lambda c: c.hidden_size),
    _columns(_LAYER + "linear_attn.in_proj_qkv.weight", LINEAR, _qkv_channels),
    _columns(_LAYER + "linear_attn.in_proj_z.weight", LINEAR, _value_channels),
    _columns(_LAYER + "linear_attn.in_proj_b.weight", LINEAR, _value_heads),
    _columns(_LAYER + "linear_attn.in_proj_a.weight", LINEAR, _value_heads),
    WeightRule(
        _LAYER + "linear_attn.conv1d.weight",
        LINEAR,
        lambda c: (_total(_qkv_channels, c), 1, c.linear_conv_kernel_dim),
        0,
        _qkv_channels,
    ),
    _per_value_head(_LAYER + "linear_attn.A_log"),
    _per_value_head(_LAYER + "linear_attn.dt_bias"),
    _whole(_LAYER + "linear_attn.norm.weight", LINEAR, lambda c: c.linear_value_head_dim),
    _rows(_LAYER + "linear_attn.out_proj.weight", LINEAR, _value_channels),
    _columns(_LAYER + "self_attn.q_proj.weight", FULL, _gated_q_heads),
    _columns(_LAYER + "self_attn.k_proj.weight", FULL, _kv_heads),
    _columns(_LAYER + "self_attn.v_proj.weight", FULL, _kv_heads),
    _whole(_LAYER + "self_attn.q_norm.weight", FULL, lambda c: c.head_dim),
    _whole(_LAYER + "self_attn.k_norm.weight", FULL, lambda c: c.head_dim),
    _rows(_LAYER + "self_attn.o_proj.weight", FULL, _q_heads),
    _whole(_LAYER + "post_attention_layernorm.weight", "any", lambda c: c.hidden_size),
    _columns(_LAYER + "mlp.gate_proj.weight", "any", _intermediate),
    _columns(_LAYER + "mlp.up_proj.weight", "any", _intermediate),
    _rows(_LAYER + "mlp.down_proj.weight", "any", _intermediate),
    _whole("norm.weight", None, lambda c: c.hidden_size),
    _columns("lm_head.weight", None, _vocab),
)

HEAD_RULES: tuple[WeightRule, ...] = (
    WeightRule("fc.weight", None, lambda c: (c.hidden_size, 2 * c.hidden_size)),
    _whole("pre_fc_norm_embedding.weight", None, lambda c: c.hidden_size),
    _whole("pre_fc_norm_hidden.weight", None, lambda c: c.hidden_size),
    _whole("norm.weight", None, lambda c: c.hidden_size),
)


def weights_of(config: ModelConfig) -> Iterator[Weight]:
    """Every weight of the trunk, `lm_head.weight` only where it is not the embedding's."""
    for rule in RULES:
        if rule.layers is None:
            if not (rule.name == "lm_head.weight" and config.tie_word_embeddings):
                yield Weight(rule.name, rule.shape(config), rule)
            continue
        for index, kind in enumerate(config.layer_types):
            if rule.layers in ("any", kind):
                yield Weight(rule.name.format(i=index), rule.shape(config), rule)


def head_weights_of(config: ModelConfig) -> Iterator[Weight]:
    """Every weight of the MTP head, without `mtp.`: it has one full-attention layer and is never cut."""
    for rule in HEAD_RULES:
        yield Weight(rule.name, rule.shape(config), rule)
    for rule in RULES:
        if rule.layers in ("any", FULL):
            yield Weight(rule.name.format(i=0), rule.shape(config), rule)


def cut(rule: WeightRule, config: ModelConfig, rank: int, size: int) -> Cut | None:
    """What rank `rank` of `size` holds of a weight; None when it holds all of it."""
    if rule.dim is None or rule.parts is None:
        return None
    ranges = []
    begin = padding = 0
    for part in rule.parts(config):
        first, count, missing = _share(part, rank, size)
        ranges.append((begin + first * part.width, begin + (first + count) * part.width))
        begin += part.units * part.width
        padding += missing * part.width
    return Cut(rule.dim, tuple(ranges), padding)


def local_shape(weight: Weight, config: ModelConfig, rank: int, size: int) -> tuple[int, ...]:
    """The shape of a rank's slice of a weight, padding included; the same on every rank."""
    taken = cut(weight.rule, config, rank, size)
    if taken is None:
        return weight.shape
    return (*weight.shape[: taken.dim], taken.length, *weight.shape[taken.dim + 1 :])


def shard_bytes(config: ModelConfig, size: int, dtype: str) -> int:
    """Bytes of one rank's weights in dtype "bf16", "fp16" or "fp32"; the same on every rank."""
    item = 4 if dtype == "fp32" else 2
    return sum(
        math.prod(local_shape(weight, config, 0, size)) * (4 if weight.rule.float32 else item)
        for weight in weights_of(config)
    )


def fitting_tp(config: ModelConfig) -> list[int]:
    """The tensor parallel sizes up to MAX_TP that this model can be cut into."""
    return [size for size in range(1, MAX_TP + 1) if not _misfits(config, size)]


def check_tp(config: ModelConfig, tp: int) -> None:
    """Refuses a tp that the model's heads do not divide by, before any weight is read."""
    fits = f"tp can be {', '.join(map(str, fitting_tp(config)))} for this model"
    if type(tp) is not int or not 1 <= tp <= MAX_TP:
        raise LoadError(
            "validation", f"tp must be an integer from 1 to {MAX_TP}, not {shown(tp)}; {fits}", "tp"
        )
    misfits = _misfits(config, tp)
    if misfits:
        raise LoadError("validation", f"tp {tp} does not divide {' and '.join(misfits)}; {fits}", "tp")


def _share(part: Part, rank: int, size: int) -> tuple[int, int, int]:
    """(first unit, units, units of padding) of one rank's share of a part."""
    if part.padded:
        each = -(-part.units // size)
        first = min(rank * each, part.units)
        count = min(each, part.units - first)
        return first, count, each - count
    if size > part.units:
        return rank * part.units // size, 1, 0
    each = part.units // size
    return rank * each, each, 0


def _misfits(config: ModelConfig, tp: int) -> list[str]:
    must_divide = (
        "num_attention_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "intermediate_size",
    )
    misfits = [f"{name} ({getattr(config, name)})" for name in must_divide if getattr(config, name) % tp != 0]
    kv_heads = config.num_key_value_heads
    if kv_heads % tp and tp % kv_heads:
        misfits.append(f"num_key_value_heads ({kv_heads}), nor is it a multiple of them")
    return misfits
