"""Figures of RESULTS.md that are drawn again from results/ without a new run.

Run:      python -m experiments.report --figures      (25 seconds)

The scripts draw the same pictures from what they have just measured. Here their functions get what
a result file holds. A row of a file is found by the label of a known row; no label is parsed.

Symbols:  none.
Differs from the paper: nothing.
"""
import types

import common
import evaluate
import sample
import synth_lpv
from experiments import bench, hrm_adapter
from experiments.report_operators import published_summaries
from experiments.report_pieces import load_result
from mark_adapters import GEOMETRIES


# ---- from what a file holds to what a function draws ---------------------------------------------


def saved_scores(result):
    """{text: {Row: metrics}} of the frozen backbone and the three geometries in evaluate/small."""
    rows = [evaluate.FROZEN]
    for name in GEOMETRIES:
        rows += evaluate.adapter_rows(name)
    scores = {}
    for text, by_label in result.metrics["scores"].items():
        scores[text] = {row: by_label[row.label()] for row in rows}
    return scores


def saved_judgements(result):
    """The Judgements in sample/small."""
    samplers = {sampler.label: sampler for sampler in sample.JUDGED}
    found = []
    for row in result.metrics["rows"]:
        numbers = {}
        for name in sample.NUMBERS:
            mean, half = row[name]
            numbers[name] = common.Interval(mean, half, result.settings["judged"])
        sampler = samplers.get(row["text"])  # None of what was not sampled
        found.append(sample.Judgement(row["text"], numbers, row["steps"], sampler))
    return found


def saved_summaries(result):
    """{kernel: what `synth_lpv.summarise` found} in a file of results/synth_lpv/."""
    summaries = {}
    for kernel, record in result.metrics["kernels"].items():
        summaries[kernel] = synth_lpv.summarise(record)
    return summaries


def with_sizes(times):
    """{size: ms}: JSON has made texts of the sizes."""
    return {int(size): ms for size, ms in times.items()}


# ---- the figures ---------------------------------------------------------------------------------


def draw_saved_scores(path):
    result = load_result("evaluate/small")
    evaluate.draw_scores(saved_scores(result), GEOMETRIES, path)


def draw_saved_costs(path):
    result = load_result("bench/laptop")
    cost = {}
    for label, row in result.metrics["cost"].items():
        cost[label] = {"overhead": with_sizes(row["overhead"])}
    scaling = {what: with_sizes(times) for what, times in result.metrics["scaling"].items()}
    bench.draw_bench({"cost": cost, "scaling": scaling}, result.settings["length"], path)


def draw_saved_judgements(path):
    sample.draw_judgements(path, saved_judgements(load_result("sample/small")))


def draw_saved_hrm(path):
    hrm_adapter.draw_hrm(load_result("hrm_adapter/small").metrics["rows"], path)


def draw_saved_recovery(path):
    """Figure 2; the name of the picture, fig2_<run>.png, says which run."""
    result = load_result(f"synth_lpv/{path.stem.removeprefix('fig2_')}")
    cfg = types.SimpleNamespace(sizes=result.settings["sizes"])
    synth_lpv.draw_recovery(saved_summaries(result), cfg, path)


def draw_published_recovery(path):
    """The same under the settings of the public script, with the bounds of the same systems."""
    cfg = types.SimpleNamespace(sizes=load_result("synth_lpv/published").settings["sizes"])
    synth_lpv.draw_recovery(published_summaries(), cfg, path)


FIGURES = {
    "table1_scores": draw_saved_scores,
    "table3_laptop": draw_saved_costs,
    "sampling": draw_saved_judgements,
    "hrm_adapter": draw_saved_hrm,
    "fig2_recovery": draw_saved_recovery,
    "fig2_published": draw_published_recovery,
    "fig2_adam": draw_saved_recovery,
}


def draw_figures(folder):
    """Draw each of FIGURES into a folder."""
    for name, draw in FIGURES.items():
        draw(folder / f"{name}.png")
