"""A tiny random backbone, a small text, commands run in this process, and one run on two ranks.

`torchrun --nproc-per-node 2 tests/tiny.py FOLDER` is that run: `two_ranks` starts it once for all
tests, which compare what it leaves in FOLDER with the same work done here by one rank.
"""
import atexit
import contextlib
import functools
import io
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # torchrun starts this file as a script

import common  # noqa: E402
import evaluate  # noqa: E402
from experiments import pretrain  # noqa: E402
import train  # noqa: E402
from data import DiffusionDataset, Windows, load_corpus, write_shards  # noqa: E402
from checkpoint import load_backbone  # noqa: E402
from hydra_ssm import MODES, HydraBert, HydraConfig  # noqa: E402
from mark_adapters import make_adapter  # noqa: E402
from text import ByteTokenizer  # noqa: E402

CONFIG = HydraConfig(260, d_model=32, n_layer=2, d_state=4, headdim=16, chunk_size=32)


def write_inputs(folder):
    """A backbone, a text, its uneven shards and a text of one window; the same at every call."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    pretrain.save_backbone(folder / "backbone.safetensors", HydraBert(CONFIG))
    torch.set_rng_state(state)
    draw = random.Random(0)
    words = ["".join(draw.choices("aeinorst", k=draw.randint(2, 7))) for _ in range(50)]
    documents = [" ".join(draw.choices(words, k=30)) + "." for _ in range(80)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    (folder / "short.txt").write_text("of one window")
    write_shards(documents, folder / "shards", ByteTokenizer(), splits={"train": 1.0},
                 shard_tokens=1000, overwrite=True)


def arguments(folder, **settings):
    """Flags of a 6-step run on the inputs in `folder`; settings override them."""
    settings = {"weights": folder / "backbone.safetensors", "data": "text.txt",
                "device": "cpu", "seqlen": 24, "global_batch": 4, "steps": 6, "warmup": 2,
                "mlp_dim": 16, "eval_windows": 6, **settings}
    settings["data"] = folder / settings["data"]
    return [part for name, value in settings.items() if value is not False
            for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))]


def config(folder, **settings):
    """The same as a train.Config."""
    import tyro
    return tyro.cli(train.Config, args=arguments(folder, **settings))


def command(script, *argv):
    """`python script argv` in this process -> its status, out and err; global state is put back.

    Saves the seconds that another process spends importing torch; the script runs as __main__.
    """
    out, err, status = io.StringIO(), io.StringIO(), 0
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    precision, argv_before = torch.get_float32_matmul_precision(), sys.argv
    sys.argv = [script, *map(str, argv)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            path = f"{script.replace('.', '/')}.py" if script.startswith("experiments.") else script
            runpy.run_path(str(ROOT / path), run_name="__main__")
    except SystemExit as stop:
        status = stop.code or 0
    finally:
        sys.argv = argv_before
        torch.set_float32_matmul_precision(precision)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue())


@contextlib.contextmanager
def root_at(folder):
    """Results go to FOLDER/runs."""
    before, common.ROOT = common.ROOT, Path(folder)
    try:
        yield
    finally:
        common.ROOT = before


# ------------------------------------------------------------------- one computation, split or not

class Handmade(Dataset):
    """Random ids under given masks: `counts` masked tokens in the sequences of a step, in turn."""

    def __init__(self, counts, l=96):
        self.counts, self.l = counts, l

    def __len__(self):
        return 100 * len(self.counts)

    def __getitem__(self, k):
        draw, n = torch.Generator().manual_seed(k), self.counts[k % len(self.counts)]
        x0 = torch.randint(256, (self.l,), generator=draw)
        masked = torch.zeros(self.l, dtype=torch.bool)
        masked[torch.randperm(self.l, generator=draw)[:n]] = True
        return {"x0": x0, "x_t": x0.masked_fill(masked, ByteTokenizer.mask_id), "masked": masked,
                "t": torch.tensor(max(n / self.l, 1e-3))}


# Two ranks with two and three micro-batches, and readouts that get no gradient.
UNEVEN = {"global_batch": 5, "micro_batch": 1, "modulate": "dt"}

SPLITS = {  # name: (dtype, masked tokens of each sequence or None for the text, settings)
    "text": (torch.float64, None, {}),
    "text, uneven": (torch.float64, None, {"global_batch": 5}),
    "text, elbo": (torch.float64, None, {"weighting": "elbo"}),
    "text, only A": (torch.float64, None, {"modulate": "A"}),
    "text, float32": (torch.float32, None, {"max_steps": 1}),
    "one and ninety": (torch.float64, (1, 0, 60, 30), {}),
    "one and ninety, float32": (torch.float32, (1, 0, 60, 30), {"max_steps": 1}),
    "one rank has nothing": (torch.float64, (40, 3, 0, 0), {}),
    "nothing": (torch.float64, (0, 0, 0, 0), {}),
    "one window for all": (torch.float64, None, {"data": "short.txt"}),
    "uneven shards": (torch.float64, None, {"data": "shards", "global_batch": 5}),
    **{f"{mode}, checkpointing": (torch.float64, None, {
        "modulate": mode, "checkpointing": True, "global_batch": 5, "max_steps": 2})
       for mode in MODES[:-1]},
    **{kernel: (torch.float64, None, {"kernel": kernel, "global_batch": 5, "max_steps": 2})
       for kernel in ("hypernet", "dct", "inject", "adaln", "lora", "lora+chebyshev",
                      "static+chebyshev")},
}


def awake(adapter, seed=1):
    """Move every parameter off its start, where half of the gradients are zero."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter.parameters():
            p += 0.1 * torch.randn(p.shape, generator=draw).to(p)
    return adapter


def make_denoiser(folder, dtype=torch.float32, kernel="chebyshev", modulate="full"):
    backbone = load_backbone(folder / "backbone.safetensors", dtype)
    torch.manual_seed(0)
    adapter = make_adapter(kernel, backbone.config, mlp_dim=16).to(dtype)
    return train.Denoiser(backbone, awake(adapter), modulate)


def run_split(folder, name, micro_batch, rank=0, world=1, stop_asked=lambda: False):
    """Four steps of `train_steps` -> what went in, the first gradient, the losses, the outcome."""
    dtype, counts, settings = SPLITS[name]
    cfg = config(folder, micro_batch=micro_batch, **{"max_steps": 4, **settings})
    tokenizer = ByteTokenizer()
    denoiser = make_denoiser(folder, dtype, cfg.kernel, cfg.modulate)
    denoiser.backbone.checkpointing = cfg.checkpointing
    dataset = Handmade(counts) if counts else DiffusionDataset(
        Windows(load_corpus(cfg.data, tokenizer), cfg.seqlen, tokenizer.pad_id), tokenizer,
        cfg.global_batch, cfg.steps, cfg.seed)
    loader = DataLoader(dataset, batch_sampler=train.MicroBatches(cfg, 0, rank, world))
    optimizer = torch.optim.AdamW(denoiser.adapter.parameters(), weight_decay=cfg.weight_decay)
    seen, numbers, gradient = [], [], {}
    denoiser.register_forward_pre_hook(lambda module, args: seen.append(args[:4]))

    def after_step(step, row, stop):
        numbers.append(row)
        if step == 1:
            gradient.update({k: p.grad.clone() for k, p in denoiser.adapter.named_parameters()
                             if p.grad is not None})

    module = denoiser if world == 1 else torch.nn.parallel.DistributedDataParallel(
        denoiser, find_unused_parameters=cfg.modulate != "full")
    done = train.train_steps(cfg, module, optimizer, loader, tokenizer, 0, stop_asked, after_step)
    return {"seen": seen, "gradient": gradient, "numbers": numbers, "done": done,
            "adapter": {k: p.detach().clone() for k, p in denoiser.adapter.named_parameters()}}


def score(folder, **how):
    """(losses of every row, metrics) of an awake adapter on the held-out text."""
    tokenizer, denoiser = ByteTokenizer(), make_denoiser(folder)
    draws = evaluate.make_draws(load_corpus(folder / "text.txt", tokenizer), tokenizer, 40, 9)
    losses = evaluate.sequence_losses(denoiser.backbone, denoiser.adapter, draws, **how)
    return losses, evaluate.metrics(losses, draws)


# ------------------------------------------------------------------------------------- on two ranks

@functools.cache
def two_ranks():
    """Run this file under torchrun, once -> (folder, finished process)."""
    folder = Path(tempfile.mkdtemp(prefix="two_ranks_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_inputs(folder)
    with root_at(folder):  # by one rank: a whole run, and one stopped early for two to resume
        for settings in ({"name": "whole"}, {"name": "resumed", "max_steps": 3}):
            run = command("train.py", *arguments(folder, **UNEVEN, **settings))
            assert run.status == 0, run.err
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--master-port", str(20_000 + os.getpid() % 20_000), __file__, folder], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        out, err = torchrun.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        torchrun.terminate()  # it ends its ranks, which a kill would leave behind
        out, err = torchrun.communicate()
        err += "\ntimed out"
    return folder, SimpleNamespace(returncode=torchrun.returncode, out=out, err=err)


def main(folder):
    torch.set_num_threads(1)
    common.ROOT = folder
    # The whole command. A second process group in one process can hang, so the first is kept.
    destroy, train.dist.destroy_process_group = train.dist.destroy_process_group, lambda: None
    train.main(config(folder, name="resumed", resume=True, **UNEVEN))
    rank, world = common.rank_and_world()
    result = {name: run_split(folder, name, 2, rank, world) for name in SPLITS}
    asked = []  # one rank alone is asked to stop, before its second step
    result["stop"] = run_split(folder, "text", 2, rank, world,
                               lambda: asked.append(0) or rank == 1 and len(asked) == 2)
    result["score"] = score(folder)
    torch.save(result, folder / f"rank{rank}.pt")
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
