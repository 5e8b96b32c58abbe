"""Scores against enumeration: the ELBO of an exact model, every metric by loops, the controls."""
import dataclasses
import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from tiny import command, make_denoiser

import common
import evaluate
from checkpoint import save_adapter
from common import UserError
from data import Corpus, load_corpus
from evaluate import FROZEN, HeldOut, Row
from mark_adapters import make_adapter
from text import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def denoiser(work):
    return make_denoiser(work)


@pytest.fixture(scope="module")
def corpus(work):
    """The first 345 tokens of the text: windows of 40 are 9, the last of them padded."""
    ids = load_corpus(work / "text.txt", TOKENIZER).ids[:345]
    n_docs = int((ids == TOKENIZER.sep_id).sum())
    return Corpus(ids, len(ids) - n_docs, n_docs, "bytes")


@pytest.fixture(scope="module")
def draws(corpus):
    draws = evaluate.make_draws(corpus, TOKENIZER, 40, 9)
    assert (draws.x0 == TOKENIZER.pad_id).any() and (draws.x0 == TOKENIZER.sep_id).any()
    return draws


def take(draws, rows):
    """The draws of some windows, in their order."""
    n = len(draws.t) // 2
    rows = torch.cat([torch.as_tensor(rows), torch.as_tensor(rows) + n])
    return dataclasses.replace(draws, **{f.name: getattr(draws, f.name)[rows]
                                         for f in dataclasses.fields(draws)
                                         if isinstance(getattr(draws, f.name), torch.Tensor)})


# ------------------------------------------------------------------------ the ELBO, by enumeration

L, V, MASK = 3, 3, 3


class Exact:
    """The conditionals p(x_i | x_visible) of a given joint p over three tokens of three values."""

    def __init__(self, joint):
        self.joint, self.word_embeddings = joint, SimpleNamespace(weight=torch.zeros(1))

    def hidden(self, x_t, modulation=None, attention_mask=None):
        """log p(x_i = . | the tokens of x_t that are not masked), b l v."""
        out = torch.zeros(*x_t.shape, V, dtype=torch.float64)
        for b, row in enumerate(x_t.tolist()):
            for i in range(L):
                for x in range(V):
                    out[b, i, x] = sum(
                        p for values, p in np.ndenumerate(self.joint)
                        if values[i] == x and all(r in (MASK, v) for r, v in zip(row, values)))
        return (out / out.sum(-1, keepdim=True)).log()

    def head(self, hidden):
        return hidden


def every_mask(x0):
    """Draws of one sequence under every count k and subset, each k with the same share."""
    rows = []
    for k in range(1, L + 1):
        subsets = list(itertools.combinations(range(L), k))
        rows += [[i in s for i in range(L)] for s in subsets] * (3 // len(subsets))
    masked = torch.tensor(rows).repeat(2, 1)
    x0 = torch.tensor(x0).expand(len(masked), -1)
    k = masked.sum(-1)
    return evaluate.Draws(x0, x0.masked_fill(masked, MASK), masked, masked.double(), k / L,
                          torch.full_like(k, L), pad_id=99, tokens_per_byte=1.0)


def test_the_elbo_of_an_exact_model_is_its_log_likelihood():
    """Any order of exact conditionals telescopes to -log p(x_0): the bound is tight, to 1e-12."""
    joint = np.random.default_rng(0).dirichlet(np.ones(V ** L) * 0.5).reshape((V,) * L)
    model = Exact(joint)
    for x0 in [(0, 1, 2), (2, 2, 0), (1, 0, 1)]:
        draws = every_mask(x0)
        losses = evaluate.sequence_losses(model, None, draws)
        assert evaluate.elbo_terms(losses, draws).mean().item() == pytest.approx(
            -math.log(joint[x0]), abs=1e-12)
        assert evaluate.metrics(losses, draws)["elbo"] * L == pytest.approx(
            -math.log(joint[x0]), abs=1e-12)


def test_the_elbo_of_any_model_is_the_mean_over_all_orders():
    """Conditionals that fit no joint: against the sum over all 3! orders, written out."""
    rng = np.random.default_rng(1)

    class Inconsistent(Exact):
        def hidden(self, x_t, modulation=None, attention_mask=None):
            return torch.stack([table[tuple(row)] for row in x_t.tolist()])

    table = {row: torch.from_numpy(rng.dirichlet(np.ones(V), L)).log()
             for row in itertools.product(range(V + 1), repeat=L)}
    x0, total = (2, 0, 1), 0.0
    for order in itertools.permutations(range(L)):
        row = [MASK] * L
        for i in order:
            total -= table[tuple(row)][i, x0[i]].item() / math.factorial(L)
            row[i] = x0[i]
    draws = every_mask(x0)
    losses = evaluate.sequence_losses(Inconsistent(None), None, draws)
    assert evaluate.elbo_terms(losses, draws).mean().item() == pytest.approx(total, abs=1e-12)


# ---------------------------------------------------------------------------- metrics and draws

def test_every_metric_is_the_loop_that_its_name_says(draws, denoiser):
    losses = evaluate.sequence_losses(denoiser.backbone, denoiser.adapter, draws)
    got = evaluate.metrics(losses, draws)
    n = len(draws.t) // 2
    weighted = w_sum = masked = elbo = tokens = 0.0
    bins = [[0.0, 0] for _ in range(evaluate.BINS)]
    with torch.no_grad():
        for row in range(2 * n):
            x0, real = draws.x0[row], draws.x0[row] != TOKENIZER.pad_id
            modulation = denoiser.adapter(draws.t[row][None])
            logits = denoiser.backbone(draws.x_t[row][real][None], modulation)[0]  # unpadded
            ce = -logits.log_softmax(-1).double()[torch.arange(len(logits)), x0[real]]
            holes = [i for i in range(len(ce)) if draws.x_t[row, i] == TOKENIZER.mask_id]
            maskable = int((x0 < 256).sum())
            if row >= n:
                elbo += maskable / len(holes) * sum(ce[i].item() for i in holes)
                tokens += maskable
                continue
            which = bins[int(draws.t[row] * evaluate.BINS)]
            for i in holes:
                w = 0.5 * sum(0.45 * 0.55 ** (abs(i - j) - 1) for j in range(len(ce))
                              if j not in holes)
                weighted, w_sum, masked = weighted + w * ce[i].item(), w_sum + w, masked + 1
                which[0], which[1] = which[0] + ce[i].item(), which[1] + 1
    expected = {"cart": weighted / masked, "cart_weight_mean": weighted / w_sum,
                "cart_sum": weighted / n, "elbo": elbo / tokens,
                "bits_per_byte": elbo / tokens / math.log(2),  # one byte a token
                "perplexity": math.exp(elbo / tokens)}
    for key, value in expected.items():  # the model runs in float32
        assert got[key] == pytest.approx(value, rel=1e-5), key
    for value, (total, count) in zip(got["by_t"], bins):
        assert math.isnan(value) if not count else value == pytest.approx(total / count, rel=1e-5)


def test_draws_mask_what_they_say_and_repeat(corpus, draws):
    n, maskable = len(draws.t) // 2, draws.x0 < 256
    assert n == 9 and torch.equal(draws.x0[:n], draws.x0[n:])
    assert torch.equal(draws.masked, draws.x_t == TOKENIZER.mask_id)
    assert torch.equal(draws.x_t[~draws.masked], draws.x0[~draws.masked])
    assert not (draws.masked & ~maskable).any()
    assert torch.equal(draws.maskable, maskable.sum(-1))
    k = draws.masked[n:].sum(-1)
    assert torch.equal(draws.t[n:], k / draws.maskable[n:])  # exactly k, and the adapter is told
    assert sorted((draws.t[:n] * n).long().tolist()) == list(range(n))  # one t in each stratum
    least = draws.maskable.min().item()
    for i, share in enumerate(((k - 1) / draws.maskable[n:]).sort().values.tolist()):
        assert i / n - 1 / least <= share < (i + 1) / n  # and one k, up to its being an integer
    again = evaluate.make_draws(corpus, TOKENIZER, 40, 9)
    other = evaluate.make_draws(corpus, TOKENIZER, 40, 9, seed=1)
    assert torch.equal(again.x_t, draws.x_t) and not torch.equal(other.x_t, draws.x_t)


def random_corpus(n):
    ids = np.random.default_rng(0).integers(0, 256, n).astype(np.uint16)
    ids[99::100] = TOKENIZER.sep_id
    return Corpus(ids, n_bytes=n - n // 100, n_docs=n // 100, tokenizer="bytes")


def test_a_uniform_guess_scores_ln_256_and_a_third_of_it_under_cart(denoiser):
    """The ELBO exactly (the table is float32: 1e-7); CART's mean weight is 1/3 but for the ends."""
    corpus = random_corpus(100 * 512)
    draws = evaluate.make_draws(corpus, TOKENIZER, 512, 100)
    short = take(draws, [0, 1])  # the frozen row is not looked at here
    rows = evaluate.reference_rows(denoiser.backbone, short, corpus.ids, TOKENIZER)
    assert list(rows) == ["uniform", "unigram", "frozen"]
    uniform = torch.full((260,), -math.log(256))
    got = evaluate.metrics(evaluate.table_losses(uniform, draws), draws)
    for row in (got, rows["uniform"]):
        assert row["elbo"] == pytest.approx(math.log(256), rel=1e-6)
        assert row["bits_per_byte"] == pytest.approx(8.0, rel=1e-6)
        assert all(math.isnan(v) or v == pytest.approx(math.log(256), rel=1e-6)
                   for v in row["by_t"])
    assert got["cart"] == pytest.approx(math.log(256) / 3, rel=0.03)
    assert got["cart_weight_mean"] == pytest.approx(math.log(256), rel=1e-6)
    # Random bytes: the smoothed frequencies of 51,200 of them are uniform up to 1/400 in nats.
    assert rows["unigram"]["elbo"] == pytest.approx(math.log(256), abs=0.05)
    table = evaluate.format_table(rows)
    assert "masked_mean" in table and all(f"| {name} |" in table for name in rows)


def test_the_unigram_row_is_the_smoothed_frequency_of_each_masked_token(work, draws, denoiser):
    ids = load_corpus(work / "text.txt", TOKENIZER).ids
    row = evaluate.reference_rows(denoiser.backbone, draws, ids, TOKENIZER)["unigram"]
    seen = [i for i in ids.tolist() if i < 256]
    total, n, counts = 0.0, len(draws.t) // 2, {i: seen.count(i) for i in set(seen)}
    for b in range(n, 2 * n):
        holes = draws.x0[b][draws.masked[b]].tolist()
        ce = -sum(math.log((counts.get(x, 0) + 1) / (len(seen) + 256)) for x in holes)
        total += draws.maskable[b].item() / len(holes) * ce
    # log-probabilities are a float32 table
    assert row["elbo"] == pytest.approx(total / draws.maskable[n:].sum().item(), rel=1e-6)


# ------------------------------------------------------------------------- what must not matter

def test_scores_depend_on_neither_the_batch_nor_the_order_nor_the_padding(draws, denoiser):
    """Float32 sums of other shapes: 1e-5."""
    model, adapter = denoiser.backbone, denoiser.adapter
    losses = evaluate.sequence_losses(model, adapter, draws)
    for batch in (1, 5):
        got = evaluate.sequence_losses(model, adapter, draws, batch=batch)
        torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-5)
    order = torch.tensor([4, 8, 0, 2, 7, 1, 6, 3, 5])
    got = evaluate.sequence_losses(model, adapter, take(draws, order), batch=4)
    torch.testing.assert_close(got, losses[torch.cat([order, order + 9])], rtol=1e-5, atol=1e-5)
    wide = dataclasses.replace(
        draws, **{name: torch.nn.functional.pad(getattr(draws, name), (0, 13), value=value)
                  for name, value in (("x0", TOKENIZER.pad_id), ("x_t", TOKENIZER.pad_id),
                                      ("masked", False), ("w", 0))})
    got = evaluate.sequence_losses(model, adapter, wide)
    torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-5)


def test_the_shares_of_the_ranks_add_up_to_all_rows(draws, denoiser, monkeypatch):
    """Each rank leaves zeros in the others' rows; 18 rows on four ranks."""
    whole = evaluate.sequence_losses(denoiser.backbone, denoiser.adapter, draws, batch=1)
    monkeypatch.setattr(evaluate.dist, "all_reduce", lambda tensor: None)
    total = torch.zeros_like(whole)
    for rank in range(4):
        monkeypatch.setattr(evaluate.common, "rank_and_world", lambda: (rank, 4))
        share = evaluate.sequence_losses(denoiser.backbone, denoiser.adapter, draws, batch=1)
        others = torch.arange(18) % 4 != rank
        assert not share[others].any() and torch.equal(share[~others], whole[~others])
        total += share
    assert torch.equal(total, whole)


@pytest.mark.slow
@pytest.mark.faults
def test_two_ranks_score_what_one_does(draws):
    folder, run = tiny.two_ranks()
    assert run.returncode == 0, run.err[-2000:]
    losses, metrics = tiny.score(folder)
    for rank in (0, 1):
        got, numbers = torch.load(folder / f"rank{rank}.pt")["score"]
        torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-5)  # other batches, float32
        for key in ("cart", "elbo", "bits_per_byte"):
            assert numbers[key] == pytest.approx(metrics[key], rel=1e-5)


# -------------------------------------------------------------------------------- the control of t

def test_an_adapter_that_reads_no_t_has_a_gap_of_exactly_zero(draws, denoiser):
    lora = tiny.awake(make_adapter("lora", tiny.CONFIG, lora_rank=2))
    scores = evaluate.score_adapter(denoiser.backbone, lora, draws)
    assert scores["gap"] == 0.0 and scores["gap_error"] == 0.0
    assert scores["shuffled_t"]["elbo"] == scores["elbo"]
    frozen = evaluate.metrics(evaluate.sequence_losses(denoiser.backbone, None, draws), draws)
    assert frozen["elbo"] != scores["elbo"]


def test_the_gap_is_the_difference_of_the_two_elbos_and_its_error_a_paired_one(draws, denoiser):
    scores = evaluate.score_adapter(denoiser.backbone, denoiser.adapter, draws)
    one = evaluate.score_adapter(denoiser.backbone, denoiser.adapter, take(draws, [0]))
    assert math.isnan(one["gap_error"])
    assert scores["gap"] != 0
    assert scores["gap"] == pytest.approx(scores["shuffled_t"]["elbo"] - scores["elbo"], abs=1e-12)
    n, pairs = len(draws.t) // 2, []
    for t in (draws.t, evaluate.shuffled(draws.t)):
        losses = evaluate.sequence_losses(denoiser.backbone, denoiser.adapter, draws, t=t)[n:, 0]
        pairs.append((losses * draws.maskable[n:] / draws.masked[n:].sum(-1)).numpy())
    each = (pairs[1] - pairs[0]) * n / draws.maskable[n:].sum().item()
    assert scores["gap_error"] == pytest.approx(1.96 * each.std(ddof=1) / math.sqrt(n), rel=1e-9)


def test_an_ablation_that_keeps_nothing_scores_as_the_frozen_backbone(draws, denoiser):
    frozen = evaluate.sequence_losses(denoiser.backbone, None, draws)
    got = evaluate.sequence_losses(denoiser.backbone, denoiser.adapter, draws, modulate="none")
    assert torch.equal(got, frozen)


@pytest.mark.parametrize("n", [1, 2, 9, 64])
def test_shuffling_gives_every_sequence_another_ones_t_of_its_own_half(n):
    t = torch.cat([torch.arange(n), 1000 + torch.arange(n)]) / 10
    for seed in range(5):
        got = evaluate.shuffled(t, seed)
        for half in (slice(0, n), slice(n, None)):
            assert torch.equal(got[half].sort().values, t[half])
        assert torch.equal(got, evaluate.shuffled(t, seed))
        if n > 1:  # else there is no other one
            assert not (got == t).any()


# ------------------------------------------------------------------------- seeds and data sets

SEEDS = (42, 142, 242)


@pytest.fixture(scope="module")
def scored(work, denoiser):
    """Scores of one adapter on two texts, the second shorter than a window, over three seeds."""
    corpora = {"long": load_corpus(work / "text.txt", TOKENIZER), "short": Corpus(
        np.frombuffer(b"a short text\x02", np.uint8).astype(np.uint16), 12, 1, "bytes")}
    corpora["short"].ids[-1] = TOKENIZER.sep_id
    return corpora, score(denoiser, corpora)


def score(denoiser, corpora, seeds=SEEDS, modes=("full",)):
    held_out = HeldOut(corpora, TOKENIZER, 24, 5, seeds)
    return evaluate.score_all(denoiser.backbone, {"one": denoiser.adapter}, held_out,
                              corpora["long"].ids, modes)


def test_a_cell_is_what_the_draws_of_its_data_set_and_seed_say(scored, denoiser):
    corpora, scores = scored
    for name, corpus in corpora.items():
        for i, seed in enumerate(SEEDS):
            draws = evaluate.make_draws(corpus, TOKENIZER, 24, 5, seed)
            told = {Row("one"): draws.t,
                    Row("one", "shuffled t"): evaluate.shuffled(draws.t, seed),
                    Row("one", "constant t"): torch.full_like(draws.t, 0.5)}
            for row, t in told.items():
                losses = evaluate.sequence_losses(denoiser.backbone, denoiser.adapter, draws, t=t)
                for metric, value in evaluate.metrics(losses, draws).items():
                    got = scores[name][row][metric][i]
                    assert str(got) == str(value)        # as text: an empty bin of t is NaN
            references = evaluate.reference_rows(denoiser.backbone, draws, corpora["long"].ids,
                                                 TOKENIZER)
            for label, values in references.items():
                assert scores[name][Row(label)]["elbo"][i] == values["elbo"]
    assert scores["long"][FROZEN]["elbo"][0] != scores["long"][FROZEN]["elbo"][1]


def test_neither_the_order_of_the_data_sets_nor_the_other_seeds_change_a_cell(scored, denoiser):
    corpora, scores = scored
    backwards = score(denoiser, dict(reversed(corpora.items())), (242, 42))
    for name in corpora:
        for row, values in scores[name].items():
            assert backwards[name][row]["elbo"] == values["elbo"][::-2]


def test_references_are_scored_once_for_adapters_that_come_one_by_one(scored, denoiser):
    """The frozen backbone runs once a text and seed, however many adapters follow."""
    corpora, scores = scored
    held_out = HeldOut(corpora, TOKENIZER, 24, 5, SEEDS)
    references = evaluate.score_references(denoiser.backbone, held_out, corpora["long"].ids)
    assert list(references["long"]) == list(evaluate.REFERENCES)
    rows = [Row("again"), Row("again", "constant t")]
    alone = evaluate.score_adapter_rows(denoiser.backbone, denoiser.adapter, rows, held_out)
    assert list(alone["short"]) == rows
    merged = evaluate.merge_scores(references, alone)
    for name in corpora:
        assert list(merged[name]) == [*evaluate.REFERENCES, *rows]
        for row, like in ((FROZEN, FROZEN), (rows[0], Row("one")),
                          (rows[1], Row("one", "constant t"))):
            assert str(merged[name][row]) == str(scores[name][like])
    assert evaluate.seed_differences(merged, "elbo", FROZEN, rows[0]) == \
        evaluate.seed_differences(scores, "elbo", FROZEN, Row("one"))


def test_every_seed_has_its_own_windows_and_a_small_set_is_scored_whole(scored):
    corpora, _ = scored
    draws = [evaluate.make_draws(corpora["long"], TOKENIZER, 24, 5, seed) for seed in (42, 142)]
    assert not (draws[0].x0[:5] == draws[1].x0[:5]).all(-1).any()
    for seed in (42, 142):
        alone = evaluate.make_draws(corpora["short"], TOKENIZER, 24, 5, seed)
        assert alone.maskable.tolist() == 10 * [12]      # without its [SEP]; five drawn, twice over


def test_a_set_of_one_window_has_a_row_in_each_bin_of_t(scored):
    draws = evaluate.make_draws(scored[0]["short"], TOKENIZER, 24, 40)
    assert sorted((draws.t[:10] * evaluate.BINS).long().tolist()) == list(range(evaluate.BINS))
    assert (draws.x0 == draws.x0[0]).all()


def test_a_text_with_nothing_to_mask_is_refused():
    empty = Corpus(np.full(5, TOKENIZER.sep_id, np.uint16), 0, 5, "bytes")
    with pytest.raises(UserError, match="no token that can be masked"):
        evaluate.make_draws(empty, TOKENIZER, 24, 5)


def test_a_rank_without_a_row_scores_nothing(scored, denoiser, monkeypatch):
    draws = take(evaluate.make_draws(scored[0]["long"], TOKENIZER, 24, 5), [0])
    monkeypatch.setattr(evaluate.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(evaluate.common, "rank_and_world", lambda: (3, 4))
    assert not evaluate.sequence_losses(denoiser.backbone, None, draws).any()


def test_the_bits_of_a_byte_count_the_bytes_of_the_text(corpus, denoiser):
    twice = dataclasses.replace(corpus, n_bytes=2 * corpus.n_bytes)     # two bytes a token
    scores = [evaluate.metrics(evaluate.sequence_losses(denoiser.backbone, None, draws), draws)
              for draws in (evaluate.make_draws(c, TOKENIZER, 40, 9) for c in (corpus, twice))]
    assert scores[1]["bits_per_byte"] == pytest.approx(scores[0]["bits_per_byte"] / 2)
    assert scores[1]["elbo"] == scores[0]["elbo"]


def test_the_sharpness_of_the_weights_is_the_one_asked_for(corpus):
    draws = evaluate.make_draws(corpus, TOKENIZER, 40, 9, p=0.2)
    visible = draws.x0[1] != TOKENIZER.pad_id
    for i in draws.masked[1].nonzero().flatten().tolist():
        w = 0.5 * sum(0.2 * 0.8 ** (abs(i - j) - 1) for j in range(40)
                      if visible[j] and not draws.masked[1, j])
        assert draws.w[1, i].item() == pytest.approx(w, rel=1e-5)


def test_other_modes_add_rows_and_leave_the_first_ones_alone(scored, denoiser):
    corpora, scores = scored
    found = score(denoiser, corpora, modes=("full", "A", "none"))["long"]
    only_A, nothing = Row("one", modulate="A"), Row("one", modulate="none")
    assert list(found) == [*scores["long"], only_A, nothing]
    assert found[Row("one")]["elbo"] == scores["long"][Row("one")]["elbo"]
    assert found[nothing]["elbo"] == found[FROZEN]["elbo"]
    assert found[only_A]["elbo"] != found[Row("one")]["elbo"]


def test_rows_are_labelled_as_in_published_files():
    """The first mode is not worth a word, whichever it is."""
    rows = evaluate.adapter_rows("dct", ("full", "A"))
    assert [row.label() for row in rows] == [
        "dct", "dct, shuffled t", "dct, constant t", "dct, A"]
    rows = evaluate.adapter_rows("dct", ("A", "full"))
    assert [row.label("A") for row in rows] == [
        "dct", "dct, shuffled t", "dct, constant t", "dct, full"]
    assert Row("dct", "shuffled t", "A").label() == "dct, A, shuffled t"
    published = common.read_json(common.SOURCE / "results/evaluate/small.json")["metrics"]["scores"]
    expected = [row.label() for row in evaluate.REFERENCES]
    for name in ("chebyshev", "dct", "hypernet"):
        expected += [row.label() for row in evaluate.adapter_rows(name)]
    assert all(list(rows) == expected for rows in published.values())


# --------------------------------------------------------------------------- tables over seeds

def row_of(elbo):
    """The values of a row, of one seed."""
    values = {metric: [elbo] for metric in evaluate.TITLES}
    return values | {"by_t": [[elbo] * evaluate.BINS]}


def test_intervals_are_of_the_paired_differences_and_the_average_is_taken_per_seed():
    x, y = Row("x"), Row("y")
    scores = {"a": {x: {"m": [1.0, 2.0, 4.0]}, y: {"m": [0.5, 1.5, 3.5]}},
              "b": {x: {"m": [2.0, 2.0, 2.0]}, y: {"m": [1.0, 2.0, 3.0]}}}
    differences = evaluate.seed_differences(scores, "m", x, y)
    assert differences == [[0.5, 0.5, 0.5], [1, 0, -1], [0.75, 0.25, -0.25]]
    table = evaluate.score_table(scores, {"x - y": differences}, "+", 2)
    assert "|  | a | b | Avg. |" in table  # 1.96 standard errors, as in C.3
    assert "| x - y | +0.50 ± 0.00 | +0.00 ± 1.13 | +0.25 ± 0.57 |" in table
    table = evaluate.score_table(scores, {"x": evaluate.seed_values(scores, "m", x)}, digits=2)
    assert "| x | 2.33 ± 1.73 | 2.00 ± 0.00 | 2.17 ± 0.86 |" in table


def test_what_has_no_interval_or_no_value_is_na():
    assert evaluate.mean_and_error([1.0], digits=2) == "1.00 (n/a)"
    assert evaluate.mean_and_error([1.0, math.nan]) == evaluate.mean_and_error([math.nan]) == "n/a"
    rows = {"x": {name: values[0] for name, values in row_of(math.nan).items()}}
    assert set(evaluate.format_table(rows).splitlines()[-1].split(" | ")[1:]) <= {"n/a", "n/a |"}
    scores = {"a": {Row("x"): row_of(1.0)}, "b": {Row("x"): row_of(3.0)}}
    scores["a"][Row("x")]["by_t"][0][4] = math.nan     # in memory
    scores["b"][Row("x")]["by_t"][0][:5] = [None] * 5  # as read from JSON
    shown = evaluate.by_t_table(scores, {"x": Row("x")}).splitlines()[-1]
    assert shown == "| x | " + " | ".join(["1.000"] * 4 + ["n/a"] + ["2.000"] * 5) + " |"


def test_a_gain_is_positive_where_the_adapter_is_better_and_a_cost_where_t_helps():
    scores = {"a": {FROZEN: row_of(2.0), Row("x"): row_of(1.5),
                    Row("x", "shuffled t"): row_of(1.8), Row("x", "constant t"): row_of(1.6)}}
    tables = evaluate.score_tables(scores, ["x"])
    table = tables["ELBO, paired differences"]
    assert "| x, gain over frozen | +0.5000 (n/a) | +0.5000 (n/a) |" in table
    assert "| x, cost of a shuffled t | +0.3000 (n/a) |" in table
    assert "| x, cost of a constant t | +0.1000 (n/a) |" in table
    by_t = tables["cross-entropy by t, nats per masked token, average"]
    assert "| x | " + " | ".join(["1.500"] * 10) + " |" in by_t


# ------------------------------------------------------------------------------------ the command

@pytest.fixture
def given(work, denoiser):
    """Flags for the tiny backbone, an adapter of its own, and a few short windows."""
    save_adapter(work / "a" / "adapter.safetensors", denoiser.adapter)
    return ("--data", f"held={work / 'text.txt'}", "--train", work / "text.txt", "--weights",
            work / "backbone.safetensors", "--adapter", work / "a", "--seqlen", 24,
            "--windows", 4, "--seeds", 2)


def written(work, label="a"):
    """What the command left of some adapters in result.json, and in tables.md."""
    folder = work / "runs/evaluate" / label
    found = common.read_json(folder / "result.json", "metrics", "config", "commit")
    return found["metrics"], (folder / "tables.md").read_text("utf-8")


def test_the_command_scores_adapters_and_writes_the_result(work, denoiser, given):
    save_adapter(work / "b" / "adapter.safetensors", denoiser.adapter)
    run = command("evaluate.py", *given, "--adapter", work / "a", work / "b")
    assert run.status == 0, run.err
    assert run.out.strip().splitlines()[-1] == "wrote runs/evaluate/several/result.json"
    metrics, shown = written(work, "several")
    rows = metrics["scores"]["held"]
    assert len(rows) == 9 and {"uniform", "unigram", "frozen", "b", "b, shuffled t"} <= rows.keys()
    assert all(len(row["elbo"]) == 2 for row in rows.values())
    for words in ("uniform", "constant t", "masked_mean", "gain over frozen", "Avg."):
        assert words in run.out
    assert len(metrics["tables"]) == 9
    assert all(table in shown for table in metrics["tables"].values())
    assert re.search(r"held: 4 of \d+ windows of 24 per seed", run.out)     # the cap is stated
    assert (work / "runs/evaluate/several/table1_scores.png").stat().st_size > 10_000


def test_a_backbone_in_bf16_scores_within_two_percent_of_float32(work, given):
    losses = []
    for precision in ("float32", "bf16"):
        run = command("evaluate.py", *given, "--precision", precision)
        assert run.status == 0, run.err
        assert ("in bfloat16, trainable" in run.out) == (precision == "bf16")
        rows = written(work)[0]["scores"]["held"]
        losses.append([rows[row]["elbo"] for row in ("frozen", "a", "a, shuffled t")])
    exact, rounded = torch.tensor(losses)
    assert 0 < (rounded / exact - 1).abs().max() < 0.02


@pytest.mark.parametrize("flags, words", [
    (("--precision", "tf32", "--device", "cpu"), "--precision: got tf32, which GPUs alone have"),
    (("--adapter", "nowhere"), "nowhere"), (("--windows", 0), "--windows: got 0"),
    (("--modulate", "full", "B"), "'all-except-A'"), (("--device", "tpu"), "'cuda'")])
def test_a_wrong_wish_ends_the_command_with_one_line(given, flags, words):
    run = command("evaluate.py", *given, *flags)
    assert run.status == 2 and run.err.count("\n") == 1 and words in run.err, run.err


def test_one_window_and_one_seed_print_na_and_never_nan(work, given):
    (work / "x.txt").write_text("x")  # of one token, which at a small t is not even masked
    with tiny.root_at(work / "one"):
        for data, seed in (("text", 42), ("x", 42), ("x", 142), ("x", 242)):
            run = command("evaluate.py", *given, "--windows", 1, "--seeds", 1, "--seed", seed,
                          "--data", work / f"{data}.txt")
            assert run.status == 0, run.err
            _, shown = written(work / "one")
            assert "(n/a)" in shown and " n/a |" in shown and "(n/a)" in run.out
            assert "nan" not in shown + run.out


def test_a_file_name_that_is_no_utf8_costs_no_result(work, given):
    """Python hands a Latin-1 é on as the surrogate U+DCE9, which no UTF-8 file can hold."""
    try:
        (work / "caf\udce9.txt").write_bytes((work / "text.txt").read_bytes())
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    with tiny.root_at(work / "odd"):
        run = command("evaluate.py", *given, "--data", work / "caf\udce9.txt")
        twice = command("evaluate.py", *given, "--data", work / "caf\udce9.txt",
                        f"caf\udce8={work / 'text.txt'}")
    assert run.status == 0, run.err
    metrics, shown = written(work / "odd")
    assert "a, shuffled t" in metrics["scores"]["caf\ufffd"]
    assert "| caf\ufffd |" in shown
    assert (work / "odd/runs/evaluate/a/table1_scores.png").is_file()
    assert twice.status == 2 and "two data sets are called caf\ufffd" in twice.err


def test_results_are_there_before_the_picture_is(work, given, monkeypatch):
    def fail(figure, path):
        raise OSError("no picture today")

    monkeypatch.setattr(common, "save_figure", fail)
    with tiny.root_at(work / "unseen"), pytest.raises(OSError, match="today"):
        command("evaluate.py", *given)
    metrics, shown = written(work / "unseen")
    assert metrics["scores"]["held"] and "gain over frozen" in shown


def test_a_rank_left_in_the_environment_silences_nothing(given, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = command("evaluate.py", *given)
    assert run.status == 0 and "gain over frozen" in run.out


# ---------------------------------------------------------------- beside the frozen backbone

def test_a_comparison_is_the_loop_over_windows(work):
    """Gain, cost and share of right tokens, one window and one pass at a time."""
    tokenizer, denoiser = ByteTokenizer(), tiny.make_denoiser(work)
    model, adapter = denoiser.backbone, denoiser.adapter
    draws = evaluate.make_draws(load_corpus(work / "text.txt", tokenizer), tokenizer, 40, 9)
    found = evaluate.compare(model, adapter, draws)
    wrong_t = evaluate.shuffled(draws.t)
    tokens = draws.maskable[9:].sum().item()
    gains, costs, more, right = [], [], [], [0, 0]
    with torch.no_grad():
        for i in range(9, 18):
            nats = []
            for told in (None, draws.t[i:i + 1], wrong_t[i:i + 1]):
                modulation = None if told is None else adapter(told)
                real = draws.x0[i:i + 1] != tokenizer.pad_id
                log_p = model(draws.x_t[i:i + 1], modulation, real)[0].double().log_softmax(-1)
                holes = draws.masked[i].nonzero().flatten().tolist()
                ce = -sum(log_p[j, draws.x0[i, j]].item() for j in holes)
                nats.append(ce * draws.maskable[i].item() / len(holes) * 9 / tokens)
            gains.append(nats[0] - nats[1])
            costs.append(nats[2] - nats[1])
        masked = draws.masked[:9].sum().item()
        for i in range(9):
            hits = []
            for k, modulation in enumerate((None, adapter(draws.t[i:i + 1]))):
                real = draws.x0[i:i + 1] != tokenizer.pad_id
                guess = model(draws.x_t[i:i + 1], modulation, real)[0].argmax(-1)
                hits.append(((guess == draws.x0[i]) & draws.masked[i]).sum().item())
                right[k] += hits[k] / masked
            more.append((hits[1] - hits[0]) * 9 / masked)
    for name, values in (("gain", gains), ("wrong_t_cost", costs)):
        want = common.interval(values)
        assert found[name].mean == pytest.approx(want.mean, abs=1e-6)
        assert found[name].half == pytest.approx(want.half, abs=1e-6) and found[name].n == 9
    assert found["right"]["frozen"] == pytest.approx(right[0])
    assert found["right"]["adapter"] == pytest.approx(right[1])
    assert found["right"]["difference"].mean == pytest.approx(sum(more) / 9)
    gain = found["frozen"]["elbo"] - found["adapter"]["elbo"]
    assert gain == pytest.approx(found["gain"].mean, abs=1e-9)


def test_the_gain_by_t_is_that_of_the_metrics_bin_by_bin(work):
    tokenizer, denoiser = ByteTokenizer(), tiny.make_denoiser(work)
    corpus = load_corpus(work / "text.txt", tokenizer)
    draws = evaluate.make_draws(corpus, tokenizer, 40, 25)
    found = evaluate.compare(denoiser.backbone, denoiser.adapter, draws)
    bins = (draws.t[:25] * evaluate.BINS).long()
    for k, value in enumerate(found["gain_by_t"]):
        want = found["frozen"]["by_t"][k] - found["adapter"]["by_t"][k]
        if value is None:
            assert math.isnan(want)
        else:
            assert value.mean == pytest.approx(want, abs=1e-9) and value.n == (bins == k).sum()


def test_one_window_has_no_wrong_t_and_a_repeated_one_no_interval(work):
    """A short text comes repeatedly: its windows are not independent, and one knows no other t."""
    tokenizer, denoiser = ByteTokenizer(), tiny.make_denoiser(work)
    (work / "tiny.txt").write_text("forty bytes of text, and then no more..")
    corpus = load_corpus(work / "tiny.txt", tokenizer)
    draws = evaluate.make_draws(corpus, tokenizer, 64, 9)
    assert draws.n == 9 and draws.distinct == 1
    found = evaluate.compare(denoiser.backbone, denoiser.adapter, draws)
    assert found["windows"] == 1 and math.isnan(found["gain"].half) and found["gain"].n == 1
    one = evaluate.make_draws(corpus, tokenizer, 64, 1)
    assert one.n == 1
    scores = evaluate.score_adapter(denoiser.backbone, denoiser.adapter, one)
    assert math.isnan(scores["gap"]) and math.isnan(scores["shuffled_t"]["elbo"])
    assert "n/a" in evaluate.last_line("x", evaluate.compare(denoiser.backbone, denoiser.adapter,
                                                             one))


def test_lora_reads_no_t_and_the_last_line_says_so(work):
    tokenizer, denoiser = ByteTokenizer(), tiny.make_denoiser(work, kernel="lora")
    draws = evaluate.make_draws(load_corpus(work / "text.txt", tokenizer), tokenizer, 40, 9)
    found = evaluate.compare(denoiser.backbone, denoiser.adapter, draws)
    assert evaluate.last_line("lora", found).endswith("it reads no t")
    assert "it reads no t" in evaluate.comparison_table("lora", found)


def test_two_adapters_are_compared_seed_by_seed_with_both_intervals():
    def of(values):
        return {"elbo": values}

    scores = {"a": {Row("x"): of([1.0, 2.0, 4.0]), Row("y"): of([1.5, 2.0, 3.0])},
              "b": {Row("x"): of([0.0, 0.0, 0.0]), Row("y"): of([1.0, 1.0, 1.0])}}
    *_, line = evaluate.pair_table(scores, ["x", "y"]).splitlines()
    label, first, second, average = [cell.strip() for cell in line.strip("|").split("|")]
    differences = [-0.5, 0.0, 1.0]
    students = common.interval(differences)
    normal = common.interval(differences, student=False)
    assert label == "x less y" and first == f"{students.show('+')} ({normal.half:.4f})"
    assert students.half > 2 * normal.half and second == "-1.0000 ± 0.0000 (0.0000)"
    assert average.startswith(f"{sum(differences) / 6 - 0.5:+.4f}")
