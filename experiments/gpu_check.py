"""One check of the scan and of the whole model on a GPU: right values and gradients, then times.

Run:      python -m experiments.gpu_check                (a CUDA machine; not run yet)
          python -m experiments.gpu_check --device cpu   (rehearses it, small, in 10 seconds)
          python -m experiments.publish runs/gpu_check --name NAME
Last line: "gpu check: frozen pass at (b, l) = (1, 512), on cuda: NN ms"

Before any time is taken, the scan, the fused steps of the mixer, a training step and a CUDA graph
are compared with the same formulas in float64; tests/test_gpu.py does this at more sizes.

What one layer moves forward at (b, l) = (8, 4096) in bfloat16, weights (15 MB) left out. A step
reads what it needs and writes what it makes once; what is read again at once (B and C by each head,
the rows around a row) comes from a cache. tests/test_gpu_check.py counts it from shapes.

    step                                      GB
    in_proj                                 0.27
    convolution and SiLU, one pass          0.23
    D and dt                                0.13
    scan: decays                            0.02
    scan: states                            0.42
    scan: y                                 0.44
    norm and gate, one pass                 0.30
    out_proj                                0.15
    residual and LayerNorm, one pass        0.15
    together                                2.12

The reference Hydra moves 4.97 GB, 2.27 of them in flips, concatenations, rolls and repeats, none of
which is left. More fusion could still save 0.20: D's own pass over x, and x read once for each
direction's states.

Symbols:  b batch, l length; forward_ms and both_ms (with backward) are medians over the rounds
          error   norm of the difference over the norm of what is right, the worst of all tensors
Differs from the paper: this compares implementations on one input in one run; Table 3's protocol is
          `experiments.bench --preset paper`. No GPU time has been measured yet.
"""
import copy
import dataclasses
import functools
import importlib.util
import statistics
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

import common
import hydra_ssm
from cart import cart_loss, cart_weights
from chunk_scan import bidirectional_scan, chunked_scan
from experiments.measure import make_model, milliseconds
from experiments.scan_bench import random_inputs
from hydra_ssm import HydraConfig
from mark_adapters import KERNELS, make_adapter
from train import Denoiser

SMALL = HydraConfig(260, d_model=64, n_layer=2, d_state=16, headdim=16)  # sizes that kernels take
REHEARSAL = HydraConfig(d_model=64, n_layer=1)
SIZES = {"cuda": ((8, 4096), (1, 512)), "cpu": ((1, 64),)}               # (b, l) that are timed

# Of an error. In a training step the angle 1000 t of c_t is rounded before its sine is taken: this
# alone moves float32 gradients by 1e-4. In bfloat16 the roundings of all layers come together.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
TRAINING_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclasses.dataclass(frozen=True)
class Config:
    """Check the scan and the model on a GPU against references, then time them."""
    device: Literal["cuda", "cpu"] = "cuda"  # cpu: a rehearsal with small sizes
    out: str = "runs/gpu_check"              # folder of result.json
    seed: int = 42


# ---- is it right? --------------------------------------------------------------------------------


def worst_error(got, want):
    """The largest error of pairs of tensors: of a zero tensor, the norm of what is in its place.
    NaN where a value is.
    """
    errors = []
    for value, right in zip(got, want, strict=True):
        norm = right.norm()
        errors.append((value.to(right) - right).norm() / torch.where(norm == 0, 1.0, norm))
    return torch.stack(errors).max().item()


def error_of(function, reference, leaves, seed):
    """Of function(*leaves), and of the gradients of its product with a random tensor in those
    leaves that want one, against `reference` on the same values in float64.
    """
    twins = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    y = function(*leaves)
    want = reference(*twins)
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(y.shape, generator=generator).to(y)
    gradients = torch.autograd.grad(y, [v for v in leaves if v.requires_grad], g)
    right = torch.autograd.grad(want, [v for v in twins if v.requires_grad], g.double())
    return worst_error([y.detach(), *gradients], [want.detach(), *right])


def scan_inputs(b, l, config, dtype, device, seed):
    """x, dt, A, B, C, D of a model's sizes as leaves: x, B and C of `dtype`, the others float32."""
    inputs = random_inputs(b, l, config.nheads, config.headdim, config.ngroups, config.d_state,
                           torch.float64, seed)
    dtypes = (dtype, torch.float32, torch.float32, dtype, dtype, torch.float32)
    return [value.detach().to(device, kind).requires_grad_()
            for value, kind in zip(inputs, dtypes, strict=True)]


def scan_error(config, l, dtype, device, seed):
    """Of the scan's y and six gradients, at the sizes of a HydraConfig, against `chunked_scan`."""
    inputs = scan_inputs(2, l, config, dtype, device, seed)
    reference = functools.partial(chunked_scan, chunk_size=config.chunk_size)
    return error_of(bidirectional_scan, reference, inputs, seed)


def convolved(packed, weight, bias, scale, shift):
    """x, B and C behind `hydra_ssm._unpack` in one tensor, B and C with the same scale and shift.
    """
    m = hydra_ssm.Modulation(B_scale=scale, B_shift=shift, C_scale=scale, C_shift=shift)
    config = HydraConfig(d_model=16, d_state=scale.shape[-1], headdim=16)
    _, *outputs, _ = hydra_ssm._unpack(packed, weight, bias, m, None, config)
    return torch.cat([v.flatten(2) for v in outputs], -1)


def fused_steps(l, dtype, device, seed, width=48):
    """{name: (a step that is one pass on a GPU, its inputs)}. Rows come from a projection, packed
    beside others, as in the mixer; weights are frozen.
    """
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(2, l, 2 * width + 5, generator=generator).to(device, dtype)
    conv = torch.randn(width, 1, 7, generator=generator).to(device, dtype)
    weight, bias = torch.randn(2, width, generator=generator).to(device, dtype)
    factors = torch.randn(2, 2, 1, 1, 1, 4, generator=generator).to(device)
    factors = [factor.requires_grad_() for factor in factors]                # b 1 1 g n
    zxBCdt = packed[..., :32 + width + 4].detach().requires_grad_()          # x 32, B and C 16
    x = packed[..., 3:3 + width].detach().requires_grad_()                   # b l width
    z = packed[..., -width:].detach().requires_grad_()
    return {"convolution and SiLU": (convolved, (zxBCdt, conv, bias, *factors)),
            "norm and gate": (hydra_ssm._gated_norm, (x, z, weight)),
            "residual and LayerNorm": (hydra_ssm._add_norm, (x, z, weight, bias))}


def fused_error(step, inputs, seed):
    """Of a fused step's values and gradients, against its own formula in float64, which no kernel
    takes, uncompiled.
    """
    return error_of(step, getattr(step, "__wrapped__", step), inputs, seed)


def step_results(denoiser, batch):
    """The loss and all gradients of one training step, and the loss after it."""
    optimizer = torch.optim.AdamW(denoiser.adapter.parameters(), lr=1e-2)
    weights = cart_weights(batch["masked"])

    def loss():
        return cart_loss(denoiser(**batch), batch["masked"], weights)

    before = loss()
    before.backward()
    gradients = [p.grad.flatten() for p in denoiser.adapter.parameters()]
    optimizer.step()
    with torch.no_grad():
        after = loss()
    return [before.detach(), torch.cat(gradients), after]


def training_error(dtype, device, seed, l=70):
    """Of a training step of a small model with an adapter, against the CPU in float64."""
    torch.manual_seed(seed)
    model = make_model(SMALL, "cpu", dtype)
    adapter = make_adapter("chebyshev", SMALL, mlp_dim=32)
    with torch.no_grad():
        for p in adapter.parameters():
            p += 0.1 * torch.randn(p.shape)  # off the start, where half of the gradients are zero
    denoiser = Denoiser(model, adapter)
    x0 = torch.randint(256, (3, l))                                          # b l
    real = torch.ones(3, l, dtype=torch.bool)
    real[1, l // 2:] = False
    masked = (torch.rand(3, l) < 0.5) & real
    batch = {"x_t": x0.masked_fill(masked, 256), "t": torch.rand(3), "x0": x0, "masked": masked,
             "mask": real}
    want = step_results(copy.deepcopy(denoiser).double(), batch)
    moved = {name: value.to(device) for name, value in batch.items()}
    return worst_error(step_results(denoiser.to(device), moved), want)


class CudaGraph:
    """A function without gradients or host reads as a CUDA graph: one launch in place of hundreds.
    It is recorded at the first call. The output is the same tensor at every call.
    """

    def __init__(self, function):
        self.function = function
        self.graph = None
        self.output = None

    def record(self):
        with torch.no_grad():
            self.function()  # compiles first
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.output = self.function()
        self.graph = graph

    def __call__(self):
        if self.graph is None:
            self.record()
        self.graph.replay()
        return self.output


@torch.no_grad()
def graph_error(dtype, seed, l=70):
    """Of a frozen pass as a CUDA graph on ids that it was not recorded with, against a plain one.
    """
    torch.manual_seed(seed)
    model = make_model(SMALL, "cuda", dtype)
    ids = torch.randint(260, (2, l), device="cuda")
    graph = CudaGraph(functools.partial(model.hidden, ids))
    graph()
    ids.copy_(torch.randint(260, (2, l), device="cuda"))
    got = graph().clone()
    return worst_error([got], [model.hidden(ids)])


class Found(NamedTuple):
    """An error, and what it may be."""
    what: str
    error: float
    bound: float


def find_errors(config, l, dtype, device, seed):
    """Found of everything above in one dtype."""
    bound = BOUNDS[dtype]
    found = [Found("the scan", scan_error(config, l, dtype, device, seed), bound)]
    for name, (step, inputs) in fused_steps(l, dtype, device, seed).items():
        found.append(Found(name, fused_error(step, inputs, seed), bound))
    error = training_error(dtype, device, seed)
    found.append(Found("a training step", error, TRAINING_BOUNDS[dtype]))
    if device == "cuda":
        error = graph_error(dtype, seed)
        found.append(Found("a CUDA graph of the frozen pass", error, bound))
    return found


def check_errors(config, l, device, seed):
    """Rows of everything above. Raises UserError where an error is too large, or not a number."""
    rows = []
    for dtype in BOUNDS:
        for what, error, bound in find_errors(config, l, dtype, device, seed):
            common.log(f"{what} in {dtype}: off by {error:.1e}")
            if not error < bound:
                raise common.UserError(f"gpu check: {what} is wrong in {dtype}, by {error:.1e} of "
                                       f"the norm where {bound} is allowed; its times would mean "
                                       "nothing")
            rows.append({"what": what, "dtype": str(dtype), "error": error, "bound": bound})
    return rows


# ---- how long does it take? ----------------------------------------------------------------------


class Case(NamedTuple):
    """What is timed, and the leaves whose gradients are."""
    part: Literal["scan", "model"]
    kind: str                # an implementation, or an adapter
    function: Callable
    inputs: list


def mamba_scan(x, dt, A, B, C, D):
    """mamba-ssm's scan as Hydra calls it (github.com/goombalab/hydra at 0daa208, modules/hydra.py):
    on a batch of both directions, one of them flipped, and with its outputs shifted by one.
    """
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def both_directions(v):
        return torch.cat([v[:, :, 0], v[:, :, 1].flip(1)])                   # 2b l ...

    y = mamba_chunk_scan_combined(
        torch.cat([x, x.flip(1)]), both_directions(dt), A, both_directions(B), both_directions(C),
        chunk_size=256)                                                      # 2b l h p
    shifted = F.pad(y[:, :-1], (0, 0, 0, 0, 1, 0))
    forward, backward = shifted.chunk(2)                                     # b l h p
    return forward + backward.flip(1) + D[..., None].to(x.dtype) * x


def scan_cases(config, b, l, dtype, device, seed):
    """The scan by each implementation that is there."""
    inputs = scan_inputs(b, l, config, dtype, device, seed)
    inputs[2] = inputs[2][0].detach().requires_grad_()  # one A for all: mamba-ssm knows no other
    plain = functools.partial(chunked_scan, chunk_size=config.chunk_size)
    scans = {"kernels": bidirectional_scan, "PyTorch path": plain}
    if importlib.util.find_spec("mamba_ssm"):
        scans["mamba-ssm as Hydra uses it"] = mamba_scan
    return [Case("scan", kind, functools.partial(scan, *inputs), inputs)
            for kind, scan in scans.items()]


def conditioned_pass(model, adapter, ids, t):
    return model.hidden(ids, adapter(t))


def model_cases(model, b, l, device):
    """The whole model with each adapter; frozen, also as a CUDA graph."""
    config = model.config
    ids = torch.randint(config.vocab_size, (b, l), device=device)
    t = torch.full((b,), 0.5, device=device)
    cases = []
    for kernel in KERNELS:
        adapter = make_adapter(kernel, config).to(device)
        trained = [p for p in adapter.parameters() if p.requires_grad]
        function = functools.partial(conditioned_pass, model, adapter, ids, t)
        cases.append(Case("model", kernel, function, trained))
    if device == "cuda":
        graph = CudaGraph(functools.partial(model.hidden, ids))
        cases.append(Case("model", "none, as a CUDA graph", graph, []))
    return cases


def median_ms(function, device, rounds):
    for _ in range(2):
        function()  # compiles, and maps memory
    return statistics.median(milliseconds(function, device) for _ in range(rounds))


def forward_and_backward(case, device, rounds=10):
    """Median ms of a Case, and with the gradients of its inputs; on a GPU, its peak MiB."""
    def forward():
        with torch.no_grad():
            case.function()

    def both():
        y = case.function()
        torch.autograd.grad(y, case.inputs, torch.ones_like(y), allow_unused=True)

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = {"forward_ms": median_ms(forward, device, rounds)}
    if case.inputs:
        row["both_ms"] = median_ms(both, device, rounds)
    if device == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return row


def time_cases(cases, b, l, device):
    """A row for each Case. One that fails has its error there: the others are worth having."""
    rows = []
    for case in cases:
        row = {"part": case.part, "kind": case.kind, "batch": b, "length": l}
        try:
            row |= forward_and_backward(case, device)
        except Exception as error:  # of any library here
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
        common.log(describe(row))
    return rows


def describe(row):
    """A row of time_cases as one line."""
    parts = [f"{row['part']}, {row['kind']} at ({row['batch']}, {row['length']}):"]
    for name in ("forward_ms", "both_ms", "peak_mib"):
        if name in row:
            parts.append(f"{name} {row[name]:.2f}")
    if "failed" in row:
        parts.append(row["failed"])
    return "  ".join(parts)


# ---- command line --------------------------------------------------------------------------------


def measure_times(config, device, seed):
    """Rows of every scan and model at every size."""
    model = make_model(config, device)
    dtype = model.word_embeddings.weight.dtype
    rows = []
    for b, l in SIZES[device]:
        cases = scan_cases(config, b, l, dtype, device, seed) + model_cases(model, b, l, device)
        rows += time_cases(cases, b, l, device)
    return rows


def last_line(row, device):
    """row: of the frozen pass."""
    time = f"{row['forward_ms']:.1f} ms" if "forward_ms" in row else "failed"
    return (f"gpu check: frozen pass at (b, l) = ({row['batch']}, {row['length']}), on {device}: "
            f"{time}")


def main(cfg):
    device = common.pick_device(cfg.device)
    config = HydraConfig() if device == "cuda" else REHEARSAL
    torch.manual_seed(cfg.seed)
    env = common.banner("gpu_check.py", cfg, device)
    _, l = SIZES[device][0]
    result = {"errors": check_errors(config, l, device, cfg.seed)}
    result["times"] = measure_times(config, device, cfg.seed)
    failed = [f"{row['part']}, {row['kind']}" for row in result["times"] if "failed" in row]
    result["failed"] = failed
    common.save_result(common.ROOT / cfg.out / "result.json", result, cfg, env)
    frozen = [row for row in result["times"] if (row["part"], row["kind"]) == ("model", "none")]
    common.log(last_line(frozen[-1], device))
    if failed:
        raise common.UserError(f"gpu check: {', '.join(failed)} failed; the rows of "
                               f"{cfg.out}/result.json say how")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
