"""Kills, signals and full disks at any moment: the run goes on and ends as if nothing had happened.

Real processes and real files: tests/forks.py runs train.py in forks of one process, which saves the
seconds of importing torch at each of the many starts. Bit-equality is asked of the adapter, both
moments, every row of metrics.jsonl but its speeds, and the result. And whatever ends a run, it ends
soon, says why in one line, and leaves no process behind.
"""
import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
import torch
from helpers import ROOT
from safetensors.torch import load_file

from checkpoint import read_metrics
from data import Windows, load_corpus
from text import ByteTokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def until(condition, seconds, otherwise=lambda: ""):
    """Wait for a condition; otherwise() is said where it never comes."""
    deadline = time.time() + seconds
    while not condition() and time.time() < deadline:
        time.sleep(0.02)
    assert condition(), otherwise()


class Process(NamedTuple):
    pid: int
    state: str  # Z: a zombie, which waits for its parent to hear of it
    parent: int
    group: int


def processes():
    """Every process of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, fields = path.read_text("utf-8", "replace").rpartition(") ")
        except OSError:  # it has just ended
            continue
        state, parent, group, *_ = fields.split()
        found.append(Process(int(path.parent.name), state, int(parent), int(group)))
    return found


def children(pid):
    return [process.pid for process in processes() if process.parent == pid]


class Forks:
    """tests/forks.py, and the runs it is asked for."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tests/forks.py", folder], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert self.process.stdout.readline() == "ready\n"
        self.waited_for = True

    def start(self, *argv, ranks=1, fault=None):
        """Start a run -> the process id of each rank; the first is that of their group."""
        self.end()
        port = free_port()
        self.log = self.folder / f"{port}.log"
        self.log.write_text("")  # now: a rank may be killed before it opens it
        job = {"argv": list(map(str, argv)), "ranks": ranks, "root": str(self.folder), "port": port,
               "log": str(self.log), "fault": fault}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        self.ranks = json.loads(self.process.stdout.readline())
        self.waited_for = False
        return self.ranks

    def end(self):
        """Kill a run that a failed test has left."""
        if not self.waited_for:
            self.kill()
            self.process.stdout.readline()
            self.waited_for = True

    def kill(self):
        """Kill the ranks and their loading processes, if there still are any."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.ranks[0], signal.SIGKILL)

    def living(self):
        """The processes of the run, loading ones too, that have not ended."""
        return [p.pid for p in processes() if p.group == self.ranks[0] and p.state != "Z"]

    def said(self):
        return self.log.read_text("utf-8")

    def wait(self, seconds=60):
        """-> each rank's exit status, negative for a signal, and what the ranks said."""
        deadline = time.time() + seconds
        while set(self.ranks) & set(self.living()) and time.time() < deadline:
            time.sleep(0.01)
        late = set(self.ranks) & set(self.living())
        if late:
            self.kill()
        status = json.loads(self.process.stdout.readline())
        self.waited_for = True
        assert not late, f"still there after {seconds} seconds; it said {self.said()}"
        return status, self.said()

    def run(self, *argv, **how):
        self.start(*argv, **how)
        return self.wait()


@pytest.fixture(scope="module")
def forks(work):
    """Inputs of 18 windows: an epoch ends within the fifth step and after the ninth."""
    draw = random.Random(1)
    documents = []
    for _ in range(40):
        words = ["".join(draw.choices("aeinorst", k=4)) for _ in range(6)]
        documents.append(" ".join(words))
    (work / "text.txt").write_text("\n\n".join(documents))
    windows = Windows(load_corpus(work / "text.txt", ByteTokenizer(), "train"), 64, 256)
    assert len(windows) == 18
    runs = Forks(work)
    yield runs
    runs.end()
    runs.process.stdin.close()
    assert runs.process.wait(timeout=20) == 0


def flags(work, name, **settings):
    settings = {"seqlen": 64, "steps": 24, "warmup": 4, "eval_every": 7, "save_every": 2,
                "eval_windows": 4, **settings}
    return tiny.arguments(work, name=name, **settings)


WHOLE = {}


def whole(forks, ranks):
    """What the uninterrupted run of so many ranks leaves; it is made once."""
    if ranks not in WHOLE:
        status, said = forks.run(*flags(forks.folder, f"whole{ranks}"), ranks=ranks)
        assert not any(status), said
        WHOLE[ranks] = outcome(forks.folder / f"runs/whole{ranks}")
    return WHOLE[ranks]


def outcome(folder):
    """All numbers of a run folder that do not say how fast it was."""
    state = torch.load(folder / "last.pt", weights_only=True)
    metrics = read_metrics(folder)
    for row in metrics:
        row.pop("tokens_per_second", None)
    result = json.loads((folder / "result.json").read_text("utf-8"))["metrics"]
    result.pop("seconds")
    return {"step": state["step"], "adapter": load_file(folder / "adapter.safetensors"),
            "last": state["adapter"], "moments": state["optimizer"]["state"],
            "metrics": metrics, "result": result,
            "files": sorted(path.name.replace(f"_{folder.name}", "") for path in folder.iterdir())}


def assert_equal(got, expected, where=""):
    """Bit by bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), where
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(got[key], value, f"{where} {key}")
    else:
        assert got == expected, where


def newest(folder):
    """The step of the newest checkpoint, which is always whole; 0 before the first."""
    path = folder / "last.pt"
    return torch.load(path, weights_only=True)["step"] if path.exists() else 0


# --------------------------------------------------------------------------------------- kill -9

MOMENTS = [("half write", 1), ("before rename", 1), ("after rename", 1),  # of config.json
           ("half line", 1), ("after line", 1), ("after write", 2), ("half write", 2),
           ("before fsync", 1), ("after fsync", 3), ("before rename", 2), ("after rename", 1),
           ("before sample", 9), ("after step", 3), ("before evaluation", 1), ("before line", 1),
           ("before evaluation", 1), ("half write", 3), ("after rename", 3)]


def attempts(forks, name, faults, expected, ranks=1):
    """Attempts of one run, each ended by one of `faults` (event, which one, signal, rank) and
    continued by the next -> after each, the newest checkpoint's step and what was said."""
    folder = forks.folder / "runs" / name
    settings = [*flags(forks.folder, name), "--resume"]
    left = []
    for at, nth, number, rank in faults:
        before = newest(folder)
        fault = {"at": at, "nth": nth, "signal": number, "rank": rank}
        status, said = forks.run(*settings, ranks=ranks, fault=fault)
        assert status == ranks * [expected], (fault, said)
        assert newest(folder) >= before, fault
        left.append((newest(folder), said))
    status, said = forks.run(*settings, ranks=ranks)
    assert not any(status), said
    assert_equal(outcome(folder), whole(forks, ranks))
    return left


def test_a_run_killed_amid_a_write_and_a_step_ends_bit_equal(forks):
    moments = [("half write", 2), ("after step", 9)]
    attempts(forks, "two", [(*moment, "SIGKILL", 0) for moment in moments], -signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.faults
def test_a_run_killed_at_every_kind_of_moment_one_after_the_other_ends_bit_equal(forks):
    attempts(forks, "moments", [(*moment, "SIGKILL", 0) for moment in MOMENTS], -signal.SIGKILL)


def kill_at_random(forks, name, ranks, workers, kills, seed=0):
    """Kill the group of all ranks and workers `kills` times; a run that ends starts over."""
    draw = random.Random(seed)
    folder = forks.folder / "runs" / name
    settings = [*flags(forks.folder, name, workers=workers, save_every=1), "--resume"]
    done = 0
    while done < kills:
        saves = draw.randint(0, 2)
        moment = draw.uniform(0, 0.03)
        forks.start(*settings, ranks=ranks)
        stamps = {stamp(folder)}
        deadline = time.time() + 60
        while len(stamps) <= saves and time.time() < deadline and forks.living():
            stamps.add(stamp(folder))
        time.sleep(moment)
        forks.kill()
        status, said = forks.wait()
        assert set(status) <= {0, -9}, said
        if any(status):
            done += 1
        else:
            assert_equal(outcome(folder), whole(forks, ranks))
            shutil.rmtree(folder)
    status, said = forks.run(*settings, ranks=ranks)
    assert not any(status), said
    assert_equal(outcome(folder), whole(forks, ranks))


def stamp(folder):
    try:
        return os.stat(folder / "last.pt").st_mtime_ns
    except FileNotFoundError:
        return None


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("ranks, workers", [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_five_kills_of_the_whole_group_at_random_moments_change_nothing(forks, ranks, workers):
    kill_at_random(forks, f"random{ranks}{workers}", ranks, workers, 5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, workers", [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_twenty_kills_of_the_whole_group_at_random_moments_change_nothing(forks, ranks, workers):
    kill_at_random(forks, f"often{ranks}{workers}", ranks, workers, 20, seed=1)


@pytest.mark.slow
@pytest.mark.faults
def test_a_kill_before_amid_or_after_any_write_fsync_or_rename_of_a_whole_run(forks):
    """Of a short run, which writes a file of each kind."""
    folder = forks.folder / "runs" / "each"
    settings = [*flags(forks.folder, "each", steps=6, save_every=3, eval_every=3), "--resume"]
    status, said = forks.run(*settings)
    assert status == [0], said
    expected = outcome(folder)
    for nth in range(1, 1000):
        shutil.rmtree(folder)
        fault = {"at": "file", "nth": nth, "signal": "SIGKILL", "rank": 0}
        status, said = forks.run(*settings, fault=fault)
        if status == [0]:
            break
        status, said = forks.run(*settings)
        assert status == [0], (nth, said)
        assert_equal(outcome(folder), expected, f"killed at event {nth}:")
    print(nth - 1, "kills")
    assert nth > 40


# --------------------------------------------------------------------------- SIGTERM and Ctrl-C

STOPS = [("before sample", 6), ("after sample", 1), ("before step", 1), ("before evaluation", 1),
         ("half write", 2), ("before fsync", 3), ("after rename", 2), ("after step", 1)]


def stop(forks, name, ranks, moments):
    """Stop a run again and again, by turns with SIGTERM and Ctrl-C; one rank alone is asked to."""
    stops = []
    for i, (at, nth) in enumerate(moments):
        writes = "write" in at or "rename" in at or "fsync" in at  # which the first rank alone does
        rank = 0 if writes else (i + 1) % ranks
        stops.append((at, nth, ("SIGTERM", "SIGINT")[i % 2], rank))
    for step, said in attempts(forks, name, stops, 0, ranks):
        assert said.splitlines()[-1].startswith(f"stopped at step {step} of 24 and saved")


def test_a_stop_saves_the_step_and_the_run_ends_bit_equal(forks):
    stop(forks, "stop", 1, [("before step", 5)])


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_at_any_moment_of_training_saves_the_step_on_every_rank(forks, ranks):
    """All leave with status 0, and say which step was saved."""
    stop(forks, f"stop{ranks}", ranks, STOPS)


# ------------------------------------------------------------------------------------- full disk

def fill_the_disk(forks, name, moments):
    """An error of the disk at each of the moments, in turn."""
    for _, said in attempts(forks, name, [(*moment, "FULL", 0) for moment in moments], 2):
        last = said.splitlines()[-1]
        assert last.startswith("error: ") and "No space left" in last and "is whole" in last
        assert "Traceback" not in said


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(forks):
    fill_the_disk(forks, "full", [("half write", 3)])


@pytest.mark.slow
@pytest.mark.faults
def test_a_disk_that_is_full_at_any_write_is_one_line(forks):
    moments = [("half write", 1), ("half line", 1), ("half write", 2), ("before fsync", 2)]
    fill_the_disk(forks, "fuller", moments)


# ------------------------------------------------------------------------- every way out of a run

class Started:
    """train.py as a user starts it: one process, or torchrun of two ranks. Its processes are known
    by a variable that they inherit."""

    def __init__(self, root, *argv, ranks=1, options=(), script=ROOT / "train.py"):
        self.mark = f"RUN_OF_A_TEST={root}/{time.monotonic_ns()}"
        self.log = root / "log"
        name, _, value = self.mark.partition("=")
        environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1", "MARK_ROOT": str(root)}
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *options,
                        "--master-port", str(free_port())]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, script, *map(str, argv)], cwd=root, env=environment,
                stdout=log, stderr=log, start_new_session=True)

    def said(self):
        return self.log.read_text("utf-8")

    def main_ranks(self):
        """The process ids of the ranks."""
        if "torch.distributed.run" not in self.process.args:
            return [self.process.pid]
        return children(self.process.pid)

    def living(self):
        """All its processes that have not ended."""
        found = []
        for process in processes():
            try:
                inherited = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:  # ended, or not ours
                continue
            if process.state != "Z" and self.mark.encode() in inherited.split(b"\0"):
                found.append(process.pid)
        return found

    def wait(self, seconds=60):
        """-> [exit status], and what was said."""
        return [self.process.wait(timeout=seconds)], self.said()

    def kill(self):
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def end_of_runs():
    """A list of runs, no process of which outlives a failed test."""
    runs = []
    yield runs
    for run in runs:
        run.kill()


FAULTY = """
import os, sys
sys.path[:0] = {paths!r}
import common, forks, train
if os.environ.get("RANK", "0") in {ranks!r}:
    forks.watch(forks.strike({fault!r}))
common.run_cli(train.Config, train.main, train.PRESETS)
"""
BUGS = {"bug": {"at": "before step", "nth": 3, "signal": "BUG", "rank": 0},
        "bug of rank 1": {"at": "before step", "nth": 3, "signal": "BUG", "rank": 1},
        "bug between workers": {"at": "before fork", "nth": 2, "signal": "BUG", "rank": 0}}
STATUS = {"not finite": 2, "dead worker": 2, "bug": 1, "bug between workers": 1, "SIGTERM": 0,
          "Ctrl-C": 0}
SAYS = {"not finite": "error: step 3: the loss is nan",
        "dead worker": "error: a data loading process has died (exit status -9)"}
LOST = "error: the connection to another rank is lost"  # what the others say


def endless(inputs, way):
    """Flags of a run with loading processes, which only `way` ends; its name is the way's."""
    return flags(inputs, way.replace(" ", "_"), steps=100_000, workers=2, save_every=100_000,
                 eval_every=0)


@pytest.fixture(scope="module")
def exploding(forks):
    """A run of two steps whose checkpoint then holds NaN; the next step shows it."""
    status, said = forks.run(*endless(forks.folder, "not finite"), "--max-steps", 2)
    assert status == [0], said
    folder = forks.folder / "runs/not_finite"
    state = torch.load(folder / "last.pt", weights_only=True)
    for parameter in state["adapter"].values():
        parameter.fill_(math.nan)
    torch.save(state, folder / "last.pt")
    return folder


def force_out(run, ranks, group, way, folder):
    """Make a run end, once it trains: ranks and group are process ids."""
    if way == "not finite":
        until(lambda: "error: " in run.said(), 120, run.said)
    elif way in BUGS:
        until(lambda: "a bug of ours" in run.said(), 120, run.said)
    else:
        until((folder / "metrics.jsonl").exists, 120, run.said)
    if way == "dead worker":
        os.kill(children(ranks()[0])[-1], signal.SIGKILL)
    elif way == "SIGTERM":
        for pid in run.living():
            os.kill(pid, signal.SIGTERM)
    elif way == "Ctrl-C":
        os.killpg(group, signal.SIGINT)


def assert_gone(run, since):
    until(lambda: not run.living(), max(0, since + 10 - time.time()),
          lambda: f"still there: {run.living()}; it said {run.said()}")


def errors(said):
    return {line for line in said.splitlines() if line.startswith("error: ")}


@pytest.mark.parametrize("way", STATUS)
def test_every_way_out_ends_within_ten_seconds_and_leaves_no_process(forks, exploding, way):
    """On one rank with two loading processes, which ignore Ctrl-C and SIGTERM."""
    folder = forks.folder / "runs" / way.replace(" ", "_")
    forks.start(*endless(forks.folder, way), "--resume", fault=BUGS.get(way))
    force_out(forks, lambda: forks.ranks, forks.ranks[0], way, folder)
    began = time.time()
    status, said = forks.wait(10)
    assert_gone(forks, began)
    assert status == [STATUS[way]], said
    if way in SAYS:
        assert said.splitlines()[-1].startswith(SAYS[way]) and said.count("error: ") == 1, said
        assert "Traceback" not in said
    elif way in BUGS:
        assert "Traceback" in said and said.splitlines()[-1] == "RuntimeError: a bug of ours"
    else:
        assert said.splitlines()[-1].startswith(f"stopped at step {newest(folder)} of"), said


def test_ranks_leave_one_that_fails_within_ten_seconds_by_themselves(forks):
    """With no torchrun to end them: the failing one says why, the other that it lost it."""
    way = "bug of rank 1"
    forks.start(*endless(forks.folder, way), ranks=2, fault=BUGS[way])
    force_out(forks, lambda: forks.ranks, forks.ranks[0], way, None)
    began = time.time()
    status, said = forks.wait(10)
    assert_gone(forks, began)
    assert status == [2, 1], said
    assert said.count("Traceback") == 1 and "RuntimeError: a bug of ours" in said, said
    assert len(errors(said)) == 1 and LOST in said, said


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("way, ranks", [*itertools.product(STATUS, (1, 2)), ("bug of rank 1", 2)])
def test_commands_and_their_process_trees_end_within_ten_seconds(forks, exploding, tmp_path,
                                                                 end_of_runs, way, ranks):
    """`python train.py` and torchrun as they are started by hand."""
    name = way.replace(" ", "_")
    if way == "not finite":
        shutil.copytree(exploding, tmp_path / "runs" / name)
    script = ROOT / "train.py"
    if way in BUGS:
        script = tmp_path / "faulty.py"
        faulty = ["1"] if way == "bug of rank 1" else ["0", "1"]
        paths = [str(ROOT), str(ROOT / "tests")]
        script.write_text(FAULTY.format(paths=paths, ranks=faulty, fault=BUGS[way]))
    run = Started(tmp_path, *endless(forks.folder, way), "--resume", ranks=ranks, script=script)
    end_of_runs.append(run)
    force_out(run, run.main_ranks, run.process.pid, way, tmp_path / "runs" / name)
    began = time.time()
    (status,), said = run.wait(10)
    assert_gone(run, began)
    assert status == (STATUS[way] if ranks == 1 else 1), said  # 1 is torchrun's own
    said_why = {line for line in errors(said) if way in SAYS and line.startswith(SAYS[way])}
    assert len(said_why) == (way in SAYS), said
    assert all(line.startswith(LOST) for line in errors(said) - said_why), said
    if way in BUGS:
        assert "RuntimeError: a bug of ours" in said and "Traceback" in said
    else:  # torchrun has a traceback of its own, without the mark of a rank
        assert "[rank" not in said and (ranks == 2 or "Traceback" not in said), said
    if way in ("SIGTERM", "Ctrl-C"):
        (step,) = re.findall(r"stopped at step (\d+) of 100000 and saved", said)
        assert newest(tmp_path / "runs" / name) == int(step)


# --------------------------------------------------------------------------------------- torchrun

AMID_A_STEP = """
import os, sys
sys.path[:0] = {paths!r}
import common, forks, train
train.dist.destroy_process_group = train.dist.barrier  # NCCL's waits for the other ranks
signals = {{"0": "HANG", "1": "BUG"}}
fault = {{"at": "before step", "nth": 3, "signal": signals[os.environ["RANK"]]}}
forks.watch(forks.strike(fault))
common.run_cli(train.Config, train.main, train.PRESETS)
"""


@pytest.mark.slow
@pytest.mark.faults
def test_a_rank_that_fails_leaves_one_that_hangs_and_torchrun_ends_that_one(forks, tmp_path,
                                                                            end_of_runs):
    """As on GPUs: rank 0 waits in step 3 for rank 1, which has failed there, and hears no SIGTERM.
    torchrun gives it 30 seconds."""
    script = tmp_path / "amid_a_step.py"
    script.write_text(AMID_A_STEP.format(paths=[str(ROOT), str(ROOT / "tests")]))
    logs = tmp_path / "logs"
    run = Started(tmp_path, *endless(forks.folder, "bug"), ranks=2, script=script,
                  options=("--log-dir", logs, "--redirects", "3"))
    end_of_runs.append(run)

    def said_by(rank):
        return "".join(path.read_text("utf-8") for path in logs.glob(f"*/*/{rank}/stderr.log"))

    until(lambda: "a bug of ours" in said_by(1), 120, lambda: run.said() + said_by(1))
    began = time.time()
    (status,), said = run.wait(45)
    assert_gone(run, began + 45)
    assert status == 1 and said_by(1).rstrip().endswith("RuntimeError: a bug of ours"), said_by(1)
    assert "Traceback" not in said_by(0) and "error: " not in said_by(0), said_by(0)
    print(f"torchrun left after {time.time() - began:.0f} seconds")


def torchrun(inputs, root, *options):
    """torchrun of two ranks on an endless schedule."""
    settings = flags(inputs, "long", steps=100_000, save_every=5, eval_every=0)
    return Started(root, *settings, "--resume", ranks=2, options=options)


@pytest.mark.slow
@pytest.mark.faults
def test_torchrun_restarts_a_killed_rank_and_a_stop_saves(forks, tmp_path, end_of_runs):
    run = torchrun(forks.folder, tmp_path, "--max-restarts", "3")
    end_of_runs.append(run)
    folder = tmp_path / "runs/long"
    until(lambda: newest(folder) >= 5, 120, run.said)
    os.kill(run.main_ranks()[1], signal.SIGKILL)
    until(lambda: "resumed at step" in run.said(), 120, run.said)
    again = int(re.search(r"resumed at step (\d+)", run.said())[1])
    assert again >= 5 and again % 5 == 0
    until(lambda: newest(folder) > again, 120, run.said)
    run.process.terminate()
    # torchrun's own status and traceback, after the ranks have left with a checkpoint
    (status,), said = run.wait(20)
    (step,) = map(int, re.findall(r"stopped at step (\d+) of 100000 and saved", said))
    assert status == 1 and newest(folder) == step > again
    status, said = forks.run(*flags(forks.folder, "straight", steps=100_000, eval_every=0,
                                    max_steps=step), ranks=2)
    assert not any(status), said
    states = [torch.load(path / "last.pt", weights_only=True)
              for path in (folder, forks.folder / "runs/straight")]
    assert_equal(*states)


@pytest.mark.slow
@pytest.mark.faults
def test_ranks_that_outlive_torchrun_save_and_leave(forks, tmp_path, end_of_runs):
    run = torchrun(forks.folder, tmp_path)
    end_of_runs.append(run)
    until(lambda: newest(tmp_path / "runs/long") >= 5, 120, run.said)
    run.process.kill()
    run.process.wait()
    until(lambda: not run.living(), 20, run.said)
    steps = re.findall(r"stopped at step (\d+) of 100000 and saved", run.said())
    assert steps == [str(newest(tmp_path / "runs/long"))]
