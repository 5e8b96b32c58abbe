"""The stability certificate of the modulated recurrence (2.1, 4.1, B.1, Algorithm 4, Figure 1).

Run:      python certify.py           (shipped backbone and adapters on text, 20 seconds)
Last line: "certified: N of N layers; Algorithm 4's least margin ..."; the status is 0 only then

Every state of a head decays by abar = exp(-exp(A_log') Delta) a step. With |x|^2 as the energy
(P = I) and the slowest decay that a hypothesis allows, the margin of a layer is

    epsilon = 1 - rho^2,    rho = max over heads of exp(-exp(A_log + lowest shift) Delta_min)

A margin is worth as much as its hypotheses. Algorithm 4 assumes Delta >= 0.001, which nothing in
Delta = softplus(Delta_in + dt_bias') enforces, so this file puts five of them side by side:

    hypothesis   shift of A_log at least             Delta at least
    paper        -0.5, proven                        0.001, assumed
    own beta_A   -beta_A of the layer, proven        0.001, assumed
    reached      the lowest on a grid of t, measured 0.001, assumed
    this text    the lowest on a grid of t, measured each head's smallest on a text, measured
    any text     -beta_A of the layer, proven        each head's bound from a LayerNorm, proven

Only "any text" holds whatever the text and t are (in exact arithmetic; a pad has Delta = 0).

Symbols:  A_log    log of -A                     (y, h)     eq. 8
          shift    beta_A tanh(psi(c_t))         (y, h)     eq. 3; at least -beta_A >= -0.5
          dt       Delta, a step                 > 0        eq. 9
          rate     -log abar, nats per step      (y, h)     eq. 10
          P        Lyapunov matrix               (n, n)     B.1
Differs from the paper: Delta_min, as said above. Everything is in float64 and 1 - rho^2 is
          -expm1(-2 rate): in float32 a head with A_log = -10 would fail for want of digits. C.4's
          last sentence calls 1 - rho the margin; both are printed.
"""
import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import common
from checkpoint import check_vocabulary, load_adapters, load_backbone
from chunk_scan import A_MIN
from data import held_out_split, load_corpus
from evaluate import make_draws
from mark_adapters import MAGNITUDES
from text import make_tokenizer

HYPOTHESES = ("paper", "own beta_A", "reached", "this text", "any text")  # as above
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
STYLES = ("o-", "s-", "^-", "v--", "x:")


# ---- the certificate -----------------------------------------------------------------------------


class Certificate(NamedTuple):
    """Algorithm 4's result for each layer y, in float64."""
    radius: torch.Tensor     # y   rho, the largest |eigenvalue| at the worst vertex
    distance: torch.Tensor   # y   1 - rho, the distance from the unit circle
    epsilon: torch.Tensor    # y   1 - rho^2, the Lyapunov margin with P = I
    head: torch.Tensor       # y   the head that sets them
    half_life: torch.Tensor  # y   steps in which that head's state halves

    @property
    def certified(self):
        """Whether every layer has a positive margin."""
        return bool((self.epsilon > 0).all())

    def lists(self):
        """{field: list}, for a result file."""
        return {name: values.tolist() for name, values in self._asdict().items()}


def certify(A_log, beta=0.5, dt_min=1e-3):
    """Algorithm 4: the certificate of A_log (y, h) under shifts >= -beta and steps >= dt_min.

    beta and dt_min: numbers, or tensors that broadcast to (y, h). The decay of a step is cut off
    at 30 nats, as the scan does. Raises UserError on NaN or infinity, naming the layer.
    """
    A_log, beta, dt_min = (torch.as_tensor(v, dtype=torch.float64) for v in (A_log, beta, dt_min))
    fits = all(v.ndim <= 2 and all(n in (1, m) for n, m in zip(v.shape[::-1], A_log.shape[::-1]))
               for v in (beta, dt_min))
    if A_log.ndim != 2 or not A_log.numel() or not fits:
        raise common.UserError(f"certify: A_log {tuple(A_log.shape)} with beta {tuple(beta.shape)} "
                               f"and dt_min {tuple(dt_min.shape)}, needed (layers, heads), not "
                               "empty, and what broadcasts to it")
    rate = (A_log - beta).exp() * dt_min                                  # y h
    finite = (A_log.isfinite() & rate.isfinite() & (dt_min >= 0)).all(-1)
    if not finite.all():
        raise common.UserError(f"certify: layer {finite.long().argmin()}: A_log, beta or dt_min is "
                               "not finite, or dt_min is negative")
    rate, head = rate.clamp(max=-A_MIN).min(-1)                           # y
    return Certificate((-rate).exp(), -torch.expm1(-rate), -torch.expm1(-2 * rate), head,
                       math.log(2) / rate)


class Aqs(NamedTuple):
    """B.1: whether A_k^T P A_k - P <= -epsilon I at every vertex, and Lemma B.2's constants."""
    verdict: str                    # "certified" or "not found"
    P: torch.Tensor | None = None   # n n
    epsilon: float = math.nan
    rho: float = math.nan           # |A^k| <= M_A rho^k, for products of different A as well
    M_A: float = math.nan


def aqs_certificate(A_vertices, P=None):
    """Verify the matrix inequality of B.1 for P (n, n) at the vertices (k, n, n).

    Without P, try P = I and each vertex's own Lyapunov solution. These are but candidates: "not
    found" does not mean that none exists. Raises UserError where the shapes do not fit, or P is
    not symmetric.
    """
    from scipy.linalg import solve_discrete_lyapunov
    A = torch.as_tensor(A_vertices, dtype=torch.float64)                  # k n n
    if A.ndim != 3 or A.shape[1] != A.shape[2] or not A.numel() or not A.isfinite().all():
        raise common.UserError(f"aqs_certificate: vertices {tuple(A.shape)}, needed (k, n, n), "
                               "finite and not empty")
    eye = torch.eye(A.shape[1], dtype=torch.float64)
    if P is None:
        stable = torch.linalg.eigvals(A).abs().amax(-1) < 1  # the others have no solution
        candidates = [eye] + [torch.from_numpy(solve_discrete_lyapunov(v.mT.numpy(), eye.numpy()))
                              for v in A[stable]]
    else:
        candidates = [torch.as_tensor(P, dtype=torch.float64)]
        if candidates[0].shape != eye.shape or not torch.allclose(candidates[0], candidates[0].mT):
            raise common.UserError("aqs_certificate: P must be symmetric and "
                                   f"{len(eye)} x {len(eye)}")
    for P in candidates:
        P = (P + P.mT) / 2
        smallest, largest = torch.linalg.eigvalsh(P)[[0, -1]].tolist()
        decrease = P - A.mT @ P @ A                                       # k n n
        epsilon = torch.linalg.eigvalsh((decrease + decrease.mT) / 2).min().item()
        terms = (A.abs().mT @ P.abs() @ A.abs()).sum(-1).max().item()     # of the two products
        rounding = 8 * len(eye) * torch.finfo(P.dtype).eps * max(largest, terms)
        if smallest > rounding and epsilon > rounding:
            return Aqs("certified", P, epsilon, math.sqrt(1 - min(1, epsilon / largest)),
                       math.sqrt(largest / smallest))
    return Aqs("not found")


# ---- what the hypotheses rest on -----------------------------------------------------------------


def recurrence(model):
    """(A_log, dt_bias) of all layers, each (y, h) in float64."""
    mixers = [layer.mixer for layer in model.layers]
    A_log = torch.stack([mixer.A_log for mixer in mixers])
    dt_bias = torch.stack([mixer.dt_bias for mixer in mixers])
    return A_log.double(), dt_bias.double()


@torch.no_grad()
def mixer_inputs(model, input_ids, modulation=None, attention_mask=None):
    """What each layer's mixer is called with on ids (b, l): [(u, m, mask), ...]."""
    seen = []

    def note(mixer, args):
        seen.append(args)

    hooks = [layer.mixer.register_forward_pre_hook(note) for layer in model.layers]
    try:
        model.hidden(input_ids, modulation, attention_mask)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def scan_inputs(model, inputs):
    """What each layer's scan reads, from its mixer's (u, m, mask): [(dt, A, B, C, D), ...].

    Shapes as in chunk_scan.py.
    """
    read = []
    for layer, (u, m, mask) in zip(model.layers, inputs, strict=True):
        _, _, dt, A, B, C, D = layer.mixer.project(u, m, mask)
        read.append((dt, A, B, C, D))
    return read


@torch.no_grad()
def reached_shift(adapter, points=30_001):
    """The lowest A shift of every head over t in [0, 1], (y, h): a grid's, less an allowance.

    Half the spacing, at twice the steepest slope between neighbours, is the largest step between
    neighbours. That slope is measured; what is proven is -beta_A, below which this never goes.
    """
    t = torch.linspace(0, 1, points)
    A = torch.cat([adapter(part).A for part in t.split(8192)], 1)         # y t h
    lowest = A.amin(1) - A.diff(dim=1).abs().amax(1)                      # y h
    return torch.maximum(lowest, -adapter.effective_magnitudes()[:, :1])


@torch.no_grad()
def step_floor(model, adapter):
    """A Delta below which no text can bring a step of a real token, (y, h) in float64.

    in_proj reads u = weight * n + bias of a LayerNorm, and n has mean 0 and |n|^2 <= d. So
    w.u >= w.bias - sqrt(d) |w * weight less its mean|, and the shift of dt_bias is >= -|beta_dt|.
    """
    h, d = model.config.nheads, model.config.d_model
    beta_dt = adapter.effective_magnitudes()[:, MAGNITUDES.index("dt")].abs()  # y
    norms = [model.embedding_norm, *(layer.norm for layer in model.layers)]
    floors = []
    for layer, norm, beta in zip(model.layers, norms, beta_dt.double()):
        w = layer.mixer.in_proj.weight[-2 * h:].double()                  # (2 h) d
        scaled = w * norm.weight
        spread = (scaled - scaled.mean(-1, keepdim=True)).norm(dim=-1)    # (2 h)
        lowest = (w @ norm.bias.double() - d ** 0.5 * spread).unflatten(0, (2, h)).amin(0)
        floors.append(F.softplus(lowest + layer.mixer.dt_bias - beta))    # h
    return torch.stack(floors)


@torch.no_grad()
def met_on_text(model, adapter, draws, dt_min=1e-3):
    """On masked windows, each told its own t: the smallest Delta and the slowest rate of every
    layer and head, (y, h) each, and the share of all Delta below dt_min. Pads do not count.
    """
    smallest = slowest = torch.full((model.config.n_layer, model.config.nheads), math.inf)
    below = total = 0
    for rows in torch.arange(len(draws.t)).split(max(1, 8192 // draws.x0.shape[1])):
        real = draws.x0[rows] != draws.pad_id                             # b l
        inputs = mixer_inputs(model, draws.x_t[rows], adapter(draws.t[rows]), real)
        layers = scan_inputs(model, inputs)
        dt = torch.stack([dt[real] for dt, *_ in layers])                 # y tokens 2 h
        rate = torch.stack([(dt * -A[:, None, None])[real] for dt, A, *_ in layers])
        smallest = torch.minimum(smallest, dt.amin((1, 2)))
        slowest = torch.minimum(slowest, rate.amin((1, 2)))
        below, total = below + (dt < dt_min).sum().item(), total + dt.numel()
    return smallest.double(), slowest.double(), below / total


@torch.no_grad()
def margins(A_log, model, adapter, draws, beta=0.5, dt_min=1e-3):
    """{hypothesis: Certificate} of an adapter; and what was met, dt, radius and share_below."""
    own = adapter.effective_magnitudes()[:, :1]                           # y 1
    reached = -reached_shift(adapter)                                     # y h
    dt, rate, below = met_on_text(model, adapter, draws, dt_min)
    bounds = ((beta, dt_min), (own, dt_min), (reached, dt_min), (reached, dt),
              (own, step_floor(model, adapter)))
    met = {"dt": dt, "radius": (-rate).exp().amax(-1), "share_below": below}
    return {name: certify(A_log, *b) for name, b in zip(HYPOTHESES, bounds)}, met


# ---- table, figure, command line -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Certify a backbone, and the adapters on it under five hypotheses."""
    weights: str = "small"               # backbone: "small", "goombalab/hydra" or a path
    adapter: tuple[str, ...] = ()        # run folders or files; "none"; default: the shipped ones
    data: tuple[str, ...] = ("embedded",)  # text on which Delta is measured
    vocab: str = "bytes"                 # "bytes", "bert-base-uncased" or a vocab.txt
    seqlen: int = 128
    windows: int = 100                   # of the text, each at two values of t
    beta: float = 0.5                    # bound of the A shift, Table 8
    dt_min: float = 1e-3                 # Algorithm 4's assumption
    publish: bool = False                # also write results/certify/ and figures/
    seed: int = 42


def backbone_table(certificate, dt_bias):
    """Markdown: Algorithm 4's certificate of each layer, and the least Delta of a zero input."""
    formats = ("{:.6f}", "{:.3e}", "{:.3e}", "{}", "{:,.0f}", "{:.2e}")
    rows = zip(*(v.tolist() for v in (*certificate, F.softplus(dt_bias).amin(-1))))
    return common.markdown(
        ["layer", "rho", "1 - rho", "epsilon", "head", "half-life, steps", "softplus(dt_bias)"],
        *([y, *(f.format(v) for f, v in zip(formats, row))] for y, row in enumerate(rows)))


def adapter_table(certificates, met):
    """Markdown: each layer's epsilon under each hypothesis, beside what the text shows."""
    rows = [[y, *(f"{c.epsilon[y]:.2e}" for c in certificates.values()), f"{step:.2e}",
             f"{met['radius'][y]:.8f}"] for y, step in enumerate(met["dt"].amin(-1))]
    return common.markdown(["layer", *certificates, "smallest Delta met", "largest rho met"], *rows)


def draw(certificate, adapters, path):
    """Figure 1: Algorithm 4's radii and margins, and what other hypotheses make of the margins."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10 if adapters else 5, 3.4), layout="constrained")
    axes = figure.subplots(1, 1 + bool(adapters), squeeze=False)[0]
    y = range(len(certificate.epsilon))
    axes[0].bar(y, certificate.epsilon.tolist(), color="tab:blue", width=0.7)
    axes[0].set_title("Algorithm 4, as in the paper")
    axes[0].set(xlabel="layer", ylim=(0, None))
    axes[0].set_ylabel("margin $\\epsilon = 1 - \\rho^2$ (bars)", color="tab:blue")
    radius = axes[0].twinx()
    radius.plot(y, certificate.radius, "o-", color="tab:red", ms=4)
    radius.set_ylabel("worst-case radius $\\rho$ (line)", color="tab:red")
    radius.set_ylim(None, 1)
    for i, certificates in enumerate(adapters.values()):
        for (label, c), color, style in zip(certificates.items(), COLORS, STYLES):
            axes[1].semilogy(y, c.epsilon, style, color=color, ms=3, lw=1,
                             label=None if i else label)
    if adapters:
        axes[1].set_title("under five hypotheses, a line for each adapter", fontsize=10)
        axes[1].set(xlabel="layer", ylabel="margin $\\epsilon$")
        figure.legend(loc="outside right upper", fontsize=9)
    common.save_figure(figure, path)


def main(cfg):
    env = common.banner("certify.py", cfg)
    model = load_backbone(cfg.weights)
    A_log, dt_bias = recurrence(model)
    backbone = certify(A_log, cfg.beta, cfg.dt_min)
    table = backbone_table(backbone, dt_bias)
    common.log(f"\nAlgorithm 4: shifts of A_log within {cfg.beta}, Delta >= {cfg.dt_min} assumed"
               f"\n\n{table}\n")
    result = {"backbone": backbone.lists(), "table": table, "adapters": {}}
    adapters, certificates = {}, {"Algorithm 4": backbone}
    if cfg.adapter != ("none",) and (cfg.adapter or cfg.weights == "small"):
        tokenizer = make_tokenizer(cfg.vocab)
        check_vocabulary(model, tokenizer)
        corpus = load_corpus(cfg.data, tokenizer, held_out_split(cfg.data, ()))
        draws = make_draws(corpus, tokenizer, cfg.seqlen, cfg.windows, cfg.seed)
        loaded = load_adapters(cfg.adapter, model.config, mark_only=True)
        for name, adapter in common.progress(loaded.items(), desc="adapters"):
            found, met = margins(A_log, model, adapter, draws, cfg.beta, cfg.dt_min)
            adapters[name] = found
            certificates |= {f"{name}, {k}": c for k, c in found.items()}
            table = adapter_table(found, met)
            result["adapters"][name] = {
                "margins": {k: c.lists() for k, c in found.items()}, "table": table,
                "dt": met["dt"].tolist(), "radius": met["radius"].tolist(),
                "share_below": met["share_below"]}
            common.log(f"\n{name}: margin epsilon under five hypotheses (see the docstring); the "
                       f"text is {len(draws.t)} windows, each at a t of its own\n\n{table}\n")
            layers = (met["dt"].amin(-1) < cfg.dt_min).sum().item()
            if layers:
                y, h = divmod(met["dt"].argmin().item(), met["dt"].shape[1])
                common.log(f"!! {name}: Delta falls to {met['dt'].min():.1e} (layer {y}, head {h})"
                           f" and below {cfg.dt_min} in {layers} of {len(A_log)} layers, in "
                           f"{met['share_below']:.2%} of all steps.\n!! The first three margins "
                           'assume what this text breaks; "any text" assumes nothing.')
    folder = common.ROOT / "runs" / "certify"
    figure = (common.ROOT / "figures" if cfg.publish else folder) / "fig1_certificate.png"
    draw(backbone, adapters, figure)
    result["certified"] = all(c.certified for c in certificates.values())
    common.write_json(folder / "result.json", {"metrics": result, "config": cfg})
    if cfg.publish:
        common.publish("certify", Path(cfg.weights).stem, result, cfg, env)
    common.log(f"figure: {figure.relative_to(common.ROOT)}")
    done = min((c.epsilon > 0).sum().item() for c in certificates.values())
    which, least = min(certificates.items(), key=lambda item: item[1].epsilon.min())
    y = least.epsilon.argmin().item()
    common.log(f"{'certified' if result['certified'] else 'NOT certified'}: {done} of {len(A_log)} "
               f"layers; Algorithm 4's least margin is epsilon {backbone.epsilon.min():.3e}, the "
               f"least of all {least.epsilon[y]:.3e} ({which}: layer {y}, head {least.head[y]})")
    return result


if __name__ == "__main__":
    common.run_cli(Config, lambda cfg: sys.exit(0 if main(cfg)["certified"] else 1))
