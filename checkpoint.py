"""The run folder and its files: written atomically, read without executing anything.

Run:      not a script; pretrain.py, train.py and evaluate.py import it.
Symbols:  runs/<name>/config.json          configuration, commit, versions and hardware of the run
          runs/<name>/metrics.jsonl        one JSON object a line: training steps and evaluations
          runs/<name>/adapter.safetensors  the trained adapter. Metadata: format (FORMAT), kernel,
                 backbone (fingerprint of its weights), settings, step, weights, vocab, ... as JSON
          runs/<name>/last.pt              all a resumed run needs: tensors and plain numbers only
Differs from the paper: nothing.

Every file but metrics.jsonl, which grows line by line, is written beside its place, fsynced and
renamed: after a crash there is the old one or the new one. No random state is saved: the noise of a
sample depends on its place alone (data.py).
"""
import contextlib
import io
import json
import os
import shutil
import signal
from pathlib import Path

import torch

import common
from mark_adapters import MarkAdapter, make_adapter

FORMAT = "mark-adapter 1"  # of adapter.safetensors; the number changes with what it means


def open_run(folder, cfg, env, resume=False, overwrite=False, free=()):
    """Create the run folder and write config.json, or check that `resume` continues the same run.

    free: names of settings that a resumed run may change. A run that was killed before its first
    checkpoint has no last.pt and is resumed at its beginning. Raises UserError where a folder would
    be lost, or where the settings of a resumed run differ.
    """
    folder, settings = Path(folder), vars(cfg)
    if resume:
        if not (folder / "config.json").is_file():
            raise common.UserError(f"--resume: {folder} holds no run; start it without --resume")
        before = json.loads((folder / "config.json").read_text())["config"]
        now = json.loads(json.dumps(settings, default=str))
        changed = [k for k in now if k not in free and k in before and before[k] != now[k]]
        if changed:
            raise common.UserError(
                f"--resume: {changed[0]} was {before[changed[0]]!r} in {folder} and is "
                f"{now[changed[0]]!r} now; give the same settings or another --name")
        for half_written in folder.glob(".*.tmp"):  # when the run was killed
            half_written.unlink()
        return folder
    if folder.is_file() or any(not path.match(".*.tmp") for path in folder.glob("*")):
        if not overwrite:
            raise common.UserError(f"{folder} exists; continue it with --resume, replace it with "
                                   "--overwrite, or choose another --name")
        if not (folder / "config.json").is_file():
            raise common.UserError(f"{folder} is not a run folder (no config.json), so --overwrite "
                                   "leaves it alone; choose another --name")
    for path in folder.glob("*"):
        if path.name != "config.json":  # which stays until it is replaced: it marks a run
            whole = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if whole else path.unlink()
    common.write_json(folder / "config.json", {"config": settings, **env})
    return folder


def started_now():
    """[the parent process, when it started]: its number alone may come again. Linux tells when."""
    pid, stat = os.getppid(), Path(f"/proc/{os.getppid()}/stat")
    return [pid, stat.read_text().rpartition(")")[2].split()[19] if stat.is_file() else None]


def started_by(folder):
    """`started_now` of the run in `folder`, as it said to open_run; None where there is none."""
    path = Path(folder) / "config.json"
    return json.loads(path.read_text()).get("parent") if path.is_file() else None


def append_metrics(folder, **row):
    """Add one line to metrics.jsonl; floats that are not finite become null."""
    with open(Path(folder) / "metrics.jsonl", "a") as file:
        file.write(json.dumps(common.plain(row)) + "\n")


def read_metrics(folder, up_to_step=None):
    """The rows of metrics.jsonl. `up_to_step` drops later rows and a torn last line for good."""
    path, rows = Path(folder) / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # a kill in the middle of a write leaves half a line
            continue
    if up_to_step is not None:
        rows = [row for row in rows if row["step"] <= up_to_step]
        with common.atomic_path(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def save_state(path, **state):
    """Tensors, numbers, strings and containers of them -> a torch file."""
    buffer = io.BytesIO()  # torch's own writer hides that a disk is full
    torch.save(state, buffer)
    with common.atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def load_state(path, device="cpu"):
    """What `save_state` wrote. Raises UserError where the file is missing, damaged or another."""
    if not Path(path).is_file():
        raise common.UserError(f"{path}: no such checkpoint; start again with --overwrite")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch, zip and pickle each have their own
        raise common.UserError(f"{path}: damaged or not a checkpoint ({type(error).__name__}); "
                               "remove it and start again with --overwrite") from None


def save_adapter(path, adapter, dtype=torch.float32, **about):
    """Write a trained adapter in FORMAT: its tensors in `dtype`; as metadata its kernel, settings,
    the fingerprint of its backbone and `about`.
    """
    metadata = {"format": FORMAT, "kernel": adapter.kernel, "backbone": adapter.backbone,
                "settings": json.dumps(adapter.settings)}
    metadata |= {k: json.dumps(v) for k, v in about.items()}
    save_tensors(path, {k: v.detach().to(dtype) for k, v in adapter.state_dict().items()}, metadata)


def save_tensors(path, tensors, metadata=None):
    """A safetensors file."""
    from safetensors.torch import save
    with common.atomic_path(path) as temporary:
        temporary.write_bytes(save({k: v.contiguous() for k, v in tensors.items()}, metadata))


def copy_adapter(source, target, dtype):
    """Write the adapter file `source` again, its tensors in `dtype`."""
    from safetensors import safe_open
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).to(dtype) for name in file.keys()}
    save_tensors(target, tensors, metadata)


def load_adapter(path, config, device="cpu"):
    """(adapter, about) from a run folder or an adapter.safetensors, for a backbone of `config`.

    Raises UserError where the file is none, or was trained on another backbone; one of the same
    sizes is told by its fingerprint, where both have one (hydra_ssm.fingerprint).
    """
    from safetensors import safe_open
    path = Path(path) / "adapter.safetensors" if Path(path).is_dir() else Path(path)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.pop("format", None) != FORMAT:
                raise common.UserError(f"not in the format {FORMAT!r} of this version's train.py; "
                                       "give a run folder or its adapter.safetensors")
            state = {k: file.get_tensor(k).float() for k in file.keys()}
        kernel, backbone = metadata.pop("kernel"), metadata.pop("backbone")
        about = {k: json.loads(v) for k, v in metadata.items()}
        adapter = make_adapter(kernel, config, **about.pop("settings"))
    except common.UserError as error:
        raise common.UserError(f"{path}: {error}") from None
    except Exception as error:  # safetensors has its own kinds
        raise common.UserError(f"{path}: not an adapter ({type(error).__name__}: {error}); give a "
                               "run folder of train.py or its adapter.safetensors") from None
    expected = adapter.state_dict()
    wrong = [k for k in expected if k not in state or state[k].shape != expected[k].shape]
    wrong += sorted(state.keys() - expected.keys())
    known = {backbone, config.weights} - {""}
    if wrong or len(known) > 1:
        seen = (f"see {wrong[0]}" if wrong else
                f"{backbone[:12]}, and this one is {config.weights[:12]}")
        raise common.UserError(f"{path}: this {kernel} adapter belongs to another backbone ({seen})"
                               "; give the --weights it was trained with")
    if not all(v.isfinite().all() for v in state.values()):
        raise common.UserError(f"{path}: holds NaN or infinity; train it again")
    adapter.load_state_dict(state)
    return adapter.to(device), about


def load_adapters(paths, config, device="cpu", mark_only=False):
    """{label: adapter} of run folders and files; the shipped ones where `paths` is empty.

    A label is the file's or the folder's name, or the whole path where that is taken. mark_only
    raises UserError for an adapter that leaves the recurrence alone.
    """
    shipped = sorted((common.SOURCE / "assets").glob("adapter_*.safetensors"))
    adapters = {}
    for path in map(Path, paths or shipped):
        adapter, _ = load_adapter(path, config, device)
        if mark_only and not isinstance(adapter, MarkAdapter):
            raise common.UserError(f"--adapter: {path} is {adapter.kernel}, which leaves the "
                                   "recurrence alone; give a hypernet, chebyshev or dct adapter")
        own = path.resolve().parent if path.name == "adapter.safetensors" else path.resolve()
        label = own.name.removesuffix(".safetensors").removeprefix("adapter_")
        taken = label in adapters or label in ("uniform", "unigram", "frozen")  # rows of tables
        adapters[str(path) if taken else label] = adapter
    return adapters


@contextlib.contextmanager
def stop_signals():
    """Yield a list that SIGTERM and Ctrl-C are added to, in place of ending the process."""
    caught, before = [], {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
