"""RESULTS.md and the README's table say what results/ holds; commands, figures and links are whole.

Where this fails because a result or a sentence has changed: python -m experiments.report
"""
import itertools
import json
import re
import shlex
import shutil
import statistics
import subprocess

import numpy as np
import pytest
import scipy.stats
from helpers import ROOT
from test_readme import broken_links, read, unknown_flags, unknown_scripts

import certify
import common
import evaluate
import sample
import synth_lpv
import train
from experiments import (bench, hrm_adapter, peers, pretrain, report, report_claims, report_hrm,
                         report_operators, report_pieces, report_scores, report_study, study,
                         trivial)
from experiments.report_pieces import (anchor, command, load_result, render_section, shorten_paths,
                                       wrap_words, wrapped)
from experiments.study_cells import read_results

PAGE = ROOT / "RESULTS.md"
README = ROOT / "README.md"
REMAKE = "run `python -m experiments.report`"


@pytest.fixture(scope="module")
def parts():
    return {part: sections() for part, sections in report.PARTS.items()}


@pytest.fixture(scope="module")
def results():
    return read_results()


# ---- what is generated is what the files say -----------------------------------------------------


def test_the_page_is_that_of_the_result_files(parts):
    assert PAGE.read_text("utf-8") == report.results_page(parts), REMAKE


def test_the_readme_has_the_claims_of_the_result_files():
    text = README.read_text("utf-8")
    assert text == report_claims.with_claims(text, report_claims.claims_table()), REMAKE


def test_a_changed_number_changes_page_and_claims(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copytree(ROOT / "figures", tmp_path / "figures")
    path = tmp_path / "results/bench/laptop.json"
    found = json.loads(path.read_text("utf-8"))
    found["metrics"]["alone"]["dct"]["operations"] = 777
    path.write_text(json.dumps(found), "utf-8")
    before = report_claims.claims_table()
    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("above\n<!-- claims -->\nold\n<!-- /claims -->\nbelow\n",
                                        "utf-8")
    report.main(report.Config())
    page = " ".join((tmp_path / "RESULTS.md").read_text("utf-8").split())
    readme = (tmp_path / "README.md").read_text("utf-8")
    assert "to 777 operations" in page
    assert "to 777 operations" in readme
    assert "777" not in before
    assert readme.startswith("above\n<!-- claims -->\n| the paper says |")
    assert readme.endswith(" |\n<!-- /claims -->\nbelow\n")
    assert "old" not in readme.splitlines()


def test_the_last_lines_of_the_first_command_are_those_of_its_result():
    result = load_result("train/demo_chebyshev")
    found = report_scores.saved_comparison(result)
    printed = evaluate.comparison_table("chebyshev", found).splitlines()
    printed.append(evaluate.last_line("chebyshev", found))
    for block in re.findall(r"```text\n(.*?)```", README.read_text("utf-8"), flags=re.S):
        for line in block.splitlines():
            if line.startswith(("| ", "chebyshev:")):
                assert line in printed


@pytest.mark.parametrize("text", ["", "no table here", "<!-- claims -->", "<!-- /claims -->"])
def test_a_text_without_the_two_comments_stays_as_it_is(text):
    assert report_claims.with_claims(text, "table") == text


def test_the_table_goes_between_the_comments_and_may_be_written_again():
    text = "a\n<!-- claims -->\n<!-- /claims -->\nb"
    once = report_claims.with_claims(text, "| table |")
    assert once == "a\n<!-- claims -->\n| table |\n<!-- /claims -->\nb"
    assert report_claims.with_claims(once, "| table |") == once


def test_a_missing_result_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    with pytest.raises(common.UserError, match="certify/small.json"):
        load_result("certify/small")


# ---- the page is whole ---------------------------------------------------------------------------


def test_links_scripts_and_flags_of_the_page_exist():
    text = read(PAGE)
    assert not broken_links(PAGE)
    assert not unknown_scripts(text)
    assert not unknown_flags(text)


def test_no_two_headings_have_one_anchor():
    anchors = [anchor(line) for line in re.findall(r"^#+ (.*)$", PAGE.read_text("utf-8"), re.M)]
    assert len(set(anchors)) == len(anchors)


def test_every_result_and_every_figure_is_shown():
    page = PAGE.read_text("utf-8")
    shown = page + README.read_text("utf-8")
    for path in sorted((ROOT / "results").glob("*/*.json")):
        alone = f"](results/{path.parent.name}/{path.name})"
        together = f"](results/{path.parent.name}/)"
        assert alone in page or together in page, path
    for path in sorted((ROOT / "figures").glob("*.png")):
        assert f"](figures/{path.name})" in shown, path


def test_every_section_says_what_made_it_and_over_what_its_interval_is(parts):
    for sections in parts.values():
        for section in sections:
            shown = render_section(section)
            assert "```bash\npython" in shown or "*Made by*" in shown or "pytest" in shown
            unwrapped = " ".join(shown.split())
            assert "commit `" in unwrapped or "*From* the files of [" in unwrapped
            assert section.counted
            assert len(section.says.split()) < 200
            assert section.shown


def test_every_result_is_of_a_known_commit_and_a_clean_tree():
    def git(*words):
        return subprocess.run(("git", "-C", ROOT, *words), capture_output=True, encoding="utf-8")

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git, or no history")
    for path in sorted((ROOT / "results").glob("*/*.json")):
        found = common.read_json(path, "commit", "dirty")
        assert not found["dirty"], f"{path} is of a changed tree"
        known = git("merge-base", "--is-ancestor", found["commit"], "HEAD")
        assert known.returncode == 0, f"{path} is of {found['commit']}, which is no commit before"


# ---- commands ------------------------------------------------------------------------------------


def unfolded(word):
    """The words that bash makes of a_{1..3}.txt."""
    braces = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", word)
    if braces is None:
        return [word]
    return [f"{braces[1]}{i}{braces[4]}" for i in range(int(braces[2]), int(braces[3]) + 1)]


@pytest.mark.parametrize("name, module", [
    ("certify/small", certify), ("evaluate/small", evaluate), ("sample/small", sample),
    ("pretrain/small", pretrain), ("train/shipped_dct", train), ("study/none", study),
    ("train/mlp_chebyshev_plain4", train), ("synth_lpv/adam", synth_lpv), ("bench/laptop", bench),
    ("hrm_adapter/small", hrm_adapter), ("trivial/wordpiece", trivial), ("bench/peers", peers)])
def test_a_command_has_the_settings_of_its_file(name, module, monkeypatch):
    settings = load_result(name).settings
    presets = getattr(module, "PRESETS", None)
    made = command("script.py", module.Config, settings, presets).replace("\\\n", " ")
    words = list(itertools.chain(*map(unfolded, shlex.split(made)[1:])))
    monkeypatch.setattr("sys.argv", words)
    parsed = common.plain(common.run_cli(module.Config, lambda cfg: cfg, presets))
    for key, value in settings.items():
        if key in parsed and key not in report_pieces.UNSHOWN:
            assert parsed[key] == value, key


@pytest.mark.parametrize("paths, short", [
    (["a_1.txt", "a_2.txt", "a_3.txt"], ["a_{1..3}.txt"]),
    (["a_1.txt", "a_3.txt"], ["a_1.txt", "a_3.txt"]),
    (["a_1.txt", "b_2.txt"], ["a_1.txt", "b_2.txt"]),
    (["a_9.txt", "a_10.txt", "b.txt"], ["a_{9..10}.txt", "b.txt"]),
    (["x=a_1.txt,a_2.txt", "a_3.txt"], ["x=a_1.txt,a_2.txt", "a_3.txt"]),
    (["1600", "3200"], ["1600", "3200"])])
def test_numbered_paths_are_shortened(paths, short):
    assert shorten_paths(paths) == short


def test_a_long_command_is_broken_between_words():
    words = ["python", *(f"--flag-{i} value" for i in range(30))]
    lines = wrap_words(words).split(" \\\n")
    assert len(lines) > 1
    assert max(map(len, lines)) <= report_pieces.WIDTH
    assert " ".join(line.strip() for line in lines) == " ".join(words)


def test_code_and_links_are_not_broken():
    for before in range(120):
        words = "w " * before + "`a long piece of code` and [a link of words](#there) end"
        shown = wrapped(words)
        assert shown.split() == words.split()
        for line in shown.splitlines():
            assert len(line) <= report_pieces.WIDTH
            assert line.count("`") % 2 == 0
            assert line.count("[") == line.count("](")


@pytest.mark.parametrize("heading, name", [
    ("Stability: Figure 1", "stability-figure-1"),
    ("The norm in the adapter's MLP", "the-norm-in-the-adapters-mlp"),
    ("What is t worth?", "what-is-t-worth")])
def test_an_anchor_is_githubs(heading, name):
    assert anchor(heading) == name


# ---- numbers in sentences, against the tables or a loop ------------------------------------------


def column(table, head):
    """The cells of a column of a Markdown table."""
    names, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")]
                        for line in table.splitlines()]
    at = names.index(head)
    return [line[at] for line in lines]


def test_a_trivial_loss_is_the_product_that_stands_beside_it():
    """Exactly so for uniform; a unigram's losses are not independent of the weights."""
    for text, rows in load_result("trivial/wordpiece").metrics["scores"].items():
        weight = statistics.fmean(rows["weight"])
        for name, within in (("uniform", 1e-6), ("unigram", 0.01)):
            made = weight * statistics.fmean(rows[name]["nats"])
            assert statistics.fmean(rows[name]["cart"]) == pytest.approx(made, rel=within), text


def test_margins_are_the_least_of_the_tables():
    result = load_result("certify/small")
    least = report_operators.least_margins(result)
    for hypothesis in ("paper", "own beta_A", "reached", "this text", "any text"):
        cells = []
        for found in result.metrics["adapters"].values():
            cells += column(found["table"], hypothesis)
        assert f"{least[hypothesis]:.2e}" == min(cells, key=float)
    smallest = column(result.metrics["adapters"]["chebyshev"]["table"], "smallest Delta met")
    below, layers, _ = report_operators.layers_below(result, 1e-3)
    assert below == sum(float(cell) < 1e-3 for cell in smallest)
    assert layers == len(smallest)


def test_distances_of_times_are_those_of_the_table():
    result = load_result("markov/small")
    shown = column(result.metrics["table"], "distance of two times, mean (largest)")
    means = report_operators.mean_distances(result)
    for name, cell in zip(means, shown, strict=True):
        between = report_operators.distances_between_times(result.metrics["adapters"][name])
        assert cell == f"{means[name]:.3f} ({max(between):.3f})"


def test_layers_whose_half_life_falls_are_counted():
    found = {"half_life_frozen": [10.0, 10.0, 10.0],
             "half_life": [[9.0, 12.0, 9.0], [9.0, 7.0, 12.0]]}  # means 9, 9.5, 10.5
    assert report_operators.layers_that_shorten(found) == (2, 3)


def test_rates_are_those_of_the_table():
    result = load_result("synth_lpv/recovery")
    table = report_operators.recovery_table(result)
    rates = [cell.split()[0] for cell in column(table, "rate, end points") if cell]
    with_seeds = [f"{rate:.2f}"
                  for rate in report_operators.rates_of(result.metrics["summary"]).values()]
    assert [rate for rate in rates if rate in with_seeds][:1] == with_seeds[:1]
    before, last = (column(table, f"N = {n}") for n in (800, 1600))
    ends = report_operators.bound_rates_at_the_end(result).values()
    bounds = [i for i, row in enumerate(column(table, "")) if row.startswith("Cramer-Rao")]
    for i, rate in zip(bounds, ends, strict=True):
        assert np.log2(float(last[i]) / float(before[i])) == pytest.approx(rate, abs=0.02)


def synth_rows(name, kernel, size):
    """The record of one size in results/synth_lpv/<name>.json."""
    return load_result(f"synth_lpv/{name}").metrics["kernels"][kernel]["sizes"][size]


@pytest.mark.parametrize("kernel", ("chebyshev", "dct"))
def test_published_errors_stand_over_the_bounds_of_the_same_seeds(kernel):
    summary = report_operators.published_summaries()[kernel]
    norm = load_result("synth_lpv/published").metrics["kernels"][kernel]["norm"]
    for i, size in enumerate(("50", "100", "200", "400", "800", "1600")):
        moe = synth_rows("published", kernel, size)["moe"]
        fine = [e for e, error in enumerate(moe) if error < 10 * norm[e]]  # others have diverged
        assert summary["moe"][i].n == len(fine)
        for name in ("", "_with_start"):
            bounds = synth_rows("published_bound", kernel, size)["bound" + name]
            squares = [(moe[e] / bounds[e]) ** 2 for e in fine]
            assert summary["ratio" + name][i] == pytest.approx(statistics.fmean(squares) ** 0.5)
            rms = statistics.fmean(bound ** 2 for bound in bounds) ** 0.5
            assert summary["bound" + name][i] == pytest.approx(rms)


def test_bounds_of_other_systems_are_refused(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "results/synth_lpv", tmp_path / "results/synth_lpv")
    path = tmp_path / "results/synth_lpv/published_bound.json"
    found = json.loads(path.read_text("utf-8"))
    found["metrics"]["kernels"]["dct"]["norm"][3] *= 1.01
    path.write_text(json.dumps(found), "utf-8")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    with pytest.raises(common.UserError, match="published_bound: dct has another norm"):
        report_operators.published_summaries()


def raw_cells():
    """{name of a file of results/study: its metrics}."""
    return {path.stem: json.loads(path.read_text("utf-8"))["metrics"]
            for path in (ROOT / "results/study").glob("*.json")}


def test_the_difference_of_two_conditioners_is_that_of_a_loop_over_files(results):
    raw = raw_cells()
    found = report_study.gain_difference(results, "chebyshev", "hypernet")
    apart = []
    for seed in study.common.SEEDS[:5]:
        losses = []
        for name in (f"chebyshev_lr-0.001_seed-{seed}", f"hypernet_lr-0.004_seed-{seed}"):
            texts = raw[name]["scores"]
            losses.append(np.mean([np.mean(texts[text][""]["elbo"])
                                   for text in texts if text != "valid"]))
        apart.append(losses[1] - losses[0])
    assert found.mean == pytest.approx(np.mean(apart))
    half = scipy.stats.t.ppf(0.975, 4) * np.std(apart, ddof=1) / np.sqrt(5)
    assert found.half == pytest.approx(half)


def test_the_change_of_cart_is_that_of_a_loop_over_files(results):
    raw = raw_cells()
    cells = report_study.trained_seeds(results, "chebyshev")
    adapted = [raw[cell.name]["scores"]["wikitext"][""]["cart"] for cell in cells]
    frozen = raw["none"]["scores"]["wikitext"]["frozen"]["cart"]
    changes = [statistics.fmean(adapter[i] for adapter in adapted) - frozen[i] for i in range(5)]
    found = report_study.cart_change(results, cells, "wikitext")
    assert found.mean == pytest.approx(statistics.fmean(changes))
    assert found.n == 5


def test_texts_gained_and_lost_on_are_those_of_the_table(results):
    table = report_study.gain_table(results)
    rows = column(table, "conditioner")
    for kernel in report_study.CONDITIONERS:
        gaining, losing = report_study.gaining_and_losing(results, kernel)
        for text in report_study.text_names(results):
            cell = column(table, text)[rows.index(kernel)]
            mean, half = map(float, re.match(r"(\S+) ± (\S+)", cell).groups())
            assert (mean > half) == (text in gaining)
            assert (mean < -half) == (text in losing)


def test_sites_are_compared_seed_by_seed():
    source = report_hrm.hrm_source()
    rows = source.metrics["rows"]
    for i, (_, change) in enumerate(report_hrm.site_differences(source)):
        mlp = [run["loss"][i] for run in rows["HRM, MLP"]["recall"]]
        attention = [run["loss"][i] for run in rows["HRM, attention"]["recall"]]
        p = scipy.stats.ttest_rel(attention, mlp).pvalue
        assert change.mean == pytest.approx(np.mean(attention) - np.mean(mlp))
        assert (change.mean > change.half) == (p < 0.05)
