"""One check of the scan and of the whole model on a GPU: right values and gradients, then times.

Run:      python -m experiments.gpu_check                (a CUDA machine, 6 minutes at most; not run
                                                          yet; it needs no tyro)
          python -m experiments.gpu_check --device cpu   (rehearses it, small, in 30 seconds)
          python -m experiments.publish runs/gpu_check --name NAME
Last line: "gpu check: frozen pass at (b, l) = (1, 512), on cuda: NN ms"

Before any time is taken, the scan, the fused steps of the mixer, a training step and a CUDA graph
are compared with the same formulas in float64; tests/test_gpu.py does this at more sizes. Where one
of them is wrong, no time is taken. Where one fails or faults, the others are worth having: cases
run in groups, each in a fresh process with a time limit (isolated.py), and result.json is written
after each case. The limits of the groups, SECONDS, add up to 340 s; that is what bounds the whole.

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
import sys
from typing import Literal

import torch
import torch.nn.functional as F

import common
import hydra_ssm
from cart import cart_loss, cart_weights
from chunk_scan import bidirectional_scan, chunked_scan
from experiments.isolated import Group, run_group
from experiments.measure import make_model, milliseconds
from experiments.scan_bench import random_inputs
from hydra_ssm import HydraConfig
from mark_adapters import KERNELS, make_adapter
from train import Denoiser

SMALL = HydraConfig(260, d_model=64, n_layer=2, d_state=16, headdim=16)  # sizes that kernels take
REHEARSAL = HydraConfig(d_model=64, n_layer=1)
SIZES = {"cuda": ((8, 4096), (1, 512)), "cpu": ((1, 64),)}               # (b, l) that are timed

# Limits of the two groups of values, and of those of times at each size. An estimate: a process
# starts in 10 s, the scan's kernels compile in 8 s for each dtype and model size, the fused steps
# in 20 s; a later process finds them in the caches of Triton and torch.compile. A model's times at
# (8, 4096) take 2 s for each adapter.
SECONDS = {"values": (80, 80), "scan": (30, 25), "model": (70, 55)}

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


def value_cases(dtype, device):
    """What is compared in one dtype, with what is allowed: the rows of `value_functions`."""
    steps = fused_steps(1, torch.float32, "cpu", 0)
    names = ["the scan", *steps, "a training step"]
    if device == "cuda":
        names.append("a CUDA graph of the frozen pass")
    cases = []
    for name in names:
        bounds = TRAINING_BOUNDS if name == "a training step" else BOUNDS
        cases.append({"what": name, "dtype": str(dtype), "bound": bounds[dtype]})
    return cases


def value_functions(config, l, dtype, device, seed):
    """For each of `value_cases` a function that finds its error."""
    functions = [functools.partial(scan_error, config, l, dtype, device, seed)]
    for step, inputs in fused_steps(l, dtype, device, seed).values():
        functions.append(functools.partial(fused_error, step, inputs, seed))
    functions.append(functools.partial(training_error, dtype, device, seed))
    if device == "cuda":
        functions.append(functools.partial(graph_error, dtype, seed))
    return [functools.partial(as_row, function) for function in functions]


def as_row(function):
    return {"error": function()}


# ---- how long does it take? ----------------------------------------------------------------------


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


def scans():
    """The implementations of the scan that are there, by name."""
    found = {"kernels": bidirectional_scan, "PyTorch path": chunked_scan}
    if importlib.util.find_spec("mamba_ssm"):
        found["mamba-ssm as Hydra uses it"] = mamba_scan
    return found


def scan_functions(config, b, l, device, seed):
    """For each of `scans` a function that times it."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = scan_inputs(b, l, config, dtype, device, seed)
    inputs[2] = inputs[2][0].detach().requires_grad_()  # one A for all: mamba-ssm knows no other
    functions = []
    for scan in scans().values():
        if scan is chunked_scan:
            scan = functools.partial(chunked_scan, chunk_size=config.chunk_size)
        function = functools.partial(scan, *inputs)
        functions.append(functools.partial(forward_and_backward, function, inputs, device))
    return functions


GRAPH = "none, as a CUDA graph"


def model_kinds(device):
    """The adapters that the whole model is timed with."""
    kinds = list(KERNELS)
    if device == "cuda":
        kinds.append(GRAPH)
    return kinds


def model_functions(config, b, l, device, seed):
    """For each of `model_kinds` a function that times it; each makes its own adapter."""
    torch.manual_seed(seed)
    model = make_model(config, device)
    ids = torch.randint(config.vocab_size, (b, l), device=device)
    t = torch.full((b,), 0.5, device=device)
    return [functools.partial(time_model, model, kind, ids, t) for kind in model_kinds(device)]


def time_model(model, kind, ids, t):
    """`forward_and_backward` of the model with an adapter, or of the frozen one as a CUDA graph."""
    device = ids.device.type
    if kind == GRAPH:
        graph = CudaGraph(functools.partial(model.hidden, ids))
        return forward_and_backward(graph, [], device)
    adapter = make_adapter(kind, model.config, init="default").to(device)  # quickly made
    trained = [p for p in adapter.parameters() if p.requires_grad]
    return forward_and_backward(lambda: model.hidden(ids, adapter(t)), trained, device)


def median_ms(function, device, rounds):
    for _ in range(2):
        function()  # compiles, and maps memory
    return statistics.median(milliseconds(function, device) for _ in range(rounds))


def forward_and_backward(function, inputs, device, rounds=10):
    """Median ms of a function, and with the gradients of `inputs`; on a GPU, its peak MiB."""
    def forward():
        with torch.no_grad():
            function()

    def both():
        y = function()
        torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = {"forward_ms": median_ms(forward, device, rounds)}
    if inputs:
        row["both_ms"] = median_ms(both, device, rounds)
    if device == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return row


# ---- the groups ----------------------------------------------------------------------------------


def value_groups(config, l, device, seed):
    """What is compared with a reference, by dtype."""
    groups = []
    for dtype, seconds in zip(BOUNDS, SECONDS["values"], strict=True):
        groups.append(Group(f"values in {dtype}", value_cases(dtype, device), value_functions,
                            (config, l, dtype, device, seed), seconds))
    return groups


def time_groups(config, device, seed):
    """What is timed, by size, scans apart from models."""
    groups = []
    for k, (b, l) in enumerate(SIZES[device]):
        for part, kinds, make in (("scan", list(scans()), scan_functions),
                                  ("model", model_kinds(device), model_functions)):
            cases = [{"part": part, "kind": kind, "batch": b, "length": l} for kind in kinds]
            groups.append(Group(f"{part} at ({b}, {l})", cases, make, (config, b, l, device, seed),
                                SECONDS[part][k]))
    return groups


def name_of(row):
    """A row's case as text."""
    if "what" in row:
        return f"{row['what']} in {row['dtype']}"
    return f"{row['part']}, {row['kind']} at ({row['batch']}, {row['length']})"


def describe(row):
    """A row as one line."""
    parts = [f"{name_of(row)}:"]
    if "error" in row:
        parts.append(f"off by {row['error']:.1e}")
    for name in ("forward_ms", "both_ms", "peak_mib"):
        if name in row:
            parts.append(f"{name} {row[name]:.2f}")
    if "failed" in row:
        parts.append(row["failed"])
    return "  ".join(parts)


def wrong_rows(rows):
    """Those whose error is too large, or not a number."""
    return [row for row in rows if "error" in row and not row["error"] < row["bound"]]


# ---- the compiler --------------------------------------------------------------------------------

PTXAS_ADVICE = ("; on sm_90 ptxas before 13.1 has made wrong code of right PTX (fla-org/"
                "flash-linear-attention#1262, triton-lang/triton#11781): try again with "
                "TRITON_PTXAS_PATH=PATH of ptxas 13.1 or later")


def compiler(device):
    """{"triton", "ptxas", "architecture"}: versions, None where there is none or it cannot say."""
    found = {"triton": None, "ptxas": None, "architecture": None}
    try:
        import triton
        found["triton"] = triton.__version__
        found["ptxas"] = triton.knobs.nvidia.ptxas.version  # TRITON_PTXAS_PATH's, if that is set
    except Exception:  # no triton, another backend's, or knobs of another version
        pass
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        found["architecture"] = f"sm_{major}{minor}"
    return found


# ---- command line --------------------------------------------------------------------------------


def last_line(row, device):
    """row: of the frozen pass."""
    time = f"{row['forward_ms']:.1f} ms" if "forward_ms" in row else "failed"
    return (f"gpu check: frozen pass at (b, l) = ({row['batch']}, {row['length']}), on {device}: "
            f"{time}")


def run_all(groups, result, save):
    """Run groups. Each row goes into `result` by its kind, and that is saved, when it is there."""
    def on_row(row):
        result["errors" if "what" in row else "times"].append(row)
        if "failed" in row:
            result["failed"].append(name_of(row))
        save()
        common.log(describe(row))

    for group in groups:
        run_group(group, on_row)


def check_values(result):
    """Raises UserError where a value is wrong."""
    wrong = wrong_rows(result["errors"])
    if not wrong:
        return
    parts = [f"{name_of(row).replace(' in ', ' is wrong in ')}, by {row['error']:.1e} of the norm "
             f"where {row['bound']} is allowed" for row in wrong]
    advice = PTXAS_ADVICE if result["compiler"]["architecture"] == "sm_90" else ""
    raise common.UserError(f"gpu check: {'; '.join(parts)}; times would mean nothing{advice}")


def main(cfg):
    device = common.pick_device(cfg.device)
    config = HydraConfig() if device == "cuda" else REHEARSAL
    env = common.banner("gpu_check.py", cfg, device)
    result = {"compiler": compiler(device), "errors": [], "times": [], "failed": []}
    common.log("  ".join(f"{name} {value}" for name, value in result["compiler"].items()))

    def save():
        common.save_result(common.ROOT / cfg.out / "result.json", result, cfg, env)

    _, l = SIZES[device][0]
    run_all(value_groups(config, l, device, cfg.seed), result, save)
    check_values(result)
    run_all(time_groups(config, device, cfg.seed), result, save)
    frozen = [row for row in result["times"] if (row["part"], row["kind"]) == ("model", "none")]
    common.log(last_line(frozen[-1], device))
    if result["failed"]:
        raise common.UserError(f"gpu check: {', '.join(result['failed'])} failed; the rows of "
                               f"{cfg.out}/result.json say how")
    return result


def parse_plainly(config_class, default):
    """`common.parse` where tyro is not installed: `--name value` alone. Raises UserError."""
    usual = dataclasses.asdict(default)
    given = {}
    flags = sys.argv[1::2]
    texts = sys.argv[2::2]
    for flag, text in zip(flags, [*texts, None]):
        name = flag.removeprefix("--")
        if name not in usual or text is None:
            raise common.UserError(f"got {flag}, need --NAME VALUE, NAME of {', '.join(usual)}")
        try:
            given[name] = type(usual[name])(text)
        except ValueError:
            raise common.UserError(f"{flag}: got {text!r}, need a number") from None
    return dataclasses.replace(default, **given)


if __name__ == "__main__":
    if importlib.util.find_spec("tyro") is None:
        common.parse = parse_plainly  # a machine lent for a check may have torch and little else
    common.run_cli(Config, main)
