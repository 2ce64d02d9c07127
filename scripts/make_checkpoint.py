"""Writes a random checkpoint of a real model's shape, for measuring speed; with a planted acceptance if wanted.

    python -m mstar.scripts.make_checkpoint /tmp/m --size 0.8B --scale 4 --acceptance 0.8
    python -m mstar.scripts.make_checkpoint /tmp/m --size 27B --virtual

A planted checkpoint costs what a real one costs, but the next token is a fixed function of the last one, and the
MTP head agrees with it independently with the given probability a token (see `mstar.loader.made`). Its config says
`mstar_planted`, and so does every table of figures made with it. A virtual one has no weight files: each load makes
the same weights from the seed, on its own device.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from mstar.loader import LoadError, Recipe, read_config, resolve
from mstar.loader.checkpoint import TORCH_DTYPES
from mstar.loader.made import HEAD_PREFIX, PREFIX, Maker
from mstar.loader.recipe import FIELD, GENERATOR, PLANTED_FIELD
from mstar.loader.sharding import head_weights_of, weights_of

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Widths of a scaled shape are multiples of this: native operations take no others.
_WIDTH_STEP = 16


@dataclass(frozen=True, slots=True)
class Size:
    """A published model's shape; head_dim 256, linear head dims 128, vocabulary 248,320 in all of them."""

    hidden: int
    layers: int
    heads: tuple[int, int]  # q, kv
    intermediate: int
    linear_heads: tuple[int, int]  # key, value
    tied: bool


SIZES = {
    "0.8B": Size(1024, 24, (8, 2), 3584, (16, 16), True),
    "2B": Size(2048, 24, (8, 2), 6144, (16, 16), True),
    "4B": Size(2560, 32, (16, 4), 9216, (16, 32), True),
    "9B": Size(4096, 32, (16, 4), 12288, (16, 32), False),
    "27B": Size(5120, 64, (24, 4), 17408, (16, 48), False),
}
VOCAB = 248320


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--size", type=click.Choice(list(SIZES)), default="0.8B", show_default=True)
@click.option("--scale", default=1, show_default=True, type=click.IntRange(1), help="Divides all widths.")
@click.option("--layers", type=click.IntRange(4), help="In place of the size's, over --scale.")
@click.option("--vocab", type=click.IntRange(1), help="In place of the size's, over --scale.")
@click.option("--acceptance", type=click.FloatRange(0, 1), help="Plant it: a probability a draft.")
@click.option("--dtype", type=click.Choice(list(_DTYPE_NAMES)), default="bf16", show_default=True)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, (1 << 63) - 1))
@click.option("--virtual", is_flag=True, help="No weight files: every load makes them on its device.")
@click.option("--file-gb", default=2.0, show_default=True, help="Size of a file, and of what is in memory.")
def main(
    directory: Path,
    size: str,
    scale: int,
    layers: int | None,
    vocab: int | None,
    acceptance: float | None,
    dtype: str,
    seed: int,
    virtual: bool,
    file_gb: float,
) -> None:
    """Writes a checkpoint into DIRECTORY, which must be empty or absent."""
    if directory.exists() and any(directory.iterdir()):
        raise click.UsageError(f"{directory} is not empty")
    config = make_config(size, scale, dtype, acceptance, layers, vocab)
    try:
        if virtual:
            write_virtual(directory, config, seed)
            total = 0
        else:
            total = write_checkpoint(directory, config, seed, int(file_gb * 1e9), click.echo)
    except (LoadError, OSError) as error:
        raise click.ClickException(f"{error}") from error
    planted = "" if acceptance is None else f", PLANTED acceptance {acceptance:g}"
    weights = "no weight files, made at each load" if virtual else f"{total / 1e9:.2f} GB"
    click.echo(f"{directory}: {size}{f' / {scale}' if scale > 1 else ''}, {weights}{planted}")


def make_config(
    size: str,
    scale: int = 1,
    dtype: str = "bf16",
    acceptance: float | None = None,
    layers: int | None = None,
    vocab: int | None = None,
) -> dict[str, Any]:
    """config.json of a size, its widths, layers and vocabulary divided by `scale`; the heads stay as many."""
    shape = SIZES[size]
    head_dim = _divided(256, scale)
    rotary_half = head_dim // 8
    tokenizer_ids = read_config(resolve("builtin:tiny")).vocab_size
    count = layers or max(4, shape.layers // scale // 4 * 4)
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": _divided(shape.hidden, scale),
        "intermediate_size": _divided(shape.intermediate, scale),
        "num_hidden_layers": count,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(count)],
        "num_attention_heads": shape.heads[0],
        "num_key_value_heads": shape.heads[1],
        "head_dim": head_dim,
        "linear_num_key_heads": shape.linear_heads[0],
        "linear_num_value_heads": shape.linear_heads[1],
        "linear_key_head_dim": _divided(128, scale),
        "linear_value_head_dim": _divided(128, scale),
        "linear_conv_kernel_dim": 4,
        "vocab_size": vocab or max(tokenizer_ids, VOCAB // scale),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": shape.tied and acceptance is None,
        "max_position_embeddings": 65536,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [
                rotary_half - 2 * (rotary_half // 3),
                rotary_half // 3,
                rotary_half // 3,
            ],
            "mrope_interleaved": True,
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "dtype": _DTYPE_NAMES[dtype],
        **({} if acceptance is None else {PLANTED_FIELD: acceptance}),
    }


def write_checkpoint(
    directory: Path, config: dict[str, Any], seed: int, file_bytes: int, say: Callable[[str], None]
) -> int:
    """Writes config, tokenizer and weights, file by file; returns the weights' bytes.

    config: as `make_config` gives it; the tokenizer is the built-in model's. Ids past its vocabulary have no text.
    Raises OSError when the disk has no room for it.
    """
    _write_beside(directory, config)
    parsed = read_config(directory)
    dtype = TORCH_DTYPES[parsed.dtype]
    named = [(PREFIX + weight.name, weight) for weight in weights_of(parsed)]
    named += [(HEAD_PREFIX + weight.name, weight) for weight in head_weights_of(parsed)]
    item = dtype.itemsize
    total = sum(math.prod(weight.shape) * (4 if weight.rule.float32 else item) for _, weight in named)
    free = shutil.disk_usage(directory).free
    if total > free:
        raise OSError(f"{directory} has {free / 1e9:.1f} GB free, and the weights take {total / 1e9:.1f}")
    maker = Maker(Recipe(seed, config.get(PLANTED_FIELD), parsed.dtype), parsed, dtype)
    values = ((name, maker.whole(name, weight)) for name, weight in named)
    _write_files(directory, values, total, file_bytes, say)
    return total


def write_virtual(directory: Path, config: dict[str, Any], seed: int) -> None:
    """Writes all but the weights; loads make those that `write_checkpoint` would write."""
    _write_beside(directory, {**config, FIELD: {"generator": GENERATOR, "seed": seed}})


def _write_beside(directory: Path, config: dict[str, Any]) -> None:
    """What stands beside the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    builtin = resolve("builtin:tiny")
    for name in TOKENIZER:
        shutil.copyfile(builtin / name, directory / name)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_files(
    directory: Path,
    values: Iterator[tuple[str, torch.Tensor]],
    total: int,
    file_bytes: int,
    say: Callable[[str], None],
) -> None:
    """Files of about `file_bytes`, each written as soon as it is full, and their index."""
    places: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    held = number = 0

    def flush() -> None:
        nonlocal held, number
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(part, directory / file, {"format": "pt"})
        places.update(dict.fromkeys(part, file))
        say(f"{file}: {len(part)} weights, {held / 1e9:.2f} GB")
        part.clear()
        held = 0

    for name, value in values:
        part[name] = value
        held += value.nbytes
        if held >= file_bytes:
            flush()
    if part:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _divided(width: int, scale: int) -> int:
    return max(_WIDTH_STEP, round(width / scale / _WIDTH_STEP) * _WIDTH_STEP)


if __name__ == "__main__":
    main()
