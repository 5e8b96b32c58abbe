"""The bidirectional selective scan of Hydra's quasiseparable mixer, chunk by chunk (eq. 7, 11).

Run:      python chunk_scan.py        (checks itself and times three implementations, 1 minute)
Last line: "chunked scan: N.N x as fast as the plain recurrence, N.N x as fast as the SSD listing"

For each head, with the log-decay a = dt A (per position, head and direction):

    h_i = exp(a_i) h_{i-1} + dt_i B_i x_i^T        left to right, direction 0       (n p)
    g_i = exp(a_i) g_{i+1} + dt_i B_i x_i^T        right to left, direction 1       (n p)
    y_i = C_{i-1}^T h_{i-1} + C_{i+1}^T g_{i+1} + D_i x_i

The outputs are shifted by one, so that position i reads only its strict past and its strict
future, and the diagonal is D alone. As a matrix, y = M x with M strictly lower (direction 0) plus
strictly upper (direction 1) semiseparable plus diagonal: the quasiseparable matrix of eq. 11.

Cut the sequence into chunks of q positions. Inside a chunk M is one full q x q matrix; across
chunks only the state at the border matters. Every array stays in position order: "C of the
predecessor" with the sum of a *before* a position is all that the shift by one amounts to.

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
import multiprocessing
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from einops import rearrange, repeat

import common

A_MIN = -30.0  # exp(-30) is 0 beside 1 in float32; an unbounded a costs its neighbours their digits


@dataclasses.dataclass(frozen=True)
class Config:
    """Check the scan against the plain recurrence, then time forward plus backward (float32)."""
    batch: int = 1
    seqlen: int = 1024            # a multiple of chunk_size; timed at four times this length too
    nheads: int = 24
    headdim: int = 64
    d_state: int = 64
    chunk_size: int = 64
    rounds: int = 5               # each times every implementation, one after the other
    seed: int = 42
    out: str = "runs/chunk_scan"  # folder of result.json
    publish: bool = False         # also write results/chunk_scan/cpu.json


def bidirectional_scan(x, dt, A, B, C, D, chunk_size=64):
    """The scan above, exact, in O(l) time. Returns y (b, l, h, p) in the dtype of x.

    x, B, C: float64, float32 or bfloat16. dt >= 0, A <= 0 and D: float32 or wider; the log-decay
    dt A (nats per step) is clamped to [-30, 0]. Any length >= 1, any strides. Differentiable in
    all six. Raises UserError where the shapes do not fit together.

    This function chooses the implementation. CUDA tensors go to the kernels of
    chunk_scan_triton.py, whose chunks have their own size, where x, B and C are float32 or bfloat16
    and p and n are 16, 32 or 64 (and triton is there, and an Ampere or later); all else goes to
    `chunked_scan`. float32 products on CUDA are as exact as torch.set_float32_matmul_precision
    asks. torch.compile takes the kernels as one opaque node, and runs `chunked_scan` uncompiled.
    """
    b, l, h, p = x.shape
    if (dt.shape != (b, l, 2, h) or A.shape not in ((h,), (1, h), (b, h)) or D.shape != (b, l, h)
            or B.shape != C.shape or B.shape[:3] != (b, l, 2) or h % B.shape[3]):
        raise common.UserError(
            f"bidirectional_scan: x {tuple(x.shape)} (b l h p) needs dt (b l 2 h), A (h) or (b h), "
            f"B and C (b l 2 g n), D (b l h); got dt {tuple(dt.shape)}, A {tuple(A.shape)}, "
            f"B {tuple(B.shape)}, C {tuple(C.shape)}, D {tuple(D.shape)}")
    if x.is_cuda:
        import chunk_scan_triton  # here, since a CPU needs neither it nor triton
        if chunk_scan_triton.fits(x, dt, A, B, C, D):
            return chunk_scan_triton.scan(x, dt, A, B, C, D)
    # Compiled, its loop over chunks would be traced again at every length.
    scan = torch.compiler.disable(chunked_scan) if torch.compiler.is_compiling() else chunked_scan
    return scan(x, dt, A, B, C, D, chunk_size)


def chunked_scan(x, dt, A, B, C, D, chunk_size):
    """`bidirectional_scan` in PyTorch. Beside g, h counts the heads of one group."""
    l, g, dtype = x.shape[1], B.shape[3], x.dtype
    q = min(chunk_size, l)
    a = (dt * A.view(-1, 1, 1, A.shape[-1])).clamp(A_MIN, 0)                # b l d h
    # C one step upstream in each direction: what position i reads the arriving state with. The
    # two that roll around the ends meet states that are still zero.
    C = torch.stack([C[:, :, 0].roll(1, 1), C[:, :, 1].roll(-1, 1)], 2)     # b l d g n
    if pad := -l % q:  # with dt = 0: a pad passes the state on unchanged
        x, dt, a, B, C, D = (F.pad(v, (0, 0) * (v.ndim - 2) + (0, pad))
                             for v in (x, dt, a, B, C, D))
    x = rearrange(x, "b (c q) (g h) p -> b c g q h p", q=q, g=g)
    D = rearrange(D, "b (c q) (g h) -> b c g q h 1", q=q, g=g)
    dt, a = (rearrange(v, "b (c q) d (g h) -> d b c g h q", q=q, g=g) for v in (dt, a))
    B, C = (rearrange(v, "b (c q) d g n -> d b c g q n", q=q).unbind(0) for v in (B, C))

    # In the order of each scan, sums of a over the chunk: through i, before i and beyond i.
    through = torch.stack(_turn(a)).cumsum(-1)                              # d b c g h q
    before, total = F.pad(through[..., :-1], (1, 0)), through[..., -1:]
    through, before, beyond = map(_turn, (through, before, total - through))

    # 1. Inside the chunk: j reaches i with exp(sum of a strictly between them) dt_j C_i^T B_j.
    # On the diagonal, which CB leaves at 0, `between` is -a <= 30: no infinity meets that 0.
    i_after_j = torch.ones(q, q, dtype=torch.bool, device=x.device).tril(-1)
    between = torch.where(i_after_j, *(s[..., :, None] - t[..., None, :]
                                       for s, t in zip(before, through)))   # b c g h q q
    dt_j = torch.where(i_after_j, *dt[..., None, :])                        # b c g h q q
    CB = torch.where(i_after_j, C[0] @ B[0].mT, (C[1] @ B[1].mT).triu(1))   # b c g q q
    M = between.exp_() * dt_j * CB[:, :, :, None]                           # b c g h q q
    y = M.to(dtype) @ rearrange(x, "b c g q h p -> b c g h q p")
    y = torch.addcmul(rearrange(y, "b c g h q p -> b c g q h p"), D, x)

    for d in (0, 1):
        # 2. The state each chunk leaves behind, and 3. the one it receives from upstream.
        inputs = x * (beyond[d].exp() * dt[d]).mT[..., None]                # b c g q h p
        inputs = rearrange(inputs.to(dtype), "b c g q h p -> b c g q (h p)")
        left = rearrange(B[d].mT @ inputs, "b c g n (h p) -> b c g n h p", h=x.shape[-2])
        state = _carry(total[d].exp().mT[..., None], left.to(a.dtype), reverse=d == 1)
        # 4. What position i reads from it: C_i^T state, decayed over the positions before i.
        state = rearrange(state.to(dtype), "b c g n h p -> b c g n (h p)")
        read = rearrange(C[d] @ state, "b c g q (h p) -> b c g q h p", h=x.shape[-2])
        y = torch.addcmul(y, read, before[d].exp().mT[..., None])
    return rearrange(y, "b c g q h p -> b (c q) (g h) p")[:, :l].to(dtype)


def _turn(v):
    """(d ... q) from position order to the order of each scan, or back: one tensor a direction."""
    return v[0], v[1].flip(-1)


def _carry(decay, left, reverse):
    """s_{c+1} = decay_c s_c + left_c from s = 0, both (b c ...) -> the state that enters each c."""
    steps = list(zip(decay.unbind(1), left.unbind(1)))
    state, entering = torch.zeros_like(left[:, 0]), []
    for chunk_decay, chunk_left in reversed(steps) if reverse else steps:
        entering.append(state)
        state = torch.addcmul(chunk_left, chunk_decay, state)
    return torch.stack(entering[::-1] if reverse else entering, 1)


# ---- the same y by other means, to check and to compare with -------------------------------------


def plain_scan(x, dt, A, B, C, D, chunk_size=None):
    """The recurrence of the module docstring as a loop over positions. Arguments as above."""
    b, l, h, p = x.shape
    decay = (dt * A.view(-1, 1, 1, h)).clamp(A_MIN, 0).exp()
    B, C = (repeat(v, "b l d g n -> b l d (g h) n", h=h // B.shape[3]) for v in (B, C))
    dt_x = dt[..., None] * x[:, :, None]                                  # b l d h p
    rows = list((D[..., None] * x).unbind(1))                             # l of b h p
    for d, (order, step) in enumerate(((range(l - 1), 1), (range(l - 1, 0, -1), -1))):
        # Unbound once: the backward pass of indexing at each step would take O(l) for each.
        decay_d, B_d, C_d, dt_x_d = (v[:, :, d].unbind(1) for v in (decay, B, C, dt_x))
        state = x.new_zeros(b, h, B.shape[-1], p)
        for i in order:
            state = decay_d[i][..., None, None] * state + B_d[i][..., None] * dt_x_d[i][:, :, None]
            rows[i + step] = rows[i + step] + torch.einsum("bhn,bhnp->bhp", C_d[i], state)
    return torch.stack(rows, 1)


def segsum(a):
    """(..., q) -> (..., q, q): sum of a over j < k <= i, and -inf above the diagonal."""
    s = a.cumsum(-1)
    future = torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool, device=a.device).triu(1)
    return (s[..., :, None] - s[..., None, :]).masked_fill(future, -torch.inf)


def ssd_listing(x, dt, A, B, C, D, chunk_size):
    """Listing 1 of Mamba-2 (arXiv 2405.21060), in our words, used as Hydra uses its scan.

    One call per direction, the second on flipped inputs, B and C repeated over the heads of a
    group, and the outputs shifted by one. Arguments as above; chunk_size must divide l.
    """
    heads = x.shape[2] // B.shape[3]
    a = (dt * A.view(-1, 1, 1, A.shape[-1])).clamp(A_MIN, 0)
    B, C = (repeat(v, "b l d g n -> b l d (g h) n", h=heads) for v in (B, C))

    def one_direction(x, a, B, C):
        x, a, B, C = (rearrange(v, "b (c q) ... -> b c q ...", q=chunk_size) for v in (x, a, B, C))
        a = rearrange(a, "b c q h -> b h c q")
        through = a.cumsum(-1)
        y = torch.einsum("bcihn,bcjhn,bhcij,bcjhp->bcihp", C, B, segsum(a).exp(), x)
        to_end = (through[..., -1:] - through).exp()
        left = torch.einsum("bcjhn,bhcj,bcjhp->bchpn", B, to_end, x)
        across = segsum(F.pad(through[..., -1], (1, 0))).exp()            # b h c+1 c+1
        left = torch.cat([torch.zeros_like(left[:, :1]), left], 1)
        state = torch.einsum("bhij,bjhpn->bihpn", across, left)[:, :-1]
        y = y + torch.einsum("bcihn,bchpn,bhci->bcihp", C, state, through.exp())
        return F.pad(rearrange(y, "b c q h p -> b (c q) h p")[:, :-1], (0, 0, 0, 0, 1, 0))

    forward, backward = ([x * dt[:, :, d, :, None], a[:, :, d], B[:, :, d], C[:, :, d]]
                         for d in (0, 1))
    return (one_direction(*forward) + one_direction(*(v.flip(1) for v in backward)).flip(1)
            + D[..., None] * x)


# ---- self-check and benchmark --------------------------------------------------------------------

SCANS = {"chunked scan": chunked_scan, "SSD listing": ssd_listing, "plain recurrence": plain_scan}


def random_inputs(b, l, h, p, g, n, dtype, seed):
    """x, dt, A, B, C, D with steps and decays of the size that Hydra starts from."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=dtype)

    dt = F.softplus(normal(b, l, 2, h) - 4)
    A = -torch.empty(b, h, dtype=dtype).uniform_(1, 16, generator=draw)
    B, C = normal(2, b, l, 2, g, n)
    return [v.requires_grad_() for v in (normal(b, l, h, p), dt, A, B, C, normal(b, l, h))]


def forward_backward(scan, inputs, chunk_size):
    """y and the gradients of |y|^2 / 2 in the six inputs."""
    y = scan(*inputs, chunk_size)
    return y.detach(), *torch.autograd.grad(y, inputs, y.detach())


def self_check(seed):
    """Largest error of values and gradients beside the plain recurrence's largest, in float64."""
    inputs = random_inputs(2, 48, 4, 6, 2, 5, torch.float64, seed)
    got = {name: forward_backward(scan, inputs, 16) for name, scan in SCANS.items()}
    want = got.pop("plain recurrence")
    errors = {name: max(((v - w).abs().max() / w.abs().max()).item() for v, w in zip(values, want))
              for name, values in got.items()}
    assert max(errors.values()) < 1e-12, f"the implementations disagree: {errors}"
    return errors


def model_inputs(cfg, times=1):
    return random_inputs(cfg.batch, times * cfg.seqlen, cfg.nheads, cfg.headdim, 1, cfg.d_state,
                         torch.float32, cfg.seed)


def peak_memory(cfg):
    """(MiB before, most MiB) resident in this process around one chunked forward plus backward.

    Run in a process of its own: the kernel keeps one high-water mark for the life of a process.
    """
    import resource  # absent on some systems, which the scan itself need not know
    inputs = model_inputs(cfg)
    unit = 2 ** 20 if sys.platform == "darwin" else 2 ** 10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    forward_backward(chunked_scan, inputs, cfg.chunk_size)
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def seconds_taken(scan, inputs, chunk_size):
    """Of forward plus backward, the best of three in a row: some have to map their memory first."""
    stamps = [time.perf_counter()]
    for _ in range(3):
        forward_backward(scan, inputs, chunk_size)
        stamps.append(time.perf_counter())
    return min(end - start for start, end in zip(stamps, stamps[1:]))


def spread(values):
    """Median, quartiles and number of values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "n": len(values)}


def main(cfg):
    if cfg.seqlen % cfg.chunk_size or cfg.rounds < 2:
        raise common.UserError(
            f"got --seqlen {cfg.seqlen}, --chunk-size {cfg.chunk_size}, --rounds {cfg.rounds}: "
            "the SSD listing needs whole chunks, and quartiles need at least 2 rounds")
    env = common.banner("chunk_scan.py", cfg)
    # First, while this process is small: a child starts with the mark of the parent it comes from.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before, peak = pool.apply(peak_memory, (cfg,))
    errors = self_check(cfg.seed)
    common.log("float64, values and gradients against the plain recurrence: "
               + ", ".join(f"{name} {error:.0e}" for name, error in errors.items()))

    # Every round times everything, so that a ratio compares neighbours in time.
    inputs, longer = model_inputs(cfg), model_inputs(cfg, times=4)
    runs = {name: (scan, inputs) for name, scan in SCANS.items()}
    runs["chunked, 4 x length"] = chunked_scan, longer
    seconds = {name: [] for name in runs}
    for _ in common.progress(range(cfg.rounds), desc="rounds"):
        for name, (scan, given) in runs.items():
            seconds[name].append(seconds_taken(scan, given, cfg.chunk_size))
    taken = {name: spread(times) for name, times in seconds.items()}
    ratios = {name: spread([t / ours for t, ours in zip(times, seconds["chunked scan"])])
              for name, times in seconds.items()}
    table = common.markdown(
        [f"forward plus backward, length {cfg.seqlen}", "median, ms",
         f"times the chunked scan's (quartiles, n = {cfg.rounds})"],
        *([name, f"{1e3 * taken[name]['median']:.0f}",
           f"{r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})"] for name, r in ratios.items()))
    result = {"errors": errors, "peak_mib": peak, "peak_mib_of_the_step": peak - before,
              "seconds": taken, "speedup_over_plain": ratios["plain recurrence"],
              "speedup_over_ssd_listing": ratios["SSD listing"],
              "growth": ratios["chunked, 4 x length"], "table": table}
    common.log(f"peak resident memory {peak:.0f} MiB, {peak - before:.0f} of it in the step")
    common.log(table)
    common.write_json(common.ROOT / cfg.out / "result.json", {"metrics": result, "config": cfg})
    if cfg.publish:
        common.publish("chunk_scan", "cpu", result, cfg, env)
    common.log(f"chunked scan: {ratios['plain recurrence']['median']:.1f} x as fast as the plain "
               f"recurrence, {ratios['SSD listing']['median']:.1f} x as fast as the SSD listing")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
