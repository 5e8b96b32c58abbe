"""The chunked scan of chunk_scan.py timed beside its recurrence and beside Mamba-2's listing.

Run:      python -m experiments.scan_bench        (1 minute; writes runs/chunk_scan/result.json)
          python -m experiments.publish runs/chunk_scan --name cpu
Last line: "chunked scan: N.N x as fast as the plain recurrence, N.N x as fast as the SSD listing"

Each round times every implementation, forward plus backward in float32, one after the other, so
that a ratio compares neighbours in time. Before that all are checked in float64, values and
gradients, and the memory of one step is measured in a process of its own.

Symbols:  chunk_scan.py's.
Differs from the paper: nothing beyond chunk_scan.py.
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
from chunk_scan import chunked_scan, log_decay, recurrent_scan


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


# ---- what is compared ----------------------------------------------------------------------------

def plain_recurrence(x, dt, A, B, C, D, chunk_size):
    """`recurrent_scan`, which knows no chunks."""
    return recurrent_scan(x, dt, A, B, C, D)


def segsum(a):
    """(..., q) -> (..., q, q): sum of a over j < k <= i, and -inf above the diagonal."""
    q = a.shape[-1]
    sums = a.cumsum(-1)
    future = torch.ones(q, q, dtype=torch.bool, device=a.device).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill(future, -torch.inf)


def ssd_one_direction(x, a, B, C, chunk_size):
    """Listing 1 of Mamba-2 (arXiv 2405.21060), in our words, its output moved on by one position.

    x (b l h p), already times dt; a (b l h); B, C (b l h n). chunk_size must divide l.
    """
    x = rearrange(x, "b (c q) h p -> b c q h p", q=chunk_size)
    B = rearrange(B, "b (c q) h n -> b c q h n", q=chunk_size)
    C = rearrange(C, "b (c q) h n -> b c q h n", q=chunk_size)
    a = rearrange(a, "b (c q) h -> b h c q", q=chunk_size)
    through = a.cumsum(-1)

    # Inside the chunks.
    y = torch.einsum("bcihn,bcjhn,bhcij,bcjhp->bcihp", C, B, segsum(a).exp(), x)

    # The state that each chunk leaves, all at once to every later chunk, and what it reads.
    to_end = (through[..., -1:] - through).exp()
    left = torch.einsum("bcjhn,bhcj,bcjhp->bchpn", B, to_end, x)
    left = torch.cat([torch.zeros_like(left[:, :1]), left], 1)
    across = segsum(F.pad(through[..., -1], (1, 0))).exp()                  # b h c+1 c+1
    state = torch.einsum("bhij,bjhpn->bihpn", across, left)[:, :-1]
    y = y + torch.einsum("bcihn,bchpn,bhci->bcihp", C, state, through.exp())

    y = rearrange(y, "b c q h p -> b (c q) h p")
    return F.pad(y[:, :-1], (0, 0, 0, 0, 1, 0))


def ssd_listing(x, dt, A, B, C, D, chunk_size):
    """The listing, used as Hydra uses its scan: one call per direction, the second on flipped
    inputs, with B and C repeated over the heads of a group. Arguments as in `bidirectional_scan`.
    """
    heads = x.shape[2] // B.shape[3]
    a = log_decay(dt, A)                                                    # b l d h
    B = repeat(B, "b l d g n -> b l d (g k) n", k=heads)                    # b l d h n
    C = repeat(C, "b l d g n -> b l d (g k) n", k=heads)
    inputs = x[:, :, None] * dt[..., None]                                  # b l d h p

    forward = ssd_one_direction(
        inputs[:, :, 0], a[:, :, 0], B[:, :, 0], C[:, :, 0], chunk_size)
    backward = ssd_one_direction(
        inputs[:, :, 1].flip(1), a[:, :, 1].flip(1), B[:, :, 1].flip(1), C[:, :, 1].flip(1),
        chunk_size)
    return forward + backward.flip(1) + D[..., None] * x


SCANS = {"chunked scan": chunked_scan, "SSD listing": ssd_listing,
         "plain recurrence": plain_recurrence}


# ---- inputs, the check ---------------------------------------------------------------------------

def random_inputs(b, l, h, p, g, n, dtype, seed):
    """x, dt, A, B, C, D with steps and decays of the size that Hydra starts from."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    dt = F.softplus(normal(b, l, 2, h) - 4)
    A = -torch.empty(b, h, dtype=dtype).uniform_(1, 16, generator=generator)
    B, C = normal(2, b, l, 2, g, n)
    x = normal(b, l, h, p)
    D = normal(b, l, h)
    return [v.requires_grad_() for v in (x, dt, A, B, C, D)]


def forward_backward(scan, inputs, chunk_size):
    """y and the gradients of |y|^2 / 2 in the six inputs."""
    y = scan(*inputs, chunk_size)
    gradients = torch.autograd.grad(y, inputs, y.detach())
    return [y.detach(), *gradients]


def self_check(seed):
    """Largest error of values and gradients beside the plain recurrence's largest, in float64."""
    inputs = random_inputs(2, 48, 4, 6, 2, 5, torch.float64, seed)
    wanted = forward_backward(plain_recurrence, inputs, 16)
    errors = {}
    for name in ("chunked scan", "SSD listing"):
        errors[name] = 0.0
        for got, want in zip(forward_backward(SCANS[name], inputs, 16), wanted):
            error = (got - want).abs().max() / want.abs().max()
            errors[name] = max(errors[name], error.item())
    assert max(errors.values()) < 1e-12, f"the implementations disagree: {errors}"
    return errors


# ---- memory and time -----------------------------------------------------------------------------

def model_inputs(cfg, times=1):
    """Inputs of the settings' sizes, `times` as long."""
    return random_inputs(cfg.batch, times * cfg.seqlen, cfg.nheads, cfg.headdim, 1, cfg.d_state,
                         torch.float32, cfg.seed)


def peak_memory(cfg):
    """(MiB before, most MiB) resident in this process around one chunked forward plus backward.

    Run in a process of its own: the kernel keeps one high-water mark for the life of a process.
    """
    import resource  # absent on some systems, which the rest need not know
    inputs = model_inputs(cfg)
    unit = 2 ** 20 if sys.platform == "darwin" else 2 ** 10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    forward_backward(chunked_scan, inputs, cfg.chunk_size)
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def seconds_taken(scan, inputs, chunk_size):
    """Of forward plus backward, the best of three in a row: some have to map their memory first."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        forward_backward(scan, inputs, chunk_size)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def time_all(cfg):
    """Name -> the seconds of each round, for every implementation and a longer input."""
    inputs = model_inputs(cfg)
    runs = {name: (scan, inputs) for name, scan in SCANS.items()}
    runs["chunked, 4 x length"] = (chunked_scan, model_inputs(cfg, times=4))
    seconds = {name: [] for name in runs}
    for _ in common.progress(range(cfg.rounds), desc="rounds"):
        for name, (scan, given) in runs.items():
            seconds[name].append(seconds_taken(scan, given, cfg.chunk_size))
    return seconds


def spread(values):
    """Median, quartiles and number of values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "n": len(values)}


def main(cfg):
    if cfg.seqlen % cfg.chunk_size or cfg.rounds < 2:
        raise common.UserError(
            f"got --seqlen {cfg.seqlen}, --chunk-size {cfg.chunk_size}, --rounds {cfg.rounds}: "
            "the SSD listing needs whole chunks, and quartiles need at least 2 rounds")
    env = common.banner("chunk_scan", cfg)  # the script under which this is published
    # First, while this process is small: a child starts with the mark of the parent it comes from.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before, peak = pool.apply(peak_memory, (cfg,))
    common.log(f"peak resident memory {peak:.0f} MiB, {peak - before:.0f} of it in the step")
    errors = self_check(cfg.seed)
    for name, error in errors.items():
        common.log(f"{name}, float64, values and gradients: within {error:.0e} of the recurrence")

    seconds = time_all(cfg)
    taken = {}
    ratios = {}
    rows = []
    for name, times in seconds.items():
        taken[name] = spread(times)
        ratios[name] = spread([t / ours for t, ours in zip(times, seconds["chunked scan"])])
        ratio = ratios[name]
        rows.append([name, f"{1e3 * taken[name]['median']:.0f}",
                     f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"])
    table = common.markdown(
        [f"forward plus backward, length {cfg.seqlen}", "median, ms",
         f"times the chunked scan's (quartiles, n = {cfg.rounds})"], *rows)
    result = {"errors": errors, "peak_mib": peak, "peak_mib_of_the_step": peak - before,
              "seconds": taken, "speedup_over_plain": ratios["plain recurrence"],
              "speedup_over_ssd_listing": ratios["SSD listing"],
              "growth": ratios["chunked, 4 x length"], "table": table}
    common.save_result(common.ROOT / cfg.out / "result.json", result, cfg, env)
    common.log(table)
    common.log(f"chunked scan: {ratios['plain recurrence']['median']:.1f} x as fast as the plain "
               f"recurrence, {ratios['SSD listing']['median']:.1f} x as fast as the SSD listing")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
