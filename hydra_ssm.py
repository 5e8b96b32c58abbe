"""Hydra-BERT: the quasiseparable mixer of eq. 11 as a frozen, modulable backbone (paper 2.1, 3.1).

Run:      python hydra_ssm.py         (a random mixer as the matrix of eq. 11, 3 seconds)
Last line: "rank of every block below or above the diagonal: at most N, the state has N"

A Modulation changes A_log, dt_bias, D, B and C of every layer without touching a weight. Where t
changes a parameter is one line for each of them, in `Mixer.project` and, for B and C, in `_unpack`.

Symbols:  A_log + m.A, dt_bias + m.dt, D + m.D   parameters per head at t   (b, h)    eq. 3, 8, 9
          m.B_scale, m.B_shift, and so for C     of the read-in and -out    (b, g n)  eq. 4
          z, x, B, C, dt        what in_proj packs, in this order; B and C once per direction
          y layer, b batch, l length, d model, h heads, p head dim, g groups, n state
Differs from the paper: it keeps 12 of the released checkpoint's 24 heads (its public code sets
          headdim 128); checkpoint.py infers the sizes from the tensors and loads all 24. Padding is
          exact here: a padded batch gives the logits of the unpadded one, which the released
          modules do not.
Upstream: github.com/goombalab/hydra (modules) and huggingface.co/goombalab/hydra (weights).
"""
import dataclasses
import functools
import importlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from torch.utils.checkpoint import checkpoint

import common
from chunk_scan import bidirectional_scan


@dataclasses.dataclass(frozen=True)
class HydraConfig:
    """Sizes of a Hydra-BERT. The defaults are the released checkpoint's: 112,082,098 parameters."""
    vocab_size: int = 30522
    d_model: int = 768
    n_layer: int = 23
    d_state: int = 64
    d_conv: int = 7
    expand: int = 2
    headdim: int = 64
    ngroups: int = 1
    chunk_size: int = 64
    weights: str = ""  # the fingerprint of what was loaded (checkpoint.py)

    def __post_init__(self):
        if self.d_inner % self.headdim:
            raise common.UserError(f"--headdim: got {self.headdim}, need a divisor of "
                                   f"{self.d_inner}, which is {self.expand} times d_model")

    @property
    def d_inner(self):
        return self.expand * self.d_model

    @property
    def nheads(self):
        return self.d_inner // self.headdim

    @property
    def d_in_proj(self):
        """z, x (d_inner each), B, C of two directions (g n each), dt of two directions (h each)."""
        return 2 * self.d_inner + 4 * self.ngroups * self.d_state + 2 * self.nheads


# ---- what t changes ------------------------------------------------------------------------------


FIELDS = {"A": ("A",), "dt": ("dt",), "D": ("D",),
          "BC": ("B_scale", "B_shift", "C_scale", "C_shift")}
KEPT = {  # Table 2: what each of its columns leaves modulated
    "full": ("A", "dt", "BC", "D"),
    "all-except-A": ("dt", "BC", "D"),
    "A": ("A",),
    "dt": ("dt",),
    "BC": ("BC",),
    "D": ("D",),
    "all-except-dt": ("A", "BC", "D"),
    "none": (),
}
MODES = tuple(KEPT)


@dataclasses.dataclass
class Modulation:
    """What an adapter asks of every layer at one t per sequence. None leaves a parameter alone.

    Shifts are bounded already; scales are factors, 1 + alpha tanh(.).
    """
    A: torch.Tensor | None = None         # y b h    added to A_log
    dt: torch.Tensor | None = None        # y b h    added to dt_bias
    D: torch.Tensor | None = None         # y b h    added to D
    B_scale: torch.Tensor | None = None   # y b gn   factor of B, both directions
    B_shift: torch.Tensor | None = None   # y b gn
    C_scale: torch.Tensor | None = None   # y b gn
    C_shift: torch.Tensor | None = None   # y b gn

    def keep(self, mode):
        """Table 2: keep the parameters that `mode` names, drop the other state-space ones."""
        if mode not in KEPT:
            raise common.UserError(f"modulate: got {mode!r}, need one of {', '.join(KEPT)}")
        dropped = {}
        for parameter, fields in FIELDS.items():
            if parameter not in KEPT[mode]:
                dropped |= dict.fromkeys(fields)
        return dataclasses.replace(self, **dropped)

    def at(self, index):
        """The same for the sequences that `index` (b,) names, of a Modulation of many t."""
        chosen = {name: value[:, index] for name, value in vars(self).items()
                  if isinstance(value, torch.Tensor)}
        return dataclasses.replace(self, **chosen)

    def by_layer(self, model):
        """A Modulation without None for each layer of `model`, of shapes that broadcast: b h for
        the shifts, b 1 1 g n for B and C. What is left alone gets a shift of 0 and a factor of 1.
        """
        config, weight = model.config, model.word_embeddings.weight
        per_head = model.layers[0].mixer.A_log
        zero = per_head.new_zeros(config.n_layer, 1, config.nheads)
        precise = torch.promote_types(weight.dtype, torch.float32)  # 1.003 is 1 in bfloat16
        nothing = weight.new_zeros(config.n_layer, 1, config.ngroups * config.d_state,
                                   dtype=precise)
        default = {"A": zero, "dt": zero, "D": zero, "B_scale": 1 + nothing, "B_shift": nothing,
                   "C_scale": 1 + nothing, "C_shift": nothing}
        rows = []
        for name, unchanged in default.items():
            value = getattr(self, name)
            value = unchanged if value is None else value.to(unchanged.dtype)
            if name in FIELDS["BC"]:
                value = rearrange(value, "y b (g n) -> y b 1 1 g n", g=config.ngroups)
            rows.append(value.unbind(0))
        return [Modulation(*layer) for layer in zip(*rows)]

    def around(self, layers):
        """The layers as they are called. A subclass may do more than change parameters."""
        return layers


# ---- the mixer -----------------------------------------------------------------------------------


def _on_gpu(v):
    """Whether kernels may take v; torch.compile makes its own of the formulas."""
    return v.is_cuda and not torch.compiler.is_compiling()


def _unpack(zxBCdt, weight, bias, m, mask, config):
    """What in_proj packs -> z, x (b, l, h p), B, C (b, l, 2, g, n), dt (b, l, 2 h).

    x, B and C pass a two-sided depthwise convolution and SiLU, then t changes B and C. On a GPU
    this is one pass over memory.
    """
    if _on_gpu(zxBCdt):
        import mixer_triton  # here, since a CPU needs neither it nor triton
        if mixer_triton.fits_convolution(zxBCdt, weight, bias):
            return mixer_triton.unpack(zxBCdt, weight, bias, m, mask, config)
    bc_width = 4 * config.ngroups * config.d_state
    z, xBC, dt = zxBCdt.split([config.d_inner, config.d_inner + bc_width, 2 * config.nheads], -1)
    if mask is not None:
        xBC = xBC * mask[..., None]            # the two-sided convolution must not see a pad
    xBC = F.conv1d(xBC.mT, weight, bias, padding="same", groups=len(weight)).mT
    x, BC = F.silu(xBC).split([config.d_inner, bc_width], dim=-1)         # b l (x, BC BC)
    B, C = rearrange(BC, "b l (d k g n) -> k b l d g n", d=2, k=2, g=config.ngroups)
    B = torch.addcmul(m.B_shift, B, m.B_scale).to(B.dtype)                # b l d g n  eq. 4
    C = torch.addcmul(m.C_shift, C, m.C_scale).to(C.dtype)                # b l d g n  eq. 4
    return z, x, B, C, dt


def _gated_norm(y, z, weight):
    """RMSNorm of y times silu(z), both (b, l, w): on a GPU one pass as well."""
    if _on_gpu(y):
        import mixer_triton
        if mixer_triton.fits(y, weight):
            return mixer_triton.gated_norm(y, z, weight, eps=1e-5)
    return F.rms_norm(y, weight.shape, weight, eps=1e-5) * F.silu(z)


def _fused(function):
    """On a GPU, `function` in one pass over memory: torch.compile makes it once, at any length."""
    compiled = functools.cache(lambda: torch.compile(function, dynamic=True))

    @functools.wraps(function)
    def either(x, *rest):
        if _on_gpu(x):
            return compiled()(x, *rest)
        return function(x, *rest)
    return either


@_fused
def _add_norm(h, out, weight, bias):
    return F.layer_norm(h + out, weight.shape, weight, bias, eps=1e-5)


class Mixer(nn.Module):
    """Hydra's quasiseparable mixer: one A_log, dt_bias and D per head, for both directions."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        h = config.nheads
        d_conv_channels = config.d_inner + 4 * config.ngroups * config.d_state
        self.in_proj = nn.Linear(config.d_model, config.d_in_proj, bias=False)
        self.conv1d = nn.Conv1d(d_conv_channels, d_conv_channels, config.d_conv,
                                groups=d_conv_channels, padding=config.d_conv // 2)
        # Delta starts log-uniform in [1e-3, 0.1] and A uniform in [1, 16], as in Mamba-2 and Hydra.
        dt = torch.exp(torch.empty(h).uniform_(-6.9078, -2.3026))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.A_log = nn.Parameter(torch.empty(h).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(h))
        self.fc_D = nn.Linear(config.d_inner, h, bias=False)
        self.norm = nn.RMSNorm(config.d_inner, eps=1e-5)
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=False)

    def project(self, u, m, mask=None):
        """u (b, l, d) -> z (b, l, h p) and the scan's x, dt, A, B, C, D (shapes in chunk_scan.py).

        m: one of `Modulation.by_layer`. It costs five small operations, on (b, h) and on B and C.
        """
        h = self.config.nheads
        zxBCdt = self.in_proj(u)                                          # b l (z, x, BC BC, dt dt)
        z, x, B, C, dt = _unpack(zxBCdt, self.conv1d.weight, self.conv1d.bias, m, mask,
                                 self.config)                             # eq. 4
        dt = rearrange(dt, "b l (d h) -> b l d h", d=2)

        # Here t changes the rest. exp in float32 always, as in the released modules.
        A = -torch.exp((self.A_log + m.A).float()).to(self.A_log.dtype)   # b h        eq. 3, 8
        dt = F.softplus(dt + (self.dt_bias + m.dt)[:, None, None])        # b l d h    eq. 3, 9
        D = self.fc_D(x) + (self.D + m.D)[:, None]                        # b l h      eq. 3, 11

        if mask is not None:
            dt = dt * mask[..., None, None]    # nor may a pad enter or decay the state
        return z, rearrange(x, "b l (h p) -> b l h p", h=h), dt, A, B, C, D

    def forward(self, u, m, mask=None):
        """u (b, l, d) -> (b, l, d). mask (b, l): False at pads, which change nothing elsewhere."""
        z, *inputs = self.project(u, m, mask)
        y = bidirectional_scan(*inputs, self.config.chunk_size)           # b l h p    eq. 7, 11
        y = rearrange(y, "b l h p -> b l (h p)").type_as(self.norm.weight)
        return self.out_proj(_gated_norm(y, z, self.norm.weight))         # b l d

    @torch.no_grad()
    def matrix(self, u, m):
        """M of eq. 11 for one sequence u (1, l, d), (h, l, l): the scan's answer to each unit
        vector, which takes the place of x.
        """
        _, x, dt, A, B, C, D = self.project(u, m)
        _, l, h, _ = x.shape
        unit = torch.eye(l).view(1, l, 1, l).expand(1, l, h, l).to(x)     # b l h l
        M = bidirectional_scan(unit, dt, A, B, C, D, self.config.chunk_size)
        return rearrange(M, "1 i h j -> h i j")


# ---- the model -----------------------------------------------------------------------------------


class Layer(nn.Module):
    """Residual post-norm block: h = LayerNorm(h + mixer(h))."""

    def __init__(self, config):
        super().__init__()
        self.mixer = Mixer(config)
        self.norm = nn.LayerNorm(config.d_model, eps=1e-5)

    def forward(self, h, m, mask=None):
        return self.add_norm(h, self.mixer(h, m, mask))

    def add_norm(self, h, out):
        return _add_norm(h, out, self.norm.weight, self.norm.bias)


class HydraBert(nn.Module):
    """Embeddings, `n_layer` Hydra layers, and BERT's masked-language-model head (decoder tied)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpointing = False  # recompute each layer in the backward pass
        self.word_embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.token_type_embeddings = nn.Embedding(2, config.d_model)
        self.embedding_norm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.head_dense = nn.Linear(config.d_model, config.d_model)
        self.head_norm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.decoder_bias = nn.Parameter(torch.zeros(config.vocab_size))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02 * (768 / config.d_model) ** 0.5)

    def embed(self, input_ids):
        """Ids (b, l) -> (b, l, d), what the first layer reads."""
        h = self.word_embeddings(input_ids) + self.token_type_embeddings.weight[0]
        return self.embedding_norm(h)

    def hidden(self, input_ids, modulation=None, attention_mask=None):
        """Last hidden states (b, l, d) of ids (b, l); attention_mask (b, l) is 0 at pads."""
        mask = None if attention_mask is None else attention_mask.bool()
        modulation = modulation or Modulation()
        h = self.embed(input_ids)                                         # b l d
        for layer, m in zip(modulation.around(self.layers), modulation.by_layer(self), strict=True):
            if self.checkpointing and torch.is_grad_enabled():
                h = checkpoint(layer, h, m, mask, use_reentrant=False,
                               preserve_rng_state=False)  # nothing in a layer is random
            else:
                h = layer(h, m, mask)
        return h

    def head(self, hidden):
        """Logits (..., v) of hidden states (..., d)."""
        h = self.head_norm(F.gelu(self.head_dense(hidden)))
        return F.linear(h, self.word_embeddings.weight, self.decoder_bias)

    def forward(self, input_ids, modulation=None, attention_mask=None):
        """Logits (b, l, v). Training and evaluation use `hidden`, and `head` where it is masked."""
        return self.head(self.hidden(input_ids, modulation, attention_mask))


def __getattr__(name):
    """load_backbone stands in checkpoint.py, above this file; both names are documented."""
    if name == "load_backbone":
        return importlib.import_module("checkpoint").load_backbone
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- demonstration -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """A random layer's mixer as a matrix, and the ranks that make it quasiseparable."""
    seqlen: int = 48
    d_model: int = 64
    d_state: int = 4
    headdim: int = 32
    seed: int = 42


def block_ranks(M):
    """The largest rank of the blocks M[i:, :i] below and M[:i, i:] above the diagonal; M (l, l)."""
    below = max(torch.linalg.matrix_rank(M[i:, :i]).item() for i in range(1, len(M)))
    above = max(torch.linalg.matrix_rank(M[:i, i:]).item() for i in range(1, len(M)))
    return below, above


def main(cfg):
    if cfg.seqlen < 2:
        raise common.UserError(f"--seqlen: got {cfg.seqlen}, need at least 2")
    torch.manual_seed(cfg.seed)
    config = HydraConfig(260, cfg.d_model, 1, cfg.d_state, headdim=cfg.headdim)
    model = HydraBert(config).double().requires_grad_(False)
    common.banner("hydra_ssm.py", cfg, "cpu", model)
    with torch.device("meta"):
        released = sum(p.numel() for p in HydraBert(HydraConfig()).parameters())
    common.log(f"the released Hydra-BERT has {released:,} parameters")
    u = model.embed(torch.randint(260, (1, cfg.seqlen)))                  # 1 l d
    m, = Modulation().by_layer(model)
    M = model.layers[0].mixer.matrix(u, m)                                # h l l
    ranks = []
    for head, M_head in enumerate(M):
        below, above = block_ranks(M_head)
        common.log(f"head {head}: M is {cfg.seqlen} x {cfg.seqlen}; largest rank of a block below "
                   f"the diagonal {below}, above it {above}")
        ranks += [below, above]
    common.log(f"rank of every block below or above the diagonal: at most {max(ranks)}, the state "
               f"has {cfg.d_state}")
    return {"ranks": ranks, "released": released}


if __name__ == "__main__":
    common.run_cli(Config, main)
