"""gpu_check.py rehearsed on the CPU, the bytes of a layer from shapes, the model's fused steps."""
import json
import re
import shutil

from experiments import bench
import chunk_scan_triton
import common
from experiments import gpu_check
import hydra_ssm
import pytest
import tiny
import torch
import torch.nn.functional as F


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("flags, said", (
    (("--gpu-check",), "torch sees no CUDA GPU; --device cpu"),
    (("--preset", "paper"), "CUDA"),
    (("--gpu-check", "--device", "gpu"), "gpu"),
    (("--gpu-check", "--device", "cpu", "--publish"), "a rehearsal on the CPU is no result")))
def test_a_machine_without_a_gpu_is_told_so_in_one_line(flags, said):
    run = tiny.command("experiments.bench", *flags)
    assert run.status == 2 and run.err.count("\n") == 1 and said in run.err


def test_the_rehearsal_checks_gradients_and_times_every_adapter(tmp_path):
    with tiny.root_at(tmp_path):
        run = tiny.command("experiments.bench", "--gpu-check", "--device", "cpu")
    assert run.status == 0, run.err
    result = json.loads((tmp_path / "runs" / "bench" / "result.json").read_text())["metrics"]
    assert all(0 <= error < 2e-2 for error in result["gradients"].values())
    rows = {row["what"]: row for row in result["times"]}
    assert {f"model, {name}" for name in gpu_check.KERNELS} < rows.keys()
    assert all(row["forward_ms"] > 0 for row in rows.values())
    assert {name for name, row in rows.items() if "both_ms" not in row} == {"model, none"}


def test_a_wrong_scan_ends_the_check_before_any_time(monkeypatch):
    monkeypatch.setattr(gpu_check, "bidirectional_scan",
                        lambda *inputs: gpu_check.chunked_scan(*inputs, 64) * 1.001)
    with pytest.raises(common.UserError, match="the scan is wrong in torch.float32"):
        gpu_check.check("cpu", 42)


def test_a_case_that_fails_costs_no_other_its_time(monkeypatch, work):
    real = gpu_check.forward_and_backward

    def fails_on_lora(function, inputs, device):
        if len(inputs) == 4 and inputs[0].ndim == 3:     # lora's weights
            raise RuntimeError("out of memory\nand more")
        return real(function, inputs, device, rounds=1)
    monkeypatch.setattr(gpu_check, "forward_and_backward", fails_on_lora)
    with pytest.raises(common.UserError, match="model, lora failed; the rows of runs/bench"):
        bench.main(bench.Config(gpu_check=True, device="cpu"))
    metrics = json.loads((work / "runs" / "bench" / "result.json").read_text())["metrics"]
    failed = [row for row in metrics["times"] if "failed" in row]
    assert metrics["failed"] == ["model, lora"] == [row["what"] for row in failed]
    assert failed[0]["failed"].startswith("RuntimeError: out of memory")
    assert all("forward_ms" in row for row in metrics["times"] if row not in failed)


def nbytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def test_the_bytes_of_the_docstring_are_those_of_the_shapes():
    """Each step's operands once, from tensors without data of the released model's shapes."""
    config = hydra_ssm.HydraConfig()
    with torch.device("meta"):
        mixer = hydra_ssm.Mixer(config).bfloat16()
        u = torch.empty(8, 4096, config.d_model, dtype=torch.bfloat16)
        A, bias, D = torch.empty(3, 1, config.nheads)  # in float32, as load_backbone keeps them
        op = hydra_ssm.Operator(A, bias, D, *[None] * 6)
        packed = mixer.in_proj(u)
        z, x, dt, B, C, D = mixer.project(u, op)
        y, rows, states = chunk_scan_triton.empty_outputs(x, dt, A, B, C, D)
    assert (dt.dtype, D.dtype) == (torch.float32, torch.float32) and x.dtype == torch.bfloat16
    raw_dt, raw_D = dt.bfloat16(), D.bfloat16()
    steps = {
        "in_proj": nbytes(u, packed),
        "convolution and SiLU, one pass": 2 * nbytes(x, B, C),
        "D and dt": nbytes(x, raw_D, raw_D, D, raw_dt, dt, dt, dt),  # product, sums, softplus
        "scan: decays": nbytes(dt, rows),
        "scan: states": nbytes(x, x, B, rows, states),  # x for each direction
        "scan: y": nbytes(x, B, C, D, rows, states, y),
        "norm and gate, one pass": nbytes(y, z, y),
        "out_proj": nbytes(y, u),
        "residual and LayerNorm, one pass": nbytes(u, u, u)}
    steps["together"] = sum(steps.values())
    table = dict(re.findall(r"^    (\S.*?)  +(\d\.\d\d)$", gpu_check.__doc__, re.M))
    assert table.keys() == steps.keys()
    for name, count in steps.items():
        assert abs(float(table[name]) - count / 1e9) < 0.006, (name, count)


def layer_inputs(l, width=24, dtype=torch.float64):
    draw = torch.Generator().manual_seed(l)
    packed = torch.randn(2, l, 2 * width + 5, generator=draw, dtype=dtype)
    x, z = packed[..., 3:3 + width], packed[..., -width:]  # rows of a projection, as in the mixer
    conv = [torch.randn(width, 1, 7, generator=draw, dtype=dtype),
            torch.randn(width, generator=draw, dtype=dtype)]
    return x.detach().requires_grad_(), z.detach().requires_grad_(), conv


def assert_same(got, want, leaves, tolerance):
    for a, b in zip((got, *torch.autograd.grad(got.square().sum(), leaves)),
                    (want, *torch.autograd.grad(want.square().sum(), leaves))):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("l", (1, 3, 40))
def test_a_sum_of_shifted_rows_is_the_two_sided_convolution(l):
    x, _, (weight, bias) = layer_inputs(l)
    want = F.silu(F.conv1d(x.mT, weight, bias, padding=3, groups=len(weight)).mT)
    assert_same(hydra_ssm._conv_silu(x, weight, bias), want, (x,), 1e-12)


def test_a_compiled_model_answers_as_the_model_at_every_length():
    model = hydra_ssm.HydraBert(hydra_ssm.HydraConfig(
        260, d_model=32, n_layer=1, d_state=16, headdim=16)).requires_grad_(False)
    compiled = torch.compile(model, backend="eager")  # traces as for a GPU, and compiles nothing
    for l in (40, 70):
        ids = torch.arange(2 * l).view(2, l)
        assert torch.equal(compiled(ids), model(ids))


@pytest.mark.slow
def test_what_torch_compile_makes_of_the_fused_steps_is_the_same_at_any_length():
    """The GPU's formulas, compiled for the CPU; the mixer asks for them on a GPU alone."""
    if not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    conv, norm, add_norm = (
        torch.compile(step.__wrapped__, dynamic=True, fullgraph=True)
        for step in (hydra_ssm._conv_silu, hydra_ssm._gated_norm, hydra_ssm._add_norm))
    for l in (40, 77):
        x, z, (weight, bias) = layer_inputs(l, dtype=torch.float32)
        assert_same(conv(x, weight, bias), hydra_ssm._conv_silu(x, weight, bias), (x,), 1e-4)
        assert_same(norm(x, z, bias), hydra_ssm._gated_norm(x, z, bias), (x, z), 1e-4)
        assert_same(add_norm(x, z, bias, bias), hydra_ssm._add_norm(x, z, bias, bias), (x, z), 1e-4)
