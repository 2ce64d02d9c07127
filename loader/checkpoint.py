"""Reads one rank's slices of a checkpoint into tensors, or makes them; `head` reads through it.

Files are memory-mapped and copied in bounded pieces whose pages are handed back at once, so that a rank's
peak is its shard and a few MiB, whatever the size of the checkpoint.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from mstar.loader.config import ModelConfig
from mstar.loader.errors import LoadError, shown
from mstar.loader.headers import TensorInfo
from mstar.loader.made import Maker
from mstar.loader.manifest import Made, Source, read_manifest
from mstar.loader.sharding import Weight, check_tp, cut, local_shape

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FILE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

# Bytes of a file that are mapped in at a time: small beside any shard, large beside a system call.
_PIECE_BYTES = 1 << 20
# The most that Linux maps at one fault: a huge page of its cache.
_FAULT_BYTES = 2 << 20

Progress = Callable[[str, int, int, str], None]  # stage ("read"), done, total, unit ("bytes")
Span = tuple[int, int]
Fill = Callable[[Span, Span, torch.Tensor], None]  # puts rows x columns of a weight, seen as a matrix, there


def load_shard(
    path: str | Path,
    config: ModelConfig,
    tp_rank: int,
    tp_size: int,
    dtype: str | torch.dtype,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """The trunk's weights as rank `tp_rank` of `tp_size` holds them, on `device` (none: the CPU).

    Keys are checkpoint names without prefix (`layers.3.mlp.up_proj.weight`), `lm_head.weight` only where it
    is not the embedding's. Tensors are contiguous, own their memory, and have `dtype` ("bf16", "fp16", "fp32"
    or torch's), but A_log and dt_bias float32; shapes are those of `sharding.local_shape`, vocabulary rows
    past the end zero. `progress` is called after each weight. Raises LoadError as `read_manifest` and
    `check_tp` do.
    """
    check_tp(config, tp_size)
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"rank {tp_rank} of {tp_size}")
    return read_sources(read_manifest(path, config), config, tp_rank, tp_size, dtype, progress, device)


def read_sources(
    sources: Iterable[Source],
    config: ModelConfig,
    tp_rank: int,
    tp_size: int,
    dtype: str | torch.dtype,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """The rank's slices of these weights by name, in the order of the files; see `load_shard`."""
    wanted = _torch_dtype(dtype)
    sources = sorted(sources, key=_place)
    sizes = [_nbytes(source) for source in sources]
    done, total = 0, sum(sizes)
    shard: dict[str, torch.Tensor] = {}
    mapped: tuple[Path, mmap.mmap] | None = None
    maker: Maker | None = None
    for source, size in zip(sources, sizes, strict=True):
        weight, info = source.weight, source.info
        fill: Fill
        if isinstance(info, Made):
            maker = maker or Maker(info.recipe, config, TORCH_DTYPES[info.recipe.dtype])
            fill = partial(maker.fill, info.name, weight)
        else:
            if mapped is None or mapped[0] != info.file:
                mapped = (info.file, _map(info.file))
            fill = partial(_copy_rows, mapped[1], info)
        # a file's pages are read by the host, weight by weight; made ones come into being where they stay
        made_on = device if isinstance(info, Made) else None
        slice_ = _read(fill, weight, config, tp_rank, tp_size, wanted, made_on)
        shard[weight.name] = slice_ if device is None else slice_.to(device)
        done += size
        if progress is not None:
            progress("read", done, total, "bytes")
    return shard


def _place(source: Source) -> tuple[Path, int]:
    return (Path(), 0) if isinstance(source.info, Made) else (source.info.file, source.info.offset)


def _nbytes(source: Source) -> int:
    if isinstance(source.info, TensorInfo):
        return source.info.nbytes
    dtype = torch.float32 if source.weight.rule.float32 else TORCH_DTYPES[source.info.recipe.dtype]
    return math.prod(source.weight.shape) * dtype.itemsize


def _read(
    fill: Fill,
    weight: Weight,
    config: ModelConfig,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device | None,
) -> torch.Tensor:
    """One weight's slice, converted."""
    shape = local_shape(weight, config, tp_rank, tp_size)
    result = torch.empty(shape, dtype=torch.float32 if weight.rule.float32 else dtype, device=device)
    taken = cut(weight.rule, config, tp_rank, tp_size)
    every_row, every_column = (0, weight.shape[0]), (0, math.prod(weight.shape[1:]))
    if taken is None:
        fill(every_row, every_column, result)
        return result
    if taken.padding:
        result[taken.length - taken.padding :].zero_()
    at = 0
    for start, stop in taken.ranges:
        part = result.narrow(taken.dim, at, stop - start)
        if taken.dim == 0:
            fill((start, stop), every_column, part)
        else:
            fill(every_row, (start, stop), part)
        at += stop - start
    return result


def _copy_rows(data: mmap.mmap, info: TensorInfo, rows: Span, columns: Span, out: torch.Tensor) -> None:
    """Copies `rows` x `columns` of a tensor in a file, seen as a matrix, to `out` piece by piece."""
    if out.numel() == 0:
        return
    file_dtype = _FILE_DTYPES[info.dtype]
    width = math.prod(info.shape[1:])
    flat = out.view(rows[1] - rows[0], -1) if out.dim() != 2 else out
    for first, count in _pieces(rows, width * file_dtype.itemsize):
        offset = info.offset + first * width * file_dtype.itemsize
        # private pages: torch wants a writable buffer, and nothing is ever written
        piece = torch.frombuffer(data, dtype=file_dtype, count=count * width, offset=offset).view(
            count, width
        )
        flat[first - rows[0] : first - rows[0] + count].copy_(piece[:, columns[0] : columns[1]])
        del piece
        _release(data, offset, count * width * file_dtype.itemsize)


def _pieces(rows: tuple[int, int], row_bytes: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of pieces of about _PIECE_BYTES."""
    step = max(1, _PIECE_BYTES // row_bytes)
    for first in range(rows[0], rows[1], step):
        yield first, min(step, rows[1] - first)


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise LoadError("validation", f"cannot map {file}: {error}", "model") from error


def _release(data: mmap.mmap, offset: int, length: int) -> None:
    """Hands a copied piece's pages back; the system keeps them cached for the other ranks.

    A fault also maps its neighbours, those of the piece before included: without the margin they add up to a
    twentieth of the file.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        start = max(0, offset - _FAULT_BYTES)
        start -= start % mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, start, min(len(data), offset + length + _FAULT_BYTES) - start)


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    known = TORCH_DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known is None or known not in TORCH_DTYPES.values():
        raise LoadError("validation", f"dtype must be {', '.join(TORCH_DTYPES)}, not {shown(dtype)}", "dtype")
    return known
