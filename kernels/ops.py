"""The operations that layers call, and what runs them on a device.

`Ops` is the torch reference, on any device and dtype. A subclass replaces what it has a faster kernel for,
keeps the meaning, shapes and dtypes, and is held to the reference by a parity test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mstar.kernels.attention import AttentionWeights, attention_decode, attention_prefill
from mstar.kernels.gdn import GdnWeights, gdn_decode, gdn_prefill
from mstar.kernels.linear import gated_linear, linear
from mstar.kernels.norm import rms_norm
from mstar.kernels.rows import Rows
from mstar.kernels.step import StepRegisters, begin_step, draw_step, filter_thresholds


@dataclass(frozen=True, slots=True)
class Packed:
    """A linear's weight in the layout of the ops that packed it."""

    data: torch.Tensor
    outputs: int
    inputs: int
    halves: int = 1  # 2: gate and up, one above the other


class Ops:
    """The torch reference of every operation."""

    name = "torch"
    ring = False  # how GDN caches hold windows, see mstar.arch.caches.GdnCache
    uniform = False  # whether a decode part's sequences must all have the same number of rows

    def pack_linear(self, weight: torch.Tensor) -> Packed:
        """weight: [n, k], model dtype. The caller drops its own reference: packed weights are the only copy."""
        return Packed(weight, weight.shape[0], weight.shape[1])

    def pack_gated(self, gate: torch.Tensor, up: torch.Tensor) -> Packed:
        """gate, up: [n, k], model dtype, for `gated_linear`."""
        return Packed(torch.cat([gate, up]), 2 * gate.shape[0], gate.shape[1], halves=2)

    def read_in_order(self, weights: Sequence[tuple[Packed, torch.Tensor | None]], eps: float) -> None:
        """Tells in which order a step reads its weights; the first follows the last. With each the norm of its inputs.

        eps: of the norms.
        """

    def unpacked_rows(self, packed: Packed, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a packed weight (a tied embedding's look-up). ids: [rows] int64 -> [rows, k]."""
        return packed.data[ids]

    def embedding_rows(self, embedding: torch.Tensor | Packed, ids: torch.Tensor) -> torch.Tensor:
        """Rows of an embedding, packed where it is also the lm_head. ids: [rows] int64 -> [rows, hidden]."""
        if isinstance(embedding, torch.Tensor):
            return embedding[ids]
        return self.unpacked_rows(embedding, ids)

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        out_f32: bool = False,
    ) -> torch.Tensor:
        """See `mstar.kernels.linear.linear`."""
        return linear(x, weight.data, norm=norm, eps=eps, residual=residual, out_f32=out_f32)

    def gated_linear(
        self, x: torch.Tensor, weight: Packed, *, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `mstar.kernels.linear.gated_linear`."""
        return gated_linear(x, weight.data, norm=norm, eps=eps)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `mstar.kernels.norm.rms_norm`."""
        return rms_norm(x, weight, eps)

    def gdn(
        self,
        proj: torch.Tensor,
        weights: GdnWeights,
        state: torch.Tensor,
        conv: torch.Tensor,
        window: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        """Prefill or decode, by `rows.rows_per_seq`; see `mstar.kernels.gdn`."""
        if rows.rows_per_seq == 0:
            return gdn_prefill(proj, weights, state, conv, rows)
        return gdn_decode(proj, weights, state, conv, window, rows)

    def attention(
        self,
        proj: torch.Tensor,
        weights: AttentionWeights,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: Rows,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Prefill or decode, by `rows.rows_per_seq`; see `mstar.kernels.attention`.

        last_only: all rows write their key and value, each sequence's last one attends: [sequences, ...].
        """
        run = attention_decode if rows.rows_per_seq else attention_prefill
        out = run(proj, weights, k_cache, v_cache, rows)
        return out[rows.cu_rows[1:] - 1] if last_only else out

    def embed(
        self, ids: torch.Tensor, embedding: torch.Tensor | Packed, first_id: int, count: int
    ) -> torch.Tensor:
        """Rows of an embedding, of which `count` ids from `first_id` on are here; other rows are zeros."""
        local = ids - first_id
        absent = (local < 0) | (local >= count)
        rows = self.embedding_rows(embedding, local.masked_fill(absent, 0))
        return rows.masked_fill_(absent[:, None], 0)

    def begin_step(
        self,
        slots: torch.Tensor,
        registers: StepRegisters,
        embedding: torch.Tensor | Packed,
        first_id: int,
        count: int,
        rows_per_seq: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `mstar.kernels.step.begin_step`."""

        def embed(ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids, embedding, first_id, count)

        return begin_step(slots, registers, embed, rows_per_seq)

    def filter_thresholds(
        self, logits: torch.Tensor, slots: torch.Tensor, registers: StepRegisters
    ) -> torch.Tensor:
        """See `mstar.kernels.step.filter_thresholds`."""
        return filter_thresholds(logits, slots, registers)

    def draw_step(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        registers: StepRegisters,
        out: torch.Tensor,
        least: torch.Tensor | None = None,
    ) -> None:
        """See `mstar.kernels.step.draw_step`."""
        draw_step(logits, slots, starts, registers, out, least)


def select_ops(
    device: torch.device, dtype: torch.dtype, block_size: int, dims: Iterable[int]
) -> tuple[Ops, list[str]]:
    """The fastest operations that work here, and notes on what runs its reference instead and why.

    dims: the model's hidden size and head dims, which a kernel may want in multiples.
    """
    if device.type != "cpu":
        return _gpu_ops(device, block_size, dims)
    from mstar.kernels.cpu import CpuOps

    reason = CpuOps.unavailable(dtype, block_size, dims)
    if reason is None:
        return CpuOps(), []
    return Ops(), [f"cpu: operations run their torch reference, slowly: {reason}"]


def _gpu_ops(device: torch.device, block_size: int, dims: Iterable[int]) -> tuple[Ops, list[str]]:
    try:
        from mstar.kernels.triton_ops import TritonOps
    except ImportError as error:
        return Ops(), [f"{device.type}: operations run their torch reference, slowly: {error}"]
    reason = TritonOps.unavailable(device, block_size, dims)
    if reason is not None:
        return Ops(), [f"{device.type}: operations run their torch reference, slowly: {reason}"]
    ops = TritonOps(device)
    return ops, list(ops.table.notes)
