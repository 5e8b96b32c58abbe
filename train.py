"""Training MaRK adapters on a frozen Hydra backbone by masked diffusion, under DDP (3.2, 3.3, C.1).

Run:      torchrun train.py --kernel chebyshev     (2 minutes; bare `python train.py` is the same)
Last line: "chebyshev: ELBO N.NN -> N.NN nats/byte ...; next: ..."
          torchrun --nproc-per-node 2 train.py --preset paper --data shards/     the paper's run

    t ~ U(0, 1) -> x_t (eq. 12) -> Modulation(t) of the frozen backbone -> w_i ce_i at the masked tokens
    (eq. 22, 23) -> one AdamW step of the adapter, the gradient divided by the global batch's count.

Symbols:  ce   -log p(x_0,i | x_t, t) in nats    w   CART weight (eq. 22) or 1/t (eq. 13)
          global_batch   sequences per optimiser step, shared out over ranks, then over micro-batches
Differs from the paper: a step of 112 sequences is read as global. Noise depends on (seed, step, slot) alone,
          so that any split into ranks and micro-batches trains on the same masks, and a resumed run
          repeats the uninterrupted one bit for bit.
"""
import contextlib
import dataclasses
import json
import math
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import common
from cart import cart_weights, elbo_weights, masked_cross_entropy
from checkpoint import append_metrics, load_state, open_run, read_metrics, save_adapter, save_state
from data import DiffusionDataset, Windows, load_corpus, make_tokenizer, maskable_tokens
from evaluate import format_table, infill, make_draws, reference_rows, score_adapter
from hydra_ssm import MODES, load_backbone
from mark_adapters import KERNELS, adapter_size, make_adapter, modulation_spread


@dataclasses.dataclass(frozen=True)
class Config:
    """The defaults are the demo; --preset paper is Tables 6 to 8. Any setting overrides the preset."""
    kernel: str = "chebyshev"             # hypernet chebyshev dct, or a baseline: inject adaln lora
    preset: str = "demo"                  # "demo" or "paper"
    name: str = ""                        # run folder under runs/; default <preset>_<kernel>
    weights: str = "small"                # backbone: "small", "goombalab/hydra" or a path
    vocab: str = "bytes"                  # "bytes", "bert-base-uncased" or the path of a vocab.txt
    data: tuple[str, ...] = ("embedded",)  # text files, folders or shards; 5 % of text is held out
    device: str = "auto"                  # "auto", "cpu", "cuda"
    seqlen: int = 128                     # tokens per sequence
    global_batch: int = 16                # sequences per optimiser step, over all ranks
    micro_batch: int = 16                 # sequences per forward pass of one rank
    steps: int = 350                      # length of the schedule
    max_steps: int = 0                    # stop after this many, within the schedule; 0: never
    warmup: int = 20
    lr: float = 4e-3                      # peak, then cosine to min_lr_ratio of it
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0                     # gradient norm
    weighting: str = "cart"               # "cart" (eq. 22), or "elbo" (1/t, eq. 13)
    cart_p: float = 0.45
    stratified: bool = False              # one t in each of global_batch equal intervals
    modulate: str = "full"                # parameters the adapter may reach: the columns of Table 2
    n_shifts: int | None = None           # see mark_adapters.AdapterConfig, also for the next five
    mlp_dim: int = 64
    init: str = "keep"
    mlp_norm: bool = True
    bounded_shifts: bool = True
    lora_rank: int | None = None
    bf16: bool = False                    # backbone in bfloat16; A_log, dt_bias, D, adapters in float32
    checkpointing: bool = False           # recompute layers in the backward pass
    workers: int = 0                      # data loading processes per rank
    eval_every: int = 0                   # steps between evaluations; 0: before and after only
    eval_windows: int = 64                # held-out windows
    save_every: int = 100                 # steps between checkpoints
    resume: bool = False
    overwrite: bool = False
    seed: int = 42


PRESETS = {"demo": {}, "paper": dict(
    weights="goombalab/hydra", vocab="bert-base-uncased", data=(), device="cuda", seqlen=4096,
    global_batch=112, micro_batch=4, steps=14_400, warmup=720, lr=6e-4, mlp_dim=256, bf16=True,
    checkpointing=True, workers=8, eval_every=720, eval_windows=128, save_every=240)}
FREE = ("max_steps", "micro_batch", "workers", "device", "resume", "overwrite", "save_every", "checkpointing",
        "weights", "vocab", "data")  # a resumed run may change how and where, not what


class Denoiser(torch.nn.Module):
    """Frozen backbone and adapter as one module, so that DDP sees one forward pass."""

    def __init__(self, backbone, adapter, modulate="full"):
        super().__init__()
        self.backbone, self.adapter, self.modulate = backbone, adapter, modulate

    def forward(self, x_t, t, x0, masked, mask):
        """Cross-entropy of the masked tokens, (m,) nats; only they reach the vocabulary."""
        modulation = self.adapter(t).keep(self.modulate)
        hidden = self.backbone.hidden(x_t, modulation, mask)                           # b l d
        return masked_cross_entropy(hidden[masked], x0[masked], self.backbone.head)


class MicroBatches:
    """Batch sampler: this rank's global positions of each step from `start`, in micro-batches."""

    def __init__(self, cfg, start, rank, world):
        first, last = (r * cfg.global_batch // world for r in (rank, rank + 1))
        self.slots = torch.arange(first, last).split(cfg.micro_batch)
        self.starts = range(start * cfg.global_batch, cfg.steps * cfg.global_batch, cfg.global_batch)

    def __iter__(self):
        return ((first + slots).tolist() for first in self.starts for slots in self.slots)

    def __len__(self):
        return len(self.starts) * len(self.slots)


def weigh(cfg, item, tokenizer):
    """(w (b, l), what sum w ce is divided by): number masked (CART), or number maskable (ELBO, eq. 13)."""
    if cfg.weighting == "elbo":
        return elbo_weights(item["masked"], item["t"]), maskable_tokens(item["x0"], tokenizer).sum()
    w = cart_weights(item["masked"], cfg.cart_p, item["x0"] != tokenizer.pad_id)
    return w, item["masked"].sum()


def train_steps(cfg, denoiser, optimizer, loader, tokenizer, start, stop_asked, after_step):
    """The loop. `after_step(step, numbers)` logs, evaluates and saves; returns the steps done."""
    device = next(denoiser.parameters()).device
    world = dist.get_world_size() if dist.is_initialized() else 1
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    micro_batches = iter(loader)
    for step in range(start, cfg.max_steps or cfg.steps):
        items = [next(micro_batches) for _ in loader.batch_sampler.slots]
        items = [{k: v.to(device, non_blocking=True) for k, v in item.items()} for item in items]
        weights, counts = zip(*(weigh(cfg, item, tokenizer) for item in items))
        # One sum over the ranks: the global count that the gradient is divided by, and whether to stop.
        shared = torch.tensor([float(sum(counts)), float(stop_asked())], device=device, dtype=torch.float64)
        if world > 1:
            dist.all_reduce(shared)
        count, stop = max(shared[0].item(), 1.0), shared[1] > 0

        for group in optimizer.param_groups:
            group["lr"] = common.learning_rate(step, cfg.steps, cfg.warmup, cfg.lr, cfg.min_lr_ratio)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for i, (item, w) in enumerate(zip(items, weights)):
            more = world > 1 and i + 1 < len(items)     # DDP averages gradients after the last one only
            with denoiser.no_sync() if more else contextlib.nullcontext():
                pads = item["x0"] != tokenizer.pad_id
                ce = denoiser(item["x_t"], item["t"], item["x0"], item["masked"], pads)
                loss = (w[item["masked"]] * ce).sum() / count                          # eq. 23
                (loss * world).backward()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        norm = torch.nn.utils.clip_grad_norm_(parameters, cfg.clip)
        if not (torch.isfinite(total) and torch.isfinite(norm)):
            raise common.UserError(f"step {step + 1}: loss {total.item()}, gradient norm {norm.item()}; the "
                                   "last checkpoint is intact: lower --lr and start again")
        optimizer.step()
        after_step(step + 1, {"loss": total.item(), "gradient_norm": norm.item(),
                              "lr": optimizer.param_groups[0]["lr"], "masked": int(count)}, bool(stop))
        if stop:
            return step + 1
    return cfg.max_steps or cfg.steps


def check(cfg):
    """Refuse, before any work, what could only fail later."""
    need = common.UserError
    if cfg.kernel not in KERNELS or cfg.kernel == "none":
        raise need(f"--kernel: got {cfg.kernel!r}, need one of {', '.join(k for k in KERNELS if k != 'none')}")
    if cfg.modulate not in MODES or cfg.modulate == "none":
        raise need(f"--modulate: got {cfg.modulate!r}, need one of {', '.join(MODES[:-1])}")
    if cfg.weighting not in ("cart", "elbo"):
        raise need(f"--weighting: got {cfg.weighting!r}, need cart or elbo")
    for name in ("seqlen", "global_batch", "micro_batch", "steps", "eval_windows", "save_every"):
        if getattr(cfg, name) < 1:
            raise need(f"--{name.replace('_', '-')}: got {getattr(cfg, name)}, need at least 1")
    world = common.rank_and_world()[1]
    if cfg.global_batch < world:
        raise need(f"--global-batch: {cfg.global_batch} sequences cannot be shared out over {world} ranks")
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise need("device: this run needs a CUDA GPU and torch sees none; --device cpu runs it here, slowly")
    if not cfg.data:
        raise need("--data: give text files or shards (data.py --mixture paper builds the paper's corpus)")


def draw_run(path, rows, references, kernel):
    """loss.png: the training loss, and cross-entropy against t before and after."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [row for row in rows if "loss" in row]
    left.plot([r["step"] for r in steps], [r["loss"] for r in steps], lw=1, color="0.6",
              label="training batch")
    evals = [row for row in rows if "eval" in row]
    left.plot([r["step"] for r in evals], [r["eval"]["cart"] for r in evals], "o-", color="C0",
              label=f"{kernel}, held out")
    left.axhline(references["frozen"]["cart"], color="C3", ls="--", label="frozen, held out")
    left.set(xlabel="step", ylabel="CART masked_mean (nats)")
    left.legend(frameon=False)
    centres = [(i + 0.5) / len(evals[-1]["eval"]["by_t"]) for i in range(len(evals[-1]["eval"]["by_t"]))]
    for name, color in (("unigram", "0.5"), ("frozen", "C3")):
        right.plot(centres, references[name]["by_t"], "--", color=color, label=name)
    right.plot(centres, evals[-1]["eval"]["by_t"], "o-", color="C0", label=kernel)
    right.set(xlabel="t (share of masked tokens)", ylabel="nats per masked token")
    right.legend(frameon=False)
    with common.atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def example(model, adapters, windows, tokenizer, t=0.4, seed=42):
    """One held-out passage masked at t, and what each of {name: adapter} makes of it."""
    from cart import corrupt
    from data import noise_generator
    x0 = torch.from_numpy(windows[len(windows) // 3])
    mask = maskable_tokens(x0, tokenizer)
    x_t, masked = corrupt(x0, t, tokenizer.mask_id, mask, noise_generator(seed, 7))
    lines, device = {"original": x0, "masked": x_t}, model.word_embeddings.weight.device
    for name, adapter in adapters.items():
        lines[name] = infill(model, adapter, x_t.to(device), tokenizer).cpu()
    for name, ids in lines.items():
        right = f"  ({(ids[masked] == x0[masked]).float().mean():.0%} right)" if name in adapters else ""
        common.log(f"  {name:>12}: {' '.join(tokenizer.decode(ids).split())}{right}")


def main(cfg):
    cfg = dataclasses.replace(cfg, name=cfg.name or f"{cfg.preset}_{cfg.kernel}", device=cfg.device if
                              cfg.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    check(cfg)
    rank, world = common.rank_and_world()
    if world > 1:
        dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo")
    try:
        return run(cfg, rank, world)
    finally:
        if world > 1:
            dist.destroy_process_group()


def run(cfg, rank, world):
    began = time.time()
    device = torch.device(cfg.device)
    if cfg.device == "cuda":
        device = torch.device("cuda", int(__import__("os").environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(cfg.seed)  # the adapter's first weights; nothing else draws from this stream
    tokenizer = make_tokenizer(cfg.vocab)
    backbone = load_backbone(cfg.weights, torch.bfloat16 if cfg.bf16 else torch.float32, device)
    if backbone.config.vocab_size != tokenizer.vocab_size:
        raise common.UserError(f"--vocab: {tokenizer.name} has {tokenizer.vocab_size} ids, the backbone "
                               f"{backbone.config.vocab_size}; give the vocabulary it was pretrained with")
    backbone.checkpointing = cfg.checkpointing
    settings = {k: getattr(cfg, k) for k in ("n_shifts", "mlp_dim", "init", "mlp_norm", "bounded_shifts",
                                             "lora_rank")}
    adapter = make_adapter(cfg.kernel, backbone.config, **settings).to(device)
    denoiser = Denoiser(backbone, adapter, cfg.modulate)
    env = common.banner("train.py", cfg, device, denoiser)
    corpora = [load_corpus(cfg.data, tokenizer, split) for split in ("train", "valid")]
    windows, held_out = (Windows(c, cfg.seqlen, tokenizer.pad_id) for c in corpora)
    draws = make_draws(corpora[1], tokenizer, cfg.seqlen, cfg.eval_windows, cfg.seed, cfg.cart_p)
    common.log(f"{cfg.kernel}: {adapter_size(adapter):,} adapter parameters beside c_t's MLP; "
               f"{corpora[0].n_bytes:,} bytes to train on, {len(draws.t) // 2} windows held out")

    # Everything that can be refused has been: now the folder.
    folder = common.ROOT / "runs" / cfg.name
    if rank == 0:
        open_run(folder, cfg, env, cfg.resume, cfg.overwrite, FREE)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=cfg.lr, betas=(0.9, 0.999),
                                  weight_decay=cfg.weight_decay, fused=True)
    start, rows = 0, []
    if cfg.resume:
        state = load_state(folder / "last.pt", device)
        adapter.load_state_dict(state["adapter"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
        rows = read_metrics(folder, up_to_step=start) if rank == 0 else []
        common.log(f"resumed at step {start}")
    references = reference_rows(backbone, draws, corpora[0].ids, tokenizer)
    common.log(f"\nbefore, on {len(draws.t) // 2} held-out windows (nats):\n\n{format_table(references)}\n")

    stop_signals = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, frame: stop_signals.append(number))
    dataset = DiffusionDataset(windows, tokenizer, cfg.global_batch, cfg.steps, cfg.seed,
                               stratified=cfg.stratified)
    loader = DataLoader(dataset, batch_sampler=MicroBatches(cfg, start, rank, world),
                        num_workers=cfg.workers, pin_memory=device.type == "cuda",
                        worker_init_fn=ignore_signals)
    module = denoiser
    if world > 1:  # an ablation leaves some heads without a gradient
        module = DistributedDataParallel(denoiser, find_unused_parameters=cfg.modulate != "full")
    bar = common.progress(total=cfg.steps, desc=cfg.kernel, initial=start)
    clock = {"time": time.time(), "step": start}

    def evaluate_now(step):
        scores = score_adapter(backbone, adapter, draws, cfg.modulate, cfg.seed)
        spread = modulation_spread(adapter)
        record(step=step, eval=scores, spread=spread)
        common.log(f"step {step}: held-out CART {scores['cart']:.4f}  ELBO {scores['elbo']:.4f} nats  "
                   f"shuffled-t gap {scores['gap']:+.4f} +- {scores['gap_error']:.4f}  "
                   f"spread of h over t {spread.get('hidden', math.nan):.3f}")
        if adapter_reads_t(adapter) and step and not scores["gap"] > scores["gap_error"]:
            common.log(f"note: at step {step} the adapter gains nothing measurable from knowing t")
        return scores

    def record(**row):
        if rank == 0:
            rows.append(row)
            append_metrics(folder, **row)

    def save(step):
        if rank == 0:
            save_state(folder / "last.pt", step=step, adapter=adapter.state_dict(),
                       optimizer=optimizer.state_dict())

    def after_step(step, numbers, stop):
        bar.update()
        bar.set_postfix(loss=f"{numbers['loss']:.3f}")
        if step % 10 == 0 or step == 1:
            seconds = time.time() - clock["time"]
            rate = (step - clock["step"]) * cfg.global_batch * cfg.seqlen / seconds
            record(step=step, tokens_per_second=rate, **numbers)
            clock.update(time=time.time(), step=step)
            if bar.disable and step % 50 == 0:
                common.log(f"step {step}/{cfg.steps}  loss {numbers['loss']:.4f}  {rate:,.0f} tokens/s")
        last = step == (cfg.max_steps or cfg.steps)
        if cfg.eval_every and step % cfg.eval_every == 0 and not last:
            evaluate_now(step)
        if step % cfg.save_every == 0 or last or stop:
            save(step)

    done = train_steps(cfg, module, optimizer, loader, tokenizer, start, lambda: bool(stop_signals),
                       after_step)
    bar.close()
    if stop_signals:
        common.log(f"stopped at step {done} of {cfg.steps}; saved. Continue with --resume")
        return {"step": done}

    scores = evaluate_now(done)
    shuffled = scores.pop("shuffled_t")
    table = {**references, cfg.kernel: scores, f"{cfg.kernel}, shuffled t": shuffled}
    common.log(f"\nafter {done} steps:\n\n{format_table(table)}\n")
    example(backbone, {"frozen": None, cfg.kernel: adapter}, held_out, tokenizer)
    result = {"step": done, "rows": table, "seconds": time.time() - began,
              "tokens": done * cfg.global_batch * cfg.seqlen}
    if rank == 0:
        save_adapter(folder / "adapter.safetensors", adapter, step=done, weights=cfg.weights,
                     vocab=tokenizer.fingerprint, modulate=cfg.modulate)
        draw_run(folder / "loss.png", rows, references, cfg.kernel)
        common.write_json(folder / "result.json", result)
    frozen = references["frozen"]
    common.log(f"\n{cfg.kernel}: CART {frozen['cart']:.3f} -> {scores['cart']:.3f}, ELBO {frozen['elbo']:.3f} "
               f"-> {scores['elbo']:.3f} nats/token, knowing t is worth {scores['gap']:.4f} of them; "
               f"next: python evaluate.py --adapter {folder.relative_to(common.ROOT)}")
    return result


def adapter_reads_t(adapter):
    return hasattr(adapter, "timestep")


def ignore_signals(worker_id):
    """Data loading processes leave Ctrl-C and SIGTERM to the main one, which saves first."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)


if __name__ == "__main__":
    common.run_cli(Config, main, PRESETS)
