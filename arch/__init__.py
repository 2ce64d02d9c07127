"""The model as modules: the text trunk of the Qwen3.5 family, sharded over the ranks of a mesh.

`Trunk` runs a prefill part or a decode part of a step over `LayerCache`s that the engine owns.
"""

from mstar.arch.caches import AttentionCache, GdnCache, LayerCache, allocate_caches, cache_sizes
from mstar.arch.head import MtpHead
from mstar.arch.inputs import DecodeInputs, PrefillInputs
from mstar.arch.trunk import Trunk

__all__ = [
    "AttentionCache",
    "DecodeInputs",
    "GdnCache",
    "LayerCache",
    "MtpHead",
    "PrefillInputs",
    "Trunk",
    "allocate_caches",
    "cache_sizes",
]
