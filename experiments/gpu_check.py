"""One check of the scan and of the whole model on a GPU: gradients first, then times.

Run:      python bench.py --gpu-check   (a CUDA machine; not run yet. --device cpu rehearses it)
Last line: "gpu check: frozen pass at (b, l) = (1, 512), on cuda: NN ms"

What one layer moves forward at (b, l) = (8, 4096) in bfloat16, weights (15 MB) left out. A step
reads what it needs and writes what it makes once; what is read again at once (B and C by each head,
the rows around a row) comes from a cache. tests/test_gpu_check.py counts it from shapes.

    step                                      GB
    in_proj                                 0.27
    convolution and SiLU, one pass          0.23
    D and dt                                0.13
    scan: decays                            0.02
    scan: states                            0.42
    scan: y                                 0.43
    norm and gate, one pass                 0.30
    out_proj                                0.15
    residual and LayerNorm, one pass        0.15
    together                                2.12

The reference Hydra moves 4.97 GB, 2.27 of them in flips, concatenations, rolls and repeats, none of
which is left. Between this and 1.95 GB, all fused, are D's own pass over x, and x read once for
each direction's states.

Symbols:  b batch, l length; forward_ms and both_ms (with backward) are medians over the rounds
Differs from the paper: this compares implementations on one input in one run; Table 3's protocol is
          bench.py --preset paper. No GPU time has been measured yet.
"""
import functools
import importlib.util
import statistics
import time

import torch
import torch.nn.functional as F

import common
from chunk_scan import bidirectional_scan, chunked_scan
from experiments.scan_bench import random_inputs
from hydra_ssm import HydraBert, HydraConfig
from checkpoint import load_backbone
from mark_adapters import KERNELS, make_adapter


def milliseconds(function, device):
    """The time of one call, by device events on a GPU."""
    if device == "cpu":
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def make_model(source, device):
    """A frozen backbone of a HydraConfig or what load_backbone takes; bfloat16 on a GPU, but for
    what load_backbone keeps in float32."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if not isinstance(source, HydraConfig):
        return load_backbone(source, dtype, device)
    model = HydraBert(source).to(device, dtype).requires_grad_(False).eval()
    for layer in model.layers:
        for name in ("A_log", "dt_bias", "D"):
            getattr(layer.mixer, name).data = getattr(layer.mixer, name).data.float()
    return model


def cast(leaves, device, dtype):
    """x, B and C as `dtype`, the others as float32, as leaves of a new graph."""
    return [v.detach().to(device, dtype if i in (0, 3, 4) else torch.float32).requires_grad_()
            for i, v in enumerate(leaves)]


def check_kernels(config, l, device, seed):
    """y and its six gradients in float32 and bfloat16, at the sizes of a HydraConfig, against
    `chunked_scan` in float64: the worst error over the norm, of each. Raises UserError.
    """
    errors, leaves = {}, random_inputs(2, l, config.nheads, config.headdim, 1, config.d_state,
                                       torch.float64, seed)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        inputs = cast(leaves, device, dtype)
        twins = [v.detach().double().requires_grad_() for v in inputs]
        y, twin = bidirectional_scan(*inputs), chunked_scan(*twins, config.chunk_size)
        g = torch.randn_like(twin).to(dtype)
        got = y, *torch.autograd.grad(y, inputs, g)
        want = twin, *torch.autograd.grad(twin, twins, g.double())
        errors[str(dtype)] = max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want))
        common.log(f"values and gradients in {dtype}: off by {errors[str(dtype)]:.1e}")
        if not errors[str(dtype)] < bound:
            raise common.UserError(f"--gpu-check: the scan is wrong in {dtype}, more than {bound} "
                                   "of the norm; its times would mean nothing")
    return errors


def mamba_scan(x, dt, A, B, C, D):
    """mamba-ssm's scan as Hydra calls it (github.com/goombalab/hydra at 0daa208, modules/hydra.py):
    on a batch of both directions, one of them flipped, and with its outputs shifted by one."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    dt, B, C = (torch.cat([v[:, :, 0], v[:, :, 1].flip(1)]) for v in (dt, B, C))
    y = mamba_chunk_scan_combined(torch.cat([x, x.flip(1)]), dt, A, B, C, chunk_size=256)
    forward, backward = F.pad(y[:, :-1], (0, 0, 0, 0, 1, 0)).chunk(2)
    return forward + backward.flip(1) + D[..., None].to(x.dtype) * x


def forward_and_backward(function, inputs, device, rounds=10):
    """Median ms of function(), and with the gradients of `inputs`; on a GPU, its peak MiB."""
    def forward():
        with torch.no_grad():
            function()

    def both():
        y = function()
        torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)

    row = {}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for name, once in (("forward_ms", forward), ("both_ms", both))[:1 + bool(inputs)]:
        once(), once()  # compiles, and maps memory
        row[name] = statistics.median(milliseconds(once, device) for _ in range(rounds))
    if device == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return row


def recorded(function):
    """`function` as a CUDA graph: one launch in place of hundreds. No gradients, no host reads."""
    with torch.no_grad():
        function()  # compiles first
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
    return graph.replay


def check(device, seed):
    """Gradients first, then the time of each scan, and of the model with each adapter. A case that
    fails has its error in its row, and its name in "failed": the others are worth having.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise common.UserError("--gpu-check: torch sees no CUDA GPU; --device cpu rehearses it")
    sizes, config = ((8, 4096), (1, 512)), HydraConfig()
    if device == "cpu":
        sizes, config = ((1, 64),), HydraConfig(d_model=64, n_layer=1)
    result = {"gradients": check_kernels(config, sizes[0][1], device, seed), "times": []}
    model = make_model(config, device)
    adapters = {name: make_adapter(name, config).to(device) for name in KERNELS}
    scans = {"scan, kernels": bidirectional_scan, "scan, PyTorch path": lambda *inputs:
             chunked_scan(*inputs, config.chunk_size)}
    if importlib.util.find_spec("mamba_ssm"):
        scans["scan, mamba-ssm as Hydra uses it"] = mamba_scan
    for b, l in sizes:
        ids = torch.randint(config.vocab_size, (b, l), device=device)
        t, leaves = torch.full((b,), 0.5, device=device), random_inputs(
            b, l, config.nheads, config.headdim, 1, config.d_state, torch.float32, seed)
        leaves[2] = leaves[2][0]  # one A for all samples: mamba-ssm knows no other
        inputs = cast(leaves, device, model.word_embeddings.weight.dtype)
        cases = {name: (lambda scan=scan: scan(*inputs), inputs) for name, scan in scans.items()}
        cases |= {f"model, {name}": (lambda a=adapter: model.hidden(ids, a(t)),
                                     [p for p in adapter.parameters() if p.requires_grad])
                  for name, adapter in adapters.items()}
        if device == "cuda":
            graph = functools.cache(lambda: recorded(lambda: model.hidden(ids)))
            cases["model, none, as a CUDA graph"] = lambda: graph()(), []
        for name, case in cases.items():
            row = {"what": name, "batch": b, "length": l}
            try:
                row |= forward_and_backward(*case, device)
            except Exception as error:  # of any library here
                row["failed"] = f"{type(error).__name__}: {error}"[:200]
            result["times"].append(row)
            common.log("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}"
                                 for k, v in row.items()))
            if name == "model, none":
                frozen = f"{row['forward_ms']:.1f} ms" if "forward_ms" in row else "failed"
    result["failed"] = [row["what"] for row in result["times"] if "failed" in row]
    common.log(f"gpu check: frozen pass at (b, l) = ({b}, {l}), on {device}: {frozen}")
    return result
