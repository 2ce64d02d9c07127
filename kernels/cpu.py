"""The operations on a CPU: native code over packed weights (kernels/*/cpu.h), called through ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from mstar.kernels.attention import AttentionWeights
from mstar.kernels.gdn import GdnWeights
from mstar.kernels.native import load_library
from mstar.kernels.ops import Ops, Packed
from mstar.kernels.rows import Rows

PANEL = 16  # outputs side by side in packed weights, and the KV block: kernels/native/vec.h
_QUAD = 64  # outputs a task: weights are padded to it
_STORE, _STORE_F32, _ADD_RESIDUAL, _SILU_GATED = range(4)

_LINEAR = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int, c_int, c_int) + (
    c_void_p,
) * 2
_NORM = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_float, c_int, c_void_p)
_GDN = (c_void_p, c_int64, *(c_void_p,) * 13, *(c_int64,) * 7, c_float, c_int)
_ATTENTION = (
    c_void_p,
    c_int64,
    *(c_void_p,) * 7,
    c_int64,
    *(c_void_p,) * 2,
    *(c_int64,) * 6,
    c_float,
    c_int,
    c_int,
)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library("cpu_ops")
    if library is not None:
        signatures = {"linear": _LINEAR, "rms_norm": _NORM, "gdn": _GDN, "attention": _ATTENTION}
        for function, types in signatures.items():
            entry = getattr(library, f"mstar_{function}")
            entry.argtypes = types
            entry.restype = None
    return library


class CpuOps(Ops):
    """float32 and bf16; sums in float32, in an order that depends on nothing but the row."""

    name = "cpu"

    def __init__(self) -> None:
        library = _library()
        assert library is not None, "ask CpuOps.unavailable first"
        self._linear = library.mstar_linear
        self._rms_norm = library.mstar_rms_norm
        self._gdn = library.mstar_gdn
        self._attention = library.mstar_attention

    @staticmethod
    def unavailable(dtype: torch.dtype, block_size: int, dims: Iterable[int]) -> str | None:
        """Why this cannot run here, or None. dims: the hidden size and the heads' dims."""
        if dtype not in (torch.float32, torch.bfloat16):
            return f"native operations take float32 and bf16, not {dtype}"
        if block_size != PANEL:
            return f"native attention takes KV blocks of {PANEL}, not {block_size}"
        odd = [dim for dim in dims if dim % PANEL]
        if odd:
            return f"native operations take hidden sizes and head dims in multiples of {PANEL}, not {odd}"
        return None if _library() is not None else "the native library did not build (see the log)"

    def pack_linear(self, weight: torch.Tensor) -> Packed:
        """[n, k] -> panels [n / 16, k, 16], padded with zeros: n to 64, k to 16."""
        outputs, inputs = weight.shape
        padded = -(-outputs // _QUAD) * _QUAD
        data = weight.new_zeros(padded // PANEL, -(-inputs // PANEL) * PANEL, PANEL)
        _fill_panels(data, weight)
        return Packed(data, outputs, inputs)

    def pack_gated(self, gate: torch.Tensor, up: torch.Tensor) -> Packed:
        """Panels alternate: gate, up."""
        outputs, inputs = gate.shape
        pairs = -(-outputs // (_QUAD // 2)) * 2
        data = gate.new_zeros(pairs, 2, -(-inputs // PANEL) * PANEL, PANEL)
        _fill_panels(data[:, 0], gate)
        _fill_panels(data[:, 1], up)
        return Packed(data.flatten(0, 1), 2 * outputs, inputs)

    def unpacked_rows(self, packed: Packed, ids: torch.Tensor) -> torch.Tensor:
        return packed.data[ids // PANEL, : packed.inputs, ids % PANEL]

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
        rows = x.shape[0]
        out = torch.empty(rows, weight.outputs, dtype=torch.float32 if out_f32 else x.dtype)
        if out_f32:
            epilogue = _STORE_F32
        else:
            epilogue = _STORE if residual is None else _ADD_RESIDUAL
        self._linear(
            x.data_ptr(), rows, x.stride(0), weight.inputs, _pointer(norm), eps,
            weight.data.data_ptr(), weight.outputs, weight.data.dtype == torch.bfloat16, x.dtype == torch.bfloat16,
            epilogue, _pointer(residual), out.data_ptr(),
        )  # fmt: skip
        return out

    def gated_linear(
        self, x: torch.Tensor, weight: Packed, *, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        rows = x.shape[0]
        out = torch.empty(rows, weight.outputs // 2, dtype=x.dtype)
        self._linear(
            x.data_ptr(), rows, x.stride(0), weight.inputs, norm.data_ptr(), eps, weight.data.data_ptr(),
            weight.outputs, weight.data.dtype == torch.bfloat16, x.dtype == torch.bfloat16, _SILU_GATED, None,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x: [rows, dim]. Torch takes 12 us for a row, in six passes; this one."""
        rows, dim = x.shape
        out = torch.empty(rows, dim, dtype=x.dtype)
        self._rms_norm(
            x.data_ptr(), rows, x.stride(0), dim, weight.data_ptr(), eps, x.dtype == torch.bfloat16, out.data_ptr()
        )  # fmt: skip
        return out

    def gdn(
        self,
        proj: torch.Tensor,
        weights: GdnWeights,
        state: torch.Tensor,
        conv: torch.Tensor,
        window: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        out = torch.empty(proj.shape[0], weights.value_heads * weights.value_dim, dtype=proj.dtype)
        self._gdn(
            proj.data_ptr(), proj.stride(0), out.data_ptr(), conv.data_ptr(), state.data_ptr(), window.data_ptr(),
            weights.conv.data_ptr(), weights.decay.data_ptr(), weights.dt_bias.data_ptr(), weights.norm.data_ptr(),
            rows.slots.data_ptr(), rows.cu_rows.data_ptr(), rows.fresh.data_ptr(), _pointer(rows.pending),
            _pointer(rows.committed), rows.sequences, window.shape[1], weights.key_heads, weights.value_heads,
            weights.key_dim, weights.value_dim, weights.conv.shape[0], weights.eps, proj.dtype == torch.bfloat16,
        )  # fmt: skip
        return out

    def attention(
        self,
        proj: torch.Tensor,
        weights: AttentionWeights,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: Rows,
        last_only: bool = False,
    ) -> torch.Tensor:
        out = torch.empty(proj.shape[0], weights.q_heads * weights.head_dim, dtype=proj.dtype)
        self._attention(
            proj.data_ptr(), proj.stride(0), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
            weights.q_norm.data_ptr(), weights.k_norm.data_ptr(), weights.inv_freq.data_ptr(),
            rows.block_tables.data_ptr(), rows.block_tables.stride(0), rows.cu_rows.data_ptr(),
            rows.starts.data_ptr(), rows.sequences, rows.longest, weights.q_heads, weights.kv_heads,
            weights.head_dim, 2 * weights.inv_freq.shape[0], weights.eps, proj.dtype == torch.bfloat16, last_only,
        )  # fmt: skip
        return out[rows.cu_rows[1:] - 1] if last_only else out


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _fill_panels(data: torch.Tensor, weight: torch.Tensor) -> None:
    """Lays the rows of `weight` [n, k] side by side in panels of 16: data [panels, k, 16]."""
    outputs, inputs = weight.shape
    whole = outputs // PANEL
    data[:whole, :inputs] = weight[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2)
    if whole * PANEL < outputs:
        data[whole, :inputs, : outputs - whole * PANEL] = weight[whole * PANEL :].t()
