"""Argmax within a shard and across shards: torch's own is the oracle, ties go to the lowest id."""

from __future__ import annotations

import pytest
import torch

from mstar.kernels.argmax import argmax_rows
from mstar.ranks.argmax import merged_maxima, shard_maxima


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 63, 64, 65, 128])
def test_best_token_over_shards_is_that_of_the_whole_row_and_ties_go_to_the_lowest_id(
    ranks: int, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    # few values: nearly every row has ties within a shard and across
    logits = torch.randint(0, 9, (rows, 248), generator=generator).float()
    logits[:, 240:] = -torch.inf
    first = (logits == logits.amax(1, keepdim=True)).float().argmax(1)
    shards = logits.chunk(ranks, dim=1)
    gathered = torch.stack([shard_maxima(shard, rank * 248 // ranks) for rank, shard in enumerate(shards)])
    assert torch.equal(merged_maxima(gathered), first)
    assert torch.equal(argmax_rows(logits), first)
