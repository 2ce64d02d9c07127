"""What every test runs under."""

import torch

# two cores, often two test runs, ranks and daemons beside them: more threads only wait for each other
torch.set_num_threads(1)
