"""Masked diffusion: corruption (section 3.2, eq. 12), CART weights and loss (A.3, eqs. 22 and 23).

Run: `python cart.py` (3 s on two CPU cores) works eq. 22 through for one short sentence; its last
     line names the figure it wrote, runs/cart/cart_weights.png.

Symbols:
    x0, x_t   x_0, x_t    b l int64   clean and corrupted tokens, section 3.2
    t         t           b           probability that a token is masked, eq. 12
    masked    m_i         b l bool    True where x_t holds [MASK]
    visible   1 - m_j     b l bool    the context that counts in eq. 22 (never [PAD])
    w         w_i         b l         weight of a masked token, 0 elsewhere, eq. 22
    p         p           number      sharpness of Geo(p, d) = p (1 - p)^d, Table 8: 0.45
    ce        -log p_theta(x_0,i | x_t, t)   m   nats, one per masked token, row by row
Differs from the paper:
    [PAD] is no context in eq. 22, and special tokens are never masked in eq. 12.
    Eq. 23 sums over a sequence; the published tables hold a mean over masked tokens. Both are here,
    with the mean over weights as a third `reduction`, and eq. 13's w(t) = 1/t (`elbo_weights`).
    Eq. 22 is a sum over all pairs (i, j); here two recursions in log2(l) vectorised steps.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from common import (ROOT, UserError, banner, log, new_figure, run_cli, save_figure,
                    save_result)

REDUCTIONS = ("masked_mean", "sum", "weight_mean")


@dataclass(frozen=True)
class Config:
    """A worked example of eq. 22."""

    sentence: str = "memory fades with growing distance"  # the words of the worked example
    mask: str = "01101"  # one digit a word, 1 = masked
    p: float = 0.45  # sharpness of the geometric kernel, in (0, 1]
    seed: int = 42  # of the masks in the figure and of the mean weight
    out: str = "runs/cart"  # folder of the figure and the numbers


# ---- corruption, eq. 12 --------------------------------------------------------------------------


def corrupt(x0, t, mask_id, maskable, generator):
    """Mask each maskable token independently with probability t (eq. 12) -> (x_t, masked).

    x0: b l int64; t: b in [0, 1]; maskable: b l bool; or one sequence: l, a number, l.
    All randomness comes from `generator`, whose device may differ from x0's.
    """
    t = torch.as_tensor(t, device=x0.device)[..., None]                    # b 1
    # The dtype is fixed, so that a seed draws the same masks under every default dtype.
    u = torch.rand(x0.shape, generator=generator, device=generator.device, dtype=torch.float32)
    masked = maskable & (u.to(x0.device) < t)                              # b l
    return x0.masked_fill(masked, mask_id), masked


def corrupt_exactly(x0, k, mask_id, maskable, generator):
    """Mask exactly k of the maskable tokens of each sequence, every subset alike -> (x_t, masked).

    Shapes as in `corrupt`; k: b, or one number for all. Raises UserError unless 0 <= k <= maskable.
    """
    k = torch.as_tensor(k, device=x0.device)
    available = maskable.sum(-1)                                           # b
    if (k < 0).any() or (k > available).any():
        raise UserError(f"corrupt_exactly masks k tokens of each sequence, got k = {k.tolist()} of "
                        f"{available.tolist()} maskable ones: choose k between 0 and that number")
    # Sorting independent uniforms permutes the tokens; float64 makes ties as good as impossible.
    u = torch.rand(x0.shape, generator=generator, device=generator.device, dtype=torch.float64)
    u = u.to(x0.device).masked_fill(~maskable, 2.0)
    rank = u.argsort(-1).argsort(-1)                                       # b l
    masked = rank < k[..., None]
    return x0.masked_fill(masked, mask_id), masked


# ---- weights, eqs. 22 and 13 ---------------------------------------------------------------------


def cart_weights(masked, p=0.45, visible=None, dtype=torch.float32):
    """w_i = m_i / 2 sum_j (1 - m_j) p (1 - p)^(|i - j| - 1), eq. 22 -> b l of `dtype`, no gradient.

    masked: ... l bool. visible: ... l bool, the real tokens (all but [PAD]); masked ones are
    dropped from it, so an attention mask will do; default: every unmasked position.
    The weight is 0 where nothing is visible. Raises UserError unless 0 < p <= 1.
    """
    if not 0 < p <= 1:
        raise UserError(f"the CART sharpness p must be in (0, 1], got {p}: the paper uses 0.45")
    masked = masked.bool()
    visible = ~masked if visible is None else visible.bool() & ~masked
    # One side: s_i = sum_{j < i} v_j q^(i-j-1), that is s_i = q s_{i-1} + v_{i-1}. The other side
    # is the same for the reversed sequence. After the step with k, s_i holds the terms of the
    # 2 k nearest positions, so log2(l) steps replace the loop over i. No power 0^0 ever occurs.
    v = torch.stack([visible, visible.flip(-1)]).to(dtype)                 # 2 b l
    s = F.pad(v[..., :-1], (1, 0))
    q = 1.0 - p
    k = 1
    while k < s.shape[-1]:
        s[..., k:] += q**k * s[..., :-k]  # the product is a copy: reading and writing may overlap
        k *= 2
    return 0.5 * p * (s[0] + s[1].flip(-1)) * masked                       # b l


def elbo_weights(masked, t, dtype=torch.float32):
    """Eq. 13 with w(t) = 1 / t: the weights of the ELBO's summed loss under t ~ U(0, 1), b l.

    masked: b l bool; t: b in (0, 1]. In expectation that sum is at least -log p(x_0).
    """
    return masked / torch.as_tensor(t, device=masked.device, dtype=dtype)[..., None]


# ---- losses --------------------------------------------------------------------------------------


def masked_cross_entropy(hidden, targets, head, chunk=4096):
    """Cross-entropy of each masked token -> m, nats, float32 (float64 for float64 logits).

    hidden: m d, the head's input at the masked positions only (hidden[masked]); targets: m int64
    (x0[masked]); head: maps (rows, d) to logits (rows, v). At most `chunk` rows of logits exist at
    a time: for more, the backward pass computes each chunk's logits again. (F.linear_cross_entropy
    chunks the decoder alone; this takes the whole head, and a softmax in float32 at least.)
    Gradients reach hidden and the head's parameters.
    """

    def cross_entropy(h, x):
        logits = head(h)                                                   # rows v
        if logits.is_cuda and not torch.compiler.is_compiling():
            import mixer_triton  # here, since a CPU needs neither it nor triton
            if mixer_triton.takes_logits(logits):  # each is read once, and no float32 of it written
                return mixer_triton.cross_entropy(logits, x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, x, reduction="none")                # rows

    if len(hidden) <= chunk:  # also m = 0: the empty result stays connected to hidden
        return cross_entropy(hidden, targets)
    return torch.cat([
        checkpoint(cross_entropy, h, x, use_reentrant=False, preserve_rng_state=False)
        for h, x in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ])


def loss_norm(masked, w, reduction="masked_mean"):
    """What `reduction` divides sum w ce by, a scalar: number masked, 1, or sum w."""
    if reduction not in REDUCTIONS:
        raise UserError(f"unknown reduction {reduction!r}: choose one of {', '.join(REDUCTIONS)}")
    if reduction == "sum":
        return torch.ones((), dtype=w.dtype, device=w.device)
    if reduction == "masked_mean":
        return masked.sum().to(w.dtype)
    return (w * masked).sum()


def cart_loss(ce, masked, w, reduction="masked_mean"):
    """sum over masked tokens of w_i ce_i (eq. 23), divided as `reduction` says -> scalar.

    ce: m, at the masked positions row by row (masked_cross_entropy's output), or b l;
    masked: b l bool; w: b l. Nothing masked, or every weight 0: exactly 0, with gradient 0.
    A batch split over ranks or micro-batches needs one common divisor: add `loss_norm` over all
    parts first, then the parts' `cart_loss(..., "sum")`, each divided by that total.
    """
    norm = loss_norm(masked, w, reduction)
    if ce.shape == masked.shape:
        ce = ce[masked]                                                    # m
    return (w[masked] * ce).sum() / torch.where(norm > 0, norm, 1)


# ---- trivial reference predictors ----------------------------------------------------------------


def uniform_nats(n_choices):
    """Cross-entropy per token of a uniform guess among n_choices tokens, in nats."""
    return math.log(n_choices)


def unigram_log_probs(ids, vocab_size, exclude=(), block=1 << 24):
    """ln p of each token by its add-one smoothed frequency in ids -> v float32; -inf if excluded.

    ids: numpy integers of any shape, or a memory map or data.Stream, read in blocks; exclude: the
    ids that are never predicted. Its cross-entropy is a lookup:
    ce = -unigram_log_probs(...)[x0[masked]].
    """
    if isinstance(ids, np.ndarray):
        ids = ids.reshape(-1)
    counts = np.ones(vocab_size)
    for start in range(0, len(ids), block):
        counts += np.bincount(ids[start:start + block], minlength=vocab_size)
    counts[list(exclude)] = 0
    return torch.from_numpy(counts / counts.sum()).log().float()


# ---- worked example ------------------------------------------------------------------------------


def print_worked_example(words, masked, p):
    """Print eq. 22 term by term for one sentence; masked: l bool."""
    w = cart_weights(masked, p)
    hidden = ["[MASK]" if m else word for word, m in zip(words, masked)]
    log("x_0  " + " ".join(words))
    log("x_t  " + " ".join(hidden))
    log(f"\nw_i = 1/2 sum over visible j of p (1 - p)^(|i - j| - 1), p = {p:g}   (eq. 22)")
    for i in masked.nonzero().flatten().tolist():
        terms = []
        for j in (~masked).nonzero().flatten().tolist():
            distance = abs(i - j)
            weight = p * (1 - p) ** (distance - 1) / 2
            terms.append(f"{weight:.5f} ({words[j]}, {distance} away)")
        total = " + ".join(terms) or "nothing is visible"
        log(f"w_{i + 1} = {w[i]:.5f} = {total}   {words[i]}")
    return w


def mean_weight(p, generator, b=256, length=4096):
    """masked_mean of a predictor that loses 1 nat everywhere, t evenly spread: a number near 1/3.

    Far from the ends E[w] = 1 - t, and the mean over masked tokens is E[t (1 - t)] / E[t] = 1/3.
    """
    x0 = torch.zeros(b, length, dtype=torch.int64)
    t = (torch.arange(b) + 0.5) / b
    _, masked = corrupt(x0, t, 1, torch.ones_like(x0, dtype=torch.bool), generator)
    w = cart_weights(masked, p)
    return cart_loss(torch.ones_like(w), masked, w).item()


def draw_weights(path, generator, ps=(0.2, 0.45, 0.9), length=64):
    """Figure: the weights along one half-masked sequence for several p, over its mask."""
    x0 = torch.zeros(length, dtype=torch.int64)
    _, masked = corrupt(x0, 0.5, 1, torch.ones_like(x0, dtype=torch.bool), generator)
    at = masked.nonzero().flatten()
    figure = new_figure(8, 3.4)
    top, strip = figure.subplots(2, sharex=True, height_ratios=[8, 1])
    for p, marker in zip(ps, "so^"):
        w = cart_weights(masked, p)[at]
        top.plot(at.numpy(), w.numpy(), marker, markersize=5, label=f"p = {p:g}")
    top.set(ylabel="CART weight $w_i$ (eq. 22)", ylim=(0, 1))
    top.legend(ncols=len(ps), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    strip.imshow(masked[None].numpy(), cmap="Greys", vmin=0, vmax=1.3, aspect="auto")
    strip.set(yticks=[], xlabel="position i (dark: masked)")
    save_figure(figure, path)


def main(cfg):
    words = cfg.sentence.split()
    if len(cfg.mask) != len(words) or set(cfg.mask) - set("01"):
        raise UserError(f"--mask needs one digit 0 or 1 for each of the {len(words)} words of "
                        f"--sentence, got {cfg.mask!r}")
    env = banner("cart.py", cfg)
    generator = torch.Generator().manual_seed(cfg.seed)
    masked = torch.tensor([digit == "1" for digit in cfg.mask])
    w = print_worked_example(words, masked, cfg.p)

    weight = mean_weight(cfg.p, generator)
    nats = uniform_nats(30_522)
    log(f"\nOver t ~ U(0, 1) a masked token weighs {weight:.3f} on average (masked_mean).")
    log(f"A uniform guess among 30,522 ids: {weight:.3f} x {nats:.2f} = {weight * nats:.2f} nats")

    folder = ROOT / cfg.out
    result = {"w": w.tolist(), "mean_weight": weight}
    save_result(folder / "result.json", result, cfg, env)
    draw_weights(folder / "cart_weights.png", generator)
    log(f"wrote {folder / 'cart_weights.png'}")
    return result


if __name__ == "__main__":
    run_cli(Config, main)
