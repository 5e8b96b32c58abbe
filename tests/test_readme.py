"""The README's tables come from results/, its snippets run, its links and flags exist.

`python tests/test_readme.py` rewrites the tables.
"""
import ast
import dataclasses
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this file is a script too

from common import markdown  # noqa: E402

README = ROOT / "README.md"


def result(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def backbone():
    metrics = result("pretrain/small")["metrics"]
    return markdown(
        ["held-out text", "masked bytes", "uniform", "trigram", "shipped backbone"],
        *([name, f"{row['masked']:,}", f"{metrics['uniform']:.3f}", f"{row['trigram']:.3f}",
           f"**{row['model']:.3f}**"] for name, row in metrics["held_out"].items()))


def scores():
    """CART of every row but the controls."""
    lines = result("evaluate/small")["metrics"]["tables"]["CART masked_mean, nats"].splitlines()
    return "\n".join(line for line in lines if " t | " not in line)


def differences():
    return result("evaluate/small")["metrics"]["tables"]["ELBO, paired differences"]


def certificate():
    return result("certify/small")["metrics"]["adapters"]["chebyshev"]["table"]


def memory():
    return result("markov/small")["metrics"]["table"]


def recovery():
    return result("synth_lpv/recovery")["metrics"]["table"].partition("\n\n")[0]


def sampling():
    return result("sample/small")["metrics"]["table"]


def samples():
    """The first three texts, seeds 42, 142 and 242, of two orders at one byte a step."""
    rows = result("sample/small")["metrics"]["rows"]
    texts = [(row["text"], text) for row in rows if row["steps"] == 128
             and row["text"] in ("random", "confidence") for text in row["samples"]]
    return "```text\n" + "\n".join(f"{order:>10}: {text}" for order, text in texts) + "\n```"


def study():
    """Every group of cells that is complete."""
    from experiments.study_cells import read_results  # here: most tables need none of the scripts
    from experiments.study_tables import finished_tables
    found = finished_tables(read_results())
    return "\n\n".join(f"*{title}*\n\n{table}" for title, table in found.items())


def claims():
    """What the paper says beside what was found here."""
    from experiments import study_cells, study_tables
    from experiments.study_cells import CONDITIONERS, INTACT, SLICED, Cell, best_cell
    from mark_adapters import GEOMETRIES
    certified = result("certify/small")["metrics"]["adapters"].values()
    margins = [found["margins"] for found in certified]
    paper, any_text = (min(min(found[name]["epsilon"]) for found in margins)
                       for name in ("paper", "any text"))
    recovered = result("synth_lpv/recovery")["metrics"]["summary"].values()
    profiles = result("markov/small")["metrics"]["adapters"].values()
    apart = [statistics.fmean(v for row in found["distance"] for v in row if v)
             for found in profiles]
    alone = [result("bench/laptop")["metrics"]["alone"][name] for name in GEOMETRIES]
    results = study_cells.read_results()

    def cart(group):
        values = []
        for cell in group:
            values += results[cell].tested()["wikitext"][cell.row()]["cart"]
        return statistics.fmean(values)

    def each(function, digits, names=GEOMETRIES):
        return ", ".join(f"{function(name):{digits}} ({name})" for name in names)

    def gain(name, **settings):
        group = study_cells.trained_seeds(results, name, **settings)
        return study_tables.training_interval(
            study_tables.gains_over_seeds(results, group)[-1]).mean

    def rough(name):
        return study_tables.variation_over_range(results, Cell(name, 1e-3, 42))

    def without_A(how):
        lost = [statistics.fmean(study_tables.ablated(results, name, how)["all-except-A"])
                for name in GEOMETRIES]
        return f"{min(lost):+.4f} to {max(lost):+.4f}"
    sliced = dataclasses.replace(best_cell("chebyshev", results), sliced=True)
    return markdown(
        ["the paper says", "found here, on the small backbone", "by"],
        ["every layer is stable at every t, if Delta >= 0.001 (4.1, Figure 1)",
         f"so it is, with margins from {paper:.1e}; text breaks the condition, and margins from "
         f"{any_text:.1e} hold without it", "`certify.py`"],
        ["operators are recovered at rates of -0.54, -0.66, -0.64 (4.2, Figure 2)",
         ", ".join(f"{found['rates'][0]:.2f}" for found in recovered) + " with other truths; the "
         "two bases' errors are as small as the Cramer-Rao bound lets them be, which explains the "
         "rate", "`synth_lpv.py`"],
        ["each t has a memory profile of its own (4.3, Figure 3)",
         f"yes: operators of two times differ by {min(apart):.0%} to {max(apart):.0%} of the "
         "frozen one's norm", "`markov.py`"],
        ["CART falls from 4.00 to 2.55 on WikiText (Table 2)",
         f"from {cart([INTACT]):.3f} to "
         f"{cart(study_cells.trained_seeds(results, 'chebyshev')):.3f}; on a backbone loaded as the "
         f"paper's code loads it, half of it, from {cart([SLICED]):.3f} to "
         f"{cart([sliced]):.3f}", "`study.py`"],
        ["Chebyshev (2.55) and DCT (2.59) beat Hypernet (3.77): their bases are smooth (4.4)",
         f"no difference: they gain {each(gain, '.4f')} nats, and at one learning rate what they "
         f"learn is about as rough, {each(rough, '.0f')}", "`study.py`"],
        ["A is necessary: without it +0.18 to +0.25 (Table 2)",
         f"of a gain of about {gain('dct'):.3f}, {without_A('masked')} where A is masked after "
         f"training, {without_A('retrained')} where it never was modulated", "`study.py`"],
        ["AdaLN, injection, LoRA: not compared (A.5)",
         f"gains of {each(gain, '.4f', CONDITIONERS[3:])}; LoRA reads no t; from another "
         f"start {gain('inject', **study_cells.DEFAULT_START):.4f} (inject), "
         f"{gain('adaln', **study_cells.DEFAULT_START):.4f} (adaln)",
         "`study.py`"],
        ["14 to 16 % slower at length 4096 on an A100 (Table 3)",
         "no GPU was at hand. At the released size on a CPU, evaluating the adapters is at most "
         f"{max(a['ms'] / a['frozen_ms'] for a in alone):.2%} of a pass, in "
         f"{min(a['operations'] for a in alone)} to {max(a['operations'] for a in alone)} "
         "operations for all layers; passes of the small model are slower by amounts mostly within "
         "their errors",
         "`bench.py`"])


def spread():
    rows = []
    for run, flags in (("norm", "(default)"), ("plain", "--no-mlp-norm"),
                       ("default", "--no-mlp-norm --init default"), ("norm4", "--lr 4e-3"),
                       ("plain4", "--lr 4e-3 --no-mlp-norm")):
        metrics = result(f"train/mlp_chebyshev_{run}")["metrics"]
        start, end, m = *metrics["spread"].values(), metrics["rows"]["chebyshev"]
        rows.append([f"`{flags}`", f"{start['hidden']:.4f}", f"{end['hidden']:.4f}",
                     f"{end['mean']:.4f}", f"{m['cart']:.4f}", f"{m['elbo']:.4f}",
                     f"{m['gap']:+.4f} ± {m['gap_error']:.4f}"])
    return markdown(["flags", "spread of h over t at the start", "at the end", "of the modulation",
                     "CART", "ELBO, nats/token", "gap to shuffled t"], *rows)


def scan():
    return result("chunk_scan/cpu")["metrics"]["table"]


def kernels():
    """What the bfloat16 kernels take of a multiprocessor."""
    metrics, rows = result("chunk_scan/triton_aot")["metrics"], {}
    for row in metrics["kernels"]:
        if row["dtype"] == "bfloat16":
            ending = ", backward" if row.get("BWD") else {True: ", dC", False: ", dB"}.get(
                row.get("IS_C"), "")
            rows.setdefault(row["kernel"] + ending, []).append(
                f"{row['registers']} / {row['spills']} / {row['shared_kb']:.0f} / "
                f"{row['wgmma'] if row['sm'] == 90 else row['mma']}")
    return markdown([f"registers / spills / shared KB / matrix instructions (triton "
                     f"{metrics['triton']})", "sm_80 (mma)", "sm_90 (wgmma)"],
                    *([f"`{name}`", *cells] for name, cells in rows.items()))


def rehearsal():
    m = result("train/rehearsal")["metrics"]
    return markdown(
        ["parameters", "loading", "memory for it", "training, bf16, length 512", "peak memory",
         "whole command"],
        [f"{m['parameters']:,}", f"{m['load_seconds']:.1f} s", f"{m['load_bytes'] / 1e9:.2f} GB",
         f"{m['tokens_per_second']:.0f} tokens/s", f"{m['peak_bytes'] / 1e9:.2f} GB",
         f"{m['seconds']:.0f} s"])


def bench(name):
    return lambda: result("bench/laptop")["metrics"]["tables"][name]


def second(name):
    """Of the HRM adapters; of the two rules of compression the one that cuts something."""
    def table():
        import hrm_adapter  # here: most of the tables need none of the scripts
        metrics = result("hrm_adapter/small")["metrics"]
        found = hrm_adapter.tables(metrics["rows"], metrics["cost_ms"])[name]
        return "\n".join(line for line in found.splitlines() if "| bound 0.01 |" not in line)
    return table


TABLES = {f.__name__: f for f in (backbone, scores, differences, claims, spread, certificate,
                                  memory, recovery, sampling, samples, study, scan, kernels,
                                  rehearsal)}
TABLES |= {name: bench(name) for name in ("cost", "alone", "training", "scaling", "plan")}
TABLES |= {"hrm": second("table"), "compression": second("compression"), "hrm_cost": second("cost")}


def with_tables(text):
    def fill(match):
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"
    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.S)


def test_the_tables_are_those_of_the_result_files():
    text = README.read_text()
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(TABLES)
    assert text == with_tables(text), "run `python tests/test_readme.py`"


def test_every_result_is_of_a_known_commit_and_a_clean_tree():
    def git(*args):
        return subprocess.run(("git", "-C", ROOT, *args), capture_output=True, text=True)
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git, or no history")
    for path in sorted((ROOT / "results").glob("*/*.json")):
        found = json.loads(path.read_text())
        assert not found["dirty"], f"{path} is of a changed tree"
        known = git("merge-base", "--is-ancestor", found["commit"], "HEAD")
        assert known.returncode == 0, f"{path} is of {found['commit']}, which is no commit before"


def test_every_python_snippet_runs(monkeypatch):
    import mark_adapters  # here: as a script, this file needs no model
    monkeypatch.setattr(mark_adapters, "KERNELS", dict(mark_adapters.KERNELS))  # one adds to it
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert len(snippets) >= 2
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})


def names_of(node):
    """What a statement defines: a function or class, or the targets of an assignment."""
    return {getattr(node, "name", None), *(getattr(t, "id", None)
                                           for t in getattr(node, "targets", ()))}


def test_every_file_function_and_figure_that_it_names_exists():
    text = README.read_text()
    for path in re.findall(r"\]\(((?!http|#)[^)]+)\)|`([\w/]+\.(?:py|md|json))`", text):
        assert (ROOT / (path[0] or path[1])).exists(), path
    headings = re.findall(r"^## (.*)$", text, re.M)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
    for dotted in re.findall(r"`([a-z_]+\.\w+(?:\.\w+)?)`", text):
        module, *names = dotted.split(".")
        if names[0] not in ("py", "md"):
            scope = ast.parse((ROOT / f"{module}.py").read_text())
            for name in names:
                scope = next((node for node in scope.body if name in names_of(node)), None)
                assert scope is not None, dotted


def test_every_test_that_the_table_of_faults_names_exists():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "tests/README.md").read_text())
    assert len(named) > 40
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


def test_every_flag_that_it_shows_exists():
    text = README.read_text()
    files = *ROOT.glob("*.py"), *ROOT.glob("tests/*.py")
    source = {path.name: path.read_text() for path in files}
    for script, rest in re.findall(r"(\w+\.py)((?: [^`|#\n]*)?)", text):
        for flag in re.findall(r"--([a-z][a-z-]+)", rest):
            name = flag.removeprefix("no-").replace("-", "_")
            found = re.search(rf"^    {name}: |\"--{flag}\" in", source[script], re.M)
            assert found, f"{script} --{flag}"


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
    sys.exit(0)
