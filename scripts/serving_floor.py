"""How far a GPU's served steps are from what their bytes cost: figures beside those of the serving benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mstar.loader import LoadError, ModelConfig, read_config, resolve
from mstar.scripts.step_floor import StepShape, step_floor_s


def served_config(model: str) -> ModelConfig | None:
    """The config of a model that is on this machine; None of one that is not."""
    if not (model.startswith("builtin:") or Path(model).expanduser().is_dir()):
        return None
    try:
        return read_config(resolve(model))
    except LoadError:
        return None


def add_floors(
    rows: Sequence[dict[str, Any]], loaded: dict[str, Any], config: ModelConfig | None, system: str
) -> None:
    """Adds `floor_ms` and `floor_ratio` to rows of plain decode by `system`, where a GPU served them.

    floor_ms: of a step of as many sequences as were in flight, in the middle of their answers. floor_ratio: the
    median gap between tokens over it. Both are None where there is no such floor: chats, whose lengths differ, and
    steps that check drafts.
    """
    if config is None or str(loaded["device"]).startswith("cpu"):
        return
    for row in rows:
        if row["system"] != system:
            continue
        row |= {"floor_ms": None, "floor_ratio": None}
        if not row["prompt_tokens"] or row["drafts_per_step"]["max"] > 0:
            continue
        context = row["prompt_tokens"] + row["output_tokens"] // 2
        shape = StepShape(row["concurrency"], context, loaded["dtype"], tp=loaded["tp"])
        row["floor_ms"] = 1e3 * step_floor_s(config, shape)
        row["floor_ratio"] = row["itl_p50_ms"]["median"] / row["floor_ms"]
