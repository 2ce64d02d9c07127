"""The edges of a decode step on the device: what its rows begin with, and what they draw. Torch references.

Values never pass through the host: tokens and lengths stay in registers by slot, and what the host must learn is
written to `out`, memory of its own where a GPU steps: a copy behind the step took 11 us.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mstar.kernels.gumbel import gumbel
from mstar.kernels.vocab.filters import thresholds

# Below this a temperature draws greedily (as in vLLM): logits over it would leave no room for the noise.
LEAST_TEMPERATURE = 1e-5
RUNNING, STOP, LENGTH = 0, 1, 2  # finish codes
PAGES = 3  # of results: the step that runs, the one behind it, and one that the host still reads


@dataclass(frozen=True, slots=True)
class StepRegisters:
    """What draws read and move, an entry a slot; slot 0 is the sink of padding rows."""

    temperature: torch.Tensor  # [slots] float32, below LEAST_TEMPERATURE for greedy
    seed: torch.Tensor  # [slots] int64
    top_k: torch.Tensor  # [slots] int64, 0 for off
    top_p: torch.Tensor  # [slots] float32, 1 for off
    min_p: torch.Tensor  # [slots] float32, 0 for off
    left: torch.Tensor  # [slots] int64, tokens until max_tokens
    stop_ids: torch.Tensor  # [slots, most] int64, padded with -1
    ahead: torch.Tensor  # [slots, 1 + drafts] int64, the newest token first, whose KV is not there yet
    lengths: torch.Tensor  # [slots] int32, tokens whose KV is there; the sink's stays 0
    # [slots] int32, of these the newest ones that the GDN states are behind by; None: a load without drafts
    pending: torch.Tensor | None = None
    # [1] int64, the page of results that the step under way writes to: each `begin_step` moves it on by one
    turn: torch.Tensor | None = None


def begin_step(
    slots: torch.Tensor,
    registers: StepRegisters,
    embed: Callable[[torch.Tensor], torch.Tensor],
    rows_per_seq: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The embedding of each row's token, and where sequences stand.

    slots: [seqs] int32; embed: the embedding's rows of ids [rows] int64, [rows, hidden].
    Returns x [seqs * rows_per_seq, hidden], starts [seqs] int64, fresh [seqs] uint8 (padding rows).
    """
    if registers.turn is not None:
        registers.turn.add_(1).remainder_(PAGES)
    index = slots.long()
    x = embed(registers.ahead[index, :rows_per_seq].reshape(-1))
    return x, registers.lengths[index].long(), (slots == 0).to(torch.uint8)


def filter_thresholds(logits: torch.Tensor, slots: torch.Tensor, registers: StepRegisters) -> torch.Tensor:
    """The least logit over temperature that top-k, top-p and min-p keep of each row; of greedy rows it means nothing.

    logits: [seqs, vocab] float32; slots: [seqs] int32. Returns [seqs] float32, the `least` of `draw_step`.
    """
    index = slots.long()
    scaled = logits / registers.temperature[index][:, None]
    filters = (registers.top_k[index], registers.top_p[index], registers.min_p[index])
    return thresholds(scaled, *filters, sort=True)[:, 0]


def draw_step(
    logits: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    registers: StepRegisters,
    out: torch.Tensor,
    least: torch.Tensor | None = None,
) -> None:
    """Draws one token a sequence, moves its registers past it, and writes (token, finish code) to `out`.

    logits: [seqs, vocab] float32; slots: [seqs] int32; starts: [seqs] int64, the position of the row that the
    logits are of: the drawn token will stand one further. out: [seqs, 2] int64, or [PAGES, seqs, 2], of which the
    registers' turn says the page. least: [seqs] float32, the least scaled logit that a row's filters keep.
    """
    if out.dim() == 3:
        assert registers.turn is not None
        out = out[int(registers.turn)]
    index = slots.long()
    temperature = registers.temperature[index]
    sampled = (temperature >= LEAST_TEMPERATURE)[:, None]
    scaled = torch.where(sampled, logits / temperature[:, None], logits)
    noised = torch.where(sampled, scaled + gumbel(registers.seed[index], starts + 1, logits.shape[1]), logits)
    if least is not None:
        noised = noised.masked_fill((scaled < least[:, None]) & sampled, float("-inf"))
    tokens = noised.argmax(1)
    owned = slots != 0
    registers.ahead[index, 0] = tokens.masked_fill(~owned, 0)
    registers.lengths.index_add_(0, index, owned.to(torch.int32))
    if registers.pending is not None:
        registers.pending.index_fill_(0, index, 0)
    left = registers.left[index] - 1
    registers.left.index_copy_(0, index, left)
    stop = (registers.stop_ids[index] == tokens[:, None]).any(1)
    out[:, 0] = tokens
    out[:, 1] = torch.where(stop, STOP, torch.where(left <= 0, LENGTH, RUNNING))
