"""The scan's kernels against the float64 loop of test_chunk_scan.py, and what they compile to.

Where there is a GPU the kernels run on it. Elsewhere `TestKernels` runs under Triton's interpreter,
in a process of its own: it must be chosen before triton is imported, and a process that interprets
cannot compile. The compiled code is read in another one, tests/compile_kernels.py.

Tolerances. float32: 2e-5 of the largest entry, as in test_chunk_scan.py, for the same reason.
bfloat16: 1 % of the norm; one rounding is 0.4 % at worst, and a sum averages over many.
"""
import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

INTERPRETED, GPU = os.environ.get("TRITON_INTERPRET") == "1", torch.cuda.is_available()
if INTERPRETED:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def values(handle):
        """What a tensor of the interpreter holds; it keeps bfloat16 as its bits."""
        bits = handle.dtype.scalar == tl.bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32) if bits else handle.data

    def create_dot(self, a, b, acc, *precision):
        return interpreter.TensorHandle(
            np.matmul(values(a), values(b)).astype(acc.data.dtype) + acc.data, acc.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot  # its own multiplies those bits

import chunk_scan_triton  # noqa: E402
import test_chunk_scan as plain  # noqa: E402
from chunk_scan import A_MIN, bidirectional_scan, narrow_heads  # noqa: E402
from helpers import ROOT, child, passed_interpreted  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTHS = (1, 2, 33, 63, 64, 65, 150, 257)
NAMES = plain.NAMES


def inputs_of(length, **sizes):
    return plain.random_inputs(length, **{"b": 1, "heads": 2, "p": 16, "n": 32, **sizes})


@functools.cache
def example(length, **sizes):
    """Inputs, rounded to bfloat16 where a model would hold them so, and the loop's results."""
    inputs = inputs_of(length, **sizes)
    for name in ("x", "B", "C"):
        inputs[name] = inputs[name].bfloat16().double()
    return inputs, plain.value_and_gradients(plain.loop_oracle, inputs)


def kernels(**inputs):
    """The kernels: on a GPU as users reach them, under the interpreter directly."""
    order = [inputs[name] for name in NAMES]
    if INTERPRETED:
        return chunk_scan_triton.scan(*order, A_MIN)
    return bidirectional_scan(*order)


def cast(inputs, dtype):
    return {k: v.to(DEVICE, dtype if k in ("x", "B", "C") else torch.float32)
            for k, v in inputs.items()}


def run(inputs, dtype=torch.float32):
    """value_and_gradients of the kernels, on the CPU."""
    assert chunk_scan_triton.fits(*cast(inputs, dtype).values())
    leaves = {k: v.requires_grad_() for k, v in cast(inputs, dtype).items()}
    y = kernels(**leaves)
    assert y.dtype == dtype
    weight = plain.output_weight(y).to(DEVICE, y.dtype)
    grads = torch.autograd.grad((y * weight).sum(), list(leaves.values()))
    return {"y": y.detach().cpu()} | {f"d{k}": g.cpu() for k, g in zip(leaves, grads)}


def assert_close(got, want, dtype=torch.float32, floor=1e-3):
    if dtype == torch.float32:
        return plain.assert_close(got, want, plain.FLOAT32, floor)
    for key, expected in want.items():
        assert torch.isfinite(got[key]).all(), key
        error = (got[key].double() - expected).norm() / expected.norm().clamp(min=floor)
        assert error < 0.01, f"{key}: {error:.2%}"


class TestKernels:
    __test__ = INTERPRETED or GPU

    @pytest.mark.parametrize("length, dtype", [(n, torch.float32) for n in LENGTHS] + [
        (n, torch.bfloat16) for n in (1, 63, 64, 65, 150)], ids=str)  # chunks of 32, and of 64
    def test_values_and_every_gradient_equal_the_loop(self, length, dtype):
        inputs, want = example(length)
        assert_close(run(inputs, dtype), want, dtype)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
    def test_with_groups_samples_and_a_decay_of_each_sample(self, dtype):
        inputs, want = example(35, b=2, heads=4, groups=2, p=32, n=16, per_sample=True)
        assert_close(run(inputs, dtype), want, dtype)

    def test_a_head_of_128_columns_is_two_heads_that_share_dt_A_and_D(self):
        inputs, want = example(35, heads=2, p=128)
        leaves = {k: v.requires_grad_() for k, v in cast(inputs, torch.float32).items()}
        narrow = narrow_heads(*[leaves[name] for name in NAMES], max(chunk_scan_triton.SIZES))
        assert narrow[0].shape[2:] == (4, 64) and chunk_scan_triton.fits(*narrow)
        y = kernels(**dict(zip(NAMES, narrow))).reshape(leaves["x"].shape)
        weight = plain.output_weight(y).to(DEVICE, y.dtype)
        grads = torch.autograd.grad((y * weight).sum(), list(leaves.values()))
        got = {"y": y.detach().cpu()} | {f"d{k}": g.cpu() for k, g in zip(leaves, grads)}
        assert_close(got, want)

    def test_heads_in_one_program_equal_heads_in_several(self, monkeypatch):
        inputs, want = example(33, heads=4)
        for programs in (1, 8):  # one part of four heads, and two; elsewhere each is its own
            monkeypatch.setattr(chunk_scan_triton, "PROGRAMS", programs)
            assert_close(run(inputs), want)

    @pytest.mark.parametrize("run_of", (1, 16))
    def test_a_spike_of_decay_costs_its_neighbours_nothing(self, run_of):
        inputs = inputs_of(130)
        inputs["A"] = torch.full_like(inputs["A"], -1.0)
        inputs["dt"] = torch.full_like(inputs["dt"], 0.01)
        for d, start in enumerate((37, 90)):
            inputs["dt"][:, start:start + run_of, d] = 1e5
            inputs["B"][:, start:start + run_of, d] *= 1e-7  # dt B x of the size of the others
        want = plain.value_and_gradients(plain.loop_oracle, inputs)
        got = run(inputs)
        for d, start in enumerate((37, 90)):  # dt is a factor of dB: compare it apart
            spikes = (slice(None), slice(start, start + run_of), d)
            plain.assert_close({"dB": got["dB"][spikes]}, {"dB": want["dB"][spikes]}, plain.FLOAT32)
            got["dB"][spikes] = want["dB"][spikes] = 0
        assert_close(got, want)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
    @pytest.mark.parametrize("case", ("no_decay", "strong_decay", "large_dt", "zero_dt"))
    def test_extreme_steps_stay_exact(self, case, dtype):
        inputs = dict(example(100)[0])
        if case == "no_decay":
            inputs["A"] = torch.zeros_like(inputs["A"])
        elif case == "strong_decay":  # a flow lasts one or two positions
            inputs["A"] = torch.full_like(inputs["A"], -8.0)
        else:
            inputs["dt"] = torch.full_like(inputs["dt"], 50.0 if case == "large_dt" else 0.0)
        want = plain.value_and_gradients(plain.loop_oracle, inputs)
        floor = 1e-3
        if case == "large_dt":  # e^-30 leaves dA the rounding of sums of the size of y dt
            floor = 50 * want["y"].abs().max().item() * (10 if dtype == torch.bfloat16 else 1)
        assert_close(run(inputs, dtype), want, dtype, floor)

    def test_a_log_decay_above_zero_counts_as_zero_and_has_no_gradient(self):
        inputs = dict(example(40)[0])
        inputs["A"] = torch.zeros_like(inputs["A"])
        want = plain.value_and_gradients(plain.loop_oracle, inputs)
        want["dA"] = torch.zeros_like(want["dA"])
        assert_close(run(inputs | {"A": torch.full_like(inputs["A"], 2.0)}), want)

    def test_padding_with_dt_zero_changes_nothing(self):
        inputs, want = example(40)
        padded = {k: v if k == "A" else torch.cat([v, 7 * torch.ones_like(v)], 1)
                  for k, v in inputs.items()}
        padded["dt"][:, 40:] = 0
        y = kernels(**cast(padded, torch.float32)).cpu()
        plain.assert_close({"y": y[:, :39]}, {"y": want["y"][:, :39]}, plain.FLOAT32)

    def test_the_gradient_passes_through_several_layers(self):
        inputs = inputs_of(34, p=16, n=16)

        def stack(scan):
            leaves = {k: v.detach().requires_grad_() for k, v in inputs.items()}
            y = leaves["x"]
            for _ in range(3):
                y = torch.tanh(scan(**{**leaves, "x": y}))
            grads = torch.autograd.grad(y.square().sum(), list(leaves.values()))
            return dict(zip([f"d{k}" for k in leaves], grads)) | {"y": y.detach()}

        def low(**v):
            return kernels(**cast(v, torch.float32)).to("cpu", torch.float64)
        want, got = stack(plain.loop_oracle), stack(low)
        for key in want:  # each layer hands its 2e-5 to the next
            plain.assert_close({key: got[key]}, {key: want[key]}, 3 * plain.FLOAT32)

    def test_views_equal_their_contiguous_copies_bit_for_bit(self):
        inputs = cast(inputs_of(33, groups=2), torch.float32)
        want = run(inputs)
        layouts = {
            "transposed": lambda v: v.transpose(0, -1).contiguous().transpose(0, -1),
            "sliced": lambda v: torch.cat((v, v), -1)[..., :v.shape[-1]],
            "rows of a wider projection": lambda v: v.flatten(2).repeat(1, 1, 2)[
                ..., :v[0, 0].numel()].unflatten(2, v.shape[2:]) if v.dim() > 2 else v}
        for name, layout in layouts.items():
            leaves = {k: layout(v).detach().requires_grad_() for k, v in inputs.items()}
            assert all(torch.equal(leaves[k], inputs[k]) for k in NAMES), name
            y = kernels(**leaves)
            grads = torch.autograd.grad((y * plain.output_weight(y).to(y)).sum(),
                                        list(leaves.values()))
            for key, value in {"y": y, **dict(zip([f"d{k}" for k in leaves], grads))}.items():
                assert torch.equal(value.cpu(), want[key]), (name, key)

    def test_two_runs_agree_bit_for_bit_and_one_without_gradients_too(self):
        inputs = inputs_of(33)
        once, again = run(inputs, torch.bfloat16), run(inputs, torch.bfloat16)
        assert all(torch.equal(once[k], again[k]) for k in once)
        with torch.no_grad():
            y = kernels(**cast(inputs, torch.bfloat16))
        assert torch.equal(y.cpu(), once["y"])

    def test_nan_in_a_decay_is_not_hidden(self):
        inputs = cast(inputs_of(5), torch.float32)
        inputs["A"][0] = torch.nan
        y = kernels(**inputs)
        assert y[:, 1:-1, 0].isnan().all() and y[:, :, 1].isfinite().all()

    def test_torch_compile_takes_the_scan_as_one_node_at_any_length(self):
        graphs = []

        def backend(module, example_inputs):
            graphs.append([n.name for n in module.graph.nodes if n.op == "call_function"])
            return module.forward
        compiled = torch.compile(lambda **v: 2 * chunk_scan_triton.scan(*v.values(), A_MIN),
                                 backend=backend, fullgraph=True, dynamic=True)
        for length in (5, 33):
            inputs = cast(inputs_of(length), torch.float32)
            inputs = {k: v.requires_grad_() for k, v in inputs.items()}
            y, want = compiled(**inputs), 2 * kernels(**inputs)
            assert torch.equal(y, want)
            leaves = list(inputs.values())
            for a, b in zip(torch.autograd.grad(y.sum(), leaves),
                            torch.autograd.grad(want.sum(), leaves)):
                assert torch.equal(a, b)
        assert len(graphs) == 1 and sum("scan" in name for name in graphs[0]) == 1

    def test_the_operators_keep_what_their_schemas_promise(self):
        inputs = [v.requires_grad_() for v in cast(inputs_of(5), torch.float32).values()]
        inputs[2] = inputs[2].detach().expand(1, 2).contiguous().requires_grad_()
        torch.library.opcheck(chunk_scan_triton.scan_op, (*inputs, A_MIN), test_utils=(
            "test_schema", "test_autograd_registration", "test_faketensor"))
        x, dt, A, B, C, D = (v.detach() for v in inputs)
        y, rows, states = chunk_scan_triton.scan_op(x, dt, A, B, C, D, A_MIN)
        torch.library.opcheck(
            chunk_scan_triton.backward_op, (y, x, A, B, C, D, rows, states, A_MIN),
            test_utils=("test_schema", "test_faketensor"))

    def test_the_backward_pass_writes_no_zeros_for_the_gradients_of_saved_states(self):
        leaves, seen = [v.requires_grad_() for v in cast(inputs_of(5), torch.float32).values()], []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func.name())
                return func(*args, **(kwargs or {}))
        y = chunk_scan_triton.scan(*leaves, A_MIN)
        with Record():
            torch.autograd.grad(y, leaves, torch.ones_like(y))
        assert "mark::scan_backward" in seen and "aten::zeros" not in seen

    @pytest.mark.skipif(not GPU or INTERPRETED, reason="needs a GPU")
    def test_what_the_kernels_do_not_take_goes_to_pytorch(self):
        for dtype, p in ((torch.float64, 16), (torch.float32, 24)):
            inputs = {k: v.cuda() for k, v in plain.cast(inputs_of(40, p=p), dtype).items()}
            want = bidirectional_scan(**{k: v.cpu() for k, v in inputs.items()})
            torch.testing.assert_close(bidirectional_scan(**inputs).cpu(), want)

    @pytest.mark.skipif(torch.cuda.device_count() < 2 or INTERPRETED, reason="needs two GPUs")
    def test_a_tensor_on_another_gpu_than_the_current_one(self):
        inputs, want = example(65)
        moved = {k: v.to("cuda:1", torch.float32) for k, v in inputs.items()}
        y = bidirectional_scan(**moved)
        plain.assert_close({"y": y.cpu()}, {"y": want["y"]}, plain.FLOAT32)


outer = pytest.mark.skipif(INTERPRETED, reason="this process interprets")


@outer
@pytest.mark.skipif(GPU, reason="the kernels ran on the GPU")
@pytest.mark.parametrize("some", [
    "65 or zero_dt",
    pytest.param("", marks=(pytest.mark.slow, pytest.mark.kernels))])
def test_the_tests_of_the_kernels_pass_under_the_interpreter(tmp_path, some):
    """Some of them, and all with `pytest -m kernels`."""
    pytest.importorskip("triton")
    assert passed_interpreted(__file__, some, tmp_path) >= 4


# Spill instructions, at most, by the version that gave them; another version may give others.
SPILLS = {"3.6.0": 60, "3.7.1": 34, "3.8.0": 13, "3.9.0": 0}
SHARED_KB = {80: 163, 90: 227}
MIXER = {  # instructions per element, at most
    "conv_fwd": 28, "conv_bwd": 65, "gate_fwd": 42, "gate_bwd": 62, "ce_fwd": 15, "ce_bwd": 21}


def compiled(folder, *arguments):
    run = child([ROOT / "tests" / "compile_kernels.py", "--out", folder, *arguments], folder,
                TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    return json.loads((folder / "result.json").read_text("utf-8"))["metrics"]["kernels"]


def assert_fits(row):
    assert row["shared_kb"] <= SHARED_KB[row["sm"]], row
    assert not row["transposed_product"], row  # Triton 3.4 to 3.7.0 get it wrong on sm_90


def assert_rows_move_in_vectors(row):
    """8 or 16 bytes at a time; what is narrower are the 7 weights of a program's channels, each
    loaded once, and the mask. Nothing spills, and a bound on instructions. A row of 30,522 logits
    in bfloat16 is 4 bytes longer than a multiple of 16: its accesses are of 4.
    """
    assert row["spills"] == 0 and row["per_element"] <= MIXER[row["kernel"]], row
    if row["kernel"].startswith("ce"):
        return
    wide = {}
    for k in ("loads", "stores"):
        wide[k] = sum(n for width, n in row[k].items() if int(width) >= 8)
    narrow = sum(n for width, n in row["loads"].items() if int(width) < 8)
    assert wide["stores"] == sum(row["stores"].values()), row
    assert wide["loads"] > 0 and narrow <= (0 if row["kernel"].startswith("gate") else 78), row


@outer
@pytest.mark.slow
@pytest.mark.kernels
def test_the_kernels_compile_for_both_architectures_and_fit_them(tmp_path):
    triton = pytest.importorskip("triton")
    rows = compiled(tmp_path)
    assert len(rows) == 32
    for row in rows:
        assert_fits(row)
        assert row["spills"] <= SPILLS.get(triton.__version__, 10 ** 9), row
        products = row["kernel"] in ("state_scan", "mix", "bc_bwd")
        assert bool(row["wgmma"]) == (products and row["sm"] == 90), row
        assert bool(row["mma"]) == (products and row["sm"] == 80), row
        if row["kernel"] in MIXER:
            assert_rows_move_in_vectors(row)


@outer
@pytest.mark.slow
@pytest.mark.parametrize("sizes", ((64, 64, 24), (32, 16, 24), (16, 64, 3)))
def test_every_size_that_fits_compiles_in_both_types(tmp_path, sizes):
    pytest.importorskip("triton")
    p, n, h = sizes
    for row in compiled(tmp_path, "--dtypes", "float32", "bfloat16", "--p", p, "--n", n, "--h", h):
        assert_fits(row)


@outer
def test_the_published_table_is_of_these_kernels_and_three_versions_compile_them():
    path = ROOT / "results" / "chunk_scan" / "triton_aot.json"
    found = json.loads(path.read_text("utf-8"))["metrics"]
    rows = found["kernels"]
    assert {row["kernel"] for row in rows} == {
        "decay_fwd", "state_scan", "mix", "bc_bwd", "decay_bwd", *MIXER}
    assert all(row["spills"] <= SPILLS[found["triton"]] for row in rows)
    assert found["triton"] == "3.7.1"  # what torch 2.13.0 asks for
    assert {(other["triton"], other["kernels"]) for other in found["also"]} == {
        ("3.6.0", len(rows)), ("3.9.0", len(rows))}
    for row in rows:
        if row["kernel"] in MIXER:
            assert_rows_move_in_vectors(row)


@outer
def test_without_triton_the_file_imports_and_takes_nothing():
    code = ("import sys; sys.modules['triton'] = None; import chunk_scan_triton as t; from torch "
            "import ones; x, d, b = ones(1, 3, 2, 16), ones(1, 3, 2, 2), ones(1, 3, 2, 1, 16); "
            "print(t.fits(x, d, -d[0, 0, 0], b, b, d[:, :, 0]))")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "False", run.stderr


@outer
def test_fits_takes_what_the_docstring_says():
    pytest.importorskip("triton")

    def fits(dtype=torch.bfloat16, p=64, n=64, dt=torch.float32, C=None):
        x, B = torch.empty(1, 3, 2, p, dtype=dtype), torch.empty(1, 3, 2, 1, n, dtype=dtype)
        d = torch.empty(1, 3, 2, 2, dtype=dt)
        return chunk_scan_triton.fits(x, d, d[:, 0, 0], B, B.to(C or dtype), d[:, :, 0])
    assert fits() and fits(torch.float32, 16, 32) and fits(dt=torch.bfloat16)
    for other in ({"dtype": torch.float64}, {"dtype": torch.float16}, {"p": 24}, {"p": 8},
                  {"n": 128}, {"dt": torch.float64}, {"C": torch.float32}):
        assert not fits(**other), other
