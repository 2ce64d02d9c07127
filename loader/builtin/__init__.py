"""Checkpoints that come with the package, so that a fresh machine serves something real without a network.

Each folder here is a plain checkpoint directory; `builtin:<folder>` names it.
"""
