"""HRM adapters: a linear recurrence beside a frozen sub-layer, and its compression once trained.

Of "SSM Adapters via Hankel Reduced-order Modeling" (arXiv 2606.26290), its eq. 16 to 25:

    output_t = sublayer(h_t) + alpha y_t          (18)
    s_t = abar s_{t-1} + Bbar h_t,  y_t = C s_t   (19)

A frozen transformer gets LoRA or HRM adapters of one size, which learn to recall a key or to
predict the next byte. Then balanced truncation (hankel.py) compresses the HRM adapters.

Run:      python -m experiments.hrm_adapter       (3 minutes)
          python -m experiments.hrm_adapter --make-backbone ...    (its flags: assets/README.md)
          python -m experiments.publish runs/hrm_adapter --name small
Last line: "empirical Gramians err as n^-0.NN; runs/hrm_adapter/hrm_adapter.png"
Symbols:  h        what the sub-layer reads, b l m              s       state, b l d
          rate     exp(log A) exp(log dt), d; abar = exp(-rate) (22)
          Bbar     B (1 - abar) / exp(log A), d m: zero-order hold (4)
          alpha    gate of a layer                              sigma   Hankel singular values, d
abar depends on log A + log dt alone and Bbar on both. Still no system is lost or gained: (A c,
dt / c, B c) is the same one for any c.
Differs from the paper: there Bbar is free and dt a part of log A, yet log dt is counted. The hold
          here takes its count of 2 d m + 2 d + 1 parameters at its word. Its rule "90 %, 0.01" is
          two rules here. A truncated system has a dense A, which its count leaves out. The
          transformer here sees 60 bytes back: only a recurrence bridges more, where the paper's
          LoRA could look back.
"""
import dataclasses
import functools
import math
import timeit
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

import common
from checkpoint import save_tensors
from data import load_corpus
from experiments.byte_transformer import (BACKBONE, DISTANCES, KEYS, LANGUAGE, TASKS,
                                          ByteTransformer, inserted, loss_by_distance,
                                          train_on_task)
from experiments.hankel import (DiagonalSystem, empirical_convergence, gramians, h_infinity_error,
                                hankel_singular_values, run_system, truncate)
from text import ByteTokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    """Train LoRA and HRM adapters of one size on a frozen transformer, and compress the latter."""
    OLD_FLAGS: ClassVar = {"--text": "--data"}
    data: tuple[str, ...] = ("embedded",)  # 5 % of the documents are held out
    steps: int = 150                       # of each training
    size: int = 2048                       # bytes of text in a step
    lr: float = 3e-2                       # peak; linear warm-up over 5 %, cosine to 2 %
    rank: int = 8                          # of LoRA; HRM has twice as many states
    gate: float = 0.01                     # alpha at the start
    seeds: int = 1                         # trainings of each variant and task: seeds 42, 142, ...
    windows: int = 48                      # held-out windows of 512 bytes
    make_backbone: bool = False            # train the transformer itself, in bfloat16


class Variant(NamedTuple):
    """What is trained. All variants but the first have about the same number of parameters."""
    label: str                             # in tables, the figure and result files
    kind: Literal["frozen", "lora", "hrm"]
    sites: tuple[str, ...] = ()            # of its adapters in each layer
    learns_gate: bool = True


FROZEN = Variant("frozen", "frozen")
HRM_MLP = Variant("HRM, MLP", "hrm", ("mlp",))  # where the paper puts it
VARIANTS = (FROZEN,
            Variant("LoRA, Q and V", "lora", ("attention.q", "attention.v")),
            HRM_MLP,
            Variant("HRM, attention", "hrm", ("attention",)),
            Variant("HRM, both", "hrm", ("attention", "mlp")),
            Variant("HRM, MLP, gate frozen", "hrm", ("mlp",), learns_gate=False))


class Rule(NamedTuple):
    """How many states truncation keeps, see `hankel.states_to_keep`."""
    label: str
    share: float | None = None
    bound: float | None = None


RULES = (Rule("90 % kept", share=0.9), Rule("bound 0.01", bound=0.01))


# ---- adapters ------------------------------------------------------------------------------------
class HRM(nn.Module):
    """alpha y of (18), h b l m -> b l m: causal, any length, computed in float32 at least.

    Memories start at 1 to 1000 steps, with log A = log dt, which makes all states equally large
    for white h.
    """

    def __init__(self, d_model, d, gate=0.01):
        super().__init__()
        if gate >= 1:
            common.log(f"the gate starts at {gate}: from 1.0 on, training diverged in the source")
        self.B = nn.Parameter(torch.randn(d, d_model) * d_model ** -0.5)
        self.C = nn.Parameter(torch.randn(d_model, d) * d ** -0.5)
        self.log_A = nn.Parameter(-torch.linspace(0, math.log(1000), d) / 2)
        self.log_dt = nn.Parameter(self.log_A.detach().clone())
        self.gate = nn.Parameter(torch.tensor(float(gate)))

    def system(self, dtype=torch.float64):
        """The DiagonalSystem of (19), with alpha inside C."""
        log_A = self.log_A.to(dtype)
        rate = torch.exp(log_A + self.log_dt.to(dtype))                   # (22)
        hold = -torch.expm1(-rate) / torch.exp(log_A)                     # (4), (1 - abar) / |A|
        return DiagonalSystem(rate, hold[:, None] * self.B.to(dtype),
                              self.gate.to(dtype) * self.C.to(dtype))

    def forward(self, h):
        with torch.autocast(h.device.type, enabled=False):
            return run_system(self.system(torch.promote_types(self.B.dtype, torch.float32)), h)


def make_lora(d_model, r):
    """x -> B A x beside one square projection (2): no memory, 2 r d_model parameters."""
    lora = nn.Sequential(nn.Linear(d_model, r, bias=False), nn.Linear(r, d_model, bias=False))
    nn.init.zeros_(lora[1].weight)
    return lora


def make_variant(variant, model, rank, gate):
    """{name of a submodule of model: its adapter}. The states of HRM are shared out over sites."""
    d_model = model.embedding.embedding_dim
    adapters = {}
    for y in range(len(model.layers)):
        for site in variant.sites:
            if variant.kind == "lora":
                adapter = make_lora(d_model, rank)
            else:
                adapter = HRM(d_model, 2 * rank // len(variant.sites), gate)
            adapters[f"layers.{y}.{site}"] = adapter
    return adapters


def trained_parameters(variant, adapters):
    found = []
    for adapter in adapters.values():
        for name, parameter in adapter.named_parameters():
            if name != "gate" or variant.learns_gate:
                found.append(parameter)
    return found


# ---- measuring -----------------------------------------------------------------------------------
def measure_variant(cfg, model, variant, task, text, held_out, seed):
    """Train a variant on a task. Returns its losses, gates and sigma, and what each rule leaves."""
    torch.manual_seed(seed)
    adapters = make_variant(variant, model, cfg.rank, cfg.gate)
    parameters = trained_parameters(variant, adapters)
    with inserted(model, adapters):
        if parameters:
            train_on_task(model, parameters, task, text, cfg, seed)
        loss = loss_by_distance(model, task, held_out, cfg.windows)
    found = {"loss": loss, "rules": {}, "parameters": sum(p.numel() for p in parameters)}
    if variant.kind == "hrm":
        with torch.no_grad():
            systems = {name: adapter.system() for name, adapter in adapters.items()}
        sigma = [hankel_singular_values(*gramians(system)) for system in systems.values()]
        found["gates"] = [adapter.gate.item() for adapter in adapters.values()]
        found["sigma"] = [values.tolist() for values in sigma]
        for rule in RULES:
            reduced, left = compress(systems, found["sigma"], rule)
            with inserted(model, reduced):
                left["loss"] = loss_by_distance(model, task, held_out, cfg.windows)
            found["rules"][rule.label] = left
    return found


def compress(systems, sigma, rule):
    """Truncate each of systems, {name: DiagonalSystem}, by a rule. Returns the adapters that are
    left, {name: function of h}, and of each the states kept, Glover's bound and the error (13).
    """
    adapters = {}
    found = {"states": [], "bound": [], "error": []}
    for (name, system), values in zip(systems.items(), sigma):
        reduced = truncate(system, rule.share, rule.bound)
        n = len(reduced.A)
        adapters[name] = functools.partial(run_system, reduced)
        found["states"].append(n)
        found["bound"].append(2 * sum(values[n:]))
        found["error"].append(h_infinity_error(system, reduced))
    return adapters, found


def measure_all(cfg, model, text, held_out):
    """{label of a variant: {name of a task: [what `measure_variant` found, for each seed]}}"""
    rows = {}
    for variant in VARIANTS:
        rows[variant.label] = {}
        seeds = common.SEEDS[:1] if variant.kind == "frozen" else common.SEEDS[:cfg.seeds]
        for task in TASKS:
            runs = [measure_variant(cfg, model, variant, task, text, held_out, seed)
                    for seed in seeds]
            rows[variant.label][task.name] = runs
            last = " ".join(f"{nats:.3f}" for nats in runs[-1]["loss"])
            common.log(f"{variant.label:22s} {task.name:9s} {last}")
    return rows


def adapter_times(d_model, rank, rounds=7):
    """[length, LoRA's ms, HRM's ms]: forward and backward of a layer's adapters, taken in turn.
    Medians; the first round warms up and does not count.
    """
    lora = [make_lora(d_model, rank), make_lora(d_model, rank)]  # of Q and of V
    hrm = [HRM(d_model, 2 * rank)]

    def milliseconds(adapters, h):
        def work():
            total = sum(adapter(h) for adapter in adapters)
            total.sum().backward()
        return 1e3 * timeit.timeit(work, number=1)

    found = []
    for l in (256, 1024, 4096, 16384):
        h = torch.randn(1, l, d_model, requires_grad=True)
        taken = []
        for _ in range(rounds + 1):
            taken.append([milliseconds(lora, h), milliseconds(hrm, h)])
        found.append([l, *np.median(taken[1:], axis=0)])
    return found


# ---- showing -------------------------------------------------------------------------------------
def loss_table(rows):
    """Nats, mean ± Student's interval over seeds. rows: what `measure_all` found, also read back
    from a result file.
    """
    head = ["nats", "parameters", "language, bytes 257 to 512"]
    head += [f"recall at {distance}" for distance in DISTANCES]
    lines = []
    for variant in VARIANTS:
        found = rows[variant.label]
        farthest = [run["loss"][-1] for run in found["language"]]
        line = [variant.label, f"{found['recall'][0]['parameters']:,}",
                common.interval(farthest).show()]
        for i in range(len(DISTANCES)):
            losses = [run["loss"][i] for run in found["recall"]]
            line.append(common.interval(losses).show())
        lines.append(line)
    return common.markdown(head, *lines)


def compression_table(rows):
    """What each rule of truncation leaves of each HRM variant."""
    lines = []
    for variant in VARIANTS:
        if variant.kind != "hrm":
            continue
        for task, runs in rows[variant.label].items():
            for rule in RULES:
                left = [run["rules"][rule.label] for run in runs]
                fewest = min(min(one["states"]) for one in left)
                most = max(max(one["states"]) for one in left)
                of = len(runs[0]["sigma"][0])
                before = common.interval([np.mean(run["loss"]) for run in runs])
                after = common.interval([np.mean(one["loss"]) for one in left])
                lines.append([f"{variant.label}: {task}", rule.label,
                              f"{fewest} to {most} of {of}", f"{largest_ratio(left):.2f}",
                              before.show(), after.show()])
    return common.markdown(["", "rule", "states kept in a layer", "error / bound", "loss before",
                            "loss after"], *lines)


def largest_ratio(left):
    """Of any layer and seed: true error over Glover's bound, 0 where nothing was cut."""
    largest = 0.0
    for one in left:
        for error, bound in zip(one["error"], one["bound"]):
            if bound > 0:
                largest = max(largest, error / bound)
    return largest


def time_table(times):
    lines = [[f"{l:,}", f"{lora:.1f}", f"{hrm:.1f}"] for l, lora, hrm in times]
    return common.markdown(["length", "LoRA on Q and V, ms", "HRM, ms"], *lines)


def hrm_tables(rows, times):
    """Markdown by name, of what `measure_all` and `adapter_times` found."""
    return {"table": loss_table(rows), "compression": compression_table(rows),
            "cost": time_table(times)}


def draw_hrm(rows, path):
    """Losses by distance, gates by layer, and the sigma of HRM beside the MLP."""
    figure = common.new_figure(12, 9)
    (recall, language), (gates, spectrum) = figure.subplots(2, 2)
    frozen = np.array(rows[FROZEN.label]["language"][0]["loss"])
    for i, variant in enumerate(VARIANTS):
        found = rows[variant.label]
        draw_losses(recall, i, [run["loss"] for run in found["recall"]])
        if variant.kind != "frozen":
            draw_losses(language, i, [frozen - run["loss"] for run in found["language"]])
        if variant.kind == "hrm":
            draw_gates(gates, i, variant, found["recall"])
    draw_spectrum(spectrum, rows[HRM_MLP.label]["recall"])
    recall.axhline(math.log(len(KEYS)), color="0.5", ls="--", lw=1, label="chance (recall)")
    language.axhline(0, color="black", lw=0.8)
    for ax in (recall, language):
        ax.set_xticks(range(len(DISTANCES)), DISTANCES)
    recall.set(title="recall, 95 %", xlabel="bytes from key to question",
               ylabel="loss (nats per answer)")
    language.set(title="language: gain over frozen, 95 %", xlabel="bytes into the window, up to",
                 ylabel="nats gained per byte")
    gates.set(title="recall: gates after training, lowest to highest of the seeds\n"
                    "(filled: beside the MLP, hollow: beside attention)",
              xlabel="layer", ylabel="|gate| (no unit)")
    gates.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*recall.get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  frameon=False)
    common.save_figure(figure, path)


def variant_style(i):
    """How the i-th of VARIANTS is drawn; frozen, the first, is black."""
    return {"color": common.COLORS[i - 1], "marker": common.MARKERS[i], "ms": 5, "lw": 1.2,
            "capsize": 2.5, "elinewidth": 0.8}


def beside_tick(i):
    """How far the i-th of VARIANTS stands beside a tick, or the bars would lie on each other."""
    return 0.07 * (i - (len(VARIANTS) - 1) / 2)


def draw_losses(ax, i, by_seed):
    """The i-th of VARIANTS: mean over seeds at each of DISTANCES, with Student's interval."""
    cells = [common.interval(values) for values in zip(*by_seed)]
    x = [k + beside_tick(i) for k in range(len(cells))]
    # Of one seed the error is NaN, of which matplotlib draws nothing.
    ax.errorbar(x, [cell.mean for cell in cells], [cell.half for cell in cells],
                label=VARIANTS[i].label, **variant_style(i))


def draw_gates(ax, i, variant, runs):
    """The size of a variant's gates by layer, a line for each site: mean over the runs, and bars
    from the lowest to the highest, as a symmetric interval would go below zero.
    """
    sizes = np.abs([run["gates"] for run in runs])  # seeds, gates: layer by layer, site by site
    for k, site in enumerate(variant.sites):
        of_site = sizes[:, k::len(variant.sites)]
        mean = of_site.mean(0)
        x = np.arange(len(mean)) + 2 * beside_tick(i) + 0.07 * k
        ax.errorbar(x, mean, [mean - of_site.min(0), of_site.max(0) - mean],
                    mfc="white" if site == "attention" else None,
                    ls="--" if site == "attention" else "-", **variant_style(i))


def draw_spectrum(ax, runs):
    """The Hankel singular values of each layer: a line for the median of the runs, and a band from
    the lowest to the highest, as a symmetric interval would go below zero.
    """
    sigma = np.array([run["sigma"] for run in runs])  # seeds, layers, values
    index = np.arange(1, sigma.shape[2] + 1)
    for y in range(sigma.shape[1]):
        ax.fill_between(index, sigma[:, y].min(0), sigma[:, y].max(0), alpha=0.15, lw=0,
                        color=common.COLORS[y])
        ax.semilogy(index, np.median(sigma[:, y], 0), color=common.COLORS[y], ms=5, lw=1.2,
                    marker=common.MARKERS[y], label=f"layer {y}")
    ax.set(title=f"recall: Hankel singular values, {HRM_MLP.label}\n"
                 f"(median of {len(runs)} seeds, lowest to highest)",
           xlabel="index i", ylabel=r"$\sigma_i$ (no unit)")
    ax.legend(frameon=False, loc="lower left")


# ---- the script ----------------------------------------------------------------------------------
def load_text(cfg, split):
    """Bytes, (l,) int64, of the "train" or "valid" part of cfg.data."""
    ids = load_corpus(cfg.data, ByteTokenizer(), split).ids
    return torch.from_numpy(np.asarray(ids, np.int64))


def check_sizes(cfg):
    if cfg.size < DISTANCES[-1] or cfg.seeds > len(common.SEEDS):
        raise common.UserError(f"got --size {cfg.size}, --seeds {cfg.seeds}: need a size from "
                               f"{DISTANCES[-1]} and at most {len(common.SEEDS)} seeds")


def check_lengths(text, held_out):
    least = 2 * DISTANCES[-1]
    if min(len(text), len(held_out)) < least:
        raise common.UserError(f"--data: {len(text)} bytes to train on, {len(held_out)} held out; "
                               f"need {least} of each")


def make_backbone(cfg, model, text, held_out, folder):
    """Train the transformer itself and write it to the run folder."""
    parameters = list(model.parameters())
    train_on_task(model, parameters, LANGUAGE, text, cfg, common.SEEDS[0], bf16=True)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    path = folder / BACKBONE.name
    save_tensors(path, state)
    common.log(f"the transformer: {path.relative_to(common.ROOT)}")
    return {"held out, nats": loss_by_distance(model, LANGUAGE, held_out, cfg.windows)}


def study_adapters(cfg, model, text, held_out):
    """All that is measured, as result.json has it."""
    rows = measure_all(cfg, model, text, held_out)
    times = adapter_times(model.embedding.embedding_dim, cfg.rank)
    errors = empirical_convergence(common.SEEDS[0])
    log_n, log_error = np.log(errors).T
    slope = np.polyfit(log_n, log_error, 1)[0]
    return {"rows": rows, "lags": DISTANCES, "cost_ms": times, "empirical_gramians": errors,
            "empirical_slope": slope, **hrm_tables(rows, times)}


def main(cfg):
    check_sizes(cfg)
    torch.manual_seed(common.SEEDS[0])
    model = ByteTransformer(None if cfg.make_backbone else BACKBONE)
    env = common.banner("hrm_adapter.py", cfg, "cpu", model)
    text = load_text(cfg, "train")
    held_out = load_text(cfg, "valid")
    check_lengths(text, held_out)
    folder = common.ROOT / "runs" / "hrm_adapter"
    if cfg.make_backbone:
        result = make_backbone(cfg, model, text, held_out, folder)
        common.save_result(folder / "result.json", result, cfg, env)
        return result
    result = study_adapters(cfg, model, text, held_out)
    common.save_result(folder / "result.json", result, cfg, env)
    for name in ("table", "compression", "cost"):
        common.log(f"\n{result[name]}\n")
    path = folder / "hrm_adapter.png"
    draw_hrm(result["rows"], path)
    common.log(f"empirical Gramians err as n^{result['empirical_slope']:.2f}; "
               f"{path.relative_to(common.ROOT)}")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
