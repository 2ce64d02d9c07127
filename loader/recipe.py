"""Checkpoints without weight files: their config names a seed, from which every load makes the weights. No torch here.

`mstar_weights` in config.json says so ({"generator": 1, "seed": 0}), and `mstar_planted` that they are made such
that drafts are accepted at that rate. Both are written by `mstar.scripts.make_checkpoint`; what the weights are
stands in `mstar.loader.made`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mstar.loader.config import read_config
from mstar.loader.errors import LoadError, listed
from mstar.loader.fields import Fields, read_json_map

FIELD = "mstar_weights"
PLANTED_FIELD = "mstar_planted"
GENERATOR = 1  # a change of any made number is another one


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that made weights depend on, beside the model's shape."""

    seed: int
    acceptance: float | None  # a draft's, where it is planted
    dtype: str  # "bf16", "fp16" or "fp32", to which numbers are rounded whatever dtype a load has

    @property
    def note(self) -> str:
        """For people who read the load's figures."""
        planted = "" if self.acceptance is None else f", PLANTED acceptance {self.acceptance:g}"
        return f"no real model: its weights were made at the load from seed {self.seed}{planted}"


def read_recipe(path: str | Path) -> Recipe | None:
    """How the weights of the checkpoint in directory `path` are made; None where they are in files.

    Raises LoadError (`validation`, `unsupported`) for a recipe that is not one, or that has files beside it.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        return None
    top = Fields(read_json_map(directory / "config.json"), {})
    values = top.mapping(FIELD)
    if values is None:
        return None
    fields = Fields(values, {})
    if fields.get("generator") != GENERATOR:
        message = f"{FIELD}.generator in {directory} must be {GENERATOR}, as this version makes weights"
        raise LoadError("unsupported", message, "model")
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    if files:
        message = (
            f"{directory} says in {FIELD} that its weights are made, and holds {listed(files)}: remove one"
        )
        raise LoadError("validation", message, "model")
    planted = top.get(PLANTED_FIELD)
    if planted is not None and (type(planted) not in (int, float) or not 0 <= planted <= 1):
        raise top.wrong(PLANTED_FIELD, "a number from 0 to 1")
    return Recipe(
        seed=fields.integer("seed", 0, (1 << 63) - 1),
        acceptance=None if planted is None else float(planted),
        dtype=read_config(directory).dtype,
    )
