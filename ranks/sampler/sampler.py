"""Draws each row's next token: penalties, logprobs, min_tokens, temperature, filters, Gumbel-max.

Greedy rows take the argmax. Sampled rows take argmax(logits / temperature + noise) over what the filters
left, which draws from exactly that distribution; the noise is keyed by (seed, position, token id), so a
request's stream is the same whatever shares its batch. Ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mstar.kernels.gumbel import gumbel, gumbel_at
from mstar.kernels.vocab.filters import candidate_thresholds, nucleus_thresholds, thresholds
from mstar.ranks.messages import SamplingParams
from mstar.ranks.sampler.logprobs import logprob_entries
from mstar.ranks.sampler.penalties import Penalties
from mstar.ranks.sampler.registers import Draw, Registers

# Logits of a pass over whole rows on a CPU: larger temporaries come from the system page by page, each time
# (16 rows of 248,320 ids: 102 ms at once, 39 ms in parts of this size).
_CPU_LOGITS = 2**19


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens, row by row."""

    tokens: torch.Tensor  # [rows] int64
    finish: torch.Tensor  # [rows] int8: RUNNING, STOP or LENGTH
    # None if no row asked for them; else an entry of TokenRun.logprobs a row, None where not asked
    logprobs: list[Any] | None


class Sampler:
    """The draws of up to `num_slots` - 1 requests; slot 0 takes padding rows, whose tokens mean nothing."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.registers = Registers(vocab_size, num_slots, device)
        self._penalties = Penalties(vocab_size, num_slots, device)
        self._logprobs: dict[int, int] = {}
        self._special: set[int] = set()  # every slot that needs more than an argmax

    def admit(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> None:
        """Takes a request into a free slot.

        output_ids: what it has drawn already, when it comes back after a preemption; counts of tokens, of
        thinking and for the penalties go on from there.
        """
        self.registers.admit(slot, params, output_ids)
        self._penalties.admit(slot, params, prompt_ids, output_ids)
        if params.logprobs is not None:
            self._logprobs[slot] = params.logprobs
        registers = self.registers
        special = (
            registers.sampled,
            registers.held_back,
            registers.capped,
            self._penalties.members,
            self._logprobs,
        )
        if any(slot in members for members in special):
            self._special.add(slot)

    def release(self, slot: int) -> None:
        """Frees a slot; a step that still has rows of it is harmless."""
        self.registers.release(slot)
        self._penalties.release(slot)
        self._logprobs.pop(slot, None)
        self._special.discard(slot)

    def plain_greedy(self, slots: Collection[int]) -> bool:
        """Whether the argmax is all that these slots need: then tokens may be drawn elsewhere."""
        return self._special.isdisjoint(slots)

    def draws_on_device(self, slots: Iterable[int]) -> bool:
        """Whether temperature, top-k, top-p and min-p are all that these slots need.

        Then `mstar.kernels.step` draws for them and moves their registers.
        """
        registers = self.registers
        more = (registers.held_back, registers.capped, self._penalties.members, self._logprobs)
        return not any(slot in self._special and any(slot in members for members in more) for slot in slots)

    def filtered(self, slots: Iterable[int]) -> bool:
        """Whether any of these slots draws from less than the whole vocabulary."""
        return any(slot in self._special and self.registers.filtered(slot) for slot in slots)

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_slots: Sequence[int] | None = None,
    ) -> Sampled:
        """Draws one token a row and moves each row's request past it.

        logits: [rows, vocab_size or more] float32, columns past the vocabulary ignored, not written to.
        slots: [rows] int64, no slot but 0 twice. positions: [rows] int64, where the drawn token will stand
        (any numbering that is the same in a re-run; it keys the noise). host_slots: `slots` as the host knows
        them; without it they are read back, which makes a device wait.
        """
        host = slots.tolist() if host_slots is None else host_slots
        tokens, scored = self.draw(logits, slots, positions, host)
        logprobs = self.logprob_rows(scored, tokens, host)
        return Sampled(tokens, self.commit(tokens, slots, host), logprobs)

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, host: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of `sample`, and the logits that their logprobs are of; changes no register.

        Slots may have several rows, which draw as if each were the slot's only one: what the others would
        change counts for slots that are `stepwise`.
        """
        registers = self.registers
        registers.settle()
        logits = logits[:, : self.vocab_size]
        if rows := _rows_of(host, self._penalties.members):
            logits = _replace(logits, rows, lambda part, at: self._penalties.apply(part, slots[at]))
        scored = logits
        if rows := _rows_of(host, registers.held_back):
            logits = _replace(logits, rows, lambda part, at: registers.hold_back(part, slots[at]))

        sampled = _rows_of(host, registers.sampled)
        if len(sampled) < len(host):
            tokens = logits.argmax(1)
        else:
            tokens = torch.empty_like(slots)
        if sampled:
            self._draw_sampled(tokens, logits, slots, positions, host, sampled)
        if rows := _rows_of(host, registers.capped):
            tokens = _replace(tokens, rows, lambda part, at: registers.force_think_end(part, slots[at]))
        return tokens, scored

    def commit(self, tokens: torch.Tensor, slots: torch.Tensor, host: Sequence[int]) -> torch.Tensor:
        """Moves each row's request past its token: counts, penalties, thinking. Returns [rows] int8 codes."""
        if rows := _rows_of(host, self._penalties.members):
            at = _index(rows, len(host), tokens.device)
            self._penalties.count(tokens[at], slots[at])
        if rows := _rows_of(host, self.registers.capped):
            at = _index(rows, len(host), tokens.device)
            self.registers.count_thinking(tokens[at], slots[at])
        return self.registers.advance(tokens, slots)

    def logprob_rows(
        self, scored: torch.Tensor, tokens: torch.Tensor, host: Sequence[int]
    ) -> list[Any] | None:
        """`Sampled.logprobs` of rows that drew `tokens` from `scored`, [rows, vocab] float32."""
        rows = _rows_of(host, self._logprobs)
        if not rows:
            return None
        at = _index(rows, len(host), tokens.device)
        found = logprob_entries(scored[at], tokens[at], [self._logprobs[host[row]] for row in rows])
        entries: list[Any] = [None] * len(host)
        for row, entry in zip(rows, found, strict=True):
            entries[row] = entry
        return entries

    def stepwise(self, slots: Iterable[int]) -> set[int]:
        """Of these slots, those whose draw depends on the tokens that they drew last: one row at a time."""
        registers = self.registers
        return {
            slot
            for slot in slots
            if slot in self._special
            and (slot in self._penalties.members or slot in registers.held_back or slot in registers.capped)
        }

    def wants_logprobs(self, slots: Collection[int]) -> bool:
        return bool(self._logprobs) and not self._logprobs.keys().isdisjoint(slots)

    def end_runs(self, slots: Sequence[int], runs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """`commit` for runs of tokens of slots that are not `stepwise`, each slot once.

        Returns how many tokens of each run are kept, at least one, and the finish code of the last one kept.
        """
        return self.registers.advance_runs(slots, runs)

    def _draw_sampled(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host: Sequence[int],
        sampled: list[int],
    ) -> None:
        """Writes the sampled rows of `tokens`, each in the cheapest way for it."""
        ways: dict[Draw, list[int]] = {}
        for row in sampled:
            ways.setdefault(self.registers.draw[host[row]], []).append(row)
        for way, rows in ways.items():
            at = _index(rows, len(host), tokens.device)
            if way is Draw.NARROW:
                widest = max(self.registers.narrow_k[host[row]] for row in rows)
                tokens[at] = self._draw_narrow(logits[at], slots[at], positions[at], widest)
            else:
                tokens[at] = self._draw_wide(logits[at], slots[at], positions[at], way)

    def _draw_wide(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, way: Draw
    ) -> torch.Tensor:
        """Draws among the whole vocabulary."""
        rows = logits.shape[0]
        if logits.device.type == "cpu" and rows > 1 and logits.numel() > _CPU_LOGITS:
            # The noise knows no batch, so halves of it draw the same tokens.
            half = rows // 2
            first = self._draw_wide(logits[:half], slots[:half], positions[:half], way)
            return torch.cat([first, self._draw_wide(logits[half:], slots[half:], positions[half:], way)])
        registers = self.registers
        scaled = logits / registers.temperature.index_select(0, slots).unsqueeze(1)
        noised = gumbel(registers.seed.index_select(0, slots), positions, self.vocab_size).add_(scaled)
        if way is not Draw.OPEN:
            top_p, min_p = registers.top_p.index_select(0, slots), registers.min_p.index_select(0, slots)
            if way is Draw.NUCLEUS:
                least = nucleus_thresholds(scaled, top_p, min_p)
            else:
                top_k = registers.top_k.index_select(0, slots)
                least = thresholds(scaled, top_k, top_p, min_p, sort=way is Draw.SORTED)
            noised.masked_fill_(scaled < least, -torch.inf)
        return noised.argmax(1)

    def _draw_narrow(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, widest: int
    ) -> torch.Tensor:
        """Draws among the best `widest` + 1 tokens of rows whose top-k is at most `widest`."""
        registers = self.registers
        best = logits.topk(min(widest + 1, self.vocab_size), dim=1)
        scaled = best.values / registers.temperature.index_select(0, slots).unsqueeze(1)
        least, tied = candidate_thresholds(
            scaled,
            registers.top_k.index_select(0, slots),
            registers.top_p.index_select(0, slots),
            registers.min_p.index_select(0, slots),
        )
        noised = gumbel_at(registers.seed.index_select(0, slots), positions, best.indices).add_(scaled)
        noised.masked_fill_(scaled < least, -torch.inf)
        # Candidates are not in the order of their ids: the lowest of equal ones is looked for.
        beaten = noised < noised.amax(1, keepdim=True)
        tokens = best.indices.masked_fill(beaten, self.vocab_size).amin(1)
        if bool(tied.any()):
            at = tied.nonzero().squeeze(1)
            tokens[at] = self._draw_wide(logits[at], slots[at], positions[at], Draw.SORTED)
        return tokens


_At = slice | torch.Tensor


def _rows_of(host: Sequence[int], members: Collection[int]) -> list[int]:
    """The rows whose slot is one of `members`."""
    if not members:
        return []
    return [row for row, slot in enumerate(host) if slot in members]


def _index(rows: list[int], total: int, device: torch.device) -> _At:
    """Picks rows of a tensor; all of them without a copy."""
    return slice(None) if len(rows) == total else torch.tensor(rows, dtype=torch.int64, device=device)


def _replace(
    whole: torch.Tensor, rows: list[int], change: Callable[[torch.Tensor, _At], torch.Tensor]
) -> torch.Tensor:
    """`whole` with some rows changed, as a new tensor."""
    at = _index(rows, whole.shape[0], whole.device)
    if isinstance(at, slice):
        return change(whole, at)
    return whole.index_copy(0, at, change(whole[at], at))
