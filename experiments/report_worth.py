"""RESULTS.md, the MaRK paper: what t is worth, to whom and where (4.4, A.5).

Run:      not a script; report.py writes the page.

Symbols:  results  {Cell: CellResult}, see study_cells.py
          world    a text, a kind of noise and a backbone, see study_cells.py
Differs from the paper: it has none of this. It compares no conditioner with one that is not told t.
"""
import common
from experiments import bases, study, study_train
from experiments.report_pieces import (Section, command, load_result, origin, picture,
                                       provenance, publish_command, titled, wrapped)
from experiments.study_cells import (BLIND, TRAINING_SEEDS, Cell, kind_of, kinds_of,
                                     results_folder, seeds_of)
from experiments.study_worth import (difference, gain_lines, gains, has_twins, label_of,
                                     reported, shown_kinds, values_of, worth, worth_lines)

MASKS = "What t is worth under masks"
BYTES = "What t is worth where it cannot be seen"
NEAR = "What t is worth on the backbone's own kind of text"
PRETRAINED = "What pretraining decides"
BASES = "Are the bases smooth in t?"
BACKBONES = {"new": "30 % masked (shipped)", "mask15": "15 % masked",
             "uniform": "t uniform in [0, 1]"}


# ---- numbers -------------------------------------------------------------------------------------


def gain_of(results, kind):
    """The Difference of a kind's gain, or None where it has no result yet."""
    grid = gains(results, kind, reported(kind.world, results))
    return difference(grid) if grid else None


def worth_of(results, kind):
    """The Difference of what t is worth to a kind, or None."""
    grid = worth(results, kind, reported(kind.world, results))
    return difference(grid) if grid else None


def listed_gains(results, world, kinds):
    """What some kinds gain, as text."""
    parts = []
    for kind in kinds:
        found = gain_of(results, kind)
        if found is not None:
            parts.append(f"{label_of(kind)} {found.show()}")
    return ", ".join(parts)


def listed_worth(results, world):
    """What t is worth to every conditioner of a world that has a twin, as text."""
    parts = []
    for kind in shown_kinds(world, results):
        found = worth_of(results, kind)
        if found is not None:
            parts.append(f"{found.show()} to {label_of(kind)}")
    return ", ".join(parts)


def share_of_ceiling(results, world):
    """What share of full fine-tuning's gain the others reach, as a sentence; empty without it."""
    ceiling = gain_of(results, kind_of(world, "finetune"))
    if ceiling is None:
        return ""
    parts = []
    for kernel in ("chebyshev", "static", "lora"):
        found = gain_of(results, kind_of(world, kernel))
        if found is not None:
            parts.append(f"{kernel} {found.mean / ceiling.mean:.0%}")
    return (f"Of what full fine-tuning gains that is {', '.join(parts)}. (static: the seven "
            "modulated parameters as plain numbers, without t and without a network.)")


def missing(results, world):
    """Which kinds of a world have not been trained on all seeds yet, as a sentence."""
    none, few = [], []
    for kind in kinds_of(world):
        name = label_of(kind) + (", blind" if kind.blind else "")
        n = len(seeds_of(kind, results))
        if n == 0:
            none.append(name)
        elif n < len(TRAINING_SEEDS):
            few.append(f"{name} ({n})")
    said = ""
    if few:
        said += f"Fewer than {len(TRAINING_SEEDS)} training seeds so far: {', '.join(few)}. "
    if none:
        said += f"Not trained yet, or the best rate not known: {', '.join(none)}."
    return said


# ---- where it comes from -------------------------------------------------------------------------


def cells_source(world):
    """The files of a world and their commits, as a line of Markdown."""
    files = sorted(results_folder().glob(f"{world}_*.json"))
    if world == "near":
        files = sorted(results_folder().glob("*blind-True*.json"))
    commits = sorted({common.read_json(path, "commit")["commit"] for path in files})
    named = ", ".join(f"`{commit}`" for commit in commits)
    frozen = "none" if world == "near" else f"{world}_none"
    source = load_result(f"study/{frozen}")
    return (f"[results/study/](results/study/): the files whose names begin with `{world}_`, a "
            f"cell each; commits {named}. Frozen backbone: [{source.path()}]({source.path()}), "
            f"{origin(source)}")


def run_command(group):
    """The command that runs a group of cells."""
    settings = {**load_result("study/none").settings, "run": [group]}
    if group == "pretraining":
        settings["backbones"] = ["mask15=runs/pretrain_mask15/backbone.safetensors",
                                 "uniform=runs/pretrain_uniform/backbone.safetensors"]
    return (command("-m experiments.study", study.Config, settings),
            "cp runs/study/*.png figures/  # pictures; the cells stand in results/study/ already")


def counted(scored_on):
    """n of a table."""
    settings = load_result("study/none").settings
    return (f"training seeds stand in the table; each training is {settings['steps']} steps of "
            f"{study_train.TRAINING['global_batch']} windows of {settings['seqlen']} bytes on one "
            f"thread; scored on {scored_on}, {settings['seeds']} evaluation seeds of "
            f"{settings['windows']} windows, the same for all rows. ± is Student's 95 % over "
            "training seeds and test windows together, of one training seed over test windows "
            "alone; p is Holm's over the rows of the table. "
            "Costs of a wrong t are of one training seed, ± over evaluation seeds.")


LEGEND = """
    *t is worth* what the blind twin loses: the same adapter, trained and scored with t = 0.5
    throughout. The twin has the rate that is best for the one that is told t, which favours t.
    Rates lie a factor of 2 apart and were tried until the best was at no edge. They were chosen on
    one half of the held-out documents of the training text; the table is of the other half."""


# ---- sections ------------------------------------------------------------------------------------


def masks_section(results):
    """A new text under masks."""
    world = "new"
    says = f"""
        On a text that the backbone has not seen, tiny Shakespeare, the conditioners gain in nats
        per byte: {listed_gains(results, world, shown_kinds(world, results))}.
        {share_of_ceiling(results, world)}

        t is worth {listed_worth(results, world)}. What a wrong t costs is another number: it is a
        cost to an adapter that was trained to rely on the right one. Masks show how many tokens are
        hidden, so a model can read t off its input, and an ideal one needs none (arXiv 2406.03736,
        Theorem 1; arXiv 2409.02908). {missing(results, world)}"""
    return Section(MASKS, says, run_command(world), cells_source(world),
                   counted("the other half of the held-out part of tiny Shakespeare"),
                   (wrapped(LEGEND), titled("gains", gain_lines(world, results)),
                    titled("what t is worth", worth_lines(world, results)),
                    *picture("worth", "What conditioners gain with and without t, and what t is "
                             "worth by t")))


def bytes_section(results):
    """The same text with random bytes in place of masks."""
    world = "bytes"
    says = f"""
        A mask says of itself that it is noise; a random byte does not. Here each byte is replaced
        with probability t by a random one of the text's alphabet, and the loss is the cross-entropy
        of the clean byte at every place (the uniform process of D3PM, arXiv 2107.03006; a model of
        text with it is arXiv 2412.10193). The backbone has not been trained on such noise.
        Conditioners gain {listed_gains(results, world, shown_kinds(world, results))}.

        Here t is worth {listed_worth(results, world)}. {missing(results, world)}"""
    return Section(BYTES, says, run_command(world), cells_source(world),
                   counted("the other half of the held-out part of tiny Shakespeare; cross-entropy "
                           "in nats per byte, which is not a bound on the likelihood"),
                   (titled("gains", gain_lines(world, results)),
                    titled("what t is worth", worth_lines(world, results))))


def near_section(results):
    """The backbone's own kind of text."""
    world = "near"
    says = f"""
        On novels and abstracts, the kind of text that the backbone was pretrained on, conditioners
        gain, on average over five test texts,
        {listed_gains(results, world, shown_kinds(world, results))}. t is worth
        {listed_worth(results, world)}. {missing(results, world)}"""
    return Section(NEAR, says, run_command(world), cells_source(world),
                   counted("five test texts"),
                   (titled("gains", gain_lines(world, results)),
                    titled("what t is worth", worth_lines(world, results))))


def pretraining_lines(results):
    """Markdown: what conditioners gain on backbones that were pretrained otherwise."""
    kinds = ("chebyshev", "lora", "finetune")
    lines = []
    for world, label in BACKBONES.items():
        if Cell("none", world=world) not in results:
            continue
        frozen = values_of(results, Cell("none", world=world), reported(world, results),
                           Cell("none").row())
        chebyshev = kind_of(world, "chebyshev")
        cells = [common.interval(frozen).show()]
        for found in (*(gain_of(results, kind_of(world, kernel)) for kernel in kinds),
                      gain_of(results, chebyshev.but(**BLIND)), worth_of(results, chebyshev)):
            cells.append("" if found is None else f"{found.show()} ({found.n})")
        lines.append([label, *cells])
    return common.markdown(["pretrained with", "frozen, ELBO", *(f"{kind} gains" for kind in kinds),
                            "blind chebyshev gains", "t is worth to chebyshev"], *lines)


def pretraining_section(results):
    """Other backbones."""
    runs = [load_result(f"pretrain/{name}") for name in ("mask15", "uniform")]
    says = """
        Two more backbones of the same size, text and steps, pretrained with 15 % of the bytes
        masked, and with a share that is uniform in [0, 1] for each window. The learning rates are
        those of the shipped backbone. What the pretraining noise left out is what there is to gain
        by adaptation; the table says how much of it is due to t."""
    return Section(PRETRAINED, says, run_command("pretraining"),
                   f"{cells_source('mask15')}; {cells_source('uniform')}; {provenance(*runs)}",
                   counted("the other half of the held-out part of tiny Shakespeare")
                   + " The number of training seeds stands in brackets.",
                   (titled("by pretraining", pretraining_lines(results)),))


def bases_section():
    """How much smooth functions of t explain."""
    result = load_result("bases/small")
    found = result.metrics["explained"]
    cosines = ", ".join(f"{by_field['mean']['cosines']:.0%} ({name})"
                        for name, by_field in found.items())
    polynomials = ", ".join(f"{by_field['mean']['polynomials']:.0%} ({name})"
                            for name, by_field in found.items())
    settings = result.settings
    says = f"""
        The paper explains the order of its geometries by bases that are smooth in t. In its
        equations both bases are functions of h, the output of a network that reads sinusoids of
        1000 t, and not of t. DCT's signal is linear in h, so its shifts are affine in h: for every
        DCT adapter there is a Hypernet that equals it at every t, with a map to the shifts of rank
        8 (a test builds it). Chebyshev's are polynomials in z(h) whose coefficients move with h.

        So we asked the shipped adapters. The first {settings['n_freqs']} cosines of t explain
        {cosines} of the variance of the modulation over t, the first {settings['degree']}
        Chebyshev polynomials of t {polynomials}. Hypernet, which has no basis, is as smooth in t
        as DCT and smoother than Chebyshev; smoothness does not tell the three apart."""
    return Section(BASES, says,
                   (command("-m experiments.bases", bases.Config, settings),
                    publish_command("bases/shipped", "small")),
                   provenance(result),
                   f"one adapter of each geometry; {settings['points']:,} even times; shares are "
                   "means over all layers and numbers of a field; no interval, as nothing is drawn",
                   (bases.share_table(found),
                    *picture("bases", "The A shift of one head over t, and its best fits by smooth "
                             "functions of t")))


def worth_sections(results):
    """The Sections that have results."""
    makers = {"new": masks_section, "bytes": bytes_section, "near": near_section}
    sections = []
    for world, make in makers.items():
        if has_twins(world, results):
            sections.append(make(results))
    others = [Cell("none", world=world) in results for world in ("mask15", "uniform")]
    if all(others):
        sections.append(pretraining_section(results))
    return (*sections, bases_section())
