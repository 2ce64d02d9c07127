"""Which kernels may run a linear of a size: the one to guess, those worth timing, and what each costs in launches."""

from __future__ import annotations

from math import log2

import torch

from mstar.kernels.linear.gpu import dot, fma, mma
from mstar.kernels.linear.gpu.run import stream  # None where Triton has no Gluon
from mstar.kernels.registry import OPTIONAL, GemmKey, KernelChoice, stream_ring

CUBLAS = KernelChoice("cublas")
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# One H200: streaming multiprocessors, and what a program may have there. Another GPU's table says what it likes.
PROCESSORS = 132
SHARED_BYTES = (60 if torch.version.hip else 220) << 10  # AMD's units have 64 KiB
THREAD_BYTES = 640  # a thread's sums and tiles in flight, of the 1020 bytes of registers that it may have
# Warps that a processor should be given to do: by the bytes in flight that hide the memory's latency.
WARPS = {"fma": 24, "dot": 8, "mma": 16}

HABITS = ("AHEAD", "SOON", "SUM_AFTER", "TOUCH")  # what a kernel of a step may do beside its work
# Those that stream takes over: it has its weights early, its parts are always added up after it, and what it asks for
# of shared memory goes with its ring.
STREAM_HABITS = ("SOON",)
# Percent of shared memory that a stream asks for: as CUDA rounds up, 100, 132, 164 and 196 KiB of an H200's 228; at 0
# nothing is asked.
CARVEOUTS = (0, 43, 57, 71, 85)
AHEAD_MIB = (0, 2, 4, 8, 16, 32)  # of what is read next: an H200's second cache holds 50 MB
SUM_AFTER_ROWS = 8  # from so many on, splits that only SUM_AFTER can take are candidates
MOST_PRELOADED = 4  # tiles of k that a program has on their way at once

# outputs a program, warps, vectors of 16 bytes that a thread reads of each weight row at a time
FMA_TILES = (
    (8, 4, 1), (4, 4, 1), (8, 2, 1), (4, 2, 2), (4, 1, 4), (4, 1, 2), (2, 4, 1), (2, 2, 2), (4, 2, 1), (8, 1, 1),
    (4, 4, 2), (8, 1, 2), (2, 8, 1), (4, 8, 1), (16, 4, 1), (16, 2, 1), (2, 1, 4), (4, 1, 1), (1, 4, 2),
)  # fmt: skip
DOT_TILES = ((16, 1), (32, 2), (64, 4), (128, 4), (128, 8), (16, 2), (32, 4))  # outputs a program, warps
DOT_DEPTHS = ((128, 4), (256, 3), (64, 5))  # values of k a tile, tiles in flight
STREAM_RINGS = (110 << 10, 72 << 10, 220 << 10)  # bytes: two programs a processor, three, one
STREAM_TILES = (  # outputs, k, warps
    (64, 128, 4), (64, 256, 4), (64, 64, 4), (128, 64, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8),
)  # fmt: skip

# What one H200 liked best for the linears of 0.8B (tables/sm_90/h200), or within 3 % of it, by rows: outputs and k of
# a tile, tiles in flight, warps, parts of k, whether the first tile is prefetched, whether a kernel norms first.
DOT_LIKED: dict[str, dict[int, tuple[int, int, int, int, int, int, int]]] = {
    "norm": {
        8: (16, 128, 4, 1, 1, 1, 0),
        16: (16, 128, 4, 2, 1, 1, 1),
        32: (64, 128, 4, 4, 1, 1, 0),
        64: (64, 128, 4, 4, 1, 1, 1),
    },
    "gated": {
        4: (16, 128, 4, 1, 1, 1, 0),
        8: (16, 128, 4, 1, 1, 1, 0),
        16: (16, 128, 4, 2, 1, 1, 1),
        32: (32, 128, 4, 4, 1, 1, 1),
        64: (32, 128, 4, 4, 1, 1, 1),
    },
    "residual": {
        8: (32, 256, 3, 4, 8, 1, 0),
        16: (32, 256, 3, 4, 8, 1, 0),
        32: (32, 128, 4, 4, 4, 1, 0),
        64: (32, 128, 4, 4, 4, 1, 0),
    },
    "f32": {
        4: (128, 128, 4, 4, 1, 0, 0),
        8: (128, 128, 4, 4, 1, 0, 0),
        16: (128, 64, 5, 4, 1, 0, 0),
        32: (128, 64, 5, 4, 1, 0, 0),
        64: (64, 64, 5, 4, 1, 1, 0),
    },
}
DOT_LIKED["plain"] = DOT_LIKED["residual"]


def default(key: GemmKey) -> KernelChoice:
    """Where nothing was timed: what another model's linears liked, else a guess; cuBLAS above 64 rows."""
    if key.rows > dot.MOST_ROWS:
        return CUBLAS
    liked = _liked(key)
    if liked is not None:
        return liked
    fma_rows = fma.MOST_ROWS if key.dtype == "fp32" else 4
    if key.rows > fma_rows:
        found = _dot_candidates(key)
        return found[0] if found else CUBLAS
    found = _fma_candidates(key)
    # small tiles of few warps: a program's first loads are in flight while the one before it ends
    small = [choice for choice in found if dict(choice.params)["BLOCK_N"] == 4]
    wanted = 2048 if key.kind in ("residual", "plain") else 512
    small.sort(key=lambda choice: abs(dict(choice.params)["BLOCK_K"] - wanted))
    return (small or found or [CUBLAS])[0]


def candidates(key: GemmKey) -> list[KernelChoice]:
    """What is worth timing for a size, the likeliest first after cuBLAS; none whose tiles do not fit."""
    found = [CUBLAS]
    if key.rows <= dot.MOST_ROWS:
        found.append(default(key))
    if key.rows <= fma.MOST_ROWS:
        found += _fma_candidates(key)[: 12 if key.rows <= 2 else 6]
    found += _mma_candidates(key)[:14]
    found += _stream_candidates(key)[:4]
    if key.rows <= dot.MOST_ROWS:
        found += _dot_candidates(key)[: 4 if key.rows <= 2 else 10 if key.rows <= 8 else 14]
    return list(dict.fromkeys(found))


def step_candidates(key: GemmKey, now: KernelChoice) -> list[KernelChoice]:
    """What is worth trying inside a step: `candidates`, and strips, a program's weights in one tile.

    There kernels overlap with what is before and behind. now: the choice that they would replace; they have its habits.
    """
    found, rings = candidates(key) + _strip_candidates(key), _stream_candidates(key)[:20]
    found = rings + found if now.kernel == "stream" else found + rings
    if key.kind in ("norm", "gated") and key.rows >= 4:
        # there the kernel before has normed, but in the first layer, whose rows no kernel prepared
        found = [
            _choice(choice.kernel, **{**dict(choice.params), "NORM_FIRST": 1})
            if choice.kernel in ("dot", "mma")
            else choice
            for choice in found
        ]
    if key.kind == "residual" and key.rows >= SUM_AFTER_ROWS:
        found += _sum_candidates(key)[:18]
    habits = {name: value for name, value in now.params if name in HABITS}
    if key.kind == "residual" and now == CUBLAS:
        habits["SUM_AFTER"] = 1  # what is behind it reads normed rows, as it does behind cuBLAS
    few = {name: value for name, value in habits.items() if name in STREAM_HABITS}
    found = [
        choice if choice == CUBLAS else with_params(choice, **(few if choice.kernel == "stream" else habits))
        for choice in found
    ]
    return list(dict.fromkeys(found))


def streaming(key: GemmKey) -> KernelChoice | None:
    """The likeliest "stream" of a size, but the head's, which has nothing to hide behind; None where there is none."""
    found = [] if key.kind == "f32" else _stream_candidates(key)
    return found[0] if found else None


def variants(key: GemmKey, choice: KernelChoice) -> list[KernelChoice]:
    """The same tiles with other habits: each switched on or off, and shares of the next weight."""
    if choice == CUBLAS:
        return []
    params = dict(choice.params)
    if choice.kernel == "stream":
        place, steps = stream_ring(key, params)
        rings = [params["num_stages"] + more for more in (-2, -1, 1, 2)]
        rings = [tiles for tiles in rings if 2 <= tiles <= min(steps, SHARED_BYTES // place)]
        return [
            with_params(choice, SOON=1 - params.get("SOON", 0)),
            *(with_params(choice, num_stages=tiles) for tiles in rings),
            *(with_params(choice, CARVEOUT=percent) for percent in CARVEOUTS),
        ]
    switches = ["SOON"]
    if key.kind == "residual":
        switches += ["SUM_AFTER", "TOUCH"]
    unrolled = choice.kernel == "fma" and params["UNROLL"]
    if unrolled and 1 < -(-key.k // params["BLOCK_K"]) <= MOST_PRELOADED:
        switches.append("PRELOAD")
    found = [with_params(choice, **{name: 1 - params.get(name, 0)}) for name in switches]
    return found + [with_params(choice, AHEAD=mebibytes) for mebibytes in AHEAD_MIB]


def with_params(choice: KernelChoice, **changed: int) -> KernelChoice:
    """A choice with some parameters changed; those that a launch may have or not are left out at 0."""
    params = {**dict(choice.params), **changed}
    return _choice(choice.kernel, **{name: v for name, v in params.items() if v or name not in OPTIONAL})


def launches(choice: KernelChoice, key: GemmKey) -> int:
    """Graph nodes of a call: 1, but that cuBLAS has a norm kernel before it and an epilogue after it.

    stream, alone, has a norm kernel before it; in a step the kernel before norms, or makes products ready. A split of
    cuBLAS's own would be one more; it does not say.
    """
    if choice.kernel != "cublas":
        params = dict(choice.params)
        if choice.kernel == "stream" and key.kind in ("norm", "gated"):
            return 2
        return 1 + params.get("NORM_FIRST", 0) + params.get("SUM_AFTER", 0)
    return 1 + (key.kind in ("norm", "gated")) + (key.kind in ("gated", "residual"))


def programs(choice: KernelChoice, key: GemmKey) -> int:
    """Programs of a skinny launch."""
    params = dict(choice.params)
    return -(-key.n // params["BLOCK_N"]) * params.get("SPLIT_K", 1)


def _fma_candidates(key: GemmKey) -> list[KernelChoice]:
    """All warps of a program lie along k, so BLOCK_K is a multiple of what they read at once.

    In smaller tiles Triton would spread x and the weight differently over the threads, and convert one through
    shared memory at every tile.
    """
    vector = 16 // ITEM_BYTES[key.dtype]
    sides = 2 if key.kind == "gated" else 1
    found = []
    for outputs, warps, vectors in FMA_TILES:
        block_k = 32 * vector * warps * vectors
        if block_k >= 2 * key.k and block_k > 32 * vector:
            continue
        sums = 4 * outputs * vectors * sides * key.rows
        tiles = 2 * 16 * outputs * vectors * sides + 4 * vector * vectors * key.rows
        if sums + tiles > THREAD_BYTES or outputs * sides > 16:
            continue
        steps = -(-key.k // block_k)
        # written out, the loads of several tiles are in flight; too many of them are slow to compile and spill
        unroll = int(steps == 1 or steps * key.rows * sides <= 8)
        found.append(_choice("fma", BLOCK_N=outputs, BLOCK_K=block_k, UNROLL=unroll, num_warps=warps))
    return sorted(found, key=lambda choice: _distance(choice, key))


def _dot_candidates(key: GemmKey) -> list[KernelChoice]:
    """Tiles deep enough in flight; k is split where the outputs alone are too few programs.

    None in float32: without tensor cores Triton writes a tile's products out, and its registers spill.
    """
    if key.dtype == "fp32":
        return []
    item = ITEM_BYTES[key.dtype]
    sides = 2 if key.kind == "gated" else 1
    rows = dot.block_rows(key.rows)
    found = []
    for outputs, warps in DOT_TILES:
        sums = 4 * outputs * rows * sides // (32 * warps)  # bytes of a thread
        if sums > THREAD_BYTES // 2:
            continue
        for block_k, stages in DOT_DEPTHS:
            # the tile that is prefetched is beside the pipeline's
            if (stages + 1) * (outputs * sides + rows) * block_k * item > SHARED_BYTES:
                continue
            if (
                rows * block_k * item > 32 * warps * 256
            ):  # a thread's part of x: one warp spilled 64 rows by 128
                continue
            for split in (1,) if key.kind in ("norm", "gated") else (1, 2, 4, 8):
                if split > 1 and split * sums > THREAD_BYTES:  # the last to arrive reads all parts at once
                    continue
                if block_k // 2 * split >= key.k or (split > 1 and split * key.n > 1 << 15):
                    continue
                params = {"BLOCK_N": outputs, "BLOCK_K": block_k, "SPLIT_K": split, "PREFETCH": 1}
                found.append(_choice("dot", **params, num_warps=warps, num_stages=stages))
    found.sort(key=lambda choice: _distance(choice, key))
    # without the prefetch all of k is one pipeline: worth a try for the likeliest tiles
    others = [_choice("dot", **{**dict(choice.params), "PREFETCH": 0}) for choice in found[:2]]
    if key.kind in ("norm", "gated") and key.rows >= 16:
        # every program norms every row: from some count of rows on, a kernel that does it once is worth its launch
        others += [_choice("dot", **dict(choice.params), NORM_FIRST=1) for choice in found[:3]]
    return found[:2] + others + found[2:]


def _strip_candidates(key: GemmKey) -> list[KernelChoice]:
    """One tile of k a program, asked for whole before the kernel ahead has ended; for the few rows that dot takes."""
    if key.dtype == "fp32" or not 2 <= key.rows <= dot.MOST_ROWS:
        return []
    item = ITEM_BYTES[key.dtype]
    sides = 2 if key.kind == "gated" else 1
    rows = dot.block_rows(key.rows)
    splits = (1,) if key.kind in ("norm", "gated") else (1, 2, 4, 8)
    found = []
    for outputs, warps in ((16, 4), (16, 8), (32, 4), (32, 8), (16, 2)):
        for split in splits:
            block_k = 1 << (-(-key.k // split) - 1).bit_length()
            held = max(outputs * sides, rows) * block_k * item // (32 * warps)  # bytes a thread of a tile
            if held > 256 or (outputs * sides + rows) * block_k * item > SHARED_BYTES:
                continue
            if split > 1 and split * key.n > 1 << 15:
                continue
            params = {"BLOCK_N": outputs, "BLOCK_K": block_k, "SPLIT_K": split, "PREFETCH": 1}
            params |= {"num_warps": warps, "num_stages": 1}
            found.append(_choice("dot", **params))
    return sorted(found, key=lambda choice: _distance(choice, key))


def _sum_candidates(key: GemmKey) -> list[KernelChoice]:
    """Splits whose parts are added up by a kernel of their own: none of their programs reads all parts."""
    if key.dtype == "fp32" or key.rows > dot.MOST_ROWS:
        return []
    item, rows = ITEM_BYTES[key.dtype], dot.block_rows(key.rows)
    found = []
    for outputs, warps in ((64, 4), (32, 4), (128, 4), (32, 2), (128, 8)):
        for block_k, stages in DOT_DEPTHS:
            threads = 32 * warps
            if (stages + 1) * (outputs + rows) * block_k * item > SHARED_BYTES:
                continue
            if max(rows * block_k * item, 4 * outputs * rows) > 256 * threads:  # bytes of x, and of sums
                continue
            for split in (2, 4, 7, 8, 14, 16):
                count = -(-key.n // outputs) * split
                if key.k % (block_k * split) or not PROCESSORS // 2 <= count <= 4 * PROCESSORS:
                    continue
                params = {
                    "BLOCK_N": outputs,
                    "BLOCK_K": block_k,
                    "SPLIT_K": split,
                    "PREFETCH": 1,
                    "SUM_AFTER": 1,
                }
                found.append(_choice("dot", **params, num_warps=warps, num_stages=stages))
    return sorted(found, key=lambda choice: _distance(choice, key))


def _mma_candidates(key: GemmKey) -> list[KernelChoice]:
    """Tiles that registers hold, k dealt to the warps of a program and, where outputs are few, to programs too."""
    if key.dtype == "fp32" or not 2 <= key.rows <= mma.MOST_ROWS:
        return []
    sides = 2 if key.kind == "gated" else 1
    rows = dot.block_rows(key.rows)
    found = []
    for outputs in (16, 32):
        for warps in (4, 8, 2, 16):
            for runs in (8, 4, 2, 16):
                block_k = 32 * warps * runs
                # bytes of a thread: its tiles of the weight and of x, sums, a norm's multipliers
                held = (outputs * sides + rows) // 8 * 16 * runs + 4 * outputs * rows * sides // 32
                if held > THREAD_BYTES or block_k >= 2 * key.k:
                    continue
                for split in (1,) if key.kind in ("norm", "gated") else (1, 2, 4, 7, 8):
                    if key.k % (block_k * split) or (split > 1 and split * key.n > 1 << 15):
                        continue
                    found.append(
                        _choice("mma", BLOCK_N=outputs, BLOCK_K=block_k, SPLIT_K=split, num_warps=warps)
                    )
    found.sort(key=lambda choice: _distance(choice, key))
    return found


def _stream_candidates(key: GemmKey) -> list[KernelChoice]:
    """Rings that leave a processor room for the kernels before and behind, k split where outputs are few programs."""
    if stream is None or not stream.usable():
        return []
    if key.dtype == "fp32" or key.rows > dot.MOST_ROWS or key.k % 8:
        return []
    fixed = {"SUM_AFTER": 1} if key.kind == "residual" else {}  # it adds up no parts itself
    found = []
    for outputs, block_k, warps in STREAM_TILES:
        for split in (1, 2, 4, 7, 8) if key.kind == "residual" else (1,):
            params = {"BLOCK_N": outputs, "BLOCK_K": block_k, "SPLIT_K": split, **fixed}
            place, steps = stream_ring(key, params)
            if split > 1 and (
                steps * split * block_k > key.k or -(-key.n // outputs) * split > 4 * PROCESSORS
            ):
                continue
            for tiles in dict.fromkeys(min(ring // place, steps) for ring in STREAM_RINGS):
                if tiles >= min(2, steps):
                    found.append(_choice("stream", **params, num_stages=tiles, num_warps=warps))
    return sorted(found, key=lambda choice: _stream_distance(choice, key))


def _stream_distance(choice: KernelChoice, key: GemmKey) -> float:
    """How far a launch is from bytes enough on their way, all in one go, in doublings; 0 is best."""
    params = dict(choice.params)
    ring = stream_ring(key, params)[0] * params["num_stages"]
    together = PROCESSORS * max(1, SHARED_BYTES // ring)
    count = programs(choice, key)
    weight = key.weight_shape[0] * key.k * ITEM_BYTES[key.dtype]
    distance = max(0.0, log2(min(8 << 20, weight) / (min(count, together) * ring)))
    distance += max(0.0, log2(PROCESSORS * 0.6 / count)) + max(0.0, log2(count / together)) / 4
    return distance + log2(params["SPLIT_K"]) / 4


def _distance(choice: KernelChoice, key: GemmKey) -> float:
    """How far a launch is from what should be fast, in doublings; 0 is best."""
    params = dict(choice.params)
    count = programs(choice, key) / PROCESSORS
    distance = max(0.0, log2(WARPS[choice.kernel] / (count * params["num_warps"])))
    distance += max(0.0, log2(count / 16)) / 4  # each program has a start and an end
    if choice.kernel != "fma":
        # every program reads all rows of x, through the second cache; a split writes and reads its parts
        distance += max(0.0, log2(dot.block_rows(key.rows) / params["BLOCK_N"])) + log2(params["SPLIT_K"]) / 2
    return distance


def _liked(key: GemmKey) -> KernelChoice | None:
    """The entry of DOT_LIKED for a size, where its tiles fit it."""
    params = DOT_LIKED[key.kind].get(key.rows) if key.dtype != "fp32" else None
    if params is None or params[1] * params[4] > key.k:
        return None
    outputs, block_k, stages, warps, split, prefetch, norm_first = params
    first = {"NORM_FIRST": 1} if norm_first else {}
    return _choice(
        "dot", BLOCK_N=outputs, BLOCK_K=block_k, SPLIT_K=split, PREFETCH=prefetch, **first,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _choice(kernel: str, **params: int) -> KernelChoice:
    return KernelChoice(kernel, tuple(sorted(params.items())))
