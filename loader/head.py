"""Reads what the rank that drafts holds beside its shard: the MTP head, and the vocabulary's matrices whole."""

from __future__ import annotations

from pathlib import Path

import torch

from mstar.loader.checkpoint import Progress, read_sources
from mstar.loader.config import ModelConfig
from mstar.loader.manifest import read_head_manifest, read_manifest


def load_head(
    path: str | Path,
    config: ModelConfig,
    dtype: str | torch.dtype,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """The MTP head's weights, from the trunk's files or the sidecar, whole.

    On `device` (none: the CPU).

    Keys are checkpoint names without `mtp.`: `fc.weight` [hidden, 2 * hidden] (the embedding's half first),
    `pre_fc_norm_embedding.weight`, `pre_fc_norm_hidden.weight`, `norm.weight`, and those of one full-attention
    layer (`layers.0.self_attn.q_proj.weight`). Tensors own their memory and have `dtype`. Raises LoadError as
    `manifest.read_head_manifest` does.
    """
    return read_sources(read_head_manifest(path, config), config, 0, 1, dtype, progress, device)


def load_vocab(
    path: str | Path,
    config: ModelConfig,
    dtype: str | torch.dtype,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Embedding and lm_head with every row, [vocab, hidden] each, for a rank whose shard has a part of them.

    On `device` (none: the CPU). The second is None where the embedding serves as both. Raises LoadError
    as `manifest.read_manifest` does.
    """
    wanted = ("embed_tokens.weight", "lm_head.weight")
    sources = [source for source in read_manifest(path, config) if source.weight.name in wanted]
    weights = read_sources(sources, config, 0, 1, dtype, progress, device)
    return weights["embed_tokens.weight"], weights.get("lm_head.weight")
