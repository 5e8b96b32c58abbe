"""The comparisons the paper lacks, on the small backbone: baselines, ablations, sweeps (A.4, A.5).

Run:      python study.py                     (prints the tables of results/study/, 5 seconds)
          python study.py --run rates --train TEXT ... --test NAME=TEXT ...   (minutes for a cell)
Last line: "wrote runs/study/comparisons.png"

One cell is one training of an adapter with its scores, in one file of results/study/; a cell whose
file exists is never run again, so a run can be stopped and continued at any point. Its groups:

    frozen   the backbones alone, and the uniform and unigram guesses
    rates    each conditioner at three learning rates, seed 42; the best is chosen on held-out
             training text, all that is reported is scored on the test sets
    seeds    each conditioner at its best rate, four more training seeds; injection and AdaLN from
             PyTorch's default start too
    ablation Table 2 by retraining, seed 142; a geometry's cell of that seed in `seeds` holds
             Table 2 as the paper has it, by masking the trained adapter
    init     PyTorch's default start, and the geometries without the norm in their MLP
    hole     0.4 < t < 0.6 left out of training: does a smooth basis fill the gap?
    sliced   the conditioners on the backbone as the paper's public code loads it
    sweep    rank, degree, frequencies, CART p and bounds, one at a time

All but `rates` use the rate that was best on the intact backbone. Intervals are Student's 95 %, two
of them joined in quadrature where test windows and training seeds both count. All cells are
scored on the same windows, t and masks, so rows are compared by paired differences.

Symbols:  gain       ELBO of frozen minus ELBO of an adapter, nats per token, same windows and masks
          cost       ELBO with a wrong t minus ELBO with the right one
          roughness  total variation over t over the range, both averaged within each modulated
                     field and summed over fields; 1 where all are monotone
Differs from the paper: it has none of this (A.4, A.5), except Table 2 by masking.
"""
import contextlib
import dataclasses
import itertools
import json
import math
import re
import statistics
import time

import torch
import torch.nn.functional as F

import common
import train
from checkpoint import load_adapter, load_backbone
from data import held_out_split, load_corpus, named_sources
from evaluate import BINS, CONTROLS, columns, losses_by_t, mean_by_t, mean_error, score, show
from hydra_ssm import MODES, HydraBert
from mark_adapters import GEOMETRIES, adapter_size
from text import make_tokenizer

CONDITIONERS = (*GEOMETRIES, "inject", "adaln", "lora")
RATES = (1e-3, 2e-3, 4e-3)
SWEEP = {"rank": (("dct", {"rank": 1}), ("dct", {"rank": 4})),
         "degree": (("chebyshev", {"degree": 3}), ("chebyshev", {"degree": 8})),
         "frequencies": (("dct", {"n_freqs": 4}), ("dct", {"n_freqs": 16})),
         "CART p": (("dct", {"cart_p": 0.2}), ("dct", {"cart_p": 0.8})),
         "B, C shifts": (("hypernet", {"bounded_shifts": False}),)}
RESTARTED, DEFAULT = ("inject", "adaln"), {"init": "default"}  # they gain more from that start
ABLATED = common.SEEDS[1]  # the training seed of Table 2
GROUPS = ("frozen", "rates", "seeds", "ablation", "init", "hole", "sliced", "sweep")


# ---- the cells -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training: what differs from the study's common settings."""
    kernel: str
    settings: dict
    sliced: bool = False

    @property
    def name(self):
        parts = [self.kernel, "sliced" * self.sliced]
        parts += [f"{k}-{v}" for k, v in sorted(self.settings.items())]
        return re.sub(r"[^\w.-]+", "", "_".join(filter(None, parts)).replace(", ", "-"))


def best_rate(kernel, results):
    """The rate of `rates` whose adapter has the lowest ELBO on held-out training text."""
    found = {lr: results.get(Cell(kernel, {"lr": lr, "seed": 42}).name) for lr in RATES}
    if None in found.values():
        raise common.UserError(f"the best learning rate of {kernel} is not known yet: "
                               "--run rates first")
    return min(RATES, key=lambda lr: statistics.fmean(found[lr]["scores"]["valid"][""]["elbo"]))


def cells(group, results):
    """The Cells of a group, in the order in which they run."""
    def best(kernel, sliced=False, **settings):
        return Cell(kernel, {"lr": best_rate(kernel, results), "seed": 42, **settings}, sliced)

    if group == "frozen":
        return [Cell("none", {}), Cell("none", {}, sliced=True)]
    if group == "rates":
        return [Cell(k, {"lr": lr, "seed": 42}) for lr in RATES for k in CONDITIONERS]
    if group == "seeds":
        return ([best(k, seed=seed) for seed in common.SEEDS[1:5] for k in CONDITIONERS]
                + [best(k, seed=seed, **DEFAULT) for seed in common.SEEDS[1:5] for k in RESTARTED])
    if group == "ablation":
        return [best(k, modulate=mode, seed=ABLATED) for mode in MODES[1:-1] for k in GEOMETRIES]
    if group == "init":
        return ([best(k, init="default", mlp_norm=False) for k in GEOMETRIES]
                + [best(k, **DEFAULT) for k in RESTARTED])
    if group == "hole":
        return [without_middle(best(k)) for k in CONDITIONERS]
    if group == "sliced":
        return [best(k, sliced=True) for k in CONDITIONERS]
    return [best(k, **settings) for k, settings in itertools.chain(*SWEEP.values())]


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
        per_head = name.endswith(("A_log", "mixer.D", "dt_bias", "fc_D.weight"))
        rows = config.nheads if per_head else None
        state[name] = tensor[:config.d_in_proj if name.endswith("in_proj.weight") else rows]
    with torch.device("meta"):
        sliced = HydraBert(config)
    sliced.load_state_dict(state, assign=True)

    def head(hidden):
        h = sliced.head_norm(F.silu(sliced.head_dense(hidden)))
        return F.linear(h, sliced.word_embeddings.weight, sliced.decoder_bias)

    sliced.head = head
    return sliced.requires_grad_(False).eval()


@torch.no_grad()
def roughness(adapter, points=4097):
    """Total variation over t in [0, 1] of each modulated number, and its range: {field: (mean of
    the one, mean of the other)}. Empty where nothing depends on t.
    """
    t = torch.linspace(0, 1, points)
    found = {}
    for name, value in vars(adapter(t)).items():
        if isinstance(value, torch.Tensor):                               # y t outputs
            variation = value.diff(dim=1).abs().sum(1).mean().item()
            found[name] = variation, (value.amax(1) - value.amin(1)).mean().item()
    return found


def run_cell(cell, cfg, tokenizer, corpora):
    """Train, score and return what the cell's file holds."""
    model = load_backbone("small")
    model = sliced_backbone(model) if cell.sliced else model
    seeds = common.SEEDS[:cfg.seeds]
    if cell.kernel == "none":
        ids = load_corpus(cfg.train, tokenizer, "train").ids
        return {"scores": score(model, {}, corpora, tokenizer, cfg.seqlen, cfg.windows, seeds, ids)}
    name = f"study_{cell.name}"
    settings = train.Config(kernel=cell.kernel, name=name, data=cfg.train, seqlen=cfg.seqlen,
                            steps=cfg.steps, eval_windows=20, save_every=10**9, overwrite=True,
                            device="cpu", **cell.settings)
    log = common.ROOT / "runs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    began = time.time()
    with open(log, "w") as file, contextlib.redirect_stdout(file):
        done = train.main(settings, model)
    if "rows" not in done:
        raise common.UserError(f"{name} was stopped; its cell will be run again from the start")
    adapter, _ = load_adapter(common.ROOT / "runs" / name, model.config)
    modes = (cell.settings.get("modulate", "full"),)
    if cell in [Cell(k, {"lr": cell.settings["lr"], "seed": ABLATED}) for k in GEOMETRIES]:
        modes = MODES[:-1]  # Table 2 by masking
    trained = time.time() - began
    scores = score(model, {"": adapter}, corpora, tokenizer, cfg.seqlen, cfg.windows, seeds,
                   modes=modes)
    return {"kernel": cell.kernel, "settings": cell.settings, "sliced": cell.sliced,
            "size": adapter_size(adapter), "spread": done["spread"], "scores": scores,
            "roughness": roughness(adapter), "seconds": [trained, time.time() - began - trained]}


SHARED = ("train", "test", "steps", "seqlen", "windows", "seeds")  # settings of all cells


def read_results(cfg=None):
    """{cell name: metrics} of every finished cell. UserError where its settings are not `cfg`'s."""
    found = {}
    for path in (common.ROOT / "results" / "study").glob("*.json"):
        cell = json.loads(path.read_text())
        if cfg and any(cell["config"][k] != common.plain(getattr(cfg, k)) for k in SHARED):
            raise common.UserError(f"{path} has other --{', --'.join(SHARED)}: repeat them (they "
                                   "are in it), or set MARK_ROOT to a folder for another study")
        found[path.stem] = cell["metrics"]
    return found


# ---- the tables ----------------------------------------------------------------------------------


def tested(results, cell):
    """{test set: {row: {metric: values}}} of a cell: its scores without the text for choosing."""
    scores = results[cell.name]["scores"]
    return {name: rows for name, rows in scores.items() if name != "valid"}


def against(results, cell, row="", minus=None):
    """How much lower the ELBO is in a row of `cell` than in `minus` = (cell, row), by default the
    frozen backbone: of each test set, then of their mean, one value per evaluation seed.
    """
    other, other_row = minus or (Cell("none", {}, cell.sliced), "frozen")
    ours, theirs = tested(results, cell), tested(results, other)
    paired = {name: {"ours": ours[name][row], "theirs": theirs[name][other_row]} for name in ours}
    return columns(paired, "elbo", "theirs", "ours")


def over_seeds(results, group, ending=None):
    """`against` of every Cell of a group, one per training seed: of each test set, then of their
    mean, a list over training seeds of lists over evaluation seeds. With the `ending` of one of
    CONTROLS: the cost of that control.
    """
    return list(zip(*(against(results, cell, "", ending and (cell, ending)) for cell in group)))


def training_error(grid):
    """(mean, half of Student's 95 % interval) over training seeds, for one choice of test windows:
    what two rows that share them are compared by.
    """
    return mean_error([statistics.fmean(values) for values in grid], student=True)


def both_errors(grid):
    """The mean of a column of `over_seeds`, ± both errors in quadrature (`training_error`)."""
    (mean, training), (_, windows) = training_error(grid), mean_error(
        [statistics.fmean(values) for values in zip(*grid)], student=True)
    if math.isnan(training):
        return f"{mean:+.4f} ± {windows:.4f} (n/a)"
    return f"{mean:+.4f} ± {math.hypot(training, windows):.4f} ({training:.4f})"


def trained_seeds(results, kernel, **settings):
    """The finished Cells of a conditioner at its best rate, over training seeds."""
    rate = best_rate(kernel, results)
    found = (Cell(kernel, {"lr": rate, "seed": seed, **settings}) for seed in common.SEEDS[:5])
    return [cell for cell in found if cell.name in results]


def finished(results, *groups):
    """Whether every cell of the groups has its file."""
    try:
        return all(cell.name in results for group in groups for cell in cells(group, results))
    except common.UserError:
        return False


def conditioning_tables(results):
    """Gains over the frozen backbone by test set, and what each conditioner makes of t."""
    sets = tested(results, Cell("none", {}))
    gains, uses = [], []
    for kernel, settings in [*((k, {}) for k in CONDITIONERS), *((k, DEFAULT) for k in RESTARTED)]:
        group, rate = trained_seeds(results, kernel, **settings), best_rate(kernel, results)
        if not group:
            continue
        name = kernel + ", default start" * bool(settings)
        edge = " (the edge)" if rate in (RATES[0], RATES[-1]) else ""
        gains.append([name, f"{results[group[0].name]['size']:,}", f"{rate:g}{edge}", len(group),
                      *map(both_errors, over_seeds(results, group))])
        costs = [both_errors(over_seeds(results, group, ending)[-1]) for ending in CONTROLS[1:]]
        rough = [variation_over_range(results, cell) for cell in group]
        uses.append([name, *costs,
                     show(rough, digits=1, student=True) if any(rough) else "reads no t",
                     show(hole_cost(results, group[0]), "+", student=True)
                     if finished(results, "hole") and not settings else ""])
    head = ["conditioner", "parameters", "best rate", "training seeds", *sets, "Avg."]
    return {"gain over frozen, ELBO in nats per token ± test windows and training seeds (training "
            "seeds alone, to compare rows by)": common.markdown(head, *gains),
            "what t is worth, nats per token, and how rough the modulation is": common.markdown(
                ["conditioner", "cost of a shuffled t", "cost of a constant t",
                 "total variation / range (falls with the rate)",
                 "cost at 0.4 < t < 0.6 of never training there (one seed)"], *uses)}


def variation_over_range(results, cell):
    """The roughness of one Cell; 0 if it reads no t."""
    found = results[cell.name]["roughness"].values()
    return sum(v[0] for v in found) / (sum(v[1] for v in found) or 1)


def without_middle(cell):
    """The Cell of the same settings that never trains at 0.4 < t < 0.6."""
    return Cell(cell.kernel, {**cell.settings, "t_hole": (0.4, 0.6)})


def hole_cost(results, cell):
    """Nats per masked token in the two bins of t where `without_middle` never trained, less those
    of the cell itself, one value per evaluation seed.
    """
    whole, holed = (losses_by_t(tested(results, c), "")[..., 4:6].nanmean((0, 2))
                    for c in (cell, without_middle(cell)))
    return (holed - whole).tolist()


def ablated(results, kernel, how):
    """Table 2, how "masked" or "retrained", in ELBO, Avg., one value per evaluation seed: the gain
    over frozen of "full", and what each of the other MODES but "none" leaves of it, less it.
    """
    full = Cell(kernel, {"lr": best_rate(kernel, results), "seed": ABLATED})
    less = [(full, f", {mode}") if how == "masked" else
            (Cell(kernel, {**full.settings, "modulate": mode}), "") for mode in MODES[1:-1]]
    return [against(results, full)[-1],
            *(against(results, cell, row, (full, ""))[-1] for cell, row in less)]


def ablation_table(results):
    """Table 2 by masking one trained adapter and by retraining."""
    rows = [[kernel, how, *(show(values, "+", student=True)
                            for values in ablated(results, kernel, how))]
            for kernel, how in itertools.product(GEOMETRIES, ("masked", "retrained"))]
    return {"Table 2: gain of full over frozen, and what is lost of it, nats per token, average of "
            "the test sets, one training seed": common.markdown(
                ["conditioner", "others are", "full", *(f"{mode}, less full"
                                                        for mode in MODES[1:-1])], *rows)}


def one_at_a_time(results, group, title):
    """Of each cell of a group: its settings, what it gains, and that less what the same gains
    without them. Another backbone has another frozen row, so a sliced cell has no such difference.
    """
    rows = []
    for cell in cells(group, results):
        base = trained_seeds(results, cell.kernel)[0]
        values = [against(results, cell)[-1], against(results, cell, "", (base, ""))[-1],
                  *(against(results, one, "", (one, CONTROLS[1]))[-1] for one in (cell, base))]
        found = [show(v, "+", student=True) for v in values]
        rows.append([cell.kernel, changed(cell, base), f"{results[cell.name]['size']:,}", found[0],
                     "" if cell.sliced else found[1], *found[2:]])
    return {f"{title}, one training seed": common.markdown(
        ["conditioner", "changed", "parameters", "gain over frozen, Avg.", "less the unchanged's",
         "cost of a shuffled t", "of the unchanged"], *rows)}


def changed(cell, base):
    """The settings of `cell` that `base` does not share, as text."""
    return ", ".join(f"{k} {v}" for k, v in cell.settings.items()
                     if base.settings.get(k) != v) or "sliced backbone"


def frozen_table(results):
    """What the slicing alone costs, and how much of that each conditioner wins back."""
    whole, sliced = Cell("none", {}), Cell("none", {}, sliced=True)
    rows = [(row, whole, row) for row in ("uniform", "unigram", "frozen")]
    rows.append(("sliced, frozen", sliced, "frozen"))
    if finished(results, "sliced"):
        rows += [(f"sliced, {cell.kernel}", cell, "") for cell in cells("sliced", results)]
    carts = ((name, columns(tested(results, cell), "cart", row)) for name, cell, row in rows)
    return {"CART masked_mean, nats": common.markdown(
        ["", *tested(results, whole), "Avg."],
        *([name, *(show(values, digits=3, student=True) for values in found)]
          for name, found in carts))}


def tables(results):
    """{title: Markdown} of every group that is complete."""
    found = {}
    if finished(results, "frozen"):
        found |= frozen_table(results)
    if finished(results, "frozen", "rates"):
        found |= conditioning_tables(results)
        if finished(results, "seeds", "ablation"):
            found |= ablation_table(results)
        for group, title in (("init", "PyTorch's default start"), ("sliced", "the sliced backbone"),
                             ("sweep", "one setting at a time")):
            if finished(results, group):
                found |= one_at_a_time(results, group, title)
    return found


def draw(results, path):
    """What conditioners gain and make of t, and a panel for each further group that is complete."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(14, 7.5), layout="constrained")
    (gains, costs, by_t), (ablation, hole, sweep) = figure.subplots(2, 3)
    bins = [(k + 0.5) / BINS for k in range(BINS)]
    frozen = mean_by_t(tested(results, Cell("none", {})), "frozen")

    def dot(ax, x, mean_and_error, kernel, marker="o", filled=True):
        ax.errorbar(x, *([v] for v in mean_and_error), fmt=marker, ms=5, lw=1, capsize=3,
                    color=f"C{CONDITIONERS.index(kernel)}", mfc=None if filled else "none")

    for x, kernel in enumerate(CONDITIONERS):
        group = trained_seeds(results, kernel)
        shuffled, constant = (training_error(over_seeds(results, group, ending)[-1])
                              for ending in CONTROLS[1:])
        dot(gains, x, training_error(over_seeds(results, group)[-1]), kernel)
        if kernel in RESTARTED and (again := trained_seeds(results, kernel, **DEFAULT)):
            from_default = training_error(over_seeds(results, again)[-1])
            dot(gains, x + 0.2, from_default, kernel, filled=False)
        dot(costs, x - 0.1, shuffled, kernel)
        dot(costs, x + 0.1, constant, kernel, "x")
        curves = [mean_by_t(tested(results, cell), "") for cell in group]
        by_t.plot(bins, frozen - torch.stack(curves).mean(0), "o-", ms=3, label=kernel)
        if finished(results, "hole"):
            holed = mean_by_t(tested(results, without_middle(group[0])), "")
            hole.plot(bins, holed - curves[0], "o-", ms=3)
    if finished(results, "seeds", "ablation"):
        for i, (kernel, how) in enumerate(itertools.product(GEOMETRIES, ("masked", "retrained"))):
            for x, values in enumerate(ablated(results, kernel, how)[1:]):
                dot(ablation, x + 0.13 * (i - 2.5), mean_error(values, True), kernel,
                    filled=how == "retrained")
    one = [cell for group in ("init", "sweep") if finished(results, group)
           for cell in cells(group, results)]
    bases = [trained_seeds(results, cell.kernel)[0] for cell in one]
    for x, (cell, base) in enumerate(zip(one, bases)):
        values = against(results, cell, "", (base, ""))[-1]
        dot(sweep, x, mean_error(values, True), cell.kernel)

    nats, masked = "nats per token", "nats per masked token"
    for ax, names, unit, title in (
            (gains, CONDITIONERS, nats, "gain ± training seeds (hollow: default start)"),
            (costs, CONDITIONERS, nats, "cost of a shuffled (dots) and of a constant t (crosses)"),
            (by_t, None, masked, "gain over frozen, by t"),
            (ablation, MODES[1:-1], nats, "Table 2, less full: masked (hollow), retrained"),
            (hole, None, masked, "cost of no training at 0.4 < t < 0.6, by t"),
            (sweep, [f"{c.kernel}: {changed(c, base)}" for c, base in zip(one, bases)], nats,
             "gain less that of the unchanged")):
        if names is not None:
            ax.set_xticks(range(len(names)), names, fontsize=8)
        ax.set_title(title, fontsize=10)
        ax.set_ylabel(unit, fontsize=8)
        ax.set_visible(ax.has_data())
        ax.axhline(0, color="k", lw=0.8)
    for ax in (ablation, sweep):
        ax.tick_params("x", rotation=45)
        for label in ax.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    hole.axvspan(0.4, 0.6, color="0.93")
    by_t.legend(fontsize=8)
    common.save_figure(figure, path)


# ---- command line --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Run groups of cells, and print the tables of what is finished."""
    run: tuple[str, ...] = ()     # groups, see above; none: tables only
    train: tuple[str, ...] = ()   # text to train on; 5 % of its documents are held out for choosing
    test: tuple[str, ...] = ()    # NAME=PATH
    steps: int = 350
    seqlen: int = 128
    windows: int = 40             # of each test set, per evaluation seed
    seeds: int = 5                # evaluation seeds
    hours: float = 24.0           # start no cell after this time
    publish: bool = False         # draw into figures/ in place of runs/study/
    seed: int = 42


def main(cfg):
    env = common.banner("study.py", cfg)
    for group in cfg.run:
        if group not in GROUPS or not cfg.train or not cfg.test:
            raise common.UserError(f"--run {group}: need one of {', '.join(GROUPS)}, with --train "
                                   "and --test")
    if "valid" in named_sources(cfg.test) or cfg.seeds > len(common.SEEDS):
        raise common.UserError(f"--seeds {cfg.seeds}: need at most {len(common.SEEDS)}; and no "
                               "--test called valid, which is the held-out part of --train")
    if cfg.run:
        tokenizer, began, results = make_tokenizer("bytes"), time.time(), read_results(cfg)
        corpora = {"valid": load_corpus(cfg.train, tokenizer, "valid")} | {
            name: load_corpus(sources, tokenizer, held_out_split(sources, cfg.train))
            for name, sources in named_sources(cfg.test).items()}
    for group in cfg.run:
        left = [cell for cell in cells(group, results) if cell.name not in results]
        typical = [sum(found["seconds"]) for found in results.values() if "seconds" in found]
        expected = len(left) * (statistics.median(typical) if typical else 150)
        common.log(f"{group}: {len(left)} cells to run, about {expected / 60:.0f} minutes")
        for cell in common.progress(left, desc=group):
            if time.time() - began > 3600 * cfg.hours:
                break
            results[cell.name] = run_cell(cell, cfg, tokenizer, corpora)
            common.publish("study", cell.name, results[cell.name], cfg, env)
            common.log(f"{time.strftime('%H:%M')} {cell.name}")
    results = read_results()
    found = tables(results)
    if not found:
        common.log("no group of cells is complete: see --run")
    for title, table in found.items():
        common.log(f"\n{title}\n\n{table}")
    if finished(results, "frozen", "rates"):
        path = common.ROOT / ("figures" if cfg.publish else "runs/study") / "comparisons.png"
        draw(results, path)
        common.log(f"wrote {path.relative_to(common.ROOT)}")
    return found


if __name__ == "__main__":
    common.run_cli(Config, main)
