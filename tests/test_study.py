"""Cells that are named once and run once, the sliced backbone row by row, tables from numbers."""
import copy
import dataclasses
import functools
import json
import math
import statistics
from types import SimpleNamespace

import pytest
import tiny
import torch

import common
from checkpoint import load_backbone
from data import load_corpus
from evaluate import CONTROLS, HeldOut, Row, mean_by_t, score_references
from experiments import study, study_cells, study_figures, study_tables, study_train
from experiments.study_cells import INTACT, SLICED, Cell, CellResult
from hydra_ssm import MODES, Modulation
from mark_adapters import GEOMETRIES
from text import ByteTokenizer

TEXTS = ("valid", "one", "two")


def made_up_scores(elbo, rows):
    """Each row 0.1 worse than the one before it, two evaluation seeds, each text 1 worse."""
    scores = {}
    for j, text in enumerate(TEXTS):
        by_t = [elbo if k in (4, 5) else 9.0 for k in range(10)]
        scores[text] = {}
        for i, row in enumerate(rows):
            value = elbo + 0.1 * i + j
            scores[text][row] = {"elbo": [value, value + 0.02], "cart": [elbo + j, elbo + j],
                                 "by_t": [by_t, by_t], "perplexity": [1.0, 1.0]}
    return scores


def made_up_result(cell):
    """Best at the second rate, a little worse with each seed, under mode A and with a hole."""
    if cell.kernel == "none":
        return CellResult(made_up_scores(5.0 if cell.sliced else 2.0, cell.rows()))
    elbo = 1.9 + cell.seed * 1e-5
    elbo += 0.01 * abs(math.log2(cell.lr / 2e-3))
    if cell.modulate == "A":
        elbo += 0.05
    if "t_hole" in cell.settings():
        elbo += 0.03
    roughness = {"A": (3.0, 1.5)} if cell.kernel != "lora" else {}
    return CellResult(made_up_scores(elbo, cell.rows()), 1000, {}, roughness, (60.0, 30.0))


@functools.cache
def made_up_cells():
    results = {}
    for cells_of in study_cells.GROUPS.values():
        while True:  # a group knows more cells as its rates are settled
            left = [cell for cell in cells_of(results) if cell not in results]
            if not left:
                break
            for cell in left:
                results[cell] = made_up_result(cell)
    return results


def every_cell():
    """{Cell: CellResult} of all groups."""
    return copy.deepcopy(made_up_cells())


def improve(results, cell, text, elbo):
    """Give a cell's own row another ELBO on one text."""
    results[cell].scores[text][cell.row()]["elbo"] = [elbo, elbo]


# ------------------------------------------------------------------------------------- the cells

def test_every_cell_has_a_name_of_its_own_that_is_a_file_name():
    results = every_cell()
    names = [cell.name for cell in results]
    assert len(set(names)) == len(names) > 400
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                "0123456789_.+-") for name in names)


@pytest.mark.parametrize("cell", [
    INTACT, SLICED, Cell("lora+dct", 2e-3, 42), Cell("dct", 1e-3, 142),
    Cell("adaln", 1e-3, 42, sliced=True).but(init="default"),
    Cell("dct", 1e-3, 142).but(modulate="A"), Cell("dct", 4e-3, 42).but(t_hole=(0.4, 0.6)),
    Cell("hypernet", 4e-3, 42).but(mlp_norm=False, init="default")], ids=lambda cell: cell.name)
def test_a_file_says_which_cell_it_is_whatever_its_name(monkeypatch, tmp_path, cell):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    env = common.banner("study.py", study.Config())
    study_cells.save_cell(cell, made_up_result(cell), study.Config(), env)
    path, = (tmp_path / "results" / "study").glob("*")
    assert path.name == f"{cell.name}.json"
    path.rename(path.with_name("another.json"))
    (read, result), = study_cells.read_results().items()
    wanted = made_up_result(cell)
    assert read == cell
    assert (result.size, result.seconds) == (wanted.size, wanted.seconds)
    for text, rows in result.scores.items():
        assert list(rows) == cell.rows()
        for row, values in rows.items():
            assert values["elbo"] == wanted.scores[text][row]["elbo"]
        shown = {"cart", "elbo", "by_t"}
        own = wanted.scores[text][cell.row()]
        assert rows[cell.row()] == {name: own[name] for name in shown}


def test_a_control_keeps_no_number_that_nothing_shows(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    cell = Cell("dct", 1e-3, 142)
    env = common.banner("study.py", study.Config())
    study_cells.save_cell(cell, made_up_result(cell), study.Config(), env)
    result = study_cells.read_results()[cell]
    for row, values in result.scores["one"].items():
        assert set(values) == ({"cart", "elbo", "by_t"} if row == cell.row() else {"elbo"})


def test_the_rate_is_chosen_on_held_out_training_text_alone():
    results = every_cell()
    assert study_cells.best_rate("dct", results) == 2e-3
    slow = Cell("dct", 1e-3, 42)
    for text in ("one", "two"):                          # better on the test texts: of no account
        improve(results, slow, text, 0.0)
    assert study_cells.best_rate("dct", results) == 2e-3
    improve(results, slow, "valid", 0.0)
    assert study_cells.best_rate("dct", results) == 1e-3
    for cell in study_cells.seed_cells(results):
        assert cell.lr == (1e-3 if cell.kernel == "dct" else 2e-3)
    with pytest.raises(common.UserError, match="--run rates first"):
        study_cells.seed_cells({})


def test_the_groups_are_what_the_docstring_says():
    results = every_cell()
    groups = {name: cells_of(results) for name, cells_of in study_cells.GROUPS.items()}
    of_near = {name: len(cells) for name, cells in groups.items() if cells[0].world == "near"}
    assert of_near == {"frozen": 2, "rates": 18, "seeds": 32, "ablation": 18, "init": 5, "hole": 6,
                       "sliced": 6, "sweep": 9, "near": of_near["near"]}
    assert {cell.modulate for cell in groups["ablation"]} == {
        "all-except-A", "A", "dt", "BC", "D", "all-except-dt"}
    assert {cell.seed for cell in groups["seeds"]} == {142, 242, 342, 442}
    for name in study_cells.GROUPS:
        assert f"\n    {name} " in study_cells.__doc__


def test_table_2_by_masking_is_scored_on_one_seed_of_each_geometry_alone():
    masked = {cell for cell in every_cell() if len(cell.rows()) > 3}
    assert masked == {Cell(kernel, 2e-3, 142) for kernel in GEOMETRIES}
    for cell in masked:
        assert [row.modulate for row in cell.rows()] == ["full"] * 3 + list(MODES[1:-1])


def test_the_settings_of_the_sweep_change_one_at_a_time():
    for kernel, setting in study_cells.SWEEP:
        assert len(setting) == 1 and kernel in GEOMETRIES


# ---------------------------------------------------------------------------- what is measured

def test_roughness_is_the_total_variation_and_the_range():
    def adapter(t):
        wave = torch.stack([torch.sin(2 * math.pi * t), 5 * t], -1)          # t outputs
        return Modulation(A=wave[None], D=torch.ones(1, len(t), 2), B_scale=("no tensor",))
    found = study.roughness(adapter)
    assert found["A"] == pytest.approx(((4 + 5) / 2, (2 + 5) / 2), rel=1e-5)
    assert found["D"] == (0, 0) and set(found) == {"A", "D"}


@pytest.fixture
def setting(work, monkeypatch):
    """(Config, HeldOut) of a very small study on the tiny backbone."""
    monkeypatch.setattr(study_train, "load_backbone",
                        lambda source: load_backbone(work / "backbone.safetensors"))
    text = str(work / "text.txt")
    tokenizer = ByteTokenizer()
    corpora = {name: load_corpus([text], tokenizer) for name in ("valid", "held")}
    cfg = study.Config(train=(text,), test=(f"held={text}",), steps=2, seqlen=24, windows=2,
                       seeds=2, dirty=True)
    return cfg, HeldOut(corpora, tokenizer, cfg.seqlen, cfg.windows, common.SEEDS[:2])


@pytest.mark.parametrize("cell", [
    Cell("dct", 1e-3, 142), Cell("adaln", 1e-3, 42, sliced=True),
    Cell("lora+dct", 1e-3, 42).but(modulate="BC"), SLICED], ids=lambda cell: cell.name)
def test_a_cell_trains_scores_and_keeps_what_the_tables_need(work, setting, cell):
    cfg, held_out = setting
    result = study.run_cell(cell, cfg, held_out)
    assert list(result.scores) == ["valid", "held"]
    assert list(result.tested()) == ["held"]
    rows = result.scores["held"]
    assert list(rows) == cell.rows()
    if cell.kernel == "none":
        assert [row.adapter for row in rows] == ["uniform", "unigram", "frozen"]
        return
    first = [Row("", told, cell.modulate) for told in ("own t", *CONTROLS)]
    assert list(rows)[:3] == first
    assert len(rows[cell.row()]["elbo"]) == 2
    assert result.size > 0 and result.roughness


def test_a_finished_cell_is_never_run_again_and_a_stop_loses_no_other(setting, monkeypatch):
    cfg = dataclasses.replace(setting[0], run=("rates",))
    ran = []

    def run_cell(cell, *rest):
        if len(ran) == 3:
            raise common.UserError("stopped")
        ran.append(cell)
        return made_up_result(cell)

    monkeypatch.setattr(study, "run_cell", run_cell)
    with pytest.raises(common.UserError, match="stopped"):
        study.main(cfg)
    first = list(ran)
    assert set(study_cells.read_results()) == set(first)
    ran.clear()
    with pytest.raises(common.UserError, match="stopped"):
        study.main(cfg)
    assert len(ran) == 3 and not set(first) & set(ran)


def test_two_processes_share_the_cells_and_neither_runs_one_twice(setting, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    cfg = dataclasses.replace(setting[0], run=("rates",))
    ran = []

    def run_cell(cell, *rest):
        ran.append(cell)
        return made_up_result(cell)

    monkeypatch.setattr(study, "run_cell", run_cell)
    taken = study_cells.rate_cells({})[3]
    monkeypatch.setattr(study, "lock", lambda folder: busy(folder, taken))
    study.main(cfg)
    assert len(ran) == len(set(ran)) == 17 and taken not in ran


def busy(folder, taken):
    """As checkpoint.lock where another process is at the cell `taken`."""
    if folder.name == taken.name:
        raise common.UserError("in use")


def test_cells_of_another_study_are_neither_taken_for_this_one_nor_mixed_with_it(
        work, setting, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(study, "run_cell", lambda cell, *rest: made_up_result(cell))
    cfg = dataclasses.replace(setting[0], run=("frozen",))
    study.main(cfg)
    study.main(dataclasses.replace(cfg, hours=1.0))      # what does not matter may differ
    for other in ({"steps": 351}, {"test": (f"other={work / 'text.txt'}",)}, {"seeds": 4}):
        with pytest.raises(common.UserError, match="none.*json has other --train, --test.*MARK_R"):
            study.main(dataclasses.replace(cfg, **other))


def test_no_result_is_of_uncommitted_code_unless_that_is_asked_for(setting, monkeypatch):
    env = {**common.banner("study.py", setting[0]), "dirty": True}
    monkeypatch.setattr(common, "banner", lambda *args: env)
    monkeypatch.setattr(study, "run_groups", lambda *args: pytest.fail("nothing may run"))
    with pytest.raises(common.UserError, match="commit first, or give --dirty"):
        study.main(dataclasses.replace(setting[0], run=("frozen",), dirty=False))


def test_an_empty_bin_of_t_does_not_spoil_the_others():
    row = Row("")
    result = {"one": {row: {"by_t": [[1.0, None], [3.0, 2.0]]}}}  # as json holds a NaN
    assert mean_by_t(result, row).tolist() == [2.0, 2.0]


def test_a_group_that_does_not_exist_or_has_no_text_is_one_line(work):
    for argv in (("--run", "everything"), ("--run", "frozen")):
        run = tiny.command("experiments.study", *argv)
        assert run.status == 2 and run.err.count("\n") == 1 and argv[1] in run.err


# ------------------------------------------------------------------------------------ the tables

def test_gains_are_paired_with_the_frozen_backbone_of_the_same_kind_and_averaged():
    results = every_cell()
    cell = study_cells.trained_seeds(results, "dct")[0]
    gain = 2.0 + 0.2 - 1.9 - 42e-5                       # frozen is the third row, so 0.2 up
    assert study_tables.gain(results, cell) == [pytest.approx([gain] * 2)] * 3
    results[INTACT].scores["one"][Row("frozen")]["elbo"][1] += 0.5       # one evaluation seed
    assert study_tables.gain(results, cell)[0] == pytest.approx([gain, gain + 0.5])
    assert study_tables.gain(results, cell)[-1] == pytest.approx([gain, gain + 0.25])
    assert study_tables.cost(results, cell, "constant t") == [pytest.approx([0.2] * 2)] * 3
    sliced = dataclasses.replace(cell, sliced=True)
    assert study_tables.gain(results, sliced)[0] == pytest.approx([gain + 3] * 2)
    assert len(study_cells.trained_seeds(results, "dct")) == 5


def lines(tables, start):
    """The lines of the table whose title starts so."""
    found, = (table for title, table in tables.items() if title.startswith(start))
    return found.splitlines()


def test_the_tables_show_the_numbers_of_the_cells():
    tables = study_tables.finished_tables(every_cell())
    assert len(tables) == 7
    assert lines(tables, "CART masked_mean, nats")[4:7] == [
        "| frozen | 3.000 ± 0.000 | 4.000 ± 0.000 | 3.500 ± 0.000 |",
        "| sliced, frozen | 6.000 ± 0.000 | 7.000 ± 0.000 | 6.500 ± 0.000 |",
        "| sliced, hypernet | 2.900 ± 0.000 | 3.900 ± 0.000 | 3.400 ± 0.000 |"]
    values = [2.2 - 1.9 - seed * 1e-5 for seed in common.SEEDS[:5]]
    t4 = 2.7764451                                       # Student's 0.975 quantile, 4 degrees
    error = t4 * statistics.stdev(values) / 5 ** 0.5     # no difference between evaluation seeds
    cell = f"{statistics.fmean(values):+.4f} ± {error:.4f} ({error:.4f})"
    gains = lines(tables, "gain")
    assert gains[2] == f"| hypernet | 1,000 | 0.002 | 5 | {cell} | {cell} | {cell} |"
    assert gains[8].startswith("| inject, default start | 1,000 | 0.002 | 5 | +0.")
    none = "± 0.0000 (0.0000)"
    uses = lines(tables, "what t is worth")
    assert f"| dct | +0.1000 {none} | +0.2000 {none} | 2.0 ± 0.0 | +0.0300 ± 0.0000 |" in uses
    assert f"| lora | +0.1000 {none} | +0.2000 {none} | reads no t | +0.0300 ± 0.0000 |" in uses
    assert uses[-1] == f"| adaln, default start | +0.1000 {none} | +0.2000 {none} | 2.0 ± 0.0 |  |"
    masked, retrained = (dict(zip(MODES, row.strip("| ").split(" | ")[2:]))
                         for row in lines(tables, "Table 2")[2:4])
    assert masked["full"] == retrained["full"] == "+0.2986 ± 0.0000"
    assert masked["all-except-A"] == "-0.3000 ± 0.0000"  # the row after two controls
    assert retrained["A"] == "-0.0500 ± 0.0000" and retrained["dt"] == "+0.0000 ± 0.0000"
    assert ("| hypernet | sliced backbone | 1,000 | +3.2996 ± 0.0000 |  | "
            "+0.1000 ± 0.0000 | +0.1000 ± 0.0000 |") in lines(tables, "the sliced")
    assert ("| dct | rank 1 | 1,000 | +0.2996 ± 0.0000 | +0.0000 ± 0.0000 | "
            "+0.1000 ± 0.0000 | +0.1000 ± 0.0000 |") in lines(tables, "one setting")
    assert lines(tables, "PyTorch's")[2].startswith("| hypernet | init default, mlp_norm False |")


def test_an_interval_has_the_test_windows_and_the_training_seeds_in_it():
    grid = [[1.0, 3.0, 2.0], [2.0, 4.0, 3.0]]            # two training, three evaluation seeds
    training = 12.7062 * (0.5 ** 0.5) / 2 ** 0.5         # of the means 2 and 3
    windows = 4.302653 * 1.0 / 3 ** 0.5                  # of the means 1.5, 3.5 and 2.5
    want = f"+2.5000 ± {math.hypot(training, windows):.4f} ({training:.4f})"
    assert study_tables.show_both(grid) == want
    assert study_tables.show_both(grid[:1]) == f"+2.0000 ± {windows:.4f} (n/a)"
    assert study_tables.show_both([[1.0], [2.0]]) == f"+1.5000 (n/a) ({training:.4f})"
    assert study_tables.show_both([[1.0]]) == "+1.0000 (n/a) (n/a)"


def test_a_rate_at_the_edge_of_those_tried_is_marked():
    results = every_cell()
    improve(results, Cell("dct", 4e-3, 42), "valid", 0.0)
    assert "| dct | 1,000 | 0.004 (the edge) | 1 |" in study_tables.gain_table(results)


def test_a_table_waits_for_its_last_cell():
    results = every_cell()
    whole = len(study_tables.finished_tables(results))
    del results[study_cells.sweep_cells(results)[4]]
    assert len(study_tables.finished_tables(results)) == whole - 1
    del results[study_cells.rate_cells(results)[0]]
    assert len(study_tables.finished_tables(results)) == 1
    assert not study_tables.finished_tables({})


# ----------------------------------------------------------------------------------- the figures

@pytest.fixture
def drawn(monkeypatch):
    """{file name: figure} of what was drawn."""
    figures = {}
    monkeypatch.setattr(common, "save_figure",
                        lambda figure, path: figures.setdefault(path.name, figure))
    return figures


def panel(figure, title):
    ax, = (ax for ax in figure.axes if ax.get_title().startswith(title))
    return ax


def dots(figure, title):
    """The numbers that a panel's dots stand at, in the order of drawing."""
    return [points.lines[0].get_xdata().item() for points in panel(figure, title).containers]


def curves(figure, title):
    """The numbers by bin of t of a panel's curves, in the order of drawing."""
    return [points.lines[0].get_ydata() for points in panel(figure, title).containers]


def test_the_first_figure_shows_the_numbers_of_the_tables(drawn, tmp_path):
    study_figures.draw_comparisons(every_cell(), tmp_path / "a.png")
    figure = drawn["a.png"]
    mean = 0.3 - statistics.fmean(common.SEEDS[:5]) * 1e-5
    assert dots(figure, "gain over frozen\n") == pytest.approx([mean] * 8)  # two of them twice
    assert dots(figure, "cost of a shuffled") == pytest.approx([0.1, 0.2] * 6)
    bins = [0.0] * 4 + [mean - 0.2] * 2 + [0.0] * 4      # frozen is 2.0 there, and 9 elsewhere
    assert curves(figure, "gain over frozen, by t") == [pytest.approx(bins, abs=1e-6)] * 6


def test_the_second_figure_shows_the_numbers_of_the_tables(drawn, tmp_path):
    results = every_cell()
    assert study_figures.draw_ablations(results, tmp_path / "a.png") == tmp_path / "a.png"
    figure = drawn["a.png"]
    by_mode = torch.tensor(dots(figure, "Table 2")).reshape(6, 3, 2)     # mode, geometry, how
    assert by_mode[0, :, 0].tolist() == pytest.approx([-0.3] * 3)        # masked, all-except-A
    assert by_mode[1, :, 0].tolist() == pytest.approx([-0.4] * 3)        # masked, A
    assert by_mode[0, :, 1].tolist() == pytest.approx([0.0] * 3)
    assert by_mode[1, :, 1].tolist() == pytest.approx([-0.05] * 3)       # retrained, A
    bins = [0.0] * 4 + [0.03] * 2 + [0.0] * 4
    assert curves(figure, "cost of no training") == [pytest.approx(bins, abs=1e-6)] * 6
    assert dots(figure, "one setting") == pytest.approx([0] * 14)


def test_a_figure_waits_for_no_group_and_shows_what_is_finished(drawn, tmp_path):
    results = {cell: result for cell, result in every_cell().items() if "rank" not in cell.name}
    study_figures.draw_ablations(results, tmp_path / "a.png")
    titles = [ax.get_title().split()[0] for ax in drawn["a.png"].axes]
    assert titles == ["Table", "cost"]
    first = {cell: results[cell] for cell in (INTACT, SLICED, *study_cells.rate_cells(results))}
    study_figures.draw_comparisons(first, tmp_path / "b.png")            # one seed: no error bar
    assert study_figures.draw_ablations(first, tmp_path / "c.png") is None and "c.png" not in drawn


def words_of(ax):
    """The title, the labels and the tick labels that are drawn."""
    words = [ax.title, ax.xaxis.label, ax.yaxis.label]
    for axis in (ax.xaxis, ax.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if low <= tick.get_loc() <= high:
                words.append(tick.label1)
    return [word for word in words if word.get_text()]


def test_no_words_of_a_figure_overlap_or_leave_it(tmp_path, monkeypatch):
    """Of the committed results, as they are drawn."""
    if not committed():
        pytest.skip("no cell is committed")
    figures = []
    monkeypatch.setattr(common, "save_figure", lambda figure, path: figures.append(figure))
    monkeypatch.setattr(common, "ROOT", tiny.ROOT)
    results = study_cells.read_results()
    study_figures.draw_comparisons(results, tmp_path / "a.png")
    study_figures.draw_ablations(results, tmp_path / "b.png")
    for figure in figures:
        figure.draw_without_rendering()
        words = figure.legends[0].get_texts()
        for ax in figure.axes:
            words += words_of(ax)
        assert len(words) > 40
        boxes = [word.get_window_extent() for word in words]
        for i, box in enumerate(boxes):
            assert 0 <= box.x0 and box.x1 <= figure.bbox.x1, words[i]
            assert 0 <= box.y0 and box.y1 <= figure.bbox.y1, words[i]
            for other, word in zip(boxes[:i], words):
                assert not box.overlaps(other), (words[i], word)


# ------------------------------------------------------------------------------- committed cells

def committed():
    return sorted((tiny.ROOT / "results" / "study").glob("*.json"))


@pytest.mark.skipif(not committed(), reason="no cell is committed")
def test_committed_cells_share_their_settings_and_are_read_as_what_they_are():
    shared = set()
    for path in committed():
        saved = common.read_json(path)
        shared.add(json.dumps([saved["config"][name] for name in study_cells.SHARED]))
        assert study_cells.read_cell(path, saved["metrics"]).name == path.stem
    assert len(shared) == 1


@pytest.mark.skipif(not committed(), reason="no cell is committed")
@pytest.mark.parametrize("cell", [INTACT, SLICED], ids=lambda cell: cell.name)
def test_a_cheap_committed_cell_is_what_it_would_be_now(cell):
    """The frozen backbones on tiny Shakespeare, one seed."""
    path = tiny.ROOT / "results" / "study" / f"{cell.name}.json"
    saved = common.read_json(path)
    config = SimpleNamespace(**saved["config"])
    was = study_cells.read_result(cell, saved["metrics"]).scores["shakespeare"]
    corpora = {"shakespeare": load_corpus([tiny.ROOT / "assets/tinyshakespeare.txt"],
                                          ByteTokenizer())}
    held_out = HeldOut(corpora, ByteTokenizer(), config.seqlen, config.windows, (42,))
    backbone = study_train.backbone_of(cell, None)
    now = score_references(backbone, held_out, torch.arange(256).repeat(2))
    frozen = Row("frozen")
    for metric in ("elbo", "cart"):                      # float32 on another machine
        got = now["shakespeare"][frozen][metric][0]
        assert got == pytest.approx(was[frozen][metric][0], rel=1e-4)
