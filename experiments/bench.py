"""What conditioning on t costs: latency, memory and parameters (Table 3), training, scaling.

Run:      python bench.py              (the shipped model and the released size, under 2 minutes)
          python bench.py --preset paper --publish   (Table 3's protocol, on a GPU; not run yet)
          python bench.py --gpu-check  (a CUDA machine: the scan's gradients first, then times; nor)
Last line: "the paper's training, computed: ..."

Table 3 finds MaRK 14 to 16 % slower at length 4096 and 65 to 104 % at 512: a constant 37 to 42 ms,
which is the launches of a Python loop over 23 layers. Here all layers' adapters are one stacked
evaluation, applied in one operation a layer; a sampler evaluates them once for all of its steps
(`sample.unmask`), the rows "all t at once".

Symbols:  b batch, l length; ms, milliseconds
          overhead   median over passes of a variant's time over frozen's, less 1; the two are timed
                     one after the other, and ± is Student-t's 95 % over seeds
          operation  a dispatched ATen operation that is no view
Differs from the paper: hidden states only, as no sampler projects all positions to the vocabulary;
          so overheads here are the larger ones. Memory is that of the weights and of the most
          that new tensors hold at once, counted on a CPU. No GPU time has been measured yet.
"""
import dataclasses
import functools
import statistics
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import common
from cart import cart_loss, cart_weights, masked_cross_entropy
from evaluate import mean_error, show
from experiments.gpu_check import check, make_model, milliseconds
from hydra_ssm import HydraBert, HydraConfig, Modulation
from mark_adapters import GEOMETRIES, adapter_size, make_adapter
from sample import at
from train import PRESETS as RUNS

BASELINES = ("inject", "adaln")                                     # beside the GEOMETRIES
LENGTHS, DEPTHS = (512, 1024, 2048, 4096, 8192), (2, 4, 8, 16)      # of the scaling
TIMES = 64                                                          # of a sampler's grid
RELEASED = HydraConfig()
# Dense bfloat16 TFLOP/s and TB/s of NVIDIA's data sheets: A100-SXM4-80GB, GH200-96GB, H200-SXM.
GPUS = {"A100": (312, 2.04), "GH200": (989, 4.0), "H200": (989, 4.8)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure the cost of each conditioner; --preset paper is Table 3's protocol."""
    preset: str = "laptop"                 # or "paper"
    gpu_check: bool = False                # the scan and the model against references, in its place
    weights: str = "small"                 # backbone: "small", a path, or "random": released size
    mlp_dim: int = 64                      # of the adapters; 256 in the paper
    batch: int = 8
    length: tuple[int, ...] = (64, 256)
    seeds: int = 5
    passes: int = 3                        # of each variant, for each seed
    device: str = "auto"                   # "auto", "cpu" or "cuda"
    out: str = "runs/bench"                # folder of result.json and cost.png
    publish: bool = False                  # also write results/bench/ and figures/
    seed: int = 42


PRESETS = {"laptop": {}, "paper": dict(weights="random", mlp_dim=256, length=(512, 4096), seeds=15,
                                       passes=100, device="cuda")}


# ---- measuring -----------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Of what runs under it: `operations` that are no views, the `sizes` in elements of new tensors
    and the `peak` of bytes that these held (what is made and dropped inside a kernel is unseen).
    """

    def __init__(self):
        super().__init__()
        self.operations, self.sizes, self.live, self.peak = 0, [], 0, 0
        self.known = weakref.WeakSet()

    def free(self, n):
        self.live -= n

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        out = func(*args, **(kwargs or {}))
        self.operations += not func.is_view
        for tensor in filter(torch.is_tensor, tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage not in given and storage not in self.known:  # neither a view nor in place
                self.known.add(storage)
                self.sizes.append(tensor.numel())
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage.nbytes())
        return out


def peak_mib(function, *modules):
    """MiB of one call: what its new tensors hold at most, and the weights of the modules."""
    weights = [p for module in modules if module for p in module.parameters()]
    if weights[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with Count() as count:
            function()
        peak = count.peak
    return (peak + sum(p.numel() * p.element_size() for p in weights)) / 2**20


def variants(model, adapters, ids, t):
    """{name: a forward pass of ids (b, l) at t (b,)}: frozen, each adapter, and the geometries with
    all times of a sampler's grid evaluated beforehand."""
    grid, index = torch.linspace(0, 1, TIMES, device=t.device), (t * (TIMES - 1)).long()
    cases = {"frozen": lambda: model.hidden(ids)}
    for name, adapter in adapters.items():
        cases[name] = lambda adapter=adapter: model.hidden(ids, adapter(t))
    for name in GEOMETRIES:
        found = adapters[name](grid)
        cases[f"{name}, all t at once"] = lambda found=found: model.hidden(ids, at(found, index))
    return cases


@torch.no_grad()
def cost(cfg, model, device):
    """Table 3: {variant: its sizes, and for each length ms and overhead, one value per seed}."""
    total, rows = sum(p.numel() for p in model.parameters()), {}
    jobs = [(l, seed) for l in cfg.length for seed in range(cfg.seeds)]
    for l, seed in common.progress(jobs, desc="latency"):
        torch.manual_seed(cfg.seed + 100 * seed)
        adapters = {name: make_adapter(name, model.config, mlp_dim=cfg.mlp_dim).to(device)
                    for name in (*BASELINES, *GEOMETRIES)}
        ids = torch.randint(model.config.vocab_size, (cfg.batch, l)).to(device)
        cases = variants(model, adapters, ids, torch.rand(cfg.batch).to(device))
        for case in cases.values():
            case()  # warm-up
        pairs = {name: [] for name in cases}  # of times: the frozen pass, and then the variant
        for _ in range(cfg.passes):
            for name, case in cases.items():
                pairs[name].append([milliseconds(f, device) for f in (cases["frozen"], case)])
        for name, case in cases.items():
            adapter = adapters.get(name.partition(",")[0])
            row = rows.setdefault(name, {
                "total": total, "added": adapter_size(adapter) if adapter else 0, "ms": {},
                "overhead": {}, "mib": {}})
            row["ms"].setdefault(l, []).append(statistics.median(ms for _, ms in pairs[name]))
            row["overhead"].setdefault(l, []).append(
                100 * statistics.median(ms / frozen - 1 for frozen, ms in pairs[name]))
            if seed == 0:
                row["mib"][l] = peak_mib(case, model, adapter)
    return rows


def cost_table(rows, lengths):
    return common.markdown(
        ["variant", "parameters", "added, beside c_t's MLP", *(
            f"{what}, length {l}" for l in lengths for what in ("ms", "overhead, %", "MiB"))],
        *([name, f"{row['total'] + row['added']:,}", f"{row['added']:,}", *(
            cell for l in lengths for cell in (
                show(row["ms"][l], "", 1, student=True), "" if name == "frozen" else
                show(row["overhead"][l], "+", 1, student=True),
                f"{row['mib'][l]:.1f}"))] for name, row in rows.items()))


# ---- the adapters alone, at the released size ----------------------------------------------------


@torch.no_grad()
def adapters_alone(model, device, rounds=9):
    """Operations of an adapter, of applying it, and its time beside one frozen pass at (8, 512)."""
    config, t = model.config, torch.rand(8).to(device)
    ids = torch.randint(config.vocab_size, (8, 512)).to(device)
    model.hidden(ids[:2])  # warm-up
    frozen, rows = milliseconds(lambda: model.hidden(ids), device), {}
    with torch.device("meta"):  # counted without data, as no GPU's compiled steps can be
        counted, few = HydraBert(config), torch.empty(8, 64, dtype=torch.int64)

    def passes(**modulation):
        with Count() as count:
            counted.hidden(few, Modulation(**{k: v.to("meta") for k, v in modulation.items()}))
        return count.operations, sum(size >= 8 * 64 * config.d_inner for size in count.sizes)

    operations, large = passes()
    for name in (*BASELINES, *GEOMETRIES):
        adapter = make_adapter(name, config)
        with Count() as count:
            modulation = adapter(t.cpu())
        applied, applied_large = passes(**{k: v for k, v in vars(modulation).items()
                                           if v is not None})
        adapter.to(device)
        rows[name] = {"operations": count.operations,
                      "to_apply": (applied - operations) / config.n_layer,
                      "large_passes": applied_large - large, "frozen_ms": frozen,
                      "ms": statistics.median(milliseconds(lambda: adapter(t), device)
                                              for _ in range(rounds))}
    return rows


def alone_table(rows):
    return common.markdown(
        ["23 layers, (b, l) = (8, 512)", "operations, all layers together",
         "operations to apply, per layer", "new tensors of (b, l, d_inner)", "alone, ms",
         "of a frozen pass, %"],
        *([name, row["operations"], f"{row['to_apply']:.1f}", row["large_passes"],
           f"{row['ms']:.1f}", f"{100 * row['ms'] / row['frozen_ms']:.3f}"]
          for name, row in rows.items()))


# ---- a training step -----------------------------------------------------------------------------


def training_step(model, adapter, optimizer, b, l, seed=42):
    """One step like train.py's, on random tokens: {part: ms}. Half of them are masked."""
    generator = torch.Generator().manual_seed(seed)
    device, spent = model.word_embeddings.weight.device, {}
    x0 = torch.randint(model.config.vocab_size, (b, l), generator=generator).to(device)
    masked = (torch.rand(b, l, generator=generator) < 0.5).to(device)

    def part(name, function, *inputs):
        out = []
        spent[name] = milliseconds(lambda: out.append(function(*inputs)), device.type)
        return out[0]

    def loss(hidden):
        ce = masked_cross_entropy(hidden[masked], x0[masked], model.head)
        return cart_loss(ce, masked, cart_weights(masked))

    modulation = part("adapter", adapter, torch.full((b,), 0.5, device=device))
    hidden = part("backbone", model.hidden, x0, modulation)
    part("backward", part("head and loss", loss, hidden).backward)
    part("clip", torch.nn.utils.clip_grad_norm_, adapter.parameters(), 1.0)
    part("optimiser", optimizer.step)
    optimizer.zero_grad()
    return spent


def training(model, b, l, mlp_dim, rounds=3):
    """Times, memory and the share of each part, without and with gradient checkpointing."""
    device, rows = model.word_embeddings.weight.device.type, {}
    for checkpointing in (False, True):
        torch.manual_seed(42)
        model.checkpointing = checkpointing
        adapter = make_adapter("chebyshev", model.config, mlp_dim=mlp_dim).to(device)
        optimizer = torch.optim.AdamW(adapter.parameters(), fused=True)
        step = functools.partial(training_step, model, adapter, optimizer, b, l)
        step()  # warm-up
        spent = [step() for _ in range(rounds)]
        medians = {name: statistics.median(each[name] for each in spent) for name in spent[0]}
        rows["checkpointing" if checkpointing else "plain"] = {
            "parts": medians, "ms": sum(medians.values()), "batch": b, "length": l,
            "tokens_per_second": 1e3 * b * l / sum(medians.values()),
            "mib": peak_mib(step, model, adapter)}
    model.checkpointing = False
    return rows


def training_table(rows):
    names = list(next(iter(rows.values()))["plain"]["parts"])
    return common.markdown(
        ["model, (b, l)", "", "tokens/s", "MiB", *(f"{name}, %" for name in names)],
        *([f"{model}, ({row['batch']}, {row['length']})", kind,
           f"{row['tokens_per_second']:,.0f}", f"{row['mib']:,.0f}",
           *(f"{100 * row['parts'][name] / row['ms']:.1f}" for name in names)]
          for model, both in rows.items() for kind, row in both.items()))


# ---- scaling, and the paper's run ----------------------------------------------------------------


@torch.no_grad()
def scaling(model, device, rounds=5):
    """Median ms of a frozen pass at (1, l), and of models of 2 to 16 layers at (1, 1024)."""
    def sweep(passes):
        for function in passes.values():
            function()  # warm-up
        times = [{k: milliseconds(function, device) for k, function in passes.items()}
                 for _ in range(rounds)]
        return {k: statistics.median(each[k] for each in times) for k in passes}

    draw = functools.partial(torch.randint, model.config.vocab_size, device=device)
    models = {n: make_model(dataclasses.replace(model.config, n_layer=n), device) for n in DEPTHS}
    return {"length": sweep({l: functools.partial(model.hidden, draw((1, l))) for l in LENGTHS}),
            "layers": sweep({n: functools.partial(m.hidden, draw((1, 1024)))
                             for n, m in models.items()})}


def scaling_table(found):
    """Of each length and depth: ms, and ms for each 1024 tokens or layer over their mean."""
    rows = []
    for key, times in found.items():
        each = {k: ms / k for k, ms in times.items()}
        mean = statistics.fmean(each.values())
        rows += [[f"{key} {k}", f"{times[k]:.0f}", f"{v / mean:.2f}"] for k, v in each.items()]
    return common.markdown(["frozen pass", "ms", "ms / (length or layers), over the mean"], *rows)


def plan():
    """The paper's run, computed from what a token takes: hours[row][GPU][number of them].

    Rows: at the data sheets' rates, compute and memory one after the other; at the share of them
    that the paper's frozen pass reaches; and so with the bytes that the reference modules move.
    """
    run, config = RUNS["paper"], RELEASED
    tokens = run["steps"] * run["global_batch"] * run["seqlen"]
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as flops:
        HydraBert(config).hidden(torch.zeros(1, run["seqlen"], dtype=torch.long))
    counts = {str(op): n / run["seqlen"] for op, n in flops.get_flop_counts()["Global"].items()}
    scan = counts["aten.bmm"]
    linear = sum(counts.values()) - scan
    head = 2 * config.d_model * (config.vocab_size + config.d_model)
    layers, reference = (config.n_layer * gb * 1e9 / (8 * 4096) for gb in (2.12, 4.97))
    # Forward, again for checkpointing, and backward: no gradient of a frozen weight, so once for a
    # linear map and twice for the scan and the bytes. Half of the tokens are masked and reach the
    # head; a logit is 48 bytes: 2 written, read, 4 for its float32, read, 4 for its logarithm, all
    # again, and as many for the gradient.
    flop = 3 * linear + 4 * scan + 3 * head / 2
    ours, theirs = (4 * moved + 48 * config.vocab_size / 2 for moved in (layers, reference))

    def seconds(gpu, flop, moved):
        teraflops, terabytes = GPUS[gpu]
        return flop / (1e12 * teraflops) + moved / (1e12 * terabytes)

    frozen = 8 * 4096 * seconds("A100", linear + scan + head, reference + 6 * config.vocab_size)
    slower = 0.26743 / frozen                                              # Table 3
    hours = {row: {gpu: {n: tokens * seconds(gpu, flop, moved) * factor / n / 3600 for n in (1, 2)}
                   for gpu in GPUS}
             for row, moved, factor in (("at the data sheets' rates", ours, 1),
                                        (f"at {1 / slower:.0%} of them, as Table 3", ours, slower),
                                        ("and with the reference's bytes", theirs, slower))}
    return {"tokens": tokens, "flop": flop, "scan_flop": scan, "bytes": ours,
            "reference_bytes": theirs, "slower_than_data_sheets": slower, "hours": hours}


def plan_table(found):
    return common.markdown(
        ["computed, not measured", *(f"{n} x {gpu}, hours" for gpu in GPUS for n in (1, 2))],
        *([row, *(f"{hours[gpu][n]:.1f}" for gpu in GPUS for n in (1, 2))]
          for row, hours in found["hours"].items()))


def draw(result, path):
    """Overheads with their intervals, and latency against length and depth beside a line."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    overhead, length, layers = figure.subplots(1, 3, width_ratios=(5, 3, 3))
    rows = {name: row for name, row in result["cost"].items() if name != "frozen"}
    lengths = len(next(iter(rows.values()))["overhead"])
    for i, l in enumerate(next(iter(rows.values()))["overhead"]):
        means, halves = zip(*(mean_error(row["overhead"][l], True) for row in rows.values()))
        overhead.barh([k + 0.8 * ((i + 0.5) / lengths - 0.5) for k in range(len(rows))], means,
                      0.76 / lengths, xerr=halves, label=f"length {l}")
    overhead.set_yticks(range(len(rows)), rows)
    overhead.invert_yaxis()
    overhead.axvline(0, color="black", lw=0.8)
    overhead.set(xlabel="overhead over the frozen pass, %", title="what conditioning costs")
    overhead.legend(frameon=False, loc="lower right")
    for ax, key, title in ((length, "length", "tokens"), (layers, "layers", "layers, 1024 tokens")):
        x, ms = zip(*result["scaling"][key].items())
        ax.plot(x, ms, "o-")
        ax.plot(x, [ms[-1] * n / x[-1] for n in x], "k:", label="proportional")
        ax.set(xlabel=title, ylabel="ms", title=f"against {key}", xscale="log", yscale="log")
        ax.set_xticks(x, x)
        ax.minorticks_off()
        ax.legend(frameon=False)
    common.save_figure(figure, path)


# ---- command line --------------------------------------------------------------------------------


def measure(cfg, model, device):
    """Everything but the GPU check, with the tables of it."""
    shipped = model if cfg.weights == "small" else make_model("small", device)
    released = model if cfg.weights == "random" else make_model(RELEASED, device)
    result = {"cost": cost(cfg, model, device), "alone": adapters_alone(released, device)}
    result["training"] = {
        "shipped": training(shipped, 16, 128, 64),
        "released size": training(released, *((1, 256) if device == "cpu" else (4, 4096)), 256,
                                  rounds=1)}
    result |= {"scaling": scaling(model, device), "plan": plan()}
    result["tables"] = {
        "cost": cost_table(result["cost"], cfg.length), "alone": alone_table(result["alone"]),
        "training": training_table(result["training"]),
        "scaling": scaling_table(result["scaling"]), "plan": plan_table(result["plan"])}
    for name, table in result["tables"].items():
        common.log(f"\n{name}\n\n{table}")
    hours = [row["A100"][1] for row in result["plan"]["hours"].values()]
    common.log(f"\nthe paper's training, computed: {min(hours):.0f} to {max(hours):.0f} hours on "
               "one A100")
    return result


def main(cfg):
    device = "cuda" if cfg.gpu_check and cfg.device == "auto" else common.pick_device(cfg.device)
    if cfg.gpu_check and cfg.publish and device != "cuda":
        raise common.UserError("--publish: a rehearsal on the CPU is no result; leave it out")
    torch.manual_seed(cfg.seed)
    model = None if cfg.gpu_check else make_model(
        RELEASED if cfg.weights == "random" else cfg.weights, device)
    env = common.banner("bench.py", cfg, device, model)
    result = check(device, cfg.seed) if cfg.gpu_check else measure(cfg, model, device)
    common.write_json(common.ROOT / cfg.out / "result.json", {"metrics": result, "config": cfg})
    if not cfg.gpu_check:
        draw(result, common.ROOT / (f"figures/table3_{cfg.preset}.png" if cfg.publish
                                    else f"{cfg.out}/cost.png"))
    if cfg.publish:
        common.publish("bench", "gpu_check" if cfg.gpu_check else cfg.preset, result, cfg, env)
    if result.get("failed"):
        raise common.UserError(f"--gpu-check: {', '.join(result['failed'])} failed; the rows of "
                               f"{cfg.out}/result.json say how")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main, PRESETS)
