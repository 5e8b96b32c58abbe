"""Predictors that read no context, in the paper's own units: CART over WordPiece tokens (Table 1).

Run:      python -m experiments.trivial   (bytes of the embedded text, 5 seconds; no weights)
          python -m experiments.trivial --vocab corpora/vocab.txt \\
              --data wikitext=corpora/wikitext_test.txt --train corpora/wikitext_valid.txt
          python -m experiments.publish runs/trivial --name wordpiece
Last line: "CART masked_mean: uniform N.NN, unigram N.NN (NAME); ..."

The published loss is the sum of w ce over the masked tokens of all windows, divided by their number
(`weighted_nll` in github.com/ibitec7/mark at 18a855b, src/hydra_model.py). What reads no context
loses the same at every mask, so its CART is a product:

    mean weight x cross-entropy per token

Far from the ends and from special tokens E[w] = 1 - t, and the mean weight under t ~ U(0, 1) is
E[t (1 - t)] / E[t] = 1/3. The two factors are shown beside the loss itself.

Symbols:  weight   sum of w over the masked tokens, by their number
          nats     cross-entropy per token of all windows, masked or not
          uniform, unigram   see `evaluate.context_free`; the unigram is add-one smoothed
Differs from the paper: it has no such rows. Its windows begin elsewhere, and its t and masks are
          others; t is stratified over the windows here, which narrows the interval.
"""
import dataclasses
import statistics

import common
from data import held_out_split, load_corpus, maskable_tokens, named_sources
from evaluate import (context_free, load_held_out, mean_and_error, metrics, table_losses,
                      windows_used)
from text import make_tokenizer

PREDICTORS = ("uniform", "unigram")


@dataclasses.dataclass(frozen=True)
class Config:
    """Score predictors that read no context; it needs a vocabulary and no weights."""
    data: tuple[str, ...] = ("embedded",)   # NAME=PATH[,PATH...]
    train: tuple[str, ...] = ("embedded",)  # text that the unigram is counted on
    vocab: str = "bytes"                    # "bytes", "bert-base-uncased" or a vocab.txt
    seqlen: int = 4096                      # tokens of a window
    windows: int = 500                      # of a data set at most, per seed; as in C.3
    seeds: int = 10                         # 42, 142, ...
    seed: int = 42                          # the first of them
    out: str = "runs/trivial"               # folder of result.json


def counted_ids(cfg, tokenizer):
    """What the unigram is counted on: all of cfg.train, but for what a data set holds out of it."""
    splits = [held_out_split(sources, cfg.train) for sources in named_sources(cfg.data).values()]
    split = "train" if "valid" in splits else None
    return load_corpus(cfg.train, tokenizer, split).ids


def score_draws(draws, predictors, tokenizer):
    """The mean weight of some Draws, and of each predictor {"nats", "cart"}."""
    n = draws.n
    maskable = maskable_tokens(draws.x0[:n], tokenizer)                      # n l
    found = {"weight": (draws.w[:n].double().sum() / draws.masked[:n].sum()).item()}
    for name, log_probs in predictors.items():
        ce = -log_probs.double()[draws.x0[:n]][maskable]
        found[name] = {"nats": ce.mean().item(),
                       "cart": metrics(table_losses(log_probs, draws), draws)["cart"]}
    return found


def score_texts(held_out, predictors):
    """{text: {"weight": [a number for each seed], predictor: {"nats": [...], "cart": [...]}}}."""
    scores = {}
    for name in held_out.corpora:
        rows = [score_draws(held_out.draw(name, seed), predictors, held_out.tokenizer)
                for seed in held_out.seeds]
        scores[name] = {"weight": [row["weight"] for row in rows]}
        for predictor in predictors:
            scores[name][predictor] = {
                "nats": [row[predictor]["nats"] for row in rows],
                "cart": [row[predictor]["cart"] for row in rows]}
    return scores


def product(weight, row):
    """The arithmetic of a cell, as text: mean weight x nats = CART."""
    return (f"{statistics.fmean(weight):.3f} x {statistics.fmean(row['nats']):.2f} = "
            f"{mean_and_error(row['cart'], digits=3)}")


def score_table(scores):
    """Markdown of `score_texts`."""
    lines = []
    for text, rows in scores.items():
        lines.append([text, *(product(rows["weight"], rows[name]) for name in PREDICTORS)])
    return common.markdown(["mean weight x nats per token = CART", *PREDICTORS], *lines)


def last_line(scores):
    parts = []
    for text, rows in scores.items():
        cart = {name: statistics.fmean(rows[name]["cart"]) for name in PREDICTORS}
        parts.append(f"uniform {cart['uniform']:.2f}, unigram {cart['unigram']:.2f} ({text})")
    return f"CART masked_mean: {'; '.join(parts)}"


def main(cfg):
    tokenizer = make_tokenizer(cfg.vocab)
    env = common.banner("trivial.py", cfg)
    held_out = load_held_out(cfg, tokenizer)
    predictors = context_free(counted_ids(cfg, tokenizer), tokenizer)
    scores = score_texts(held_out, predictors)
    result = {"scores": scores, "windows": windows_used(held_out), "table": score_table(scores),
              "vocabulary": tokenizer.vocab_size,
              "choices": tokenizer.vocab_size - len(tokenizer.special_ids)}
    common.save_result(common.ROOT / cfg.out / "result.json", result, cfg, env)
    for name, share in result["windows"].items():
        common.log(f"{name}: {share}")
    common.log(f"\nmean ± 1.96 standard errors, n = {cfg.seeds} seeds, each with its own t and "
               f"masks\n\n{result['table']}\n\n{last_line(scores)}")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
