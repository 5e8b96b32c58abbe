"""What conditioning on t costs: latency, memory and parameters (Table 3), training, scaling.

Run:      python -m experiments.bench                  (the shipped model and the released size,
                                                        2 minutes)
          python -m experiments.bench --preset paper   (Table 3's protocol, on a GPU; not run yet)
          python -m experiments.publish runs/bench --name laptop
Last line: "the paper's training, computed: ..."

Table 3 finds MaRK 14 to 16 % slower at length 4096 and 65 to 104 % at 512: a constant 37 to 42 ms,
which is the launches of a Python loop over 23 layers. Here all layers' adapters are one stacked
evaluation. A sampler evaluates them once for all of its steps (`sample.unmask`), the rows "all t at
once". Applying the result is five small operations a layer. A frozen pass has the same five, on
zeros and ones; AdaLN's five and injection's one come on top of them.

Symbols:  b batch, l length; ms, milliseconds
          overhead   median over passes of a variant's time over frozen's, less 1; the two are timed
                     one after the other, and ± is Student-t's 95 % over seeds
          operation  a dispatched ATen operation that is no view
          to apply   the operations that read the modulation, or what is made of it alone
Differs from the paper: hidden states only, as no sampler projects all positions to the vocabulary;
          so overheads here are the larger ones. Memory is that of the weights and of the most
          that new tensors hold at once, counted on a CPU. No GPU time has been measured yet.
"""
import dataclasses
import functools
import statistics
from typing import Literal, NamedTuple

import torch

import common
from cart import cart_loss, cart_weights, masked_cross_entropy
from experiments.measure import Count, make_model, milliseconds, peak_mib, timed
from experiments.plan import paper_run, plan_table
from hydra_ssm import HydraBert, HydraConfig, Modulation
from mark_adapters import GEOMETRIES, adapter_size, make_adapter

BASELINES = ("inject", "adaln")
RELEASED = HydraConfig()
TIMES = 64                                                  # of a sampler's grid
LENGTHS = (512, 1024, 2048, 4096, 8192)                     # of the scaling
DEPTHS = (2, 4, 8, 16)
SHIPPED_BATCH = (16, 128)                                   # b, l of a training step
RELEASED_BATCH = {"cpu": (1, 256), "cuda": (4, 4096)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure the cost of each conditioner; --preset paper is Table 3's protocol."""
    preset: Literal["laptop", "paper"] = "laptop"  # from Python a label: see common.from_preset
    weights: str = "small"                 # backbone: "small", a path, or "random": released size
    mlp_dim: int = 64                      # of the adapters; 256 in the paper
    batch: int = 8
    length: tuple[int, ...] = (64, 256)
    seeds: int = 5
    passes: int = 3                        # of each variant, for each seed
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: str = "runs/bench"                # folder of result.json and table3_<preset>.png
    seed: int = 42


PRESETS = {
    "laptop": {},
    "paper": dict(weights="random", mlp_dim=256, length=(512, 4096), seeds=15, passes=100,
                  device="cuda", out="runs/bench_paper"),
}


# ---- Table 3: latency, memory and parameters -----------------------------------------------------


class Variant(NamedTuple):
    """What is timed: a pass with a conditioner."""
    kernel: str             # of make_adapter; "none" is the frozen pass
    at_once: bool = False   # all times of a sampler's grid are evaluated beforehand

    @property
    def label(self):
        """In tables, the figure and result files."""
        if self.kernel == "none":
            return "frozen"
        if self.at_once:
            return f"{self.kernel}, all t at once"
        return self.kernel


FROZEN = Variant("none")
VARIANTS = (FROZEN, *(Variant(name) for name in (*BASELINES, *GEOMETRIES)),
            *(Variant(name, at_once=True) for name in GEOMETRIES))


def forward_pass(variant, model, adapter, ids, t):
    """A function that runs the variant once, on ids (b, l) at t (b,)."""
    if not variant.at_once:
        return lambda: model.hidden(ids, adapter(t))
    grid = adapter(torch.linspace(0, 1, TIMES, device=t.device))
    index = (t * (TIMES - 1)).long()
    return lambda: model.hidden(ids, grid.at(index))


def time_pairs(passes, rounds, device):
    """{variant: [(ms of the frozen pass, ms of the variant right after it), ...]}."""
    pairs = {variant: [] for variant in passes}
    for function in passes.values():
        function()  # warm-up
    for _ in range(rounds):
        for variant, function in passes.items():
            frozen = milliseconds(passes[FROZEN], device)
            pairs[variant].append((frozen, milliseconds(function, device)))
    return pairs


@torch.no_grad()
def cost(cfg, model, device):
    """Table 3: {label of a variant: its sizes, and for each length ms and overhead, one value per
    seed, and MiB}."""
    total = sum(p.numel() for p in model.parameters())
    rows = {}
    for variant in VARIANTS:
        rows[variant.label] = {"total": total, "ms": {l: [] for l in cfg.length},
                               "overhead": {l: [] for l in cfg.length}, "mib": {}}
    jobs = [(l, seed) for l in cfg.length for seed in range(cfg.seeds)]
    for l, seed in common.progress(jobs, desc="latency"):
        torch.manual_seed(cfg.seed + 100 * seed)
        adapters = {}
        for name in ("none", *BASELINES, *GEOMETRIES):
            adapter = make_adapter(name, model.config, mlp_dim=cfg.mlp_dim)
            adapters[name] = adapter.to(device)
        ids = torch.randint(model.config.vocab_size, (cfg.batch, l)).to(device)
        t = torch.rand(cfg.batch).to(device)
        passes = {}
        for variant in VARIANTS:
            passes[variant] = forward_pass(variant, model, adapters[variant.kernel], ids, t)

        for variant, pairs in time_pairs(passes, cfg.passes, device).items():
            adapter = adapters[variant.kernel]
            row = rows[variant.label]
            row["added"] = adapter_size(adapter)
            row["ms"][l].append(statistics.median(ms for _, ms in pairs))
            ratio = statistics.median(ms / frozen for frozen, ms in pairs)
            row["overhead"][l].append(100 * (ratio - 1))
            if seed == 0:
                row["mib"][l] = peak_mib(passes[variant], model, adapter)
    return rows


def cost_table(rows, lengths):
    head = ["variant", "parameters", "added, beside c_t's MLP"]
    for l in lengths:
        head += [f"ms, length {l}", f"overhead, %, length {l}", f"MiB, length {l}"]
    lines = []
    for label, row in rows.items():
        line = [label, f"{row['total'] + row['added']:,}", f"{row['added']:,}"]
        for l in lengths:
            overhead = common.interval(row["overhead"][l]).show("+", 1)
            if label == FROZEN.label:
                overhead = ""
            line += [common.interval(row["ms"][l]).show("", 1), overhead, f"{row['mib'][l]:.1f}"]
        lines.append(line)
    return common.markdown(head, *lines)


# ---- the adapters alone, at the released size ----------------------------------------------------


class Applied(NamedTuple):
    """What a pass of one layer under a modulation does."""
    operations: int
    reading: int     # of them, those that read the modulation, or what is made of it alone
    large: int       # new tensors of the size of (b, l, d_inner), or larger


def count_layer(config, modulation):
    """The Applied of a modulation of 8 times, all layers being alike. Counted on tensors without
    data, in float32: a GPU's compiled steps cannot be counted.
    """
    first = {name: value[:1].to("meta") for name, value in vars(modulation).items()
             if isinstance(value, torch.Tensor)}
    modulation = dataclasses.replace(modulation, **first)
    with torch.device("meta"):
        model = HydraBert(dataclasses.replace(config, n_layer=1))
        ids = torch.empty(8, 64, dtype=torch.int64)
        with Count(watched=first) as count:
            model.hidden(ids, modulation)
    large = [size for size in count.sizes if size >= ids.numel() * config.d_inner]
    return Applied(count.operations, count.reading, len(large))


@torch.no_grad()
def adapters_alone(model, device, rounds=9):
    """{adapter: its operations, those that apply it, and its time beside one frozen pass}."""
    config = model.config
    t = torch.rand(8).to(device)
    ids = torch.randint(config.vocab_size, (8, 512)).to(device)
    model.hidden(ids[:2])  # warm-up
    frozen_ms = milliseconds(lambda: model.hidden(ids), device)
    frozen = count_layer(config, Modulation())
    rows = {}
    for name in (*BASELINES, *GEOMETRIES):
        adapter = make_adapter(name, config, init="default")  # quickly made; the cost is the same
        with Count() as count:
            modulation = adapter(t.cpu())
        applied = count_layer(config, modulation)
        adapter.to(device)
        times = [milliseconds(lambda: adapter(t), device) for _ in range(rounds)]
        rows[name] = {
            "operations": count.operations,
            "to_apply": applied.reading,                                # in a layer
            "beyond_frozen": applied.operations - frozen.operations,    # in a layer
            "large_passes": config.n_layer * (applied.large - frozen.large),
            "frozen_ms": frozen_ms,
            "ms": statistics.median(times)}
    return rows


def alone_table(rows):
    lines = []
    for name, row in rows.items():
        lines.append([name, row["operations"], row["to_apply"], row["beyond_frozen"],
                      row["large_passes"], f"{row['ms']:.1f}",
                      f"{100 * row['ms'] / row['frozen_ms']:.3f}"])
    return common.markdown(
        ["23 layers, (b, l) = (8, 512)", "operations, all layers together",
         "operations to apply, per layer", "more than in a frozen pass, per layer",
         "new tensors of (b, l, d_inner)", "alone, ms", "of a frozen pass, %"], *lines)


# ---- a training step -----------------------------------------------------------------------------


def masked_loss(model, hidden, x0, masked):
    """Eq. 23 of the masked tokens; hidden (b, l, d)."""
    ce = masked_cross_entropy(hidden[masked], x0[masked], model.head)
    return cart_loss(ce, masked, cart_weights(masked))


def training_step(model, adapter, optimizer, b, l, seed=42):
    """One step like train.py's, on random tokens: {part: ms}. Half of them are masked."""
    generator = torch.Generator().manual_seed(seed)
    weight = model.word_embeddings.weight
    time = functools.partial(timed, device=weight.device.type)
    x0 = torch.randint(model.config.vocab_size, (b, l), generator=generator).to(weight.device)
    masked = (torch.rand(b, l, generator=generator) < 0.5).to(weight.device)
    t = torch.full((b,), 0.5, device=weight.device)

    ms = {}
    modulation, ms["adapter"] = time(adapter, t)
    hidden, ms["backbone"] = time(model.hidden, x0, modulation)
    loss, ms["head and loss"] = time(masked_loss, model, hidden, x0, masked)
    _, ms["backward"] = time(loss.backward)
    _, ms["clip"] = time(torch.nn.utils.clip_grad_norm_, adapter.parameters(), 1.0)
    _, ms["optimiser"] = time(optimizer.step)
    optimizer.zero_grad()
    return ms


def training(model, b, l, mlp_dim, rounds=3):
    """Times, memory and the share of each part, without and with gradient checkpointing."""
    device = model.word_embeddings.weight.device.type
    rows = {}
    for name in ("plain", "checkpointing"):
        torch.manual_seed(42)
        model.checkpointing = name == "checkpointing"
        adapter = make_adapter("chebyshev", model.config, mlp_dim=mlp_dim).to(device)
        optimizer = torch.optim.AdamW(adapter.parameters(), fused=True)
        step = functools.partial(training_step, model, adapter, optimizer, b, l)
        step()  # warm-up
        steps = [step() for _ in range(rounds)]
        parts = {}
        for part in steps[0]:
            parts[part] = statistics.median(ms[part] for ms in steps)
        total = sum(parts.values())
        rows[name] = {"parts": parts, "ms": total, "batch": b, "length": l,
                      "tokens_per_second": 1e3 * b * l / total,
                      "mib": peak_mib(step, model, adapter)}
    model.checkpointing = False
    return rows


def training_table(found):
    """found: {model: what `training` returns}."""
    lines = []
    for model, rows in found.items():
        for name, row in rows.items():
            line = [f"{model}, ({row['batch']}, {row['length']})", name,
                    f"{row['tokens_per_second']:,.0f}", f"{row['mib']:,.0f}"]
            line += [f"{100 * ms / row['ms']:.1f}" for ms in row["parts"].values()]
            lines.append(line)
    parts = [f"{part}, %" for part in row["parts"]]
    return common.markdown(["model, (b, l)", "", "tokens/s", "MiB", *parts], *lines)


# ---- scaling -------------------------------------------------------------------------------------


def median_times(passes, device, rounds):
    """{name: median ms}: in each round every pass is timed once, one after the other."""
    times = {name: [] for name in passes}
    for function in passes.values():
        function()  # warm-up
    for _ in range(rounds):
        for name, function in passes.items():
            times[name].append(milliseconds(function, device))
    return {name: statistics.median(ms) for name, ms in times.items()}


@torch.no_grad()
def scaling(model, device, rounds=5):
    """Median ms of a frozen pass at (1, l), and of models of 2 to 16 layers at (1, 1024)."""
    config = model.config
    by_length = {}
    for l in LENGTHS:
        ids = torch.randint(config.vocab_size, (1, l), device=device)
        by_length[l] = functools.partial(model.hidden, ids)
    by_depth = {}
    for n in DEPTHS:
        deep = make_model(dataclasses.replace(config, n_layer=n), device)
        ids = torch.randint(config.vocab_size, (1, 1024), device=device)
        by_depth[n] = functools.partial(deep.hidden, ids)
    return {"length": median_times(by_length, device, rounds),
            "layers": median_times(by_depth, device, rounds)}


def scaling_table(found):
    """Of each length and depth: ms, and ms for a token or a layer over their mean."""
    lines = []
    for what, times in found.items():
        each = {size: ms / size for size, ms in times.items()}
        mean = statistics.fmean(each.values())
        for size, ms in times.items():
            lines.append([f"{what} {size}", f"{ms:.0f}", f"{each[size] / mean:.2f}"])
    return common.markdown(["frozen pass", "ms", "ms / (length or layers), over the mean"], *lines)


# ---- the figure ----------------------------------------------------------------------------------


def draw_overheads(ax, rows, lengths):
    """Every variant's overhead at each length, with its interval where there is one."""
    labels = [label for label in rows if label != FROZEN.label]
    for i, l in enumerate(lengths):
        found = [common.interval(rows[label]["overhead"][l]) for label in labels]
        y = [k + (i + 0.5) * 0.5 / len(lengths) - 0.25 for k in range(len(labels))]
        halves = [each.half for each in found]
        ax.errorbar([each.mean for each in found], y, ls="", marker=common.MARKERS[i], ms=6,
                    xerr=halves if found[0].n > 1 else None, lw=1.4, capsize=3,
                    color=common.COLORS[i], label=f"length {l}")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.axvline(0, color="black", lw=0.8)
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    interval = ", 95 %" if found[0].n > 1 else ""
    ax.set(xlabel="time over that of the frozen pass, less 1 (%)",
           title=f"what conditioning costs{interval}")
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(lengths))


def draw_scaling(ax, times, title, xlabel):
    """Time against a size, beside a line through the last point that is proportional to it."""
    sizes = list(times)
    ms = list(times.values())
    ax.plot(sizes, ms, marker=common.MARKERS[0], color=common.COLORS[0], label="measured, median")
    ax.plot(sizes, [ms[-1] * size / sizes[-1] for size in sizes], ":", color="black",
            label="proportional")
    ax.set(xlabel=xlabel, ylabel="time of a pass (milliseconds)", title=title, xscale="log",
           yscale="log")
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    ticks = common.decade_ticks(*ax.get_ylim())
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def draw_bench(result, lengths, path):
    """Table 3's overheads, and how a frozen pass grows with length and depth."""
    figure = common.new_figure(13, 4.4)
    overhead, length, layers = figure.subplots(1, 3, width_ratios=(5, 3, 3))
    draw_overheads(overhead, result["cost"], lengths)
    draw_scaling(length, result["scaling"]["length"], "a frozen pass, by length",
                 "length (tokens)")
    draw_scaling(layers, result["scaling"]["layers"], "a frozen pass, by depth",
                 "layers, at 1,024 tokens")
    common.save_figure(figure, path)


# ---- command line --------------------------------------------------------------------------------


def measure_all(cfg, model, device):
    """Everything, with its tables."""
    shipped = model if cfg.weights == "small" else make_model("small", device)
    released = model if cfg.weights == "random" else make_model(RELEASED, device)
    result = {}
    result["cost"] = cost(cfg, model, device)
    result["alone"] = adapters_alone(released, device)
    result["training"] = {
        "shipped": training(shipped, *SHIPPED_BATCH, mlp_dim=64),
        "released size": training(released, *RELEASED_BATCH[device], mlp_dim=256, rounds=1)}
    result["scaling"] = scaling(model, device)
    result["plan"] = paper_run()
    result["tables"] = {
        "cost": cost_table(result["cost"], cfg.length),
        "alone": alone_table(result["alone"]),
        "training": training_table(result["training"]),
        "scaling": scaling_table(result["scaling"]),
        "plan": plan_table(result["plan"])}
    return result


def main(cfg):
    device = common.pick_device(cfg.device)
    torch.manual_seed(cfg.seed)
    model = make_model(RELEASED if cfg.weights == "random" else cfg.weights, device)
    env = common.banner("bench.py", cfg, device, model)
    result = measure_all(cfg, model, device)
    folder = common.ROOT / cfg.out
    common.save_result(folder / "result.json", result, cfg, env)
    for name, table in result["tables"].items():
        common.log(f"\n{name}\n\n{table}")
    draw_bench(result, cfg.length, folder / f"table3_{cfg.preset}.png")
    hours = [estimate["A100"][1] for estimate in result["plan"]["hours"].values()]
    common.log(f"\nthe paper's training, computed: {min(hours):.0f} to {max(hours):.0f} hours on "
               "one A100")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main, PRESETS)
