"""How long the paper's training takes on a GPU, computed from what a token costs (C.1, Table 3).

Run:      not a script; bench.py prints and stores it.

A token costs floating-point operations (flop) and bytes that move to and from memory. A GPU does
both at the rates of its data sheet, one after the other. The paper's own frozen pass on an A100
(Table 3) reaches a share of those rates, which the other two estimates take over.

    forward        once, and once more for gradient checkpointing
    backward       once for a linear map: a frozen weight has no gradient, its input has one;
                   twice for the scan and for the bytes
    head           for half of the tokens, those that are masked; no checkpointing there
    a logit        48 bytes: 2 written, 2 read, 4 for its float32, 4 read, 4 for its logarithm, all
                   this again, and as many for the gradient

Symbols:  linear, scan, head   flop of one token, forward
          moved                bytes of one token
Differs from the paper: it gives no training time. Nothing here is measured, and two GPUs count as
          twice as fast as one.
"""
import dataclasses
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

import common
from hydra_ssm import HydraBert, HydraConfig
from train import PRESETS as TRAINING_PRESETS


class Gpu(NamedTuple):
    """Dense bfloat16 TFLOP/s and TB/s of NVIDIA's data sheet."""
    teraflops: float
    terabytes: float

    def seconds(self, flop, moved):
        """For so many operations, and then so many bytes."""
        return flop / (1e12 * self.teraflops) + moved / (1e12 * self.terabytes)


GPUS = {"A100": Gpu(312, 2.04),    # SXM4-80GB
        "GH200": Gpu(989, 4.0),    # 96GB
        "H200": Gpu(989, 4.8)}     # SXM
COUNTS = (1, 2)                    # of GPUs

# What one layer moves forward at (b, l) = (8, 4096) in bfloat16: gpu_check.py has the first.
TOKENS = 8 * 4096
LAYER_BYTES = 2.12e9
REFERENCE_LAYER_BYTES = 4.97e9
LOGIT_BYTES = 48
PUBLISHED_SECONDS = 0.26743        # Table 3: frozen pass at (8, 4096) on an A100


class Flop(NamedTuple):
    """Floating-point operations of one token, forward."""
    linear: float                  # all layers' linear maps and convolutions
    scan: float                    # all layers' scans
    head: float                    # of the token, where it reaches the head


def count_flop(config, seqlen):
    """The Flop of a token in a sequence of that length: of one layer, counted on tensors without
    data, times their number.
    """
    with torch.device("meta"):
        model = HydraBert(dataclasses.replace(config, n_layer=1))
        ids = torch.zeros(1, seqlen, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        model.hidden(ids)
    counts = {str(operation): n for operation, n in flops.get_flop_counts()["Global"].items()}
    scan = config.n_layer * counts["aten.bmm"] / seqlen
    linear = config.n_layer * sum(counts.values()) / seqlen - scan
    head = 2 * config.d_model * (config.vocab_size + config.d_model)
    return Flop(linear, scan, head)


def training_bytes(config, layer_bytes):
    """What training moves for a token: the layers four times, and half of the logits."""
    layers = config.n_layer * layer_bytes / TOKENS
    logits = LOGIT_BYTES * config.vocab_size / 2
    return 4 * layers + logits


def slower_than_data_sheets(config, flop):
    """How many times the data sheets' seconds the paper's frozen pass takes, with the reference's
    bytes and 6 for each logit.
    """
    moved = config.n_layer * REFERENCE_LAYER_BYTES / TOKENS + 6 * config.vocab_size
    seconds = TOKENS * GPUS["A100"].seconds(sum(flop), moved)
    return PUBLISHED_SECONDS / seconds


def training_hours(tokens, flop, moved, slower=1.0):
    """{GPU: {number of them: hours}} for so many tokens."""
    hours = {}
    for name, gpu in GPUS.items():
        seconds = tokens * gpu.seconds(flop, moved) * slower
        hours[name] = {n: seconds / n / 3600 for n in COUNTS}
    return hours


def paper_run(config=HydraConfig()):
    """The paper's training: what a token costs, and hours[estimate][GPU][number of GPUs]."""
    run = TRAINING_PRESETS["paper"]
    tokens = run["steps"] * run["global_batch"] * run["seqlen"]
    flop = count_flop(config, run["seqlen"])
    training_flop = 3 * flop.linear + 4 * flop.scan + 3 * flop.head / 2
    ours = training_bytes(config, LAYER_BYTES)
    reference = training_bytes(config, REFERENCE_LAYER_BYTES)
    slower = slower_than_data_sheets(config, flop)
    hours = {
        "at the data sheets' rates": training_hours(tokens, training_flop, ours),
        f"at {1 / slower:.0%} of them, as Table 3":
            training_hours(tokens, training_flop, ours, slower),
        "and with the reference's bytes":
            training_hours(tokens, training_flop, reference, slower),
    }
    return {"tokens": tokens, "flop": training_flop, "scan_flop": flop.scan, "bytes": ours,
            "reference_bytes": reference, "slower_than_data_sheets": slower, "hours": hours}


def plan_table(found):
    """Markdown of what `paper_run` returns."""
    head = ["computed, not measured"]
    for name in GPUS:
        head += [f"{n} x {name}, hours" for n in COUNTS]
    rows = []
    for estimate, hours in found["hours"].items():
        cells = [estimate]
        for name in GPUS:
            cells += [f"{hours[name][n]:.1f}" for n in COUNTS]
        rows.append(cells)
    return common.markdown(head, *rows)
