"""One thread here and in child processes, unless the caller asked for more: sums round alike."""
import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
