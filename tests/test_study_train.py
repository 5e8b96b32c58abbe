"""A cell's training equals train.py's, finetune trains all, rates move until none is at an edge."""
import dataclasses
import functools
import math

import numpy as np
import pytest
import test_study
import tiny
import torch

import common
import train
from checkpoint import load_adapter, load_backbone
from data import Corpus, DiffusionDataset, Windows, load_corpus
from evaluate import make_draws, metrics, sequence_losses
from experiments import random_bytes, study, study_cells, study_train
from experiments.study_cells import CHOOSING, FIRST, OWN, Cell, at
from text import ByteTokenizer

CHEBYSHEV = Cell("chebyshev", world="new")


@pytest.fixture
def setting(work, monkeypatch):
    """The Config of a very small study whose new text is the tiny one."""
    monkeypatch.setattr(study_train, "load_backbone",
                        lambda source: load_backbone(work / "backbone.safetensors"))
    text = str(work / "text.txt")
    monkeypatch.setattr(study_train, "training_text", lambda cell, cfg: (text,))
    return study.Config(train=(text,), test=(f"held={text}",), steps=3, seqlen=24, windows=2,
                        seeds=2, dirty=True)


def trained(cell, cfg):
    """(the Denoiser of a cell before training, the one after it)."""
    settings = study_train.settings_of(cell, cfg)
    made = [study_train.make_denoiser(cell, settings, study_train.backbone_of(cell, cfg))
            for _ in range(2)]
    study_train.train_denoiser(cell, cfg, settings, made[1])
    return made


# --------------------------------------------------------------------------------- the training

@pytest.mark.parametrize("settings", [{}, {"modulate": "dt", "t_hole": (0.4, 0.6)}])
def test_a_cell_is_trained_as_train_py_trains_it(work, setting, settings, monkeypatch):
    monkeypatch.chdir(work)
    cell = Cell("chebyshev", 1e-2, 7).but(**settings)
    cfg = train.Config(kernel="chebyshev", name="other", weights="backbone.safetensors",
                       data=setting.train, seqlen=24, steps=3, eval_every=0, eval_windows=2,
                       overwrite=True, device="cpu", **study_train.TRAINING, **cell.settings())
    train.main(cfg)
    want, _ = load_adapter(work / "runs/other", load_backbone("backbone.safetensors").config)
    before, after = trained(cell, setting)
    moved = 0.0
    for name, p in after.adapter.state_dict().items():
        torch.testing.assert_close(p, want.state_dict()[name], rtol=1e-6, atol=1e-8)
        moved = max(moved, (p - before.adapter.state_dict()[name]).abs().max().item())
    assert moved > 1e-3


def test_finetune_trains_every_weight_of_the_backbone_and_a_geometry_on_top(setting):
    for kernel, settings in (("finetune", {}), ("finetune+chebyshev", {"blind": True})):
        cell = Cell(kernel, 1e-2, 7, world="bytes").but(**settings)
        before, after = trained(cell, setting)
        was = dict(before.backbone.named_parameters()) | dict(before.adapter.named_parameters())
        for part in (after.backbone, after.adapter):
            for name, p in part.named_parameters():
                assert not torch.equal(p, was[name]), name
        size = study_train.trained_size(trained_before(cell, setting))
        backbone = sum(p.numel() for p in after.backbone.parameters())
        assert size > backbone if "+" in kernel else size == backbone


def trained_before(cell, cfg):
    settings = study_train.settings_of(cell, cfg)
    return study_train.make_denoiser(cell, settings, study_train.backbone_of(cell, cfg))


def test_a_frozen_backbone_stays_as_it_is(setting):
    before, after = trained(Cell("static", 1e-2, 7, world="new"), setting)
    for name, p in after.backbone.named_parameters():
        assert torch.equal(p, dict(before.backbone.named_parameters())[name]), name


# ------------------------------------------------------------------------------------ the worlds

def test_the_halves_of_a_text_are_whole_documents_and_all_of_it():
    sep = ByteTokenizer.sep_id
    ids = np.array([65, 66, sep, 67, sep, 68, 69, 70, sep, 71, sep], np.uint16)
    corpus = Corpus(ids, 7, 4, "bytes")
    first, second = study_train.halves(corpus)
    assert first.ids.tolist() == ids[:9].tolist() and second.ids.tolist() == [71, sep]
    assert (first.n_docs, second.n_docs) == (3, 1)
    assert (first.n_bytes, second.n_bytes) == (6, 1)


def test_no_text_of_a_new_world_holds_what_another_was_chosen_on(monkeypatch):
    cfg = study.Config(test=("shakespeare=assets/tinyshakespeare.txt",))
    texts = study_train.texts_of("new", cfg)
    assert list(texts.corpora) == [CHOOSING, OWN]        # the whole of it is no test text here
    whole = load_corpus(("embedded",), ByteTokenizer(), "valid")
    joined = np.concatenate([corpus.ids for corpus in texts.corpora.values()])
    assert np.array_equal(joined, whole.ids)
    assert list(study_train.texts_of("bytes", cfg).corpora) == [CHOOSING, OWN]


def test_another_backbone_is_found_by_its_name_or_asked_for(work):
    cell = Cell("none", world="mask15")
    with pytest.raises(common.UserError, match="mask15=PATH"):
        study_train.backbone_of(cell, study.Config())
    cfg = study.Config(backbones=(f"mask15={work / 'backbone.safetensors'}",))
    assert study_train.backbone_of(cell, cfg).config.nheads == tiny.CONFIG.nheads


# --------------------------------------------------------------------------------- random bytes

@pytest.fixture(scope="module")
def noisy():
    """(RandomBytes, the DiffusionDataset it replaces) on a made-up text of four letters."""
    sep = ByteTokenizer.sep_id
    letters = np.random.default_rng(0).integers(97, 101, 40_000)
    letters[::50] = sep
    corpus = Corpus(letters.astype(np.uint16), 39_200, 800, "bytes")
    windows = Windows(corpus, 64, ByteTokenizer.pad_id)
    alphabet = random_bytes.alphabet_of(corpus)
    assert alphabet.tolist() == [97, 98, 99, 100]
    masks = DiffusionDataset(windows, ByteTokenizer(), 8, 64, 3)
    return (random_bytes.RandomBytes(masks, alphabet), masks)


def test_a_byte_is_replaced_with_probability_t_by_any_letter_alike(noisy):
    random, masks = noisy
    changed = torch.zeros(4, 4)                          # true letter, new letter
    for k in range(len(random)):
        item, before = random[k], masks[k]
        assert torch.equal(item["x0"], before["x0"]) and item["t"] == before["t"]
        special = item["x0"] >= 256
        assert torch.equal(item["masked"], ~special)
        assert torch.equal(item["x_t"][special], item["x0"][special])
        kept = ~before["masked"]
        assert torch.equal(item["x_t"][kept], item["x0"][kept])
        for true, new in zip(item["x0"][before["masked"]], item["x_t"][before["masked"]]):
            changed[true - 97, new - 97] += 1
    n = changed.sum(1, keepdim=True)
    error = 4 * (0.25 * 0.75 / n) ** 0.5                 # four standard deviations
    assert (n > 500).all() and ((changed / n - 0.25).abs() < error).all()


def test_its_score_is_the_mean_cross_entropy_over_all_bytes(work):
    model = load_backbone(work / "backbone.safetensors")
    corpus = load_corpus([str(work / "text.txt")], ByteTokenizer())
    texts = random_bytes.RandomByteTexts({"one": corpus}, ByteTokenizer(), 24, 12, (42,),
                                         random_bytes.alphabet_of(corpus))
    draws = texts.draw("one", 42)
    plain = make_draws(corpus, ByteTokenizer(), 24, 12, 42)
    assert torch.equal(draws.x0, plain.x0) and torch.equal(draws.t, plain.t)
    changed = draws.x_t != draws.x0
    assert changed.any() and not (changed & ~plain.masked).any()
    assert not (draws.x_t == ByteTokenizer.mask_id).any()
    found = metrics(sequence_losses(model, None, draws), draws)
    with torch.no_grad():
        logits = model(draws.x_t, attention_mask=draws.x0 != ByteTokenizer.pad_id).double()
    total = count = 0.0
    for row in range(draws.n, 2 * draws.n):
        for i in range(24):
            true = draws.x0[row, i].item()
            if true < 256:
                total -= logits[row, i].log_softmax(-1)[true].item()
                count += 1
    assert found["elbo"] == pytest.approx(total / count, rel=1e-5)


# ---------------------------------------------------------------------------- choosing the rates

def elbo_at(results, kind, elbo):
    """Give each rate that is asked for the ELBO elbo(rate), until the best is settled."""
    for _ in range(20):
        found, settled = study_cells.rates_tried(kind, results)
        if settled:
            return found
        for lr in found:
            cell = at(kind, lr, FIRST)
            results[cell] = test_study.made_up_result(cell)
            test_study.improve(results, cell, CHOOSING, elbo(lr))
    raise AssertionError("never settled")


@pytest.mark.parametrize("best", [2.5e-4, 1e-3, 4e-3, 6.4e-2])
def test_rates_are_tried_until_the_best_lies_at_no_edge(best):
    found = elbo_at({}, CHEBYSHEV, lambda lr: abs(math.log2(lr / best)))
    rates = sorted(found)
    chosen = min(found, key=found.get)
    assert chosen == pytest.approx(best)
    assert rates[0] < chosen < rates[-1] and {4e-3, 2e-3, 8e-3} <= set(rates)


def test_a_blind_twin_and_the_like_inherit_their_rate():
    results = {}
    elbo_at(results, CHEBYSHEV, lambda lr: abs(math.log2(lr / 1e-3)))
    settled = functools.partial(study_cells.settled_rate, results=results)
    assert settled(CHEBYSHEV) == settled(CHEBYSHEV.but(blind=True)) == 1e-3
    assert settled(dataclasses.replace(CHEBYSHEV, world="mask15")) == 1e-3
    assert settled(dataclasses.replace(CHEBYSHEV, world="bytes")) is None
    both = Cell("lora+chebyshev", world="new")
    elbo_at(results, both, lambda lr: abs(math.log2(lr / 2e-3)))
    assert settled(Cell("lora+dct", world="new").but(blind=True)) == 2e-3
    assert settled(Cell("lora", world="new")) is None
    assert study_cells.tuned_as(Cell("finetune+chebyshev", world="bytes")).kernel == "finetune"


def test_a_world_trains_each_kind_on_all_seeds_once_its_rate_is_settled():
    results = test_study.every_cell()
    for world, kinds in (("new", 20), ("bytes", 19), ("near", 20)):
        cells = study_cells.worth_cells(world, results)
        assert len(study_cells.kinds_of(world)) == kinds
        for kind in study_cells.kinds_of(world):
            assert len(study_cells.seeds_of(kind, results)) == 5
            assert {cell.seed for cell in study_cells.seeds_of(kind, results)} <= {
                cell.seed for cell in cells}
    assert {cell.seed for cell in study_cells.pretraining_cells(results)} == {0, 42, 142, 242}


def test_a_control_is_scored_only_where_a_t_could_be_wrong():
    assert len(at(CHEBYSHEV, 1e-3, 42).rows()) == 3
    for kernel in ("lora", "static", "finetune"):
        assert len(Cell(kernel, 1e-3, 42, world="new").rows()) == 1
    assert len(Cell("finetune+chebyshev", 1e-3, 42, world="bytes").but(blind=True).rows()) == 1
