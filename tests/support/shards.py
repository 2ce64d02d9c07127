"""Benches whose trunk lies in shards over several ranks, in this process: what `MeshBackend` is for.

A thread stands for each follower. One rank computes at a time, and gives its turn away where ranks meet, so that what
happens is the same in every run. Plans go over the wire's codec, and a follower's error ends the step it happens in.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mstar.arch.caches import allocate_caches
from mstar.arch.head import MtpHead
from mstar.arch.trunk import Trunk
from mstar.loader import read_config, resolve
from mstar.loader.checkpoint import load_shard
from mstar.loader.head import load_head, load_vocab
from mstar.ranks.cache import BLOCK_SIZE
from mstar.ranks.executor import Executor
from mstar.ranks.plan import Drawn, StepPlan, pack, unpack
from mstar.ranks.speculation.backend import MeshBackend
from tests.support.engines import CPU, VOCAB, Bench, CheckingModel, Tiny, checking, tiny

WAIT_S = 60.0  # a bound, not a measure


class Room:
    """Where ranks meet. Whoever holds `turn` computes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()
        self.sent = 0  # broadcasts
        self._given: list[torch.Tensor | None] = [None] * size
        self._met: list[torch.Tensor] = []
        self._round = 0
        self._failed: BaseException | None = None
        self._jobs: list[deque[Callable[[], None]]] = [deque() for _ in range(size)]
        for rank in range(1, size):
            threading.Thread(target=self._follow, args=(rank,), daemon=True).start()

    def meet(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's x in rank order, once all have come."""
        assert self._given[rank] is None
        self._given[rank] = x.clone()
        mine = self._round
        if all(given is not None for given in self._given):
            self._met = [given for given in self._given if given is not None]
            self._given = [None] * self.size
            self._round += 1
            self.turn.notify_all()
        self._wait(lambda: self._round > mine or self._failed is not None)
        if self._round == mine:
            raise RuntimeError("another rank failed") from self._failed
        met = self._met
        assert all(part.shape == x.shape and part.dtype == x.dtype for part in met)
        return met

    def post(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Hands each follower its part of a step."""
        for queue, job in zip(self._jobs[1:], jobs, strict=True):
            queue.append(job)
        self.turn.notify_all()

    def together(self, work: Callable[[], Any]) -> Any:
        """Rank 0's part of a step; returns when all have done theirs."""
        with self.turn:
            try:
                return work()
            except BaseException as error:
                self._failed = self._failed or error
                self.turn.notify_all()
                raise
            finally:
                self._wait(lambda: not any(self._jobs))
                failed, self._failed = self._failed, None
                self._given = [None] * self.size
                if failed is not None:
                    raise failed

    def _follow(self, rank: int) -> None:
        jobs = self._jobs[rank]
        with self.turn:
            while True:
                self.turn.wait_for(lambda: jobs)
                try:
                    jobs[0]()
                except BaseException as error:
                    self._failed = self._failed or error
                jobs.popleft()
                self.turn.notify_all()

    def _wait(self, until: Callable[[], Any]) -> None:
        assert self.turn.wait_for(until, WAIT_S), "ranks do not meet"


class RoomCollective:
    """A rank's end of a room."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.size = rank, room.size
        self._room = room

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = (part.float() for part in self._room.meet(self.rank, x))
        for part in rest:
            first = first + part
        return x.copy_(first)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._room.meet(self.rank, x))

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        self._room.sent += self.rank == root
        return x.copy_(self._room.meet(self.rank, x)[root])

    def barrier(self) -> None:
        self._room.meet(self.rank, torch.empty(0))

    def close(self) -> None:
        return


@functools.cache
def room_of(size: int) -> Room:
    """One for all benches of a size: its threads stay."""
    return Room(size)


def spread(bench: Bench, room: Room, executors: Sequence[Executor], vocab: int) -> None:
    """Puts a bench's trunk on these executors, rank 0's first."""
    own, *others = (
        MeshBackend(executor, RoomCollective(room, rank), vocab) for rank, executor in enumerate(executors)
    )

    def share(plan: StepPlan) -> None:
        packed = pack(plan)
        room.post([functools.partial(_follow, backend, packed) for backend in others])

    own._share = share
    bench.executor = executors[0]
    bench.leader.backend = own
    execute = bench.leader.execute

    def together(plan: StepPlan) -> Drawn:
        drawn: Drawn = room.together(lambda: execute(plan))
        for other in others:
            same = ("ahead", "lengths", "pending", "block_table")
            assert all(
                torch.equal(getattr(other.executor, name), getattr(own.executor, name)) for name in same
            )
        return drawn

    bench.leader.execute = together  # type: ignore[method-assign]


def _follow(backend: MeshBackend, packed: bytes) -> None:
    plan = unpack(packed)
    assert isinstance(plan, StepPlan)
    backend.follow(plan)


class CheckingShard:
    """A rank of the checking model: all of its caches, and its part of the vocabulary."""

    layers = ()

    def __init__(self, model: CheckingModel, rank: int, size: int) -> None:
        self.model = model
        self.prefill, self.decode = model.prefill, model.decode
        self._ids = slice(rank * -(-VOCAB // size), (rank + 1) * -(-VOCAB // size))
        self._padding = size * -(-VOCAB // size) - VOCAB

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        whole = torch.nn.functional.pad(self.model.logits(hidden), (0, self._padding), value=float("-inf"))
        return whole[:, self._ids].contiguous()


def checking_over(ranks: int, wrong_of: int = 4, **changes: Any) -> Bench:
    """`checking` on so many ranks, each of which checks its own caches."""
    bench = checking(wrong_of, **changes)
    if ranks == 1:
        return bench
    limits, model = bench.scheduler.limits, bench.executor.model
    assert isinstance(model, CheckingModel)
    executors = []
    for rank in range(ranks):
        own = model if rank == 0 else CheckingModel(limits.kv_blocks + 1, limits.max_num_seqs + 1)
        executors.append(
            Executor(
                CheckingShard(own, rank, ranks),
                [],
                slots=limits.max_num_seqs + 1,
                max_seq=limits.max_seq,
                device=CPU,
                drafts=limits.drafts,
            )
        )
    spread(bench, room_of(ranks), executors, VOCAB)
    return bench


@dataclass(frozen=True)
class TinyMesh(Tiny):
    """The built-in model over several ranks, in float32. trunk: rank 0's."""

    trunks: tuple[Trunk, ...]
    room: Room

    def bench(self, **changes: Any) -> Bench:
        bench = super().bench(**changes)
        limits, ranks = bench.scheduler.limits, len(self.trunks)
        executors = []
        for trunk in self.trunks:
            caches = allocate_caches(
                self.config,
                ranks,
                blocks=limits.kv_blocks + 1,
                block_size=BLOCK_SIZE,
                slots=limits.max_num_seqs + 1,
                dtype=torch.float32,
                device=CPU,
                drafts=limits.drafts,
            )
            executors.append(
                Executor(
                    trunk,
                    caches,
                    slots=limits.max_num_seqs + 1,
                    max_seq=limits.max_seq,
                    device=CPU,
                    drafts=limits.drafts,
                )
            )
        spread(bench, self.room, executors, self.config.vocab_size)
        return bench


@functools.cache
def tiny_over(ranks: int) -> Tiny:
    """`tiny` on so many ranks; loaded once a process."""
    if ranks == 1:
        return tiny()
    path, room = resolve("builtin:tiny"), room_of(ranks)
    config = read_config(path)
    with torch.inference_mode():
        trunks = []
        for rank in range(ranks):
            weights = load_shard(path, config, rank, ranks, "fp32")
            collective = RoomCollective(room, rank)
            trunks.append(Trunk(config, weights, dtype=torch.float32, device=CPU, collective=collective))
        ops = trunks[0].ops
        table, lm_head = load_vocab(path, config, "fp32")
        assert lm_head is None, "the built-in model is tied"
        packed = ops.pack_linear(table)
        head = MtpHead(config, load_head(path, config, "fp32"), ops, packed, packed)
    return TinyMesh(config, trunks[0], head, tiny().tokenizer, tuple(trunks), room)
