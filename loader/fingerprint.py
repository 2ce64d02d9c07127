"""A short name for what a checkpoint is, cheap enough to be taken at every load. No torch here."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mstar.loader.errors import LoadError
from mstar.loader.headers import find_sidecar, read_header, weight_files
from mstar.loader.recipe import read_recipe


def fingerprint(path: str | Path) -> str:
    """SHA-256 over config.json and the headers of all weight files (sidecar included), as 64 hex digits.

    It tells models, shapes, dtypes and file layouts apart; weights themselves are not read, so two trainings
    of one shape in equal files share it. Made weights follow from config.json.
    """
    directory = Path(path)
    files = [directory / "config.json"]
    if read_recipe(directory) is None:
        sidecar = find_sidecar(directory)
        files += [*weight_files(directory), *([sidecar] if sidecar else [])]
    digest = hashlib.sha256()
    for file in dict.fromkeys(files):
        try:
            content = file.read_bytes() if file.suffix == ".json" else _header_bytes(file)
        except OSError as error:
            raise LoadError(
                "validation", f"cannot read {file}: {error.strerror or error}", "model"
            ) from error
        # lengths and names keep apart what would otherwise run together
        digest.update(f"{file.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _header_bytes(file: Path) -> bytes:
    read_header(file)  # refuses a corrupt one
    with file.open("rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "little"))
