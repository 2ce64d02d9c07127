"""The operations on a GPU: Triton kernels beside their references, and cuBLAS where a table says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from triton.runtime.errors import OutOfResources

from mstar.kernels.attention import AttentionWeights
from mstar.kernels.attention.gpu.run import attention_gpu
from mstar.kernels.gdn import GdnWeights
from mstar.kernels.gdn.gpu.decode import gdn_decode_gpu
from mstar.kernels.gdn.gpu.prefill import gdn_prefill_gpu
from mstar.kernels.linear.gpu.ahead import Ahead
from mstar.kernels.linear.gpu.run import Prepared, run_linear, run_residual
from mstar.kernels.norm.gpu.rows import rms_norm_rows
from mstar.kernels.ops import Ops, Packed
from mstar.kernels.registry import GemmKey, KernelChoice, Table, row_bucket, table_for
from mstar.kernels.rows import Rows
from mstar.kernels.step import StepRegisters
from mstar.kernels.vocab.gpu.begin import begin_step
from mstar.kernels.vocab.gpu.draw import partial_draws
from mstar.kernels.vocab.gpu.finish import finish_step
from mstar.kernels.vocab.gpu.thresholds import filter_thresholds

log = logging.getLogger(__name__)

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CUBLAS = KernelChoice("cublas")


class TritonOps(Ops):
    """bf16, fp16 and float32; weights stay as the checkpoint has them, [n, k]."""

    name = "triton"
    ring = True
    uniform = True

    def __init__(self, device: torch.device, table: Table | None = None) -> None:
        """table: of kernel choices, in place of the device's own."""
        self.table = table_for(device) if table is None else table
        # what the last linear with a residual gave, and what it prepared for the norm behind it
        self._last: tuple[torch.Tensor, Prepared | None] | None = None
        self._next: dict[int, Ahead] = {}  # by a weight's address: what a step reads after it
        self.refused: set[tuple[GemmKey, KernelChoice]] = set()  # what does not fit this GPU

    @staticmethod
    def unavailable(device: torch.device, block_size: int, dims: Iterable[int]) -> str | None:
        """Why this cannot run here, or None. dims: the hidden size and the heads' dims."""
        dims = list(dims)
        odd = [dim for dim in dims if dim % 16]
        if odd:
            return f"Triton kernels take hidden sizes and head dims in multiples of 16, not {odd}"
        # with fewer columns Triton 3.6's products of the chunked delta rule were wrong on an H200 (bf16, 16 columns)
        small = [dim for dim in dims if dim < 64]
        if small:
            return f"Triton kernels take hidden sizes and head dims of 64 or more, not {small}"
        if block_size % 16:
            return f"Triton attention takes KV blocks of 16 or a multiple, not {block_size}"
        return None

    def read_in_order(self, weights: Sequence[tuple[Packed, torch.Tensor | None]], eps: float) -> None:
        for (weight, _), (after, norm) in zip(weights, [*weights[1:], *weights[:1]], strict=True):
            self._next[weight.data.data_ptr()] = Ahead(after.data, after.halves, norm, eps)

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
        kind = (
            "f32" if out_f32 else "residual" if residual is not None else "plain" if norm is None else "norm"
        )
        return self._run(kind, x, weight, weight.outputs, norm, eps, residual)

    def gated_linear(
        self, x: torch.Tensor, weight: Packed, *, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._run("gated", x, weight, weight.outputs // 2, norm, eps, None)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm_rows(x, weight, eps)

    def gdn(
        self,
        proj: torch.Tensor,
        weights: GdnWeights,
        state: torch.Tensor,
        conv: torch.Tensor,
        window: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        if rows.rows_per_seq == 0:
            return gdn_prefill_gpu(proj, weights, state, conv, window, rows)
        return gdn_decode_gpu(proj, weights, state, conv, window, rows)

    def attention(
        self,
        proj: torch.Tensor,
        weights: AttentionWeights,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: Rows,
        last_only: bool = False,
    ) -> torch.Tensor:
        return attention_gpu(proj, weights, k_cache, v_cache, rows, last_only)

    def begin_step(
        self,
        slots: torch.Tensor,
        registers: StepRegisters,
        embedding: torch.Tensor | Packed,
        first_id: int,
        count: int,
        rows_per_seq: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table = embedding if isinstance(embedding, torch.Tensor) else embedding.data
        return begin_step(
            slots,
            registers.ahead,
            registers.lengths,
            table,
            rows_per_seq=rows_per_seq,
            vocab_start=first_id,
            vocab_local=count,
            turn=registers.turn,
        )

    def filter_thresholds(
        self, logits: torch.Tensor, slots: torch.Tensor, registers: StepRegisters
    ) -> torch.Tensor:
        return filter_thresholds(
            logits,
            slots,
            registers.temperature,
            registers.top_k,
            registers.top_p,
            registers.min_p,
            logits.shape[1],
        )

    def draw_step(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        registers: StepRegisters,
        out: torch.Tensor,
        least: torch.Tensor | None = None,
    ) -> None:
        values, ids = partial_draws(
            logits,
            slots,
            starts,
            registers.temperature,
            registers.seed,
            first_id=0,
            vocab=logits.shape[1],
            least=least,
            position_offset=1,
        )
        finish_step(
            values,
            ids,
            slots,
            registers.ahead,
            registers.lengths,
            registers.left,
            registers.stop_ids,
            out,
            pending=registers.pending,
            turn=registers.turn if out.dim() == 3 else None,
        )

    def _run(
        self,
        kind: str,
        x: torch.Tensor,
        weight: Packed,
        outputs: int,
        norm: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        choice, key = self._choice(kind, x, outputs, weight.inputs)
        ahead = self._next.get(weight.data.data_ptr())
        known = self._last[1] if self._last is not None and self._last[0] is x else None
        try:
            if residual is not None:
                scaled = ahead is not None and self._takes_prepared(ahead, x)
                self._last = run_residual(choice, x, weight.data, residual, ahead, scaled)
                return self._last[0]
            return run_linear(choice, x, weight.data, kind=kind, norm=norm, eps=eps, known=known, ahead=ahead)
        except OutOfResources as error:  # at a kernel's first launch, which the warm-up makes
            log.warning("%s: %s does not fit this GPU, cuBLAS runs it: %s", key.name, choice.name, error)
            self.refused.add((key, choice))
            return run_linear(_CUBLAS, x, weight.data, kind=kind, norm=norm, eps=eps, residual=residual)

    def _choice(self, kind: str, x: torch.Tensor, outputs: int, inputs: int) -> tuple[KernelChoice, GemmKey]:
        """What runs a linear of x's rows, and its size."""
        rows = row_bucket(x.shape[0])
        key = GemmKey(kind, rows or 0, outputs, inputs, _DTYPES[x.dtype])
        choice = _CUBLAS if rows is None else self.table.choose(key)
        return (_CUBLAS if (key, choice) in self.refused else choice), key

    def _takes_prepared(self, after: Ahead, x: torch.Tensor) -> bool:
        """Whether the linear after one of x's rows reads products that `run_residual` prepares."""
        if after.norm is None:
            return False
        outputs, inputs = after.weight.shape[0] // after.halves, after.weight.shape[1]
        choice, _ = self._choice("gated" if after.halves == 2 else "norm", x, outputs, inputs)
        return choice.kernel in ("dot", "mma", "stream")
