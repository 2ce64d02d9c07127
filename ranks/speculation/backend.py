"""The trunk as a step on rank 0 sees it, on one rank or sharded over a mesh.

Drafting, the accept rule and the statistics know `TrunkBackend` at most; where the shards are is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from mstar.kernels.argmax import argmax_rows
from mstar.ranks.argmax import merged_maxima, shard_maxima
from mstar.ranks.collectives import Collective
from mstar.ranks.executor import Executor, Moves, Ran
from mstar.ranks.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a backend was sized for."""

    slots: int  # the sink included
    max_seq: int
    drafts: int  # the most that a step checks for a sequence


@dataclass(frozen=True, slots=True)
class Verified:
    """A step's rows, and over the whole vocabulary what their draws need: one of `best` and `logits`."""

    ran: Ran
    best: torch.Tensor | None  # [rows that draw] int64, each row's likeliest token, ties to the lowest id
    logits: torch.Tensor | None  # [rows that draw, vocab] float32


class TrunkBackend(Protocol):
    """Runs the trunk's part of a step; every `verify` that drew is followed by one `commit`."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def executor(self) -> Executor:
        """Rank 0's, whose registers hold what all ranks' do."""
        ...

    def verify(self, plan: StepPlan) -> Verified:
        """Runs all rows of the plan: prefill, newest tokens and the drafts behind them."""
        ...

    def commit(self, plan: StepPlan, moves: Moves) -> None:
        """Moves every rank's registers past what was drawn: at most one broadcast."""
        ...

    def free(self) -> None:
        """Drops caches and windows; nothing may be called after it."""
        ...


class SlotBackend:
    """The shard is the model."""

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        self.executor = executor
        self._vocab_size = vocab_size

    @property
    def capacity(self) -> Capacity:
        return _capacity(self.executor)

    def verify(self, plan: StepPlan) -> Verified:
        ran = self.executor.run(plan)
        if ran.hidden is None:
            return Verified(ran, None, None)
        logits = self.executor.model.logits(ran.hidden)[:, : self._vocab_size]
        return Verified(ran, None, logits) if plan.gather_logits else Verified(ran, argmax_rows(logits), None)

    def commit(self, plan: StepPlan, moves: Moves) -> None:
        self.executor.move(plan, moves)

    def free(self) -> None:
        self.executor.free()


class MeshBackend:
    """Shards on several ranks: rank 0 verifies and commits, the others `follow` its plans.

    share: on rank 0, hands a plan to the followers.
    """

    def __init__(
        self,
        executor: Executor,
        collective: Collective,
        vocab_size: int,
        share: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.executor = executor
        self._mesh = collective
        self._vocab_size = vocab_size
        self._share = share

    @property
    def capacity(self) -> Capacity:
        return _capacity(self.executor)

    def verify(self, plan: StepPlan) -> Verified:
        assert self._share is not None, "followers follow"
        self._share(plan)
        return self._verify(plan)

    def commit(self, plan: StepPlan, moves: Moves) -> None:
        if plan.told:
            message = self._message(plan)
            message[:, 0] = 1 if moves.kept is None else moves.kept
            message[:, 1:] = moves.ahead
            self._mesh.broadcast(message)
        self.executor.move(plan, moves)

    def free(self) -> None:
        self.executor.free()

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """A follower's whole step."""
        verified = self._verify(plan)
        if not plan.draws:
            return
        if plan.told:
            message = self._mesh.broadcast(self._message(plan))
            moves = Moves(message[:, 0].to(torch.int32), message[:, 1:])
        else:
            assert verified.best is not None
            moves = Moves(None, verified.best[: plan.draws, None])
        self.executor.move(plan, moves)

    def _verify(self, plan: StepPlan) -> Verified:
        ran = self.executor.run(plan)
        if ran.hidden is None:
            return Verified(ran, None, None)
        logits = self.executor.model.logits(ran.hidden)
        if plan.gather_logits:
            whole = self._mesh.all_gather(logits).transpose(0, 1).flatten(1)
            return Verified(ran, None, whole[:, : self._vocab_size])
        # a (value, id) pair a row and rank: the logits themselves do not travel
        pairs = shard_maxima(logits, self._mesh.rank * logits.shape[1])
        return Verified(ran, merged_maxima(self._mesh.all_gather(pairs)), None)

    def _message(self, plan: StepPlan) -> torch.Tensor:
        """[sequences that draw, 2 + drafts] int64: tokens kept, newest token, drafts."""
        return torch.zeros(plan.draws, 2 + plan.drafts, dtype=torch.int64, device=self.executor.device)


def _capacity(executor: Executor) -> Capacity:
    return Capacity(executor.slots, executor.max_seq, executor.drafts)
