"""gpu_check.py rehearsed on the CPU: what it notices; the bytes of a layer, and the fused steps."""
import functools
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys

import chunk_scan_triton
import common
import hydra_ssm
import pytest
import tiny
import torch
from experiments import gpu_check, plan
from helpers import ROOT

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


def run_here(group, on_row):
    """`isolated.run_group` in this process, where the tests break things."""
    functions = group.make(*group.args)
    for about, function in zip(group.cases, functions, strict=True):
        on_row(about | function())


def stored_metrics(folder):
    stored = json.loads((folder / "runs" / "gpu_check" / "result.json").read_text("utf-8"))
    assert stored["script"] == "gpu_check"
    return stored["metrics"]


@pytest.mark.slow
def test_the_rehearsal_checks_values_and_gradients_and_times_every_adapter(tmp_path):
    with tiny.root_at(tmp_path):
        run = tiny.command("experiments.gpu_check", "--device", "cpu")
    assert run.status == 0, run.err
    assert_whole(run.out, stored_metrics(tmp_path))


def test_the_rehearsal_in_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "run_group", run_here)
    with tiny.root_at(tmp_path):
        gpu_check.main(CPU)
    assert_whole(capsys.readouterr().out, stored_metrics(tmp_path))


def assert_whole(out, metrics):
    """What a rehearsal printed and stored."""
    assert out.splitlines()[-1].startswith("gpu check: frozen pass at (b, l) = (1, 64), on cpu")
    checked = {(row["what"], row["dtype"]) for row in metrics["errors"]}
    assert len(checked) == len(metrics["errors"]) == 2 * 5
    for row in metrics["errors"]:
        assert 0 < row["error"] < row["bound"], row
    models = {row["kind"]: row for row in metrics["times"] if row["part"] == "model"}
    scans = {row["kind"]: row for row in metrics["times"] if row["part"] == "scan"}
    assert models.keys() == gpu_check.KERNELS.keys()
    assert {"kernels", "PyTorch path"} <= scans.keys()
    for row in metrics["times"]:
        assert row["forward_ms"] > 0
    assert [kind for kind, row in models.items() if "both_ms" not in row] == ["none"]
    assert metrics["failed"] == []
    assert f"ptxas {metrics['compiler']['ptxas']}" in out


def test_a_case_that_fails_costs_no_other_its_time(monkeypatch, tmp_path):
    """isolated.py is tested for how; here one row of a group has failed."""
    def fails_on_lora(group, on_row):
        for about in group.cases:
            if about.get("kind") == "lora":
                on_row(about | {"failed": "RuntimeError: out of memory"})
            elif "what" in about:
                on_row(about | {"error": 0.0})
            else:
                on_row(about | {"forward_ms": 1.0})
    monkeypatch.setattr(gpu_check, "run_group", fails_on_lora)
    said = r"model, lora at \(1, 64\) failed; the rows of runs/gpu_check"
    with tiny.root_at(tmp_path), pytest.raises(common.UserError, match=said):
        gpu_check.main(CPU)
    metrics = stored_metrics(tmp_path)
    assert metrics["failed"] == ["model, lora at (1, 64)"]
    assert [row["kind"] for row in metrics["times"] if "failed" in row] == ["lora"]
    assert len(metrics["times"]) == len(gpu_check.KERNELS) + len(gpu_check.scans())


def test_the_result_is_whole_after_each_case(monkeypatch, tmp_path):
    counted = []

    def two_rows(group, on_row):
        for about in group.cases[:2]:
            on_row(about | ({"error": 0.0} if "what" in about else {"forward_ms": 1.0}))
            metrics = stored_metrics(tmp_path)
            counted.append(len(metrics["errors"]) + len(metrics["times"]))
        if group.cases[0].get("part") == "model":
            raise KeyboardInterrupt
    monkeypatch.setattr(gpu_check, "run_group", two_rows)
    with tiny.root_at(tmp_path), pytest.raises(KeyboardInterrupt):
        gpu_check.main(CPU)
    assert counted == list(range(1, 9))


def test_the_groups_limits_leave_20_of_6_minutes_to_the_start():
    config = hydra_ssm.HydraConfig()
    groups = (gpu_check.value_groups(config, 4096, "cuda", 0)
              + gpu_check.time_groups(config, "cuda", 0))
    assert sum(group.seconds for group in groups) <= 340
    assert str(sum(group.seconds for group in groups)) in gpu_check.__doc__
    for group in groups:
        assert group.seconds >= 25 and group.cases
        pickle.dumps(group)  # as it goes to a process
    kinds = [about["kind"] for about in groups[-1].cases]
    assert kinds == [*gpu_check.KERNELS, gpu_check.GRAPH]
    assert [row["what"] for row in groups[0].cases][-1] == "a CUDA graph of the frozen pass"


def test_cases_and_their_functions_are_as_many():
    for dtype in gpu_check.BOUNDS:
        cases = gpu_check.value_cases(dtype, "cpu")
        functions = gpu_check.value_functions(gpu_check.REHEARSAL, 8, dtype, "cpu", 0)
        assert len(cases) == len(functions)


# ---- without tyro, and what it is told -----------------------------------------------------------

WITHOUT_TYRO = """
import runpy, sys
sys.modules["tyro"] = None
sys.argv = ["gpu_check.py", *sys.argv[1:]]
import experiments.isolated
def run_group(group, on_row):
    for about in group.cases:
        on_row(about | ({"error": 0.0} if "what" in about else {"forward_ms": 1.0}))
experiments.isolated.run_group = run_group
runpy.run_module("experiments.gpu_check", run_name="__main__")
"""


def test_it_runs_where_tyro_is_not_installed(tmp_path):
    run = subprocess.run([sys.executable, "-c", WITHOUT_TYRO, "--device", "cpu", "--seed", "7"],
                         text=True, timeout=120, capture_output=True, cwd=ROOT,
                         env={**os.environ, "MARK_ROOT": str(tmp_path)})
    assert run.returncode == 0, run.stderr
    assert "seed=7" in run.stdout and stored_metrics(tmp_path)["failed"] == []


@pytest.mark.parametrize("words, said", (
    (("--device",), "got --device, need --NAME VALUE, NAME of device, out, seed"),
    (("--seed", "x"), "--seed: got 'x'"), (("--devices", "cpu"), "got --devices, need"),
    (("cpu",), "got cpu, need")))
def test_without_tyro_a_wrong_word_is_one_line(monkeypatch, words, said):
    monkeypatch.setattr("sys.argv", ["gpu_check.py", *words])
    with pytest.raises(common.UserError, match=said) as refused:
        gpu_check.parse_plainly(gpu_check.Config, gpu_check.Config())
    assert "\n" not in str(refused.value)


def test_without_tyro_a_setting_that_is_given_wins(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--out", "runs/a", "--seed", "7"])
    found = gpu_check.parse_plainly(gpu_check.Config, CPU)
    assert found == gpu_check.Config(device="cpu", out="runs/a", seed=7)


def wrong_result(architecture):
    row = {"what": "the scan", "dtype": "torch.float32", "bound": 1e-4, "error": math.nan}
    return {"compiler": {"architecture": architecture}, "errors": [row]}


def test_on_hopper_a_wrong_value_is_told_of_ptxas():
    with pytest.raises(common.UserError, match="TRITON_PTXAS_PATH=PATH of ptxas 13.1 or later"):
        gpu_check.check_values(wrong_result("sm_90"))
    for architecture in ("sm_80", None):
        with pytest.raises(common.UserError, match="times would mean nothing$"):
            gpu_check.check_values(wrong_result(architecture))


def test_without_triton_there_is_no_version_and_no_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert gpu_check.compiler("cpu") == {"triton": None, "ptxas": None, "architecture": None}


@pytest.mark.parametrize("dtype, asked", ((torch.float32, 1), (torch.bfloat16, 0)))
def test_the_precision_of_float32_is_read_for_float32_alone_and_may_be_refused(
        monkeypatch, dtype, asked):
    reads = []

    def refused():
        reads.append(0)
        raise RuntimeError("mix of the legacy and new APIs")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refused)
    x, B = torch.empty(1, 8, 2, 16, dtype=dtype), torch.empty(1, 8, 2, 1, 16, dtype=dtype)
    assert chunk_scan_triton.constants(x, B)["PRECISION"] == "tf32x3"
    assert len(reads) == asked


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
    monkeypatch.setattr(gpu_check, "run_group", run_here)
    monkeypatch.setattr(gpu_check, "time_groups", None)
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
