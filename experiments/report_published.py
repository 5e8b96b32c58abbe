"""RESULTS.md, the MaRK paper: what its published setup does to t, and that setup at full size.

Run:      not a script; report.py writes the page.
Symbols:  none.
Differs from the paper: nothing.
"""
import common
from experiments import published_t
from experiments.report_pieces import (Section, command, listed, load_result, provenance,
                                       publish_command, titled)

STEPS = (350, 2000)  # of the runs that are shown, as far as they are finished


def finished_runs():
    """The Results of published_t that are there."""
    found = []
    for steps in STEPS:
        name = f"published_t/hypernet_{steps}"
        if (common.ROOT / "results" / f"{name}.json").is_file():
            found.append(load_result(name))
    return found


def sections():
    """The Sections of this file; none where nothing was run yet."""
    runs = finished_runs()
    found = []
    if runs:
        found.append(t_section(runs))
    if (common.ROOT / "results" / "train" / "rehearsal_published.json").is_file():
        found.append(rehearsal_section())
    return tuple(found)


def spread_of(run, path, moment):
    """The spread of h over t, averaged over the seeds of a path."""
    spreads = [one["spread"][moment]["hidden"] for one in run.metrics["paths"][path]]
    return sum(spreads) / len(spreads)


def worth_of(run, path):
    """What t is worth to a path, an Interval over its seeds."""
    return common.interval([one["worth"][0] for one in run.metrics["paths"][path]])


def t_section(runs):
    """Spread, embeddings and worth of t along the published path."""
    first = runs[0]
    counts = first.metrics["embeddings"]
    low = sum(counts["rounded"]["tenths"][:5])
    spreads = listed({f"after {run.settings['steps']:,} steps": spread_of(run, "published", "end")
                      for run in runs}, 6)
    worths = "; ".join(f"{worth_of(run, 'published').show('+', 5)} after "
                       f"{run.settings['steps']:,} steps" for run in runs)
    says = f"""
        The paper's public code feeds 1 - t, rounds the angle of its sinusoids to bfloat16, starts
        every linear map at N(0, 0.02) and has no norm between them. The rounded angle leaves
        {counts['rounded']['all']:,} different embeddings of the {counts['reachable']:,} t that it
        can draw, and {low:,} for all t below 0.5. On the small backbone h has a standard deviation
        over t of {spread_of(first, 'published', 'start'):.1e} at the start, and of {spreads}. What
        t is worth there, a blind twin's ELBO less the adapter's, in nats per token: {worths}. All
        that follows from code at this size; it says nothing about the authors' own runs, which
        were longer and larger."""
    counted = (f"{first.settings['seeds']} training seeds, each with a blind twin; "
               f"{first.metrics['windows']} held-out windows, the same for all; ± Student's 95 % "
               "over the seeds.")
    commands = []
    shown = [titled("Different embeddings of t, by tenths of t",
                    first.metrics["tables"]["embeddings"])]
    for run in runs:
        steps = run.settings["steps"]
        commands.append(command("-m experiments.published_t", published_t.Config, run.settings))
        commands.append(publish_command(f"published_t/hypernet_{steps}"))
        shown.append(titled(f"{steps:,} steps; ELBO in nats per token",
                            run.metrics["tables"]["paths"]))
    return Section("What the published setup does to t", says, tuple(commands), provenance(*runs),
                   counted, tuple(shown))


def rehearsal_section():
    """The released size through --preset published, on a CPU."""
    result = load_result("train/rehearsal_published")
    found = result.metrics
    table = common.markdown(
        ["parameters", "of the adapter", "training, bf16, length 512", "peak memory",
         "whole command"],
        [f"{found['parameters']:,}", f"{found['adapter_parameters']:,}",
         f"{found['tokens_per_second']:.0f} tokens/s", f"{found['peak_bytes'] / 1e9:.2f} GB",
         f"{found['seconds']:.0f} s"])
    says = """
        A random checkpoint in the layout and of the size of the released one is read as the paper's
        public code reads it, 12 heads of 128, which is a misreading, and trained for two steps with
        `--preset published` on a CPU. So the command works at its size; it says nothing about
        losses or about speed on a GPU."""
    made = "MARK_PUBLISH=1 pytest -m slow tests/test_published.py"
    return Section("The published setup, rehearsed", says,
                   (made, publish_command("rehearsal_published")), provenance(result),
                   "one run; no interval.", (table,))
