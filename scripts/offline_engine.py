"""The engine over an `OfflineModel`, in this process: as rank 0 of a mesh of one runs it, with its states in reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar.arch import allocate_caches
from mstar.arch.caches import AttentionCache, GdnCache, head_cache
from mstar.arch.layers import GdnMixer
from mstar.kernels.ops import Ops
from mstar.kernels.rows import Rows
from mstar.ranks.cache import BLOCK_SIZE, blocks_for
from mstar.ranks.device_steps import DeviceSteps
from mstar.ranks.engine import Engine
from mstar.ranks.executor import Executor
from mstar.ranks.leader import Leader
from mstar.ranks.messages import (
    EngineStats,
    Event,
    QueryStats,
    SamplingParams,
    Submit,
    TokenRun,
    Tokens,
)
from mstar.ranks.plan import decode_buckets
from mstar.ranks.sampler import Sampler
from mstar.ranks.scheduler import Limits, Scheduler
from mstar.ranks.speculation.backend import SlotBackend
from mstar.ranks.speculation.draft import Chain
from mstar.scripts.offline_model import OfflineModel

PREFILL_BUDGET, MIXED_BUDGET = 512, 128  # as a rank on a CPU has them


class OfflineEngine:
    """Runs requests of one load. drafts: checked in every step, without a policy that would lower them.

    eager: on a GPU, without captured graphs. budgets: prompt tokens of a step, alone and beside decodes. buckets: sizes
    of decode parts on a GPU, in place of those that a load of so many sequences has, and no shapes of prefill parts.
    """

    def __init__(
        self,
        model: OfflineModel,
        *,
        drafts: int,
        max_num_seqs: int,
        max_seq: int,
        eager: bool = False,
        budgets: tuple[int, int] = (PREFILL_BUDGET, MIXED_BUDGET),
        buckets: tuple[int, ...] | None = None,
    ) -> None:
        self._model = model
        config, device, dtype = model.config, model.device, model.dtype
        slots, ops = max_num_seqs + 1, model.trunk.ops
        blocks = max_num_seqs * blocks_for(max_seq + 3 * drafts + 1)
        limits = Limits(
            max_seq=max_seq,
            max_num_seqs=max_num_seqs,
            kv_blocks=blocks,
            prefill_budget=budgets[0],
            mixed_budget=budgets[1],
            drafts=drafts,
            buckets=(buckets or decode_buckets(max_num_seqs)) if ops.uniform else (),
        )
        caches = allocate_caches(
            config,
            1,
            blocks=blocks + 1,
            block_size=BLOCK_SIZE,
            slots=slots,
            dtype=dtype,
            device=device,
            drafts=drafts,
            ring=ops.ring,
        )
        chain: Chain | None = None
        if drafts:
            cache = head_cache(config, blocks=blocks + 1, block_size=BLOCK_SIZE, dtype=dtype, device=device)
            chain = Chain(model.head(model.dtype_name), cache, device)
        self.executor = Executor(
            model.trunk,
            caches,
            slots=slots,
            max_seq=max_seq,
            device=device,
            drafts=drafts,
            uniform=ops.uniform,
        )
        sampler = Sampler(config.vocab_size, slots, device)
        self.steps: DeviceSteps | None = None
        if ops.uniform:
            self.steps = DeviceSteps(
                self.executor, sampler, config.vocab_size, limits.buckets, eager, prefills=buckets is None
            )
            self.steps.capture(lambda *_: None)
        leader = Leader(SlotBackend(self.executor, config.vocab_size), sampler, chain, self.steps)
        self._scheduler = Scheduler(limits, sampler)
        self._engine = Engine(self._scheduler, leader, self._take)
        self.runs: list[TokenRun] = []  # of the latest step
        self._phases: dict[str, list[float]] = {}

    def submit(self, request_id: int, prompt: Sequence[int], params: SamplingParams) -> None:
        self._engine.handle(Submit(request_id, list(prompt), params))

    def step(self) -> bool:
        """Runs one step, whose tokens are then in `runs`; False when there was nothing to run."""
        self.runs = []
        return self._engine.step()

    def phases(self) -> dict[str, list[float]]:
        """[p50, p95, mean] in microseconds, and the count, of the parts of the latest steps; see mstar.ranks.phases."""
        self._engine.handle(QueryStats(0))
        return self._phases

    def lengths(self) -> dict[int, tuple[int, int]]:
        """Slot, and tokens whose KV is in the caches, of every running request that decodes."""
        lengths = self.executor.lengths.tolist()
        return {
            request.request_id: (request.slot, lengths[request.slot])
            for request in self._scheduler.running
            if request.decoding
        }

    @torch.inference_mode()
    def states(self, slot: int) -> dict[str, torch.Tensor]:
        """What a slot's sequence has left in the caches, by layer: S and the conv's inputs, KV of the last block.

        Accepted drafts that S is behind by are replayed on a copy first: plain decode has the same at this length.
        """
        found: dict[str, torch.Tensor] = {}
        length = int(self.executor.lengths[slot])
        table = self.executor.block_table[slot]
        last_block, filled = int(table[(length - 1) // BLOCK_SIZE]), (length - 1) % BLOCK_SIZE + 1
        layers = zip(self._model.trunk.layers, self.executor.caches, strict=True)
        for index, (layer, cache) in enumerate(layers):
            if isinstance(cache, AttentionCache):
                found[f"layers.{index}.k"] = cache.k[last_block, ..., :filled].clone()
                found[f"layers.{index}.v"] = cache.v[last_block, :, :filled].clone()
            else:
                assert isinstance(layer.mixer, GdnMixer)
                state, conv = self._settled(layer.mixer, cache, slot)
                found[f"layers.{index}.state"], found[f"layers.{index}.conv"] = state, conv
        return found

    def _settled(self, mixer: GdnMixer, cache: GdnCache, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of a slot's S and conv inputs, with its pending rows replayed by a call without new rows."""
        executor, device, owner = self.executor, self.executor.device, slot
        if mixer.ops.ring:
            cache = _unrolled(cache, slot, int(executor.lengths[slot]), int(executor.pending[slot]), mixer)
            slot, ops = 0, Ops()
        else:
            ops = mixer.ops
        state, conv, window = (t[slot : slot + 1].clone() for t in (cache.state, cache.conv, cache.window))
        rows = Rows(
            sequences=1,
            longest=1,
            rows_per_seq=1,
            cu_rows=torch.zeros(2, dtype=torch.int64, device=device),
            starts=executor.lengths[owner : owner + 1].long(),
            slots=torch.zeros(1, dtype=torch.int32, device=device),
            fresh=torch.zeros(1, dtype=torch.uint8, device=device),
            block_tables=executor.block_table[owner : owner + 1],
            pending=executor.pending[owner : owner + 1],
            committed=torch.ones(1, dtype=torch.int64, device=device),
        )
        nothing = torch.empty(0, mixer.in_proj.outputs, dtype=conv.dtype, device=device)
        ops.gdn(nothing, mixer.weights, state, conv, window, rows)
        return state[0], conv[0]

    def end(self) -> None:
        """Drops graphs and caches."""
        if self.steps is not None:
            self.steps.free()
        self.executor.free()

    def _take(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self.runs += event.runs
        elif isinstance(event, EngineStats):
            self._phases = event.phases


def _unrolled(cache: GdnCache, slot: int, length: int, pending: int, mixer: GdnMixer) -> GdnCache:
    """A slot of a cache of rings as the reference has it: the conv's inputs before the pending rows, and those rows."""
    width, heads = mixer.weights.conv.shape[0], mixer.weights.value_heads
    ring, device = cache.conv.shape[1], cache.conv.device
    behind = torch.arange(length - pending - width + 1, length, device=device)
    inputs = cache.conv[slot].index_select(0, behind % ring)
    inputs = torch.where(behind[:, None] >= 0, inputs, 0)
    gates = inputs.new_zeros(pending, 2 * heads)
    if pending:
        gates = cache.window[slot].index_select(0, behind[width - 1 :] % ring)
    window = torch.cat([inputs[width - 1 :], gates], 1)
    return GdnCache(cache.state[slot : slot + 1], inputs[None, : width - 1], window[None])
