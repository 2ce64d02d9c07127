"""What a bench keeps: one JSON a model in a directory, `<model>-tp<ranks>.json`.

A file holds the device, the stack and, by size, the default and every candidate with its launch parameters,
its launches and the microseconds of each pass. Candidates that fell out after the first pass have one time;
failed ones say why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.kernels.registry import OP

Json = dict[str, Any]


class StoreError(Exception):
    """A store that does not fit what is asked of it; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Under what a store's figures were taken."""

    arch: str
    device: str
    stack: Mapping[str, str]

    def as_json(self) -> Json:
        return {"op": OP, "arch": self.arch, "device": self.device, "stack": dict(self.stack)}


class Store:
    """A directory of measured sizes. A size is written once it is whole, so that a bench can be cut off."""

    def __init__(self, directory: Path):
        self.directory = directory

    def files(self) -> Iterator[tuple[Path, Json]]:
        """The files by name. Raises StoreError for one that is no file of a bench."""
        for path in sorted(self.directory.glob("*.json")):
            try:
                content = json.loads(path.read_text())
                fits = content["op"] == OP and isinstance(content["sizes"], dict)
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{path} is not what the bench writes: {error!r}") from error
            if not fits:
                raise StoreError(f"{path} is of another op, not {OP}")
            yield path, content

    def sizes(self) -> set[str]:
        """Names of all sizes that are measured."""
        return {name for _, content in self.files() for name in content["sizes"]}

    def check(self, under: Measured) -> None:
        """Raises StoreError where the directory has figures of another device or stack."""
        for path, content in self.files():
            if any(content.get(field) != value for field, value in under.as_json().items()):
                raise StoreError(f"{path} was measured on another device or stack: use another --store")

    def add(self, model: str, under: Measured, name: str, size: Json) -> None:
        """Adds a size to the model's file, which changes at once and as a whole."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{model}.json"
        content = json.loads(path.read_text()) if path.is_file() else {**under.as_json(), "sizes": {}}
        content["sizes"][name] = size
        write_json(path, content)


def write_json(path: Path, content: Json) -> None:
    """Sorted by name, so that the same content is the same bytes; a reader sees the old file or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    part.replace(path)
