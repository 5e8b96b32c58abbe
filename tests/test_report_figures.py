"""--figures draws every figure that it claims, from results/ alone and with its numbers."""
import pytest

import common
import evaluate
import sample
from experiments import report, report_figures
from experiments.report_pieces import load_result
from mark_adapters import GEOMETRIES


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    report_figures.draw_figures(folder)
    return folder


def test_every_figure_that_is_claimed_is_drawn(drawn):
    names = {f"{name}.png" for name in report_figures.FIGURES}
    assert {path.name for path in drawn.iterdir()} == names
    for name in names:
        assert (drawn / name).stat().st_size > 20_000, name
        assert (common.SOURCE / "figures" / name).is_file(), name


def test_the_flag_draws_before_the_page_is_written(tmp_path, monkeypatch, capsys):
    def draw(path):
        assert not (tmp_path / "RESULTS.md").exists()
        path.parent.mkdir()
        path.write_text("picture", "utf-8")

    monkeypatch.setattr(report_figures, "FIGURES", {"a": draw})
    monkeypatch.setattr(report, "FIGURES", {"a": draw})
    monkeypatch.setattr(report, "PARTS", {})
    monkeypatch.setattr(common, "ROOT", tmp_path)
    report.main(report.Config())
    assert not (tmp_path / "figures").exists()
    (tmp_path / "RESULTS.md").unlink()
    report.main(report.Config(figures=True))
    assert (tmp_path / "figures" / "a.png").is_file()
    assert "drew 1 figures: a" in capsys.readouterr().out


def test_saved_scores_have_the_differences_of_the_published_table():
    result = load_result("evaluate/small")
    scores = report_figures.saved_scores(result)
    table = result.metrics["tables"][evaluate.DIFFERENCES]
    differences = {}
    for name in ("chebyshev", "dct", "hypernet"):  # in the order of the file
        differences |= evaluate.adapter_differences(scores, name)
    assert evaluate.score_table(scores, differences, "+") == table


def test_saved_judgements_give_the_published_table():
    result = load_result("sample/small")
    found = report_figures.saved_judgements(result)
    assert sample.judgement_table(found) == result.metrics["table"]
    for sampler in sample.JUDGED:
        assert [j.steps for j in found if j.sampler == sampler] == list(sample.JUDGED_STEPS)


@pytest.mark.parametrize("run", ("recovery", "published", "adam"))
def test_saved_summaries_are_those_of_the_file(run):
    result = load_result(f"synth_lpv/{run}")
    for kernel, summary in report_figures.saved_summaries(result).items():
        means = [mean for mean, _, _ in result.metrics["summary"][kernel]["moe"]]
        assert [cell.mean for cell in summary["moe"]] == pytest.approx(means, rel=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seeds", (1, 3))
def test_scores_are_drawn_with_an_interval_where_there_are_seeds(tmp_path, monkeypatch, seeds):
    scores = report_figures.saved_scores(load_result("evaluate/small"))
    for rows in scores.values():
        for values in rows.values():
            for metric in values:
                values[metric] = values[metric][:seeds]
    heights = []

    def measure(figure, path):
        figure.draw_without_rendering()
        for series in [*figure.axes[0].containers, *figure.axes[1].containers]:
            for segment in series.lines[2][0].get_segments():  # empty where the error is NaN
                heights.append(segment[1][1] - segment[0][1] if len(segment) else 0.0)

    monkeypatch.setattr(common, "save_figure", measure)
    evaluate.draw_scores(scores, GEOMETRIES, tmp_path / "scores.png")
    assert len(heights) == 9 * 6 + 3 * evaluate.BINS  # five texts and their average; t
    for height in heights:
        assert (height > 0) == (seeds > 1)


@pytest.mark.parametrize("low, high, ticks", (
    (15.0, 131.0, [20, 50, 100]),
    (0.0047, 0.4, [0.005, 0.01, 0.02, 0.05, 0.1, 0.2]),
    (1.0, 1.0, [1])))
def test_the_ticks_of_a_logarithmic_axis_are_read_at_a_glance(low, high, ticks):
    assert common.decade_ticks(low, high) == pytest.approx(ticks)


def test_colours_and_markers_tell_seven_series_apart():
    assert len(set(common.COLORS)) == len(common.COLORS) == 7
    assert len(set(common.MARKERS)) == len(common.MARKERS) >= len(sample.JUDGED)
