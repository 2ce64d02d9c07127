"""How many KV blocks a load gets: what is free after the weights, over all ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from mstar.arch.caches import cache_sizes, head_block_bytes
from mstar.loader.config import ModelConfig
from mstar.ranks.cache import BLOCK_SIZE, blocks_for

# A laptop's page cache and browser need memory too: 8 GiB of KV are 64 sequences of 8k tokens of a 0.8B model.
CPU_KV_CAP_BYTES = 8 * 2**30


class OutOfMemory(Exception):
    """The load does not fit; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on each rank, and the blocks and slots that they hold (sinks included)."""

    kv_blocks: int
    slots: int
    kv_bytes: int
    state_bytes: int
    workspace_bytes: int
    head_kv_bytes: int = 0  # on rank 0 alone


def size_caches(
    config: ModelConfig,
    tp_size: int,
    dtype: torch.dtype,
    *,
    max_seq: int,
    max_num_seqs: int,
    step_rows: int,
    budget_bytes: int,
    on_cpu: bool,
    drafts: int = 0,
    leader_budget_bytes: int | None = None,
    ring: bool = False,
) -> Sizes:
    """Splits a rank's budget (the least over ranks) into states, workspace and KV.

    step_rows: the most rows of one step. drafts: the most that a step checks for a sequence; with any, rank 0 has
    the head's KV beside its own, within its budget `leader_budget_bytes` (the least one, where it is not given).
    ring: how windows are kept, see mstar.arch.caches.GdnCache.
    Raises OutOfMemory when not even one sequence of max_seq fits.
    """
    each = cache_sizes(config, tp_size, dtype, BLOCK_SIZE, drafts, ring)
    slots = max_num_seqs + 1
    state_bytes = slots * each.slot_bytes
    workspace = _workspace_bytes(config, tp_size, step_rows, max_num_seqs * (1 + drafts))
    left = budget_bytes - state_bytes - workspace
    wanted = max_num_seqs * blocks_for(max_seq)
    one_sequence = blocks_for(max_seq)
    if on_cpu:
        wanted = min(wanted, max(one_sequence, CPU_KV_CAP_BYTES // each.block_bytes))
    head_bytes = head_block_bytes(config, dtype, BLOCK_SIZE) if drafts else 0
    fit = left // each.block_bytes - 1
    if drafts:
        leader = (budget_bytes if leader_budget_bytes is None else leader_budget_bytes) - budget_bytes + left
        fit = min(fit, leader // (each.block_bytes + head_bytes) - 1)
    blocks = min(wanted, fit)
    if blocks < one_sequence:
        room = max(0, fit * BLOCK_SIZE)
        change = f"lower max_seq to {room} or less, lower max_num_seqs" if room else "lower max_num_seqs"
        raise OutOfMemory(
            f"{_mib(budget_bytes)} are free on each rank after the weights; states of {max_num_seqs} sequences take "
            f"{_mib(state_bytes)}, workspace {_mib(workspace)}, and KV of one sequence of {max_seq} tokens "
            f"{_mib(one_sequence * each.block_bytes)}: {change}, raise memory_fraction, or use a larger tp"
        )
    kv_bytes, head_kv_bytes = (blocks + 1) * each.block_bytes, (blocks + 1) * head_bytes
    return Sizes(blocks + 1, slots, kv_bytes, state_bytes, workspace, head_kv_bytes)


def host_budget_bytes(memory_fraction: float, tp_size: int) -> int:
    """What one of `tp_size` ranks of this machine may still take of its main memory."""
    return int(available_host_bytes() * memory_fraction) // tp_size


def device_budget_bytes(memory_fraction: float, device: torch.device, ranks_on_device: int) -> int:
    """What a rank may still take of its GPU, with its weights there already."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - (1 - memory_fraction) * total)) // ranks_on_device


def available_host_bytes() -> int:
    """Memory that can be taken without swapping: the system's, cut to the control group's."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the physical memory bounds it
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # file pages that nobody maps are given back on demand
        available = min(available, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass  # no control group, or one without a limit ("max")
    return max(0, available)


def _workspace_bytes(config: ModelConfig, tp_size: int, step_rows: int, drawing_rows: int) -> int:
    """Activations of the widest layer, twice, in float32, and three copies of the logits: an upper bound."""
    local = config.local(tp_size)
    heads = (2 * local.q_heads + 2 * local.kv_heads) * config.head_dim
    row = 4 * config.hidden_size + max(3 * local.intermediate, 4 * local.conv_channels, 3 * heads)
    return 2 * step_rows * row * 4 + 3 * drawing_rows * config.vocab_size * 4


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
