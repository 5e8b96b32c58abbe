"""MaRK adapters: t -> bounded changes of A, dt, D, B, C in every layer (3.4, A.2; eq. 3, 4, 14-20).

Run: `python mark_adapters.py` (12 s on two CPU cores) prints the geometries' parameter budgets at
     the released backbone's size; its last line names the figure it drew,
     runs/mark_adapters/modulation.png.

Symbols:
    t          t            b            diffusion time = masking probability, section 3.2
    c          c_t          b 128        sinusoid of 1000 t and a two-layer MLP, section 2
    h          h            y b 256      hidden state, one MLP per layer y, A.2
    shift      Theta_shift  y b (m s)    m: A, dt, D; s = n_shifts, each for nheads / s neighbours
    UV         U, V         y b (m f)    m: B_scale, B_shift, C_scale, C_shift; f: U (a r), V (r v)
    magnitude  beta, alpha  y 7          A, dt, D, then m of UV; learned, 0.2 at the start, Table 8
    z, T       z, T_k       y b s, y b k s    Chebyshev coordinate and polynomials, k < K = 5
    u, basis   u, phi_f     y b i, f i   DCT signal of 256 points i, 8 frequencies f
Differs from the paper:
    h is RMS normalised (`mlp_norm`) and the MLPs start orthogonal with zero biases (`init="keep"`).
    With neither, h has a standard deviation of 0.0007 over t at the start; with either, 0.5 to 0.6.
    z = tanh(W_z h): Algorithm 2 wants z in [-1, 1] and does not say how it gets there.
    What the paper's public code does otherwise, from `init="published"` to `stored_buffers`, are
    settings, which train.py's --preset published turns on together.
    Eqs. 16 and 17 sum over k = 1..K, Algorithm 2 over 0..K-1, which we take. T_0 = 1 then repeats
    the base of eq. 17; the published sizes count both.
    "UV + UV" (eqs. 17, 20) adds the factors, U to U and V to V, and multiplies afterwards.
    All layers are evaluated in one stacked pass, 43 to 58 ATen operations at any depth.
Upstream: github.com/ibitec7/mark, the paper's code.
"""
import dataclasses
import importlib
import math
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange

from common import (ROOT, UserError, banner, log, markdown, new_figure, run_cli, save_figure,
                    save_result)
from hydra_ssm import HydraConfig, Modulation

C_DIM = 128                  # width of c_t, Table 7
BETA_A_MAX = 0.5             # Table 8: the one bound that the stability certificate rests on
MAGNITUDE = 0.2              # Table 8: where every magnitude starts
MLP_GAIN, C_GAIN = 1.8, 1.4  # of init="keep": the spread over t survives the SiLU layers
MAGNITUDES = ("A", "dt", "D", "B_scale", "B_shift", "C_scale", "C_shift")
PUBLISHED = {"hypernet": 6.27, "chebyshev": 10.97, "dct": 7.07}  # millions, Table 3


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """What an adapter can be told; the sizes are the paper's (Table 7)."""
    n_shifts: int | None = None   # outputs for each of A, dt, D; None: 12 if that divides nheads
    mlp_dim: int = 256            # width of h
    rank: int = 2                 # r of U and V
    degree: int = 5               # Chebyshev: number K of polynomials T_0 .. T_{K-1}
    n_freqs: int = 8              # DCT: frequencies
    timepoints: int = 256         # DCT: points of the signal u
    # keep t alive through the MLP; PyTorch's start; or the public code's, N(0, 0.02) everywhere
    init: Literal["keep", "default", "published"] = "keep"
    mlp_norm: bool = True         # RMS normalisation (no parameters) after every SiLU
    bounded_shifts: bool = True   # False (hypernet only, 3.4): B and C shifts without the tanh
    t_scale: float = 1000.0       # the fastest sinusoid of c_t is sin(t_scale t)
    blind: bool = False           # a control: trained and used as if t were 0.5 at all times
    beta_A: float = 0.2           # where the bound of A's shift starts; the public code: 0.275
    bounded_z: bool = True        # False (Chebyshev): z = W_z h, without the tanh
    reversed_t: bool = False      # c_t of 1 - t
    rounded_angle: bool = False   # the angle t_scale t times frequency as bfloat16 has it
    stored_buffers: bool = False  # frequencies of c_t and the DCT's basis are saved as weights are
    lora_rank: int | None = None  # LoRA; None: the rank whose size is nearest to the hypernet's
    static_rate: float = 10.0     # static operator: its learning rate, in units of --lr


# ---- the maths -----------------------------------------------------------------------------------


def near_square(n):
    """(a, v) with a v = n and a <= v as close as they get: 64 -> (8, 8), 32 -> (4, 8)."""
    a = math.isqrt(n)
    while n % a:
        a -= 1
    return a, n // a


def chebyshev_basis(z, degree):
    """T_0(z) .. T_{K-1}(z), K = degree >= 2: z (..., s) in [-1, 1] -> (..., k, s)."""
    T = [torch.ones_like(z), z]
    while len(T) < degree:
        T.append(torch.addcmul(-T[-2], z, T[-1], value=2))     # T_k = 2 z T_{k-1} - T_{k-2}
    return torch.stack(T, -2)


def dct_basis(n_freqs, timepoints):
    """The first rows of the orthonormal DCT-II, (f, i): basis @ basis^T is the identity."""
    f = torch.arange(n_freqs).double()
    i = torch.arange(timepoints).double()
    basis = torch.cos(math.pi / timepoints * torch.outer(f, i + 0.5)) * (2 / timepoints) ** 0.5
    basis[0] /= 2 ** 0.5
    return basis.to(torch.get_default_dtype())


def rms_normalise(h, eps=1e-6):
    """h / rms(h) over the last dimension; a zero vector stays zero."""
    rms = torch.linalg.vector_norm(h, dim=-1, keepdim=True) * h.shape[-1] ** -0.5
    return h / (rms + eps)


# ---- modules with parameters ---------------------------------------------------------------------


class StackedLinear(nn.Module):
    """One linear map per layer y, all applied in a single batched product: (y, b, i) -> (y, b, o).

    gain: None for PyTorch's default start, 0 for zeros, else orthogonal with that gain, bias zero.
    """

    def __init__(self, n_layer, n_in, n_out, gain=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_layer, n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_layer, 1, n_out))
        with torch.no_grad():
            if gain is None:
                for tensor in (self.weight, self.bias):
                    tensor.uniform_(-n_in ** -0.5, n_in ** -0.5)
            elif gain:
                for weight in self.weight:
                    nn.init.orthogonal_(weight, gain)

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


class TimestepEmbedding(nn.Module):
    """c_t of section 2: DDPM/DiT sinusoid of 1000 t, Linear, SiLU, Linear. (b,) -> (b, 128)."""

    def __init__(self, cfg):
        super().__init__()
        self.t_scale = cfg.t_scale
        self.blind = cfg.blind
        self.reversed_t = cfg.reversed_t
        self.rounded_angle = cfg.rounded_angle
        self.lower = nn.Linear(C_DIM, C_DIM)
        self.upper = nn.Linear(C_DIM, C_DIM)
        if cfg.init == "keep":
            for linear in (self.lower, self.upper):
                nn.init.orthogonal_(linear.weight, C_GAIN)
                nn.init.zeros_(linear.bias)
        frequency = 10_000.0 ** -(torch.arange(C_DIM // 2) / (C_DIM // 2))  # 1 .. almost 1/10,000
        self.register_buffer("angular", cfg.t_scale * frequency, persistent=cfg.stored_buffers)

    def angle(self, t):
        """1000 t times each frequency, (b, 64); of 1 - t and rounded where the settings say so."""
        if self.reversed_t:
            t = 1 - t
        if not self.rounded_angle:
            return t[:, None] * self.angular
        # Each factor and their product are rounded: above 512 the angle moves in steps of 4.
        thousand_t = (self.t_scale * t).bfloat16()
        frequency = (self.angular / self.t_scale).bfloat16()
        return (thousand_t[:, None] * frequency).to(t.dtype)

    def forward(self, t):
        if self.blind:
            t = torch.full_like(t, 0.5)
        angle = self.angle(t)                                          # b 64
        wave = torch.cat([angle.sin(), angle.cos()], -1)               # b 128
        return self.upper(F.silu(self.lower(wave)))                    # b 128


class Conditioned(nn.Module):
    """An adapter that reads t, through one embedding shared by all its layers."""

    def __init__(self, cfg):
        super().__init__()
        self.timestep = TimestepEmbedding(cfg)

    def condition(self, t):
        """t (b,) in [0, 1] or a ready c_t (b, 128) -> c_t (b, 128) in the adapter's own dtype.

        A Python number is one t, b = 1. Values are checked on a CPU alone: looking at those of
        another device would make it wait.
        """
        dtype = self.timestep.angular.dtype
        if dtype not in (torch.float32, torch.float64):
            raise UserError(f"adapter: its weights are {dtype}, need float32 or float64; "
                            "cast the backbone alone")
        t = self.check_t(t)
        if t.ndim == 2:
            return t.to(dtype)
        return self.timestep(t.to(dtype))

    def check_t(self, t):
        """`t` as a tensor. Raises UserError where it is none of what `condition` takes."""
        if isinstance(t, (int, float)):
            if not 0 <= t <= 1:
                raise UserError(f"t: got {t}, need a number in [0, 1]")
            return torch.tensor([t], dtype=torch.float32, device=self.timestep.angular.device)
        what = "need floats in [0, 1] of shape (b,), a number, or a ready embedding (b, 128)"
        if not isinstance(t, torch.Tensor):
            raise UserError(f"t: got {t!r}, {what}")
        if not t.is_floating_point() or t.ndim == 0 or t.shape[1:] not in ((), (C_DIM,)):
            raise UserError(f"t: got {t.dtype} of shape {tuple(t.shape)}, {what}")
        if t.ndim == 1 and t.device.type == "cpu":
            for value in t.tolist():
                if not 0 <= value <= 1:                                # NaN too
                    raise UserError(f"t: got {value}, {what}")
        return t

    def forward(self, t):
        device = self.timestep.angular.device.type
        with torch.autocast(device, enabled=False):                    # float32 under autocast too
            return self.modulate(self.condition(t))


class MarkAdapter(Conditioned):
    """What the three geometries share: the MLP, the bounds of eq. 3 and 4, the learned magnitudes.

    A geometry makes its readouts in `__init__`; its `heads(h)` returns the unbounded shift and UV,
    packed as in Symbols. What ends in `shift` or in V starts at zero: the identity. U does not:
    with both factors zero the gradient of their product would be zero for ever.
    """

    def __init__(self, config, cfg):
        super().__init__(cfg)
        self.n_layer = config.n_layer
        self.nheads = config.nheads
        self.rank = cfg.rank
        self.mlp_dim = cfg.mlp_dim
        self.mlp_norm = cfg.mlp_norm
        self.init = cfg.init
        self.bounded_shifts = cfg.bounded_shifts
        self.n_shifts = cfg.n_shifts or (12 if config.nheads % 12 == 0 else config.nheads)
        if config.nheads % self.n_shifts:
            raise UserError(f"n_shifts: got {self.n_shifts}, need a divisor of the backbone's "
                            f"{config.nheads} heads")
        a, v = near_square(config.ngroups * config.d_state)
        self.factors = [a * cfg.rank, cfg.rank * v]                    # numbers in one U, in one V
        self.shift_size = 3 * self.n_shifts
        self.UV_size = 4 * sum(self.factors)

        widths = [C_DIM] + 4 * [cfg.mlp_dim]
        gain = MLP_GAIN if cfg.init == "keep" else None
        self.mlp = nn.ModuleList(StackedLinear(config.n_layer, n_in, n_out, gain)
                                 for n_in, n_out in zip(widths, widths[1:]))
        start = torch.full((config.n_layer, 7), MAGNITUDE)
        start[:, 0] = math.log(cfg.beta_A / (BETA_A_MAX - cfg.beta_A))  # rho_A = logit(0.4)
        self.magnitude = nn.Parameter(start)

    def readout(self, n_out, zero=False, n_in=None):
        """A linear map per layer, from h unless n_in says otherwise."""
        if zero:
            gain = 0
        else:
            gain = 1 if self.init == "keep" else None
        return StackedLinear(self.n_layer, n_in or self.mlp_dim, n_out, gain)

    def readout_UV(self, copies=1, n_in=None):
        """The same for UV, its V half zero; `copies` of it one after the other."""
        linear = self.readout(copies * self.UV_size, n_in=n_in)
        with torch.no_grad():
            for tensor in (linear.weight, linear.bias):
                tensor.unflatten(-1, (-1, sum(self.factors)))[..., self.factors[0]:] = 0
        return linear

    def hidden(self, t):
        """h = MLP(c_t) of every layer, (y, b, mlp_dim)."""
        h = self.condition(t).expand(self.n_layer, -1, -1)             # y b 128
        for linear in self.mlp:
            h = F.silu(linear(h))                                      # y b mlp_dim
            if self.mlp_norm:
                h = rms_normalise(h)
        return h

    def effective_magnitudes(self):
        """(y, 7) in the order of MAGNITUDES; beta_A = 0.5 sigmoid(rho_A) never exceeds 0.5."""
        rho_A, others = self.magnitude.split([1, 6], -1)
        return torch.cat([BETA_A_MAX * rho_A.sigmoid(), others], -1)

    def modulate(self, c):
        """Eq. 3 and 4: tanh of what the geometry returns, times the learned magnitudes."""
        shift, UV = self.heads(self.hidden(c))
        magnitude = self.effective_magnitudes()[:, None, :, None]      # y 1 7 1

        # eq. 3: beta tanh(shift), each output for nheads / n_shifts neighbouring heads
        shift = rearrange(shift, "y b (m s) -> y b m s", m=3).tanh() * magnitude[:, :, :3]
        A, dt, D = shift.repeat_interleave(self.nheads // self.n_shifts, -1).unbind(2)  # y b h

        # eq. 4: alpha tanh(U V) and beta tanh(U V), for the scales and shifts of B and C
        U, V = rearrange(UV, "y b (m f) -> y b m f", m=4).split(self.factors, -1)
        U = rearrange(U, "y b m (a r) -> y b m a r", r=self.rank)
        V = rearrange(V, "y b m (r v) -> y b m r v", r=self.rank)
        raw = torch.einsum("ybmar,ybmrv->ybmav", U, V).flatten(3)      # y b m gn
        bounded = raw.tanh()
        if not self.bounded_shifts:                                    # 3.4: m = 1 and 3 are shifts
            bounded = torch.stack([bounded[:, :, 0::2], raw[:, :, 1::2]], 3).flatten(2, 3)
        bounded = bounded * magnitude[:, :, 3:]
        B_scale, C_scale = (1 + bounded[:, :, 0::2]).unbind(2)         # y b gn
        B_shift, C_shift = bounded[:, :, 1::2].unbind(2)               # y b gn
        return Modulation(A=A, dt=dt, D=D, B_scale=B_scale, B_shift=B_shift,
                          C_scale=C_scale, C_shift=C_shift)


class Hypernet(MarkAdapter):
    """Algorithm 1, eq. 14 and 15: everything straight from h."""

    def __init__(self, config, cfg):
        super().__init__(config, cfg)
        self.shift = self.readout(self.shift_size, zero=True)
        self.UV = self.readout_UV()

    def heads(self, h):
        return self.shift(h), self.UV(h)


class Chebyshev(MarkAdapter):
    """Algorithm 2, eq. 16 and 17: polynomials in a learned coordinate, coefficients from h."""

    def __init__(self, config, cfg):
        super().__init__(config, cfg)
        self.degree = cfg.degree
        self.bounded_z = cfg.bounded_z
        self.z = self.readout(self.n_shifts)
        self.shift = self.readout(cfg.degree * self.shift_size, zero=True)      # m k s
        self.UV = self.readout_UV(1 + cfg.degree)                               # base, then each k

    def heads(self, h):
        z = self.z(h)                                                           # y b s
        if self.bounded_z:
            z = z.tanh()
        T = chebyshev_basis(z, self.degree)                                     # y b k s
        theta = rearrange(self.shift(h), "y b (m k s) -> y b m k s", m=3, k=self.degree)
        shift = (theta * T[:, :, None]).sum(-2).flatten(2)                      # y b (m s)
        # UV = base + sum over k of Tbar_k UV_k: the base is one more term, of weight 1.
        weight = F.pad(T.mean(-1), (1, 0), value=1)                             # y b (1 k)
        terms = self.UV(h).unflatten(-1, (1 + self.degree, -1))                 # y b (1 k) (m f)
        UV = torch.einsum("ybk,ybkx->ybx", weight, terms)                       # y b (m f)
        return shift, UV


class DCT(MarkAdapter):
    """Algorithm 3, eq. 18 to 20: a bandlimited signal u from damped spectral weights."""

    def __init__(self, config, cfg):
        super().__init__(config, cfg)
        self.spectrum = self.readout(cfg.n_freqs)
        self.alpha = nn.Parameter(torch.ones(config.n_layer, 1, 1))
        self.shift = self.readout(self.shift_size, zero=True, n_in=cfg.timepoints)
        self.UV = self.readout_UV()
        self.UV_basis = self.readout_UV(n_in=cfg.timepoints)
        stored = cfg.stored_buffers
        self.register_buffer("basis", dct_basis(cfg.n_freqs, cfg.timepoints), persistent=stored)
        self.register_buffer("order", 1.0 + torch.arange(cfg.n_freqs), persistent=stored)

    def heads(self, h):
        damping = self.order ** -(F.softplus(self.alpha) + 1e-4)                # y 1 f
        u = torch.einsum("ybf,fi->ybi", self.spectrum(h) * damping, self.basis)
        return self.shift(u), self.UV(h) + self.UV_basis(u)


# ---- making one ----------------------------------------------------------------------------------


GEOMETRIES = ("hypernet", "chebyshev", "dct")
KERNELS = {"hypernet": Hypernet, "chebyshev": Chebyshev, "dct": DCT}  # baselines.py adds its own


def make_adapter(kernel, config, **settings):
    """The adapter `kernel` for a backbone of `config` (HydraConfig); settings: see AdapterConfig.

    adapter(t) -> Modulation, t (b,) in [0, 1] or a ready embedding (b, 128). Raises UserError.
    """
    if kernel not in KERNELS:  # looked up by name, since that file stands above this one
        importlib.import_module("baselines")
    if kernel not in KERNELS:
        raise UserError(f"kernel: got {kernel!r}, need one of {', '.join(KERNELS)}, or the "
                        "--plugin that adds it")
    cfg = AdapterConfig(**settings)
    check_adapter(kernel, cfg)
    adapter = KERNELS[kernel](config, cfg)
    if cfg.init == "published":
        published_start(adapter)
    adapter.kernel = kernel
    adapter.settings = settings
    adapter.backbone = config.weights
    return adapter


@torch.no_grad()
def published_start(adapter):
    """The public code's start, which is BERT's: every linear map N(0, 0.02) with zero biases. The
    readouts too, so that it is not the identity.
    """
    for name, p in adapter.named_parameters():
        if name.endswith("weight"):
            p.normal_(std=0.02)
        if name.endswith("bias"):
            p.zero_()


def check_adapter(kernel, cfg):
    """Raise UserError where an AdapterConfig cannot be made."""
    if cfg.init not in ("keep", "default", "published"):
        raise UserError(f"init: got {cfg.init!r}, need keep, default or published")
    if not 0 < cfg.beta_A < BETA_A_MAX:
        raise UserError(f"beta_A: got {cfg.beta_A}, need a number between 0 and {BETA_A_MAX}")
    if not cfg.bounded_shifts and kernel != "hypernet":
        raise UserError(f"bounded_shifts=False: got kernel {kernel!r}, need hypernet (3.4)")
    least = {"n_shifts": 1, "mlp_dim": 1, "rank": 1, "degree": 2, "n_freqs": 1,
             "timepoints": cfg.n_freqs, "lora_rank": 1}
    for name, smallest in least.items():
        value = getattr(cfg, name)
        if value is not None and value < smallest:
            raise UserError(f"{name}: got {value}, need at least {smallest}")


def adapter_size(adapter):
    """Number of parameters without those of the shared c_t, as the paper counts them (Table 3)."""
    return sum(p.numel() for name, p in adapter.named_parameters() if "timestep" not in name)


def reads_t(adapter):
    """Whether an adapter reads t at all: LoRA does not, nor does a blind one."""
    return hasattr(adapter, "timestep") and not adapter.timestep.blind


@torch.no_grad()
def modulation_spread(adapter, n=65):
    """How much each modulation, by its name, and h, as "hidden", depend on t: the standard
    deviation over n even t in [0, 1], averaged over layers and outputs; "mean" is the modulations'
    average. A saturated adapter has a large "hidden" and a small "mean". Empty if t is not read.
    """
    if not reads_t(adapter):
        return {}
    t = torch.linspace(0, 1, n, device=adapter.timestep.angular.device)
    spread = {}
    for name, value in vars(adapter(t)).items():
        if isinstance(value, torch.Tensor):
            spread[name] = value.std(dim=1).mean().item()
    spread["mean"] = sum(spread.values()) / len(spread)
    if hasattr(adapter, "hidden"):
        spread["hidden"] = adapter.hidden(t).std(dim=1).mean().item()
    return spread


# ---- the table and the figure --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Parameter budgets at the released backbone's size, and the modulation against t."""
    out: str = "runs/mark_adapters"  # folder of the figure and of result.json
    layer: int = 0                   # layer that is drawn
    t_max: float = 0.1               # draw 0 <= t <= t_max: 16 turns of c_t's fastest sinusoid
    seed: int = 42                   # of the random readouts in the figure


def budgets(config):
    """Sizes of the geometries with 12 and with 24 shifts, as records."""
    rows = []
    with torch.device("meta"):                                         # shapes alone
        for n_shifts in (12, 24):
            for kernel in GEOMETRIES:
                adapter = make_adapter(kernel, config, n_shifts=n_shifts, init="default")
                size = adapter_size(adapter)
                rows.append({"kernel": kernel, "n_shifts": n_shifts, "size": size})
    return rows


def budget_table(rows):
    """Markdown of `budgets`, beside what the paper says."""
    lines = []
    for row in rows:
        published = PUBLISHED[row["kernel"]] if row["n_shifts"] == 12 else "-"
        lines.append([row["kernel"], row["n_shifts"], f"{row['size']:,}", published])
    return markdown(["adapter", "n_shifts", "parameters", "published, M"], *lines)


@torch.no_grad()
def randomise_readouts(adapter):
    """Random weights for every readout, zero at the start or not, so that there is a modulation."""
    for name, module in adapter.named_modules():
        if isinstance(module, StackedLinear) and not name.startswith("mlp"):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)


@torch.no_grad()
def draw_modulation(adapters, cfg, path):
    """One panel per adapter: the A shifts of three neighbouring groups of heads against t."""
    t = torch.linspace(0, cfg.t_max, 1001)
    figure = new_figure(4 * len(adapters), 3)
    axes = figure.subplots(1, len(adapters), sharey=True)
    for ax, adapter in zip(axes, adapters):
        beta_A = adapter.effective_magnitudes()[cfg.layer, 0].item()
        neighbours = adapter.nheads // adapter.n_shifts
        shifts = adapter(t).A[cfg.layer, :, ::neighbours]              # t s
        ax.axhspan(-beta_A, beta_A, color="0.93")
        ax.plot(t, shifts[:, :3], lw=1)
        ax.set(title=f"{adapter.kernel}, random readouts", xlabel="t")
    axes[0].set_ylabel("shift of A_log (grey: within beta_A)")
    save_figure(figure, path)


def main(cfg):
    torch.manual_seed(cfg.seed)
    env = banner("mark_adapters.py", cfg)
    config = HydraConfig()
    if cfg.layer >= config.n_layer:
        raise UserError(f"--layer: got {cfg.layer}, need 0 to {config.n_layer - 1}")
    rows = budgets(config)
    log(f"{config.n_layer} layers, {config.nheads} heads; c_t's MLP (33,024 more) not counted\n")
    log(budget_table(rows))

    adapters = [make_adapter(kernel, config) for kernel in GEOMETRIES]
    spreads = {a.kernel: modulation_spread(a)["hidden"] for a in adapters}
    log("\nstandard deviation of h over t at the start: "
        + ", ".join(f"{kernel} {spread:.2f}" for kernel, spread in spreads.items()))
    result = {"sizes": rows, "hidden_spread": spreads}
    folder = ROOT / cfg.out
    save_result(folder / "result.json", result, cfg, env)
    for adapter in adapters:
        randomise_readouts(adapter)
    draw_modulation(adapters, cfg, folder / "modulation.png")
    log("untrained, with random readouts (at the start every modulation is zero): "
        f"{folder / 'modulation.png'}")
    return result


if __name__ == "__main__":
    run_cli(Config, main)
