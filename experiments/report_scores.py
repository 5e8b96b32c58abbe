"""RESULTS.md, the MaRK paper: the models, Table 1, trivial rows, the adapter's MLP, sampling.

Run:      not a script; report.py writes the page.

Symbols:  none.
Differs from the paper: nothing.
"""
import statistics

import common
import evaluate
import sample
import train
from experiments import pretrain, trivial
from experiments.report_pieces import (Section, command, folded, listed, load_result, picture,
                                       provenance, publish_command, titled)
from mark_adapters import GEOMETRIES


# ---- models --------------------------------------------------------------------------------------


def backbone_section():
    """How the shipped backbone was pretrained, beside trivial predictors."""
    result = load_result("pretrain/small")
    metrics, settings = result.metrics, result.settings
    lines = []
    for text, row in metrics["held_out"].items():
        lines.append([text, f"{row['masked']:,}", f"{metrics['uniform']:.3f}",
                      f"{row['trigram']:.3f}", f"**{row['model']:.3f}**"])
    table = common.markdown(["held-out text", "masked bytes", "uniform", "trigram",
                             "shipped backbone"], *lines)
    says = f"""
        Almost every number below is of this backbone: a Hydra-BERT of {metrics['parameters']:,}
        parameters that reads bytes. It was pretrained at a masking rate of
        {settings['mask_rate']:.0%} on public-domain novels and arXiv abstracts,
        {metrics['train_bytes']:,} bytes, in {metrics['seconds'] / 60:.0f} minutes. The table has
        the cross-entropy of held-out text, in nats per masked byte; lower is better. The trigram
        p(x_i | x_{{i-1}}, x_{{i+1}}) is counted on the same training text, and it sees both true
        neighbours; the backbone is far below it on both texts."""
    counted = (f"one model, one training seed, {settings['eval_windows']} windows of "
               f"{settings['seqlen']} bytes of each text; no interval was computed.")
    made = command("-m experiments.pretrain", pretrain.Config, {**settings, "name": ""},
                   pretrain.PRESETS)
    return Section("The shipped backbone", says, (made, publish_command("pretrain_small", "small")),
                   provenance(result), counted, (table,))


def saved_comparison(result):
    """What `evaluate.compare` returned, from a result of train.py: with its Intervals."""
    found = dict(result.metrics["comparison"])
    for name in ("gain", "wrong_t_cost"):
        found[name] = common.Interval(*found[name])
    for name in ("gain_by_t", "wrong_t_gain_by_t"):
        found[name] = [common.Interval(*in_bin) for in_bin in found[name]]
    right = found["right"]
    found["right"] = {**right, "difference": common.Interval(*right["difference"])}
    return found


def gain_by_t_table(found):
    """Gains of a `saved_comparison` by t."""
    lines = []
    rows = zip(found["gain_by_t"], found["wrong_t_gain_by_t"], strict=True)
    for k, (own, wrong) in enumerate(rows):
        middle = (k + 0.5) / evaluate.BINS
        lines.append([f"{middle:.2f}", own.n, own.show("+", 3), wrong.show("+", 3)])
    return common.markdown(["t", "windows", "gain, nats per masked byte", "told a wrong t"], *lines)


def demo_section():
    """What the first command finds."""
    result = load_result("train/demo_chebyshev")
    settings, found = result.settings, saved_comparison(result)
    right = found["right"]
    more = right["difference"]
    points = common.Interval(100 * more.mean, 100 * more.half, more.n)
    clear = sum(gain.mean > gain.half for gain in found["gain_by_t"])
    says = f"""
        The first command of the README trains a Chebyshev adapter on {result.embedded_text()}, a
        kind of text that is new to the backbone, for {settings['steps']} steps. It gains
        {found['gain'].show('+')} nats per byte of ELBO over the frozen backbone, and it fills
        {right['adapter']:.1%} of the masked bytes right in one pass, {points.show(digits=1)} points
        more. Its gain is clear of zero in {clear} of {evaluate.BINS} bins of t. Told another
        window's t it loses {found['wrong_t_cost'].show()} of the gain, so most of what is learned
        here does not depend on t."""
    counted = (f"one training seed of {settings['steps']} steps of {settings['global_batch']} "
               f"windows of {settings['seqlen']} bytes; {found['windows']} held-out windows; ± is "
               "Student's 95 % over the windows, of paired differences.")
    shown = (evaluate.comparison_table(settings["kernel"], found), gain_by_t_table(found),
             *picture("training_demo_chebyshev", "Held-out loss over training; gain by t; memory "
                      "of the operators at three t over the frozen one's"))
    made = command("train.py", train.Config, {**settings, "name": ""}, train.PRESETS)
    return Section("The first command", says, (made, publish_command("demo_chebyshev")),
                   provenance(result), counted, shown)


def shipped_section():
    """The training runs that made the adapters in assets/."""
    results = {kernel: load_result(f"train/shipped_{kernel}") for kernel in GEOMETRIES}
    lines = []
    for kernel, result in results.items():
        rows = result.metrics["rows"]
        adapted = rows[kernel]
        gap = common.Interval(adapted["gap"], adapted["gap_error"], 0)
        lines.append([kernel, f"{result.metrics['seconds'] / 60:.0f}",
                      f"{rows['frozen']['cart']:.4f}", f"{adapted['cart']:.4f}",
                      f"{rows['frozen']['elbo']:.4f}", f"{adapted['elbo']:.4f}", gap.show("+")])
    table = common.markdown(["adapter", "minutes", "CART, frozen", "CART, adapted", "ELBO, frozen",
                             "ELBO, adapted", "cost of a shuffled t"], *lines)
    settings = results["dct"].settings
    says = f"""
        One adapter of each geometry is shipped, trained for {settings['steps']} steps of
        {settings['global_batch']} windows of {settings['seqlen']} bytes on the backbone's own
        training text. The scores here are those that the training runs printed. They are of few
        windows; [Table 1](#table-1-scores-and-controls) scores the same adapters on more text."""
    counted = (f"one training seed each; {settings['eval_windows']} held-out windows; ± is 1.96 "
               "standard errors of the paired difference over the windows.")
    pictures = []
    for kernel in GEOMETRIES:
        pictures += picture(f"training_shipped_{kernel}",
                            f"Training of the shipped adapter, {kernel}")
    made = command("train.py", train.Config, {**settings, "name": ""}, train.PRESETS)
    return Section("The shipped adapters", says,
                   (made, publish_command("shipped_dct"), "# and --kernel chebyshev, hypernet"),
                   provenance(*results.values()), counted, (table, *pictures))


# ---- Table 1 -------------------------------------------------------------------------------------

FEWER_READ = {  # tables of evaluate.py that repeat the others in another unit
    "CART weight_mean, nats": "CART, divided by the sum of the weights, nats",
    "CART sum, nats per window": "CART, summed over a window, nats",
    "ELBO, bits per byte": "ELBO, bits per byte",
    "perplexity, exp(ELBO)": "perplexity, exp(ELBO)",
}


def evaluate_values(result, metric, row):
    """One value per seed of a row of evaluate/small, each averaged over the texts."""
    texts = result.metrics["scores"].values()
    by_text = [text[row][metric] for text in texts]
    return [statistics.fmean(at_seed) for at_seed in zip(*by_text, strict=True)]


def scores_section():
    """Table 1 with trivial rows, two controls of t and the ELBO."""
    result = load_result("evaluate/small")
    tables, settings = result.metrics["tables"], result.settings
    elbo = {}
    for row in ("frozen", *GEOMETRIES):
        elbo[row] = statistics.fmean(evaluate_values(result, "elbo", row))
    gains = {kernel: elbo["frozen"] - elbo[kernel] for kernel in GEOMETRIES}
    apart = max(gains.values()) - min(gains.values())
    says = f"""
        The shipped adapters on held-out text of the two kinds they were trained on (books, arxiv)
        and on three texts that no model here has seen. On average they gain
        {listed(gains)} nats per byte of ELBO over the frozen backbone. They gain where most of the
        text is masked, for which the backbone's pretraining did not prepare it; on arXiv abstracts
        there is no gain. Told a wrong t, they lose most of what they gained; this is the harm of a
        wrong t to an adapter that was trained with the right one, and not what t is worth. The
        geometries lie within {apart:.4f} nats of each other on average, with one training seed
        each: too little to confirm or to refute the paper's order, 2.55 (Chebyshev), 2.59 (DCT),
        3.77 (Hypernet). No loss can be compared with a published one, as backbone, tokenizer and
        texts are others."""
    counted = (f"{settings['seeds']} evaluation seeds (42, 142, ...); each draws its own "
               f"{settings['windows']} windows of {settings['seqlen']} bytes of each text, t and "
               "masks, which are the same for all rows. ± is 1.96 standard errors over the seeds, "
               "as in the paper (C.3); in the table of differences, of paired differences. It says "
               "nothing about other trainings: one training seed.")
    shown = [titled("CART masked_mean, nats; lower is better", tables["CART masked_mean, nats"]),
             titled("ELBO, nats per byte, paired differences; a positive gain speaks for the "
                    "adapter, a positive cost says that it reads t",
                    tables["ELBO, paired differences"]),
             titled("ELBO, nats per byte; lower is better", tables["ELBO, nats per token"]),
             titled("cross-entropy by t, nats per masked byte, average of the texts",
                    tables["cross-entropy by t, nats per masked token, average"])]
    shown += [folded(title, tables[name]) for name, title in FEWER_READ.items()]
    shown += picture("table1_scores", "The three geometries (filled) gain about the same on each "
                     "text, and nothing on arXiv. On average a wrong t (hollow, half filled) costs "
                     "them most of it. Most of the gain is at t above 0.5")
    made = command("evaluate.py", evaluate.Config, settings)
    return Section("Table 1: scores and controls", says,
                   (made, publish_command("evaluate/shipped", "small")),
                   provenance(result), counted,
                   tuple(shown))


PAPER_CART = {  # Table 1: Hypernet, Chebyshev, DCT
    "wikitext": ("3.73 ± 0.23", "2.55 ± 0.16", "2.55 ± 0.14"),
    "lambada": ("3.70 ± 0.17", "2.40 ± 0.10", "2.47 ± 0.11"),
    "agnews": ("3.91 ± 0.20", "2.85 ± 0.14", "2.86 ± 0.14"),
    "arxiv": ("4.12 ± 0.10", "2.55 ± 0.05", "2.61 ± 0.07"),
}
# github.com/ibitec7/mark at ca55c543f18a, data/ablation_results/cart_benchmark_results.csv:
# raw_nll of Chebyshev on WikiText, 10 seeds. It sums over masked tokens and divides by all.
PAPER_RAW_NLL = common.Interval(3.8244, 1.96 * 0.2774 / 10 ** 0.5, 10)


def trivial_table(scores):
    """Each trivial row with its arithmetic, beside Table 1."""
    lines = []
    for text, rows in scores.items():
        cells = [trivial.product(rows["weight"], rows[name]) for name in trivial.PREDICTORS]
        lines.append([text, *cells, *PAPER_CART[text]])
    return common.markdown(["mean weight x nats per token = CART", *trivial.PREDICTORS,
                            "paper, Hypernet", "paper, Chebyshev", "paper, DCT"], *lines)


def trivial_cart(result, text, name):
    """The Interval over seeds of a predictor's CART."""
    return common.interval(result.metrics["scores"][text][name]["cart"], student=False)


def trivial_section():
    """Predictors that read no context, in the paper's units."""
    result = load_result("trivial/wordpiece")
    found, settings = result.metrics, result.settings
    uniform = trivial_cart(result, "wikitext", "uniform").mean
    unigram = {text: trivial_cart(result, text, "unigram").mean for text in found["scores"]}
    nats = statistics.fmean(found["scores"]["wikitext"]["unigram"]["nats"])
    says = f"""
        Here the vocabulary, the length of a window and the reduction are the paper's. What reads no
        context loses as much at every mask, so its CART is the mean weight, about 1/3, times its
        cross-entropy per token. A uniform guess among {found['choices']:,} tokens scores
        {uniform:.2f} on WikiText, less than the paper's frozen backbone (3.99 to 4.00). A unigram
        counted on WikiText's validation text scores {unigram['wikitext']:.2f} on its test text,
        where the paper's best is 2.55 with an interval of ± 0.14, and {unigram['agnews']:.2f} on AG
        News, where it is 2.85. On LAMBADA and arXiv, of other kinds than what it counted, it stays
        above the paper's best. The paper's repository also holds the loss without weights:
        {PAPER_RAW_NLL.show(digits=2)} nats per token for Chebyshev on WikiText, of which about half
        are masked; half of the unigram's is {nats / 2:.2f}. So on WikiText and AG
        News the published losses do not show that context is read."""
    counted = (f"{settings['seeds']} seeds (42, 142, ...), each with its own t and masks of all "
               f"windows of {settings['seqlen']:,} tokens; ± is 1.96 standard errors over the "
               "seeds, as in the paper (C.3). t is stratified over the windows, so the intervals "
               "are narrower than the paper's. The texts may be cut and cleaned in other ways than "
               "the paper's; arxiv is of abstracts.")
    made = command("-m experiments.trivial", trivial.Config, settings)
    return Section("Trivial predictors in the paper's units", says,
                   (made, publish_command("trivial", "wordpiece")), provenance(result), counted,
                   (trivial_table(found["scores"]),))


NORM_RUNS = ("norm", "plain", "default", "norm4", "plain4")  # of results/train/mlp_chebyshev_*


def norm_section():
    """Does t survive the adapter's MLP? Five trainings of Chebyshev."""
    results = [load_result(f"train/mlp_chebyshev_{run}") for run in NORM_RUNS]
    lines = []
    for result in results:
        settings, spread = result.settings, result.metrics["spread"]
        row = result.metrics["rows"]["chebyshev"]
        gap = common.Interval(row["gap"], row["gap_error"], 0)
        start = {"keep": "orthogonal", "default": "PyTorch's"}[settings["init"]]
        lines.append([f"{settings['lr']:g}", "yes" if settings["mlp_norm"] else "no", start,
                      f"{spread['start']['hidden']:.4f}", f"{spread['end']['hidden']:.4f}",
                      f"{spread['end']['mean']:.4f}", f"{row['cart']:.4f}", f"{row['elbo']:.4f}",
                      gap.show("+")])
    table = common.markdown(["learning rate", "norm", "start", "spread of h over t at the start",
                             "at the end", "of the modulation", "CART", "ELBO",
                             "cost of a shuffled t"], *lines)
    elbo = {run: result.metrics["rows"]["chebyshev"]["elbo"]
            for run, result in zip(NORM_RUNS, results, strict=True)}
    first = results[0]
    says = f"""
        The MLP of an adapter must carry t to its readouts. The spread is the standard deviation
        over t in [0, 1] of the MLP's output h, and of the modulation that is made of it (the mean
        of the seven). Without the norm and with an orthogonal start, a rate of
        {results[-1].settings['lr']:g} ends in collapse: h still varies, the saturated modulation
        does not. The norm prevents this and is the default. At
        {first.settings['lr']:g} the paper's plain MLP (third row) recovers from its start and
        ends {elbo['norm'] - elbo['default']:.4f} nats per byte lower than the default. The text
        was new to the backbone, and in none of the five does a shuffled t cost more than its
        error."""
    counted = (f"one training seed each; {first.settings['eval_windows']} held-out windows of "
               f"{first.settings['seqlen']} bytes of {first.embedded_text()}; ± is 1.96 standard "
               "errors of the paired difference over the windows.")
    made = command("train.py", train.Config, first.settings, train.PRESETS)
    return Section("The norm in the adapter's MLP", says,
                   (made, publish_command("mlp_chebyshev_norm"),
                    "# and with the --lr, --no-mlp-norm and --init default of the rows"),
                   provenance(*results), counted, (table,))


# ---- sampling ------------------------------------------------------------------------------------


def first_texts(result, orders=("random", "confidence")):
    """The first sampled texts of two orders, at the largest number of steps."""
    rows = result.metrics["rows"]
    steps = max(row["steps"] for row in rows)
    lines = []
    for row in rows:
        if row["steps"] == steps and row["text"] in orders:
            lines += [f"{row['text']:>10}: {text}" for text in row["samples"]]
    return "```text\n" + "\n".join(lines) + "\n```"


def bits_at(result, label, steps):
    """(bits per byte, distinct-4) of a row of sample/small."""
    for row in result.metrics["rows"]:
        if row["text"] == label and row["steps"] == steps:
            return row["bits_per_byte"][0], row["distinct"][0]
    raise common.UserError(f"{result.path()} has no {label!r} at {steps} steps")


def sampling_section():
    """Texts sampled in several orders, judged by the frozen backbone."""
    result = load_result("sample/small")
    settings = result.settings
    real, confidence = bits_at(result, "held-out text", 0), bits_at(result, "confidence", 128)
    adapted, frozen = bits_at(result, "random", 128), bits_at(result, "random, frozen", 128)
    says = f"""
        Texts are sampled from nothing but [MASK]s, with the Chebyshev adapter, in several orders
        and numbers of steps, and judged three ways: bits per byte (their ELBO under the frozen
        backbone), entropy of their bytes, and distinct-4 (the share of four-byte pieces that are
        different). Read the three together. At 128 steps the order *confidence* scores
        {confidence[0]:.2f} bits per byte, below real text at {real[0]:.2f}, because it repeats
        itself: distinct-4 is {confidence[1]:.2f} against {real[1]:.2f}. The order *random* at one
        byte a step samples the model's own distribution, as far as its conditionals have one. The
        adapter makes no measurable difference there: {adapted[0]:.2f} with it, {frozen[0]:.2f}
        without."""
    counted = (f"{settings['judged']} texts of {settings['length']} bytes in each cell; ± is 1.96 "
               "jackknife standard errors over the texts.")
    shown = (result.metrics["table"],
             *picture("sampling", "More steps bring the bits per byte of most orders nearer to "
                      "real text (grey, with its interval). At 128 steps the order confidence lies "
                      "below real text in all three panels: it repeats itself"),
             titled("The first three texts (seeds 42, 142, 242) of two orders at 128 steps",
                    first_texts(result)))
    return Section("Sampling", says,
                   (command("sample.py", sample.Config, settings),
                    publish_command("sample/chebyshev", "small")),
                   provenance(result), counted, shown)
