"""HRM adapters (a second paper, "SSM Adapters via Hankel Reduced-order Modeling"): a recurrence
beside a frozen sub-layer, s_t = abar s_{t-1} + Bbar h_t and y_t = C s_t (19), whose output becomes
sublayer(h_t) + alpha y_t (18); compressed by balanced truncation once it is trained.

Run:      python hrm_adapter.py       (a frozen transformer, LoRA and HRM of one size; 3 minutes)
          python hrm_adapter.py --make-backbone ...    (its flags are in assets/README.md)
Last line: "empirical Gramians err as n^-0.NN; runs/hrm_adapter/hrm_adapter.png"
Symbols:  h       what the sub-layer reads, b l m                  s          state, b l d
          rate    exp(log A) exp(log dt), abar = exp(-rate)        alpha      gate of a layer
          Bbar    B (1 - abar) / exp(log A): zero-order hold       W_c, W_o   Gramians, d d
          sigma   Hankel singular values, the roots of the eigenvalues of W_c W_o, descending
The present input counts: s_t holds h_t, as (19) is written. On the unit circle that differs from
C (z - abar)^-1 Bbar by the factor z alone: Gramians, norms and Glover's bound are those of D = 0.
abar knows only log A + log dt, Bbar both; still (A c, dt / c, B c) is the same system.
Differs from the source: Bbar is free there and dt part of log A, yet log dt is counted; the hold
          takes its 2 d m + 2 d + 1 parameters at their word. Its rule "90 %, 0.01" is two here. A
          truncated system is dense, which it does not count. Attention sees 16 bytes here, 60
          through all layers; only a recurrence bridges more, where its LoRA could look back.
"""
import contextlib
import dataclasses
import itertools
import math
import timeit
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import load_file
from scipy.fft import next_fast_len
from torch import nn

import common
from checkpoint import save_tensors
from data import load_corpus, noise_generator
from evaluate import show
from text import ByteTokenizer
from train import check_finite, learning_rate

BACKBONE = common.SOURCE / "assets" / "transformer_small.safetensors"
KEYS = torch.tensor(list(b"<>[]"))   # one of them is to be remembered: chance has ln 4 nats
LAGS = (32, 64, 128, 256, 512)       # bytes from the key to a question about it
SPACE, CUE, UNSCORED = ord(" "), ByteTokenizer.mask_id, -100


# ---- linear systems: running them, Gramians, balanced truncation ---------------------------------
class System(NamedTuple):
    """y_t = sum over k of C A^k B h_{t-k}, from state 0."""
    A: torch.Tensor     # d d; of a diagonal system its rate, ... d, exact where abar is near 1
    B: torch.Tensor     # ... d m
    C: torch.Tensor     # ... p d


def causal_convolution(u, kernel):
    """s_t = sum over k of kernel_k u_{t-k}, by FFT on at least 2 l points: O(l log l).
    u: b l d. kernel: d l, for each state, or e d l, of matrices."""
    l = u.shape[1]
    n = next_fast_len(2 * l, real=True)
    U, K = torch.fft.rfft(u.mT, n), torch.fft.rfft(kernel, n)             # b d f, (e) d f
    S = U * K if kernel.ndim == 2 else torch.einsum("edf,bdf->bef", K, U)
    return torch.fft.irfft(S, n)[..., :l].mT                              # b l d


def run(system, h):
    """y, b l p, for h, b l m; computed in the wider of their types."""
    A, B, C = (v.to(torch.promote_types(h.dtype, v.dtype)) for v in system)
    k = torch.arange(h.shape[1], device=h.device)
    kernel = torch.exp(-A[:, None] * k) if A.ndim == 1 else torch.stack(              # (e) d l
        [*itertools.accumulate(k[1:], lambda P, _: P @ A, initial=torch.eye(len(A)).to(A))], -1)
    return (causal_convolution(h.to(B.dtype) @ B.mT, kernel) @ C.mT).to(h.dtype)


def gramians(system):
    """W_c, W_o of a diagonal system, ... d d: discrete Lyapunov equations in closed form."""
    rate, B, C = system
    gap = -torch.expm1(-(rate[..., :, None] + rate[..., None, :]))        # 1 - abar_i abar_j
    return B @ B.mT / gap, C.mT @ C / gap


def empirical_gramians(rate, B, C, h):
    """The same for input-dependent B_t (n l d m), C_t (n l p d), from n calibration inputs h n l m.
    W_c: the mean of s_t s_t^T over inputs and the later half of time. W_o, whose formula the source
    text lacks, is Lall's: release each unit state without input, under the C_t of an input, and sum
    the outputs' products. White h and fixed B, C lead to `gramians`, as n^-1/2. O(n l d^2)."""
    decay = torch.exp(-rate[:, None] * torch.arange(h.shape[1]))                      # d l
    s = causal_convolution(torch.einsum("nldm,nlm->nld", B, h), decay)[:, h.shape[1] // 2:]
    released = C * decay.T[:, None]                                                   # n l p d
    return (torch.einsum("nli,nlj->ij", s, s) / s[..., 0].numel(),
            torch.einsum("nlpi,nlpj->ij", released, released) / len(h))


def root(W):
    """L with L L^T = W. By eigenvalues, not Cholesky: Gramians are often singular to rounding."""
    values, vectors = torch.linalg.eigh(W)
    return vectors * values.clamp(min=0).sqrt()[..., None, :]


def hankel_singular_values(W_c, W_o):
    """sigma, ... d."""
    return torch.linalg.svdvals(root(W_o).mT @ root(W_c))


def balance(system, W=None):
    """A diagonal system (and other W_c, W_o) -> a dense one with both Gramians diag(sigma), sigma.
    By square roots. States below 1e-9 of the largest sigma are rounding errors and left out."""
    (rate, B, C), (L_c, L_o) = system, map(root, W or gramians(system))
    U, sigma, Vt = torch.linalg.svd(L_o.mT @ L_c)
    n = max(1, int((sigma > 1e-9 * sigma[0]).sum()))
    scale = sigma[:n].clamp(min=1e-30) ** -0.5                            # finite at a gate of 0
    T = scale[:, None] * (L_o @ U[:, :n]).mT                              # n d
    inverse = L_c @ Vt[:n].mT * scale                                     # d n
    return System(T * torch.exp(-rate) @ inverse, T @ B, C @ inverse), sigma


def truncate(system, share=None, bound=None, W=None):
    """The first balanced states: as few, from 1, as keep `share` of the sum of sigma, or as leave
    Glover's bound on the H-infinity error, twice the sum of the other sigma, at most `bound`."""
    (A, B, C), sigma = balance(system, W)
    kept = sigma.cumsum(0)
    short = kept < share * kept[-1] if bound is None else 2 * (kept[-1] - kept) > bound
    n = min(int(short.sum()) + 1, len(A))
    return System(A[:n, :n], B[:n], C[:, :n])


def h_infinity_error(full, reduced, points=200):
    """Largest singular value of G - Ghat on a grid of frequencies, logarithmic and even. float64.
    B and C are first cut down to their triangular factors: O(d^3) a frequency, whatever m and p."""
    w = torch.cat([torch.logspace(-7, 0.49, points), torch.linspace(0, math.pi, points)]).double()
    A = torch.block_diag(torch.diag(torch.exp(-full.A)), reduced.A)
    R_c = torch.linalg.qr(torch.cat([full.C, -reduced.C], 1))[1]
    R_b = torch.linalg.qr(torch.cat([full.B, reduced.B]).mT)[1]
    resolvent = torch.linalg.inv(torch.eye(len(A)) - A * torch.exp(-1j * w)[:, None, None])
    return torch.linalg.svdvals(R_c.to(resolvent) @ resolvent @ R_b.mT.to(resolvent)).max().item()


# ---- adapters ------------------------------------------------------------------------------------
class HRM(nn.Module):
    """alpha y of (18), h b l m -> b l m: causal, any length, in float32 at least. Memories start at
    1 to 1000 steps, with log A = log dt, which makes all states equally large for white h."""
    def __init__(self, d_model, d, gate=0.01):
        super().__init__()
        if gate >= 1:
            common.log(f"the gate starts at {gate}: from 1.0 on, training diverged in the source")
        self.B = nn.Parameter(torch.randn(d, d_model) * d_model ** -0.5)
        self.C = nn.Parameter(torch.randn(d_model, d) * d ** -0.5)
        self.log_A = nn.Parameter(-torch.linspace(0, math.log(1000), d) / 2)
        self.log_dt = nn.Parameter(self.log_A.detach().clone())
        self.gate = nn.Parameter(torch.tensor(float(gate)))

    def system(self, dtype=torch.float64):
        """Diagonal, the gate inside C."""
        log_A, log_dt, B, C = (v.to(dtype) for v in (self.log_A, self.log_dt, self.B, self.C))
        rate = torch.exp(log_A + log_dt)
        hold = -torch.expm1(-rate) / torch.exp(log_A)                     # (1 - abar) / |A|
        return System(rate, hold[:, None] * B, self.gate.to(dtype) * C)

    def forward(self, h):
        with torch.autocast(h.device.type, enabled=False):
            return run(self.system(torch.promote_types(self.B.dtype, torch.float32)), h)


def make_lora(d_model, r):
    """x -> B A x for one square projection: no memory, 2 r d_model parameters."""
    lora = nn.Sequential(nn.Linear(d_model, r, bias=False), nn.Linear(r, d_model, bias=False))
    nn.init.zeros_(lora[1].weight)
    return lora


@contextlib.contextmanager
def inserted(model, adapters):
    """{name: adapter}: within this context adapter(h) is added to the output of the submodule
    `name`, h being what that reads. "one:other" reads what `one` reads and adds to the output of
    `other`: "linear1:linear2" is the MLP of torch.nn.TransformerEncoderLayer. Of an output that is
    a tuple (MultiheadAttention) the first changes. Neither parameters nor keys of the model do."""
    modules, used = dict(model.named_modules()), set()
    with contextlib.ExitStack() as hooks:
        for name, adapter in adapters.items():
            source, target = (name.split(":") * 2)[:2]
            if not {source, target} <= modules.keys() or any(
                    getattr(module, "batch_first", True) is False for module in modules.values()):
                raise common.UserError(f"no adapter can be inserted at {name!r}: give a name of "
                                       "named_modules(), and all of them need batch_first=True")
            read = []
            def add(module, args, output, name=name, adapter=adapter, read=read):
                used.add(name)
                y = adapter(read.pop())
                return (output[0] + y, *output[1:]) if isinstance(output, tuple) else output + y
            hooks.enter_context(modules[source].register_forward_pre_hook(
                lambda module, args, read=read: read.append(args[0])))
            hooks.enter_context(modules[target].register_forward_hook(add))
        yield
    if unused := adapters.keys() - used:  # such as the out_proj of torch.nn.MultiheadAttention
        raise common.UserError(f"the model never calls {unused.pop()!r}: give another submodule")


# ---- the frozen transformer ----------------------------------------------------------------------
class Attention(nn.Module):
    """Causal attention to the last `window` bytes, O(l window), with a bias for each distance."""
    def __init__(self, d_model, nheads, window):
        super().__init__()
        self.nheads, self.window = nheads, window
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in "qkvo")
        self.bias = nn.Parameter(torch.zeros(nheads, window))

    def forward(self, x):
        b, l, w = *x.shape[:2], self.window
        x = F.pad(x, (0, 0, 0, -l % w))
        q, k, v = (rearrange(f(x), "b (c w) (h p) -> b c h w p", w=w, h=self.nheads)
                   for f in (self.q, self.k, self.v))
        # a chunk sees itself and the one before; before the first there are keys and values of 0
        k, v = (torch.cat([F.pad(u, (0, 0) * 3 + (1, 0))[:, :-1], u], 3) for u in (k, v))
        back = torch.arange(w)[:, None] + w - torch.arange(2 * w)         # w 2w, distance
        bias = self.bias[:, back.clamp(0, w - 1)].masked_fill((back < 0) | (back >= w), -math.inf)
        y = F.scaled_dot_product_attention(*(u.flatten(0, 1) for u in (q, k, v)), bias)
        return self.out(rearrange(y, "(b c) h w p -> b (c w) (h p)", b=b)[:, :l])


class Transformer(nn.Module):
    """ids b l -> logits b l v: causal, pre-norm, any length; frozen if it is given a weights file.
    A layer's sites for adapters are `attention` (and its q, v) and `mlp`."""
    def __init__(self, weights=None, vocab_size=260, d_model=64, n_layer=4, nheads=4, window=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.layers = nn.ModuleList(nn.ModuleDict({
            "norm1": nn.LayerNorm(d_model), "attention": Attention(d_model, nheads, window),
            "norm2": nn.LayerNorm(d_model), "mlp": nn.Sequential(
                nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))})
            for _ in range(n_layer))
        self.norm = nn.LayerNorm(d_model)
        if weights:
            self.load_state_dict(load_file(weights))
            self.requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids)                                           # b l m
        for layer in self.layers:
            x = x + layer["attention"](layer["norm1"](x))
            x = x + layer["mlp"](layer["norm2"](x))
        return self.norm(x) @ self.embedding.weight.T


# ---- two tasks, training, measuring, showing -----------------------------------------------------
def language(text, size, lag, draw):
    """`size` bytes in windows of 512, n l -> inputs, targets: the next byte. lag: not used."""
    ids = text[torch.randint(len(text) - 512, (size // 512, 1), generator=draw) + torch.arange(513)]
    return ids[:, :-1], ids[:, 1:]


def recall(text, size, lag, draw):
    """Text after a key, a cue in place of every 32nd byte up to `lag`; target: which key, at the
    cues. The answer is never shown, and whatever else looks like a key is taken out of the text."""
    at = torch.randint(len(text) - lag, (size // lag, 1), generator=draw)
    ids, key = text[at + torch.arange(lag + 1)], torch.randint(len(KEYS), at.shape, generator=draw)
    ids[torch.isin(ids, KEYS)] = SPACE
    target, cues = torch.full_like(ids, UNSCORED), torch.arange(LAGS[0], lag + 1, LAGS[0])
    ids[:, :1], ids[:, cues], target[:, cues] = KEYS[key], CUE, key
    return ids, target


TASKS = {"recall": (recall, KEYS), "language": (language, slice(None))}  # and the logits to choose
ROWS = {"frozen": (), "LoRA, Q and V": ("attention.q", "attention.v"), "HRM, MLP": ("mlp",),
        "HRM, attention": ("attention",), "HRM, both": ("attention", "mlp"),
        "HRM, MLP, gate frozen": ("mlp",)}      # sites in each layer; all have the same size
RULES = {"90 % kept": {"share": 0.9}, "bound 0.01": {"bound": 0.01}}


def cross_entropy(model, task, ids, target):
    """Nats, b l; 0 where nothing is asked."""
    logits = model(ids)[..., TASKS[task][1]].float().flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), reduction="none").view_as(target)


def train(model, parameters, task, text, cfg, seed, bf16=False):
    """Adam on the mean loss; text and keys of a step depend on (seed, step) alone."""
    optimizer, warmup = torch.optim.Adam(parameters, betas=(0.9, 0.98)), max(1, cfg.steps // 20)
    for step in common.progress(range(cfg.steps), desc=task):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg.steps, warmup, cfg.lr, 0.02)
        lag = LAGS[step % len(LAGS)]
        ids, target = TASKS[task][0](text, cfg.size, lag, noise_generator(seed, step))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = cross_entropy(model, task, ids, target).sum() / (target != UNSCORED).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        check_finite(step + 1, loss, norm, "lower --lr or --gate")
        optimizer.step()


@torch.no_grad()
def score(model, task, text, n):
    """Nats at each of LAGS, in n windows: of the answer there, or of the bytes from half as far."""
    batch = (v.split(16) for v in TASKS[task][0](text, n * LAGS[-1], LAGS[-1], noise_generator(0)))
    ce = torch.cat([cross_entropy(model, task, *part) for part in zip(*batch)])       # n l
    return [(ce[:, lag] if task == "recall" else ce[:, lag // 2:lag]).mean().item() for lag in LAGS]


def measure(cfg, model, row, task, text, held_out, seed):
    """Train a row on a task: its losses, gates and sigma, and what each rule leaves of it."""
    torch.manual_seed(seed)
    d_model, d = model.embedding.embedding_dim, 2 * cfg.rank // max(1, len(ROWS[row]))
    adapters = {f"layers.{y}.{site}":
                make_lora(d_model, cfg.rank) if "LoRA" in row else HRM(d_model, d, cfg.gate)
                for y in range(len(model.layers)) for site in ROWS[row]}
    parameters = [p for adapter in adapters.values() for name, p in adapter.named_parameters()
                  if (name, row) != ("gate", "HRM, MLP, gate frozen")]
    with inserted(model, adapters):
        if parameters:
            train(model, parameters, task, text, cfg, seed)
        found = {"loss": score(model, task, held_out, cfg.windows), "rules": {},
                 "parameters": sum(p.numel() for p in parameters)}
    if "HRM" in row:
        systems = [System(*(v.detach() for v in adapter.system())) for adapter in adapters.values()]
        sigma = [hankel_singular_values(*gramians(system)).tolist() for system in systems]
        found |= {"gates": [adapter.gate.item() for adapter in adapters.values()], "sigma": sigma}
        for rule, how in RULES.items():
            reduced = [truncate(system, **how) for system in systems]
            with inserted(model, {name: lambda h, system=system: run(system, h)
                                  for name, system in zip(adapters, reduced)}):
                loss = score(model, task, held_out, cfg.windows)
            found["rules"][rule] = {
                "states": [len(system.A) for system in reduced], "loss": loss,
                "bound": [2 * sum(v[len(r.A):]) for v, r in zip(sigma, reduced)],
                "error": [*map(h_infinity_error, systems, reduced)]}
    return found


def cost(d_model, rank, rounds=7):
    """[length, LoRA's ms, HRM's ms], forward and backward, of a layer's adapters taken in turn."""
    both, found = ([make_lora(d_model, rank) for _ in "qv"], [HRM(d_model, 2 * rank)]), []
    for l in (256, 1024, 4096, 16384):
        h = torch.randn(1, l, d_model, requires_grad=True)
        taken = [[1e3 * timeit.timeit(lambda: sum(f(h) for f in one).sum().backward(), number=1)
                  for one in both] for _ in range(rounds + 1)]
        found.append([l, *np.median(taken[1:], 0)])
    return found


def convergence(seed):
    """[n, relative error] of `empirical_gramians`, where B_t = B (1 + sign / 2) and C_t likewise,
    the sign being that of the sum of h_{t-1}: their limit is 5/4 of the closed form."""
    draw, found = noise_generator(seed), []
    B, C, h = (torch.randn(*n, generator=draw) for n in ((3, 2), (2, 3), (2048, 200, 2)))
    rate = torch.tensor([0.05, 0.1, 0.4])
    swing = 1 + h.sum(-1).roll(1, 1)[..., None, None].sign() / 2         # n l 1 1
    W = 1.25 * torch.stack(gramians(System(rate, B, C)))
    for n in (8, 32, 128, 512, 2048):
        error = torch.stack(empirical_gramians(rate, swing[:n] * B, swing[:n] * C, h[:n])) - W
        found.append([n, (error.norm() / W.norm()).item()])
    return found


def tables(rows, times):
    """Markdown: losses; what compression leaves; time."""
    losses, compressed = [], []
    for row, found in rows.items():
        losses.append([row, f"{found['recall'][0]['parameters']:,}",
                       show([one["loss"][-1] for one in found["language"]], student=True),
                       *(show(losses, student=True)
                         for losses in zip(*(one["loss"] for one in found["recall"])))])
        for (task, runs), rule in itertools.product(found.items(), RULES if "HRM" in row else ()):
            left = [one["rules"][rule] for one in runs]
            states = sum((one["states"] for one in left), [])
            ratio = max([0, *(e / b for r in left for e, b in zip(r["error"], r["bound"]) if b)])
            before, after = (show([np.mean(one["loss"]) for one in v], student=True)
                             for v in (runs, left))
            kept = f"{min(states)} to {max(states)} of {len(runs[0]['sigma'][0])}"
            compressed.append([f"{row}: {task}", rule, kept, f"{ratio:.2f}", before, after])
    return {"table": common.markdown(["nats", "parameters", "language, bytes 257 to 512",
                                      *(f"recall at {lag}" for lag in LAGS)], *losses),
            "compression": common.markdown(["", "rule", "states kept in a layer", "error / bound",
                                            "loss before", "loss after"], *compressed),
            "cost": common.markdown(["length", "LoRA on Q and V, ms", "HRM, ms"],
                                    *([f"{l:,}", *(f"{v:.1f}" for v in ms)] for l, *ms in times))}


def draw(rows, path):
    """Losses by distance, gates by layer, and one row's sigma."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (far, near), (gates, spectrum) = figure.subplots(2, 2)
    for i, (row, found) in enumerate(rows.items()):
        color, line = f"C{i}" if i else "k", ".--" if "frozen" in row else ".-"
        base, loss, answer = (np.mean([one["loss"] for one in runs], 0) for runs in (
            rows["frozen"]["language"], found["language"], found["recall"]))
        far.plot(answer, line, c=color, label=row)
        near.plot(base - loss, line, c=color)
        if "HRM" in row:
            gate = np.mean([np.abs(one["gates"]) for one in found["recall"]], 0)
            gates.plot(np.arange(len(gate)) / len(ROWS[row]), gate, line, c=color)
    for y, sigma in enumerate(rows["HRM, MLP"]["recall"][0]["sigma"]):
        spectrum.semilogy(range(1, len(sigma) + 1), sigma, ".-", label=f"layer {y}")
    far.axhline(math.log(len(KEYS)), color="grey", lw=0.8)
    axis = {"xticks": range(len(LAGS)), "xticklabels": LAGS, "ylabel": "nats per byte"}
    far.set(title="Recall: loss (grey: chance)", xlabel="bytes from key to question", **axis)
    near.set(title="Language: gain over frozen", xlabel="bytes into the window, up to", **axis)
    gates.set(title="Recall: |gate| after training", xlabel="layer (both: attention, MLP at 1/2)")
    spectrum.set(title="Recall: Hankel singular values, HRM, MLP", xlabel="i", ylabel=r"$\sigma_i$")
    spectrum.legend()
    figure.legend(*far.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    common.save_figure(figure, path)


@dataclasses.dataclass(frozen=True)
class Config:
    """Train LoRA and HRM adapters of one size on a frozen transformer, and compress the latter."""
    text: tuple[str, ...] = ("embedded",)  # 5 % of the documents are held out
    steps: int = 150                       # of each training
    size: int = 2048                       # bytes of text in a step
    lr: float = 3e-2                       # peak; linear warm-up over 5 %, cosine to 2 %
    rank: int = 8                          # of LoRA; HRM has twice as many states
    gate: float = 0.01                     # alpha at the start
    seeds: int = 1                         # trainings of each row on each task: seeds 42, 142, ...
    windows: int = 48                      # held-out windows of 512 bytes
    make_backbone: bool = False            # train the transformer itself, in bfloat16
    publish: bool = False                  # also write results/, figures/; the transformer: assets/


def main(cfg):
    if cfg.size < LAGS[-1] or cfg.seeds > len(common.SEEDS):
        raise common.UserError(f"got --size {cfg.size}, --seeds {cfg.seeds}: need a size from "
                               f"{LAGS[-1]} and at most {len(common.SEEDS)} seeds")
    torch.manual_seed(common.SEEDS[0])
    model = Transformer(None if cfg.make_backbone else BACKBONE)
    env = common.banner("hrm_adapter.py", cfg, "cpu", model)
    text, held_out = (torch.from_numpy(np.asarray(load_corpus(cfg.text, ByteTokenizer(), split).ids,
                                                  np.int64)) for split in ("train", "valid"))
    if min(len(text), len(held_out)) < 2 * LAGS[-1]:
        raise common.UserError(f"--text: {len(text)} bytes to train on, {len(held_out)} held out; "
                               f"need {2 * LAGS[-1]} of each")
    if cfg.make_backbone:
        train(model, [*model.parameters()], "language", text, cfg, common.SEEDS[0], bf16=True)
        save_tensors(BACKBONE if cfg.publish else common.ROOT / "runs/hrm_adapter" / BACKBONE.name,
                     {k: v.detach() for k, v in model.state_dict().items()})
        return {"held out, nats": score(model, "language", held_out, cfg.windows)}
    rows = {row: {task: [] for task in TASKS} for row in ROWS}
    for row, task in itertools.product(ROWS, TASKS):
        for seed in common.SEEDS[:cfg.seeds if ROWS[row] else 1]:
            rows[row][task].append(measure(cfg, model, row, task, text, held_out, seed))
        common.log(f"{row:22s} {task:9s}", *(f"{v:.3f}" for v in rows[row][task][-1]["loss"]))
    times, errors = cost(model.embedding.embedding_dim, cfg.rank), convergence(common.SEEDS[0])
    slope = np.polyfit(*np.log(errors).T, 1)[0]
    result = {"rows": rows, "lags": LAGS, "cost_ms": times, "empirical_gramians": errors,
              "empirical_slope": slope, **tables(rows, times)}
    common.log("", *("\n" + result[name] + "\n" for name in ("table", "compression", "cost")))
    folder = common.ROOT / "runs" / "hrm_adapter"
    path = (common.ROOT / "figures" if cfg.publish else folder) / "hrm_adapter.png"
    draw(rows, path)
    common.write_json(folder / "result.json", {"metrics": result, "config": cfg})
    if cfg.publish:
        common.publish("hrm_adapter", "small", result, cfg, env)
    common.log(f"empirical Gramians err as n^{slope:.2f}; {path.relative_to(common.ROOT)}")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
