"""Which kernel runs each linear layer of a decode step, by op and size.

A served size is a `GemmKey`, an implementation with its parameters a
`KernelChoice`. The choice for a size comes from a table measured on the same
device, or else from the rule of kernels/linear/gpu/candidates.py.
"""

from dataclasses import dataclass

# Rows are padded up to one of these; 256 is the most that a decode step has.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KINDS = ("plain", "norm", "residual", "gated", "f32")
DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """An implementation by name and its launch parameters, sorted by name."""

    kernel: str
    params: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GemmKey:
    """One served size of a linear layer."""

    kind: str  # one of KINDS
    rows: int  # a row bucket
    n: int  # outputs; a gated weight has 2n rows
    k: int  # inputs
    dtype: str  # of inputs and weight, one of DTYPES


def row_bucket(rows: int) -> int | None:
    """The smallest bucket that holds `rows`, or None above the largest."""
    for bucket in ROW_BUCKETS:
        if rows <= bucket:
            return bucket
    return None
