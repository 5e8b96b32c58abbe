"""The README's tables come from results/, its snippets run, its links and flags exist.

`python tests/test_readme.py` rewrites the tables.
"""
import ast
import json
import re
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
    import study  # here: most of the tables need none of the scripts
    found = study.tables(study.read_results())
    return "\n\n".join(f"*{title}*\n\n{table}" for title, table in found.items())


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


TABLES = {f.__name__: f for f in (backbone, scores, differences, spread, certificate, memory,
                                  recovery, sampling, samples, study, scan, kernels, rehearsal)}
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
