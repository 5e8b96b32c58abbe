"""gpu_check.py rehearsed on the CPU: what it notices; the bytes of a layer, and the fused steps."""
import functools
import json
import re
import shutil

import chunk_scan_triton
import common
import hydra_ssm
import pytest
import tiny
import torch
from experiments import gpu_check, plan

CPU = gpu_check.Config(device="cpu")


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("flags, said", (
    ((), "torch sees none; --device cpu"),
    (("--device", "gpu"), "gpu")))
def test_a_machine_without_a_gpu_is_told_so_in_one_line(flags, said):
    run = tiny.command("experiments.gpu_check", *flags)
    assert run.status == 2 and run.err.count("\n") == 1 and said in run.err


def test_help_lists_the_settings():
    run = tiny.command("experiments.gpu_check", "--help")
    assert run.status == 0 and "--device {cuda,cpu}" in run.out and "rehearsal" in run.out


def test_the_rehearsal_checks_values_and_gradients_and_times_every_adapter(tmp_path):
    with tiny.root_at(tmp_path):
        run = tiny.command("experiments.gpu_check", "--device", "cpu")
    assert run.status == 0, run.err
    assert run.out.splitlines()[-1].startswith("gpu check: frozen pass at (b, l) = (1, 64), on cpu")
    stored = json.loads((tmp_path / "runs" / "gpu_check" / "result.json").read_text("utf-8"))
    assert stored["script"] == "gpu_check"
    checked = {(row["what"], row["dtype"]) for row in stored["metrics"]["errors"]}
    assert len(checked) == len(stored["metrics"]["errors"]) == 2 * 5
    for row in stored["metrics"]["errors"]:
        assert 0 < row["error"] < row["bound"], row
    models = {row["kind"]: row for row in stored["metrics"]["times"] if row["part"] == "model"}
    scans = {row["kind"]: row for row in stored["metrics"]["times"] if row["part"] == "scan"}
    assert models.keys() == gpu_check.KERNELS.keys()
    assert {"kernels", "PyTorch path"} <= scans.keys()
    for row in stored["metrics"]["times"]:
        assert row["forward_ms"] > 0
    assert [kind for kind, row in models.items() if "both_ms" not in row] == ["none"]


def test_a_case_that_fails_costs_no_other_its_time(monkeypatch, tmp_path):
    real = gpu_check.forward_and_backward

    def fails_on_lora(case, device):
        if case.kind == "lora":
            raise RuntimeError("out of memory\nand more")
        return real(case, device, rounds=1)
    monkeypatch.setattr(gpu_check, "forward_and_backward", fails_on_lora)
    said = "model, lora failed; the rows of runs/gpu_check"
    with tiny.root_at(tmp_path), pytest.raises(common.UserError, match=said):
        gpu_check.main(CPU)
    stored = json.loads((tmp_path / "runs" / "gpu_check" / "result.json").read_text("utf-8"))
    metrics = stored["metrics"]
    failed = [row for row in metrics["times"] if "failed" in row]
    assert metrics["failed"] == ["model, lora"]
    assert [row["kind"] for row in failed] == ["lora"]
    assert failed[0]["failed"].startswith("RuntimeError: out of memory")
    for row in metrics["times"]:
        assert ("forward_ms" in row) != ("failed" in row)


# ---- what it notices -----------------------------------------------------------------------------


def slightly_wrong(function):
    """Off by a tenth of a percent."""
    @functools.wraps(function)
    def wrong(*inputs):
        return 1.001 * function(*inputs)
    return wrong


def break_scan(monkeypatch):
    monkeypatch.setattr(gpu_check, "bidirectional_scan",
                        slightly_wrong(gpu_check.bidirectional_scan))


def break_convolution(monkeypatch):
    monkeypatch.setattr(gpu_check, "convolved", slightly_wrong(gpu_check.convolved))


def break_norm(monkeypatch):
    monkeypatch.setattr(hydra_ssm, "_gated_norm", slightly_wrong(hydra_ssm._gated_norm))


def break_residual(monkeypatch):
    monkeypatch.setattr(hydra_ssm, "_add_norm", slightly_wrong(hydra_ssm._add_norm.__wrapped__))


def break_model(monkeypatch):
    """Another diagonal of the scan inside the model, but not in the reference in float64."""
    right = hydra_ssm.bidirectional_scan

    def wrong(x, dt, A, B, C, D, chunk_size):
        D = D if x.dtype == torch.float64 else D + 0.01
        return right(x, dt, A, B, C, D, chunk_size)
    monkeypatch.setattr(hydra_ssm, "bidirectional_scan", wrong)


@pytest.mark.parametrize("break_it, what", (
    (break_scan, "the scan"), (break_convolution, "convolution and SiLU"),
    (break_norm, "norm and gate"), (break_residual, "residual and LayerNorm"),
    (break_model, "a training step")))
def test_what_is_slightly_wrong_ends_the_check_before_any_time(monkeypatch, break_it, what):
    break_it(monkeypatch)
    monkeypatch.setattr(gpu_check, "measure_times", None)
    with pytest.raises(common.UserError, match=f"{what} is wrong in torch.float32"):
        gpu_check.main(CPU)


def test_an_error_is_nan_wherever_a_value_is():
    good, bad = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    for got in ([good, bad], [bad, good]):
        found = gpu_check.worst_error(got, [good, good])
        assert found != found
    assert gpu_check.worst_error([good, 1.5 * good], [good, good]) == pytest.approx(0.5)
    zeros = torch.zeros(3)
    assert gpu_check.worst_error([zeros], [zeros]) == 0
    assert gpu_check.worst_error([good], [zeros]) == pytest.approx(3 ** 0.5)


# ---- the bytes of a layer ------------------------------------------------------------------------


def nbytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def layer_without_data():
    """The released model's first mixer in bfloat16, a frozen layer's modulation and u (8, 4096)."""
    config = hydra_ssm.HydraConfig(n_layer=1)
    with torch.device("meta"):
        model = hydra_ssm.HydraBert(config).bfloat16()
        mixer = model.layers[0].mixer
        for parameter in (mixer.A_log, mixer.dt_bias, mixer.D):  # as load_backbone keeps them
            parameter.data = parameter.data.float()
        m, = hydra_ssm.Modulation().by_layer(model)
        u = torch.empty(8, 4096, config.d_model, dtype=torch.bfloat16)
    return mixer, m, u


def test_the_bytes_of_the_docstring_are_those_of_the_shapes():
    """Each step's operands once, from tensors without data of the released model's shapes."""
    mixer, m, u = layer_without_data()
    packed = mixer.in_proj(u)
    z, x, dt, A, B, C, D = mixer.project(u, m)
    y, rows, states = chunk_scan_triton.empty_outputs(x, dt, A, B, C, D)
    assert (dt.dtype, D.dtype, x.dtype) == (torch.float32, torch.float32, torch.bfloat16)
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
        assert table[name] == f"{count / 1e9:.2f}", name
    assert f"{plan.LAYER_BYTES / 1e9:.2f}" == table["together"]
    saved = re.search(r"could still save (\d\.\d\d)", gpu_check.__doc__)[1]
    assert saved == f"{nbytes(x, x) / 1e9:.2f}"


# ---- the fused steps -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_model_answers_as_the_model_at_every_length():
    model = hydra_ssm.HydraBert(hydra_ssm.HydraConfig(
        260, d_model=32, n_layer=1, d_state=16, headdim=16)).requires_grad_(False)
    compiled = torch.compile(model, backend="eager")  # traces as for a GPU, and compiles nothing
    for l in (40, 70):
        ids = torch.arange(2 * l).view(2, l)
        assert torch.equal(compiled(ids), model(ids))


@pytest.mark.slow
def test_what_torch_compile_makes_of_the_residual_is_the_same_at_any_length():
    """The GPU's formula, compiled for the CPU; the model asks for it on a GPU alone."""
    if not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    step = hydra_ssm._add_norm.__wrapped__
    compiled = torch.compile(step, dynamic=True, fullgraph=True)
    for l in (40, 77):
        _, inputs = gpu_check.fused_steps(l, torch.float32, "cpu", l)["residual and LayerNorm"]
        assert gpu_check.error_of(compiled, step, inputs, l) < 1e-5
