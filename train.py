"""Training MaRK adapters on a frozen Hydra backbone by masked diffusion, under DDP (3.2, 3.3, C.1).

Run:      torchrun train.py --kernel chebyshev    (2 minutes; bare `python train.py` is the same)
          torchrun --nproc-per-node 2 train.py --preset paper --data shards/      the paper's run
          torchrun --max-restarts 3 train.py --resume      goes on after a crash of a rank by itself
Last line: "chebyshev: ELBO N -> N nats/token (gain ...), filled right ..., a wrong t costs ..."

    t ~ U(0, 1)  ->  x_t (eq. 12)  ->  frozen backbone under Modulation(t)  ->  ce of masked tokens
    ->  sum of w ce (eq. 22, 23) over the global batch's count  ->  one AdamW step of the adapter

Symbols:  ce             -log p(x_0,i | x_t, t), nats, of the masked tokens
          w              CART weight (eq. 22), or 1/t with --weighting elbo (eq. 13)
          global_batch   sequences per optimiser step, shared out over ranks, then micro-batches
          gap            what a wrong t costs in nats per token, see evaluate.py
Differs from the paper: its batch of 112 is read as global. Noise depends on (seed, step, slot)
          alone: any split into ranks and micro-batches trains on the same masks, and a resumed run
          repeats the uninterrupted one bit for bit.
"""
import contextlib
import dataclasses
import importlib
import math
import os
import shlex
import time
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import common
from cart import cart_loss, cart_weights, elbo_weights, masked_cross_entropy
from checkpoint import (append_metrics, check_free, check_vocabulary, load_backbone, open_run,
                        read_metrics, restore_state, run_folder, run_plugin, save_adapter,
                        save_state, unlock)
from data import (DiffusionDataset, Windows, held_out_split, is_shard_folder, load_corpus,
                  maskable_tokens)
from evaluate import (compare, comparison_table, draw_gain_by_t, format_table, last_line,
                      make_draws, metrics, reference_rows, score_adapter, sequence_losses)
from hydra_ssm import MODES
from mark_adapters import (KERNELS, AdapterConfig, adapter_size, make_adapter,
                           modulation_spread)
from markov import draw_memory, memory_ratios
from sample import show_infilling
from text import find_files, make_tokenizer


@dataclasses.dataclass(frozen=True)
class Config(AdapterConfig):
    """The defaults are the demo, --preset paper is Tables 6 to 8; other flags override either.

    From Python, `common.from_preset(Config, PRESETS, "paper", ...)` makes a preset's settings; the
    field `preset` alone is a label.
    """
    MAY_BE_ZERO: ClassVar = ("warmup", "eval_every", "t_jitter")
    # hypernet, chebyshev, dct (geometries), inject, adaln, lora, static (baselines), a geometry on
    # top of one (lora+hypernet, lora+chebyshev, lora+dct, static+hypernet, static+chebyshev,
    # static+dct), or what --plugin adds
    kernel: str = "chebyshev"
    plugin: str = ""                # Python file of your own, run first; it adds geometries
    # shipped: the adapters in assets/; published: the paper's run with all that its code departs in
    preset: Literal["demo", "shipped", "paper", "published"] = "demo"
    name: str = ""                  # run folder under runs/; default <preset>_<kernel>
    weights: str = "small"          # backbone: "small", "goombalab/hydra" or a path
    sliced: bool = False            # NOT it, but what the paper's code makes of it (published.py)
    vocab: str = "bytes"            # "bytes", "bert-base-uncased" or the path of a vocab.txt
    data: tuple[str, ...] = ("embedded",)  # text files, folders of them, or shards
    valid: tuple[str, ...] = ()     # held-out text; default: 5 % of --data, on which none trains
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seqlen: int = 128               # tokens per sequence
    global_batch: int = 16          # sequences per optimiser step, over all ranks
    micro_batch: int = 16           # sequences per forward pass of one rank
    steps: int = 200                # length of the schedule
    max_steps: int = 0              # stop here, within the schedule; 0: at its end
    warmup: int = 20                # steps
    lr: float = 4e-3                # peak; then cosine down to min_lr_ratio of it
    min_lr_ratio: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 1.0               # gradient norm
    weighting: Literal["cart", "elbo"] = "cart"  # eq. 22, or 1/t (eq. 13)
    cart_p: float = 0.45
    stratified: bool = False        # one t in each of global_batch equal intervals
    t_hole: tuple[float, float] = (0.0, 0.0)  # an interval of t that is left out of training
    t_per_batch: bool = False       # one t for all sequences of a step
    t_jitter: float = 0.0           # noise in the masking rate, of which the adapter is not told
    pads_as_context: bool = False   # CART counts [PAD] as visible
    warmup_from_zero: bool = False  # the first step has rate 0, and so does nothing
    modulate: Literal[MODES[:-1]] = "full"  # what the adapter may reach: the columns of Table 2
    mlp_dim: int = 64               # width of the adapter's MLP; 256 in the paper
    bf16: bool = False              # backbone in bfloat16; A_log, dt_bias, D and adapter in float32
    checkpointing: bool = False     # recompute the layers in the backward pass
    workers: int = 0                # data loading processes per rank
    eval_every: int = 40            # steps between evaluations on few windows; 0: none
    eval_windows: int = 256         # held-out windows that the end is judged by
    save_every: int = 100           # steps between checkpoints
    tensorboard: bool = False       # curves for TensorBoard as well, in the run folder
    resume: bool = False            # continue the run folder, or start it where there is none
    overwrite: bool = False         # replace it
    seed: int = 42


PAPER = dict(
    weights="goombalab/hydra", vocab="bert-base-uncased", data=(), device="cuda", seqlen=4096,
    global_batch=112, micro_batch=16, steps=14_400, warmup=720, lr=6e-4, mlp_dim=256, bf16=True,
    workers=8, eval_every=720, eval_windows=128, save_every=240)  # for 80 GB; 8 fit 40 GB
PUBLISHED = dict(  # where the paper's public code departs from its text (github.com/ibitec7/mark)
    kernel="hypernet",        # of whose run the schedule is; for chebyshev and dct it has
                              # --global-batch 32 --warmup 2000 --steps 40000
    sliced=True,              # 12 heads of 128
    init="published",         # random heads, every map N(0, 0.02): no identity at the start
    mlp_norm=False,           # so the spread of h over t is 7e-6 at the start
    beta_A=0.5 / (1 + math.exp(-0.2)),  # 0.275
    bounded_z=False,
    reversed_t=True,          # the adapter is fed 1 - t
    rounded_angle=True,       # by bf16-true
    t_per_batch=True,
    t_jitter=0.05,
    pads_as_context=True,
    warmup_from_zero=True)
PRESETS = {
    "demo": {},
    "shipped": dict(seqlen=256, steps=600, lr=2e-3, eval_every=0, eval_windows=128),
    "paper": PAPER,
    "published": PAPER | PUBLISHED,
}
FREE = ("max_steps", "micro_batch", "workers", "device", "resume", "overwrite", "save_every",
        "checkpointing", "plugin", "tensorboard")  # what a resumed run may change


def adapter_settings(cfg):
    """Those settings of a Config that make_adapter takes."""
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(AdapterConfig)}


# ---- one step ------------------------------------------------------------------------------------


class Denoiser(torch.nn.Module):
    """Frozen backbone and adapter as one module, so that DDP sees one forward pass."""

    def __init__(self, backbone, adapter, modulate="full"):
        super().__init__()
        self.backbone = backbone
        self.adapter = adapter
        self.modulate = modulate

    def forward(self, x_t, t, x0, masked, mask):
        """Cross-entropy of the masked tokens, (m,) nats; no other token reaches the vocabulary."""
        modulation = self.adapter(t).keep(self.modulate)
        hidden = self.backbone.hidden(x_t, modulation, mask)                   # b l d
        return masked_cross_entropy(hidden[masked], x0[masked], self.backbone.head)


class MicroBatches:
    """Batch sampler: the global positions of this rank, step by step from `start`."""

    def __init__(self, cfg, start, rank, world):
        first = rank * cfg.global_batch // world
        last = (rank + 1) * cfg.global_batch // world
        self.slots = torch.arange(first, last).split(cfg.micro_batch)
        self.steps = range(start, cfg.steps)
        self.global_batch = cfg.global_batch

    def __iter__(self):
        for step in self.steps:
            for slots in self.slots:
                yield (step * self.global_batch + slots).tolist()

    def __len__(self):
        return len(self.steps) * len(self.slots)


def weigh(cfg, item, tokenizer):
    """(w (b, l), count), for a loss sum w ce / count: masked tokens in CART, maskable in eq. 13."""
    if cfg.weighting == "elbo":
        w = elbo_weights(item["masked"], item["t"])
        return w, maskable_tokens(item["x0"], tokenizer).sum()
    visible = None if cfg.pads_as_context else item["x0"] != tokenizer.pad_id
    w = cart_weights(item["masked"], cfg.cart_p, visible)
    return w, item["masked"].sum()


def learning_rate(step, steps, warmup, peak, min_ratio=0.1, from_zero=False):
    """Linear warm-up over `warmup` steps, then cosine to min_ratio * peak (Table 6)."""
    if step < warmup:
        return peak * (step + (0 if from_zero else 1)) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return peak * (min_ratio + (1 - min_ratio) * cosine)


def check_finite(step, loss, norm, advice):
    """Raise UserError, which names the step, unless the loss and the gradient norm are finite."""
    if not (torch.isfinite(loss) and torch.isfinite(norm)):
        raise common.UserError(f"step {step}: the loss is {loss.item()}, the gradient norm "
                               f"{norm.item()}; {advice}")


def backward(denoiser, items, weights, count, tokenizer):
    """Add the gradients of eq. 23 over this rank's micro-batches; returns its part of the loss.

    count: what all ranks together divide by. DDP averages gradients over ranks, hence the factor.
    """
    world = common.rank_and_world()[1]
    total = torch.zeros((), dtype=torch.float64, device=items[0]["t"].device)
    for i, (item, w) in enumerate(zip(items, weights)):
        last = i + 1 == len(items)
        with contextlib.nullcontext() if last or world == 1 else denoiser.no_sync():
            real = item["x0"] != tokenizer.pad_id if item["padded"] else None
            ce = denoiser(item["x_t"], item["t"], item["x0"], item["masked"], real)
            loss = cart_loss(ce, item["masked"], w, "sum") / count             # eq. 23
            (loss * world).backward()
        total += loss.detach()
    return total


def sum_over_ranks(*values, device):
    """The sums of numbers over all ranks, float64 (n,)."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if common.rank_and_world()[1] > 1:
        dist.all_reduce(total)
    return total


def train_steps(cfg, denoiser, optimizer, loader, tokenizer, start, stop_asked, after_step,
                weigh_batch=weigh):
    """The training loop. Returns the number of steps done.

    stop_asked() -> bool is asked on every rank before each step; any rank's yes stops all after it.
    after_step(step, numbers, stop) logs, evaluates and saves. weigh_batch: `weigh`, or what returns
    the like for another loss. Raises UserError, before the
    optimiser moves, where the loss or a gradient is not finite.
    """
    device = next(denoiser.parameters()).device
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    last = cfg.max_steps or cfg.steps
    with common.loading(loader) as micro_batches:
        for step in range(start, last):
            items, weights, counts = [], [], []
            for _ in loader.batch_sampler.slots:
                item = next(micro_batches)
                padded = (item["x0"] == tokenizer.pad_id).any().item()  # here a GPU need not answer
                item = {name: v.to(device, non_blocking=True) for name, v in item.items()}
                item["padded"] = padded
                w, n = weigh_batch(cfg, item, tokenizer)
                items.append(item)
                weights.append(w)
                counts.append(n)
            # One sum over ranks: the count that gradients are divided by, and whether to stop.
            shared = sum_over_ranks(float(sum(counts)), float(stop_asked()), device=device)
            count = max(1.0, shared[0].item())
            stop = shared[1].item() > 0

            lr = learning_rate(step, cfg.steps, cfg.warmup, cfg.lr, cfg.min_lr_ratio,
                               cfg.warmup_from_zero)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad(set_to_none=True)
            loss = backward(denoiser, items, weights, count, tokenizer)
            loss = sum_over_ranks(loss.item(), device=device)[0]
            norm = torch.nn.utils.clip_grad_norm_(trained, cfg.clip)
            check_finite(step + 1, loss, norm, "the last checkpoint is intact; start again with a "
                         "lower --lr and --overwrite, or under another --name")
            optimizer.step()
            after_step(step + 1, {"loss": loss.item(), "gradient_norm": norm.item(), "lr": lr,
                                  "masked": int(count)}, stop)
            if stop:
                return step + 1
    return max(start, last)


# ---- a run ---------------------------------------------------------------------------------------


class Journal:
    """What happens around the steps of one run: log lines, metrics.jsonl, evaluations, last.pt."""

    def __init__(self, cfg, folder, denoiser, optimizer, draws, start, rows):
        self.cfg = cfg
        self.folder = folder
        self.denoiser = denoiser
        self.optimizer = optimizer
        self.draws = draws
        self.rows = rows
        self.main_rank = common.rank_and_world()[0] == 0
        self.board = None
        if cfg.tensorboard and self.main_rank:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(folder, purge_step=start + 1)
        self.bar = common.progress(total=cfg.steps, desc=cfg.kernel, initial=start)
        self.since(start)

    def since(self, step):
        """From here on the rate in tokens per second is counted."""
        self.timed = time.time()
        self.timed_step = step

    def record(self, **row):
        if self.main_rank:
            self.rows.append(row)
            append_metrics(self.folder, **row)
        if self.board:
            for name, value in {**row, **row.get("eval", {})}.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, row["step"])
            self.board.flush()

    def evaluate(self, step):
        """Score the adapter on a few held-out windows: a point of the curve."""
        cfg = self.cfg
        adapter = self.denoiser.adapter
        scores = score_adapter(self.denoiser.backbone, adapter, self.draws, cfg.modulate, cfg.seed)
        spread = modulation_spread(adapter)
        known = self.rows and self.rows[-1]["step"] == step and "eval" in self.rows[-1]
        if not known:  # from before a kill
            self.record(step=step, eval=scores, spread=spread)
        gap = common.Interval(scores["gap"], scores["gap_error"], self.draws.n)
        common.log(f"step {step}/{cfg.steps}  held out: CART {scores['cart']:.4f}, ELBO "
                   f"{scores['elbo']:.4f}; a wrong t costs {gap.show('+')}")
        if step > cfg.warmup and spread and spread["mean"] < 1e-3:
            common.log(f"step {step}: the adapter has stopped using t (its modulation varies by "
                       f"{spread['mean']:.4f} over t); try a lower --lr")
        self.since(step)

    def after_step(self, step, numbers, stop):
        cfg = self.cfg
        last = step == (cfg.max_steps or cfg.steps)
        self.bar.update()
        self.bar.set_postfix(loss=f"{numbers['loss']:.3f}")
        seconds = (time.time() - self.timed) / (step - self.timed_step)  # of one step
        rate = cfg.global_batch * cfg.seqlen / seconds
        if self.bar.disable and (step in (5, 20) or step % 50 == 0 or last):
            left = seconds * (cfg.steps - step)
            common.log(f"step {step}/{cfg.steps}  loss {numbers['loss']:.4f}  {rate:,.0f} tokens/s"
                       f"  about {left:,.0f} s left")
        if step % 10 == 0 or last:
            self.record(step=step, tokens_per_second=rate, **numbers)
            self.since(step)
        if cfg.eval_every and (step % cfg.eval_every == 0 or last):
            self.evaluate(step)
        if self.main_rank and (step % cfg.save_every == 0 or last or stop):
            save_state(self.folder / "last.pt", step=step, optimizer=self.optimizer.state_dict(),
                       adapter=self.denoiser.adapter.state_dict())


def check(cfg, world):
    """Refuse, before any work, what could only fail later."""
    def need(flag, got, what):
        raise common.UserError(f"--{flag}: got {got}, need {what}")

    if cfg.kernel not in KERNELS or cfg.kernel == "none":
        known = [kernel for kernel in KERNELS if kernel != "none"]
        need("kernel", cfg.kernel, f"one of {', '.join(known)}, or a --plugin that adds it")
    if cfg.global_batch < world:
        need("global-batch", cfg.global_batch, f"at least one sequence for each of {world} ranks")
    if not 0 <= cfg.t_hole[0] <= cfg.t_hole[1] < 1:
        need("t-hole", cfg.t_hole, "two times, 0 <= a <= b < 1")
    if cfg.t_per_batch and (cfg.stratified or cfg.t_hole != (0.0, 0.0)):
        need("t-per-batch", "--stratified or --t-hole too", "it alone")
    if cfg.t_jitter and cfg.weighting == "elbo":
        need("t-jitter", "--weighting elbo", "cart: 1/t is right for the masking rate alone")
    if not all(0 <= beta < 1 for beta in cfg.betas):
        need("betas", cfg.betas, "two numbers, 0 <= beta < 1")
    if cfg.max_steps > cfg.steps:
        need("max-steps", cfg.max_steps, f"at most --steps, {cfg.steps}")
    if cfg.tensorboard:
        try:
            importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            need("tensorboard", "it", "the package tensorboard: pip install tensorboard")
    common.pick_device(cfg.device)
    check_free(run_folder(cfg.name), cfg)
    if not cfg.data:
        need("data", "nothing", "text files or shards; `python -m experiments.mixture` builds the "
             "paper's")
    for path in (*cfg.data, *cfg.valid):
        if not is_shard_folder(path):
            find_files(path)


def begin(cfg, folder, inputs, env, denoiser, optimizer, device):
    """Open the run folder on rank 0 and take up its checkpoint on all: (step, rows of metrics)."""
    rank, world = common.rank_and_world()
    refusal, goes_on = None, False
    if rank == 0:
        try:
            goes_on = open_run(folder, cfg, inputs, env, FREE)
        except common.UserError as error:
            refusal = str(error)
    if world > 1:  # or the other ranks would wait for a rank that has left
        verdict = [refusal, goes_on]
        dist.broadcast_object_list(verdict)
        refusal, goes_on = verdict
    if refusal:
        raise common.UserError(refusal)
    start = 0
    if goes_on:
        state = restore_state(folder / "last.pt", device, adapter=denoiser.adapter,
                              optimizer=optimizer)
        start = state["step"]
        common.log(f"resumed at step {start}")
    rows = []
    if rank == 0:
        rows = read_metrics(folder, up_to_step=start)
    return start, rows


def make_denoiser(cfg, device, backbone=None):
    """The frozen backbone of cfg.weights, or the one given, and a new adapter for it."""
    dtype = torch.bfloat16 if cfg.bf16 else torch.float32
    backbone = backbone or load_backbone(cfg.weights, dtype, device, sliced=cfg.sliced)
    backbone.checkpointing = cfg.checkpointing
    torch.manual_seed(cfg.seed)  # the adapter's first weights; nothing else draws from this stream
    adapter = make_adapter(cfg.kernel, backbone.config, **adapter_settings(cfg)).to(device)
    return Denoiser(backbone, adapter, cfg.modulate)


def make_optimizer(cfg, parameters):
    """AdamW of Table 6; `train_steps` sets its rate."""
    return torch.optim.AdamW(parameters, lr=cfg.lr, betas=cfg.betas,
                             weight_decay=cfg.weight_decay, fused=True)


def make_dataset(cfg, windows, tokenizer):
    """Windows under noise, as the settings say."""
    return DiffusionDataset(windows, tokenizer, cfg.global_batch, cfg.steps, cfg.seed,
                            stratified=cfg.stratified, t_hole=cfg.t_hole,
                            t_per_batch=cfg.t_per_batch, t_jitter=cfg.t_jitter)


def make_loader(cfg, dataset, start, device):
    """Micro-batches of this rank, from step `start` on."""
    rank, world = common.rank_and_world()
    return DataLoader(dataset, batch_sampler=MicroBatches(cfg, start, rank, world),
                      num_workers=cfg.workers, pin_memory=device.type == "cuda",
                      worker_init_fn=common.begin_worker)


def train_until_stopped(cfg, denoiser, optimizer, loader, tokenizer, start, journal, parent):
    """`train_steps` under DDP, ended after its step by a signal to any rank. Returns the steps.

    parent: the process that has started this one.
    """
    world = common.rank_and_world()[1]
    module = denoiser
    if world > 1:  # an ablation leaves some readouts without a gradient
        module = DistributedDataParallel(denoiser, forward_sync_buffers=False,
                                         find_unused_parameters=cfg.modulate != "full")
    with common.stop_signals() as caught:
        def stop_asked():  # a rank that outlives torchrun leaves too, before the next run
            orphaned = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent
            return bool(caught) or orphaned

        return train_steps(cfg, module, optimizer, loader, tokenizer, start, stop_asked,
                           journal.after_step)


def run(cfg, device, backbone=None):
    """Everything between the process group's start and its end."""
    parent = os.getppid()
    tokenizer = make_tokenizer(cfg.vocab)
    denoiser = make_denoiser(cfg, device, backbone)
    check_vocabulary(denoiser.backbone, tokenizer)
    env = common.banner("train.py", cfg, device, denoiser)
    train = load_corpus(cfg.data, tokenizer, "train")
    scored = cfg.valid or cfg.data
    valid = load_corpus(scored, tokenizer, held_out_split(scored, cfg.data))
    draws = make_draws(valid, tokenizer, cfg.seqlen, cfg.eval_windows, cfg.seed, cfg.cart_p)
    few = make_draws(valid, tokenizer, cfg.seqlen, min(64, cfg.eval_windows), cfg.seed, cfg.cart_p)
    common.log(f"{adapter_size(denoiser.adapter):,} adapter parameters beside c_t's MLP; "
               f"{train.n_bytes:,} bytes to train on; scored on {draws.n} held-out windows of "
               f"{cfg.seqlen}")

    optimizer = make_optimizer(cfg, denoiser.adapter.parameters())
    folder = run_folder(cfg.name)
    inputs = {"weights": denoiser.backbone.config.weights, "data": train.fingerprint,
              "valid": valid.fingerprint}
    spread = {"start": modulation_spread(denoiser.adapter)}
    start, rows = begin(cfg, folder, inputs, env, denoiser, optimizer, device)
    frozen = sequence_losses(denoiser.backbone, None, draws)
    references = reference_rows(denoiser.backbone, draws, train.ids, tokenizer, frozen)
    common.log(f"\nbefore, in nats:\n\n{format_table(references)}\n")

    journal = Journal(cfg, folder, denoiser, optimizer, few, start, rows)
    windows = Windows(train, cfg.seqlen, tokenizer.pad_id)
    loader = make_loader(cfg, make_dataset(cfg, windows, tokenizer), start, device)
    done = train_until_stopped(cfg, denoiser, optimizer, loader, tokenizer, start, journal, parent)
    journal.bar.close()
    if done < (cfg.max_steps or cfg.steps):  # agreed by all ranks; a late signal may not be
        common.log(f"stopped at step {done} of {cfg.steps} and saved; continue with --resume")
        return {"step": done}

    adapter = denoiser.adapter
    if journal.main_rank:
        save_adapter(folder / "adapter.safetensors", adapter, step=done, weights=cfg.weights,
                     sliced=cfg.sliced, vocab=tokenizer.fingerprint, modulate=cfg.modulate)
    found = compare(denoiser.backbone, adapter, draws, cfg.modulate, cfg.seed, frozen)
    spread["end"] = modulation_spread(adapter)
    result = {"step": done, "tokens": done * cfg.global_batch * cfg.seqlen,
              "seconds": time.time() - env["began"], "spread": spread,
              "rows": {**references, **rows_of_adapter(cfg.kernel, found)}, "comparison": found}
    if journal.main_rank:
        common.save_result(folder / "result.json", result, cfg, env)
    report(cfg, folder, result, denoiser, Windows(valid, cfg.seqlen, tokenizer.pad_id), tokenizer)
    at_start = metrics(sequence_losses(denoiser.backbone, None, few), few)  # all ranks share it
    if journal.main_rank:
        memory = memory_ratios(denoiser.backbone, adapter, few, cfg.modulate)
        draw_run(folder / f"training_{folder.name}.png", cfg, rows, at_start, found, memory)
    return result


def rows_of_adapter(kernel, found):
    """The rows of an adapter and of its control, for the table and the result file."""
    return {kernel: found["adapter"], f"{kernel}, shuffled t": found["wrong_t"]}


def report(cfg, folder, result, denoiser, held_out, tokenizer):
    """Print what the run has changed: the tables, one passage filled, and a last line."""
    found = result["comparison"]
    common.log(f"\nafter {result['step']} steps, in nats:\n\n{format_table(result['rows'])}\n")
    common.log(comparison_table(cfg.kernel, found))
    common.log("\none passage, as an illustration:")
    passage = torch.from_numpy(held_out[len(held_out) // 2])
    show_infilling(denoiser.backbone, {"frozen": None, cfg.kernel: denoiser.adapter}, passage,
                   tokenizer, cfg.seed)
    path = os.path.relpath(folder)
    common.log(f"\nfigure: {path}/training_{folder.name}.png; next: {next_command(cfg, path)}")
    common.log(last_line(cfg.kernel, found))


def next_command(cfg, path):
    """What scores this adapter on this text, over several seeds."""
    command = ["python", "evaluate.py", "--adapter", path]
    if cfg.plugin:
        command += ["--plugin", cfg.plugin]
    if cfg.weights != "small":
        command += ["--weights", cfg.weights, "--vocab", cfg.vocab]
    if cfg.sliced:
        command += ["--sliced"]
    if cfg.seqlen != Config.seqlen:
        command += ["--seqlen", str(cfg.seqlen)]
    if cfg.data != ("embedded",):
        command += ["--train", *cfg.data]
    scored = cfg.valid or cfg.data
    if scored != ("embedded",):
        command += ["--data", f"text={','.join(scored)}"]
    return shlex.join(command)


# ---- the picture of a run ------------------------------------------------------------------------


def draw_run(path, cfg, rows, at_start, found, memory):
    """What a run has changed: the held-out loss over training, the gain by t with the right and a
    wrong t, and the memory of the operators at three t over the frozen one's.
    """
    figure = common.new_figure(12.5, 3.5)
    curve, gain, remembered = figure.subplots(1, 3)
    draw_curve(curve, cfg, rows, at_start)
    draw_gain_by_t(gain, found)
    draw_memory(remembered, memory)
    common.save_figure(figure, path)


def draw_curve(ax, cfg, rows, at_start):
    """The held-out loss from the frozen backbone on. (The loss of single batches, in metrics.jsonl,
    varies by ten times as much, as t does.)
    """
    evals = [row for row in rows if "eval" in row]
    unit = {"cart": "CART masked_mean (nats)", "elbo": "ELBO (nats per token)"}[cfg.weighting]
    ax.plot([0, *(row["step"] for row in evals)],
            [at_start[cfg.weighting], *(row["eval"][cfg.weighting] for row in evals)],
            color=common.COLORS[0], marker=common.MARKERS[0], ms=4, label="held out")
    ax.axhline(at_start[cfg.weighting], color="0.3", ls="--", lw=1, label="frozen")
    ax.set(xlabel="step", ylabel=unit, title=f"{cfg.kernel}: held-out loss")
    ax.legend(frameon=False, fontsize=8)


def main(cfg, backbone=None):
    """Train and score an adapter; backbone: a HydraBert in place of the one of cfg.weights."""
    run_plugin(cfg.plugin)
    cfg = dataclasses.replace(cfg, name=cfg.name or f"{cfg.preset}_{cfg.kernel}")
    check(cfg, common.world_size())
    kind = common.pick_device(cfg.device)
    cfg = dataclasses.replace(cfg, device=kind)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # Table 6
    with common.process_group(device):
        try:
            return run(cfg, device, backbone)
        finally:
            unlock(run_folder(cfg.name))


if __name__ == "__main__":
    common.run_cli(Config, main, PRESETS)
