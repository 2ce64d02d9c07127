"""The linear layers that a model serves, as keys of the registry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mstar.kernels.registry import GemmKey


class LocalShape(Protocol):
    """What one rank holds: `mstar.loader.config.LocalShape`."""

    @property
    def q_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def linear_value_heads(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def conv_channels(self) -> int: ...


class Shape(Protocol):
    """A model's shape: `mstar.loader.config.ModelConfig`."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def linear_value_head_dim(self) -> int: ...
    def local(self, tp_size: int) -> LocalShape: ...


def served_sizes(config: Shape, tp: int, rows: int, dtype: str) -> dict[GemmKey, str]:
    """Every size of a decode step at a row bucket, trunk and MTP head, and what uses it.

    On more ranks the row-parallel products are float32 and added up by the ranks; the head stays whole on one.
    """
    uses: dict[GemmKey, list[str]] = {}
    for use, kind, n, k in [*_trunk(config, tp), *_head(config)]:
        named = uses.setdefault(GemmKey(kind, rows, n, k, dtype), [])
        if use not in named:
            named.append(use)
    return {key: ", ".join(named) for key, named in uses.items()}


Size = tuple[str, str, int, int]  # use, kind, outputs, inputs


def _trunk(config: Shape, tp: int) -> Iterable[Size]:
    hidden, local = config.hidden_size, config.local(tp)
    values = local.linear_value_heads * config.linear_value_head_dim
    summed = "residual" if tp == 1 else "f32"
    yield "gdn in_proj", "norm", local.conv_channels + values + 2 * local.linear_value_heads, hidden
    yield "gdn out_proj", summed, hidden, values
    yield from _attention_layer(config, tp)
    yield "lm_head", "f32", local.vocab, hidden


def _attention_layer(config: Shape, tp: int) -> Iterable[Size]:
    hidden, local = config.hidden_size, config.local(tp)
    summed = "residual" if tp == 1 else "f32"
    heads = 2 * local.q_heads + 2 * local.kv_heads  # a query head brings its gate
    yield "attention in_proj", "norm", heads * config.head_dim, hidden
    yield "attention out_proj", summed, hidden, local.q_heads * config.head_dim
    yield "gate_up", "gated", local.intermediate, hidden
    yield "down", summed, hidden, local.intermediate


def _head(config: Shape) -> Iterable[Size]:
    yield "mtp fc", "plain", config.hidden_size, 2 * config.hidden_size
    yield from _attention_layer(config, 1)
    yield "lm_head", "f32", config.local(1).vocab, config.hidden_size
