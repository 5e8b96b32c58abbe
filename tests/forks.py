"""A process that has imported everything and runs train.py in forks of itself, one per rank.

`python tests/forks.py FOLDER`, with the inputs of tiny.py, says "ready" and then reads one JSON job
a line: argv of train.py, number of ranks, port, root (results go to ROOT/runs), log, and perhaps a
fault: the signal that one rank sends itself at the nth event of a name. It answers the process ids,
then each rank's exit status. The ranks of a job are one process group, which a SIGKILL ends as a
whole; the signal FULL is the OSError of a full disk. Events are "before" and "after" each write,
fsync, rename and line of metrics, "half" of a write or a line, and before and after each sample,
step and evaluation; "file" counts those of files.
"""
import contextlib
import errno
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

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
        with open(path, "w" if isinstance(content, str) else "wb") as file:
            file.write(content[:len(content) // 2])
        yield

    @contextlib.contextmanager
    def half_line(folder, **row):
        with open(Path(folder) / "metrics.jsonl", "a") as file:
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


def strike(fault):
    """A function for `watch` that does what `fault` says, once."""
    seen = Counter()

    def happened(event):
        seen[event] += 1
        seen["file"] += event.split()[1] in FILES
        counted = event if fault["at"] == event else "file" if event.split()[1] in FILES else ""
        if fault["at"] == counted and seen[counted] == fault["nth"]:
            if fault["signal"] == "FULL":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            number = getattr(signal, fault["signal"])
            os.killpg(0, number) if number == signal.SIGKILL else os.kill(os.getpid(), number)
    return happened


def run_rank(job, rank):
    """In a fork: rank `rank` of the job, to its end."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    if job["ranks"] > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["ranks"]), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(job["port"]))
    common.ROOT, sys.argv = Path(job["root"]), ["train.py", *job["argv"]]
    fault = job["fault"]
    if fault and rank == fault["rank"]:
        watch(strike(fault))
    try:
        common.run_cli(train.Config, train.main, train.PRESETS)
    except SystemExit as stop:
        return stop.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
    return 0


def main(folder):
    torch.set_num_threads(1)
    with tiny.root_at(folder), open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        train.main(tiny.config(folder, name="warm", max_steps=1))  # what is imported late, once
    print("ready", flush=True)
    for line in sys.stdin:
        job, pids = json.loads(line), []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, pids[0] if pids else 0)
                os._exit(run_rank(job, rank))
            os.setpgid(pid, pids[0] if pids else pid)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]),
              flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
