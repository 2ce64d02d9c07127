"""An engine in one process, over a model that checks its own caches or over the built-in one in float32."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from mstar.arch.caches import AttentionCache, GdnCache, LayerCache, allocate_caches, head_cache
from mstar.arch.head import MtpHead
from mstar.arch.inputs import DecodeInputs, PrefillInputs
from mstar.arch.trunk import Trunk
from mstar.kernels.ops import Ops
from mstar.kernels.rows import Rows
from mstar.kernels.step import StepRegisters, begin_step
from mstar.loader import read_config, resolve
from mstar.loader.checkpoint import load_shard
from mstar.loader.config import ModelConfig
from mstar.loader.head import load_head
from mstar.ranks.cache import BLOCK_SIZE
from mstar.ranks.collectives import SoloCollective
from mstar.ranks.device_steps import DeviceSteps
from mstar.ranks.engine import Engine
from mstar.ranks.executor import Executor
from mstar.ranks.leader import InFlight, Leader
from mstar.ranks.messages import EngineStats, Event, QueryStats, SamplingParams, Submit, TokenRun, Tokens
from mstar.ranks.plan import StepPlan, pack, unpack
from mstar.ranks.sampler import Sampler
from mstar.ranks.scheduler import Limits, Scheduler
from mstar.ranks.speculation.backend import SlotBackend
from mstar.ranks.speculation.draft import Chain
from mstar.ranks.speculation.policy import Policy

VOCAB = 97
PRIME = 2_147_483_647
CPU = torch.device("cpu")


def fold(state: int, token: int) -> int:
    return (state * 31 + token + 1) % PRIME


def expected(prompt: list[int], count: int) -> list[int]:
    """What the checking model says, from the tokens alone."""
    tokens = list(prompt)
    state = 0
    for token in prompt:
        state = fold(state, token)
    for _ in range(count):
        tokens.append(state % VOCAB)
        state = fold(state, tokens[-1])
    return tokens[len(prompt) :]


class CheckingModel:
    """Next token = a hash of the sequence, kept both in paged 'KV' and in a slot's 'state', which must agree.

    Drafts move the state one step later, from the slot's window, by as many as are pending.
    """

    def __init__(self, blocks: int, slots: int) -> None:
        self.ops = Ops()
        self.kv = torch.full((blocks, BLOCK_SIZE), -1, dtype=torch.int64)
        self.state = [12345] * slots  # never cleared by anyone but a sequence's start
        self.window: list[list[int]] = [[] for _ in range(slots)]
        self.decode_shapes: set[int] = set()

    def prefill(
        self, inputs: PrefillInputs, caches: list[LayerCache], every_row: bool = False
    ) -> torch.Tensor:
        assert caches == []
        hidden = []
        for index, start in enumerate(inputs.starts):
            first, end = inputs.cu_rows[index], inputs.cu_rows[index + 1]
            tokens = inputs.token_ids[first:end].tolist()
            positions = inputs.positions[first:end].tolist()
            assert positions == list(range(start, start + len(tokens)))
            slot = int(inputs.slots[index])
            if start == 0:
                self.state[slot] = 0
            table = inputs.block_tables[index]
            rows = []
            for token, position in zip(tokens, positions, strict=True):
                self._put(table, position, token)
                self.state[slot] = fold(self.state[slot], token)
                rows.append(self.state[slot])
            assert self._read(table, start + len(tokens)) == rows[-1], "KV and state differ"
            hidden += rows if every_row else rows[-1:]
        return torch.tensor(hidden, dtype=torch.float64).unsqueeze(1)

    def decode(self, inputs: DecodeInputs, caches: list[LayerCache]) -> torch.Tensor:
        self.decode_shapes.add(len(inputs.slots))
        hidden: list[int] = []
        row = 0
        counts = inputs.counts or (1,) * len(inputs.slots)
        tokens = inputs.token_ids.tolist()
        for index, slot in enumerate(inputs.slots.tolist()):
            length, count = int(inputs.seq_lens[index]), counts[index]
            own, row = tokens[row : row + count], row + count
            table = inputs.block_tables[index]
            pending = 0 if inputs.pending is None else int(inputs.pending[index])
            if slot == 0:
                assert length == 1 and count == 1 and pending == 0 and not table.any()
                hidden.append(0)
                continue
            for draft in self.window[slot][:pending]:
                self.state[slot] = fold(self.state[slot], draft)
            self.state[slot] = fold(self.state[slot], own[0])
            self.window[slot][: count - 1] = own[1:]  # what it does not overwrite stays
            state = self.state[slot]
            hidden.append(state)
            for draft in own[1:]:
                state = fold(state, draft)
                hidden.append(state)
            for position, token in enumerate(own, length - 1):
                self._put(table, position, token)
            assert self._read(table, length) == self.state[slot], "KV and state differ"
            assert self._read(table, length + count - 1) == state
        assert row == len(tokens)
        return torch.tensor(hidden, dtype=torch.float64).unsqueeze(1)

    def step(
        self, slots: torch.Tensor, registers: StepRegisters, table: torch.Tensor, caches: list[LayerCache]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`decode` from registers, as `mstar.arch.trunk.Trunk.step`."""
        index = slots.long()
        tokens, starts, _ = begin_step(slots, registers, lambda ids: ids)
        inputs = DecodeInputs(
            token_ids=tokens,
            seq_lens=starts.to(torch.int32) + 1,
            slots=slots,
            block_tables=table.index_select(0, index),
            pending=None if registers.pending is None else registers.pending[index],
        )
        return self.decode(inputs, caches), starts

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -(torch.arange(VOCAB) - hidden % VOCAB).abs().float()

    def _put(self, table: torch.Tensor, position: int, token: int) -> None:
        assert 0 <= token < VOCAB
        block = int(table[position // BLOCK_SIZE])
        assert block != 0
        self.kv[block, position % BLOCK_SIZE] = token

    def _read(self, table: torch.Tensor, length: int) -> int:
        state = 0
        for token in self.kv[table.long()].view(-1)[:length].tolist():
            state = fold(state, token)
        return state


class CheckingHead:
    """Knows what the checking model will say, and is wrong now and then; its KV must be whole and true.

    An entry is (the trunk's hidden of its position, the token after it, whether both are true or guessed).
    """

    def __init__(self, model: CheckingModel, wrong_of: int = 4) -> None:
        self.model = model
        self.wrong_of = wrong_of  # one draft of so many is wrong
        blocks = model.kv.shape[0]
        self.kv: list[list[tuple[int, int, bool] | None]] = [[None] * BLOCK_SIZE for _ in range(blocks)]
        self.ends: dict[int, int] = {}  # by a sequence's first block: positions written by its latest pass

    def __call__(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, cache: AttentionCache, rows: Rows
    ) -> torch.Tensor:
        true = rows.rows_per_seq == 0
        borders = rows.cu_rows.tolist()
        out = []
        for index, start in enumerate(rows.starts.tolist()):
            table = rows.block_tables[index].tolist()
            own = range(borders[index], borders[index + 1])
            for position, row in enumerate(own, start):
                self._put(table, position, (int(hidden[row, 0]), int(token_ids[row]), true))
            state = 0
            tokens = self.model.kv[rows.block_tables[index].long()].view(-1).tolist()
            for position in range(start + len(own) if true else 0):
                state = fold(state, tokens[position])
                entry = self._get(table, position)
                assert entry is not None and entry[0] == state and entry[2], "a hole in the head's KV"
                if position < start + len(own) - 1:
                    assert entry[1] == tokens[position + 1]
            assert true or start == self.ends[table[0]], "a guess is one position on"
            self.ends[table[0]] = start + len(own)
            out.append(fold(int(hidden[own[-1], 0]), int(token_ids[own[-1]])))
        return torch.tensor(out, dtype=torch.float64).unsqueeze(1)

    def draft(self, hidden: torch.Tensor) -> torch.Tensor:
        states = hidden[:, 0].to(torch.int64)
        return (states + (states // VOCAB % self.wrong_of == 0)) % VOCAB

    def _put(self, table: list[int], position: int, entry: tuple[int, int, bool]) -> None:
        block = table[position // BLOCK_SIZE]
        assert block != 0
        self.kv[block][position % BLOCK_SIZE] = entry

    def _get(self, table: list[int], position: int) -> tuple[int, int, bool] | None:
        return self.kv[table[position // BLOCK_SIZE]][position % BLOCK_SIZE]


class Recording(Leader):
    """Plans go over the wire's codec, and are kept."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> InFlight:
        self.plans.append(plan)
        return super().launch(unpack(pack(plan)))


class Steady(Policy):
    """All drafts, always: what a test sees does not depend on how fast or how right they are."""

    def plan(self, sequences: int) -> int:
        return self.k

    def starts(self, sequences: int = 1, tokens: int = 0) -> bool:
        return True

    def gives_up(self, steps: int, drafted: int, accepted: int) -> bool:
        return False


class Bench:
    """An engine whose plans go over the wire's codec, and what it said."""

    def __init__(
        self,
        limits: Limits,
        model: Any,
        caches: list[LayerCache],
        vocab: int,
        chain: Chain | None = None,
        ahead: bool = False,
    ) -> None:
        slots = limits.max_num_seqs + 1
        self.sampler = Sampler(vocab, slots, CPU)
        self.executor = Executor(
            model, caches, slots=slots, max_seq=limits.max_seq, device=CPU, drafts=limits.drafts
        )
        steps = DeviceSteps(self.executor, self.sampler, vocab, limits.buckets) if ahead else None
        self.leader = Recording(SlotBackend(self.executor, vocab), self.sampler, chain, steps)
        self.plans = self.leader.plans
        self.scheduler = Scheduler(limits, self.sampler, policy=Steady(limits.drafts))
        self.events: list[Event] = []
        self.engine = Engine(self.scheduler, self.leader, self.events.append)

    def submit(self, request_id: int, prompt: list[int], **sampling: Any) -> None:
        params = SamplingParams(**({"max_tokens": 20, "seed": request_id} | sampling))
        assert self.engine.handle(Submit(request_id, prompt, params))

    def run(self) -> dict[int, list[int]]:
        while self.engine.step():
            pass
        return self.tokens()

    def runs(self, request_id: int | None = None) -> list[TokenRun]:
        """What was sent, of one request or of all."""
        runs = [run for event in self.events if isinstance(event, Tokens) for run in event.runs]
        return [run for run in runs if request_id in (None, run.request_id)]

    def tokens(self) -> dict[int, list[int]]:
        got: dict[int, list[int]] = {}
        ended = set()
        for run in self.runs():
            assert run.request_id not in ended
            assert 0 <= run.accepted <= (run.drafted or 0)
            assert run.accepted <= len(run.ids) <= run.accepted + 1
            got.setdefault(run.request_id, []).extend(run.ids)
            if run.finish is not None:
                ended.add(run.request_id)
        return got

    def stats(self) -> EngineStats:
        self.engine.handle(QueryStats(1))
        stats = self.events[-1]
        assert isinstance(stats, EngineStats)
        return stats


def checking(wrong_of: int = 4, ahead: bool = False, **changes: Any) -> Bench:
    """A bench of the checking model, and with `drafts` of the checking head; ahead: as `Tiny.bench` has it."""
    fields = {"max_seq": 300, "max_num_seqs": 6, "kv_blocks": 200, "prefill_budget": 128, "mixed_budget": 64}
    limits = Limits(**(fields | changes))
    model = CheckingModel(limits.kv_blocks + 1, limits.max_num_seqs + 1)
    none = torch.empty(0)
    chain = Chain(CheckingHead(model, wrong_of), AttentionCache(none, none), CPU) if limits.drafts else None
    return Bench(limits, model, [], VOCAB, chain, ahead)


def prompts(count: int, longest: int = 200) -> list[list[int]]:
    """Prompts of the checking model, of the lengths where something changes and of others."""
    rng = random.Random(count)
    sizes = [1, 2, 16, 17, 64, 65, longest, *(rng.randint(1, longest) for _ in range(count))][:count]
    return [[rng.randrange(VOCAB) for _ in range(size)] for size in sizes]


@dataclass(frozen=True)
class Tiny:
    """The built-in model on one rank, in float32."""

    config: ModelConfig
    trunk: Trunk
    head: MtpHead
    tokenizer: Tokenizer

    def chat(self, question: str) -> list[int]:
        """A prompt as the model's template renders it, thinking on."""
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n"
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def bench(self, ahead: bool = False, **changes: Any) -> Bench:
        """ahead: plain steps are launched before the results of the one before them, as on a GPU."""
        fields = {
            "max_seq": 400,
            "max_num_seqs": 8,
            "kv_blocks": 200,
            "prefill_budget": 512,
            "mixed_budget": 128,
        }
        limits = Limits(**(fields | changes))
        sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "dtype": torch.float32, "device": CPU}
        caches = allocate_caches(
            self.config,
            1,
            blocks=limits.kv_blocks + 1,
            slots=limits.max_num_seqs + 1,
            drafts=limits.drafts,
            **sizes,
        )
        chain = None
        if limits.drafts:
            chain = Chain(self.head, head_cache(self.config, blocks=limits.kv_blocks + 1, **sizes), CPU)
        return Bench(limits, self.trunk, caches, self.config.vocab_size, chain, ahead)


@functools.cache
def tiny() -> Tiny:
    """Loaded once a process."""
    path = resolve("builtin:tiny")
    config = read_config(path)
    with torch.inference_mode():
        weights = load_shard(path, config, 0, 1, "fp32")
        trunk = Trunk(config, weights, dtype=torch.float32, device=CPU, collective=SoloCollective())
        head = MtpHead(config, load_head(path, config, "fp32"), trunk.ops, trunk.embedding, trunk.lm_head)
    return Tiny(config, trunk, head, Tokenizer.from_file(str(path / "tokenizer.json")))


def settled(bench: Bench, slot: int) -> list[torch.Tensor]:
    """A slot's GDN states and conv inputs with its pending rows replayed: what plain decode has at this length."""
    executor = bench.executor
    index = torch.tensor([slot])
    none = torch.empty(0, dtype=torch.int64)
    rows = Rows(
        sequences=1,
        longest=1,
        rows_per_seq=1,
        cu_rows=torch.zeros(2, dtype=torch.int64),
        starts=executor.lengths[index].long(),
        slots=index.to(torch.int32),
        fresh=torch.zeros(1, dtype=torch.uint8),
        block_tables=executor.block_table[index],
        pending=executor.pending[index],
        committed=torch.ones(1, dtype=torch.int64),
    )
    result = []
    for layer, cache in zip(executor.model.layers, executor.caches, strict=True):  # type: ignore[attr-defined]
        if isinstance(cache, GdnCache):
            state, conv = cache.state.clone(), cache.conv.clone()
            mixer = layer.mixer
            width = mixer.in_proj.outputs
            mixer.ops.gdn(torch.empty(0, width), mixer.weights, state, conv, cache.window.clone(), rows)
            result += [state[slot], conv[slot]]
    assert none.numel() == 0
    return result


def keys_and_values(bench: Bench, slot: int, length: int, cache: AttentionCache) -> list[torch.Tensor]:
    """A slot's first `length` keys and values, position by position."""
    table = bench.executor.block_table[slot].long()
    k = cache.k[table].permute(0, 3, 1, 2).flatten(0, 1)
    v = cache.v[table].permute(0, 2, 1, 3).flatten(0, 1)
    return [k[:length], v[:length]]
