"""The comparisons the paper lacks, on the small backbone: baselines, ablations, sweeps (A.4, A.5).

Run:      python -m experiments.study       (prints and draws what results/study/ holds, 5 seconds)
          python -m experiments.study --run rates --train TEXT ... --test NAME=TEXT ...
                                            (minutes for a cell)
Last line: "wrote runs/study/comparisons.png, ..._ablation.png, runs/study/worth.png"

One cell is one training of an adapter with its scores, in one file of results/study/; a cell whose
file exists is never run again, so a run can be stopped and continued at any point. The groups of
cells stand in study_cells.py, how they are trained in study_train.py, the tables in study_tables.py
and, of what t is worth, in study_worth.py, the figures in study_figures.py. A cell holds the scores
of its own adapter alone: the frozen backbone and the trivial guesses are scored once, in cells of
their own. All cells are scored on the same windows, t and masks, so rows are compared by paired
differences. The figures are published by copying them from runs/study/ to figures/.

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

import common
from checkpoint import lock, unlock
from data import load_corpus, named_sources
from evaluate import score_adapter_rows, score_references
from experiments.study_cells import (CHOOSING, FIRST, GROUPS, OWN, TRAINING_SEEDS, CellResult,
                                     finished, read_results, save_cell)
from experiments.study_figures import draw_ablations, draw_comparisons, draw_worth
from experiments.study_tables import finished_tables
from experiments.study_train import (backbone_of, make_denoiser, settings_of, texts_of,
                                     train_denoiser, trained_size, training_text)
from experiments.study_worth import worth_tables
from mark_adapters import modulation_spread


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
    backbones: tuple[str, ...] = ()  # NAME=PATH of mask15 and uniform, for the group pretraining
    kernels: tuple[str, ...] = ()  # run cells of these alone
    trainings: int = 5            # training seeds of a cell's kind, in the groups about t
    hours: float = 24.0           # start no cell after this time
    dirty: bool = False           # write results of uncommitted code


# ---- one cell ------------------------------------------------------------------------------------


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


def run_cell(cell, cfg, held_out):
    """Train a cell and score it: its CellResult."""
    backbone = backbone_of(cell, cfg)
    if cell.kernel == "none":
        train_ids = load_corpus(training_text(cell, cfg), held_out.tokenizer, "train").ids
        return CellResult(score_references(backbone, held_out, train_ids))
    settings = settings_of(cell, cfg)
    denoiser = make_denoiser(cell, settings, backbone)
    adapter = denoiser.adapter
    size = trained_size(denoiser)
    spread = {"start": modulation_spread(adapter)}
    began = time.time()
    train_denoiser(cell, cfg, settings, denoiser)
    trained = time.time()
    spread["end"] = modulation_spread(adapter)
    scores = score_cell(cell, denoiser.backbone, adapter, held_out)
    seconds = (trained - began, time.time() - trained)
    return CellResult(scores, size, spread, roughness(adapter), seconds)


def score_cell(cell, backbone, adapter, held_out):
    """The scores of a cell. In the worlds of a new text its controls are scored on that alone."""
    if cell.world == "near":
        return score_adapter_rows(backbone, adapter, cell.rows(), held_out)
    scores = score_adapter_rows(backbone, adapter, [cell.row()], held_out)
    controls = [row for row in cell.rows() if row != cell.row()]
    if controls and cell.seed == FIRST:
        own = dataclasses.replace(held_out, corpora={OWN: held_out.corpora[OWN]})
        scores[OWN] |= score_adapter_rows(backbone, adapter, controls, own)[OWN]
    return scores


# ---- many cells ----------------------------------------------------------------------------------


def cells_left(group, results, cfg):
    """The cells of a group that have no result, as far as they are known by now."""
    left = []
    for cell in GROUPS[group](results):
        wanted = not cfg.kernels or cell.kernel in (*cfg.kernels, "none")
        if wanted and cell not in results and cell.seed <= TRAINING_SEEDS[cfg.trainings - 1]:
            left.append(cell)
    return left


@contextlib.contextmanager
def claimed(cell):
    """Whether this process may run a cell: another that is at it keeps it until its end."""
    folder = common.ROOT / "runs" / "study" / cell.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock(folder)
    except common.UserError:
        yield False
        return
    try:
        yield True
    finally:
        unlock(folder)


def run_groups(cfg, env):
    """Run every cell of the groups of `cfg` that has no result yet; several processes share them.
    """
    texts = {}  # {world: its HeldOut}
    began = time.time()
    for group in cfg.run:
        busy = set()  # cells of other processes
        while time.time() - began < 3600 * cfg.hours:
            results = read_results(cfg)
            left = [cell for cell in cells_left(group, results, cfg) if cell not in busy]
            if not left:
                break
            common.log(f"{time.strftime('%H:%M')} {group}: {left[0].name}; {len(left)} cells are "
                       f"known to be left, {minutes(left, results):.0f} minutes")
            with claimed(left[0]) as mine:
                if not mine:
                    busy.add(left[0])
                elif left[0] not in read_results(cfg):  # or another has finished it just now
                    run_and_save(left[0], cfg, env, texts)


def run_and_save(cell, cfg, env, texts):
    """One cell, from its training to its file."""
    if cell.world not in texts:
        texts[cell.world] = texts_of(cell.world, cfg)
    began = time.time()
    result = run_cell(cell, cfg, texts[cell.world])
    save_cell(cell, result, cfg, {**env, "began": began})


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
    tables = finished_tables(results) | worth_tables(results)
    if not tables:
        common.log("no group of cells is complete: see --run")
    for title, table in tables.items():
        common.log(f"\n{title}\n\n{table}")

    folder = common.ROOT / "runs" / "study"
    drawn = []
    if finished(results, "frozen", "rates"):
        drawn.append(draw_comparisons(results, folder / "comparisons.png"))
        drawn.append(draw_ablations(results, folder / "comparisons_ablation.png"))
    drawn.append(draw_worth(results, folder / "worth.png"))
    names = [str(path.relative_to(common.ROOT)) for path in drawn if path]
    if names:
        common.log(f"\nwrote {', '.join(names)}")
    return tables


if __name__ == "__main__":
    common.run_cli(Config, main)
