"""Sampling: text from [MASK]s, and templates filled, by the adapted model (3.2, eq. 12 reversed).

Run:      python sample.py          (three texts and a filled template, 10 seconds)
          python sample.py --prompt "It was" --length 128 --steps 64 --order random --show
          python sample.py --judge  (and how good such texts are, 9 minutes on one core)
Last line: "wrote runs/sample/chebyshev/result.json"

A text starts with n holes, [MASK], and each of S steps fills n // S, the first n mod S steps one
more: so t is known for every step beforehand. A step draws a token for each hole and keeps the best
by `order`: the token's log-probability (confidence), minus the entropy of its distribution, the
margin of the likeliest token over the second, or at random. One token a step in random order
samples the model's own distribution, as far as its conditionals have one; several are drawn as if
independent, and another order prefers some texts. With `remask` the tokens filled before compete
with the new ones, each by its value when it was filled, and the losers are [MASK] again.

Symbols:  t       share of holes among the maskable tokens, as in evaluation (k / M); 1 if all are
          log_p   log-probabilities (m, v) of the m holes, float32, special tokens excluded
          u       noise (m, 1 + v), float64 in [0, 1): the random order, then the Gumbel noise
Differs from the paper: it samples nothing. The orders are those of Dream, its reference [8].

The shipped adapters know windows of up to 256 bytes, cut anywhere: texts start and end in mid-word.
A seed gives the same text on one kind of device whatever else is in the batch: noise depends on the
seed and the step alone, and logits but for the rounding of matrix products of another shape (1e-6
in float32, 1e-3 in TF32), which could tip a choice between values that agree to as many digits.
"""
import dataclasses
import math
import re
import shutil
import sys
from typing import Literal, NamedTuple, get_args

import torch

import common
from cart import corrupt, unigram_log_probs
from checkpoint import (ASSETS, check_vocabulary, load_adapter, load_backbone, result_folder,
                        run_plugin)
from data import Corpus, Windows, load_corpus, maskable_tokens, noise_generator
from evaluate import elbo_terms, make_draws, sequence_losses, tokens_per_byte
from text import make_tokenizer

Order = Literal["confidence", "entropy", "margin", "random"]
ORDERS = get_args(Order)
TEMPLATE = "The [MASK:6] of the [MASK:8] was [MASK:7], and she could not [MASK:5] what he had said."


@dataclasses.dataclass(frozen=True)
class Config:
    """Generate texts, or fill a template; bare, both. With --judge, score texts as well."""
    prompt: str = ""            # how the texts begin
    template: str = ""          # in its place, holes anywhere: [MASK], or [MASK:12] for twelve
    length: int = 128           # tokens of a text, the prompt's included
    steps: int = 64             # passes; a text with fewer holes takes one for each
    samples: int = 3            # texts, of seeds --seed, --seed + 100, ...
    temperature: float = 1.0    # 0 takes the most likely token
    top_p: float = 1.0          # draw from the fewest tokens that together have this probability
    order: Order = "confidence"  # which holes are filled first
    remask: bool = False        # filled tokens may become [MASK] again
    adapter: str = "chebyshev"  # shipped, as "dct" and "hypernet"; a run folder or file; "none"
    weights: str = "small"      # backbone: "small", "goombalab/hydra" or a path
    sliced: bool = False        # NOT it, but what the paper's code makes of it
    vocab: str = "bytes"        # "bytes", "bert-base-uncased" or the path of a vocab.txt
    plugin: str = ""            # Python file of your own, run first; it adds geometries
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # of the backbone; auto: tf32 on a GPU and float32 elsewhere
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    show: bool = False          # watch the texts appear
    history: str = ""           # JSON file for the text after every step
    judge: bool = False         # then score texts of --length in every order and number of steps
    judged: int = 16            # --judge: texts for each of them
    data: tuple[str, ...] = ("embedded",)  # --judge: text to compare with, its held-out 5 %
    seed: int = 42


# ---- the sampler ---------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What is known of every row and step before the first one."""
    holes: torch.Tensor    # b S+1  holes before each step; 0 at the end
    times: torch.Tensor    # n      all different t, in order
    which: torch.Tensor    # b S    the place in `times` of the t of a row and step


def make_plan(ids, tokenizer, steps):
    """The Plan of ids (b, l): n // S holes are filled a step, in the first n mod S one more."""
    n = (ids == tokenizer.mask_id).sum(-1).cpu()[:, None]                              # b 1
    step = torch.arange(steps + 1)                                                     # S+1
    filled = n // steps * step + (n % steps).minimum(step)                             # b S+1
    holes = n - filled
    maskable = maskable_tokens(ids, tokenizer).sum(-1).cpu()[:, None]                  # b 1
    t = holes[:, :-1] / maskable.clamp(min=1)                                          # b S
    times, which = t.unique(return_inverse=True)
    return Plan(holes, times, which)


def hole_log_probs(model, modulation, ids, real, tokenizer):
    """log_p (m, v) of the holes of ids (r, l), row by row; real (r, l): what is no padding."""
    mask = None if real.all() else real
    hidden = model.hidden(ids, modulation, mask)                                       # r l d
    holes = ids == tokenizer.mask_id
    logits = model.head(hidden[holes])[:, :tokenizer.vocab_size].float()  # no padded ids   m v
    logits[:, list(tokenizer.special_ids)] = -math.inf
    return logits.log_softmax(-1)


def hole_noise(seed, step, rows, counts, width, device="cpu"):
    """u (m, width) of `counts` holes in each of the rows: every row has a stream of its own, made
    on the device. A GPU's generator is another one, and so are its texts.
    """
    u = torch.empty(int(counts.sum()), width, dtype=torch.float64, device=device)
    for row, part in zip(rows.tolist(), u.split(counts.tolist()), strict=True):
        part.uniform_(generator=noise_generator(seed + 100 * row, step, device=device))
    return u


def draw_tokens(log_p, temperature, top_p, u):
    """Tokens (m,) from softmax(log_p / temperature), the likeliest at 0; log_p, u (m, v).

    top_p leaves the fewest tokens whose probabilities, tempered, sum to it.
    """
    if temperature == 0:
        return log_p.argmax(-1)
    tokens = []
    n = max(1, 2**20 // log_p.shape[1])  # what fits into a CPU's cache costs half
    for part, noise in zip(log_p.split(n), u.split(n), strict=True):
        if top_p < 1:
            top = part.amax(-1, keepdim=True)
            part = part.where(nucleus(tempered(part, top, temperature), top_p), -math.inf)
        tokens.append(gumbel_argmax(part, temperature, noise))
    return torch.cat(tokens)


def tempered(log_p, top, temperature):
    """log_p over the temperature, float64; 0 for the likeliest, whose log_p is `top`, at 1e-310
    too.
    """
    return (log_p.double() - top) / temperature


def gumbel_argmax(log_p, temperature, u, k=64):
    """argmax of z - log(-log u), (m,), with z of `tempered`; log_p, u (m, v). The noise is float64:
    in float32 it ends near 17, and what is rare would come too rarely.

    It is computed for few tokens. Beyond the k likeliest, z is at most the least of theirs, so
    noise that wins is at least g, the best of theirs less that; only u >= 1 - exp(-g) gives it.
    """
    def noisy(log_p, top, u):
        return tempered(log_p, top, temperature) - (-u.log()).log()

    if log_p.shape[1] < 16 * k:  # not worth while
        return noisy(log_p, log_p.amax(-1, keepdim=True), u).argmax(-1)
    likely, where = log_p.topk(k)                                                      # m k
    top = likely[:, :1]                                                                # m 1
    best = noisy(likely, top, u.gather(-1, where)).amax(-1, keepdim=True)              # m 1
    g = best - tempered(likely[:, -1:], top, temperature)                              # m 1
    able = u >= 1 - 1.001 * (-g).exp()  # some more of them, whatever the rounding       m v
    able.scatter_(-1, where, True)
    hole, token = able.nonzero(as_tuple=True)
    value = noisy(log_p[hole, token], top[hole, 0], u[hole, token])
    best = best[:, 0].scatter_reduce(0, hole, value, "amax")                           # m
    wins = value == best[hole]
    none = where.new_full(best.shape, log_p.shape[1])                                  # m
    return none.scatter_reduce(0, hole[wins], token[wins], "amin")  # of equals the first


def nucleus(z, top_p, k=256):
    """True, m v, at the fewest tokens whose softmax(z) sums to top_p; of equals the first is taken.

    The k likeliest are looked at, and more in those rows where they are not enough.
    """
    p = z.softmax(-1)                                                                  # m v
    places = torch.arange(z.shape[1], device=z.device).expand_as(p)
    few = 4 * k < z.shape[1]  # or it is not worth while
    if few:
        places = p.topk(k).indices.sort().values                                       # m k
        p = p.gather(-1, places)
    p, rank = p.sort(dim=-1, descending=True, stable=True)
    inside = p.cumsum(-1) - p < top_p
    kept = torch.zeros_like(z, dtype=torch.bool).scatter_(-1, places.gather(-1, rank), inside)
    short = (inside & (p == p[:, -1:])).any(-1)  # others may be as likely as the last of k      m
    if few and short.any():
        kept[short] = nucleus(z[short], top_p, 16 * k)
    return kept


def certainty(order, log_p, tokens, u):
    """What `order` ranks the holes by, (m,): log_p (m, v), the tokens drawn (m,), u (m,)."""
    if order == "confidence":
        return log_p.gather(-1, tokens[:, None])[:, 0]
    if order == "entropy":
        return -torch.special.entr(log_p.exp()).sum(-1)
    if order == "margin":
        return -log_p.exp().topk(2, -1).values.diff()[:, 0]
    return u.float()


def surest(certain, n):
    """True at the n (r,) most certain tokens of each row, r l; of equal ones the first is taken."""
    ranking = certain.argsort(dim=-1, descending=True, stable=True)
    place = ranking.argsort(-1)                                                        # r l
    return place < n[:, None]


@torch.no_grad()
def unmask(model, adapter, ids, tokenizer, steps=64, temperature=1.0, top_p=1.0,
           order="confidence", remask=False, seed=42, batch=None, watch=None):
    """Fill the [MASK]s of ids (b, l) int64 -> a new (b, l); every other token stays.

    adapter(t) -> Modulation, or None for the frozen backbone. Row i has the seed `seed` + 100 i;
    `batch` rows are computed together. watch(step, rows, ids) is called after each step with ids
    (b, l) and the rows (r,) that had holes. Raises UserError for a setting out of range.
    """
    check_sampling(steps, temperature, top_p, order)
    b, l = ids.shape
    ids = ids.clone()
    real = ids != tokenizer.pad_id
    plan = make_plan(ids, tokenizer, steps)
    # Of all rows and steps at once.
    modulation = None if adapter is None else adapter(plan.times.to(ids.device))
    width = 1 if temperature == 0 else 1 + tokenizer.vocab_size  # of the noise
    # How sure the model was of each token when it was filled; what was given never goes.
    held = torch.full((b, l), math.inf, device=ids.device)
    for rows in torch.arange(b).split(batch or rows_that_fit(l, tokenizer.vocab_size)):
        for step in common.progress(range(steps), desc="sampling", leave=False):
            rows = rows[plan.holes[rows, step] > 0]
            if not len(rows):
                break
            x = ids[rows]                                                              # r l
            holes = x == tokenizer.mask_id
            now = None if modulation is None else modulation.at(plan.which[rows, step])
            log_p = hole_log_probs(model, now, x, real[rows], tokenizer)               # m v
            u = hole_noise(seed, step, rows, plan.holes[rows, step], width, ids.device)
            tokens = draw_tokens(log_p, temperature, top_p, u[:, 1:])                  # m
            x[holes] = tokens
            certain = held[rows]                                                       # r l
            certain[holes] = certainty(order, log_p, tokens, u[:, 0])
            kept = surest(certain, l - plan.holes[rows, step + 1].to(ids.device))
            ids[rows] = x.where(kept, tokenizer.mask_id)
            held[rows] = certain if remask else certain.masked_fill(kept, math.inf)
            if watch:
                watch(step, rows, ids)
    return ids


def check_sampling(steps, temperature, top_p, order):
    """Raise UserError for a setting of `unmask` that is out of range."""
    if not (steps >= 1 and 0 <= temperature < math.inf and 0 < top_p <= 1 and order in ORDERS):
        raise common.UserError(
            f"got steps {steps}, temperature {temperature}, top_p {top_p}, order {order!r}; need "
            f"steps >= 1, temperature >= 0, 0 < top_p <= 1, order one of {', '.join(ORDERS)}")


def rows_that_fit(l, v):
    """How many rows of l tokens are computed together: bounds the memory at any length."""
    return max(1, min(8192 // l, 2**25 // (l * v)))


# ---- prompts, templates, and what is shown -------------------------------------------------------


def holed(prompt, template, length, tokenizer):
    """The ids (l,) to fill: a prompt and holes up to `length`, or a template. Raises UserError."""
    if prompt and template:
        raise common.UserError("--prompt and --template: got both, need one of them")
    if template:
        return holed_template(template, tokenizer)
    ids = tokenizer.encode(prompt).tolist()
    needed = max(1, len(ids))
    if length < needed:
        raise common.UserError(f"--length: got {length}, need at least {needed}, the tokens of the "
                               "prompt; or give a shorter prompt")
    return torch.tensor(ids + [tokenizer.mask_id] * (length - len(ids)))


def holed_template(template, tokenizer):
    """The ids (l,) of a template, in which [MASK] is a hole and [MASK:12] are twelve."""
    ids = []
    end = 0
    for hole in re.finditer(r"\[MASK(?::(\d+))?\]", template):
        ids += tokenizer.encode(template[end:hole.start()]).tolist()
        ids += [tokenizer.mask_id] * int(hole[1] or 1)
        end = hole.end()
    ids += tokenizer.encode(template[end:]).tolist()
    if tokenizer.mask_id not in ids:
        raise common.UserError(f"--template: got {template!r}, need a hole: [MASK], or [MASK:12]")
    return torch.tensor(ids)


def sample(model, adapter, tokenizer, prompt="", template="", length=128, samples=1, **settings):
    """A list of texts (str); settings: those of `unmask`. Bytes that are no UTF-8 read U+FFFD."""
    ids = holed(prompt, template, length, tokenizer).to(model.word_embeddings.weight.device)
    ids = unmask(model, adapter, ids.expand(samples, -1), tokenizer, **settings)
    return [tokenizer.decode(row) for row in ids.tolist()]


def one_line(text):
    """White space as spaces; control characters, to which a terminal would listen, as U+FFFD."""
    shown = []
    for c in text:
        if c.isprintable():
            shown.append(c)
        else:
            shown.append(" " if c.isspace() else "\ufffd")
    return "".join(shown)


class Watcher:
    """A `watch` for `unmask` that adds all texts to `history` after each step, and shows them:
    repainted in a terminal, else eight times.
    """

    def __init__(self, tokenizer, steps, history, show=False):
        self.tokenizer = tokenizer
        self.every = max(1, steps // 8)
        self.history = history
        self.show = show
        self.height = 0  # lines that the last picture takes in the terminal

    def __call__(self, step, rows, ids):
        self.history.append([self.tokenizer.decode(row) for row in ids.tolist()])
        if not self.show:
            return
        texts = [one_line(text) for text in self.history[-1]]
        if sys.stdout.isatty():
            self.repaint(texts)
        elif (step + 1) % self.every == 0:
            common.log("\n".join(f"step {step + 1:4}: {texts[row]}" for row in rows))

    def repaint(self, texts):
        """Write the texts over those of the last step."""
        width, room = shutil.get_terminal_size()
        lines = []
        for text in texts:
            lines += [text[i:i + width] for i in range(0, len(text), width)]
        lines = lines[:room - 1]
        to_the_top = f"\x1b[{self.height}F" if self.height else "\r"
        print(f"{to_the_top}\x1b[J" + "\n".join(lines), flush=True)
        self.height = len(lines)


def show_infilling(model, adapters, x0, tokenizer, seed, t=0.4):
    """Print one passage x0 (l,), masked at t, and what each of {name: adapter} fills in."""
    x_t, masked = corrupt(x0, t, tokenizer.mask_id, maskable_tokens(x0, tokenizer),
                          noise_generator(seed, 0))
    texts = {"text": x0, "masked": x_t}
    for name, adapter in adapters.items():
        holed = x_t[None].to(model.word_embeddings.weight.device)
        texts[name] = unmask(model, adapter, holed, tokenizer, 16, temperature=0)[0]
    for name, ids in texts.items():
        common.log(f"  {name:>10}: {' '.join(tokenizer.decode(ids.tolist()).split())}")


# ---- how good the texts are ----------------------------------------------------------------------


NUMBERS = {"bits_per_byte": "bits per byte", "entropy": "entropy, bits", "distinct": "distinct-4"}
HELD_OUT = "held-out text"
ITS_UNIGRAM = "its unigram"


class Sampler(NamedTuple):
    """A way to sample that is judged."""
    order: Order
    how: Literal["adapted", "remask", "frozen"] = "adapted"

    @property
    def label(self):
        return self.order if self.how == "adapted" else f"{self.order}, {self.how}"


JUDGED = (*map(Sampler, ORDERS), Sampler("confidence", "remask"), Sampler("random", "remask"),
          Sampler("confidence", "frozen"), Sampler("random", "frozen"))
JUDGED_STEPS = (8, 16, 32, 64, 128)


class Judgement(NamedTuple):
    """What texts of one kind score; steps is 0, and sampler None, where nothing was sampled."""
    label: str
    numbers: dict[str, common.Interval]  # each of NUMBERS
    steps: int = 0
    sampler: Sampler | None = None
    texts: tuple[str, ...] = ()          # the first of them

    def record(self):
        """As it stands in a result file."""
        row = {"text": self.label, "steps": self.steps}
        for name, found in self.numbers.items():
            row[name] = (found.mean, found.half)
        if self.sampler:
            row["samples"] = list(self.texts)
        return row


def diversity(ids, n=4):
    """(entropy of the tokens in bits, share of different n-grams) of all rows of ids (b, l)."""
    p = ids.unique(return_counts=True)[1].double() / ids.numel()
    grams = ids.unfold(1, n, 1).flatten(0, 1)                                          # . n
    return torch.special.entr(p).sum().item() / math.log(2), len(grams.unique(dim=0)) / len(grams)


def text_bits(model, ids, tokenizer, per_byte, draws=8):
    """evaluate.py's bound on -log p of each text of ids (b, l) under the frozen backbone, (b,) bits
    per byte: from `draws` masks of each text, the same for all ids of one shape.
    """
    b, l = ids.shape
    packed = ids.repeat(draws, 1).flatten().to(torch.uint16).numpy()
    masks = make_draws(Corpus(packed, b * l, 0, ""), tokenizer, l, b * draws)
    bounds = elbo_terms(sequence_losses(model, None, masks), masks)                    # draws b
    nats = bounds.view(draws, b).mean(0) / l
    return nats * per_byte / math.log(2)


def score_texts(model, ids, tokenizer, per_byte, draws=8):
    """{each of NUMBERS: Interval} of texts ids (b, l), by the jackknife: 1.96 standard errors.

    per_byte: tokens per byte. bits_per_byte is the mean of `text_bits`; the others are of all texts
    together.
    """
    b = len(ids)
    bits = text_bits(model, ids, tokenizer, per_byte, draws)                           # b
    whole = (bits.mean().item(), *diversity(ids))
    without_one = []
    for i in range(b):
        rest = torch.arange(b) != i
        without_one.append((bits[rest].mean().item(), *diversity(ids[rest])))
    variance = (b - 1) * torch.tensor(without_one).var(0, correction=0)
    half = (1.96 * variance.sqrt()).tolist()
    return {name: common.Interval(value, error, b)
            for name, value, error in zip(NUMBERS, whole, half, strict=True)}


def real_texts(corpus, tokenizer, judged, length):
    """`judged` windows of a Corpus within its documents, as a sampled text is: ids (b, l)."""
    x0 = Windows(corpus, length, tokenizer.pad_id).evenly(4 * judged)
    x0 = x0[maskable_tokens(x0, tokenizer).all(-1)]
    if judged < 2 or length < 4 or len(x0) < judged:
        raise common.UserError(f"--judge: got --judged {judged} and --length {length}, need at "
                               f"least 2 and 4; and --data holds {len(x0)} windows of that "
                               "length, need at least --judged")
    return x0[torch.linspace(0, len(x0) - 1, judged).round().long()]


def unigram_texts(corpus, tokenizer, shape, seed):
    """Tokens drawn independently by their frequency in a Corpus, ids of `shape`."""
    p = unigram_log_probs(corpus.ids, tokenizer.vocab_size, tokenizer.special_ids).exp()
    drawn = p.multinomial(math.prod(shape), True, generator=noise_generator(seed))
    return drawn.view(shape)


def judge(model, adapter, tokenizer, cfg, corpus, x0):
    """The Judgements of real text x0 (b, l), of the unigram of its Corpus, and of JUDGED."""
    per_byte = tokens_per_byte(corpus)
    found = []
    drawn = unigram_texts(corpus, tokenizer, x0.shape, cfg.seed)
    for label, ids in ((HELD_OUT, x0), (ITS_UNIGRAM, drawn)):
        found.append(Judgement(label, score_texts(model, ids, tokenizer, per_byte)))
    empty = torch.full_like(x0, tokenizer.mask_id).to(model.word_embeddings.weight.device)
    cells = [(sampler, steps) for sampler in JUDGED for steps in JUDGED_STEPS]
    for sampler, steps in common.progress(cells, desc="judging"):
        used = None if sampler.how == "frozen" else adapter
        ids = unmask(model, used, empty, tokenizer, steps, cfg.temperature, cfg.top_p,
                     sampler.order, sampler.how == "remask", seed=cfg.seed).cpu()
        numbers = score_texts(model, ids, tokenizer, per_byte)
        texts = tuple(one_line(tokenizer.decode(row)) for row in ids[:3].tolist())
        found.append(Judgement(sampler.label, numbers, steps, sampler, texts))
        common.log(f"{sampler.label}, {steps} steps: {texts[0]}")
    return found


def judgement_table(found, columns=(8, 32, 128)):
    """Markdown of Judgements: NUMBERS of each kind of text at some numbers of steps."""
    cells = {}  # label: {steps: cell}
    for judgement in found:
        shown = [judgement.numbers[name].show(digits=2) for name in NUMBERS]
        for steps in [judgement.steps] if judgement.sampler else columns:
            cells.setdefault(judgement.label, {})[steps] = " / ".join(shown)
    lines = []
    for label, by_steps in cells.items():
        lines.append([label, *(by_steps[steps] for steps in columns)])
    return common.markdown([" / ".join(NUMBERS.values()), *(f"{n} steps" for n in columns)], *lines)


SCALES = {"bits_per_byte": "ELBO under the frozen backbone (bits per byte)",
          "entropy": "entropy of the tokens (bits)",
          "distinct": "share of 4-token pieces that are different"}  # of the axes, for NUMBERS
LINE_STYLES = {"adapted": "-", "remask": "--", "frozen": ":"}


def draw_judgements(path, found):
    """NUMBERS against the number of steps; grey lines and bands for what has none."""
    figure = common.new_figure(13.5, 5)
    axes = figure.subplots(1, 3)
    for ax, (name, title) in zip(axes, NUMBERS.items(), strict=True):
        for label, style in ((HELD_OUT, "-"), (ITS_UNIGRAM, "-.")):
            cell, = [j.numbers[name] for j in found if j.label == label]
            ax.axhspan(cell.mean - cell.half, cell.mean + cell.half, color="0.92", zorder=0)
            ax.axhline(cell.mean, label=label, color="0.3", ls=style, zorder=1)
        for i, sampler in enumerate(JUDGED):
            own = [j for j in found if j.sampler == sampler]
            apart = 2 ** (0.06 * (i - (len(JUDGED) - 1) / 2))  # or the bars lie on each other
            ax.errorbar([apart * j.steps for j in own], [j.numbers[name].mean for j in own],
                        [j.numbers[name].half for j in own], label=sampler.label,
                        color=common.COLORS[ORDERS.index(sampler.order)], marker=common.MARKERS[i],
                        ls=LINE_STYLES[sampler.how], ms=5, lw=1.2, elinewidth=0.8)
        ax.set_xscale("log", base=2)
        ax.set_xticks(JUDGED_STEPS, JUDGED_STEPS)
        ax.set(xlabel="steps of sampling", ylabel=SCALES[name], title=f"{title}, 95 %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False)
    common.save_figure(figure, path)


# ---- command line --------------------------------------------------------------------------------


def load_named_adapter(name, config, device):
    """The adapter of the setting --adapter: a shipped one, a path, or None for "none"."""
    if name == "none":
        return None
    shipped = ASSETS / f"adapter_{name}.safetensors"
    adapter, _ = load_adapter(shipped if shipped.is_file() else name, config, device)
    return adapter


def sample_texts(model, adapter, tokenizer, cfg):
    """({what was asked: texts}, {the same: the texts after each step}) of a Config; logs them."""
    prompt = common.readable(cfg.prompt)
    template = common.readable(cfg.template)
    asked = [(prompt, template)]
    if not prompt and not template:
        asked.append(("", TEMPLATE))
    settings = {name: getattr(cfg, name) for name in (
        "length", "samples", "seed", "steps", "temperature", "top_p", "order", "remask")}
    texts = {}
    history = {}
    for prompt, template in asked:
        name = template or f"{prompt}[MASK] ..."
        history[name] = []
        watch = Watcher(tokenizer, cfg.steps, history[name], cfg.show)
        texts[name] = sample(model, adapter, tokenizer, prompt, template, watch=watch, **settings)
        common.log(f"\n{one_line(name)}")
        for i, text in enumerate(texts[name]):
            common.log(f"  seed {cfg.seed + 100 * i}: {one_line(text)}")
    return texts, history


def main(cfg):
    run_plugin(cfg.plugin)
    device = common.pick_device(cfg.device)
    tokenizer = make_tokenizer(cfg.vocab)
    dtype = common.pick_precision(cfg.precision, device)
    model = load_backbone(cfg.weights, dtype, device, sliced=cfg.sliced)
    check_vocabulary(model, tokenizer)
    adapter = load_named_adapter(cfg.adapter, model.config, device)
    env = common.banner("sample.py", cfg, device, model)
    if cfg.judge:  # it may refuse, so before any work
        corpus = load_corpus(cfg.data, tokenizer, "valid")
        x0 = real_texts(corpus, tokenizer, cfg.judged, cfg.length)

    result, history = sample_texts(model, adapter, tokenizer, cfg)
    if cfg.history:
        common.write_json(cfg.history, {"history": history, "config": cfg})
    found = []
    if cfg.judge:
        found = judge(model, adapter, tokenizer, cfg, corpus, x0)
        result["table"] = judgement_table(found)
        result["rows"] = [judgement.record() for judgement in found]
        common.log(f"\n{result['table']}\n")
    folder = result_folder("sample", (cfg.adapter,))
    common.save_result(folder / "result.json", result, cfg, env)
    if found:
        draw_judgements(folder / "sampling.png", found)
    common.log(f"\nwrote {folder.relative_to(common.ROOT)}/result.json")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
