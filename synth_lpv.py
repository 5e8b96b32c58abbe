"""Synthetic LPV-SSM recovery: how the operator error falls with N (4.2, B.2, C.5; Figure 2).

Run:      python synth_lpv.py              (three kernels, six sizes, 15 seeds: 3 minutes)
Last line: "wrote runs/synth_lpv/recovery.json and recovery.png"

Draw a true system tau -> A, B, C by Algorithm 5, 6 or 7; observe N trajectories of 20 steps, with a
new tau at every step; fit a system of the same form, from a noisy copy of the truth; compare:

    x_s = Abar(tau_s) x_{s-1} + Bbar(tau_s) u_s        y_s = C(tau_s)^T x_s + 0.1 noise
    M_k(tau) = C(tau)^T Abar(tau)^k Bbar(tau)          frozen-time Markov parameters, k = 0..14
    MOE = sqrt(mean over 200 tau in [0, 1] of sum_k (M_k - M_k of the fit)^2)

What a rate means: B.2 proves N^-1/2 for the squared error (eq. 32), so N^-1/4 for the error MOE.
The Cramer-Rao bound on the RMS error of unbiased estimators falls faster than N^-1/2 here: an
exponent does not tell a good estimator from a bad one, the ratio to the bound does. The rate of a
first-order fit (Adam) is a fact about its budget. A fit below the bound is biased: the start, a
noisy copy of the truth, still shows in it. The Hypernet has no bound: its information is singular.

Symbols:  tau, u, y  e l b    tau_s, u_s, y_s        A, B, C  e n m    A, B, C(tau), continuous
          theta      e c f    f = 1 + k: A_log_base, U_base, V_base, then _coeffs (Algorithm 6)
                              or _spec (7); channels c: A n, U (n r), V r; p = (c f) parameters
          e seeds, l steps (L), b trajectories (N), m = (l b) or the grid, n state, r rank,
          k basis function or lag
Differs from the paper, or is left open there: the truth (OURS: there is something to recover); the
          start's noise, absolute on bases, else relative to the RMS; alpha, beta_A and beta_B of
          Algorithms 6 and 7 are known to the fit; heads of the Hypernet are 2 x 2 factors, as in
          the adapters; it is stopped early. The Frobenius norm over grid and lags is sqrt(200) MOE.
Upstream: github.com/ibitec7/mark at 18a855b, analysis/*_synthetic_lpv.py. `--published` has its
          truth, budget and scaling of the error, and fits alpha and the betas (whose start has
          noise 0.02 here); streams are ours; its Hypernet, 256 wide, would take hours.
"""
import dataclasses
import math
import time
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F

import common
from data import noise_generator
from mark_adapters import chebyshev_basis, near_square

D_STATE, RANK, LENGTH, DT, EPS = 4, 2, 20, 0.1, 1e-7    # C.5
K_BASIS, N_FREQS, L_TIME = 3, 8, 256                    # Algorithms 6 and 7
LAGS, GRID = 15, 200                                    # of the MOE
PACKED = [D_STATE, D_STATE * RANK, RANK]                # channels c: A, U, V
A_DIM, V_DIM = near_square(D_STATE)                     # Algorithm 5: U_q (a r), V_q (r v)
HEADS = {"W_A": D_STATE} | dict.fromkeys(("W_B_scale", "W_B_shift", "W_C_scale", "W_C_shift"),
                                         RANK * (A_DIM + V_DIM))
SCALARS = ("beta_A_param", "alpha_B", "beta_B", "alpha_C", "beta_C")
WIDTH = 16                                              # of the MLP of Algorithm 5
PAPER_RATE = {"hypernet": -0.54, "chebyshev": -0.66, "dct": -0.64}
CHUNK = 1600                                            # trajectories at once: they fit the cache
NOTE = __doc__[__doc__.index("What a rate"):__doc__.index("Symbols")].replace("\n", " ").strip()

# The truth: ends of A_log_base, deviation of U_base and V_base, and of the coefficients (those of
# the DCT meet 1 / sqrt(256)). The public script's leaves little to recover.
OURS = dict(log_poles=(math.log(0.5), math.log(16)), factors=2.0, chebyshev=1.0, dct=16.0,
            beta_A=0.5, beta_B=1.0, alpha=0.0)
PUBLIC = dict(log_poles=(-2.0, 0.0), factors=0.5, chebyshev=0.5, dct=0.5,
              beta_A=0.5, beta_B=0.5, alpha=1.0)
PUBLISHED = dict(kernel=("chebyshev", "dct"), fit="adam", steps=1500, lr=0.08, batch=0, hold_out=0.)
QUICK = dict(seeds=3, steps=150, iterations=40)


@dataclasses.dataclass(frozen=True)
class Config:
    """Recover synthetic LPV systems from N trajectories: table, rates and Figure 2."""
    MAY_BE_ZERO: ClassVar = ("iterations", "batch")
    kernel: tuple[str, ...] = ("hypernet", "chebyshev", "dct")
    sizes: tuple[int, ...] = (50, 100, 200, 400, 800, 1600)  # N
    seeds: int = 15                    # seed i is 42 + 100 i
    fit: Literal["lm", "adam"] = "lm"  # of the two bases; the hypernet is always trained by Adam
    iterations: int = 60               # of Levenberg-Marquardt: fewer leave more of the start
    steps: int = 800                   # of Adam, its rate falling to 0 as a cosine
    lr: float = 1e-3
    batch: int = 50                    # trajectories in a step of Adam; 0: all
    hold_out: float = 0.2              # share that stops Adam early; 0: the whole budget
    noise: float = 0.1                 # sigma of the observed y
    start_noise: float = 0.1
    constant_tau: bool = False         # one tau per trajectory: the frozen context of B.2
    published: bool = False            # the public script's settings, on the two bases: 15 minutes
    quick: bool = False                # 3 seeds, smaller budgets: 20 seconds
    out: str = "runs/synth_lpv"        # folder of result and figure
    publish: bool = False              # also write results/synth_lpv/ and figures/


# ---- Algorithms 5 to 7: tau -> features; P, features -> A, B, C. At the right, the paper's lines.
# P holds tensors that lead with e: scalars (e 1 1), vectors (e n 1), matrices (e n k).

def embedding(tau):
    """Algorithm 5, line 3: [sin 2 pi f tau, cos 2 pi f tau], f < 64; (e m) -> (e k m), k = 128."""
    angle = 2 * math.pi * torch.arange(64, dtype=tau.dtype)[:, None] * tau[:, None]
    return torch.cat([angle.sin(), angle.cos()], 1)


def hypernet(P, cond):
    """Algorithm 5: cond = embedding(tau) -> A, B, C (e n m)."""
    h = cond
    for layer in "1234":                                                       # 4
        h = F.silu(P["W" + layer] @ h + P["b" + layer])
    heads = torch.cat([P[name] for name in HEADS], 1) @ h
    a_shift, q = heads[:, :D_STATE], heads[:, D_STATE:].unflatten(1, (4, -1))  # e n m, e 4 q m
    U_q, V_q = q.split([A_DIM * RANK, RANK * V_DIM], 2)                        # 5: uvflat
    UV = U_q.unflatten(2, (A_DIM, RANK, 1)) * V_q.unflatten(2, (1, RANK, V_DIM))
    bounded = torch.tanh(UV.sum(3).flatten(2, 3)).unbind(1)                    # 4 of e n m
    beta_A = 0.5 * torch.sigmoid(P["beta_A_param"])                            # 6
    A = -torch.exp(P["A_log_base"] + beta_A * torch.tanh(a_shift))             # 7
    b_base = (P["U_base"] @ P["V_base"]).flatten(1)[..., None]                 # 8
    b_scale, b_shift = 1 + P["alpha_B"] * bounded[0], P["beta_B"] * bounded[1]  # 9
    B = b_base * b_scale + b_shift                                             # 10
    c_scale, c_shift = 1 + P["alpha_C"] * bounded[2], P["beta_C"] * bounded[3]  # 11
    return A, B, 1 * c_scale + c_shift                                         # 12


def cosines(tau):
    """Algorithm 7, lines 5 and 6: b_k(tau) = c_k cos(pi k tau), k < 8; (e m) -> (e k m)."""
    k = torch.arange(N_FREQS, dtype=tau.dtype)[:, None]
    c = ((2 - (k == 0).to(tau.dtype)) / L_TIME).sqrt()
    return c * torch.cos(math.pi * k * tau[:, None])


def attenuated(P, basis):
    """Algorithm 7, line 4: w_k b_k(tau). Algorithm 6 has no alpha, and attenuates nothing."""
    k = torch.arange(basis.shape[1], dtype=basis.dtype)[:, None]
    return basis * (k + 1) ** -(F.softplus(P["alpha"]) + 1e-4) if "alpha" in P else basis


def basis_kernel(P, basis):
    """Algorithms 6 (lines 3 to 7: in KERNELS) and 7, lines 8 to 12 -> A, B, C (e n m)."""
    A_log_base, U_base, V_base = P["theta"][..., :1].split(PACKED, 1)
    shifts = P["theta"][..., 1:] @ attenuated(P, basis)                        # 8, 9
    A_shift, U_shift, V_shift = shifts.split(PACKED, 1)
    A = -torch.exp(A_log_base + P["beta_A"] * torch.tanh(A_shift))             # 10
    U = U_base + P["beta_B"] * torch.tanh(U_shift)                             # 11
    V = V_base + P["beta_B"] * torch.tanh(V_shift)
    B = (U.unflatten(1, (D_STATE, RANK)) * V[:, None]).sum(2)                  # 12: B = U V, C = 1
    return A, B, torch.ones_like(A)


KERNELS = {"hypernet": (embedding, hypernet), "dct": (cosines, basis_kernel),
           "chebyshev": (lambda tau: chebyshev_basis(2 * tau - 1, K_BASIS), basis_kernel)}


def zero_order_hold(A, B):
    """Abar, Bbar of C.5."""
    Abar = torch.exp(A * DT)
    return Abar, (Abar - 1) / (A + EPS) * B


def roll_out(kernel, P, features, u):
    """y (e l b) without noise, from x = 0: features (e k (l b)), u (e l b)."""
    A, B, C = KERNELS[kernel][1](P, features)
    Abar, Bbar = (v.unflatten(2, u.shape[1:]) for v in zero_order_hold(A, B))  # e n l b
    states, x = [], torch.zeros_like(Abar[:, :, 0])                            # e n b
    for Abar_s, Bu_s in zip(Abar.unbind(2), (Bbar * u[:, None]).unbind(2)):
        x = torch.addcmul(Bu_s, Abar_s, x)
        states.append(x)
    return (C * torch.stack(states, 2).flatten(2)).sum(1).view_as(u)


def markov_operator(kernel, P):
    """M_k(tau) = C^T Abar^k Bbar for 15 lags k and 200 tau: (e k m)."""
    tau = torch.linspace(0, 1, GRID, dtype=torch.float64).expand(len(P["beta_B"]), -1)
    A, B, C = KERNELS[kernel][1](P, KERNELS[kernel][0](tau))
    Abar, Bbar = zero_order_hold(A, B)
    return (Abar[:, None] ** torch.arange(LAGS)[:, None, None] * (C * Bbar)[:, None]).sum(2)


def operator_error(M, M_true):
    """MOE, (e k m) -> (e)."""
    return (M - M_true).square().sum(1).mean(-1).sqrt()


def draw_truth(kernel, seed, truth):
    """P of one seed, float64, e = 1."""
    stream, scalars = noise_generator(seed, 0), dict.fromkeys(SCALARS, 0.5)
    def normal(scale, *shape):
        return scale * torch.randn(1, *shape, generator=stream, dtype=torch.float64)
    A_log_base = torch.linspace(*truth["log_poles"], D_STATE, dtype=torch.float64)[None, :, None]
    if kernel == "hypernet":  # gain 1.6, and frequency f damped by 1 + f: tau survives, smoothly
        weight = 1 / (1 + torch.arange(64).double()).repeat(2)
        P = {"A_log_base": A_log_base, "U_base": normal(truth["factors"], A_DIM, RANK),
             "V_base": normal(truth["factors"], RANK, V_DIM),
             "W1": normal(1.6, WIDTH, 128) * weight / weight.norm()}
        P |= {"b" + layer: normal(0.1, WIDTH, 1) for layer in "1234"}
        for name, n in {"W2": WIDTH, "W3": WIDTH, "W4": WIDTH, **HEADS}.items():
            P[name] = normal(1.6 / WIDTH ** 0.5, n, WIDTH)
    else:
        scalars = {k: truth[k] for k in ("beta_A", "beta_B", *["alpha"] * (kernel == "dct"))}
        base = torch.cat([A_log_base, normal(truth["factors"], sum(PACKED[1:]), 1)], 1)
        coeffs = normal(truth[kernel], sum(PACKED), N_FREQS if kernel == "dct" else K_BASIS)
        P = {"theta": torch.cat([base, coeffs], 2)}
    return P | {k: torch.full((1, 1, 1), v, dtype=torch.float64) for k, v in scalars.items()}


def noisy_copy(seed, P, learned, cfg):
    """The start of a fit. The public script's noise is absolute, and a fifth of it on scalars."""
    stream, start = noise_generator(seed, 1), dict(P)
    for name in learned:
        scale = torch.full_like(P[name], 0.2 if P[name].numel() == 1 else 1.0)
        if not cfg.published and not name.endswith("base"):
            relative = scale[..., 1:] if name == "theta" else scale
            relative.fill_(P[name][..., -relative.shape[-1]:].square().mean().sqrt())
        noise = torch.randn(scale.shape, generator=stream, dtype=torch.float64)
        start[name] = P[name] + cfg.start_noise * scale * noise
    return start


def draw_data(kernel, seed, P, size, cfg):
    """tau, u and the noisy y of `size` trajectories of one seed, each (1 l b) float64."""
    stream, shape = noise_generator(seed, 2, size), (1, LENGTH, size)
    tau = torch.rand(shape, generator=stream, dtype=torch.float64)
    tau = tau[:, :1].repeat(1, LENGTH, 1) if cfg.constant_tau else tau
    u, e = torch.randn(2, *shape, generator=stream, dtype=torch.float64)
    return tau, u, roll_out(kernel, P, KERNELS[kernel][0](tau.flatten(1)), u) + cfg.noise * e


# ---- fits ----------------------------------------------------------------------------------------

def normal_equations(P, basis, u, y):
    """J^T J (e p p), J^T r (e p), r^T r (e), float64: r = y - roll_out, J = d roll_out / d theta.
    The state's sensitivity is dx_s/dtheta = Abar_s dx_{s-1}/dtheta + dx_s/dchannel dchannel/dtheta;
    five channels j at tau_s drive state n: A_n, r of U, r of V."""
    basis = attenuated(P, basis).unflatten(2, u.shape[1:])                     # e k l b
    beta = torch.cat([P["beta_A"]] * PACKED[0] + [P["beta_B"]] * sum(PACKED[1:]), 1)    # e c 1
    base, coeffs, n = P["theta"][..., :1], P["theta"][..., 1:], torch.arange(D_STATE)[:, None]
    c = torch.cat([n, D_STATE + n * RANK + torch.arange(RANK),
                   (sum(PACKED[:2]) + torch.arange(RANK)).expand(D_STATE, -1)], 1)      # n j
    x, JTJ, JTr, rTr = 0, 0, 0, 0
    dx = u.new_zeros(len(u), *c.shape, 1 + basis.shape[1], u.shape[2])         # e n j f b
    J = u.new_empty(len(u), sum(PACKED), *dx.shape[3:])                        # e c f b
    for phi, u_s, y_s in zip(basis.unbind(2), u.unbind(1), y.unbind(1)):       # e k b, e b, e b
        shift = torch.tanh(coeffs @ phi)                                       # e c b
        slope = (beta * (1 - shift * shift))[:, c]                             # e n j b
        log_A, U, V = (base + beta * shift)[:, c].split([1, RANK, RANK], 2)
        A, B = -torch.exp(log_A), (U * V).sum(2, keepdim=True)                 # e n 1 b
        Abar, gain = zero_order_hold(A, 1.0)                                   # Bbar = gain B
        u_s, d_gain = u_s[:, None, None], A / (A + EPS) * (Abar * DT - gain)
        channels = torch.cat([Abar * A * DT * x + d_gain * B * u_s,            # dx_s / d log A_n,
                              gain * u_s * V, gain * u_s * U], 2)              # dU, dV
        x = Abar * x + gain * B * u_s                                          # e n 1 b
        dx *= Abar[:, :, :, None]                                              # in place: the cache
        dx[:, :, :, 0] += channels
        dx[:, :, :, 1:].addcmul_((channels * slope)[:, :, :, None], phi[:, None, None])
        J.zero_().index_add_(1, c.flatten(), dx.flatten(1, 2))                 # y = sum over n
        J_p, r = J.flatten(1, 2), y_s - x.sum((1, 2))                          # e p b, e b
        JTJ, rTr = JTJ + (J_p @ J_p.mT).double(), rTr + r.square().sum(-1).double()
        JTr = JTr + (J_p @ r[..., None])[..., 0].double()
    return JTJ, JTr, rTr


def levenberg_marquardt(P, basis, u, y, iterations):
    """Least squares from P, each seed with its own damping; J in the dtype of u, steps in float64.
    A step that does not lower r^T r, or is not finite, is not taken."""
    theta = candidate = P["theta"].clone()
    damping, state = u.new_full((len(u), 1), 1e-2, dtype=torch.float64), None
    for _ in range(iterations + 1):
        new = normal_equations({name: value.to(u.dtype) for name, value in
                                (P | {"theta": candidate}).items()}, basis, u, y)
        JTJ, JTr, rTr = state = state or new
        better = new[2] < rTr
        for value, new_value in zip((theta, *state), (candidate, *new)):
            value[better] = new_value[better]
        damping = torch.where(better[:, None], damping / 2, damping * 3)
        scale = damping * JTJ.diagonal(dim1=1, dim2=2).clamp_min(1e-12)        # e p
        step = torch.linalg.solve_ex(JTJ + torch.diag_embed(scale), JTr).result
        candidate = theta + step.view_as(theta)
    return P | {"theta": theta}


def adam(kernel, P, features, u, y, learned, cfg):
    """Mean squared error from P by AdamW, float32; elementwise, so no seed sees another.
    Each seed keeps the parameters that were best on the last trajectories, which are held out."""
    P = {name: value.float().requires_grad_(name in learned) for name, value in P.items()}
    size, train = u.shape[2], u.shape[2] - round(cfg.hold_out * u.shape[2])
    cuts = [*range(cfg.batch or size, train, cfg.batch or size), train]
    parts = (v.tensor_split(cuts, -1) for v in (features.unflatten(2, u.shape[1:]), u, y))
    *batches, check = [(part.flatten(2), *rest) for part, *rest in zip(*parts)]
    decay = 1e-4 if cfg.published else 0
    optimiser = torch.optim.AdamW([P[name] for name in learned], cfg.lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, cfg.steps)
    def loss(features, u, y):
        return (roll_out(kernel, P, features, u) - y).square().mean((1, 2))    # e
    best, kept = torch.full((len(u),), math.inf), {k: v.detach().clone() for k, v in P.items()}
    for step in range(cfg.steps + 1):                                          # the last at rate 0
        if train < size and (step % 20 == 0 or step == cfg.steps):
            with torch.no_grad():
                better = (now := loss(*check)) < best
                for value, new in ((best, now), *((kept[name], P[name]) for name in learned)):
                    value[better] = new[better]
        optimiser.zero_grad()
        loss(*batches[step % len(batches)]).sum().backward()
        optimiser.step()
        schedule.step()
    return {name: value.detach().double() for name, value in (kept if train < size else P).items()}


def cramer_rao(JTJ, G, noise, cut=1e-12):
    """noise^2 tr(G (J^T J)^+ G^T), (e p p), (e m p) -> (e): the least E |G (theta - theta_fit)|^2.
    J^T J gets a unit diagonal, and what is below `cut` of its largest eigenvalue is left out: of so
    few data that they do not determine theta, this is too low."""
    unit = JTJ.diagonal(dim1=1, dim2=2).clamp_min(1e-30).rsqrt()               # e p
    values, vectors = torch.linalg.eigh(unit[:, :, None] * JTJ * unit[:, None])
    inverse = torch.where(values > cut * values[:, -1:], 1 / values, 0)
    return noise ** 2 * (((G * unit[:, None]) @ vectors).square().sum(1) * inverse).sum(-1)


def operator_jacobian(kernel, P):
    """G = d M / d theta of a basis kernel, scaled so that |G dtheta| is an MOE: (e (k m) p)."""
    def operator(P):
        return markov_operator(kernel, {name: value[None] for name, value in P.items()}).flatten()
    G = torch.func.vmap(torch.func.jacfwd(operator))(P)["theta"]               # e (k m) c f
    return G.flatten(2) / GRID ** 0.5


def excitation(tau, u):
    """kappa_pe of eq. 26, estimated from tau, u (e l b): (e). White u without end has 1.
    The least eigenvalue of the second moment of psi_j(tau_s) u_{s-k}, 15 lags k, 8 orthonormal
    cosines psi_j; 0 where there are fewer than 120 samples."""
    psi = cosines(tau[:, LAGS - 1:].flatten(1)) * L_TIME ** 0.5                # e j (s b)
    past = u.unfold(1, LAGS, 1).flatten(1, 2).mT                               # e k (s b)
    z = (psi[:, :, None] * past[:, None]).flatten(1, 2)                        # e (j k) (s b)
    return torch.linalg.eigvalsh(z @ z.mT / z.shape[2])[:, 0].clamp_min(0)


# ---- the experiment ------------------------------------------------------------------------------

def recover(kernel, cfg, tick=lambda: None):
    """Fit one kernel at every N: {"norm", "constant", "start", "sizes"}, a number for each seed."""
    basis, truth = kernel != "hypernet", PUBLIC if cfg.published else OURS
    by_lm, bound = basis and cfg.fit == "lm", basis and not cfg.published
    seeds = [42 * i if cfg.published else seed for i, seed in enumerate(common.SEEDS[:cfg.seeds])]
    truths = [draw_truth(kernel, seed, truth) for seed in seeds]
    learned = ["theta"] if bound else [*truths[0]]
    starts = [noisy_copy(seed, P, learned, cfg) for seed, P in zip(seeds, truths)]
    def stack(systems):
        return {name: torch.cat([P[name] for P in systems]) for name in systems[0]}
    M = markov_operator(kernel, stack(truths))                                 # e k m
    record = {"seeds": seeds, "sizes": {}, "norm": operator_error(M, 0 * M).tolist(),
              "constant": operator_error(M, M.mean(-1, keepdim=True)).tolist(),
              "start": operator_error(M, markov_operator(kernel, stack(starts))).tolist()}
    for size in cfg.sizes:
        began, parts = time.perf_counter(), []
        at_once = max(1, CHUNK // (size if by_lm else cfg.batch or size))
        for part in (slice(i, i + at_once) for i in range(0, len(seeds), at_once)):
            P, start = stack(truths[part]), stack(starts[part])
            draws = [draw_data(kernel, *one, size, cfg) for one in zip(seeds[part], truths[part])]
            tau, u, y = map(torch.cat, zip(*draws))                            # e l b
            features = KERNELS[kernel][0](tau.flatten(1))
            data = features.float(), u.float(), y.float()
            fitted = (levenberg_marquardt(start, *data, cfg.iterations) if by_lm else
                      adam(kernel, start, *data, learned, cfg))
            error = markov_operator(kernel, fitted) - M[part]
            parts.append({"moe": operator_error(error, 0), "kappa_pe": excitation(tau, u),
                          "public": error.norm(dim=-1).mean(-1)})              # their scaling
            if bound:
                JTJ, G = normal_equations(P, features, u, y)[0], operator_jacobian(kernel, P)
                parts[-1]["bound"] = cramer_rao(JTJ, G, cfg.noise).sqrt()
        row = {name: torch.cat([part[name] for part in parts]).tolist() for name in parts[0]}
        record["sizes"][size] = row
        common.log(f"{kernel}, N = {size}: median MOE {np.median(row['moe']):.4f}, "
                   f"{time.perf_counter() - began:.0f} s")
        tick()
    return record


def interval(values):
    """[mean, 1.96 standard errors, n]; nan, which JSON holds as null, where there are too few."""
    n, mean = len(values), float(np.mean(values)) if len(values) else math.nan
    return [mean, 1.96 * float(np.std(values, ddof=1)) / n ** 0.5 if n > 1 else math.nan, n]


def show(value, digits=4):
    """A number, or a mean and its interval, as text."""
    return " ± ".join(f"{v:.{digits}f}" if v == v else "n/a" for v in np.atleast_1d(value)[:2])


def summarise(record):
    """Intervals over seeds for each N; rates [end points, least squares] of means, seeds and bound.
    A fit ten times as far off as no operator at all has diverged: it is left out, and n says so."""
    rows, x = [*record["sizes"].values()], np.log([*record["sizes"]])
    data = {name: np.array([row[name] for row in rows]) for name in rows[0]}   # sizes e
    fine = data["moe"] < 10 * np.array(record["norm"])                         # False for nan
    def rates(values):
        log = np.log(values)
        return ([(log[-1] - log[0]) / (x[-1] - x[0]), np.polyfit(x, log, 1)[0]] if len(x) > 1
                else [np.full(log.shape[1:], math.nan)] * 2)
    s = {k: [interval(v[ok]) for v, ok in zip(data[k], fine)] for k in ("moe", "public")}
    s |= {"kappa_pe": [interval(v) for v in data["kappa_pe"]], "start": interval(record["start"]),
          "constant": interval(record["constant"]),
          "better": (data["moe"] < record["start"]).mean(1).tolist(),
          "diverged": (~fine).sum(1).tolist(),
          "rates": [float(v) for v in rates([mean for mean, _, _ in s["moe"]])],
          "seed_rates": [interval(v) for v in rates(data["moe"][:, fine.all(0)])]}
    if "bound" in data:
        bound, square = data["bound"], (data["moe"] / data["bound"]) ** 2
        s |= {"bound": np.sqrt((bound ** 2).mean(1)).tolist(),
              "ratio": [interval(v[ok])[0] ** 0.5 for v, ok in zip(square, fine)]}
        s["bound_rates"] = [float(v) for v in rates(s["bound"])]
    return s


def table(summaries, cfg):
    """Markdown of {kernel: summary}, with what a reader must know below it."""
    head, lines = ["", *(f"N = {v}" for v in cfg.sizes), "rate, end points", "regression"], []
    for kernel, s in summaries.items():
        moe = [show(v) + f" (n = {v[2]})" * (v[2] < cfg.seeds) for v in s["moe"]]
        rates = [f"{show(mean, 2)} (seeds {show(seeds, 2)})"
                 for mean, seeds in zip(s["rates"], s["seed_rates"])]
        lines.append([f"**{kernel}** (paper: rate {PAPER_RATE[kernel]}), MOE", *moe, *rates])
        if "bound" in s:
            rates, ratios = ([show(v, 2) for v in s[name]] for name in ("bound_rates", "ratio"))
            lines += [["Cramer-Rao bound, RMS", *map(show, s["bound"]), *rates],
                      ["MOE / bound, RMS", *ratios, "", ""]]
        if cfg.published:
            lines.append(["in the public script's scaling", *map(show, s["public"]), "", ""])
        lines.append([f"better than the start, {show(s['start'], 3)} (best constant operator: "
                      f"{show(s['constant'], 3)})", *(f"{v:.0%}" for v in s["better"]), "", ""])
    lines.append(["kappa_pe (eq. 26)", *(show(v, 2) for v in s["kappa_pe"]), "", ""])
    return common.markdown(head, *lines) + (
        f"\n\nMean ± 1.96 standard errors over {cfg.seeds} seeds; a fit that diverged is left "
        f"out, and n says so. {NOTE}")


def draw(summaries, sizes, path):
    """Figure 2: a panel for each kernel."""
    from matplotlib.figure import Figure
    figure, shown = Figure(figsize=(4.2 * len(summaries), 3.9), layout="constrained"), {}
    for ax, (kernel, s) in zip(figure.subplots(1, len(summaries), sharey=True, squeeze=False)[0],
                               summaries.items()):
        mean, error, _ = np.array(s["moe"]).T
        ax.fill_between(sizes, mean - error, mean + error, color="C0", alpha=0.25, lw=0)
        ax.loglog(sizes, mean, "o-", color="C0", label="MOE, mean and 95 % interval")
        ax.loglog(sizes, mean[0] * (sizes[0] / np.array(sizes)) ** 0.5, "C3--", label="$N^{-1/2}$")
        if "bound" in s:
            ax.loglog(sizes, s["bound"], "k", lw=1.2, label="Cramer-Rao bound, RMS")
        elif kernel == "hypernet":
            ax.text(0.04, 0.04, "Not bounded: the information is singular,\nand what the data do "
                    "not show keeps its start.", transform=ax.transAxes, fontsize=8)
        ax.axhline(s["start"][0], color="0.6", ls=":", label="start of the fit")
        ax.set(title=f"{kernel}: rate {show(s['rates'][0], 2)} (paper: {PAPER_RATE[kernel]})",
               xlabel="trajectories N", xticks=sizes, xticklabels=sizes)
        ax.minorticks_off()
        shown |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4)
    figure.axes[0].set_ylabel("Markov operator error, MOE")
    common.save_figure(figure, path)


def main(cfg):
    """{"kernels": {kernel: recover()}, "summary": {kernel: summarise()}, "table", "seconds"}."""
    changed = (PUBLISHED if cfg.published else {}) | (QUICK if cfg.quick else {})
    cfg = dataclasses.replace(cfg, sizes=tuple(sorted(set(cfg.sizes))), **{
        k: v for k, v in changed.items() if getattr(cfg, k) == getattr(Config, k)})   # flags win
    for flag, fine, need in (
            ("kernel", cfg.kernel and {*cfg.kernel} <= {*KERNELS}, f"some of {', '.join(KERNELS)}"),
            ("seeds", cfg.seeds <= len(common.SEEDS), f"1 to {len(common.SEEDS)}"),
            ("hold_out", cfg.hold_out < 1, "a share in [0, 1)")):
        if not fine:
            raise common.UserError(f"--{flag.replace('_', '-')}: got {getattr(cfg, flag)}, "
                                   f"need {need}")
    env, began = common.banner("synth_lpv.py", cfg), time.perf_counter()
    with common.progress(total=len(cfg.kernel) * len(cfg.sizes), desc="fits") as bar:
        records = {kernel: recover(kernel, cfg, bar.update) for kernel in cfg.kernel}
    summaries = {kernel: summarise(record) for kernel, record in records.items()}
    result = {"kernels": records, "summary": summaries, "seconds": time.perf_counter() - began,
              "table": table(summaries, cfg)}
    run = "published" if cfg.published else "recovery" if cfg.fit == "lm" else "adam"
    run += "_constant_tau" * cfg.constant_tau + "_quick" * cfg.quick
    folder = common.ROOT / cfg.out
    common.log(result["table"])
    common.write_json(folder / f"{run}.json", {"metrics": result, "config": cfg})
    draw(summaries, cfg.sizes, folder / f"{run}.png")
    if cfg.publish:
        common.publish("synth_lpv", run, result, cfg, env)
        draw(summaries, cfg.sizes, common.ROOT / "figures" / f"fig2_{run}.png")
    common.log(f"wrote {cfg.out}/{run}.json and {run}.png")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
