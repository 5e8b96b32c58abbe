"""bench.py: its claims about operations and memory, how it times, its tables and its figure."""
import dataclasses
import json

import common
import hydra_ssm
import pytest
import tiny
import torch
from checkpoint import load_backbone
from experiments import bench, measure
from experiments.measure import Count
from mark_adapters import make_adapter
from torch.utils.flop_counter import FlopCounterMode

NARROW = hydra_ssm.HydraConfig(vocab_size=97, d_model=32, n_layer=23, d_state=8, headdim=16)


# ---- the claims ----------------------------------------------------------------------------------


def test_at_23_layers_an_adapter_is_60_operations_and_five_a_layer_and_no_pass_over_d_inner():
    rows = bench.adapters_alone(hydra_ssm.HydraBert(NARROW), "cpu", rounds=1)
    for name in bench.GEOMETRIES:
        row = rows[name]
        assert 30 < row["operations"] <= 60, name
        assert row["to_apply"] == 5, name
        assert row["beyond_frozen"] == 0, "a frozen pass has the same five"
        assert row["large_passes"] == 0, name
    for name, operations in (("inject", 1), ("adaln", 5)):
        assert rows[name]["to_apply"] == rows[name]["beyond_frozen"] == operations, name


def test_a_pass_over_d_inner_would_be_seen():
    """Where d_inner is d_model, the baselines make them: one a layer h + W c, and AdaLN three."""
    config = dataclasses.replace(NARROW, n_layer=2, expand=1, d_state=4)
    rows = bench.adapters_alone(hydra_ssm.HydraBert(config), "cpu", rounds=1)
    assert rows["inject"]["large_passes"] == 2
    assert rows["adaln"]["large_passes"] == 6
    assert rows["dct"]["large_passes"] == 0


@pytest.mark.parametrize("checkpointing", (False, True))
def test_only_masked_positions_reach_the_vocabulary_a_chunk_at_a_time(checkpointing):
    """2 x 16,384 tokens, half of them masked, of a vocabulary of 2,000: the logits of all would be
    262 MB, and a step makes those of 4,096 positions at a time, with their softmax and gradient."""
    config = dataclasses.replace(NARROW, vocab_size=2000, d_model=16, n_layer=1, expand=1)
    model = hydra_ssm.HydraBert(config).requires_grad_(False)
    model.checkpointing = checkpointing
    adapter = make_adapter("hypernet", config, mlp_dim=8)
    optimizer = torch.optim.AdamW(adapter.parameters())
    with Count() as count:
        bench.training_step(model, adapter, optimizer, 2, 16_384)
    assert max(count.sizes) == 4096 * 2000
    assert count.peak < 2 * 16_384 * 2000 * 4


def test_memory_and_work_grow_with_the_length_and_no_faster():
    model = load_backbone("small")
    peaks = []
    work = []
    for l in (512, 2048):
        ids = torch.zeros(1, l, dtype=torch.long)
        with torch.no_grad(), Count() as count, FlopCounterMode(display=False) as flops:
            model.hidden(ids)
        peaks.append(count.peak / l)
        work.append(flops.get_total_flops() / l)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)
    assert work[1] == work[0]


# ---- the run -------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """The released size and the sweeps, small."""
    monkeypatch.setattr(bench, "RELEASED", dataclasses.replace(NARROW, n_layer=2))
    monkeypatch.setattr(measure, "load_backbone",
                        lambda *args: hydra_ssm.HydraBert(bench.RELEASED).requires_grad_(False))
    monkeypatch.setattr(bench, "LENGTHS", (64, 128))
    monkeypatch.setattr(bench, "DEPTHS", (1, 2))


def test_a_run_measures_every_variant_and_draws_and_writes_its_tables(tmp_path, small, capsys):
    with tiny.root_at(tmp_path):
        result = bench.main(bench.Config(length=(16, 24), batch=2, seeds=2, passes=2, device="cpu",
                                         weights="random"))
    total = sum(p.numel() for p in hydra_ssm.HydraBert(bench.RELEASED).parameters())
    for name, row in result["cost"].items():
        assert row["total"] == total
        assert (row["added"] > 0) == (name != "frozen")
        for l in (16, 24):
            assert len(row["ms"][l]) == len(row["overhead"][l]) == 2
        assert row["mib"][16] < row["mib"][24]
    assert {"frozen", "inject", "adaln", "dct", "dct, all t at once"} < result["cost"].keys()
    for both in result["training"].values():
        for row in both.values():
            assert row["ms"] == pytest.approx(sum(row["parts"].values()))
            assert row["tokens_per_second"] == pytest.approx(
                1e3 * row["batch"] * row["length"] / row["ms"])
    shipped = result["training"]["shipped"]
    assert shipped["checkpointing"]["mib"] < shipped["plain"]["mib"]
    assert list(result["scaling"]["length"]) == [64, 128]
    assert (tmp_path / "runs/bench/table3_laptop.png").exists()
    stored = json.loads((tmp_path / "runs/bench/result.json").read_text("utf-8"))
    assert stored["metrics"]["tables"] == result["tables"]
    assert stored["script"] == "bench"
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(
        "the paper's training, computed:")


def test_the_result_is_written_before_the_figure_is_drawn(tmp_path, monkeypatch, small):
    def broken(*args):
        raise OSError("no picture")
    measured = {"tables": {}, "plan": {"hours": {}}}
    monkeypatch.setattr(bench, "measure_all", lambda *args: measured)
    monkeypatch.setattr(bench, "draw_bench", broken)
    with tiny.root_at(tmp_path), pytest.raises(OSError, match="no picture"):
        bench.main(bench.Config(weights="random", device="cpu"))
    stored = json.loads((tmp_path / "runs/bench/result.json").read_text("utf-8"))
    assert stored["metrics"] == measured


def test_overheads_are_of_passes_timed_one_after_the_other(monkeypatch, small):
    """A clock on which each pass takes 2 % more than the one before: a variant is charged with one
    such step, wherever in the round it stands, and AdaLN with the 50 % that it takes besides."""
    now, calls = [100.0], []

    def milliseconds(function, device):
        calls.append(function)
        now[0] *= 1.02
        return now[0] * (1.5 if len(calls) % 18 == 6 else 1)  # after frozen, inject: the third pair
    monkeypatch.setattr(bench, "milliseconds", milliseconds)
    rows = bench.cost(bench.Config(length=(8,), batch=1, seeds=2, passes=3),
                      hydra_ssm.HydraBert(bench.RELEASED), "cpu")
    for name, row in rows.items():
        assert row["overhead"][8] == pytest.approx([53 if name == "adaln" else 2] * 2)
        assert row["ms"][8][1] > 1.5 * row["ms"][8][0]


@pytest.mark.parametrize("kernel", (*bench.BASELINES, *bench.GEOMETRIES))
def test_a_variant_is_a_pass_at_the_given_times(kernel):
    config = dataclasses.replace(NARROW, n_layer=2)
    model = hydra_ssm.HydraBert(config).requires_grad_(False)
    adapter = tiny.awake(make_adapter(kernel, config, mlp_dim=8))
    ids = torch.randint(97, (3, 12))
    t = torch.linspace(0, 1, bench.TIMES)[[3, 63, 20]]
    with torch.no_grad():
        want = model.hidden(ids, adapter(t))
        found = bench.forward_pass(bench.Variant(kernel), model, adapter, ids, t)()
        assert torch.equal(found, want)
        if kernel in bench.GEOMETRIES:
            at_once = bench.Variant(kernel, at_once=True)
            found = bench.forward_pass(at_once, model, adapter, ids, t + 1e-6)()
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


# ---- tables and figure ---------------------------------------------------------------------------


def with_numbers(value):
    """A part of a result file with its sizes as numbers again, which JSON makes texts."""
    if not isinstance(value, dict):
        return value
    return {int(key) if key.isdigit() else key: with_numbers(each) for key, each in value.items()}


def test_the_published_numbers_give_the_published_tables():
    path = common.SOURCE / "results" / "bench" / "laptop.json"
    published = json.loads(path.read_text("utf-8"))["metrics"]
    numbers = with_numbers(published)
    made = {"cost": bench.cost_table(numbers["cost"], (64, 256)),
            "training": bench.training_table(numbers["training"]),
            "scaling": bench.scaling_table(numbers["scaling"]),
            "plan": bench.plan_table(numbers["plan"])}
    for name, table in made.items():
        assert table == published["tables"][name], name


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seeds", (1, 3))
def test_a_figure_of_one_seed_has_no_intervals(tmp_path, seeds):
    overhead = {64: [1.0, 3.0, 2.0][:seeds], 256: [0.5, 0.6, 0.7][:seeds]}
    result = {"cost": {"frozen": {"overhead": overhead}, "dct": {"overhead": overhead}},
              "scaling": {"length": {512: 1.0, 1024: 2.0}, "layers": {2: 1.0, 4: 2.1}}}
    figure = common.new_figure(4, 3)
    ax = figure.subplots()
    bench.draw_overheads(ax, result["cost"], (64, 256))
    assert [series.has_xerr for series in ax.containers] == 2 * [seeds > 1]  # of the two lengths
    bench.draw_bench(result, (64, 256), tmp_path / "table3.png")
    assert (tmp_path / "table3.png").stat().st_size > 10_000


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", (("--batch", "0"), ("--length", "0"), ("--seeds", "-1"),
                                   ("--passes", "0"), ("--length", "8", "-8")))
def test_settings_that_cannot_run_are_one_line(flags):
    run = tiny.command("experiments.bench", *flags)
    assert run.status == 2 and run.err.count("\n") == 1 and "need a number from 1" in run.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_papers_protocol_is_refused_without_a_gpu():
    run = tiny.command("experiments.bench", "--preset", "paper")
    assert run.status == 2 and run.err.count("\n") == 1 and "CUDA" in run.err


def test_a_flag_wins_over_the_papers_protocol_also_where_it_equals_the_default(monkeypatch):
    seen = []
    monkeypatch.setattr("sys.argv", ["bench.py", "--preset", "paper", "--device", "cpu", "--seeds",
                                     "5", "--length", "64", "256"])
    common.run_cli(bench.Config, seen.append, bench.PRESETS)
    assert (seen[0].device, seen[0].seeds, seen[0].length) == ("cpu", 5, (64, 256))
    assert (seen[0].passes, seen[0].mlp_dim, seen[0].weights) == (100, 256, "random")
