"""The tensors that outlive a step: paged KV for full attention, slots of state for Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mstar.kernels.gdn.rings import ring_rows
from mstar.loader.config import ModelConfig

# Slot 0 and block 0 are sinks: padding rows read and write them, no request owns them.
SINK = 0


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """One full-attention layer's paged KV on this rank.

    k: [blocks, kv_heads, head_dim, block_size], model dtype: keys of a block lie side by side, so scores of
       a block are a broadcast of q against contiguous keys, without sums across lanes.
    v: [blocks, kv_heads, block_size, head_dim], model dtype.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class GdnCache:
    """One Gated DeltaNet layer's state slots on this rank.

    state: [slots, value_heads, key_dim, value_dim] float32, S of the delta rule.
    conv: [slots, width - 1, conv_channels] model dtype, the last inputs of the causal conv, oldest first.
    window: [slots, drafts, conv_channels + 2 * value_heads] model dtype, the inputs (Q|K|V before the conv, b, a)
       of the latest step's draft rows: those that were accepted are replayed by the next step.

    Where operations keep rings (`Ops.ring`, the Triton kernels), position p is at index p % ring_rows instead:
    conv: [slots, ring_rows, conv_channels], window: [slots, ring_rows, 2 * value_heads] (b, a; no rows in a load
    without drafts). A new position never takes the place of one that another program of the launch still reads.
    """

    state: torch.Tensor
    conv: torch.Tensor
    window: torch.Tensor


LayerCache = AttentionCache | GdnCache


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Bytes on one rank: of one KV block over all layers, and of one GDN slot over all layers."""

    block_bytes: int
    slot_bytes: int


def _window_shapes(
    config: ModelConfig, tp_size: int, drafts: int, ring: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a slot's `conv` and `window`."""
    local, width = config.local(tp_size), config.linear_conv_kernel_dim
    gates = 2 * local.linear_value_heads
    if ring:
        rows = ring_rows(drafts, width)
        return (rows, local.conv_channels), (rows if drafts else 0, gates)
    return (width - 1, local.conv_channels), (drafts, local.conv_channels + gates)


def cache_sizes(
    config: ModelConfig,
    tp_size: int,
    dtype: torch.dtype,
    block_size: int,
    drafts: int = 0,
    ring: bool = False,
) -> CacheSizes:
    """What a block and a slot cost on each rank of a mesh of `tp_size`; drafts: the most rows of a window."""
    local = config.local(tp_size)
    full = config.layer_types.count("full_attention")
    linear = len(config.layer_types) - full
    item = dtype.itemsize
    block = full * 2 * local.kv_heads * config.head_dim * block_size * item
    state = local.linear_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
    windows = sum(rows * columns * item for rows, columns in _window_shapes(config, tp_size, drafts, ring))
    return CacheSizes(block_bytes=block, slot_bytes=linear * (state + windows))


def head_block_bytes(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """What a block costs in the MTP head's KV, on the rank that has the head."""
    return 2 * config.num_key_value_heads * config.head_dim * block_size * dtype.itemsize


def head_cache(
    config: ModelConfig, *, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionCache:
    """The MTP head's KV, zeroed: one layer with all its heads, in the blocks of the trunk's."""
    heads, dim = config.num_key_value_heads, config.head_dim
    k = torch.zeros(blocks, heads, dim, block_size, dtype=dtype, device=device)
    return AttentionCache(k, torch.zeros(blocks, heads, block_size, dim, dtype=dtype, device=device))


def allocate_caches(
    config: ModelConfig,
    tp_size: int,
    *,
    blocks: int,
    block_size: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    drafts: int = 0,
    ring: bool = False,
) -> list[LayerCache]:
    """Zeroed caches of every layer in order. `blocks` and `slots` count the sinks; drafts: the most a step checks.

    ring: whether the operations keep rings, see `GdnCache`.
    """
    local = config.local(tp_size)
    conv_shape, window_shape = _window_shapes(config, tp_size, drafts, ring)
    caches: list[LayerCache] = []
    for kind in config.layer_types:
        if kind == "full_attention":
            heads, dim = local.kv_heads, config.head_dim
            k = torch.zeros(blocks, heads, dim, block_size, dtype=dtype, device=device)
            v = torch.zeros(blocks, heads, block_size, dim, dtype=dtype, device=device)
            caches.append(AttentionCache(k, v))
        else:
            state_shape = (
                slots,
                local.linear_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
            )
            state = torch.zeros(state_shape, dtype=torch.float32, device=device)
            conv = torch.zeros(slots, *conv_shape, dtype=dtype, device=device)
            window = torch.zeros(slots, *window_shape, dtype=dtype, device=device)
            caches.append(GdnCache(state, conv, window))
    return caches
