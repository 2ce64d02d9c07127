"""Native code for CPUs: C compiled once on the machine that runs it, loaded through ctypes."""

from mstar.kernels.native.build import load_library
from mstar.kernels.native.pool import set_threads

__all__ = ["load_library", "set_threads"]
