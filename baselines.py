"""What MaRK is compared with: input injection, AdaLN-Zero, LoRA, a static operator (4.4, Table 3).

Run:      not a script; `torchrun train.py --kernel lora` trains one.

Injection, AdaLN and LoRA leave the recurrence alone. They act around the mixers of the same frozen
backbone, from outside, and the residual path is theirs to leave alone (h is what enters a layer).
The static operator changes what the geometries change, but knows no t:

    inject    mixer(h + W c_t)
    adaln     (1 + gate) mixer((1 + scale) h + shift), from one linear map of SiLU(c_t)
    lora      in_proj(u) + up down u, and so for out_proj; the same at every t
    static    the shifts and scales of eq. 3 and 4 as plain numbers, without a bound; the same at
              every t
    lora+K, static+K    LoRA, or a static operator, and on top of it the geometry K: hypernet,
              chebyshev or dct
    none      the backbone as it is

Importing this file adds these names to mark_adapters.KERNELS.

Symbols:  c     c_t              (b, 128)     section 2
          W     what is trained  (y, i, o)    y layer, b batch, d model, r rank
          down, up               LoRA's two factors of in_proj and of out_proj
          rate  static_rate      the static operator's learning rate over the geometries'
Differs from the paper: it compares with injection and AdaLN alone. All start as the identity here.
"""
import contextlib
import dataclasses
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

from hydra_ssm import FIELDS, Modulation
from mark_adapters import (C_DIM, GEOMETRIES, KERNELS, Conditioned, Hypernet, StackedLinear,
                           adapter_size)

# ---- how they are applied ------------------------------------------------------------------------


@dataclasses.dataclass
class Conditioning(Modulation):
    """A Modulation that also acts around each mixer. Its own fields are stacked over the layers."""
    in_scale: torch.Tensor | None = None  # y b d    u = (1 + in_scale) h + in_shift
    in_shift: torch.Tensor | None = None  # y b d
    out_gate: torch.Tensor | None = None  # y b d    (1 + out_gate) mixer(u)
    lora: tuple | None = None             # in_down y r d, in_up y o r; out_down y r e, out_up y d r

    def around(self, layers):
        """Each layer as a function of (h, m, mask) that does what this asks."""
        dtype = layers[0].mixer.in_proj.weight.dtype
        wrapped = []
        for y, layer in enumerate(layers):
            own = {}
            for name in ("in_scale", "in_shift", "out_gate"):
                value = getattr(self, name)
                own[name] = None if value is None else value[y, :, None]          # b 1 d
            if self.lora is not None:
                own["lora"] = [factor[y].to(dtype) for factor in self.lora]
            wrapped.append(functools.partial(conditioned, layer, **own))
        return wrapped


def conditioned(layer, h, m, mask, in_scale=None, in_shift=None, out_gate=None, lora=None):
    """LayerNorm(h + (1 + out_gate) mixer((1 + in_scale) h + in_shift)), the mixer with LoRA."""
    u = h                                                              # b l d
    if in_scale is not None:  # float32 at least, as the others: 1.003 is 1 in bfloat16
        u = u * (1 + in_scale)
    if in_shift is not None:
        u = u + in_shift
    with low_rank(layer.mixer, lora):
        out = layer.mixer(u.to(h.dtype), m, mask)                      # b l d
    if out_gate is not None:
        out = out * (1 + out_gate)
    return layer.add_norm(h, out.to(h.dtype))


@contextlib.contextmanager
def low_rank(mixer, lora):
    """Inside, in_proj and out_proj of `mixer` have their low-rank terms. lora: four matrices."""
    if lora is None:
        yield
        return
    in_down, in_up, out_down, out_up = lora

    def add(down, up, linear, inputs, output):
        return output + inputs[0] @ down.mT @ up.mT

    hooks = [
        mixer.in_proj.register_forward_hook(functools.partial(add, in_down, in_up)),
        mixer.out_proj.register_forward_hook(functools.partial(add, out_down, out_up)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ---- the baselines -------------------------------------------------------------------------------


class Inject(Conditioned):
    """Input injection, mixer(h + W c_t). W starts at zero."""

    def __init__(self, config, cfg):
        super().__init__(cfg)
        self.W = StackedLinear(config.n_layer, C_DIM, config.d_model, gain=0)

    def modulate(self, c):
        c = c.expand(len(self.W.weight), -1, -1)                       # y b 128
        return Conditioning(in_shift=self.W(c))


class AdaLN(Conditioned):
    """AdaLN-Zero as in DiT, h + (1 + gate) mixer((1 + scale) h + shift), from Linear(SiLU(c_t))."""

    def __init__(self, config, cfg):
        super().__init__(cfg)
        self.W = StackedLinear(config.n_layer, C_DIM, 3 * config.d_model, gain=0)

    def modulate(self, c):
        c = F.silu(c).expand(len(self.W.weight), -1, -1)               # y b 128
        scale, shift, gate = self.W(c).chunk(3, -1)                    # y b d
        return Conditioning(in_scale=scale, in_shift=shift, out_gate=gate)


class LoRA(nn.Module):
    """Low-rank changes of in_proj and out_proj, the same at every t: down random, up zero."""

    def __init__(self, config, cfg):
        super().__init__()
        self.rank = cfg.lora_rank or matched_lora_rank(config, cfg)
        self.in_down = self.random(config.n_layer, self.rank, config.d_model)
        self.in_up = nn.Parameter(torch.zeros(config.n_layer, config.d_in_proj, self.rank))
        self.out_down = self.random(config.n_layer, self.rank, config.d_inner)
        self.out_up = nn.Parameter(torch.zeros(config.n_layer, config.d_model, self.rank))

    @staticmethod
    def random(n_layer, rank, n_in):
        return nn.Parameter(torch.empty(n_layer, rank, n_in).uniform_(-n_in ** -0.5, n_in ** -0.5))

    def forward(self, t=None):
        return Conditioning(lora=(self.in_down, self.in_up, self.out_down, self.out_up))


def matched_lora_rank(config, cfg):
    """The LoRA rank whose size is nearest to a hypernet's with the same settings."""
    with torch.device("meta"):
        target = adapter_size(Hypernet(config, dataclasses.replace(cfg, init="default")))
    per_rank = config.d_model + config.d_in_proj + config.d_inner + config.d_model
    return max(1, round(target / (config.n_layer * per_rank)))


class Static(nn.Module):
    """The modulated parameters trained directly: per head a shift of A_log, dt_bias and D, per
    state a scale and a shift of B and of C. No network, no bound, no t. It starts as the identity.

    What AdamW moves by --lr in a step moves the parameter by `rate` times as much: plain numbers
    need a higher rate than a network does.
    """

    def __init__(self, config, cfg):
        super().__init__()
        self.rate = cfg.static_rate
        states = config.ngroups * config.d_state
        for name in FIELDS["A"] + FIELDS["dt"] + FIELDS["D"]:
            setattr(self, name, nn.Parameter(torch.zeros(config.n_layer, 1, config.nheads)))
        for name in FIELDS["BC"]:
            setattr(self, name, nn.Parameter(torch.zeros(config.n_layer, 1, states)))

    def forward(self, t=None):
        b = len(t) if isinstance(t, torch.Tensor) else 1
        changes = {}
        for name, parameter in self.named_parameters():
            changes[name] = self.rate * parameter.expand(-1, b, -1)    # y b h, or y b gn
        changes["B_scale"] = 1 + changes["B_scale"]
        changes["C_scale"] = 1 + changes["C_scale"]
        return Modulation(**changes)


class Upon(nn.Module):
    """A geometry on top of a backbone that something without t adapts at the same time."""

    def __init__(self, geometry, config, cfg):
        super().__init__()
        self.geometry = KERNELS[geometry](config, cfg)

    @property
    def timestep(self):
        return self.geometry.timestep

    def hidden(self, t):
        return self.geometry.hidden(t)


class LoRAWith(Upon):
    """LoRA adapts the projections, a geometry the recurrence to t."""

    def __init__(self, geometry, config, cfg):
        super().__init__(geometry, config, cfg)
        self.lora = LoRA(config, cfg)

    def forward(self, t):
        return dataclasses.replace(self.lora(), **vars(self.geometry(t)))


class StaticWith(Upon):
    """A geometry that modulates, within its bounds, what a static operator has made of the frozen
    one. The certificate is then that of the backbone whose A_log is shifted by static.A.
    """

    def __init__(self, geometry, config, cfg):
        super().__init__(geometry, config, cfg)
        self.static = Static(config, cfg)

    def forward(self, t):
        base = self.static()                                           # y 1 h, y 1 gn
        m = self.geometry(t)                                           # y b h, y b gn
        return Modulation(A=base.A + m.A, dt=base.dt + m.dt, D=base.D + m.D,
                          B_scale=m.B_scale * base.B_scale,
                          B_shift=m.B_scale * base.B_shift + m.B_shift,
                          C_scale=m.C_scale * base.C_scale,
                          C_shift=m.C_scale * base.C_shift + m.C_shift)


class Frozen(nn.Module):
    """The backbone as it is."""

    def __init__(self, config, cfg):
        super().__init__()

    def forward(self, t=None):
        return Modulation()


KERNELS.update(inject=Inject, adaln=AdaLN, lora=LoRA, static=Static, none=Frozen)
for name in GEOMETRIES:
    KERNELS[f"lora+{name}"] = functools.partial(LoRAWith, name)
    KERNELS[f"static+{name}"] = functools.partial(StaticWith, name)
