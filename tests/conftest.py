"""One thread here and in child processes, whatever the caller's setting: sums round alike."""
import os

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a tiny backbone and a text, to which every run of a test file writes."""
    import tiny  # not at the top: it imports every script, which most test files do not need
    folder = tmp_path_factory.mktemp("work")
    tiny.write_inputs(folder)
    with tiny.root_at(folder):
        yield folder
