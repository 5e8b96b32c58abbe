"""Tables of the study: gains, what t is worth, Table 2, single settings (A.4, A.5).

Run:      not a script; study.py prints them.

Intervals are Student's 95 %. Where test windows and training seeds both count, two of them are
joined in quadrature.

Symbols:  gain     ELBO of frozen minus ELBO of an adapter, nats per token, same windows and masks
          cost     ELBO with a wrong t minus ELBO with the right one
          values   one number per evaluation seed
          columns  [values of each test text, and values of their average]
          grid     [values of each training seed], of one column
Differs from the paper: it has none of this (A.4, A.5), except Table 2 by masking.
"""
import math
import statistics
from typing import NamedTuple

import common
from evaluate import BINS, CONTROLS, Row, losses_by_t, seed_differences, seed_values
from experiments.study_cells import (ABLATED, ABLATIONS, CONDITIONERS, DEFAULT_START, GROUPS, HOLE,
                                     INTACT, RATES, RESTARTED, SLICED, Cell, best_cell, finished,
                                     trained_seeds, without_middle)
from mark_adapters import GEOMETRIES

HOWS = ("masked", "retrained")  # two ways to Table 2: of one trained adapter, and by training


# ---- differences ---------------------------------------------------------------------------------


class Scored(NamedTuple):
    """One row of a cell's scores."""
    cell: Cell
    row: Row


def own(cell):
    """The row of a cell's adapter as it was trained, or of its frozen backbone."""
    return Scored(cell, cell.row())


def frozen_beside(cell):
    """The row that a cell's gain is counted from."""
    return own(SLICED if cell.sliced else INTACT)


def differences(results, scored, minus):
    """ELBO of one Scored minus that of another, nats per token, as columns."""
    theirs = results[minus.cell].tested()
    paired = {}
    for text, rows in results[scored.cell].tested().items():
        paired[text] = {scored: rows[scored.row], minus: theirs[text][minus.row]}
    return seed_differences(paired, "elbo", scored, minus)


def gain(results, cell):
    """What a cell gains over the frozen backbone, as columns."""
    return differences(results, frozen_beside(cell), own(cell))


def gain_beyond(results, cell, other):
    """What a cell gains less what another gains on the same backbone, as columns."""
    return differences(results, own(other), own(cell))


def cost(results, cell, told):
    """What one of CONTROLS costs a cell, as columns."""
    return differences(results, Scored(cell, cell.row(told)), own(cell))


def grids(columns_of_cells):
    """The columns of several cells, one per training seed -> the grid of each column."""
    return [list(grid) for grid in zip(*columns_of_cells, strict=True)]


def gains_over_seeds(results, group):
    """`gain` of every Cell of a group, one per training seed, as grids."""
    return grids([gain(results, cell) for cell in group])


def costs_over_seeds(results, group, told):
    """`cost` of every Cell of a group, one per training seed, as grids."""
    return grids([cost(results, cell, told) for cell in group])


def training_interval(grid):
    """The Interval over training seeds, for one choice of test windows: what two rows that share
    them are compared by.
    """
    return common.interval([statistics.fmean(values) for values in grid])


def windows_interval(grid):
    """The Interval over evaluation seeds, for one choice of training seeds."""
    return common.interval([statistics.fmean(at_seed) for at_seed in zip(*grid, strict=True)])


def show_both(grid):
    """The mean of a grid ± both errors in quadrature (that of training seeds alone), as text."""
    training = training_interval(grid)
    windows = windows_interval(grid)
    if math.isnan(training.half):
        return f"{windows.show('+')} (n/a)"
    both = training._replace(half=math.hypot(training.half, windows.half))
    return f"{both.show('+')} ({training.half:.4f})"


def show_windows(values):
    """The mean of one cell's values ± the error of the test windows, as text."""
    return common.interval(values).show("+")


# ---- what else is measured -----------------------------------------------------------------------


def variation_over_range(results, cell):
    """How rough the modulation of a cell is: its total variation over t over its range, summed over
    the modulated fields. 1 where all are monotone; 0 where nothing reads t.
    """
    measured = results[cell].roughness.values()
    variation = sum(of_field[0] for of_field in measured)
    extent = sum(of_field[1] for of_field in measured)
    return variation / extent if extent else 0.0


def hole_cost(results, cell):
    """Nats per masked token in the two bins of t where `without_middle` never trained, less those
    of the cell itself, as values.
    """
    first, last = (round(t * BINS) for t in HOLE)
    losses = []
    for one in (without_middle(cell), cell):
        by_t = losses_by_t(results[one].tested(), one.row())     # text, evaluation seed, bin of t
        losses.append(by_t[..., first:last].nanmean((0, 2)))     # evaluation seed
    return (losses[0] - losses[1]).tolist()


def ablated(results, kernel, how):
    """Table 2, how "masked" or "retrained", ELBO averaged over the test texts: {mode: values}.

    Of "full" the gain over frozen, of ABLATIONS what they gain less than full.
    """
    full = best_cell(kernel, results, ABLATED)
    found = {"full": gain(results, full)[-1]}
    for mode in ABLATIONS:
        if how == "masked":
            reduced = Scored(full, full.row(modulate=mode))
        else:
            reduced = own(full.but(modulate=mode))
        found[mode] = differences(results, own(full), reduced)[-1]
    return found


def text_names(results):
    return list(results[INTACT].tested())


# ---- tables --------------------------------------------------------------------------------------


def finished_tables(results):
    """{title: Markdown} of every group that is complete."""
    tables = {}
    if finished(results, "frozen"):
        tables["CART masked_mean, nats"] = frozen_table(results)
    if not finished(results, "frozen", "rates"):
        return tables
    tables["gain over frozen, ELBO in nats per token ± test windows and training seeds (training "
           "seeds alone, to compare rows by)"] = gain_table(results)
    tables["what t is worth, nats per token, and how rough the modulation is"] = use_table(results)
    if finished(results, "seeds", "ablation"):
        tables["Table 2: gain of full over frozen, and what is lost of it, nats per token, average "
               "of the test sets, one training seed"] = ablation_table(results)
    for group, title in (("init", "PyTorch's default start"), ("sliced", "the sliced backbone"),
                         ("sweep", "one setting at a time")):
        if finished(results, group):
            tables[f"{title}, one training seed"] = change_table(results, group)
    return tables


def frozen_table(results):
    """What the slicing alone costs, and how much of that each conditioner wins back."""
    shown = {name: Scored(INTACT, Row(name)) for name in ("uniform", "unigram", "frozen")}
    shown["sliced, frozen"] = own(SLICED)
    if finished(results, "sliced"):
        for cell in GROUPS["sliced"](results):
            shown[f"sliced, {cell.kernel}"] = own(cell)
    lines = []
    for label, scored in shown.items():
        columns = seed_values(results[scored.cell].tested(), "cart", scored.row)
        found = [common.interval(values).show(digits=3) for values in columns]
        lines.append([label, *found])
    return common.markdown(["", *text_names(results), "Avg."], *lines)


def groups_by_label(results):
    """{label: finished Cells over training seeds} of the rows of `gain_table` and `use_table`."""
    groups = {kernel: trained_seeds(results, kernel) for kernel in CONDITIONERS}
    for kernel in RESTARTED:
        again = trained_seeds(results, kernel, **DEFAULT_START)
        if again:
            groups[f"{kernel}, default start"] = again
    return groups


def gain_table(results):
    """Gains over the frozen backbone by test text."""
    lines = []
    for label, group in groups_by_label(results).items():
        first = group[0]
        rate = f"{first.lr:g}"
        if first.lr in (min(RATES), max(RATES)):
            rate += " (the edge)"
        gains = [show_both(grid) for grid in gains_over_seeds(results, group)]
        lines.append([label, f"{results[first].size:,}", rate, len(group), *gains])
    return common.markdown(["conditioner", "parameters", "best rate", "training seeds",
                            *text_names(results), "Avg."], *lines)


def use_table(results):
    """What each conditioner makes of t."""
    lines = []
    for label, group in groups_by_label(results).items():
        costs = [show_both(costs_over_seeds(results, group, told)[-1]) for told in CONTROLS]
        rough = [variation_over_range(results, cell) for cell in group]
        shown = common.interval(rough).show(digits=1) if any(rough) else "reads no t"
        hole = ""
        if finished(results, "hole") and not group[0].changed:
            hole = show_windows(hole_cost(results, group[0]))
        lines.append([label, *costs, shown, hole])
    return common.markdown(["conditioner", *(f"cost of a {told}" for told in CONTROLS),
                            "total variation / range (falls with the rate)",
                            "cost at 0.4 < t < 0.6 of never training there (one seed)"], *lines)


def ablation_table(results):
    """Table 2 by masking one trained adapter and by retraining."""
    lines = []
    for kernel in GEOMETRIES:
        for how in HOWS:
            found = ablated(results, kernel, how).values()
            lines.append([kernel, how, *map(show_windows, found)])
    return common.markdown(["conditioner", "others are", "full",
                            *(f"{mode}, less full" for mode in ABLATIONS)], *lines)


def change_table(results, group):
    """Of each cell of a group: its settings, what it gains, and that less what the same gains
    without them. Another backbone has another frozen row, so a sliced cell has no such difference.
    """
    lines = []
    for cell in GROUPS[group](results):
        base = cell.unchanged()
        beyond = ""
        if not cell.sliced:
            beyond = show_windows(gain_beyond(results, cell, base)[-1])
        costs = [show_windows(cost(results, one, CONTROLS[0])[-1]) for one in (cell, base)]
        lines.append([cell.kernel, change_of(cell), f"{results[cell].size:,}",
                      show_windows(gain(results, cell)[-1]), beyond, *costs])
    return common.markdown(
        ["conditioner", "changed", "parameters", "gain over frozen, Avg.", "less the unchanged's",
         "cost of a shuffled t", "of the unchanged"], *lines)


def change_of(cell):
    """What a cell does not share with its `unchanged`, as text."""
    if cell.sliced:
        return "sliced backbone"
    return ", ".join(f"{name} {value}" for name, value in cell.changed)
