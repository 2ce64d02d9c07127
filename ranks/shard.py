"""A rank's part of the load: from the spec to a model, and from rank 0's sizes to an executor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mstar.arch.caches import allocate_caches, head_cache
from mstar.arch.head import MtpHead
from mstar.arch.trunk import Trunk
from mstar.kernels.native import set_threads
from mstar.loader.checkpoint import TORCH_DTYPES, load_shard
from mstar.loader.config import ModelConfig, read_config
from mstar.loader.errors import LoadError
from mstar.loader.head import load_head, load_vocab
from mstar.loader.recipe import read_recipe
from mstar.ranks.cache import BLOCK_SIZE
from mstar.ranks.collectives import Collective, connect
from mstar.ranks.executor import Executor
from mstar.ranks.memory import device_budget_bytes, host_budget_bytes
from mstar.ranks.messages import LoadSpec
from mstar.ranks.plan import Setup
from mstar.ranks.speculation.draft import Chain

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int, str], None]  # stage, done, total, unit


@dataclass(slots=True)
class Shard:
    """The loaded weights of one rank and how it meets the others; caches come with `executor`."""

    spec: LoadSpec
    rank: int
    config: ModelConfig
    trunk: Trunk
    collective: Collective
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    notes: list[str]
    head: MtpHead | None = None  # on rank 0 of a load that speculates
    head_bytes: int = 0

    def budget_bytes(self) -> int:
        """What this rank may take for caches and workspace, with the weights that are loaded by now."""
        tp = self.spec.tp_size
        if self.device.type == "cpu":
            return host_budget_bytes(self.spec.memory_fraction, tp)
        shared = -(-tp // torch.cuda.device_count())
        return device_budget_bytes(self.spec.memory_fraction, self.device, shared)

    def executor(self, setup: Setup) -> Executor:
        """Allocates what rank 0 decided."""
        caches = allocate_caches(
            self.config,
            self.spec.tp_size,
            blocks=setup.kv_blocks,
            block_size=BLOCK_SIZE,
            slots=setup.slots,
            dtype=self.dtype,
            device=self.device,
            drafts=self.spec.spec_k,
            ring=self.trunk.ops.ring,
        )
        return Executor(
            self.trunk,
            caches,
            slots=setup.slots,
            max_seq=self.spec.max_seq,
            device=self.device,
            drafts=self.spec.spec_k,
            uniform=self.trunk.ops.uniform,
        )

    def chain(self, setup: Setup) -> Chain | None:
        """The head over its own KV, on the rank that has one."""
        if self.head is None:
            return None
        cache = head_cache(
            self.config, blocks=setup.kv_blocks, block_size=BLOCK_SIZE, dtype=self.dtype, device=self.device
        )
        return Chain(self.head, cache, self.device)


def load(spec: LoadSpec, rank: int, shm_fd: int | None, progress: Progress) -> Shard:
    """Reads the rank's slices and builds its model. Raises LoadError as the loader does."""
    torch.set_num_threads(spec.threads)
    set_threads(spec.threads)
    device = rank_device(spec, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = read_config(spec.model_dir, spec.overrides)
    dtype = TORCH_DTYPES[spec.dtype]
    collective, backend = connect(rank, spec.tp_size, device, Path(spec.run_dir), shm_fd)
    weights = load_shard(spec.model_dir, config, rank, spec.tp_size, dtype, progress, device)
    weight_bytes = sum(tensor.nbytes for tensor in weights.values())
    with torch.inference_mode():
        trunk = Trunk(
            config, weights, dtype=dtype, device=device, collective=collective, block_size=BLOCK_SIZE
        )
    notes = list(trunk.notes)
    recipe = read_recipe(spec.model_dir)
    if recipe is not None:
        notes.append(recipe.note)
    if backend == "gloo":
        place = "shared memory" if device.type == "cpu" else "nccl"
        notes.append(f"gloo in place of {place} between ranks: slower, same sums")
    shard = Shard(spec, rank, config, trunk, collective, device, dtype, weight_bytes, notes)
    if rank == 0 and spec.spec_k:
        _load_head(shard, progress)
    return shard


def _load_head(shard: Shard, progress: Progress) -> None:
    """The head, and the whole vocabulary where the trunk holds a part of it: drafting is local to one rank."""
    spec, trunk = shard.spec, shard.trunk
    weights = load_head(spec.model_dir, shard.config, shard.dtype, progress, shard.device)
    embedding, lm_head = trunk.embedding, trunk.lm_head
    vocab: list[torch.Tensor] = []
    if spec.tp_size > 1:
        table, own_head = load_vocab(spec.model_dir, shard.config, shard.dtype, progress, shard.device)
        vocab = [table] if own_head is None else [table, own_head]
    shard.head_bytes = sum(tensor.nbytes for tensor in (*weights.values(), *vocab))
    with torch.inference_mode():
        if len(vocab) == 1:
            embedding = lm_head = trunk.ops.pack_linear(vocab.pop())
        elif vocab:
            lm_head = trunk.ops.pack_linear(vocab.pop())
            embedding = vocab.pop()
        shard.head = MtpHead(shard.config, weights, trunk.ops, embedding, lm_head)


def rank_device(spec: LoadSpec, rank: int) -> torch.device:
    """A rank's own GPU, or one that it shares where there are fewer than ranks."""
    if spec.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.device_count():
        build = (
            "a CPU build"
            if torch.version.cuda is None and torch.version.hip is None
            else "no driver or no card"
        )
        message = f"torch {torch.__version__} sees no GPU here ({build}): start the daemon with --device cpu"
        raise LoadError("unsupported", message, "device")
    return torch.device("cuda", rank % torch.cuda.device_count())


def device_name(spec: LoadSpec, device: torch.device) -> str:
    """As a person reads it."""
    if device.type == "cpu":
        return f"cpu ({spec.threads} thread{'s' if spec.threads != 1 else ''} a rank)"
    return torch.cuda.get_device_name(device)
