"""The comparisons the paper lacks, on the small backbone: baselines, ablations, sweeps (A.4, A.5).

Run:      python -m experiments.study       (prints and draws what results/study/ holds, 5 seconds)
          python -m experiments.study --run rates --train TEXT ... --test NAME=TEXT ...
                                            (minutes for a cell)
Last line: "wrote runs/study/comparisons.png, runs/study/comparisons_ablation.png"

One cell is one training of an adapter with its scores, in one file of results/study/; a cell whose
file exists is never run again, so a run can be stopped and continued at any point. The groups of
cells stand in study_cells.py, the tables in study_tables.py, the figures in study_figures.py. A
cell holds the scores of its own adapter alone: the frozen backbone and the trivial guesses are
scored once, in cells of their own. All cells are scored on the same windows, t and masks, so rows
are compared by paired differences. The figures are published by copying them from runs/study/ to
figures/.

Symbols:  cell       a study_cells.Cell
          held_out   the texts that cells are scored on, see evaluate.HeldOut
          roughness  total variation over t, and the range, of each modulated field
Differs from the paper: it has none of this (A.4, A.5), except Table 2 by masking.
"""
import contextlib
import dataclasses
import statistics
import time
from typing import Literal

import torch
import torch.nn.functional as F

import common
import train
from checkpoint import load_adapter, load_backbone
from data import held_out_split, load_corpus, named_sources
from evaluate import HeldOut, score_adapter_rows, score_references
from experiments.study_cells import (CHOOSING, GROUPS, CellResult, finished, read_results,
                                     save_cell)
from experiments.study_figures import draw_ablations, draw_comparisons
from experiments.study_tables import finished_tables
from hydra_ssm import HydraBert
from mark_adapters import adapter_size
from text import make_tokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    """Run groups of cells, and show the tables and figures of what is finished."""
    run: tuple[Literal[tuple(GROUPS)], ...] = ()  # groups of cells; none: tables and figures only
    train: tuple[str, ...] = ()   # text to train on; 5 % of its documents are held out for choosing
    test: tuple[str, ...] = ()    # NAME=PATH
    steps: int = 350              # of a training
    seqlen: int = 128             # tokens of a window
    windows: int = 40             # of each test text, per evaluation seed
    seeds: int = 5                # evaluation seeds
    hours: float = 24.0           # start no cell after this time
    dirty: bool = False           # write results of uncommitted code


TRAINING = dict(global_batch=16, micro_batch=16, warmup=20, mlp_dim=64)  # of every cell


# ---- one cell ------------------------------------------------------------------------------------


def sliced_backbone(model):
    """For this comparison alone, and NOT a way to load weights: half of the model, misread.

    The paper's public code (github.com/ibitec7/mark) reads the released 24 heads of 64 as 12 of
    128: A_log, D, dt_bias and fc_D lose their second half, and in_proj its last rows, so that half
    of the forward Delta is taken for the backward one. Its head has SiLU where the weights were
    trained with gelu.
    """
    config = dataclasses.replace(model.config, headdim=2 * model.config.headdim, weights="")
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("A_log", "mixer.D", "dt_bias", "fc_D.weight")):
            tensor = tensor[:config.nheads]
        if name.endswith("in_proj.weight"):
            tensor = tensor[:config.d_in_proj]
        state[name] = tensor
    with torch.device("meta"):
        sliced = HydraBert(config)
    sliced.load_state_dict(state, assign=True)

    def head(hidden):
        h = sliced.head_norm(F.silu(sliced.head_dense(hidden)))
        return F.linear(h, sliced.word_embeddings.weight, sliced.decoder_bias)

    sliced.head = head
    return sliced.requires_grad_(False).eval()


def backbone_of(cell):
    """The frozen backbone of a cell."""
    model = load_backbone("small")
    if cell.sliced:
        return sliced_backbone(model)
    return model


@torch.no_grad()
def roughness(adapter, points=4097):
    """{field: (total variation over t in [0, 1], range)}, both averaged over the field's numbers.

    Empty where nothing depends on t.
    """
    t = torch.linspace(0, 1, points)
    found = {}
    for name, value in vars(adapter(t)).items():
        if isinstance(value, torch.Tensor):                               # y t outputs
            variation = value.diff(dim=1).abs().sum(1).mean().item()
            extent = (value.amax(1) - value.amin(1)).mean().item()
            found[name] = (variation, extent)
    return found


def train_cell(cell, cfg, model):
    """Train the adapter of a cell on `model`: (adapter, its spread over t). Its log is a file."""
    name = f"study_{cell.name}"
    settings = train.Config(kernel=cell.kernel, name=name, data=cfg.train, seqlen=cfg.seqlen,
                            steps=cfg.steps, eval_every=0, eval_windows=20, save_every=10**9,
                            overwrite=True, device="cpu", **TRAINING, **cell.settings())
    runs = common.ROOT / "runs"
    runs.mkdir(exist_ok=True)
    with open(runs / f"{name}.log", "w", encoding="utf-8") as log:
        with contextlib.redirect_stdout(log):
            done = train.main(settings, model)
    if "rows" not in done:
        raise common.UserError(f"{name} was stopped; its cell will be run again from the start")
    adapter, _ = load_adapter(runs / name, model.config)
    return adapter, done["spread"]


def run_cell(cell, cfg, held_out):
    """Train a cell and score it: its CellResult."""
    model = backbone_of(cell)
    if cell.kernel == "none":
        train_ids = load_corpus(cfg.train, held_out.tokenizer, "train").ids
        return CellResult(score_references(model, held_out, train_ids))
    began = time.time()
    adapter, spread = train_cell(cell, cfg, model)
    trained = time.time()
    scores = score_adapter_rows(model, adapter, cell.rows(), held_out)
    seconds = (trained - began, time.time() - trained)
    return CellResult(scores, adapter_size(adapter), spread, roughness(adapter), seconds)


# ---- many cells ----------------------------------------------------------------------------------


def texts_to_score(cfg):
    """The HeldOut of a Config: the test texts, and the held-out part of the training text."""
    tokenizer = make_tokenizer("bytes")
    corpora = {CHOOSING: load_corpus(cfg.train, tokenizer, "valid")}
    for name, sources in named_sources(cfg.test).items():
        corpora[name] = load_corpus(sources, tokenizer, held_out_split(sources, cfg.train))
    return HeldOut(corpora, tokenizer, cfg.seqlen, cfg.windows, common.SEEDS[:cfg.seeds])


def run_groups(cfg, env):
    """Run every cell of the groups of `cfg` that has no result yet."""
    results = read_results(cfg)
    held_out = texts_to_score(cfg)
    began = time.time()
    for group in cfg.run:
        left = [cell for cell in GROUPS[group](results) if cell not in results]
        common.log(f"{group}: {len(left)} cells to run, about {minutes(left, results):.0f} minutes")
        for cell in common.progress(left, desc=group):
            if time.time() - began > 3600 * cfg.hours:
                return
            cell_began = time.time()
            results[cell] = run_cell(cell, cfg, held_out)
            save_cell(cell, results[cell], cfg, {**env, "began": cell_began})
            common.log(f"{time.strftime('%H:%M')} {cell.name}")


def minutes(cells, results):
    """How long some cells will take, from those that are finished."""
    taken = [sum(result.seconds) for result in results.values() if result.seconds]
    each = statistics.median(taken) if taken else 150
    return len(cells) * each / 60


def check(cfg):
    """Refuse, before any work, what could only fail later."""
    if cfg.run and not (cfg.train and cfg.test):
        raise common.UserError(f"--run {' '.join(cfg.run)}: need --train and --test")
    if CHOOSING in named_sources(cfg.test):
        raise common.UserError(f"--test: no text may be called {CHOOSING}, which is the held-out "
                               "part of --train")
    if cfg.seeds > len(common.SEEDS):
        raise common.UserError(f"--seeds {cfg.seeds}: need at most {len(common.SEEDS)}")


def main(cfg):
    check(cfg)
    env = common.banner("study.py", cfg)
    if cfg.run:
        if env["dirty"] and not cfg.dirty:
            raise common.UserError("--run: these results would be of uncommitted code; commit "
                                   "first, or give --dirty")
        run_groups(cfg, env)

    results = read_results()
    tables = finished_tables(results)
    if not tables:
        common.log("no group of cells is complete: see --run")
    for title, table in tables.items():
        common.log(f"\n{title}\n\n{table}")

    folder = common.ROOT / "runs" / "study"
    drawn = []
    if finished(results, "frozen", "rates"):
        drawn.append(draw_comparisons(results, folder / "comparisons.png"))
        drawn.append(draw_ablations(results, folder / "comparisons_ablation.png"))
    names = [str(path.relative_to(common.ROOT)) for path in drawn if path]
    if names:
        common.log(f"\nwrote {', '.join(names)}")
    return tables


if __name__ == "__main__":
    common.run_cli(Config, main)
