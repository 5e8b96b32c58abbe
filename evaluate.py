"""Scoring a denoiser on held-out text: CART, ELBO, cross-entropy by t, trivial guesses (4.4, C.3).

Run:      python evaluate.py          (the shipped adapters on the embedded held-out text, 1 minute)
Last line: "wrote runs/evaluate/result.json"

Every row of a table sees the same windows, the same t and the same masks, so that two rows differ
by the predictor alone. Each window is drawn twice: masked with probability t, t stratified over
(0, 1), for the CART loss and the cross-entropy by t; and with exactly k of its tokens masked, k
stratified over 1..M, for

    -log p(x_0) <= E_k [ M / k  sum over masked i of -log p(x_0,i | x_t, t = k / M) ]        (nats)

which is eq. 13's bound with w = 1/t in its any-order form: k is exact, so it has less variance.

Symbols:  t       what the adapter is told: the masking probability, or k / M
          w       CART weight, eq. 22              M      maskable tokens of a window
          gap     ELBO with another sequence's t, minus ELBO with its own: what knowing t is worth
Differs from the paper: it reports the CART loss alone. A uniform guess scores ln(v) / 3 there.
"""
import dataclasses
import math
from pathlib import Path

import torch
import torch.distributed as dist

import common
from cart import (cart_weights, corrupt, corrupt_exactly, masked_cross_entropy, unigram_log_probs,
                  uniform_nats)
from checkpoint import load_adapter
from data import (Windows, held_out_split, load_corpus, maskable_tokens, named_sources,
                  noise_generator)
from hydra_ssm import check_vocabulary, load_backbone
from text import make_tokenizer

BINS = 10  # of t, for the cross-entropy per masked token


@dataclasses.dataclass
class Draws:
    """n windows drawn twice: rows 0..n-1 by probability t, rows n..2n-1 by an exact count."""
    x0: torch.Tensor          # 2n l   clean ids
    x_t: torch.Tensor         # 2n l   with [MASK]
    masked: torch.Tensor      # 2n l   bool
    w: torch.Tensor           # 2n l   CART weights
    t: torch.Tensor           # 2n     masking probability; k / M in the second half
    maskable: torch.Tensor    # 2n     M
    pad_id: int
    tokens_per_byte: float    # maskable tokens per UTF-8 byte of the corpus


def make_draws(corpus, tokenizer, seqlen, n_windows, seed=42, p=0.45):
    """Draws of n_windows evenly spaced windows of a corpus (all of them, where it has fewer)."""
    x0 = Windows(corpus, seqlen, tokenizer.pad_id).evenly(n_windows)                   # n l
    maskable = maskable_tokens(x0, tokenizer)
    x0, maskable = x0[maskable.any(-1)], maskable[maskable.any(-1)]
    n, M, noise = len(x0), maskable.sum(-1), noise_generator(seed, n_windows)
    t, u = ((torch.randperm(n, generator=noise) + torch.rand(n, generator=noise)) / n
            for _ in range(2))                                                         # n
    k = (1 + (u * M).long()).clamp(max=M)                                              # n
    x_t, masked = corrupt(x0, t, tokenizer.mask_id, maskable, noise)
    x_k, masked_k = corrupt_exactly(x0, k, tokenizer.mask_id, maskable, noise)
    x0, masked = x0.repeat(2, 1), torch.cat([masked, masked_k])
    return Draws(x0, torch.cat([x_t, x_k]), masked, cart_weights(masked, p, x0 != tokenizer.pad_id),
                 torch.cat([t, k / M]), M.repeat(2), tokenizer.pad_id,
                 (len(corpus.ids) - corpus.n_docs) / corpus.n_bytes)


@torch.no_grad()
def sequence_losses(model, adapter, draws, batch=None, t=None, modulate="full"):
    """Per row of `draws`: the sum of ce and of w ce over its masked tokens, (2n, 2) float64.

    adapter None is the frozen backbone; t (2n,) replaces the true one. Rows are shared out over the
    ranks; a row's losses depend on neither the ranks nor the batch, beyond rounding.
    """
    device = model.word_embeddings.weight.device
    rank, world = common.rank_and_world() if dist.is_initialized() else (0, 1)
    t = draws.t if t is None else t
    batch = batch or max(1, 8192 // draws.x0.shape[1])  # bounds the memory at any length
    losses = torch.zeros(len(draws.t), 2, dtype=torch.float64)
    for rows in torch.arange(rank, len(draws.t), world).split(batch):
        x0, x_t, masked, w = (getattr(draws, name)[rows].to(device)
                              for name in ("x0", "x_t", "masked", "w"))                # b l
        modulation = None if adapter is None else adapter(t[rows].to(device)).keep(modulate)
        real = x0 != draws.pad_id
        hidden = model.hidden(x_t, modulation, None if real.all() else real)           # b l d
        ce = torch.zeros(x0.shape, dtype=torch.float64, device=device)
        ce[masked] = masked_cross_entropy(hidden[masked], x0[masked], model.head).double()
        losses[rows] = torch.stack([ce.sum(-1), (w * ce).sum(-1)], -1).cpu()
    if world > 1:  # every other rank holds zeros in these rows, so the sum is exact
        shared = losses.to(device)
        dist.all_reduce(shared)
        losses = shared.cpu()
    return losses


def table_losses(log_probs, draws):
    """`sequence_losses` of a predictor that ignores the context; log_probs (v,) in nats."""
    ce = -log_probs.double()[draws.x0].where(draws.masked, 0)  # a special id is never masked
    return torch.stack([ce.sum(-1), (draws.w * ce).sum(-1)], -1)


def metrics(losses, draws):
    """From row losses: CART under each reduction ("cart": masked_mean, "cart_weight_mean", and
    "cart_sum" in nats per window), the ELBO in nats per token and in bits per byte, and by bin of t
    the cross-entropy in nats per masked token.
    """
    n = len(draws.t) // 2
    ce, weighted = losses[:n].unbind(-1)
    masked, w_sum = draws.masked[:n].sum(-1).double(), draws.w[:n].double().sum(-1)
    nats = elbo_terms(losses, draws).sum().item() / draws.maskable[n:].sum().item()
    bins = (draws.t[:n] * BINS).long().clamp(max=BINS - 1)
    total = torch.zeros(2, BINS, dtype=torch.float64)
    total = total.index_add(1, bins, torch.stack([ce, masked]))
    return {"cart": (weighted.sum() / masked.sum()).item(),
            "cart_weight_mean": (weighted.sum() / w_sum.sum()).item(),
            "cart_sum": (weighted.sum() / n).item(),
            "elbo": nats, "bits_per_byte": nats * draws.tokens_per_byte / math.log(2),
            "by_t": (total[0] / total[1]).tolist()}


def elbo_terms(losses, draws):
    """M / k sum of ce of each window under its exact count, (n,) nats."""
    n = len(draws.t) // 2
    k = draws.masked[n:].sum(-1)
    return losses[n:, 0] * draws.maskable[n:] / k


def shuffled(t, seed=42):
    """Each sequence gets another one's t: each half of the draws is rotated in a random order."""
    out, n = t.clone(), len(t) // 2
    order = torch.randperm(n, generator=noise_generator(seed, -1))
    for half in (order, n + order):
        out[half] = t[half.roll(1)]  # a plain permutation leaves one in n its own, on average
    return out


def score_adapter(model, adapter, draws, modulate="full", seed=42):
    """Metrics of an adapter, and what knowing t is worth to it: "gap" +- "gap_error", nats a token.

    gap_error is 1.96 standard errors of the paired difference over windows.
    """
    right = sequence_losses(model, adapter, draws, modulate=modulate)
    wrong = sequence_losses(model, adapter, draws, modulate=modulate, t=shuffled(draws.t, seed))
    n = len(draws.t) // 2
    gaps = (elbo_terms(wrong, draws) - elbo_terms(right, draws)) * n / draws.maskable[n:].sum()
    return {**metrics(right, draws), "shuffled_t": metrics(wrong, draws), "gap": gaps.mean().item(),
            "gap_error": 1.96 * gaps.std().item() / math.sqrt(n) if n > 1 else math.nan}


def reference_rows(model, draws, train_ids, tokenizer):
    """The rows every table carries: uniform, unigram (of the training text), frozen."""
    choices = tokenizer.vocab_size - len(tokenizer.special_ids)
    uniform = torch.full((tokenizer.vocab_size,), -uniform_nats(choices))
    unigram = unigram_log_probs(train_ids, tokenizer.vocab_size, tokenizer.special_ids)
    return {"uniform": metrics(table_losses(uniform, draws), draws),
            "unigram": metrics(table_losses(unigram, draws), draws),
            "frozen": metrics(sequence_losses(model, None, draws), draws)}


def format_table(rows):
    """Markdown of {name: metrics}; nats per token unless the head says otherwise."""
    lines = ["| | CART masked_mean | ELBO nats/token | bits/byte | " + " | ".join(
        f"t {(i + 0.5) / BINS:.2f}" for i in range(0, BINS, 2)) + " |",
        "| --- |" + " --- |" * (3 + BINS // 2)]
    for name, m in rows.items():
        lines.append(f"| {name} | {m['cart']:.4f} | {m['elbo']:.4f} | {m['bits_per_byte']:.4f} | "
                     + " | ".join(f"{v:.3f}" for v in m["by_t"][::2]) + " |")
    return "\n".join(lines)


@torch.no_grad()
def infill(model, adapter, ids, tokenizer, steps=16):
    """Fill the [MASK]s of ids (l,), the surest first, in `steps` passes; t is the masked share."""
    ids, special = ids.clone(), list(tokenizer.special_ids)
    maskable, real = maskable_tokens(ids, tokenizer).sum(), ids[None] != tokenizer.pad_id
    for step in range(steps, 0, -1):
        holes = (ids == tokenizer.mask_id).nonzero().flatten()
        if not len(holes):
            break
        t = torch.tensor([len(holes) / maskable], dtype=torch.float32, device=ids.device)
        modulation = None if adapter is None else adapter(t)
        hidden = model.hidden(ids[None], modulation, real)[0]                          # l d
        logits = model.head(hidden[holes]).float()
        logits[:, special] = -math.inf
        certainty, best = logits.log_softmax(-1).max(-1)
        now = certainty.topk(math.ceil(len(holes) / step)).indices
        ids[holes[now]] = best[now]
    return ids


@dataclasses.dataclass(frozen=True)
class Config:
    """Score adapters on held-out text."""
    adapter: tuple[str, ...] = ()                # run folders or files; default: the shipped ones
    data: tuple[str, ...] = ("embedded",)        # NAME=PATH[,PATH...]; what is also in --train,
    #   "embedded" and shards: their held-out part
    weights: str = "small"                       # backbone: "small", "goombalab/hydra" or a path
    vocab: str = "bytes"                         # "bytes", "bert-base-uncased" or a vocab.txt
    train: tuple[str, ...] = ("embedded",)       # text trained on: its unigram is the reference
    seqlen: int = 128
    windows: int = 200                           # per data set, evenly spaced
    device: str = "auto"                         # "auto", "cpu" or "cuda"
    publish: bool = False                        # write results/evaluate/
    seed: int = 42


def main(cfg):
    paths = cfg.adapter or sorted(map(str, (common.ROOT / "assets").glob("adapter_*.safetensors")))
    device, tokenizer = common.pick_device(cfg.device), make_tokenizer(cfg.vocab)
    model = load_backbone(cfg.weights, device=device)
    check_vocabulary(model, tokenizer)
    env = common.banner("evaluate.py", cfg, device, model)
    train_ids = load_corpus(cfg.train, tokenizer, "train").ids
    result = {}
    for name, sources in named_sources(cfg.data).items():
        corpus = load_corpus(sources, tokenizer, held_out_split(sources, cfg.train))
        draws = make_draws(corpus, tokenizer, cfg.seqlen, cfg.windows, cfg.seed)
        rows = reference_rows(model, draws, train_ids, tokenizer)
        for path in common.progress(paths, desc=name):
            adapter, _ = load_adapter(path, model.config, device)
            label = Path(path).stem.removeprefix("adapter_")
            label = str(path) if label == "adapter" or label in rows else label
            rows[label] = score_adapter(model, adapter, draws)
            rows[f"{label}, shuffled t"] = rows[label].pop("shuffled_t")
        result[name] = rows
        common.log(f"\n{name}: {len(draws.t) // 2} windows of {cfg.seqlen}\n\n"
                   f"{format_table(rows)}\n")
    out = common.ROOT / "runs" / "evaluate" / "result.json"
    common.write_json(out, {"metrics": result, "config": cfg})
    if cfg.publish:
        out = common.publish("evaluate", "small", result, cfg, env)
    common.log(f"wrote {out.relative_to(common.ROOT)}")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
