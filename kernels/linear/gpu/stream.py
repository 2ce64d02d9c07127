"""Linear of up to 64 rows whose weight streams through shared memory by TMA, from before the kernel ahead has ended.

A ring of tiles is asked for at once, by one thread and without a register: that is a program's whole weight where
it is small, and else what keeps the memory busy while the kernel ahead ends and this one's inputs come. The tensor
cores read both sides from shared memory. Hopper's, so it is written in Gluon, Triton's language for one architecture,
which the interpreter does not run: its parity tests need a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mstar.kernels.aot import AotCase
from mstar.kernels.launch import runs_gluon
from mstar.kernels.linear.gpu.dot import block_rows
from mstar.kernels.linear.gpu.epilogue import gated_value

# Triton 3.6 calls it otherwise than 3.9.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# Both sides of the product, tiles of 64 values of k side by side, as the tensor cores read them.
SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def usable() -> bool:
    """Whether the GPU at hand runs it; so it is said where there is none, too, for who reads or makes a table."""
    if torch.version.hip:
        return False
    return not torch.cuda.is_available() or runs_gluon(torch.device("cuda", torch.cuda.current_device()))


def arguments(
    params: dict[str, int], x: torch.Tensor, weight: torch.Tensor, gated: bool
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid, and the arguments of its shapes and tiles; params: a choice's. x and weight: bf16 or fp16."""
    if x.dtype.itemsize != 2:
        raise ValueError(f"stream takes bf16 and fp16, not {x.dtype}")
    rows, k = x.shape
    if k % 8:
        raise ValueError(f"stream takes k in multiples of 8, which TMA reads, not {k}")
    if x.data_ptr() % 16 or x.stride(0) % 8:
        x = x.clone(memory_format=torch.contiguous_format)  # one row of any stride is contiguous
    block, outputs, depth = block_rows(rows), params["BLOCK_N"], params["BLOCK_K"]
    n = weight.shape[0] // (2 if gated else 1)
    return (triton.cdiv(n, outputs), params["SPLIT_K"], triton.cdiv(rows, block)), {
        "x": TensorDescriptor.from_tensor(x, [block, depth], SWIZZLED),
        "weight": TensorDescriptor.from_tensor(weight, [outputs, depth], SWIZZLED),
        "rows": rows,
        "n": n,
        "K": k,
        "ROWS": block,
        "BLOCK_N": outputs,
        "BLOCK_K": depth,
        "TILES": params["num_stages"],
        "SPLIT_K": params["SPLIT_K"],
        "GATED": gated,
        "SOON": params.get("SOON", 0),
        "CARVEOUT": params.get("CARVEOUT", 0),
        "WARPS": params["num_warps"],
        "num_warps": params["num_warps"],
    }


@gluon.jit(do_not_specialize=["rows", "known_tiles"])  # n says how stores are aligned
def _stream(
    x, weight, known, eps, out, rows, n, known_tiles,
    K: gl.constexpr, KNOWN: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    TILES: gl.constexpr, SPLIT_K: gl.constexpr, GATED: gl.constexpr, SOON: gl.constexpr, PRESCALE: gl.constexpr,
    CARVEOUT: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[:rows, :n] = epilogue(x W^T); x: [rows, K], weight: [n or 2n, K], descriptors with tiles of BLOCK_K.

    known: None, or [known_tiles, rows] float32, whose columns add up to the squares of the rows that x is products of
    with a norm's multipliers and PRESCALE: the result is divided by their root. KNOWN: at least known_tiles, a power
    of two.
    With SPLIT_K the parts stay, out[part, :rows, :n]. TILES: of the ring. SOON: the next kernel may start with this
    one, not only once this one has waited for those before it. CARVEOUT: what its launch asks for; nothing here reads
    it, but launches that ask otherwise are other functions.
    """
    if PDL and SOON:
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: gl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    RING: gl.constexpr = TILES if TILES < STEPS else STEPS
    gl.static_assert(RING > 1 or STEPS == 1, "a place is filled again while the next one is used")
    SIDES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = (SIDES * BLOCK_N + ROWS) * BLOCK_K * 2
    output = gl.program_id(0) * BLOCK_N
    line = gl.program_id(2) * ROWS
    first = gl.program_id(1) * STEPS * BLOCK_K
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    w_ring = gl.allocate_shared_memory(weight.dtype, [RING * SIDES, BLOCK_N, BLOCK_K], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [RING, ROWS, BLOCK_K], x.layout)
    for tile in gl.static_range(RING):
        mbarrier.init(ready.index(tile), count=1)
    for tile in gl.static_range(RING):
        mbarrier.expect(ready.index(tile), BYTES)  # of both; x comes after the wait
        for side in gl.static_range(SIDES):
            load_tile(
                weight,
                [side * n + output, first + tile * BLOCK_K],
                ready.index(tile),
                w_ring.index(tile * SIDES + side),
            )
    if PDL:
        tl.extra.cuda.gdc_wait()  # what is above reads weights alone; what is below, other kernels' results
        if not SOON:
            tl.extra.cuda.gdc_launch_dependents()
    for tile in gl.static_range(RING):
        load_tile(x, [line, first + tile * BLOCK_K], ready.index(tile), x_ring.index(tile))
    part = 0.0
    HELD: gl.constexpr = KNOWN * ROWS <= 32 * 32 * WARPS  # more a thread would spill
    if known is not None and HELD:
        part = _known_part(known, 0, known_tiles, line, rows, KNOWN, ROWS, WARPS)
    held: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    y = gl.zeros([BLOCK_N, ROWS], gl.float32, held)
    up = gl.zeros([BLOCK_N, ROWS], gl.float32, held)
    for step in range(STEPS):
        place = step % RING
        mbarrier.wait(ready.index(place), (step // RING) & 1)
        b = x_ring.index(place).permute((1, 0))
        y = warpgroup_mma(w_ring.index(place * SIDES), b, y, is_async=True)
        # products of the step before have been read then, and its place takes another tile
        if GATED:
            up = warpgroup_mma(w_ring.index(place * SIDES + 1), b, up, is_async=True)
            y, up = warpgroup_mma_wait(SIDES, deps=(y, up))
        else:
            y = warpgroup_mma_wait(SIDES, deps=(y,))
        if RING < STEPS:
            later = step - 1 + RING
            if (step > 0) & (later < STEPS):
                free = (step - 1) % RING
                k = first + later * BLOCK_K
                mbarrier.expect(ready.index(free), BYTES)
                for side in gl.static_range(SIDES):
                    load_tile(
                        weight, [side * n + output, k], ready.index(free), w_ring.index(free * SIDES + side)
                    )
                load_tile(x, [line, k], ready.index(free), x_ring.index(free))
    if GATED:
        y, up = warpgroup_mma_wait(0, deps=(y, up))
    else:
        y = warpgroup_mma_wait(0, deps=(y,))
    if known is not None:
        square = (
            gl.sum(part, 0) if HELD else _known_squares(known, known_tiles, line, rows, KNOWN, ROWS, WARPS)
        )
        scale = gl.rsqrt(square / K + eps) / PRESCALE
        scale = gl.convert_layout(scale, gl.SliceLayout(0, held))[None, :]
        y = y * scale
        up = up * scale
    # 16 bytes a thread along the outputs, which lie side by side in memory
    VECTOR: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    stored: gl.constexpr = gl.BlockedLayout([VECTOR, 1], [64 // VECTOR, VECTOR // 2], [1, WARPS], [0, 1])
    y = gl.convert_layout(y, stored)
    if GATED:
        y = gated_value(y, gl.convert_layout(up, stored), out.dtype.element_ty)
    outputs = output + gl.arange(0, BLOCK_N, gl.SliceLayout(1, stored))[:, None]
    lines = line + gl.arange(0, ROWS, gl.SliceLayout(0, stored))[None, :]
    at = out + (gl.program_id(1).to(gl.int64) * rows + lines) * n + outputs
    gl.store(at, y.to(out.dtype.element_ty), mask=(outputs < n) & (lines < rows))


@gluon.jit
def _known_part(
    known, first, tiles, line, rows,
    COUNT: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Some tiles of the rows' squares, [COUNT, ROWS] float32, the tiles dealt to lanes and warps."""
    dealt: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    tile = first + gl.arange(0, COUNT, gl.SliceLayout(1, dealt))[:, None]
    lines = line + gl.arange(0, ROWS, gl.SliceLayout(0, dealt))[None, :]
    return gl.load(known + tile * rows + lines, mask=(tile < tiles) & (lines < rows), other=0.0)


@gluon.jit
def _known_squares(
    known, tiles, line, rows,
    KNOWN: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The rows' squares: [ROWS] float32."""
    square = gl.sum(_known_part(known, 0, tiles, line, rows, 64, ROWS, WARPS), 0)
    for first in range(64, KNOWN, 64):
        square += gl.sum(_known_part(known, first, tiles, line, rows, 64, ROWS, WARPS), 0)
    return square


_CONSTANTS = (
    "K", "KNOWN", "ROWS", "BLOCK_N", "BLOCK_K", "TILES", "SPLIT_K", "GATED", "SOON", "PRESCALE", "CARVEOUT",
    "WARPS", "PDL",
)  # fmt: skip


def _case(out: str = "*bf16", known: int = 0, **constants: int | bool) -> AotCase:
    given: dict[str, Any] = {
        "K": 2048, "KNOWN": max(1, known), "ROWS": 16, "BLOCK_N": 64, "BLOCK_K": 128, "TILES": 4, "SPLIT_K": 1,
        "GATED": False, "SOON": 0, "PRESCALE": 1.0, "CARVEOUT": 0, "WARPS": 4, **constants,
    }  # fmt: skip
    tiles = {
        name: f"tensordesc<bf16[{given[rows]},{given['BLOCK_K']}],{SWIZZLED!r}>"
        for name, rows in (("x", "ROWS"), ("weight", "BLOCK_N"))
    }
    signature = {
        **tiles,
        "known": "*fp32",
        "eps": "fp32",
        "out": out,
        "rows": "i32",
        "n": "i32",
        "known_tiles": "i32",
    }
    signature |= dict.fromkeys(_CONSTANTS, "constexpr")
    if not known:
        signature["known"] = "constexpr"
        given["known"] = None
    return AotCase(
        _stream, signature, given, num_warps=int(given["WARPS"]), pdl=True, aligned=("n",), targets=("sm_90",)
    )


AOT_CASES = [
    _case(),
    _case(GATED=True, ROWS=64, TILES=3),
    _case(known=256, GATED=True, ROWS=8),
    _case(known=1024, ROWS=32),
    _case("*fp32", SPLIT_K=4, ROWS=8, BLOCK_N=128, BLOCK_K=64, SOON=1),
    _case(ROWS=64, BLOCK_N=128, WARPS=8),
]
