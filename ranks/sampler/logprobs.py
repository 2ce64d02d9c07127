"""Log-probabilities as the events carry them."""

from __future__ import annotations

from typing import Any

import torch


def logprob_entries(logits: torch.Tensor, tokens: torch.Tensor, wanted: list[int]) -> list[Any]:
    """The chosen token's log-probability, and those of the best beside it.

    logits: [rows, vocab] float32, after penalties, before temperature and filters. tokens: [rows] int64.
    wanted: how many best tokens each row asked for, 0 or more. Returns an entry a row:
    [logprob, [[id, logprob], ...]], best first, equal ones by id.
    """
    total = logits.logsumexp(1, keepdim=True)
    chosen = (logits.gather(1, tokens.unsqueeze(1)) - total).squeeze(1).tolist()
    best = logits.topk(max(wanted), dim=1)
    values = (best.values - total).tolist()
    ids = best.indices.tolist()
    return [
        [
            chosen[row],
            sorted(([i, v] for i, v in zip(ids[row][:n], values[row][:n], strict=True)), key=_best_first),
        ]
        for row, n in enumerate(wanted)
    ]


def _best_first(pair: list[Any]) -> tuple[float, int]:
    return -pair[1], pair[0]
