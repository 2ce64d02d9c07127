"""What the files of a checkpoint hold, read from safetensors headers alone. No torch here.

A header says each tensor's dtype, shape and place; that the file has all the bytes it promises is checked
here too, so that a truncated download is refused before a rank is started.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.loader.errors import LoadError, listed, shown
from mstar.loader.fields import Fields, read_json_map

SIDECAR_PATTERN = "*.mtp.safetensors"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit

# Bytes an element of the dtypes that safetensors knows.
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: where its bytes are and how to read them."""

    file: Path
    dtype: str  # as safetensors writes it: "BF16", "F16", "F32", ...
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file. LoadError, which names the file, when it is cut short or corrupt."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _corrupt(file, f"its header does not fit into its {size} bytes")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise LoadError("validation", f"cannot read {file}: {error.strerror or error}", "model") from error
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _corrupt(file, "its header is not a JSON object")
    start = 8 + length
    tensors = {
        name: _tensor(file, start, name, entry) for name, entry in header.items() if name != "__metadata__"
    }
    _check_extent(file, start, size, tensors)
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the trunk: the single file, those of the index, or all but sidecars."""
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if (directory / _INDEX).is_file():
        return [directory / name for name in sorted(set(_weight_map(directory).values()))]
    files = sorted(set(directory.glob("*.safetensors")) - set(directory.glob(SIDECAR_PATTERN)))
    if not files:
        raise LoadError("validation", f"{directory} holds no *.safetensors weights", "model")
    return files


def find_sidecar(directory: str | Path) -> Path | None:
    """The checkpoint's MTP head in a file of its own, if there is one; several are refused."""
    found = sorted(Path(directory).glob(SIDECAR_PATTERN))
    if len(found) > 1:
        names = listed([file.name for file in found])
        raise LoadError("validation", f"{directory} has several MTP sidecars ({names}); leave one", "model")
    return found[0] if found else None


def read_tensors(directory: str | Path) -> dict[str, TensorInfo]:
    """Every tensor of the trunk's files by its name there; with an index, those that the index lists."""
    directory = Path(directory)
    files = weight_files(directory)
    indexed = _weight_map(directory) if files != [directory / _SINGLE] and _has_index(directory) else None
    tensors: dict[str, TensorInfo] = {}
    twice: list[str] = []
    for file in files:
        for name, info in read_header(file).items():
            if indexed is not None and indexed.get(name) != file.name:
                continue
            if name in tensors:
                twice.append(f"{name} ({tensors[name].file.name} and {file.name})")
            tensors[name] = info
    if twice:
        raise LoadError("validation", f"weights are in {directory} twice: {listed(twice)}", "model")
    absent = [f"{name} ({file})" for name, file in (indexed or {}).items() if name not in tensors]
    if absent:
        message = f"{_INDEX} in {directory} lists weights that their files lack: {listed(absent)}"
        raise LoadError("validation", message, "model")
    return tensors


def _has_index(directory: Path) -> bool:
    return (directory / _INDEX).is_file()


def _weight_map(directory: Path) -> dict[str, str]:
    """Weight name -> file name, from the index; every file named must be there."""
    fields = Fields(read_json_map(directory / _INDEX), {})
    weights: dict[str, Any] = fields.mapping("weight_map") or {}
    wrong = [
        name
        for name, file in weights.items()
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file
    ]
    if wrong or not weights:
        detail = f"names no safetensors file for {listed(wrong)}" if wrong else "has no weight_map"
        raise LoadError("validation", f"{_INDEX} in {directory} {detail}", "model")
    absent = sorted({file for file in weights.values() if not (directory / file).is_file()})
    if absent:
        message = f"{directory} lacks files that its index names: {listed(absent)}; download them again"
        raise LoadError("validation", message, "model")
    return weights


def _tensor(file: Path, start: int, name: str, entry: Any) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise _corrupt(file, f"its header describes {shown(name)} as {shown(entry)}")
    if dtype not in _ITEM_BYTES:
        raise LoadError("unsupported", f"{name} in {file} has the unknown dtype {shown(dtype)}", "model")
    if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
        raise _corrupt(file, f"its header gives {shown(name)} the shape {shown(shape)}")
    if not 0 <= begin <= end or end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise _corrupt(file, f"{shown(name)} does not fill the bytes that its header gives it")
    return TensorInfo(file, dtype, tuple(shape), start + begin, end - begin)


def _check_extent(file: Path, start: int, size: int, tensors: dict[str, TensorInfo]) -> None:
    """Tensors lie one after the other from the header's end to the file's."""
    end = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            raise _corrupt(file, f"{shown(name)} does not begin where the tensor before it ends")
        end += info.nbytes
    if end != size:
        detail = f"it has {size} bytes where its header promises {end}"
        raise _corrupt(file, detail + ("; download it again" if size < end else ""))


def _corrupt(file: Path, detail: str) -> LoadError:
    return LoadError("validation", f"{file} is cut short or corrupt: {detail}", "model")
