"""Linear systems beside their recurrences, balanced truncation beside scipy, Gramians by loops."""
import math

import numpy as np
import pytest
import scipy.linalg
import torch

import markov
from experiments import hankel
from experiments.hrm_adapter import HRM


def random_system(d=6, m=3, p=4, seed=0):
    """Poles of rate 0.002 to 1, as a trained adapter has them."""
    rng = np.random.default_rng(seed)
    return hankel.DiagonalSystem(torch.from_numpy(np.exp(rng.uniform(-6, 0, d))),
                                 torch.from_numpy(rng.normal(size=(d, m))),
                                 torch.from_numpy(rng.normal(size=(p, d))))


def lyapunov(A, B, C):
    return (scipy.linalg.solve_discrete_lyapunov(A, B @ B.T),
            scipy.linalg.solve_discrete_lyapunov(A.T, C.T @ C))


def dense(system):
    """A, B, C as numpy matrices."""
    if isinstance(system, hankel.DiagonalSystem):
        A = np.diag(np.exp(-system.rate.numpy()))
    else:
        A = system.A.numpy()
    return A, system.B.numpy(), system.C.numpy()


def response(system, w):
    """sum over k of C A^k B e^{-i w k}, p m."""
    A, B, C = dense(system)
    return C @ np.linalg.solve(np.eye(len(A)) - A * np.exp(-1j * w), B)


@pytest.mark.parametrize("share", [None, 0.8])
def test_a_system_runs_as_its_recurrence(share):
    system = random_system()
    if share:
        system = hankel.truncate(system, share=share)
    h = torch.randn(2, 21, 3, dtype=torch.float64)
    A, B, C = (torch.from_numpy(v) for v in dense(system))
    s = torch.zeros(2, len(A), dtype=torch.float64)
    y = []
    for t in range(21):
        s = s @ A.T + h[:, t] @ B.T
        y.append(s @ C.T)
    assert torch.allclose(hankel.run_system(system, h), torch.stack(y, 1), atol=1e-10)
    assert hankel.run_system(system, h.float()).dtype == torch.float32


# ---- Gramians and balanced truncation ------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_closed_forms_solve_the_lyapunov_equations(seed):
    """scipy's solver loses digits where abar is near 1 (0.998 here): 1e-8."""
    system = random_system(seed=seed)
    for ours, scipys in zip(hankel.gramians(system), lyapunov(*dense(system))):
        assert np.allclose(ours, scipys, rtol=1e-8)


def test_the_hankel_values_are_the_singular_values_of_the_hankel_matrix():
    """The matrix [g_{i+j}] of 100 lags; rates are at least e^-1.5, so what is cut off is e^-22."""
    rng = np.random.default_rng(1)
    system = random_system(4)._replace(rate=torch.from_numpy(np.exp(rng.uniform(-1.5, 0, 4))))
    A, B, C = dense(system)
    g = [C @ np.linalg.matrix_power(A, k) @ B for k in range(199)]
    matrix = np.block([g[i:i + 100] for i in range(100)])
    want = scipy.linalg.svdvals(matrix)[:4]
    assert np.allclose(hankel.hankel_singular_values(*hankel.gramians(system)), want, rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_balanced_system_is_the_same_map_with_equal_diagonal_gramians(seed):
    """1e-7: the inverse of a state of sigma 1e-4 of the largest multiplies rounding errors."""
    system = random_system(seed=seed)
    balanced, sigma = hankel.balance(system)
    scale = sigma[0].item()
    for W in lyapunov(*dense(balanced)):
        assert np.allclose(W, np.diag(sigma), atol=1e-7 * scale)
    for w in (0, 0.01, 1, 3):
        assert np.allclose(response(system, w), response(balanced, w), atol=1e-7 * scale)


def test_a_state_that_nothing_reaches_is_left_out():
    """Two equal poles that only one combination of is driven and seen: order 3 of 4."""
    system = random_system(4, 1, 1)
    system.rate[1] = system.rate[0]
    balanced, sigma = hankel.balance(system)
    assert len(balanced.A) == 3
    assert sigma[3] < 1e-7 * sigma[0]
    assert np.allclose(response(system, 0.1), response(balanced, 0.1), rtol=1e-6)


def test_a_closed_gate_leaves_one_state_that_does_nothing():
    with torch.no_grad():
        system = HRM(6, 3, gate=0.0).system()
    reduced = hankel.truncate(system, share=0.9)
    assert len(reduced.A) == 1
    assert hankel.h_infinity_error(system, reduced) == 0
    assert torch.equal(hankel.run_system(reduced, torch.ones(1, 5, 6)), torch.zeros(1, 5, 6))


@pytest.mark.parametrize("seed", range(8))
def test_truncation_is_stable_and_within_glovers_bound_and_above_the_next_value(seed):
    """sigma_{n+1} <= error <= 2 (sigma_{n+1} + ...); 1e-6 for the grid and rounding."""
    system = random_system(8, seed=seed)
    sigma = hankel.hankel_singular_values(*hankel.gramians(system))
    for share in (0.5, 0.8, 0.9, 0.99):
        reduced = hankel.truncate(system, share=share)
        n = len(reduced.A)
        assert reduced.A.dtype == torch.float64  # real
        assert np.abs(np.linalg.eigvals(reduced.A)).max() < 1
        assert sigma[:n].sum() >= share * sigma.sum() * (1 - 1e-9)
        assert n == 1 or sigma[:n - 1].sum() < share * sigma.sum()
        error = hankel.h_infinity_error(system, reduced)
        assert sigma[n] * (1 - 1e-6) <= error <= 2 * sigma[n:].sum() * (1 + 1e-6)


def test_the_rule_of_a_bound_keeps_as_few_states_as_keep_it():
    system = random_system(8, seed=3)
    sigma = hankel.hankel_singular_values(*hankel.gramians(system))
    for bound in (1e3, 10, 1, 0.1):
        n = len(hankel.truncate(system, bound=bound).A)
        assert 2 * sigma[n:].sum() <= bound
        assert n == 1 or 2 * sigma[n - 1:].sum() > bound


def test_the_error_is_the_largest_over_frequencies_of_the_whole_matrix():
    """2e-3: the grid here is finer."""
    system = random_system(6, 9, 8, seed=2)
    reduced = hankel.truncate(system, share=0.7)
    grid = [*np.logspace(-7, 0.49, 400), *np.linspace(0, np.pi, 400)]
    want = max(scipy.linalg.svdvals(response(system, w) - response(reduced, w))[0] for w in grid)
    assert hankel.h_infinity_error(system, reduced) == pytest.approx(want, rel=2e-3)


def test_the_closed_form_of_markov_is_the_hankel_value_of_a_small_diagonal_system():
    """A head: one decay for all of its states, so one value, |C' Bbar'| / (1 - abar^2)."""
    rng = np.random.default_rng(0)
    rate = 0.03
    B = torch.from_numpy(rng.normal(size=(5, 1)))
    C = torch.from_numpy(rng.normal(size=(1, 5)))
    fields = [torch.full((1, 1, 1, 1), value, dtype=torch.float64)
              for value in ((C @ B).item(), rate, 1, 1, 1)]
    response = markov.ImpulseResponse(*fields)
    system = hankel.DiagonalSystem(torch.full((5,), rate).double(), B, C)
    sigma = hankel.hankel_singular_values(*hankel.gramians(system))
    want = abs((C @ B).item()) / (1 - math.exp(-2 * rate))
    assert markov.hankel_singular_value(response).item() == pytest.approx(want, rel=1e-10)
    assert sigma[0].item() == pytest.approx(want, rel=1e-7)  # float32's rate
    assert (sigma[1:] < 1e-6 * want).all()  # square roots of rounding errors


# ---- empirical Gramians --------------------------------------------------------------------------


def test_empirical_gramians_are_those_of_a_plain_loop():
    rng = np.random.default_rng(0)
    n, l, d = 3, 10, 4
    rate = torch.from_numpy(rng.uniform(0.1, 1, d))
    B = torch.from_numpy(rng.uniform(0.1, 1, (n, l, d, 2)))
    C = torch.from_numpy(rng.uniform(0.1, 1, (n, l, 3, d)))
    h = torch.from_numpy(rng.uniform(0.1, 1, (n, l, 2)))
    A = np.diag(np.exp(-rate.numpy()))
    W_c = np.zeros((d, d))
    W_o = np.zeros((d, d))
    for i in range(n):
        s = np.zeros(d)
        released = np.eye(d)
        for t in range(l):
            s = A @ s + (B[i, t] @ h[i, t]).numpy()
            if t >= l // 2:
                W_c += np.outer(s, s) / (n * l / 2)
            y = C[i, t].numpy() @ released
            W_o += y.T @ y / n
            released = A @ released
    for ours, loop in zip(hankel.empirical_gramians(rate, B, C, h), (W_c, W_o)):
        assert np.allclose(ours, loop, rtol=1e-10)


def test_empirical_gramians_converge_as_the_root_of_the_number_of_inputs():
    """-1/2; the slope of five points scatters by about 0.1 over seeds, the mean of four less."""
    slopes = []
    for seed in range(4):
        log_n, log_error = np.log(hankel.empirical_convergence(seed)).T
        slopes.append(np.polyfit(log_n, log_error, 1)[0])
    assert -0.65 < np.mean(slopes) < -0.35


def test_empirical_gramians_can_be_balanced():
    system = random_system(4)
    W_c, W_o = hankel.gramians(system)
    reduced = hankel.truncate(system, share=0.9, W=(W_c, W_o))
    for ours, plain in zip(reduced, hankel.truncate(system, share=0.9)):
        assert torch.equal(ours, plain)
    _, sigma = hankel.balance(system)
    _, of_doubled = hankel.balance(system, (2 * W_c, 2 * W_o))
    assert torch.allclose(of_doubled, 2 * sigma)
