"""The run folder: atomic files, torn lines, adapters of other backbones, nothing executed."""
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import common
from checkpoint import (append_metrics, copy_adapter, load_adapter, load_adapters, load_backbone,
                        open_run, read_metrics, restore_state, result_folder, run_folder,
                        save_adapter, save_state)
from mark_adapters import make_adapter

KERNELS = ("hypernet", "chebyshev", "dct", "inject", "adaln", "lora", "lora+chebyshev")
ENV = {"commit": "abc", "argv": ["train.py"]}


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float = 0.1
    data: tuple = ("a", "b")
    name: str = "run"
    resume: bool = False
    overwrite: bool = False


RESUME = dataclasses.replace(Settings(), resume=True)
OVERWRITE = dataclasses.replace(Settings(), overwrite=True)
FREE = ("resume", "overwrite")


class Plants:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"echo run > {self.path}",))


# ------------------------------------------------------------------------------------- adapters

@pytest.mark.parametrize("kernel", KERNELS)
def test_an_adapter_comes_back_bit_for_bit_with_its_settings(tmp_path, kernel):
    settings = {"mlp_dim": 16, "n_shifts": 2, "init": "default", "mlp_norm": False, "lora_rank": 3,
                "bounded_shifts": kernel != "hypernet"}
    adapter = tiny.awake(make_adapter(kernel, tiny.CONFIG, **settings))
    save_adapter(tmp_path / "adapter.safetensors", adapter, step=7, weights="small", modulate="A")
    t = torch.tensor([0.0, 0.3, 1.0])
    for path in (tmp_path, tmp_path / "adapter.safetensors", str(tmp_path)):
        loaded, about = load_adapter(path, tiny.CONFIG)
        assert (loaded.kernel, loaded.settings) == (kernel, settings)
        assert about == {"step": 7, "weights": "small", "modulate": "A"}
        expected = adapter.state_dict()
        assert loaded.state_dict().keys() == expected.keys()
        assert all(torch.equal(v, expected[k]) for k, v in loaded.state_dict().items())
        for name, value in vars(adapter(t)).items():
            got = getattr(loaded(t), name)
            for a, b in zip(got, value) if name == "lora" and value else [(got, value)]:
                assert a is b is None or torch.equal(a, b), name


def test_float16_halves_the_file_and_keeps_eleven_bits(tmp_path):
    adapter = tiny.awake(make_adapter("chebyshev", tiny.CONFIG, mlp_dim=16))
    save_adapter(tmp_path / "32.safetensors", adapter)
    save_adapter(tmp_path / "16.safetensors", adapter, torch.float16)
    assert {v.dtype for v in load_file(tmp_path / "16.safetensors").values()} == {torch.float16}
    sizes = [(tmp_path / f"{bits}.safetensors").stat().st_size for bits in (16, 32)]
    assert sizes[0] < 0.6 * sizes[1]
    loaded = load_adapter(tmp_path / "16.safetensors", tiny.CONFIG)[0]
    for key, value in loaded.state_dict().items():
        assert value.dtype == torch.float32
        # Half a unit in the last of 11 bits, or of the smallest subnormal, 2^-24.
        torch.testing.assert_close(value, adapter.state_dict()[key], rtol=2**-11, atol=2**-25)


@pytest.mark.parametrize("kernel, sizes", [
    ("hypernet", {"n_layer": 3}), ("hypernet", {"d_state": 16}), ("chebyshev", {"headdim": 32}),
    ("adaln", {"n_layer": 1}), ("adaln", {"d_model": 64}), ("lora", {"d_model": 64})])
def test_an_adapter_of_another_backbone_is_refused(tmp_path, kernel, sizes):
    save_adapter(tmp_path / "a.safetensors", make_adapter(kernel, tiny.CONFIG, mlp_dim=16))
    with pytest.raises(common.UserError, match=f"{kernel} adapter belongs to another backbone"):
        load_adapter(tmp_path / "a.safetensors", dataclasses.replace(tiny.CONFIG, **sizes))


def test_what_is_no_adapter_is_refused_by_name(tmp_path):
    (tmp_path / "garbage.safetensors").write_bytes(b"\0\1garbage" * 99)
    save_file({"x": torch.ones(2)}, tmp_path / "plain.safetensors")
    (tmp_path / "empty").mkdir()
    good = tmp_path / "good.safetensors"
    save_adapter(good, make_adapter("dct", tiny.CONFIG, mlp_dim=16))
    (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:-100])
    for name in ("garbage.safetensors", "plain.safetensors", "empty", "cut.safetensors", "absent"):
        with pytest.raises(common.UserError, match=name) as error:
            load_adapter(tmp_path / name, tiny.CONFIG)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [{"kernel": "fourier"}, {"settings": '{"colour": 1}'},
                                    {"settings": "[1"}])
def test_an_adapter_of_a_later_version_is_refused_in_one_line(tmp_path, change):
    adapter = make_adapter("dct", tiny.CONFIG, mlp_dim=16)
    about = {"kernel": "dct", "settings": json.dumps(adapter.settings), **change}
    save_file(dict(adapter.state_dict()), tmp_path / "a.safetensors", about)
    with pytest.raises(common.UserError):
        load_adapter(tmp_path / "a.safetensors", tiny.CONFIG)


def test_edited_settings_or_tensors_are_noticed_and_a_copy_is_whole(tmp_path):
    adapter = tiny.awake(make_adapter("dct", tiny.CONFIG, mlp_dim=16))
    save_adapter(tmp_path / "a.safetensors", adapter, step=3)
    copy_adapter(tmp_path / "a.safetensors", tmp_path / "half.safetensors", torch.float16)
    assert load_adapter(tmp_path / "half.safetensors", tiny.CONFIG)[1] == {"step": 3}
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "a.safetensors")
    edited = json.dumps(json.loads(metadata["settings"]) | {"mlp_norm": False})
    save_file(tensors, tmp_path / "b.safetensors", metadata | {"settings": edited})
    save_file(tensors | {"alpha": tensors["alpha"] + 1}, tmp_path / "c.safetensors", metadata)
    for name in ("b", "c"):
        with pytest.raises(common.UserError, match="checksum"):
            load_adapter(tmp_path / f"{name}.safetensors", tiny.CONFIG)
    old = {name: value for name, value in metadata.items() if name != "checksum"}
    save_file(tensors, tmp_path / "old.safetensors", old)  # from before there were checksums
    assert load_adapter(tmp_path / "old.safetensors", tiny.CONFIG)[0].kernel == "dct"


def test_adapters_are_labelled_by_their_file_or_run_and_none_is_lost(tmp_path):
    paths = [tmp_path / "runs/lr-0.01/adapter.safetensors", tmp_path / "adapter_dct.safetensors",
             tmp_path / "other/dct.safetensors"]
    for path, kernel in zip(paths, ("hypernet", "dct", "lora")):
        save_adapter(path, make_adapter(kernel, tiny.CONFIG, mlp_dim=8))
    found = load_adapters([str(paths[0].parent), *map(str, paths[1:])], tiny.CONFIG)
    assert {label: adapter.kernel for label, adapter in found.items()} == {
        "lr-0.01": "hypernet", "dct": "dct", str(paths[2]): "lora"}
    with pytest.raises(common.UserError, match="is lora, which .* a hypernet, chebyshev or dct"):
        load_adapters(paths, tiny.CONFIG, mark_only=True)


def test_the_shipped_adapters_are_the_default():
    config = load_backbone("small").config
    assert list(load_adapters((), config)) == ["chebyshev", "dct", "hypernet"]


# ------------------------------------------------------------------------------------- last.pt

def test_a_state_comes_back_bit_for_bit(tmp_path):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save_state(tmp_path / "last.pt", step=5, model=model.state_dict(),
               optimizer=optimizer.state_dict())
    other = torch.nn.Linear(3, 3)
    other_optimizer = torch.optim.AdamW(other.parameters())
    state = restore_state(tmp_path / "last.pt", model=other, optimizer=other_optimizer)
    assert state == {"step": 5}
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())
    moments = optimizer.state_dict()["state"][0]
    restored = other_optimizer.state_dict()["state"][0]
    assert all(torch.equal(moments[k], v) for k, v in restored.items())


def test_the_checkpoint_of_another_run_is_one_line(tmp_path):
    save_state(tmp_path / "last.pt", step=5, model=torch.nn.Linear(3, 3).state_dict())
    save_state(tmp_path / "none.pt", adapter={})
    for name, model in (("last.pt", torch.nn.Linear(3, 4)), ("none.pt", torch.nn.Linear(3, 3))):
        with pytest.raises(common.UserError, match=f"{name}: the checkpoint of another") as error:
            restore_state(tmp_path / name, model=model)
        assert "\n" not in str(error.value)


def test_a_planted_pickle_is_refused_and_not_executed(tmp_path):
    planted = tmp_path / "planted"
    torch.save({"step": 1, "adapter": Plants(planted)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Plants(planted), 2))
    torch.save({"step": Plants(planted)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("zip.pt", "plain.pt", "old.pt"):
        with pytest.raises(common.UserError, match=name):
            restore_state(tmp_path / name)
    assert not planted.exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)  # the bait works
    assert planted.exists()


def test_a_missing_or_damaged_state_is_one_line(tmp_path):
    save_state(tmp_path / "last.pt", step=1, x=torch.ones(1000))
    (tmp_path / "cut.pt").write_bytes((tmp_path / "last.pt").read_bytes()[:2000])
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("cut.pt", "empty.pt", "absent.pt"):
        with pytest.raises(common.UserError, match=name) as error:
            restore_state(tmp_path / name)
        assert "\n" not in str(error.value) and "--overwrite" in str(error.value)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("event", ["write", "fsync", "replace", "fsync of the folder"])
def test_a_fault_before_or_after_any_step_of_a_save_leaves_a_whole_file(tmp_path, monkeypatch,
                                                                        event, when):
    adapter = make_adapter("dct", tiny.CONFIG, mlp_dim=16)
    files = {  # how each is written, and the number that was written
        "last.pt": (lambda path, n: save_state(path, step=n),
                    lambda path: restore_state(path)["step"]),
        "adapter.safetensors": (lambda path, n: save_adapter(path, adapter, step=n),
                                lambda path: load_adapter(path, tiny.CONFIG)[1]["step"]),
        "result.json": (lambda path, n: common.write_json(path, {"n": n}),
                        lambda path: json.loads(path.read_text())["n"])}
    for name, (write, _) in files.items():
        write(tmp_path / name, 1)
    calls = []

    def faulty(whole, label):
        def call(*args, **settings):
            calls.append(label)
            name = "fsync of the folder" if calls[-2:] == ["replace", "fsync"] else label
            if name == event and when == "before":
                raise OSError("no space left")
            result = whole(*args, **settings)
            if name == event:
                raise OSError("no space left")
            return result
        return call

    for owner, name, label in ((os, "fsync", "fsync"), (os, "replace", "replace"),
                               (Path, "write_bytes", "write"), (Path, "write_text", "write")):
        monkeypatch.setattr(owner, name, faulty(getattr(owner, name), label))
    for name, (write, _) in files.items():
        with pytest.raises(OSError, match="no space"):
            write(tmp_path / name, 2)
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == files.keys()  # and no temporary file
    renamed = event == "fsync of the folder" or (event, when) == ("replace", "after")
    for name, (_, read) in files.items():
        assert read(tmp_path / name) == (2 if renamed else 1)


# -------------------------------------------------------------------------------- metrics, folder

def test_metrics_survive_a_torn_last_line_and_forget_later_steps(tmp_path):
    for step in range(1, 6):
        append_metrics(tmp_path, step=step, loss=1 / step, rate=float("nan"))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    rows = read_metrics(tmp_path, up_to_step=3)
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[2]["loss"] == 1 / 3
    append_metrics(tmp_path, step=4, loss=0.5)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert json.loads(lines[0])["rate"] is None
    assert read_metrics(tmp_path / "none") == []


def test_a_row_without_a_step_is_one_line_that_names_file_and_line(tmp_path):
    append_metrics(tmp_path, step=1)
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"loss": 1}\n')
    with pytest.raises(common.UserError, match="metrics.jsonl:2 has no step"):
        read_metrics(tmp_path, up_to_step=1)


def test_a_run_folder_is_made_refused_resumed_or_replaced(tmp_path):
    folder, cfg = tmp_path / "runs" / "run", Settings()
    assert open_run(folder, RESUME, {}, ENV, FREE) is False  # --resume starts what is not there
    written = json.loads((folder / "config.json").read_text("utf-8"))
    assert written == {"config": common.plain(RESUME), "inputs": {}, **ENV}
    with pytest.raises(common.UserError, match="--overwrite"):
        open_run(folder, cfg, {}, ENV)
    assert open_run(folder, RESUME, {}, ENV, FREE) is False  # killed before its first checkpoint
    (folder / "last.pt").write_bytes(b"")
    assert open_run(folder, RESUME, {}, ENV, FREE) is True
    for change in ({"lr": 0.2}, {"data": ("a",)}):
        with pytest.raises(common.UserError, match=next(iter(change))):
            open_run(folder, dataclasses.replace(RESUME, **change), {}, ENV, FREE)
    open_run(folder, dataclasses.replace(RESUME, lr=0.2), {}, ENV, (*FREE, "lr"))
    (folder / "notes.txt").write_text("")
    open_run(folder, dataclasses.replace(OVERWRITE, lr=0.3), {}, ENV)
    left = {path.name for path in folder.iterdir()} - {".lock"}
    assert left == {"config.json", "notes.txt"}, "what a run does not write is left alone"
    assert json.loads((folder / "config.json").read_text("utf-8"))["config"]["lr"] == 0.3


def test_changed_weights_or_texts_under_the_same_path_are_refused(tmp_path):
    before = {"weights": "abc", "data": "def"}
    open_run(tmp_path / "run", RESUME, before, ENV, FREE)
    open_run(tmp_path / "run", RESUME, before, ENV, FREE)
    for name in before:
        with pytest.raises(common.UserError, match=f"--{name} has changed"):
            open_run(tmp_path / "run", RESUME, before | {name: "other"}, ENV, FREE)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"config": {}}', "\xff"])
def test_a_damaged_config_is_one_line_that_names_it(tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(common.UserError, match="config.json") as error:
        open_run(tmp_path / "run", RESUME, {}, ENV, FREE)
    assert "\n" not in str(error.value)


def test_a_kill_while_a_run_is_made_or_replaced_leaves_one_that_can_be(tmp_path, monkeypatch):
    folder, cfg = tmp_path / "run", Settings()
    folder.mkdir()
    (folder / ".config.json.77.tmp").write_text("{")  # killed at its very first file
    open_run(folder, cfg, {}, ENV)
    for name in ("metrics.jsonl", "last.pt", ".last.pt.77.tmp"):
        (folder / name).write_text(name)
    open_run(folder, RESUME, {}, ENV, FREE)
    left = sorted(path.name for path in folder.iterdir())
    assert left == [".lock", "config.json", "last.pt", "metrics.jsonl"]
    unlink, killed = Path.unlink, []

    def die(path, *args, **settings):
        unlink(path, *args, **settings)
        killed.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", die)
    with pytest.raises(KeyboardInterrupt):  # the first file is gone, the others are not
        open_run(folder, OVERWRITE, {}, ENV)
    monkeypatch.undo()
    assert len(killed) == 1
    open_run(folder, OVERWRITE, {}, ENV)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.json"]


def test_a_file_in_the_place_of_a_run_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    for cfg in (Settings(), OVERWRITE):
        with pytest.raises(common.UserError, match="another --name"):
            open_run(tmp_path / "run", cfg, {}, ENV)


def test_an_empty_folder_is_used_and_a_strange_one_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    open_run(tmp_path / "empty", Settings(), {}, ENV)
    strange = {"thesis": {"thesis.txt": ""},  # and a model folder of another library
               "model": {"config.json": '{"architectures": ["BertModel"]}', "last.pt": "x"}}
    for name, files in strange.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
        for cfg in (Settings(), OVERWRITE):
            with pytest.raises(common.UserError, match=name):
                open_run(tmp_path / name, cfg, {}, ENV)
        assert {path.name for path in (tmp_path / name).iterdir()} - {".lock"} == set(files)


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "a/../../x", "/tmp/x", "a/.."])
def test_a_name_that_leads_out_of_runs_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    with pytest.raises(common.UserError, match="--name"):
        run_folder(name)
    assert run_folder("a/b") == tmp_path / "runs" / "a" / "b"


def test_two_processes_never_write_one_folder_and_a_dead_one_leaves_no_lock(tmp_path):
    """The second is refused; a process killed with the lock, even with children, frees it."""
    holder = (f"import sys, time, os; sys.path.insert(0, {str(tiny.ROOT)!r}); import checkpoint\n"
              f"checkpoint.lock(checkpoint.Path({str(tmp_path)!r}))\n"
              "os.fork() or time.sleep(20)\n"  # a child, as a loading process is
              "print('held', flush=True)\ntime.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(common.UserError, match="in use by another process"):
            open_run(tmp_path, Settings(), {}, ENV)
    finally:
        process.kill()
        process.wait()
    open_run(tmp_path, Settings(), {}, ENV)


def test_a_result_folder_is_named_after_the_adapters_and_an_older_result_is_not_replaced_silently(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    one, other = tmp_path / "runs/notes/adapter.safetensors", "adapter_dct.safetensors"
    for paths, label in (((), "shipped"), ((one,), "notes"), ((one.parent,), "notes"),
                         ((other,), "dct"), ((one, other), "several"), (("none",), "none")):
        folder = result_folder("certify", paths)
        assert folder == tmp_path / "runs/certify" / label
    assert capsys.readouterr().out == ""
    common.write_json(folder / "result.json", {})
    result_folder("certify", ("none",))
    assert capsys.readouterr().out.startswith("replacing runs/certify/none/result.json of 20")
