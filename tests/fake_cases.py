"""Groups for test_isolated.py: cases that return, raise, die or hang. It imports nothing heavy."""
import os
import signal
import time


def fine(k):
    return {"value": k, "process": os.getpid()}


def raises(k):
    raise RuntimeError(f"case {k}\nfails")


def aborts(k):
    os.abort()


def leaves(k):
    os._exit(7)


def is_killed(k):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(k):
    time.sleep(600)


def slow(k):
    time.sleep(0.5)
    return fine(k)


KINDS = {function.__name__: function
         for function in (fine, raises, aborts, leaves, is_killed, hangs, slow)}


def make(kinds):
    """A function of nothing for each name of KINDS."""
    def bound(k, kind):
        return lambda: KINDS[kind](k)
    return [bound(k, kind) for k, kind in enumerate(kinds)]


def make_nothing(kinds):
    raise OSError("no device")
