"""DCT adapters are Hypernets of rank 8, Chebyshev's are polynomials of z(h), none is one of t."""
import dataclasses

import numpy as np
import pytest
import tiny
import torch

from experiments import bases
from mark_adapters import make_adapter

T = torch.linspace(0, 1, 301).double()


def awake(kernel, **settings):
    torch.manual_seed(3)
    return tiny.awake(make_adapter(kernel, tiny.CONFIG, mlp_dim=24, **settings)).double()


def test_a_dct_adapter_is_a_hypernet_at_every_t():
    adapter = awake("dct")
    twin = bases.hypernet_of(adapter, tiny.CONFIG)
    for name, value in vars(adapter(T)).items():
        assert value.std(1).mean() > 1e-3, name                      # it does depend on t
        torch.testing.assert_close(getattr(twin(T), name), value, rtol=0, atol=1e-10)


def test_its_map_to_the_shifts_has_the_rank_of_its_spectrum():
    adapter = awake("dct", n_freqs=3)
    shift = bases.hypernet_of(adapter, tiny.CONFIG).shift.weight.detach()   # y h (m s)
    assert min(shift.shape[1:]) > 3
    for layer in shift:
        singular = torch.linalg.svdvals(layer)
        assert singular[2] > 1e-3 * singular[0] and singular[3] < 1e-12 * singular[0]
    full = torch.linalg.svdvals(awake("hypernet").shift.weight.detach()[0])
    assert full[-1] > 1e-3 * full[0]


def test_a_chebyshev_shift_is_a_polynomial_of_z_and_not_of_t():
    """At fixed coefficients it follows T_k(z) for any z; over t no polynomial of its degree fits.
    """
    adapter = awake("chebyshev")
    h = adapter.hidden(T)
    got = adapter.heads(h)[0].detach().numpy()                       # y t (m s)
    theta = adapter.shift(h).detach().numpy()
    z = adapter.z(h).tanh().detach().numpy()
    s = adapter.n_shifts
    for m in range(3):
        for j in range(s):
            coefficients = [theta[..., (m * 5 + k) * s + j] for k in range(5)]
            want = sum(c * np.cos(k * np.arccos(z[..., j])) for k, c in enumerate(coefficients))
            np.testing.assert_allclose(got[..., m * s + j], want, rtol=0, atol=1e-10)
    functions = bases.design("polynomials", T.numpy(), 5)
    share = bases.explained(got.transpose(1, 0, 2).reshape(len(T), -1), functions)
    assert np.nanmean(share) < 0.9


def test_what_a_fit_explains():
    t = T.numpy()
    noise = np.random.default_rng(0).normal(size=len(t))
    values = np.stack([3 + t ** 3, np.cos(3 * np.pi * t), noise, np.ones(len(t))], 1)
    polynomials = bases.explained(values, bases.design("polynomials", t, 5))
    assert polynomials[0] == pytest.approx(1) and 0.2 < polynomials[1] < 0.9
    assert abs(polynomials[2]) < 0.05 and np.isnan(polynomials[3])
    cosines = bases.explained(values, bases.design("cosines", t, 8))
    assert cosines[1] == pytest.approx(1) and cosines[0] < 1


def test_the_command_shows_the_shipped_adapters(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bases.common, "ROOT", tmp_path)
    found = bases.main(dataclasses.replace(bases.Config(), points=101))
    assert set(found) == {"chebyshev", "dct", "hypernet"}
    assert all(0 < by_field["mean"]["cosines"] < 1 for by_field in found.values())
    assert (tmp_path / "runs/bases/shipped/bases.png").stat().st_size > 10_000
    assert "| dct | polynomials |" in capsys.readouterr().out
