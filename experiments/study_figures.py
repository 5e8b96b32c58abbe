"""Figures of the study: gains, what t is worth, Table 2, a hole in t, single settings (A.4).

Run:      not a script; study.py draws them.

A colour and a marker are a conditioner, in every panel. Bars are 95 % intervals (Student's): over
training seeds where there are several, over the test windows elsewhere.

Symbols:  see study_tables.py
Differs from the paper: it has none of this, except Table 2 by masking.
"""
from typing import Callable, NamedTuple

import torch

import common
from evaluate import BINS, CONTROLS, losses_by_t, mean_by_t
from experiments.study_cells import (ABLATIONS, BLIND, CONDITIONERS, DEFAULT_START, GROUPS, HOLE,
                                     INTACT, RESTARTED, Cell, best_cell, finished, trained_seeds,
                                     without_middle)
from experiments.study_tables import (HOWS, ablated, change_of, costs_over_seeds, gain_beyond,
                                      gains_over_seeds, training_interval)
from experiments.study_worth import (difference, gains, has_twins, label_of, reported,
                                     shown_kinds, worth_by_t)
from mark_adapters import GEOMETRIES

DRAWN = ("hypernet", "chebyshev", "dct", "inject", "adaln", "lora")  # in this order of colours
COLORS = {**dict(zip(DRAWN, common.COLORS)), "lora": common.COLORS[-1]}
MARKERS = dict(zip(DRAWN, common.MARKERS))
MIDDLES = [(k + 0.5) / BINS for k in range(BINS)]  # of the bins of t


# ---- pieces --------------------------------------------------------------------------------------


def draw_interval(ax, interval, y, kernel, hollow=False):
    """An Interval as a dot and a horizontal bar; of one value there is no bar (n/a)."""
    ax.errorbar([interval.mean], [y], xerr=[interval.half], fmt=MARKERS[kernel], ms=5, lw=1.2,
                capsize=2.5, color=COLORS[kernel], mfc="white" if hollow else None)


def draw_by_t(ax, rows, kernel):
    """The mean of some rows of numbers by bin of t, with an Interval over them in each bin."""
    intervals = [common.interval(in_bin) for in_bin in rows.T.tolist()]
    place = CONDITIONERS.index(kernel) / (len(CONDITIONERS) - 1) - 0.5
    t = [middle + 0.05 * place for middle in MIDDLES]  # or the bars would lie on each other
    ax.errorbar(t, [interval.mean for interval in intervals],
                [interval.half for interval in intervals], fmt="-", marker=MARKERS[kernel], ms=4,
                lw=1, elinewidth=0.8, color=COLORS[kernel])


def name_rows(ax, names):
    """The first name on top, and a line at zero."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.axvline(0, color="black", lw=0.8)
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    ax.locator_params("x", nbins=6)


def finish_by_t(ax):
    ax.axhline(0, color="black", lw=0.8)
    ax.set_xlim(0, 1)
    ax.set_xlabel("t (share of masked tokens)")
    ax.set_ylabel("nats per masked token")


def legend_below(figure):
    """One legend for all panels, outside them."""
    from matplotlib.lines import Line2D
    entries = []
    for kernel in CONDITIONERS:
        entries.append(Line2D([], [], ls="", marker=MARKERS[kernel], color=COLORS[kernel],
                              label=kernel))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False)


# ---- comparisons.png -----------------------------------------------------------------------------


def draw_comparisons(results, path):
    """What conditioners gain, what a wrong t costs them, and what they gain at each t."""
    figure = common.new_figure(12, 4.2)
    gains, costs, by_t = figure.subplots(1, 3)
    draw_gains_by_conditioner(gains, results)
    draw_costs_by_conditioner(costs, results)
    draw_gains_by_t(by_t, results)
    legend_below(figure)
    common.save_figure(figure, path)
    return path


def draw_gains_by_conditioner(ax, results):
    for y, kernel in enumerate(CONDITIONERS):
        group = trained_seeds(results, kernel)
        draw_interval(ax, training_interval(gains_over_seeds(results, group)[-1]), y, kernel)
        again = []
        if kernel in RESTARTED:
            again = trained_seeds(results, kernel, **DEFAULT_START)
        if again:
            restarted = training_interval(gains_over_seeds(results, again)[-1])
            draw_interval(ax, restarted, y + 0.25, kernel, hollow=True)
    name_rows(ax, CONDITIONERS)
    ax.set_xlabel("nats per token")
    ax.set_title("gain over frozen\n(hollow: PyTorch's default start)")


def draw_costs_by_conditioner(ax, results):
    for y, kernel in enumerate(CONDITIONERS):
        group = trained_seeds(results, kernel)
        for told, offset in zip(CONTROLS, (-0.13, 0.13)):
            costs = training_interval(costs_over_seeds(results, group, told)[-1])
            draw_interval(ax, costs, y + offset, kernel, hollow=told == "constant t")
    name_rows(ax, CONDITIONERS)
    ax.set_xlabel("nats per token")
    ax.set_title("cost of a shuffled t (filled)\nand of a constant t (hollow)")


def draw_gains_by_t(ax, results):
    frozen = mean_by_t(results[INTACT].tested(), INTACT.row())                   # bin
    for kernel in CONDITIONERS:
        group = trained_seeds(results, kernel)
        gains = [frozen - mean_by_t(results[cell].tested(), cell.row()) for cell in group]
        draw_by_t(ax, torch.stack(gains), kernel)
    finish_by_t(ax)
    ax.set_title("gain over frozen, by t")


# ---- comparisons_ablation.png --------------------------------------------------------------------


def draw_table_2(ax, results):
    for y, mode in enumerate(ABLATIONS):
        offset = -0.32
        for kernel in GEOMETRIES:
            for how in HOWS:
                lost = common.interval(ablated(results, kernel, how)[mode])
                draw_interval(ax, lost, y + offset, kernel, hollow=how == "masked")
                offset += 0.13
    name_rows(ax, ABLATIONS)
    ax.set_xlabel("nats per token")
    ax.set_title("Table 2, gain less that of full:\nmasked (hollow) and retrained (filled)")


def draw_hole(ax, results):
    for kernel in CONDITIONERS:
        cell = best_cell(kernel, results)
        holed = without_middle(cell)
        losses = losses_by_t(results[cell].tested(), cell.row())                 # text, seed, bin
        without = losses_by_t(results[holed].tested(), holed.row())
        draw_by_t(ax, (without - losses).nanmean(0), kernel)
    ax.axvspan(*HOLE, color="0.92", zorder=0)
    finish_by_t(ax)
    ax.set_title(f"cost of no training at\n{HOLE[0]} < t < {HOLE[1]} (grey), by t")


def draw_changes(ax, results):
    by_change = {}
    for cell in GROUPS["init"](results) + GROUPS["sweep"](results):
        by_change.setdefault(change_of(cell), []).append(cell)
    for y, cells in enumerate(by_change.values()):
        for i, cell in enumerate(cells):
            offset = 0.25 * (i - (len(cells) - 1) / 2)
            beyond = common.interval(gain_beyond(results, cell, cell.unchanged())[-1])
            draw_interval(ax, beyond, y + offset, cell.kernel)
    name_rows(ax, list(by_change))
    ax.set_xlabel("nats per token")
    ax.set_title("one setting changed:\ngain less that of the unchanged")


class Panel(NamedTuple):
    draw: Callable              # (ax, results)
    groups: tuple[str, ...]     # that have to be finished


PANELS = (
    Panel(draw_table_2, ("seeds", "ablation")),
    Panel(draw_hole, ("hole",)),
    Panel(draw_changes, ("init", "sweep")),
)


def draw_ablations(results, path):
    """Each panel whose groups are finished; None, and no file, where there is none."""
    complete = [panel for panel in PANELS if finished(results, *panel.groups)]
    if not complete:
        return None
    figure = common.new_figure(1 + 4 * len(complete), 5)
    axes = figure.subplots(1, len(complete), squeeze=False)[0]
    for panel, ax in zip(complete, axes):
        panel.draw(ax, results)
    legend_below(figure)
    common.save_figure(figure, path)
    return path


# ---- worth.png -----------------------------------------------------------------------------------


WORLD_TITLES = {"new": "masks, a new text", "bytes": "random bytes, the same text",
                "near": "masks, the backbone's own kind of text"}


def draw_worth(results, path):
    """What conditioners gain with t and blind, by world, and what t is worth by t. None, and no
    file, where no world has results.
    """
    worlds = [world for world in WORLD_TITLES if has_twins(world, results)]
    if not worlds:
        return None
    rows = max(len(shown_kinds(world, results)) for world in worlds)
    figure = common.new_figure(4.3 * (len(worlds) + 1), 2.4 + 0.27 * rows)
    *by_world, by_t = figure.subplots(1, len(worlds) + 1)
    for ax, world in zip(by_world, worlds):
        draw_gains_of_world(ax, world, results)
    for i, world in enumerate(worlds):
        draw_worth_of_world(by_t, world, i, results)
    by_t.axhline(0, color="black", lw=0.8)
    by_t.set(xlim=(0, 1), xlabel="t (share of changed tokens)", ylabel="nats per scored byte",
             title="what t is worth to Chebyshev, by t")
    if by_t.containers:
        by_t.legend(frameon=False, fontsize=8)
    common.save_figure(figure, path)
    return path


def draw_gains_of_world(ax, world, results):
    """A row for each conditioner: its gain with t (filled) and that of its blind twin (hollow)."""
    texts = reported(world, results)
    names = []
    for y, kind in enumerate(shown_kinds(world, results)):
        names.append(label_of(kind))
        pair = ((kind, 0.0, common.COLORS[0], None),
                (kind.but(**BLIND), 0.25, common.COLORS[1], "white"))
        for one, offset, color, face in pair:
            grid = gains(results, one, texts)
            if grid:
                found = difference(grid)
                ax.errorbar([found.mean], [y + offset], xerr=[found.half], fmt="o", ms=4.5, lw=1.2,
                            capsize=2, color=color, mfc=face)
    name_rows(ax, names)
    ax.set_xlabel("gain over frozen (nats per byte)")
    ax.set_title(f"{WORLD_TITLES[world]}\n(hollow: the blind twin)")


def draw_worth_of_world(ax, world, i, results):
    """What t is worth to Chebyshev in each bin of t, over training seeds."""
    rows = worth_by_t(results, Cell("chebyshev", world=world), reported(world, results))
    if not rows:
        return
    found = [common.interval(in_bin) for in_bin in zip(*rows)]
    x = [middle + 0.012 * (i - 1) for middle in MIDDLES]
    ax.errorbar(x, [one.mean for one in found], [one.half for one in found], fmt="-",
                marker=common.MARKERS[i], color=common.COLORS[i], ms=4, lw=1.2, capsize=2,
                label=WORLD_TITLES[world])
