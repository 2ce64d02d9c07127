"""Which tensor of which file is which weight of the model, checked before anything is read. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mstar.loader.config import ModelConfig
from mstar.loader.errors import LoadError, listed
from mstar.loader.headers import SIDECAR_PATTERN, TensorInfo, find_sidecar, read_header, read_tensors
from mstar.loader.recipe import Recipe, read_recipe
from mstar.loader.sharding import Weight, head_weights_of, weights_of

_TRUNK = "model."
_PREFIXES = ("model.language_model.", _TRUNK)  # of multimodal and of text checkpoints; some have none
_HEAD = "mtp."
_SKIPPED = ("visual.", _HEAD)  # the vision tower is not served; the head is read by the one who drafts
_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Made:
    """A weight without a file."""

    recipe: Recipe
    name: str  # with the prefix of a checkpoint's files: the trunk's and the head's layers differ by it


@dataclass(frozen=True, slots=True)
class Source:
    """A weight of the model and where its bytes are, or what they are made from."""

    weight: Weight
    info: TensorInfo | Made


def read_manifest(path: str | Path, config: ModelConfig) -> list[Source]:
    """Every weight of the trunk with its place in the checkpoint's files, or with how it is made.

    Raises one LoadError (`validation`, field `model`) that names all weights that are missing, that the model
    does not have, or whose shape or dtype is wrong, and the file where one is corrupt.
    """
    recipe = read_recipe(path)
    if recipe is not None:
        return [Source(weight, Made(recipe, _TRUNK + weight.name)) for weight in weights_of(config)]
    found, twice = _by_canonical_name(read_tensors(path).items())
    # old exports store the rope frequencies, which follow from the config
    skipped = [name for name in found if name.startswith(_SKIPPED) or name.endswith("rotary_emb.inv_freq")]
    for name in skipped:
        del found[name]
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # a copy, or stale: the embedding is what the config says to use
    twice = [name for name in twice if not name.startswith(_SKIPPED)]
    return _match(f"{path} does not fit its config.json", weights_of(config), found, twice)


def read_head_manifest(path: str | Path, config: ModelConfig) -> list[Source]:
    """Every weight of the MTP head, named without `mtp.`, with its place in the trunk's files or the sidecar.

    As `read_manifest` where weights are made.

    Raises LoadError: `unsupported` (field `spec.mtp`) where there is none, or one of a kind that is not
    served; `validation` (field `model`) with all names where its weights are not those of the config.
    """
    recipe = read_recipe(path)
    found, twice = _head_tensors(path) if recipe is None else ({}, [])
    if recipe is None and not found:
        message = f"{path} has no MTP head: neither {_HEAD}* weights nor a file {SIDECAR_PATTERN}"
        raise LoadError("unsupported", message, "spec.mtp")
    layers = config.mtp_num_hidden_layers
    if layers not in (None, 1):
        message = (
            f"mtp_num_hidden_layers is {layers} in the config, and a head of one layer is what is served"
        )
        raise LoadError("unsupported", message, "spec.mtp")
    if config.mtp_use_dedicated_embeddings:
        message = "mtp_use_dedicated_embeddings is true in the config: heads share the trunk's embedding here"
        raise LoadError("unsupported", message, "spec.mtp")
    if recipe is not None:
        return [Source(weight, Made(recipe, _HEAD + weight.name)) for weight in head_weights_of(config)]
    what = f"the MTP head in {path} does not fit the model's config.json"
    return _match(what, head_weights_of(config), found, twice)


def head_fault(path: str | Path, config: ModelConfig) -> LoadError | None:
    """Why a load cannot draft with the checkpoint's MTP head; None when it can."""
    try:
        read_head_manifest(path, config)
    except LoadError as error:
        return error
    return None


def _head_tensors(path: str | Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """What the sidecar holds and `mtp.*` beside the trunk, by name without `mtp.`; and what came twice."""
    beside, twice = _by_canonical_name(read_tensors(path).items())
    found = {name.removeprefix(_HEAD): info for name, info in beside.items() if name.startswith(_HEAD)}
    twice = [name.removeprefix(_HEAD) for name in twice if name.startswith(_HEAD)]
    sidecar = find_sidecar(path)
    if sidecar is not None:
        own, own_twice = _by_canonical_name(read_header(sidecar).items())
        twice += [name.removeprefix(_HEAD) for name in own_twice]
        for name, info in own.items():
            # an index may list the sidecar's weights too: these are one and the same
            if found.setdefault(name.removeprefix(_HEAD), info) != info:
                twice.append(name.removeprefix(_HEAD))
    return found, twice


def _match(
    what: str, weights: Iterable[Weight], found: dict[str, TensorInfo], twice: list[str]
) -> list[Source]:
    """Puts each weight to its tensor; one LoadError, begun by `what`, for all that do not fit. Empties `found`."""
    sources: list[Source] = []
    missing: list[str] = []
    shapes: list[str] = []
    dtypes: list[str] = []
    for weight in weights:
        info = found.pop(weight.name, None)
        if info is None:
            missing.append(weight.name)
            continue
        if info.shape != weight.shape:
            shapes.append(f"{weight.name} (has {list(info.shape)}, the config says {list(weight.shape)})")
        if info.dtype not in _FLOATS:
            dtypes.append(f"{weight.name} ({info.dtype})")
        sources.append(Source(weight, info))
    faults = (
        ("missing", missing),
        ("of the wrong shape", shapes),
        (f"of a dtype other than {', '.join(_FLOATS)}", dtypes),
        ("not part of this model", list(found)),
        ("there twice, in two files or under two prefixes", twice),
    )
    if any(names for _, names in faults):
        detail = "; ".join(f"{fault}: {listed(names)}" for fault, names in faults if names)
        raise LoadError("validation", f"{what}. Weights {detail}", "model")
    return sources


def _by_canonical_name(
    tensors: Iterable[tuple[str, TensorInfo]],
) -> tuple[dict[str, TensorInfo], list[str]]:
    """Tensors by their name without the model's prefix, and the names that came twice, under two prefixes."""
    found: dict[str, TensorInfo] = {}
    twice = []
    for full_name, info in tensors:
        prefix = next((prefix for prefix in _PREFIXES if full_name.startswith(prefix)), "")
        name = full_name.removeprefix(prefix)
        if name in found:
            twice.append(name)
        found[name] = info
    return found, twice
