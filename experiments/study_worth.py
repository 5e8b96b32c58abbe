"""Tables of the study about t: gains, what t is worth, and where (4.4, A.5).

Run:      not a script; study.py prints them, report_worth.py publishes them.

What t is worth to a conditioner is the ELBO of its blind twin less its own: the twin was trained
and is scored with t = 0.5 throughout, all else is the same. A wrong t at test time is another
thing: it is a cost to an adapter that has learnt to rely on the right one.

Every number is paired: both rows see the same windows, t and noise, and the twins the same training
samples. Training seeds and test windows both vary it. Their variances of the mean add up, and
Student's t has Welch's and Satterthwaite's degrees of freedom. Of one training seed the interval is
over test windows alone. The p-values of one table are Holm's, so that a table of many rows finds
nothing by luck.

Symbols:  grid      [one list of values per training seed, one value per evaluation seed]
          kind      a conditioner in a world, see study_cells.py
          measured  ELBO with masks, cross-entropy with random bytes; nats per byte, lower is better
Differs from the paper: it has none of this. It compares no conditioner with one that is not told t.
"""
import math
import statistics
from typing import NamedTuple

import common
from evaluate import BINS, CONTROLS, FROZEN, mean_by_t, seed_values
from experiments.study_cells import (BLIND, DEFAULT_START, FIRST, OWN, WORLDS, Cell, at,
                                     kinds_of, seeds_of, settled_rate)
from mark_adapters import GEOMETRIES

ORDER = (*GEOMETRIES, "static", *(f"static+{kernel}" for kernel in GEOMETRIES), "inject", "adaln",
         "lora", *(f"lora+{kernel}" for kernel in GEOMETRIES), "finetune", "finetune+chebyshev")
THIRDS = {"t < 0.3": range(0, 3), "0.3 to 0.7": range(3, 7), "t > 0.7": range(7, BINS)}


# ---- statistics ----------------------------------------------------------------------------------


class Difference(NamedTuple):
    """A paired difference: its mean, half of Student's 95 % interval, p of "it is 0", and n."""
    mean: float
    half: float
    p: float       # nan where there is one training seed
    n: int         # training seeds

    def show(self, digits=4):
        return common.Interval(self.mean, self.half, self.n).show("+", digits)


def difference(grid):
    """The Difference of a grid of paired differences, of two evaluation seeds at least."""
    by_training = [statistics.fmean(values) for values in grid]
    by_windows = [statistics.fmean(values) for values in zip(*grid, strict=True)]
    mean = statistics.fmean(by_training)
    n = len(by_training)
    if n == 1:
        return Difference(mean, common.interval(by_windows).half, math.nan, n)
    parts = []  # (variance of the mean, its degrees of freedom)
    for means in (by_training, by_windows):
        parts.append((statistics.variance(means) / len(means), len(means) - 1))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return Difference(mean, 0.0, 0.0 if mean else 1.0, n)
    freedom = variance ** 2 / sum(part ** 2 / degrees for part, degrees in parts)
    from scipy.stats import t
    error = math.sqrt(variance)
    p = 2 * float(t.sf(abs(mean) / error, freedom))
    return Difference(mean, float(t.ppf(0.975, freedom)) * error, p, n)


def holm(p_values):
    """Holm's adjusted p-values of a family, in the order given. nan counts for nothing."""
    tested = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(tested, key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(tested) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def show_p(p):
    """A p-value as text."""
    if math.isnan(p):
        return "n/a"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


# ---- what is compared ----------------------------------------------------------------------------


def reported(world, results):
    """The texts that a world is reported on: the new text's own half, or the near one's tests."""
    if WORLDS[world].text == "new":
        return (OWN,)
    return tuple(results[Cell("none", world=world)].tested())


def scores_on(results, cell, texts):
    """A cell's scores on some texts alone."""
    return {text: results[cell].scores[text] for text in texts}


def values_of(results, cell, texts, row=None):
    """A cell's ELBO averaged over texts, one value per evaluation seed."""
    return seed_values(scores_on(results, cell, texts), "elbo", row or cell.row())[-1]


def subtract(ones, others):
    return [one - other for one, other in zip(ones, others, strict=True)]


def gains(results, kind, texts):
    """What a kind gains over its frozen backbone, as a grid."""
    frozen = values_of(results, Cell("none", world=kind.world), texts, FROZEN)
    return [subtract(frozen, values_of(results, cell, texts))
            for cell in seeds_of(kind, results)]


def pairs(results, kind, other):
    """[(cell of one kind, cell of another)] of the training seeds that both have."""
    others = {cell.seed: cell for cell in seeds_of(other, results)}
    return [(cell, others[cell.seed]) for cell in seeds_of(kind, results) if cell.seed in others]


def worth(results, kind, texts):
    """What t is worth to a kind, as a grid; empty where it has no blind twin yet."""
    return [subtract(values_of(results, twin, texts), values_of(results, cell, texts))
            for cell, twin in pairs(results, kind, kind.but(**BLIND))]


def by_t(results, cell, texts):
    """Nats per scored byte in each bin of t, averaged over texts and evaluation seeds."""
    return mean_by_t(scores_on(results, cell, texts), cell.row()).tolist()


def worth_by_t(results, kind, texts):
    """What t is worth in each bin of t, nats per scored byte: one list per training seed."""
    return [subtract(by_t(results, twin, texts), by_t(results, cell, texts))
            for cell, twin in pairs(results, kind, kind.but(**BLIND))]


def control_cost(results, kind, told):
    """What a wrong t costs a kind on the new text, one value per evaluation seed; of one seed."""
    rate = settled_rate(kind, results)
    cell = at(kind, rate, FIRST)
    wrong = cell.row(told)
    rows = results[cell].scores[OWN] if OWN in results[cell].scores else {}
    if wrong not in rows:
        return []
    return subtract(rows[wrong]["elbo"], rows[cell.row()]["elbo"])


# ---- tables --------------------------------------------------------------------------------------


def shown_kinds(world, results):
    """The kinds of a world that are not blind and have a result at a settled rate, in ORDER."""
    kinds = [kind for kind in kinds_of(world) if not kind.blind and seeds_of(kind, results)]
    return sorted(kinds, key=lambda kind: ORDER.index(kind.kernel))


def is_known(world, results):
    """Whether a world has its frozen row and a conditioner to show beside it."""
    return Cell("none", world=world) in results and bool(shown_kinds(world, results))


def has_twins(world, results):
    """Whether any kind of a world has its blind twin beside it."""
    kinds = shown_kinds(world, results) if is_known(world, results) else ()
    return any(pairs(results, kind, kind.but(**BLIND)) for kind in kinds)


def label_of(kind):
    """A kind's name in tables."""
    start = dict(kind.changed).get("init") == DEFAULT_START["init"]
    return f"{kind.kernel}, default start" if start else kind.kernel


def gain_lines(world, results):
    """Markdown: what each conditioner of a world gains over the frozen backbone."""
    texts = reported(world, results)
    others = [text for text in results[Cell("none", world=world)].tested() if text not in texts]
    frozen = common.interval(values_of(results, Cell("none", world=world), texts, FROZEN))
    lines = [["frozen", "", "", "", frozen.show(), "", ""]]
    for kind in shown_kinds(world, results):
        cells = seeds_of(kind, results)
        first = results[cells[0]]
        found = difference(gains(results, kind, texts))
        left = frozen.mean - found.mean
        elsewhere = ""
        if others:
            elsewhere = difference(gains(results, kind, others)).show()
        minutes = statistics.median(results[cell].seconds[0] for cell in cells) / 60
        lines.append([label_of(kind), f"{first.size:,}", f"{cells[0].lr:g}", found.n,
                      f"{left:.4f}", found.show(), elsewhere, f"{minutes:.1f}"])
    lines[0].append("")
    measured = "ELBO" if WORLDS[world].noise == "masks" else "cross-entropy"
    return common.markdown(["conditioner", "trained numbers", "rate", "training seeds",
                            f"{measured}, nats per byte", "gain over frozen",
                            "gain on the other texts, average", "minutes of a training"], *lines)


def worth_lines(world, results):
    """Markdown: what t is worth to each conditioner of a world that reads it."""
    texts = reported(world, results)
    kinds = [kind for kind in shown_kinds(world, results)
             if pairs(results, kind, kind.but(**BLIND))]
    found = [difference(worth(results, kind, texts)) for kind in kinds]
    adjusted = holm([one.p for one in found])
    lines = []
    for kind, one, p in zip(kinds, found, adjusted, strict=True):
        blind = difference(gains(results, kind.but(**BLIND), texts))
        by_third = worth_by_thirds(results, kind, texts)
        costs = []
        for told in CONTROLS:
            values = control_cost(results, kind, told)
            costs.append(common.interval(values).show("+") if values else "")
        lines.append([label_of(kind), one.n, difference(gains(results, kind, texts)).show(),
                      blind.show(), one.show(), show_p(p), *by_third, *costs])
    return common.markdown(["conditioner", "training seeds", "gain", "gain of its blind twin",
                            "t is worth", "p (Holm)", *(f"worth at {name}" for name in THIRDS),
                            *(f"cost of a {told}" for told in CONTROLS)], *lines)


def worth_by_thirds(results, kind, texts):
    """What t is worth in three parts of its range, nats per scored byte, as text."""
    rows = worth_by_t(results, kind, texts)
    shown = []
    for bins in THIRDS.values():
        means = [statistics.fmean(row[k] for k in bins) for row in rows]
        shown.append(common.interval(means).show("+"))
    return shown


def worth_tables(results):
    """{title: Markdown} of the worlds that have results by now."""
    tables = {}
    for world in ("new", "bytes", "near"):
        if is_known(world, results):
            tables[f"{world}: gain over the frozen backbone"] = gain_lines(world, results)
            if has_twins(world, results):
                tables[f"{world}: what t is worth"] = worth_lines(world, results)
    return tables
