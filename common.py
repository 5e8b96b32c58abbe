"""What every script needs and no paper describes: errors, atomic files, the banner, result files.

Run:      not a script; the other files import it.
Symbols:  none.
Differs from the paper: nothing.
"""
import contextlib
import dataclasses
import errno
import json
import math
import os
import platform
import re
import subprocess
import sys
import textwrap
import time
from importlib import metadata
from pathlib import Path

import torch
import tqdm

SOURCE = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("MARK_ROOT") or SOURCE).resolve()  # of runs/, results/ and figures/
MENDABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS,
            errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)  # by the user
SEEDS = tuple(42 + 100 * i for i in range(15))  # C.3: seed i is 42 + 100 i


class UserError(ValueError):
    """A mistake the user can mend: one line that says what, what was got, and how to fix it."""


def rank_and_world():
    """(rank, world size) as torchrun sets them; (0, 1) for a plain `python script.py`."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def pick_device(name):
    """The device of a setting: auto is cuda where torch sees a GPU, and cpu elsewhere."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: got {name!r}, need one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: got cuda, need a CUDA GPU, and torch sees none; --device cpu "
                        "runs here, slowly")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def log(*parts):
    """Print on rank 0 only, without breaking a progress bar."""
    if rank_and_world()[0] == 0:
        tqdm.tqdm.write(" ".join(str(p) for p in parts), file=sys.stdout)
        sys.stdout.flush()


def progress(iterable=None, total=None, desc="", **kwargs):
    """A tqdm bar on rank 0 of a terminal; elsewhere a loop logs a line a minute."""
    silent = rank_and_world()[0] != 0 or not sys.stderr.isatty()
    if silent and iterable is not None:
        return _lines(iterable, desc)
    return tqdm.tqdm(iterable, total=total, desc=desc, disable=silent, dynamic_ncols=True, **kwargs)


def _lines(iterable, desc, every=60):
    of, since = f" of {len(iterable)}" if hasattr(iterable, "__len__") else "", time.monotonic()
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


def save_figure(figure, path):
    """Write a matplotlib figure as PNG, atomically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def plain(value):
    """`value` as JSON holds it: dataclasses as dicts, NaN and infinity as null, the rest by str."""
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def write_json(path, data):
    """Write `data` as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        text = json.dumps(plain(data), indent=1, ensure_ascii=False) + "\n"
        temporary.write_text(text, "utf-8")


def markdown(head, *rows):
    """A Markdown table of lists of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def learning_rate(step, steps, warmup, peak, min_ratio=0.1):
    """Linear warm-up over `warmup` steps, then cosine to min_ratio * peak (Table 6)."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def check_finite(step, loss, norm, advice):
    """Raise UserError, which names the step, unless the loss and the gradient norm are finite."""
    if not (torch.isfinite(loss) and torch.isfinite(norm)):
        raise UserError(f"step {step}: the loss is {loss.item()}, the gradient norm {norm.item()}; "
                        f"{advice}")


def environment():
    """Commit, versions and hardware: what a published number needs beside it."""
    def git(*args):
        try:
            return subprocess.run(("git", "-C", str(SOURCE), *args), capture_output=True, text=True,
                                  timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):  # no git, or one that hangs
            return ""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = ("torch", "numpy", "einops", "triton", "tokenizers", "safetensors")
    found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()
             if d.metadata["Name"] and d.metadata["Name"].lower() in packages}
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") or "unknown",
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(), **dict(sorted(found.items())),
        "hardware": {"cpu": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(),
                     "threads": torch.get_num_threads(), "gpus": gpus},
    }


def banner(script, cfg, device="cpu", model=None):
    """Print the one block every script opens with, and return `environment()`."""
    env = environment()
    lines = [f"{script}  commit {env['commit']}{' (dirty)' if env['dirty'] else ''}  "
             f"torch {env.get('torch')}  device {device}  seed {getattr(cfg, 'seed', None)}"]
    if model is not None:
        total = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        lines.append(f"parameters {total:,} in {dtype}, trainable {trainable:,}")
    settings = "  ".join(f"{f.name}={getattr(cfg, f.name)}" for f in dataclasses.fields(cfg))
    lines += textwrap.wrap(settings, 98, break_on_hyphens=False, break_long_words=False)
    log("-" * 98 + "\n" + "\n".join(lines) + "\n" + "-" * 98)
    return env


def publish(script, run, result, cfg=None, env=None):
    """Write results/<script>/<run>.json: metrics, config, environment. Returns the path.

    env: the `environment()` the run began in, which a long run passes on; default: now. What was
    published before under this name is replaced; git has it.
    """
    path = ROOT / "results" / script / f"{run}.json"
    write_json(path, {"metrics": result, "config": cfg, **(env or environment())})
    return path


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


def run_cli(config_class, main, presets=None):
    """Parse `config_class` from the command line, check it and call `main(cfg)`.

    With presets, `--preset NAME` sets the defaults that the other flags then override. What the
    user can mend ends in one line and status 2; a bug has its traceback.
    """
    import tyro
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))
        with contextlib.suppress(AttributeError):  # a text may hold what the terminal cannot show
            getattr(sys, name).reconfigure(errors="replace")
    try:
        default = config_class()
        if presets:
            chosen = re.search(r"(?:^|\0)--preset[=\0]([^\0]+)", "\0".join(sys.argv[1:]))
            default = from_preset(config_class, presets, chosen[1] if chosen else default.preset)
        cfg = tyro.cli(config_class, default=default)
        check_settings(cfg, default)
        return main(cfg)
    except UserError as error:
        said, status = error, 2
    except (MemoryError, RuntimeError) as error:  # numpy's; on a GPU torch's, and on a CPU
        if not (isinstance(error, (MemoryError, torch.OutOfMemoryError))
                or "can't allocate memory" in str(error)):
            raise
        said, status = f"out of memory ({error}): give smaller sizes or a shorter text", 2
    except KeyboardInterrupt:
        said, status = "interrupted", 130
    except BrokenPipeError:  # `| head` has seen enough; what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in MENDABLE:
            raise
        said, status = (f"{error}: make room, or give a path with rights to it (MARK_ROOT=DIR "
                        "moves runs/ and results/); what was saved before is whole"), 2
    print(f"error: {said}", file=sys.stderr)
    sys.exit(status)
