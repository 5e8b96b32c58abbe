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

All of these are trained on the backbone's own kind of text, with masks, and all but `rates` use the
rate that was best there of three. The groups that ask what t is worth, each in worlds of its own:

    new      Shakespeare, which the backbone has not seen
    bytes    the same text, but bytes become random bytes instead of [MASK]
    near     novels and abstracts, as above
    pretraining  the text of `new` on two backbones that were pretrained otherwise

There every conditioner is trained at rates a factor of 2 apart until the best does not lie at an
edge, and then with more seeds. A twin that is blind (told t = 0.5 at all times) has the rate that
is best for the one that is told t, which favours t; lora+K and static+K have that of
lora+chebyshev and static+chebyshev, finetune+K that of finetune; `pretraining` has those of `new`.

Symbols:  results  {Cell: CellResult} of the cells that are finished
          world    a text, a kind of noise and a backbone
          kind     a Cell without a rate and a seed: a conditioner in a world
          scores   {text: {Row: {metric: [one value per evaluation seed]}}}, see evaluate.py
Differs from the paper: it has none of this (A.4, A.5), except Table 2 by masking.
"""
import dataclasses
import functools
import statistics
from typing import Literal, NamedTuple

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
OWN = "own"                     # the other half of it, where it is reported on too


class World(NamedTuple):
    """What cells are trained and scored on."""
    text: Literal["near", "new"] = "new"   # novels and abstracts, or Shakespeare
    noise: Literal["masks", "random bytes"] = "masks"
    backbone: str = "small"                # the shipped one, or a name of --backbones
    others: bool = True                    # scored on the test texts as well


WORLDS = {
    "near": World(text="near"),
    "new": World(),
    "bytes": World(noise="random bytes", others=False),
    "mask15": World(backbone="mask15", others=False),
    "uniform": World(backbone="uniform", others=False),
}


# ---- a cell --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training and its scores: what differs from the settings that all cells share."""
    kernel: str           # of train.py; "none" is the backbone as it is, and nothing is trained
    lr: float = 0.0       # the peak rate
    seed: int = 0         # of the training
    changed: tuple = ()   # ((name, value), ...), sorted: further settings of train.Config
    sliced: bool = False  # on published.sliced_backbone
    world: str = "near"   # of WORLDS

    def but(self, **settings):
        """The same cell with these settings of train.Config changed; None takes one away."""
        together = {**dict(self.changed), **settings}
        together = {name: value for name, value in together.items() if value is not None}
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

    @property
    def blind(self):
        """Whether its adapter is told t = 0.5 at all times."""
        return dict(self.changed).get("blind", False)

    def rows(self):
        """The Rows it is scored on."""
        if self.kernel == "none":
            return list(REFERENCES)
        knows_t = self.kernel not in ("static", "finetune") and not self.blind
        if self.kernel == "lora" and self.world != "near":  # where older files have its controls
            knows_t = False
        if not knows_t:
            return [self.row()]  # no t could be wrong
        modes = [self.modulate]
        if self == Cell(self.kernel, self.lr, ABLATED) and self.kernel in GEOMETRIES:
            modes += ABLATIONS  # Table 2 by masking
        return adapter_rows("", modes)

    @property
    def name(self):
        """Of its file and its run folder; nothing reads it back."""
        parts = [self.kernel]
        if self.world != "near":
            parts.insert(0, self.world)
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


# ---- the groups that ask what t is worth ---------------------------------------------------------


BLIND = {"blind": True}
START_RATES = {  # the middle of the first three rates: what trials found, in `new` and `bytes`
    "hypernet": 4e-3, "chebyshev": 4e-3, "dct": 4e-3, "static": 4e-3, "static+chebyshev": 4e-3,
    "inject": 2e-3, "adaln": 2e-3, "lora": 4e-3, "lora+chebyshev": 4e-3, "finetune": 1e-3,
}
NEAR_RATES = {"hypernet": 2e-3, "chebyshev": 2e-3, "dct": 2e-3, "static": 1e-3,
              "static+chebyshev": 1e-3, "inject": 1e-3, "adaln": 1e-3, "lora": 2e-3,
              "lora+chebyshev": 2e-3, "finetune": 5e-4}


def kind_of(world, kernel, **settings):
    """A conditioner in a world; settings: as in its cells."""
    return Cell(kernel, world=world).but(**settings)


def kinds_of(world):
    """The conditioners of a world, what decides first."""
    kind = functools.partial(kind_of, world)
    kinds = [kind("chebyshev"), kind("chebyshev", **BLIND), kind("lora"), kind("finetune")]
    if WORLDS[world].backbone != "small":
        return kinds
    kinds += [kind("static"), kind("lora+chebyshev"), kind("lora+chebyshev", **BLIND),
              kind("adaln", **DEFAULT_START)]
    if world == "bytes":
        kinds += [kind("adaln", **DEFAULT_START, **BLIND), kind("finetune+chebyshev"),
                  kind("finetune+chebyshev", **BLIND)]
    else:
        kinds += [kind("static+chebyshev"), kind("inject", **DEFAULT_START)]
    for kernel in ("hypernet", "dct"):
        kinds += [kind(kernel), kind(kernel, **BLIND)]
        kinds += [kind(f"lora+{kernel}"), kind(f"lora+{kernel}", **BLIND)]
        if world != "bytes":
            kinds.append(kind(f"static+{kernel}"))
    return kinds


def tuned_as(kind):
    """The kind whose best rate a kind is trained at: often itself."""
    base, plus, _ = kind.kernel.partition("+")
    kernel = kind.kernel
    if base == "finetune":
        kernel = "finetune"
    elif plus:
        kernel = f"{base}+chebyshev"
    world = kind.world if WORLDS[kind.world].backbone == "small" else "new"
    return dataclasses.replace(kind, kernel=kernel, world=world).but(blind=None)


def at(kind, lr, seed):
    """The Cell of a kind."""
    return dataclasses.replace(kind, lr=lr, seed=seed)


def rates_tried(kind, results):
    """({rate: ELBO on the text for choosing, None where it is not known yet}, whether the best of
    them is settled: no edge, all known). The next rates to run are among them.
    """
    starts = NEAR_RATES if kind.world == "near" else START_RATES
    middle = starts[kind.kernel]
    rates = [middle / 2, middle, 2 * middle]
    while True:
        found = {}
        for lr in rates:
            cell = at(kind, lr, FIRST)
            found[lr] = None
            if cell in results:
                found[lr] = statistics.fmean(results[cell].scores[CHOOSING][cell.row()]["elbo"])
        if None in found.values():
            return found, False
        best = min(found, key=found.get)
        if best not in (rates[0], rates[-1]):
            return found, True
        rates = [best / 2, *rates] if best == rates[0] else [*rates, 2 * best]


def settled_rate(kind, results):
    """The best rate of a kind; None where it is not settled."""
    found, settled = rates_tried(tuned_as(kind), results)
    return min(found, key=found.get) if settled else None


def worth_cells(world, results, trainings=len(TRAINING_SEEDS)):
    """The Cells of a world that are known by now, in the order in which they run. As rates are
    settled there are more.
    """
    cells = [Cell("none", world=world)]
    later = []
    for kind in kinds_of(world):
        tuned = tuned_as(kind)
        if tuned == kind:
            cells += [at(kind, lr, FIRST) for lr in rates_tried(kind, results)[0]]
        rate = settled_rate(kind, results)
        if rate is not None:
            later += [at(kind, rate, seed) for seed in TRAINING_SEEDS[:trainings]]
    return cells + sorted(later, key=lambda cell: cell.seed)


def pretraining_cells(results):
    cells = worth_cells("mask15", results, 3) + worth_cells("uniform", results, 3)
    return sorted(cells, key=lambda cell: cell.seed)


def seeds_of(kind, results):
    """The finished Cells of a kind at its best rate, one per training seed."""
    rate = settled_rate(kind, results)
    if rate is None:
        return []
    cells = [at(kind, rate, seed) for seed in TRAINING_SEEDS]
    return [cell for cell in cells if cell in results]


GROUPS = {  # {name: results -> its Cells, in the order in which they run}
    "frozen": frozen_cells,
    "rates": rate_cells,
    "seeds": seed_cells,
    "ablation": ablation_cells,
    "init": start_cells,
    "hole": hole_cells,
    "sliced": sliced_cells,
    "sweep": sweep_cells,
    "new": functools.partial(worth_cells, "new"),
    "bytes": functools.partial(worth_cells, "bytes"),
    "near": functools.partial(worth_cells, "near"),
    "pretraining": pretraining_cells,
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
               "world": cell.world, "size": result.size, "spread": result.spread,
               "roughness": result.roughness,
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
    world = metrics.get("world", "near")
    if metrics["kernel"] == "none":
        return Cell("none", sliced=metrics["sliced"], world=world)
    settings = {}
    for name, value in metrics["settings"].items():
        settings[name] = tuple(value) if isinstance(value, list) else value
    cell = Cell(metrics["kernel"], settings.pop("lr"), settings.pop("seed"),
                sliced=metrics["sliced"], world=world)
    return cell.but(**settings)


def read_result(cell, metrics):
    """The CellResult of a file."""
    scores = {}
    for text, labelled in metrics["scores"].items():
        scores[text] = {}
        for row in cell.rows():
            label = row.label(cell.modulate)
            if label in labelled:  # controls are scored on the trained text alone
                scores[text][row] = labelled[label]
    return CellResult(scores, metrics.get("size", 0), metrics.get("spread"),
                      metrics.get("roughness"), tuple(metrics.get("seconds", ())))
