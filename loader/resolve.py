"""From what a user names a model by to a directory on this machine. No torch here."""

from __future__ import annotations

import re
from pathlib import Path

from mstar.loader.errors import LoadError, listed, shown

_BUILTIN = Path(__file__).parent / "builtin"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
# What serving needs; a hub repository may hold the same weights in other formats too.
_HUB_FILES = [
    "*.json",
    "*.jinja",
    "*.safetensors",
    "merges.txt",
    "tokenizer.model",
]
_HUB_SUBFOLDERS = ["*/*"]  # other formats live there: onnx/, original/, ...


def resolve(model: str) -> Path:
    """The checkpoint directory of `model`: `builtin:NAME`, a directory, or a hub id `owner/name`.

    A hub id is downloaded into the usual cache (HF_HOME), or only looked up there under HF_HUB_OFFLINE=1.
    Raises LoadError (`validation`, field `model`) that says what to do. Blocks while it downloads.
    """
    if not isinstance(model, str) or not model.strip() or "\0" in model:
        raise _refused(f"{shown(model)} names no model: give a directory, a hub id or builtin:tiny")
    if model.startswith("builtin:"):
        return _builtin(model.removeprefix("builtin:"))
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long for the file system, a home of nobody
        raise _refused(f"cannot look at {shown(model)}: {error}") from error
    if exists:
        raise _refused(f"{model} is a file: give the directory that holds config.json and the weights")
    if not _HUB_ID.fullmatch(model):
        hint = "give a directory, a hub id like Qwen/Qwen3.5-0.8B, or builtin:tiny"
        raise _refused(f"there is no directory {shown(model)}: {hint}")
    return _from_hub(model)


def _builtin(name: str) -> Path:
    names = sorted(config.parent.name for config in _BUILTIN.glob("*/config.json"))
    if name not in names:
        raise _refused(f"there is no built-in model {shown(name)}; there is {listed(names)}")
    return _BUILTIN / name


def _from_hub(model: str) -> Path:
    from huggingface_hub import errors, snapshot_download  # slow to import, and most loads need no hub

    try:
        found = snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SUBFOLDERS)
    except errors.GatedRepoError as error:
        message = f"{model} is gated on the hub: accept its terms there and log in with `hf auth login`"
        raise _refused(message) from error
    except errors.RepositoryNotFoundError as error:
        message = (
            f"there is neither a directory nor a hub repository {model} (or it is private: `hf auth login`)"
        )
        raise _refused(message) from error
    except errors.LocalEntryNotFoundError as error:
        message = (
            f"{model} is neither a directory nor in the local cache, and the hub cannot be asked "
            "(HF_HUB_OFFLINE is set or there is no network): "
            "download it once while online, or give a directory"
        )
        raise _refused(message) from error
    except Exception as error:  # an open set: the hub's HTTP and storage clients raise their own
        raise _refused(f"cannot fetch {model} from the hub: {str(error) or type(error).__name__}") from error
    return Path(str(found))


def _refused(message: str) -> LoadError:
    return LoadError("validation", message, "model")
