"""The best token of each row: of a shard, and over shards. Ties go to the lowest id everywhere."""

from __future__ import annotations

import torch

from mstar.kernels.argmax import argmax_rows


def shard_maxima(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """[2, rows] float64: each row's largest logit and its id, of a shard whose ids begin at `first_id`.

    float64 holds a float32 value and an id exactly, so that one gather moves both.
    """
    ids = argmax_rows(logits)
    best = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    return torch.stack((best.double(), (ids + first_id).double()))


def merged_maxima(gathered: torch.Tensor) -> torch.Tensor:
    """[rows] int64 ids of the largest of every shard's `shard_maxima`, gathered: [ranks, 2, rows]."""
    winner = gathered[:, 0].argmax(
        0, keepdim=True
    )  # the first of equal ones: the lowest rank has the lowest id
    return gathered[:, 1].gather(0, winner).squeeze(0).to(torch.int64)
