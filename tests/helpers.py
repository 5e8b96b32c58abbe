"""Random checkpoints in the layout of the released file, of any size; no code of the project."""
import contextlib
import os
import random
import re
import subprocess
import sys
import types
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
SCRIPTS = []  # by the name they are run as
for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("experiments/*.py")]):
    if "\nif __name__" in path.read_text("utf-8"):
        SCRIPTS.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
PREFIX = "model.bert.encoder.layer"


def released_state(config, seed=0, rows=None, decoder=True):
    """Released key -> float32 tensor. Embedding rows: vocab_size padded to a multiple of 8.

    `config` is anything with the fields of HydraConfig. Random scales and biases everywhere: no
    tensor can be left out, doubled or swapped without changing the logits.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape, std=1.0, mean=0.0):
        return torch.randn(*shape, generator=draw).mul_(std).add_(mean)

    d, n_bc = config.d_model, 4 * config.ngroups * config.d_state
    d_inner = config.expand * d
    h = d_inner // config.headdim
    rows = rows or -(-config.vocab_size // 8) * 8
    state = {
        "model.bert.embeddings.word_embeddings.weight": normal(rows, d),
        "model.bert.embeddings.token_type_embeddings.weight": normal(2, d),
        "model.bert.embeddings.LayerNorm.weight": normal(d, std=0.2, mean=1.0),
        "model.bert.embeddings.LayerNorm.bias": normal(d, std=0.2)}
    for y in range(config.n_layer):
        mixer = f"{PREFIX}.{y}.layer.mixer"
        state |= {
            f"{mixer}.dt_bias": normal(h, mean=-1.0),
            f"{mixer}.A_log": normal(h, std=0.7),
            f"{mixer}.D": normal(h),
            f"{mixer}.in_proj.weight": normal(2 * d_inner + n_bc + 2 * h, d, std=d ** -0.5),
            f"{mixer}.conv1d.weight": normal(d_inner + n_bc, 1, config.d_conv, std=0.5),
            f"{mixer}.conv1d.bias": normal(d_inner + n_bc, std=0.2),
            f"{mixer}.fc_D.weight": normal(h, d_inner, std=d_inner ** -0.5),
            f"{mixer}.norm.weight": normal(d_inner, std=0.2, mean=1.0),
            f"{mixer}.out_proj.weight": normal(d, d_inner, std=d_inner ** -0.5),
            f"{PREFIX}.{y}.layer.norm.weight": normal(d, std=0.2, mean=1.0),
            f"{PREFIX}.{y}.layer.norm.bias": normal(d, std=0.2)}
    state |= {
        "model.cls.predictions.transform.dense.weight": normal(d, d, std=d ** -0.5),
        "model.cls.predictions.transform.dense.bias": normal(d, std=0.2),
        "model.cls.predictions.transform.LayerNorm.weight": normal(d, std=0.2, mean=1.0),
        "model.cls.predictions.transform.LayerNorm.bias": normal(d, std=0.2)}
    if decoder:  # tied: the same storage, as in the release
        word = state["model.bert.embeddings.word_embeddings.weight"]
        state["model.cls.predictions.decoder.weight"] = word
    state["model.cls.predictions.decoder.bias"] = normal(rows, std=0.2)
    return state


@contextlib.contextmanager
def absent_package(module_name, class_name):
    """A class that pickles by a global name which no installed package provides afterwards."""
    parts = module_name.split(".")
    names = [".".join(parts[:i + 1]) for i in range(len(parts))]
    assert not set(names) & set(sys.modules), f"{module_name} is installed"
    modules = {name: types.ModuleType(name) for name in names}
    cls = type(class_name, (), {"__module__": module_name})
    setattr(modules[module_name], class_name, cls)
    sys.modules.update(modules)
    try:
        yield cls
    finally:
        for name in names:
            del sys.modules[name]


def write_composer_layout(path, state):
    """Save `state` as composer does, among pickled objects of packages a user does not have."""
    with absent_package("composer.core.time", "Timestamp") as Timestamp:
        timestamp = Timestamp()
        timestamp.batch, timestamp.epoch = 70_000, Timestamp()
        huggingface = {"model": {"config": {"vocab_size": 30522}}}
        torch.save({
            "state": {"model": state, "timestamp": timestamp, "run_name": "hydra",
                      "integrations": {"huggingface": huggingface}},
            "rng": [{"python": random.Random(0).getstate(), "torch": torch.get_rng_state(),
                     "numpy": np.random.RandomState(0).get_state(),
                     "generator": np.random.default_rng(0)}]}, path)


def write_released_layout(path, config, seed=0, rows=None, decoder=True):
    """Write a random composer checkpoint of the released layout and return its state dict."""
    state = released_state(config, seed, rows, decoder)
    write_composer_layout(path, state)
    return state


def public_code_state(adapter, config, seed=0):
    """The state_dict of a checkpoint of the paper's public code: a random backbone of `config`
    around the tensors of an adapter under that code's names, every one as inner.* and module.*.
    """
    inner = dict(adapter)
    for key, tensor in released_state(config, seed, rows=config.vocab_size).items():
        name = key.removeprefix("model.").replace("bert.", "hydra.", 1)
        inner[f"inner.{name}"] = tensor.bfloat16()
    word = inner["inner.hydra.embeddings.word_embeddings.weight"]
    inner["inner.cls.predictions.decoder.weight"] = word
    again = {key.replace("inner.", "module.", 1): tensor for key, tensor in inner.items()}
    return inner | again


def write_lightning_layout(path, state, **more):
    """Save `state` as Lightning does: with optimiser states, callbacks, loops, and a configuration
    of a package that a user does not have.
    """
    with absent_package("omegaconf.dictconfig", "DictConfig") as DictConfig:
        config = DictConfig()
        config.content, config.parent = {"batch_size": 112, "cart_p": 0.45}, None
        moments = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}
        torch.save({
            "epoch": 2, "global_step": 14_400, "pytorch-lightning_version": "2.5.0",
            "state_dict": OrderedDict(state),
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {"ModelCheckpoint{'monitor': 'val_loss_epoch'}": {
                "best_model_path": Path("best_hydra_mark.ckpt"),
                "best_model_score": torch.tensor(2.5)}},
            "optimizer_states": [{"state": moments, "param_groups": [{"lr": 6e-5}]}],
            "lr_schedulers": [{"last_epoch": 14_400, "lr_lambdas": [None]}],
            "hparams_name": "cfg", "hyper_parameters": {"cfg": config}, **more}, path)


def child(command, folder, **environment):
    """Run a command in a process that shares no compile cache with another."""
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder), **environment})


def passed_interpreted(path, some, folder):
    """How many tests of a file pass under Triton's interpreter; none may fail. some: -k."""
    run = child(["-m", "pytest", "-p", "no:cacheprovider", "--durations=8", "-k", some, path],
                folder, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout[-6000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout
    print(run.stdout)  # the slowest of them
    return int(passed[1])
