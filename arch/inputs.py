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
class PaddedPrefill:
    """Chunks of prompts of up to `sequences` requests in up to `rows` rows, all on the device: fit for capture.

    Surplus sequences have no rows and slot 0, surplus rows are token 0 and nobody's.
    """

    token_ids: torch.Tensor  # [rows] int64
    cu_rows: torch.Tensor  # [sequences + 1] int64, where each chunk's rows begin
    starts: torch.Tensor  # [sequences] int64, tokens of the sequence before the chunk
    last_rows: torch.Tensor  # [sequences] int64
    slots: torch.Tensor  # [sequences] int32
    chunk_table: torch.Tensor  # see mstar.kernels.rows.Rows
    chunk_borders: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The newest token of each of `seqs` sequences, and drafts of the tokens after it where there are any.

    Padded to a bucket with slot 0, block 0, seq_len 1.
    """

    token_ids: torch.Tensor  # [rows] int64, sequence after sequence
    seq_lens: torch.Tensor  # [seqs] int32, length with the first of these rows, which stands at seq_len - 1
    slots: torch.Tensor  # [seqs] int32
    block_tables: torch.Tensor  # [seqs, blocks] int32, padded with block 0
    counts: tuple[int, ...] | None = None  # [seqs] rows: one token and the drafts behind it; None: no drafts
    pending: torch.Tensor | None = (
        None  # [seqs] int32, drafts accepted in the sequence's last step; None: none
    )
