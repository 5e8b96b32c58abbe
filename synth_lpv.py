"""Synthetic LPV-SSM recovery: how the operator error falls with N (4.2, B.2, C.5; Figure 2).

Run:      python synth_lpv.py                     (three kernels, six sizes, 15 seeds: 3 minutes)
          python synth_lpv.py --preset published  (settings of the public script: 15 minutes;
              "published_bound" is its bounds without the fits: 1; "published_hypernet": 12)
Last line: "wrote runs/synth_lpv/recovery/result.json and fig2_recovery.png"
          (`python -m experiments.publish runs/synth_lpv/recovery` copies both to where the
          repository keeps them.)

Part one is the paper's experiment. Draw a true system tau -> A, B, C by Algorithm 5, 6 or 7.
Observe N trajectories of 20 steps, with a new tau at every step. Fit a system of the same form to
them by Adam, from a noisy copy of the truth. Compare the two by their frozen-time Markov parameters
on a grid of 200 tau. All of this is C.5:

    x_s = Abar(tau_s) x_{s-1} + Bbar(tau_s) u_s        y_s = C(tau_s)^T x_s + 0.1 noise
    M_k(tau) = C(tau)^T (Abar(tau)^k Bbar(tau))        k = 0..14
    MOE = sqrt(mean over tau of sum_k (M_k of the fit - M_k)^2)

Part two asks what the best possible error is, for the two bases. Levenberg-Marquardt finds the
least-squares fit, and the Cramer-Rao bound says how small the error of an unbiased fit can be. A
second bound counts the start as data: a noisy copy of the truth is a measurement of it.

How to read the rates is said below every table: NOTE.

Symbols:  tau, u, y  e l b    tau_s, u_s, y_s        A, B, C  e n m    A, B, C(tau), continuous
          features   e k m    what a kernel computes of tau alone: embedding, T_k or b_k
          P          name ->  the parameters of the systems of all seeds; each tensor leads with e
          theta      e c f    of Algorithms 6 and 7, packed. Rows c: A (n), U (n r), V (r).
                              Columns f: first A_log_base, U_base, V_base, then the coefficients
                              _coeffs (Algorithm 6) or _spec (7). p = (c f).
          M          e k m    M_k(tau)               J        e p b    d y_s / d theta
          e seeds, l steps (L), b trajectories (N), m = (l b) or the grid, n state, r rank,
          k basis function or lag, j the channels c that drive one state
Differs from the paper, or is left open there: the truth (TRUTHS); the noise of the start, absolute
          on the bases and relative to the RMS elsewhere; alpha, beta_A and beta_B of Algorithms 6
          and 7 are known to the fit; the heads of the Hypernet are 2 x 2 factors, as in the
          adapters, and its MLP is 16 wide; Adam is stopped early by held-out trajectories. MOE has
          a mean over tau: the Frobenius norm over grid and lags is sqrt(200) MOE.
Upstream: github.com/ibitec7/mark at 18a855b, analysis/*_synthetic_lpv.py. PRESETS["published"] sets
          everything in which these scripts depart from ours. The random streams are ours, and the
          start of the betas has noise 0.02 here. Its Hypernet is 256 wide: 15 seeds of six sizes
          would take 9 hours of one core, so "published_hypernet" has 3 seeds of the three smallest.
"""
import dataclasses
import math
import time
from typing import Callable, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import common
from data import noise_generator
from mark_adapters import chebyshev_basis, near_square

# C.5
D_STATE = 4
RANK = 2
LENGTH = 20
DT = 0.1
EPS = 1e-7
LAGS = 15                              # of the Markov operator
GRID = 200                             # points in tau, of the Markov operator

# Algorithm 5
A_DIM, V_DIM = near_square(D_STATE)    # U_q (a r), V_q (r v), a v = n
UV_SIZE = A_DIM * RANK + RANK * V_DIM
HEADS = {"W_A": D_STATE, "W_B_scale": UV_SIZE, "W_B_shift": UV_SIZE, "W_C_scale": UV_SIZE,
         "W_C_shift": UV_SIZE}         # the outputs of each head
SCALARS = ("beta_A_param", "alpha_B", "beta_B", "alpha_C", "beta_C")

# Algorithms 6 and 7
CHANNELS = [D_STATE, D_STATE * RANK, RANK]     # rows of theta: A, U, V
K_BASIS = 3
N_FREQS = 8
L_TIME = 256

PAPER_RATE = {"hypernet": -0.54, "chebyshev": -0.66, "dct": -0.64}     # Figure 2
CHUNK = 1600                           # trajectories that are fitted at once: they fit the cache
CHECK_EVERY = 20                       # steps of Adam between looks at the held-out trajectories
DIVERGED = 10                          # times the norm of the operator: such a fit has diverged
NOTE = (
    "What a rate means: B.2 proves N^-1/2 for the squared error (eq. 32), so N^-1/4 for the error "
    "MOE. The Cramer-Rao bound on the RMS error of unbiased estimators falls as N^-1/2 in the "
    "limit of many trajectories, and faster before it: an exponent does not tell a good estimator "
    "from a bad one, the ratio to the bound does. The rate of a first-order fit (Adam) is a fact "
    "about its budget. A fit below the bound is biased: the start, a noisy copy of the truth, "
    "still shows in it. The bound for an estimator that also measures the truth by its start "
    "counts that in. There is no bound (n/a) where the data do not determine the parameters. The "
    "Hypernet has none: its information is singular.")


class Truth(NamedTuple):
    """How true systems are drawn. The paper does not say."""
    log_poles: tuple      # A_log_base goes from the first to the second in equal steps
    factors: float        # standard deviation of U_base and V_base
    coefficients: dict    # standard deviation of the coefficients, by kernel
    beta_A: float         # the bounds and alpha of Algorithms 6 and 7
    beta_B: float
    alpha: float
    scalars: float        # the bounds and alphas of Algorithm 5
    smooth: bool          # layers of Algorithm 5 that let tau through, or PyTorch's default ones


# Ours leave something to recover: the coefficients of the DCT meet c_k, about 1 / sqrt(256), so the
# public script's hardly move its operator.
TRUTHS = {
    "ours": Truth((math.log(0.5), math.log(16)), 2.0, {"chebyshev": 1.0, "dct": 16.0},
                  beta_A=0.5, beta_B=1.0, alpha=0.0, scalars=0.5, smooth=True),
    "public": Truth((-2.0, 0.0), 0.5, {"chebyshev": 0.5, "dct": 0.5},
                    beta_A=0.5, beta_B=0.5, alpha=1.0, scalars=0.2, smooth=False)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Recover synthetic LPV systems from N trajectories: table, rates and Figure 2."""
    MAY_BE_ZERO: ClassVar = ("iterations", "steps", "batch")
    # 3 min, 20 s, 15 min, 1 min, 12 min; from Python a label: see common.from_preset
    preset: Literal["recovery", "quick", "published", "published_bound",
                    "published_hypernet"] = "recovery"
    kernel: tuple[Literal["hypernet", "chebyshev", "dct"], ...] = ("hypernet", "chebyshev", "dct")
    sizes: tuple[int, ...] = (50, 100, 200, 400, 800, 1600)  # N
    seeds: int = 15                    # at most 15
    fit: Literal["lm", "adam"] = "lm"  # of the two bases; the hypernet is always trained by Adam
    iterations: int = 60               # of Levenberg-Marquardt: fewer leave more of the start
    steps: int = 800                   # of Adam, its rate falling to 0 as a cosine; 0: no fit
    lr: float = 1e-3                   # of Adam
    weight_decay: float = 0.0          # of Adam
    batch: int = 50                    # trajectories in a step of Adam; 0: all
    hold_out: float = 0.2              # share that stops Adam early; 0: the whole budget
    noise: float = 0.1                 # sigma of the observed y
    start_noise: float = 0.1           # of the start of the fit, a noisy copy of the truth
    constant_tau: bool = False         # one tau per trajectory: the frozen context of B.2
    truth: Literal["ours", "public"] = "ours"      # how true systems are drawn
    width: int = 16                    # of the Hypernet's MLP
    seed_list: Literal["paper", "public"] = "paper"  # seed i: 42 + 100 i (C.3), or 42 i
    start_noise_absolute: bool = False  # the same noise on every number, a fifth on scalars
    fit_scalars: bool = False          # fit alpha and the betas of the bases too
    public_scaling: bool = False       # a row more: the error in the public script's scaling
    out: str = "runs/synth_lpv"        # folder of the folders of result and figure


PUBLISHED = {
    "kernel": ("chebyshev", "dct"), "fit": "adam", "steps": 1500, "lr": 0.08, "weight_decay": 1e-4,
    "batch": 0, "hold_out": 0.0, "truth": "public", "width": 256, "seed_list": "public",
    "start_noise_absolute": True, "fit_scalars": True, "public_scaling": True}
PRESETS = {
    "recovery": {},
    "quick": {"seeds": 3, "steps": 150, "iterations": 40},
    "published": PUBLISHED,
    "published_bound": PUBLISHED | {"steps": 0},
    "published_hypernet": PUBLISHED | {"kernel": ("hypernet",), "seeds": 3,
                                       "sizes": (50, 100, 200)}}


# ==================================================================================================
# Part one: the paper's experiment
# ==================================================================================================

# ---- Algorithms 5 to 7: features of tau, then P and features -> A, B, C --------------------------
# The numbers at the right are the lines of the algorithm. P holds scalars as (e 1 1), vectors as
# (e n 1) and matrices as (e n k).

def embedding(tau):
    """Algorithm 5, cond(tau): (e m) -> (e k m), k = 128."""
    m = torch.arange(64, dtype=tau.dtype)
    angle = 2 * math.pi * m[:, None] * tau[:, None]             # e 64 m
    return torch.cat([angle.sin(), angle.cos()], 1)             # 3


def uvflat(q):
    """Algorithm 5, line 5: vec(U_q V_q), where q (e k m) holds U_q, then V_q; -> (e n m)."""
    U_q, V_q = q.split([A_DIM * RANK, RANK * V_DIM], 1)
    U_q = U_q.unflatten(1, (A_DIM, RANK, 1))                    # e a r 1 m
    V_q = V_q.unflatten(1, (1, RANK, V_DIM))                    # e 1 r v m
    return (U_q * V_q).sum(2).flatten(1, 2)                     # e n m


def hypernet_matrices(P, cond):
    """Algorithm 5: cond = embedding(tau) (e k m) -> A, B, C (e n m)."""
    h = cond
    for layer in "1234":
        h = F.silu(P["W" + layer] @ h + P["b" + layer])         # 4

    W = torch.cat([P[name] for name in HEADS], 1)
    outputs = W @ h                                             # one product for all heads
    if "b_heads" in P:                                          # of the public script
        outputs = outputs + P["b_heads"]
    Wh = dict(zip(HEADS, outputs.split(list(HEADS.values()), 1)))

    beta_A = 0.5 * torch.sigmoid(P["beta_A_param"])             # 6
    a_shift = Wh["W_A"]
    A = -torch.exp(P["A_log_base"] + beta_A * torch.tanh(a_shift))              # 7

    b_base = (P["U_base"] @ P["V_base"]).flatten(1)[..., None]                  # 8
    b_scale = 1 + P["alpha_B"] * torch.tanh(uvflat(Wh["W_B_scale"]))         # 9
    b_shift = P["beta_B"] * torch.tanh(uvflat(Wh["W_B_shift"]))
    B = b_base * b_scale + b_shift                              # 10

    c_scale = 1 + P["alpha_C"] * torch.tanh(uvflat(Wh["W_C_scale"]))         # 11
    c_shift = P["beta_C"] * torch.tanh(uvflat(Wh["W_C_shift"]))
    C = 1 * c_scale + c_shift                                   # 12
    return A, B, C


def polynomials(tau):
    """Algorithm 6: T_k(2 tau - 1), k < 3; (e m) -> (e k m)."""
    z = 2 * tau - 1                                             # 3
    return chebyshev_basis(z, K_BASIS)                          # 4 to 7


def cosines(tau):
    """Algorithm 7: b_k(tau) = c_k cos(pi k tau), k < 8; (e m) -> (e k m)."""
    k = torch.arange(N_FREQS, dtype=tau.dtype)[:, None]
    one_or_two = 2 - (k == 0).to(tau.dtype)
    c = (one_or_two / L_TIME).sqrt()                            # 5
    return c * torch.cos(math.pi * k * tau[:, None])            # 6


def attenuated(P, basis):
    """Algorithm 7: w_k b_k(tau). Algorithm 6 has no alpha, and attenuates nothing."""
    if "alpha" not in P:
        return basis
    k = torch.arange(basis.shape[1], dtype=basis.dtype)[:, None]
    w = (k + 1) ** -(F.softplus(P["alpha"]) + 1e-4)             # 4
    return basis * w


def basis_matrices(P, basis):
    """Algorithms 6 and 7, lines 8 to 12: basis T_k or b_k (e k m) -> A, B, C (e n m)."""
    bases = P["theta"][..., :1]
    coefficients = P["theta"][..., 1:]
    A_log_base, U_base, V_base = bases.split(CHANNELS, 1)
    shifts = coefficients @ attenuated(P, basis)                # 8, 9
    A_shift, U_shift, V_shift = shifts.split(CHANNELS, 1)
    A = -torch.exp(A_log_base + P["beta_A"] * torch.tanh(A_shift))              # 10
    U = U_base + P["beta_B"] * torch.tanh(U_shift)              # 11
    V = V_base + P["beta_B"] * torch.tanh(V_shift)
    U = U.unflatten(1, (D_STATE, RANK))                         # e n r m
    B = (U * V[:, None]).sum(2)                                 # 12
    C = torch.ones_like(A)
    return A, B, C


class System(NamedTuple):
    """One of the Algorithms 5 to 7."""
    features: Callable    # tau (e m) -> (e k m), without parameters
    matrices: Callable    # P, features -> A, B, C (e n m)


SYSTEMS = {"hypernet": System(embedding, hypernet_matrices),
           "chebyshev": System(polynomials, basis_matrices),
           "dct": System(cosines, basis_matrices)}


def zero_order_hold(A, B):
    """Abar, Bbar of C.5."""
    Abar = torch.exp(A * DT)
    Bbar = (Abar - 1) / (A + EPS) * B
    return Abar, Bbar


def roll_out(kernel, P, features, u):
    """y (e l b) without noise, from x = 0: features (e k (l b)), u (e l b)."""
    A, B, C = SYSTEMS[kernel].matrices(P, features)
    Abar, Bbar = zero_order_hold(A, B)                          # e n (l b)
    Abar = Abar.unflatten(2, u.shape[1:])                       # e n l b
    Bbar = Bbar.unflatten(2, u.shape[1:])                       # e n l b
    Bbar_u = Bbar * u[:, None]
    x = torch.zeros_like(Abar[:, :, 0])                         # e n b
    states = []
    for Abar_s, Bbar_u_s in zip(Abar.unbind(2), Bbar_u.unbind(2)):
        x = torch.addcmul(Bbar_u_s, Abar_s, x)
        states.append(x)
    x = torch.stack(states, 2).flatten(2)                       # e n (l b)
    return (C * x).sum(1).view_as(u)


# ---- true systems, and where a fit starts --------------------------------------------------------

def normal(stream, deviation, *shape):
    """Normal numbers (1 ...), float64."""
    return deviation * torch.randn(1, *shape, generator=stream, dtype=torch.float64)


def scalar(value):
    """One number as (1 1 1), float64."""
    return torch.full((1, 1, 1), value, dtype=torch.float64)


def smooth_layers(stream, width):
    """The layers of Algorithm 5. The gain of 1.6, and the damping of frequency m by 1 + m, let tau
    through the MLP, smoothly."""
    damping = 1 / (1 + torch.arange(64).double())
    damping = damping.repeat(2)                                 # of the sines, of the cosines
    layers = {"W1": normal(stream, 1.6, width, 128) * damping / damping.norm()}
    for layer in "1234":
        layers["b" + layer] = normal(stream, 0.1, width, 1)
    for layer in "234":
        layers["W" + layer] = normal(stream, 1.6 / width ** 0.5, width, width)
    for name, n_outputs in HEADS.items():
        layers[name] = normal(stream, 1.6 / width ** 0.5, n_outputs, width)
    return layers


def default_layers(stream, width):
    """The same as torch.nn.Linear draws them, with a bias of the heads: the public script's."""
    def uniform(n_in, *shape):
        within_1 = 2 * torch.rand(1, *shape, generator=stream, dtype=torch.float64) - 1
        return within_1 / n_in ** 0.5

    layers = {"W1": uniform(128, width, 128), "b1": uniform(128, width, 1)}
    for layer in "234":
        layers["W" + layer] = uniform(width, width, width)
        layers["b" + layer] = uniform(width, width, 1)
    for name, n_outputs in HEADS.items():
        layers[name] = uniform(width, n_outputs, width)
    layers["b_heads"] = uniform(width, sum(HEADS.values()), 1)
    return layers


def random_hypernet(stream, truth, A_log_base, width):
    """P of Algorithm 5."""
    P = {"A_log_base": A_log_base}
    P["U_base"] = normal(stream, truth.factors, A_DIM, RANK)
    P["V_base"] = normal(stream, truth.factors, RANK, V_DIM)
    P |= smooth_layers(stream, width) if truth.smooth else default_layers(stream, width)
    for name in SCALARS:
        P[name] = scalar(truth.scalars)
    return P


def random_basis_system(stream, kernel, truth, A_log_base):
    """P of Algorithm 6 or 7."""
    n_basis = N_FREQS if kernel == "dct" else K_BASIS
    factors = normal(stream, truth.factors, CHANNELS[1] + CHANNELS[2], 1)
    coefficients = normal(stream, truth.coefficients[kernel], sum(CHANNELS), n_basis)
    bases = torch.cat([A_log_base, factors], 1)                 # e c 1
    P = {"theta": torch.cat([bases, coefficients], 2)}
    P["beta_A"] = scalar(truth.beta_A)
    P["beta_B"] = scalar(truth.beta_B)
    if kernel == "dct":
        P["alpha"] = scalar(truth.alpha)
    return P


def random_truth(kernel, seed, name, width=16):
    """P of the true system of one seed (e = 1), float64; name: of one of TRUTHS; width: of the
    Hypernet's MLP."""
    truth = TRUTHS[name]
    stream = noise_generator(seed, 0)
    A_log_base = torch.linspace(*truth.log_poles, D_STATE, dtype=torch.float64)[None, :, None]
    if kernel == "hypernet":
        return random_hypernet(stream, truth, A_log_base, width)
    return random_basis_system(stream, kernel, truth, A_log_base)


def start_deviation(name, value, absolute):
    """The standard deviation of the start's noise on each number of a parameter, in units of
    start_noise. Absolute: 1, and 0.2 on scalars. Else: 1 on the bases, the RMS elsewhere."""
    deviation = torch.ones_like(value)
    if absolute:
        if value.numel() == 1:
            deviation.fill_(0.2)
    elif name == "theta":
        deviation[..., 1:] = value[..., 1:].square().mean().sqrt()      # the coefficients
    elif not name.endswith("base"):
        deviation.fill_(value.square().mean().sqrt())
    return deviation


def noisy_copy(seed, P, learned, cfg):
    """The start of a fit: P with noise on what is learned."""
    stream = noise_generator(seed, 1)
    start = dict(P)
    for name in learned:
        deviation = start_deviation(name, P[name], cfg.start_noise_absolute)
        noise = torch.randn(deviation.shape, generator=stream, dtype=torch.float64)
        start[name] = P[name] + cfg.start_noise * deviation * noise
    return start


def stack_systems(systems):
    """The P of several seeds as one, along e."""
    return {name: torch.cat([P[name] for P in systems]) for name in systems[0]}


# ---- data ----------------------------------------------------------------------------------------

def observe(kernel, seed, P, size, cfg):
    """tau, u and the noisy y of `size` trajectories of one seed, each (1 l b) float64 (C.5).

    With constant_tau this is eq. 25, whose context is frozen.
    """
    stream = noise_generator(seed, 2, size)
    shape = (1, LENGTH, size)
    tau = torch.rand(shape, generator=stream, dtype=torch.float64)
    if cfg.constant_tau:
        tau = tau[:, :1].repeat(1, LENGTH, 1)
    u, noise = torch.randn(2, *shape, generator=stream, dtype=torch.float64)
    features = SYSTEMS[kernel].features(tau.flatten(1))         # e k (l b)
    y = roll_out(kernel, P, features, u) + cfg.noise * noise
    return tau, u, y


def observe_all(kernel, seeds, systems, size, cfg):
    """The same of several seeds, each (e l b)."""
    drawn = []
    for seed, P in zip(seeds, systems):
        drawn.append(observe(kernel, seed, P, size, cfg))
    tau, u, y = zip(*drawn)
    return torch.cat(tau), torch.cat(u), torch.cat(y)


def excitation(tau, u):
    """kappa_pe of eq. 26, estimated from tau, u (e l b): (e). White u without end has 1.

    It is the least eigenvalue of the second moment of psi_j(tau_s) u_{s-k}, for 15 lags k and 8
    orthonormal cosines psi_j; 0 where there are fewer than 120 samples.
    """
    psi = cosines(tau[:, LAGS - 1:].flatten(1)) * L_TIME ** 0.5         # e j (s b)
    past = u.unfold(1, LAGS, 1)                                 # e s b k
    past = past.flatten(1, 2).mT                                # e k (s b)
    z = (psi[:, :, None] * past[:, None]).flatten(1, 2)         # e (j k) (s b)
    moment = z @ z.mT / z.shape[2]                              # e (j k) (j k)
    return torch.linalg.eigvalsh(moment)[:, 0].clamp_min(0)


# ---- the paper's fit: mean squared error by Adam -------------------------------------------------

def some_trajectories(features, u, y, first, end):
    """Trajectories first to end - 1: features (e k (l b)), u and y (e l b)."""
    features = features.unflatten(2, u.shape[1:])               # e k l b
    features = features[..., first:end].flatten(2)              # e k (l b)
    return features, u[..., first:end], y[..., first:end]


def split_data(features, u, y, cfg):
    """The batches of Adam, and the last trajectories, which are held out; None where none are."""
    size = u.shape[2]
    n_held_out = min(round(cfg.hold_out * size), size - 1)      # one is left to be fitted
    n_train = size - n_held_out
    batch_size = cfg.batch if cfg.batch > 0 else size
    batches = []
    for first in range(0, n_train, batch_size):
        end = min(first + batch_size, n_train)
        batches.append(some_trajectories(features, u, y, first, end))
    if n_held_out == 0:
        return batches, None
    return batches, some_trajectories(features, u, y, n_train, size)


def squared_error(kernel, P, features, u, y):
    """Mean squared error of each seed, (e)."""
    return (roll_out(kernel, P, features, u) - y).square().mean((1, 2))


@torch.no_grad()
def keep_better(best, best_error, P, error, learned):
    """Copy P into `best` for the seeds whose error is less than their best."""
    better = error < best_error                                 # e; False for nan
    best_error[better] = error[better]
    for name in learned:
        best[name][better] = P[name][better]


def adam(kernel, start, features, u, y, learned, cfg):
    """P after AdamW on the mean squared error, from P = start, in float32.

    AdamW works number by number, and the loss is a sum over seeds, so no seed sees another. The
    last trajectories are held out: each seed keeps the parameters that were best on them.
    """
    P = {name: value.float() for name, value in start.items()}
    for name in learned:
        P[name].requires_grad_()
    optimiser = torch.optim.AdamW([P[name] for name in learned], cfg.lr,
                                  weight_decay=cfg.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, cfg.steps)

    batches, held_out = split_data(features, u, y, cfg)
    best = {name: value.detach().clone() for name, value in P.items()}
    best_error = torch.full((len(u),), math.inf)                # e
    for step in range(cfg.steps):
        if held_out is not None and step % CHECK_EVERY == 0:
            keep_better(best, best_error, P, squared_error(kernel, P, *held_out), learned)
        batch = batches[step % len(batches)]
        optimiser.zero_grad()
        squared_error(kernel, P, *batch).sum().backward()
        optimiser.step()
        schedule.step()

    if held_out is None:
        best = P
    else:
        keep_better(best, best_error, P, squared_error(kernel, P, *held_out), learned)
    return {name: value.detach().double() for name, value in best.items()}


# ---- the Markov operator and its error -----------------------------------------------------------

def markov_operator(kernel, P):
    """M_k(tau) = C^T (Abar^k Bbar) for 15 lags k and 200 tau (C.5): (e k m)."""
    n_seeds = len(P["beta_B"])                                  # a parameter of every kernel
    tau = torch.linspace(0, 1, GRID, dtype=torch.float64).expand(n_seeds, -1)   # e m
    A, B, C = SYSTEMS[kernel].matrices(P, SYSTEMS[kernel].features(tau))
    Abar, Bbar = zero_order_hold(A, B)                          # e n m
    k = torch.arange(LAGS)[:, None, None]
    powers = Abar[:, None] ** k                                 # e k n m
    return (powers * (C * Bbar)[:, None]).sum(2)                # e k m


def operator_error(M, M_true):
    """MOE, the Markov Operator Error of 4.2: (e k m) -> (e)."""
    squared = (M - M_true).square().sum(1)                      # e m
    return squared.mean(-1).sqrt()


def error_in_public_scaling(M, M_true):
    """The public script's: a norm over the grid of tau, then a mean over the lags; -> (e)."""
    return (M - M_true).norm(dim=-1).mean(-1)


# ==================================================================================================
# Part two: the best that the data allow, for the two bases (not in the paper)
# ==================================================================================================
# The observations are y = roll_out(theta) + sigma * normal noise. With J = d roll_out / d theta,
# the Fisher information of theta is J^T J / sigma^2. The same J drives Levenberg-Marquardt.

class NormalEquations(NamedTuple):
    """Of least squares, summed over steps and trajectories, in float64. r = y - roll_out."""
    JTJ: torch.Tensor     # e p p
    JTr: torch.Tensor     # e p
    rTr: torch.Tensor     # e


def channels_of_states():
    """(n j): the channels, rows of theta, that drive state n: A_n, row n of U, all of V."""
    first_U = CHANNELS[0]
    first_V = CHANNELS[0] + CHANNELS[1]
    rows = []
    for n in range(D_STATE):
        A_n = [n]
        U_n = [first_U + n * RANK + r for r in range(RANK)]
        V = [first_V + r for r in range(RANK)]
        rows.append(A_n + U_n + V)
    return torch.tensor(rows)


def own_sensitivities(log_A, U, V, x, u_s):
    """Of one step x_s = Abar x + gain B u_s, with B = sum_r U_r V_r: the new state (e n 1 b), Abar,
    and d x_s / d (log A_n, U_n, V) with x held fixed (e n j b). log_A is log(-A)."""
    A = -torch.exp(log_A)
    B = (U * V).sum(2, keepdim=True)                            # e n 1 b
    Abar, gain = zero_order_hold(A, 1.0)                        # Bbar = gain B
    d_Abar = Abar * A * DT                                      # d Abar / d log A
    d_gain = A / (A + EPS) * (Abar * DT - gain)                 # d gain / d log A
    by_log_A = d_Abar * x + d_gain * B * u_s                    # e n 1 b
    by_U = gain * u_s * V                                       # e n r b
    by_V = gain * u_s * U                                       # e n r b
    x_s = Abar * x + gain * B * u_s
    return x_s, Abar, torch.cat([by_log_A, by_U, by_V], 2)


def sensitivities(P, basis, u, betas=False):
    """For each step s the y_s of P without noise (e b), and J = d y_s / d theta (e p b).

    basis (e k (l b)), u (e l b). A channel has the value base + beta tanh(shift), where shift =
    sum_k coefficient_k basis_k. The sensitivity of the state follows the recurrence of the state:

        dx_s/dtheta = Abar_s dx_{s-1}/dtheta + (dx_s/dchannel with x_{s-1} fixed) dchannel/dtheta

    where dchannel/dtheta is 1 for the base, and beta (1 - tanh^2) basis_k for coefficient k. Only
    the channels j of a state are kept with it, (e n j f b). With `betas`, tanh = dchannel/dbeta
    makes a last column f, and beta_A and beta_B follow theta in J.
    """
    basis = attenuated(P, basis).unflatten(2, u.shape[1:])      # e k l b
    bases = P["theta"][..., :1]                                 # e c 1
    coefficients = P["theta"][..., 1:]                          # e c k
    beta_A = [P["beta_A"]] * CHANNELS[0]
    beta_B = [P["beta_B"]] * (CHANNELS[1] + CHANNELS[2])
    beta = torch.cat(beta_A + beta_B, 1)                        # e c 1
    channels = channels_of_states()                             # n j

    n_seeds, _, size = u.shape
    n_columns = P["theta"].shape[2]
    x = u.new_zeros(n_seeds, D_STATE, 1, size)                  # e n 1 b
    dx = u.new_zeros(n_seeds, *channels.shape, n_columns + betas, size)     # e n j f b
    J = u.new_empty(n_seeds, sum(CHANNELS), n_columns + betas, size)        # e c f b
    for basis_s, u_s in zip(basis.unbind(2), u.unbind(1)):      # e k b, e b
        tanh = torch.tanh(coefficients @ basis_s)               # e c b
        value = (bases + beta * tanh)[:, channels]              # e n j b
        slope = (beta * (1 - tanh * tanh))[:, channels]         # e n j b
        log_A, U, V = value.split([1, RANK, RANK], 2)
        x, Abar, own = own_sensitivities(log_A, U, V, x, u_s[:, None, None])

        dx *= Abar[:, :, :, None]                               # in place: it stays in the cache
        dx[:, :, :, 0] += own                                   # of the bases
        by_shift = (own * slope)[:, :, :, None]                 # e n j 1 b
        by_coefficient = dx[:, :, :, 1:n_columns]
        by_coefficient.addcmul_(by_shift, basis_s[:, None, None])
        if betas:
            dx[:, :, :, -1] += own * tanh[:, channels]

        # y = sum_n x_n, so the states' sensitivities to a channel are added.
        J.zero_().index_add_(1, channels.flatten(), dx.flatten(1, 2))
        J_p = J[:, :, :n_columns].flatten(1, 2)                 # e p b
        if betas:
            by_A, by_B = J[:, :, -1].split([CHANNELS[0], CHANNELS[1] + CHANNELS[2]], 1)
            J_p = torch.cat([J_p, by_A.sum(1, keepdim=True), by_B.sum(1, keepdim=True)], 1)
        yield x.sum((1, 2)), J_p


def normal_equations(P, basis, u, y):
    """NormalEquations at P: basis (e k (l b)), u and y (e l b)."""
    JTJ = 0
    JTr = 0
    rTr = 0
    for y_s, (of_P, J) in zip(y.unbind(1), sensitivities(P, basis, u)):
        r = y_s - of_P                                          # e b
        JTJ = JTJ + (J @ J.mT).double()
        JTr = JTr + (J @ r[..., None])[..., 0].double()
        rTr = rTr + r.square().sum(-1).double()
    return NormalEquations(JTJ, JTr, rTr)


def damped_step(equations, damping):
    """The solution of (J^T J + damping diag(J^T J)) step = J^T r: damping (e 1) -> (e p)."""
    diagonal = equations.JTJ.diagonal(dim1=1, dim2=2).clamp_min(1e-12)  # e p
    damped = equations.JTJ + torch.diag_embed(damping * diagonal)
    return torch.linalg.solve_ex(damped, equations.JTr).result


def levenberg_marquardt(start, basis, u, y, iterations):
    """P of the least squares from P = start, each seed with its own damping.

    J is in the dtype of u, and the steps in float64. A step that does not lower r^T r, or is not
    finite, is not taken, and the damping rises.
    """
    fixed = {name: value.to(u.dtype) for name, value in start.items()}

    def equations_at(theta):
        return normal_equations(fixed | {"theta": theta.to(u.dtype)}, basis, u, y)

    theta = start["theta"].clone()
    equations = equations_at(theta)
    damping = torch.full((len(u), 1), 0.03, dtype=torch.float64)        # e 1
    for _ in range(iterations):
        candidate = theta + damped_step(equations, damping).view_as(theta)
        found = equations_at(candidate)
        better = found.rTr < equations.rTr                      # e; False for nan
        theta[better] = candidate[better]
        for old, new in zip(equations, found):
            old[better] = new[better]
        damping = torch.where(better[:, None], damping / 2, damping * 3)
    return start | {"theta": theta}


def information_root(P, basis, u, betas=False):
    """R (e p p) with R^T R = J^T J over all steps and trajectories, so R^T R / sigma^2 is the
    information. J^T J itself would lose what lies below 1e-8 of the largest singular value of J:
    under the public script's truths the smallest are 1e-12 of it.
    """
    n_parameters = P["theta"][0].numel() + 2 * betas
    R = u.new_zeros(len(u), n_parameters, n_parameters)
    for _, J in sensitivities(P, basis, u, betas):
        R = torch.linalg.qr(torch.cat([R, J.mT], 1), mode="r").R
    return R


def operator_jacobian(kernel, P, betas=False):
    """G = d M / d theta of a basis kernel, scaled so that |G dtheta| is an MOE: (e (k m) p).
    With `betas`, beta_A and beta_B follow theta."""
    def operator(P_of_one):
        as_one_seed = {name: value[None] for name, value in P_of_one.items()}
        return markov_operator(kernel, as_one_seed).flatten()   # (k m)

    G = torch.func.vmap(torch.func.jacfwd(operator))(P)
    columns = [G["theta"].flatten(2)]                           # e (k m) (c f)
    if betas:
        columns += [G["beta_A"].flatten(2), G["beta_B"].flatten(2)]
    return torch.cat(columns, 2) / GRID ** 0.5                  # e (k m) p


def cramer_rao(R, G, noise):
    """The least E |G (theta_fit - theta)|^2 of an unbiased fit, noise^2 tr(G (R^T R)^-1 G^T).

    R (e q p), G (e m p) -> (e), with nan where the data do not determine theta: where R, its
    columns scaled to 1, has a singular value that is 0 to rounding. Then some direction of theta is
    free, and no unbiased fit exists.
    """
    unit = 1 / R.norm(dim=1).clamp_min(1e-15)                   # e p
    _, values, vectors = torch.linalg.svd(R * unit[:, None], full_matrices=False)
    rounding = R.shape[2] * torch.finfo(torch.float64).eps      # numpy's rule for the rank
    determined = values[:, -1] > rounding * values[:, 0]        # e
    along = ((G * unit[:, None]) @ vectors.mT).square().sum(1)  # e p
    bound = noise ** 2 * (along / values.square()).sum(-1)
    return torch.where(determined, bound, math.nan)


# ==================================================================================================
# The experiment: records, table, figure
# ==================================================================================================

# ---- records -------------------------------------------------------------------------------------

def list_of_seeds(cfg):
    """The first cfg.seeds seeds."""
    if cfg.seed_list == "public":
        return [42 * i for i in range(cfg.seeds)]
    return list(common.SEEDS[:cfg.seeds])


def learned_parameters(kernel, P, cfg):
    """The names of what a fit may change."""
    if kernel == "hypernet" or cfg.fit_scalars:
        return list(P)
    return ["theta"]


def is_least_squares(kernel, cfg):
    """Whether Levenberg-Marquardt fits this kernel."""
    return kernel != "hypernet" and cfg.fit == "lm"


def start_deviations(P, cfg):
    """The standard deviation of the start's noise on each parameter p of one seed, (1 p)."""
    names = ["theta", "beta_A", "beta_B"] if cfg.fit_scalars else ["theta"]
    parts = []
    for name in names:
        deviation = start_deviation(name, P[name], cfg.start_noise_absolute)
        parts.append(cfg.start_noise * deviation.flatten(1))
    return torch.cat(parts, 1)


def least_rms_errors(kernel, truths, features, u, cfg):
    """The roots of the Cramer-Rao bounds of each seed, {"bound", "bound_with_start": (e)}.

    Where the fit learns the scalars too, so does the estimator that is bounded, except alpha: the
    coefficients make up for any change of it.
    """
    P = stack_systems(truths)
    R = information_root(P, features, u, cfg.fit_scalars)       # e p p
    G = operator_jacobian(kernel, P, cfg.fit_scalars)           # e (k m) p
    # In units of the start's deviations, the start measures each parameter with deviation 1.
    deviations = torch.cat([start_deviations(truth, cfg) for truth in truths])[:, None]     # e 1 p
    by_start = cfg.noise * torch.eye(R.shape[2], dtype=R.dtype).expand_as(R)
    with_start = torch.cat([R * deviations, by_start], 1)       # e 2p p
    return {"bound": cramer_rao(R, G, cfg.noise).sqrt(),
            "bound_with_start": cramer_rao(with_start, G * deviations, cfg.noise).sqrt()}


def recover_seeds(kernel, size, seeds, truths, starts, cfg):
    """Observe and fit some seeds at one N: {name: (e)}."""
    P = stack_systems(truths)
    start = stack_systems(starts)
    tau, u, y = observe_all(kernel, seeds, truths, size, cfg)   # e l b
    features = SYSTEMS[kernel].features(tau.flatten(1))         # e k (l b)
    data = (features.float(), u.float(), y.float())
    if is_least_squares(kernel, cfg):
        fitted = levenberg_marquardt(start, *data, cfg.iterations)
    else:
        fitted = adam(kernel, start, *data, learned_parameters(kernel, P, cfg), cfg)

    M_true = markov_operator(kernel, P)
    M = markov_operator(kernel, fitted)
    found = {"moe": operator_error(M, M_true), "kappa_pe": excitation(tau, u),
             "public": error_in_public_scaling(M, M_true)}
    if kernel != "hypernet":                                    # whose information is singular
        found |= least_rms_errors(kernel, truths, features, u, cfg)
    return found


def recover_size(kernel, size, seeds, truths, starts, cfg):
    """Observe and fit all seeds at one N, as many at once as fit the cache: {name: [e]}."""
    at_once_of_one = size
    if not is_least_squares(kernel, cfg) and cfg.batch > 0:
        at_once_of_one = cfg.batch
    n_seeds = max(1, CHUNK // at_once_of_one)
    row = {}
    for first in range(0, len(seeds), n_seeds):
        part = slice(first, first + n_seeds)
        found = recover_seeds(kernel, size, seeds[part], truths[part], starts[part], cfg)
        for name, values in found.items():
            row.setdefault(name, []).extend(values.tolist())
    return row


def recover(kernel, cfg, bar=None):
    """The record of one kernel, with a number for each seed: {"seeds", "sizes": {N: {name: [e]}},
    "norm" of the true operator, MOE of the best "constant" operator, MOE of the "start"}."""
    seeds = list_of_seeds(cfg)
    truths = [random_truth(kernel, seed, cfg.truth, cfg.width) for seed in seeds]
    starts = []
    for seed, P in zip(seeds, truths):
        starts.append(noisy_copy(seed, P, learned_parameters(kernel, P, cfg), cfg))
    M = markov_operator(kernel, stack_systems(truths))          # e k m
    M_start = markov_operator(kernel, stack_systems(starts))
    M_constant = M.mean(-1, keepdim=True)
    record = {"seeds": seeds, "sizes": {},
              "norm": operator_error(0 * M, M).tolist(),
              "constant": operator_error(M_constant, M).tolist(),
              "start": operator_error(M_start, M).tolist()}
    for size in sorted(set(cfg.sizes)):
        began = time.perf_counter()
        row = recover_size(kernel, size, seeds, truths, starts, cfg)
        record["sizes"][size] = row
        seconds = time.perf_counter() - began
        common.log(f"{kernel}, N = {size}: median MOE {show_number(np.median(row['moe']))}, "
                   f"{seconds:.0f} s")
        if bar is not None:
            bar.update()
    return record


# ---- summary -------------------------------------------------------------------------------------

def over_seeds(values):
    """Interval of values of seeds, mean and 1.96 standard errors (C.3, Figure 2). nan, which JSON
    holds as null, where one is not finite or none is left."""
    values = [float(v) for v in values]
    if not values or not all(map(math.isfinite, values)):
        return common.Interval(math.nan, math.nan, len(values))
    return common.interval(values, student=False)


def root_mean_square(values):
    """nan where there are none, or one is nan."""
    if len(values) == 0:
        return math.nan
    return float(np.sqrt(np.mean(np.square(values))))


def decay_rates(sizes, errors):
    """Exponents of N: [through the end points, by regression]; nan where there are none."""
    errors = np.asarray(errors)
    usable = np.isfinite(errors) & (errors > 0)
    if len(sizes) < 2 or not usable.all():
        return [math.nan, math.nan]
    x = np.log(sizes)
    log_errors = np.log(errors)
    end_points = (log_errors[-1] - log_errors[0]) / (x[-1] - x[0])
    regression = np.polyfit(x, log_errors, 1)[0]
    return [float(end_points), float(regression)]


def summarise(record):
    """Intervals over seeds for each N; rates [end points, regression] of the mean MOE, of each
    seed's and of the bound. A fit that is 10 times as far off as no operator at all has diverged:
    it is left out, and n says so."""
    sizes = [int(size) for size in record["sizes"]]
    rows = list(record["sizes"].values())
    limit = DIVERGED * np.array(record["norm"])                 # e
    summary = {"moe": [], "public": [], "kappa_pe": [], "start": over_seeds(record["start"]),
               "constant": over_seeds(record["constant"]), "better": [], "diverged": []}
    always_fine = np.full(len(limit), True)
    for row in rows:
        moe = np.array(row["moe"])
        fine = moe < limit                                      # e; False for nan
        always_fine &= fine
        summary["moe"].append(over_seeds(moe[fine]))
        summary["public"].append(over_seeds(np.array(row["public"])[fine]))
        summary["kappa_pe"].append(over_seeds(row["kappa_pe"]))
        summary["better"].append(float(np.mean(moe < record["start"])))
        summary["diverged"].append(int(np.sum(~fine)))

    summary["rates"] = decay_rates(sizes, [interval.mean for interval in summary["moe"]])
    rates_of_seeds = []
    for seed in np.flatnonzero(always_fine):
        rates_of_seeds.append(decay_rates(sizes, [row["moe"][seed] for row in rows]))
    summary["seed_rates"] = [over_seeds([rates[i] for rates in rates_of_seeds]) for i in range(2)]

    for name in ("bound", "bound_with_start"):                  # older files have the first alone
        if name in rows[0]:
            bounds, ratios = summarise_bound(name, rows, limit)
            summary[name] = bounds
            summary[name.replace("bound", "ratio")] = ratios
            summary[name.replace("bound", "bound_rates")] = decay_rates(sizes, bounds)
    return summary


def summarise_bound(name, rows, limit):
    """RMS over seeds of a bound and of MOE / bound, for each N."""
    bounds = []
    ratios = []
    for row in rows:
        moe = np.array(row["moe"])
        bound = np.array(row[name])
        fine = moe < limit
        bounds.append(root_mean_square(bound))
        with np.errstate(divide="ignore", invalid="ignore"):    # without noise the bound is 0
            ratios.append(root_mean_square(moe[fine] / bound[fine]))
    return bounds, ratios


# ---- table ---------------------------------------------------------------------------------------

def show_number(value, digits=4):
    """A number as text; n/a for nan and infinity."""
    if not math.isfinite(value):
        return "n/a"
    return f"{value:.{digits}f}"


def show_interval(interval, digits=4):
    """A mean and its interval as text."""
    if math.isnan(interval.mean):
        return "n/a"
    return interval.show(digits=digits)


def bound_rows(summary, which, label, ratio_label):
    """The rows of a bound and of MOE over it. which: the end of its names in the summary."""
    bounds = [show_number(bound) for bound in summary["bound" + which]]
    rates = [show_number(rate, 2) for rate in summary["bound_rates" + which]]
    ratios = [show_number(ratio, 2) for ratio in summary["ratio" + which]]
    return [[label, *bounds, *rates], [ratio_label, *ratios, "", ""]]


def kernel_rows(kernel, summary, cfg):
    """The table's rows of one kernel."""
    moe = []
    for interval in summary["moe"]:
        left_out = f" (n = {interval.n})" if interval.n < cfg.seeds else ""
        moe.append(show_interval(interval) + left_out)
    rates = []
    for of_mean, of_seeds in zip(summary["rates"], summary["seed_rates"]):
        rates.append(f"{show_number(of_mean, 2)} (seeds {show_interval(of_seeds, 2)})")
    rows = [[f"**{kernel}** (paper: rate {PAPER_RATE[kernel]}), MOE", *moe, *rates]]
    if "bound" in summary:
        rows += bound_rows(summary, "", "Cramer-Rao bound, RMS", "MOE / bound, RMS")
    if "bound_with_start" in summary:
        rows += bound_rows(summary, "_with_start", "bound with the start as data, RMS",
                           "MOE / bound with the start, RMS")
    if cfg.public_scaling:
        public = [show_interval(interval) for interval in summary["public"]]
        rows.append(["in the public script's scaling", *public, "", ""])
    start = show_interval(summary["start"], 3)
    constant = show_interval(summary["constant"], 3)
    better = [f"{share:.0%}" for share in summary["better"]]
    rows.append([f"better than the start, {start} (best constant operator: {constant})", *better,
                 "", ""])
    return rows


def recovery_table(summaries, cfg):
    """Markdown of {kernel: summary}, with what a reader must know below it."""
    sizes = [f"N = {size}" for size in sorted(set(cfg.sizes))]
    head = ["", *sizes, "rate, end points", "regression"]
    rows = []
    for kernel, summary in summaries.items():
        rows += kernel_rows(kernel, summary, cfg)
    any_summary = next(iter(summaries.values()))                # all kernels see the same tau and u
    kappa_pe = [show_interval(interval, 2) for interval in any_summary["kappa_pe"]]
    rows.append(["kappa_pe (eq. 26)", *kappa_pe, "", ""])
    below = (f"Mean ± 1.96 standard errors over {cfg.seeds} seeds; a fit that diverged is left "
             f"out, and n says so. {NOTE}")
    return f"{common.markdown(head, *rows)}\n\n{below}"


# ---- figure --------------------------------------------------------------------------------------

def draw_kernel(ax, kernel, summary, sizes):
    """One panel of Figure 2."""
    mean = np.array([interval.mean for interval in summary["moe"]])
    half = np.array([interval.half for interval in summary["moe"]])
    blue, red, green = common.COLORS[:3]
    start = summary["start"]
    ax.axhspan(start.mean - start.half, start.mean + start.half, color="0.93", zorder=0)
    ax.axhline(start.mean, color="0.4", ls=":", zorder=1, label="start of the fit, 95 %")
    ax.fill_between(sizes, mean - half, mean + half, color=blue, alpha=0.25, lw=0)
    ax.loglog(sizes, mean, "o-", color=blue, label="error of the fit, 95 %")
    reference = mean[0] * (sizes[0] / np.array(sizes)) ** 0.5
    ax.loglog(sizes, reference, "--", color=red, label="slope $N^{-1/2}$")
    if np.isfinite(summary.get("bound", [])).any():             # nan is left out
        ax.loglog(sizes, summary["bound"], "s-", ms=4, lw=1.2, color=green,
                  label="Cramer-Rao bound, root mean square")
    rate = show_number(summary["rates"][0], 2)
    ax.set(title=f"{kernel}: rate {rate} (paper: {PAPER_RATE[kernel]})",
           xlabel="trajectories N")
    ax.minorticks_off()
    ax.set_xticks(sizes, sizes)


def draw_recovery(summaries, cfg, path):
    """Figure 2: a panel for each kernel."""
    sizes = sorted(set(cfg.sizes))
    figure = common.new_figure(max(9, 4.4 * len(summaries)), 4.4)
    panels = figure.subplots(1, len(summaries), sharey=True, squeeze=False)[0]
    legend = {}
    for ax, (kernel, summary) in zip(panels, summaries.items()):
        draw_kernel(ax, kernel, summary, sizes)
        for handle, label in zip(*ax.get_legend_handles_labels()):
            legend[label] = handle
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4,
                  frameon=False)
    ticks = common.decade_ticks(*panels[0].get_ylim())
    panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[0].set_ylabel("Markov operator error, MOE (no unit)")
    common.save_figure(figure, path)


# ---- main ----------------------------------------------------------------------------------------

def check_config(cfg):
    """Refuse settings that do not go together."""
    if cfg.seeds > len(common.SEEDS):
        raise common.UserError(f"--seeds: got {cfg.seeds}, need 1 to {len(common.SEEDS)}")
    if cfg.hold_out >= 1:
        raise common.UserError(f"--hold-out: got {cfg.hold_out}, need a share in [0, 1)")
    if cfg.fit_scalars and cfg.fit == "lm":
        raise common.UserError("--fit: got lm, which fits theta alone: need adam, or "
                               "--no-fit-scalars")


def run_name(cfg):
    """The folder of a run, and part of the name of its figure."""
    name = "recovery"
    if cfg.fit == "adam":
        name = "adam"
    if cfg.preset.startswith("published"):
        name = cfg.preset
    if cfg.constant_tau:
        name += "_constant_tau"
    if cfg.preset == "quick":
        name += "_quick"
    return name


def main(cfg):
    """{"kernels": {kernel: recover()}, "summary": {kernel: summarise()}, "table", "seconds"}."""
    check_config(cfg)
    env = common.banner("synth_lpv.py", cfg)
    began = time.perf_counter()
    records = {}
    with common.progress(total=len(cfg.kernel) * len(set(cfg.sizes)), desc="fits") as bar:
        for kernel in cfg.kernel:
            records[kernel] = recover(kernel, cfg, bar)
    summaries = {kernel: summarise(record) for kernel, record in records.items()}
    table = recovery_table(summaries, cfg)
    common.log(table)

    seconds = time.perf_counter() - began
    result = {"kernels": records, "summary": summaries, "seconds": seconds, "table": table}
    run = run_name(cfg)
    folder = common.ROOT / cfg.out / run
    common.save_result(folder / "result.json", result, cfg, env)
    draw_recovery(summaries, cfg, folder / f"fig2_{run}.png")
    common.log(f"wrote {cfg.out}/{run}/result.json and fig2_{run}.png")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main, PRESETS)
