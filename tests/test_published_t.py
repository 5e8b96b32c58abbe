"""The published path from t to h: its count by a loop over bits, twins that differ in t alone."""
import dataclasses
import shutil
import struct

import pytest
import tiny
import torch

import common
import train
from experiments import published_t, report_published
from experiments.report_pieces import render_section
from hydra_ssm import HydraConfig
from mark_adapters import make_adapter


def rounded_to_bfloat16(number):
    """A float32 with its lower 16 bits rounded away, to the nearest and then to the even."""
    bits = struct.unpack("I", struct.pack("f", number))[0]
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))[0]


def test_the_count_of_embeddings_is_that_of_rounded_numbers():
    found = published_t.distinct_embeddings()
    t = published_t.reachable_times()
    assert found["reachable"] == len(t) == found["exact"]["all"]
    some = t[::37].float()
    angle = [rounded_to_bfloat16(x) for x in (1000 * (1 - some)).tolist()]
    embedding = make_adapter("dct", HydraConfig(20, 8, 1, 4, headdim=8), reversed_t=True,
                             rounded_angle=True).timestep
    assert (embedding.angle(some)[:, 0] == torch.tensor(angle)).all()
    # From 512 to 1000 there are 123 numbers of 8 bits, and those are all t below 0.488.
    assert 123 <= sum(found["rounded"]["tenths"][:5]) <= 123 + 10
    assert found["rounded"]["all"] < 0.005 * found["reachable"]


def test_a_twin_differs_in_being_blind_alone_and_the_preset_is_kept():
    cfg = published_t.Config()
    for path, settings in published_t.PATHS.items():
        own = common.plain(published_t.train_settings(cfg, path, 42, False))
        twin = common.plain(published_t.train_settings(cfg, path, 42, True))
        assert {name for name in own if own[name] != twin[name]} == {"blind", "name"}
        differs = {name for name, v in train.PUBLISHED.items() if own[name] != v}
        assert differs <= {"sliced", "kernel", "rounded_angle", "init", "mlp_norm"}
    preset = train.PRESETS["published"]
    assert published_t.train_settings(cfg, "published", 42, False).lr == preset["lr"]
    assert published_t.train_settings(
        published_t.Config(steps=14_400), "published", 42, False).warmup == preset["warmup"]


def test_twins_are_trained_once_and_worth_and_spread_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(train, "draw_run", lambda *args: None)  # most of the time
    tiny.write_inputs(tmp_path)
    cfg = published_t.Config(weights=str(tmp_path / "backbone.safetensors"), seeds=1, steps=3,
                             data=(str(tmp_path / "text.txt"),), seqlen=24, global_batch=4,
                             windows=12, paths=("published", "kept"))
    published_t.main(cfg)
    folder = tmp_path / "runs/published_t/hypernet_3"
    found = common.read_json(folder / "result.json", "metrics")["metrics"]
    start = {path: rows[0]["spread"]["start"]["hidden"] for path, rows in found["paths"].items()}
    assert start["published"] < 1e-4 < 0.1 < start["kept"]
    assert "| published |" in found["tables"]["paths"]
    (tmp_path / "results/published_t").mkdir(parents=True)
    shutil.copy(folder / "result.json", tmp_path / "results/published_t/hypernet_350.json")
    page = render_section(report_published.sections()[0])
    assert "1,276 different embeddings of the 303,792 t" in page and "(n/a)" in page
    assert "python -m experiments.published_t" in page
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("adapter.safetensors")}
    assert len(before) == 4
    published_t.main(cfg)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "trained again"
    with pytest.raises(common.UserError, match="another seqlen"):
        published_t.main(dataclasses.replace(cfg, seqlen=32))


def test_what_cannot_be_run_is_refused(tmp_path):
    for flags, word in ((["--kernel", "lora"], "hypernet"), (["--seeds", 99], "at most")):
        run = tiny.command("experiments.published_t", *flags)
        assert run.status == 2 and word in run.err
    assert pytest.approx(0.275, abs=1e-4) == published_t.PUBLISHED["beta_A"]
