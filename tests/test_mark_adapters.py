"""mark_adapters.py against float64 loops over Algorithms 1 to 3; counts, bounds, gradients."""
import dataclasses
import json
import math

import numpy as np
import pytest
import scipy.fft
import torch

import mark_adapters as ma
from common import UserError
from experiments.bench import Count
from hydra_ssm import HydraBert, HydraConfig
from mark_adapters import MarkAdapter, adapter_size, make_adapter, modulation_spread

GEOMETRIES = ("hypernet", "chebyshev", "dct")
BASELINES = ("inject", "adaln", "lora")
REAL = HydraConfig()
TINY = HydraConfig(vocab_size=50, d_model=48, n_layer=2, d_state=16, headdim=8)           # 12 heads
ODD = HydraConfig(vocab_size=50, d_model=40, n_layer=3, d_state=12, headdim=8, ngroups=2)  # 10
TIMES = torch.tensor([0.0, 1e-3, 0.37, 0.5, 1.0])


@pytest.fixture
def float64():
    """Modules and constants made inside the test are float64 throughout."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def randomised(adapter, seed=0):
    """Every parameter random, biases and magnitudes too, at sizes that leave tanh unsaturated."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in adapter.named_parameters():
            fan_in = p.shape[1] if p.ndim == 3 else p.shape[-1]
            small = name in ("magnitude", "alpha") or "bias" in name
            scale = 0.5 if small else 1.5 * fan_in ** -0.5
            p.copy_(scale * torch.randn(p.shape, generator=generator))
    return adapter


def fields(modulation):
    return {name: value for name, value in vars(modulation).items() if value is not None}


# ---- the oracle: one layer and one sequence at a time, straight from the paper -------------------


def silu(x):
    return x / (1 + np.exp(-x))


def embed(adapter, t):
    """c_t from a scalar t: sinusoid of 1000 t, frequencies 10,000^(-j/64), sin before cos."""
    angles = [1000 * t * 10_000 ** (-j / 64) for j in range(64)]
    wave = np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    W = {name: p.detach().double().numpy() for name, p in adapter.timestep.named_parameters()}
    hidden = silu(W["lower.weight"] @ wave + W["lower.bias"])
    return W["upper.weight"] @ hidden + W["upper.bias"]


def oracle(adapter, config, cfg, layer, c):
    """Algorithms 1 to 3 for one layer and one c_t, in float64: the fields of a Modulation."""
    def linear(module, x):
        weight, bias = (p[layer].detach().double().numpy() for p in (module.weight, module.bias))
        return np.array([sum(weight[i, o] * x[i] for i in range(len(x))) + bias[0, o]
                         for o in range(weight.shape[1])])

    h = c
    for module in adapter.mlp:
        h = silu(linear(module, h))
        if cfg.mlp_norm:
            h = h / (np.sqrt(np.mean(h ** 2)) + 1e-6)
    s = cfg.n_shifts or (12 if config.nheads % 12 == 0 else config.nheads)
    width = config.ngroups * config.d_state
    a_size, v_size = {16: (4, 4), 24: (4, 6), 64: (8, 8)}[width]
    r_size = cfg.rank
    per_matrix = a_size * r_size + r_size * v_size

    def factors(vector, copy, m):
        """U (a, r) and V (r, v) of matrix m in copy number `copy` of a packed vector."""
        start = (copy * 4 + m) * per_matrix
        U = vector[start:start + a_size * r_size].reshape(a_size, r_size)
        V = vector[start + a_size * r_size:start + per_matrix].reshape(r_size, v_size)
        return U, V

    if adapter.kernel == "hypernet":
        shifts = linear(adapter.shift, h).reshape(3, s)
        UV = linear(adapter.UV, h)
        pairs = [factors(UV, 0, m) for m in range(4)]
    elif adapter.kernel == "chebyshev":
        K = cfg.degree
        z = np.tanh(linear(adapter.z, h))
        T = np.array([np.cos(k * np.arccos(z)) for k in range(K)])
        coefficients = linear(adapter.shift, h).reshape(3, K, s)
        shifts = np.array([[sum(coefficients[m, k, i] * T[k, i] for k in range(K))
                            for i in range(s)] for m in range(3)])
        UV = linear(adapter.UV, h)
        pairs = []
        for m in range(4):
            U, V = factors(UV, 0, m)
            for k in range(K):
                U_k, V_k = factors(UV, 1 + k, m)
                U, V = U + U_k * T[k].mean(), V + V_k * T[k].mean()
            pairs.append((U, V))
    else:
        alpha = adapter.alpha[layer].item()
        exponent = math.log1p(math.exp(alpha)) + 1e-4
        spectrum = linear(adapter.spectrum, h)
        N = cfg.timepoints
        u = np.zeros(N)
        for f in range(cfg.n_freqs):
            norm = math.sqrt((1 if f == 0 else 2) / N)
            for i in range(N):
                u[i] += (spectrum[f] / (f + 1) ** exponent
                         * norm * math.cos(math.pi * f * (2 * i + 1) / (2 * N)))
        shifts = linear(adapter.shift, u).reshape(3, s)
        base, basis = linear(adapter.UV, h), linear(adapter.UV_basis, u)
        pairs = [[x + y for x, y in zip(factors(base, 0, m), factors(basis, 0, m))]
                 for m in range(4)]

    raw = adapter.magnitude[layer].detach().double().numpy()
    beta = [0.5 / (1 + math.exp(-raw[0])), *raw[1:]]
    out = {}
    for m, name in enumerate(("A", "dt", "D")):
        out[name] = np.array([beta[m] * math.tanh(shifts[m, head * s // config.nheads])
                              for head in range(config.nheads)])
    for m, name in enumerate(("B_scale", "B_shift", "C_scale", "C_shift")):
        product = (pairs[m][0] @ pairs[m][1]).flatten()
        free = name.endswith("shift") and not cfg.bounded_shifts
        out[name] = beta[3 + m] * (product if free else np.tanh(product))
        if name.endswith("scale"):
            out[name] = 1 + out[name]
    return out


CASES = [(config, dict(mlp_dim=20, mlp_norm=norm, **more)) for config, more in (
    (TINY, {}), (TINY, {"n_shifts": 4, "rank": 1, "degree": 3, "n_freqs": 3, "timepoints": 9}),
    (ODD, {}), (ODD, {"n_shifts": 5, "rank": 3, "degree": 7})) for norm in (True, False)]


def assert_is_the_oracle(adapter, config, settings, modulation, embeddings, atol):
    cfg = ma.AdapterConfig(**settings)
    assert set(fields(modulation)) == {"A", "dt", "D", *ma.MAGNITUDES[3:]}
    for layer in range(config.n_layer):
        for row, c in enumerate(embeddings):
            for name, expected in oracle(adapter, config, cfg, layer, c).items():
                got = getattr(modulation, name)[layer, row].detach().double().numpy()
                np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("kernel", GEOMETRIES)
@pytest.mark.parametrize("config, settings", CASES)
def test_the_stacked_pass_is_algorithms_1_to_3_layer_by_layer(kernel, config, settings, float64):
    adapter = randomised(make_adapter(kernel, config, **settings))
    t = TIMES[2:].double()
    embeddings = [embed(adapter, x) for x in t.tolist()]
    # 1000 t is good to 1e-13, and six layers and T_6 multiply that by a few thousand at most.
    assert_is_the_oracle(adapter, config, settings, adapter(t), embeddings, atol=1e-9)


@pytest.mark.parametrize("kernel", GEOMETRIES)
def test_float32_is_the_same_formula_to_rounding(kernel):
    adapter = randomised(make_adapter(kernel, TINY, mlp_dim=20))
    # A ready c_t: in float32 the angle 1000 t itself is only good to 3e-5.
    c = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    assert_is_the_oracle(adapter, TINY, {"mlp_dim": 20}, adapter(c), c.double().numpy(), atol=5e-5)


def test_unbounded_hypernet_frees_the_shifts_of_B_and_C_alone(float64):
    settings = dict(mlp_dim=20, bounded_shifts=False)
    adapter = randomised(make_adapter("hypernet", TINY, **settings))
    t = TIMES[2:].double()
    embeddings = [embed(adapter, x) for x in t.tolist()]
    assert_is_the_oracle(adapter, TINY, settings, adapter(t), embeddings, atol=1e-9)


def test_the_timestep_embedding_is_its_formula(float64):
    adapter = randomised(make_adapter("inject", TINY))
    expected = np.stack([embed(adapter, t) for t in TIMES.tolist()])
    np.testing.assert_allclose(adapter.timestep(TIMES.double()).detach(), expected, atol=1e-11)
    assert sum(p.numel() for p in adapter.timestep.parameters()) == 33_024


def test_a_row_does_not_depend_on_the_batch_and_c_may_be_given_ready():
    for kernel in GEOMETRIES + ("inject", "adaln"):
        adapter = randomised(make_adapter(kernel, TINY, mlp_dim=20))
        together, ready = adapter(TIMES), adapter(adapter.timestep(TIMES))
        for name, value in fields(together).items():
            assert torch.equal(value, getattr(ready, name))
            for row in range(len(TIMES)):
                alone = getattr(adapter(TIMES[row:row + 1]), name)[:, 0]
                torch.testing.assert_close(value[:, row], alone, rtol=0, atol=1e-5)


# ---- bases ---------------------------------------------------------------------------------------


def test_the_chebyshev_recurrence_is_cos_k_arccos_z():
    z = torch.linspace(-1, 1, 201, dtype=torch.float64, requires_grad=True)
    T = ma.chebyshev_basis(z, 9)
    assert T.shape == (9, 201)
    expected = torch.stack([torch.cos(k * z.detach().arccos()) for k in range(9)])
    torch.testing.assert_close(T.detach(), expected, rtol=0, atol=1e-13)
    T.sum().backward()
    assert z.grad.isfinite().all()  # arccos has none at the ends, where tanh saturates


def test_the_dct_basis_is_orthonormal_and_scipys():
    for n_freqs, points in ((8, 256), (5, 5), (1, 7)):
        basis = ma.dct_basis(n_freqs, points).double()
        torch.testing.assert_close(basis @ basis.T, torch.eye(n_freqs, dtype=torch.float64),
                                   rtol=0, atol=1e-6)  # float32
        expected = scipy.fft.dct(np.eye(points), type=2, norm="ortho", axis=0)[:n_freqs]
        np.testing.assert_allclose(basis, expected, rtol=0, atol=1e-7)


# ---- sizes ---------------------------------------------------------------------------------------


def size_by_formula(kernel, s, layers=23):
    """Table 3's sizes from the widths alone: a Linear from n to m holds (n + 1) m numbers."""
    mlp = 129 * 256 + 3 * 257 * 256
    uv = 4 * (8 * 2 + 2 * 8)
    heads = {"hypernet": 257 * (3 * s + uv),
             "chebyshev": 257 * (s + 3 * 5 * s + uv + 5 * uv),
             "dct": 257 * 8 + 1 + 257 * 3 * s + 257 * uv + 257 * uv}[kernel]
    return layers * (mlp + heads + 7)


@pytest.mark.parametrize("kernel, n_shifts, size", [
    ("hypernet", None, 6_268_765), ("chebyshev", None, 10_973_921), ("dct", None, 7_072_684),
    ("hypernet", 24, 6_481_561), ("chebyshev", 24, 12_108_833), ("dct", 24, 7_285_480),
    ("inject", None, 2_278_656), ("adaln", None, 6_835_968), ("lora", None, 6_228_768),
    ("none", None, 0)])
def test_sizes_over_the_real_backbone_are_the_published_ones(kernel, n_shifts, size):
    with torch.device("meta"):
        adapter = make_adapter(kernel, REAL, n_shifts=n_shifts, init="default")
    assert adapter_size(adapter) == size and adapter.kernel == kernel
    if kernel in GEOMETRIES:
        assert size == size_by_formula(kernel, n_shifts or 12)
    total = sum(p.numel() for p in adapter.parameters())
    assert total == size + (33_024 if hasattr(adapter, "timestep") else 0)
    assert hasattr(adapter, "timestep") == (kernel not in ("lora", "none"))
    assert set(adapter.state_dict()) == {name for name, _ in adapter.named_parameters()}


def test_lora_takes_the_rank_nearest_to_the_hypernets_size():
    for config, settings in ((TINY, {}), (TINY, {"mlp_dim": 64}), (ODD, {"mlp_dim": 64})):
        target = adapter_size(make_adapter("hypernet", config, **settings))
        rank = make_adapter("lora", config, **settings).rank
        sizes = {r: adapter_size(make_adapter("lora", config, lora_rank=r))
                 for r in range(1, 2 * rank)}
        assert rank == min(sizes, key=lambda r: abs(sizes[r] - target))


def test_near_square_factors():
    assert [ma.near_square(n) for n in (64, 16, 32, 12, 7, 1)] == [
        (8, 8), (4, 4), (4, 8), (3, 4), (1, 7), (1, 1)]


def test_each_shift_drives_neighbouring_heads():
    assert make_adapter("dct", dataclasses.replace(TINY, headdim=4)).n_shifts == 12  # of 24 heads
    assert make_adapter("dct", ODD).n_shifts == 10 == ODD.nheads
    adapter = randomised(make_adapter("hypernet", TINY, n_shifts=4))
    A = adapter(TIMES).A
    assert torch.equal(A, A[..., ::3].repeat_interleave(3, -1)) and len(A[0, 0].unique()) == 4


# ---- the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["keep", "default"])
@pytest.mark.parametrize("kernel", GEOMETRIES + BASELINES + ("none",))
def test_every_adapter_starts_as_the_identity_bit_for_bit(kernel, init):
    torch.manual_seed(0)
    model, adapter = HydraBert(TINY), make_adapter(kernel, TINY, init=init, mlp_dim=32)
    modulation = adapter(TIMES)
    for name, value in fields(modulation).items():
        if name == "lora":
            assert not value[1].any() and not value[3].any() and value[0].all() and value[2].all()
        else:
            assert value.shape[:2] == (TINY.n_layer, len(TIMES)) and value.dtype == torch.float32
            assert (value == (1.0 if name in ("B_scale", "C_scale") else 0.0)).all(), name
    ids = torch.randint(TINY.vocab_size, (len(TIMES), 19))
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids, modulation=modulation))


def test_every_magnitude_starts_at_a_fifth():
    for kernel in GEOMETRIES:
        magnitudes = make_adapter(kernel, TINY).effective_magnitudes()
        torch.testing.assert_close(magnitudes, torch.full((TINY.n_layer, 7), 0.2))


def random_loss(adapter, t, weights):
    """A fixed random linear function of everything the adapter says."""
    modulation = adapter(t)
    outputs = fields(modulation)
    if "lora" in outputs:
        in_down, in_up, out_down, out_up = modulation.lora
        outputs = {"in": in_up @ in_down, "out": out_up @ out_down}
    return sum((value * weights(name, value.shape)).sum() for name, value in outputs.items())


def fixed_weights(seed):
    cache, generator = {}, torch.Generator().manual_seed(seed)

    def weights(name, shape):
        if name not in cache:
            cache[name] = torch.randn(shape, generator=generator)
        return cache[name]
    return weights


def assert_gradients_everywhere_after_two_steps(adapter):
    optimiser = torch.optim.AdamW(adapter.parameters(), lr=1e-3)
    weights, t = fixed_weights(3), torch.rand(6, generator=torch.Generator().manual_seed(4))
    for _ in range(2):
        optimiser.zero_grad()
        random_loss(adapter, t, weights).backward()
        optimiser.step()
    optimiser.zero_grad()
    random_loss(adapter, t, weights).backward()
    for name, p in adapter.named_parameters():
        # Not only each tensor: each output unit of each layer, so also both halves of every UV.
        per_unit = p.grad.abs().sum(1) if p.ndim == 3 and "alpha" not in name else p.grad
        per_unit = per_unit.sum(-1) if p.ndim == 2 and name != "magnitude" else per_unit
        assert p.grad.isfinite().all() and per_unit.all(), name


@pytest.mark.parametrize("init", ["keep", "default"])
@pytest.mark.parametrize("config", [TINY, ODD, dataclasses.replace(TINY, n_layer=1)])
@pytest.mark.parametrize("kernel", GEOMETRIES + BASELINES)
def test_after_two_steps_every_trainable_number_can_move(kernel, config, init):
    torch.manual_seed(0)
    assert_gradients_everywhere_after_two_steps(make_adapter(kernel, config, init=init, mlp_dim=32))


def test_t_survives_the_mlp_with_init_keep_and_not_with_the_default():
    for mlp_dim in (256, 64):
        for norm in (True, False):
            torch.manual_seed(0)
            kept = make_adapter("hypernet", REAL, mlp_dim=mlp_dim, mlp_norm=norm)
            assert 0.3 < modulation_spread(kept)["hidden"] < 2
            assert kept.timestep(torch.linspace(0, 1, 65)).std(0).mean() > 0.3
            assert not any(p.any() for name, p in kept.named_parameters() if "bias" in name)
        lost = make_adapter("hypernet", REAL, mlp_dim=mlp_dim, mlp_norm=False, init="default")
        assert modulation_spread(lost)["hidden"] < 0.01


def test_the_spread_names_every_modulation():
    for kernel in GEOMETRIES:
        adapter = make_adapter(kernel, TINY)
        spread = modulation_spread(adapter)
        assert set(spread) == {*ma.MAGNITUDES, "mean", "hidden"}
        assert all(value == 0 for name, value in spread.items() if name != "hidden")
        ma.randomise_readouts(adapter)
        assert all(value > 1e-3 for value in modulation_spread(adapter).values())
    assert modulation_spread(make_adapter("inject", TINY)) == {"in_shift": 0, "mean": 0}
    assert modulation_spread(make_adapter("lora", TINY)) == {}
    assert modulation_spread(make_adapter("none", TINY)) == {}


# ---- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", GEOMETRIES)
@pytest.mark.parametrize("raw", [1e6, -1e6, 0.7])
def test_bounds_hold_for_huge_hidden_states_and_magnitudes(kernel, raw, monkeypatch):
    adapter = randomised(make_adapter(kernel, TINY, mlp_dim=32))
    torch.nn.init.constant_(adapter.magnitude, raw)
    huge = 1e3 * torch.randn(TINY.n_layer, 5, 32, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(adapter, "hidden", lambda c: huge)
    modulation = adapter(TIMES)
    assert modulation.A.abs().max() <= 0.5
    for name, value in fields(modulation).items():
        assert value.isfinite().all()
        offset = 1 if name.endswith("scale") else 0
        assert (value - offset).abs().max() <= max(abs(raw), 0.5) + 1e-6  # 1.7 - 1 rounds
    sum(value.sum() for value in fields(modulation).values()).backward()
    assert all(p.grad.isfinite().all() for p in adapter.parameters() if p.grad is not None)


def test_unbounded_shifts_leave_the_bound_of_A_alone(monkeypatch):
    adapter = randomised(make_adapter("hypernet", TINY, mlp_dim=32, bounded_shifts=False))
    torch.nn.init.constant_(adapter.magnitude, 1.0)
    monkeypatch.setattr(adapter, "hidden", lambda c: 1e3 * torch.ones(TINY.n_layer, 5, 32))
    modulation = adapter(TIMES)
    assert modulation.A.abs().max() <= 0.5
    assert max(modulation.dt.abs().max(), modulation.D.abs().max()) <= 1
    assert modulation.B_scale.max() <= 2 and modulation.C_scale.max() <= 2
    assert modulation.B_shift.abs().max() > 1e3 and modulation.C_shift.abs().max() > 1e3


def test_the_spectral_damping_stays_finite_for_any_alpha():
    for alpha in (1e6, -1e6):
        adapter = randomised(make_adapter("dct", TINY, mlp_dim=32))
        torch.nn.init.constant_(adapter.alpha, alpha)
        loss = sum(value.sum() for value in fields(adapter(TIMES)).values())
        loss.backward()
        assert loss.isfinite() and adapter.alpha.grad.isfinite().all()


# ---- cost and precision --------------------------------------------------------------------------


@pytest.mark.parametrize("kernel, most", [("hypernet", 45), ("chebyshev", 60), ("dct", 55),
                                          ("inject", 10), ("adaln", 10)])
def test_one_pass_over_all_layers_takes_few_operations_at_any_depth(kernel, most):
    counts = []
    for config, n_shifts in ((REAL, 12), (REAL, 24), (dataclasses.replace(REAL, n_layer=2), 12)):
        adapter = make_adapter(kernel, config, n_shifts=n_shifts, init="default")
        with Count() as count:
            adapter(TIMES)
        counts.append(count.operations)
    assert max(counts) <= most and len(set(counts)) == 1


@pytest.mark.parametrize("kernel", GEOMETRIES + ("inject", "adaln"))
def test_autocast_leaves_an_adapter_in_float32(kernel):
    adapter = randomised(make_adapter(kernel, TINY, mlp_dim=32))
    expected = fields(adapter(TIMES))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name, value in fields(adapter(TIMES)).items():
            assert value.dtype == torch.float32 and torch.equal(value, expected[name])
    assert fields(adapter(TIMES.bfloat16())).keys() == expected.keys()
    assert all(v.dtype == torch.float64 for v in fields(adapter.double()(TIMES)).values())
    with pytest.raises(UserError, match="bfloat16, need float32"):
        adapter.bfloat16()(TIMES)


# ---- ablations, a fourth geometry, mistakes ------------------------------------------------------


def test_keep_masks_exactly_what_it_names():
    names = ("A", "dt", "D", "B_scale", "B_shift", "C_scale", "C_shift")
    full = randomised(make_adapter("chebyshev", TINY))(TIMES)
    kept = {"full": names, "none": (), "A": ("A",), "dt": ("dt",), "D": ("D",), "BC": names[3:],
            "all-except-A": names[1:], "all-except-dt": ("A", *names[2:])}
    for mode, expected in kept.items():
        masked = full.keep(mode)
        assert tuple(fields(masked)) == expected
        assert all(getattr(masked, name) is getattr(full, name) for name in expected)
    assert set(fields(full)) == set(names)  # `keep` returns a new one
    with pytest.raises(UserError, match="BC"):
        full.keep("B")


class Fourier(MarkAdapter):
    """A fourth geometry: everything is read from sin and cos of learned phases."""

    def __init__(self, config, cfg):
        super().__init__(config, cfg)
        self.phase = self.readout(16)
        self.shift = self.readout(self.shift_size, zero=True, n_in=32)
        self.UV = self.readout_UV(n_in=32)

    def heads(self, h):
        phase = self.phase(h)                                          # y b 16
        wave = torch.cat([phase.sin(), phase.cos()], -1)               # y b 32
        return self.shift(wave), self.UV(wave)


def test_a_fourth_geometry_is_one_class_and_one_registry_entry(monkeypatch):
    monkeypatch.setitem(ma.KERNELS, "fourier", Fourier)
    adapter = make_adapter("fourier", TINY, mlp_dim=32)
    assert adapter.kernel == "fourier" and modulation_spread(adapter)["hidden"] > 0.3
    for name, value in fields(adapter(TIMES)).items():
        assert (value == (1 if name.endswith("scale") else 0)).all()
    assert_gradients_everywhere_after_two_steps(adapter)
    assert modulation_spread(adapter)["A"] > 0


@pytest.mark.parametrize("kernel, settings, message", [
    ("cubic", {}, "hypernet, cheb"), ("hypernet", {"n_shifts": 5}, "divisor of the backbone's"),
    ("dct", {"init": "zeros"}, "keep, default or published"), ("dct", {"beta_A": 0.5}, "beta_A"),
    ("dct", {"bounded_shifts": False}, "hypernet"),
    ("chebyshev", {"degree": 1}, "degree"), ("dct", {"n_freqs": 300}, "timepoints: got 256"),
    ("hypernet", {"n_shifts": 0}, "n_shifts"), ("lora", {"lora_rank": 0}, "lora_rank")])
def test_a_wrong_setting_is_one_line(kernel, settings, message):
    with pytest.raises(UserError, match=message) as error:
        make_adapter(kernel, TINY, **settings)
    assert "\n" not in str(error.value)


# ---- what the paper's public code does otherwise -------------------------------------------------


@pytest.mark.parametrize("kernel", GEOMETRIES)
def test_the_published_start_is_berts_and_t_does_not_survive_it(kernel):
    torch.manual_seed(0)
    adapter = make_adapter(kernel, REAL, init="published", mlp_norm=False, beta_A=0.275)
    for name, p in adapter.named_parameters():
        if name.endswith("weight"):
            assert 0.0195 < p.std() < 0.0205, name
        if name.endswith("bias"):
            assert not p.any(), name
    torch.testing.assert_close(adapter.effective_magnitudes()[:, 0], torch.full((23,), 0.275))
    torch.testing.assert_close(adapter.magnitude[:, 0], torch.full((23,), 0.2), rtol=0, atol=2e-3)
    assert 0 < modulation_spread(adapter)["hidden"] < 2e-5
    shift = adapter(torch.tensor([0.5])).A
    assert 0 < shift.abs().max() < 1e-5, "not the identity, though near it"


def test_a_reversed_t_is_one_less_t():
    plain = randomised(make_adapter("dct", TINY, mlp_dim=20))
    other = randomised(make_adapter("dct", TINY, mlp_dim=20, reversed_t=True))
    assert torch.equal(other(1 - TIMES).A, plain(1 - (1 - TIMES)).A)
    assert not torch.allclose(other(TIMES).A, plain(TIMES).A)


def test_a_rounded_angle_moves_in_steps_of_four_above_512():
    """bfloat16 has 8 bits: numbers from 512 to 1024 are 4 apart, those from 256 to 512 are 2."""
    time = make_adapter("inject", TINY, rounded_angle=True).timestep
    t = torch.linspace(0, 1, 100_001)
    fastest = time.angle(t)[:, 0]
    for low, high, step in ((256, 512, 2), (512, 1000, 4)):
        inside = fastest[(fastest >= low) & (fastest <= high)].unique()
        assert inside.tolist() == list(range(low, high + 1, step))
    assert (time.angle(t) / (1000 * t[:, None] * time.angular / 1000) - 1)[1:].abs().max() < 0.012
    exact = make_adapter("inject", TINY).timestep
    assert torch.equal(exact.angle(t), t[:, None] * exact.angular)


def test_an_unbounded_z_is_algorithm_2_as_printed(float64):
    """T_k of a z outside [-1, 1], where cos(k arccos z) has no value: by its polynomial."""
    adapter = randomised(make_adapter("chebyshev", TINY, mlp_dim=20, bounded_z=False))
    with torch.no_grad():
        adapter.z.weight *= 4
    h = adapter.hidden(TIMES.double())
    z = adapter.z(h)                                                   # y b s
    assert z.abs().max() > 1
    T = torch.stack([z**0, z, 2 * z**2 - 1, 4 * z**3 - 3 * z, 8 * z**4 - 8 * z**2 + 1])
    theta = adapter.shift(h).unflatten(-1, (3, 5, -1))[:, :, 0]        # y b k s
    want = torch.einsum("ybks,kybs->ybs", theta, T)
    torch.testing.assert_close(adapter.heads(h)[0].unflatten(-1, (3, -1))[:, :, 0], want)


def test_a_python_number_is_one_t():
    adapter = make_adapter("dct", TINY, mlp_dim=8)
    assert torch.equal(adapter(0.5).A, adapter(torch.tensor([0.5])).A)
    assert torch.equal(adapter(1).A, adapter(torch.tensor([1.0])).A)


@pytest.mark.parametrize("t", [3, -0.1, float("nan"), "0.5", [0.5], None, torch.tensor([0.5, 3.0]),
                               torch.tensor([-1e-3]), torch.tensor([float("nan")])])
@pytest.mark.parametrize("kernel", ["dct", "inject"])
def test_a_t_outside_0_to_1_or_no_t_at_all_is_refused(kernel, t):
    adapter = make_adapter(kernel, TINY, mlp_dim=8)
    with pytest.raises(UserError, match=r"^t: got .*in \[0, 1\]"):
        adapter(t)


@pytest.mark.parametrize("t", [torch.tensor(0.5), torch.zeros(3, 1), torch.zeros(3, 127),
                               torch.arange(3), torch.zeros(2, 3, 128)])
def test_t_of_a_wrong_shape_or_type_is_refused(t):
    for kernel in ("hypernet", "adaln"):
        with pytest.raises(UserError, match=r"shape \(b,\)"):
            make_adapter(kernel, TINY)(t)


def test_main_prints_the_budgets_and_draws(tmp_path, capsys):
    result = ma.main(ma.Config(out=str(tmp_path), seed=1))
    printed = capsys.readouterr().out
    assert "| chebyshev | 12 | 10,973,921 | 10.97 |" in printed
    assert printed.rstrip().endswith(str(tmp_path / "modulation.png"))
    assert (tmp_path / "modulation.png").stat().st_size > 10_000
    assert len(result["sizes"]) == 6
    assert json.loads((tmp_path / "result.json").read_text())["metrics"] == result
