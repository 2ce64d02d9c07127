"""Random checkpoints in the Qwen3.5 layout, small but with the head ratios of the real sizes; and broken ones.

The weights are drawn here by name, in checkpoint terms alone, so that what the loader makes of them can be
compared with what `transformers` makes of them.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mstar.loader import resolve

# Head counts by ratio: 0.8B has q/kv 4:1 and one value head a key head, 4B two, 27B three and q/kv 6:1.
# All of them fit tp 1, 2 and 4; at tp 4 the kv heads are replicated.
SHAPES: dict[str, dict[str, int]] = {
    "0.8B-scaled": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "4B-scaled": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "27B-scaled": {
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
    },
}

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def text_config(shape: str = "0.8B-scaled", **overrides: Any) -> dict[str, Any]:
    """The text part of config.json for one of SHAPES. The vocabulary is odd, so that every tp has to pad it."""
    config: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 144,
        "num_hidden_layers": 4,
        **SHAPES[shape],
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 331,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e5,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 2,
        **overrides,
    }
    if "layer_types" not in config:
        interval = config.get("full_attention_interval", 4)
        config["layer_types"] = [
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(config["num_hidden_layers"])
        ]
    return config


def write_checkpoint(
    path: Path,
    shape: str = "0.8B-scaled",
    *,
    tied: bool = True,
    nested: bool = False,
    dtype: str = "bf16",
    seed: int = 0,
    sharded_files: int = 1,
    prefix: str | None = None,
    with_vision: bool | None = None,
    with_mtp: str = "no",
    tokenizer: bool = False,
    lm_head: bool | None = None,
    **overrides: Any,
) -> Path:
    """Writes a random checkpoint into directory `path` (made if need be) and returns it.

    tied: one matrix for embedding and lm_head. nested: config.json as multimodal checkpoints have it, with a
    `text_config`, the `model.language_model.` prefix and a vision tower unless `prefix` and `with_vision` say
    otherwise. dtype: of the file, "bf16", "fp16" or "fp32" (A_log and dt_bias are float32 in any). More than
    one of `sharded_files` gives an index. with_mtp: "no", "beside" (in the trunk's files) or "sidecar".
    tokenizer: copies the built-in model's, and takes its vocabulary. lm_head: whether its weight is written
    (by default where untied). overrides: fields of the text config.
    """
    path.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        overrides = {"vocab_size": 6144, "eos_token_id": 6137, **overrides}
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(resolve("builtin:tiny") / name, path / name)
    config = text_config(shape, **overrides)
    config["dtype"] = _DTYPE_NAMES[dtype]
    config["tie_word_embeddings"] = tied
    if prefix is None:
        prefix = "model.language_model." if nested else "model."
    generator = torch.Generator().manual_seed(seed)
    write_head = lm_head if lm_head is not None else not tied
    tensors: dict[str, torch.Tensor] = {}
    for name, value in _trunk(config, generator).items():
        if name == "lm_head.weight":
            if write_head:
                tensors[name] = value
        else:
            tensors[prefix + name] = value
    if nested if with_vision is None else with_vision:
        tensors["model.visual.patch_embed.proj.weight"] = torch.randn(8, 3, 2, 4, 4, generator=generator)
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.randn(24, 8, generator=generator)
    head = _head(config, generator)
    if with_mtp == "beside":
        tensors |= head
    elif with_mtp == "sidecar":
        save_file(_cast(head, dtype), path / "model.mtp.safetensors", {"format": "pt"})
    _write_weights(path, _cast(tensors, dtype), sharded_files)
    _write_config(path, config, nested)
    return path


def load_oracle(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as `transformers` loads it, in eval mode; every weight must have come from the files."""
    from transformers import Qwen3_5ForCausalLM

    model, info = Qwen3_5ForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model.eval()


def edit_config(path: Path, **fields: Any) -> None:
    """Sets fields at config.json's top level; a value of `...` removes the field."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for name, value in fields.items():
        config.pop(name, None)
        if value is not ...:
            config[name] = value
    file.write_text(json.dumps(config))


def edit_weights(path: Path, **edits: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors of model.safetensors, by full name with `__` for the dots."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, value in edits.items():
        full_name = name.replace("__", ".")
        tensors.pop(full_name, None)
        if value is not None:
            tensors[full_name] = value
    save_file(tensors, file, {"format": "pt"})


def drop_tensor(path: Path, name: str) -> None:
    edit_weights(path, **{name.replace(".", "__"): None})


def misshape_tensor(path: Path, name: str) -> None:
    """Gives a tensor one row too many."""
    value = load_file(path / "model.safetensors")[name]
    edit_weights(path, **{name.replace(".", "__"): torch.cat([value, value[:1]])})


def truncate_weights(path: Path, drop_bytes: int = 1) -> None:
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - drop_bytes])


def corrupt_header(path: Path) -> None:
    """Overwrites the middle of the header with bytes that are no JSON."""
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[100:110] = b"\xff" * 10
    file.write_bytes(bytes(data))


def _trunk(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Float32 weights by name without prefix, lm_head included, of scales that keep activations near one."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {"embed_tokens.weight": torch.randn(vocab, hidden, generator=generator) * 0.5}
    for index, kind in enumerate(config["layer_types"]):
        mixer = _linear_mixer if kind == "linear_attention" else _full_mixer
        layer = mixer(config, generator) | _around(config, generator)
        tensors |= {f"layers.{index}.{name}": value for name, value in layer.items()}
    tensors["norm.weight"] = _zero_centred(hidden, generator)
    tensors["lm_head.weight"] = torch.randn(vocab, hidden, generator=generator) * 0.3
    return tensors


def _head(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """An MTP head, by full name."""
    hidden = config["hidden_size"]
    layer = _full_mixer(config, generator) | _around(config, generator)
    return {
        "mtp.fc.weight": _linear(hidden, 2 * hidden, generator),
        "mtp.pre_fc_norm_embedding.weight": _zero_centred(hidden, generator),
        "mtp.pre_fc_norm_hidden.weight": _zero_centred(hidden, generator),
        "mtp.norm.weight": _zero_centred(hidden, generator),
    } | {f"mtp.layers.0.{name}": value for name, value in layer.items()}


def _linear_mixer(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, value_heads = config["hidden_size"], config["linear_num_value_heads"]
    values = value_heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    width = config["linear_conv_kernel_dim"]
    # step sizes of 0.01 to 0.3 and decay rates of 1 to 8, as trained models have: memory of a few to a few
    # hundred tokens
    steps = torch.empty(value_heads).uniform_(math.log(0.01), math.log(0.3), generator=generator).exp()
    weights = {
        "in_proj_qkv.weight": _linear(channels, hidden, generator),
        "in_proj_z.weight": _linear(values, hidden, generator),
        "in_proj_b.weight": _linear(value_heads, hidden, generator),
        "in_proj_a.weight": _linear(value_heads, hidden, generator),
        "conv1d.weight": torch.randn(channels, 1, width, generator=generator) * 0.5,
        "A_log": torch.empty(value_heads).uniform_(1, 8, generator=generator).log(),
        "dt_bias": torch.log(torch.expm1(steps)),  # the inverse of softplus
        "norm.weight": 1 + _zero_centred(config["linear_value_head_dim"], generator),
        "out_proj.weight": _linear(hidden, values, generator),
    }
    return {f"linear_attn.{name}": value for name, value in weights.items()}


def _full_mixer(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    weights = {
        "q_proj.weight": _linear(2 * queries, hidden, generator),
        "k_proj.weight": _linear(keys, hidden, generator),
        "v_proj.weight": _linear(keys, hidden, generator),
        "q_norm.weight": _zero_centred(head_dim, generator) + 0.5,
        "k_norm.weight": _zero_centred(head_dim, generator) + 0.5,
        "o_proj.weight": _linear(hidden, queries, generator),
    }
    return {f"self_attn.{name}": value for name, value in weights.items()}


def _around(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What every layer has beside its mixer."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    return {
        "input_layernorm.weight": _zero_centred(hidden, generator),
        "post_attention_layernorm.weight": _zero_centred(hidden, generator),
        "mlp.gate_proj.weight": _linear(intermediate, hidden, generator),
        "mlp.up_proj.weight": _linear(intermediate, hidden, generator),
        "mlp.down_proj.weight": _linear(hidden, intermediate, generator),
    }


def _linear(outputs: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)


def _zero_centred(length: int, generator: torch.Generator) -> torch.Tensor:
    """A norm's weight around zero, far from flat."""
    return torch.randn(length, generator=generator) * 0.3


def _cast(tensors: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    kept = ("A_log", "dt_bias")
    return {
        name: (value if name.endswith(kept) else value.to(DTYPES[dtype])).contiguous()
        for name, value in tensors.items()
    }


def _write_weights(path: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    if files == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = names[number::files]  # neighbours in different files, so that nothing depends on their order
        save_file({name: tensors[name] for name in part}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_config(path: Path, text: dict[str, Any], nested: bool) -> None:
    if nested:
        config: dict[str, Any] = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": text["tie_word_embeddings"],
            "image_token_id": 3,
            "text_config": text,
            "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 8},
        }
    else:
        config = {"architectures": ["Qwen3_5ForCausalLM"], **text}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [text["eos_token_id"], 1]}))
