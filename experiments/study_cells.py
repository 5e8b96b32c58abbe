"""The cells of the study: one training each, in groups, and the files of their results (A.4, A.5).

Run:      not a script; study.py runs the cells, study_tables.py shows what they found.

A cell is a record. Its file results/study/<name>.json says which cell it is; the name of the file
is for people. The groups:

    frozen   the backbones alone, and the uniform and unigram guesses
    rates    each conditioner at three learning rates, seed 42; the best is chosen on held-out
             training text, all that is reported is scored on the test texts
    seeds    each conditioner at its best rate, four more training seeds; injection and AdaLN from
             PyTorch's default start too
    ablation Table 2 by retraining, seed 142; a geometry's cell of that seed in `seeds` holds
             Table 2 as the paper has it, by masking the trained adapter
    init     PyTorch's default start, and the geometries without the norm in their MLP
    hole     0.4 < t < 0.6 left out of training: does a smooth basis fill the gap?
    sliced   the conditioners on the backbone as the paper's public code loads it
    sweep    rank, degree, frequencies, CART p and bounds, one at a time

All but `rates` use the rate that was best on the intact backbone.

Symbols:  results  {Cell: CellResult} of the cells that are finished
          scores   {text: {Row: {metric: [one value per evaluation seed]}}}, see evaluate.py
Differs from the paper: it has none of this (A.4, A.5), except Table 2 by masking.
"""
import dataclasses
import statistics

import common
from evaluate import FROZEN, REFERENCES, Row, adapter_rows, by_label
from hydra_ssm import MODES
from mark_adapters import GEOMETRIES

CONDITIONERS = (*GEOMETRIES, "inject", "adaln", "lora")
RATES = (1e-3, 2e-3, 4e-3)
TRAINING_SEEDS = common.SEEDS[:5]
FIRST = TRAINING_SEEDS[0]       # the seed of every cell that is trained once
ABLATED = TRAINING_SEEDS[1]     # the seed of Table 2
ABLATIONS = MODES[1:-1]         # the columns of Table 2 between full and none
RESTARTED = ("inject", "adaln")  # they gain more from PyTorch's start
DEFAULT_START = {"init": "default"}
HOLE = (0.4, 0.6)               # of t
SWEEP = (                       # one setting at a time
    ("dct", {"rank": 1}),
    ("dct", {"rank": 4}),
    ("chebyshev", {"degree": 3}),
    ("chebyshev", {"degree": 8}),
    ("dct", {"n_freqs": 4}),
    ("dct", {"n_freqs": 16}),
    ("dct", {"cart_p": 0.2}),
    ("dct", {"cart_p": 0.8}),
    ("hypernet", {"bounded_shifts": False}),
)
CHOOSING = "valid"              # the text, held out of the training text, that rates are chosen on


# ---- a cell --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training and its scores: what differs from the settings that all cells share."""
    kernel: str           # of train.py; "none" is the backbone as it is, and nothing is trained
    lr: float = 0.0       # the peak rate
    seed: int = 0         # of the training
    changed: tuple = ()   # ((name, value), ...), sorted: further settings of train.Config
    sliced: bool = False  # on study.sliced_backbone

    def but(self, **settings):
        """The same cell with these settings of train.Config changed."""
        together = {**dict(self.changed), **settings}
        return dataclasses.replace(self, changed=tuple(sorted(together.items())))

    def unchanged(self):
        """The cell that this one is compared with: nothing changed, on the intact backbone."""
        return dataclasses.replace(self, changed=(), sliced=False)

    def settings(self):
        """What train.Config is told beside the kernel."""
        if self.kernel == "none":
            return {}
        return {"lr": self.lr, "seed": self.seed, **dict(self.changed)}

    @property
    def modulate(self):
        """What its adapter reaches in training and in its own rows: a mode of Table 2."""
        return dict(self.changed).get("modulate", "full")

    def row(self, told="own t", modulate=None):
        """One of its Rows in scores; without arguments the adapter as it was trained."""
        if self.kernel == "none":
            return FROZEN
        return Row("", told, modulate or self.modulate)

    def rows(self):
        """The Rows it is scored on."""
        if self.kernel == "none":
            return list(REFERENCES)
        modes = [self.modulate]
        if self == Cell(self.kernel, self.lr, ABLATED) and self.kernel in GEOMETRIES:
            modes += ABLATIONS  # Table 2 by masking
        return adapter_rows("", modes)

    @property
    def name(self):
        """Of its file and its run folder; nothing reads it back."""
        parts = [self.kernel]
        if self.sliced:
            parts.append("sliced")
        for setting, value in sorted(self.settings().items()):
            values = value if isinstance(value, tuple) else (value,)
            parts.append("-".join([setting, *map(str, values)]))
        return "_".join(parts)


INTACT = Cell("none")
SLICED = Cell("none", sliced=True)


@dataclasses.dataclass(frozen=True)
class CellResult:
    """What a cell has found."""
    scores: dict                   # {text: {Row: {metric: [one value per evaluation seed]}}}
    size: int = 0                  # parameters of the adapter
    spread: dict | None = None     # of h and of the modulation over t, before and after training
    roughness: dict | None = None  # {modulated field: (its total variation over t, its range)}
    seconds: tuple = ()            # of training, and of scoring

    def tested(self):
        """The scores on the test texts: all but the one that rates are chosen on."""
        return {text: rows for text, rows in self.scores.items() if text != CHOOSING}


# ---- the groups ----------------------------------------------------------------------------------


def best_rate(kernel, results):
    """The rate of `rates` whose adapter has the lowest ELBO on held-out training text."""
    elbo = {}
    for lr in RATES:
        cell = Cell(kernel, lr, FIRST)
        if cell not in results:
            raise common.UserError(f"the best learning rate of {kernel} is not known yet: "
                                   "--run rates first")
        elbo[lr] = statistics.fmean(results[cell].scores[CHOOSING][cell.row()]["elbo"])
    return min(RATES, key=elbo.get)


def best_cell(kernel, results, seed=FIRST):
    """The Cell of a conditioner at its best rate."""
    return Cell(kernel, best_rate(kernel, results), seed)


def frozen_cells(results):
    return [INTACT, SLICED]


def rate_cells(results):
    return [Cell(kernel, lr, FIRST) for lr in RATES for kernel in CONDITIONERS]


def seed_cells(results):
    cells = []
    for seed in TRAINING_SEEDS[1:]:
        cells += [best_cell(kernel, results, seed) for kernel in CONDITIONERS]
    for seed in TRAINING_SEEDS[1:]:
        cells += [best_cell(kernel, results, seed).but(**DEFAULT_START) for kernel in RESTARTED]
    return cells


def ablation_cells(results):
    cells = []
    for mode in ABLATIONS:
        cells += [best_cell(kernel, results, ABLATED).but(modulate=mode) for kernel in GEOMETRIES]
    return cells


def start_cells(results):
    cells = []
    for kernel in GEOMETRIES:
        cells.append(best_cell(kernel, results).but(**DEFAULT_START, mlp_norm=False))
    for kernel in RESTARTED:
        cells.append(best_cell(kernel, results).but(**DEFAULT_START))
    return cells


def hole_cells(results):
    return [without_middle(best_cell(kernel, results)) for kernel in CONDITIONERS]


def without_middle(cell):
    """The Cell of the same settings that never trains at the t of HOLE."""
    return cell.but(t_hole=HOLE)


def sliced_cells(results):
    cells = [best_cell(kernel, results) for kernel in CONDITIONERS]
    return [dataclasses.replace(cell, sliced=True) for cell in cells]


def sweep_cells(results):
    return [best_cell(kernel, results).but(**setting) for kernel, setting in SWEEP]


GROUPS = {  # {name: results -> its Cells, in the order in which they run}
    "frozen": frozen_cells,
    "rates": rate_cells,
    "seeds": seed_cells,
    "ablation": ablation_cells,
    "init": start_cells,
    "hole": hole_cells,
    "sliced": sliced_cells,
    "sweep": sweep_cells,
}


def finished(results, *groups):
    """Whether every cell of the groups has its result."""
    for group in groups:
        try:
            cells = GROUPS[group](results)
        except common.UserError:  # the best rates are not known yet
            return False
        if any(cell not in results for cell in cells):
            return False
    return True


def trained_seeds(results, kernel, **settings):
    """The finished Cells of a conditioner at its best rate, over training seeds."""
    cells = [best_cell(kernel, results, seed).but(**settings) for seed in TRAINING_SEEDS]
    return [cell for cell in cells if cell in results]


# ---- their files ---------------------------------------------------------------------------------


SHARED = ("train", "test", "steps", "seqlen", "windows", "seeds")  # settings of all cells
USED = ("cart", "elbo", "by_t")  # metrics that a table or a figure shows of a row


def results_folder():
    return common.ROOT / "results" / "study"


def save_cell(cell, result, cfg, env):
    """Write a cell's file. env: what common.banner returned, began: when the cell did."""
    used = {text: used_metrics(cell, rows) for text, rows in result.scores.items()}
    metrics = {"kernel": cell.kernel, "settings": cell.settings(), "sliced": cell.sliced,
               "size": result.size, "spread": result.spread, "roughness": result.roughness,
               "scores": by_label(used, cell.modulate), "seconds": result.seconds}
    common.save_result(results_folder() / f"{cell.name}.json", metrics, cfg, env)


def used_metrics(cell, rows):
    """{Row: {metric: values}} without what nothing shows: of a control or a masked adapter all but
    the ELBO.
    """
    used = {}
    for row, values in rows.items():
        wanted = USED
        if cell.kernel != "none" and row != cell.row():
            wanted = ("elbo",)
        used[row] = {metric: values[metric] for metric in wanted}
    return used


def read_results(cfg=None):
    """{Cell: CellResult} of every finished cell. UserError where a file's shared settings are not
    those of `cfg`.
    """
    results = {}
    for path in sorted(results_folder().glob("*.json")):
        saved = common.read_json(path, "metrics", "config")
        if cfg is not None:
            check_shared(path, saved["config"], cfg)
        cell = read_cell(path, saved["metrics"])
        results[cell] = read_result(cell, saved["metrics"])
    return results


def check_shared(path, config, cfg):
    """Raise UserError unless a file's shared settings are those of `cfg`."""
    for name in SHARED:
        if config[name] != common.plain(getattr(cfg, name)):
            raise common.UserError(f"{path} has other --{', --'.join(SHARED)}: repeat them (they "
                                   "are in it), or set MARK_ROOT to a folder for another study")


def read_cell(path, metrics):
    """The Cell of a file."""
    if "kernel" not in metrics:  # older files of the two backbones hold their scores alone
        by_name = {cell.name: cell for cell in (INTACT, SLICED)}
        return by_name[path.stem]
    if metrics["kernel"] == "none":
        return Cell("none", sliced=metrics["sliced"])
    settings = {}
    for name, value in metrics["settings"].items():
        settings[name] = tuple(value) if isinstance(value, list) else value
    cell = Cell(metrics["kernel"], settings.pop("lr"), settings.pop("seed"),
                sliced=metrics["sliced"])
    return cell.but(**settings)


def read_result(cell, metrics):
    """The CellResult of a file."""
    scores = {}
    for text, labelled in metrics["scores"].items():
        scores[text] = {row: labelled[row.label(cell.modulate)] for row in cell.rows()}
    return CellResult(scores, metrics.get("size", 0), metrics.get("spread"),
                      metrics.get("roughness"), tuple(metrics.get("seconds", ())))
