"""What one forward pass is told about its rows. Layers get these as arguments; nothing is global."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Chunks of prompts of several requests, one after another, unpadded.

    Shapes on the host (`cu_rows`, `starts`), values on the device.
    """

    token_ids: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64, the row's index in its sequence
    slots: torch.Tensor  # [chunks] int32, the GDN slot of each chunk's request
    block_tables: torch.Tensor  # [chunks, blocks] int32, padded with block 0
    cu_rows: tuple[int, ...]  # [chunks + 1], where each chunk's rows begin
    starts: tuple[
        int, ...
    ]  # [chunks], tokens of the sequence before the chunk; 0 starts from a cleared state


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """`rows_per_seq` rows for each of `seqs` sequences, padded to a bucket with slot 0, block 0, seq_len 1."""

    token_ids: torch.Tensor  # [seqs * rows_per_seq] int64
    seq_lens: (
        torch.Tensor
    )  # [seqs] int32, length with the last of these rows; that row's position is seq_len - 1
    slots: torch.Tensor  # [seqs] int32
    block_tables: torch.Tensor  # [seqs, blocks] int32, padded with block 0
    rows_per_seq: int = 1
