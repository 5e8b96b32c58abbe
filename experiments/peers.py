"""A layer of ours beside two peers of its width on a CPU: a Mamba-2 layer and a BERT layer.

Run:      pip install transformers   (into an environment of its own; nothing else here needs it)
          python -m experiments.peers   (4 to 10 minutes, one thread)
          python -m experiments.publish runs/peers --name peers
Last line: "at 4096 tokens, times ours: Mamba-2 (chunks of 256) N.N, ..., BERT N.N"

A forward pass of one layer of width 768 at batch 1, random weights, float32, no gradient. Ours and
BERT read the text from both sides, Mamba-2 from one. Mamba-2 is the PyTorch code that transformers
runs where its kernels are absent, as on a CPU; its chunks are of 256 tokens by default, ours of 64,
and both are timed. BERT's attention is PyTorch's scaled_dot_product_attention. In a round each is
timed once, one after the other, so a ratio is of neighbours in time; the next round begins with
another layer. How fast Mamba-2 is depends on the version of transformers, which is stored.

Symbols:  l        tokens
          ratio    median over the rounds of a peer's time over ours; in brackets the two rounds
                   between which its true median lies with 95 % or more (binomial, any distribution)
Differs from the paper: it has no such comparison. These are implementations on one CPU; on a GPU
          all three have kernels. A layer of BERT holds attention and an MLP, ours a mixer alone.
"""
import dataclasses
import functools
import importlib.util
import math
import os
import statistics
from importlib import metadata

import torch

import common
from experiments.measure import make_model, milliseconds
from hydra_ssm import HydraConfig, Modulation

OURS = "ours"
NEEDED = ("experiments.peers needs transformers, which is not installed: pip install transformers, "
          "best into an environment of its own")


@dataclasses.dataclass(frozen=True)
class Config:
    """Time a layer of ours, of Mamba-2 and of BERT, on a CPU."""
    length: tuple[int, ...] = (512, 2048, 4096)
    rounds: int = 15           # each times every layer once
    threads: int = 1
    d_model: int = 768
    out: str = "runs/peers"    # folder of result.json
    seed: int = 42


# ---- the layers ----------------------------------------------------------------------------------


def hydra_config(d_model):
    """One layer of the released shape, whatever its width; the vocabulary is not used."""
    return HydraConfig(vocab_size=8, d_model=d_model, n_layer=1)


def our_layer(d_model):
    model = make_model(hydra_config(d_model), "cpu")
    modulation, = Modulation().by_layer(model)  # of the frozen backbone
    return model.layers[0], functools.partial(model.layers[0], m=modulation)


def mamba2_layer(d_model, chunk_size):
    """transformers' Mamba-2 with our sizes: state, heads, expansion, one group."""
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Block, Mamba2Config
    ours = hydra_config(d_model)
    config = Mamba2Config(hidden_size=d_model, num_heads=ours.nheads, head_dim=ours.headdim,
                          state_size=ours.d_state, expand=ours.expand, n_groups=ours.ngroups,
                          num_hidden_layers=1, chunk_size=chunk_size)
    layer = Mamba2Block(config, 0).eval()
    layer.mixer.init_mamba2_weights()  # the block alone leaves some of them as they come
    return layer, layer


def bert_layer(d_model):
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer
    config = BertConfig(hidden_size=d_model, num_attention_heads=d_model // 64,
                        intermediate_size=4 * d_model, attn_implementation="sdpa")
    layer = BertLayer(config).eval()
    return layer, layer


def make_layers(d_model):
    """{name: (module, a function of u (b, l, d) -> (b, l, d))}. Raises UserError."""
    if importlib.util.find_spec("transformers") is None:
        raise common.UserError(NEEDED)
    return {OURS: our_layer(d_model),
            "Mamba-2 (chunks of 256)": mamba2_layer(d_model, 256),
            "Mamba-2 (chunks of 64)": mamba2_layer(d_model, 64),
            "BERT": bert_layer(d_model)}


# ---- timing --------------------------------------------------------------------------------------


def rotated(names, k):
    """The names in a circle, from the k-th."""
    k %= len(names)
    return names[k:] + names[:k]


@torch.no_grad()
def time_layers(functions, length, d_model, rounds, seed):
    """{name: [ms, one for each round]} on u (1, l, d). Raises UserError where one is no layer."""
    u = torch.randn(1, length, d_model, generator=torch.Generator().manual_seed(seed))
    for name, function in functions.items():  # the first call is not timed: it maps memory
        y = function(u)
        if y.shape != u.shape or not y.isfinite().all():
            raise common.UserError(f"{name} gives {tuple(y.shape)} of {tuple(u.shape)}, or values "
                                   "that are not finite: this version of it is no such layer")
    times = {name: [] for name in functions}
    for k in common.progress(range(rounds), desc=f"rounds at {length} tokens"):
        for name in rotated(list(functions), k):
            times[name].append(milliseconds(functools.partial(functions[name], u), "cpu"))
    return times


# ---- tables --------------------------------------------------------------------------------------


def ends_of_median(values):
    """(low, high): the innermost of the sorted values that hold the true median between them with
    95 % or more; the outermost where there are too few values for that.
    """
    values = sorted(values)
    n = len(values)
    k = 0        # values left out at each end
    outside = 1  # 2^n / 2 times the chance that the median lies out of the k-th
    while 2 * (outside + math.comb(n, k + 1)) <= 0.05 * 2 ** n:
        k += 1
        outside += math.comb(n, k)
    return values[k], values[-1 - k]


def ratios(times, name):
    """A peer's time over ours, in each round."""
    return [ms / ours for ms, ours in zip(times[name], times[OURS], strict=True)]


def time_table(found):
    """Markdown of {length: `time_layers`}."""
    peers = [name for name in next(iter(found.values())) if name != OURS]
    head = ["tokens", f"{OURS}, ms"]
    for name in peers:
        head += [f"{name}, ms", "times ours"]
    lines = []
    for length, times in found.items():
        line = [f"{int(length):,}", f"{statistics.median(times[OURS]):,.0f}"]
        for name in peers:
            each = ratios(times, name)
            low, high = ends_of_median(each)
            line += [f"{statistics.median(times[name]):,.0f}",
                     f"{statistics.median(each):.2f} ({low:.2f} to {high:.2f})"]
        lines.append(line)
    return common.markdown(head, *lines)


def last_line(found):
    length, times = list(found.items())[-1]
    parts = [f"{name} {statistics.median(ratios(times, name)):.1f}"
             for name in times if name != OURS]
    return f"at {length} tokens, times ours: {', '.join(parts)}"


# ---- command line --------------------------------------------------------------------------------


def load_average():
    """Processes that want to run, over the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def main(cfg):
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    layers = make_layers(cfg.d_model)
    env = common.banner("bench", cfg)  # the script under which this is published
    functions = {name: function for name, (_, function) in layers.items()}
    parameters = {}
    for name, (module, _) in layers.items():
        parameters[name] = sum(p.numel() for p in module.parameters())
    load = [load_average()]
    found = {}
    for length in cfg.length:
        found[length] = time_layers(functions, length, cfg.d_model, cfg.rounds, cfg.seed)
    load.append(load_average())
    result = {"ms": found, "parameters": parameters, "table": time_table(found),
              "transformers": metadata.version("transformers"), "load": load}
    common.save_result(common.ROOT / cfg.out / "result.json", result, cfg, env)
    common.log(f"transformers {result['transformers']}; n = {cfg.rounds} rounds, medians\n\n"
               f"{result['table']}\n\n{last_line(found)}")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
