"""One prepared check of the scan and of the whole model on a GPU, and the bytes of a layer.

Run:      python bench.py --gpu-check   (a CUDA machine: gradients first, then times; not timed yet)
Last line: "gpu check: (b, l) = (1, 512) takes NN ms frozen, in torch.bfloat16 on cuda"

What one layer moves forward at (b, l) = (8, 4096) in bfloat16, weights (15 MB) left out. A step
reads what it needs and writes what it makes once; what is read again at once (B and C by each head,
the rows around a row) comes from a cache. tests/test_bench.py counts it from shapes.

    step                                      GB
    in_proj                                 0.27
    convolution and SiLU, one pass          0.23
    D and dt                                0.13
    scan: decays                            0.02
    scan: states                            0.42
    scan: y                                 0.43
    norm and gate, one pass                 0.30
    out_proj                                0.15
    residual and LayerNorm, two passes      0.25
    together                                2.22

The reference Hydra moves 4.97 GB, 2.27 of them in flips, concatenations, rolls and repeats, none of
which is left. Between this and 1.95 GB, all fused, are D's own pass over x, the second pass of
the LayerNorm, and x read once for each direction's states.

Symbols:  b batch, l length; forward_ms and both_ms (with backward) are medians over the rounds
Differs from the paper: Table 3's protocol is 15 seeds of 100 passes; this compares implementations
          on one input in one run. No GPU time has been measured yet.
"""
import dataclasses
import importlib.util
import statistics
import time

import torch
import torch.nn.functional as F

import common
from chunk_scan import bidirectional_scan, chunked_scan, random_inputs
from hydra_ssm import HydraBert, HydraConfig
from mark_adapters import KERNELS, make_adapter


@dataclasses.dataclass(frozen=True)
class Config:
    """Check the scan's gradients on a GPU, then time it, and the model with each adapter."""
    gpu_check: bool = False
    batch: tuple[int, ...] = (8, 1)        # the sizes: each batch at its length
    length: tuple[int, ...] = (4096, 512)
    n_layer: int = 23
    d_model: int = 768
    rounds: int = 10
    device: str = "cuda"                   # cpu: a rehearsal, at sizes that you give
    out: str = "runs/bench"                # folder of result.json
    publish: bool = False                  # also write into results/
    seed: int = 42


# ---- on a GPU ------------------------------------------------------------------------------------

def cast(leaves, device, dtype):
    """x, B and C as `dtype`, the others as float32, as leaves of a new graph."""
    return [v.detach().to(device, dtype if i in (0, 3, 4) else torch.float32).requires_grad_()
            for i, v in enumerate(leaves)]


def check_gradients(cfg, config):
    """y and its six gradients against the PyTorch path in float64: worst error over norm."""
    errors, leaves = {}, random_inputs(2, max(cfg.length), config.nheads, config.headdim, 1,
                                       config.d_state, torch.float64, cfg.seed)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        inputs = cast(leaves, cfg.device, dtype)
        twins = [v.detach().double().requires_grad_() for v in inputs]
        y, twin = bidirectional_scan(*inputs), chunked_scan(*twins, config.chunk_size)
        g = torch.randn_like(twin).to(dtype)
        got = y, *torch.autograd.grad(y, inputs, g)
        want = twin, *torch.autograd.grad(twin, twins, g.double())
        errors[str(dtype)] = max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want))
        common.log(f"values and gradients in {dtype}: off by {errors[str(dtype)]:.1e} of the norm")
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


def timed(function, inputs, cfg):
    """Median ms of function(), and with the gradients of `inputs`; peak GB where there is a GPU."""
    synchronize = torch.cuda.synchronize if cfg.device == "cuda" else lambda: None

    def once(backward):
        synchronize()
        start = time.perf_counter()
        with torch.set_grad_enabled(backward):
            y = function()
        if backward:
            torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)
        synchronize()
        return 1e3 * (time.perf_counter() - start)

    row = {}
    if cfg.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for name, backward in (("forward_ms", False), ("both_ms", True))[:1 + bool(inputs)]:
        once(backward), once(backward)  # compiles, and maps memory
        row[name] = statistics.median(once(backward) for _ in range(cfg.rounds))
    if cfg.device == "cuda":
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def gpu_check(cfg):
    """Gradients first, then the time of each scan, and of the model with each adapter."""
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise common.UserError("--gpu-check: torch sees no CUDA GPU; --device cpu --batch 1 "
                               "--length 64 --d-model 64 --n-layer 2 rehearses it here")
    config = HydraConfig(d_model=cfg.d_model, n_layer=cfg.n_layer)
    result = {"gradients": check_gradients(cfg, config), "times": []}
    dtype = torch.bfloat16 if cfg.device == "cuda" else torch.float32
    model = HydraBert(config).to(cfg.device, dtype).requires_grad_(False).eval()
    for layer in model.layers:
        for name in ("A_log", "dt_bias", "D"):  # in float32, as load_backbone keeps them
            getattr(layer.mixer, name).data = getattr(layer.mixer, name).data.float()
    adapters = {name: make_adapter(name, config).to(cfg.device) for name in KERNELS}
    scans = {"scan, kernels": bidirectional_scan, "scan, PyTorch path": lambda *inputs:
             chunked_scan(*inputs, config.chunk_size)}
    if importlib.util.find_spec("mamba_ssm"):
        scans["scan, mamba-ssm as Hydra uses it"] = mamba_scan
    for b, l in zip(cfg.batch, cfg.length, strict=True):
        ids = torch.randint(config.vocab_size, (b, l), device=cfg.device)
        t, leaves = torch.full((b,), 0.5, device=cfg.device), random_inputs(
            b, l, config.nheads, config.headdim, 1, config.d_state, torch.float32, cfg.seed)
        leaves[2] = leaves[2][0]  # one A for all samples: mamba-ssm knows no other
        inputs = cast(leaves, cfg.device, dtype)
        cases = {name: (lambda scan=scan: scan(*inputs), inputs) for name, scan in scans.items()}
        cases |= {f"model, {name}": (lambda a=adapter: model.hidden(ids, a(t)),
                                     [p for p in adapter.parameters() if p.requires_grad])
                  for name, adapter in adapters.items()}
        for name, case in cases.items():
            row = {"what": name, "batch": b, "length": l, **timed(*case, cfg)}
            result["times"].append(row)
            common.log("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}"
                                 for k, v in row.items()))
            if name == "model, none":
                frozen = f"(b, l) = ({b}, {l}) takes {row['forward_ms']:.1f} ms frozen"
    common.log(f"gpu check: {frozen}, in {dtype} on {cfg.device}")
    return result


def main(cfg):
    if (len(cfg.batch) != len(cfg.length) or min(*cfg.batch, *cfg.length, cfg.rounds) < 1
            or cfg.device not in ("cpu", "cuda")):
        raise common.UserError(f"got --batch {cfg.batch}, --length {cfg.length}, --rounds "
                               f"{cfg.rounds}, --device {cfg.device}: need as many lengths as "
                               "batches, all of them and the rounds from 1, and cpu or cuda")
    if not cfg.gpu_check:
        raise common.UserError("bench.py: give --gpu-check, on a machine with a CUDA GPU")
    if cfg.publish and cfg.device != "cuda":
        raise common.UserError("--publish: a rehearsal on the CPU is no result; leave it out")
    env = common.banner("bench.py", cfg, cfg.device)
    result = gpu_check(cfg)
    common.write_json(common.ROOT / cfg.out / "result.json", {"metrics": result, "config": cfg})
    if cfg.publish:
        common.publish("bench", "gpu_check", result, cfg, env)
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
