"""Cells that are named once and run once, the sliced backbone row by row, tables from numbers."""
import dataclasses
import itertools
import json
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch

import common
from experiments import study
from data import load_corpus
from hydra_ssm import HydraConfig, Modulation, load_backbone
from text import ByteTokenizer

SETS = ("valid", "one", "two")


def scores(elbo, rows=("", ", shuffled t", ", constant t", ", A")):
    """A cell's scores: each row 0.1 worse than the one before it, two evaluation seeds."""
    return {name: {row: {"elbo": [elbo + 0.1 * i + j, elbo + 0.1 * i + j + 0.02],
                         "cart": [elbo + j, elbo + j],
                         "by_t": [[elbo if k in (4, 5) else 9.0 for k in range(10)]] * 2}
                   for i, row in enumerate(rows)} for j, name in enumerate(SETS)}


def every_cell():
    """{name: metrics} in which the second rate is the best, filled group by group."""
    results = {}
    for group in study.GROUPS:
        for cell in study.cells(group, results):
            if cell.kernel == "none":
                found = {"scores": scores(2.0 + 3 * cell.sliced, ("uniform", "unigram", "frozen"))}
            else:
                elbo = 1.9 + 0.01 * (cell.settings["lr"] != 2e-3) + cell.settings["seed"] * 1e-5
                elbo += 0.05 * (cell.settings.get("modulate") == "A")
                elbo += 0.03 * ("t_hole" in cell.settings)
                rows = ["", ", shuffled t", ", constant t", *(f", {m}" for m in study.MODES[1:-1])]
                found = {"scores": scores(elbo, rows), "size": 1000, "settings": cell.settings,
                         "roughness": {"A": (3.0, 1.5)} if cell.kernel != "lora" else {}}
            assert cell.name not in results or group == "ablation"
            results[cell.name] = json.loads(json.dumps(found))
    return results


# ------------------------------------------------------------------------------------- the cells

def test_every_cell_has_a_name_of_its_own_that_is_a_file_name():
    results = every_cell()
    cells = [cell for group in study.GROUPS for cell in study.cells(group, results)]
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) == len(results)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                "0123456789_.-") for name in names)


def test_the_rate_is_chosen_on_held_out_training_text_alone():
    results = every_cell()
    assert study.best_rate("dct", results) == 2e-3
    slow = results[study.Cell("dct", {"lr": 1e-3, "seed": 42}).name]
    for name in ("one", "two"):                          # better on the test sets: of no account
        slow["scores"][name][""]["elbo"] = [0.0, 0.0]
    assert study.best_rate("dct", results) == 2e-3
    slow["scores"]["valid"][""]["elbo"] = [0.0, 0.0]
    assert study.best_rate("dct", results) == 1e-3
    assert all(cell.settings["lr"] == (1e-3 if cell.kernel == "dct" else 2e-3)
               for cell in study.cells("seeds", results))
    with pytest.raises(common.UserError, match="--run rates first"):
        study.cells("seeds", {})


def test_the_groups_are_what_the_docstring_says():
    results = every_cell()
    count = {group: len(study.cells(group, results)) for group in study.GROUPS}
    assert count == {"frozen": 2, "rates": 18, "seeds": 32, "ablation": 18, "init": 5, "hole": 6,
                     "sliced": 6, "sweep": 9}
    modes = {cell.settings["modulate"] for cell in study.cells("ablation", results)}
    assert modes == {"all-except-A", "A", "dt", "BC", "D", "all-except-dt"}
    seeds = {cell.settings["seed"] for cell in study.cells("seeds", results)}
    assert seeds == {142, 242, 342, 442}


# -------------------------------------------------------------------------- the sliced backbone

def test_the_sliced_backbone_is_the_one_of_the_public_code_row_by_row(work):
    model = load_backbone(work / "backbone.safetensors")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    sliced = study.sliced_backbone(model)
    full, half = tiny.CONFIG, sliced.config
    assert (half.nheads, half.headdim) == (full.nheads // 2, 2 * full.headdim)
    rows = 2 * full.d_inner + 4 * full.d_state           # of z, x, B and C
    for layer, whole in zip(sliced.layers, model.layers):
        old, new = whole.mixer.in_proj.weight, layer.mixer.in_proj.weight
        assert torch.equal(new[:rows], old[:rows])
        forward = old[rows:rows + full.nheads]           # of the forward dt: 4 heads
        assert torch.equal(new[rows:], forward)          # its second half now is the backward dt
        assert len(new) == rows + 2 * half.nheads
        for name in ("A_log", "dt_bias", "D"):
            assert torch.equal(getattr(layer.mixer, name), getattr(whole.mixer, name)[:half.nheads])
        assert torch.equal(layer.mixer.fc_D.weight, whole.mixer.fc_D.weight[:half.nheads])
        assert torch.equal(layer.mixer.out_proj.weight, whole.mixer.out_proj.weight)
    hidden = torch.randn(3, full.d_model, generator=torch.Generator().manual_seed(0))
    inner = sliced.head_dense(hidden)
    want = sliced.head_norm(inner * torch.sigmoid(inner)) @ sliced.word_embeddings.weight.T
    torch.testing.assert_close(sliced.head(hidden), want + sliced.decoder_bias)
    assert not torch.allclose(sliced.head(hidden), model.head(hidden), atol=1e-3)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_of_the_released_sizes_it_keeps_3352_rows():
    assert HydraConfig(headdim=128).d_in_proj == 3352 and HydraConfig(headdim=128).nheads == 12


# ---------------------------------------------------------------------------- what is measured

def test_roughness_is_the_total_variation_and_the_range():
    def adapter(t):
        wave = torch.stack([torch.sin(2 * math.pi * t), 5 * t], -1)          # t outputs
        return Modulation(A=wave[None], D=torch.ones(1, len(t), 2), lora=("not a modulation",))
    found = study.roughness(adapter)
    assert found["A"] == pytest.approx(((4 + 5) / 2, (2 + 5) / 2), rel=1e-5)
    assert found["D"] == (0, 0) and set(found) == {"A", "D"}


@pytest.fixture
def setting(work, monkeypatch):
    monkeypatch.setattr(study, "load_backbone",
                        lambda source: load_backbone(work / "backbone.safetensors"))
    text = str(work / "text.txt")
    corpora = {name: load_corpus([text], ByteTokenizer()) for name in ("valid", "held")}
    return study.Config(train=(text,), steps=2, seqlen=24, windows=2, seeds=2), corpora


@pytest.mark.parametrize("cell", [
    study.Cell("dct", {"lr": 1e-3, "seed": 142}),
    study.Cell("adaln", {"lr": 1e-3, "seed": 42}, sliced=True),
    study.Cell("dct", {"lr": 1e-3, "seed": 42, "modulate": "BC"}), study.Cell("none", {}, True)],
    ids=lambda cell: cell.name)
def test_a_cell_trains_scores_and_keeps_what_the_tables_need(work, setting, cell, monkeypatch):
    cfg, corpora = setting
    asked, score = [], study.score
    monkeypatch.setattr(study, "score",
                        lambda *args, **how: asked.append(how) or score(*args, **how))
    found = study.run_cell(cell, cfg, ByteTokenizer(), corpora)
    rows = found["scores"]["held"]
    if cell.kernel == "none":
        assert rows.keys() == {"uniform", "unigram", "frozen"}
        return
    assert {"", ", shuffled t", ", constant t"} <= rows.keys() and len(rows[""]["elbo"]) == 2
    assert (", BC" in rows) == (cell == study.Cell("dct", {"lr": 1e-3, "seed": 142}))
    assert found["size"] > 0 and found["sliced"] == cell.sliced and found["roughness"]
    first = cell.settings.get("modulate", "full")
    assert asked[0]["modes"][0] == first and (len(asked[0]["modes"]) == 7) == (", BC" in rows)
    reaches_A = json.loads((work / f"runs/study_{cell.name}/config.json").read_text())["config"]
    assert reaches_A["modulate"] == cell.settings.get("modulate", "full")


def test_a_finished_cell_is_never_run_again_and_a_stop_loses_no_other(work, setting, monkeypatch):
    ran = []

    def run_cell(cell, *rest):
        if len(ran) == 3:
            raise common.UserError("stopped")
        ran.append(cell.name)
        return {"scores": scores(2.0), "seconds": [1, 1]}
    monkeypatch.setattr(study, "run_cell", run_cell)
    cfg = study.Config(run=("rates",), train=setting[0].train, test=(f"t={work / 'text.txt'}",))
    with pytest.raises(common.UserError, match="stopped"):
        study.main(cfg)
    first, ran[:] = list(ran), []
    assert {path.stem for path in (work / "results/study").glob("*")} == set(first)
    with pytest.raises(common.UserError, match="stopped"):
        study.main(cfg)
    assert not set(first) & set(ran)


def test_cells_of_another_study_are_neither_taken_for_this_one_nor_mixed_with_it(
        work, setting, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(study, "run_cell", lambda *args: {
        "scores": scores(2.0, ("uniform", "unigram", "frozen"))})
    cfg = study.Config(run=("frozen",), train=setting[0].train, test=(f"t={work / 'text.txt'}",))
    study.main(cfg)
    study.main(dataclasses.replace(cfg, hours=1.0))      # what does not matter may differ
    for other in ({"steps": 351}, {"test": (f"other={work / 'text.txt'}",)}, {"seeds": 4}):
        with pytest.raises(common.UserError, match="none.*json has other --train, --test.*MARK_R"):
            study.main(dataclasses.replace(cfg, **other))


def test_an_empty_bin_of_t_does_not_spoil_the_others():
    result = {"one": {"": {"by_t": [[1.0, None], [3.0, 2.0]]}}}  # as json holds a NaN
    assert study.mean_by_t(result, "").tolist() == [2.0, 2.0]


def test_a_group_that_does_not_exist_or_has_no_text_is_one_line(work):
    for argv in (("--run", "everything"), ("--run", "frozen")):
        run = tiny.command("experiments.study", *argv)
        assert run.status == 2 and run.err.count("\n") == 1 and argv[1] in run.err


# ------------------------------------------------------------------------------------ the tables

def test_gains_are_paired_with_the_frozen_backbone_of_the_same_kind_and_averaged():
    results = every_cell()
    cell = study.trained_seeds(results, "dct")[0]
    gain = 2.0 + 0.2 - 1.9 - 42e-5                       # frozen is the third row, so 0.2 up
    assert study.against(results, cell) == [pytest.approx([gain] * 2)] * 3
    results["none"]["scores"]["one"]["frozen"]["elbo"][1] += 0.5         # one evaluation seed
    assert study.against(results, cell)[0] == pytest.approx([gain, gain + 0.5])
    assert study.against(results, cell)[-1] == pytest.approx([gain, gain + 0.25])
    constant = study.against(results, cell, "", (cell, ", constant t"))
    assert constant == [pytest.approx([0.2] * 2)] * 3
    sliced = study.Cell("dct", {"lr": 2e-3, "seed": 42}, sliced=True)
    assert study.against(results, sliced)[0] == pytest.approx([gain + 3] * 2)
    assert len(study.trained_seeds(results, "dct")) == 5


def test_the_tables_show_the_numbers_of_the_cells():
    results = every_cell()
    found = study.tables(results)
    assert len(found) == 7
    frozen = found["CART masked_mean, nats"].splitlines()
    assert frozen[4:7] == ["| frozen | 3.000 ± 0.000 | 4.000 ± 0.000 | 3.500 ± 0.000 |",
                           "| sliced, frozen | 6.000 ± 0.000 | 7.000 ± 0.000 | 6.500 ± 0.000 |",
                           "| sliced, hypernet | 2.900 ± 0.000 | 3.900 ± 0.000 | 3.400 ± 0.000 |"]
    gains = next(table for title, table in found.items() if title.startswith("gain")).splitlines()
    values = [2.2 - 1.9 - seed * 1e-5 for seed in common.SEEDS[:5]]
    t4 = 2.7764451                                       # Student's 0.975 quantile, 4 degrees
    error = t4 * statistics.stdev(values) / 5 ** 0.5     # no difference between evaluation seeds
    cell = f"{statistics.fmean(values):+.4f} ± {error:.4f} ({error:.4f})"
    assert gains[2] == f"| hypernet | 1,000 | 0.002 | 5 | {cell} | {cell} | {cell} |"
    uses = next(table for title, table in found.items() if title.startswith("what t is worth"))
    none = "± 0.0000 (0.0000)"
    assert f"| dct | +0.1000 {none} | +0.2000 {none} | 2.0 ± 0.0 | +0.0300 ± 0.0000 |" in uses
    assert f"| lora | +0.1000 {none} | +0.2000 {none} | reads no t | +0.0300 ± 0.0000 |" in uses
    ablation = next(table for title, table in found.items() if title.startswith("Table 2"))
    masked, retrained = (dict(zip(study.MODES, row.strip("| ").split(" | ")[2:]))
                         for row in ablation.splitlines()[2:4])
    assert masked["full"] == retrained["full"] == "+0.2986 ± 0.0000"
    assert masked["all-except-A"] == "-0.3000 ± 0.0000"  # the row after two controls
    assert retrained["A"] == "-0.0500 ± 0.0000" and retrained["dt"] == "+0.0000 ± 0.0000"
    sliced = next(table for title, table in found.items() if title.startswith("the sliced"))
    assert ("| hypernet | sliced backbone | 1,000 | +3.2996 ± 0.0000 |  | "
            "+0.1000 ± 0.0000 | +0.1000 ± 0.0000 |") in sliced
    sweep = next(table for title, table in found.items() if title.startswith("one setting"))
    assert ("| dct | rank 1 | 1,000 | +0.2996 ± 0.0000 | +0.0000 ± 0.0000 | "
            "+0.1000 ± 0.0000 | +0.1000 ± 0.0000 |") in sweep


def test_an_interval_has_the_test_windows_and_the_training_seeds_in_it():
    grid = [[1.0, 3.0, 2.0], [2.0, 4.0, 3.0]]            # two training, three evaluation seeds
    training = 12.7062 * (0.5 ** 0.5) / 2 ** 0.5         # of the means 2 and 3
    windows = 4.302653 * 1.0 / 3 ** 0.5                  # of the means 1.5, 3.5 and 2.5
    want = f"+2.5000 ± {math.hypot(training, windows):.4f} ({training:.4f})"
    assert study.both_errors(grid) == want
    assert study.both_errors(grid[:1]) == f"+2.0000 ± {windows:.4f} (n/a)"


def test_the_figure_shows_the_numbers_of_the_tables(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(common, "save_figure", lambda figure, path: drawn.append(figure))
    results = every_cell()
    study.draw(results, tmp_path / "comparisons.png")
    panels = {ax.get_title(): ax for ax in drawn[0].axes}

    def dots(title):                                     # in the order of drawing
        ax = next(ax for name, ax in panels.items() if name.startswith(title))
        return [points.lines[0].get_ydata().item() for points in ax.containers]
    mean = 0.3 - statistics.fmean(common.SEEDS[:5]) * 1e-5
    assert dots("gain ± training") == pytest.approx([mean] * 8)  # two of them a second time
    assert dots("cost of a shuffled") == pytest.approx([0.1, 0.2] * 6)
    masked, retrained = np.array(dots("Table 2")).reshape(3, 2, 6).swapaxes(0, 1)
    assert retrained[:, :2] == pytest.approx(np.array([[0, -0.05]] * 3))
    assert masked[:, :2] == pytest.approx(np.array([[-0.3, -0.4]] * 3))
    assert dots("gain less") == pytest.approx([0] * 14)
    hole = [line.get_ydata() for line in panels["cost of no training at 0.4 < t < 0.6, by t"].lines]
    assert len(hole) == 7 and all(line == pytest.approx([0] * 4 + [0.03] * 2 + [0] * 4, abs=1e-6)
                                  for line in hole[:6])  # the last is the zero line

    for name in [name for name in results if "t_hole" in name or "rank" in name]:
        del results[name]                                # a figure does not wait for them
    study.draw(results, tmp_path / "comparisons.png")


def test_a_rate_at_the_edge_of_those_tried_is_marked():
    results = every_cell()
    fast = results[study.Cell("dct", {"lr": 4e-3, "seed": 42}).name]
    fast["scores"]["valid"][""]["elbo"] = [0, 0]
    gains, _ = study.conditioning_tables(results).values()
    assert "| dct | 1,000 | 0.004 (the edge) | 1 |" in gains


def test_a_table_waits_for_its_last_cell():
    results = every_cell()
    whole = len(study.tables(results))
    results.pop(study.cells("sweep", results)[4].name)
    assert len(study.tables(results)) == whole - 1
    results.pop(study.cells("rates", results)[0].name)
    assert len(study.tables(results)) == 1 and not study.tables({})


def test_the_spread_of_settings_in_the_sweep_is_one_at_a_time():
    for kernel, settings in itertools.chain(*study.SWEEP.values()):
        assert len(settings) == 1 and kernel in study.GEOMETRIES


# ------------------------------------------------------------------------------- committed cells

def committed():
    return sorted((tiny.ROOT / "results" / "study").glob("*.json"))


@pytest.mark.skipif(not committed(), reason="no cell is committed")
def test_committed_cells_share_their_settings():
    shared = ("train", "test", "steps", "seqlen", "windows", "seeds")
    configs = [json.loads(path.read_text())["config"] for path in committed()]
    assert len({json.dumps([config[k] for k in shared]) for config in configs}) == 1


@pytest.mark.skipif(not (tiny.ROOT / "corpora").exists() or not committed(),
                    reason="the texts are not here")
def test_a_cheap_committed_cell_is_what_it_would_be_now(monkeypatch):
    """The frozen backbones on tiny Shakespeare, one seed."""
    monkeypatch.chdir(tiny.ROOT)
    tokenizer = ByteTokenizer()
    for sliced in (False, True):
        saved = json.loads((tiny.ROOT / "results" / "study" / (
            study.Cell("none", {}, sliced).name + ".json")).read_text())
        cfg = SimpleNamespace(**saved["config"])
        path = dict(item.split("=") for item in cfg.test)["shakespeare"]
        model = load_backbone("small")
        model = study.sliced_backbone(model) if sliced else model
        now = study.score(model, {}, {"shakespeare": load_corpus([path], tokenizer)}, tokenizer,
                          cfg.seqlen, cfg.windows, [42], torch.arange(256).repeat(2))
        was = saved["metrics"]["scores"]["shakespeare"]["frozen"]
        for metric in ("elbo", "cart"):                  # float32 on another machine
            got = now["shakespeare"]["frozen"][metric][0]
            assert got == pytest.approx(was[metric][0], rel=1e-4)
