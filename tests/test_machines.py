"""Other people's machines: no terminal, network, display or right to write; other Pythons, paths.

macOS and Windows are untested: requirements.txt leaves triton out there, paths go through pathlib
and files are opened as UTF-8, but signals, fsync of a folder and os.fork are POSIX here.
"""
import ast
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from helpers import ROOT

import common
import data
from text import WordPiece

CODE = sorted([*ROOT.glob("*.py"), *ROOT.glob("experiments/*.py")])
SOURCES = [*CODE, *sorted(ROOT.glob("tests/*.py"))]
CLEAN = {k: v for k, v in os.environ.items()
         if k not in ("DISPLAY", "PYTHONPATH", "MARK_ROOT", "MPLBACKEND")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_a_file_is_python_3_10(path):
    """On 3.10 and 3.11; a later parser lets the f-strings of 3.12 pass."""
    ast.parse(path.read_text("utf-8"), feature_version=(3, 10))


def named_encoding(call):
    """Whether a call that opens a text names UTF-8; True for calls that open none."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    words = [value.value for value in given if isinstance(value, ast.Constant)]
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    by_a_path = name in ("read_text", "write_text")
    by_open = getattr(call.func, "id", "") == "open"
    binary = any(isinstance(word, str) and set(word) <= set("rwab+") and "b" in word
                 for word in words)
    return "utf-8" in words or not (by_a_path or by_open and not binary)


@pytest.mark.parametrize("path", CODE, ids=lambda p: p.stem)
def test_a_text_file_is_opened_as_utf8(path):
    """`open` and `read_text` follow the locale, which is not UTF-8 everywhere."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            assert named_encoding(node), f"{path.name}:{node.lineno}: {ast.unparse(node)}"


# ---------------------------------------------------------------------------------------- streams

def forked(argv, closed=(), encoding="utf-8", to=None, read=True):
    """`python argv` in a fork of this process, which saves importing torch -> (status, what it
    wrote to 1 and 2). closed: descriptors it starts without; to: a file that its output goes to;
    read: False hangs up first."""
    reader, writer = os.pipe()
    out = os.open(to, os.O_WRONLY) if to else writer
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reader)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                if number in closed:
                    os.close(number)
                    setattr(sys, name, None)
                elif number:
                    os.dup2(out if number == 1 else writer, number)
                    stream = io.TextIOWrapper(open(number, "wb", 0, closefd=False),
                                              encoding=encoding, write_through=True)
                    setattr(sys, name, stream)
            sys.argv = [str(a) for a in argv]
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            if sys.stderr:
                sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    os.close(writer)
    if to:
        os.close(out)
    said = b""
    if read:
        with open(reader, "rb") as pipe:
            said = pipe.read()
    else:
        os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode(encoding, "replace")


@pytest.fixture(scope="module")
def odd_text(work):
    """A text that a terminal may be unable to show, at a path that a shell may split."""
    path = work / "späce dir" / "ü 日本.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("naïve café, 日本 🙂 ± and more of it\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_hinder_nothing(odd_text, closed):
    status, said = forked(["data.py", "--data", odd_text], closed)
    assert status == 0 and "Traceback" not in said
    assert (1 in closed) == ("pack your own" not in said)
    status, said = forked(["data.py", "--data", "nowhere.txt"], closed)
    assert status == 2 and (2 in closed) == ("does not exist" not in said)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_what_a_terminal_cannot_show_is_shown_as_a_question_mark(odd_text, encoding):
    status, said = forked(["data.py", "--data", odd_text], encoding=encoding)
    assert status == 0 and ("日本" in said) == (encoding == "utf-8") and "and more of it" in said


def test_a_reader_who_leaves_and_a_full_disk_are_no_tracebacks(odd_text):
    assert forked(["data.py", "--data", odd_text], read=False)[0] == 141  # as `yes | head`
    if os.path.exists("/dev/full"):
        status, said = forked(["data.py", "--data", odd_text], to="/dev/full")
        assert status == 2 and "Traceback" not in said and "make room" in said


def test_shards_and_results_may_lie_at_any_path(work, odd_text):
    out = odd_text.parent / "shärds, 2"
    run = tiny.command("data.py", "--data", odd_text, "--out", out)
    assert run.status == 0, run.err
    assert data.load_corpus(out, data.make_tokenizer("bytes"), "train").n_docs == 1
    run = tiny.command("sample.py", "--prompt", "ab", "--length", 6, "--steps", 2, "--samples", 1,
                       "--history", odd_text.parent / "h ö.json")
    assert run.status == 0 and (odd_text.parent / "h ö.json").is_file(), run.err


def test_a_run_on_a_text_with_a_latin_1_name_ends_and_is_resumed(work):
    """Its bytes are no UTF-8: U+FFFD in config.json, and a path all the same."""
    name = os.fsdecode(b"caf\xe9.txt")
    shutil.copy(work / "text.txt", work / name)
    settings = ["train.py", *tiny.arguments(work, data=name, name="latin")]
    for more, end in ((["--max-steps", "2"], "chebyshev: "), (["--resume"], "resumed at step 2")):
        status, said = forked([*settings, *more])
        assert status == 0 and "Traceback" not in said and end in said, said
    found = json.loads((work / "runs/latin/config.json").read_text("utf-8"))
    assert found["config"]["data"] == [str(work / "caf\ufffd.txt")]
    status, said = forked([*settings, "--seqlen", "23", "--resume"])
    assert status == 2 and said.splitlines()[-1].startswith("error: --resume: seqlen was 24")
    status, said = forked(["train.py", "--data", work / os.fsdecode(b"\xe9")])
    assert status == 2 and said.splitlines()[-1].startswith("error: ") and "\ufffd" in said


# ---------------------------------------------------------------------- output that is no terminal

def test_a_loop_without_a_terminal_logs_a_line_a_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    for i in common.progress(range(100), desc="scoring"):
        now[0] += 7  # seconds an item
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "scoring: 9 of 100" and len(lines) == 11 == len(set(lines))
    for i in common.progress(iter("abc"), desc="rows"):
        now[0] += 60
    assert capsys.readouterr().out == "rows: 1\nrows: 2\n"
    monkeypatch.setattr(common, "rank_and_world", lambda: (1, 2))
    for i in common.progress(range(3), desc="scoring"):
        now[0] += 60
    assert capsys.readouterr().out == ""


OFFLINE = """
import socket

def refuse(*args, **kwargs):
    raise RuntimeError("a connection was tried")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""


def copied(folder):
    """The repository at a path with a space and an umlaut, and its listing with times and sizes."""
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "assets", folder / "assets")
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in [folder, *folder.rglob("*")]}


def said_once(out):
    """The lines of a training run, none of which is there twice, but for rulers and table rows."""
    lines = [line for line in out.splitlines() if line.strip(" -") and not line.startswith("|")]
    assert len(lines) == len(set(lines)), out
    return lines


def test_a_read_only_checkout_trains_offline_without_display_into_another_folder(work, tmp_path):
    """Root may write anywhere, so what lies in the checkout is compared instead."""
    before = copied(tmp_path / "check öut")
    (tmp_path / "sitecustomize.py").write_text(OFFLINE)
    out = tmp_path / "elsewhere, ü"
    run = subprocess.run(
        [sys.executable, "-B", tmp_path / "check öut" / "train.py", "--data", work / "text.txt",
         "--steps", "3", "--seqlen", "32", "--eval-windows", "4", "--device", "cpu"],
        text=True, capture_output=True, cwd=work, timeout=120, stdin=subprocess.DEVNULL,
        env=CLEAN | {"MARK_ROOT": str(out), "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1",
                     "MPLBACKEND": "module://absent"})
    try:
        assert run.returncode == 0, run.stderr
        assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in before} == before
        assert {*(tmp_path / "check öut").rglob("*"), tmp_path / "check öut"} == before.keys()
        assert {p.name for p in (out / "runs/demo_chebyshev").iterdir()} == {
            "config.json", "metrics.jsonl", "last.pt", "adapter.safetensors", "result.json",
            "training_demo_chebyshev.png", ".lock"}
        lines = said_once(run.stdout)
        assert len(lines) < 40 and "\r" not in run.stdout
        assert run.stderr == ""
    finally:
        for path in (p for p in before if p.is_dir()):  # for pytest to remove it
            path.chmod(0o755)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_line(tmp_path):
    tmp_path.chmod(0o555)
    with tiny.root_at(tmp_path):
        run = tiny.command("hydra_ssm.py")
    tmp_path.chmod(0o755)
    assert run.status == 2 and run.err.count("\n") == 1 and "MARK_ROOT" in run.err


# ---------------------------------------------------------------------------------- many processes

def test_workers_start_after_tokenising_without_a_word_or_a_hang(work, capfd):
    (work / "vocab.txt").write_text("\n".join(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz."]) + "\n")
    tokenizer = WordPiece(work / "vocab.txt")
    corpus = data.load_corpus(work / "text.txt", tokenizer)  # in threads of the tokenizers package
    windows = data.Windows(corpus, 16, tokenizer.pad_id)
    dataset = data.DiffusionDataset(windows, tokenizer, 4, 8, 42)
    alone, forks = (list(torch.utils.data.DataLoader(dataset, 4, num_workers=n, timeout=n and 60))
                    for n in (0, 2))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(alone, forks) for key in a)
    assert len(forks) == 8 and capfd.readouterr().err == ""


@pytest.mark.slow
def test_two_torchruns_at_once_do_not_meet(work):
    """Neither is told a port. Each prints every line once, though it has two ranks."""
    def start(name):
        argv = tiny.arguments(work, name=name, steps=8)
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             ROOT / "train.py", *map(str, argv)], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=CLEAN | {"MARK_ROOT": str(work), "OMP_NUM_THREADS": "1"})

    runs = {name: start(name) for name in ("one", "two")}
    results = []
    for name, run in runs.items():
        out, err = run.communicate(timeout=200)
        assert run.returncode == 0, err
        assert said_once(out) and "Traceback" not in err
        results.append(Path(work, "runs", name, "adapter.safetensors").read_bytes())
    assert len(results[0]) == len(results[1]) > 1000
