"""RESULTS.md and the README's table of claims, written from results/ and figures/.

Run:      python -m experiments.report               (10 seconds; nothing is trained or measured)
          python -m experiments.report --figures     (and the figures of report_figures.py)
Last line: "wrote RESULTS.md: N sections, N figures; README.md: its table of claims"

A test writes both anew and fails where they are not what the result files say. The sections stand
in report_scores.py, report_operators.py, report_worth.py, report_study.py, report_cost.py and
report_hrm.py, the table of claims in report_claims.py, what they are made of in report_pieces.py.
With --figures, those pictures that need nothing but a result file are drawn again first; the others
come from runs (`python -m experiments.publish`).

Symbols:  none.
Differs from the paper: nothing.
"""
import dataclasses

import common
from experiments import (report_cost, report_hrm, report_operators, report_published,
                         report_scores, report_study, report_worth)
from experiments.report_claims import claims_table, with_claims
from experiments.report_figures import FIGURES, draw_figures
from experiments.report_pieces import anchor, render_section, wrapped
from experiments.study_cells import read_results


@dataclasses.dataclass(frozen=True)
class Config:
    """Write RESULTS.md, and the table of claims into README.md."""
    figures: bool = False      # draw figures again from results/ first, into figures/


TITLE = "# Results"
ABOUT = """
Every table and figure of this project, written from `results/` by `python -m experiments.report`. A
test fails where this page and the files disagree. The paper's claims beside what was found stand in
the [README](README.md#what-the-paper-says-and-what-was-found).

*Commands* are those that have the settings of the file today. The file holds the command that was
typed at its commit, with all settings and versions. `corpora/` is not shipped;
[assets/README.md](assets/README.md) says where its texts come from.
"""
HOW_TO_READ = """
**CART** is the paper's loss (eq. 22, 23): the cross-entropy of masked tokens, weighted by how much
visible text is near; *masked_mean* divides by the number of masked tokens. **ELBO** stands for its
negative here, an upper bound on the negative log-likelihood in nats per byte. Both are losses, so
lower is better. A **gain** is the loss of the frozen backbone less that of the adapter, and
positive where the adapter is better.

**Two controls** of t: *shuffled* tells an adapter another window's t, *constant* tells it 0.5. What
they cost shows that an adapter reads t. It is not what t is worth: that needs a twin that is
trained without t. An ideal denoiser needs no t, as the masks show how much is hidden (arXiv
2406.03736, Theorem 1, for unlimited capacity).

**±** is a 95 % interval. What it is taken over stands above each table. "(n/a)" marks one value,
which has none. No interval is corrected for the number of comparisons in a table.
"""


def first_part():
    """The Sections of the MaRK paper."""
    results, source = read_results(), report_study.study_source()
    return (
        report_scores.backbone_section(),
        report_scores.demo_section(),
        report_scores.shipped_section(),
        report_scores.scores_section(),
        report_scores.trivial_section(),
        report_scores.norm_section(),
        report_operators.stability_section(),
        report_operators.memory_section(),
        report_operators.recovery_section(),
        report_operators.published_section(),
        report_operators.other_recoveries_section(),
        *report_worth.worth_sections(results),
        report_study.gains_section(results, source),
        report_study.wrong_t_section(results, source),
        report_study.ablation_section(results, source),
        report_study.settings_section(results, source),
        report_study.sliced_section(results, source),
        report_scores.sampling_section(),
        report_cost.cost_section(),
        report_cost.speed_section(),
        report_cost.plan_section(),
        report_cost.rehearsal_section(),
        report_cost.peers_section(),
        *report_published.sections(),
        report_cost.scan_section(),
        report_cost.kernels_section(),
        report_cost.mutations_section(),
    )


def second_part():
    """The Sections of the second paper."""
    return (report_hrm.recall_section(), report_hrm.compression_section(),
            report_hrm.time_section())


PARTS = {
    "Part one: the MaRK paper": first_part,
    "Part two: HRM adapters": second_part,
}
INTRODUCTIONS = {
    "Part one: the MaRK paper": "MaRK: Markov-adapted Recurrent Kernels for Dynamic Operator "
                                "Conditioning in State Space Models (arXiv 2610.09092).",
    "Part two: HRM adapters": "SSM Adapters via Hankel Reduced-order Modeling: Injection Site "
                              "Determines Task Suitability in Long-Context Fine-Tuning (arXiv "
                              "2606.26290).",
}


def contents(parts):
    """A list of links to all headings."""
    lines = []
    for part, sections in parts.items():
        lines.append(f"- [{part}](#{anchor(part)})")
        for section in sections:
            lines.append(f"  - [{section.heading}](#{anchor(section.heading)})")
    return "\n".join(lines)


def results_page(parts):
    """RESULTS.md. parts: {heading: Sections}."""
    pieces = [TITLE, wrapped(ABOUT), contents(parts), "## How to read this page",
              wrapped(HOW_TO_READ)]
    for part, sections in parts.items():
        pieces += [f"## {part}", wrapped(INTRODUCTIONS[part])]
        pieces += [render_section(section) for section in sections]
    return "\n\n".join(pieces) + "\n"


def write_page(path, text):
    with common.atomic_path(path) as temporary:
        temporary.write_text(text, "utf-8")


def main(cfg):
    if cfg.figures:
        draw_figures(common.ROOT / "figures")
        common.log(f"drew {len(FIGURES)} figures: {', '.join(FIGURES)}")
    parts = {part: sections() for part, sections in PARTS.items()}
    page = results_page(parts)
    write_page(common.ROOT / "RESULTS.md", page)
    n_sections = sum(len(sections) for sections in parts.values())
    said = f"wrote RESULTS.md: {n_sections} sections, {page.count('![')} figures"
    readme = common.ROOT / "README.md"
    if readme.is_file():
        text = readme.read_text("utf-8")
        filled = with_claims(text, claims_table())
        if filled != text:
            write_page(readme, filled)
        said += "; README.md: its table of claims"
    common.log(said)
    return {"page": page}


if __name__ == "__main__":
    common.run_cli(Config, main)
