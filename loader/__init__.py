"""Checkpoints: the config, where the files are, how a mesh cuts the weights, and reading one rank's part.

Importing this needs no torch, so the daemon may; `mstar.loader.checkpoint.load_shard` is what ranks import.
"""

from mstar.loader.config import ModelConfig, read_config, resolve_dtype
from mstar.loader.errors import LoadError
from mstar.loader.fingerprint import fingerprint
from mstar.loader.headers import find_sidecar, has_head
from mstar.loader.manifest import read_manifest
from mstar.loader.policy import SpecPolicy, decide
from mstar.loader.resolve import resolve
from mstar.loader.sharding import check_tp

__all__ = [
    "LoadError",
    "ModelConfig",
    "SpecPolicy",
    "check_tp",
    "decide",
    "find_sidecar",
    "fingerprint",
    "has_head",
    "read_config",
    "read_manifest",
    "resolve",
    "resolve_dtype",
]
