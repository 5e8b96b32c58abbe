"""RESULTS.md, the MaRK paper: stability, memory and recovery of operators (Figures 1 to 3).

Run:      not a script; report.py writes the page.

Symbols:  none.
Differs from the paper: nothing.
"""
import math
import statistics

import certify
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


def stability_section():
    """Algorithm 4's certificate, and what holds on text."""
    result = load_result("certify/small")
    settings = result.settings
    least = least_margins(result)
    below, layers, share = layers_below(result, settings["dt_min"])
    half_life = max(max(found["margins"]["any text"]["half_life"])
                    for found in result.metrics["adapters"].values())
    says = f"""
        Every layer passes Algorithm 4, with a margin epsilon = 1 - rho^2 of at least
        {least['paper']:.1e}. But the algorithm assumes Delta >= {settings['dt_min']:g}, and
        nothing in Delta = softplus(Delta_in + dt_bias') enforces that. On text, masked at random
        t, the small backbone with the Chebyshev adapter falls below it in {below} of {layers}
        layers, in {share:.0%} of all steps. This is a finding about the small backbone; the
        released weights were not at hand. The last of the five hypotheses below assumes nothing of
        the text; its margins are at least {least['any text']:.1e}, a state that halves in
        {half_life:,.0f} steps at worst. They hold in exact arithmetic: in float32, exp(-rate)
        rounds to 1 where the margin is below 6e-8."""
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


def rates_of(result):
    """{kernel: exponent of N between the smallest and the largest N}."""
    return {kernel: found["rates"][0] for kernel, found in result.metrics["summary"].items()}


def bound_ratios(result):
    """Error over the Cramer-Rao bound, of every kernel that has one and every N."""
    ratios = []
    for found in result.metrics["summary"].values():
        ratios += found.get("ratio", [])
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


def recovery_section():
    """Do fits recover known operators, and how fast?"""
    result = load_result("synth_lpv/recovery")
    ends = bound_rates_at_the_end(result)
    sizes = result.settings["sizes"]
    says = f"""
        True systems are drawn by Algorithms 5 to 7, N noisy trajectories of each are observed, and
        systems of the same form are fitted. From N = {sizes[0]} to {sizes[-1]} the error falls as
        N to the power {listed(rates_of(result), 2)}; the paper reports -0.54, -0.66 and -0.64. The
        Cramer-Rao bound stands beside the error for the two bases, and least squares lies on
        it: error over bound is {lowest_to_highest(bound_ratios(result), 2)}. So the bound explains
        our rates. It does not explain the paper's: the paper leaves the true systems, the start
        and the stopping open, and ours differ from those of its public script. Rates steeper than
        -1/2 are an effect of small N: between the two largest N the bound falls at
        {listed(ends, 2)}. The Hypernet has no bound (its information is singular), and its rate
        depends on the budget of Adam."""
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


def recovery_count(result):
    return (f"{result.settings['seeds']} seeds, each with its own truth, data and start; ± is 1.96 "
            "standard errors over the seeds, as in the paper. A fit that diverged is left out, and "
            "the table says so.")


def other_recoveries_section():
    """The paper's public settings, and Adam in place of least squares."""
    published = load_result("synth_lpv/published")
    adam = load_result("synth_lpv/adam")
    rates = rates_of(published)
    dct = published.metrics["summary"]["dct"]
    settings = dict(published.settings)
    if settings.pop("published", False):  # of an older file: what is a preset now
        settings = {"preset": "published"}
    says = f"""
        With the settings of the paper's public script, on the two bases, the rates are
        {listed(rates, 2)}. No Cramer-Rao bound was computed for these settings. The DCT truth
        hardly varies over tau there: the best constant operator is off by
        {dct['constant'][0]:.3f} and the start of the fit by {dct['start'][0]:.3f}, while the fits
        end at {dct['moe'][0][0]:.3f} (smallest N, farther off than their start) to
        {dct['moe'][-1][0]:.3f} (largest N).

        With our truths and {adam.settings['steps']} steps of Adam in place of least squares, the
        rates are {listed(rates_of(adam), 2)}: the fits still show their start, a noisy copy of
        the truth, whatever N is. At the smallest N they lie below the Cramer-Rao bound, which
        holds for unbiased estimators only. So an exponent alone does not tell a good estimator
        from a bad one."""
    made = (command("synth_lpv.py", synth_lpv.Config, settings, synth_lpv.PRESETS),
            publish_command("synth_lpv/published"),
            command("synth_lpv.py", synth_lpv.Config, adam.settings, synth_lpv.PRESETS),
            publish_command("synth_lpv/adam"))
    shown = (titled("the settings of the public script", recovery_table(published)),
             *picture("fig2_published", "With the settings of the public script the error falls "
                      "about as fast as published; up to N = 200 the DCT fit is worse than its own "
                      "start (grey)"),
             titled("Adam in place of least squares", recovery_table(adam)),
             *picture("fig2_adam", "Adam with a small budget stops at an error that hardly depends "
                      "on N: its rate is a fact about the budget"))
    return Section("Operator recovery: other settings", says, made, provenance(published, adam),
                   recovery_count(published), shown)
