"""The chunked scan against a float64 loop over positions and heads written from the equation.

Tolerances. float64: 1e-11 of the largest entry; loop and chunks only sum in another order.
float32: 2e-5 of the largest entry; the decay between two positions of a chunk is a difference of
cumulative log-decays of some tens, each rounded to 6e-8 of itself, so it is good to about 5e-6,
and the sums over a chunk and over the state add a few units more.
bfloat16: 1 % of the norm; one rounding is 0.4 % at worst, and a sum averages over many.
"""
import functools
import json

import chunk_scan
import common
import pytest
import tiny
import torch
from chunk_scan import bidirectional_scan, recurrent_scan
from experiments import publish, scan_bench

LENGTHS = (1, 2, 7, 63, 64, 65, 200)
NAMES = ("x", "dt", "A", "B", "C", "D")
FLOAT64, FLOAT32 = 1e-11, 2e-5


def loop_oracle(x, dt, A, B, C, D):
    """y_i = C_{i-1} h_{i-1} + C_{i+1} g_{i+1} + D_i x_i, one position and one head at a time."""
    b, length, heads, p = x.shape
    groups, n = B.shape[3], B.shape[4]
    if A.dim() == 1:
        A = torch.stack([A] * b)
    rows = [[D[:, i, j, None] * x[:, i, j] for j in range(heads)] for i in range(length)]
    for j in range(heads):
        group = j // (heads // groups)                     # neighbouring heads share a group
        for direction, order in ((0, range(length)), (1, range(length - 1, -1, -1))):
            state = torch.zeros(b, p, n, dtype=x.dtype)
            step = 1 if direction == 0 else -1
            for i in order:
                decay = torch.exp((dt[:, i, direction, j] * A[:, j]).clamp(min=-30.0))
                inflow = dt[:, i, direction, j, None, None] * (
                    x[:, i, j, :, None] * B[:, i, direction, group, None, :])
                state = decay[:, None, None] * state + inflow
                if 0 <= i + step < length:                 # the state at i is read one position on
                    read = (state * C[:, i, direction, group, None, :]).sum(-1)
                    rows[i + step][j] = rows[i + step][j] + read
    return torch.stack([torch.stack(row, 1) for row in rows], 1)  # b l h p


def random_inputs(length, b=2, heads=4, p=3, n=5, groups=1, per_sample=False, seed=0):
    draw = torch.Generator().manual_seed(1000 * length + 10 * groups + per_sample + seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    A = -torch.exp(normal(*((b, heads) if per_sample else (heads,))))
    return dict(x=normal(b, length, heads, p), dt=normal(b, length, 2, heads).exp() * 0.3, A=A,
                B=normal(b, length, 2, groups, n), C=normal(b, length, 2, groups, n),
                D=normal(b, length, heads))


def output_weight(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def value_and_gradients(scan, inputs):
    """The output, and the gradient of a fixed weighted sum of it with respect to every input."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in inputs.items()}
    y = scan(**leaves)
    (y * output_weight(y).to(y.dtype)).sum().backward()
    grads = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}
    return {"y": y.detach()} | {f"d{k}": grads[k] for k in NAMES}   # length 1 uses x and D alone


def chunked(chunk_size):
    return functools.partial(bidirectional_scan, chunk_size=chunk_size)


def cast(inputs, dtype):
    return {k: v.to(dtype) for k, v in inputs.items()}


def assert_close(got, want, tolerance, floor=1e-3):
    for key, expected in want.items():
        value = got[key]
        assert value is not None and value.shape == expected.shape, key
        assert torch.isfinite(value).all(), f"{key} is not finite"
        error = (value.double() - expected).abs().max().item()
        scale = max(expected.abs().max().item(), floor)
        assert error <= tolerance * scale, f"{key}: {error:.3e} at scale {scale:.3e}"


@functools.cache
def expected_results(length, groups, per_sample):
    inputs = random_inputs(length, groups=groups, per_sample=per_sample)
    return value_and_gradients(loop_oracle, inputs)


@pytest.mark.parametrize("per_sample", (False, True), ids=("shared_A", "per_sample_A"))
@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("length", LENGTHS)
def test_values_and_every_gradient_equal_the_loop(length, groups, per_sample):
    inputs = random_inputs(length, groups=groups, per_sample=per_sample)
    want = expected_results(length, groups, per_sample)
    for chunk_size in (1, 16, 32, 64) if length == 7 else (16, 32, 64):
        got = value_and_gradients(chunked(chunk_size), inputs)
        assert got["y"].dtype == torch.float64
        assert_close(got, want, FLOAT64)
        got = value_and_gradients(chunked(chunk_size), cast(inputs, torch.float32))
        assert got["y"].dtype == torch.float32
        assert_close(got, want, FLOAT32)


@pytest.mark.parametrize("length", (1, 2, 65))
def test_the_recurrence_of_the_file_equals_the_loop(length):
    inputs = random_inputs(length, groups=2, per_sample=True)
    got = value_and_gradients(recurrent_scan, inputs)
    assert_close(got, expected_results(length, 2, True), FLOAT64)


def wrong_shapes():
    """One input at a time that does not fit the others."""
    inputs = random_inputs(6, heads=4, groups=2)
    return {
        "dt of one direction": {"dt": inputs["dt"][:, :, :1]},
        "dt of another length": {"dt": inputs["dt"][:, 1:]},
        "A of another number of heads": {"A": inputs["A"][:3]},
        "A of another batch": {"A": inputs["A"].expand(3, -1)},
        "D without heads": {"D": inputs["D"][:, :, 0]},
        "C of another state": {"C": inputs["C"][..., :4]},
        "B and C of another batch": {"B": inputs["B"][:1], "C": inputs["C"][:1]},
        "groups that do not divide the heads": {
            "B": inputs["B"][:, :, :, [0, 1, 1]], "C": inputs["C"][:, :, :, [0, 1, 1]]}}


@pytest.mark.parametrize("what", wrong_shapes())
def test_shapes_that_do_not_fit_are_refused_in_one_line(what):
    inputs = random_inputs(6, heads=4, groups=2) | wrong_shapes()[what]
    with pytest.raises(common.UserError, match="bidirectional_scan: x .* needs dt") as error:
        bidirectional_scan(**inputs)
    assert "\n" not in str(error.value)


def test_the_mixer_matrix_of_the_docstring_gives_the_same_y():
    """M_ij written out from the docstring, one entry at a time, in groups and by sample."""
    inputs = random_inputs(9, groups=2, per_sample=True)
    x, dt, A, B, C, D = (inputs[name] for name in NAMES)
    b, length, heads, _ = x.shape
    a = dt * A[:, None, None, :]
    want = torch.zeros_like(x)
    for j in range(heads):
        group = j // (heads // B.shape[3])
        for i in range(length):
            want[:, i, j] += D[:, i, j, None] * x[:, i, j]
            for source in range(length):
                if source == i:
                    continue
                direction = 0 if source < i else 1
                reader = i - 1 if source < i else i + 1
                between = a[:, min(source, i) + 1:max(source, i), direction, j].sum(1)
                entry = (C[:, reader, direction, group] * B[:, source, direction, group]).sum(-1)
                entry = entry * dt[:, source, direction, j] * between.exp()
                want[:, i, j] += entry[:, None] * x[:, source, j]
    assert_close({"y": chunked(4)(**inputs)}, {"y": want}, FLOAT64)


@pytest.mark.parametrize("length", (65, 200))
def test_bf16_is_within_one_percent_of_the_loop_on_the_same_rounded_inputs(length):
    inputs = random_inputs(length, p=16, n=16, per_sample=True)
    for name in ("x", "B", "C"):
        inputs[name] = inputs[name].bfloat16().double()
    want = value_and_gradients(loop_oracle, inputs)
    low = {k: v.to(torch.bfloat16 if k in ("x", "B", "C") else torch.float32)
           for k, v in inputs.items()}
    got = value_and_gradients(chunked(64), low)
    assert got["y"].dtype == torch.bfloat16
    for key, expected in want.items():
        error = (got[key].double() - expected).norm() / expected.norm()
        assert error < 0.01, f"{key}: {error:.2%}"


@pytest.mark.parametrize("run, float32", ((1, FLOAT32), (16, FLOAT32), (40, 1e-4)),
                         ids=("one_spike", "a_run_of_spikes", "most_of_a_chunk"))
def test_a_spike_of_decay_costs_its_neighbours_nothing(run, float32):
    """One log-decay of -1e5 among -0.01: unclamped, cumulative sums would keep three digits.

    Clamped, 40 of them sum to 1,200, which float32 holds to 6e-5.
    """
    inputs = random_inputs(130, per_sample=True)
    inputs["A"] = torch.full_like(inputs["A"], -1.0)
    inputs["dt"] = torch.full_like(inputs["dt"], 0.01)
    spikes = slice(20, 20 + run), slice(74, 74 + run)
    for direction, spike in enumerate(spikes):
        inputs["dt"][:, spike, direction] = 1e5
        inputs["B"][:, spike, direction] *= 1e-7           # dt B x stays of the size of the others
    want = value_and_gradients(loop_oracle, inputs)
    got = value_and_gradients(chunked(64), cast(inputs, torch.float32))
    for spike in spikes:                                   # dt is a factor of dB: compare it apart
        assert_close({"dB": got["dB"][:, spike]}, {"dB": want["dB"][:, spike].clone()}, float32)
        want["dB"][:, spike] = got["dB"][:, spike] = 0
    assert_close(got, want, float32)


def test_extreme_heads_are_finite_and_leave_the_others_exact():
    """A_log of -20, 0, 1 and 20, steps of 0 and 1e4 among others, inputs of 1e4."""
    inputs = random_inputs(130, b=1)
    inputs["A"] = -torch.tensor([-20.0, 0.0, 1.0, 20.0], dtype=torch.float64).exp()
    inputs["x"] *= 1e4
    inputs["dt"][:, 5:9] = 1e4
    inputs["dt"][:, 70:80] = 0.0
    want = loop_oracle(**inputs)
    got = value_and_gradients(chunked(64), cast(inputs, torch.float32))
    assert all(value.isfinite().all() for value in got.values())
    for head in range(4):  # each at its own scale
        assert_close({"y": got["y"][:, :, head]}, {"y": want[:, :, head]}, FLOAT32)


@pytest.mark.parametrize("case", ("no_decay", "large_dt", "zero_dt", "dt_zero_in_places"))
def test_extreme_steps_stay_exact(case):
    inputs = random_inputs(100, groups=2)
    if case == "no_decay":
        inputs["A"] = torch.zeros_like(inputs["A"])
    elif case == "large_dt":
        inputs["dt"] = torch.full_like(inputs["dt"], 50.0)
    elif case == "zero_dt":
        inputs["dt"] = torch.zeros_like(inputs["dt"])
    else:
        inputs["dt"][:, 20:40] = 0.0
        inputs["dt"][:, 64] = 0.0
    want = value_and_gradients(loop_oracle, inputs)
    floor = 1e-3
    if case == "large_dt":  # decays of exp(-30) leave dA the rounding of sums of the size of y dt
        floor = 50 * want["y"].abs().max().item()
    for chunk_size in (16, 64):
        assert_close(value_and_gradients(chunked(chunk_size), inputs), want, FLOAT64, floor)
        got = value_and_gradients(chunked(chunk_size), cast(inputs, torch.float32))
        assert_close(got, want, FLOAT32, floor)


def test_a_log_decay_above_zero_counts_as_zero_and_has_no_gradient():
    inputs = random_inputs(40, groups=2)
    want = value_and_gradients(loop_oracle, inputs | {"A": torch.zeros_like(inputs["A"])})
    want["dA"] = torch.zeros_like(want["dA"])
    got = value_and_gradients(chunked(16), inputs | {"A": -inputs["A"]})
    assert_close(got, want, FLOAT64)


@pytest.mark.parametrize("length", (64, 65, 150))
def test_reversing_the_input_and_swapping_the_directions_reverses_the_output(length):
    inputs = random_inputs(length, groups=2, per_sample=True)
    mirrored = {k: v if k == "A" else v.flip(1) for k, v in inputs.items()}
    for name in ("dt", "B", "C"):
        mirrored[name] = mirrored[name].flip(2)
    y, mirror = chunked(64)(**inputs), chunked(64)(**mirrored)
    assert_close({"y": mirror.flip(1)}, {"y": y}, FLOAT64)
    assert not torch.allclose(chunked(64)(**inputs | {"C": inputs["C"].flip(2)}), y)


@pytest.mark.parametrize("length, chunk_size", ((40, 16), (70, 32)))
def test_feeding_the_identity_shows_a_quasiseparable_matrix(length, chunk_size):
    n = 4
    inputs = random_inputs(length, b=1, heads=1, p=length, n=n)
    inputs["x"] = torch.eye(length, dtype=torch.float64)[None, :, None, :]
    inputs["A"] = torch.full_like(inputs["A"], -0.05)      # slow: far blocks are not zero
    M = chunked(chunk_size)(**inputs)[0, :, 0, :]          # y_i = sum_j M_ij x_j
    assert torch.equal(M.diagonal(), inputs["D"][0, :, 0]), "a state must not see its own position"
    for i in range(1, length):
        for block in (M[i:, :i], M[:i, i:]):
            spectrum = torch.linalg.svdvals(block)
            assert (spectrum[n:] < 1e-12 * spectrum[0]).all(), f"rank above n = {n} at {i}"
            assert spectrum[min(n, i, length - i) - 1] > 1e-9 * spectrum[0], f"rank below n at {i}"
    assert torch.linalg.matrix_rank(M) == length           # of low rank off the diagonal only


def test_one_batch_equals_separate_calls():
    inputs = random_inputs(70, b=3, per_sample=True)
    together = chunked(32)(**inputs)
    for i in range(3):
        alone = chunked(32)(**{k: v[i:i + 1] for k, v in inputs.items()})
        assert_close({"y": alone}, {"y": together[i:i + 1]}, FLOAT64)
    shared = inputs | {"A": inputs["A"][0]}
    expanded = inputs | {"A": inputs["A"][:1].expand(3, -1)}
    assert_close({"y": chunked(32)(**shared)}, {"y": chunked(32)(**expanded)}, FLOAT64)


def test_views_equal_their_contiguous_copies():
    inputs = random_inputs(66, groups=2, per_sample=True)
    want = value_and_gradients(chunked(32), inputs)
    layouts = {
        "transposed": lambda v: v.transpose(0, -1).contiguous().transpose(0, -1),
        "sliced": lambda v: torch.cat((v, v), -1)[..., :v.shape[-1]],
        "strided": lambda v: torch.stack((v, v + 1), -1).flatten(-2)[..., ::2],
    }
    for name, layout in layouts.items():
        views = {k: layout(v) for k, v in inputs.items()}
        assert all(torch.equal(views[k], inputs[k]) for k in NAMES), name
        leaves = {k: v.requires_grad_() for k, v in views.items()}
        assert not leaves["x"].is_contiguous()
        before = {k: v.detach().clone() for k, v in leaves.items()}
        y = chunked(32)(**leaves)
        grads = torch.autograd.grad((y * output_weight(y)).sum(), list(leaves.values()))
        got = {"y": y.detach()} | {f"d{k}": g for k, g in zip(leaves, grads)}
        assert_close(got, want, FLOAT64)
        assert all(torch.equal(before[k], leaves[k]) for k in NAMES), "an input was written to"


def test_torch_compile_leaves_the_loop_over_chunks_alone_at_any_length():
    traced = []

    def backend(module, example_inputs):
        traced.append(len(module.graph.nodes))
        return module
    compiled = torch.compile(lambda **v: 2 * chunked(16)(**v), backend=backend)
    for length in (20, 50, 90):
        inputs = random_inputs(length)
        assert torch.equal(compiled(**inputs), 2 * chunked(16)(**inputs))
    assert sum(traced) < 40, "the scan was traced"


def test_gradcheck_on_a_tiny_case():
    inputs = random_inputs(5, b=2, heads=2, p=2, n=2, groups=2, per_sample=True)
    leaves = tuple(inputs[k].requires_grad_() for k in NAMES)
    assert torch.autograd.gradcheck(functools.partial(bidirectional_scan, chunk_size=2), leaves)


def test_the_demonstration_checks_the_scan_and_says_by_how_much_it_is_faster(monkeypatch):
    run = tiny.command("chunk_scan.py", "--seqlen", "100")
    assert run.status == 0, run.err
    assert run.out.splitlines()[-1].startswith("chunked scan: within ")
    right = chunk_scan.chunked_scan
    monkeypatch.setattr(chunk_scan, "chunked_scan", lambda *inputs: 1.001 * right(*inputs))
    with pytest.raises(AssertionError, match="the two forms differ by"):
        chunk_scan.main(chunk_scan.Config(seqlen=100))


def test_the_benchmark_is_published_as_chunk_scan(tmp_path):
    with tiny.root_at(tmp_path):
        run = tiny.command("experiments.scan_bench", "--seqlen", "64", "--nheads", "2", "--headdim",
                           "8", "--d-state", "4", "--chunk-size", "16", "--rounds", "2")
        assert run.status == 0, run.err
        publish.publish(tmp_path / "runs" / "chunk_scan", "cpu", dirty=True)
    published = json.loads((tmp_path / "results" / "chunk_scan" / "cpu.json").read_text("utf-8"))
    metrics = published["metrics"]
    assert metrics["errors"].keys() == {"chunked scan", "SSD listing"}
    assert max(metrics["errors"].values()) < 1e-12
    assert metrics["seconds"].keys() == {*scan_bench.SCANS, "chunked, 4 x length"}
    assert metrics["peak_mib"] > metrics["peak_mib_of_the_step"] >= 0
    assert metrics["table"].count("\n") == 5
    assert run.out.splitlines()[-1].endswith("x as fast as the SSD listing")


def test_the_benchmark_refuses_what_the_listing_cannot_do():
    run = tiny.command("experiments.scan_bench", "--seqlen", "100", "--chunk-size", "64")
    assert run.status == 2 and "the SSD listing needs whole chunks" in run.err
