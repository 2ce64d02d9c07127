"""How the next tokens are drawn, and what a drawn token does to its request.

`Sampler` holds the per-slot registers; `Sampled` is what a step gives back; `FINISH_REASONS` names its codes.
"""

from mstar.kernels.step import LENGTH, RUNNING, STOP
from mstar.ranks.sampler.registers import FINISH_REASONS
from mstar.ranks.sampler.sampler import Sampled, Sampler

__all__ = ["FINISH_REASONS", "LENGTH", "RUNNING", "STOP", "Sampled", "Sampler"]
