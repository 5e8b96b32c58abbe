"""The certificate against exact arithmetic, random search and what adapters really do."""
import copy
import decimal
import json
import math
from fractions import Fraction

import pytest
import tiny
import torch
from helpers import write_released_layout
from safetensors.torch import load_file, save_file

import certify
import common
from checkpoint import load_backbone, save_adapter
from common import UserError
from data import load_corpus
from evaluate import make_draws
from mark_adapters import make_adapter
from text import ByteTokenizer


def exact_margin(A_log, beta, dt_min):
    """1 - exp(-2 exp(A_log - beta) dt_min) in 60 digits."""
    with decimal.localcontext(prec=60):
        A_log, beta, dt_min = (decimal.Decimal(repr(v)) for v in (A_log, beta, dt_min))
        return float(1 - (-2 * (A_log - beta).exp() * dt_min).exp())


def uniform(low, high, *shape, seed=0):
    return torch.empty(*shape).uniform_(low, high, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(work):
    return load_backbone(work / "backbone.safetensors")


def awake_adapter(config, kernel="chebyshev"):
    torch.manual_seed(0)
    return tiny.awake(make_adapter(kernel, config, mlp_dim=16, t_scale=30.0))


# ------------------------------------------------------------------------------------ Algorithm 4

@pytest.mark.parametrize("A_log, epsilon", [(0.0, 0.001212326), (-10.0, 5.5073e-8)])
def test_the_margins_known_beforehand(A_log, epsilon):
    found = certify.certify(torch.full((1, 1), A_log))
    assert found.epsilon.item() == pytest.approx(epsilon, rel=1e-5)    # the digits given
    assert found.certified


def test_every_layer_is_right_to_the_last_digits():
    A_log = uniform(-12, 4, 5, 7).double()
    beta = 0.3
    dt_min = 0.002
    found = certify.certify(A_log, beta, dt_min)
    for y, row in enumerate(A_log.tolist()):
        margins = [exact_margin(v, beta, dt_min) for v in row]
        assert found.epsilon[y].item() == pytest.approx(min(margins), rel=1e-13)  # a few roundings
        assert found.head[y] == margins.index(min(margins))
        rho = math.sqrt(1 - min(margins))
        assert found.radius[y].item() == pytest.approx(rho, rel=1e-13)
        assert found.distance[y].item() == pytest.approx(min(margins) / (1 + rho), rel=1e-13)
        assert rho ** found.half_life[y].item() == pytest.approx(0.5, rel=1e-5)   # rho is near 1


def test_no_point_of_the_rectangle_has_a_larger_radius_and_the_vertex_has_that_one():
    A_log = uniform(-3, 3, 4, 6).double()
    beta = 0.5
    dt_min = 1e-3
    found = certify.certify(A_log, beta, dt_min)
    shift = uniform(-beta, beta, 2000, 4, 6, seed=1).double()
    dt = dt_min * uniform(0, 12, 2000, 4, 6, seed=2).double().exp()     # to 160
    radii = (-(A_log + shift).exp() * dt).clamp(min=-30).exp()
    assert (radii.amax((0, 2)) <= found.radius).all()
    vertex = (-(A_log - beta).exp() * dt_min).exp().amax(1)
    torch.testing.assert_close(found.radius, vertex, rtol=1e-15, atol=0)


def test_a_wider_shift_or_a_smaller_step_never_raises_the_margin():
    A_log = uniform(-3, 3, 4, 6)
    epsilons = [certify.certify(A_log, beta, dt).epsilon
                for beta, dt in ((0, 1e-2), (0.1, 1e-2), (0.5, 1e-2), (0.5, 1e-3), (0.5, 1e-9))]
    assert all((after < before).all() for before, after in zip(epsilons, epsilons[1:]))


def test_bounds_of_each_head_are_as_good_as_those_of_the_worst():
    A_log = uniform(-3, 3, 2, 3)
    beta = uniform(0, 0.5, 2, 3, seed=1)
    dt = uniform(0, 1, 2, 3, seed=2)
    found = certify.certify(A_log, beta, dt)
    for y in range(2):
        margins = [exact_margin(*(v[y, h].item() for v in (A_log, beta, dt))) for h in range(3)]
        assert found.epsilon[y].item() == pytest.approx(min(margins), rel=1e-12)


def test_without_decay_nothing_is_certified():
    assert not certify.certify(torch.zeros(2, 3), dt_min=0).certified
    assert not certify.certify(torch.tensor([[0.0], [-800.0]])).certified   # exp underflows
    assert certify.certify(torch.tensor([[0.0], [-700.0]])).certified
    one_bad = torch.tensor([[1e-3, 1e-3], [1e-3, 0]])
    assert certify.certify(torch.zeros(2, 2), dt_min=one_bad).epsilon.tolist()[1] == 0


def test_a_step_decays_by_30_nats_at_most_as_in_the_scan():
    assert certify.certify(torch.full((1, 1), 9.0), 0, 1.0).radius.item() == math.exp(-30)


@pytest.mark.parametrize("A_log, beta, dt, said", [
    (torch.tensor([[0.0], [math.nan]]), 0.5, 1e-3, "layer 1"),
    (torch.tensor([[0.0], [0.0], [math.inf]]), 0.5, 1e-3, "layer 2"),
    (torch.zeros(2, 2), torch.tensor([[0.5], [math.nan]]), 1e-3, "layer 1"),
    (torch.zeros(2, 2), 0.5, -1e-3, "negative"),
    (torch.zeros(0, 2), 0.5, 1e-3, "not empty"),
    (torch.zeros(3), 0.5, 1e-3, "(layers, heads)"),
    (torch.zeros(2, 2), torch.zeros(3), 1e-3, "broadcasts"),
    (torch.zeros(2, 2), torch.zeros(3, 2, 2), 1e-3, "broadcasts")])
def test_what_is_no_recurrence_is_refused(A_log, beta, dt, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(").replace(")", r"\)")):
        certify.certify(A_log, beta, dt)


# --------------------------------------------------------------------------------- B.1 in general

def rotation(angle):
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]],
                        dtype=torch.float64)


def test_a_family_that_shrinks_every_vector_is_certified_by_the_identity():
    A = torch.stack([0.9 * rotation(a) for a in (0.1, 1.0, 2.5)])
    found = certify.aqs_certificate(A)
    assert found.verdict == "certified" and torch.equal(found.P, torch.eye(2, dtype=torch.float64))
    assert (found.epsilon, found.rho, found.M_A) == pytest.approx((0.19, 0.9, 1))


def test_a_family_that_first_grows_needs_another_P():
    A = torch.tensor([[[0.5, 2.0], [0.0, 0.5]], [[0.4, 1.5], [0.0, 0.6]]], dtype=torch.float64)
    assert torch.linalg.matrix_norm(A, 2).max() > 2
    assert certify.aqs_certificate(A, torch.eye(2)).verdict == "not found"
    found = certify.aqs_certificate(A)
    again = certify.aqs_certificate(A, found.P + torch.tensor([[0, 1e-10], [0, 0]]))
    assert again.verdict == "certified" and torch.equal(again.P, again.P.T)
    assert found.verdict == "certified" and found.M_A > 1
    for v in A:     # the inequality, by plain loops
        slack = [[found.P[i, j] - sum(v[k, i] * found.P[k, m] * v[m, j] for k in (0, 1)
                                      for m in (0, 1)) for j in (0, 1)] for i in (0, 1)]
        trace = slack[0][0] + slack[1][1] - 2 * found.epsilon
        determinant = ((slack[0][0] - found.epsilon) * (slack[1][1] - found.epsilon)
                       - slack[0][1] ** 2)
        assert trace >= 0 and determinant >= -1e-9      # of a matrix that touches zero


def test_products_of_interpolated_systems_stay_under_the_bound_of_lemma_b2():
    A = torch.tensor([[[0.5, 2.0], [0.0, 0.5]], [[0.4, 1.5], [0.0, 0.6]]], dtype=torch.float64)
    found = certify.aqs_certificate(A)
    product = torch.eye(2, dtype=torch.float64)
    for k, weight in enumerate(uniform(0, 1, 40).tolist(), 1):
        product = product @ (weight * A[0] + (1 - weight) * A[1])
        assert torch.linalg.matrix_norm(product, 2) <= found.M_A * found.rho ** k * (1 + 1e-12)


def test_an_unstable_family_is_not_certified_by_any_P():
    A = torch.stack([0.5 * torch.eye(2), torch.diag(torch.tensor([1.0, 0.2]))])
    assert certify.aqs_certificate(A).verdict == "not found"
    assert certify.aqs_certificate(A, torch.tensor([[3.0, 1.0], [1.0, 2.0]])).verdict == "not found"


def test_rounding_never_certifies_what_exact_arithmetic_does_not():
    """An eigenvalue of 1 + 1e-13 seen in coordinates that stretch by 1e5, in exact fractions."""
    certified = 0
    for seed in range(60):
        T = torch.diag(torch.tensor([1.0, 1e5], dtype=torch.float64)) @ rotation(0.1 + seed / 20)
        turn = rotation(seed / 10)
        A = turn @ torch.diag(torch.tensor([1 + 1e-13, 0.5], dtype=torch.float64)) @ turn.T
        A = T.inverse() @ A @ T
        P = T.T @ T
        P = (P + P.T) / 2
        a, p = ([[Fraction(v) for v in row] for row in m.tolist()] for m in (A, P))
        gap = [[p[i][j] - sum(a[k][i] * p[k][m] * a[m][j] for k in (0, 1) for m in (0, 1))
                for j in (0, 1)] for i in (0, 1)]
        positive = gap[0][0] > 0 and gap[0][0] * gap[1][1] > gap[0][1] * gap[1][0]
        found = certify.aqs_certificate(A[None], P).verdict == "certified"
        assert positive or not found
        certified += found
    assert certified == 0


def test_not_found_where_none_exists_and_where_one_does():
    nilpotent = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    switched = torch.stack([nilpotent, nilpotent.T])    # each stable, their product has radius 4
    assert certify.aqs_certificate(switched).verdict == "not found"
    T = torch.diag(torch.tensor([1.0, 30.0], dtype=torch.float64))
    slow = torch.diag(torch.tensor([0.99, 0.01], dtype=torch.float64))
    slow = (slow, rotation(math.pi / 4) @ slow @ rotation(-math.pi / 4))  # along different axes
    hidden = torch.stack([T.inverse() @ v @ T for v in slow])
    assert certify.aqs_certificate(hidden).verdict == "not found"
    assert certify.aqs_certificate(hidden, T.T @ T).verdict == "certified"


@pytest.mark.parametrize("A, P", [
    (torch.zeros(2, 2), None), (torch.zeros(0, 2, 2), None),
    (torch.full((1, 1, 1), math.nan), None),
    (torch.zeros(1, 2, 2), torch.tensor([[1.0, 1.0], [0.0, 1.0]])),
    (torch.zeros(1, 2, 2), torch.eye(3))])
def test_what_is_no_family_or_no_P_is_refused(A, P):
    with pytest.raises(UserError, match="aqs_certificate"):
        certify.aqs_certificate(A, P)


@pytest.mark.parametrize("scale, P", [(0.5, -1.0), (0.5, 0.0), (2.0, -1.0)])
def test_a_P_that_is_not_positive_certifies_nothing(scale, P):
    eye = torch.eye(2)
    assert certify.aqs_certificate(scale * eye[None], P * eye).verdict == "not found"


# ----------------------------------------------------------------------------------- reading a file

def test_the_recurrence_is_that_of_the_file(tmp_path):
    state = write_released_layout(tmp_path / "composer.pt", tiny.CONFIG)
    found = certify.recurrence(load_backbone(tmp_path / "composer.pt"))
    for name, values in zip(("A_log", "dt_bias"), found):
        for y, row in enumerate(values):
            wanted = state[f"model.bert.encoder.layer.{y}.layer.mixer.{name}"]
            assert torch.equal(row, wanted.double())


def write_changed(work, name, change):
    """The tiny backbone with one thing changed."""
    state = load_file(work / "backbone.safetensors")
    change(state)
    save_file(state, work / name)
    return work / name


@pytest.mark.parametrize("said, change", [
    ("layers.1.mixer.A_log", lambda state: state.pop("layers.1.mixer.A_log")),
    ("layers.1.mixer.A_log holds NaN", lambda state: state["layers.1.mixer.A_log"].fill_(math.nan)),
    ("holds no tensors", lambda state: state.clear())])
def test_a_broken_file_is_named_with_what_it_lacks_and_status_2(work, said, change):
    run = tiny.command("certify.py", "--weights", write_changed(work, "broken.safetensors", change))
    assert run.status == 2
    assert said in run.err and "broken.safetensors" in run.err
    assert run.err.count("\n") == 1


def test_the_status_is_1_where_a_layer_does_not_certify(work):
    slow = write_changed(work, "slow.safetensors", lambda s: s["layers.1.mixer.A_log"].fill_(-800))
    run = tiny.command("certify.py", "--weights", slow)
    assert run.status == 1
    assert "NOT certified: 1 of 2 layers" in run.out.splitlines()[-1]


def test_a_pickled_checkpoint_is_certified(work):
    write_released_layout(work / "composer.pt", tiny.CONFIG)
    run = tiny.command("certify.py", "--weights", work / "composer.pt")
    assert run.status == 0
    assert "certified: 2 of 2 layers" in run.out.splitlines()[-1]


# -------------------------------------------------------------------- what the hypotheses rest on

@pytest.mark.parametrize("kernel", ("hypernet", "chebyshev", "dct"))
def test_the_reached_shift_bounds_a_finer_grid_and_never_passes_beta_A(model, kernel):
    adapter = awake_adapter(model.config, kernel)
    reached = certify.reached_shift(adapter, 8001)
    with torch.no_grad():
        finer = adapter(torch.linspace(0, 1, 40_000)).A.amin(1)
        assert (reached <= finer).all()
        assert (finer - reached).max() < 0.01           # 30 radians over [0, 1]: a smooth curve
        coarse = certify.reached_shift(adapter, 7)      # neighbours differ by more than beta_A
        assert (coarse >= -adapter.effective_magnitudes()[:, :1]).all()


def test_an_untrained_adapter_reaches_nothing(model):
    assert not certify.reached_shift(make_adapter("dct", model.config, mlp_dim=16)).any()


def test_no_input_has_a_smaller_step_than_the_floor_and_one_has_it(model):
    model = copy.deepcopy(model)
    adapter = awake_adapter(model.config)
    h = model.config.nheads
    d = model.config.d_model
    with torch.no_grad():
        for layer in model.layers:                       # the fixture's norms are the identity
            layer.norm.weight.copy_(uniform(0.5, 2, d, seed=3))
            layer.norm.bias.copy_(uniform(-1, 1, d, seed=4))
        floor = certify.step_floor(model, adapter)
        beta_dt = adapter.effective_magnitudes()[:, certify.MAGNITUDES.index("dt")]
        norms = [model.embedding_norm, model.layers[0].norm]
        for y, (layer, norm) in enumerate(zip(model.layers, norms)):
            w = layer.mixer.in_proj.weight[-2 * h:]
            worst = -(w * norm.weight)
            worst = 1e3 * (worst - worst.mean(-1, keepdim=True))    # so large that eps is nothing
            x = torch.cat([worst, torch.randn(5000, d, generator=torch.Generator().manual_seed(5))])
            u = norm(x)                                  # in (2h + 5000) d
            step = torch.nn.functional.softplus(
                (u @ w.mT).unflatten(-1, (2, h)) + layer.mixer.dt_bias - beta_dt[y].abs())
            lowest = step.amin((0, 1)).double()
            assert (lowest >= floor[y] * (1 - 1e-5)).all()          # float32 beside float64
            torch.testing.assert_close(lowest, floor[y], rtol=1e-4, atol=0)


def text_draws(work, seqlen=40, n=9):
    tokenizer = ByteTokenizer()
    return make_draws(load_corpus(work / "text.txt", tokenizer), tokenizer, seqlen, n)


def test_what_is_met_on_text_is_what_each_window_alone_shows(work, model):
    adapter = awake_adapter(model.config)
    draws = text_draws(work)
    draws.x0[3, 30:] = draws.pad_id                      # pads in one window
    draws.x_t[3, 30:] = draws.pad_id
    smallest, slowest, share = certify.met_on_text(model, adapter, draws, dt_min=0.05)
    steps = []
    rates = []
    with torch.no_grad():
        for x_t, x0, t in zip(draws.x_t, draws.x0, draws.t):
            x_t = x_t[x0 != draws.pad_id][None]          # without its pads
            inputs = certify.mixer_inputs(model, x_t, adapter(t[None]))
            layers = certify.scan_inputs(model, inputs, adapter(t[None]))
            steps.append(torch.stack([scan.dt[0] for scan in layers]))       # y l 2 h
            rates.append(torch.stack([-scan.dt[0] * scan.A[0] for scan in layers]))
    steps = torch.cat(steps, 1)
    rates = torch.cat(rates, 1)
    close = {"rtol": 1e-4, "atol": 0}                    # float32, in batches of another shape
    torch.testing.assert_close(smallest, steps.amin((1, 2)).double(), **close)
    torch.testing.assert_close(slowest, rates.amin((1, 2)).double(), **close)
    assert share == pytest.approx((steps < 0.05).double().mean().item(), abs=1e-3)


@pytest.mark.parametrize("kernel", ("hypernet", "chebyshev", "dct"))
def test_realised_radii_never_exceed_the_certified_ones(work, model, kernel):
    adapter = awake_adapter(model.config, kernel)
    draws = text_draws(work)
    A_log = torch.stack([layer.mixer.A_log for layer in model.layers]).double()
    smallest, slowest, _ = certify.met_on_text(model, adapter, draws)
    # Assume what this text does keep, so that all five hypotheses hold.
    found, met = certify.margins(model, adapter, draws, dt_min=smallest.min().item())
    assert tuple(found) == certify.HYPOTHESES and all(c.certified for c in found.values())
    assert torch.equal(met.radius, (-slowest.amin(-1)).exp())
    rates = {name: -torch.log1p(-c.distance) for name, c in found.items()}  # nats per step, y
    for name, rate in rates.items():                     # float32 beside float64
        assert (slowest.amin(-1) >= rate * (1 - 1e-5)).all(), name
    beta_A = adapter.effective_magnitudes()[:, :1].detach()
    floor = ((A_log - beta_A).exp() * certify.step_floor(model, adapter)).amin(-1)
    torch.testing.assert_close(rates["any text"], floor, rtol=1e-6, atol=0)
    own = ((A_log - beta_A).exp() * smallest.min()).amin(-1)
    torch.testing.assert_close(rates["own beta_A"], own, rtol=1e-6, atol=0)
    # On other text, and noise, "any text" alone is bound to hold.
    other = make_draws(load_corpus(work / "text.txt", ByteTokenizer()), ByteTokenizer(), 24, 30, 7)
    other.x_t = torch.randint(260, other.x_t.shape, generator=torch.Generator().manual_seed(8))
    _, slowest, _ = certify.met_on_text(model, adapter, other)
    assert (slowest.amin(-1) >= rates["any text"] * (1 - 1e-5)).all()
    for less, more in (("any text", "this text"), ("paper", "own beta_A"),
                       ("own beta_A", "reached"), ("reached", "this text")):
        assert (found[less].epsilon <= found[more].epsilon).all()


# ------------------------------------------------------------------------------ static operators

def static_adapter(config, kernel, rate=3.0):
    """A static operator, or a geometry on top of one: only A_log and dt_bias are shifted."""
    torch.manual_seed(0)
    adapter = make_adapter(kernel, config, mlp_dim=16, t_scale=30.0, static_rate=rate)
    if kernel == "static":
        static = adapter
    else:
        tiny.awake(adapter.geometry)
        static = adapter.static
    with torch.no_grad():
        static.A.copy_(uniform(-0.5, 0.5, *static.A.shape, seed=11))
        static.dt.copy_(uniform(-0.5, 0.5, *static.dt.shape, seed=12))
    return adapter


def write_shifted(work, adapter):
    """The tiny backbone's file with the static shifts added to its A_log and dt_bias by hand."""
    static = getattr(adapter, "static", adapter)

    def shift(state):
        for y in range(tiny.CONFIG.n_layer):
            for name, numbers in (("A_log", static.A), ("dt_bias", static.dt)):
                for h in range(tiny.CONFIG.nheads):
                    state[f"layers.{y}.mixer.{name}"][h] += 3.0 * numbers[y, 0, h].item()
    return write_changed(work, "shifted.safetensors", shift)


def assert_same_margins(got, want):
    for name in certify.HYPOTHESES:
        for field in ("epsilon", "radius", "distance", "half_life"):      # the file is in float32
            torch.testing.assert_close(getattr(got[0][name], field), getattr(want[0][name], field),
                                       rtol=1e-5, atol=0, msg=f"{name}: {field}")
        assert torch.equal(got[0][name].head, want[0][name].head)
    torch.testing.assert_close(got[1].dt, want[1].dt, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kernel", ("hypernet", "chebyshev", "dct"))
def test_a_geometry_on_a_static_operator_has_the_certificate_of_the_shifted_backbone(work, model,
                                                                                     kernel):
    adapter = static_adapter(model.config, f"static+{kernel}")
    shifted = load_backbone(write_shifted(work, adapter))
    draws = text_draws(work)
    got = certify.margins(model, adapter, draws)
    assert_same_margins(got, certify.margins(shifted, adapter.geometry, draws))
    before = certify.margins(model, adapter.geometry, draws)[0]
    assert (got[0]["any text"].epsilon != before["any text"].epsilon).all()


def test_a_static_operator_alone_has_a_bound_of_zero_around_the_shifted_backbone(work, model):
    adapter = static_adapter(model.config, "static")
    shifted = load_backbone(write_shifted(work, adapter))
    A_log = certify.recurrence(shifted)[0]
    draws = text_draws(work)
    nothing = make_adapter("none", model.config)
    met = certify.met_on_text(shifted, nothing, draws)
    floor = certify.step_floor(shifted, nothing)
    want = {"paper": certify.certify(A_log), "own beta_A": certify.certify(A_log, 0),
            "reached": certify.certify(A_log, 0), "this text": certify.certify(A_log, 0, met.dt),
            "any text": certify.certify(A_log, 0, floor)}
    assert_same_margins(certify.margins(model, adapter, draws), (want, met))


def test_no_text_or_time_decays_more_slowly_than_a_static_adapter_is_certified_to(work, model):
    adapter = static_adapter(model.config, "static+chebyshev")
    tiny.awake(adapter)                                  # B, C and D as well, which must not matter
    found, _ = certify.margins(model, adapter, text_draws(work))
    noise = text_draws(work)
    noise.x_t = torch.randint(260, noise.x_t.shape, generator=torch.Generator().manual_seed(8))
    slowest = certify.met_on_text(model, adapter, noise).rate
    rate = -torch.log1p(-found["any text"].distance)     # nats per step, y
    assert (slowest.amin(-1) >= rate * (1 - 1e-5)).all()


# ----------------------------------------------------------------------------------- the command

def write_adapter(work, kernel, name):
    save_adapter(work / name, awake_adapter(tiny.CONFIG, kernel))
    return work / name


def arguments(work, *adapters):
    return ("--weights", work / "backbone.safetensors", "--data", work / "text.txt", "--seqlen", 24,
            "--windows", 5, *(("--adapter", *adapters) if adapters else ()))


def test_the_command_prints_every_layer_and_leaves_its_numbers_and_figure(work):
    path = write_adapter(work, "dct", "dct.safetensors")
    run = tiny.command("certify.py", *arguments(work, path))
    assert run.status == 0, run.err
    last = run.out.splitlines()[-1]
    assert "certified: 2 of 2 layers; Algorithm 4's least margin is epsilon" in last
    metrics = json.loads((work / "runs/certify/dct/result.json").read_text())["metrics"]
    assert metrics["certified"] and metrics["table"] in run.out
    assert len(metrics["backbone"]["epsilon"]) == tiny.CONFIG.n_layer
    adapter = metrics["adapters"]["dct"]
    assert adapter["table"] in run.out and set(adapter["margins"]) == set(certify.HYPOTHESES)
    assert (work / "runs/certify/dct/fig1_certificate.png").stat().st_size > 10_000


def config(work, *adapters):
    """The same as a certify.Config."""
    return certify.Config(weights=str(work / "backbone.safetensors"), seqlen=24, windows=5,
                          adapter=tuple(map(str, adapters)), data=(str(work / "text.txt"),))


def test_the_last_line_names_the_adapter_whose_margin_fails(work, monkeypatch, capsys):
    """Under a name that looks like a label: nothing takes labels apart."""
    monkeypatch.setattr(certify, "step_floor", lambda model, adapter: torch.zeros(2, 4))
    path = write_adapter(work, "dct", "a, this text.safetensors")
    result = certify.main(config(work, path))
    assert not result["certified"] and result["backbone"]["epsilon"][0] > 0
    assert not any(result["adapters"]["a, this text"]["margins"]["any text"]["epsilon"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("NOT certified: 0 of 2 layers")
    assert "least of all 0.000e+00 (a, this text, any text: layer 0" in last


def test_the_numbers_are_written_before_the_picture(work, monkeypatch):
    def fail(*args):
        raise OSError("no picture today")
    monkeypatch.setattr(common, "save_figure", fail)
    result = work / "runs/certify/none/result.json"
    result.unlink(missing_ok=True)
    with pytest.raises(OSError, match="no picture"):
        certify.main(config(work, "none"))
    assert json.loads(result.read_text())["metrics"]["certified"]


def test_the_figure_is_drawn_of_several_adapters_of_one_and_of_none(tmp_path):
    certificate = certify.certify(uniform(-3, 3, 4, 6))
    nothing = certify.certify(torch.zeros(4, 6), dt_min=0)      # a log axis has no place for it
    found = dict.fromkeys(certify.HYPOTHESES, certificate) | {"any text": nothing}
    sizes = []
    for adapters in ({"a": found, "b": found}, {"a": found}, {}):
        certify.draw_certificate(certificate, adapters, tmp_path / "figure.png")
        sizes.append((tmp_path / "figure.png").stat().st_size)
    assert min(sizes) > 10_000 and sizes[1] > sizes[2]


@pytest.mark.parametrize("dt_min, loud", [("1.0", True), ("1e-12", False)])
def test_a_broken_hypothesis_is_said_out_loud(work, dt_min, loud):
    path = write_adapter(work, "hypernet", "hypernet.safetensors")
    run = tiny.command("certify.py", *arguments(work, path), "--dt-min", dt_min)
    assert run.status == 0 and ("!! hypernet: Delta falls to" in run.out) == loud
    assert ("assume what this text breaks" in run.out) == loud


def test_delta_is_measured_on_the_whole_of_ones_own_text(work):
    (work / "one.txt").write_text("a single document, which falls into no held-out part. " * 4)
    path = write_adapter(work, "dct", "dct.safetensors")
    for script in ("certify.py", "markov.py"):
        run = tiny.command(script, "--weights", work / "backbone.safetensors", "--adapter", path,
                           "--data", work / "one.txt", "--seqlen", 24, "--windows", 2)
        assert run.status == 0, run.err


def test_a_backbone_of_ones_own_is_certified_without_an_adapter(work):
    for none in ((), ("none",)):
        run = tiny.command("certify.py", *arguments(work, *none))
        assert run.status == 0 and "hypotheses" not in run.out


@pytest.mark.parametrize("kernel", ("inject", "lora", "lora+dct"))
def test_an_adapter_that_changes_something_else_is_refused(work, kernel):
    path = write_adapter(work, kernel, "i.safetensors")
    run = tiny.command("certify.py", *arguments(work, path))
    assert run.status == 2 and f"is {kernel}, " in run.err and "static+" in run.err
    assert run.err.count("\n") == 1


def test_a_static_operator_with_and_without_a_geometry_is_certified_by_the_command(work):
    paths = []
    for kernel in ("static", "static+dct"):
        paths.append(work / f"{kernel}.safetensors")
        save_adapter(paths[-1], static_adapter(tiny.CONFIG, kernel))
    run = tiny.command("certify.py", *arguments(work, *paths))
    assert run.status == 0, run.err
    assert "static: margin epsilon" in run.out and "static+dct: margin epsilon" in run.out
    run = tiny.command("markov.py", *arguments(work, paths[1]))
    assert run.status == 2 and "is static+dct, " in run.err


def test_the_last_line_counts_the_layers_in_which_float32_does_not_decay():
    edge = 2.0 ** -25
    for rate, rounded in ((edge, True), (1.01 * edge, False)):
        certificate = certify.certify(torch.zeros(3, 2), 0, rate)
        decay = torch.tensor(-rate, dtype=torch.float64).exp().float()
        assert (decay == 1) == rounded
        line = certify.last_line([certify.Finding("", "paper", certificate)])
        assert ("float32 rounds such a decay to 1 in 3 layers" in line) == rounded
