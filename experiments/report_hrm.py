"""RESULTS.md, the second paper: HRM adapters beside LoRA, and their compression.

Run:      not a script; report.py writes the page.

Symbols:  none.
Differs from the paper: nothing.
"""
import statistics

import common
from experiments import hrm_adapter
from experiments.byte_transformer import DISTANCES
from experiments.hrm_adapter import hrm_tables
from experiments.report_pieces import (Section, command, load_result, lowest_to_highest, picture,
                                       provenance, publish_command)

RECALL = "HRM: recall and language"  # the heading of the first of three sections of one run
CHANCE = 1.386  # ln 4, of four keys
BESIDE_MLP = "HRM, MLP"
BESIDE_ATTENTION = "HRM, attention"
LORA = "LoRA, Q and V"


def hrm_source():
    return load_result("hrm_adapter/small")


def hrm_commands(source):
    return (command("-m experiments.hrm_adapter", hrm_adapter.Config, source.settings),
            publish_command("hrm_adapter", "small"))


def recall_losses(source, label, i):
    """Recall at the i-th distance, one loss per training seed."""
    return [run["loss"][i] for run in source.metrics["rows"][label]["recall"]]


def site_differences(source):
    """[(distance, Interval of recall beside attention less beside the MLP)], paired by seed."""
    found = []
    for i, distance in enumerate(DISTANCES):
        pairs = zip(recall_losses(source, BESIDE_ATTENTION, i),
                    recall_losses(source, BESIDE_MLP, i), strict=True)
        found.append((distance, common.interval([attention - mlp for attention, mlp in pairs])))
    return found


def site_sentence(source):
    """Whether the site matters for recall, as far as the seeds go."""
    found = site_differences(source)
    told = "; ".join(f"{change.show('+', 2)} at {distance}" for distance, change in found)
    clear = sum(change.mean > change.half for _, change in found)
    return (f"Beside attention its loss is higher than beside the MLP by {told} nats, paired by "
            f"seed. {clear} of these {len(found)} intervals are clear of zero, so on "
            f"{source.settings['seeds']} seeds the order of the two sites is a tendency and not a "
            "finding")


def recall_section():
    """Recall and language, by adapter and site."""
    source = hrm_source()
    rows = source.metrics["rows"]
    far = [statistics.fmean(recall_losses(source, LORA, i)) for i in range(1, len(DISTANCES))]
    language = {label: statistics.fmean(run["loss"][-1] for run in rows[label]["language"])
                for label in (LORA, BESIDE_MLP)}
    tables = hrm_tables(rows, source.metrics["cost_ms"])
    says = f"""
        HRM is a diagonal linear recurrence beside a frozen sub-layer; LoRA, of the same size, has
        no memory. On a small frozen byte transformer they learn to say, {DISTANCES[0]} to
        {DISTANCES[-1]} bytes of real text later, which of four keys the text began with (chance:
        {CHANCE} nats), or to predict the next byte. The transformer's attention reaches 60 bytes
        back, so the comparison is built to show what a recurrence adds; under global attention, as
        in the source, LoRA could learn to look the answer up. HRM beside the MLP answers at all
        distances, while LoRA stays at chance from {DISTANCES[1]} bytes on
        ({lowest_to_highest(far, 2)}). {site_sentence(source)}. On plain language LoRA is best,
        {language[LORA]:.3f} against {language[BESIDE_MLP]:.3f} nats per byte. A gate that is frozen
        at {source.settings['gate']} learns little recall."""
    counted = (f"{source.settings['seeds']} training seeds of {source.settings['steps']} steps for "
               f"each row and task, {source.settings['windows']} held-out windows of 512 bytes of "
               f"{source.embedded_text()}; ± is Student's 95 % over the training seeds.")
    return Section(RECALL, says, hrm_commands(source), provenance(source), counted,
                   (tables["table"],
                    *picture("hrm_adapter", "HRM with a trained gate recalls the key at "
                             "all distances and LoRA does not; on language all gain, LoRA the "
                             "most. Three seeds leave wide intervals")))


def singular_values(source):
    """The Hankel singular values of all trained HRM adapters: variants, tasks, seeds, layers."""
    values = []
    for label, tasks in source.metrics["rows"].items():
        if not label.startswith("HRM"):
            continue
        for runs in tasks.values():
            for run in runs:
                for of_layer in run["sigma"]:
                    values += of_layer
    return values


def compression_section():
    """Balanced truncation of the trained HRM adapters."""
    source = hrm_source()
    tables = hrm_tables(source.metrics["rows"], source.metrics["cost_ms"])
    smallest = min(singular_values(source))
    says = f"""
        Trained HRM adapters are cut by balanced truncation, with two rules that the source states
        as one: keep 90 % of the sum of the Hankel singular values, or cut while Glover's bound
        stays below 0.01. "error / bound" is the largest true error of any layer over that bound;
        it never passes 1. The first rule costs little on language and a good part of the recall,
        so the 90 % is no safe rule. The second cuts nothing here: twice the smallest singular
        value of all runs is {2 * smallest:.3f}."""
    counted = (f"{source.settings['seeds']} training seeds; ± is Student's 95 % over them; losses "
               "are means over the distances.")
    return Section("HRM: compression", says, RECALL, provenance(source), counted,
                   (tables["compression"],))


def time_section():
    """What the adapters cost, and how empirical Gramians converge."""
    source = hrm_source()
    tables = hrm_tables(source.metrics["rows"], source.metrics["cost_ms"])
    ratios = [hrm / lora for _, lora, hrm in source.metrics["cost_ms"]]
    lines = [[f"{int(n):,}", f"{error:.4f}"] for n, error in source.metrics["empirical_gramians"]]
    gramians = common.markdown(["inputs n", "relative error of the empirical Gramians"], *lines)
    says = f"""
        The time of a layer's adapters, forward and backward, measured in turn in one run. HRM
        takes {lowest_to_highest(ratios, 1)} times as long as LoRA, where the source reports parity.
        The second table is of empirical Gramians, averages over n random inputs, of a system whose
        B and C depend on the input: their error falls as n to the power
        {source.metrics['empirical_slope']:.2f}."""
    counted = "medians of a few rounds on one machine; no interval was computed."
    return Section("HRM: time", says, RECALL, provenance(source), counted,
                   (tables["cost"], gramians))
