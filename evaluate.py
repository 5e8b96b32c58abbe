"""Scoring a denoiser on held-out text: CART, ELBO, cross-entropy by t, controls (4.4, C.3).

Run:      python evaluate.py          (the shipped adapters on the embedded held-out text, 1 minute)
Last line: "wrote runs/evaluate/result.json"

Every row of a table sees the same windows, the same t and the same masks, so that two rows differ
by the predictor alone and their difference has its own, paired interval. A cell is the mean over
seeds +- 1.96 standard errors; each seed draws its own windows, t and masks. An adapter has two
control rows: told another window's t ("shuffled t"), and always told 0.5 ("constant t").

Each window is drawn twice: masked with probability t, t stratified over (0, 1), for the CART loss
and the cross-entropy by t; and with exactly k of its tokens masked, k stratified over 1..M, for

    -log p(x_0) <= E_k [ M / k  sum over masked i of -log p(x_0,i | x_t, t = k / M) ]        (nats)

which is eq. 13's bound with w = 1/t in its any-order form: k is exact, so it has less variance.

Symbols:  t       what the adapter is told: the masking probability, or k / M
          w       CART weight, eq. 22              M      maskable tokens of a window
          gap     ELBO with another sequence's t, minus ELBO with its own: what knowing t is worth
Differs from the paper: it reports the CART loss alone. A uniform guess scores ln(v) / 3 there.
"""
import dataclasses
import itertools
import math
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

import common
from cart import (cart_weights, corrupt, corrupt_exactly, masked_cross_entropy, unigram_log_probs,
                  uniform_nats)
from checkpoint import check_vocabulary, load_adapters, load_backbone
from data import (Windows, held_out_split, load_corpus, maskable_tokens, named_sources,
                  noise_generator)
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
    """Draws of n_windows even windows of a corpus; a seed has its own windows too.

    A corpus that has fewer is drawn whole, and again until each bin of t can have a row.
    """
    phase = torch.rand((), generator=noise_generator(seed, -2)).item()
    x0 = Windows(corpus, seqlen, tokenizer.pad_id).evenly(n_windows, phase)            # n l
    x0 = x0[maskable_tokens(x0, tokenizer).any(-1)]
    if not len(x0):
        raise common.UserError("the text has no token that can be masked; give another")
    x0 = x0.repeat(-(-min(n_windows, BINS) // len(x0)), 1)
    maskable = maskable_tokens(x0, tokenizer)
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
    for rows in torch.arange(len(draws.t))[rank::world].split(batch):
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
    "cart_sum" in nats per window), the ELBO in nats per token, in bits per byte and as perplexity,
    and by bin of t the cross-entropy in nats per masked token.
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
            "perplexity": math.exp(nats),
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
    return common.markdown(
        ["", "CART masked_mean", "ELBO nats/token", "bits/byte",
         *(f"t {(i + 0.5) / BINS:.2f}" for i in range(0, BINS, 2))],
        *([name, *(f"{m[k]:.4f}" for k in ("cart", "elbo", "bits_per_byte")),
           *(f"{v:.3f}" for v in m["by_t"][::2])] for name, m in rows.items()))


# ---- tables over seeds and data sets -------------------------------------------------------------


CONTROLS = ("", ", shuffled t", ", constant t")  # what the name of an adapter's row ends in


def score(model, adapters, corpora, tokenizer, seqlen, windows, seeds, train_ids=None,
          modes=("full",)):
    """{data set: {row: {metric: [one value per seed]}}} of {label: adapter} on {name: Corpus}.

    train_ids: the text whose unigram is a row; None leaves the three reference rows out. modes: of
    Modulation.keep; the controls go with the first, the others add a row "label, mode".
    """
    result = {name: {} for name in corpora}
    cells = list(itertools.product(corpora.items(), seeds))
    for (name, corpus), seed in common.progress(cells, desc="scoring"):
        draws = make_draws(corpus, tokenizer, seqlen, windows, seed)
        rows = {} if train_ids is None else reference_rows(model, draws, train_ids, tokenizer)
        for label, adapter in adapters.items():
            told = draws.t, shuffled(draws.t, seed), torch.full_like(draws.t, 0.5)
            asked = [(ending, t, modes[0]) for ending, t in zip(CONTROLS, told)]
            for ending, t, mode in asked + [(f", {mode}", draws.t, mode) for mode in modes[1:]]:
                losses = sequence_losses(model, adapter, draws, t=t, modulate=mode)
                rows[label + ending] = metrics(losses, draws)
        for row, scores in rows.items():
            for metric, value in scores.items():
                result[name].setdefault(row, {}).setdefault(metric, []).append(value)
    return result


def mean_error(values, student=False):
    """(mean, half of its 95 % interval): 1.96 standard errors, the normal approximation of C.3, or
    Student's quantile of them. One value has no error.
    """
    values = torch.tensor(values, dtype=torch.float64)
    n, quantile = len(values), 1.96
    if n < 2:
        return values.mean().item(), math.nan
    if student:
        from scipy.stats import t
        quantile = t.ppf(0.975, n - 1)
    return values.mean().item(), float(quantile * values.std() / n ** 0.5)


def show(values, sign="", digits=4, student=False):
    """mean ± the half interval of `mean_error` as text."""
    mean, error = mean_error(values, student)
    return f"{mean:{sign}.{digits}f} " + ("(n/a)" if len(values) < 2 else f"± {error:.{digits}f}")


def columns(result, metric, row, minus=None):
    """Of each data set, then of their average: the value of a row at each seed, or what is left
    of it after that of the row `minus` at the same seed.
    """
    lists = [[a - b for a, b in zip(rows[row][metric], rows[minus][metric])] if minus
             else rows[row][metric] for rows in result.values()]
    return [*lists, [statistics.fmean(values) for values in zip(*lists)]]


def score_table(result, metric, rows, digits=4):
    """Markdown; rows: {label: the arguments (row[, minus]) of `columns`}."""
    return common.markdown(["", *result, "Avg."], *(
        [label, *(show(values, "+" * (len(pair) > 1), digits)
                  for values in columns(result, metric, *pair))] for label, pair in rows.items()))


def tables(result, labels):
    """{title: Markdown} of a `score` with references; the last has the paired differences."""
    rows = {row: (row,) for row in next(iter(result.values()))}
    titles = {"cart": "CART masked_mean, nats", "cart_weight_mean": "CART weight_mean, nats",
              "cart_sum": "CART sum, nats per window", "elbo": "ELBO, nats per token",
              "bits_per_byte": "ELBO, bits per byte", "perplexity": "perplexity, exp(ELBO)"}
    found = {title: score_table(result, metric, rows) for metric, title in titles.items()}
    found["cross-entropy by t, nats per masked token, average"] = common.markdown(
        ["t", *(f"{(k + 0.5) / BINS:.2f}" for k in range(BINS))],
        *([row, *(f"{v:.3f}" for v in mean_by_t(result, row))] for row in rows))
    differences = {}
    for label in labels:
        differences[f"{label}, gain over frozen"] = ("frozen", label)
        for ending in CONTROLS[1:]:
            differences[f"{label}, cost of a {ending[2:]}"] = (label + ending, label)
    return found | {"ELBO, paired differences": score_table(result, "elbo", differences)}


def losses_by_t(result, row):
    """Nats per masked token by data set, seed and bin of t; NaN in an empty bin, a null in JSON."""
    return torch.tensor([[[math.nan if v is None else v for v in bins]
                          for bins in scores[row]["by_t"]] for scores in result.values()])


def mean_by_t(result, row):
    """The mean of `losses_by_t` over data sets and seeds: (BINS,)."""
    return losses_by_t(result, row).nanmean((0, 1))


def draw_scores(result, labels, path):
    """Paired differences to the frozen backbone: ELBO by data set, cross-entropy by t."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    gains, by_t = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [*result, "Avg."]
    for i, label in enumerate(labels):
        for j, (ending, marker) in enumerate(zip(CONTROLS, "osx")):
            cells = [mean_error(v) for v in columns(result, "elbo", "frozen", label + ending)]
            x = [k + (i - len(labels) / 2 + 0.2 + 0.2 * j) * 0.8 / len(labels)
                 for k in range(len(names))]
            gains.errorbar(x, *zip(*cells), fmt=marker, ms=5, color=f"C{i}", lw=1,
                           mfc="none" if ending else None, label=label + ending)
        by_t.plot([(k + 0.5) / BINS for k in range(BINS)],
                  (mean_by_t(result, "frozen") - mean_by_t(result, label)).tolist(), "o-", ms=3)
    gains.set_xticks(range(len(names)), names, fontsize=8)
    gains.set(ylabel="ELBO gained over frozen\n(nats per token)", title="by data set")
    by_t.set(xlabel="t (share of masked tokens)", ylabel="nats gained per masked token",
             title="by t, average over data sets")
    for ax in (gains, by_t):
        ax.axhline(0, color="k", lw=0.8)
    figure.legend(*gains.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    common.save_figure(figure, path)


@dataclasses.dataclass(frozen=True)
class Config:
    """Score adapters on held-out text."""
    adapter: tuple[str, ...] = ()                # run folders or files; default: the shipped ones
    data: tuple[str, ...] = ("embedded",)        # NAME=PATH[,PATH...]; what is also in --train,
    #   "embedded" and shards: their held-out part
    weights: str = "small"                       # backbone: "small", "goombalab/hydra" or a path
    vocab: str = "bytes"                         # "bytes", "bert-base-uncased" or a vocab.txt
    train: tuple[str, ...] = ("embedded",)       # text trained on: its unigram is the reference
    modulate: tuple[str, ...] = ("full",)        # Table 2: what adapters may reach; controls for
    #   the first, a row for each of the others
    seqlen: int = 128
    windows: int = 40                            # of a data set, per seed; evenly spaced
    seeds: int = 3                               # 42, 142, ...; 10 in the paper's tables
    device: str = "auto"                         # "auto", "cpu" or "cuda"
    publish: bool = False                        # also write results/evaluate/ and figures/
    seed: int = 42                               # the first of the seeds


def main(cfg):
    device, tokenizer = common.pick_device(cfg.device), make_tokenizer(cfg.vocab)
    model = load_backbone(cfg.weights, device=device)
    check_vocabulary(model, tokenizer)
    adapters = load_adapters(cfg.adapter, model.config, device)
    env = common.banner("evaluate.py", cfg, device, model)
    corpora = {name: load_corpus(sources, tokenizer, held_out_split(sources, cfg.train))
               for name, sources in named_sources(cfg.data).items()}
    seeds = [cfg.seed + 100 * i for i in range(cfg.seeds)]
    result = score(model, adapters, corpora, tokenizer, cfg.seqlen, cfg.windows, seeds,
                   load_corpus(cfg.train, tokenizer, "train").ids, cfg.modulate)
    used = {}
    for name, corpus in corpora.items():
        total = len(Windows(corpus, cfg.seqlen, tokenizer.pad_id))
        used[name] = f"{min(cfg.windows, total):,} of {total:,} windows of {cfg.seqlen} per seed"
        common.log(f"{name}: {used[name]}")
    found, folder = tables(result, adapters), common.ROOT / "runs" / "evaluate"
    texts = {title: f"\n{title}; mean ± 1.96 standard errors, n = {cfg.seeds} seeds\n\n{table}"
             for title, table in found.items()}
    for title in ("CART masked_mean, nats", "ELBO, nats per token", "ELBO, paired differences"):
        common.log(texts[title])
    with common.atomic_path(folder / "tables.md") as temporary:
        temporary.write_text("\n".join(texts.values()), "utf-8")
    figure = (common.ROOT / "figures" if cfg.publish else folder) / "table1_scores.png"
    draw_scores(result, list(adapters), figure)
    result = {"scores": result, "tables": found, "windows": used, "seeds": seeds}
    out = folder / "result.json"
    common.write_json(out, {"metrics": result, "config": cfg})
    if cfg.publish:
        out = common.publish("evaluate", Path(cfg.weights).stem, result, cfg, env)
    common.log(f"\nfigure: {figure.relative_to(common.ROOT)}; all metrics: runs/evaluate/tables.md"
               f"\nwrote {out.relative_to(common.ROOT)}")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
