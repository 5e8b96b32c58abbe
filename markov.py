"""Markov memory profiles: what each layer remembers at each diffusion time (4.3, B.2, Figure 3).

Run:      python markov.py            (the shipped adapters on the embedded text, 20 seconds)
Last line: "figures: ... (profiles, operators, coefficients)"

Freeze one token's Delta, B and C and the time t, and a head answers an impulse k + 1 positions
later (the scan is shifted by one) with the k-th Markov parameter of eq. 7,

    h_k = C'^T Abar'^k Bbar' = gain exp(-rate k),   gain = Delta C'^T B',   rate = exp(A_log') Delta

because A is a scalar times the identity for each head. Everything follows in closed form: the
Hankel operator [h_{i+j}] has rank one, with the singular value |gain| / (1 - exp(-2 rate)); the H2
norm is |gain| / sqrt(1 - exp(-2 rate)); the half-life is ln 2 / rate steps; and for two operators,

    <H, H'> = sum over k of h_k h'_k = gain gain' / (1 - exp(-(rate + rate')))

No coordinates of the state appear, as Lemma B.1 says. Lemma B.2 bounds |h_k| by M_C M_A M_B rho^k.

Symbols:  gain, rate   h_0 and -log Abar'      (y, s, 2, h)   s: a token of the sample
          k            lag; lag k is distance k + 1 in the mixer
          M_A          1, as P = I             M_B, M_C   largest |Bbar'|, |C'| of a layer
          rho          certify.py's radius of a layer: own beta_A, smallest Delta of the sample
Differs from the paper: its public figure takes the forward direction alone, Delta from the bias
          alone, and splits the state across the heads. Here B, C and Delta are those of real
          tokens, in both directions, and each head has the whole state; averages are root mean
          squares, not means of norms. Every t sees one text, masked at --masked, and each layer the
          activations of the frozen backbone, so that operators differ by their modulation alone.
          Bbar = Delta B, as in the scan that runs; --zoh takes eq. 5's zero-order hold.
"""
import dataclasses
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import common
from cart import corrupt
from certify import certify, mixer_inputs, scan_inputs
from checkpoint import check_vocabulary, load_adapters, load_backbone
from chunk_scan import A_MIN
from data import Windows, held_out_split, load_corpus, maskable_tokens, noise_generator
from hydra_ssm import Modulation
from mark_adapters import MAGNITUDES
from text import make_tokenizer

TIMES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of Figure 3
LAGS = torch.cat([torch.arange(65), torch.logspace(6, 12, 97, 2)[1:].round()]).double()  # to 4096


# ---- the operator of a token at a frozen time, and its closed forms ------------------------------


class Operator(NamedTuple):
    """h_k = gain exp(-rate k) of every layer y, token s, direction and head, in float64."""
    gain: torch.Tensor  # y s 2 h
    rate: torch.Tensor  # y s 2 h   nats per step
    dt: torch.Tensor    # y s 2 h
    B: torch.Tensor     # y s 2 h   |Bbar'|
    C: torch.Tensor     # y s 2 h   |C'|


def frozen_operator(model, inputs, modulation=None, zoh=False):
    """The Operator at each real token of `inputs`, the frozen backbone's `mixer_inputs`."""
    parts = []
    u, _, mask = inputs[0]
    real = torch.ones_like(u[..., 0], dtype=torch.bool) if mask is None else mask  # b l
    layers = (modulation or Modulation()).by_layer(model)
    modulated = [(u, m, mask) for (u, _, mask), m in zip(inputs, layers, strict=True)]
    for dt, A, B, C, _ in scan_inputs(model, modulated):
        heads = dt.shape[-1] // B.shape[3]                                # of one group
        A = A.double()[:, None].expand(*real.shape, -1)[real][:, None]    # s 1 h
        dt, B, C = (v[real].double() for v in (dt, B, C))
        hold = torch.expm1(dt * A) / A if zoh else dt                     # s 2 h, Bbar' / B'
        CB, B, C = (v.repeat_interleave(heads, -1)                        # s 2 h
                    for v in ((C * B).sum(-1), B.norm(dim=-1), C.norm(dim=-1)))
        parts.append((hold * CB, (-dt * A).clamp(max=-A_MIN), dt, hold * B, C))
    return Operator(*map(torch.stack, zip(*parts)))


def inner(one, other):
    """<H, H'> of two Operators on the same tokens, averaged over y, s, directions and heads."""
    overlap = one.gain * other.gain / -torch.expm1(-(one.rate + other.rate))
    return overlap.mean().item()


def hankel_singular_value(op):
    """The only one, of each y s 2 h: [h_{i+j}] has rank one, as h_{i+j} is a product over i, j."""
    return op.gain.abs() / -torch.expm1(-2 * op.rate)


def half_life(op):
    """Steps in which a state halves, (y,): the geometric mean over tokens, directions and heads."""
    return (math.log(2) / op.rate).log().mean((1, 2, 3)).exp()


def profile(op, lags):
    """Root mean square of h_k over layers, tokens, directions and heads, for lags (k,)."""
    return torch.stack([(op.gain * (-op.rate * k).exp()).square().mean().sqrt() for k in lags])


def lemma_bound(operators, A_log, beta_A, lags):
    """Lemma B.2 for `profile`: M_C M_A M_B rho^k of each layer, then their root mean square.

    beta_A (y,). The constants hold for every one of the operators.
    """
    M_B, M_C = (torch.stack([getattr(op, name).amax((1, 2, 3)) for op in operators]).amax(0)
                for name in ("B", "C"))                                   # y
    dt = torch.stack([op.dt.amin((1, 2)) for op in operators]).amin(0)    # y h
    rho = certify(A_log, beta_A[:, None], dt).radius                      # y
    return ((M_C * M_B)[:, None] * rho[:, None] ** lags).square().mean(0).sqrt()


def distances(operators):
    """|H - H'| between all pairs of Operators, (i, i), root mean square like the H2 norm."""
    gram = torch.tensor([[inner(a, b) for b in operators] for a in operators], dtype=torch.float64)
    norm = gram.diagonal()
    return (norm[:, None] + norm - 2 * gram).clamp(min=0).sqrt()


@torch.no_grad()
def coefficients(adapter, points=257):
    """A.2's components, by layer: the learned magnitudes (y, 7); for a DCT the exponent of its
    damping (y,) and the spectrum (y, f), for Chebyshev the coefficients of the A shift (y, k);
    both root mean square over an even grid of t.
    """
    h = adapter.hidden(torch.linspace(0, 1, points))                      # y t m
    found = {"magnitudes": adapter.effective_magnitudes()}
    if adapter.kernel == "dct":
        exponent = F.softplus(adapter.alpha) + 1e-4                       # y 1 1
        spectrum = adapter.spectrum(h) * adapter.order ** -exponent       # y t f
        found |= {"exponent": exponent[:, 0, 0], "spectrum": spectrum.square().mean(1).sqrt()}
    if adapter.kernel == "chebyshev":
        theta = adapter.shift(h).unflatten(-1, (3, adapter.degree, -1))[:, :, 0]  # y t k s
        found["spectrum"] = theta.square().mean((1, 3)).sqrt()
    return found


# ---- figures -------------------------------------------------------------------------------------


def draw_profiles(result, path):
    """Figure 3: h_k log-log, semi-log and beside the frozen backbone's, one column per adapter."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    figure = Figure(figsize=(3.6 * len(result) + 1.2, 8), layout="constrained")
    axes = figure.subplots(3, len(result), sharey="row", squeeze=False)
    for (loglog, semilog, ratio), (name, found) in zip(axes.T, result.items()):
        frozen = torch.tensor(found["profile_frozen"])
        for ax, lags in ((loglog, LAGS + 1), (semilog, LAGS)):
            for t, curve in zip(TIMES, found["profile"]):
                ax.plot(lags, curve, color=colormaps["viridis"](0.9 * t), label=f"t = {t}")
            ax.plot(lags, frozen, "k--", lw=1, label="frozen")
            ax.plot(lags, found["bound"], ":", color="tab:red", label="Lemma B.2")
            ax.set_yscale("log")
            ax.set_ylim(min(found["profile_frozen"]) / 3, 3e3 * max(found["profile_frozen"]))
        for t, curve in zip(TIMES, found["profile"]):
            ratio.plot(LAGS + 1, torch.tensor(curve) / frozen, color=colormaps["viridis"](0.9 * t))
        ratio.axhline(1, color="k", ls="--", lw=1)
        loglog.set(title=name, xscale="log", xlabel="distance, k + 1")
        semilog.set(xlabel="lag k")
        ratio.set(xscale="log", xlabel="distance, k + 1")
    for ax, label in zip(axes[:, 0], ("root mean square of $h_k$", "root mean square of $h_k$",
                                      "the same, over frozen's")):
        ax.set_ylabel(label)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
    common.save_figure(figure, path)


def draw_operators(result, grid, path):
    """Half-life by layer and t, and the distance between operators at two times."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(3.6 * len(result) + 1.2, 6.2), layout="constrained")
    axes = figure.subplots(2, len(result), squeeze=False)
    ratios = [[[math.log2(now / frozen) for now, frozen in zip(row, found["half_life_frozen"])]
               for row in found["half_life"]] for found in result.values()]
    most = max(abs(v) for ratio in ratios for row in ratio for v in row) or 1
    far = max(v for found in result.values() for row in found["distance"] for v in row) or 1
    ticks = [0, (len(grid) - 1) / 2, len(grid) - 1]
    for column, ratio, (name, found) in zip(axes.T, ratios, result.items()):
        upper = column[0].imshow(list(zip(*ratio)), cmap="RdBu_r", vmin=-most, vmax=most,
                                 aspect="auto", interpolation="nearest")
        column[0].set(title=name, xlabel="t", ylabel="layer", xticks=ticks)
        lower = column[1].imshow(found["distance"], cmap="magma", vmin=0, vmax=far)
        column[1].set(xlabel="t' (last: frozen)", ylabel="t", xticks=ticks, yticks=ticks)
        column[1].axvline(len(grid) - 0.5, color="white", lw=2)
        column[1].axhline(len(grid) - 0.5, color="white", lw=2)
        for axis in (column[0].xaxis, column[1].xaxis, column[1].yaxis):
            axis.set_ticklabels(["0", "0.5", "1"])
    figure.colorbar(upper, ax=axes[0], label="half-life, log2 of frozen's")
    figure.colorbar(lower, ax=axes[1], label="distance / norm of frozen")
    common.save_figure(figure, path)


def draw_coefficients(found, path):
    """What each layer learned: the magnitudes, and a basis' components."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(3.6 * len(found) + 1.2, 6), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False)
    most = max(v["magnitudes"].abs().max() for v in found.values())
    for column, (name, values) in zip(axes.T, found.items()):
        upper = column[0].imshow(values["magnitudes"].numpy(), cmap="RdBu_r", vmin=-most, vmax=most,
                                 aspect="auto")
        column[0].set(title=f"{name}: magnitudes", ylabel="layer", xticks=range(len(MAGNITUDES)))
        column[0].set_xticklabels(MAGNITUDES, rotation=90)
        column[1].set_axis_off()
        if "spectrum" in values:
            column[1].set_axis_on()
            image = column[1].imshow(values["spectrum"].numpy(), "magma", vmin=0, aspect="auto")
            order = "frequency" if "exponent" in values else "degree k, A shift"
            column[1].set(title="root mean square over t", xlabel=order, ylabel="layer")
            figure.colorbar(image, ax=column[1])
        if "exponent" in values:
            column[1].set_yticks(range(len(values["exponent"])), [
                f"{y}: {e:.2f}" for y, e in enumerate(values["exponent"].tolist())])
            column[1].set_ylabel("layer: damping exponent")
    figure.colorbar(upper, ax=axes[0], label="beta or alpha")
    common.save_figure(figure, path)


# ---- command line --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Draw the memory profiles of adapters at frozen times."""
    adapter: tuple[str, ...] = ()        # run folders or files; default: the shipped ones
    weights: str = "small"               # backbone: "small", "goombalab/hydra" or a path
    data: tuple[str, ...] = ("embedded",)
    vocab: str = "bytes"                 # "bytes", "bert-base-uncased" or a vocab.txt
    seqlen: int = 128
    windows: int = 8                     # every token of these is in the sample
    masked: float = 0.3                  # share of the sample that is masked, at every t
    grid: int = 17                       # even times in the pictures over t
    zoh: bool = False                    # Bbar by zero-order hold in place of Delta B
    publish: bool = False                # also write results/markov/ and figures/
    seed: int = 42


@torch.no_grad()
def analyse(model, adapter, inputs, grid, zoh=False):
    """Everything that is drawn of one adapter, as lists; `grid`: times 0 to 1, every (n / 4)-th of
    which is one of TIMES."""
    frozen = frozen_operator(model, inputs, None, zoh)
    b = len(inputs[0][0])
    every = [*(frozen_operator(model, inputs, adapter(torch.full((b,), t)), zoh) for t in grid),
             frozen]
    shown = every[:-1:len(grid) // 4]
    A_log = torch.stack([layer.mixer.A_log for layer in model.layers])
    beta_A = adapter.effective_magnitudes()[:, 0]
    return {"profile": [profile(op, LAGS).tolist() for op in shown],
            "profile_frozen": profile(frozen, LAGS).tolist(),
            "bound": lemma_bound([*shown, frozen], A_log, beta_A, LAGS).tolist(),
            "hankel": [hankel_singular_value(op).square().mean().sqrt().item()
                       for op in (*shown, frozen)],
            "half_life": [half_life(op).tolist() for op in every[:-1]],
            "half_life_frozen": half_life(frozen).tolist(),
            "distance": (distances(every) / math.sqrt(inner(frozen, frozen))).tolist()}


def table(result):
    """Markdown: how far the operators of an adapter are apart, and what becomes of the memory."""
    far, rows = LAGS.tolist().index(1024), []
    for name, found in result.items():
        *matrix, _ = found["distance"]
        between = [v for i, row in enumerate(matrix) for v in row[:i]]
        kept = [found["profile"][i][far] / found["profile_frozen"][far] for i in (0, 2, 4)]
        changes = [now / frozen for row in found["half_life"]
                   for now, frozen in zip(row, found["half_life_frozen"])]
        hankel = [value / found["hankel"][-1] for value in found["hankel"][:-1:4]]
        rows.append([name, f"{statistics.mean(between):.3f} ({max(between):.3f})",
                     f"{statistics.mean(row[-1] for row in matrix):.3f}",
                     f"{min(changes):.2f} to {max(changes):.2f}", *(f"{v:.2f}" for v in hankel),
                     *(f"{v:.2f}" for v in kept)])
    return common.markdown(
        ["adapter", "distance of two times, mean (largest)", "distance to frozen, mean",
         "half-life of a layer over frozen's", "Hankel singular value over frozen's: t = 0",
         "t = 1", f"h_k over frozen's at lag {LAGS[far]:.0f}: t = 0",
         "t = 0.5", "t = 1"], *rows)


def main(cfg):
    if cfg.grid < 5 or cfg.grid % 4 != 1 or not 0 <= cfg.masked <= 1:
        raise common.UserError(f"got --grid {cfg.grid} and --masked {cfg.masked}, need 5, 9, 13, "
                               "... times and a share from 0 to 1")
    tokenizer, model = make_tokenizer(cfg.vocab), load_backbone(cfg.weights)
    check_vocabulary(model, tokenizer)
    env = common.banner("markov.py", cfg, "cpu", model)
    corpus = load_corpus(cfg.data, tokenizer, held_out_split(cfg.data, ()))
    x0 = Windows(corpus, cfg.seqlen, tokenizer.pad_id).evenly(cfg.windows)     # b l
    real = x0 != tokenizer.pad_id
    x_t, _ = corrupt(x0, torch.full((len(x0),), cfg.masked), tokenizer.mask_id,
                     maskable_tokens(x0, tokenizer), noise_generator(cfg.seed))
    inputs = mixer_inputs(model, x_t, None, real)
    grid, result, learned = torch.linspace(0, 1, cfg.grid).tolist(), {}, {}
    adapters = load_adapters(cfg.adapter, model.config, mark_only=True)
    for name, adapter in common.progress(adapters.items(), desc="adapters"):
        result[name] = analyse(model, adapter, inputs, grid, cfg.zoh)
        learned[name] = coefficients(adapter)
    text = table(result)
    common.log(f"\n{real.sum()} tokens, both directions, {len(model.layers)} layers; distances as "
               f"shares of the frozen operator's norm\n\n{text}\n")
    folder = common.ROOT / "runs" / "markov"
    figures = common.ROOT / "figures" if cfg.publish else folder
    draw_profiles(result, figures / "fig3_profiles.png")
    draw_operators(result, grid, figures / "fig3_operators.png")
    draw_coefficients(learned, figures / "fig3_coefficients.png")
    for name, values in learned.items():
        result[name]["learned"] = {k: v.tolist() for k, v in values.items()}
    result = {"adapters": result, "lags": LAGS.tolist(), "grid": grid, "table": text}
    common.write_json(folder / "result.json", {"metrics": result, "config": cfg})
    if cfg.publish:
        common.publish("markov", Path(cfg.weights).stem, result, cfg, env)
    common.log(f"figures: {figures.relative_to(common.ROOT)}/fig3_*.png (profiles, operators, "
               "coefficients)")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
