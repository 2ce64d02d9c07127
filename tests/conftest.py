"""What every test runs under."""

import os

import torch

# Triton decides at import: without a GPU its kernels run in the interpreter, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# two cores, often two test runs, ranks and daemons beside them: more threads only wait for each other
torch.set_num_threads(1)
