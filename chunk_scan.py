"""The bidirectional selective scan of Hydra's quasiseparable mixer: its recurrence, and in chunks.

Run:      python chunk_scan.py        (checks one form against the other, a few seconds)
Last line: "chunked scan: within N.Ne-NN of the recurrence, N.N x as fast"

For each head, with the log-decay a = dt A (per position, head and direction; eq. 7):

    h_i = exp(a_i) h_{i-1} + dt_i B_i x_i^T        left to right, direction 0       (n p)
    g_i = exp(a_i) g_{i+1} + dt_i B_i x_i^T        right to left, direction 1       (n p)
    y_i = C_{i-1}^T h_{i-1} + C_{i+1}^T g_{i+1} + D_i x_i

The outputs are shifted by one: position i reads only its strict past and its strict future, and
what it sees of itself is D alone. h_i, g_i, B and C are each direction's own. Unrolled, y = M x:

           C_{i-1}^T B_j dt_j exp(sum of a strictly between j and i)    for j < i, direction 0
    M_ij = C_{i+1}^T B_j dt_j exp(sum of a strictly between i and j)    for j > i, direction 1
           D_i                                                          for j = i

The part below the diagonal and the part above it are semiseparable: any block that stays clear of
the diagonal has rank n at most, as all it carries has to pass through one state. Together with a
free diagonal they are the quasiseparable matrix of eq. 11.

Symbols:  x    input of the mixer           (b, l, h, p)
          dt   Delta after softplus         (b, l, 2, h)      Delta, eq. 9
          A    -exp(A_log')                 (h,) or (b|1, h)  A, eq. 8
          B, C read-in, read-out            (b, l, 2, g, n)   B, C
          D    diagonal                     (b, l, h)         delta_i, eq. 11
          b batch, l length, h heads, p head dim, g groups, n state, c chunks, q chunk size,
          d direction
Differs from the paper: eq. 11 as printed is not shifted, and C and B trade indices above the
          diagonal. The released code (github.com/goombalab/hydra) shifts both directions by one;
          this file follows it. Bbar = dt B (Euler), as there, where eq. 5 says zero-order hold.
"""
import dataclasses
import functools
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat

import common

A_MIN = -30.0  # exp(-30) is 0 beside 1 in float32; an unbounded a costs its neighbours their digits


# ---- the definition ------------------------------------------------------------------------------

def log_decay(dt, A):
    """a = dt A, in nats per step, within [A_MIN, 0]: b l d h."""
    h = A.shape[-1]
    return (dt * A.view(-1, 1, 1, h)).clamp(A_MIN, 0)


def recurrent_scan(x, dt, A, B, C, D):
    """y of the module docstring as a loop over positions. Arguments as in `bidirectional_scan`."""
    b, l, h, p = x.shape
    g, n = B.shape[3:]
    decay = log_decay(dt, A).exp()                                          # b l d h
    dt_x = dt[..., None] * x[:, :, None]                                    # b l d h p
    B = repeat(B, "b l d g n -> b l d (g k) n", k=h // g)                   # b l d h n
    C = repeat(C, "b l d g n -> b l d (g k) n", k=h // g)                   # b l d h n

    y = list((D[..., None] * x).unbind(1))                                  # l rows of b h p
    for direction, step in ((0, 1), (1, -1)):
        # Cut into positions once: the backward pass of v[:, i] would take O(l) at each step.
        decays = decay[:, :, direction].unbind(1)                           # l of b h
        inputs = dt_x[:, :, direction].unbind(1)                            # l of b h p
        Bs = B[:, :, direction].unbind(1)                                   # l of b h n
        Cs = C[:, :, direction].unbind(1)
        state = x.new_zeros(b, h, n, p)
        for i in range(l)[::step][:-1]:  # nobody reads the last state
            inflow = Bs[i][..., :, None] * inputs[i][..., None, :]          # b h n p
            state = decays[i][..., None, None] * state + inflow
            y[i + step] = y[i + step] + torch.einsum("bhn,bhnp->bhp", Cs[i], state)
    return torch.stack(y, 1)                                                # b l h p


# ---- the same y in chunks ------------------------------------------------------------------------

class ChunkSums(NamedTuple):
    """Sums of a over parts of a chunk, counted in the order of one direction."""
    through: torch.Tensor  # from the chunk's first position through i              b c g h q
    before: torch.Tensor   # from the first position to the one before i            b c g h q
    beyond: torch.Tensor   # from the position after i to the last                  b c g h q
    total: torch.Tensor    # of the whole chunk                                     b c g h 1


def chunked_scan(x, dt, A, B, C, D, chunk_size):
    """`bidirectional_scan` in PyTorch: chunks of q positions, so that the work is in products.

    Inside a chunk, M is one full q x q matrix: there the recurrence is not walked but multiplied
    out (`within_chunks`). What goes from chunk to chunk passes through the state at the border,
    n x p numbers a head. Only these are walked, in l / q steps (`across_chunks`). So all work is
    O(l q), and most of it is products of matrices.

    Every array stays in position order, direction 1 included. All that the shift by one amounts to
    is that i reads with the C of the position before it, in the order of the scan, and that decays
    towards i stop before i. From here on, h counts the heads of one group.
    """
    length = x.shape[1]
    dtype = x.dtype
    g = B.shape[3]
    q = min(chunk_size, length)
    a = log_decay(dt, A)                                                    # b l d h
    # The two rows that roll around the ends meet states that are still zero.
    C = torch.stack([C[:, :, 0].roll(1, 1), C[:, :, 1].roll(-1, 1)], 2)     # b l d g n

    x = cut(x, "b (c q) (g h) p -> b c g q h p", q, g)
    D = cut(D, "b (c q) (g h) -> b c g q h 1", q, g)
    # And a pair of tensors, one for each direction, of:
    a = cut(a, "b (c q) d (g h) -> d b c g h q", q, g).unbind(0)
    dt = cut(dt, "b (c q) d (g h) -> d b c g h q", q, g).unbind(0)
    B = cut(B, "b (c q) d g n -> d b c g q n", q, g).unbind(0)
    C = cut(C, "b (c q) d g n -> d b c g q n", q, g).unbind(0)

    forward = chunk_sums(a[0], reverse=False)
    backward = chunk_sums(a[1], reverse=True)
    y = within_chunks(x, dt, B, C, forward, backward)                       # b c g q h p
    y = torch.addcmul(y, D, x)                                              # the diagonal
    y = across_chunks(y, x, dt[0], B[0], C[0], forward, reverse=False)
    y = across_chunks(y, x, dt[1], B[1], C[1], backward, reverse=True)
    y = rearrange(y, "b c g q h p -> b (c q) (g h) p")
    return y[:, :length].to(dtype)


def cut(v, pattern, q, g):
    """v (b l ...) in whole chunks. A pad has dt = 0, so a = 0: it passes the state on unchanged."""
    pad = -v.shape[1] % q
    if pad:
        v = F.pad(v, (0, 0) * (v.ndim - 2) + (0, pad))
    return rearrange(v, pattern, q=q, g=g)


def chunk_sums(a, reverse):
    """The ChunkSums of a (b c g h q): counted in the order of the scan, in position order."""
    if reverse:
        a = a.flip(-1)
    through = a.cumsum(-1)
    before = F.pad(through[..., :-1], (1, 0))
    total = through[..., -1:]
    beyond = total - through
    if reverse:
        through = through.flip(-1)
        before = before.flip(-1)
        beyond = beyond.flip(-1)
    return ChunkSums(through, before, beyond, total)


def within_chunks(x, dt, B, C, forward, backward):
    """M x of each chunk by itself, without the diagonal: b c g q h p.

    j reaches i with C_i^T B_j dt_j exp(before_i - through_j): C_i is already that of i's
    predecessor, and before_i - through_j is the sum of a strictly between j and i. Direction 0
    fills the triangle below the diagonal and direction 1 the one above, so one matrix holds both.
    """
    q = x.shape[-3]
    below = torch.ones(q, q, dtype=torch.bool, device=x.device).tril(-1)    # i after j
    CB = torch.where(below, C[0] @ B[0].mT, (C[1] @ B[1].mT).triu(1))       # b c g q q
    # On the diagonal, where CB is 0, `between` is -a <= 30: no infinity meets that 0.
    between = torch.where(below,
                          forward.before[..., :, None] - forward.through[..., None, :],
                          backward.before[..., :, None] - backward.through[..., None, :])
    dt_j = torch.where(below, dt[0][..., None, :], dt[1][..., None, :])     # b c g h q q
    M = between.exp_() * dt_j * CB[:, :, :, None]                           # b c g h q q
    y = M.to(x.dtype) @ rearrange(x, "b c g q h p -> b c g h q p")
    return rearrange(y, "b c g h q p -> b c g q h p")


def across_chunks(y, x, dt, B, C, sums, reverse):
    """y plus what its positions read of one direction's states at the borders: b c g q h p.

        left     = sum_j exp(beyond_j) dt_j B_j x_j^T         what a chunk adds to the state
        entering = exp(total) entering + left                 from each chunk to the next
        y_i     += exp(before_i) C_i^T entering               what position i reads

    The heads of a group share B and C, so h and p are one axis in the products.
    """
    h = x.shape[-2]
    weight = (sums.beyond.exp() * dt).mT[..., None]                         # b c g q h 1
    inputs = rearrange((x * weight).to(x.dtype), "b c g q h p -> b c g q (h p)")
    left = rearrange(B.mT @ inputs, "b c g n (h p) -> b c g n h p", h=h)

    decay = sums.total.exp().mT[..., None]                                  # b c g 1 h 1
    entering = entering_states(decay, left.to(decay.dtype), reverse)        # b c g n h p

    entering = rearrange(entering.to(x.dtype), "b c g n h p -> b c g n (h p)")
    read = rearrange(C @ entering, "b c g q (h p) -> b c g q h p", h=h)
    return torch.addcmul(y, read, sums.before.exp().mT[..., None])


def entering_states(decay, left, reverse):
    """s_{c+1} = decay_c s_c + left_c from s = 0, both (b c ...): the state that enters each c."""
    decays = decay.unbind(1)
    lefts = left.unbind(1)
    chunks = range(len(lefts))
    if reverse:
        chunks = reversed(chunks)
    state = torch.zeros_like(lefts[0])
    entering = [None] * len(lefts)
    for c in chunks:
        entering[c] = state
        state = torch.addcmul(lefts[c], decays[c], state)
    return torch.stack(entering, 1)


# ---- which of them runs --------------------------------------------------------------------------

def narrow_heads(x, dt, A, B, C, D, most):
    """The same inputs with each head of a multiple of `most` columns as several heads of `most`.

    Exact, as every column of x is a scan of its own: these neighbours share dt, A and D.
    """
    p = x.shape[-1]
    if p <= most or p % most:
        return x, dt, A, B, C, D
    k = p // most
    x = rearrange(x, "b l h (k p) -> b l (h k) p", k=k)
    dt = dt.repeat_interleave(k, -1)                                        # b l d (h k)
    A = A.repeat_interleave(k, -1)                                          # (h k), or b (h k)
    D = D.repeat_interleave(k, -1)                                          # b l (h k)
    return x, dt, A, B, C, D


def bidirectional_scan(x, dt, A, B, C, D, chunk_size=64):
    """The scan above, exact, in O(l) time. Returns y (b, l, h, p) in the dtype of x.

    x, B, C: float64, float32 or bfloat16. dt >= 0, A <= 0 and D: float32 or wider; the log-decay
    dt A (nats per step) is clamped to [-30, 0]. Any length >= 1, any strides. Differentiable in
    all six. Raises UserError where the shapes do not fit together.

    CUDA tensors go to the kernels of chunk_scan_triton.py, whose chunks have their own size, where
    x, B and C are float32 or bfloat16, n is 16, 32 or 64, and so is p, or a multiple of 64 (and
    triton is there, and an Ampere or later); all else goes to `chunked_scan`. float32 products on
    CUDA are as exact as torch.set_float32_matmul_precision asks. torch.compile takes the kernels as
    one opaque node, and runs `chunked_scan` uncompiled.
    """
    b, l, h, _ = x.shape
    shapes_fit = (dt.shape == (b, l, 2, h)
                  and A.shape in ((h,), (1, h), (b, h))
                  and D.shape == (b, l, h)
                  and B.shape == C.shape
                  and B.shape[:3] == (b, l, 2)
                  and h % B.shape[3] == 0)
    if not shapes_fit:
        raise common.UserError(
            f"bidirectional_scan: x {tuple(x.shape)} (b l h p) needs dt (b l 2 h), A (h) or (b h), "
            f"B and C (b l 2 g n), D (b l h); got dt {tuple(dt.shape)}, A {tuple(A.shape)}, "
            f"B {tuple(B.shape)}, C {tuple(C.shape)}, D {tuple(D.shape)}")
    if x.is_cuda:
        import chunk_scan_triton  # here, since a CPU needs neither it nor triton
        narrow = narrow_heads(x, dt, A, B, C, D, max(chunk_scan_triton.SIZES))
        if chunk_scan_triton.fits(*narrow):
            return chunk_scan_triton.scan(*narrow, A_MIN).reshape(x.shape)
    if torch.compiler.is_compiling():  # its loop over chunks would be traced again at every length
        return torch.compiler.disable(chunked_scan)(x, dt, A, B, C, D, chunk_size)
    return chunked_scan(x, dt, A, B, C, D, chunk_size)


# ---- a demonstration -----------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Config:
    """Check the chunked scan against the recurrence on random inputs (float64), and time both."""
    seqlen: int = 1000
    chunk_size: int = 32
    seed: int = 42


def timed(scan, *arguments):
    """What scan(*arguments) returns, and the seconds of the fastest of three calls."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        y = scan(*arguments)
        seconds.append(time.perf_counter() - start)
    return y, min(seconds)


def main(cfg):
    common.banner("chunk_scan.py", cfg)
    torch.manual_seed(cfg.seed)
    normal = functools.partial(torch.randn, dtype=torch.float64)
    inputs = (normal(1, cfg.seqlen, 8, 32),                      # x, of 8 heads
              F.softplus(normal(1, cfg.seqlen, 2, 8) - 4),       # dt
              -normal(8).exp(),                                  # A
              normal(1, cfg.seqlen, 2, 1, 16),                   # B
              normal(1, cfg.seqlen, 2, 1, 16),                   # C
              normal(1, cfg.seqlen, 8))                          # D
    want, slow = timed(recurrent_scan, *inputs)
    got, fast = timed(bidirectional_scan, *inputs, cfg.chunk_size)
    error = ((got - want).abs().max() / want.abs().max()).item()
    assert error < 1e-12, f"the two forms differ by {error:.1e} of the largest y"
    common.log(f"chunked scan: within {error:.1e} of the recurrence, {slow / fast:.1f} x as fast")
    return {"error": error, "speedup": slow / fast}


if __name__ == "__main__":
    common.run_cli(Config, main)
