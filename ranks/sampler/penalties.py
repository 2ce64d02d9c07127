"""Repetition, presence and frequency penalties, and the counts of tokens that they need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mstar.ranks.messages import SamplingParams


class Penalties:
    """Per-slot penalties over a vocabulary.

    The counts take 5 bytes a slot and token id (81 MB for 65 slots of 248,320 ids), so they are allocated
    with the first request that has a penalty, once, and stay.
    """

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.members: set[int] = set()
        self._shape = (num_slots, vocab_size)
        self._repetition = torch.ones(num_slots, device=device)
        self._presence = torch.zeros(num_slots, device=device)
        self._frequency = torch.zeros(num_slots, device=device)
        self._counts = torch.empty(
            0, dtype=torch.int32, device=device
        )  # [slots, vocab], tokens of the output
        self._prompt = torch.empty(
            0, dtype=torch.bool, device=device
        )  # [slots, vocab], whether the prompt has it

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    def admit(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Counts a request's tokens so far; does nothing for a request without penalties."""
        if not self.wanted(params):
            return
        if not self._counts.numel():
            self._counts = self._counts.new_zeros(self._shape)
            self._prompt = self._prompt.new_zeros(self._shape)
        self.members.add(slot)
        self._repetition[slot].fill_(params.repetition_penalty)
        self._presence[slot].fill_(params.presence_penalty)
        self._frequency[slot].fill_(params.frequency_penalty)
        device = self._counts.device
        output = torch.tensor(list(output_ids), dtype=torch.int64, device=device)
        self._counts[slot] = torch.bincount(output, minlength=self.vocab_size)
        self._prompt[slot] = False
        self._prompt[slot, torch.tensor(list(prompt_ids), dtype=torch.int64, device=device)] = True

    def release(self, slot: int) -> None:
        self.members.discard(slot)

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Penalised logits of rows of slots that have penalties.

        Repetition first (over prompt and output: positive logits divided, negative multiplied), then
        frequency times a token's count in the output, then presence. logits: [rows, vocab] float32, left as
        it is.
        """
        counts = self._counts.index_select(0, slots)
        drawn = counts > 0
        seen = drawn | self._prompt.index_select(0, slots)
        repetition = self._repetition.index_select(0, slots).unsqueeze(1)
        frequency = self._frequency.index_select(0, slots).unsqueeze(1)
        presence = self._presence.index_select(0, slots).unsqueeze(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        penalised = torch.where(seen, repeated, logits)
        return penalised.sub_(counts * frequency).sub_(drawn * presence)

    def count(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """Adds one output token a row; tokens, slots: [rows] int64, slots with penalties."""
        one = torch.ones(tokens.shape, dtype=torch.int32, device=tokens.device)
        self._counts.index_put_((slots, tokens), one, accumulate=True)
