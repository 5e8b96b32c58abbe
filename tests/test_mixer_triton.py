"""The mixer's kernels against float64 loops written from the equations.

Where there is a GPU the kernels run on it. Elsewhere `TestKernels` runs under Triton's interpreter,
in a process of its own, as in test_chunk_scan_triton.py; the compiled code is read there, too.

Tolerances. float32: 1e-5 of the largest entry: sums of a few products, each rounded to 6e-8.
bfloat16: 1 % of the norm; a result is rounded once, by 0.4 % at worst.
"""
import os
import subprocess
import sys

import pytest
import torch

INTERPRETED, GPU = os.environ.get("TRITON_INTERPRET") == "1", torch.cuda.is_available()
if INTERPRETED:
    import numpy as np
    from triton.runtime import interpreter

    def create_splat(self, ret_ty, arg):
        value = arg.data.reshape(-1)[0]
        return interpreter.TensorHandle(np.full(ret_ty.shape, value, arg.data.dtype),
                                        arg.dtype.scalar)

    interpreter.InterpreterBuilder.create_splat = create_splat  # its own makes integers of booleans

import hydra_ssm  # noqa: E402
import mixer_triton  # noqa: E402
from helpers import ROOT, passed_interpreted  # noqa: E402
from hydra_ssm import HydraBert, HydraConfig, Modulation  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = HydraConfig(32, d_model=16, n_layer=1, d_state=8, headdim=16)
GROUPED = HydraConfig(32, d_model=24, n_layer=1, d_state=3, d_conv=5, headdim=16, ngroups=2)
WIDE = HydraConfig(32, d_model=160, n_layer=1, d_state=16, d_conv=3, headdim=16)
FACTORS = ("B_scale", "B_shift", "C_scale", "C_shift")
LENGTHS = (1, 2, 57, 58, 59, 65, 117)  # a strip has 64 rows forward and 58 of its own backward


# ----------------------------------------------------------------------- the references, in float64

def unpack_oracle(packed, weight, bias, real, factors, config):
    """z, x, B, C, dt, one position at a time: the convolution is a sum over the positions near."""
    e, gn, l = config.d_inner, config.ngroups * config.d_state, packed.shape[1]
    half = weight.shape[2] // 2
    z, dt = packed[..., :e], packed[..., 2 * e + 4 * gn:]
    rows = []
    for i in range(l):
        a = bias
        for j in range(max(0, i - half), min(l, i + half + 1)):
            seen = packed[:, j, e:2 * e + 4 * gn] * real[:, j, None]
            a = a + weight[:, 0, j - i + half] * seen
        rows.append(a / (1 + torch.exp(-a)))
    v = torch.stack(rows, 1)                                              # b l w
    x, B, C = v[..., :e], [], []
    for direction in range(2):
        at = e + direction * 2 * gn
        own = {k: f.flatten(1)[:, None] for k, f in factors.items()}      # b 1 gn
        B.append(v[..., at:at + gn] * own["B_scale"] + own["B_shift"])
        C.append(v[..., at + gn:at + 2 * gn] * own["C_scale"] + own["C_shift"])
    shape = (*packed.shape[:2], 2, config.ngroups, config.d_state)
    return z, x, torch.stack(B, 2).view(shape), torch.stack(C, 2).view(shape), dt


def gate_oracle(y, z, weight):
    rows = []
    for i in range(y.shape[1]):
        length = (y[:, i].square().sum(-1, keepdim=True) / y.shape[2] + 1e-5).sqrt()
        rows.append(y[:, i] / length * weight * z[:, i] / (1 + torch.exp(-z[:, i])))
    return torch.stack(rows, 1)


# ----------------------------------------------------------------------------------------- helpers

def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unpack_inputs(config, l, b=2, dtype=torch.float32):
    """packed, the factors (b 1 1 g n), weight, bias; rounded to what the kernels are given."""
    w = config.d_inner + 4 * config.ngroups * config.d_state
    packed = normal(b, l, config.d_in_proj, seed=l).to(dtype).double()
    factors = {}
    for k, name in enumerate(FACTORS):
        factors[name] = normal(b, 1, 1, config.ngroups, config.d_state, seed=k) + ("scale" in name)
    weight = normal(w, 1, config.d_conv, seed=5).to(dtype).double()
    bias = normal(w, seed=6).to(dtype).double()
    return packed, factors, weight, bias


def output_weights(outputs):
    """A fixed random factor for each output; their sum of products is differentiated."""
    return [normal(*v.shape, seed=40 + k) for k, v in enumerate(outputs)]


def values_and_gradients(function, leaves):
    """Outputs and gradients as one dict, in float64 on the CPU."""
    leaves = {k: v.detach().requires_grad_() for k, v in leaves.items()}
    outputs = function(**leaves)
    total = sum((v.double() * w.to(v.device)).sum()
                for v, w in zip(outputs, output_weights(outputs), strict=True))
    grads = torch.autograd.grad(total, list(leaves.values()))
    found = {f"output {k}": v for k, v in enumerate(outputs)}
    found |= {f"d {k}": g for k, g in zip(leaves, grads, strict=True)}
    return {k: v.detach().double().cpu() for k, v in found.items()}


def assert_close(got, want, dtype=torch.float32):
    assert got.keys() == want.keys()
    for key, right in want.items():
        assert got[key].shape == right.shape and got[key].isfinite().all(), key
        error = got[key] - right
        if dtype == torch.float32:
            assert error.abs().max() <= 1e-5 * right.abs().max(), key
        else:
            assert error.norm() <= 0.01 * right.norm(), f"{key}: {error.norm() / right.norm():.2%}"


def run_unpack(config, packed, factors, weight, bias, real=None, dtype=torch.float32,
               layout=lambda v: v):
    """The kernel as a model would call it: weights frozen, factors in float32."""
    frozen = weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)
    leaves = {"packed": layout(packed.to(DEVICE, dtype))}
    leaves |= {k: v.to(DEVICE, torch.float32) for k, v in factors.items()}
    real = None if real is None else real.to(DEVICE)

    def function(packed, **factors):
        assert mixer_triton.fits_convolution(packed, *frozen)
        return mixer_triton.unpack(packed, *frozen, Modulation(**factors), real, config)
    return values_and_gradients(function, leaves)


def expected_unpack(config, packed, factors, weight, bias, real=None):
    if real is None:
        real = torch.ones(packed.shape[:2])

    def function(packed, **factors):
        return unpack_oracle(packed, weight, bias, real.double(), factors, config)
    return values_and_gradients(function, {"packed": packed, **factors})


def run_gate(y, z, weight, dtype=torch.float32):
    weight = weight.to(DEVICE, dtype)
    leaves = {"y": y.to(DEVICE, dtype), "z": z.to(DEVICE, dtype)}
    return values_and_gradients(lambda y, z: [mixer_triton.gated_norm(y, z, weight, 1e-5)], leaves)


class TestKernels:
    __test__ = INTERPRETED or GPU

    @pytest.mark.parametrize("l", LENGTHS)
    def test_values_and_gradients_equal_the_loop(self, l):
        inputs = unpack_inputs(SMALL, l)
        assert_close(run_unpack(SMALL, *inputs), expected_unpack(SMALL, *inputs))

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
    @pytest.mark.parametrize("config", (GROUPED, WIDE), ids=("groups", "blocks"))
    def test_with_pads_groups_and_several_blocks_of_channels(self, config, dtype):
        inputs = unpack_inputs(config, 61, b=3, dtype=dtype)
        real = torch.ones(3, 61, dtype=torch.bool)
        real[1, 40:] = False
        real[2, :9] = False
        real[2, 60] = False
        assert_close(run_unpack(config, *inputs, real, dtype),
                     expected_unpack(config, *inputs, real), dtype)

    def test_a_pad_may_hold_anything(self):
        inputs = unpack_inputs(SMALL, 20)
        real = torch.ones(2, 20, dtype=torch.bool)
        real[:, 12:] = False
        clean = run_unpack(SMALL, *inputs, real)
        inputs[0][:, 12:, SMALL.d_inner:-2 * SMALL.nheads] = torch.nan
        dirty = run_unpack(SMALL, *inputs, real)
        for key in ("output 1", "output 2", "output 3", "d packed", "d B_scale"):
            assert torch.equal(dirty[key], clean[key]), key

    def test_one_modulation_for_all_samples_gets_the_sum_of_their_gradients(self):
        packed, factors, weight, bias = unpack_inputs(SMALL, 12)
        shared = {k: v[:1] for k, v in factors.items()}
        assert_close(run_unpack(SMALL, packed, shared, weight, bias),
                     expected_unpack(SMALL, packed, shared, weight, bias))

    def test_unit_scales_and_zero_shifts_change_no_bit_of_x_and_b(self):
        packed, factors, weight, bias = unpack_inputs(SMALL, 30)
        unit = {k: torch.full_like(v, float("scale" in k)) for k, v in factors.items()}
        one, other = (run_unpack(SMALL, packed, f, weight, bias) for f in (factors, unit))
        assert torch.equal(one["output 1"], other["output 1"])
        frozen = expected_unpack(SMALL, packed, unit, weight, bias)
        assert_close({"B": other["output 2"]}, {"B": frozen["output 2"]})

    def test_a_factor_below_bfloat16_s_steps_is_applied(self):
        """1.003 on B: on average over the entries, whose roundings cancel. Rounded it would be 1.
        (The interpreter cuts bfloat16 off and does not round, so both sides come from the kernel.)
        """
        packed, factors, weight, bias = unpack_inputs(SMALL, 60, dtype=torch.bfloat16)
        unit = {k: torch.full_like(v, float("scale" in k)) for k, v in factors.items()}
        plain = run_unpack(SMALL, packed, unit, weight, bias, dtype=torch.bfloat16)["output 2"]
        unit["B_scale"] += 0.003
        B = run_unpack(SMALL, packed, unit, weight, bias, dtype=torch.bfloat16)["output 2"]
        factor = (B * plain).sum() / plain.square().sum()
        assert abs(factor - 1.003) < 5e-4

    def test_strided_inputs_equal_their_copies_bit_for_bit(self):
        inputs = unpack_inputs(SMALL, 23)
        want = run_unpack(SMALL, *inputs)
        layouts = {
            "rows of a wider tensor": lambda v: torch.cat([v, v], -1)[..., 3:3 + v.shape[-1]],
            "transposed": lambda v: v.transpose(0, 2).contiguous().transpose(0, 2)}
        for name, layout in layouts.items():
            def moved(v, layout=layout, name=name):
                out = layout(torch.cat([v[..., -3:], v], -1))[..., :v.shape[-1]]
                if name == "transposed":
                    out = layout(v)
                assert torch.equal(out, v)
                return out
            got = run_unpack(SMALL, *inputs, layout=moved)
            assert all(torch.equal(got[k], want[k]) for k in want), name

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
    @pytest.mark.parametrize("w", (32, 48))
    def test_norm_and_gate_equal_the_loop(self, w, dtype):
        y, weight = normal(2, 5, w, seed=1).to(dtype).double(), normal(w, seed=3).to(dtype).double()
        z = normal(2, 5, 2 * w + 3, seed=2).to(dtype).double()[..., 1:w + 1]
        want = values_and_gradients(lambda y, z: [gate_oracle(y, z, weight)], {"y": y, "z": z})
        assert_close(run_gate(y, z, weight, dtype), want, dtype)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
    @pytest.mark.parametrize("v", (3, 2048, 5001))  # a block of a row has 2048 logits
    def test_cross_entropy_equals_the_loop(self, v, dtype):
        logits = (20 * normal(4, v, seed=v)).to(dtype).double()
        logits[0] -= 1e4  # far from zero, and the target among the last
        logits = logits.to(dtype).double()
        targets = torch.tensor([v - 1, 0, 2, v // 2])

        def oracle(logits):
            rows = []
            for row, target in zip(logits, targets.tolist()):
                shifted = row - row.max().detach()
                rows.append(torch.exp(shifted).sum().log() - shifted[target])
            return [torch.stack(rows)]

        def kernels(logits):
            return [mixer_triton.cross_entropy(logits, targets.to(logits.device))]
        got = values_and_gradients(kernels, {"logits": logits.to(DEVICE, dtype)})
        assert_close(got, values_and_gradients(oracle, {"logits": logits}), dtype)

    def test_a_logit_that_is_not_a_number_makes_the_loss_none(self):
        logits = torch.zeros(2, 9, device=DEVICE)
        logits[0, 3] = torch.nan
        ce = mixer_triton.cross_entropy(logits, torch.tensor([5, 5], device=DEVICE))
        assert ce[0].isnan() and ce[1].isfinite()

    def test_all_gradients_of_in_proj_lie_in_one_buffer(self):
        """From norm and gate back through the convolution: no copy of dz, no concatenation."""
        packed, factors, weight, bias = unpack_inputs(SMALL, 9)
        leaf = packed.float().to(DEVICE).requires_grad_()
        m = Modulation(**{k: v.float().to(DEVICE) for k, v in factors.items()})
        weight, bias = weight.float().to(DEVICE), bias.float().to(DEVICE)
        z, x, *_ = mixer_triton.unpack(leaf, weight, bias, m, None, SMALL)
        out = mixer_triton.gated_norm(x, z, torch.ones_like(x[0, 0]), 1e-5)
        made = []
        z.register_hook(lambda dz: made.append(dz.untyped_storage().data_ptr()))
        grad, = torch.autograd.grad(out.square().sum(), [leaf])
        assert grad.untyped_storage().data_ptr() == made[0]

        def plain(packed):
            z, x, *_ = unpack_oracle(packed, weight.double().cpu(), bias.double().cpu(),
                                     torch.ones(2, 9), factors, SMALL)
            return [gate_oracle(x, z, torch.ones_like(x[0, 0])).square()]
        twin = packed.clone().requires_grad_()
        want, = torch.autograd.grad(plain(twin)[0].sum(), [twin])
        assert_close({"d": grad.double().cpu()}, {"d": want})

    def test_a_mixer_with_the_kernels_is_the_mixer(self, monkeypatch):
        """Values and gradients of the whole of it, pads and all, against its own PyTorch path."""
        torch.manual_seed(0)
        model = HydraBert(SMALL).requires_grad_(False)
        ids = torch.randint(32, (2, 70))
        real = torch.ones(2, 70)
        real[1, 50:] = 0
        leaves = {k: normal(1, 2, 8, seed=k) .float().requires_grad_() for k in range(4)}
        modulation = Modulation(**dict(zip(FACTORS, leaves.values())))
        if GPU and not INTERPRETED:
            pytest.skip("gpu_check.py compares whole training steps")

        def results():
            out = model.hidden(ids, modulation, real)[real.bool()]
            return [out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))]
        want = results()
        monkeypatch.setattr(hydra_ssm, "_on_gpu", lambda v: True)
        monkeypatch.setattr(hydra_ssm, "_add_norm", hydra_ssm._add_norm.__wrapped__)
        calls = []
        for name in ("conv_op", "gate_op"):
            op = getattr(mixer_triton, name)
            monkeypatch.setattr(mixer_triton, name, lambda *a, op=op: calls.append(op) or op(*a))
        got = results()
        assert len(calls) == 2
        for value, right in zip(got, want, strict=True):
            torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5)

    def test_the_operators_keep_what_their_schemas_promise(self):
        packed, factors, weight, bias = unpack_inputs(SMALL, 7)
        packed = packed.float().to(DEVICE)
        weight, bias = weight.float().to(DEVICE), bias.float().to(DEVICE)
        m = torch.stack([f.flatten(1) for f in factors.values()], 1).float().to(DEVICE)
        e = SMALL.d_inner
        utils = ("test_schema", "test_faketensor")
        for real in (None, torch.ones(2, 7, dtype=torch.uint8, device=DEVICE)):
            torch.library.opcheck(mixer_triton.conv_op, (packed, weight, bias, real, m, e),
                                  test_utils=utils)
        gx = torch.ones(2, 7, e, device=DEVICE)
        gB = torch.ones(2, 7, 2, 1, SMALL.d_state, device=DEVICE)
        torch.library.opcheck(
            mixer_triton.conv_backward_op,
            (torch.zeros_like(packed), packed, weight, bias, None, m, gx, gB, gB, e),
            test_utils=utils)
        z, w = packed[..., :e], torch.ones(e, device=DEVICE)
        torch.library.opcheck(mixer_triton.gate_op, (gx, z, w, 1e-5), test_utils=utils)
        torch.library.opcheck(mixer_triton.gate_backward_op, (gx, gx, z, w, 1e-5),
                              test_utils=utils)
        logits, targets = packed[0], torch.zeros(7, dtype=torch.long, device=DEVICE)
        torch.library.opcheck(mixer_triton.ce_op, (logits, targets), test_utils=utils)
        torch.library.opcheck(mixer_triton.ce_backward_op,
                              (*logits.T[:1], logits, targets, *logits.T[:2]), test_utils=utils)


outer = pytest.mark.skipif(INTERPRETED, reason="this process interprets")


@outer
@pytest.mark.skipif(GPU, reason="the kernels ran on the GPU")
@pytest.mark.parametrize("some", [
    "59 or one_buffer or 32-torch.bfloat16 or 5001",
    pytest.param("", marks=(pytest.mark.slow, pytest.mark.kernels))])
def test_the_tests_of_the_kernels_pass_under_the_interpreter(tmp_path, some):
    """Some of them, and all with `pytest -m kernels`."""
    pytest.importorskip("triton")
    assert passed_interpreted(__file__, some, tmp_path) >= 5


@outer
def test_weights_that_train_and_other_types_go_to_pytorch():
    pytest.importorskip("triton")
    weight, bias = torch.ones(6, 1, 7), torch.ones(6)

    def fits(dtype=torch.bfloat16, **changes):
        given = {"weight": weight, "bias": bias} | changes
        return mixer_triton.fits_convolution(torch.ones(1, 3, 9, dtype=dtype), **given)
    assert fits() and fits(torch.float32) and fits(weight=torch.ones(6, 1, 3))
    assert not fits(torch.float64) and not fits(torch.float16)
    assert not fits(weight=torch.ones(6, 1, 9)) and not fits(weight=torch.ones(6, 1, 4))
    trained = bias.clone().requires_grad_()
    assert not fits(bias=trained)
    with torch.no_grad():
        assert fits(bias=trained)


@outer
@pytest.mark.parametrize("grad", (False, True))
def test_tensors_without_data_pass_through_the_kernels(monkeypatch, grad):
    """Shapes and dtypes of a whole pass, and of its gradients, as if on a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(hydra_ssm, "_on_gpu", lambda v: True)
    monkeypatch.setattr(hydra_ssm, "_add_norm", hydra_ssm._add_norm.__wrapped__)
    seen = []
    for name in ("unpack", "gated_norm"):
        real = getattr(mixer_triton, name)
        monkeypatch.setattr(mixer_triton, name,
                            lambda *a, real=real, **k: seen.append(real) or real(*a, **k))
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        model = HydraBert(SMALL).requires_grad_(False)
        scale = torch.ones(1, 2, 8, requires_grad=grad)
        ids = torch.zeros(2, 40, dtype=torch.long)
        hidden = model.hidden(ids, Modulation(B_scale=scale), torch.ones(2, 40))
        if grad:
            hidden.sum().backward()
            assert scale.grad.shape == scale.shape
    assert hidden.shape == (2, 40, 16)
    assert len(seen) == 2


@outer
def test_without_triton_the_file_imports_and_takes_nothing():
    code = ("import sys; sys.modules['triton'] = None; import mixer_triton as t; from torch "
            "import ones; print(t.fits(ones(1, 3, 4)))")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "False", run.stderr
