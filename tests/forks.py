"""A process that has imported everything and runs train.py in forks of itself, one per rank.

`python tests/forks.py FOLDER`, with the inputs of tiny.py, says "ready" and then reads one JSON job
a line: argv of train.py, number of ranks, port, root (results go to ROOT/runs), log, and perhaps a
fault: the signal that one rank sends itself at the nth event of a name. It answers the process ids,
then each rank's exit status. A rank leaves as a script does, through all that Python does at its
end. The ranks of a job and their loading processes are one process group, which a SIGKILL ends as a
whole; the signal FULL is the OSError of a full disk, BUG a RuntimeError, HANG ten minutes without a
word. Events are "before" and "after" each write, fsync, rename and line of metrics, "half" of a
write or a line, and before and after each sample, step, evaluation and fork; "file" counts those of
files.
"""
import contextlib
import errno
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.modules["triton"] = None  # which a CPU does not need, and which complains at a quick end

import tiny  # first: it finds the other files
import torch

import common
import data
import train

FILES = ("write", "fsync", "rename", "line")


def watch(happened):
    """Call happened(event) at each event of this process."""
    def around(owner, name, label, half=None):
        whole = getattr(owner, name)

        def watched(*args, **settings):
            happened(f"before {label}")
            if half:
                with half(*args, **settings):
                    happened(f"half {label}")
            result = whole(*args, **settings)
            happened(f"after {label}")
            return result
        setattr(owner, name, watched)

    @contextlib.contextmanager
    def half_file(path, content, *encoding):
        raw = content.encode(*encoding) if isinstance(content, str) else content
        with open(path, "wb") as file:
            file.write(raw[:len(raw) // 2])
        yield

    @contextlib.contextmanager
    def half_line(folder, **row):
        with open(Path(folder) / "metrics.jsonl", "a", encoding="utf-8") as file:
            size = file.tell()
            file.write('{"step": 1')
            file.flush()
            yield
            file.truncate(size)

    around(os, "fsync", "fsync")
    around(os, "replace", "rename")
    around(Path, "write_bytes", "write", half_file)
    around(Path, "write_text", "write", half_file)
    around(train, "append_metrics", "line", half_line)
    around(data.DiffusionDataset, "__getitem__", "sample")
    around(train.Denoiser, "forward", "step")
    around(train, "score_adapter", "evaluation")
    around(os, "fork", "fork")


def strike(fault):
    """A function for `watch` that does what `fault` says, once."""
    seen = Counter()

    def happened(event):
        names = [event]
        if event.split()[1] in FILES:
            names.append("file")
        seen.update(names)
        if fault["at"] not in names or seen[fault["at"]] != fault["nth"]:
            return
        if fault["signal"] == "FULL":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault["signal"] == "BUG":
            raise RuntimeError("a bug of ours")
        if fault["signal"] == "HANG":
            time.sleep(600)  # through SIGTERM, which train.py only notes
        number = getattr(signal, fault["signal"])
        if number == signal.SIGKILL:
            os.killpg(0, number)
        else:
            os.kill(os.getpid(), number)
    return happened


def run_rank(job, rank):
    """In a fork: rank `rank` of the job, to its end."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    if job["ranks"] > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["ranks"]), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(job["port"]))
    common.ROOT = Path(job["root"])
    sys.argv = ["train.py", *job["argv"]]
    fault = job["fault"]
    if fault and rank == fault["rank"]:
        watch(strike(fault))
    common.run_cli(train.Config, train.main, train.PRESETS)


def start(job):
    """Fork the ranks of a job -> their process ids; in a rank, it returns nothing at its end."""
    pids = []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            run_rank(job, rank)
            return None
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return pids


def main(folder):
    torch.set_num_threads(1)
    with tiny.root_at(folder), open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        train.main(tiny.config(folder, name="warm", max_steps=1))  # what is imported late, once
    gc.collect()
    gc.freeze()  # or each fork would spend a second on what it has not made
    print("ready", flush=True)
    for line in sys.stdin:
        pids = start(json.loads(line))
        if pids is None:
            return
        print(json.dumps(pids), flush=True)
        ends = [os.waitpid(pid, 0)[1] for pid in pids]
        print(json.dumps([os.waitstatus_to_exitcode(end) for end in ends]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
