"""The GPU check as tests: kernels, fused steps, a training step and a CUDA graph against float64.

Errors are relative to the norm of what is right; gpu_check.py says why the bounds are what they
are. `python -m experiments.gpu_check` compares the same at the released sizes, and then times them.
"""
import chunk_scan_triton
import pytest
import torch
from experiments import gpu_check
from experiments.gpu_check import BOUNDS, SMALL, TRAINING_BOUNDS
from hydra_ssm import HydraConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
GROUPED = HydraConfig(d_model=64, n_layer=1, d_state=32, headdim=16, ngroups=2)


@DTYPES
@pytest.mark.parametrize("l", (1, 2, 63, 64, 65, 300, 2000))
@pytest.mark.parametrize("config", (HydraConfig(), SMALL, GROUPED),
                         ids=("released", "small", "groups"))
def test_the_kernels_are_the_scan_in_values_and_gradients(config, l, dtype):
    inputs = gpu_check.scan_inputs(2, l, config, dtype, "cuda", 0)
    assert chunk_scan_triton.fits(*inputs), "the PyTorch path would be compared with itself"
    assert gpu_check.scan_error(config, l, dtype, "cuda", seed=l) < BOUNDS[dtype]


@DTYPES
@pytest.mark.parametrize("l", (1, 3, 40, 77, 1000))
def test_a_fused_step_is_its_formula_in_values_and_gradients(l, dtype):
    for name, (step, inputs) in gpu_check.fused_steps(l, dtype, "cuda", seed=l).items():
        assert gpu_check.fused_error(step, inputs, seed=l) < BOUNDS[dtype], name


@DTYPES
@pytest.mark.parametrize("seed", (0, 1, 2))
def test_a_training_step_on_a_gpu_is_the_one_on_a_cpu(dtype, seed):
    assert gpu_check.training_error(dtype, "cuda", seed) < TRAINING_BOUNDS[dtype]


@DTYPES
def test_a_cuda_graph_of_the_frozen_pass_reads_new_ids(dtype):
    assert gpu_check.graph_error(dtype, seed=0) < BOUNDS[dtype]
