"""Training MaRK adapters on a frozen Hydra backbone by masked diffusion, under DDP (3.2, 3.3, C.1).

Run:      torchrun train.py --kernel chebyshev    (2 minutes; bare `python train.py` is the same)
          torchrun --nproc-per-node 2 train.py --preset paper --data shards/      the paper's run
Last line: "chebyshev: CART N -> N, ELBO N -> N nats/token, ...; next: python evaluate.py ..."

    t ~ U(0, 1)  ->  x_t (eq. 12)  ->  frozen backbone under Modulation(t)  ->  ce of masked tokens
    ->  sum of w ce (eq. 22, 23) over the global batch's count  ->  one AdamW step of the adapter

Symbols:  ce             -log p(x_0,i | x_t, t), nats, of the masked tokens
          w              CART weight (eq. 22), or 1/t with --weighting elbo (eq. 13)
          global_batch   sequences per optimiser step, shared out over ranks, then micro-batches
          gap            what knowing t is worth in nats per token, see evaluate.py
Differs from the paper: its batch of 112 is read as global. Noise depends on (seed, step, slot)
          alone: any split into ranks and micro-batches trains on the same masks, and a resumed run
          repeats the uninterrupted one bit for bit.
"""
import contextlib
import dataclasses
import math
import os
import signal
import time
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import common
from cart import cart_loss, cart_weights, corrupt, elbo_weights, masked_cross_entropy
from checkpoint import (append_metrics, load_state, open_run, read_metrics, save_adapter,
                        save_state, started_by, started_now, stop_signals)
from data import (DiffusionDataset, Windows, held_out_split, load_corpus, maskable_tokens,
                  noise_generator)
from evaluate import format_table, make_draws, reference_rows, score_adapter
from hydra_ssm import MODES, check_vocabulary, load_backbone
from mark_adapters import KERNELS, adapter_size, make_adapter, modulation_spread
from sample import unmask
from text import find_files, make_tokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    """The defaults are the demo, --preset paper is Tables 6 to 8; other flags override either."""
    MAY_BE_ZERO: ClassVar = ("warmup",)
    kernel: str = "chebyshev"       # hypernet chebyshev dct, or a baseline: inject adaln lora
    preset: str = "demo"            # "demo", "paper", or "shipped": the adapters in assets/
    name: str = ""                  # run folder under runs/; default <preset>_<kernel>
    weights: str = "small"          # backbone: "small", "goombalab/hydra" or a path
    vocab: str = "bytes"            # "bytes", "bert-base-uncased" or the path of a vocab.txt
    data: tuple[str, ...] = ("embedded",)  # text files, folders of them, or shards
    valid: tuple[str, ...] = ()     # held-out text; default: 5 % of --data, on which none trains
    device: str = "auto"            # "auto", "cpu" or "cuda"
    seqlen: int = 128               # tokens per sequence
    global_batch: int = 16          # sequences per optimiser step, over all ranks
    micro_batch: int = 16           # sequences per forward pass of one rank
    steps: int = 350                # length of the schedule
    max_steps: int = 0              # stop here, within the schedule; 0: at its end
    warmup: int = 20                # steps
    lr: float = 2e-3                # peak; then cosine down to min_lr_ratio of it
    min_lr_ratio: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 1.0               # gradient norm
    weighting: str = "cart"         # "cart" (eq. 22) or "elbo" (1/t, eq. 13)
    cart_p: float = 0.45
    stratified: bool = False        # one t in each of global_batch equal intervals
    t_hole: tuple[float, float] = (0.0, 0.0)  # an interval of t that is left out of training
    modulate: str = "full"          # what the adapter may reach: the columns of Table 2
    n_shifts: int | None = None     # outputs for each of A, dt, D; default: 12 if that divides h
    mlp_dim: int = 64               # width of the adapter's MLP; 256 in the paper
    rank: int = 2                   # r of U and V
    degree: int = 5                 # Chebyshev polynomials
    n_freqs: int = 8                # DCT frequencies
    timepoints: int = 256           # DCT points
    init: str = "keep"              # "keep" t alive through the MLP, or PyTorch's "default"
    mlp_norm: bool = True           # RMS normalisation after each SiLU of the MLP
    t_scale: float = 1000.0         # fastest sinusoid of c_t, radians over t in [0, 1]
    bounded_shifts: bool = True     # False (hypernet only): B and C shifts without the tanh
    lora_rank: int | None = None    # default: the rank whose size is nearest to the hypernet's
    bf16: bool = False              # backbone in bfloat16; A_log, dt_bias, D and adapter in float32
    checkpointing: bool = False     # recompute the layers in the backward pass
    workers: int = 0                # data loading processes per rank
    eval_every: int = 0             # steps between evaluations; 0: before and after only
    eval_windows: int = 64          # held-out windows
    save_every: int = 100           # steps between checkpoints
    resume: bool = False            # continue the run folder
    overwrite: bool = False         # replace it
    publish: bool = False           # write results/train/; with --preset shipped, assets/, figures/
    seed: int = 42


PRESETS = {"demo": {}, "shipped": dict(seqlen=256, steps=600, eval_windows=128), "paper": dict(
    weights="goombalab/hydra", vocab="bert-base-uncased", data=(), device="cuda", seqlen=4096,
    global_batch=112, micro_batch=4, steps=14_400, warmup=720, lr=6e-4, mlp_dim=256, bf16=True,
    checkpointing=True, workers=8, eval_every=720, eval_windows=128, save_every=240)}
ADAPTER_SETTINGS = ("n_shifts", "mlp_dim", "rank", "degree", "n_freqs", "timepoints", "init",
                    "mlp_norm", "t_scale", "bounded_shifts", "lora_rank")
FREE = ("max_steps", "micro_batch", "workers", "device", "resume", "overwrite", "publish",
        "save_every", "checkpointing")  # what a resumed run may change


class Denoiser(torch.nn.Module):
    """Frozen backbone and adapter as one module, so that DDP sees one forward pass."""

    def __init__(self, backbone, adapter, modulate="full"):
        super().__init__()
        self.backbone, self.adapter, self.modulate = backbone, adapter, modulate

    def forward(self, x_t, t, x0, masked, mask):
        """Cross-entropy of the masked tokens, (m,) nats; no other token reaches the vocabulary."""
        modulation = self.adapter(t).keep(self.modulate)
        hidden = self.backbone.hidden(x_t, modulation, mask)                   # b l d
        return masked_cross_entropy(hidden[masked], x0[masked], self.backbone.head)


class MicroBatches:
    """Batch sampler: the global positions of this rank, step by step from `start`."""

    def __init__(self, cfg, start, rank, world):
        first, last = (r * cfg.global_batch // world for r in (rank, rank + 1))
        self.slots = torch.arange(first, last).split(cfg.micro_batch)
        self.steps = range(start, cfg.steps)
        self.global_batch = cfg.global_batch

    def __iter__(self):
        for step in self.steps:
            yield from ((step * self.global_batch + slots).tolist() for slots in self.slots)

    def __len__(self):
        return len(self.steps) * len(self.slots)


def weigh(cfg, item, tokenizer):
    """(w (b, l), count), for a loss sum w ce / count: masked tokens in CART, maskable in eq. 13."""
    if cfg.weighting == "elbo":
        w = elbo_weights(item["masked"], item["t"])
        return w, maskable_tokens(item["x0"], tokenizer).sum()
    w = cart_weights(item["masked"], cfg.cart_p, item["x0"] != tokenizer.pad_id)
    return w, item["masked"].sum()


def learning_rate(step, steps, warmup, peak, min_ratio=0.1):
    """Linear warm-up over `warmup` steps, then cosine to min_ratio * peak (Table 6)."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def check_finite(step, loss, norm, advice):
    """Raise UserError, which names the step, unless the loss and the gradient norm are finite."""
    if not (torch.isfinite(loss) and torch.isfinite(norm)):
        raise common.UserError(f"step {step}: the loss is {loss.item()}, the gradient norm {norm.item()}; "
                        f"{advice}")


def train_steps(cfg, denoiser, optimizer, loader, tokenizer, start, stop_asked, after_step):
    """The training loop. Returns the number of steps done.

    stop_asked() -> bool is asked on every rank before each step; any rank's yes stops all after it.
    after_step(step, numbers, stop) logs, evaluates and saves. Raises UserError, before the
    optimiser moves, where the loss or a gradient is not finite.
    """
    device = next(denoiser.parameters()).device
    world = dist.get_world_size() if dist.is_initialized() else 1
    micro_batches, last = iter(loader), cfg.max_steps or cfg.steps
    for step in range(start, last):
        items = [next(micro_batches) for _ in loader.batch_sampler.slots]
        items = [{k: v.to(device, non_blocking=True) for k, v in item.items()} for item in items]
        weights, counts = zip(*(weigh(cfg, item, tokenizer) for item in items))
        # One sum over ranks: the count that every gradient is divided by, and whether to stop.
        shared = torch.tensor([float(sum(counts)), float(stop_asked())], dtype=torch.float64)
        shared = shared.to(device)
        if world > 1:
            dist.all_reduce(shared)
        count, stop = max(1.0, shared[0].item()), shared[1].item() > 0

        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg.steps, cfg.warmup, cfg.lr,
                                               cfg.min_lr_ratio)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for i, (item, w) in enumerate(zip(items, weights)):
            hold = world > 1 and i + 1 < len(items)  # DDP averages over ranks after the last one
            with denoiser.no_sync() if hold else contextlib.nullcontext():
                real = item["x0"] != tokenizer.pad_id
                ce = denoiser(item["x_t"], item["t"], item["x0"], item["masked"], real)
                loss = cart_loss(ce, item["masked"], w, "sum") / count         # eq. 23
                (loss * world).backward()
            total += loss.detach()
        if world > 1:
            dist.all_reduce(total)
        norm = torch.nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], cfg.clip)
        check_finite(step + 1, total, norm, "the last checkpoint is intact: start again "
                            "with a lower --lr")
        optimizer.step()
        after_step(step + 1, {"loss": total.item(), "gradient_norm": norm.item(), "lr": group["lr"],
                              "masked": int(count)}, stop)
        if stop:
            return step + 1
    return max(start, last)


def check(cfg, world):
    """Refuse, before any work, what could only fail later."""
    def need(flag, got, what):
        raise common.UserError(f"--{flag.replace('_', '-')}: got {got}, need {what}")
    kernels = [k for k in KERNELS if k != "none"]
    for flag, allowed in (("kernel", kernels), ("modulate", MODES[:-1]),
                          ("weighting", ("cart", "elbo"))):
        if getattr(cfg, flag) not in allowed:
            need(flag, repr(getattr(cfg, flag)), f"one of {', '.join(allowed)}")
    for flag in ("seqlen", "global_batch", "micro_batch", "steps", "eval_windows", "save_every"):
        if getattr(cfg, flag) < 1:
            need(flag, getattr(cfg, flag), "at least 1")
    if cfg.global_batch < world:
        need("global_batch", cfg.global_batch, f"at least one sequence for each of {world} ranks")
    if not 0 <= cfg.t_hole[0] <= cfg.t_hole[1] < 1:
        need("t_hole", cfg.t_hole, "two times, 0 <= a <= b < 1")
    if not all(0 <= beta < 1 for beta in cfg.betas):
        need("betas", cfg.betas, "two numbers, 0 <= beta < 1")
    if cfg.max_steps > cfg.steps:
        need("max_steps", cfg.max_steps, f"at most --steps, {cfg.steps}")
    common.pick_device(cfg.device)
    if not cfg.data:
        need("data", "nothing", "text files or shards; data.py --mixture paper builds the paper's")
    for path in (*cfg.data, *cfg.valid):
        if path != "embedded" and not os.path.isfile(os.path.join(path, "manifest.json")):
            find_files(path)


def draw_run(path, rows, table, kernel, weighting):
    """loss.png: that weighting's loss over training, and on held-out text the cross-entropy against
    t and the gain over the frozen backbone, with the true t and with a shuffled one."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 3.3), layout="constrained")
    loss, absolute, gain = figure.subplots(1, 3)
    steps = [row for row in rows if "loss" in row]
    evals = [row for row in rows if "eval" in row]
    loss.plot([r["step"] for r in steps], [r["loss"] for r in steps], color="0.75", lw=1,
              label="training batches")
    loss.plot([0] + [r["step"] for r in evals],
              [table["frozen"][weighting]] + [r["eval"][weighting] for r in evals], "o-",
              label="held out (step 0: frozen)")
    unit = {"cart": "CART masked_mean (nats)", "elbo": "ELBO (nats per token)"}[weighting]
    loss.set(xlabel="step", ylabel=unit, title=f"{kernel}: training")
    by_t = {name: scores["by_t"] for name, scores in table.items()}
    t = [(i + 0.5) / len(by_t[kernel]) for i in range(len(by_t[kernel]))]
    for name, style in (("unigram", "0.6"), ("frozen", "C3"), (kernel, "C0")):
        absolute.plot(t, by_t[name], "o-" if name == kernel else "--", color=style, label=name)
    absolute.set(xlabel="t (share of masked tokens)", ylabel="nats per masked token",
                 title="held-out cross-entropy")
    for name, style in ((kernel, "o-"), (f"{kernel}, shuffled t", "s:")):
        gain.plot(t, [f - a for f, a in zip(by_t["frozen"], by_t[name])], style, label=name)
    gain.axhline(0, color="C3", ls="--", label="frozen")
    gain.set(xlabel="t (share of masked tokens)", ylabel="nats gained per masked token",
             title="gain over the frozen backbone")
    for ax in (loss, absolute, gain):
        ax.legend(frameon=False)
    common.save_figure(figure, path)


def show_infilling(model, adapters, x0, tokenizer, seed, t=0.4):
    """One held-out passage x0 (l,), masked at t, and what each of {name: adapter} fills in."""
    x_t, masked = corrupt(x0, t, tokenizer.mask_id, maskable_tokens(x0, tokenizer),
                          noise_generator(seed, 0))
    common.log(f"  {'text':>10}: {' '.join(tokenizer.decode(x0).split())}")
    common.log(f"  {'masked':>10}: {' '.join(tokenizer.decode(x_t).split())}")
    for name, adapter in adapters.items():
        device = model.word_embeddings.weight.device
        filled = unmask(model, adapter, x_t[None].to(device), tokenizer, 16, temperature=0)[0].cpu()
        right = (filled[masked] == x0[masked]).float().mean()
        common.log(f"  {name:>10}: {' '.join(tokenizer.decode(filled).split())}  ({right:.0%})")


def main(cfg, backbone=None):
    """Train and score an adapter; backbone: a HydraBert in place of the one of cfg.weights."""
    rank, world = common.rank_and_world()
    check(cfg, world)
    device = common.pick_device(cfg.device)
    cfg = dataclasses.replace(cfg, name=cfg.name or f"{cfg.preset}_{cfg.kernel}", device=device)
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if world > 1:
        # torchrun keeps one store for all attempts: without a prefix a restarted rank may read the
        # addresses that dead ones left there (torch 2.13).
        store, _, _ = next(rendezvous("env://", rank, world))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if cfg.device == "cuda" else "gloo", store=store, rank=rank,
                                world_size=world)
    try:
        return run(cfg, torch.device(device), rank, world, backbone)
    finally:
        if world > 1:
            dist.destroy_process_group()


def run(cfg, device, rank, world, backbone=None):
    began = time.time()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # Table 6
    tokenizer = make_tokenizer(cfg.vocab)
    dtype = torch.bfloat16 if cfg.bf16 else torch.float32
    backbone = backbone or load_backbone(cfg.weights, dtype, device)
    backbone.checkpointing = cfg.checkpointing
    check_vocabulary(backbone, tokenizer)
    torch.manual_seed(cfg.seed)  # the adapter's first weights; nothing else draws from this stream
    settings = {name: getattr(cfg, name) for name in ADAPTER_SETTINGS}
    adapter = make_adapter(cfg.kernel, backbone.config, **settings).to(device)
    denoiser = Denoiser(backbone, adapter, cfg.modulate)
    env = common.banner("train.py", cfg, device, denoiser)
    train = load_corpus(cfg.data, tokenizer, "train")
    scored = cfg.valid or cfg.data
    valid = load_corpus(scored, tokenizer, held_out_split(scored, cfg.data))
    windows, held_out = (Windows(c, cfg.seqlen, tokenizer.pad_id) for c in (train, valid))
    draws = make_draws(valid, tokenizer, cfg.seqlen, cfg.eval_windows, cfg.seed, cfg.cart_p)
    common.log(f"{adapter_size(adapter):,} adapter parameters beside c_t's MLP; {train.n_bytes:,} "
               f"bytes to train on; scored on {len(draws.t) // 2} of {len(held_out)} held-out "
               f"windows of {cfg.seqlen}")

    folder = common.ROOT / "runs" / cfg.name  # all that can be refused has been: make it now
    parent = started_now()  # torchrun; --max-restarts gives the same command again, to be resumed
    resume = cfg.resume or (int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
                            and started_by(folder) == parent)
    refusal, has_state = None, False
    if rank == 0:
        try:
            open_run(folder, cfg, {**env, "parent": parent}, resume, cfg.overwrite, FREE)
            has_state = resume and (folder / "last.pt").is_file()
        except common.UserError as error:
            refusal = str(error)
    if world > 1:  # or the other ranks would wait for a rank that has left
        verdict = [refusal, has_state]
        dist.broadcast_object_list(verdict)
        refusal, has_state = verdict
    if refusal:
        raise common.UserError(refusal)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=cfg.lr, betas=cfg.betas,
                                  weight_decay=cfg.weight_decay, fused=True)
    start, rows, spread_at_start = 0, [], modulation_spread(adapter)
    if has_state:
        state = load_state(folder / "last.pt", device)
        adapter.load_state_dict(state["adapter"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    if resume:
        rows = read_metrics(folder, up_to_step=start) if rank == 0 else []
        common.log(f"resumed at step {start}")
    references = reference_rows(backbone, draws, train.ids, tokenizer)
    common.log(f"\nbefore (nats):\n\n{format_table(references)}\n")

    dataset = DiffusionDataset(windows, tokenizer, cfg.global_batch, cfg.steps, cfg.seed,
                               stratified=cfg.stratified, t_hole=cfg.t_hole)
    loader = DataLoader(dataset, batch_sampler=MicroBatches(cfg, start, rank, world),
                        num_workers=cfg.workers, pin_memory=device.type == "cuda",
                        worker_init_fn=ignore_signals)
    module = denoiser
    if world > 1:  # an ablation leaves some readouts without a gradient
        module = DistributedDataParallel(denoiser, broadcast_buffers=False,
                                         find_unused_parameters=cfg.modulate != "full")
    bar = common.progress(total=cfg.steps, desc=cfg.kernel, initial=start)
    since = {"time": time.time(), "step": start}  # of the rate in tokens per second

    def record(**row):
        if rank == 0:
            rows.append(row)
            append_metrics(folder, **row)

    def evaluate_now(step):
        scores = score_adapter(backbone, adapter, draws, cfg.modulate, cfg.seed)
        spread = modulation_spread(adapter)
        if not (rows and rows[-1]["step"] == step and "eval" in rows[-1]):  # from before a kill
            record(step=step, eval=scores, spread=spread)
        common.log(f"step {step}: held-out CART {scores['cart']:.4f}, ELBO {scores['elbo']:.4f}; "
                   f"gap to a shuffled t {scores['gap']:+.4f} +- {scores['gap_error']:.4f}; "
                   f"spread of the modulation over t {spread.get('mean', 0.0):.4f}")
        if spread and spread["mean"] < 1e-3:
            common.log(f"step {step}: the adapter has stopped using t; try a lower --lr")
        elif spread and not scores["gap"] > scores["gap_error"]:
            common.log(f"step {step}: its use of t is worth nothing measurable on this text (yet)")
        since.update(time=time.time(), step=step)
        return scores

    def after_step(step, numbers, stop):
        last = step == (cfg.max_steps or cfg.steps)
        bar.update()
        bar.set_postfix(loss=f"{numbers['loss']:.3f}")
        if step % 10 == 0 or last:
            rate = (step - since["step"]) * cfg.global_batch * cfg.seqlen
            rate /= time.time() - since["time"]
            record(step=step, tokens_per_second=rate, **numbers)
            since.update(time=time.time(), step=step)
            if bar.disable and (step % 50 == 0 or last):
                common.log(f"step {step}/{cfg.steps}  loss {numbers['loss']:.4f}  "
                           f"{rate:,.0f} tokens/s")
        if cfg.eval_every and step % cfg.eval_every == 0 and not last:
            evaluate_now(step)
        if rank == 0 and (step % cfg.save_every == 0 or last or stop):
            save_state(folder / "last.pt", step=step, adapter=adapter.state_dict(),
                       optimizer=optimizer.state_dict())

    def stop_asked():  # a rank that outlives torchrun leaves too, before the next run
        return bool(caught) or "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent[0]

    with stop_signals() as caught:
        done = train_steps(cfg, module, optimizer, loader, tokenizer, start,
                           stop_asked, after_step)
    bar.close()
    if done < (cfg.max_steps or cfg.steps):  # agreed by all ranks; a late signal may not be
        common.log(f"stopped at step {done} of {cfg.steps} and saved; continue with --resume")
        return {"step": done}

    scores = evaluate_now(done)
    rows_after = {**references, cfg.kernel: scores,
                  f"{cfg.kernel}, shuffled t": scores.pop("shuffled_t")}
    common.log(f"\nafter {done} steps (nats):\n\n{format_table(rows_after)}\n")
    passage = torch.from_numpy(held_out[len(held_out) // 2])
    show_infilling(backbone, {"frozen": None, cfg.kernel: adapter}, passage, tokenizer, cfg.seed)
    result = {"step": done, "tokens": done * cfg.global_batch * cfg.seqlen,
              "seconds": time.time() - began, "rows": rows_after,
              "spread": {"start": spread_at_start, "end": rows[-1]["spread"] if rows else None}}
    if rank == 0:
        save_adapter(folder / "adapter.safetensors", adapter, step=done, weights=cfg.weights,
                     vocab=tokenizer.fingerprint, modulate=cfg.modulate)
        draw_run(folder / "loss.png", rows, rows_after, cfg.kernel, cfg.weighting)
        common.write_json(folder / "result.json", result)
        if cfg.publish:
            common.publish("train", cfg.name, result, cfg, env)
        if cfg.publish and cfg.preset == "shipped":
            save_adapter(common.SOURCE / "assets" / f"adapter_{cfg.kernel}.safetensors", adapter,
                         torch.float16, step=done, vocab=tokenizer.fingerprint)
            draw_run(common.ROOT / "figures" / f"training_{cfg.kernel}.png", rows, rows_after,
                     cfg.kernel, cfg.weighting)
    frozen, path = references["frozen"], os.path.relpath(folder)
    with_flags = "" if cfg.weights == "small" else f" --weights {cfg.weights} --vocab {cfg.vocab}"
    common.log(f"\n{cfg.kernel}: CART {frozen['cart']:.3f} -> {scores['cart']:.3f}, ELBO "
               f"{frozen['elbo']:.3f} -> {scores['elbo']:.3f} nats/token; knowing t is worth "
               f"{scores['gap']:.4f}; see {path}/loss.png; "
               f"next: python evaluate.py --adapter {path}{with_flags}")
    return result


def ignore_signals(worker_id):
    """Data loading processes leave Ctrl-C and SIGTERM to the main one, which saves first."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    common.run_cli(Config, main, PRESETS)
