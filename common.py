"""What every script needs and no paper describes: errors, atomic files, the banner, result files.

Run:      not a script; the other files import it.
Symbols:  none.
Differs from the paper: nothing.
"""
import contextlib
import dataclasses
import errno
import inspect
import io
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import tqdm
from torch.distributed.rendezvous import rendezvous

SOURCE = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("MARK_ROOT") or SOURCE).resolve()  # of runs/, results/ and figures/
MENDABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS,
            errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)  # by the user
SURROGATE = re.compile("[\ud800-\udfff]")  # in a str: a byte that was not UTF-8
SEEDS = tuple(42 + 100 * i for i in range(15))  # C.3: seed i is 42 + 100 i
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # and Ito, for every kind of sight; with COLORS


class UserError(ValueError):
    """A mistake the user can mend: one line that says what, what was got, and how to fix it."""


def rank_and_world():
    """(rank, world size) of this process; (0, 1) where no process group was started.

    What the environment says does not count: a RANK left over from another run silences nobody.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def pick_device(name):
    """The device of a setting: auto is cuda where torch sees a GPU, and cpu elsewhere."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: got {name!r}, need one of auto, cpu, cuda")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("--device: got cuda, need a CUDA GPU, and torch sees none; --device cpu "
                        "runs here, slowly")
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    return name


def pick_precision(name, device):
    """The dtype of a backbone by a setting: auto is tf32 on a GPU and float32 elsewhere.

    tf32 keeps float32 and lets the matrix products of this process round their factors to TF32.
    """
    if name == "auto":
        name = "tf32" if device == "cuda" else "float32"
    if name == "tf32" and device != "cuda":
        raise UserError("--precision: got tf32, which GPUs alone have; need float32 or bf16 here")
    if name == "tf32":
        torch.set_float32_matmul_precision("high")
    return torch.bfloat16 if name == "bf16" else torch.float32


def log(*parts):
    """Print on rank 0 only, without breaking a progress bar."""
    rank, _ = rank_and_world()
    if rank == 0:
        tqdm.tqdm.write(readable(" ".join(map(str, parts))), file=sys.stdout)
        sys.stdout.flush()


def progress(iterable=None, total=None, desc="", **kwargs):
    """A tqdm bar on rank 0 of a terminal; elsewhere a loop logs a line a minute."""
    silent = rank_and_world()[0] != 0 or not sys.stderr.isatty()
    if silent and iterable is not None:
        return _lines(iterable, desc)
    return tqdm.tqdm(iterable, total=total, desc=desc, disable=silent, dynamic_ncols=True, **kwargs)


def _lines(iterable, desc, every=60):
    of = f" of {len(iterable)}" if hasattr(iterable, "__len__") else ""
    since = time.monotonic()
    for done, item in enumerate(iterable):
        if time.monotonic() - since >= every:
            log(f"{desc}: {done}{of}")
            since = time.monotonic()
        yield item


@contextlib.contextmanager
def atomic_path(path):
    """Yield a temporary sibling of `path`; on clean exit fsync it and rename it onto `path`.

    A reader sees the old file or the new one, never half of either, whenever the process dies.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def fsync(target):
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)  # the rename itself
    finally:
        temporary.unlink(missing_ok=True)


def new_figure(width, height):
    """An empty matplotlib figure, in inches, for `save_figure`.

    It is drawn into a file and never on a screen, so the backend that a notebook leaves in the
    environment, which may not even be installed here, does not matter.
    """
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def decade_ticks(low, high):
    """1, 2 and 5 times the powers of ten from low to high: ticks of a logarithmic axis, whose own
    may be one number, or none.
    """
    ticks = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for digit in (1, 2, 5):
            tick = digit * 10.0 ** power
            if low <= tick <= high:
                ticks.append(tick)
    return ticks


def save_figure(figure, path):
    """Write a matplotlib figure as PNG, atomically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def readable(text):
    """`text` with U+FFFD where bytes of an argument or a file name are not UTF-8."""
    return SURROGATE.sub("\ufffd", text)


def plain(value):
    """`value` as JSON holds it: dataclasses as dicts, NaN and infinity as null, the rest by str."""
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {readable(str(k)): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (int, float, bool, type(None))):
        return value
    return readable(str(value))


NUMBERS = re.compile(r"\[\n(?:[-+.\deE,\s]|null)*\]")  # an indented list of numbers, as JSON


def write_json(path, data):
    """Write `data` as indented JSON, atomically; a list of numbers stands on one line."""
    text = json.dumps(plain(data), indent=1, ensure_ascii=False) + "\n"
    text = NUMBERS.sub(lambda found: " ".join(found.group().split()), text)
    with atomic_path(path) as temporary:
        temporary.write_text(text, "utf-8")


def read_json(path, *needed):
    """The object in a JSON file. Raises UserError, naming the file, where it is damaged or lacks
    one of the keys `needed`.
    """
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path} is damaged ({error}): remove it, or make it again") from None
    missing = [key for key in needed if not isinstance(found, dict) or key not in found]
    if missing:
        raise UserError(f"{path} has no {missing[0]!r}, so it is damaged or another file: remove "
                        "it, or make it again")
    return found


def markdown(head, *rows):
    """A Markdown table of lists of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


class Interval(NamedTuple):
    """A mean, half of its 95 % interval (NaN where n is 1), and the number of values."""
    mean: float
    half: float
    n: int

    def show(self, sign="", digits=4):
        """As text: mean ± half; sign "+" shows a plus too."""
        if math.isnan(self.mean):
            return "n/a"
        mean = f"{self.mean:{sign}.{digits}f}"
        return f"{mean} (n/a)" if math.isnan(self.half) else f"{mean} ± {self.half:.{digits}f}"


def interval(values, student=True):
    """The Interval of independent values: Student's, or 1.96 standard errors (C.3)."""
    values = [float(v) for v in values]
    n = len(values)
    mean = statistics.fmean(values)
    if n < 2 or math.isnan(mean):
        return Interval(mean, math.nan, n)
    quantile = 1.96
    if student:
        from scipy.stats import t
        quantile = float(t.ppf(0.975, n - 1))
    return Interval(mean, quantile * statistics.stdev(values) / math.sqrt(n), n)


# ---- processes and ranks -------------------------------------------------------------------------


def world_size():
    """The number of processes that the environment of torchrun speaks of. Raises UserError."""
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"the environment says WORLD_SIZE={value}: start with torchrun, or unset "
                        "it")
    return int(value)


@contextlib.contextmanager
def process_group(device):
    """Inside is the process group that torchrun's environment describes; none for one process.

    It is closed after success alone: one that fails must not wait for the others. Raises UserError
    where the environment describes half of a group, or where another rank is lost (on gloo).
    """
    world = world_size()
    if world == 1:
        yield
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(f"the environment says WORLD_SIZE={world} and has no {missing[0]}: start "
                        "with torchrun, or unset WORLD_SIZE")
    rank = int(os.environ["RANK"])
    # torchrun keeps one store for all attempts: without a prefix a restarted rank may read the
    # addresses that dead ones left there (torch 2.13).
    store, _, _ = next(rendezvous("env://", rank, world))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield
    except RuntimeError as error:
        if "gloo/transport" not in str(error):
            raise
        raise UserError("the connection to another rank is lost; where that has ended, it has said "
                        "why") from None
    dist.destroy_process_group()


@contextlib.contextmanager
def stop_signals():
    """Yield a list that SIGTERM and Ctrl-C are added to, in place of ending the process."""
    caught = []
    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def loading(loader):
    """An iterator over `loader`, whose processes end with the block, however it ends.

    They leave Ctrl-C and SIGTERM to this process, which saves first; so they have to be told.
    """
    others = multiprocessing.active_children()
    workers = []  # none where this process loads the data itself
    try:
        batches = iter(loader)
        workers = getattr(batches, "_workers", [])
        if workers:
            # torch would raise at the death of one, wherever this process is, and again soon after.
            # Without that, the death shows when its batch is waited for, after 5 seconds at most.
            torch_handler = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        yield batches
        if workers:
            batches._shutdown_workers()  # what its own __del__ calls
    except UserError:
        raise
    except Exception:  # the death of a process shows as one of many kinds
        status = status_of_a_dead(workers)
        if status is None:
            raise
        raise UserError(f"a data loading process has died (exit status {status}): give fewer "
                        "--workers if memory was short, and go on with --resume") from None
    finally:
        for child in multiprocessing.active_children():  # of an iter that failed half-way, too
            if child not in others:
                child.kill()
                child.join()
        if workers:
            batches._shutdown = True  # or __del__ might wait for a lock that a dead one has held
            signal.signal(signal.SIGCHLD, torch_handler)


def status_of_a_dead(workers):
    """The exit status of a process that has died; None where all live, or there are none.

    One that is being killed closes its pipes, which is an error here, before it is gone.
    """
    seconds = 1 if workers else 0
    ended = multiprocessing.connection.wait([w.sentinel for w in workers], timeout=seconds)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join()
            return worker.exitcode
    return None


def begin_worker(worker_id):
    """What a data loading process does first."""
    for number in (signal.SIGTERM, signal.SIGINT):  # for the main process, which saves first
        signal.signal(number, signal.SIG_IGN)
    # A thread here says by it that the main process has hung up. Errors reach that one otherwise.
    sys.excepthook = lambda *error: None


# ---- results and settings ------------------------------------------------------------------------


def environment():
    """Commit, versions and hardware: what a number needs beside it."""
    def git(*args):
        try:
            return subprocess.run(("git", "-C", str(SOURCE), *args), capture_output=True,
                                  encoding="utf-8", errors="replace", timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):  # no git, or one that hangs
            return ""

    cpuinfo = Path("/proc/cpuinfo")
    described = cpuinfo.read_text("utf-8", "replace") if cpuinfo.exists() else ""
    cpu = re.search(r"model name\s*: (.*)", described)
    packages = ("torch", "numpy", "einops", "triton", "tokenizers", "safetensors")
    versions = {}
    for package in sorted(packages):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    program = Path(sys.argv[0]).resolve()
    inside = program.is_relative_to(SOURCE)
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") or "unknown",
        # What runs publish is no code: publishing one does not make the next one dirty.
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results",
                          ":!figures", ":!RESULTS.md", ":!README.md")),
        "argv": [str(program.relative_to(SOURCE)) if inside else program.name, *sys.argv[1:]],
        "python": platform.python_version(), **versions,
        "hardware": {"cpu": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(),
                     "threads": torch.get_num_threads(),
                     "gpus": [torch.cuda.get_device_name(i)
                              for i in range(torch.cuda.device_count())]},
    }


def banner(script, cfg, device="cpu", model=None):
    """Print the one block every script opens with. Returns what `save_result` writes beside the
    numbers: `environment()`, the script's name and when it began.
    """
    env = {"script": script.removesuffix(".py"), "began": time.time(), **environment()}
    lines = [f"{script}  commit {env['commit']}{' (dirty)' if env['dirty'] else ''}  "
             f"torch {env.get('torch')}  device {device}  seed {getattr(cfg, 'seed', None)}"]
    if model is not None:
        total = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        lines.append(f"parameters {total:,} in {dtype}, trainable {trainable:,}")
        lines += [part.misreading for part in model.modules() if hasattr(part, "misreading")]
    settings = "  ".join(f"{f.name}={getattr(cfg, f.name)}" for f in dataclasses.fields(cfg))
    lines += textwrap.wrap(settings, 98, break_on_hyphens=False, break_long_words=False)
    log("-" * 98 + "\n" + "\n".join(lines) + "\n" + "-" * 98)
    return env


def save_result(path, metrics, cfg, env):
    """Write what `main` returns with its provenance: configuration, commit, versions, hardware and
    wall time. env: what `banner` returned. `python -m experiments.publish` copies such a file.
    """
    seconds = time.time() - env["began"]
    about = {name: value for name, value in env.items() if name != "began"}
    write_json(path, {"metrics": metrics, "config": cfg, "seconds": seconds, **about})


def from_preset(config_class, presets, name, **given):
    """The configuration of a preset, in which each value that is given wins."""
    if name not in presets:
        raise UserError(f"--preset: got {name!r}, need one of {', '.join(presets)}")
    return config_class(**{**presets[name], **given, "preset": name})


def check_settings(cfg, default):
    """Refuse what no script can use: a number that is negative, above 1e12 or not finite, and 0 or
    nothing where both the class and `default` have more; but for a seed, and what the class lists
    as MAY_BE_ZERO.
    """
    may_be_zero = ("seed", *getattr(cfg, "MAY_BE_ZERO", ()))
    for field in dataclasses.fields(cfg):
        value, flag = getattr(cfg, field.name), f"--{field.name.replace('_', '-')}"
        full = bool(field.default and getattr(default, field.name))
        if full and value == ():
            raise UserError(f"{flag}: got nothing, need at least one value")
        for v in value if isinstance(value, tuple) else (value,):
            least = int(full and isinstance(v, int) and field.name not in may_be_zero)
            if type(v) in (int, float) and not least <= v <= 1e12:
                raise UserError(f"{flag}: got {v}, need a number from {least} to 1e12")


def current_words(config_class):
    """The command line, with the flags of today for those that `config_class` lists as OLD_FLAGS.
    """
    renamed = getattr(config_class, "OLD_FLAGS", {})
    words = []
    for word in sys.argv[1:]:
        flag, equals, value = word.partition("=")
        words.append(renamed.get(flag, flag) + equals + value)
    return words


def parse(config_class, default):
    """The command line as a `config_class`. What tyro refuses, in a box, is raised as one line.

    --help opens with the first paragraph of the script's docstring.
    """
    import tyro
    box = io.StringIO()
    about = (sys.modules["__main__"].__doc__ or "").partition("\n\n")[0]
    about = "\n\n".join(filter(None, (about, inspect.getdoc(config_class))))
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(config_class, description=about, default=default,
                            args=current_words(config_class))
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
    lines = [line.strip(" │╭╮╰╯─|+-") for line in box.getvalue().splitlines()]
    title, *rest = lines or [""]
    complaint = []
    for line in rest:
        if line:
            complaint.append(line)
        elif complaint:  # a rule, and what follows it is the same for every mistake
            break
    said = " ".join(complaint) or title
    raise UserError(f"{said.rstrip('.')}; --help lists all settings")


def run_cli(config_class, main, presets=None):
    """Parse `config_class` from the command line, check it and call `main(cfg)`.

    With presets, `--preset NAME` sets the defaults that the other flags then override. What the
    user can mend ends in one line and status 2; a bug has its traceback.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        with contextlib.suppress(AttributeError):  # a text may hold what the terminal cannot show
            getattr(sys, name).reconfigure(errors="replace")
    try:
        default = config_class()
        if presets:
            chosen = re.search(r"(?:^|\0)--preset[=\0]([^\0]+)", "\0".join(sys.argv[1:]))
            default = from_preset(config_class, presets, chosen[1] if chosen else default.preset)
        cfg = parse(config_class, default)
        check_settings(cfg, default)
        return main(cfg)
    except UserError as error:
        said, status = str(error), 2
    except (MemoryError, RuntimeError) as error:  # numpy's; on a GPU torch's, and on a CPU
        if not (isinstance(error, (MemoryError, torch.OutOfMemoryError))
                or "can't allocate memory" in str(error)):
            raise
        said = f"out of memory ({error}): give smaller sizes or a shorter text"
        status = 2
    except KeyboardInterrupt:
        said, status = "interrupted", 130
    except BrokenPipeError:  # `| head` has seen enough; what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in MENDABLE:
            raise
        said = (f"{error}: make room, or give a path with rights to it (MARK_ROOT=DIR moves runs/ "
                "and results/); what was saved before is whole")
        status = 2
    # Outside the handlers: an exception that is kept would keep alive all that its frames hold.
    print(f"error: {readable(said)}", file=sys.stderr)
    sys.exit(status)
