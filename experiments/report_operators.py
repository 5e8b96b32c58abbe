"""RESULTS.md, the MaRK paper: stability, memory and recovery of operators (Figures 1 to 3).

Run:      not a script; report.py writes the page.

Symbols:  none.
Differs from the paper: nothing.
"""
import math
import statistics
import types

import numpy as np

import certify
import common
import markov
import synth_lpv
from experiments.report_pieces import (Section, command, listed, load_result, lowest_to_highest,
                                       picture, provenance, publish_command, titled, wrapped)
from mark_adapters import GEOMETRIES

# ---- Figure 1 ------------------------------------------------------------------------------------


def least_margins(result):
    """{hypothesis: the least margin of any adapter and layer} of certify/small."""
    least = {}
    for found in result.metrics["adapters"].values():
        for hypothesis, certificate in found["margins"].items():
            margin = min(certificate["epsilon"])
            least[hypothesis] = min(margin, least.get(hypothesis, math.inf))
    return least


def layers_below(result, floor):
    """(layers in which some step on the text is below `floor`, layers, share of steps below it)."""
    found = result.metrics["adapters"]["chebyshev"]
    smallest = [min(heads) for heads in found["dt"]]
    below = sum(dt < floor for dt in smallest)
    return below, len(smallest), found["share_below"]


def layers_float32_rounds(result):
    """In how many layers of certify/small the slowest decay of "any text" is 1 in float32."""
    most = 0
    for found in result.metrics["adapters"].values():
        epsilons = found["margins"]["any text"]["epsilon"]
        most = max(most, sum(epsilon <= certify.FLOAT32 for epsilon in epsilons))
    return most


def stability_section():
    """Algorithm 4's certificate, and what holds on text."""
    result = load_result("certify/small")
    settings = result.settings
    least = least_margins(result)
    below, layers, share = layers_below(result, settings["dt_min"])
    half_life = max(max(found["margins"]["any text"]["half_life"])
                    for found in result.metrics["adapters"].values())
    says = f"""
        Every layer of the small backbone passes Algorithm 4, with a margin epsilon = 1 - rho^2 of
        at least {least['paper']:.1e}. But the algorithm assumes Delta >= {settings['dt_min']:g},
        and nothing in Delta = softplus(Delta_in + dt_bias') enforces that. In Hydra's public code
        0.001 is `dt_min`, where softplus(dt_bias) starts before training, and `dt_limit` is (0,
        inf), which cuts nothing off. On text, masked at random t, the small backbone with the
        Chebyshev adapter falls below it in {below} of {layers} layers, in {share:.0%} of all
        steps. This is a finding about the small backbone; the released weights were not at hand.

        The last of the five hypotheses below assumes nothing of the text; its margins are at least
        {least['any text']:.1e}, a state that halves in {half_life:,.0f} steps at worst. They hold
        in exact arithmetic alone: float32 rounds exp(-rate) to 1 where the margin is below
        {certify.FLOAT32:.0e}, which is so in {layers_float32_rounds(result)} of {layers}
        layers."""
    legend = """
        The five hypotheses. *paper*: a shift of A_log of -0.5, and Delta >= 0.001. *own beta_A*:
        the layer's learned bound in place of 0.5. *reached*: the lowest shift on a grid of t. *this
        text*: that shift, and each head's smallest Delta on a text. *any text*: bounds that are
        proven for every text, because the LayerNorm before a layer limits what the layer can
        read."""
    tables = []
    for kernel in GEOMETRIES:
        title = f"epsilon by layer with the {kernel} adapter, and what was met on the text"
        tables.append(titled(title, result.metrics["adapters"][kernel]["table"]))
    counted = (f"every layer of one model with one adapter of each geometry; *this text* is "
               f"{settings['windows']} windows of {settings['seqlen']} bytes of "
               f"{result.embedded_text()}, each at two t. Minima, so there is no ±.")
    shown = [titled("Algorithm 4 on the backbone: shift -0.5, Delta >= 0.001",
                    result.metrics["table"]), wrapped(legend), *tables,
             *picture("fig1_certificate", "Margins of the layers under the five hypotheses")]
    made = command("certify.py", certify.Config, settings)
    return Section("Stability: Figure 1", says, (made, publish_command("certify/shipped", "small")),
                   provenance(result), counted, tuple(shown))


# ---- Figure 3 ------------------------------------------------------------------------------------


def distances_between_times(found):
    """Distances of the operators of two times of an adapter of markov/small, in shares of the
    frozen operator's norm. The last row and column of the matrix are the frozen operator.
    """
    matrix = found["distance"][:-1]
    between = []
    for i, row in enumerate(matrix):
        between += row[:i]
    return between


def mean_distances(result):
    """{adapter: the mean distance of two times} of markov/small."""
    return {name: statistics.fmean(distances_between_times(found))
            for name, found in result.metrics["adapters"].items()}


def change_at_lag(result, lag, time):
    """{adapter: Markov parameters at a lag and a time over frozen's, less 1}; time is 0 to 4."""
    at = result.metrics["lags"].index(float(lag))
    return {name: found["profile"][time][at] / found["profile_frozen"][at] - 1
            for name, found in result.metrics["adapters"].items()}


def layers_that_shorten(found):
    """(layers whose half-life, averaged over t, is below the frozen one's; layers)."""
    frozen = found["half_life_frozen"]
    means = [statistics.fmean(over_t) for over_t in zip(*found["half_life"], strict=True)]
    shorter = sum(mean < before for mean, before in zip(means, frozen, strict=True))
    return shorter, len(frozen)


def decades_to_bound(result):
    """The smallest and largest log10 of Lemma B.2's bound over the frozen Markov parameters."""
    decades = []
    for found in result.metrics["adapters"].values():
        for bound, value in zip(found["bound"], found["profile_frozen"], strict=True):
            decades.append(math.log10(bound / value))
    return min(decades), max(decades)


def memory_section():
    """What each layer remembers at each t."""
    result = load_result("markov/small")
    settings = result.settings
    near, far = change_at_lag(result, 10, 4), change_at_lag(result, 1024, 4)
    early = change_at_lag(result, 35, 1)
    shorter = []
    for name, found in result.metrics["adapters"].items():
        count, layers = layers_that_shorten(found)
        shorter.append(f"{count} of {layers} layers ({name})")
    low, high = decades_to_bound(result)
    apart = mean_distances(result).values()
    says = f"""
        A head has one decay, so its Markov parameters h_k = C' A-bar'^k B-bar', what it remembers
        of the byte k + 1 positions back, have a closed form. Here they are averaged (root mean
        square) over heads, layers, both directions and the bytes of one real text, while the
        adapter is told different t. Operators of two times differ by
        {lowest_to_highest(apart, 2)} of the frozen operator's norm on average: these adapters do
        use t.

        All three geometries learned much the same. At t = 1 they raise the Markov parameters, by
        {lowest_to_highest(near.values(), 2)} at lag 10 and by
        {lowest_to_highest(far.values(), 2)} at lag 1024; at t = 0.25 they change those at lag 35
        by {lowest_to_highest(early.values(), 2, '+')}. The half-life, averaged over t, falls in
        {', '.join(shorter)}. Lemma B.2's bound holds and lies {low:.1f} to {high:.1f} decades
        above the frozen curve."""
    counted = (f"one adapter of each geometry, one training seed; {settings['windows']} windows of "
               f"{settings['seqlen']} bytes of {result.embedded_text()}, {settings['masked']:.0%} "
               f"masked; {settings['grid']} times. No interval: these are properties of the "
               "adapters on one sample.")
    shown = [result.metrics["table"],
             *picture("fig3_profiles", "Markov parameters by lag, at five t, and the frozen ones"),
             *picture("fig3_operators", "Half-life by layer and t, and distances between the "
                      "operators of two t; an adapter that ignored t would show no distance"),
             *picture("fig3_coefficients", "What each layer learned: magnitudes, Chebyshev and DCT "
                      "components"),
             *picture("mixer_matrix", "The matrix of eq. 11 that a layer multiplies a sentence "
                      "with, for three heads of the frozen backbone, log scale")]
    made = command("markov.py", markov.Config, settings)
    return Section("Memory: Figure 3", says, (made, publish_command("markov/shipped", "small")),
                   provenance(result), counted, tuple(shown))


# ---- Figure 2 ------------------------------------------------------------------------------------


def recovery_table(result):
    """Its table without the note below it."""
    return result.metrics["table"].partition("\n\n")[0]


def rates_of(summaries, name="rates"):
    """{kernel: exponent of N between the smallest and the largest N}, of the error or, with its
    name, of a bound."""
    return {kernel: found[name][0] for kernel, found in summaries.items() if name in found}


def bound_ratios(summaries, name="ratio"):
    """Error over the Cramer-Rao bound, of every kernel that has one and every N."""
    ratios = []
    for found in summaries.values():
        ratios += found.get(name, [])
    return ratios


def bound_rates_at_the_end(result):
    """{kernel: exponent of the Cramer-Rao bound between the two largest N}."""
    sizes = result.settings["sizes"]
    rates = {}
    for kernel, found in result.metrics["summary"].items():
        if "bound" in found:
            *_, before, last = found["bound"]
            rates[kernel] = math.log(last / before) / math.log(sizes[-1] / sizes[-2])
    return rates


def published_summaries():
    """{kernel: summary} of the two bases under the settings of the public script. The fits are
    those of synth_lpv/published, the bounds those of synth_lpv/published_bound.

    Raises UserError unless both files are of the same systems.
    """
    fits = load_result("synth_lpv/published").metrics["kernels"]
    bounds = load_result("synth_lpv/published_bound").metrics["kernels"]
    summaries = {}
    for kernel, record in fits.items():
        other = bounds[kernel]
        for same in ("seeds", "norm", "start"):
            if not np.allclose(record[same], other[same], rtol=1e-9, atol=0):
                raise common.UserError(f"synth_lpv/published_bound: {kernel} has another {same} "
                                       "than synth_lpv/published; publish both anew")
        sizes = {}
        for size, row in record["sizes"].items():
            found = other["sizes"][size]
            sizes[size] = row | {name: found[name] for name in ("bound", "bound_with_start")}
        summaries[kernel] = synth_lpv.summarise(record | {"sizes": sizes})
    return summaries


def share_that_varies(result, kernel):
    """The error of the best constant operator over the norm of the true one: median over seeds."""
    record = result.metrics["kernels"][kernel]
    pairs = zip(record["constant"], record["norm"], strict=True)
    return statistics.median(constant / norm for constant, norm in pairs)


def published_table():
    """The table of `published_summaries`."""
    settings = load_result("synth_lpv/published").settings
    cfg = types.SimpleNamespace(sizes=settings["sizes"], seeds=settings["seeds"],
                                public_scaling=True)
    return synth_lpv.recovery_table(published_summaries(), cfg).partition("\n\n")[0]


def recovery_section():
    """Do fits recover known operators, and how fast?"""
    result = load_result("synth_lpv/recovery")
    summaries = result.metrics["summary"]
    ends = bound_rates_at_the_end(result)
    sizes = result.settings["sizes"]
    says = f"""
        True systems are drawn by Algorithms 5 to 7, N noisy trajectories of each are observed, and
        systems of the same form are fitted. From N = {sizes[0]} to {sizes[-1]} the error falls as
        N to the power {listed(rates_of(summaries), 2)}; the paper reports -0.54, -0.66 and -0.64.
        The Cramer-Rao bound stands beside the error for the two bases, and least squares lies on
        it: error over bound is {lowest_to_highest(bound_ratios(summaries), 2)}. So the bound
        explains our rates; for the paper's see the next section, as the true systems, the start
        and the stopping are ours here. Rates steeper than -1/2 are an effect of small N: between
        the two largest N the bound falls at {listed(ends, 2)}. The Hypernet has no bound (its
        information is singular), and its rate depends on the budget of Adam.

        The fits start at a noisy copy of the truth. Counted as data, that is a measurement of the
        truth, and the bound is lower; least squares does not use it and stays above that bound."""
    legend = """
        MOE is the root mean square over tau of the error of the first 15 Markov parameters; B.2
        proves N^-1/2 for its square, which is N^-1/4 for itself. kappa_pe says how well the inputs
        excite; it is 1 for endless white noise."""
    shown = (wrapped(legend), recovery_table(result),
             *picture("fig2_recovery", "The error of the two bases (blue) falls with the "
                      "Cramer-Rao bound (green), a little faster than N^-1/2 (dashed); that of the "
                      "Hypernet, which has no bound, falls more slowly"))
    return Section("Operator recovery: Figure 2", says,
                   (command("synth_lpv.py", synth_lpv.Config, result.settings, synth_lpv.PRESETS),
                    publish_command("synth_lpv/recovery")),
                   provenance(result), recovery_count(result), shown)


def recovery_count(*results):
    seeds = " and ".join(f"{result.settings['seeds']}" for result in results)
    return (f"{seeds} seeds, each with its own truth, data and start; ± is 1.96 standard errors "
            "over the seeds, as in the paper. A fit that diverged is left out, and the table says "
            "so.")


def recovery_commands(results):
    """The commands that make some results of synth_lpv.py, and publish them."""
    commands = []
    for result in results:
        settings = dict(result.settings)
        if settings.pop("published", False):  # of an older file: what is a preset now
            settings = {"preset": "published"}
        commands.append(command("synth_lpv.py", synth_lpv.Config, settings, synth_lpv.PRESETS))
        commands.append(publish_command(result.name))
    return tuple(commands)


def published_section():
    """The settings of the paper's public script, on the two bases."""
    fits = load_result("synth_lpv/published")
    bound = load_result("synth_lpv/published_bound")
    shown = (titled("the fits of `published` and the bounds of `published_bound`, of the same "
                    "systems and data", published_table()),
             *picture("fig2_published", "With the settings of the public script the error falls "
                      "about as fast as published, and so does the Cramer-Rao bound (green); up to "
                      "N = 200 the DCT fit is worse than its own start (grey)"))
    return Section("Operator recovery: the public script", published_says(bound),
                   recovery_commands((fits, bound)), provenance(fits, bound), recovery_count(fits),
                   shown)


def other_recoveries_section():
    """The public script's Hypernet, and Adam in place of least squares."""
    hypernet = load_result("synth_lpv/published_hypernet")
    adam = load_result("synth_lpv/adam")
    shown = (titled("the public script's Hypernet", recovery_table(hypernet)),
             titled("Adam in place of least squares", recovery_table(adam)),
             *picture("fig2_adam", "Adam with a small budget stops at an error that hardly depends "
                      "on N: its rate is a fact about the budget"))
    return Section("Operator recovery: other settings",
                   f"{hypernet_says(hypernet)}\n\n{adam_says(adam)}",
                   recovery_commands((hypernet, adam)), provenance(hypernet, adam),
                   recovery_count(hypernet, adam), shown)


def published_says(bound):
    """What was found on the two bases under the settings of the public script."""
    found = published_summaries()
    dct = found["dct"]
    apart = {}
    with_start = {}
    for kernel, summary in found.items():
        apart[kernel] = lowest_to_highest(summary["ratio"], 2)
        with_start[kernel] = lowest_to_highest(summary["ratio_with_start"], 1)
    return f"""
        With the settings of the paper's public script, on the two bases, the rates are
        {listed(rates_of(found), 2)}. The Cramer-Rao bound of the same systems falls at
        {listed(rates_of(found, 'bound_rates'), 2)}, and between the two largest N at
        {listed(bound_rates_at_the_end(bound), 2)}. So exponents steeper than -1/2, such as the
        paper's, are to be expected at such N. They do not show that a fit is efficient, and these
        are not on the bound: error over bound is {apart['chebyshev']} (chebyshev) and
        {apart['dct']} (dct). A fit below it is biased, here to its start, a noisy copy of the
        truth. Where the start counts as data, the bound falls at
        {listed(rates_of(found, 'bound_rates_with_start'), 2)} only, and the errors are
        {with_start['chebyshev']} (chebyshev) and {with_start['dct']} (dct)
        times as large: the fits are far from the best that their start and data allow.

        The DCT truth hardly varies over tau there: the best constant operator is off by
        {dct['constant'].mean:.3f} ({share_that_varies(bound, 'dct'):.1%} of the operator's norm,
        the median over seeds) and the start of the fit by {dct['start'].mean:.3f}, while the fits
        end at {dct['moe'][0].mean:.3f} (smallest N, farther off than their start) to
        {dct['moe'][-1].mean:.3f} (largest N)."""


def hypernet_says(hypernet):
    """What was found on the public script's Hypernet."""
    settings = hypernet.settings
    found = hypernet.metrics["summary"]["hypernet"]
    errors = [mean for mean, _, _ in found["moe"]]
    return f"""
        The public script's Hypernet is {settings['width']} wide; all of it would take hours here,
        so this is N = {', '.join(map(str, settings['sizes']))} with {settings['seeds']} seeds, too
        few for a rate to compare with -0.54. Its true systems hardly vary over tau: layers that
        start as PyTorch's do pass little of it on, and the best constant operator is off by
        {share_that_varies(hypernet, 'hypernet'):.2%} of the operator's norm (the median over
        seeds). From a start that is off by {found['start'][0]:.3f} the fits end at
        {lowest_to_highest(errors)}."""


def adam_says(adam):
    """What a small budget of Adam does under our settings."""
    found = adam.metrics["summary"]
    above = bound_ratios(found, "ratio_with_start")
    return f"""
        With our truths and {adam.settings['steps']} steps of Adam in place of least squares, the
        rates are {listed(rates_of(found), 2)}: the fits still show their start, whatever N is. At
        the smallest N they lie below the Cramer-Rao bound, which holds for unbiased estimators
        only. The bound that counts the start as data they exceed everywhere,
        {lowest_to_highest(above, 1)} times. So an exponent alone does not tell a good estimator
        from a bad one."""
