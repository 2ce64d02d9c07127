"""Which tensor of which file is which weight of the model, checked before anything is read. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mstar.loader.config import ModelConfig
from mstar.loader.errors import LoadError, listed
from mstar.loader.headers import TensorInfo, read_tensors
from mstar.loader.sharding import Weight, weights_of

_PREFIXES = ("model.language_model.", "model.")  # of multimodal and of text checkpoints; some have none
_SKIPPED = ("visual.", "mtp.")  # the vision tower is not served; the head is read by the one who drafts
_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Source:
    """A weight of the model and where its bytes are."""

    weight: Weight
    info: TensorInfo


def read_manifest(path: str | Path, config: ModelConfig) -> list[Source]:
    """Every weight of the trunk with its place in the checkpoint's files.

    Raises one LoadError (`validation`, field `model`) that names all weights that are missing, that the model
    does not have, or whose shape or dtype is wrong, and the file where one is corrupt.
    """
    found, twice = _by_canonical_name(read_tensors(path).items())
    sources: list[Source] = []
    missing: list[str] = []
    shapes: list[str] = []
    dtypes: list[str] = []
    for weight in weights_of(config):
        info = found.pop(weight.name, None)
        if info is None:
            missing.append(weight.name)
            continue
        if info.shape != weight.shape:
            shapes.append(f"{weight.name} (has {list(info.shape)}, the config says {list(weight.shape)})")
        if info.dtype not in _FLOATS:
            dtypes.append(f"{weight.name} ({info.dtype})")
        sources.append(Source(weight, info))
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # a copy, or stale: the embedding is what the config says to use
    faults = (
        ("missing", missing),
        ("of the wrong shape", shapes),
        (f"of a dtype other than {', '.join(_FLOATS)}", dtypes),
        ("not part of this model", list(found)),
        ("there under two prefixes", twice),
    )
    if any(names for _, names in faults):
        detail = "; ".join(f"{what}: {listed(names)}" for what, names in faults if names)
        raise LoadError("validation", f"{path} does not fit its config.json. Weights {detail}", "model")
    return sources


def _by_canonical_name(
    tensors: Iterable[tuple[str, TensorInfo]],
) -> tuple[dict[str, TensorInfo], list[str]]:
    """Trunk tensors by their name without prefix, and the names that came twice."""
    found: dict[str, TensorInfo] = {}
    twice = []
    for full_name, info in tensors:
        prefix = next((prefix for prefix in _PREFIXES if full_name.startswith(prefix)), "")
        name = full_name.removeprefix(prefix)
        # old exports store the rope frequencies, which follow from the config
        if name.startswith(_SKIPPED) or name.endswith("rotary_emb.inv_freq"):
            continue
        if name in found:
            twice.append(name)
        found[name] = info
    return found, twice
