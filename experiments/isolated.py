"""Groups of cases in fresh processes, within time limits: what fails or faults costs one case.

Run:      not a script; gpu_check.py runs its cases with it.

A case that raises, ends its process or takes too long has the reason in its row; a new process goes
on with the one after it, as a GPU may be lost to the process of the one that failed. A row is
handed on as soon as it is there. Nothing here imports torch.

Symbols:  row   a dict: what a case is about, and what it returned or "failed"
Differs from the paper: nothing.
"""
import multiprocessing
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

CASE_SECONDS = 60   # of one case; those of a process's first include its start


class Group(NamedTuple):
    """Cases that may share a process."""
    name: str
    cases: list        # dicts: what each is about
    make: Callable     # of args, in the process -> for each case a function of nothing -> dict
    args: tuple        # like `make`, it goes to the process by pickle
    seconds: float     # for all cases, in all processes that they take


def run_cases(group, start, sender):
    """In the process: send what each case from `start` returns, up to the first that fails."""
    try:
        functions = group.make(*group.args)
        assert len(functions) == len(group.cases), (group.name, len(functions), len(group.cases))
        for function in functions[start:]:
            sender.send(function())
    except Exception as error:  # of any library
        said = " ".join(str(error).split())
        sender.send({"failed": f"{type(error).__name__}: {said}"[:300]})


def next_message(process, receiver, seconds):
    """What the process sends next, or why it sends nothing."""
    if not receiver.poll(max(0, seconds)):
        return {"failed": f"stopped after {seconds:.0f} s"}
    try:
        return receiver.recv()
    except EOFError:
        process.join()
    if process.exitcode < 0:
        return {"failed": f"its process died of {signal.Signals(-process.exitcode).name}"}
    return {"failed": f"its process ended with status {process.exitcode}"}


def run_process(group, start, ends, on_row):
    """Run cases from `start` in a new process, up to the first that fails -> where to go on."""
    context = multiprocessing.get_context("spawn")  # a fork would share the device
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_cases, args=(group, start, sender))
    process.start()
    sender.close()  # the process holds the only other one, so its end shows
    try:
        for k in range(start, len(group.cases)):
            found = next_message(process, receiver, min(CASE_SECONDS, ends - time.monotonic()))
            on_row(group.cases[k] | found)
            if "failed" in found:
                return k + 1
        return len(group.cases)
    finally:
        process.kill()
        process.join(10)  # one that is stuck in a driver is left behind
        receiver.close()


def run_group(group, on_row):
    """on_row(row) of every case of a Group, within its time: what is not run by then has failed."""
    ends = time.monotonic() + group.seconds
    done = 0
    while done < len(group.cases) and time.monotonic() < ends:
        done = run_process(group, done, ends, on_row)
    for about in group.cases[done:]:
        on_row(about | {"failed": f"not run: the {group.seconds:.0f} s of its group were over"})
