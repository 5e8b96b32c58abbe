"""RESULTS.md, the MaRK paper: the comparisons of the study, Table 2, the sliced backbone.

Run:      not a script; report.py writes the page.

Symbols:  results  {Cell: CellResult}, see study_cells.py
Differs from the paper: it has none of this (A.4, A.5), except Table 2 by masking.
"""
import dataclasses
import statistics

import common
from evaluate import CONTROLS
from experiments import study, study_train
from experiments.report_pieces import (Section, anchor, command, listed, load_result,
                                       lowest_to_highest, origin, picture, titled, wrapped)
from experiments.study_cells import (CONDITIONERS, DEFAULT_START, FIRST, INTACT, RESTARTED, SLICED,
                                     Cell, best_cell, results_folder, trained_seeds)
from experiments.study_tables import (HOWS, ablated, ablation_table, change_table, costs_over_seeds,
                                      frozen_table, gain, gain_beyond, gain_table,
                                      gains_over_seeds, grids, hole_cost, text_names,
                                      training_interval, use_table, variation_over_range,
                                      windows_interval)
from mark_adapters import GEOMETRIES

FIRST_SECTION = "Comparisons"
SAME_FILES = f"the files of [{FIRST_SECTION}](#{anchor(FIRST_SECTION)})"
SHUFFLED = CONTROLS[0]


# ---- numbers -------------------------------------------------------------------------------------


def mean_gain(results, kernel, **settings):
    """The Interval over training seeds of a conditioner's gain, averaged over the texts."""
    group = trained_seeds(results, kernel, **settings)
    return training_interval(gains_over_seeds(results, group)[-1])


def mean_cost(results, kernel):
    """The Interval over training seeds of what a shuffled t costs a conditioner."""
    group = trained_seeds(results, kernel)
    return training_interval(costs_over_seeds(results, group, SHUFFLED)[-1])


def gain_difference(results, kernel, other):
    """The Interval over training seeds of what one conditioner gains more than another."""
    pairs = zip(trained_seeds(results, kernel), trained_seeds(results, other), strict=True)
    columns = [gain_beyond(results, cell, beside) for cell, beside in pairs]
    return training_interval(grids(columns)[-1])


def gaining_and_losing(results, kernel):
    """(texts on which a conditioner gains, texts on which it loses), by both errors."""
    names = text_names(results)
    gains = gains_over_seeds(results, trained_seeds(results, kernel))[:len(names)]
    gaining, losing = [], []
    for name, grid in zip(names, gains, strict=True):
        training, windows = training_interval(grid), windows_interval(grid)
        both = (training.half ** 2 + windows.half ** 2) ** 0.5
        if training.mean > both:
            gaining.append(name)
        if training.mean < -both:
            losing.append(name)
    return gaining, losing


def roughness_at_one_rate(results):
    """{geometry: total variation over range at the lowest rate}: one seed, one rate for all."""
    return {kernel: variation_over_range(results, Cell(kernel, 1e-3, FIRST))
            for kernel in GEOMETRIES}


def rise_without_A(results, how):
    """By how much the ELBO of each geometry rises without A, [one number per geometry]."""
    return [-statistics.fmean(ablated(results, kernel, how)["all-except-A"])
            for kernel in GEOMETRIES]


def gain_of_full(results):
    """What each geometry of Table 2 gains over the frozen backbone."""
    return [statistics.fmean(ablated(results, kernel, HOWS[0])["full"]) for kernel in GEOMETRIES]


def cart_values(results, cells, text):
    """CART on a text, averaged over cells: one value per evaluation seed."""
    of_cells = [results[cell].tested()[text][cell.row()]["cart"] for cell in cells]
    return [statistics.fmean(at_seed) for at_seed in zip(*of_cells, strict=True)]


def mean_cart(results, cells, text):
    """CART on a text, averaged over cells and windows."""
    return statistics.fmean(cart_values(results, cells, text))


def cart_change(results, cells, text):
    """The Interval over test windows of the cells' CART less the frozen backbone's."""
    pairs = zip(cart_values(results, cells, text), cart_values(results, [INTACT], text),
                strict=True)
    return common.interval([adapted - frozen for adapted, frozen in pairs])


def sliced_cell(results, kernel):
    return dataclasses.replace(best_cell(kernel, results), sliced=True)


# ---- where it comes from -------------------------------------------------------------------------


def study_source():
    """The frozen cell's Result, which has the settings that all cells share."""
    return load_result("study/none")


def study_commands(source, *groups):
    """The command that runs some groups of cells."""
    settings = {**source.settings, "run": list(groups)}
    return (command("-m experiments.study", study.Config, settings),
            "cp runs/study/*.png figures/  # pictures; the cells stand in results/study/ already")


def study_provenance(source):
    """All files of results/study/ and their commits, as a line of Markdown."""
    files = sorted(results_folder().glob("*.json"))
    commits = sorted({common.read_json(path, "commit")["commit"] for path in files})
    named = ", ".join(f"`{commit}`" for commit in commits)
    return (f"[results/study/](results/study/): {len(files)} files, a cell each; commits {named}. "
            f"Frozen backbone: [{source.path()}]({source.path()}), {origin(source)}")


def counted(source, trainings):
    """n of a table of the study. trainings: how often each row was trained."""
    settings = source.settings
    budget = (f"each training is {settings['steps']} steps of "
              f"{study_train.TRAINING['global_batch']} windows of {settings['seqlen']} bytes")
    return (f"{trainings}; {budget}; scored on {settings['seeds']} evaluation seeds of "
            f"{settings['windows']} windows of each text, the same for all rows. ± is Student's "
            "95 %, without a correction for the number of comparisons.")


# ---- sections ------------------------------------------------------------------------------------


def by_text_sentence(results):
    """On which texts which conditioners gain or lose."""
    alike = {}  # (texts gained on, texts lost on): conditioners
    for kernel in CONDITIONERS:
        gaining, losing = gaining_and_losing(results, kernel)
        alike.setdefault((tuple(gaining), tuple(losing)), []).append(kernel)
    parts = []
    for (gaining, losing), kernels in alike.items():
        part = f"{', '.join(kernels)} gain on {', '.join(gaining) or 'none'}"
        if losing:
            part += f" and lose on {', '.join(losing)}"
        parts.append(part)
    return "; ".join(parts)


def gains_section(results, source):
    """Who gains how much."""
    chebyshev = gain_difference(results, "chebyshev", "hypernet")
    dct = gain_difference(results, "dct", "hypernet")
    lora = gain_difference(results, "lora", "hypernet")
    started = {kernel: mean_gain(results, kernel, **DEFAULT_START).mean for kernel in RESTARTED}
    before = {kernel: mean_gain(results, kernel).mean for kernel in RESTARTED}
    by_text = by_text_sentence(results)
    says = f"""
        AdaLN, input injection and LoRA (of Hypernet's size) beside the three geometries, on one
        frozen backbone and one training text, the backbone's own. On average over five texts
        Chebyshev gains {chebyshev.show('+')} and DCT {dct.show('+')} nats per byte more than
        Hypernet; in the paper Hypernet is 1.2 behind. LoRA reads no t at all and gains
        {lora.show('+')} more than Hypernet. By text, beyond both errors: {by_text}.
        From PyTorch's default start injection and AdaLN gain {listed(started)}, against
        {listed(before)} from the start that the other rows have."""
    legend = """
        Each row has the best of three learning rates, chosen on held-out training text. "(the
        edge)" marks a best rate that is the smallest or the largest of the three, so that a better
        one may lie outside. ± joins test windows and training seeds; in brackets stands the error
        of the training seeds alone, by which two rows are compared."""
    return Section(FIRST_SECTION, says, study_commands(source, "frozen", "rates", "seeds"),
                   study_provenance(source),
                   counted(source, "five training seeds for each row"),
                   (wrapped(legend), gain_table(results),
                    *picture("comparisons", "Gains, and costs of a wrong t, by conditioner; gains "
                             "by t")))


def wrong_t_section(results, source):
    """What a wrong t costs, and how rough the modulation is."""
    costs = {kernel: mean_cost(results, kernel).mean for kernel in CONDITIONERS if kernel != "lora"}
    holes = [common.interval(hole_cost(results, best_cell(kernel, results)))
             for kernel in CONDITIONERS]
    highest = max(hole.mean + hole.half for hole in holes)
    rough = roughness_at_one_rate(results)
    says = f"""
        Told another window's t, an adapter loses {listed(costs)} nats per byte. These are costs to
        an adapter that was trained with the right t. They show that it reads t. They are not what
        t is worth, which is the difference to a twin that is trained without t; no such twin is in
        these files.

        The paper explains its order of the geometries by smooth bases. Total variation over range
        measures how rough the modulation is as a function of t (1 where it is monotone). At one
        learning rate, 0.001, and one seed it is {listed(rough, 0)}, and it falls with the rate
        more than it changes with the geometry. Never training at 0.4 < t < 0.6 costs at most
        {highest:.4f} nats per masked byte there (upper end of the widest interval)."""
    return Section("The cost of a wrong t", says,
                   study_commands(source, "frozen", "rates", "seeds", "hole"),
                   SAME_FILES,
                   counted(source, "five training seeds for each row; one in the last column"),
                   (use_table(results),))


def ablation_section(results, source):
    """Table 2 by masking and by retraining."""
    masked = lowest_to_highest(rise_without_A(results, HOWS[0]), sign="+")
    retrained = lowest_to_highest(rise_without_A(results, HOWS[1]), sign="+")
    says = f"""
        Table 2 twice. *Masked*, as published: one trained adapter, of which parts are switched off.
        *Retrained*: an adapter that never had these parts. Of a gain of
        {lowest_to_highest(gain_of_full(results))} nats per byte, masking A costs {masked}, and
        training without A costs {retrained}. Masking shows how much a
        trained adapter leans on a part, retraining whether the others can replace it. The paper's
        +0.18 to +0.25 for A is CART on WikiText over 10 seeds; this table is the ELBO averaged over
        five texts, so the two are not one measure."""
    return Section("Table 2: ablations", says,
                   study_commands(source, "frozen", "rates", "seeds", "ablation"),
                   SAME_FILES,
                   counted(source, "one training seed for each row, so that ± is over test windows "
                           "alone"),
                   (ablation_table(results),
                    *picture("comparisons_ablation", "Table 2 by masking and by retraining, a gap "
                             "in t, single settings")))


def settings_section(results, source):
    """PyTorch's start, and one setting at a time."""
    says = """
        One thing is changed at a time. From PyTorch's default start, without the norm, the
        geometries gain about as much and lose less by a wrong t; injection and AdaLN gain more
        from it. Rank, degree, number of frequencies, CART's p and unbounded shifts change the gain
        by no more than its error."""
    return Section("Starts and single settings", says,
                   study_commands(source, "frozen", "rates", "init", "sweep"),
                   SAME_FILES,
                   counted(source, "one training seed for each row, so that ± is over test windows "
                           "alone"),
                   (titled("PyTorch's default start", change_table(results, "init")),
                    titled("one setting at a time", change_table(results, "sweep"))))


def average_of_texts(results, cell, row=None):
    """CART averaged over the texts."""
    texts = results[cell].tested().values()
    return statistics.fmean(statistics.fmean(rows[row or cell.row()]["cart"]) for rows in texts)


def won_back(results, kernel):
    """The share of the CART that slicing lost which a conditioner wins back."""
    intact, sliced = average_of_texts(results, INTACT), average_of_texts(results, SLICED)
    adapted = average_of_texts(results, sliced_cell(results, kernel))
    return (sliced - adapted) / (sliced - intact)


def sliced_section(results, source):
    """The backbone as the paper's public code loads the released weights."""
    shares = {kernel: won_back(results, kernel) for kernel in CONDITIONERS}
    least, most = min(shares, key=shares.get), max(shares, key=shares.get)
    gains = [statistics.fmean(gain(results, sliced_cell(results, kernel))[-1])
             for kernel in CONDITIONERS]
    says = f"""
        The shipped backbone, loaded as the paper's public code loads the released weights: half of
        the heads, half of the forward Delta read as the backward one, SiLU for gelu. Frozen, it
        scores CART {average_of_texts(results, SLICED):.3f} on average against
        {average_of_texts(results, INTACT):.3f} of the intact one, hardly better than counting
        letters. Conditioners win back {shares[least]:.0%} ({least}) to {shares[most]:.0%} ({most})
        of what slicing lost; their gain in the ELBO is {lowest_to_highest(gains, 2)} nats per
        byte. Loading all heads does this without training.

        The paper's frozen row, CART 4.00, is worse than a uniform guess, about 3.44 for 30,522
        words under the same reduction. Slicing may be why; the released weights were not at hand
        to try."""
    return Section("The sliced backbone", says,
                   study_commands(source, "frozen", "rates", "sliced"),
                   SAME_FILES,
                   counted(source, "one training seed for each row, so that ± is over test windows "
                           "alone"),
                   (titled("CART masked_mean, nats; lower is better", frozen_table(results)),
                    titled("gains on the sliced backbone", change_table(results, "sliced"))))
