"""What the sampler knows of each slot: how its request draws, and how far it is.

Values live in tensors on the device, one entry a slot, so that a step reads and moves them without the host.
What the host must know to choose a step's work (who is greedy, who has filters) is kept beside them in sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from mstar.kernels.staging import staged
from mstar.kernels.step import LEAST_TEMPERATURE, LENGTH, RUNNING, STOP
from mstar.ranks.messages import SamplingParams

# What the protocol calls the codes of a step's `finish`.
FINISH_REASONS: tuple[str | None, ...] = (None, "stop", "length")

# Above this a top-k is looked for in the sorted vocabulary: the best few no longer come cheaper.
WIDEST_CANDIDATES = 256

_NO_LIMIT = 2**62
_FIRST_STOPS = 4
# What the protocol lets a request ask for, and its model's ends: captured steps hold the tensor as it is.
_DEVICE_STOPS = 1024 + 64


class Draw(Enum):
    """The least work that draws a slot's tokens; every way gives the same token."""

    GREEDY = 0
    OPEN = 1  # temperature alone
    FLOOR = 2  # min-p, which needs only the maximum
    NARROW = 3  # a top-k small enough to draw among the best tokens (CPU)
    NUCLEUS = 4  # top-p without top-k (CPU)
    SORTED = 5  # whatever is left, from the sorted vocabulary


@dataclass(frozen=True, slots=True)
class _Row:
    """What every request has a register for; by default as harmless as slot 0's."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    left: int = _NO_LIMIT
    top_k: int = 0
    seed: int = 0
    stops: Sequence[int] = ()


class Registers:
    """Registers of `num_slots` slots, slot 0 included, which takes padding rows and belongs to no request.

    What slots come and go with is written by `settle`, for all of them at once: a burst of 64 requests would wait
    for a thousand small copies otherwise.
    """

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        def per_slot(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        def together(first: float, second: float, third: float, dtype: torch.dtype) -> torch.Tensor:
            # each of the three begins at a multiple of 16 bytes: Triton compiles kernels anew for others
            values = torch.tensor([[first], [second], [third]], dtype=dtype, device=device)
            return values.repeat(1, -(-num_slots // 4) * 4)

        self.vocab_size = vocab_size
        self.device = device
        self._floats = together(0.0, 1.0, 0.0, torch.float32)
        self.temperature = self._floats[0, :num_slots]
        self.top_p = self._floats[1, :num_slots]
        self.min_p = self._floats[2, :num_slots]
        self._ints = together(_NO_LIMIT, 0, 0, torch.int64)
        self.left = self._ints[0, :num_slots]  # tokens until max_tokens
        self.top_k = self._ints[1, :num_slots]
        self.seed = self._ints[2, :num_slots]
        self.held_above = per_slot(_NO_LIMIT, torch.int64)  # while `left` is above, min_tokens is not reached
        # Ids that end the request, padded with -1; as wide as the longest list so far.
        width = _FIRST_STOPS if device.type == "cpu" else _DEVICE_STOPS
        self._most_stops = vocab_size if device.type == "cpu" else width
        self.stop_ids = torch.full((num_slots, width), -1, dtype=torch.int64, device=device)
        self.in_think = per_slot(0, torch.bool)
        self.think_count = per_slot(0, torch.int64)
        self.think_cap = per_slot(_NO_LIMIT, torch.int64)
        self.think_start = per_slot(-1, torch.int64)
        self.think_end = per_slot(-1, torch.int64)

        self._unsettled: dict[int, _Row] = {}
        self._columns = [0] * num_slots  # of `stop_ids`, that may hold an id
        self.stops: list[frozenset[int]] = [frozenset()] * num_slots  # `stop_ids` as the host looks them up
        self.draw: list[Draw] = [Draw.GREEDY] * num_slots
        self.narrow_k: list[int] = [0] * num_slots  # a NARROW slot's top-k
        self.sampled: set[int] = set()
        self.held_back: set[int] = set()  # with min_tokens
        self.capped: set[int] = set()  # with max_think_tokens

    def admit(self, slot: int, params: SamplingParams, output_ids: Sequence[int]) -> None:
        """Sets a slot's registers as they stand after `output_ids`, which it drew before a preemption."""
        draw = self._way(params)
        self.draw[slot] = draw
        stops = sorted(i for i in {*params.stop_ids, *params.eos_ids} if 0 <= i < self.vocab_size)
        if len(stops) > self._most_stops:
            raise ValueError(
                f"{len(stops)} ids end the answer, and a step here looks among {self._most_stops}"
            )
        self.stops[slot] = frozenset(stops)
        left = params.max_tokens - len(output_ids)
        if draw is Draw.GREEDY:
            self._unsettled[slot] = _Row(left=left, stops=stops)
        else:
            self.sampled.add(slot)
            self.narrow_k[slot] = params.top_k
            top_k = params.top_k if params.top_k < self.vocab_size else 0
            row = _Row(
                params.temperature, params.top_p, params.min_p, left, top_k, _signed(params.seed), stops
            )
            self._unsettled[slot] = row
        if params.min_tokens > 0 and stops:
            self.held_back.add(slot)
            self.held_above[slot].fill_(params.max_tokens - params.min_tokens)
        if params.max_think_tokens is not None and params.think_end_id is not None:
            self._admit_think(slot, params, output_ids, params.max_think_tokens, params.think_end_id)

    def filtered(self, slot: int) -> bool:
        """Whether top-k, top-p or min-p is on for a slot."""
        return self.draw[slot] not in (Draw.GREEDY, Draw.OPEN)

    def release(self, slot: int) -> None:
        """Makes a slot's rows as harmless as those of slot 0, once that is settled."""
        self.draw[slot] = Draw.GREEDY
        for members in (self.sampled, self.held_back, self.capped):
            members.discard(slot)
        self.stops[slot] = frozenset()
        self._unsettled[slot] = _Row()

    def settle(self) -> None:
        """Writes what slots came and went with since the last call; due before a step reads the tensors."""
        if not self._unsettled:
            return
        rows, self._unsettled = self._unsettled, {}
        slots = list(rows)
        width = max(max(len(row.stops), self._columns[slot]) for slot, row in rows.items())
        self._widen(width)
        ints = slots + [getattr(row, name) for name in ("left", "top_k", "seed") for row in rows.values()]
        for place in range(width):
            ints += [row.stops[place] if place < len(row.stops) else -1 for row in rows.values()]
        floats = [getattr(row, name) for name in ("temperature", "top_p", "min_p") for row in rows.values()]
        whole = staged(ints, torch.int64, self.device).view(4 + width, -1)
        index = whole[0]
        self._ints.index_copy_(1, index, whole[1:4])
        self._floats.index_copy_(1, index, staged(floats, torch.float32, self.device).view(3, -1))
        if width:
            self.stop_ids[:, :width].index_copy_(0, index, whole[4:].T)
        for slot, row in rows.items():
            self._columns[slot] = len(row.stops)

    def advance(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Counts one token a row and says which rows it ends.

        tokens, slots: [rows] int64. Returns [rows] int8: RUNNING, STOP or LENGTH; a stop id at the limit is
        STOP.
        """
        self.settle()
        left = self.left.index_select(0, slots).sub_(1)
        self.left.index_copy_(0, slots, left)
        stop = (self.stop_ids.index_select(0, slots) == tokens.unsqueeze(1)).any(1)
        return (left <= 0).view(torch.int8).mul_(LENGTH).masked_fill_(stop, STOP)

    def advance_runs(self, slots: Sequence[int], runs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """`advance` over several tokens a slot, on the host, each slot once.

        Returns (tokens up to the first that ends the request, its code) of each run; later ones do not count.
        """
        self.settle()
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        ends: list[tuple[int, int]] = []
        for slot, run, left in zip(slots, runs, self.left.index_select(0, index).tolist(), strict=True):
            kept, code = len(run), RUNNING
            if kept >= left:
                kept, code = max(1, left), LENGTH
            stops = self.stops[slot]
            for place in range(kept):
                if run[place] in stops:
                    kept, code = place + 1, STOP
                    break
            ends.append((kept, code))
        moved = torch.tensor([kept for kept, _ in ends], dtype=torch.int64, device=self.device)
        self.left.index_add_(0, index, moved.neg_())
        return ends

    def hold_back(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Takes the ids that would end a request from rows whose request is still below its min_tokens.

        logits: [rows, vocab] float32. Returns them with -inf there; the argument is left as it is.
        """
        stops = self.stop_ids.index_select(0, slots)
        early = self.left.index_select(0, slots) > self.held_above.index_select(0, slots)
        # Padding adds 0 to id 0, which is itself unless id 0 is a stop id too.
        bar = torch.zeros(stops.shape, device=logits.device)
        bar.masked_fill_((stops >= 0) & early.unsqueeze(1), -torch.inf)
        return logits.scatter_add(1, stops.clamp(min=0), bar)

    def force_think_end(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Replaces the token of rows that have thought up to their cap by the one that ends thinking."""
        spent = self.think_count.index_select(0, slots) >= self.think_cap.index_select(0, slots)
        spent &= self.in_think.index_select(0, slots)
        return torch.where(spent, self.think_end.index_select(0, slots), tokens)

    def count_thinking(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """Moves the thinking registers past one token a row. The two marks themselves are not counted."""
        inside = self.in_think.index_select(0, slots)
        start = tokens == self.think_start.index_select(0, slots)
        end = tokens == self.think_end.index_select(0, slots)
        self.think_count.index_add_(0, slots, (inside & ~start & ~end).to(torch.int64))
        self.in_think.index_copy_(0, slots, (inside | start) & ~end)

    def _way(self, params: SamplingParams) -> Draw:
        if params.temperature < LEAST_TEMPERATURE:
            return Draw.GREEDY
        top_k = 0 < params.top_k < self.vocab_size
        on_cpu = self.device.type == "cpu"
        if top_k:
            return Draw.NARROW if on_cpu and params.top_k <= WIDEST_CANDIDATES else Draw.SORTED
        if params.top_p < 1.0:
            return Draw.NUCLEUS if on_cpu else Draw.SORTED
        return Draw.FLOOR if params.min_p > 0.0 else Draw.OPEN

    def _widen(self, width: int) -> None:
        missing = width - self.stop_ids.shape[1]
        if missing > 0:
            wider = self.stop_ids.new_full((self.stop_ids.shape[0], missing), -1)
            self.stop_ids = torch.cat([self.stop_ids, wider], dim=1)

    def _admit_think(
        self, slot: int, params: SamplingParams, output_ids: Sequence[int], cap: int, end_id: int
    ) -> None:
        inside, count = params.starts_in_think, 0
        for token in output_ids:
            marks = token == end_id or token == params.think_start_id
            count += inside and not marks
            inside = (inside or token == params.think_start_id) and token != end_id
        self.capped.add(slot)
        self.in_think[slot].fill_(inside)
        self.think_count[slot].fill_(count)
        self.think_cap[slot].fill_(cap)
        self.think_start[slot].fill_(-1 if params.think_start_id is None else params.think_start_id)
        self.think_end[slot].fill_(end_id)


def _signed(seed: int) -> int:
    """The low 64 bits of a seed as int64 holds them."""
    bits = seed & (2**64 - 1)
    return bits - 2**64 if bits >= 2**63 else bits
