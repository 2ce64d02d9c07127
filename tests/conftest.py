"""What every test runs under."""

import os
import signal

import torch

# A shell that runs tests in the background has them ignore Ctrl-C, and all that they start would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton decides at import: without a GPU its kernels run in the interpreter, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# two cores, often two test runs, ranks and daemons beside them: more threads only wait for each other
torch.set_num_threads(1)
