"""The model's shape: what `config.json` says, nested or flat, checked and typed. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.loader.errors import LoadError, listed, shown
from mstar.loader.fields import Fields, read_json_map

LINEAR = "linear_attention"
FULL = "full_attention"

DTYPES = ("bf16", "fp16", "fp32")

# The fields that a load's `overrides` may set, by the names of config.json.
OVERRIDABLE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "full_attention_interval",
    "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    "vocab_size", "rms_norm_eps", "rope_theta", "partial_rotary_factor", "max_position_embeddings",
    "tie_word_embeddings", "dtype", "eos_token_id", "mtp_num_hidden_layers",
)  # fmt: skip

_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
_ARCHITECTURES = (
    "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5TextModel", "Qwen3_5Model",
)  # fmt: skip
_DTYPE_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32",
}  # fmt: skip
# "mrope" is how older multimodal configs say default: without images its positions are equal.
_ROPE_TYPES = ("default", "mrope")

# Far above any model of the family, and low enough that sizes made of them stay sane.
_MAX_LAYERS = 1024
_MAX_HEADS = 1024
_MAX_HEAD_DIM = 4096
_MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalShape:
    """What one rank of a mesh holds; every rank holds the same amount."""

    q_heads: int
    kv_heads: int
    linear_key_heads: int
    linear_value_heads: int
    intermediate: int
    vocab: int  # rows of embedding and lm_head, the last rank's padding included

    conv_channels: int  # Q|K|V of the linear layers: 2 * key heads * key dim + value heads * value dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Qwen3.5-family text trunk. Field names are those of config.json."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # the checkpoint's: "bf16", "fp16" or "fp32"
    eos_token_ids: tuple[int, ...]
    # What the config says of its MTP head, None where it says nothing: the weights say whether there is one.
    mtp_num_hidden_layers: int | None = None
    mtp_use_dedicated_embeddings: bool = False

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def local(self, tp_size: int) -> LocalShape:
        """Shapes on one of `tp_size` ranks; `tp_size` must fit (see sharding.check_tp)."""
        key_heads = self.linear_num_key_heads // tp_size
        value_heads = self.linear_num_value_heads // tp_size
        return LocalShape(
            q_heads=self.num_attention_heads // tp_size,
            kv_heads=max(1, self.num_key_value_heads // tp_size),
            linear_key_heads=key_heads,
            linear_value_heads=value_heads,
            intermediate=self.intermediate_size // tp_size,
            vocab=-(-self.vocab_size // tp_size),
            conv_channels=2 * key_heads * self.linear_key_head_dim + value_heads * self.linear_value_head_dim,
        )


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of the checkpoint in directory `path`, with `overrides` (fields of config.json) on top.

    Raises LoadError: `unsupported` for another architecture or a variant that is not built, `validation` for
    everything missing, mistyped or inconsistent; `field` names it.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise LoadError("validation", f"{directory} is not a directory with a checkpoint", "model")
    if not (directory / "config.json").is_file():
        raise LoadError("validation", f"{directory} has no config.json, so it is not a checkpoint", "model")
    top = read_json_map(directory / "config.json")
    generation = {}
    if (directory / "generation_config.json").is_file():
        generation = read_json_map(directory / "generation_config.json")
    return parse_config(top, generation, overrides or {})


def parse_config(
    top: Mapping[str, Any], generation: Mapping[str, Any], overrides: Mapping[str, Any]
) -> ModelConfig:
    """`read_config` on what config.json and generation_config.json hold."""
    _check_overrides(overrides)
    nested = Fields(top, {}).mapping("text_config")
    _check_architecture(top, nested)
    fields = Fields(_flatten(top, nested), overrides)
    _check_variant(fields)

    q_heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, _MAX_HEADS)
    if q_heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({q_heads})")
    key_heads = fields.integer("linear_num_key_heads", 1, _MAX_HEADS, default=16)
    value_heads = fields.integer("linear_num_value_heads", 1, _MAX_HEADS, default=32)
    if value_heads % key_heads:
        raise fields.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    head_dim = fields.integer("head_dim", 2, _MAX_HEAD_DIM, default=256)
    partial = fields.number("partial_rotary_factor", 0, 1, default=0.25)
    if int(head_dim * partial) < 2 or int(head_dim * partial) % 2:
        raise fields.wrong(
            "partial_rotary_factor", f"such that it turns an even part of head_dim ({head_dim})"
        )
    vocab = fields.integer("vocab_size", 1, 1 << 24)
    return ModelConfig(
        hidden_size=fields.integer("hidden_size", 1, _MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", 1, _MAX_WIDTH),
        layer_types=_layer_types(fields),
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=fields.integer("linear_key_head_dim", 1, _MAX_HEAD_DIM, default=128),
        linear_value_head_dim=fields.integer("linear_value_head_dim", 1, _MAX_HEAD_DIM, default=128),
        linear_conv_kernel_dim=fields.integer("linear_conv_kernel_dim", 2, 16, default=4),
        vocab_size=vocab,
        rms_norm_eps=fields.number("rms_norm_eps", 0, 1, default=1e-6),
        rope_theta=fields.number("rope_theta", 0, 1e15, default=1e4),
        partial_rotary_factor=partial,
        max_position_embeddings=fields.integer("max_position_embeddings", 1, 1 << 30, default=32768),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        dtype=_dtype(fields),
        eos_token_ids=_eos_ids(fields, top, generation, vocab),
        mtp_num_hidden_layers=_mtp_layers(fields),
        mtp_use_dedicated_embeddings=fields.boolean("mtp_use_dedicated_embeddings", default=False),
    )


def resolve_dtype(requested: str, config: ModelConfig) -> str:
    """The dtype that a load runs in: "bf16", "fp16" or "fp32"; "auto" is the checkpoint's."""
    if requested == "auto":
        return config.dtype
    if requested not in DTYPES:
        raise LoadError(
            "validation", f"dtype must be auto, {', '.join(DTYPES)}, not {shown(requested)}", "dtype"
        )
    return requested


def _check_overrides(overrides: Mapping[str, Any]) -> None:
    for name in overrides:
        if name not in OVERRIDABLE:
            message = (
                f"no config field {shown(name)} can be overridden; these can: {listed(list(OVERRIDABLE))}"
            )
            raise LoadError("validation", message, f"overrides.{name}"[:120])


def _check_architecture(top: Mapping[str, Any], nested: Mapping[str, Any] | None) -> None:
    """Refuses by name what is not a dense Qwen3.5 text model."""
    known = f"mstar serves the dense Qwen3.5 family ({', '.join(_MODEL_TYPES)})"
    levels = [Fields(level, {}) for level in (top, nested) if level is not None]
    types = [(level, level.text("model_type", "")) for level in levels]
    for level, model_type in types:
        if model_type and model_type not in _MODEL_TYPES:
            raise level.unsupported("model_type", known)
    if not any(model_type for _, model_type in types):
        raise levels[0].wrong("model_type", f"given: {known}")
    architectures = levels[0].sequence("architectures", 16)
    if architectures and not any(name in _ARCHITECTURES for name in architectures if isinstance(name, str)):
        raise levels[0].unsupported("architectures", f"mstar serves {', '.join(_ARCHITECTURES)}")
    for level in levels:
        if level.get("quantization_config") is not None:
            raise level.unsupported("quantization_config", "load the bf16, fp16 or fp32 checkpoint instead")


def _flatten(top: Mapping[str, Any], nested: Mapping[str, Any] | None) -> dict[str, Any]:
    """The text model's fields in one map, today's and older spellings folded into one name each.

    dtype: the text level wins over the top one, and a config that names none is read as bf16, in which the
    family is published. Tying: multimodal checkpoints say it at either level, and tools that fill in the other
    write its default, false: one true is enough.
    """
    text = dict(top if nested is None else nested)
    written = [level.get(name) for level in (text, top) for name in ("dtype", "torch_dtype")]
    text["dtype"] = next((value for value in written if value is not None), None)
    tied = [Fields(level, {}).boolean("tie_word_embeddings", default=False) for level in (text, top)]
    text["tie_word_embeddings"] = any(tied)
    # older configs: rope_scaling, with rope_theta beside it
    ropes = [Fields(text, {}).mapping(name) or {} for name in ("rope_parameters", "rope_scaling")]
    for rope in ropes:
        if any(isinstance(value, dict) for value in rope.values()):
            nested_rope = Fields({"rope_parameters": rope}, {})
            raise nested_rope.unsupported("rope_parameters", "one set serves all layers")
    for name in ("rope_theta", "partial_rotary_factor"):
        text[name] = next((rope[name] for rope in ropes if rope.get(name) is not None), text.get(name))
    types = [rope[name] for rope in ropes for name in ("rope_type", "type") if rope.get(name) is not None]
    text["rope_type"] = next((kind for kind in types if kind not in _ROPE_TYPES), None)
    return text


def _check_variant(fields: Fields) -> None:
    """Refuses by name the variants of the architecture that would silently compute something else."""
    for name in ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if fields.get(name):
            raise fields.unsupported(name, "mixture-of-experts layers are not built")
    if fields.boolean("attention_bias", default=False):
        raise fields.unsupported("attention_bias", "the projections have no biases")
    if not fields.boolean("attn_output_gate", default=True):
        raise fields.unsupported("attn_output_gate", "full attention is always gated")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "only silu is")
    if fields.get("rope_type") is not None:
        raise fields.unsupported("rope_type", "only default is")


def _layer_types(fields: Fields) -> tuple[str, ...]:
    named = fields.sequence("layer_types", _MAX_LAYERS)
    if named is not None and fields.path("full_attention_interval") == "full_attention_interval":
        for kind in named:
            if kind not in (LINEAR, FULL):
                raise fields.wrong("layer_types", f"a list of {LINEAR} and {FULL}")
        if fields.integer("num_hidden_layers", 1, _MAX_LAYERS, default=len(named)) != len(named):
            raise fields.wrong("num_hidden_layers", f"the length of layer_types ({len(named)})")
        types = tuple(named)
    else:
        layers = fields.integer("num_hidden_layers", 1, _MAX_LAYERS)
        interval = fields.integer("full_attention_interval", 1, _MAX_LAYERS, default=4)
        types = tuple(FULL if (index + 1) % interval == 0 else LINEAR for index in range(layers))
    if not (LINEAR in types and FULL in types):
        name = "layer_types" if named is not None else "num_hidden_layers"
        raise fields.unsupported(name, "a model of this family has linear and full attention layers")
    return types


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", "bfloat16").removeprefix("torch.")
    if name not in _DTYPE_NAMES:
        raise fields.wrong("dtype", f"one of {', '.join(_DTYPE_NAMES)}")
    return _DTYPE_NAMES[name]


def _mtp_layers(fields: Fields) -> int | None:
    if fields.get("mtp_num_hidden_layers") is None:
        return None
    return fields.integer("mtp_num_hidden_layers", 0, 64)


def _eos_ids(
    fields: Fields, top: Mapping[str, Any], generation: Mapping[str, Any], vocab: int
) -> tuple[int, ...]:
    """Every id that ends a turn: the config's at either level and generation_config's, or the override's."""
    sources = [fields]
    if fields.path("eos_token_id") == "eos_token_id":
        sources += [Fields(top, {}), Fields(generation, {})]
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for token in ids[:1024]:
            if type(token) is not int or not 0 <= token < vocab:
                raise source.wrong(
                    "eos_token_id", f"a token id below vocab_size ({vocab}), or a list of them"
                )
            found[token] = None
    return tuple(found)
