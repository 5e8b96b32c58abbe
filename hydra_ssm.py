"""Hydra-BERT: the quasiseparable mixer of eq. 11 as a frozen, modulable backbone (paper 2.1, 3.1).

Run:      python hydra_ssm.py         (fills a masked sentence and draws a mixer matrix, 5 seconds)
Last line: "mixer matrix of layer N: runs/hydra_ssm/mixer_matrix.png"

A Modulation changes A_log, dt_bias, D, B and C of every layer without touching a weight (eq. 3, 4);
its tensors are stacked over the layers, and applying them costs one operation per layer.

Symbols:  A_log', dt_bias', D'  modulated per-head parameters  (y, b, h)      eq. 3, 8, 9
          B', C'                modulated read-in and read-out  (y, b, g n)   eq. 4
          z, x, B, C, dt        what in_proj packs, in this order; B and C once per direction
          y layer, b batch, l length, d model, h heads, p head dim, g groups, n state
Differs from the paper: it keeps 12 of the released checkpoint's 24 heads (its public code sets
          headdim 128); this file infers the sizes from the tensors and loads all 24. Padding is
          exact here: a padded batch gives the logits of the unpadded one, which the released
          modules do not.
Upstream: github.com/goombalab/hydra (modules) and huggingface.co/goombalab/hydra (weights).
"""
import dataclasses
import functools
import hashlib
import re
import zipfile
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from torch.utils.checkpoint import checkpoint

import common
import text
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
    weights: str = ""  # the `fingerprint` of what was loaded

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


PARAMETERS = {"A": ("A",), "dt": ("dt",), "D": ("D",),
              "BC": ("B_scale", "B_shift", "C_scale", "C_shift")}
MODES = ("full", "all-except-A", "A", "dt", "BC", "D", "all-except-dt", "none")  # as in Table 2


@dataclasses.dataclass
class Modulation:
    """What an adapter asks of the backbone at one t per sequence. None leaves a parameter alone.

    Shifts are bounded already; scales are factors (1 + alpha tanh(.)). in_scale, in_shift, out_gate
    and lora serve the conditioning baselines,
    h + (1 + out_gate) mixer((1 + in_scale) h + in_shift).
    """
    A: torch.Tensor | None = None         # y b h    added to A_log
    dt: torch.Tensor | None = None        # y b h    added to dt_bias
    D: torch.Tensor | None = None         # y b h    added to D
    B_scale: torch.Tensor | None = None   # y b gn   factor of B, both directions
    B_shift: torch.Tensor | None = None   # y b gn
    C_scale: torch.Tensor | None = None   # y b gn
    C_shift: torch.Tensor | None = None   # y b gn
    in_scale: torch.Tensor | None = None  # y b d
    in_shift: torch.Tensor | None = None  # y b d
    out_gate: torch.Tensor | None = None  # y b d
    # in_down y r d, in_up y o r, out_down y r d_inner, out_up y d r
    lora: tuple | None = None

    def keep(self, mode):
        """Table 2: keep the parameters that `mode` names, drop the other state-space ones."""
        if mode not in MODES:
            raise common.UserError(f"modulate: got {mode!r}, need one of {', '.join(MODES)}")
        kept = {"full": "A dt BC D", "none": "", "all-except-A": "dt BC D",
                "all-except-dt": "A BC D"}.get(mode, mode).split()
        dropped = [field for name, fields in PARAMETERS.items() if name not in kept
                   for field in fields]
        return dataclasses.replace(self, **dict.fromkeys(dropped))


class Operator(NamedTuple):
    """One layer's parameters after modulation; b is 1 where nothing depends on the sequence."""
    A: torch.Tensor                       # b h     -exp(A_log'), eq. 8
    dt_bias: torch.Tensor                 # b h
    D: torch.Tensor                       # b h
    BC_scale: torch.Tensor | None         # b 1 4gn factor of B_fwd, C_fwd, B_bwd, C_bwd
    BC_shift: torch.Tensor | None         # b 1 4gn
    in_scale: torch.Tensor | None         # b 1 d
    in_shift: torch.Tensor | None         # b 1 d
    out_gate: torch.Tensor | None         # b 1 d
    lora: tuple | None                    # in_down, in_up, out_down, out_up


def _fused(function):
    """On a GPU, `function` in one pass over memory: torch.compile makes it once, at any length."""
    compiled = functools.cache(lambda: torch.compile(function, dynamic=True))

    @functools.wraps(function)
    def either(x, *rest):
        as_it_is = not x.is_cuda or torch.compiler.is_compiling()
        return (function if as_it_is else compiled())(x, *rest)
    return either


@_fused
def _conv_silu(x, weight, bias):
    """silu of the two-sided depthwise convolution of x (b, l, w): a sum of shifted rows."""
    l, k = x.shape[1], weight.shape[-1]
    x = F.pad(x, (0, 0, k // 2, k // 2))
    return F.silu(bias + sum(weight[:, 0, i] * x[:, i:i + l] for i in range(k)))


@_fused
def _gated_norm(y, z, weight):
    return F.rms_norm(y, weight.shape, weight, eps=1e-5) * F.silu(z)


@_fused
def _add_norm(h, out, weight, bias):
    return F.layer_norm(h + out, weight.shape, weight, bias, eps=1e-5)


class Mixer(nn.Module):
    """Hydra's quasiseparable mixer: one A_log, dt_bias and D per head, for both directions."""

    def __init__(self, config):
        super().__init__()
        self.config, h = config, config.nheads
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

    def project(self, u, op, mask=None):
        """u (b, l, d) -> z (b, l, h p) and the scan's x, dt, B, C, D (shapes in chunk_scan.py)."""
        cfg = self.config
        zxbcdt = self.in_proj(u)                                          # b l (z, x, BC BC, dt dt)
        if op.lora:
            zxbcdt = zxbcdt + u @ op.lora[0].mT @ op.lora[1].mT
        bc_width = 4 * cfg.ngroups * cfg.d_state
        z, xBC, dt = zxbcdt.split([cfg.d_inner, cfg.d_inner + bc_width, 2 * cfg.nheads], dim=-1)
        if mask is not None:
            xBC = xBC * mask[..., None]        # the two-sided convolution must not see a pad
        if xBC.is_cuda:
            xBC = _conv_silu(xBC, self.conv1d.weight, self.conv1d.bias)   # b l (x, BC BC)
        else:
            xBC = F.silu(self.conv1d(xBC.mT).mT)
        x, BC = xBC.split([cfg.d_inner, bc_width], dim=-1)
        if op.BC_scale is not None:
            BC = torch.addcmul(op.BC_shift, BC, op.BC_scale)              # eq. 4, both directions

        dt = rearrange(dt, "b l (d h) -> b l d h", d=2)
        dt = F.softplus(dt + op.dt_bias[:, None, None])                   # eq. 9
        if mask is not None:
            dt = dt * mask[..., None, None]    # nor may a pad enter or decay the state
        D = self.fc_D(x) + op.D[:, None]                                  # b l h, the free diagonal
        B, C = rearrange(BC, "b l (d k g n) -> k b l d g n", d=2, k=2, g=cfg.ngroups)
        return z, rearrange(x, "b l (h p) -> b l h p", h=cfg.nheads), dt, B, C, D

    def forward(self, u, op, mask=None):
        """u (b, l, d) -> (b, l, d). mask (b, l): False at pads, which change nothing elsewhere."""
        z, x, dt, B, C, D = self.project(u, op, mask)
        y = bidirectional_scan(x, dt, op.A, B, C, D, self.config.chunk_size)  # eq. 11
        y = rearrange(y, "b l h p -> b l (h p)").type_as(self.norm.weight)
        y = _gated_norm(y, z, self.norm.weight)
        out = self.out_proj(y)
        if op.lora:
            out = out + y @ op.lora[2].mT @ op.lora[3].mT
        return out


class Layer(nn.Module):
    """Residual post-norm block: h = LayerNorm(h + mixer(h))."""

    def __init__(self, config):
        super().__init__()
        self.mixer = Mixer(config)
        self.norm = nn.LayerNorm(config.d_model, eps=1e-5)

    def forward(self, h, op, mask=None):
        u = h
        if op.in_scale is not None:
            u = u * (1 + op.in_scale)
        if op.in_shift is not None:
            u = u + op.in_shift
        out = self.mixer(u, op, mask)
        if op.out_gate is not None:
            out = out * (1 + op.out_gate)
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

    def operators(self, modulation=None):
        """The Operator of each layer. All are evaluated together; a layer then takes views."""
        m, mixers = modulation or Modulation(), [layer.mixer for layer in self.layers]

        def shifted(name, shift):                                         # y 1 h (+ y b h)
            base = torch.stack([getattr(mixer, name) for mixer in mixers])[:, None]
            return base if shift is None else base + shift.to(base.dtype)

        # In float32 whatever the model's dtype, as in the released modules and the golden file.
        A = -torch.exp(shifted("A_log", m.A).float()).to(mixers[0].A_log.dtype)
        rows = {"A": A, "dt_bias": shifted("dt_bias", m.dt), "D": shifted("D", m.D)}
        like = self.word_embeddings.weight
        bc = (m.B_scale, m.C_scale, m.B_shift, m.C_shift)
        if any(part is not None for part in bc):
            one = torch.ones_like(next(part for part in bc if part is not None))
            scales = [one if part is None else part for part in bc[:2]]
            shifts = [0 * one if part is None else part for part in bc[2:]]
            rows["BC_scale"] = torch.cat(scales * 2, -1)                  # y b 4gn
            rows["BC_shift"] = torch.cat(shifts * 2, -1)
        rows |= {name: getattr(m, name) for name in ("in_scale", "in_shift", "out_gate")}
        for name in ("BC_scale", "BC_shift", "in_scale", "in_shift", "out_gate"):
            if rows.get(name) is not None:
                rows[name] = rows[name].to(like.dtype)[:, :, None]        # y b 1 .
        per_layer = {name: rows[name].unbind(0) if rows.get(name) is not None
                     else (None,) * len(mixers) for name in Operator._fields if name != "lora"}
        lora = zip(*(w.to(like.dtype) for w in m.lora)) if m.lora else (None,) * len(mixers)
        return [Operator(*row) for row in zip(*per_layer.values(), lora)]

    def hidden(self, input_ids, modulation=None, attention_mask=None):
        """Last hidden states (b, l, d) of ids (b, l); attention_mask (b, l) is 0 at pads."""
        mask = None if attention_mask is None else attention_mask.bool()
        h = self.word_embeddings(input_ids) + self.token_type_embeddings.weight[0]
        h = self.embedding_norm(h)                                        # b l d
        for layer, op in zip(self.layers, self.operators(modulation), strict=True):
            if self.checkpointing and torch.is_grad_enabled():
                h = checkpoint(layer, h, op, mask, use_reentrant=False,
                               preserve_rng_state=False)  # nothing in a layer is random
            else:
                h = layer(h, op, mask)
        return h

    def head(self, hidden):
        """Logits (..., v) of hidden states (..., d)."""
        h = self.head_norm(F.gelu(self.head_dense(hidden)))
        return F.linear(h, self.word_embeddings.weight, self.decoder_bias)

    def forward(self, input_ids, modulation=None, attention_mask=None):
        """Logits (b, l, v). Training and evaluation use `hidden`, and `head` where it is masked."""
        return self.head(self.hidden(input_ids, modulation, attention_mask))


@torch.no_grad()
def mixer_inputs(model, input_ids, modulation=None, attention_mask=None):
    """What each layer's mixer is called with on ids (b, l): [(u, op, mask), ...]."""
    seen = []
    hooks = [layer.mixer.register_forward_pre_hook(lambda mixer, args: seen.append(args))
             for layer in model.layers]
    try:
        model.hidden(input_ids, modulation, attention_mask)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def scan_inputs(model, inputs):
    """What each layer's scan reads, from its mixer's (u, op, mask): [(dt, A, B, C, D), ...].

    Shapes as in chunk_scan.py.
    """
    projected = ((layer.mixer.project(*args), args[1].A)
                 for layer, args in zip(model.layers, inputs, strict=True))
    return [(dt, A, B, C, D) for (_, _, dt, B, C, D), A in projected]


@torch.no_grad()
def mixer_matrix(model, input_ids, layer):
    """M of eq. 11, (h, l, l), of one layer on ids (l,): the scan's answer to each unit vector."""
    (u, op, _), mixer = mixer_inputs(model, input_ids[None])[layer], model.layers[layer].mixer
    _, _, dt, B, C, D = mixer.project(u, op)
    l, cfg = len(input_ids), model.config
    unit = torch.eye(l).view(1, l, 1, l).expand(1, l, cfg.nheads, l).to(B)           # b l h l
    return bidirectional_scan(unit, dt, op.A, B, C, D, cfg.chunk_size)[0].movedim(1, 0)


# ---- loading weights -----------------------------------------------------------------------------

class HubFile(NamedTuple):
    revision: str
    filename: str
    size: int
    sha256: str


HUB_FILES = {"goombalab/hydra": HubFile(
    "89204f45b7e595243e74d2ed0cab0afc2aa35ef6", "hydra_bert_23layers.pt", 449_652_194,
    "d38892dd98e4c71e24d3566084e7a64da5c3bfbff2ee4e2ba46e66a61202e1f9")}
SMALL = common.SOURCE / "assets" / "hydra_small.safetensors"

RENAMES = (  # released key -> ours
    (r"^bert\.embeddings\.(word|token_type)_embeddings\.", r"\1_embeddings."),
    (r"^bert\.embeddings\.LayerNorm\.", "embedding_norm."),
    (r"^bert\.encoder\.layer\.(\d+)\.layer\.", r"layers.\1."),
    (r"^cls\.predictions\.transform\.dense\.", "head_dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head_norm."),
    (r"^cls\.predictions\.decoder\.bias$", "decoder_bias"),
)


def load_backbone(source="small", dtype=torch.float32, device="cpu", vocab_size=None):
    """A frozen HydraBert in eval mode: "small" (shipped), "goombalab/hydra" (released) or a path.

    A path may hold safetensors or a torch file, as a composer checkpoint or a plain state dict.
    Sizes are read off the tensors. vocab_size=None keeps every row of the embeddings, except that
    30,528 rows mean 30,522; a number cuts the padded rows. A_log, dt_bias and D stay in float32
    under a 16-bit dtype. No pickled code is executed. Raises UserError, naming the tensor or what
    to do.
    """
    path = locate(source)
    state = _canonical(read_tensors(path), path)
    rows = len(state["word_embeddings.weight"])
    vocab_size = vocab_size or (30522 if rows == 30528 else rows)
    if vocab_size > rows:
        raise common.UserError(f"{path}: {rows} embedding rows, but vocab_size {vocab_size} was "
                               "asked for")
    for name in ("word_embeddings.weight", "decoder_bias"):
        state[name] = state[name][:vocab_size]
    with torch.device("meta"):
        model = HydraBert(infer_config(state))
    expected = model.state_dict()
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise common.UserError(f"{path}: {name} is {tuple(tensor.shape)}, "
                                   f"needed {tuple(expected[name].shape)}")
        keep = name.endswith(("A_log", "dt_bias", "mixer.D")) and dtype.itemsize < 4
        state[name] = tensor.to(device, torch.float32 if keep else dtype, copy=True)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def locate(source):
    """The file of `source`: shipped, fetched from the hub, or a path, which must exist."""
    path = SMALL if source == "small" else _fetch(source) if source in HUB_FILES else Path(source)
    if not path.is_file():
        raise common.UserError(f"weights: no file {path}; give a path, \"small\" or one of "
                               f"{list(HUB_FILES)}")
    return path


def fingerprint(state):
    """sha256 of weights by name, rounded to bfloat16: the same in any file, in bfloat16, float32
    and float64 (float16 rounds some of them to another neighbour).
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].bfloat16().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_vocabulary(model, tokenizer):
    """Raise UserError unless the tokenizer's ids are those of the backbone's embeddings."""
    if model.config.vocab_size != tokenizer.vocab_size:
        raise common.UserError(f"--vocab: {tokenizer.name} has {tokenizer.vocab_size} ids and the "
                               f"backbone {model.config.vocab_size}; give the vocabulary that it "
                               "was pretrained with")


def infer_config(state):
    """HydraConfig from tensors, sizes by shape alone (one group is assumed: they cannot tell)."""
    d_inner = state["layers.0.mixer.out_proj.weight"].shape[1]
    h = len(state["layers.0.mixer.A_log"])
    vocab_size, d_model = state["word_embeddings.weight"].shape
    return HydraConfig(
        vocab_size=vocab_size, d_model=d_model, headdim=d_inner // h, expand=d_inner // d_model,
        n_layer=1 + max(int(k.split(".")[1]) for k in state if k.startswith("layers.")),
        d_state=(len(state["layers.0.mixer.conv1d.bias"]) - d_inner) // 4,
        d_conv=state["layers.0.mixer.conv1d.weight"].shape[-1],
        chunk_size=64 if d_inner // h >= 64 else 32, weights=fingerprint(state))


def canonical_name(key):
    """A released or plain key as ours: layers.3.mixer.A_log."""
    name = re.sub(r"^((model|module|_orig_mod)\.)+", "", key)
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _canonical(state, path):
    """Released or plain keys -> ours, the tied decoder checked and dropped, no key unaccounted."""
    renamed = {}
    for key, tensor in state.items():
        name = canonical_name(key)
        if name in renamed:
            raise common.UserError(f"{path}: two tensors for {name}, one of them {key}")
        if not torch.isfinite(tensor).all():
            raise common.UserError(f"{path}: {name} holds NaN or infinity")
        renamed[name] = tensor
    decoder = renamed.pop("cls.predictions.decoder.weight", None)
    word = renamed.get("word_embeddings.weight")
    if decoder is not None and word is not None and not torch.equal(decoder, word):
        raise common.UserError(f"{path}: cls.predictions.decoder.weight differs from the word "
                               "embeddings; Hydra-BERT ties them")
    indices = {int(k.split(".")[1]) for k in renamed if re.match(r"layers\.\d+\.", k)}
    with torch.device("meta"):
        expected = HydraBert(HydraConfig(n_layer=1 + max(indices, default=0))).state_dict()
    for problem, names in (("missing", expected.keys() - renamed),
                           ("unknown", renamed.keys() - expected)):
        if names:
            raise common.UserError(f"{path}: tensor {min(names)} is {problem} "
                                   f"({len(names)} in all); is this a Hydra-BERT checkpoint?")
    for name, tensor in renamed.items():
        if tensor.ndim != expected[name].ndim or not tensor.numel():
            raise common.UserError(f"{path}: {name} is {tuple(tensor.shape)}, "
                                   f"needed {expected[name].ndim} dimensions, none empty")
    if len(renamed["decoder_bias"]) != len(word):
        raise common.UserError(f"{path}: decoder_bias has {len(renamed['decoder_bias'])} entries, "
                               f"needed one for each of {len(word)} embedding rows")
    return renamed


def read_tensors(path):
    """Key -> tensor, mapped from a safetensors or zipped torch file; no pickled code is run."""
    try:
        if zipfile.is_zipfile(path):
            # Other entries of a composer checkpoint are pickled objects of packages nobody needs
            # here: inert stand-ins take the place of their classes, weights_only does the rest.
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            inert = [(type("Inert", (), {"__init__": lambda self, *args: None,
                                         "__setstate__": lambda self, state: None}), name)
                     for name in names]
            with torch.serialization.safe_globals(inert):
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            content = content.get("state", content)
            content = dict(content.get("model", content))
        else:
            from safetensors.torch import load_file
            content = load_file(path)
    except Exception as error:  # every reader has its own kinds of failure; all mean that
        raise common.UserError(
            f"{path}: not a readable torch or safetensors file, or cut short "
            f"({type(error).__name__}: {str(error)[:120].partition(chr(10))[0]})") from None
    tensors = {k: v for k, v in content.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        raise common.UserError(f"{path}: holds no tensors")
    return tensors


def _fetch(source):
    """Path of a hub file in huggingface_hub's cache, fetched if need be; size and hash checked."""
    import huggingface_hub
    hub = HUB_FILES[source]
    try:
        path = Path(huggingface_hub.hf_hub_download(source, hub.filename, revision=hub.revision))
    except Exception as error:  # connection, HTTP status, offline mode: classes of several packages
        raise common.UserError(
            f"could not fetch {hub.filename} of {source} ({type(error).__name__}); download it "
            "elsewhere and give its path as --weights, set HF_ENDPOINT to a mirror, or unset "
            "HF_HUB_OFFLINE") from None
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if (size, digest.hexdigest()) != (hub.size, hub.sha256):
        path = path.resolve()  # the snapshot is a link: deleting it alone would leave the bad blob
        raise common.UserError(f"{path}: {size} bytes with sha256 {digest.hexdigest()[:12]}..., "
                               f"expected {hub.size} and {hub.sha256[:12]}...; delete the file and "
                               "try again")
    return path


# ---- demonstration -------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Config:
    """Fill the [MASK]s of a text in one pass, and draw what one layer's mixer does to it."""
    MAY_BE_ZERO: ClassVar = ("layer",)
    text: str = ("It is a truth univ[MASK]rsally acknowl[MASK]dged, that a sin[MASK]le man is in "
                 "want of a w[MASK]fe.")
    weights: str = "small"      # "small", "goombalab/hydra" or a path
    vocab: str = "bytes"        # "bytes", "bert-base-uncased" or the path of a vocab.txt
    layer: int = 3              # whose mixer matrix is drawn
    publish: bool = False       # draw into figures/ in place of runs/hydra_ssm/
    seed: int = 42


def main(cfg):
    from matplotlib.figure import Figure
    tokenizer, model = text.make_tokenizer(cfg.vocab), load_backbone(cfg.weights)
    check_vocabulary(model, tokenizer)
    if not cfg.text:
        raise common.UserError("--text: got nothing, need some text")
    if not 0 <= cfg.layer < model.config.n_layer:
        raise common.UserError(f"--layer: got {cfg.layer}, need 0 to {model.config.n_layer - 1}")
    common.banner("hydra_ssm.py", cfg, "cpu", model)
    parts = [tokenizer.encode(part).tolist() for part in cfg.text.split("[MASK]")]
    ids = torch.tensor(sum(([tokenizer.mask_id] + part for part in parts), [])[1:])  # l
    holes = (ids == tokenizer.mask_id).nonzero().flatten()
    with torch.no_grad():
        p = model.head(model.hidden(ids[None])[0, holes]).softmax(-1)                # holes v
    result = {"filled": [], "probability": []}
    for hole, row in zip(holes.tolist(), p):
        best = row.topk(3)
        ids[hole] = best.indices[0]
        names = [f"{tokenizer.decode([i])!r} {q:.2f}"
                 for i, q in zip(best.indices.tolist(), best.values)]
        common.log(f"position {hole}: {', '.join(names)}")
        result["filled"].append(int(best.indices[0]))
        result["probability"].append(best.values[0].item())
    common.log(f"{cfg.text}\n{tokenizer.decode(ids)}")

    M = mixer_matrix(model, ids, cfg.layer)                                          # h l l
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for ax, head in zip(figure.subplots(1, 3), (0, len(M) // 2, len(M) - 1)):
        size = M[head].float().abs().clamp(min=1e-9).log10().cpu().numpy()
        image = ax.imshow(size, cmap="magma", vmin=-4, vmax=1)
        ax.set(title=f"layer {cfg.layer}, head {head}", xlabel="j (from)", ylabel="i (to)")
        figure.colorbar(image, ax=ax, shrink=0.8, label="log10 |m_ij|")
    folder = common.ROOT / ("figures" if cfg.publish else "runs/hydra_ssm")
    path = folder / "mixer_matrix.png"
    common.save_figure(figure, path)
    common.log(f"mixer matrix of layer {cfg.layer}: {path.relative_to(common.ROOT)}")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
