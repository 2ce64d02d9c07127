"""Checkpoints: the config, where the files are, how a mesh cuts the weights, and reading one rank's part.

Importing this needs no torch, so the daemon may; `mstar.loader.checkpoint` and `mstar.loader.head`
are what ranks import.
"""

from mstar.loader.config import ModelConfig, read_config, resolve_dtype
from mstar.loader.errors import LoadError
from mstar.loader.fingerprint import fingerprint
from mstar.loader.headers import find_sidecar
from mstar.loader.manifest import head_fault, read_manifest
from mstar.loader.policy import SpecPolicy, check_built, decide
from mstar.loader.recipe import Recipe, read_recipe
from mstar.loader.resolve import resolve
from mstar.loader.sharding import check_tp

__all__ = [
    "LoadError",
    "ModelConfig",
    "Recipe",
    "SpecPolicy",
    "check_built",
    "check_tp",
    "decide",
    "find_sidecar",
    "fingerprint",
    "head_fault",
    "read_config",
    "read_manifest",
    "read_recipe",
    "resolve",
    "resolve_dtype",
]
