"""trivial.py: its losses against loops over tokens, its mean weight against the closed form."""
import collections
import json
import math

import numpy as np
import pytest
import tiny
from evaluate import HeldOut, context_free, make_draws
from data import Corpus
from experiments import trivial
from text import ByteTokenizer

P = 0.45  # of eq. 22


def corpus_of(text):
    ids = ByteTokenizer().encode(text)
    return Corpus(ids, len(ids), 1, "bytes")


def weight_of(masked, pads, i):
    """Eq. 22 at a masked position: a loop over the visible ones."""
    total = 0.0
    for j in range(len(masked)):
        if j != i and not masked[j] and not pads[j]:
            total += P * (1 - P) ** (abs(i - j) - 1)
    return total / 2


def brute_force(draws, loss_of):
    """CART of a predictor: sum of w loss over the number of masked tokens, one token at a time."""
    weighted, count = 0.0, 0
    for x0, masked in zip(draws.x0[:draws.n].tolist(), draws.masked[:draws.n].tolist()):
        pads = [token == ByteTokenizer.pad_id for token in x0]
        for i, token in enumerate(x0):
            if masked[i]:
                weighted += weight_of(masked, pads, i) * loss_of(token)
                count += 1
    return weighted / count


@pytest.fixture(scope="module")
def scored():
    """Scores of a text in windows of 50, and what a loop needs to score it again."""
    text = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 9
    held_out = HeldOut({"text": corpus_of(text)}, ByteTokenizer(), 50, 100, (42, 142))
    counted = "the age of foolishness, the epoch of belief"
    predictors = context_free(corpus_of(counted).ids, ByteTokenizer())
    return held_out, counted, trivial.score_texts(held_out, predictors)["text"]


def test_uniform_is_the_mean_weight_by_a_loop_times_the_logarithm_of_the_choices(scored):
    held_out, _, rows = scored
    for k, seed in enumerate(held_out.seeds):
        draws = held_out.draw("text", seed)
        weight = brute_force(draws, lambda token: 1.0)
        assert rows["weight"][k] == pytest.approx(weight, rel=1e-5)
        assert rows["uniform"]["cart"][k] == pytest.approx(weight * math.log(256), rel=1e-5)
        assert rows["uniform"]["nats"][k] == pytest.approx(math.log(256), rel=1e-6)


def test_unigram_is_that_of_a_loop_over_counts(scored):
    held_out, counted, rows = scored
    counts = collections.Counter(counted.encode())
    total = sum(counts.values()) + 256  # add one to each byte; special tokens are never predicted

    def loss(token):
        return -math.log((counts[token] + 1) / total)

    for k, seed in enumerate(held_out.seeds):
        draws = held_out.draw("text", seed)
        assert rows["unigram"]["cart"][k] == pytest.approx(brute_force(draws, loss), rel=1e-5)
        tokens = [token for row in draws.x0[:draws.n].tolist() for token in row if token < 256]
        mean = sum(map(loss, tokens)) / len(tokens)
        assert rows["unigram"]["nats"][k] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("l", (8, 64))
def test_the_mean_weight_is_a_third_less_what_the_ends_lack(l):
    """Of l tokens the i-th sees 1 - (q^(i-1) + q^(l-i)) / 2 of the kernel, q = 1 - p, and a token
    is visible with probability 1 - t: E[t (1 - t)] / E[t] = 1/3 times the mean over i.
    """
    q = 1 - P
    want = (1 - (1 - q ** l) / (l * P)) / 3
    ids = np.arange(4000 * l, dtype=np.uint16) % 256
    tokenizer = ByteTokenizer()
    draws = make_draws(Corpus(ids, len(ids), 1, "bytes"), tokenizer, l, 4000)
    found = trivial.score_draws(draws, {}, tokenizer)["weight"]
    assert found == pytest.approx(want, rel=0.02)  # 4 standard errors at l = 8


def test_the_command_needs_no_weights_and_writes_what_it_prints(tmp_path):
    text, other = tmp_path / "a.txt", tmp_path / "b.txt"
    text.write_text("to be or not to be " * 40, "utf-8")
    other.write_text("that is the question " * 40, "utf-8")
    with tiny.root_at(tmp_path):
        run = tiny.command("experiments.trivial", "--data", f"a={text}", "--train", other,
                           "--seqlen", "64", "--seeds", "2")
    assert run.status == 0, run.err
    found = json.loads((tmp_path / "runs/trivial/result.json").read_text("utf-8"))["metrics"]
    assert found["table"] in run.out and found["choices"] == 256
    last = run.out.splitlines()[-1]
    cart = np.mean(found["scores"]["a"]["unigram"]["cart"])
    assert last.startswith("CART masked_mean: uniform") and f"unigram {cart:.2f} (a)" in last


def test_the_unigram_counts_nothing_that_is_scored(tmp_path):
    """Of a text that is scored too, its other documents are counted; of another text, all."""
    documents = [f"document {i} of a text" for i in range(200)]
    text, other = tmp_path / "a.txt", tmp_path / "b.txt"
    text.write_text("\n\n".join(documents), "utf-8")
    other.write_text("\n\n".join(documents).upper(), "utf-8")
    tokenizer = ByteTokenizer()

    def counted(train):
        cfg = trivial.Config(data=(f"a={text}",), train=(str(train),))
        return tokenizer.decode(trivial.counted_ids(cfg, tokenizer)).strip().split("\n\n")

    assert len(counted(other)) == 200
    assert 150 < len(counted(text)) < 200
