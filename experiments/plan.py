"""How long the paper's training takes on a GPU, computed from what a token costs (C.1, Table 3).

Run:      python -m experiments.plan        (seconds; bench.py stores the first of its tables)
Last line: "estimates, not measured: a frozen forward at (8, 4096) in NN ms on an A100, ..."

A token costs floating-point operations (flop) and bytes that move to and from memory. A GPU does
both at the rates of its data sheet, one after the other. The paper's own frozen pass on an A100
(Table 3) reaches a share of those rates, which the other two estimates take over.

    forward        once
    backward       once for a linear map: a frozen weight has no gradient, its input has one;
                   twice for the scan and for the bytes
    head           for half of the tokens, those that are masked; forward twice, as it is recomputed
    a logit        14 bytes: 2 written, 2 read for the loss, all this again, 2 read and 2 written
                   for the gradient, 2 read

Symbols:  linear, scan, head   flop of one token, forward
          moved                bytes of one token
Differs from the paper: it gives no training time. Nothing here is measured, and two GPUs count as
          twice as fast as one.
"""
import dataclasses
import json
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

import common
from hydra_ssm import HydraBert, HydraConfig
from train import PRESETS as TRAINING_PRESETS


class Gpu(NamedTuple):
    """Dense bfloat16 TFLOP/s, TB/s, and instructions of a warp per second in 1e12, of NVIDIA's data
    sheet: multiprocessors x 4 x boost clock.
    """
    teraflops: float
    terabytes: float
    terawarps: float

    def seconds(self, flop, moved):
        """For so many operations, and then so many bytes."""
        return flop / (1e12 * self.teraflops) + moved / (1e12 * self.terabytes)


GPUS = {"A100": Gpu(312, 2.04, 108 * 4 * 1.41e-3),    # SXM4-80GB
        "GH200": Gpu(989, 4.0, 132 * 4 * 1.98e-3),    # 96GB
        "H200": Gpu(989, 4.8, 132 * 4 * 1.98e-3)}     # SXM
COUNTS = (1, 2)                    # of GPUs

# What one layer moves forward at (b, l) = (8, 4096) in bfloat16: gpu_check.py has the first.
TOKENS = 8 * 4096
LAYER_BYTES = 2.12e9
REFERENCE_LAYER_BYTES = 4.97e9
LOGIT_BYTES = 14
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
    """What training moves for a token: the layers three times, and half of the logits."""
    layers = config.n_layer * layer_bytes / TOKENS
    logits = LOGIT_BYTES * config.vocab_size / 2
    return 3 * layers + logits


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
    training_flop = 2 * flop.linear + 3 * flop.scan + 3 * flop.head / 2
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


# ---- how much memory does a step take? -----------------------------------------------------------


MEMORIES = (40, 80, 96, 141)       # GB of an A100, an A100 or H100, a GH200, an H200
USABLE = 0.85                      # of them: the rest is CUDA's own, and the allocator's gaps
LOGITS_HELD = 4                    # bytes of a logit of one chunk, and of its gradient
CHUNK_ROWS = 4096                  # logits at a time (cart.masked_cross_entropy)


def saved_bytes(config):
    """What a token leaves in one layer for the backward pass on a GPU, without checkpointing."""
    inner, h = config.d_inner, config.nheads
    packed = 2 * config.d_in_proj                                 # z, x, B, C, dt: in_proj's output
    convolved = 2 * (inner + 4 * config.ngroups * config.d_state)
    states = 2 * 2 * inner * config.d_state / 64                  # of each chunk of 64, direction
    y = 2 * inner                                                 # the scan's output
    residual = 2 * config.d_model                                 # the LayerNorm's input
    float32 = 4 * (3 * 2 * h + h)                                 # dt twice, sums, D
    return packed + convolved + states + y + residual + float32


def step_bytes(config, micro_batch, seqlen):
    """Peak of a training step: all layers of a micro-batch, the gradients in one layer, taken for
    as much as it saves, one chunk of logits, the weights.
    """
    layers = micro_batch * seqlen * (config.n_layer + 1) * saved_bytes(config)
    logits = CHUNK_ROWS * config.vocab_size * LOGITS_HELD
    weights = 2 * 112e6
    return layers + logits + weights


def micro_batches(config=HydraConfig(), seqlen=4096):
    """{GB: the largest power of two of sequences that fits} for MEMORIES."""
    found = {}
    for gigabytes in MEMORIES:
        fitting = 1
        while step_bytes(config, 2 * fitting, seqlen) <= USABLE * 1e9 * gigabytes:
            fitting *= 2
        found[gigabytes] = fitting
    return found


# ---- and how long a forward pass? ----------------------------------------------------------------


class Step(NamedTuple):
    """What one step of a layer takes at (b, l) = (8, 4096) in bfloat16."""
    name: str
    bytes: float
    flop: float = 0.0
    warps: float = 0.0             # instructions of a warp, of all programs together


BANDWIDTH, ARITHMETIC, ISSUE = 0.8, 0.65, 0.5  # shares of the data sheet that count as reached
LAUNCHES = {  # a forward kernel: how often a program runs its loop, its warps, its programs
    "conv_fwd": (8, 1, 7 * 64 * 8),            # blocks of 256 channels, strips of 64 rows, b
    "state_scan": (64, 4, 24 * 2 * 8),         # heads, directions, b
    "mix": (2, 4, 24 * 64 * 8),                # heads, chunks, b
    "gate_fwd": (1, 4, 8 * 4096)}              # rows


def kernel_steps(kernels, sm):
    """Steps of the forward kernels in results/chunk_scan/triton_aot.json."""
    steps = []
    for row in kernels:
        backward = row.get("BWD") or row.get("MASKED")
        if row["sm"] != sm or row["dtype"] != "bfloat16" or backward:
            continue
        if row["kernel"] in LAUNCHES:
            turns, warps, programs = LAUNCHES[row["kernel"]]
            executed = row["instructions"] + (turns - 1) * row["loop"]
            steps.append(Step(row["kernel"], 1e9 * row["gigabytes"],
                              warps=executed * warps * programs))
    return steps


def layer_steps(config, kernels, sm):
    """All Steps of one layer, forward."""
    d, inner = config.d_model, config.d_inner
    packed = config.d_in_proj
    linear = [Step("in_proj", 2 * TOKENS * (d + packed), 2 * TOKENS * d * packed),
              Step("out_proj", 2 * TOKENS * (inner + d), 2 * TOKENS * inner * d)]
    small = [Step("D, dt and decays", 0.15e9), Step("residual and LayerNorm", 2 * TOKENS * 3 * d)]
    return linear + small + kernel_steps(kernels, sm)


def forward_ms(config, kernels, name):
    """Of all layers at (8, 4096): each step takes what bytes, operations or instructions take."""
    gpu = GPUS[name]
    seconds = 0.0
    for step in layer_steps(config, kernels, 80 if name == "A100" else 90):
        seconds += max(step.bytes / (BANDWIDTH * 1e12 * gpu.terabytes),
                       step.flop / (ARITHMETIC * 1e12 * gpu.teraflops),
                       step.warps / (ISSUE * 1e12 * gpu.terawarps))
    return 1e3 * config.n_layer * seconds


# ---- command line --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """The paper's run on GPUs, computed from shapes and compiled code. It has no settings."""


def main(cfg):
    env = common.banner("plan.py", cfg)
    plan = paper_run()
    table = plan_table(plan)
    common.log(table)
    sizes = [f"{n} in {gigabytes} GB" for gigabytes, n in micro_batches().items()]
    common.log("\n--micro-batch of the paper's step without checkpointing, by memory: "
               + ", ".join(sizes))
    path = common.SOURCE / "results" / "chunk_scan" / "triton_aot.json"
    kernels = json.loads(path.read_text("utf-8"))["metrics"]["kernels"]
    ms = {name: forward_ms(HydraConfig(), kernels, name) for name in GPUS}
    common.log(f"estimates, not measured: a frozen forward at (8, 4096) in {ms['A100']:.0f} ms on "
               f"an A100, {ms['H200']:.0f} on an H200")
    result = {"plan": plan, "table": table, "micro_batches": micro_batches(),
              "forward_ms": ms, "shares": {"bandwidth": BANDWIDTH, "arithmetic": ARITHMETIC,
                                           "issue": ISSUE}}
    path = common.ROOT / "runs" / "plan" / "result.json"
    common.save_result(path, result, cfg, env)
    common.log(f"wrote {path.relative_to(common.ROOT)}")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
