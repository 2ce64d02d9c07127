"""Runs a linear as a choice says: one skinny kernel, or cuBLAS between a norm kernel and an epilogue kernel."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton

from mstar.kernels.carveout import prefer_carveout
from mstar.kernels.launch import interpreted, launch_options, runs_gluon
from mstar.kernels.linear.gpu import dot, fma, mma
from mstar.kernels.linear.gpu.ahead import NOTHING, Ahead
from mstar.kernels.linear.gpu.epilogue import silu_gated
from mstar.kernels.linear.gpu.parts import add_parts
from mstar.kernels.norm.gpu.rows import rms_norm_rows
from mstar.kernels.registry import KernelChoice

try:
    from mstar.kernels.linear.gpu import stream as stream
except Exception as error:  # Gluon is experimental: a later Triton may have it elsewhere, or otherwise
    logging.getLogger(__name__).warning("linears do not stream, Triton has no Gluon as it was: %s", error)
    stream = None  # type: ignore[assignment]

CUBLAS = KernelChoice("cublas")
# What logits run where the library has no product with float32 results (ROCm); 64 rows a block.
F32_FALLBACK = KernelChoice(
    "dot",
    (
        ("BLOCK_K", 64),
        ("BLOCK_N", 64),
        ("PREFETCH", 0),
        ("SPLIT_K", 1),
        ("num_stages", 2),
        ("num_warps", 4),
    ),
)
COUNTERS = 1 << 14  # programs that a split launch may have; a split is for launches of a few hundred


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a residual's kernel leaves, beside its result, for the norm behind it."""

    # [tiles, rows] float32, whose columns add up to the squares of the result's rows
    squares: torch.Tensor | None = None
    scaled: torch.Tensor | None = None  # [rows, n], the model's dtype: the result times the multiplier
    multiplier: torch.Tensor | None = None  # [n] float32, of the norm
    normed: torch.Tensor | None = None  # [rows, n], the model's dtype: the result normed


@dataclass(frozen=True, slots=True)
class Call:
    """A launch that is ready."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    out: torch.Tensor

    def start(self) -> torch.Tensor:
        """Launches on the current stream. Returns what the kernel fills."""
        launched = self.kernel[self.grid](**self.arguments)
        if self.arguments.get("CARVEOUT"):
            prefer_carveout(launched, self.arguments["CARVEOUT"])
        return self.out


def run_linear(
    choice: KernelChoice,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    kind: str,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    known: Prepared | None = None,
    ahead: Ahead | None = None,
) -> torch.Tensor:
    """`mstar.kernels.linear.linear`, or `gated_linear` under kind "gated", as `choice` says.

    choice: of `candidates`; above 64 rows every choice is "cublas". kind: one of registry.KINDS.
    x: [rows, k], rows may lie apart; weight: [n, k] or, gated, [2 * n, k], contiguous; norm: [k] float32, with any
    kind; residual: [rows, n], of kind "residual"; known: what x's own kernel prepared for a norm (`run_residual`);
    ahead: what is read next, of which the choice's AHEAD MiB are asked for. Returns [rows, n] in x's dtype, float32
    under kind "f32".

    Roundings are the reference's, but that a skinny kernel scales by 1/rms after the product: "fma" never rounds
    norm(x), "dot", "mma" and "stream" round x * norm. With NORM_FIRST, and before "stream", a norm kernel runs where
    x * norm is not known, and norm(x) is rounded. Raises ValueError where arguments do not fit each other or the
    choice.

    Split launches share counters: do not run them on two streams of one device at a time.
    """
    _check(x, weight, kind, norm, residual)
    if x.stride(1) != 1:
        x = x.contiguous()
    n = weight.shape[0] // 2 if kind == "gated" else weight.shape[0]
    if x.shape[0] == 0:
        return torch.empty(0, n, dtype=torch.float32 if kind == "f32" else x.dtype, device=x.device)
    if norm is not None and known is not None and known.normed is not None and known.multiplier is norm:
        x, norm, known = known.normed, None, None
    if residual is not None:
        if norm is not None:
            x = rms_norm_rows(x, norm, eps)
        return run_residual(choice, x, weight, residual, ahead)[0]
    if choice.kernel == "cublas" or x.shape[0] > dot.MOST_ROWS:
        return _run_cublas(x, weight, kind, norm, eps)
    if dict(choice.params).get("SUM_AFTER"):
        raise ValueError(f"SUM_AFTER is for a linear with a residual, not for kind {kind}")
    first = dict(choice.params).get("NORM_FIRST", 0) == 1
    if first:
        choice = KernelChoice(choice.kernel, tuple(pair for pair in choice.params if pair[0] != "NORM_FIRST"))
    if (first or choice.kernel == "stream") and norm is not None and not _is_scaled(known, norm):
        x, norm = rms_norm_rows(x, norm, eps), None
    return skinny_call(choice, x, weight, kind=kind, norm=norm, eps=eps, known=known, ahead=ahead).start()


def run_residual(
    choice: KernelChoice,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    ahead: Ahead | None = None,
    scaled: bool = False,
) -> tuple[torch.Tensor, Prepared | None]:
    """`run_linear` of kind "residual", and what the norm that reads the result needs: `ahead`'s.

    Where a kernel of its own adds the residual (cuBLAS, and SUM_AFTER), it norms the rows, too. Elsewhere squares are
    counted: with them in use, ptxas asks for the residual at once, and without at the end, where its way is waited
    for (622 us a step of 0.8B against 584). scaled: whether products with the norm's multipliers are wanted there.
    Above 64 rows every choice is cuBLAS. Returns out [rows, n], and None with it where there are no rows.
    """
    _check(x, weight, "residual", None, residual)
    rows, n = x.shape[0], weight.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    if rows == 0:
        return torch.empty(0, n, dtype=x.dtype, device=x.device), None
    if rows > dot.MOST_ROWS:
        choice = CUBLAS
    norm = None if ahead is None else ahead.norm
    if choice.kernel == "cublas" or dict(choice.params).get("SUM_AFTER"):
        if choice.kernel == "cublas":
            parts = F.linear(x, weight)
        else:
            parts = skinny_call(choice, x, weight, kind="plain", ahead=ahead).start()
        parts = parts.view(-1, rows, n)
        eps = 0.0 if ahead is None else ahead.eps
        assert norm is None or eps > 0, "a norm without its eps"
        out, normed = add_parts(parts, residual, norm, eps)
        return out, Prepared(multiplier=norm, normed=normed)
    if not scaled:
        norm = None
    made = Prepared(
        torch.empty(
            triton.cdiv(n, dict(choice.params)["BLOCK_N"]), rows, dtype=torch.float32, device=x.device
        ),
        None if norm is None else torch.empty(rows, n, dtype=x.dtype, device=x.device),
        norm,
    )
    call = skinny_call(choice, x, weight, kind="residual", residual=residual, made=made, ahead=ahead)
    return call.start(), made


def _is_scaled(known: Prepared | None, norm: torch.Tensor) -> bool:
    """Whether what was prepared is for this norm."""
    return known is not None and known.scaled is not None and known.multiplier is norm


def _of_squares(squares: torch.Tensor | None) -> dict[str, torch.Tensor | int | None]:
    """What a kernel takes of the squares that are known, [tiles, rows]; it is compiled for a power of two of tiles."""
    tiles = 1 if squares is None else squares.shape[0]
    return {"known": squares, "known_tiles": tiles, "KNOWN": triton.next_power_of_2(tiles)}


def _prescale(dtype: torch.dtype) -> float:
    """What x * norm is multiplied by before it is rounded, so that fp16 holds it."""
    return 1 / 16 if dtype == torch.float16 else 1.0  # 16: more than a norm's multiplier is


def skinny_call(
    choice: KernelChoice,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    kind: str,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    known: Prepared | None = None,
    made: Prepared | None = None,
    ahead: Ahead | None = None,
    out: torch.Tensor | None = None,
) -> Call:
    """The launch of a skinny kernel; arguments as of `run_linear`.

    made: receives what the norm behind a residual needs (`run_residual`).
    out: [rows, n] contiguous, made here if None; with SUM_AFTER (kind "plain") a split's is made here, [SPLIT_K, rows,
    n] float32: the parts.
    NORM_FIRST is not known here: x is what the kernel reads.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if kind == "gated" else weight.shape[0]
    params = dict(choice.params)
    mebibytes = params.pop("AHEAD", 0)
    split = params.get("SPLIT_K", 1)
    parts_stay = params.pop("SUM_AFTER", 0) == 1 and split > 1
    if parts_stay:
        out = torch.empty(split, rows, n, dtype=torch.float32, device=x.device)
    elif out is None:
        out = torch.empty(rows, n, dtype=torch.float32 if kind == "f32" else x.dtype, device=x.device)
    if choice.kernel == "stream":
        return _stream_call(params, x, weight, kind, norm, eps, known, out)
    arguments = {
        "SOON": 0,
        "TOUCH": 0,
        **params,
        **(NOTHING if ahead is None else ahead.arguments(mebibytes)),
        "THREADS": params["num_warps"] * (64 if torch.version.hip else 32),
        "x": x,
        "x_stride": x.stride(0),
        "weight": weight,
        "norm": norm,
        "eps": eps,
        "residual": residual if kind == "residual" else None,
        "residual_stride": residual.stride(0) if kind == "residual" and residual is not None else 0,
        "out": out,
        "sums": None if made is None else made.squares,
        "scaled": None if made is None else made.scaled,
        "multiplier": None if made is None else made.multiplier,
        "PRESCALE": _prescale(x.dtype),
        "rows": rows,
        "n": n,
        "K": k,
        "GATED": kind == "gated",
        **launch_options(x.device),
    }
    if choice.kernel == "fma":
        arguments.setdefault("PRELOAD", 0)
        if rows > fma.MOST_ROWS:
            raise ValueError(f"fma takes {fma.MOST_ROWS} rows, not {rows}")
        arguments |= {"ROWS": triton.next_power_of_2(rows), "VECTOR": 16 // x.element_size()}
        return Call(fma._fma, (triton.cdiv(n, arguments["BLOCK_N"]),), arguments, out)
    if choice.kernel not in ("dot", "mma"):
        raise ValueError(f"no kernel named {choice.kernel}")
    if choice.kernel == "mma" and rows > mma.MOST_ROWS:
        raise ValueError(f"mma takes {mma.MOST_ROWS} rows, not {rows}")
    if split > 1 and (norm is not None or kind == "gated"):
        raise ValueError("a split of k goes with neither a norm nor a gate")
    counted = split > 1 and not parts_stay
    block = dot.block_rows(rows)
    grid = (triton.cdiv(n, arguments["BLOCK_N"]), split, triton.cdiv(rows, block))
    programs = grid[0] * grid[1] * grid[2]
    squares = None if known is None or norm is None else known.squares
    if norm is not None and known is not None and _is_scaled(known, norm):
        assert known.scaled is not None
        arguments |= {"x": known.scaled, "x_stride": known.scaled.stride(0), "norm": None}
    arguments |= {
        "ROWS": block,
        "scratch": torch.empty(programs, arguments["BLOCK_N"], block, device=x.device) if counted else None,
        "counters": _counters(x.device, grid[0] * grid[2]) if counted else None,
        **_of_squares(squares),
        "UPCAST": interpreted(),
    }
    if choice.kernel == "mma":
        return Call(mma._mma, grid, arguments | {"PARTS": arguments["num_warps"], "num_stages": 1}, out)
    return Call(dot._dot, grid, arguments | {"VECTOR": 16 // x.element_size()}, out)


def _stream_call(
    params: dict[str, int],
    x: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
    norm: torch.Tensor | None,
    eps: float,
    known: Prepared | None,
    out: torch.Tensor,
) -> Call:
    """`skinny_call` of "stream", which reads rows that are normed, or products that are ready for it."""
    if stream is None or not runs_gluon(x.device):
        raise ValueError("stream needs a GPU of Hopper's kind, and a Triton with Gluon")
    squares = None
    if norm is not None:
        if known is None or known.squares is None or not _is_scaled(known, norm):
            raise ValueError("stream norms no rows: they are normed before, or products are ready")
        assert known.scaled is not None
        x, squares = known.scaled, known.squares
    if kind == "residual" or (params["SPLIT_K"] > 1 and out.dim() == 2):
        raise ValueError("stream adds up no parts: a residual takes it with SUM_AFTER")
    grid, arguments = stream.arguments(params, x, weight, kind == "gated")
    arguments |= {"eps": eps, "PRESCALE": _prescale(x.dtype), "out": out}
    arguments |= _of_squares(squares) | launch_options(x.device)
    return Call(stream._stream, grid, arguments, out)


def _run_cublas(
    x: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
    norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    if norm is not None:
        x = rms_norm_rows(x, norm, eps)
    if kind == "f32":
        return _f32_product(x, weight)
    y = F.linear(x, weight)
    return silu_gated(y) if kind == "gated" else y


def _f32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    if x.is_cuda and torch.version.hip is None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return skinny_call(F32_FALLBACK, x, weight, kind="f32").start()


_COUNTERS: dict[torch.device, torch.Tensor] = {}


def _counters(device: torch.device, count: int) -> torch.Tensor:
    """Zeros that split launches count in and leave as zeros; they outlive every graph."""
    if count > COUNTERS:
        raise ValueError(f"a split launch of {count} programs: {COUNTERS} are counted")
    if device not in _COUNTERS:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run a split linear once before capturing it: its counters are made then")
        _COUNTERS[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _COUNTERS[device]


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} differ"
        )
    if not weight.is_contiguous():
        raise ValueError("the weight is not contiguous")
    if kind in ("norm", "gated") and norm is None:
        raise ValueError(f"kind {kind} needs a norm")
    if (kind == "residual") != (residual is not None):
        raise ValueError(f"kind {kind}, and a residual: {residual is not None}")
