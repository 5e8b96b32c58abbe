"""Atomic files, JSON, the schedule, errors as one line, result files."""
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

import common


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a script."""
    preset: str = "small"
    lr: float = 0.1
    steps: int = 10
    bf16: bool = False
    names: tuple[str, ...] = ("a",)
    seed: int = 42


PRESETS = {"small": {}, "large": {"lr": 0.01, "steps": 1000, "bf16": True, "names": ()}}


def parsed(monkeypatch, *argv, presets=PRESETS):
    seen = []
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    common.run_cli(Config, seen.append, presets)
    return seen[0]


# --------------------------------------------------------------------------------------- files

def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with common.atomic_path(path) as temporary:
        assert temporary.parent == path.parent  # a rename across file systems would copy
        temporary.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one"
    with pytest.raises(RuntimeError), common.atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "one" and os.listdir(path.parent) == ["file.txt"]


def test_a_process_that_dies_while_writing_leaves_the_old_file(tmp_path):
    (tmp_path / "file.txt").write_text("old")
    code = ("import os, sys, common\n"
            "with common.atomic_path(sys.argv[1]) as path:\n"
            "    path.write_text('new')\n"
            "    os.kill(os.getpid(), 9)\n")
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "file.txt"], cwd=ROOT)
    assert run.returncode == -9
    assert (tmp_path / "file.txt").read_text() == "old"


def test_the_file_is_on_disk_before_it_gets_its_name_and_the_name_after(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b)))
    with common.atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("x")
    assert calls == [(tmp_path / "file").stat().st_ino, "rename", tmp_path.stat().st_ino]


def test_json_holds_null_for_what_is_not_finite_and_text_for_the_rest(tmp_path):
    data = {"a": math.nan, "b": [math.inf, -math.inf, 1.5, True, None], 3: ("x", Path("p/q")),
            "c": Config(), "d": {"e": float("nan")}, "f": "gr\u00fcn"}
    common.write_json(tmp_path / "r.json", data)
    strict = json.loads((tmp_path / "r.json").read_text("utf-8"),
                        parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert strict == {"a": None, "b": [None, None, 1.5, True, None], "3": ["x", "p/q"],
                      "c": {"preset": "small", "lr": 0.1, "steps": 10, "bf16": False,
                            "names": ["a"], "seed": 42}, "d": {"e": None}, "f": "gr\u00fcn"}


def test_a_published_result_says_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    path = common.publish("script", "run", {"loss": 1.0}, Config())
    assert path == tmp_path / "results" / "script" / "run.json"
    data = json.loads(path.read_text())
    assert data["metrics"] == {"loss": 1.0} and data["config"]["lr"] == 0.1
    assert {"commit", "dirty", "argv", "python", "torch", "hardware"} <= data.keys()
    assert data["torch"] == torch.__version__ and data["hardware"]["cores"] == os.cpu_count()
    assert not Path(data["argv"][0]).is_absolute()


# ------------------------------------------------------------------------------------ schedule

def test_the_rate_rises_in_a_line_and_falls_along_a_cosine():
    """Table 6 with the paper's numbers: 720 of 14,400 steps, 6e-4, floor 0.1."""
    rate = [common.learning_rate(step, 14_400, 720, 6e-4, 0.1) for step in range(14_401)]
    assert rate[0] == pytest.approx(6e-4 / 720, rel=1e-12)
    assert rate[359] == pytest.approx(3e-4, rel=1e-12)
    assert rate[719] == rate[720] == pytest.approx(6e-4, rel=1e-12)
    assert rate[720 + 13_680 // 2] == pytest.approx(0.55 * 6e-4, rel=1e-12)
    assert rate[14_400] == pytest.approx(0.6e-4, rel=1e-12)
    assert max(rate) == rate[720] and all(a < b for a, b in zip(rate[:720], rate[1:720]))
    assert all(a > b for a, b in zip(rate[720:], rate[721:]))
    for step in (1000, 5000, 14_399):
        angle = math.pi * (step - 720) / (14_400 - 720)
        assert rate[step] == pytest.approx(6e-5 + 5.4e-4 * math.cos(angle / 2) ** 2, rel=1e-12)


def test_the_rate_without_warm_up_or_past_the_end_stays_in_bounds():
    assert common.learning_rate(0, 10, 0, 1.0, 0.1) == 1.0
    assert common.learning_rate(99, 10, 2, 1.0, 0.1) == pytest.approx(0.1)
    assert common.learning_rate(5, 5, 5, 1.0, 0.1) == 1.0
    assert common.SEEDS[:3] == (42, 142, 242) and len(common.SEEDS) == 15


# ------------------------------------------------------------------------------- command line

def test_a_users_mistake_ends_with_one_line_and_status_2(monkeypatch, capsys):
    def main(cfg):
        raise common.UserError("--lr: got 0.1, need less")

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as stop:
        common.run_cli(Config, main)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", "error: --lr: got 0.1, need less\n")
    assert issubclass(common.UserError, ValueError)


def test_a_bug_is_not_dressed_up_as_a_users_mistake(monkeypatch):
    def main(cfg):
        raise ValueError("a bug")

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(ValueError, match="a bug"):
        common.run_cli(Config, main)


@pytest.mark.parametrize("argv, changed", [
    ((), {}),
    (("--lr", "0.5"), {"lr": 0.5}),
    (("--preset", "large"), {"preset": "large", **PRESETS["large"]}),
    (("--preset=large", "--names", "b", "c"),
     {"preset": "large", **PRESETS["large"], "names": ("b", "c")}),
    # The defaults of "small", asked for: they win over the preset.
    (("--lr", "0.1", "--preset", "large", "--steps", "10", "--no-bf16"),
     {"preset": "large", "lr": 0.1, "steps": 10, "bf16": False, "names": ()}),
])
def test_a_preset_sets_defaults_and_every_flag_wins_over_it(monkeypatch, argv, changed):
    assert parsed(monkeypatch, *argv) == dataclasses.replace(Config(), **changed)


def test_an_unknown_preset_is_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        parsed(monkeypatch, "--preset", "huge")
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert all(word in err for word in ("--preset", "huge", "small", "large"))


def test_other_ranks_and_pipes_see_no_bar_and_other_ranks_no_log(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert common.rank_and_world() == (1, 2)
    common.log("hidden")
    monkeypatch.setenv("RANK", "0")
    common.log("shown", 1)
    assert list(common.progress(range(3))) == [0, 1, 2]
    assert capsys.readouterr() == ("shown 1\n", "")


def test_the_banner_names_file_commit_device_seed_parameters_and_every_setting(capsys):
    model = torch.nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    env = common.banner("script.py", Config(), "cpu", model)
    out = capsys.readouterr().out
    for word in ("script.py", env["commit"], "cpu", "seed 42", "parameters 20", "trainable 16",
                 "float32", "lr=0.1", "steps=10", "names=('a',)"):
        assert word in out, word
