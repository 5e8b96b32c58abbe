"""Kills, signals and full disks at any moment: the run goes on and ends as if nothing had happened.

Real processes and real files: tests/forks.py runs train.py in forks of one process, which saves the
seconds of importing torch at each of the many starts. Bit-equality is asked of the adapter, both
moments, every row of metrics.jsonl but its speeds, and the result.
"""
import json
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

import pytest
import tiny
import torch
from helpers import ROOT
from safetensors.torch import load_file

from checkpoint import load_state, read_metrics
from data import Windows, load_corpus
from text import ByteTokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


class Forks:
    """tests/forks.py, and the runs it is asked for."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tests/forks.py", folder], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert self.process.stdout.readline() == "ready\n"

    def start(self, *argv, ranks=1, fault=None):
        """Start a run -> the process id of each rank; the first is that of their group."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log = self.folder / f"{port}.log"
        self.log.write_text("")  # now: a rank may be killed before it opens it
        job = {"argv": list(map(str, argv)), "ranks": ranks, "root": str(self.folder), "port": port,
               "log": str(self.log), "fault": fault}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait(self):
        """-> each rank's exit status, negative for a signal, and what the ranks said."""
        return json.loads(self.process.stdout.readline()), self.log.read_text()

    def run(self, *argv, **how):
        self.start(*argv, **how)
        return self.wait()


@pytest.fixture(scope="module")
def forks(work):
    """Inputs of 18 windows: an epoch ends within the fifth step and after the ninth."""
    draw = random.Random(1)
    documents = (" ".join("".join(draw.choices("aeinorst", k=4)) for _ in range(6))
                 for _ in range(40))
    (work / "text.txt").write_text("\n\n".join(documents))
    windows = Windows(load_corpus(work / "text.txt", ByteTokenizer(), "train"), 64, 256)
    assert len(windows) == 18
    runs = Forks(work)
    yield runs
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
    state = load_state(folder / "last.pt")
    result = json.loads((folder / "result.json").read_text())
    return {"step": state["step"], "adapter": load_file(folder / "adapter.safetensors"),
            "last": state["adapter"], "moments": state["optimizer"]["state"],
            "metrics": [{k: v for k, v in row.items() if k != "tokens_per_second"}
                        for row in read_metrics(folder)],
            "result": {k: v for k, v in result.items() if k != "seconds"},
            "files": sorted(path.name for path in folder.iterdir())}


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
    return load_state(folder / "last.pt")["step"] if (folder / "last.pt").exists() else 0


def go_on(folder):
    """What the user adds to the command: nothing before there is a run."""
    return ["--resume"] if (folder / "config.json").exists() else []


# --------------------------------------------------------------------------------------- kill -9

MOMENTS = [("half write", 1), ("before rename", 1), ("after rename", 1),  # of config.json
           ("half line", 1), ("after line", 1), ("after write", 2), ("half write", 2),
           ("before fsync", 1), ("after fsync", 3), ("before rename", 2), ("after rename", 1),
           ("before sample", 9), ("after step", 3), ("before evaluation", 1), ("before line", 1),
           ("before evaluation", 1), ("half write", 3), ("after rename", 3)]


def chain(forks, name, faults, expected, ranks=1):
    """Attempts of one run, each ended by one of `faults` (event, which one, signal, rank) and
    continued by the next -> after each, the newest checkpoint's step and what was said."""
    folder, settings, left = forks.folder / "runs" / name, flags(forks.folder, name), []
    for fault in faults:
        before, began = newest(folder), time.time()
        status, said = forks.run(*settings, *go_on(folder), ranks=ranks,
                                 fault=dict(zip(("at", "nth", "signal", "rank"), fault)))
        assert status == ranks * [expected], (fault, said)
        assert newest(folder) >= before and time.time() - began < 20, fault
        left.append((newest(folder), said))
    status, said = forks.run(*settings, *go_on(folder), ranks=ranks)
    assert not any(status), said
    assert_equal(outcome(folder), whole(forks, ranks))
    return left


def test_a_run_killed_at_every_kind_of_moment_one_after_the_other_ends_bit_equal(forks):
    chain(forks, "moments", [(*moment, "SIGKILL", 0) for moment in MOMENTS], -signal.SIGKILL)


def kill_at_random(forks, name, ranks, workers, kills, seed=0):
    """Kill the group of all ranks and workers `kills` times; a run that ends starts over."""
    draw, folder, done = random.Random(seed), forks.folder / "runs" / name, 0
    settings = flags(forks.folder, name, workers=workers, save_every=1)
    while done < kills:
        saves, moment = draw.randint(0, 2), draw.uniform(0, 0.03)
        pids = forks.start(*settings, *go_on(folder), ranks=ranks)
        stamps, until = {stamp(folder)}, time.time() + 60
        while len(stamps) <= saves and time.time() < until and alive(pids[0]):
            stamps.add(stamp(folder))
        time.sleep(moment)
        if alive(pids[0]):
            os.killpg(pids[0], signal.SIGKILL)
        status, said = forks.wait()
        assert set(status) <= {0, -9}, said
        if any(status):
            done += 1
        else:
            assert_equal(outcome(folder), whole(forks, ranks))
            shutil.rmtree(folder)
    status, said = forks.run(*settings, *go_on(folder), ranks=ranks)
    assert not any(status), said
    assert_equal(outcome(folder), whole(forks, ranks))


def stamp(folder):
    try:
        return os.stat(folder / "last.pt").st_mtime_ns
    except FileNotFoundError:
        return None


def alive(pid):
    """Not yet a zombie, which waits for its parent to hear of it."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ")[1][0] != "Z"


@pytest.mark.parametrize("ranks, workers", [(1, 2), (2, 0)])
def test_three_kills_of_the_whole_group_at_random_moments_change_nothing(forks, ranks, workers):
    kill_at_random(forks, f"random{ranks}{workers}", ranks, workers, 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, workers", [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_twenty_kills_of_the_whole_group_at_random_moments_change_nothing(forks, ranks, workers):
    kill_at_random(forks, f"often{ranks}{workers}", ranks, workers, 20, seed=1)


@pytest.mark.slow
def test_a_kill_before_amid_or_after_any_write_fsync_or_rename_of_a_whole_run(forks):
    name, last = "each", whole(forks, 1)
    for nth in range(1, 1000):
        shutil.rmtree(forks.folder / "runs" / name, ignore_errors=True)
        status, said = forks.run(*flags(forks.folder, name),
                                 fault={"at": "file", "nth": nth, "signal": "SIGKILL", "rank": 0})
        if status == [0]:
            break
        status, said = forks.run(*flags(forks.folder, name), *go_on(forks.folder / "runs" / name))
        assert status == [0], (nth, said)
        assert_equal(outcome(forks.folder / "runs" / name), last, f"killed at event {nth}:")
    print(nth - 1, "kills")
    assert nth > 60


# --------------------------------------------------------------------------- SIGTERM and Ctrl-C

STOPS = [("before sample", 6), ("after sample", 1), ("before step", 1), ("before evaluation", 1),
         ("half write", 2), ("before fsync", 3), ("after rename", 2), ("after step", 1)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_at_any_moment_of_training_saves_the_step_on_every_rank(forks, ranks):
    """One rank alone is asked to; all leave with status 0, and say which step was saved."""
    stops = [(at, nth, ("SIGTERM", "SIGINT")[i % 2], 0 if "write" in at or "rename" in at else
              (i + 1) % ranks) for i, (at, nth) in enumerate(STOPS)]
    for step, said in chain(forks, f"stop{ranks}", stops, 0, ranks):
        assert said.splitlines()[-1].startswith(f"stopped at step {step} of 24 and saved")


# ------------------------------------------------------------------------------------- full disk

def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(forks):
    moments = ("half write", 1), ("half line", 1), ("half write", 2), ("before fsync", 2)
    for _, said in chain(forks, "full", [(*moment, "FULL", 0) for moment in moments], 2):
        last = said.splitlines()[-1]
        assert last.startswith("error: ") and "No space left" in last and "is whole" in last
        assert "Traceback" not in said


# --------------------------------------------------------------------------------------- torchrun

class Torchrun:
    """torchrun of two ranks of train.py in a copy of the repository, on an endless schedule."""

    def __init__(self, inputs, tmp_path, *options):
        for path in ROOT.glob("*.py"):
            shutil.copy(path, tmp_path)
        self.folder, self.log = tmp_path / "runs/long", tmp_path / "log"
        settings = flags(inputs, "long", steps=100_000, save_every=5, eval_every=0)
        with socket.socket() as free, open(self.log, "w") as log:
            free.bind(("127.0.0.1", 0))
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options,
                 "--master-port", str(free.getsockname()[1]), "train.py", *settings],
                cwd=tmp_path, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def until(self, condition, seconds=120):
        deadline = time.time() + seconds
        while not condition() and time.time() < deadline:
            time.sleep(0.05)
        assert condition(), self.said()[-3000:]

    def said(self):
        return self.log.read_text()

    def ranks(self):
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return list(map(int, children.split()))

    def stopped_at(self):
        found = re.findall(r"stopped at step (\d+) of 100000 and saved", self.said())
        return [int(step) for step in found]


@pytest.fixture
def end_of_ranks():
    """No rank outlives a failed test."""
    runs = []
    yield runs
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(timeout=60)


def test_torchrun_restarts_a_killed_rank_and_a_stop_saves(forks, tmp_path, end_of_ranks):
    run = Torchrun(forks.folder, tmp_path, "--max-restarts", "1")
    end_of_ranks.append(run)
    run.until(lambda: newest(run.folder) >= 5)
    os.kill(run.ranks()[1], signal.SIGKILL)
    run.until(lambda: "resumed at step" in run.said())
    again = int(re.search(r"resumed at step (\d+)", run.said())[1])
    assert again >= 5 and again % 5 == 0
    run.until(lambda: newest(run.folder) > again)
    asked = time.time()
    run.process.terminate()
    # torchrun's own status and traceback, after the ranks have left with a checkpoint
    assert run.process.wait(timeout=60) == 1 and time.time() - asked < 20
    (step,) = run.stopped_at()
    assert newest(run.folder) == step > again
    status, said = forks.run(*flags(forks.folder, "straight", steps=100_000, eval_every=0,
                                    max_steps=step), ranks=2)
    assert not any(status), said
    assert_equal(load_state(run.folder / "last.pt"),
                 load_state(forks.folder / "runs/straight/last.pt"))


@pytest.mark.slow
def test_ranks_that_outlive_torchrun_save_and_leave(forks, tmp_path, end_of_ranks):
    run = Torchrun(forks.folder, tmp_path)
    end_of_ranks.append(run)
    run.until(lambda: newest(run.folder) >= 5)
    ranks = run.ranks()
    run.process.kill()
    run.process.wait()
    run.until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 20)
    assert run.stopped_at() == [newest(run.folder)]
