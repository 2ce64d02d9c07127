"""A model in this process, for checks that need hidden states and exact logits: one rank, no daemon, no engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mstar.arch import AttentionCache, MtpHead, PrefillInputs, Trunk, allocate_caches
from mstar.arch.caches import LayerCache
from mstar.kernels.ops import select_ops
from mstar.loader import ModelConfig, read_config, resolve, resolve_dtype
from mstar.loader.checkpoint import TORCH_DTYPES, load_shard
from mstar.loader.head import load_head, load_vocab
from mstar.ranks.cache import BLOCK_SIZE
from mstar.ranks.collectives.solo import SoloCollective
from mstar.scripts.planted import planted_acceptance


@dataclass(frozen=True, slots=True)
class Rooms:
    """Caches of a batch in which sequence i owns slot i + 1 and a run of blocks.

    slots: [seqs] int32; tables: [seqs, blocks] int32.
    """

    layers: list[LayerCache]
    head: AttentionCache
    slots: torch.Tensor
    tables: torch.Tensor


class OfflineModel:
    """The trunk of a checkpoint on one device, and its MTP head in any dtype."""

    def __init__(self, model: str, dtype: str = "auto", device: str = "cpu") -> None:
        """model, dtype: as `load` takes them. Raises LoadError."""
        self.path: Path = resolve(model)
        self.config: ModelConfig = read_config(self.path)
        self.planted = planted_acceptance(self.path)
        self.dtype_name = resolve_dtype(dtype, self.config)
        self.dtype = TORCH_DTYPES[self.dtype_name]
        self.device = torch.device(device)
        weights = load_shard(self.path, self.config, 0, 1, self.dtype, device=self.device)
        self.trunk = Trunk(
            self.config,
            weights,
            dtype=self.dtype,
            device=self.device,
            collective=SoloCollective(),
            block_size=BLOCK_SIZE,
        )

    def head(self, dtype: str) -> MtpHead:
        """The head in "bf16", "fp16" or "fp32"; it shares the trunk's embedding and lm_head where it can."""
        head_dtype = TORCH_DTYPES[dtype]
        weights = load_head(self.path, self.config, head_dtype, device=self.device)
        if head_dtype == self.dtype:
            trunk = self.trunk
            return MtpHead(self.config, weights, trunk.ops, trunk.embedding, trunk.lm_head)
        config = self.config
        dims = (config.hidden_size, config.head_dim, config.linear_key_head_dim, config.linear_value_head_dim)
        ops, _ = select_ops(self.device, head_dtype, BLOCK_SIZE, dims)
        embedding, lm_head = load_vocab(self.path, config, head_dtype, device=self.device)
        packed = ops.pack_linear(embedding if lm_head is None else lm_head)
        return MtpHead(config, weights, ops, packed if lm_head is None else embedding, packed)

    def rooms(self, sequences: int, tokens: int, drafts: int, head_dtype: str) -> Rooms:
        """Cleared caches for `sequences` of up to `tokens` each, drafts behind them included."""
        blocks = -(-tokens // BLOCK_SIZE)
        total = sequences * blocks + 1
        layers = allocate_caches(
            self.config,
            1,
            blocks=total,
            block_size=BLOCK_SIZE,
            slots=sequences + 1,
            dtype=self.dtype,
            device=self.device,
            drafts=drafts,
            ring=self.trunk.ops.ring,
        )
        heads, dim = self.config.num_key_value_heads, self.config.head_dim
        dtype = TORCH_DTYPES[head_dtype]
        head = AttentionCache(
            torch.zeros(total, heads, dim, BLOCK_SIZE, dtype=dtype, device=self.device),
            torch.zeros(total, heads, BLOCK_SIZE, dim, dtype=dtype, device=self.device),
        )
        slots = torch.arange(1, sequences + 1, dtype=torch.int32, device=self.device)
        tables = torch.arange(1, total, dtype=torch.int32, device=self.device).view(sequences, blocks)
        return Rooms(layers, head, slots, tables)

    @torch.inference_mode()
    def next_logits(self, ids: list[int]) -> torch.Tensor:
        """The logits of the token after `ids`, [vocab] float32."""
        rooms = self.rooms(1, len(ids), 0, self.dtype_name)
        inputs = PrefillInputs(
            token_ids=torch.tensor(ids, device=self.device),
            positions=torch.arange(len(ids), device=self.device),
            slots=rooms.slots,
            block_tables=rooms.tables,
            cu_rows=(0, len(ids)),
            starts=(0,),
        )
        return self.logits(self.trunk.prefill(inputs, rooms.layers))[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] float32."""
        return self.trunk.logits(hidden)[:, : self.config.vocab_size]
