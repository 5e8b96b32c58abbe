"""One thread unless the caller asked for more: sums then round alike on every machine."""
import os

import torch

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
