"""Checkpoints whose acceptance is planted (see `mstar.scripts.make_checkpoint`) say so in their config."""

from __future__ import annotations

import json
from pathlib import Path

from mstar.loader.recipe import PLANTED_FIELD


def planted_acceptance(directory: Path) -> float | None:
    """The acceptance that was planted in the checkpoint, None in one whose text means something."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    value = config.get(PLANTED_FIELD, config.get("text_config", {}).get(PLANTED_FIELD))
    return None if value is None else float(value)


def planted_note(acceptance: float | None) -> str:
    """What every table of figures from such a checkpoint says behind the model's name."""
    return "" if acceptance is None else f"; PLANTED acceptance {acceptance:g}"
