"""Sampling: text from [MASK]s, and templates filled, by the adapted model (3.2, eq. 12 reversed).

Run:      python sample.py          (three texts and a filled template, 10 seconds)
          python sample.py --prompt "It was" --length 128 --steps 64 --order random --show
          python sample.py --judge  (how good the texts are, 9 minutes on one core)
Last line: "wrote runs/sample/result.json"

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
A seed gives the same text whatever else is in the batch: noise depends on the seed and the step
alone, and logits but for the rounding of matrix products of another shape (1e-6 in float32), which
could tip a choice between values that agree to as many digits.
"""
import dataclasses
import math
import re
import shutil
import sys

import torch

import common
from cart import unigram_log_probs
from checkpoint import SMALL, check_vocabulary, load_adapter, load_backbone
from data import Corpus, Windows, load_corpus, maskable_tokens, noise_generator
from evaluate import elbo_terms, make_draws, sequence_losses
from text import make_tokenizer

ORDERS = ("confidence", "entropy", "margin", "random")
TEMPLATE = "The [MASK:6] of the [MASK:8] was [MASK:7], and she could not [MASK:5] what he had said."
JUDGED = (*ORDERS, "confidence, remask", "random, remask", "confidence, frozen", "random, frozen")
JUDGED_STEPS = (8, 16, 32, 64, 128)
NUMBERS = {"bits_per_byte": "bits per byte", "entropy": "entropy, bits", "distinct": "distinct-4"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Generate texts, fill a template, or judge the texts; bare, the first two."""
    prompt: str = ""            # how the texts begin
    template: str = ""          # in its place, holes anywhere: [MASK], or [MASK:12] for twelve
    length: int = 128           # tokens of a text, the prompt's included
    steps: int = 64             # passes; a text with fewer holes takes one for each
    samples: int = 3            # texts, of seeds --seed, --seed + 100, ...
    temperature: float = 1.0    # 0 takes the most likely token
    top_p: float = 1.0          # draw from the fewest tokens that together have this probability
    order: str = "confidence"   # or "entropy", "margin", "random": which holes are filled first
    remask: bool = False        # filled tokens may become [MASK] again
    adapter: str = "chebyshev"  # shipped, as "dct" and "hypernet"; a run folder or file; "none"
    weights: str = "small"      # backbone: "small", "goombalab/hydra" or a path
    vocab: str = "bytes"        # "bytes", "bert-base-uncased" or the path of a vocab.txt
    device: str = "auto"        # "auto", "cpu" or "cuda"
    show: bool = False          # watch the texts appear
    history: str = ""           # JSON file for the text after every step
    judge: bool = False         # score texts of every order and number of steps
    judged: int = 16            # texts for each of them
    data: tuple[str, ...] = ("embedded",)  # real text to compare with: its held-out 5 %
    publish: bool = False       # with --judge: write results/sample/ and figures/
    seed: int = 42


# ---- the sampler ---------------------------------------------------------------------------------

def draw(log_p, temperature, top_p, u):
    """Tokens (m,) from softmax(log_p / temperature), the likeliest at 0; log_p, u (m, v).

    top_p leaves the fewest tokens whose probabilities, tempered, sum to it. The Gumbel noise is
    float64: in float32 it ends near 17, and what is rare would come too rarely.
    """
    if temperature == 0:
        return log_p.argmax(-1)
    z = log_p.double() / temperature                                                   # m v
    if top_p < 1:
        p, order = z.softmax(-1).sort(-1, descending=True)
        surplus = p.cumsum(-1) - p >= top_p
        z = z.masked_fill(surplus.scatter(-1, order, surplus), -math.inf)
    return (z - (-u.log()).log()).argmax(-1)


def certainty(order, log_p, tokens, u):
    """What `order` ranks the holes by, (m,): log_p (m, v), the tokens drawn (m,), u (m,)."""
    if order == "confidence":
        return log_p.gather(-1, tokens[:, None])[:, 0]
    if order == "entropy":
        return -torch.special.entr(log_p.exp()).sum(-1)
    if order == "margin":
        return -log_p.exp().topk(2, -1).values.diff()[:, 0]
    return u.float()


def at(modulation, index):
    """The Modulation of those t that `index` (b,) names; what depends on no t is left as it is."""
    return dataclasses.replace(modulation, **{
        name: value[:, index] for name, value in vars(modulation).items()
        if value is not None and name != "lora"})


@torch.no_grad()
def unmask(model, adapter, ids, tokenizer, steps=64, temperature=1.0, top_p=1.0,
           order="confidence", remask=False, seed=42, batch=None, watch=None):
    """Fill the [MASK]s of ids (b, l) int64 -> a new (b, l); every other token stays.

    adapter(t) -> Modulation, or None for the frozen backbone. Row i has the seed `seed` + 100 i;
    `batch` rows are computed together. watch(step, rows, ids) is called after each step with ids
    (b, l) and the rows (r,) that had holes. Raises UserError for a setting out of range.
    """
    if not (steps >= 1 and 0 <= temperature < math.inf and 0 < top_p <= 1 and order in ORDERS):
        raise common.UserError(
            f"got steps {steps}, temperature {temperature}, top_p {top_p}, order {order!r}; need "
            f"steps >= 1, temperature >= 0, 0 < top_p <= 1, order one of {', '.join(ORDERS)}")
    (b, l), v, device, ids = ids.shape, tokenizer.vocab_size, ids.device, ids.clone()
    batch = batch or max(1, min(8192 // l, 2**25 // (l * v)))  # bounds the memory at any length
    real, maskable = ids != tokenizer.pad_id, maskable_tokens(ids, tokenizer).sum(-1).cpu()
    n = (ids == tokenizer.mask_id).sum(-1).cpu()[:, None]                              # b 1
    step = torch.arange(steps + 1)
    holes_left = n - n // steps * step - (n % steps).minimum(step)                     # b steps+1
    t, which = (holes_left[:, :-1] / maskable.clamp(min=1)[:, None]).unique(return_inverse=True)
    modulation = adapter and adapter(t.to(device))      # of all rows and steps, which (b, steps)
    held = torch.full((b, l), math.inf, device=device)  # the certainty of each token; given: inf
    for rows in torch.arange(b).split(batch):
        for step in common.progress(range(steps), desc="sampling", leave=False):
            rows = rows[holes_left[rows, step] > 0]
            if not len(rows):
                break
            x, certain, counts = ids[rows], held[rows], holes_left[rows, step].tolist()  # r l
            holes = x == tokenizer.mask_id
            hidden = model.hidden(x, adapter and at(modulation, which[rows, step]),
                                  None if real[rows].all() else real[rows])            # r l d
            logits = model.head(hidden[holes])[:, :v].float()  # padded rows cut         m v
            logits[:, list(tokenizer.special_ids)] = -math.inf
            log_p = logits.log_softmax(-1)
            noise = [noise_generator(seed + 100 * row, step) for row in rows.tolist()]
            u = torch.cat([torch.rand(k, 1 + (v if temperature else 0), dtype=torch.float64,
                                      generator=g) for k, g in zip(counts, noise)]).to(device)
            x[holes] = tokens = draw(log_p, temperature, top_p, u[:, 1:])
            certain[holes] = certainty(order, log_p, tokens, u[:, 0])
            place = certain.argsort(dim=-1, descending=True, stable=True).argsort(-1)  # r l
            kept = place < l - holes_left[rows, step + 1].to(device)[:, None]
            ids[rows] = x.where(kept, tokenizer.mask_id)
            held[rows] = certain if remask else certain.masked_fill(kept, math.inf)
            if watch:
                watch(step, rows, ids)
    return ids


def holed(prompt, template, length, tokenizer):
    """The ids (l,) to fill: a prompt and holes up to `length`, or a template. Raises UserError."""
    if prompt and template:
        raise common.UserError("--prompt and --template: got both, need one of them")
    pieces, ids = re.split(r"\[MASK(?::(\d+))?\]", template) if template else [prompt], []
    for text, holes in zip(pieces[::2], [*pieces[1::2], "0"]):
        ids += tokenizer.encode(text).tolist() + [tokenizer.mask_id] * int(holes or 1)
    if template and tokenizer.mask_id not in ids:
        raise common.UserError(f"--template: got {template!r}, need a hole: [MASK], or [MASK:12]")
    if not template and length < max(1, len(ids)):
        raise common.UserError(f"--length: got {length}, need at least {max(1, len(ids))}, the "
                               "tokens of the prompt; or give a shorter prompt")
    return torch.tensor(ids if template else ids + [tokenizer.mask_id] * (length - len(ids)))


def sample(model, adapter, tokenizer, prompt="", template="", length=128, samples=1, **settings):
    """A list of texts (str); settings: those of `unmask`. Bytes that are no UTF-8 read U+FFFD."""
    ids = holed(prompt, template, length, tokenizer).to(model.word_embeddings.weight.device)
    ids = unmask(model, adapter, ids.expand(samples, -1), tokenizer, **settings)
    return [tokenizer.decode(row) for row in ids.tolist()]


def one_line(text):
    """White space as spaces; control characters, to which a terminal would listen, as U+FFFD."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def watcher(tokenizer, steps, history, show=False):
    """A `watch` that notes all texts, and shows them: repainted in a terminal, else eight times."""
    height = 0
    def watch(step, rows, ids):
        nonlocal height
        history.append([tokenizer.decode(row) for row in ids.tolist()])
        texts = [one_line(text) for text in history[-1]]
        if show and sys.stdout.isatty():
            width, room = shutil.get_terminal_size()
            lines = [text[i:i + width] for text in texts for i in range(0, len(text), width)]
            up, lines = f"\x1b[{height}F" if height else "\r", lines[:room - 1]
            print(f"{up}\x1b[J" + "\n".join(lines), flush=True)
            height = len(lines)
        elif show and (step + 1) % max(1, steps // 8) == 0:
            common.log("\n".join(f"step {step + 1:4}: {texts[row]}" for row in rows))
    return watch


# ---- how good the texts are ----------------------------------------------------------------------

def diversity(ids, n=4):
    """(entropy of the tokens in bits, share of different n-grams) of all rows of ids (b, l)."""
    p = ids.unique(return_counts=True)[1].double() / ids.numel()
    grams = ids.unfold(1, n, 1).flatten(0, 1)                                          # . n
    return torch.special.entr(p).sum().item() / math.log(2), len(grams.unique(dim=0)) / len(grams)


def score(model, ids, tokenizer, tokens_per_byte, draws=8):
    """{each of NUMBERS: (value, 1.96 standard errors)} of texts ids (b, l), by the jackknife.

    bits_per_byte is evaluate.py's bound on -log p under the frozen backbone, from `draws` masks of
    each text, the same for all ids of one shape; the others are of all texts together.
    """
    b, l = ids.shape
    corpus = Corpus(ids.repeat(draws, 1).flatten().to(torch.uint16).numpy(), b * l, 0, "")
    masks = make_draws(corpus, tokenizer, l, b * draws)
    nats = elbo_terms(sequence_losses(model, None, masks), masks).view(draws, b).mean(0) / l
    bits = nats * tokens_per_byte / math.log(2)                                        # b
    all_but = [torch.arange(b) != i for i in range(-1, b)]  # nothing, then each text in turn
    value, *others = ([bits[rows].mean().item(), *diversity(ids[rows])] for rows in all_but)
    error = 1.96 * ((b - 1) * torch.tensor(others).var(0, correction=0)).sqrt()
    return dict(zip(NUMBERS, zip(value, error.tolist())))


def judge(model, adapter, tokenizer, cfg):
    """[{"text", "steps", *NUMBERS, "samples"}] of real text, of its unigram, and of JUDGED."""
    corpus = load_corpus(cfg.data, tokenizer, "valid")
    per_byte = (len(corpus.ids) - corpus.n_docs) / corpus.n_bytes
    x0 = Windows(corpus, cfg.length, tokenizer.pad_id).evenly(4 * cfg.judged)
    x0 = x0[maskable_tokens(x0, tokenizer).all(-1)]  # within a document, as a sampled text is
    if cfg.judged < 2 or cfg.length < 4 or len(x0) < cfg.judged:
        raise common.UserError(f"--judge: got --judged {cfg.judged} and --length {cfg.length}, "
                               f"need at least 2 and 4; and --data holds {len(x0)} windows of that "
                               "length, need at least --judged")
    x0 = x0[torch.linspace(0, len(x0) - 1, cfg.judged).round().long()]                 # b l
    p = unigram_log_probs(corpus.ids, tokenizer.vocab_size, tokenizer.special_ids).exp()
    drawn = p.multinomial(x0.numel(), True, generator=noise_generator(cfg.seed)).view(x0.shape)
    rows = [{"text": text, "steps": 0, **score(model, ids, tokenizer, per_byte)}
            for text, ids in (("held-out text", x0), ("its unigram", drawn))]
    empty = torch.full_like(x0, tokenizer.mask_id).to(model.word_embeddings.weight.device)
    cells = [(text, steps) for text in JUDGED for steps in JUDGED_STEPS]
    for text, steps in common.progress(cells, desc="judging"):
        order, _, how = text.partition(", ")
        ids = unmask(model, None if how == "frozen" else adapter, empty, tokenizer, steps,
                     cfg.temperature, cfg.top_p, order, how == "remask", seed=cfg.seed).cpu()
        rows.append({"text": text, "steps": steps, **score(model, ids, tokenizer, per_byte),
                     "samples": [one_line(tokenizer.decode(row)) for row in ids[:3].tolist()]})
        common.log(f"{text}, {steps} steps: {rows[-1]['samples'][0]}")
    return rows


def judgement_table(rows, columns=(8, 32, 128)):
    """Markdown: NUMBERS of each text at some numbers of steps."""
    lines = []
    for text in dict.fromkeys(row["text"] for row in rows):
        cells = {row["steps"]: " / ".join("{:.2f} ± {:.2f}".format(*row[n]) for n in NUMBERS)
                 for row in rows if row["text"] == text}
        lines.append([text, *(cells.get(steps, cells.get(0)) for steps in columns)])
    return common.markdown([" / ".join(NUMBERS.values()), *(f"{n} steps" for n in columns)], *lines)


def draw_judgement(path, rows):
    """NUMBERS against the number of steps; grey lines for what has none."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for ax, name in zip(figure.subplots(1, 3), NUMBERS):
        for text in dict.fromkeys(row["text"] for row in rows):
            order, _, how = text.partition(", ")
            own = [(row["steps"], *row[name]) for row in rows if row["text"] == text]
            if order in ORDERS:
                ax.errorbar(*zip(*own), label=text, color=f"C{ORDERS.index(order)}", ms=5,
                            fmt={"": "o-", "remask": "s--", "frozen": "^:"}[how], elinewidth=0.8)
            else:
                ax.axhline(own[0][1], label=text, color="0.3", ls=":" if "unigram" in text else "-")
        ax.set_xscale("log", base=2)
        ax.set_xticks(JUDGED_STEPS, JUDGED_STEPS)
        ax.set(xlabel="steps", title=NUMBERS[name])
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False)
    common.save_figure(figure, path)


def main(cfg):
    if cfg.publish and not cfg.judge:
        raise common.UserError("--publish: goes with --judge")
    device, tokenizer = common.pick_device(cfg.device), make_tokenizer(cfg.vocab)
    model = load_backbone(cfg.weights, device=device)
    check_vocabulary(model, tokenizer)
    shipped = SMALL.parent / f"adapter_{cfg.adapter}.safetensors"
    adapter = None if cfg.adapter == "none" else load_adapter(
        shipped if shipped.is_file() else cfg.adapter, model.config, device)[0]
    env = common.banner("sample.py", cfg, device, model)
    out, result, history = common.ROOT / "runs" / "sample" / "result.json", {}, {}
    if cfg.judge:
        rows = judge(model, adapter, tokenizer, cfg)
        result = {"table": judgement_table(rows), "rows": rows}
        common.log(f"\n{result['table']}\n")
        folder = common.ROOT / "figures" if cfg.publish else out.parent
        draw_judgement(folder / "sampling.png", rows)
    settings = {name: getattr(cfg, name) for name in (
        "length", "samples", "seed", "steps", "temperature", "top_p", "order", "remask")}
    asked = [(cfg.prompt, cfg.template)] + [("", TEMPLATE)] * (not cfg.prompt + cfg.template)
    for prompt, template in () if cfg.judge else asked:
        name = template or f"{prompt}[MASK] ..."
        watch = watcher(tokenizer, cfg.steps, history.setdefault(name, []), cfg.show)
        result[name] = sample(model, adapter, tokenizer, prompt, template, watch=watch, **settings)
        common.log("\n".join(["", one_line(name), *(
            f"  seed {cfg.seed + 100 * i}: {one_line(t)}" for i, t in enumerate(result[name]))]))
    if cfg.history:
        common.write_json(cfg.history, {"history": history, "config": cfg})
    common.write_json(out, {"metrics": result, "config": cfg})
    if cfg.publish and cfg.judge:
        out = common.publish("sample", "small", result, cfg, env)
    common.log(f"\nwrote {out.relative_to(common.ROOT)}")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
