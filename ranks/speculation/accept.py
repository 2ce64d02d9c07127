"""What a step's rows draw, and how many drafts that accepts. One rule for greedy and sampled, plain and speculative.

Each row draws as plain decode would at its position. Drafts are accepted while the draw equals the draft; the
first draw that differs, or the last row's, is the bonus. So the tokens are plain decode's, whatever was drafted:
drafts decide how many rows of a step count, never what they say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mstar.ranks.sampler import Sampled


class RowSampler(Protocol):
    """What draws; mstar.ranks.sampler.Sampler."""

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_slots: Sequence[int] | None = None,
    ) -> Sampled: ...

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, host: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def logprob_rows(
        self, scored: torch.Tensor, tokens: torch.Tensor, host: Sequence[int]
    ) -> list[Any] | None: ...

    def wants_logprobs(self, slots: Sequence[int]) -> bool: ...

    def end_runs(self, slots: Sequence[int], runs: Sequence[Sequence[int]]) -> list[tuple[int, int]]: ...

    def stepwise(self, slots: Sequence[int]) -> Collection[int]: ...


@dataclass(frozen=True, slots=True)
class Candidates:
    """The sequences that draw in a step. Rows lie sequence after sequence: one token's, then its drafts'."""

    slots: list[int]
    positions: list[int]  # where the token that a sequence's first row draws will stand
    drafts: list[list[int]]  # checked in this step; a sequence has one row more


@dataclass(slots=True)
class Accepted:
    """What each sequence got. Runs end with the first token that ends the request."""

    runs: list[list[int]]
    accepted: list[int]  # the first so many tokens of a run are drafts
    finish: list[int]  # the sampler's code of the run's last token
    logprobs: list[list[Any] | None] | None  # an entry a token, of sequences that asked; None: nobody did


def accept(
    sampler: RowSampler, candidates: Candidates, best: torch.Tensor | None, logits: torch.Tensor | None
) -> Accepted:
    """Draws all rows, accepts, and moves the sampler's registers past what was kept.

    best: [rows] int64, where the argmax is all that these sequences need; else logits: [rows, vocab] float32.
    Padding rows may follow in both.
    """
    if best is not None:
        return _together(sampler, candidates, best.tolist(), None)
    assert logits is not None
    stepwise = sampler.stepwise(candidates.slots)
    sequences = range(len(candidates.slots))
    if not any(candidates.drafts):
        return _row_by_row(sampler, candidates, logits, list(sequences))
    if not stepwise:
        return _together(sampler, candidates, None, logits)
    # Rows whose draw needs what their own sequence drew before in this step go row by row.
    alone = [i for i in sequences if candidates.slots[i] in stepwise]
    rest = [i for i in sequences if candidates.slots[i] not in stepwise]
    result = _row_by_row(sampler, candidates, logits, alone)
    if rest:
        firsts = _first_rows(candidates)
        rows = [row for i in rest for row in range(firsts[i], firsts[i + 1])]
        part = Candidates(
            [candidates.slots[i] for i in rest],
            [candidates.positions[i] for i in rest],
            [candidates.drafts[i] for i in rest],
        )
        _merge(result, _together(sampler, part, None, logits[rows]), rest)
    return result


def longest_run(draws: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of the drafts are accepted: those before the first that was not drawn."""
    for index, draft in enumerate(drafts):
        if draws[index] != draft:
            return index
    return len(drafts)


def _together(
    sampler: RowSampler, candidates: Candidates, best: list[int] | None, logits: torch.Tensor | None
) -> Accepted:
    """All rows at once: no draw depends on another one of this step."""
    slots, drafts = candidates.slots, candidates.drafts
    drawn: torch.Tensor | None = None
    if best is None:
        assert logits is not None
        host = [
            slot for slot, row_drafts in zip(slots, drafts, strict=True) for _ in range(len(row_drafts) + 1)
        ]
        at = [
            position + row
            for position, row_drafts in zip(candidates.positions, drafts, strict=True)
            for row in range(len(row_drafts) + 1)
        ]
        device = logits.device
        logits = logits[: len(host)]
        drawn, _ = sampler.draw(
            logits, torch.tensor(host, device=device), torch.tensor(at, device=device), host
        )
        best = drawn.tolist()
    runs: list[list[int]] = []
    accepted: list[int] = []
    row = 0
    for row_drafts in drafts:
        count = longest_run(best[row : row + len(row_drafts)], row_drafts) if row_drafts else 0
        accepted.append(count)
        runs.append(best[row : row + count + 1])
        row += len(row_drafts) + 1
    finish: list[int] = []
    for index, (kept, code) in enumerate(sampler.end_runs(slots, runs)):
        if kept < len(runs[index]):
            del runs[index][kept:]
            accepted[index] = min(accepted[index], kept)
        finish.append(code)
    result = Accepted(runs, accepted, finish, None)
    if logits is not None and drawn is not None and sampler.wants_logprobs(slots):
        _add_logprobs(sampler, candidates, result, logits, drawn)
    return result


def _add_logprobs(
    sampler: RowSampler, candidates: Candidates, result: Accepted, logits: torch.Tensor, drawn: torch.Tensor
) -> None:
    """Entries of the rows that were kept."""
    firsts = _first_rows(candidates)
    rows = [firsts[i] + row for i, run in enumerate(result.runs) for row in range(len(run))]
    host = [slot for slot, run in zip(candidates.slots, result.runs, strict=True) for _ in run]
    found = sampler.logprob_rows(logits[rows], drawn[rows], host) or []
    result.logprobs = []
    at = 0
    for run in result.runs:
        entries = found[at : at + len(run)]
        result.logprobs.append(None if entries[0] is None else entries)
        at += len(run)


def _row_by_row(
    sampler: RowSampler, candidates: Candidates, logits: torch.Tensor, sequences: list[int]
) -> Accepted:
    """The first rows of these sequences, then the second rows of those whose first draft was accepted, and on.

    The result has entries for all candidates; those of other sequences are empty.
    """
    total = len(candidates.slots)
    result = Accepted([[] for _ in range(total)], [0] * total, [0] * total, None)
    firsts = _first_rows(candidates)
    device = logits.device
    active, row = sequences, 0
    while active:
        host = [candidates.slots[i] for i in active]
        at = [firsts[i] + row for i in active]
        whole = at == list(range(logits.shape[0]))
        sampled = sampler.sample(
            logits if whole else logits[at],
            torch.tensor(host, device=device),
            torch.tensor([candidates.positions[i] + row for i in active], device=device),
            host,
        )
        tokens, codes = sampled.tokens.tolist(), sampled.finish.tolist()
        following = []
        for place, i in enumerate(active):
            result.runs[i].append(tokens[place])
            result.finish[i] = codes[place]
            if sampled.logprobs is not None and sampled.logprobs[place] is not None:
                result.logprobs = result.logprobs or [None] * total
                entries = result.logprobs[i] or []
                entries.append(sampled.logprobs[place])
                result.logprobs[i] = entries
            drafts = candidates.drafts[i]
            if row < len(drafts) and tokens[place] == drafts[row]:
                result.accepted[i] += 1
                if not codes[place]:
                    following.append(i)
        active, row = following, row + 1
    return result


def _merge(into: Accepted, part: Accepted, sequences: list[int]) -> None:
    """Writes the entries of `part` to those of `sequences`."""
    if part.logprobs is not None:
        into.logprobs = into.logprobs or [None] * len(into.runs)
    for place, i in enumerate(sequences):
        into.runs[i], into.accepted[i] = part.runs[place], part.accepted[place]
        into.finish[i] = part.finish[place]
        if part.logprobs is not None and into.logprobs is not None:
            into.logprobs[i] = part.logprobs[place]


def _first_rows(candidates: Candidates) -> list[int]:
    """[sequences + 1]"""
    firsts = [0]
    for drafts in candidates.drafts:
        firsts.append(firsts[-1] + len(drafts) + 1)
    return firsts
