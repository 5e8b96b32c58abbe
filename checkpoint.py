"""Files of models and runs: backbones, adapters, the run folder; nothing pickled is executed.

Run:      not a script; train.py, evaluate.py and the analyses import it.
Symbols:  runs/<name>/config.json          configuration, fingerprints of weights and data, commit,
                                           versions and hardware of the run
          runs/<name>/metrics.jsonl        one JSON object a line: training steps and evaluations
          runs/<name>/adapter.safetensors  the trained adapter. Metadata: format (FORMAT), kernel,
                 backbone (fingerprint of its weights), settings, step, weights, vocab, ... as JSON
          runs/<name>/last.pt              all a resumed run needs: tensors and plain numbers only
          runs/<name>/.lock                held by the process that writes the folder
Differs from the paper: its public code loads 12 of the released 24 heads; here the sizes follow
          from the tensors. What its own checkpoints need stands in published.py.

Every file but metrics.jsonl, which grows line by line, is written beside its place, fsynced and
renamed: after a crash there is the old one or the new one. No random state is saved: the noise of a
sample depends on its place alone (data.py).
"""
import collections
import dataclasses
import errno
import hashlib
import importlib.util
import io
import json
import os
import pickle
import re
import sys
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch

import baselines
import common
import published
import text
from hydra_ssm import HydraBert, HydraConfig
from mark_adapters import GEOMETRIES, MarkAdapter, make_adapter

try:
    import fcntl
except ImportError:  # no such thing on Windows: runs there are not locked
    fcntl = None

FORMAT = "mark-adapter 1"  # of adapter.safetensors; the number changes with what it means
ASSETS = common.SOURCE / "assets"
SMALL = ASSETS / "hydra_small.safetensors"


# ---- backbones -----------------------------------------------------------------------------------


class HubFile(NamedTuple):
    revision: str
    filename: str
    size: int
    sha256: str


HUB_FILES = {"goombalab/hydra": HubFile(
    "89204f45b7e595243e74d2ed0cab0afc2aa35ef6", "hydra_bert_23layers.pt", 449_652_194,
    "d38892dd98e4c71e24d3566084e7a64da5c3bfbff2ee4e2ba46e66a61202e1f9")}

RENAMES = (  # released key -> ours
    (r"^bert\.embeddings\.(word|token_type)_embeddings\.", r"\1_embeddings."),
    (r"^bert\.embeddings\.LayerNorm\.", "embedding_norm."),
    (r"^bert\.encoder\.layer\.(\d+)\.layer\.", r"layers.\1."),
    (r"^cls\.predictions\.transform\.dense\.", "head_dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head_norm."),
    (r"^cls\.predictions\.decoder\.bias$", "decoder_bias"),
)


def load_backbone(source="small", dtype=torch.float32, device="cpu", vocab_size=None,
                  sliced=False):
    """A frozen HydraBert in eval mode: "small" (shipped), "goombalab/hydra" (released) or a path.

    A path may hold safetensors or a torch file, as a composer checkpoint, a plain state dict or a
    checkpoint of the paper's code, which is also known as OWNER/NAME@REVISION of the hub. Sizes
    are read off the tensors. vocab_size=None keeps every row of the embeddings, except that
    30,528 rows mean 30,522; a number cuts the padded rows. A_log, dt_bias and D stay in float32
    under a 16-bit dtype. No pickled code is executed. Raises UserError, naming the tensor or what
    to do.

    sliced: NOT the model of the file, but what the paper's code makes of it (published.py).
    """
    path = locate(source)
    tensors = read_tensors(path)
    model_class = HydraBert
    if published.is_published(tensors):
        tensors, _ = published.split_checkpoint(tensors, path)
        model_class = published.SlicedHydra  # which it is already
        sliced = False
    state = rename(tensors, path)
    state = cut_rows(state, vocab_size, path)
    config = infer_config(state, path)
    if sliced:
        state, config = published.slice_weights(state, config)
        model_class = published.SlicedHydra
    cast = {}
    for name, tensor in state.items():
        keep = name.endswith(("A_log", "dt_bias", "mixer.D")) and dtype.itemsize < 4
        cast[name] = tensor.to(device, torch.float32 if keep else dtype, copy=True)
    with torch.device("meta"):
        model = model_class(config)
    try:
        model.load_state_dict(cast, assign=True)  # strict: a wrong key or shape ends it
    except RuntimeError as error:
        problem = str(error).splitlines()[1].strip()
        raise common.UserError(f"{path}: is this a Hydra-BERT checkpoint? {problem[:300]}"
                               ) from None
    model.config = dataclasses.replace(config, weights=fingerprint(state))
    return model.requires_grad_(False).eval()


def locate(source):
    """The file of `source`: shipped, fetched from the hub, or a path, which must exist."""
    if source == "small":
        path = SMALL
    elif source in HUB_FILES:
        path = fetch_backbone(source)
    elif is_hub_name(source):
        path = fetch_published(source)
    else:
        path = Path(source)
    if not path.is_file():
        raise common.UserError(f"weights: no file {path}; give a path, \"small\" or one of "
                               f"{list(HUB_FILES)}")
    return path


def rename(state, path):
    """Released or plain keys -> ours; the tied decoder is checked and dropped."""
    renamed = {}
    for key, tensor in state.items():
        name = re.sub(r"^((model|module|_orig_mod)\.)+", "", key)
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        if name in renamed:
            raise common.UserError(f"{path}: two tensors for {name}, one of them {key}")
        if not torch.isfinite(tensor).all():
            raise common.UserError(f"{path}: {name} holds NaN or infinity")
        renamed[name] = tensor
    decoder = renamed.pop("cls.predictions.decoder.weight", None)
    word = renamed.get("word_embeddings.weight")
    if decoder is not None and word is not None and not torch.equal(decoder, word):
        raise common.UserError(f"{path}: cls.predictions.decoder.weight differs from the word "
                               "embeddings; Hydra-BERT ties them")
    return renamed


def cut_rows(state, vocab_size, path):
    """`state` with `vocab_size` rows of embeddings and decoder bias: see load_backbone."""
    rows = size_of(state, "word_embeddings.weight", 2, path)[0]
    if vocab_size is None:
        vocab_size = 30522 if rows == 30528 else rows
    if vocab_size > rows:
        raise common.UserError(f"{path}: {rows} embedding rows, but vocab_size {vocab_size} was "
                               "asked for")
    cut = dict(state)
    for name in ("word_embeddings.weight", "decoder_bias"):
        if size_of(state, name, None, path)[0] == rows:
            cut[name] = state[name][:vocab_size]
    return cut


def size_of(state, name, ndim, path):
    """The shape of a tensor that has to be there, with ndim dimensions (None: one at least)."""
    if name not in state:
        raise common.UserError(f"{path}: tensor {name} is missing; is this a Hydra-BERT "
                               "checkpoint?")
    shape = state[name].shape
    if not state[name].numel() or len(shape) < 1 or len(shape) != (ndim or len(shape)):
        raise common.UserError(f"{path}: {name} is {tuple(shape)}, needed {ndim or 1} dimensions, "
                               "none of them empty")
    return shape


def infer_config(state, path):
    """HydraConfig from tensors, sizes by shape alone (one group is assumed: they cannot tell)."""
    mixer = "layers.0.mixer."
    vocab_size, d_model = size_of(state, "word_embeddings.weight", 2, path)
    d_inner = size_of(state, mixer + "out_proj.weight", 2, path)[1]
    h = size_of(state, mixer + "A_log", 1, path)[0]
    channels = size_of(state, mixer + "conv1d.bias", 1, path)[0]
    d_conv = size_of(state, mixer + "conv1d.weight", 3, path)[2]
    numbers = [int(name.split(".")[1]) for name in state if re.match(r"layers\.\d+\.", name)]
    headdim = d_inner // h
    sizes = dict(vocab_size=vocab_size, d_model=d_model, headdim=headdim,
                 expand=d_inner // d_model, n_layer=1 + max(numbers),
                 d_state=(channels - d_inner) // 4, d_conv=d_conv)
    fit = headdim * h == d_inner == sizes["expand"] * d_model
    if min(sizes.values()) < 1 or not fit:
        raise common.UserError(f"{path}: the shapes of word_embeddings.weight and of the A_log, "
                               "conv1d and out_proj of layers.0.mixer do not fit together "
                               f"({sizes})")
    return HydraConfig(**sizes, chunk_size=64 if headdim >= 64 else 32)


def fingerprint(state):
    """sha256 of weights by name, rounded to bfloat16: the same in any file, in bfloat16, float32
    and float64 (float16 rounds some of them to another neighbour).
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].bfloat16().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_vocabulary(model, tokenizer):
    """Raise UserError unless the tokenizer's ids are those of the backbone's embeddings."""
    if model.config.vocab_size != tokenizer.vocab_size:
        raise common.UserError(f"--vocab: {tokenizer.name} has {tokenizer.vocab_size} ids and the "
                               f"backbone {model.config.vocab_size}; give the vocabulary that it "
                               "was pretrained with")


# ---- reading tensors, and nothing else, from a file ----------------------------------------------


class Inert(dict):
    """Takes the place of every class and function that a pickle names, and does nothing.

    It takes all that a pickle does to an object: being called, given a state, items, members.
    """

    def __init__(self, *args, **kwargs):
        super().__init__()

    def ignore(self, *args):
        pass

    __setstate__ = append = extend = add = ignore
    __hash__ = object.__hash__

    def __call__(self, *args, **kwargs):
        return Inert()


class TensorsOnly(pickle.Unpickler):
    """Rebuilds tensors and dicts of them. Nothing else that a pickle names is imported or called.

    torch's own weights_only reader does not read subclasses of dict and list, of which other
    people's checkpoints are full (a defaultdict of an optimiser, say).
    """
    ALLOWED = {("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
               ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
               ("collections", "OrderedDict"): collections.OrderedDict}

    def find_class(self, module, name):
        return self.ALLOWED.get((module, name), Inert)


class tensors_only:
    """What torch.load takes as a pickle module."""
    Unpickler = TensorsOnly


def read_tensors(path):
    """Key -> tensor, mapped from a safetensors or zipped torch file; no pickled code is run."""
    try:
        if zipfile.is_zipfile(path):
            content = read_zipped(path)
        else:
            from safetensors.torch import load_file
            content = load_file(path)
        tensors = {k: v for k, v in content.items() if isinstance(v, torch.Tensor)}
    except common.UserError:
        raise
    except Exception as error:  # every reader has its own kinds of failure; all mean that
        first_line = str(error)[:120].partition("\n")[0]
        raise common.UserError(f"{path}: {unreadable(path)} ({type(error).__name__}: {first_line})"
                               ) from None
    if not tensors:
        raise common.UserError(f"{path}: holds no tensors")
    return tensors


def read_zipped(path):
    """The state dict of a file of torch.save: a plain one, composer's or Lightning's."""
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise common.UserError(f"{path}: a TorchScript program, not weights; save the state "
                                   "dict of the model in its place")
    content = torch.load(path, map_location="cpu", mmap=True, weights_only=False,
                         pickle_module=tensors_only)
    content = content.get("state_dict", content)  # Lightning
    content = content.get("state", content)       # composer
    return content.get("model", content)


def unreadable(path):
    """Why a file is neither safetensors nor a zip, as far as its first bytes tell."""
    with open(path, "rb") as file:
        start = file.read(2)
    if start[:1] == b"\x80":  # the protocol mark of a pickle
        return ("a torch file of before version 1.6, which cannot be read without running its "
                "pickle; load and save it again with a newer torch where you trust it")
    return "not a readable torch or safetensors file, or cut short"


# ---- the hub -------------------------------------------------------------------------------------


def fetch_backbone(source):
    """Path of a hub file in huggingface_hub's cache, fetched if need be; size and hash checked."""
    hub = HUB_FILES[source]
    return text.fetch(source, hub.filename, hub.size, hub.sha256, "its path as --weights",
                      hub.revision)


def is_hub_name(source):
    """Whether `source` is to be fetched: OWNER/NAME@REVISION, or of the paper's owner on the hub;
    and no file or folder.
    """
    name, at, _ = str(source).partition("@")
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
    return is_name and bool(at or name.startswith("mark-ssm/")) and not Path(source).exists()


def fetch_published(source):
    """Path of the checkpoint of the paper's code in a hub's repository, OWNER/NAME@REVISION.

    Neither a revision nor a hash of one is known here, so the user gives the revision, and the hash
    of what came is printed.
    """
    name, _, revision = str(source).partition("@")
    if not revision:
        raise common.UserError(f"{source}: which revision? Give {name}@REVISION, with the commit "
                               "that the hub shows for its files")
    return text.fetch(name, published.FILENAME, None, None, "its path", revision)


# ---- adapters ------------------------------------------------------------------------------------


def run_plugin(path):
    """Run a Python file of the user's own, which adds its geometries to mark_adapters.KERNELS.

    It can do all that Python can, so the user names it on every command line: no adapter, run
    folder or other file leads to one. Nothing is run where `path` is empty.
    """
    if not path:
        return
    path = Path(path)
    if not path.is_file():
        raise common.UserError(f"--plugin: no file {path}; give a Python file")
    name = f"plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise common.UserError(f"--plugin: got {path}, need a file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)


def save_adapter(path, adapter, dtype=torch.float32, **about):
    """Write a trained adapter in FORMAT: its tensors in `dtype`; as metadata its kernel, settings,
    the fingerprint of its backbone, `about`, and a checksum of all that.
    """
    metadata = {"format": FORMAT, "kernel": adapter.kernel, "backbone": adapter.backbone,
                "settings": json.dumps(adapter.settings)}
    for name, value in about.items():
        metadata[name] = json.dumps(common.plain(value))
    tensors = {name: v.detach().to(dtype) for name, v in adapter.state_dict().items()}
    save_tensors(path, tensors, metadata | {"checksum": checksum(tensors, metadata)})


def copy_adapter(source, target, dtype):
    """Write the adapter file `source` again, its tensors in `dtype`."""
    tensors, metadata = read_adapter(source)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_tensors(target, tensors, metadata | {"checksum": checksum(tensors, metadata)})


def checksum(tensors, metadata):
    """sha256 of an adapter's tensors and metadata, so that neither is edited without the other."""
    digest = hashlib.sha256()
    for name in sorted(metadata):
        if name != "checksum":
            digest.update(f"{name}={metadata[name]}\n".encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def save_tensors(path, tensors, metadata=None):
    """A safetensors file."""
    from safetensors.torch import save
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    with common.atomic_path(path) as temporary:
        temporary.write_bytes(content)


def read_adapter(path):
    """(tensors, metadata) of an adapter file; one from before there were checksums has none.

    Raises UserError, naming the file.
    """
    from safetensors import safe_open
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:  # safetensors has its own kinds
        raise common.UserError(f"{path}: not an adapter ({type(error).__name__}: {error}); give a "
                               "run folder of train.py or its adapter.safetensors") from None
    if metadata.get("format") != FORMAT or not {"kernel", "backbone", "settings"} <= set(metadata):
        raise common.UserError(f"{path}: not in the format {FORMAT!r} of this version's train.py; "
                               "give a run folder or its adapter.safetensors")
    if metadata.get("checksum", "") not in ("", checksum(tensors, metadata)):
        raise common.UserError(f"{path}: its checksum is wrong, so its tensors or settings were "
                               "changed after training; take the file that train.py wrote")
    return tensors, metadata


def read_published_adapter(path, config):
    """The same of a checkpoint of the paper's code. Its adapters have a shift for every head, so
    one for another number of heads than `config` has is refused.
    """
    tensors = read_tensors(path)
    if not published.is_published(tensors):
        raise common.UserError(f"{path}: not an adapter; give a run folder of train.py, its "
                               "adapter.safetensors or a checkpoint of the paper's code")
    backbone, adapter = published.split_checkpoint(tensors, path)
    state = cut_rows(rename(backbone, path), None, path)
    own = infer_config(state, path)
    kernel, settings, tensors = published.convert_adapter(adapter, own, path)
    if own.nheads != config.nheads:
        raise common.UserError(f"{path}: its adapter is for {own.nheads} heads of {own.headdim}, "
                               f"and the backbone has {config.nheads} of {config.headdim}; give "
                               "the file itself as --weights, or --sliced")
    return tensors, {"kernel": kernel, "backbone": fingerprint(state),
                     "settings": json.dumps(settings)}


def load_adapter(path, config, device="cpu", dtype=torch.float32):
    """(adapter, about) from a run folder, an adapter.safetensors or a checkpoint of the paper's
    code (a path, or OWNER/NAME@REVISION), for a backbone of `config`.

    Raises UserError where the file is none, or was trained on another backbone; one of the same
    sizes is told by its fingerprint, where both have one.
    """
    path = fetch_published(path) if is_hub_name(path) else Path(path)
    if path.is_dir():
        path = path / "adapter.safetensors"
    if zipfile.is_zipfile(path):
        tensors, metadata = read_published_adapter(path, config)
    else:
        tensors, metadata = read_adapter(path)
    kernel = metadata["kernel"]
    try:
        about = {name: json.loads(value) for name, value in metadata.items()
                 if name not in ("format", "kernel", "backbone", "checksum")}
        adapter = make_adapter(kernel, config, **about.pop("settings"))
    except (common.UserError, TypeError, ValueError) as error:
        raise common.UserError(f"{path}: not an adapter of this version ({error})") from None
    check_belongs(path, adapter, tensors, metadata["backbone"])
    adapter.to(dtype).load_state_dict({name: v.to(dtype) for name, v in tensors.items()})
    return adapter.to(device), about


def check_belongs(path, adapter, tensors, backbone):
    """Raise UserError unless tensors are finite and fit `adapter`, made for the same backbone."""
    expected = adapter.state_dict()
    wrong = [name for name in expected
             if name not in tensors or tensors[name].shape != expected[name].shape]
    wrong += sorted(tensors.keys() - expected.keys())
    other = backbone and adapter.backbone and backbone != adapter.backbone
    if wrong or other:
        seen = (f"see {wrong[0]}" if wrong
                else f"{backbone[:12]}, and this one is {adapter.backbone[:12]}")
        raise common.UserError(f"{path}: this {adapter.kernel} adapter belongs to another backbone "
                               f"({seen}); give the --weights it was trained with")
    for tensor in tensors.values():
        if not tensor.isfinite().all():
            raise common.UserError(f"{path}: holds NaN or infinity; train it again")


def load_adapters(paths, config, device="cpu", mark_only=False, static=False):
    """{label: adapter} of run folders and files; the shipped ones where `paths` is empty.

    A label is the file's or the folder's name, or the whole path where that is taken. mark_only
    raises UserError for what is not one of the three geometries alone; with `static`, a static
    operator and a geometry on top of one will do as well.
    """
    wanted = (MarkAdapter,)
    said = "hypernet, chebyshev or dct adapter"
    if static:
        wanted += (baselines.Static, baselines.StaticWith)
        said += ", a static one, or static+ one of the three"
    shipped = [ASSETS / f"adapter_{kernel}.safetensors" for kernel in sorted(GEOMETRIES)]
    adapters = {}
    for path in map(Path, paths or shipped):
        adapter, _ = load_adapter(path, config, device)
        if mark_only and not isinstance(adapter, wanted):
            raise common.UserError(f"--adapter: {path} is {adapter.kernel}, which this command "
                                   f"cannot read as a modulated recurrence; give a {said}")
        label = label_of(path)
        if label in adapters or label in ("uniform", "unigram", "frozen"):  # rows of tables
            label = str(path)
        adapters[common.readable(label)] = adapter
    return adapters


def label_of(path):
    """The name of an adapter's file or run folder, for tables and folders."""
    path = Path(path)
    own = path.resolve().parent if path.name == "adapter.safetensors" else path.resolve()
    return own.name.removesuffix(".safetensors").removeprefix("adapter_")


def result_folder(script, paths):
    """runs/<script>/<label>, for what a script finds out about the adapters of --adapter: "shipped"
    where none is given, "several" for two or more. Says which older result will be replaced.
    """
    if not paths:
        label = "shipped"
    elif len(paths) == 1:
        label = common.readable(label_of(paths[0]))
    else:
        label = "several"
    folder = common.ROOT / "runs" / script / label
    older = folder / "result.json"
    if older.is_file():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(older.stat().st_mtime))
        common.log(f"replacing {older.relative_to(common.ROOT)} of {when}")
    return folder


# ---- the run folder ------------------------------------------------------------------------------


RUN_FILES = ("metrics.jsonl", "last.pt", "adapter.safetensors", "backbone.safetensors",
             "result.json", "*.png", "events.out.tfevents.*")


def run_folder(name):
    """runs/<name>. Raises UserError for a name that leads out of runs/."""
    runs = common.ROOT / "runs"
    folder = runs / name
    inside = os.path.normpath(folder).startswith(os.path.normpath(runs) + os.sep)
    if not inside or ".." in Path(name).parts:
        raise common.UserError(f"--name: got {name!r}, need a name of a folder inside {runs}")
    return folder


def open_run(folder, cfg, inputs, env, free=()):
    """Make the run folder, or check that a resumed run is the same. Returns whether there is a
    checkpoint to go on from.

    cfg.resume continues the run in the folder and starts one where there is none; cfg.overwrite
    replaces it. free: names of settings that a resumed run may change. inputs: fingerprints of the
    weights and texts, which it may not. The folder is this process's from here to `unlock`. Raises
    UserError where a folder would be lost, is in use, or where a resumed run differs.
    """
    folder = Path(folder)
    check_free(folder, cfg)
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    check_free(folder, cfg)  # again: another may have been faster
    used = in_use(folder)
    if used and cfg.resume:
        check_same_run(folder, cfg, inputs, free)
    elif used:
        clear_run(folder)
    for half_written in folder.glob(".*.tmp"):  # when the run was killed
        half_written.unlink()
    if used and cfg.resume:
        return (folder / "last.pt").is_file()
    common.write_json(folder / "config.json", {"config": cfg, "inputs": inputs, **env})
    return False


LOCKS = {}  # folder: the open file that keeps its lock


def lock(folder):
    """Keep other processes out of a run folder until `unlock`, or this one's end, however it ends.
    """
    if fcntl is None or folder in LOCKS:
        return
    file = open(folder / ".lock", "ab")
    try:
        # Not flock: its lock would be shared with the loading processes, which outlive a kill.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return  # a file system without locks
        raise common.UserError(f"{folder} is in use by another process; wait for it, or choose "
                               "another --name") from None
    LOCKS[folder] = file  # closing it would end the lock


def unlock(folder):
    """Let go of a run folder; nothing where this process does not hold it."""
    if folder in LOCKS:
        LOCKS.pop(folder).close()


def begun_with(folder):
    """(settings, fingerprints of inputs) of the run in a folder. Raises UserError if there is none.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise common.UserError(f"{folder} has no config.json, so it is not a run that could be "
                               "continued; choose another --name")
    before = common.read_json(path, "config", "commit")
    try:
        return dict(before["config"]), dict(before.get("inputs", {}))
    except (TypeError, ValueError):
        raise common.UserError(f"{path} is damaged; choose another --name") from None


def check_same_run(folder, cfg, inputs, free):
    """Raise UserError unless the run in the folder had the same settings, weights and texts."""
    settings_before, inputs_before = begun_with(folder)
    for name, value in common.plain(cfg).items():
        if name not in free and settings_before.get(name, value) != value:
            raise common.UserError(
                f"--resume: {name} was {settings_before[name]!r} in {folder} and is {value!r} "
                "now; give the same settings or another --name")
    for name, value in inputs.items():
        if inputs_before.get(name, value) != value:
            raise common.UserError(f"--resume: the content of --{name} has changed since {folder} "
                                   "was begun; give what it was trained with, or another --name")


def in_use(folder):
    """Whether something stands in a run folder, but for a lock and what a kill left half-written.
    """
    found = folder.iterdir() if folder.is_dir() else ()
    return any(path.name != ".lock" and not path.match(".*.tmp") for path in found)


def check_free(folder, cfg):
    """Raise UserError where a new run would meet an old one, and --resume or --overwrite what is no
    run. Asked before any work, and again.
    """
    if folder.is_file():
        raise common.UserError(f"{folder} is a file; choose another --name")
    if not in_use(folder):
        return
    if cfg.resume:
        begun_with(folder)
    elif cfg.overwrite:
        check_ours(folder)
    else:
        raise common.UserError(f"{folder} exists; continue it with --resume, replace it with "
                               "--overwrite, or choose another --name")


def check_ours(folder):
    """Raise UserError unless a folder is that of a run."""
    mark = folder / "config.json"
    try:
        ours = {"config", "commit", "argv"} <= set(json.loads(mark.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        ours = False
    if not ours:
        raise common.UserError(f"{folder} is not a run folder (its config.json is not ours), so "
                               "--overwrite leaves it alone; choose another --name")


def clear_run(folder):
    """Remove what a run has written into its folder, and nothing else."""
    check_ours(folder)
    for pattern in RUN_FILES:  # config.json stays until it is replaced: it marks a run
        for path in folder.glob(pattern):
            path.unlink()


def append_metrics(folder, **row):
    """Add one line to metrics.jsonl; floats that are not finite become null."""
    with open(Path(folder) / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(common.plain(row)) + "\n")


def read_metrics(folder, up_to_step=None):
    """The rows of metrics.jsonl. `up_to_step` drops later rows and a torn last line for good.

    Raises UserError, naming file and line, for a row that no run has written.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:  # a kill in the middle of a write leaves half a line
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise common.UserError(f"{path}:{number} has no step, so the file is damaged; remove "
                                   "the line, or start again with --overwrite")
        rows.append(row)
    if up_to_step is not None:
        rows = [row for row in rows if row["step"] <= up_to_step]
        with common.atomic_path(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return rows


def save_state(path, **state):
    """Tensors, numbers, strings and containers of them -> a torch file."""
    buffer = io.BytesIO()  # torch's own writer hides that a disk is full
    torch.save(state, buffer)
    with common.atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def restore_state(path, device="cpu", **modules):
    """Load what `save_state` wrote into modules and optimisers, by name; returns the rest.

    Raises UserError where the file is damaged, or of another run.
    """
    again = "remove it and start again with --overwrite"
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch, zip and pickle each have their own
        raise common.UserError(f"{path}: damaged or not a checkpoint ({type(error).__name__}); "
                               f"{again}") from None
    try:
        for name, module in modules.items():
            module.load_state_dict(state.pop(name))
        state["step"] = int(state["step"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise common.UserError(f"{path}: the checkpoint of another run ({type(error).__name__}: "
                               f"{first_line[:120]}); {again}") from None
    return state
