"""The README's one table: what the paper claims beside what was found here.

Run:      not a script; report.py writes it between two comments of README.md.

Each row says on how much it rests, and links to the section of RESULTS.md that shows it.

Symbols:  none.
Differs from the paper: nothing.
"""
import statistics
from typing import NamedTuple

import common
from experiments import (report_cost, report_operators, report_scores, report_study,
                         report_worth)
from experiments.report_pieces import link, load_result, lowest_to_highest
from experiments.study_train import TRAINING
from experiments.study_cells import (DEFAULT_START, INTACT, SLICED, kind_of, read_results,
                                     trained_seeds)
from experiments.study_tables import HOWS
from mark_adapters import GEOMETRIES

OPEN = "<!-- claims -->"
CLOSE = "<!-- /claims -->"


class Claim(NamedTuple):
    """A row of the table. Line breaks count as spaces."""
    paper: str    # what it says, and where
    found: str    # here
    rests: str    # on how much: sections of RESULTS.md, seeds, windows, budget


# ---- the rows ------------------------------------------------------------------------------------


def stability_claim():
    result = load_result("certify/small")
    least = report_operators.least_margins(result)
    below, layers, share = report_operators.layers_below(result, result.settings["dt_min"])
    return Claim(
        "Every layer is stable at every t, if Delta >= 0.001 (4.1, Figure 1)",
        f"""Yes for the small backbone, under this assumption: margins of {least['paper']:.1e} and
        more. Hydra's public code does not enforce it (`dt_limit` is (0, inf)), and on text the
        small backbone breaks it, in {below} of {layers} layers and {share:.0%} of all steps.
        Without it, margins of {least['any text']:.1e} and more are proven for any text, in exact
        arithmetic only""",
        f"""{link('Stability: Figure 1')}; one adapter of each geometry,
        {result.settings['windows']} windows of text""")


def recovery_claim():
    def shown(rates):
        return " and ".join(f"{rate:.2f}" for rate in rates.values())

    result = load_result("synth_lpv/recovery")
    summaries = result.metrics["summary"]
    rates = [f"{rate:.2f}" for rate in report_operators.rates_of(summaries).values()]
    ratios = report_operators.bound_ratios(summaries)
    public = report_operators.published_summaries()
    bound = load_result("synth_lpv/published_bound")
    hypernet = load_result("synth_lpv/published_hypernet")
    ends = report_operators.bound_rates_at_the_end(bound)
    return Claim(
        """Operators are recovered at rates of -0.54 (Hypernet), -0.66 (Chebyshev), -0.64 (DCT)
        (4.2, Figure 2)""",
        f"""At {', '.join(rates)} with true systems of ours, where least squares on the two bases
        lies on the Cramer-Rao bound (error over bound {lowest_to_highest(ratios, 2)}). With those
        of the paper's public script at {shown(report_operators.rates_of(public))} (bases), where
        the bound itself falls at {shown(report_operators.rates_of(public, 'bound_rates'))}: a rate
        steeper than -1/2 is an effect of small N (between the two largest it is {shown(ends)}).
        Those errors are not on the bound
        ({lowest_to_highest(report_operators.bound_ratios(public), 2)} of it), and the public DCT
        and Hypernet truths hardly vary over tau: the best constant operator is off by
        {report_operators.share_that_varies(bound, 'dct'):.1%} and
        {report_operators.share_that_varies(hypernet, 'hypernet'):.2%} of the norm""",
        f"""{link('Operator recovery: Figure 2')}, {link('Operator recovery: the public script')};
        {result.settings['seeds']} seeds (the public Hypernet: {hypernet.settings['seeds']})""")


def memory_claim():
    result = load_result("markov/small")
    apart = report_operators.mean_distances(result).values()
    return Claim(
        "Each t has a memory profile of its own (4.3, Figure 3)",
        f"""Yes. Operators of two t differ by {min(apart):.0%} to {max(apart):.0%} of the frozen
        operator's norm""",
        f"""{link('Memory: Figure 3')}; one adapter of each geometry,
        {result.settings['windows']} windows of text""")


def trivial_claim():
    result = load_result("trivial/wordpiece")
    rows = result.metrics["scores"]["wikitext"]
    cart = {text: report_scores.trivial_cart(result, text, "unigram").show(digits=3)
            for text in result.metrics["scores"]}
    uniform = report_scores.trivial_cart(result, "wikitext", "uniform")
    return Claim(
        """The best CART is 2.55 on WikiText, 2.40 on LAMBADA, 2.85 on AG News, 2.55 on arXiv (Table
        1)""",
        f"""In the same units a unigram, which reads no context, scores {cart['wikitext']} on
        WikiText (mean weight {statistics.fmean(rows['weight']):.3f} x
        {statistics.fmean(rows['unigram']['nats']):.2f} nats), {cart['lambada']} on LAMBADA,
        {cart['agnews']} on AG News, {cart['arxiv']} on arXiv's abstracts; a uniform guess
        {uniform.show(digits=3)} on WikiText, where the paper's frozen backbone has 4.00""",
        f"""{link("Trivial predictors in the paper's units")}; counted on WikiText's validation
        text; {result.settings['seeds']} evaluation seeds; all windows of
        {result.settings['seqlen']:,} tokens; ± is 1.96 standard errors""")


def losses_claim(results, settings):
    seeds = trained_seeds(results, "chebyshev")
    repaired = [report_study.sliced_cell(results, "chebyshev")]

    def wikitext(cells):
        return f"{report_study.mean_cart(results, cells, 'wikitext'):.3f}"

    change = report_study.cart_change(results, seeds, "wikitext").show("+")
    return Claim(
        "CART on WikiText falls from 4.00 (frozen) to 2.55 (Chebyshev) (Table 2)",
        f"""From {wikitext([INTACT])} to {wikitext(seeds)}, a change of {change}. On the small
        backbone loaded as the paper's public code loads the released one, half of it, from
        {wikitext([SLICED])} to {wikitext(repaired)}""",
        f"""{link('Comparisons')}, {link('The sliced backbone')}; ± over test windows; {len(seeds)}
        training seeds (sliced: 1) of {settings['steps']} steps of {TRAINING['global_batch']}
        windows of {settings['seqlen']} bytes, where the paper has 14,400 steps of 112 windows of
        4,096 tokens""")


def geometries_claim(results):
    chebyshev = report_study.gain_difference(results, "chebyshev", "hypernet")
    dct = report_study.gain_difference(results, "dct", "hypernet")
    smooth = load_result("bases/small").metrics["explained"]
    shares = [f"{smooth[name]['mean']['cosines']:.0%}" for name in GEOMETRIES]
    return Claim(
        """Chebyshev (2.55) and DCT (2.59) beat Hypernet (3.77), because their bases are smooth in t
        (Table 1, 4.4)""",
        f"""Beyond Hypernet, Chebyshev gains {chebyshev.show('+')} and DCT {dct.show('+')} nats per
        byte (ELBO). The bases are functions of h, not of t: a DCT adapter is a Hypernet of rank 8.
        The first 8 cosines of t explain {', '.join(shares)} of what they do over t (Hypernet,
        Chebyshev, DCT)""",
        f"""{link('Comparisons')}, {link(report_worth.BASES)}; {chebyshev.n} training seeds, five
        texts; smoothness: one adapter of each geometry""")


def necessary_claim(results):
    masked = report_study.rise_without_A(results, HOWS[0])
    retrained = report_study.rise_without_A(results, HOWS[1])
    whole = statistics.fmean(report_study.gain_of_full(results))
    return Claim(
        "A is necessary: without it CART on WikiText rises by 0.18 to 0.25 (Table 2)",
        f"""Not found here. The ELBO rises by {lowest_to_highest(masked, sign='+')} where A is
        masked after training, and by {lowest_to_highest(retrained, sign='+')} where A was never
        modulated, of a gain of about {whole:.3f}. This is another measure than the paper's, and
        one seed""",
        f"{link('Table 2: ablations')}; 1 training seed, ELBO averaged over five texts")


def shown_difference(found):
    """A Difference of study_worth.py with its number of training seeds, as text."""
    if found is None:
        return "(not trained yet)"
    return f"{found.show()} (n = {found.n})"


def conditioning_claim(results):
    def gain(world, kernel):
        kind = kind_of(world, kernel)
        return shown_difference(report_worth.gain_of(results, kind))

    def worth(world, kernel):
        kind = kind_of(world, kernel)
        return shown_difference(report_worth.worth_of(results, kind))

    near = [report_study.mean_gain(results, kernel).mean for kernel in GEOMETRIES]
    adaln = report_study.mean_gain(results, "adaln", **DEFAULT_START)
    return Claim(
        """Operator modulation conditions an SSM beyond input injection and AdaLN (abstract); none
        of them is trained for comparison (A.5)""",
        f"""In nats per byte: on the backbone's own kind of text the geometries gain
        {lowest_to_highest(near)}, AdaLN {adaln.show('+')}. On a new text, under masks, Chebyshev
        gains {gain('new', 'chebyshev')} and LoRA, which reads no t, {gain('new', 'lora')}; t is
        worth {worth('new', 'chebyshev')} to Chebyshev. With random bytes in place of masks, which
        do not show t, t is worth {worth('bytes', 'chebyshev')} to Chebyshev and
        {worth('bytes', 'lora+chebyshev')} to LoRA with Chebyshev""",
        f"""{link(report_worth.MASKS)}, {link(report_worth.BYTES)}, {link('Comparisons')}; n is the
        number of training seeds so far; ± over seeds and test windows""")


def cost_claim():
    result = load_result("bench/laptop")
    fewest, most = report_cost.operations_alone(result)
    share = report_cost.largest_share_alone(result)
    return Claim(
        "14 to 16 % slower at length 4096 on an A100 (Table 3)",
        f"""No GPU was at hand. At the released size on a CPU an adapter alone takes at most
        {share:.2%} of a pass, in {fewest} to {most} operations for all layers; most overheads of
        the small model are within their errors""",
        f"""{link('Cost: Table 3')}; {result.settings['seeds']} seeds of
        {result.settings['passes']} passes on two cores""")


# ---- the table -----------------------------------------------------------------------------------


def claims_table():
    """The table, in Markdown."""
    results = read_results()
    settings = report_study.study_source().settings
    claims = (stability_claim(), recovery_claim(), memory_claim(), trivial_claim(),
              losses_claim(results, settings), geometries_claim(results),
              necessary_claim(results), conditioning_claim(results), cost_claim())
    lines = []
    for claim in claims:
        lines.append([" ".join(cell.split()) for cell in claim])
    return common.markdown(["the paper says", "found here", "it rests on"], *lines)


def with_claims(text, table):
    """`text` with the table between OPEN and CLOSE; unchanged where it has no such pair."""
    before, opened, rest = text.partition(OPEN)
    _, closed, after = rest.partition(CLOSE)
    if not opened or not closed:
        return text
    return f"{before}{OPEN}\n{table}\n{CLOSE}{after}"
