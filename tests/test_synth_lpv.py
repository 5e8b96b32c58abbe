"""Algorithms 5 to 7, sensitivities, bound and fits against plain float64 loops from the equations.

Tolerances. float64 against a loop: 1e-11 of the largest entry, sums in another order. Fits are in
float32: with no noise and the true start, y is rounded to 6e-8 of itself, and what a fit makes of
that is below 1e-5 of an operator of size 1.
"""
import dataclasses
import math
import sys

import common
import numpy as np
import pytest
import synth_lpv
import torch
from synth_lpv import PRESETS, SYSTEMS, Config, recover, recovery_table, summarise

BASES = ("chebyshev", "dct")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "ROOT", tmp_path)


def random_system(kernel, seed=42, truth="ours"):
    return synth_lpv.random_truth(kernel, seed, truth)


def published(**given):
    return common.from_preset(Config, PRESETS, "published", **given)


def saved(cfg, run):
    """The result file of a run, as `python -m experiments.publish` reads it."""
    return common.read_json(common.ROOT / cfg.out / run / "result.json", "metrics", "config")


def matrices_by_hand(kernel, P, tau):
    """A, B, C (lists of 4 scalars) of the first seed at one tau, as the algorithms are printed."""
    P = {name: value[0] for name, value in P.items()}
    if kernel == "hypernet":
        h = torch.tensor([wave(2 * math.pi * m * tau) for wave in (math.sin, math.cos)
                          for m in range(64)], dtype=torch.float64)
        for layer in range(1, 5):
            z = P[f"W{layer}"] @ h + P[f"b{layer}"][:, 0]
            h = z / (1 + torch.exp(-z))

        def uvflat(q):
            U, V = [[q[0], q[1]], [q[2], q[3]]], [[q[4], q[5]], [q[6], q[7]]]
            return [sum(U[i][r] * V[r][j] for r in range(2)) for i in range(2) for j in range(2)]

        beta_A = 0.5 / (1 + math.exp(-P["beta_A_param"]))
        shift = P["W_A"] @ h
        A = [-torch.exp(P["A_log_base"][i, 0] + beta_A * torch.tanh(shift[i])) for i in range(4)]
        base = uvflat([*P["U_base"].flatten(), *P["V_base"].flatten()])
        flat = {name: uvflat(P[name] @ h) for name in synth_lpv.HEADS if name != "W_A"}
        B = [base[i] * (1 + P["alpha_B"].item() * torch.tanh(flat["W_B_scale"][i]))
             + P["beta_B"].item() * torch.tanh(flat["W_B_shift"][i]) for i in range(4)]
        C = [1 + P["alpha_C"].item() * torch.tanh(flat["W_C_scale"][i])
             + P["beta_C"].item() * torch.tanh(flat["W_C_shift"][i]) for i in range(4)]
        return A, B, C
    if kernel == "chebyshev":
        z = 2 * tau - 1
        basis = [1.0, z, 2 * z * z - 1]
    else:
        exponent = math.log1p(math.exp(P["alpha"])) + 1e-4
        basis = [math.sqrt((1 if k == 0 else 2) / 256) * math.cos(math.pi * k * tau)
                 * (k + 1) ** -exponent for k in range(8)]
    theta = P["theta"]                       # rows: A_1..4, U_11, U_12, U_21, .., U_42, V_1, V_2
    shift = [sum(basis[k] * theta[c, 1 + k] for k in range(len(basis))) for c in range(14)]
    value = [theta[c, 0] + P["beta_A" if c < 4 else "beta_B"].item() * torch.tanh(shift[c])
             for c in range(14)]
    B = [sum(value[4 + 2 * i + r] * value[12 + r] for r in range(2)) for i in range(4)]
    return [-torch.exp(v) for v in value[:4]], B, [1.0] * 4


def roll_out_by_hand(kernel, P, tau, u):
    """y_s of one trajectory, tau and u lists of floats."""
    x = [0.0] * 4
    ys = []
    for tau_s, u_s in zip(tau, u):
        A, B, C = matrices_by_hand(kernel, P, tau_s)
        for i in range(4):
            Abar = torch.exp(A[i] * 0.1)
            x[i] = Abar * x[i] + (Abar - 1) / (A[i] + 1e-7) * B[i] * u_s
        ys.append(sum(C[i] * x[i] for i in range(4)))
    return torch.stack(ys)


@pytest.mark.parametrize("kernel", SYSTEMS)
def test_roll_out_and_operator_are_the_algorithms_in_a_scalar_loop(kernel):
    P = random_system(kernel)
    cfg = Config(noise=0.0)
    tau, u, y = synth_lpv.observe(kernel, 7, P, 3, cfg)
    want = torch.stack([roll_out_by_hand(kernel, P, tau[0, :, b].tolist(), u[0, :, b].tolist())
                        for b in range(3)], 1)
    assert torch.allclose(y[0], want, rtol=0, atol=1e-11 * want.abs().max())
    M = synth_lpv.markov_operator(kernel, P)[0]
    assert M.shape == (15, 200)
    for m in (0, 57, 199):
        A, B, C = matrices_by_hand(kernel, P, m / 199)
        for k in (0, 1, 14):
            Abar = [math.exp(a * 0.1) for a in A]
            want = sum(C[i] * Abar[i] ** k * (Abar[i] - 1) / (A[i] + 1e-7) * B[i] for i in range(4))
            assert abs(M[k, m] - want) < 1e-11


@pytest.mark.parametrize("kernel", BASES)
def test_sensitivities_are_those_of_autograd_through_the_scalar_loop(kernel):
    P = random_system(kernel)
    cfg = Config(noise=0.3)
    tau, u, y = (v[:, :5] for v in synth_lpv.observe(kernel, 7, P, 2, cfg))
    features = SYSTEMS[kernel].features(tau.flatten(1))
    JTJ, JTr, rTr = synth_lpv.normal_equations(P, features, u, y)

    def outputs(theta):
        return torch.cat([roll_out_by_hand(kernel, P | {"theta": theta}, tau[0, :, b].tolist(),
                                           u[0, :, b].tolist()) for b in range(2)])

    J = torch.autograd.functional.jacobian(outputs, P["theta"])[:, 0].flatten(1)
    r = y[0].mT.flatten() - outputs(P["theta"])
    for got, want in ((JTJ[0], J.mT @ J), (JTr[0], J.mT @ r), (rTr[0], r @ r)):
        assert torch.allclose(got, want, rtol=0, atol=1e-11 * want.abs().max())


@pytest.mark.parametrize("kernel", SYSTEMS)
def test_no_noise_and_the_true_start_give_no_error(kernel):
    cfg = Config(sizes=(10,), seeds=2, noise=0.0, start_noise=0.0, steps=30, iterations=10)
    assert max(recover(kernel, cfg)["sizes"][10]["moe"]) < 1e-5


@pytest.mark.parametrize("kernel", BASES)
def test_without_noise_levenberg_marquardt_finds_the_operator_from_a_noisy_start(kernel):
    cfg = Config(sizes=(200,), seeds=2, noise=0.0, iterations=60)
    record = recover(kernel, cfg)
    for start, end in zip(record["start"], record["sizes"][200]["moe"]):
        assert end < 0.03 * start


def test_results_repeat_bit_for_bit_whatever_else_is_run():
    cfg = Config(sizes=(5, 9), seeds=2, steps=25, iterations=4)
    together = synth_lpv.main(cfg)["kernels"]
    for kernel in SYSTEMS:
        alone = recover(kernel, Config(sizes=(9,), seeds=2, steps=25, iterations=4))
        assert alone["sizes"][9] == together[kernel]["sizes"][9]
        assert alone["start"] == together[kernel]["start"]


def test_seeds_differ_and_are_those_of_the_paper_and_each_size_has_its_own_data():
    record = recover("chebyshev", Config(sizes=(3,), seeds=3, iterations=1))
    assert record["seeds"] == [42, 142, 242]
    assert len(set(record["sizes"][3]["moe"])) == 3
    few, many = (synth_lpv.observe("chebyshev", 42, random_system("chebyshev"), size, Config())
                 for size in (1, 2))
    assert not set(few[0].flatten().tolist()) & set(many[0].flatten().tolist())


@pytest.mark.parametrize("kernel", SYSTEMS)
def test_one_trajectory_is_enough_to_run_and_one_seed_has_no_interval(kernel):
    cfg = Config(kernel=(kernel,), sizes=(1,), seeds=1, steps=5, iterations=5)
    result = synth_lpv.main(cfg)
    assert math.isfinite(result["kernels"][kernel]["sizes"][1]["moe"][0])
    assert "n/a" in result["table"] and "nan" not in result["table"].lower()
    assert saved(cfg, "recovery")["metrics"]["summary"][kernel]["moe"][0][1] is None


def test_a_fit_that_diverges_is_left_out_of_the_mean_and_n_says_so():
    cfg = Config(kernel=("chebyshev",), sizes=(4, 8), seeds=3, iterations=3)
    record = recover("chebyshev", cfg)
    for bad in (math.nan, math.inf, 11 * record["norm"][1]):
        record["sizes"][8]["moe"][1] = bad
        summary = summarise(record)
        others = [record["sizes"][8]["moe"][i] for i in (0, 2)]
        assert summary["moe"][1][0] == pytest.approx(np.mean(others), rel=1e-12)
        assert summary["moe"][1][2] == 2 and summary["moe"][0][2] == 3
        assert summary["seed_rates"][0][2] == 2
        text = recovery_table({"chebyshev": summary}, cfg)
        assert summary["diverged"] == [0, 1]
        assert "(n = 2)" in text and "nan" not in text and "inf" not in text.split("\n\n")[0]


def test_a_rate_that_is_far_too_high_does_diverge():
    cfg = Config(kernel=("dct",), sizes=(4,), seeds=2, fit="adam", lr=1e3, hold_out=0.0, steps=20)
    result = synth_lpv.main(cfg)
    assert "n/a (n = 0)" in result["table"] and "nan" not in result["table"]


def test_the_held_out_trajectories_stop_a_fit_that_only_gets_worse():
    kept, spent = (recover("hypernet", Config(sizes=(10,), seeds=2, lr=1.0, steps=20, hold_out=h))
                   for h in (0.2, 0.0))
    assert max(kept["sizes"][10]["moe"]) <= max(kept["start"])
    assert min(spent["sizes"][10]["moe"]) > 1.1 * max(spent["start"])


def test_the_bound_of_a_linear_model_is_the_textbook_one():
    X = torch.randn(3, 50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = synth_lpv.cramer_rao(X, G, 0.3)
    for i in range(3):
        covariance = 0.09 * np.linalg.inv((X[i].mT @ X[i]).numpy())
        assert got[i].item() == pytest.approx(np.trace(G[i].numpy() @ covariance @ G[i].mT.numpy()))


def test_there_is_no_bound_where_a_parameter_is_not_seen():
    X = torch.zeros(2, 5, 2, dtype=torch.float64)
    X[:, :, 0] = 2
    X[1, 0, 1] = 1                                     # of the first system the second is not seen
    G = torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    got = synth_lpv.cramer_rao(X, G, 1.0)
    want = np.trace(np.linalg.inv((X[1].mT @ X[1]).numpy()))
    assert got[0].isnan() and got[1].item() == pytest.approx(want)


def test_there_is_no_bound_with_fewer_observations_than_parameters():
    cfg = Config(kernel=BASES, sizes=(1, 2, 30), seeds=2, iterations=2)
    result = synth_lpv.main(cfg)
    for kernel in BASES:                               # 20 and 40 observations, 56 or 126 numbers
        sizes = result["kernels"][kernel]["sizes"]
        assert all(math.isnan(bound) for size in (1, 2) for bound in sizes[size]["bound"])
        assert all(0 < bound < 1 for bound in sizes[30]["bound"])
        found = saved(cfg, "recovery")["metrics"]
        assert found["kernels"][kernel]["sizes"]["1"]["bound"] == [None, None]
        assert found["summary"][kernel]["bound"][:2] == [None, None]
        assert found["summary"][kernel]["ratio"][:2] == [None, None]
        assert found["summary"][kernel]["bound_rates"] == [None, None]
    rows = [row for row in result["table"].splitlines() if "bound, RMS" in row]
    assert len(rows) == 4                              # the bound and the ratio, of two kernels
    for row in rows:
        cells = row.split(" | ")
        assert cells[1:3] == ["n/a", "n/a"] and float(cells[3]) > 0
    assert "nan" not in result["table"]


def test_there_is_no_bound_where_enough_observations_show_too_few_frozen_systems():
    P = random_system("chebyshev")
    G = synth_lpv.operator_jacobian("chebyshev", P)
    bounds = []
    for size in (4, 100):                              # 4 frozen tau show at most 8 numbers each
        tau, u, y = synth_lpv.observe("chebyshev", 42, P, size, Config(constant_tau=True))
        features = SYSTEMS["chebyshev"].features(tau.flatten(1))
        R = synth_lpv.information_root(P, features, u)
        bounds.append(synth_lpv.cramer_rao(R, G, 0.1).item())
    assert math.isnan(bounds[0]) and 0 < bounds[1] < 1


def operator_by_numbers(kernel, numbers, P, tau, lags):
    """(y_s or M_k) of Algorithm 6 or 7 with A_log etc. taken from a flat list of numbers: theta row
    by row, beta_A, beta_B. Plain numpy, which takes complex numbers as well."""
    theta = numbers[:-2].reshape(14, -1)
    beta = np.concatenate([numbers[-2].repeat(4), numbers[-1].repeat(10)])
    k = np.arange(theta.shape[1] - 1)
    if kernel == "chebyshev":
        z = 2 * tau[..., None] - 1
        basis = np.concatenate([z ** 0, z, 2 * z * z - 1], -1)
    else:
        decay = np.log1p(np.exp(P["alpha"].item())) + 1e-4
        norm = np.sqrt(np.where(k == 0, 1, 2) / 256)
        basis = norm * np.cos(np.pi * k * tau[..., None]) * (k + 1.0) ** -decay
    value = theta[:, 0] + beta * np.tanh(basis @ theta[:, 1:].T)          # tau's shape, c
    A = -np.exp(value[..., :4])
    B = (value[..., 4:12].reshape(*tau.shape, 4, 2) * value[..., None, 12:]).sum(-1)
    Abar = np.exp(A * 0.1)
    Bbar = (Abar - 1) / (A + 1e-7) * B
    if lags:
        return np.stack([(Abar ** lag * Bbar).sum(-1) for lag in range(15)])
    return Abar, Bbar


def bound_by_complex_steps(kernel, P, tau, u, noise, start):
    """The bound on the root mean square of MOE, with theta and the betas unknown, from J and G
    whose columns are Im f(p + 1e-30 i) / 1e-30: a difference quotient without cancellation.

    start: the deviation of a measurement of each number, or None.
    """
    numbers = np.concatenate([P[name].flatten().numpy() for name in ("theta", "beta_A", "beta_B")])
    J = []
    G = []
    for p in range(len(numbers)):
        moved = numbers.astype(complex)
        moved[p] += 1e-30j
        Abar, Bbar = operator_by_numbers(kernel, moved, P, tau, lags=False)       # l b n
        x = np.zeros_like(Abar[0])
        y = []
        for s in range(len(u)):
            x = Abar[s] * x + Bbar[s] * u[s, :, None]
            y.append(x.sum(-1))
        J.append(np.stack(y).imag.flatten() / 1e-30)
        M = operator_by_numbers(kernel, moved, P, np.linspace(0, 1, 200), lags=True)
        G.append(M.imag.flatten() / 1e-30 / 200 ** 0.5)
    J = np.array(J).T
    if start is not None:
        J = np.concatenate([J, np.diag(noise / start)])
    # The least-norm solution, in units in which all columns of J are as long.
    unit = 1 / np.linalg.norm(J, axis=0)
    inverse = np.linalg.pinv(J * unit, rcond=1e-14)
    return noise * np.linalg.norm((np.array(G).T * unit) @ inverse)


@pytest.mark.parametrize("kernel", BASES)
@pytest.mark.parametrize("seed", (0, 42 * 14))
def test_the_bound_under_the_published_settings_is_that_of_complex_steps(kernel, seed):
    cfg = published()
    P = random_system(kernel, seed, "public")
    tau, u, y = synth_lpv.observe(kernel, seed, P, 50, cfg)
    features = SYSTEMS[kernel].features(tau.flatten(1))
    found = synth_lpv.least_rms_errors(kernel, [P], features, u, cfg)
    start = np.full(P["theta"].numel() + 2, 0.1)
    start[-2:] = 0.02                                  # of the betas
    for name, deviations in (("bound", None), ("bound_with_start", start)):
        want = bound_by_complex_steps(kernel, P, tau[0].numpy(), u[0].numpy(), 0.1, deviations)
        # Singular values go down to 1e-12 of the largest, and carry 1e-15 of it as rounding.
        assert found[name].item() == pytest.approx(want, rel=1e-3), name


def test_the_start_of_each_parameter_counts_with_its_own_noise():
    P = random_system("dct")
    got = synth_lpv.start_deviations(P, Config(start_noise=0.3))[0].view(14, 9)
    assert (got[:, 0] == 0.3).all()                    # absolute on the bases
    rms = math.sqrt(sum(v ** 2 for v in P["theta"][0, :, 1:].flatten().tolist()) / 112)
    assert torch.allclose(got[:, 1:], torch.tensor(0.3 * rms).double())
    got = synth_lpv.start_deviations(P, published())[0]
    assert got.tolist() == pytest.approx([0.1] * 126 + [0.02] * 2)


def test_a_start_without_noise_is_the_truth_and_a_wild_one_says_nothing():
    P = random_system("chebyshev")
    tau, u, y = synth_lpv.observe("chebyshev", 42, P, 100, Config())
    features = SYSTEMS["chebyshev"].features(tau.flatten(1))
    bounds = {}
    for noise in (0.0, 0.1, 1e6):
        found = synth_lpv.least_rms_errors("chebyshev", [P], features, u, Config(start_noise=noise))
        bounds[noise] = found["bound_with_start"].item()
    assert bounds[0.0] == 0 and 0 < bounds[0.1] < bounds[1e6]
    assert bounds[1e6] == pytest.approx(found["bound"].item(), rel=1e-6)


class PublicHypernet(torch.nn.Module):
    """The public script's, from modules of torch: one Linear for each head, with a bias."""

    def __init__(self, P, width):
        super().__init__()
        sizes = [128, width, width, width, width]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(*pair, dtype=torch.float64) for pair in zip(sizes, sizes[1:]))
        self.heads = torch.nn.ModuleDict(
            {name: torch.nn.Linear(width, n, dtype=torch.float64)
             for name, n in synth_lpv.HEADS.items()})
        first = 0
        with torch.no_grad():
            for k, layer in enumerate(self.layers, 1):
                layer.weight.copy_(P[f"W{k}"][0])
                layer.bias.copy_(P[f"b{k}"][0, :, 0])
            for name, head in self.heads.items():
                head.weight.copy_(P[name][0])
                head.bias.copy_(P["b_heads"][0, first:first + head.out_features, 0])
                first += head.out_features
        self.P = {name: value[0] for name, value in P.items()}

    def forward(self, tau):
        angles = 2 * math.pi * tau[:, None] * torch.arange(64)
        h = torch.cat([angles.sin(), angles.cos()], -1)
        for layer in self.layers:
            h = torch.nn.functional.silu(layer(h))

        def flat(q):
            return (q[:, :4].reshape(-1, 2, 2) @ q[:, 4:].reshape(-1, 2, 2)).flatten(1)

        heads = {name: head(h) for name, head in self.heads.items()}
        P = {name: value.flatten() for name, value in self.P.items()}
        A = -torch.exp(P["A_log_base"]
                       + 0.5 * torch.sigmoid(P["beta_A_param"]) * torch.tanh(heads["W_A"]))
        base = (self.P["U_base"] @ self.P["V_base"]).flatten()
        B = (base * (1 + P["alpha_B"] * torch.tanh(flat(heads["W_B_scale"])))
             + P["beta_B"] * torch.tanh(flat(heads["W_B_shift"])))
        C = (1 + P["alpha_C"] * torch.tanh(flat(heads["W_C_scale"]))
             + P["beta_C"] * torch.tanh(flat(heads["W_C_shift"])))
        return A, B, C


def test_the_published_hypernet_is_that_of_torch_modules_and_starts_as_they_do():
    width = 24
    P = synth_lpv.random_truth("hypernet", 42, "public", width)
    tau = torch.linspace(0, 1, 7, dtype=torch.float64)
    got = synth_lpv.hypernet_matrices(P, synth_lpv.embedding(tau[None]))
    for ours, theirs in zip(got, PublicHypernet(P, width)(tau)):
        torch.testing.assert_close(ours[0], theirs.mT, rtol=1e-12, atol=1e-14)
    assert P["A_log_base"].flatten().tolist() == pytest.approx([-2, -4 / 3, -2 / 3, 0])
    assert all(P[name].item() == 0.2 for name in synth_lpv.SCALARS)
    for name, bound in (("W1", 128 ** -0.5), ("b1", 128 ** -0.5), ("W3", 24 ** -0.5),
                        ("W_C_shift", 24 ** -0.5), ("b_heads", 24 ** -0.5)):
        largest = P[name].abs().max().item()           # torch.nn.Linear: uniform within this bound
        assert 0.8 * bound < largest <= bound, name


def test_the_published_bounds_are_those_of_a_fit_and_of_no_fit():
    fitted, not_fitted = (
        synth_lpv.main(common.from_preset(Config, PRESETS, preset, sizes=(30,), seeds=2, **steps))
        for preset, steps in (("published", {"steps": 3}), ("published_bound", {})))
    for kernel in BASES:
        row, bounds = (found["kernels"][kernel]["sizes"][30] for found in (fitted, not_fitted))
        assert row["bound"] == bounds["bound"]
        assert row["bound_with_start"] == bounds["bound_with_start"]
        start = not_fitted["kernels"][kernel]["start"]          # Adam holds numbers in float32
        assert bounds["moe"] == pytest.approx(start, rel=1e-4) and row["moe"] != bounds["moe"]


def test_the_published_hypernet_has_three_seeds_of_the_three_smallest_sizes():
    cfg = common.from_preset(Config, PRESETS, "published_hypernet")
    usual = published()
    assert (cfg.kernel, cfg.seeds, cfg.sizes, cfg.width) == (("hypernet",), 3, (50, 100, 200), 256)
    assert dataclasses.replace(cfg, kernel=usual.kernel, seeds=usual.seeds, sizes=usual.sizes,
                               preset=usual.preset) == usual


def published_results(name):
    path = common.SOURCE / "results" / "synth_lpv" / f"{name}.json"
    return common.read_json(path, "metrics", "config")


@pytest.mark.parametrize("kernel", BASES)
@pytest.mark.parametrize("size", (50, 1600))
def test_the_published_bounds_are_found_again(kernel, size):
    published_row = published_results("recovery")["metrics"]["kernels"][kernel]["sizes"][str(size)]
    for seed, want in zip(common.SEEDS[:3], published_row["bound"]):
        P = random_system(kernel, seed)
        tau, u, y = synth_lpv.observe(kernel, seed, P, size, Config())
        features = SYSTEMS[kernel].features(tau.flatten(1))
        got = synth_lpv.least_rms_errors(kernel, [P], features, u, Config())["bound"].item()
        assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", ("recovery", "published", "published_hypernet", "adam"))
def test_the_published_table_is_made_again_from_the_published_records(name):
    found = published_results(name)
    records = found["metrics"]["kernels"]
    summaries = {kernel: summarise(record) for kernel, record in records.items()}
    settings = found["config"]
    cfg = Config(public_scaling=name.startswith("published"), seeds=settings["seeds"],
                 sizes=tuple(settings["sizes"]))
    got = recovery_table(summaries, cfg).partition("\n\n")[0].splitlines()
    want = found["metrics"]["table"].partition("\n\n")[0].splitlines()
    assert got[1:] == want[1:]                         # one head says "least squares"
    for kernel, summary in summaries.items():
        before = found["metrics"]["summary"][kernel]
        assert set(summary) == set(before)
        for key, value in summary.items():
            assert np.allclose(value, before[key], rtol=1e-9, atol=0), (kernel, key)


@pytest.mark.parametrize("kernel", BASES)
def test_the_bound_does_not_change_when_U_V_and_beta_B_are_rescaled_together(kernel):
    bounds = []
    for scale in (1.0, 30.0):
        P = random_system(kernel)
        P["theta"][:, 4:, 0] *= scale
        P["beta_B"] *= scale
        tau, u, y = synth_lpv.observe(kernel, 7, P, 200, Config())
        features = SYSTEMS[kernel].features(tau.flatten(1))
        R = synth_lpv.information_root(P, features, u)
        bounds.append(synth_lpv.cramer_rao(R, synth_lpv.operator_jacobian(kernel, P), 0.1).item())
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-6)  # eigenvalues span 1e10


def test_the_operator_jacobian_is_the_slope_of_the_error():
    P = random_system("dct")
    G = synth_lpv.operator_jacobian("dct", P)[0]
    step = torch.randn(P["theta"].shape, generator=torch.Generator().manual_seed(0)).double()
    moved = P | {"theta": P["theta"] + 1e-6 * step}
    error = synth_lpv.operator_error(*(synth_lpv.markov_operator("dct", p) for p in (moved, P)))
    assert (1e-6 * (G @ step.flatten()).norm()).item() == pytest.approx(error.item(), rel=1e-4)


def test_alpha_of_the_dct_is_a_gauge_of_its_coefficients():
    P = random_system("dct")
    k = torch.arange(8.0).double()
    softplus = [math.log1p(math.exp(a)) for a in (P["alpha"].item(), 1.3)]
    moved = {**P, "alpha": torch.full_like(P["alpha"], 1.3), "theta": P["theta"].clone()}
    moved["theta"][..., 1:] *= (k + 1) ** (softplus[1] - softplus[0])
    error = synth_lpv.operator_error(*(synth_lpv.markov_operator("dct", p) for p in (moved, P)))
    assert error.item() < 1e-12


def test_excitation_is_the_least_eigenvalue_of_a_moment_matrix_written_as_loops():
    tau, u, _ = synth_lpv.observe("dct", 3, random_system("dct"), 60, Config())
    moment = np.zeros((120, 120))
    n = 0
    for b in range(60):
        for s in range(14, 20):
            psi = [1.0] + [math.sqrt(2) * math.cos(math.pi * j * tau[0, s, b]) for j in range(1, 8)]
            z = np.array([p * u[0, s - k, b].item() for p in psi for k in range(15)])
            moment += np.outer(z, z)
            n += 1
    want = np.linalg.eigvalsh(moment / n)[0]
    assert synth_lpv.excitation(tau, u).item() == pytest.approx(want, rel=1e-8)
    many = synth_lpv.observe("dct", 3, random_system("dct"), 20000, Config())[:2]
    assert 0.9 < synth_lpv.excitation(*many).item() < 1                # white noise: 1 in the limit


def test_summaries_recover_the_exponent_of_a_power_law():
    sizes = {n: {"moe": [0.1 * n ** -0.7, 0.2 * n ** -0.3], "public": [1.0, 1.0],
                 "kappa_pe": [0.5, 0.5], "bound": [n ** -0.5] * 2} for n in (50, 100, 400)}
    summary = summarise({"norm": [1, 1], "start": [0.5, 0.0399], "constant": [1, 1],
                         "sizes": sizes})
    assert summary["bound_rates"] == pytest.approx([-0.5, -0.5])
    for mean, error, n in summary["seed_rates"]:
        assert (mean, error, n) == (pytest.approx(-0.5), pytest.approx(1.96 * 0.2), 2)
    assert summary["better"] == [0.5, 0.5, 1.0]        # the second seed: 0.062, 0.050, 0.033
    square = [np.mean([(m / b) ** 2 for m, b in zip(r["moe"], r["bound"])]) for r in sizes.values()]
    assert summary["ratio"] == pytest.approx(np.sqrt(square))


def test_constant_tau_holds_tau_along_a_trajectory_only():
    P = random_system("chebyshev")
    frozen, _, _ = synth_lpv.observe("chebyshev", 1, P, 6, Config(constant_tau=True))
    assert (frozen == frozen[:, :1]).all() and len(frozen.unique()) == 6
    assert len(synth_lpv.observe("chebyshev", 1, P, 6, Config())[0].unique()) == 120


def test_the_start_has_the_noise_that_it_says():
    P = random_system("dct")
    cfg = Config(start_noise=0.1)
    moves = torch.stack([synth_lpv.noisy_copy(s, P, ["theta"], cfg)["theta"] - P["theta"]
                         for s in range(200)])
    assert moves[..., 0].std().item() == pytest.approx(0.1, rel=0.1)   # absolute on the bases
    rms = P["theta"][..., 1:].square().mean().sqrt().item()
    assert moves[..., 1:].std().item() == pytest.approx(0.1 * rms, rel=0.05)
    public = random_system("dct", truth="public")
    starts = [synth_lpv.noisy_copy(s, public, ["theta", "alpha"], published()) for s in range(200)]
    moves = torch.stack([start["alpha"] for start in starts]) - public["alpha"]
    assert moves.std().item() == pytest.approx(0.02, rel=0.2)


def test_published_runs_the_public_seeds_and_prints_its_scaling():
    cfg = published(sizes=(4,), seeds=2, steps=3)
    result = synth_lpv.main(cfg)
    assert list(result["kernels"]) == ["chebyshev", "dct"]
    assert result["kernels"]["dct"]["seeds"] == [0, 42] and "scaling" in result["table"]
    config = saved(cfg, "published")["config"]
    assert (config["lr"], config["batch"], config["steps"]) == (0.08, 0, 3)   # a flag wins
    row = result["kernels"]["dct"]["sizes"][4]
    assert all(p > m for p, m in zip(row["public"], row["moe"]))


def test_published_fits_alpha_and_the_betas_and_least_squares_refuses_to():
    P = random_system("dct", truth="public")
    cfg = published()
    assert synth_lpv.learned_parameters("dct", P, cfg) == ["theta", "beta_A", "beta_B", "alpha"]
    assert synth_lpv.learned_parameters("dct", P, Config(fit="adam")) == ["theta"]
    with pytest.raises(common.UserError, match="^--fit: got lm, .*--no-fit-scalars"):
        synth_lpv.main(published(fit="lm"))
    row = synth_lpv.main(published(fit="lm", fit_scalars=False, sizes=(50,), seeds=1, iterations=2))
    assert "bound" in row["kernels"]["chebyshev"]["sizes"][50]


def configured(monkeypatch, *argv):
    """The settings that a command line ends in."""
    monkeypatch.setattr(sys, "argv", ["synth_lpv.py", *argv])
    return common.run_cli(Config, lambda cfg: cfg, PRESETS)


def test_a_flag_wins_over_a_preset_also_where_it_equals_the_default(monkeypatch):
    assert configured(monkeypatch) == Config()
    usual = Config()
    preset = published()
    assert (preset.lr, preset.steps) != (usual.lr, usual.steps)
    cfg = configured(monkeypatch, "--preset", "published", "--lr", "1e-3", "--steps", "800")
    assert (cfg.lr, cfg.steps) == (usual.lr, usual.steps)
    assert dataclasses.replace(cfg, lr=preset.lr, steps=preset.steps) == preset
    cfg = configured(monkeypatch, "--seeds", "15", "--preset", "quick")
    assert cfg == Config(preset="quick", steps=150, iterations=40, seeds=15)


@pytest.mark.parametrize("flag, allowed", (("--kernel", "chebyshev"), ("--fit", "lm"),
                                           ("--truth", "public"), ("--preset", "quick")))
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(monkeypatch, capsys, flag,
                                                                    allowed):
    with pytest.raises(SystemExit) as stop:
        configured(monkeypatch, flag, "fourier")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "fourier" in said and allowed in said


def test_result_and_figure_lie_in_the_folder_of_the_run_and_the_last_line_names_them(capsys):
    cfg = Config(kernel=("chebyshev",), sizes=(4, 8), seeds=2, iterations=2)
    result = synth_lpv.main(cfg)
    folder = common.ROOT / "runs/synth_lpv/recovery"
    assert {path.name for path in folder.iterdir()} == {"result.json", "fig2_recovery.png"}
    assert (folder / "fig2_recovery.png").stat().st_size > 10_000
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "wrote runs/synth_lpv/recovery/result.json and fig2_recovery.png"
    found = saved(cfg, "recovery")
    assert found["metrics"]["table"] == result["table"] and found["config"]["iterations"] == 2
    assert found["script"] == "synth_lpv"
    assert "N^-1/4" in result["table"] and "Cramer-Rao" in result["table"]


@pytest.mark.parametrize("given, name", (
    ({}, "recovery"), ({"fit": "adam"}, "adam"), ({"preset": "published"}, "published"),
    ({"preset": "published_hypernet"}, "published_hypernet"),
    ({"preset": "published_bound"}, "published_bound"),
    ({"constant_tau": True}, "recovery_constant_tau"), ({"preset": "quick"}, "recovery_quick"),
    ({"fit": "adam", "constant_tau": True, "preset": "quick"}, "adam_constant_tau_quick")))
def test_each_kind_of_run_has_its_own_name(given, name):
    assert synth_lpv.run_name(Config(**given)) == name


def test_the_result_is_written_before_the_figure_is_drawn(monkeypatch):
    def draw(*_):
        raise RuntimeError("no figure")

    monkeypatch.setattr(synth_lpv, "draw_recovery", draw)
    cfg = Config(kernel=("dct",), sizes=(4,), seeds=2, iterations=1)
    with pytest.raises(RuntimeError, match="no figure"):
        synth_lpv.main(cfg)
    assert "dct" in saved(cfg, "recovery")["metrics"]["summary"]


def test_without_noise_the_bound_is_zero_and_the_ratio_to_it_n_a(recwarn):
    cfg = Config(kernel=("dct",), sizes=(20, 40), seeds=2, noise=0.0, iterations=1)
    table = synth_lpv.main(cfg)["table"]
    assert "| Cramer-Rao bound, RMS | 0.0000 | 0.0000 | n/a | n/a |" in table
    assert "| MOE / bound, RMS | n/a | n/a |" in table
    assert not [str(w.message) for w in recwarn if "divide" in str(w.message)]


def test_rates_are_n_a_where_an_error_is_missing():
    assert synth_lpv.decay_rates([1, 4], [1.0, 0.5]) == pytest.approx([-0.5, -0.5])
    for sizes, errors in (([1], [1.0]), ([1, 4], [math.nan, 1.0]), ([1, 4], [1.0, 0.0])):
        assert all(math.isnan(rate) for rate in synth_lpv.decay_rates(sizes, errors))
    cfg = Config(kernel=("dct",), sizes=(4, 8), seeds=2, fit="adam", lr=1e3, hold_out=0.0, steps=20)
    table = synth_lpv.main(cfg)["table"]               # every fit diverged
    assert "| n/a (seeds n/a) |" in table and "nan" not in table


@pytest.mark.parametrize("wrong", ({"sizes": (0,)}, {"seeds": 16}, {"hold_out": 1.0}, {"steps": -1},
                                   {"sizes": ()}, {"kernel": ()}, {"batch": -1},
                                   {"iterations": -1}, {"lr": math.nan}))
def test_a_setting_that_cannot_be_run_is_refused(wrong):
    flag = next(iter(wrong)).replace("_", "-")
    with pytest.raises(common.UserError, match=f"^--{flag}: got .*need "):
        common.check_settings(Config(**wrong), Config())  # by the command line, before main
        synth_lpv.main(Config(**wrong))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BASES)
def test_the_fitted_error_is_within_15_percent_of_the_bound(kernel):
    summary = summarise(recover(kernel, Config(sizes=(200, 400, 800, 1600))))
    assert all(0.85 < ratio < 1.15 for ratio in summary["ratio"]), summary["ratio"]
