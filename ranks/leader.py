"""A step on rank 0: verify, accept, draft, commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mstar.ranks.device_steps import DeviceSteps
from mstar.ranks.executor import Moves
from mstar.ranks.plan import Drawn, StepPlan
from mstar.ranks.speculation.accept import Accepted, Candidates, RowSampler, accept
from mstar.ranks.speculation.backend import TrunkBackend, Verified
from mstar.ranks.speculation.draft import Chain, Following


class InFlight(Protocol):
    """A step that was launched."""

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> Drawn: ...

    def device_times(self) -> list[tuple[str, float]]:
        """Seconds on the device by phase, once it was waited for."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that ran while it was launched."""

    drawn: Drawn
    done: bool = True

    def wait(self) -> Drawn:
        return self.drawn

    def device_times(self) -> list[tuple[str, float]]:
        return []


class Leader:
    """Runs plans over all ranks and says what they drew.

    chain: where the load speculates. steps: where plain steps need not be waited for.
    """

    def __init__(
        self,
        backend: TrunkBackend,
        sampler: RowSampler,
        chain: Chain | None = None,
        steps: DeviceSteps | None = None,
    ) -> None:
        self.backend = backend
        self._sampler = sampler
        self._chain = chain
        self._steps = steps

    @property
    def steps_ahead(self) -> int:
        """Steps that are worth launching before the results of the one before them."""
        return 0 if self._steps is None else 1

    def runs_ahead(self, plan: StepPlan) -> bool:
        """Whether `launch` returns before this step has run."""
        return self._steps is not None and self._steps.takes(plan)

    def launch(self, plan: StepPlan) -> InFlight:
        """Begins a step on every rank; those before it may be under way."""
        if self.runs_ahead(plan):
            assert self._steps is not None
            return self._steps.launch(plan)
        return Finished(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Drawn:
        """Runs one step on every rank."""
        verified = self.backend.verify(plan)
        if not plan.draws:
            if self._chain is not None:
                self._draft(plan, verified, None, [])
            return Drawn([], [])
        candidates = _candidates(plan, verified)
        accepted = accept(self._sampler, candidates, verified.best, verified.logits)
        drafts = self._draft(plan, verified, accepted, candidates.positions)
        self.backend.commit(plan, self._moves(plan, accepted, drafts))
        return Drawn(
            accepted.runs,
            accepted.finish,
            accepted.logprobs,
            accepted.accepted,
            [len(tokens) for tokens in drafts],
        )

    def free(self) -> None:
        """Drops graphs, caches, windows and the head."""
        if self._steps is not None:
            self._steps.free()
        self.backend.free()
        self._chain = None

    def _draft(
        self, plan: StepPlan, verified: Verified, accepted: Accepted | None, positions: list[int]
    ) -> list[list[int]]:
        """Runs the head over what speculating sequences got; returns drafts a sequence that draws."""
        following = _following(plan, accepted, positions)
        if not following:
            return [[] for _ in range(plan.draws)]
        assert self._chain is not None, "the plan speculates and no head is loaded"
        ran, executor = verified.ran, self.backend.executor
        parts = [part for part in (ran.chunk_hidden, ran.hidden) if part is not None]
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        made = self._chain.run(following, hidden, executor.block_table, executor.tables_version)
        drafts: list[list[int]] = [[] for _ in range(plan.draws)]
        for sequence, tokens in zip(following, made, strict=True):
            if sequence.draws >= 0:
                drafts[sequence.draws] = tokens
        return drafts

    def _moves(self, plan: StepPlan, accepted: Accepted, drafts: list[list[int]]) -> Moves:
        device = self.backend.executor.device
        width = plan.drafts
        newest = [run[-1] for run in accepted.runs]
        if width:
            ahead = [
                [token, *tokens, *(0,) * (width - len(tokens))]
                for token, tokens in zip(newest, drafts, strict=True)
            ]
        else:
            ahead = [[token] for token in newest]
        kept = None
        if plan.decode_counts:
            kept = torch.tensor([len(run) for run in accepted.runs], dtype=torch.int32, device=device)
        return Moves(kept, torch.tensor(ahead, device=device))


def _candidates(plan: StepPlan, verified: Verified) -> Candidates:
    """The sequences that draw: final chunks, then the decode part."""
    finals = [chunk for chunk in plan.chunks if chunk.final]
    slots = [chunk.slot for chunk in finals] + plan.decode_slots
    positions = [chunk.start + len(chunk.token_ids) for chunk in finals]
    drafts: list[list[int]] = [[] for _ in finals]
    ran = verified.ran
    if ran.seq_lens is not None:
        positions += ran.seq_lens.tolist()
        if plan.decode_counts:
            assert ran.token_ids is not None
            tokens, row = ran.token_ids.tolist(), 0
            for count in plan.decode_counts:
                drafts.append(tokens[row + 1 : row + count])
                row += count
        else:
            drafts += [[] for _ in plan.decode_slots]
    return Candidates(slots, positions, drafts)


def _following(plan: StepPlan, accepted: Accepted | None, positions: list[int]) -> list[Following]:
    """What pass 0 runs over: rows count from the chunks' first one where the head follows any chunk."""
    following: list[Following] = []
    row = draw = 0
    chunk_rows = any(chunk.head for chunk in plan.chunks)
    for chunk in plan.chunks:
        size = len(chunk.token_ids)
        if chunk.head and not chunk.final:
            following.append(
                Following(chunk.slot, chunk.start, row, [*chunk.token_ids[1:], chunk.next_id], 0)
            )
        elif chunk.head and accepted is not None and not accepted.finish[draw]:
            next_ids = chunk.token_ids[1:] + accepted.runs[draw]
            most = _room(plan, draw, positions[draw] + 1)
            following.append(Following(chunk.slot, chunk.start, row, next_ids, most, draw))
        draw += chunk.final
        row += size
    if not plan.draft_most or accepted is None:
        return following
    row = (row if chunk_rows else 0) + draw  # the final chunks' rows come again before the decode part's
    for place, slot in enumerate(plan.decode_slots):
        if plan.draft_most[draw] >= 0 and not accepted.finish[draw]:
            run = accepted.runs[draw]
            most = _room(plan, draw, positions[draw] + len(run))
            following.append(Following(slot, positions[draw] - 1, row, run, most, draw))
        row += plan.decode_counts[place] if plan.decode_counts else 1
        draw += 1
    return following


def _room(plan: StepPlan, draw: int, length: int) -> int:
    """Drafts to make for a sequence that has `length` tokens now."""
    return max(0, min(plan.draft_most[draw], plan.draft_ends[draw] - length))
