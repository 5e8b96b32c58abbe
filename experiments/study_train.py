"""How a cell of the study is trained and on what: texts, noise, backbones (A.4, A.5).

Run:      not a script; study.py runs the cells.

A cell is trained by `train.train_steps` without what surrounds it in train.py: no run folder and no
checkpoints, since a cell takes minutes. So that it can train the backbone too, the optimiser gets
what asks for a gradient: the adapter, and with "finetune" every weight.

Symbols:  world     what a cell lives in: a text, a kind of noise, a backbone; see study_cells.py
          finetune  the kernel that trains the backbone itself, finetune+K with a geometry on top
Differs from the paper: it has none of this (A.4, A.5).
"""
import dataclasses

import torch

import common
import train
from checkpoint import load_backbone
from data import Windows, held_out_split, load_corpus, named_sources
from evaluate import HeldOut
from experiments.random_bytes import RandomBytes, RandomByteTexts, alphabet_of, weigh_all
from experiments.study_cells import CHOOSING, OWN, WORLDS
from mark_adapters import adapter_size, make_adapter
from published import sliced_backbone
from text import ByteTokenizer

TRAINING = dict(global_batch=16, micro_batch=16, warmup=20, mlp_dim=64)  # of every cell
NOT_TRAINED_ON = ("shakespeare",)  # test texts that the worlds of a new text leave out: it is them


# ---- texts ---------------------------------------------------------------------------------------


def training_text(cell, cfg):
    """What a cell is trained on, for load_corpus."""
    return cfg.train if WORLDS[cell.world].text == "near" else ("embedded",)


def halves(corpus):
    """A corpus in two parts, cut between documents: to choose rates on, and to report on."""
    ids = corpus.ids
    ends = (ids == ByteTokenizer.sep_id).nonzero()[0] + 1
    cut = int(ends[len(ends) // 2])
    n_docs = len(ends) // 2 + 1
    first = dataclasses.replace(corpus, ids=ids[:cut], n_docs=n_docs, n_bytes=cut - n_docs)
    rest = corpus.n_docs - n_docs
    second = dataclasses.replace(corpus, ids=ids[cut:], n_docs=rest,
                                 n_bytes=len(ids) - cut - rest)
    return first, second


def texts_of(name, cfg):
    """The HeldOut of a world, by its name in WORLDS.

    Of the near text, rates are chosen on its held-out part and reported on the test texts, none of
    which it is part of. A new text is test text too: the held-out part has two halves.
    """
    world = WORLDS[name]
    tokenizer = ByteTokenizer()
    corpora = {}
    if world.text == "near":
        corpora[CHOOSING] = load_corpus(cfg.train, tokenizer, "valid")
    else:
        held_out = load_corpus(("embedded",), tokenizer, "valid")
        corpora[CHOOSING], corpora[OWN] = halves(held_out)
    if world.others:
        for text, sources in named_sources(cfg.test).items():
            if world.text == "near" or text not in NOT_TRAINED_ON:
                split = held_out_split(sources, cfg.train)
                corpora[text] = load_corpus(sources, tokenizer, split)
    parts = (corpora, tokenizer, cfg.seqlen, cfg.windows, common.SEEDS[:cfg.seeds])
    if world.noise == "random bytes":
        trained_on = load_corpus(("embedded",), tokenizer, "train")
        return RandomByteTexts(*parts, alphabet=alphabet_of(trained_on))
    return HeldOut(*parts)


# ---- models --------------------------------------------------------------------------------------


def backbone_of(cell, cfg):
    """The frozen backbone of a cell."""
    source = WORLDS[cell.world].backbone
    if source != "small":
        paths = named_sources(cfg.backbones)
        if source not in paths:
            raise common.UserError(f"--backbones: {cell.world} needs {source}=PATH")
        source = paths[source][0]
    model = load_backbone(source)
    if cell.sliced:
        return sliced_backbone(model)
    return model


def settings_of(cell, cfg):
    """The train.Config of a cell."""
    return train.Config(kernel=cell.kernel, seqlen=cfg.seqlen, steps=cfg.steps,
                        **TRAINING, **cell.settings())


def make_denoiser(cell, settings, backbone):
    """A train.Denoiser whose trained weights, and no others, ask for a gradient."""
    adapter_kernel = cell.kernel
    if cell.kernel.startswith("finetune"):
        backbone.requires_grad_(True)
        adapter_kernel = cell.kernel.removeprefix("finetune").removeprefix("+") or "none"
    torch.manual_seed(settings.seed)  # the adapter's first weights, as in train.py
    adapter = make_adapter(adapter_kernel, backbone.config, **train.adapter_settings(settings))
    return train.Denoiser(backbone, adapter, settings.modulate)


def trained_size(denoiser):
    """Trained numbers, without those of the shared c_t, as the paper counts (Table 3)."""
    size = adapter_size(denoiser.adapter)
    for p in denoiser.backbone.parameters():
        if p.requires_grad:
            size += p.numel()
    return size


# ---- the steps -----------------------------------------------------------------------------------


def make_dataset(cell, cfg, settings):
    """The training samples of a cell."""
    tokenizer = ByteTokenizer()
    corpus = load_corpus(training_text(cell, cfg), tokenizer, "train")
    windows = Windows(corpus, cfg.seqlen, tokenizer.pad_id)
    dataset = train.make_dataset(settings, windows, tokenizer)
    if WORLDS[cell.world].noise == "random bytes":
        return RandomBytes(dataset, alphabet_of(corpus))
    return dataset


def train_denoiser(cell, cfg, settings, denoiser):
    """All steps of a cell, which nothing stops or looks at."""
    trained = [p for p in denoiser.parameters() if p.requires_grad]
    optimizer = train.make_optimizer(settings, trained)
    dataset = make_dataset(cell, cfg, settings)
    loader = train.make_loader(settings, dataset, 0, torch.device("cpu"))
    random = WORLDS[cell.world].noise == "random bytes"
    train.train_steps(settings, denoiser, optimizer, loader, ByteTokenizer(), 0,
                      stop_asked=lambda: False, after_step=lambda *numbers: None,
                      weigh_batch=weigh_all if random else train.weigh)
    denoiser.requires_grad_(False)
