"""Scoring a denoiser on held-out text: CART, ELBO, cross-entropy by t, controls (4.4, C.3).

Run:      python evaluate.py          (the shipped adapters on the embedded held-out text, 1 minute)
Last line: "wrote runs/evaluate/shipped/result.json"

Every row of a table sees the same windows, the same t and the same masks, so that two rows differ
by the predictor alone and their difference has its own, paired interval. A cell is the mean over
seeds +- 1.96 standard errors; each seed draws its own windows, t and masks. An adapter has two
control rows: told another window's t ("shuffled t"), and always told 0.5 ("constant t").

Each window is drawn twice: masked with probability t, t stratified over (0, 1), for the CART loss
and the cross-entropy by t; and with exactly k of its tokens masked, k stratified over 1..M, for

    -log p(x_0) <= E_k [ M / k  sum over masked i of -log p(x_0,i | x_t, t = k / M) ]        (nats)

which is eq. 13's bound with w = 1/t in its any-order form: k is exact, so it has less variance.
What the tables call ELBO is this right-hand side, so lower is better.

Symbols:  t       what the adapter is told: the masking probability, or k / M
          w       CART weight, eq. 22              M      maskable tokens of a window
          gap     ELBO with another sequence's t, minus ELBO with its own: what a wrong t costs
          scores  {data set: {Row: {metric: [one value per seed]}}}
Differs from the paper: it reports the CART loss alone. A uniform guess scores ln(v) / 3 there.
"""
import dataclasses
import itertools
import math
import statistics
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import common
from cart import (cart_weights, corrupt, corrupt_exactly, masked_cross_entropy, unigram_log_probs,
                  uniform_nats)
from checkpoint import check_vocabulary, load_adapters, load_backbone, result_folder, run_plugin
from data import (Corpus, Windows, held_out_split, load_corpus, maskable_tokens, named_sources,
                  noise_generator)
from hydra_ssm import MODES
from mark_adapters import reads_t
from text import make_tokenizer

BINS = 10  # of t, for the cross-entropy per masked token


@dataclasses.dataclass(frozen=True)
class Config:
    """Score adapters on held-out text."""
    # table1: ten seeds; table2: ten seeds and every column of Table 2, one adapter masked; name the
    # paper's text with --data wikitext=PATH
    preset: Literal["quick", "table1", "table2"] = "quick"
    adapter: tuple[str, ...] = ()           # run folders or files; default: the shipped ones
    # NAME=PATH[,PATH...]; the held-out part of "embedded", shards and what is also in --train
    data: tuple[str, ...] = ("embedded",)
    weights: str = "small"                  # backbone: "small", "goombalab/hydra" or a path
    sliced: bool = False                    # NOT it, but what the paper's code makes of it
    vocab: str = "bytes"                    # "bytes", "bert-base-uncased" or a vocab.txt
    train: tuple[str, ...] = ("embedded",)  # text trained on: its unigram is the reference
    # Table 2: what adapters may reach; controls for the first, a row for each of the others
    modulate: tuple[Literal[MODES], ...] = ("full",)
    seqlen: int = 128                       # tokens of a window
    windows: int = 40                       # of a data set, per seed; evenly spaced
    seeds: int = 3                          # 42, 142, ...; 10 in the paper's tables
    plugin: str = ""                        # Python file of your own, run first; it adds geometries
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # of the backbone; auto: tf32 on a GPU and float32 elsewhere
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    seed: int = 42                          # the first of the seeds


PRESETS = {
    "quick": {},
    "table1": dict(seeds=10),
    "table2": dict(seeds=10, modulate=MODES),
}


# ---- draws ---------------------------------------------------------------------------------------


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
    distinct: int = 0         # different windows; less than n where a short text comes repeatedly

    @property
    def n(self):
        """The number of windows."""
        return len(self.t) // 2


def make_draws(corpus, tokenizer, seqlen, n_windows, seed=42, p=0.45):
    """Draws of n_windows even windows of a corpus; a seed has its own windows too.

    A corpus that has fewer is drawn whole, and again until each bin of t can have a row.
    """
    x0 = choose_windows(corpus, tokenizer, seqlen, n_windows, seed)                    # n l
    distinct = len(x0.unique(dim=0))
    maskable = maskable_tokens(x0, tokenizer)
    M = maskable.sum(-1)                                                               # n
    noise = noise_generator(seed, n_windows)
    t = stratified(len(x0), noise)
    share = stratified(len(x0), noise)
    k = (1 + (share * M).long()).clamp(max=M)
    x_t, masked_t = corrupt(x0, t, tokenizer.mask_id, maskable, noise)
    x_k, masked_k = corrupt_exactly(x0, k, tokenizer.mask_id, maskable, noise)
    x0 = x0.repeat(2, 1)                                                               # 2n l
    masked = torch.cat([masked_t, masked_k])
    return Draws(x0=x0, x_t=torch.cat([x_t, x_k]), masked=masked,
                 w=cart_weights(masked, p, x0 != tokenizer.pad_id),
                 t=torch.cat([t, k / M]), maskable=M.repeat(2), pad_id=tokenizer.pad_id,
                 tokens_per_byte=tokens_per_byte(corpus), distinct=distinct)


def choose_windows(corpus, tokenizer, seqlen, n_windows, seed):
    """Even windows of a corpus that have a token to mask, (n, l); few of them come repeatedly."""
    phase = torch.rand((), generator=noise_generator(seed, -2)).item()
    x0 = Windows(corpus, seqlen, tokenizer.pad_id).evenly(n_windows, phase)            # n l
    x0 = x0[maskable_tokens(x0, tokenizer).any(-1)]
    if not len(x0):
        raise common.UserError("the text has no token that can be masked; give another")
    wanted = min(n_windows, BINS)
    return x0.repeat(math.ceil(wanted / len(x0)), 1)


def stratified(n, generator):
    """One number in each of n equal parts of [0, 1), in random order."""
    part = torch.randperm(n, generator=generator)
    return (part + torch.rand(n, generator=generator)) / n


def tokens_per_byte(corpus):
    """Tokens, without [SEP], per UTF-8 byte of a corpus."""
    return (len(corpus.ids) - corpus.n_docs) / corpus.n_bytes


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The texts that rows are scored on, and how: every row sees the same draws."""
    corpora: dict[str, Corpus]
    tokenizer: object
    seqlen: int
    windows: int              # of a text, per seed
    seeds: tuple[int, ...]

    def cells(self):
        """[(name of a text, seed)]."""
        return list(itertools.product(self.corpora, self.seeds))

    def draw(self, name, seed):
        """The Draws of a cell."""
        corpus = self.corpora[name]
        return make_draws(corpus, self.tokenizer, self.seqlen, self.windows, seed)


# ---- losses of each window -----------------------------------------------------------------------


def batch_states(model, adapter, draws, rows, t, modulate="full"):
    """x0 (b, l), masked (b, l) and the last hidden states (b, l, d) of some rows of `draws`."""
    device = model.word_embeddings.weight.device
    x0 = draws.x0[rows].to(device)                                                     # b l
    modulation = None
    if adapter is not None:
        modulation = adapter(t[rows].to(device)).keep(modulate)
    real = x0 != draws.pad_id
    mask = None if real.all() else real
    hidden = model.hidden(draws.x_t[rows].to(device), modulation, mask)                # b l d
    return x0, draws.masked[rows].to(device), hidden


def batch_size(draws):
    """Rows that are computed together: it bounds the memory at any length."""
    return max(1, 8192 // draws.x0.shape[1])


@torch.no_grad()
def sequence_losses(model, adapter, draws, batch=None, t=None, modulate="full"):
    """Per row of `draws`: the sum of ce and of w ce over its masked tokens, (2n, 2) float64.

    adapter None is the frozen backbone; t (2n,) replaces the true one. Rows are shared out over the
    ranks; a row's losses depend on neither the ranks nor the batch, beyond rounding.
    """
    device = model.word_embeddings.weight.device
    rank, world = common.rank_and_world()
    if t is None:
        t = draws.t
    losses = torch.zeros(len(draws.t), 2, dtype=torch.float64)
    for rows in torch.arange(len(draws.t))[rank::world].split(batch or batch_size(draws)):
        x0, masked, hidden = batch_states(model, adapter, draws, rows, t, modulate)
        ce = torch.zeros(x0.shape, dtype=torch.float64, device=device)                 # b l
        ce[masked] = masked_cross_entropy(hidden[masked], x0[masked], model.head).double()
        weighted = draws.w[rows].to(device) * ce
        losses[rows] = torch.stack([ce.sum(-1), weighted.sum(-1)], -1).cpu()           # b 2
    if world > 1:  # every other rank holds zeros in these rows, so the sum is exact
        shared = losses.to(device)
        dist.all_reduce(shared)
        losses = shared.cpu()
    return losses


def table_losses(log_probs, draws):
    """`sequence_losses` of a predictor that ignores the context; log_probs (v,) in nats."""
    ce = -log_probs.double()[draws.x0].where(draws.masked, 0)  # a special id is never masked
    weighted = draws.w * ce
    return torch.stack([ce.sum(-1), weighted.sum(-1)], -1)


def shuffled(t, seed=42):
    """Each sequence gets another one's t: each half of the draws is rotated in a random order."""
    n = len(t) // 2
    order = torch.randperm(n, generator=noise_generator(seed, -1))
    out = t.clone()
    for half in (order, n + order):
        out[half] = t[half.roll(1)]  # a plain permutation leaves one in n its own, on average
    return out


# ---- metrics of all windows ----------------------------------------------------------------------


def elbo_terms(losses, draws):
    """M / k sum of ce of each window under its exact count, (n,) nats."""
    k = draws.masked[draws.n:].sum(-1)
    return losses[draws.n:, 0] * draws.maskable[draws.n:] / k


def metrics(losses, draws):
    """From row losses: CART under each reduction ("cart": masked_mean, "cart_weight_mean", and
    "cart_sum" in nats per window), the ELBO in nats per token, in bits per byte and as perplexity,
    and by bin of t the cross-entropy in nats per masked token, NaN in an empty bin.
    """
    n = draws.n
    weighted = losses[:n, 1].sum()
    masked = draws.masked[:n].sum(-1).double().sum()
    w = draws.w[:n].double().sum(-1).sum()
    nats = elbo_terms(losses, draws).sum().item() / draws.maskable[n:].sum().item()
    return {"cart": (weighted / masked).item(),
            "cart_weight_mean": (weighted / w).item(),
            "cart_sum": (weighted / n).item(),
            "elbo": nats,
            "bits_per_byte": nats * draws.tokens_per_byte / math.log(2),
            "perplexity": math.exp(nats),
            "by_t": cross_entropy_by_t(losses, draws)}


def cross_entropy_by_t(losses, draws):
    """Nats per masked token in each of BINS equal intervals of t; NaN in an empty one."""
    n = draws.n
    bins = (draws.t[:n] * BINS).long().clamp(max=BINS - 1)
    empty = torch.zeros(BINS, dtype=torch.float64)
    ce = empty.index_add(0, bins, losses[:n, 0])
    masked = empty.index_add(0, bins, draws.masked[:n].sum(-1).double())
    return (ce / masked).tolist()


def score_adapter(model, adapter, draws, modulate="full", seed=42):
    """Metrics of an adapter, and what a wrong t costs it: "gap" +- "gap_error", nats per token.

    gap_error is 1.96 standard errors of the paired difference over windows; NaN if there is one.
    """
    right = sequence_losses(model, adapter, draws, modulate=modulate)
    wrong = wrong_t_losses(model, adapter, draws, modulate, seed)
    gap = elbo_difference(wrong, right, draws, student=False)
    return {**metrics(right, draws), "shuffled_t": metrics(wrong, draws), "gap": gap.mean,
            "gap_error": gap.half}


def wrong_t_losses(model, adapter, draws, modulate="full", seed=42):
    """`sequence_losses` of an adapter that is told another window's t; NaN if there is no other."""
    if draws.n == 1:
        return torch.full((2, 2), math.nan, dtype=torch.float64)
    return sequence_losses(model, adapter, draws, modulate=modulate, t=shuffled(draws.t, seed))


# ---- one adapter beside the frozen backbone, with intervals over windows -------------------------


@torch.no_grad()
def filled_right(model, adapter, draws, modulate="full"):
    """How many masked tokens of each window, at its own t, the likeliest token is right for: (n,).

    One pass fills all of them. The frozen backbone where adapter is None.
    """
    right = torch.zeros(draws.n)
    for rows in torch.arange(draws.n).split(batch_size(draws)):
        x0, masked, hidden = batch_states(model, adapter, draws, rows, draws.t, modulate)
        hits = torch.zeros_like(masked)
        guesses = [model.head(part).argmax(-1) for part in hidden[masked].split(4096)]
        hits[masked] = torch.cat(guesses) == x0[masked]
        right[rows] = hits.sum(-1).float().cpu()
    return right


def over_windows(values, draws, student=True):
    """The Interval of one value per window. A text that comes repeatedly has no interval: its
    windows are not independent.
    """
    found = common.interval(values.tolist(), student)
    if draws.distinct < draws.n:
        return common.Interval(found.mean, math.nan, draws.distinct)
    return found


def elbo_difference(losses, minus, draws, student=True):
    """The ELBO of one predictor less another's, nats per token: an Interval over windows."""
    tokens = draws.maskable[draws.n:].sum()
    terms = elbo_terms(losses, draws) - elbo_terms(minus, draws)                       # n
    return over_windows(terms * draws.n / tokens, draws, student)


def difference_by_t(losses, minus, draws):
    """The same by bin of t, in nats per masked token: an Interval, or None, for each bin."""
    n = draws.n
    masked = draws.masked[:n].sum(-1).double()
    difference = losses[:n, 0] - minus[:n, 0]                                          # n
    bins = (draws.t[:n] * BINS).long().clamp(max=BINS - 1)
    found = []
    for k in range(BINS):
        inside = bins == k
        if not inside.any():
            found.append(None)
            continue
        per_token = difference[inside] / masked[inside].mean()
        found.append(over_windows(per_token, draws))
    return found


def compare(model, adapter, draws, modulate="full", seed=42, frozen=None):
    """What an adapter changes on held-out text. frozen: `sequence_losses` of the frozen backbone,
    where they are known. All Intervals are Student's 95 % over windows, of
    differences between predictors on the same windows, t and masks:

    "frozen", "adapter", "wrong_t"   metrics of each; wrong_t: told another window's t; the
                    adapter's hold "gap" and "gap_error" as well, see score_adapter
    "reads_t"       whether the adapter reads t at all
    "gain"          ELBO of frozen less the adapter's, nats per token
    "wrong_t_cost"  ELBO with the wrong t less the adapter's own
    "gain_by_t", "wrong_t_gain_by_t"   the gain with the own and the wrong t, nats per masked token
    "right"         shares of masked tokens filled right: frozen, the adapter, and the difference
    """
    if frozen is None:
        frozen = sequence_losses(model, None, draws)
    own = sequence_losses(model, adapter, draws, modulate=modulate)
    wrong = wrong_t_losses(model, adapter, draws, modulate, seed)
    masked = draws.masked[:draws.n].sum().item()
    before = filled_right(model, None, draws)
    after = filled_right(model, adapter, draws, modulate)
    more = over_windows((after - before) * draws.n / masked, draws)
    gap = elbo_difference(wrong, own, draws, student=False)
    return {
        "windows": draws.distinct,
        "reads_t": reads_t(adapter),
        "frozen": metrics(frozen, draws),
        "adapter": {**metrics(own, draws), "gap": gap.mean, "gap_error": gap.half},
        "wrong_t": metrics(wrong, draws),
        "gain": elbo_difference(frozen, own, draws),
        "wrong_t_cost": elbo_difference(wrong, own, draws),
        "gain_by_t": difference_by_t(frozen, own, draws),
        "wrong_t_gain_by_t": difference_by_t(frozen, wrong, draws),
        "right": {"frozen": before.sum().item() / masked, "adapter": after.sum().item() / masked,
                  "difference": more},
    }


def comparison_table(name, found):
    """Markdown of what `compare` found, for a reader who has seen nothing else."""
    right = found["right"]
    points = right["difference"]
    points = common.Interval(100 * points.mean, 100 * points.half, points.n)
    cost = found["wrong_t_cost"].show("+") if found["reads_t"] else "it reads no t"
    return common.markdown(
        [f"{name}, on {found['windows']} held-out windows", "± Student's 95 % over windows"],
        ["gain over the frozen backbone, ELBO in nats per token", found["gain"].show("+")],
        ["masked tokens filled right in one pass", f"{right['frozen']:.2%} -> "
         f"{right['adapter']:.2%}, {points.show('+', 2)} points"],
        ["cost of telling it another window's t, ELBO in nats per token", cost])


def last_line(name, found):
    """One line that says what was gained."""
    before = found["frozen"]["elbo"]
    after = found["adapter"]["elbo"]
    right = found["right"]
    if found["reads_t"]:
        cost = f"a wrong t costs {found['wrong_t_cost'].show(digits=3)}"
    else:
        cost = "it reads no t"
    return (f"{name}: ELBO {before:.3f} -> {after:.3f} nats/token (gain "
            f"{found['gain'].show(digits=3)}), filled right {right['frozen']:.1%} -> "
            f"{right['adapter']:.1%}, {cost}")


def draw_gain_by_t(ax, found):
    """The gain over the frozen backbone by t, with the adapter's own t and with a wrong one."""
    lines = (("gain_by_t", "its own t", "-"), ("wrong_t_gain_by_t", "another window's t", ":"))
    for i, (name, label, style) in enumerate(lines):
        x, means, halves = [], [], []
        for k, value in enumerate(found[name]):
            if value is not None:
                x.append((k + 0.5) / BINS + 0.012 * (i - 0.5))  # or the bars lie on each other
                means.append(value.mean)
                halves.append(value.half)
        ax.errorbar(x, means, halves, ls=style, ms=4, lw=1.2, capsize=2, label=label,
                    **score_style(i))
    ax.axhline(0, color="0.3", ls="--", lw=1, label="frozen")
    ax.set(xlabel="t (share of masked tokens)", ylabel="nats gained per masked token",
           title=f"gain over frozen, {found['windows']} windows, 95 %")
    ax.legend(frameon=False, fontsize=8)


# ---- rows, over texts and seeds ------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the tables: an adapter, what it is told as t, and what it may reach (Table 2)."""
    adapter: str  # its name; or a reference, which takes no t: see REFERENCES
    told: Literal["own t", "shuffled t", "constant t"] = "own t"
    modulate: Literal[MODES] = "full"

    def label(self, usual="full"):
        """The row's name in tables and files; `usual` is the mode that is not worth a word."""
        parts = [self.adapter]
        if self.modulate != usual:
            parts.append(self.modulate)
        if self.told != "own t":
            parts.append(self.told)
        return ", ".join(parts)


CONTROLS = ("shuffled t", "constant t")
FROZEN = Row("frozen")
REFERENCES = (Row("uniform"), Row("unigram"), FROZEN)


def adapter_rows(name, modes=("full",)):
    """The Rows of an adapter: its controls go with the first of `modes`."""
    first, *others = modes
    rows = [Row(name, "own t", first)]
    rows += [Row(name, told, first) for told in CONTROLS]
    rows += [Row(name, "own t", mode) for mode in others]
    return rows


def told_t(draws, told, seed):
    """What the adapter of a Row is told on these draws, (2n,)."""
    if told == "shuffled t":
        return shuffled(draws.t, seed)
    if told == "constant t":
        return torch.full_like(draws.t, 0.5)
    return draws.t


def context_free(train_ids, tokenizer):
    """{name: log-probabilities (v,)} of two predictors that ignore the context: a uniform guess,
    and the unigram of the training text.
    """
    choices = tokenizer.vocab_size - len(tokenizer.special_ids)
    uniform = torch.full((tokenizer.vocab_size,), -uniform_nats(choices))
    unigram = unigram_log_probs(train_ids, tokenizer.vocab_size, tokenizer.special_ids)
    return {"uniform": uniform, "unigram": unigram}


def reference_rows(model, draws, train_ids, tokenizer, frozen=None):
    """{name: metrics} that every table carries: uniform, unigram (of the training text), frozen.

    frozen: `sequence_losses` of the frozen backbone, where they are known.
    """
    return reference_metrics(model, draws, context_free(train_ids, tokenizer), frozen)


def reference_metrics(model, draws, predictors, frozen=None):
    """`reference_rows` from what `context_free` returned."""
    if frozen is None:
        frozen = sequence_losses(model, None, draws)
    found = {}
    for name, log_probs in predictors.items():
        found[name] = metrics(table_losses(log_probs, draws), draws)
    found["frozen"] = metrics(frozen, draws)
    return found


def score_references(model, held_out, train_ids):
    """The scores of REFERENCES: once for all adapters."""
    predictors = context_free(train_ids, held_out.tokenizer)
    scores = {name: {} for name in held_out.corpora}
    for name, seed in common.progress(held_out.cells(), desc="scoring the references"):
        found = reference_metrics(model, held_out.draw(name, seed), predictors)
        for reference, values in found.items():
            add_seed(scores[name], Row(reference), values)
    return scores


def score_adapter_rows(model, adapter, rows, held_out):
    """The scores of some Rows of one adapter."""
    scores = {name: {} for name in held_out.corpora}
    for name, seed in common.progress(held_out.cells(), desc=f"scoring {rows[0].adapter}"):
        draws = held_out.draw(name, seed)
        for row in rows:
            t = told_t(draws, row.told, seed)
            losses = sequence_losses(model, adapter, draws, t=t, modulate=row.modulate)
            add_seed(scores[name], row, metrics(losses, draws))
    return scores


def add_seed(rows, row, values):
    """Add {metric: value} of one more seed to {Row: {metric: [one value per seed]}}."""
    of_row = rows.setdefault(row, {})
    for metric, value in values.items():
        of_row.setdefault(metric, []).append(value)


def merge_scores(*parts):
    """The scores of several calls on the same texts and seeds, as one."""
    merged = {name: {} for name in parts[0]}
    for part in parts:
        for name, rows in part.items():
            merged[name] |= rows
    return merged


def score_all(model, adapters, held_out, train_ids, modes=("full",)):
    """The scores of REFERENCES and of every Row of {name: adapter}."""
    parts = [score_references(model, held_out, train_ids)]
    for name, adapter in adapters.items():
        parts.append(score_adapter_rows(model, adapter, adapter_rows(name, modes), held_out))
    return merge_scores(*parts)


# ---- what tables and figures show of scores ------------------------------------------------------


def seed_values(scores, metric, row):
    """A row's values, one per seed: of each data set, then of their average."""
    lists = [rows[row][metric] for rows in scores.values()]
    return [*lists, average(lists)]


def seed_differences(scores, metric, row, minus):
    """What is left of a row after the row `minus`, seed by seed: shaped as `seed_values`."""
    lists = []
    for rows in scores.values():
        pairs = zip(rows[row][metric], rows[minus][metric], strict=True)
        lists.append([a - b for a, b in pairs])
    return [*lists, average(lists)]


def average(lists):
    """The mean over data sets at each seed."""
    return [statistics.fmean(at_seed) for at_seed in zip(*lists, strict=True)]


def losses_by_t(scores, row):
    """Nats per masked token by data set, seed and bin of t; NaN in an empty bin, a null in JSON."""
    found = [rows[row]["by_t"] for rows in scores.values()]
    return torch.from_numpy(np.array(found, dtype=np.float64))  # which makes a NaN of None


def mean_by_t(scores, row):
    """The mean of `losses_by_t` over data sets and seeds: (BINS,)."""
    return losses_by_t(scores, row).nanmean((0, 1))


def by_label(scores, usual="full"):
    """Scores as result files hold them, by the labels of the rows."""
    labelled = {}
    for name, rows in scores.items():
        labelled[name] = {row.label(usual): values for row, values in rows.items()}
    return labelled


# ---- tables --------------------------------------------------------------------------------------


TITLES = {"cart": "CART masked_mean, nats", "cart_weight_mean": "CART weight_mean, nats",
          "cart_sum": "CART sum, nats per window", "elbo": "ELBO, nats per token",
          "bits_per_byte": "ELBO, bits per byte", "perplexity": "perplexity, exp(ELBO)"}
BY_T = "cross-entropy by t, nats per masked token, average"
DIFFERENCES = "ELBO, paired differences"


def number(value, digits):
    """A number as text; NaN, where there is nothing to average, is n/a."""
    return "n/a" if math.isnan(value) else f"{value:.{digits}f}"


def mean_and_error(values, sign="", digits=4):
    """The mean of one value per seed ± 1.96 standard errors (C.3), as text."""
    return common.interval(values, student=False).show(sign, digits)


def format_table(rows):
    """Markdown of {name: metrics}; nats per token unless the head says otherwise."""
    every_second = range(0, BINS, 2)
    head = ["", "CART masked_mean", "ELBO nats/token", "bits/byte"]
    head += [f"t {(k + 0.5) / BINS:.2f}" for k in every_second]
    lines = []
    for name, scores in rows.items():
        line = [name]
        line += [number(scores[metric], 4) for metric in ("cart", "elbo", "bits_per_byte")]
        line += [number(scores["by_t"][k], 3) for k in every_second]
        lines.append(line)
    return common.markdown(head, *lines)


def score_table(scores, values, sign="", digits=4):
    """Markdown of {label: what `seed_values` or `seed_differences` found}, means over seeds."""
    lines = []
    for label, lists in values.items():
        lines.append([label, *(mean_and_error(v, sign, digits) for v in lists)])
    return common.markdown(["", *scores, "Avg."], *lines)


def by_t_table(scores, rows):
    """Markdown of {label: Row}: the cross-entropy by t, over data sets and seeds."""
    lines = []
    for label, row in rows.items():
        lines.append([label, *(number(v, 3) for v in mean_by_t(scores, row).tolist())])
    return common.markdown(["t", *(f"{(k + 0.5) / BINS:.2f}" for k in range(BINS))], *lines)


def adapter_differences(scores, name, usual="full"):
    """{label: ELBO differences}: what an adapter gains, and what a wrong t costs it.

    A gain is positive where the adapter is better, a cost where its own t is.
    """
    own = Row(name, "own t", usual)
    found = {f"{name}, gain over frozen": seed_differences(scores, "elbo", FROZEN, own)}
    for told in CONTROLS:
        wrong = Row(name, told, usual)
        found[f"{name}, cost of a {told}"] = seed_differences(scores, "elbo", wrong, own)
    return found


def score_tables(scores, adapters, usual="full"):
    """{title: Markdown} of `score_all` for the names of its adapters; usual: its first mode."""
    rows = {row.label(usual): row for row in next(iter(scores.values()))}
    tables = {}
    for metric, title in TITLES.items():
        values = {label: seed_values(scores, metric, row) for label, row in rows.items()}
        tables[title] = score_table(scores, values)
    tables[BY_T] = by_t_table(scores, rows)
    differences = {}
    for name in adapters:
        differences |= adapter_differences(scores, name, usual)
    tables[DIFFERENCES] = score_table(scores, differences, "+")
    return tables


PAIRS = "ELBO, adapters beside each other"


def pair_table(scores, adapters, usual="full"):
    """Markdown: the ELBO of each adapter less that of every later one, on the same windows, t and
    masks; its 95 % interval over seeds, Student's and, beside it, C.3's 1.96 standard errors.
    """
    lines = []
    for one, other in itertools.combinations(adapters, 2):
        rows = [Row(name, "own t", usual) for name in (one, other)]
        cells = []
        for values in seed_differences(scores, "elbo", *rows):
            students = common.interval(values)
            normal = common.interval(values, student=False)
            cell = students.show("+")
            if not math.isnan(normal.half):
                cell += f" ({normal.half:.4f})"
            cells.append(cell)
        lines.append([f"{one} less {other}", *cells])
    return common.markdown(["", *scores, "Avg."], *lines)


# ---- figure --------------------------------------------------------------------------------------


FILLED = {"own t": "full", "shuffled t": "none", "constant t": "bottom"}  # markers of what is told


def draw_scores(scores, adapters, path, usual="full"):
    """What adapters gain over the frozen backbone: ELBO by data set, cross-entropy by t."""
    figure = common.new_figure(13, 4.6)
    gains, by_t = figure.subplots(1, 2, width_ratios=(5, 3))
    for i, name in enumerate(adapters):
        draw_scores_by_text(gains, scores, name, i, len(adapters), usual)
        draw_scores_by_t(by_t, scores, name, i, len(adapters), usual)
    gains.set_xticks(range(len(scores) + 1), [*scores, "average"])
    for boundary in range(len(scores)):
        gains.axvline(boundary + 0.5, color="0.85", lw=0.8)
    gains.set(xlim=(-0.5, len(scores) + 0.5), ylabel="ELBO gained over frozen (nats per token)",
              title="gain by text, 95 %")
    by_t.set(xlabel="t (share of masked tokens)", xlim=(0, 1),
             ylabel="nats gained per masked token", title="gain by t, average of the texts, 95 %")
    for ax in (gains, by_t):
        ax.axhline(0, color="black", lw=0.8)
    figure.legend(handles=score_handles(adapters), loc="outside lower center", frameon=False,
                  ncols=min(6, len(adapters) + len(FILLED)))
    common.save_figure(figure, path)


def score_style(i):
    """Colour and marker of the i-th adapter."""
    return {"color": common.COLORS[i % len(common.COLORS)],
            "marker": common.MARKERS[i % len(common.MARKERS)]}


def score_handles(adapters):
    """What a legend names: adapters by colour and marker, what they are told by the filling."""
    from matplotlib.lines import Line2D
    handles = []
    for i, name in enumerate(adapters):
        handles.append(Line2D([], [], ls="", label=name, **score_style(i)))
    for told, filled in FILLED.items():
        label = f"told its {told}" if told == "own t" else f"told a {told}"
        handles.append(Line2D([], [], ls="", marker="o", color="0.4", fillstyle=filled,
                              markerfacecoloralt="white", label=label))
    return handles


def draw_scores_by_text(ax, scores, name, i, n, usual):
    """One adapter, the i-th of n: at each data set its gain with its own t and with wrong ones."""
    for j, (told, filled) in enumerate(FILLED.items()):
        row = Row(name, told, usual)
        cells = [common.interval(values, student=False)
                 for values in seed_differences(scores, "elbo", FROZEN, row)]
        offset = 0.28 * (j - 1) + 0.22 * ((i + 0.5) / n - 0.5)
        x = [k + offset for k in range(len(cells))]
        # Of one seed the error is NaN, of which matplotlib draws nothing.
        ax.errorbar(x, [c.mean for c in cells], [c.half for c in cells], ls="", ms=6, lw=1.2,
                    fillstyle=filled, markerfacecoloralt="white", **score_style(i))


def draw_scores_by_t(ax, scores, name, i, n, usual):
    """One adapter, the i-th of n: its gain in each bin of t, with an interval over the seeds."""
    gained = losses_by_t(scores, FROZEN) - losses_by_t(scores, Row(name, "own t", usual))
    x, means, halves = [], [], []
    for k, by_seed in enumerate(gained.nanmean(0).T):
        found = by_seed[~by_seed.isnan()].tolist()  # a seed may have masked nothing in a bin
        if found:
            cell = common.interval(found, student=False)
            x.append((k + 0.5 + 0.4 * ((i + 0.5) / n - 0.5)) / BINS)
            means.append(cell.mean)
            halves.append(cell.half)
    ax.errorbar(x, means, halves, ms=5, lw=1.2, **score_style(i))


# ---- command line --------------------------------------------------------------------------------


def load_held_out(cfg, tokenizer):
    """The HeldOut of a Config."""
    corpora = {}
    for name, sources in named_sources(cfg.data).items():
        corpora[name] = load_corpus(sources, tokenizer, held_out_split(sources, cfg.train))
    seeds = tuple(cfg.seed + 100 * i for i in range(cfg.seeds))
    return HeldOut(corpora, tokenizer, cfg.seqlen, cfg.windows, seeds)


def windows_used(held_out):
    """{data set: how much of it was scored}."""
    used = {}
    for name, corpus in held_out.corpora.items():
        total = len(Windows(corpus, held_out.seqlen, held_out.tokenizer.pad_id))
        taken = min(held_out.windows, total)
        used[name] = f"{taken:,} of {total:,} windows of {held_out.seqlen} per seed"
    return used


def main(cfg):
    run_plugin(cfg.plugin)
    device = common.pick_device(cfg.device)
    tokenizer = make_tokenizer(cfg.vocab)
    dtype = common.pick_precision(cfg.precision, device)
    model = load_backbone(cfg.weights, dtype, device, sliced=cfg.sliced)
    check_vocabulary(model, tokenizer)
    adapters = load_adapters(cfg.adapter, model.config, device)
    env = common.banner("evaluate.py", cfg, device, model)
    held_out = load_held_out(cfg, tokenizer)
    train_ids = load_corpus(cfg.train, tokenizer, "train").ids

    scores = score_all(model, adapters, held_out, train_ids, cfg.modulate)
    usual = cfg.modulate[0]
    tables = score_tables(scores, adapters, usual)
    if len(adapters) > 1:
        tables[PAIRS] = pair_table(scores, adapters, usual)
    used = windows_used(held_out)
    result = {"scores": by_label(scores, usual), "tables": tables, "windows": used,
              "seeds": list(held_out.seeds)}
    folder = result_folder("evaluate", cfg.adapter)
    common.save_result(folder / "result.json", result, cfg, env)
    texts = {}
    for title, table in tables.items():
        over = f"n = {cfg.seeds} seeds, each with its own windows, t and masks"
        head = f"{title}; mean ± 1.96 standard errors, {over}"
        if title == PAIRS:
            head = (f"{title}; mean ± Student's 95 % (C.3's 1.96 standard errors), {over}; "
                    "negative: the first is better")
        texts[title] = f"\n{head}\n\n{table}"
    with common.atomic_path(folder / "tables.md") as temporary:
        temporary.write_text("\n".join(texts.values()), "utf-8")

    for name, share in used.items():
        common.log(f"{name}: {share}")
    for title in (TITLES["cart"], TITLES["elbo"], DIFFERENCES, PAIRS):
        if title in texts:
            common.log(texts[title])
    figure = folder / "table1_scores.png"
    draw_scores(scores, list(adapters), figure, usual)
    shown = folder.relative_to(common.ROOT)
    common.log(f"\nfigure: {shown}/{figure.name}; all metrics: {shown}/tables.md"
               f"\nwrote {shown}/result.json")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main, PRESETS)
