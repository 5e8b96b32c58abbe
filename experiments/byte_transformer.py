"""A small frozen transformer, two tasks for it, and adapters that stand beside its sub-layers.

What the adapters of hrm_adapter.py are tried on. The transformer reads bytes and attends to the
last 16, which is 60 through its four layers: further back only what an adapter remembers counts.

Run:      not a script; hrm_adapter.py uses it, and `python -m experiments.hrm_adapter
          --make-backbone ...` trains the transformer (its flags are in assets/README.md).
Symbols:  h        what a sub-layer reads, b l m            w     the window of attention
          ids      bytes, n l, n windows of l of them       target  the right answers, n l
          distance from the key to a question about it (recall), or into the window (language)
Differs from the paper: Mistral-7B, with attention to everything, is not a small file. Its layer is
          pre-norm too: x + Attn(norm(x)), then x + MLP(norm(x)) (16), (17).
"""
import contextlib
import math
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import load_file
from torch import nn

import common
from data import noise_generator
from text import ByteTokenizer
from train import check_finite, learning_rate

BACKBONE = common.SOURCE / "assets" / "transformer_small.safetensors"
KEYS = torch.tensor(list(b"<>[]"))    # one of them is to be remembered: chance has ln 4 nats
DISTANCES = (32, 64, 128, 256, 512)   # bytes
SPACE = ord(" ")
CUE = ByteTokenizer.mask_id           # the question: which key was it?
UNSCORED = -100                       # a target that is none


# ---- the transformer -----------------------------------------------------------------------------
class WindowAttention(nn.Module):
    """Causal attention to the last `window` bytes, O(l window), with a bias for each distance.

    The text is cut into chunks of `window`; a chunk attends to itself and to the one before it.
    Before the first lie keys and values of zero.
    """

    def __init__(self, d_model, nheads, window):
        super().__init__()
        self.nheads = nheads
        self.window = window
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.bias = nn.Parameter(torch.zeros(nheads, window))

    def in_chunks(self, u):
        return rearrange(u, "b (c w) (h p) -> b c h w p", w=self.window, h=self.nheads)

    def forward(self, x):
        b, l, _ = x.shape
        w = self.window
        x = F.pad(x, (0, 0, 0, -l % w))                                   # b (c w) m
        q = self.in_chunks(self.q(x))                                     # b c h w p
        k = with_chunk_before(self.in_chunks(self.k(x)))                  # b c h 2w p
        v = with_chunk_before(self.in_chunks(self.v(x)))                  # b c h 2w p
        distance = torch.arange(w)[:, None] + w - torch.arange(2 * w)     # w 2w, query to key
        outside = (distance < 0) | (distance >= w)
        bias = self.bias[:, distance.clamp(0, w - 1)]                     # h w 2w
        bias = bias.masked_fill(outside, -math.inf)
        y = F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bias)
        y = rearrange(y, "(b c) h w p -> b (c w) (h p)", b=b)
        return self.out(y[:, :l])                                         # b l m


def with_chunk_before(u):
    """b c h w p -> b c h 2w p: each chunk behind the one before it, the first behind zeros."""
    before = F.pad(u, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat([before, u], 3)


def transformer_layer(d_model, nheads, window):
    """The parts of a layer. The sites for adapters are `attention`, its q and v, and `mlp`."""
    return nn.ModuleDict({
        "norm1": nn.LayerNorm(d_model),
        "attention": WindowAttention(d_model, nheads, window),
        "norm2": nn.LayerNorm(d_model),
        "mlp": nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(),
                             nn.Linear(4 * d_model, d_model))})


class ByteTransformer(nn.Module):
    """ids, b l -> logits, b l v: causal, pre-norm, any length; frozen where it is given weights.

    weights: a safetensors file such as BACKBONE, or None for random ones.
    """

    def __init__(self, weights=None, vocab_size=260, d_model=64, n_layer=4, nheads=4, window=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=0.05)
        layers = [transformer_layer(d_model, nheads, window) for _ in range(n_layer)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(d_model)
        if weights:
            self.load_state_dict(load_file(weights))
            self.requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids)                                           # b l m
        for layer in self.layers:
            x = x + layer["attention"](layer["norm1"](x))                 # (16)
            x = x + layer["mlp"](layer["norm2"](x))                       # (17)
        return self.norm(x) @ self.embedding.weight.T                     # b l v


# ---- adapters beside frozen sub-layers -----------------------------------------------------------
class Insertion:
    """Two hooks that add adapter(h) to what a sub-layer makes of h."""

    def __init__(self, adapter):
        self.adapter = adapter
        self.read = []      # what the sub-layer reads, until it answers
        self.used = False

    def note_input(self, module, args):
        self.read.append(args[0])

    def add_output(self, module, args, output):
        self.used = True
        y = self.adapter(self.read.pop())
        if isinstance(output, tuple):
            return (output[0] + y, *output[1:])
        return output + y


@contextlib.contextmanager
def inserted(model, adapters):
    """Within this context, adapter(h) is added to the output of the submodule `name` that reads h,
    for each item of adapters, {name: adapter} (18). Parameters and keys of the model stay.

    name "one:other" reads what `one` reads and adds to what `other` gives: "linear1:linear2" is the
    MLP of torch.nn.TransformerEncoderLayer. Of an output that is a tuple (MultiheadAttention) the
    first changes. Raises UserError for a name that does not exist or, at the end, is never called.
    """
    modules = dict(model.named_modules())
    insertions = {}
    with contextlib.ExitStack() as hooks:
        for name, adapter in adapters.items():
            source, _, target = name.partition(":")
            target = target or source
            check_site(name, source, target, modules)
            insertion = Insertion(adapter)
            insertions[name] = insertion
            hooks.enter_context(modules[source].register_forward_pre_hook(insertion.note_input))
            hooks.enter_context(modules[target].register_forward_hook(insertion.add_output))
        yield
    for name, insertion in insertions.items():
        if not insertion.used:  # such as the out_proj of torch.nn.MultiheadAttention
            raise common.UserError(f"the model never calls {name!r}: give another submodule")


def check_site(name, source, target, modules):
    """Refuse a name that is not among modules, {name: module}, and inputs that are not b l m."""
    exists = source in modules and target in modules
    batch_first = True
    for module in modules.values():
        if getattr(module, "batch_first", True) is False:
            batch_first = False
    if not (exists and batch_first):
        raise common.UserError(f"no adapter can be inserted at {name!r}: give a name of "
                               "named_modules(), and all of them need batch_first=True")


# ---- the two tasks -------------------------------------------------------------------------------
class Task(NamedTuple):
    """What a model is trained and scored on."""
    name: str               # in result files
    make_batch: Callable    # (text, size, distance, generator) -> ids, target: n l, about size ids
    choices: Any            # index of the logits that an answer is chosen from
    at_distance: Callable   # (nats n l, distance) -> those of them that are asked at that distance


def recall_batch(text, size, distance, generator):
    """Text behind a key, with a cue in place of every 32nd byte up to `distance`. Target: which
    key it was, at each cue. The answer is never shown, and what else looks like a key is blanked.
    """
    n = size // distance
    start = torch.randint(len(text) - distance, (n, 1), generator=generator)
    key = torch.randint(len(KEYS), (n, 1), generator=generator)
    cues = torch.arange(DISTANCES[0], distance + 1, DISTANCES[0])
    ids = text[start + torch.arange(distance + 1)]                        # n l
    ids[torch.isin(ids, KEYS)] = SPACE
    ids[:, :1] = KEYS[key]
    ids[:, cues] = CUE
    target = torch.full_like(ids, UNSCORED)                               # n l
    target[:, cues] = key
    return ids, target


def recall_at_distance(nats, distance):
    return nats[:, distance]


def language_batch(text, size, distance, generator):
    """Windows of 512 bytes, whatever the distance. Target: the next byte."""
    length = DISTANCES[-1]
    start = torch.randint(len(text) - length, (size // length, 1), generator=generator)
    ids = text[start + torch.arange(length + 1)]                          # n l+1
    return ids[:, :-1], ids[:, 1:]


def language_at_distance(nats, distance):
    """Of the bytes from half as far."""
    return nats[:, distance // 2:distance]


RECALL = Task("recall", recall_batch, KEYS, recall_at_distance)
LANGUAGE = Task("language", language_batch, slice(None), language_at_distance)
TASKS = (RECALL, LANGUAGE)


# ---- training and scoring ------------------------------------------------------------------------
def task_nats(model, task, ids, target):
    """-log p of the target among the choices of the task, n l; 0 where nothing is asked."""
    logits = model(ids)[..., task.choices].float()                        # n l choices
    nats = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return nats.view_as(target)


def train_on_task(model, parameters, task, text, cfg, seed, bf16=False):
    """Adam on the mean loss. cfg: steps, size (bytes of a step) and lr, the peak of the rate.
    Distances take turns; text and keys of a step depend on (seed, step) alone.
    """
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98))
    warmup = max(1, cfg.steps // 20)
    for step in common.progress(range(cfg.steps), desc=task.name):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg.steps, warmup, cfg.lr, 0.02)
        distance = DISTANCES[step % len(DISTANCES)]
        ids, target = task.make_batch(text, cfg.size, distance, noise_generator(seed, step))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            nats = task_nats(model, task, ids, target)
            loss = nats.sum() / (target != UNSCORED).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        check_finite(step + 1, loss, norm, "lower --lr or --gate")
        optimizer.step()


@torch.no_grad()
def loss_by_distance(model, task, text, n, batch=16):
    """Mean nats at each of DISTANCES, in n windows of 512 bytes that are always the same."""
    length = DISTANCES[-1]
    ids, target = task.make_batch(text, n * length, length, noise_generator(0))
    nats = []
    for some_ids, some_target in zip(ids.split(batch), target.split(batch)):
        nats.append(task_nats(model, task, some_ids, some_target))
    nats = torch.cat(nats)                                                # n l
    return [task.at_distance(nats, distance).mean().item() for distance in DISTANCES]
