"""Markov parameters against impulses through the scan, explicit Hankel matrices and plain sums."""
import json
import math

import pytest
import tiny
import torch

import certify
import common
import markov
from certify import mixer_inputs, scan_inputs
from checkpoint import load_backbone, save_adapter
from chunk_scan import bidirectional_scan
from hydra_ssm import Modulation
from mark_adapters import make_adapter

CLOSE = {"rtol": 1e-10, "atol": 0}   # float64, some roundings


@pytest.fixture(scope="module")
def model(work):
    return load_backbone(work / "backbone.safetensors", torch.float64)


@pytest.fixture(scope="module")
def sample(model):
    """(ids, the mixers' inputs) of two sequences on the frozen backbone."""
    x_t = torch.randint(97, 123, (2, 12), generator=torch.Generator().manual_seed(0))
    x_t[0, 3] = x_t[1, 5] = 259
    return x_t, mixer_inputs(model, x_t)


def awake_adapter(kernel="dct", dtype=torch.float64):
    torch.manual_seed(0)
    return tiny.awake(make_adapter(kernel, tiny.CONFIG, mlp_dim=16, t_scale=30.0)).to(dtype)


def at(adapter, x_t, t):
    return adapter(torch.full((len(x_t),), t, dtype=torch.float64))


def random_response(seed=0, shape=(2, 3, 2, 4)):
    draw = torch.Generator().manual_seed(seed)
    gain, dt, B, C = torch.randn(4, *shape, generator=draw, dtype=torch.float64)
    rate = torch.empty(shape, dtype=torch.float64).uniform_(0.05, 1.5, generator=draw)
    return markov.ImpulseResponse(gain, rate, dt.abs(), B.abs(), C.abs())


# --------------------------------------------------------------------- the parameters themselves

@pytest.mark.parametrize("t", (None, 0.3))
def test_they_are_the_mixers_answer_to_an_impulse(model, sample, t):
    """Every position holds the same token's Delta, B and C; an impulse in the middle."""
    x_t, inputs = sample
    modulation = None if t is None else at(awake_adapter(), x_t, t)
    with torch.no_grad():
        op = markov.frozen_operator(model, inputs, modulation)
        layers = scan_inputs(model, inputs, modulation)
    l = 21
    b, i = 1, 5                                         # token 5 of sequence 1
    s = 12 + 5                                          # is the 17th of the sample
    for y, (dt, A, B, C) in enumerate(layers):
        constant = [v[b:b + 1, i:i + 1].expand(1, l, *v.shape[2:]) for v in (dt, B, C)]
        A = A.expand(len(x_t), -1)[b:b + 1]
        h = dt.shape[-1]
        x = torch.zeros(1, l, h, 1, dtype=torch.float64)
        x[:, 10] = 1
        D = torch.zeros(1, l, h, dtype=torch.float64)
        answer = bidirectional_scan(x, constant[0], A, *constant[1:], D, 8)
        for k in range(10):                             # lag k is distance k + 1, on either side
            h_k = op.gain[y, s] * torch.exp(-op.rate[y, s] * k)             # 2 h
            torch.testing.assert_close(answer[0, 11 + k, :, 0], h_k[0], **CLOSE)
            torch.testing.assert_close(answer[0, 9 - k, :, 0], h_k[1], **CLOSE)


def test_a_change_of_the_states_coordinates_leaves_them_alone(model, sample):
    """Lemma B.1: C T^-1 (T A T^-1)^k T B, with dense matrices."""
    _, inputs = sample
    with torch.no_grad():
        op = markov.frozen_operator(model, inputs)
        dt, A, B, C = scan_inputs(model, inputs)[1]
    T = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for d in (0, 1):
        b = dt[0, 7, d, 2] * B[0, 7, d, 0]
        c = C[0, 7, d, 0]
        A_bar = torch.exp(dt[0, 7, d, 2] * A[0, 2]) * torch.eye(4, dtype=torch.float64)
        moved = T @ A_bar @ T.inverse()
        for k in range(6):
            h_k = (c @ T.inverse()) @ torch.linalg.matrix_power(moved, k) @ (T @ b)
            want = op.gain[1, 7, d, 2] * torch.exp(-op.rate[1, 7, d, 2] * k)
            torch.testing.assert_close(h_k, want, rtol=1e-9, atol=1e-14)    # T is not orthogonal


def test_zero_order_hold_is_the_integral_of_the_held_input(model, sample):
    _, inputs = sample
    with torch.no_grad():
        euler = markov.frozen_operator(model, inputs)
        held = markov.frozen_operator(model, inputs, zoh=True)
        A = torch.stack([scan.A[0] for scan in scan_inputs(model, inputs)])     # y h
        A = A[:, None, None]                                                    # y 1 1 h
    u = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000              # of the step's length
    integral = torch.stack([torch.exp(A * euler.dt * v) for v in u]).mean(0)
    torch.testing.assert_close(held.gain / euler.gain, integral, rtol=1e-6, atol=0)  # midpoint rule
    assert torch.equal(held.rate, euler.rate) and torch.equal(held.C, euler.C)


def test_pads_are_not_in_the_sample(model, sample):
    """And without a mask every token is."""
    x_t, inputs = sample
    padded = torch.nn.functional.pad(x_t, (0, 4), value=256)
    known = padded != 256
    with torch.no_grad():
        wider = mixer_inputs(model, padded, None, known)
        longer = markov.frozen_operator(model, wider, attention_mask=known)
        for short, long in zip(markov.frozen_operator(model, inputs), longer):
            torch.testing.assert_close(short, long, rtol=1e-9, atol=1e-13)
        everything = torch.ones_like(x_t, dtype=torch.bool)
        masked = markov.frozen_operator(model, inputs, attention_mask=everything)
        assert all(map(torch.equal, masked, markov.frozen_operator(model, inputs)))
        assert masked.gain.shape == (2, x_t.numel(), 2, 4)


def test_an_untrained_adapter_is_the_backbone(model, sample):
    x_t, inputs = sample
    with torch.no_grad():
        frozen = markov.frozen_operator(model, inputs)
        for kernel in ("hypernet", "chebyshev", "dct"):
            adapter = make_adapter(kernel, tiny.CONFIG, mlp_dim=16).double()
            now = markov.frozen_operator(model, inputs, at(adapter, x_t, 0.7))
            assert all(map(torch.equal, now, frozen))


# ------------------------------------------------------------------------------------ closed forms

def test_the_hankel_operator_has_the_stated_singular_value_and_no_other():
    op = random_response()
    i = torch.arange(300, dtype=torch.float64)          # exp(-0.05 * 600) is 0
    for index in ((0, 0, 0, 0), (1, 2, 1, 3)):
        matrix = op.gain[index] * torch.exp(-op.rate[index] * (i[:, None] + i))
        values = torch.linalg.svdvals(matrix)
        torch.testing.assert_close(markov.hankel_singular_value(op)[index], values[0], rtol=1e-8,
                                   atol=0)
        assert values[1] < 1e-12 * values[0]


def test_inner_products_and_distances_are_sums_over_the_lags():
    one = random_response(0)
    two = random_response(1)
    k = torch.arange(1000, dtype=torch.float64)[:, None, None, None, None]
    h = [op.gain * torch.exp(-op.rate * k) for op in (one, two)]            # k y s 2 h
    count = one.gain.numel()
    assert markov.inner(one, two) == pytest.approx((h[0] * h[1]).sum().item() / count, rel=1e-12)
    apart = ((h[0] - h[1]) ** 2).sum().div(count).sqrt().item()
    found = markov.distances([one, two, one])
    assert found[0, 1].item() == found[1, 0].item() == pytest.approx(apart, rel=1e-12)
    assert found[0, 2].item() < 1e-7                    # the root of a rounding


def test_the_profile_is_the_root_mean_square_at_each_lag():
    op = random_response()
    for k, value in zip((0, 3, 40), markov.profile(op, torch.tensor([0.0, 3.0, 40.0]))):
        squares = [(g * math.exp(-r * k)) ** 2
                   for g, r in zip(op.gain.flatten().tolist(), op.rate.flatten().tolist())]
        assert value.item() == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-12)


def test_the_profile_of_a_token_is_the_same_over_layers_directions_and_heads():
    op = random_response()
    found = markov.token_profiles(op, torch.tensor([0.0, 7.0], dtype=torch.float64))
    assert found.shape == (2, 3)                        # k s
    for k, row in zip((0, 7), found):
        for s, value in enumerate(row):
            gains = op.gain[:, s].flatten().tolist()
            rates = op.rate[:, s].flatten().tolist()
            squares = [(g * math.exp(-r * k)) ** 2 for g, r in zip(gains, rates)]
            assert value.item() == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-12)


def test_the_band_holds_the_middle_half_of_the_tokens():
    """Five tokens whose gains change by 0.8, 0.9, 1, 1.2 and 1.6 at every lag."""
    frozen = random_response(shape=(2, 5, 2, 4))
    frozen = frozen._replace(rate=frozen.rate / 50)     # so that something is left at lag 4096
    change = torch.tensor([1.2, 0.8, 1.6, 1.0, 0.9], dtype=torch.float64)
    changed = frozen._replace(gain=frozen.gain * change[:, None, None])
    (low, high), same = markov.ratio_quartiles([changed, frozen], frozen)
    assert low == pytest.approx([0.9] * len(markov.LAGS))
    assert high == pytest.approx([1.2] * len(markov.LAGS))
    assert same == [[1.0] * len(markov.LAGS)] * 2


def test_half_of_a_state_is_left_after_its_half_life():
    op = random_response()
    same = op._replace(rate=torch.full_like(op.rate, 0.2))
    for steps in markov.half_life(same).tolist():
        assert math.exp(-0.2 * steps) == pytest.approx(0.5)
    mixed = math.prod(math.log(2) / r for r in op.rate[1].flatten().tolist()) ** (1 / 24)
    assert markov.half_life(op)[1].item() == pytest.approx(mixed)
    one_head = math.prod(math.log(2) / r for r in op.rate[1, :, :, 2].flatten().tolist()) ** (1 / 6)
    assert markov.head_half_life(op)[1, 2].item() == pytest.approx(one_head)


def test_no_parameter_of_the_sample_passes_the_bound_of_lemma_b2(model, sample):
    x_t, inputs = sample
    adapter = awake_adapter()
    A_log = torch.stack([layer.mixer.A_log for layer in model.layers])
    with torch.no_grad():
        operators = [markov.frozen_operator(model, inputs, at(adapter, x_t, t))
                     for t in (0.0, 0.2, 0.9)]
        beta_A = adapter.effective_magnitudes()[:, 0]
        bound = markov.lemma_bound(operators, A_log, beta_A, markov.LAGS)
        single = [markov.lemma_bound([op], A_log, beta_A, markov.LAGS) for op in operators]
    for op, alone in zip(operators, single):
        assert (markov.profile(op, markov.LAGS) <= alone).all() and (alone <= bound).all()
    # M_C M_B rho^k, written out for one layer alone
    one = [op._replace(**{n: v[:1] for n, v in op._asdict().items()}) for op in operators]
    M = max(op.B[0].max() for op in operators) * max(op.C[0].max() for op in operators)
    smallest = torch.stack([op.dt[0].amin((0, 1)) for op in operators]).amin(0)
    rho = certify.certify(A_log[:1], beta_A[0], smallest[None]).radius[0]
    torch.testing.assert_close(markov.lemma_bound(one, A_log[:1], beta_A[:1], markov.LAGS),
                               M * rho ** markov.LAGS, **CLOSE)


def test_the_lags_reach_4096_and_none_repeats():
    lags = markov.LAGS.tolist()
    assert lags[0] == 0 and lags[-1] == 4096 and sorted(set(lags)) == lags


def test_the_components_are_those_of_the_adapter():
    t = torch.linspace(0, 1, 257, dtype=torch.float64)
    adapter = awake_adapter("chebyshev")
    with torch.no_grad():
        found = markov.coefficients(adapter)
        h = adapter.hidden(t)
        K = adapter.degree
        s = adapter.n_shifts
        theta = adapter.shift(h)[..., :K * s].view(2, 257, K, s)            # of A; k, then s
    for y in range(2):
        for k in range(K):
            mean = sum((theta[y, :, k, j] ** 2).sum() for j in range(s)) / (257 * s)
            torch.testing.assert_close(found["spectrum"][y, k], mean.sqrt(), **CLOSE)
    adapter = awake_adapter("dct")
    with torch.no_grad():
        found = markov.coefficients(adapter)
        h = adapter.hidden(t)
        for y in range(2):
            exponent = math.log1p(math.exp(adapter.alpha[y].item())) + 1e-4
            assert found["exponent"][y].item() == pytest.approx(exponent)
            for f in range(8):
                weight = adapter.spectrum(h)[y, :, f] * (f + 1) ** -exponent
                torch.testing.assert_close(found["spectrum"][y, f], weight.square().mean().sqrt(),
                                           **CLOSE)
    assert set(markov.coefficients(awake_adapter("hypernet"))) == {"magnitudes"}


# ------------------------------------------------------------------------------------- the pictures

def test_an_adapter_that_ignores_t_shows_no_distance_between_times(model, sample):
    class Constant(torch.nn.Module):
        """Half of each memory, whatever t is."""
        kernel = "constant"

        def forward(self, t):
            return Modulation(A=torch.full((2, len(t), 4), 0.3, dtype=torch.float64))

        def effective_magnitudes(self):
            return torch.full((2, 7), 0.3, dtype=torch.float64)

    found = markov.analyse(model, Constant(), sample[1], [0.0, 0.25, 0.5, 0.75, 1.0])
    distance = torch.tensor(found["distance"])
    assert (distance[:5, :5] < 1e-7).all() and (distance[:5, 5] > 0.01).all()
    assert found["half_life"][0] == found["half_life"][4] != found["half_life_frozen"]
    assert "| constant | 0.000 (0.000) |" in markov.memory_table({"constant": found})


def test_the_profiles_are_at_the_times_of_figure_3(model, sample):
    x_t, inputs = sample
    adapter = awake_adapter()
    grid = torch.linspace(0, 1, 9).tolist()
    found = markov.analyse(model, adapter, inputs, grid)
    for t, curve in zip(markov.TIMES, found["profile"], strict=True):
        with torch.no_grad():
            op = markov.frozen_operator(model, inputs, at(adapter, x_t, t))
        assert curve == markov.profile(op, markov.LAGS).tolist()
    assert len(found["half_life"]) == 9 and len(found["distance"]) == 10


def test_a_change_of_the_diagonal_alone_moves_no_operator(model, sample):
    x_t, inputs = sample
    with torch.no_grad():
        only_D = markov.frozen_operator(model, inputs, at(awake_adapter(), x_t, 0.3).keep("D"))
        assert all(map(torch.equal, only_D, markov.frozen_operator(model, inputs)))


def test_the_table_reads_the_right_times_and_lags():
    curve = [1.0] * len(markov.LAGS)
    at_1024 = markov.LAGS.tolist().index(1024)
    profiles = [[v * (1 + i) if k == at_1024 else v for k, v in enumerate(curve)] for i in range(5)]
    far = [[abs(i - j) / 10 for j in range(6)] for i in range(6)]
    found = {"distance": far, "profile": profiles, "profile_frozen": [2 * v for v in curve],
             "half_life": [[3.0, 8.0], [5.0, 2.0], [4.0, 4.0]], "half_life_frozen": [4.0, 4.0],
             "hankel": [1.0, 2.0, 3.0, 4.0, 6.0, 5.0]}
    row = "| x | 0.200 (0.400) | 0.300 | 0.50 to 2.00 | 0.20 | 1.20 | 0.50 | 1.50 | 2.50 |"
    assert row in markov.memory_table({"x": found})


def test_the_numbers_are_written_before_the_pictures(work, monkeypatch):
    def fail(*args):
        raise OSError("no picture today")
    monkeypatch.setattr(common, "save_figure", fail)
    save_adapter(work / "hypernet.safetensors", awake_adapter("hypernet", torch.float32))
    given = markov.Config(weights=str(work / "backbone.safetensors"), seqlen=24, windows=2, grid=5,
                          adapter=(str(work / "hypernet.safetensors"),), layer=1,
                          data=(str(work / "text.txt"),), sentence="one head or two")
    with pytest.raises(OSError, match="no picture"):
        markov.main(given)
    found = json.loads((work / "runs/markov/hypernet/result.json").read_text())
    assert found["metrics"]["matrices"]["layer"] == 1
    assert len(found["metrics"]["matrices"]["half_life"]) == 4
    assert found["metrics"]["adapters"]["hypernet"]["learned"].keys() == {"magnitudes"}


def test_the_command_leaves_a_table_its_numbers_and_its_figures(work):
    paths = []
    for kernel in ("dct", "chebyshev"):
        paths.append(work / f"{kernel}.safetensors")
        save_adapter(paths[-1], awake_adapter(kernel, torch.float32))
    options = ("--weights", work / "backbone.safetensors", "--data", work / "text.txt", "--seqlen",
               24, "--windows", 3, "--grid", 5)
    run = tiny.command("markov.py", *options, "--adapter", *paths)
    assert run.status == 0, run.err
    last = "figures: runs/markov/several/fig3_*.png (profiles, operators, coefficients)"
    assert run.out.splitlines()[-1] == last
    metrics = json.loads((work / "runs/markov/several/result.json").read_text())["metrics"]
    assert metrics["table"] in run.out and metrics["lags"][-1] == 4096
    found = metrics["adapters"]["dct"]
    assert len(found["distance"]) == 6 and len(found["profile"]) == len(markov.TIMES)
    assert "exponent" in found["learned"] and "spectrum" in found["learned"]
    for name in ("fig3_profiles", "fig3_operators", "fig3_coefficients", "mixer_matrix"):
        assert (work / f"runs/markov/several/{name}.png").stat().st_size > 10_000
    save_adapter(work / "adaln.safetensors", make_adapter("adaln", tiny.CONFIG))
    run = tiny.command("markov.py", *options, "--adapter", work / "adaln.safetensors")
    assert run.status == 2 and "adaln" in run.err and run.err.count("\n") == 1
    for wrong in (("--masked", "1.5"), ("--grid", "8"), ("--layer", "2"), ("--sentence", "")):
        run = tiny.command("markov.py", *options, *wrong)
        assert run.status == 2 and wrong[0] in run.err and run.err.count("\n") == 1
