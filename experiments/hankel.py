"""Linear systems and their reduction: Hankel singular values and balanced truncation.

Of "SSM Adapters via Hankel Reduced-order Modeling" (arXiv 2606.26290), its eq. 5 to 15. A system
G = (A, B, C) remembers its input h in a state s of d numbers:

    s_t = A s_{t-1} + B h_t,    y_t = C s_t = sum over k of C A^k B h_{t-k}          (5), (19)

Balanced truncation changes the basis of the state so that each direction is as easy to reach by
inputs as it is to see in outputs, and leaves out those where both are small.

Run:      not a script; hrm_adapter.py uses it.
Symbols:  h       input, b l m                        s, d      state, and the number of its entries
          y       output, b l p                       rate      of a diagonal A = exp(-rate), d
          W_c     controllability Gramian, d d (6)    W_o       observability Gramian, d d (8)
          sigma   Hankel singular values, d: roots of the eigenvalues of W_c W_o, descending (10)
          T       the balancing change of basis (11)  G, G_hat  a system and its reduction (12)
Differs from the paper: (5) has a feed-through D. Here s_t already holds h_t, as (19) is written,
          and there is no D. On the unit circle that differs from C (z - A)^-1 B by the factor z
          alone, whose absolute value is 1: Gramians, norms and Glover's bound are those of D = 0.
The text that this follows names the equations 4, 5, 18 and 19; other numbers are counted along it.
"""
import math
from typing import NamedTuple

import torch
from scipy.fft import next_fast_len

from data import noise_generator


class DiagonalSystem(NamedTuple):
    """A = diag(exp(-rate)). The rate is kept and not A: it is exact where A is close to 1."""
    rate: torch.Tensor  # d, positive
    B: torch.Tensor     # d m
    C: torch.Tensor     # p d


class DenseSystem(NamedTuple):
    """Any A, such as that of a balanced system."""
    A: torch.Tensor     # d d
    B: torch.Tensor     # d m
    C: torch.Tensor     # p d


# ---- running a system ----------------------------------------------------------------------------
def causal_convolution(u, kernel):
    """s_t = sum over k of kernel_k u_{t-k}, in O(l log l): FFT on at least 2 l points (25).

    u: b l d. kernel: d l, numbers for each entry of u; or e d l, matrices. Returns b l d, or b l e.
    """
    l = u.shape[1]
    n = next_fast_len(2 * l, real=True)
    U = torch.fft.rfft(u.mT, n)                                           # b d f
    K = torch.fft.rfft(kernel, n)                                         # d f, or e d f
    if kernel.ndim == 2:
        S = U * K                                                         # b d f
    else:
        S = torch.einsum("edf,bdf->bef", K, U)                            # b e f
    return torch.fft.irfft(S, n)[..., :l].mT                              # b l d, or b l e


def powers(system, length):
    """A^k for k = 0 to length - 1: of a DiagonalSystem the diagonals, d l; else matrices, d d l."""
    if isinstance(system, DiagonalSystem):
        k = torch.arange(length, device=system.rate.device)
        return torch.exp(-system.rate[:, None] * k)                       # d l
    found = [torch.eye(len(system.A)).to(system.A)]
    for _ in range(length - 1):
        found.append(found[-1] @ system.A)
    return torch.stack(found, -1)                                         # d d l


def run_system(system, h):
    """The output y, b l p, for h, b l m, from state 0. Computed in the wider of their two types,
    returned in that of h.
    """
    wide = [part.to(torch.promote_types(h.dtype, part.dtype)) for part in system]
    system = type(system)(*wide)
    u = h.to(system.B.dtype) @ system.B.mT                                # b l d
    s = causal_convolution(u, powers(system, h.shape[1]))                 # b l d
    return (s @ system.C.mT).to(h.dtype)                                  # b l p


# ---- Gramians and Hankel singular values ---------------------------------------------------------
def gramians(system):
    """W_c, W_o of a DiagonalSystem, d d: the Lyapunov equations (7), (9) solved entry by entry.

    W_c = A W_c A + B B^T, and entry i, j of A W_c A is a_i a_j times that of W_c.
    """
    rate, B, C = system
    one_minus_aa = -torch.expm1(-(rate[:, None] + rate[None, :]))         # d d, 1 - a_i a_j
    W_c = B @ B.mT / one_minus_aa
    W_o = C.mT @ C / one_minus_aa
    return W_c, W_o


def empirical_gramians(rate, B, C, h):
    """W_c, W_o, d d, of a system whose B_t and C_t depend on the input (14), (15). O(n l d^2).

    rate: d. B: n l d m. C: n l p d. h: n l m, the n inputs to calibrate on.
    W_c is the mean of s_t s_t^T over inputs and over the later half of time, when the state no
    longer feels its start. W_o is that of Lall et al. (1999): release each unit state without
    input, under the C_t of an input, and sum the products of the outputs; then average over inputs.
    White h and fixed B, C lead to `gramians`, with an error that falls as n^-1/2.
    """
    n, l = h.shape[:2]
    a_to_k = torch.exp(-rate[:, None] * torch.arange(l))                  # d l
    u = torch.einsum("nldm,nlm->nld", B, h)
    s = causal_convolution(u, a_to_k)[:, l // 2:]                         # n l/2 d
    W_c = torch.einsum("nli,nlj->ij", s, s) / s[..., 0].numel()
    released = C * a_to_k.T[:, None]                                      # n l p d
    W_o = torch.einsum("nlpi,nlpj->ij", released, released) / n
    return W_c, W_o


def empirical_convergence(seed):
    """[n, relative error] of `empirical_gramians` against their limit, for n inputs.

    The input is white, and B_t = B (1 + sign / 2), C_t likewise, where the sign is that of the sum
    of h_{t-1}. The mean of (1 + sign / 2)^2 is 5/4, so the limit is 5/4 of the closed form.
    """
    generator = noise_generator(seed)
    B = torch.randn(3, 2, generator=generator)
    C = torch.randn(2, 3, generator=generator)
    h = torch.randn(2048, 200, 2, generator=generator)                    # n l m
    rate = torch.tensor([0.05, 0.1, 0.4])
    sign = h.sum(-1).roll(1, 1)[..., None, None].sign()                   # n l 1 1
    swing = 1 + sign / 2
    limit = 1.25 * torch.stack(gramians(DiagonalSystem(rate, B, C)))      # 2 d d
    found = []
    for n in (8, 32, 128, 512, 2048):
        W = torch.stack(empirical_gramians(rate, swing[:n] * B, swing[:n] * C, h[:n]))
        error = (W - limit).norm() / limit.norm()
        found.append([n, error.item()])
    return found


def gramian_root(W):
    """L with L L^T = W. By eigenvalues, not Cholesky: Gramians are often singular to rounding."""
    values, vectors = torch.linalg.eigh(W)
    return vectors * values.clamp(min=0).sqrt()                           # d d, columns scaled


def hankel_singular_values(W_c, W_o):
    """sigma, d (10)."""
    return torch.linalg.svdvals(gramian_root(W_o).mT @ gramian_root(W_c))


# ---- balanced truncation -------------------------------------------------------------------------
def balance(system, W=None):
    """The same map as a DenseSystem whose two Gramians are both diag(sigma) (11), and sigma.

    system: a DiagonalSystem. W: (W_c, W_o) to balance in place of its own, such as empirical ones.
    States below 1e-9 of the largest sigma are rounding errors and left out, so that A may be
    smaller than sigma is long.
    """
    W_c, W_o = W or gramians(system)
    L_c = gramian_root(W_c)
    L_o = gramian_root(W_o)
    U, sigma, Vt = torch.linalg.svd(L_o.mT @ L_c)
    n = max(1, int((sigma > 1e-9 * sigma[0]).sum()))
    scale = sigma[:n].clamp(min=1e-30) ** -0.5                            # finite for a zero system
    T = scale[:, None] * (L_o @ U[:, :n]).mT                              # n d
    T_inverse = L_c @ Vt[:n].mT * scale                                   # d n
    A = T * torch.exp(-system.rate) @ T_inverse                           # n n
    return DenseSystem(A, T @ system.B, system.C @ T_inverse), sigma


def states_to_keep(sigma, share=None, bound=None):
    """How many of sigma, at least 1: as few as keep `share` of their sum, or as few as leave
    Glover's bound on the error (13), twice the sum of the discarded ones, at most `bound`.
    """
    kept = sigma.cumsum(0)
    total = kept[-1]
    if bound is None:
        too_few = kept < share * total
    else:
        too_few = 2 * (total - kept) > bound
    return int(too_few.sum()) + 1


def truncate(system, share=None, bound=None, W=None):
    """G_hat (12): the first states of the balanced DiagonalSystem, as many as `states_to_keep`."""
    balanced, sigma = balance(system, W)
    n = min(states_to_keep(sigma, share, bound), len(balanced.A))
    return DenseSystem(balanced.A[:n, :n], balanced.B[:n], balanced.C[:, :n])


def h_infinity_error(full, reduced, points=200):
    """max over w of the largest singular value of G(w) - G_hat(w), the left side of (13). float64.

    full: a DiagonalSystem, reduced: a DenseSystem. w runs over a grid of `points` logarithmic and
    as many even frequencies. The difference is itself a system, with the states of both. Its B and
    C are cut down to their triangular factors first, which have the same singular values: O(d^3)
    for a frequency, whatever m and p.
    """
    low = torch.logspace(-7, 0.49, points)                                # up to pi
    even = torch.linspace(0, math.pi, points)
    w = torch.cat([low, even]).double()
    A = torch.block_diag(torch.diag(torch.exp(-full.rate)), reduced.A)
    R_c = torch.linalg.qr(torch.cat([full.C, -reduced.C], 1))[1]
    R_b = torch.linalg.qr(torch.cat([full.B, reduced.B]).mT)[1]
    delay = torch.exp(-1j * w)[:, None, None]                             # w 1 1
    resolvent = torch.linalg.inv(torch.eye(len(A)) - A * delay)           # w d d
    G = R_c.to(resolvent) @ resolvent @ R_b.mT.to(resolvent)
    return torch.linalg.svdvals(G).max().item()
