"""Typed, range-checked reading of a JSON map: every wrong value becomes a LoadError that names its field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstar.loader.errors import LoadError, shown

_MAX_JSON_BYTES = 64 << 20  # a 27B checkpoint's index has 100 kB


def read_json_map(path: Path) -> dict[str, Any]:
    """The object in a JSON file. LoadError when it cannot be read or holds something else."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise LoadError("validation", f"{path} has {size} bytes, which is no {path.name}", "model")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise LoadError("validation", f"cannot read {path}: {error.strerror or error}", "model") from error
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, nested too deep
        raise LoadError("validation", f"{path} is not valid JSON: {error}", "model") from error
    if not isinstance(value, dict):
        raise LoadError("validation", f"{path} must hold a JSON object, not {shown(value)}", "model")
    return value


class Fields:
    """Fields of a model config, some of them overridden by the load request. A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        self._values = {**values, **overrides}
        self._overrides = frozenset(overrides)

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def path(self, name: str) -> str:
        """The field's name in an error event: where the value came from tells who can mend it."""
        return f"overrides.{name}" if name in self._overrides else name

    def wrong(self, name: str, wanted: str) -> LoadError:
        where = "the load request" if name in self._overrides else "config.json"
        value = self._values.get(name)
        found = f"not {shown(value)}" if value is not None else "and it is missing"
        return LoadError("validation", f"{name} in {where} must be {wanted}, {found}", self.path(name))

    def unsupported(self, name: str, wanted: str) -> LoadError:
        message = f"{name} = {shown(self._values.get(name))} is not supported: {wanted}"
        return LoadError("unsupported", message, self.path(name))

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, above: float, high: float, default: float) -> float:
        """A finite number in (above, high]."""
        value = self._values.get(name)
        if value is None:
            return default
        wanted = f"a number above {above:g} and at most {high:g}"
        if type(value) not in (int, float):
            raise self.wrong(name, wanted)
        try:
            number = float(value)
        except OverflowError as error:
            raise self.wrong(name, wanted) from error
        if not (math.isfinite(number) and above < number <= high):
            raise self.wrong(name, wanted)
        return number

    def boolean(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is not str:
            raise self.wrong(name, "a string")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def sequence(self, name: str, limit: int) -> list[Any] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) > limit:
            raise self.wrong(name, f"a list of at most {limit}")
        return list(value)
