"""Atomic files, JSON, the schedule, errors as one line, result files."""
import dataclasses
import importlib
import inspect
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, SCRIPTS

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


def test_the_old_words_for_data_and_vocab_still_work(monkeypatch):
    import data
    monkeypatch.setattr(sys, "argv", ["data.py", "--text", "a=b", "--text-books", "--tokenizer=x"])
    with pytest.raises(SystemExit):  # no such flag as --text-books
        common.run_cli(data.Config, print)
    monkeypatch.setattr(sys, "argv", ["data.py", "--text", "a=b", "c", "--tokenizer=x=y"])
    seen = []
    common.run_cli(data.Config, seen.append)
    assert (seen[0].data, seen[0].vocab) == (("a=b", "c"), "x=y")


@pytest.mark.parametrize("name", ["data", "experiments.mixture", "experiments.pretrain",
                                  "experiments.hrm_adapter"])
def test_texts_are_data_and_the_tokenizer_is_vocab_in_every_script(name):
    config = importlib.import_module(name).Config
    fields = {field.name for field in dataclasses.fields(config)}
    assert not fields & {"text", "tokenizer"}
    assert set(config.OLD_FLAGS.values()) <= {f"--{field}" for field in fields}


@pytest.mark.parametrize("name, device, dtype, asks", [
    ("auto", "cuda", torch.float32, "high"), ("auto", "cpu", torch.float32, "highest"),
    ("tf32", "cuda", torch.float32, "high"), ("float32", "cuda", torch.float32, "highest"),
    ("bf16", "cuda", torch.bfloat16, "highest"), ("bf16", "cpu", torch.bfloat16, "highest")])
def test_a_gpu_rounds_matrix_products_to_tf32_unless_told_otherwise(name, device, dtype, asks):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert common.pick_precision(name, device) == dtype
        assert torch.get_float32_matmul_precision() == asks
    finally:
        torch.set_float32_matmul_precision(before)


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


def test_a_result_says_where_it_comes_from(tmp_path, capsys):
    env = common.banner("script.py", Config())
    common.save_result(tmp_path / "result.json", {"loss": 1.0}, Config(), env)
    data = common.read_json(tmp_path / "result.json")
    assert data["metrics"] == {"loss": 1.0} and data["config"]["lr"] == 0.1
    assert {"commit", "dirty", "argv", "python", "torch", "hardware", "seconds"} <= data.keys()
    assert data["script"] == "script" and 0 <= data["seconds"] < 60
    assert data["torch"] == torch.__version__ and data["hardware"]["cores"] == os.cpu_count()
    assert not Path(data["argv"][0]).is_absolute()


@pytest.mark.parametrize("content, word", [
    (b"", "damaged"), (b'{"a": 1', "damaged"), (b"\xff", "damaged"), (b"{}", "'a'"),
    (b"[1]", "'a'"), (b"null", "'a'")])
def test_a_damaged_json_file_is_one_line_that_names_it(tmp_path, content, word):
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(common.UserError, match="r.json") as error:
        common.read_json(tmp_path / "r.json", "a")
    assert word in str(error.value) and "\n" not in str(error.value)


def test_bytes_that_are_no_utf8_are_shown_and_written_as_ufffd(tmp_path, capsys):
    """As they come in arguments and file names: as lone surrogates."""
    name = b"caf\xe9.txt".decode("utf-8", "surrogateescape")
    common.write_json(tmp_path / "r.json", {"name": name, "of": [Path(name)]})
    assert common.read_json(tmp_path / "r.json") == {"name": "caf\ufffd.txt",
                                                    "of": ["caf\ufffd.txt"]}
    common.log(name)
    assert capsys.readouterr().out == "caf\ufffd.txt\n"
    assert common.readable("gr\u00fcn") == "gr\u00fcn"


def test_a_figure_is_drawn_whatever_backend_the_environment_names(tmp_path):
    """In a process of its own: matplotlib reads the environment when it is first imported."""
    code = (f"import sys; sys.path.insert(0, {str(common.SOURCE)!r}); import common\n"
            "figure = common.new_figure(2, 2)\nfigure.subplots().plot([1, 2])\n"
            "common.save_figure(figure, 'f.png')")
    for backend in ("module://no_such_backend",):
        env = {**os.environ, "MPLBACKEND": backend}
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env,
                             capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert (tmp_path / "f.png").stat().st_size > 1000
        (tmp_path / "f.png").unlink()


@pytest.mark.parametrize("n, quantile", [(2, 12.7062), (5, 2.7764), (30, 2.0452)])
def test_an_interval_is_students_or_c_3s(n, quantile):
    values = [math.sin(i) for i in range(n)]
    mean = sum(values) / n
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    for student, factor in ((True, quantile), (False, 1.96)):
        found = common.interval(values, student)
        assert found.mean == pytest.approx(mean) and found.n == n
        assert found.half == pytest.approx(factor * error, rel=1e-4)


def test_one_value_has_no_interval():
    one = common.interval([0.25])
    assert one.n == 1 and math.isnan(one.half) and one.show("+", 2) == "+0.25 (n/a)"
    assert common.interval([1.0, 3.0], student=False).show(digits=2) == "2.00 \u00b1 1.96"


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
    """A rank is what the process group says; a RANK left in the environment is none."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert common.rank_and_world() == (0, 1)
    common.log("shown", 1)
    assert list(common.progress(range(3))) == [0, 1, 2]
    monkeypatch.setattr(common, "rank_and_world", lambda: (1, 2))
    common.log("hidden")
    assert list(common.progress(range(3))) == [0, 1, 2]
    assert capsys.readouterr() == ("shown 1\n", "")


@pytest.mark.parametrize("argv, words", [
    (("--steps", "many"), ("--steps", "many")), (("--colour", "red"), ("--colour",)),
    (("--steps",), ("--steps",)), (("--preset", "huge"), ("--preset", "huge", "small"))])
def test_what_the_parser_refuses_is_one_line_too(monkeypatch, capsys, argv, words):
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    with pytest.raises(SystemExit) as stop:
        common.run_cli(Config, lambda cfg: None, PRESETS)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and err.startswith("error: "), err
    assert all(word in err for word in words), err


def test_the_banner_names_file_commit_device_seed_parameters_and_every_setting(capsys):
    model = torch.nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    env = common.banner("script.py", Config(), "cpu", model)
    out = capsys.readouterr().out
    for word in ("script.py", env["commit"], "cpu", "seed 42", "parameters 20", "trainable 16",
                 "float32", "lr=0.1", "steps=10", "names=('a',)"):
        assert word in out, word


def test_help_opens_with_the_scripts_own_words(capsys):
    """The first paragraph of its docstring, then what its Config is for."""
    import tiny
    run = tiny.command("certify.py", "--help")
    assert run.status == 0
    words = " ".join(run.out.split())
    assert words.index("The stability certificate") < words.index("Certify a backbone")


def comments(config_class):
    """{field: its comment in the source}: beside it and, further in than a field, below; or above.
    """
    found = {}
    for base in reversed(config_class.__mro__[:-1]):
        above = []
        for line in inspect.getsource(base).splitlines():
            code, _, comment = line.partition("#")
            field = re.match(r"    (\w+): ", code)
            if field:
                name = field[1]
                found[name] = [*above, comment.strip()]
            if comment and not code.strip():
                target = above if len(code) == 4 else found[name]
                target.append(comment.strip())
            else:
                above = []
    return {name: " ".join(" ".join(parts).split()) for name, parts in found.items()}


def options_of_help(text):
    """{flag: all that --help says of it}, without boxes and line breaks; "" is all before them."""
    found = {"": ""}
    flag = ""
    for line in text.splitlines():
        start = re.match(r"\W? {1,2}(--\w[\w-]*)", line)
        if start:
            flag = start[1]
            found[flag] = ""
        found[flag] += " " + line.strip(" \u2502")
    return {flag: " ".join(words.split()) for flag, words in found.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_cuts_no_comment_in_half(script, capsys, monkeypatch):
    config_class = importlib.import_module(script).Config
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    with pytest.raises(SystemExit):
        common.parse(config_class, config_class())
    said = options_of_help(capsys.readouterr().out)
    comment_of = comments(config_class)
    for field in dataclasses.fields(config_class):
        flag = f"--{field.name.replace('_', '-')}"
        words = said.get(flag, said[""])  # what has its place on the line has no flag
        assert f"{comment_of[field.name]} (default:" in words, f"{flag}: {words}"
