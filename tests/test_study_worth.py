"""What t is worth: paired over seeds and windows, against formulas written out, and Holm's p."""
import copy
import math
import statistics

import pytest
import scipy.stats
import test_study

import common
from evaluate import Row
from experiments import study_cells, study_figures, study_worth
from experiments.study_cells import BLIND, OWN, Cell
from experiments.study_worth import Difference

NEW = "new"
CHEBYSHEV = Cell("chebyshev", world=NEW)


def own_text(result, elbo, by_t, wrong=None):
    """Scores of a cell on the new text's own half, two evaluation seeds."""
    row = Row("")
    scores = {OWN: {row: {"elbo": [elbo, elbo + 0.1], "by_t": [by_t, by_t], "cart": [1.0, 1.0]}}}
    if wrong is not None:
        scores[OWN][Row("", "shuffled t")] = {"elbo": [wrong, wrong + 0.2]}
    return result.__class__({**result.scores, **scores}, 432_184, {}, {}, (120.0, 30.0))


@pytest.fixture
def results():
    """Chebyshev gains .10 + seed/1e4, its twin .02 less (seed 42: .03 less)."""
    found = test_study.every_cell()
    frozen = Cell("none", world=NEW)
    row = Row("frozen")
    found[frozen].scores[OWN] = {row: {"elbo": [2.0, 2.1], "cart": [1.0, 1.0],
                                       "by_t": [[2.0] * 10] * 2}}
    for kind, less in ((CHEBYSHEV, 0.0), (CHEBYSHEV.but(**BLIND), 0.02)):
        for cell in study_cells.seeds_of(kind, found):
            if less and cell.seed == 42:
                less_here = 0.03
            else:
                less_here = less
            elbo = 1.9 - cell.seed / 1e4 + less_here
            by_t = [1.0 + less_here] * 3 + [2.0] * 7
            wrong = None if less else elbo + 0.5
            found[cell] = own_text(found[cell], elbo, by_t, wrong)
    return found


def test_a_difference_has_the_variance_of_seeds_and_of_windows_in_it():
    grid = [[1.0, 3.0, 2.0], [2.0, 4.0, 3.0]]            # two training, three evaluation seeds
    error = math.sqrt(0.5 / 2 + 1.0 / 3)                 # of the means 2, 3 and of 1.5, 3.5, 2.5
    found = study_worth.difference(grid)
    assert (found.mean, found.n) == (2.5, 2)
    welch = error ** 4 / (0.25 ** 2 / 1 + (1 / 3) ** 2 / 2)            # degrees of freedom
    assert found.half == pytest.approx(scipy.stats.t.ppf(0.975, welch) * error)
    assert found.p == pytest.approx(2 * scipy.stats.t.sf(2.5 / error, welch))
    one = study_worth.difference(grid[:1])               # over its three windows alone
    assert one.mean == 2.0 and one.half == pytest.approx(4.302653 / 3 ** 0.5) and one.n == 1
    assert math.isnan(one.p)
    assert study_worth.difference([[1.0, 1.0], [1.0, 1.0]]) == (1.0, 0.0, 0.0, 2)


def test_holms_p_values_are_those_of_the_textbook():
    """Four tests: the smallest times 4, the next times 3, ..., never falling, at most 1."""
    assert study_worth.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert study_worth.holm([0.5, 0.9]) == [1.0, 1.0]
    with_nan = study_worth.holm([0.01, math.nan])
    assert with_nan[0] == 0.01 and math.isnan(with_nan[1])
    assert study_worth.show_p(0.0004) == "< 0.001" and study_worth.show_p(0.0215) == "0.021"


def test_what_t_is_worth_is_the_twins_elbo_less_its_own(results):
    grid = study_worth.worth(results, CHEBYSHEV, (OWN,))
    assert grid == [pytest.approx([0.03] * 2)] + [pytest.approx([0.02] * 2)] * 4
    found = study_worth.difference(grid)
    error = statistics.stdev([0.03] + [0.02] * 4) / 5 ** 0.5
    assert found.mean == pytest.approx(0.022) and found.n == 5
    assert found.half == pytest.approx(2.776445 * error, rel=1e-4)     # windows do not vary it
    rows = study_worth.worth_by_t(results, CHEBYSHEV, (OWN,))
    assert rows[0] == pytest.approx([0.03] * 3 + [0.0] * 7)
    assert rows[1] == pytest.approx([0.02] * 3 + [0.0] * 7)


def test_a_missing_seed_of_a_twin_is_left_out_on_both_sides(results):
    twins = study_cells.seeds_of(CHEBYSHEV.but(**BLIND), results)
    del results[twins[0]]
    assert study_worth.worth(results, CHEBYSHEV, (OWN,)) == [pytest.approx([0.02] * 2)] * 4
    assert len(study_worth.worth_by_t(results, CHEBYSHEV, (OWN,))) == 4


def line_of(table, name):
    line, = (line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def only(results, *kinds):
    """The results of some kinds of the new world, and of its frozen backbone."""
    kept = {Cell("none", world=NEW): results[Cell("none", world=NEW)]}
    for cell, result in results.items():
        if cell.world == NEW and cell.kernel in kinds:
            kept[cell] = result
    return kept


def test_the_tables_show_these_numbers(results):
    kept = only(results, "chebyshev")
    tables = study_worth.worth_tables(kept)
    assert list(tables) == ["new: gain over the frozen backbone", "new: what t is worth"]
    mean = statistics.fmean(0.1 + seed / 1e4 for seed in common.SEEDS[:5])
    gain = line_of(tables["new: gain over the frozen backbone"], "chebyshev")
    assert gain[1:4] == ["432,184", "0.002", "5"]
    assert gain[4] == f"{2.05 - mean:.4f}" and gain[5].startswith(f"+{mean:.4f} ± ")
    assert gain[-1] == "2.0"
    worth = line_of(tables["new: what t is worth"], "chebyshev")
    assert worth[1] == "5" and worth[4].startswith("+0.0220 ± ")
    assert worth[6].startswith("+0.0220 ± ") and worth[8].startswith("+0.0000 ± ")
    assert worth[9].startswith("+0.5500 ± ") and worth[10] == ""  # the costs, of seed 42
    frozen = line_of(tables["new: gain over the frozen backbone"], "frozen")
    assert frozen[4].startswith("2.0500 ± ")


def test_a_world_without_results_has_no_table():
    assert study_worth.worth_tables({}) == {}
    assert study_worth.worth_tables({Cell("none", world=NEW): None}) == {}


def test_the_figure_shows_the_twins(results, monkeypatch, tmp_path):
    figures = {}
    monkeypatch.setattr(common, "save_figure",
                        lambda figure, path: figures.setdefault(path.name, figure))
    kept = only(copy.copy(results), "chebyshev")
    study_figures.draw_worth(kept, tmp_path / "a.png")
    ax = figures["a.png"].axes[0]
    seeing, blind = [points.lines[0].get_xdata().item() for points in ax.containers]
    assert seeing - blind == pytest.approx(0.022)
    assert study_figures.draw_worth({}, tmp_path / "b.png") is None


def test_a_difference_is_shown_with_its_sign():
    assert Difference(0.0123, 0.001, 0.01, 5).show(3) == "+0.012 ± 0.001"
