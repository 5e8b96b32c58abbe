"""The bidirectional selective scan of Hydra's quasiseparable mixer, chunk by chunk (paper eq. 7, 11).

Run:      python chunk_scan.py        (checks itself and times three implementations, 1 minute)
Last line: "chunked scan: N.N x the plain recurrence, N.N x the SSD listing"

For each head, with the log-decay a = dt A (per position, head and direction):

    h_i = exp(a_i) h_{i-1} + dt_i B_i x_i^T        left to right, direction 0       (n p)
    g_i = exp(a_i) g_{i+1} + dt_i B_i x_i^T        right to left, direction 1       (n p)
    y_i = C_{i-1}^T h_{i-1} + C_{i+1}^T g_{i+1} + D_i x_i

The outputs are shifted by one, so that position i reads only its strict past and its strict future and
the diagonal is D alone. As a matrix, y = M x with M strictly lower (direction 0) plus strictly upper
(direction 1) semiseparable plus diagonal: the quasiseparable matrix of eq. 11.

Cut the sequence into chunks of q positions. Inside a chunk M is one full q x q matrix; across chunks only
the state at the border matters. Every array stays in position order: nothing is flipped, rolled or padded
by one, because "C of the predecessor" with the *exclusive* sum of a is all the shift amounts to.

Symbols:  x    input of the mixer           (b, l, h, p)
          dt   Delta after softplus         (b, l, 2, h)      Delta, eq. 9
          A    -exp(A_log')                 (h,) or (b|1, h)  A, eq. 8
          B, C read-in, read-out            (b, l, 2, g, n)   B, C
          D    diagonal                     (b, l, h)         delta_i, eq. 11
          b batch, l length, h heads, p head dim, g groups, n state, c chunks, q chunk size
Differs from the paper: eq. 11 as printed is not shifted, and C and B trade indices above the diagonal. The
          released code (github.com/goombalab/hydra) shifts both directions by one; this file follows it.
          Bbar = dt B (Euler), as there, where eq. 5 says zero-order hold.
"""
import dataclasses
import time

import torch
import torch.nn.functional as F
from einops import rearrange, repeat

import common

A_MIN = -30.0  # exp(-30) is 0 beside 1 in float32; an unbounded a would cost its neighbours their digits


def bidirectional_scan(x, dt, A, B, C, D, chunk_size=64):
    """The scan above, exact, in O(l) time. Returns y (b, l, h, p) in the dtype of x.

    x, B, C: float64, float32 or bfloat16. dt >= 0, A <= 0 and D: float32 or wider; the log-decay dt A
    (nats per step) is clamped to [-30, 0]. Any length >= 1, any strides. Differentiable in all six.
    Raises UserError where the shapes do not fit together.
    """
    b, l, h, p = x.shape
    if (dt.shape != (b, l, 2, h) or A.shape not in ((h,), (1, h), (b, h)) or D.shape != (b, l, h)
            or B.shape != C.shape or B.shape[:3] != (b, l, 2) or h % B.shape[3]):
        raise common.UserError(
            f"bidirectional_scan: x {tuple(x.shape)} (b l h p) needs dt (b l 2 h), A (h) or (b h), B and C "
            f"(b l 2 g n), D (b l h); got dt {tuple(dt.shape)}, A {tuple(A.shape)}, B {tuple(B.shape)}, "
            f"C {tuple(C.shape)}, D {tuple(D.shape)}")
    return chunked_scan(x, dt, A, B, C, D, chunk_size)


def chunked_scan(x, dt, A, B, C, D, chunk_size):
    """The PyTorch path of `bidirectional_scan`, for any device."""
    l, g, dtype = x.shape[1], B.shape[3], x.dtype
    q = min(chunk_size, l)
    skip = D[..., None].to(dtype) * x                                                  # b l h p
    pad = -l % q                                      # dt = 0 at the pads: they pass the state on unchanged
    x, dt, B, C = (F.pad(v, (0, 0) * (v.ndim - 2) + (0, pad)) if pad else v for v in (x, dt, B, C))

    a = (dt * A.view(-1, 1, 1, A.shape[-1])).clamp(A_MIN, 0)
    a, dt = (rearrange(v, "b (c q) d h -> d b c h q", q=q) for v in (a, dt))
    through = a.cumsum(-1)                            # sum of a over k <= i, within the chunk
    before = F.pad(through[..., :-1], (1, 0))         # sum of a over k <  i
    total = through[..., -1]                                                           # d b c h

    # C one step upstream of i in each direction: what position i reads the arriving state with.
    C = torch.stack([F.pad(C[:, :-1, 0], (0, 0, 0, 0, 1, 0)), F.pad(C[:, 1:, 1], (0, 0, 0, 0, 0, 1))])
    B, C = (rearrange(v, "d b (c q) g n -> d b c g q n", q=q) for v in (B.movedim(2, 0), C))
    x_heads = rearrange(x, "b (c q) h p -> b c h q p", q=q)

    # 1. Inside the chunk: j reaches i with exp(sum of a strictly between them) dt_j C_i^T B_j.
    lower = torch.ones(q, q, dtype=torch.bool, device=x.device).tril(-1)               # i > j
    diagonal = torch.eye(q, dtype=torch.bool, device=x.device)
    between = torch.where(lower, before[0][..., :, None] - through[0][..., None, :],
                          before[1][..., None, :] - through[1][..., :, None])          # b c h q q
    between = between.clamp(max=0)                    # rounding, and the diagonal that comes out as -a
    CB = C @ B.mT                                                                      # d b c g q q
    CB = torch.where(lower, CB[0], CB[1]).masked_fill(diagonal, 0)                     # b c g q q
    dt_from = torch.where(lower, dt[0][..., None, :], dt[1][..., None, :])             # b c h q q
    M = between.exp() * dt_from
    M = M.unflatten(2, (g, -1)) * CB[:, :, :, None]                                    # b c g h/g q q
    y = M.flatten(2, 3).to(dtype) @ x_heads                                            # b c h q p
    y = rearrange(y, "b c h q p -> b (c q) h p")

    # 2. The state each chunk leaves behind, and 3. the state that enters each chunk from upstream.
    to_end = torch.stack([total[0][..., None] - through[0], before[1]])                # d b c h q
    weight = rearrange(to_end.clamp(max=0).exp() * dt, "d b c h q -> d b c q h 1")
    x_chunks = rearrange(x, "b (c q) h p -> b c q h p", q=q)
    inputs = rearrange((weight * x_chunks).to(dtype), "d b c q (g h) p -> d b c g q (h p)", g=g)
    left = rearrange(B.mT @ inputs, "d b c g n (h p) -> d b c (g h) n p", p=x.shape[-1]).to(a.dtype)
    entering = torch.stack([_carry(total[0].exp(), left[0], reverse=False),
                            _carry(total[1].exp(), left[1], reverse=True)])            # d b c h n p

    # 4. What position i reads from it: C_i^T state, decayed over the positions in between.
    decay = torch.stack([before[0], total[1][..., None] - through[1]]).clamp(max=0).exp()
    entering = rearrange(entering.to(dtype), "d b c (g h) n p -> d b c g n (h p)", g=g)
    read = rearrange(C @ entering, "d b c g q (h p) -> d b (c q) (g h) p", p=x.shape[-1])
    decay = rearrange(decay, "d b c h q -> d b (c q) h 1")
    y = y + (read[0] * decay[0] + read[1] * decay[1])
    return y[:, :l].to(dtype) + skip


def _carry(decay, left, reverse):
    """s_{c+1} = decay_c s_c + left_c from s = 0. decay (b c h), left (b c h n p) -> states entering c."""
    steps = list(zip(decay[..., None, None].unbind(1), left.unbind(1)))
    state, entering = torch.zeros_like(steps[0][1]), []
    for chunk_decay, chunk_left in reversed(steps) if reverse else steps:
        entering.append(state)
        state = torch.addcmul(chunk_left, chunk_decay, state)
    return torch.stack(entering[::-1] if reverse else entering, 1)


def plain_scan(x, dt, A, B, C, D, chunk_size=None):
    """The recurrence of the module docstring as a loop over positions, for checks. Arguments as above."""
    b, l, h, p = x.shape
    a = (dt * A.view(-1, 1, 1, h)).clamp(A_MIN, 0)
    B, C = (repeat(v, "b l d g n -> b l d (g h) n", h=h // B.shape[3]) for v in (B, C))
    rows = [D[:, i, :, None] * x[:, i] for i in range(l)]                              # l of b h p
    for d, (order, step) in enumerate(((range(l - 1), 1), (range(l - 1, 0, -1), -1))):
        state = x.new_zeros(b, h, B.shape[-1], p)
        for i in order:
            injected = dt[:, i, d, :, None, None] * B[:, i, d, ..., None] * x[:, i, :, None]
            state = a[:, i, d, :, None, None].exp() * state + injected                 # b h n p
            rows[i + step] = rows[i + step] + torch.einsum("bhn,bhnp->bhp", C[:, i, d], state)
    return torch.stack(rows, 1)
