"""The stability certificate of the modulated recurrence (2.1, 4.1, B.1, Algorithm 4, Figure 1).

Run:      python certify.py           (shipped backbone and adapters on text, 20 seconds)
Last line: "certified: N of N layers; Algorithm 4's least margin ..."; the status is 0 only then

Every state of a head decays by abar = exp(-exp(A_log') Delta) a step. Take |x|^2 as the energy
(P = I) and the slowest decay that a hypothesis allows. The margin of a layer is then

    epsilon = 1 - rho^2,    rho = max over heads of exp(-exp(A_log + lowest shift) Delta_min)

A margin is worth as much as its hypothesis. Algorithm 4 assumes Delta >= 0.001, and nothing in
Delta = softplus(Delta_in + dt_bias') enforces that. So this file puts five of them side by side:

    hypothesis   shift of A_log at least             Delta at least
    paper        -0.5, proven                        0.001, assumed
    own beta_A   -beta_A of the layer, proven        0.001, assumed
    reached      the lowest on a grid of t, measured 0.001, assumed
    this text    the lowest on a grid of t, measured each head's smallest on a text, measured
    any text     -beta_A of the layer, proven        each head's bound from a LayerNorm, proven

Only "any text" holds whatever the text and t are (a pad has Delta = 0). It does so in exact
arithmetic: float32, in which the scan runs, rounds the decay exp(-rate) of one step to 1 where
epsilon is below 6e-8. The command's last line says in how many layers that is so.

An adapter `static+K` is a geometry on top of a static operator (baselines.py). What is certified is
the geometry within its own bounds around the shifted backbone: A_log + static.A and dt_bias +
static.dt take the place of A_log and dt_bias. `static` alone is the same with a bound of 0.
Algorithm 4's table is always of the backbone as it is.

Symbols:  A_log    log of -A                     (y, h)     eq. 8
          shift    beta_A tanh(psi(c_t))         (y, h)     eq. 3; at least -beta_A >= -0.5
          dt       Delta, a step                 > 0        eq. 9
          rate     -log abar, nats per step      (y, h)     eq. 10
          P        Lyapunov matrix               (n, n)     B.1
          y layer, h heads, n state, b batch, l length, d model; k vertices of B.1
Differs from the paper: Delta_min, as said above. Its script takes 0.001 from `dt_min` of Hydra's
          module, which is where softplus(dt_bias) starts before training; `dt_limit` is (0, inf)
          there, so nothing cuts Delta off (github.com/goombalab/hydra at 0daa208,
          hydra/modules/hydra.py). Everything is in float64 and 1 - rho^2 is -expm1(-2 rate): in
          float32 a head with A_log = -10 would fail for want of digits. C.4's last sentence calls
          1 - rho the margin; both are printed.
"""
import dataclasses
import math
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

import common
from baselines import Static, StaticWith
from checkpoint import check_vocabulary, load_adapters, load_backbone, result_folder, run_plugin
from chunk_scan import A_MIN
from data import held_out_split, load_corpus
from evaluate import make_draws
from hydra_ssm import Modulation
from mark_adapters import MAGNITUDES, MarkAdapter
from text import make_tokenizer

FLOAT32 = 2.0 ** -24  # up to this epsilon, 1 - epsilon / 2 is rounded to 1 in float32

# ---- Algorithm 4 ---------------------------------------------------------------------------------


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
    A_log, beta, dt_min = [torch.as_tensor(v, dtype=torch.float64) for v in (A_log, beta, dt_min)]
    check_shapes(A_log, beta, dt_min)
    slowest = A_log - beta                             # y h    line 4: the vertex of least decay
    rate = slowest.exp() * dt_min                      # y h    lines 5 and 6: -log abar
    sound = A_log.isfinite() & rate.isfinite() & (dt_min >= 0)
    if not sound.all():
        layer = sound.all(-1).long().argmin()
        raise common.UserError(f"certify: layer {layer}: A_log, beta or dt_min is not finite, or "
                               "dt_min is negative")
    rate, head = rate.clamp(max=-A_MIN).min(-1)        # y      line 8: the slowest head
    return Certificate(
        radius=torch.exp(-rate),
        distance=-torch.expm1(-rate),
        epsilon=-torch.expm1(-2 * rate),               # y      line 9
        head=head,
        half_life=math.log(2) / rate)


def check_shapes(A_log, beta, dt_min):
    """Raise UserError unless A_log is (y, h), and beta and dt_min broadcast to it."""
    fits = A_log.ndim == 2 and A_log.numel() > 0
    for bound in (beta, dt_min):
        try:
            bound.expand(A_log.shape)
        except RuntimeError:
            fits = False
    if not fits:
        raise common.UserError(f"certify: A_log {tuple(A_log.shape)} with beta {tuple(beta.shape)} "
                               f"and dt_min {tuple(dt_min.shape)}, needed (layers, heads), not "
                               "empty, and what broadcasts to it")


# ---- B.1 in general: any vertices, any P ---------------------------------------------------------


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
    A = torch.as_tensor(A_vertices, dtype=torch.float64)                  # k n n
    if A.ndim != 3 or A.shape[1] != A.shape[2] or not A.numel() or not A.isfinite().all():
        raise common.UserError(f"aqs_certificate: vertices {tuple(A.shape)}, needed (k, n, n), "
                               "finite and not empty")
    n = A.shape[1]
    if P is None:
        candidates = lyapunov_candidates(A)
    else:
        P = torch.as_tensor(P, dtype=torch.float64)
        if P.shape != (n, n) or not torch.allclose(P, P.mT):
            raise common.UserError(f"aqs_certificate: P must be symmetric and {n} x {n}")
        candidates = [P]
    for candidate in candidates:
        found = verify(A, candidate)
        if found.verdict == "certified":
            return found
    return Aqs("not found")


def lyapunov_candidates(A):
    """I, and for each stable vertex A_k the P that solves A_k^T P A_k - P = -I."""
    from scipy.linalg import solve_discrete_lyapunov
    eye = torch.eye(A.shape[1], dtype=torch.float64)
    candidates = [eye]
    for vertex in A:
        if torch.linalg.eigvals(vertex).abs().max() < 1:  # the others have no solution
            P = solve_discrete_lyapunov(vertex.mT.numpy(), eye.numpy())
            candidates.append(torch.from_numpy(P))
    return candidates


def verify(A, P):
    """B.1's inequality for one symmetric P (n, n) at the vertices A (k, n, n), as an Aqs.

    A margin counts only where it is larger than the rounding of the products that it comes from.
    """
    n = len(P)
    P = (P + P.mT) / 2
    smallest, largest = torch.linalg.eigvalsh(P)[[0, -1]].tolist()
    decrease = P - A.mT @ P @ A                                           # k n n
    epsilon = torch.linalg.eigvalsh((decrease + decrease.mT) / 2).min().item()
    terms = (A.abs().mT @ P.abs() @ A.abs()).sum(-1).max().item()         # of the two products
    rounding = 8 * n * torch.finfo(P.dtype).eps * max(largest, terms)
    if smallest <= rounding or epsilon <= rounding:
        return Aqs("not found")
    rho = math.sqrt(1 - min(1, epsilon / largest))
    return Aqs("certified", P, epsilon, rho, M_A=math.sqrt(largest / smallest))


# ---- what a model's scan reads -------------------------------------------------------------------


class ScanInputs(NamedTuple):
    """What the scan of one layer reads beside x; shapes as in chunk_scan.py."""
    dt: torch.Tensor   # b l 2 h
    A: torch.Tensor    # (b|1) h
    B: torch.Tensor    # b l 2 g n
    C: torch.Tensor    # b l 2 g n


@torch.no_grad()
def mixer_inputs(model, input_ids, modulation=None, attention_mask=None):
    """What each layer's mixer reads on ids (b, l): a list of u (b, l, d)."""
    seen = []

    def note(mixer, args):
        seen.append(args[0])

    hooks = [layer.mixer.register_forward_pre_hook(note) for layer in model.layers]
    try:
        model.hidden(input_ids, modulation, attention_mask)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def scan_inputs(model, inputs, modulation=None, attention_mask=None):
    """The ScanInputs of each layer whose mixer reads u (b, l, d): a list.

    inputs: a list of u. Their modulation and `modulation` may differ (markov.py).
    """
    modulation = modulation or Modulation()
    read = []
    for layer, u, m in zip(model.layers, inputs, modulation.by_layer(model), strict=True):
        _, _, dt, A, B, C, _ = layer.mixer.project(u, m, attention_mask)
        read.append(ScanInputs(dt, A, B, C))
    return read


def recurrence(model):
    """(A_log, dt_bias) of all layers, each (y, h) in float64."""
    A_log = torch.stack([layer.mixer.A_log for layer in model.layers])
    dt_bias = torch.stack([layer.mixer.dt_bias for layer in model.layers])
    return A_log.double(), dt_bias.double()


# ---- what is certified of an adapter -------------------------------------------------------------


class Modulated(NamedTuple):
    """A recurrence, and the geometry that shifts it within bounds; None where nothing does."""
    A_log: torch.Tensor    # y h   in float64
    dt_bias: torch.Tensor  # y h   in float64
    geometry: MarkAdapter | None

    def bound(self, parameter):
        """The bound beta of the shifts of "A" or "dt", (y, 1) in float64."""
        if self.geometry is None:
            return self.A_log.new_zeros(len(self.A_log), 1)
        k = MAGNITUDES.index(parameter)
        return self.geometry.effective_magnitudes()[:, k:k + 1].abs().double()


@torch.no_grad()
def modulated_recurrence(model, adapter):
    """The Modulated of a geometry, of a static operator, or of a geometry on top of one."""
    A_log, dt_bias = recurrence(model)
    geometry = adapter if isinstance(adapter, MarkAdapter) else None
    static = adapter if isinstance(adapter, Static) else None
    if isinstance(adapter, StaticWith):
        geometry = adapter.geometry
        static = adapter.static
    if static is not None:
        shifts = static()
        A_log = A_log + shifts.A[:, 0]                                    # y h
        dt_bias = dt_bias + shifts.dt[:, 0]                               # y h
    return Modulated(A_log, dt_bias, geometry)


# ---- the five hypotheses -------------------------------------------------------------------------


class Hypothesis(NamedTuple):
    """No shift of A_log below -beta and no step below dt_min; both broadcast to (y, h)."""
    name: str
    beta: torch.Tensor | float
    dt_min: torch.Tensor | float


HYPOTHESES = ("paper", "own beta_A", "reached", "this text", "any text")  # their names, as above


class Met(NamedTuple):
    """What was met on a text, over its real tokens and both directions."""
    dt: torch.Tensor      # y h   the smallest Delta, in float64
    rate: torch.Tensor    # y h   the slowest decay, nats per step, in float64
    share_below: float    # of all Delta, those below dt_min

    @property
    def radius(self):
        """The largest rho of each layer, (y,)."""
        return (-self.rate).exp().amax(-1)


@torch.no_grad()
def met_on_text(model, adapter, draws, dt_min=1e-3):
    """What is Met on masked windows (evaluate.py's Draws), each told its own t."""
    n, l = draws.x0.shape
    smallest = torch.full((model.config.n_layer, model.config.nheads), math.inf)
    slowest = smallest.clone()
    below = 0
    total = 0
    for rows in torch.arange(n).split(max(1, 8192 // l)):
        real = draws.x0[rows] != draws.pad_id                             # b l
        modulation = adapter(draws.t[rows])
        inputs = mixer_inputs(model, draws.x_t[rows], modulation, real)
        for y, scan in enumerate(scan_inputs(model, inputs, modulation, real)):
            dt = scan.dt[real]                                            # tokens 2 h
            rate = (scan.dt * -scan.A[:, None, None])[real]               # tokens 2 h
            smallest[y] = torch.minimum(smallest[y], dt.amin((0, 1)))
            slowest[y] = torch.minimum(slowest[y], rate.amin((0, 1)))
            below += (dt < dt_min).sum().item()
            total += dt.numel()
    return Met(smallest.double(), slowest.double(), below / total)


@torch.no_grad()
def reached_shift(geometry, points=30_001):
    """The lowest A shift of every head over t in [0, 1], (y, h): a grid's, less an allowance.

    Half the spacing, at twice the steepest slope between neighbours, is the largest step between
    neighbours. That slope is measured; what is proven is -beta_A, below which this never goes.
    """
    t = torch.linspace(0, 1, points)
    A = torch.cat([geometry(part).A for part in t.split(8192)], 1)        # y t h
    largest_step = A.diff(dim=1).abs().amax(1)                            # y h
    proven = -geometry.effective_magnitudes()[:, :1]                      # y 1
    return torch.maximum(A.amin(1) - largest_step, proven)                # y h


@torch.no_grad()
def step_floor(model, adapter):
    """A Delta below which no text can bring a step of a real token, (y, h) in float64.

    in_proj reads u = weight * n + bias of a LayerNorm, and n has mean 0 and |n|^2 <= d. So
    w.u >= w.bias - sqrt(d) |w * weight less its mean|, and the shift of dt_bias is >= -|beta_dt|.
    """
    h = model.config.nheads
    d = model.config.d_model
    base = modulated_recurrence(model, adapter)
    bias = base.dt_bias - base.bound("dt")               # y h   the lowest
    norms = [model.embedding_norm]                       # whose output a layer reads
    norms += [layer.norm for layer in model.layers[:-1]]
    floors = []
    for layer, norm, lowest_bias in zip(model.layers, norms, bias, strict=True):
        w = layer.mixer.in_proj.weight[-2 * h:].double()                  # (2 h) d
        scaled = w * norm.weight
        spread = (scaled - scaled.mean(-1, keepdim=True)).norm(dim=-1)    # (2 h)
        lowest = w @ norm.bias.double() - d ** 0.5 * spread               # (2 h)
        lowest = lowest.unflatten(0, (2, h)).amin(0)                      # h
        floors.append(F.softplus(lowest + lowest_bias))
    return torch.stack(floors)                                            # y h


@torch.no_grad()
def margins(model, adapter, draws, beta=0.5, dt_min=1e-3):
    """({name of a hypothesis: Certificate}, Met) of an adapter on a text."""
    met = met_on_text(model, adapter, draws, dt_min)
    base = modulated_recurrence(model, adapter)
    own = base.bound("A")                                                 # y 1
    reached = own if base.geometry is None else -reached_shift(base.geometry)  # y h, or y 1
    hypotheses = [
        Hypothesis("paper", beta, dt_min),
        Hypothesis("own beta_A", own, dt_min),
        Hypothesis("reached", reached, dt_min),
        Hypothesis("this text", reached, met.dt),
        Hypothesis("any text", own, step_floor(model, adapter)),
    ]
    found = {}
    for name, shift, step in hypotheses:
        found[name] = certify(base.A_log, shift, step)
    return found, met


# ---- tables and figure ---------------------------------------------------------------------------


def backbone_table(certificate, dt_bias):
    """Markdown: Algorithm 4's certificate of each layer, and the least Delta of a zero input."""
    head = ["layer", "rho", "1 - rho", "epsilon", "head", "half-life, steps", "softplus(dt_bias)"]
    rest = F.softplus(dt_bias).amin(-1)                                   # y
    rows = []
    for y in range(len(rest)):
        radius, distance, epsilon, slowest, half_life = [values[y] for values in certificate]
        rows.append([y, f"{radius:.6f}", f"{distance:.3e}", f"{epsilon:.3e}", f"{slowest}",
                     f"{half_life:,.0f}", f"{rest[y]:.2e}"])
    return common.markdown(head, *rows)


def adapter_table(certificates, met):
    """Markdown: each layer's epsilon under each hypothesis, beside what the text shows."""
    head = ["layer", *certificates, "smallest Delta met", "largest rho met"]
    smallest = met.dt.amin(-1)                                            # y
    rows = []
    for y in range(len(smallest)):
        epsilons = [f"{certificate.epsilon[y]:.2e}" for certificate in certificates.values()]
        rows.append([y, *epsilons, f"{smallest[y]:.2e}", f"{met.radius[y]:.8f}"])
    return common.markdown(head, *rows)


class Line(NamedTuple):
    """How a hypothesis looks in Figure 1."""
    color: str
    marker: str
    label: str


LINES = {
    "paper": Line(common.COLORS[0], "o",
                  r"paper: shift $\geq -\beta$, $\Delta \geq \Delta_{\min}$"),
    "own beta_A": Line(common.COLORS[4], "s",
                       r"own $\beta_A$: shift $\geq -\beta_A$, $\Delta$ as above"),
    "reached": Line(common.COLORS[2], "^",
                    r"reached: lowest shift over $t$, $\Delta$ as above"),
    "this text": Line(common.COLORS[1], "v",
                      r"this text: the same shift, smallest $\Delta$ met"),
    "any text": Line(common.COLORS[3], "D",
                     r"any text: shift $\geq -\beta_A$, $\Delta$ proven"),
}


def draw_certificate(certificate, adapters, path):
    """Figure 1: Algorithm 4's margins by layer, and the margins under the five hypotheses.

    adapters: {name: {name of a hypothesis: Certificate}}, or nothing for the first panel alone.
    """
    figure = common.new_figure(12.5 if adapters else 5, 3.8)
    panels = figure.subplots(1, 2 if adapters else 1, squeeze=False)[0]
    draw_algorithm_4(panels[0], certificate)
    if adapters:
        draw_hypotheses(panels[1], adapters)
        figure.legend(loc="outside right upper", fontsize=9, title="hypothesis")
    for panel in panels:
        panel.set_xlabel("layer")
        panel.xaxis.get_major_locator().set_params(integer=True)
    common.save_figure(figure, path)


def draw_algorithm_4(panel, certificate):
    """A bar for each layer; the least of them is named with its radius."""
    layers = range(len(certificate.epsilon))
    worst = certificate.epsilon.argmin().item()
    bars = panel.bar(layers, certificate.epsilon.tolist(), color=LINES["paper"].color, width=0.7)
    bars[worst].set_color(LINES["this text"].color)
    panel.set_title("Algorithm 4, as in the paper\n"
                    f"least margin: layer {worst}, $\\epsilon$ = "
                    f"{certificate.epsilon[worst]:.2e}, $\\rho$ = {certificate.radius[worst]:.6f}",
                    fontsize=10)
    panel.set_ylabel("margin $\\epsilon = 1 - \\rho^2$\n(share of the energy lost per step)")


def draw_hypotheses(panel, adapters):
    """A line for each hypothesis: the least margin of all adapters; a band up to the largest."""
    for name, line in LINES.items():
        epsilons = torch.stack([found[name].epsilon for found in adapters.values()])  # adapters y
        layers = range(epsilons.shape[1])
        least = epsilons.amin(0)
        panel.semilogy(layers, least, marker=line.marker, color=line.color, ms=4, lw=1.2,
                       label=line.label)
        panel.fill_between(layers, least, epsilons.amax(0), color=line.color, alpha=0.3, lw=0)
    drawn = f"adapter: {next(iter(adapters))}"
    if len(adapters) > 1:
        drawn = f"line: least of {len(adapters)} adapters, band: to the largest"
    panel.set_title(f"under five hypotheses\n{drawn}", fontsize=10)
    panel.set_ylabel("margin $\\epsilon$, log scale\n(share of the energy lost per step)")


# ---- command line --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Certify a backbone, and the adapters on it under five hypotheses."""
    weights: str = "small"               # backbone: "small", "goombalab/hydra" or a path
    sliced: bool = False                 # NOT it, but what the paper's code makes of it
    adapter: tuple[str, ...] = ()        # run folders or files; "none"; default: the shipped ones
    data: tuple[str, ...] = ("embedded",)  # text on which Delta is measured
    vocab: str = "bytes"                 # "bytes", "bert-base-uncased" or a vocab.txt
    seqlen: int = 128                    # tokens of a window
    windows: int = 100                   # of the text, each at two values of t
    beta: float = 0.5                    # bound of the A shift, Table 8
    dt_min: float = 1e-3                 # Algorithm 4's assumption
    plugin: str = ""                     # Python file of your own, run first; it adds geometries
    seed: int = 42


class Finding(NamedTuple):
    """A certificate, and what it is of."""
    adapter: str       # "" for the backbone alone
    hypothesis: str
    certificate: Certificate

    def name(self):
        """For a reader."""
        return f"{self.adapter}, {self.hypothesis}" if self.adapter else "Algorithm 4"


def load_what_is_asked(cfg, model):
    """({name: adapter}, the Draws of the text). No adapter where none is asked, or a backbone of
    one's own is given alone.
    """
    wanted = cfg.adapter or cfg.weights == "small"
    if not wanted or cfg.adapter == ("none",):
        return {}, None
    tokenizer = make_tokenizer(cfg.vocab)
    check_vocabulary(model, tokenizer)
    corpus = load_corpus(cfg.data, tokenizer, held_out_split(cfg.data, ()))
    draws = make_draws(corpus, tokenizer, cfg.seqlen, cfg.windows, cfg.seed)
    return load_adapters(cfg.adapter, model.config, mark_only=True, static=True), draws


def report_adapter(name, table, met, draws, dt_min):
    """Print an adapter's table, and loudly where the text breaks what the first margins assume."""
    common.log(f"\n{name}: margin epsilon under five hypotheses (see the docstring); the text is "
               f"{len(draws.t)} windows, each at a t of its own\n\n{table}\n")
    layers = len(met.dt)
    broken = (met.dt.amin(-1) < dt_min).sum().item()
    if broken:
        y, h = divmod(met.dt.argmin().item(), met.dt.shape[1])
        common.log(f"!! {name}: Delta falls to {met.dt.min():.1e} (layer {y}, head {h}) and below "
                   f"{dt_min} in {broken} of {layers} layers, in {met.share_below:.2%} of all "
                   "steps.\n!! The first three margins assume what this text breaks; \"any text\" "
                   "assumes nothing.")


def last_line(findings):
    """Whether all is certified, the least margins, and where float32 does not hold them. findings:
    the backbone's is the first."""
    backbone = findings[0].certificate
    certified = all(finding.certificate.certified for finding in findings)
    layers = min((finding.certificate.epsilon > 0).sum().item() for finding in findings)
    worst = min(findings, key=lambda finding: finding.certificate.epsilon.min())
    y = worst.certificate.epsilon.argmin().item()
    line = (f"{'certified' if certified else 'NOT certified'}: {layers} of {len(backbone.epsilon)} "
            f"layers; Algorithm 4's least margin is epsilon {backbone.epsilon.min():.3e}, the "
            f"least of all {worst.certificate.epsilon[y]:.3e} ({worst.name()}: layer {y}, head "
            f"{worst.certificate.head[y]})")
    rounded = max((finding.certificate.epsilon <= FLOAT32).sum().item() for finding in findings)
    if rounded:
        line += (f"; in exact arithmetic: float32 rounds such a decay to 1 in {rounded} layers "
                 f"(epsilon below {FLOAT32:.0e})")
    return line


def main(cfg):
    run_plugin(cfg.plugin)
    model = load_backbone(cfg.weights, sliced=cfg.sliced)
    env = common.banner("certify.py", cfg, "cpu", model)
    A_log, dt_bias = recurrence(model)
    backbone = certify(A_log, cfg.beta, cfg.dt_min)
    table = backbone_table(backbone, dt_bias)
    common.log(f"\nAlgorithm 4: shifts of A_log within {cfg.beta}, Delta >= {cfg.dt_min} assumed"
               f"\n\n{table}\n")
    result = {"backbone": backbone.lists(), "table": table, "adapters": {}}
    findings = [Finding("", "paper", backbone)]
    by_adapter = {}
    adapters, draws = load_what_is_asked(cfg, model)
    for name, adapter in common.progress(adapters.items(), desc="adapters"):
        found, met = margins(model, adapter, draws, cfg.beta, cfg.dt_min)
        table = adapter_table(found, met)
        report_adapter(name, table, met, draws, cfg.dt_min)
        by_adapter[name] = found
        findings += [Finding(name, hypothesis, c) for hypothesis, c in found.items()]
        result["adapters"][name] = {
            "margins": {hypothesis: c.lists() for hypothesis, c in found.items()},
            "table": table, "dt": met.dt.tolist(), "radius": met.radius.tolist(),
            "share_below": met.share_below}
    result["certified"] = all(finding.certificate.certified for finding in findings)
    folder = result_folder("certify", cfg.adapter)
    figure = folder / "fig1_certificate.png"
    common.save_result(folder / "result.json", result, cfg, env)
    draw_certificate(backbone, by_adapter, figure)
    common.log(f"figure: {figure.relative_to(common.ROOT)}")
    common.log(last_line(findings))
    return result


def run(cfg):
    """`main`, with status 1 where a layer is not certified."""
    result = main(cfg)
    sys.exit(0 if result["certified"] else 1)


if __name__ == "__main__":
    common.run_cli(Config, run)
