"""What a user can get wrong ends in one line and status 2; a bug of ours keeps its traceback."""
import dataclasses
import errno
import importlib
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny
import torch
from helpers import ROOT, SCRIPTS
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import command

import checkpoint
import common
import data
import train
from experiments import pretrain
from checkpoint import fingerprint, load_backbone
from hydra_ssm import HydraBert
from mark_adapters import make_adapter
from text import ByteTokenizer, WordPiece, read_documents

KERNELS = ("hypernet", "chebyshev", "dct", "inject", "adaln", "lora")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def refused(run, *words):
    """One line on stderr that carries the words, and status 2."""
    assert run.status == 2 and "Traceback" not in run.err
    assert run.err.count("\n") == 1 and run.err.startswith("error: "), run.err
    for word in words:
        assert word in run.err, (word, run.err)


# --------------------------------------------------------------------------------------- settings

def numbers(config_class):
    """The fields that hold numbers, of which there may be several."""
    for field in dataclasses.fields(config_class):
        usual = field.default if isinstance(field.default, tuple) else (field.default,)
        if usual and all(type(v) in (int, float) for v in usual):
            yield field.name, field.default, usual[0]


def wrong_values(default, one, may_be_zero):
    """What a number of this default must not be, as it is given: one, or several."""
    wrong = [-1, 10**13]
    if isinstance(one, float):
        wrong += [math.nan, math.inf, -0.5]
    if not may_be_zero:
        wrong += [0]
    return [(value,) if isinstance(default, tuple) else value for value in wrong]


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_number_of_any_script_may_be_negative_or_endless_and_no_size_zero(script):
    config_class = importlib.import_module(script).Config
    usual = config_class()
    common.check_settings(usual, usual)
    listed = ("seed", *getattr(config_class, "MAY_BE_ZERO", ()))
    for name, default, one in numbers(config_class):
        may_be_zero = one == 0 or isinstance(one, float) or name in listed
        for value in wrong_values(default, one, may_be_zero):
            with pytest.raises(common.UserError, match=f"^--{name.replace('_', '-')}: got "):
                common.check_settings(dataclasses.replace(usual, **{name: value}), usual)
        if may_be_zero and not isinstance(default, tuple):
            common.check_settings(dataclasses.replace(usual, **{name: type(one)(0)}), usual)
    for field in dataclasses.fields(config_class):
        if isinstance(field.default, tuple) and field.default:
            with pytest.raises(common.UserError, match="got nothing"):
                common.check_settings(dataclasses.replace(usual, **{field.name: ()}), usual)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_refuses_in_one_line_before_it_begins(script):
    path = script if script.startswith("experiments.") else f"{script}.py"
    wrong = [("--nope", "1")]  # the parser's own words
    for name, default, one in numbers(importlib.import_module(script).Config):
        flag = f"--{name.replace('_', '-')}"
        wrong.append((flag, "many"))
        run = command(path, flag, "-1")
        refused(run, flag, "-1", "need a number from")
        assert run.out == ""
        break
    for argv in wrong:
        run = command(path, *argv)
        refused(run, argv[0])
        assert run.out == ""


def test_a_preset_may_switch_off_what_the_default_has_and_its_user_too(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Config:
        preset: str = "small"
        workers: int = 0
        data: tuple[str, ...] = ("a",)

    presets = {"small": {}, "large": {"workers": 8, "data": ()}}
    for argv, workers in ((("--preset", "large", "--workers", "0"), 0), (("--preset", "large"), 8)):
        seen = []
        monkeypatch.setattr(sys, "argv", ["script.py", *argv])
        common.run_cli(Config, seen.append, presets)
        assert (seen[0].workers, seen[0].data) == (workers, ())


@pytest.mark.parametrize("script, argv, words", [
    ("data.py", ("--t", "1.5"), ("--t", "1.5")),
    ("data.py", ("--data", ""), ("an empty path",)),
    ("data.py", ("--vocab", "nowhere"), ("nowhere", "vocab.txt")),
    ("mark_adapters.py", ("--layer", "23"), ("--layer", "0 to 22")),
    ("evaluate.py", ("--device", "tpu"), ("--device", "auto", "cuda")),
    ("evaluate.py", ("--adapter", "nowhere"), ("nowhere",)),
    ("evaluate.py", ("--data", "a=x.txt", "a=y.txt"), ("called a", "NAME=PATH")),
    ("sample.py", ("--order", "best"), ("best", "margin")),
    ("sample.py", ("--top-p", "0"), ("top_p",)),
    ("sample.py", ("--prompt", "a", "--template", "[MASK]"), ("--prompt", "--template", "both")),
    ("sample.py", ("--template", "no hole"), ("[MASK:12]",)),
    ("sample.py", ("--prompt", "abcdef", "--length", "3"), ("--length", "at least 6")),
    ("certify.py", ("--weights", "nowhere"), ("nowhere", "small")),
    ("synth_lpv.py", ("--kernel", "fourier"), ("--kernel", "dct")),
    ("synth_lpv.py", ("--seeds", "16"), ("--seeds", "1 to 15")),
    ("synth_lpv.py", ("--hold-out", "1"), ("--hold-out", "[0, 1)")),
    ("train.py", ("--betas", "0.9", "1"), ("--betas", "0.9, 1.0")),
    ("experiments.pretrain", ("--mask-rate", "0"), ("--mask-rate", "0.0", "at most 1")),
    ("experiments.pretrain", ("--mask-rate", "2"), ("--mask-rate", "2.0", "at most 1")),
    ("experiments.pretrain", ("--headdim", "24"), ("--headdim", "24", "divisor of 128")),
    ("experiments.study", ("--run", "all"), ("all", "rates")),
    ("experiments.study", ("--run", "rates"), ("--train", "--test")),
    ("experiments.study", ("--seeds", "16"), ("--seeds", "at most 15")),
    ("experiments.study", ("--test", "valid=x.txt"), ("valid",))])
def test_a_wrong_choice_or_pair_is_one_line_with_what_is_allowed(work, script, argv, words):
    refused(command(script, *argv), *words)


@pytest.mark.parametrize("error, status, words", [
    (MemoryError("Unable to allocate 745. GiB"), 2, "745. GiB"), (KeyboardInterrupt(), 130, ""),
    (PermissionError(errno.EACCES, "Permission denied", "runs"), 2, "'runs': make room, or give a"),
    (OSError(errno.EROFS, "Read-only file system", "runs"), 2, "MARK_ROOT=DIR"),
    (OSError(errno.ENOSPC, "No space left on device"), 2, "make room")])
def test_what_the_machine_refuses_is_one_line_too(monkeypatch, capsys, error, status, words):
    def main(cfg):
        raise error

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as stop:
        common.run_cli(data.Config, main)
    said = capsys.readouterr().err
    assert stop.value.code == status and said.count("\n") == 1 and words in said


def test_a_tensor_that_no_memory_holds_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit):
        common.run_cli(data.Config, lambda cfg: torch.empty(10**15))
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory") and said.count("\n") == 1


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "no such file"), KeyError("k"),
                                   RuntimeError("shape"), AssertionError("invariant")])
def test_a_bug_keeps_its_traceback(monkeypatch, error):
    def main(cfg):
        raise error

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(type(error)):
        common.run_cli(data.Config, main)


def test_a_quick_run_leaves_the_whole_ones_files_alone(work):
    small = ("--kernel", "chebyshev", "--sizes", 3, "--seeds", 1, "--iterations", 1)
    for preset in ("recovery", "quick"):
        run = command("synth_lpv.py", "--preset", preset, *small)
        assert run.status == 0, run.err
    names = {path.name for path in (work / "runs/synth_lpv").iterdir()}
    assert names == {"recovery", "recovery_quick"}


# ------------------------------------------------------------------------------------------- text

@pytest.mark.parametrize("content, documents", [
    (b"a", ["a"]), (b"\xef\xbb\xbf", []), (b"\n \t\n\r\n", []), (b"\xef\xbb\xbfa\r\n\r\nb\r\n",
                                                                  ["a", "b"]),
    (b"\xff\xfe\xfd", ["\ufffd\ufffd\ufffd"]), ("🙂 日本 \u202e".encode(), ["🙂 日本 \u202e"]),
    (b"a\r\rb\r", ["a", "b"]), (b"a\x1b[2Jb\x07", ["a\x1b[2Jb\x07"])])
def test_odd_texts_are_read_as_they_are(tmp_path, content, documents):
    (tmp_path / "a.txt").write_bytes(content)
    assert list(read_documents(tmp_path / "a.txt")) == documents


@pytest.mark.parametrize("content", [b"hello\0world", "hello".encode("utf-16"), bytes(99),
                                     b"x" * (3 << 20) + b"\0"])
def test_binary_files_and_utf16_are_no_text(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(common.UserError, match="a.txt holds NUL.*convert"):
        list(read_documents(tmp_path / "a.txt"))


def test_one_byte_is_enough_to_score_and_to_draw(work):
    (work / "one.txt").write_text("x")
    for script, argv in (("data.py", ("--data", work / "one.txt")),
                         ("evaluate.py", ("--data", work / "one.txt", "--train", work / "text.txt",
                                          "--windows", 2, "--seqlen", 8, "--seeds", 1))):
        run = command(script, *argv)
        assert run.status == 0, run.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    refused(command("data.py", "--data", tmp_path / "a.txt"), "a.txt", "Permission denied")


def vocabulary(path):
    path.write_text("\n".join([*SPECIALS, "a", "b", "##a", "word"]) + "\n")
    return path


def test_a_word_of_more_than_a_hundred_characters_is_one_unk(tmp_path):
    tokenizer = WordPiece(vocabulary(tmp_path / "vocab.txt"))
    assert tokenizer.encode("a" * 100).tolist() == [5] + [7] * 99
    assert tokenizer.encode(f"b {'a' * 101} b").tolist() == [6, 1, 6]
    assert tokenizer.encode("🙂 日本 a").tolist() == [1, 1, 1, 5]  # CJK letters stand alone


def test_thousands_of_tiny_documents_arrive_each_with_its_sep(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join("ab"[i % 2] for i in range(20_000)))
    for tokenizer, a in ((ByteTokenizer(), 97), (WordPiece(vocabulary(tmp_path / "v")), 5)):
        corpus = data.load_corpus(tmp_path / "a.txt", tokenizer)
        assert corpus.n_docs == corpus.n_bytes == 20_000
        assert corpus.ids.tolist() == [a, tokenizer.sep_id, a + 1, tokenizer.sep_id] * 10_000


MEASURE = """
import resource, sys
import data, text
tokenizer = text.WordPiece(sys.argv[2]) if sys.argv[2] else text.ByteTokenizer()
tokenizer.encode("a first word")
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
corpus = data.load_corpus(sys.argv[1], tokenizer)
print(len(corpus.ids), corpus.n_docs, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("unit, size, wordpiece, bound", [
    (b"x" * 4096, 100_000_000, False, 320), ("🙂".encode() * 1024, 100_000_000, False, 320),
    (b"ab " * 1024, 8_000_000, True, 160), (b"x" * 4096, 8_000_000, True, 160),
    (b"a\n\n", 3_000_000, True, 80)])
def test_a_line_without_end_and_a_million_documents_take_bounded_memory(tmp_path, unit, size,
                                                                       wordpiece, bound):
    """MB beyond what imports take. The ids are 2 bytes a token, held once: 200 MB of 100 MB of
    bytes; the rest is a block of 1 MB at a time, and its pieces as WordPiece."""
    (tmp_path / "a.txt").write_bytes(unit * (size // len(unit)))
    vocab = vocabulary(tmp_path / "vocab.txt") if wordpiece else ""
    run = subprocess.run([sys.executable, "-c", MEASURE, tmp_path / "a.txt", vocab], cwd=ROOT,
                         text=True, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr
    ids, documents, megabytes = run.stdout.splitlines()[-1].split()
    assert float(megabytes) < bound and int(documents) >= 1
    if not wordpiece:
        assert int(ids) == size // len(unit) * len(unit) + int(documents)


# ------------------------------------------------------------------------------------ run folders

TINY = {"train.py": lambda work: tiny.arguments(work, steps=4, save_every=2),
        "experiments.pretrain": lambda work: [
            "--seqlen", 32, "--batch", 4, "--steps", 4, "--d-model", 32, "--n-layer", 1,
            "--d-state", 4, "--headdim", 16, "--save-every", 2, "--eval-windows", 4,
            "--data", work / "text.txt", "--valid", f"held-out={work / 'text.txt'}"]}


@pytest.fixture(scope="module", params=TINY)
def run_of(request, work):
    """A function that runs a script in the folder of a name, and a finished run called "done"."""
    def run_in(name, *more):
        return command(request.param, *TINY[request.param](work), "--name", name, *more)

    run = run_in("done", "--overwrite")
    assert run.status == 0, run.err
    return run_in


DAMAGES = [  # file, what becomes of it (None: it is gone), what is said
    ("config.json", None, "has no config.json"),
    ("config.json", b"", "config.json is damaged"),
    ("config.json", b"{", "config.json is damaged"),
    ("config.json", b"\xff", "config.json is damaged"),
    ("config.json", b"{}", "config.json has no 'config'"),
    ("config.json", b"[]", "config.json has no 'config'"),
    ("config.json", b'{"config": 3, "inputs": {}, "commit": ""}', "config.json"),
    ("config.json", b'{"config": {}, "inputs": 3, "commit": ""}', "config.json"),
    ("metrics.jsonl", b'{"loss": 1.0}\n', "metrics.jsonl:1 has no step"),
    ("metrics.jsonl", b'[1]\n', "metrics.jsonl:1 has no step"),
    ("metrics.jsonl", b'{"step": "x"}\n', "metrics.jsonl:1 has no step"),
    ("last.pt", b"", "last.pt: damaged"),
    ("last.pt", b"PK\3\4", "last.pt: damaged"),
    ("last.pt", lambda whole: whole[:-99], "last.pt: damaged"),
    ("last.pt", lambda whole: torch_file({}), "last.pt: the checkpoint of another run"),
    ("last.pt", lambda whole: torch_file([1]), "last.pt: the checkpoint of another run"),
    ("last.pt", lambda whole: torch_file({"step": "x"}), "last.pt: the checkpoint of another run")]


def torch_file(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize("file, change, words", DAMAGES)
def test_a_damaged_file_of_a_run_is_one_line_that_names_it(work, run_of, file, change, words):
    folder = work / "runs" / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "runs" / "done", folder)
    config = (folder / "config.json").read_text("utf-8").replace('"done"', '"damaged"')
    (folder / "config.json").write_text(config.replace('"overwrite": true', '"overwrite": false'),
                                        "utf-8")
    if change is None:
        (folder / file).unlink()
    elif callable(change):
        (folder / file).write_bytes(change((folder / file).read_bytes()))
    else:
        (folder / file).write_bytes(change)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused(run_of("damaged", "--resume"), words)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["../x", "..", ".", "a/../../x", "/x", "a/.."])
def test_a_run_stays_in_runs(work, run_of, name):
    before = sorted(work.iterdir())
    refused(run_of(name, "--overwrite"), f"--name: got {name!r}")
    assert sorted(work.iterdir()) == before and not os.path.exists("/x")


def test_overwrite_leaves_a_folder_alone_that_is_no_run(work, run_of):
    folder = work / "runs" / "model"
    folder.mkdir(exist_ok=True)
    files = {"config.json": '{"architectures": ["BertModel"]}', "last.pt": "x"}
    for file, content in files.items():
        (folder / file).write_text(content)
    for more in ((), ("--overwrite",), ("--resume",)):
        refused(run_of("model", *more), "model")
    (folder / "config.json").unlink()
    files.pop("config.json")
    for more in ((), ("--overwrite",), ("--resume",)):
        refused(run_of("model", *more), "model")
    assert {path.name: path.read_text() for path in folder.iterdir()} == files  # and no lock


def race(function):
    """What two processes say that call `function` at the same moment: nothing, or why not. Each
    holds what it has got until both have answered."""
    forks = multiprocessing.get_context("fork")
    together = forks.Barrier(2)
    answers = forks.Queue()

    def contend():
        together.wait()
        try:
            function()
            said = ""
        except common.UserError as error:
            said = str(error)
        answers.put(said)
        together.wait()

    contenders = [forks.Process(target=contend) for _ in range(2)]
    for contender in contenders:
        contender.start()
    said = sorted(answers.get(timeout=20) for _ in contenders)
    for contender in contenders:
        contender.join()
    return said


def test_of_two_starts_at_the_same_moment_one_runs_and_the_other_is_told_in_one_line(tmp_path):
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        one, other = race(lambda: checkpoint.open_run(folder, train.Config(), {}, {}))
        assert one == "" and ("in use by another process" in other or "exists" in other)


# ----------------------------------------------------------------------------------------- shards

@pytest.mark.parametrize("change", [
    {}, {"splits": []}, {"splits": {"train": {}}}, {"splits": {"train": {"shards": [{}]}}},
    {"splits": {"train": {"shards": [], "bytes": 1}}}, {"splits": 3}, "text", None, [1]])
def test_a_manifest_that_is_no_manifest_is_refused(tmp_path, change):
    manifest = {"tokenizer": "bytes", "fingerprint": ByteTokenizer.fingerprint}
    manifest = manifest | change if isinstance(change, dict) else change
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(common.UserError, match="manifest.json is damaged|no document in"):
        data.load_corpus(tmp_path, ByteTokenizer())


def test_any_changed_byte_of_a_shard_is_noticed(tmp_path):
    documents = [f"document {i}" for i in range(200)]
    data.write_shards(documents, tmp_path / "s", ByteTokenizer(), shard_tokens=500)
    whole = np.asarray(data.load_corpus(tmp_path / "s", ByteTokenizer()).ids)
    assert len(whole) == sum(map(len, documents)) + 200
    path = tmp_path / "s" / "shard_00000.bin"
    good = path.read_bytes()
    for place in (0, 501, len(good) - 2):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1:])
        with pytest.raises(common.UserError, match="shard_00000.bin has CRC-32"):
            data.load_corpus(tmp_path / "s", ByteTokenizer())
    path.write_bytes(good)
    assert np.array_equal(data.load_corpus(tmp_path / "s", ByteTokenizer()).ids, whole)
    data.write_shards(["x" * (5 << 20)], tmp_path / "l", ByteTokenizer())  # of more than one block
    assert data.load_corpus(tmp_path / "l", ByteTokenizer()).n_bytes == 5 << 20


def test_shards_are_replaced_by_renames_and_no_moment_has_neither(tmp_path, monkeypatch):
    out, rename = tmp_path / "s", os.rename
    data.write_shards(["old words"], out, ByteTokenizer())

    def crash(a, b):
        if str(b) == str(out):
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        data.write_shards(["new words"], out, ByteTokenizer(), overwrite=True)
    monkeypatch.undo()
    kept, = tmp_path.glob(".s.*.replaced")
    assert data.load_corpus(kept, ByteTokenizer()).n_bytes == len("old words")
    data.write_shards(["newer words"], out, ByteTokenizer())
    data.write_shards(["newest words"], out, ByteTokenizer(), overwrite=True)
    assert data.load_corpus(out, ByteTokenizer()).n_bytes == len("newest words")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("overwrite, left", [(False, "faster"), (True, "slower")])
def test_of_two_writers_of_one_shard_folder_the_slower_is_refused_unless_it_overwrites(
        tmp_path, overwrite, left):
    out = tmp_path / "s"

    def documents():
        yield "slower words"
        other = multiprocessing.get_context("fork").Process(
            target=data.write_shards, args=(["faster words"], out, ByteTokenizer()))
        other.start()
        other.join()

    if overwrite:
        data.write_shards(documents(), out, ByteTokenizer(), overwrite=True)
    else:
        with pytest.raises(common.UserError, match="exists and is a shard folder"):
            data.write_shards(documents(), out, ByteTokenizer())
    ids = data.load_corpus(out, ByteTokenizer()).ids
    assert ByteTokenizer().decode(np.asarray(ids).tolist()).startswith(f"{left} words")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


# --------------------------------------------------------------------------------------- adapters

@pytest.fixture(scope="module")
def backbone(work):
    return load_backbone(work / "backbone.safetensors")


@pytest.fixture(scope="module")
def saved(work, backbone):
    """A trained adapter, and its file's path."""
    adapter = tiny.awake(make_adapter("dct", backbone.config, mlp_dim=16))
    checkpoint.save_adapter(work / "dct.safetensors", adapter, step=3)
    return adapter, work / "dct.safetensors"


def rewritten(path, to, change=lambda state: state, **metadata):
    """The adapter file with other metadata (None: without it) or tensors."""
    tensors, before = checkpoint.read_adapter(path)
    tensors = change(tensors)
    metadata = {k: v for k, v in {**before, **metadata}.items() if v is not None}
    if "checksum" not in metadata or metadata["checksum"] == before["checksum"]:
        metadata["checksum"] = checkpoint.checksum(tensors, metadata)  # as a whole file has it
    save_file(tensors, to, metadata)
    return to


def refusal(path, config):
    with pytest.raises(common.UserError) as error:
        checkpoint.load_adapter(path, config)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_loaded_adapter_gives_the_logits_it_gave_when_saved(tmp_path, backbone, kernel):
    adapter = tiny.awake(make_adapter(kernel, backbone.config, mlp_dim=16))
    ids, t = torch.arange(3 * 20).view(3, 20) % 250, torch.tensor([0.001, 0.5, 1.0])
    with torch.no_grad():
        before = backbone(ids, adapter(t))
        checkpoint.save_adapter(tmp_path / "a.safetensors", adapter)
        loaded, _ = checkpoint.load_adapter(tmp_path / "a.safetensors", backbone.config)
        assert torch.equal(backbone(ids, loaded(t)), before)
    assert not torch.equal(before, backbone(ids))


def test_the_file_says_what_it_is_and_for_which_backbone(saved, backbone):
    with safe_open(saved[1], "pt") as file:
        metadata = file.metadata()
    settings = json.loads(metadata.pop("settings"))
    assert re.fullmatch("[0-9a-f]{64}", metadata.pop("checksum"))
    assert metadata == {"format": checkpoint.FORMAT, "kernel": "dct", "step": "3",
                        "backbone": fingerprint(backbone.state_dict())}
    assert settings == {"mlp_dim": 16} and re.fullmatch(r"mark-adapter \d+", checkpoint.FORMAT)


def test_the_shipped_adapters_name_the_shipped_backbone():
    config = load_backbone("small").config
    for path in sorted((ROOT / "assets").glob("adapter_*.safetensors")):
        assert len(config.weights) == 64
        assert checkpoint.load_adapter(path, config)[0].backbone == config.weights
        with safe_open(path, "pt") as file:
            assert file.metadata()["backbone"] == config.weights


def test_a_backbone_is_known_in_any_file_and_dtype_and_no_other_passes_for_it(work, saved, backbone,
                                                                             tmp_path):
    own = backbone.config.weights
    for name, dtype in (("same.pt", torch.float32), ("half.pt", torch.bfloat16)):
        torch.save({f"module.{k}": v.to(dtype) for k, v in backbone.state_dict().items()},
                   tmp_path / name)
    for path in (work / "backbone.safetensors", tmp_path / "same.pt", tmp_path / "half.pt"):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            config = load_backbone(path, dtype).config
            assert config.weights == own
            checkpoint.load_adapter(saved[1], config)
    torch.manual_seed(1)
    pretrain.save_backbone(tmp_path / "other.safetensors", HydraBert(tiny.CONFIG))
    other = load_backbone(tmp_path / "other.safetensors").config
    assert dataclasses.replace(other, weights=own) == backbone.config  # of the same sizes
    said = refusal(saved[1], other)
    assert own[:12] in said and other.weights[:12] in said and "--weights" in said
    run = command("evaluate.py", "--weights", tmp_path / "other.safetensors", "--adapter", saved[1])
    refused(run, "another backbone", own[:12])
    checkpoint.load_adapter(saved[1], tiny.CONFIG)  # weights made in memory have no fingerprint


def test_one_changed_weight_changes_the_fingerprint(backbone):
    state = {k: v.clone() for k, v in backbone.state_dict().items()}
    for name, value in state.items():
        changed = value.clone()
        changed.view(-1)[-1] += 1
        assert fingerprint(state | {name: changed}) != backbone.config.weights, name
    swapped = {"layers.0.mixer.D": state["layers.1.mixer.D"],
               "layers.1.mixer.D": state["layers.0.mixer.D"]}
    assert not torch.equal(*swapped.values()) or fingerprint(state | swapped) == fingerprint(state)


@pytest.mark.parametrize("change, words", [
    ({"format": "mark-adapter 2"}, "mark-adapter 1"), ({"format": None}, "mark-adapter 1"),
    ({"format": "pt"}, "train.py"), ({"kernel": None}, "train.py"),
    ({"backbone": None}, "train.py"),
    ({"checksum": "0" * 64}, "changed after training"),
    ({"kernel": "fourier"}, "fourier"), ({"kernel": "hypernet"}, "another backbone"),
    ({"settings": '{"colour": 1}'}, "colour"), ({"settings": "3"}, "not an adapter"),
    ({"settings": '{"mlp_dim": 16, "n_freqs": 4}'}, "another backbone"),
    ({"settings": '{"mlp_dim": -1}'}, "mlp_dim"), ({"step": "{"}, "not an adapter"),
    ({"settings": '{"mlp_dim": 16, "n_shifts": 2}'}, "another backbone"),
    ({"settings": '{"mlp_dim": 16, "n_shifts": 3}'}, "n_shifts")])
def test_another_format_geometry_or_number_of_shifts_is_refused(tmp_path, saved, backbone, change,
                                                               words):
    path = rewritten(saved[1], tmp_path / "a.safetensors", **change)
    assert words in refusal(path, backbone.config)


def test_tensors_that_are_not_an_adapters_are_refused(tmp_path, saved, backbone):
    path, changes = tmp_path / "a.safetensors", {
        "NaN": lambda s: {k: v * math.nan for k, v in s.items()},
        "extra.weight": lambda s: s | {"extra.weight": torch.ones(1)},
        "another backbone": lambda s: dict(list(s.items())[:-1]),
        " another backbone": lambda s: {k: v[..., :1].clone() for k, v in s.items()}}
    for words, change in changes.items():
        assert words in refusal(rewritten(saved[1], path, change), backbone.config)
    save_file({"x": torch.ones(2)}, path, {"format": "pt"})  # as transformers writes
    assert "train.py" in refusal(path, backbone.config)
    assert "mark-adapter" in refusal(ROOT / "assets/hydra_small.safetensors", backbone.config)
    whole = saved[1].read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refusal(path, backbone.config)
