r"""The paper's own files, and its reading of the released weights, in this repository's terms.

Run:      not a script; `load_backbone(FILE)` and `load_adapter(FILE, config)` of checkpoint.py read
          a best_hydra_mark.ckpt, and `load_backbone("goombalab/hydra", sliced=True)` is the model
          that the paper's public code makes of the released one.
Symbols:  tau   1 - t, what the public code feeds its adapter    y layer, i in, o out
          theirs -> ours:
          mixer.mark.mlp.{2j}                          mlp.{j}        weights transposed, (y, i, o)
          {A,dt,D}_shift_proj, of Chebyshev {}_proj    shift          concatenated
          {B,C}_{scale,shift}_proj, _base_, _basis_    UV, UV_basis   concatenated
          spec_proj, z_proj, alpha                     spectrum, z, alpha
          A_beta, dt_beta, ... C_beta                  magnitude      (y, 7)
          embeddings.time_mlp.{0,2}                    timestep.{lower,upper}
          embeddings.freqs; cosine_basis, freqs        timestep.angular; basis, order
Differs from the paper: it speaks of the released checkpoint; its code keeps half of that. A model
          of this file is therefore marked as a misreading wherever a script opens with it. Nothing
          here is needed to train or score the way that we recommend.
Not run:  the real files could not be had where this was made. With a network, REVISION being the
          commit that the hub shows for a repository, of which no hash is known here:
              python evaluate.py --preset table1 --adapter mark-ssm/hydra_mark_hypernet@REVISION \
                  --weights mark-ssm/hydra_mark_hypernet@REVISION --vocab bert-base-uncased \
                  --data wikitext=wikitext_test.txt --train wikitext_valid.txt --seqlen 4096
              python evaluate.py --preset table2 ... (the same), and markov.py --published ...
              torchrun --nproc-per-node 2 train.py --preset published --data shards/
          and the released weights as that code reads them, `--weights goombalab/hydra --sliced`.
          Of the hub's names only mark-ssm/hydra_mark_hypernet is known, from its code's documents.
Upstream: github.com/ibitec7/mark, commit 18a855b: src/mark.py, src/hydra_modules.py, src/nemo.py
          (what a checkpoint holds), src/transfer.py, src/hydra.py, src/hydra_heads.py (the model).
"""
import dataclasses
import re

import torch
import torch.nn.functional as F

from common import UserError
from hydra_ssm import HydraBert
from mark_adapters import C_DIM, near_square

# ---- the backbone --------------------------------------------------------------------------------


class SlicedHydra(HydraBert):
    """The public code's model: its head has SiLU where the weights were trained with gelu."""
    misreading = ("NOT the released Hydra-BERT: 12 of its 24 heads, read as the paper's public "
                  "code reads them")

    def head(self, hidden):
        h = self.head_norm(F.silu(self.head_dense(hidden)))
        return F.linear(h, self.word_embeddings.weight, self.decoder_bias)


def sliced_backbone(model):
    """NOT a way to load weights: half of `model`, misread as the paper's public code misreads it.

    See `slice_weights`; beside that, its head has SiLU where the weights were trained with gelu.
    """
    state, config = slice_weights(model.state_dict(), model.config)
    with torch.device("meta"):
        sliced = SlicedHydra(config)
    sliced.load_state_dict(state, assign=True)
    return sliced.requires_grad_(False).eval()


def slice_weights(state, config):
    """A state dict and its HydraConfig -> those of half the heads, each twice as wide.

    The public code takes the released 24 heads of 64 for 12 of 128: A_log, D, dt_bias and fc_D lose
    their second half, and in_proj its last rows, so that half of the forward Delta is taken for the
    backward one.
    """
    if config.nheads % 2:
        raise UserError(f"sliced: the backbone has {config.nheads} heads, need an even number")
    config = dataclasses.replace(config, headdim=2 * config.headdim, weights="")
    kept = dict(state)
    for name, tensor in state.items():
        if name.endswith(("A_log", "mixer.D", "dt_bias", "fc_D.weight")):
            kept[name] = tensor[:config.nheads]
        if name.endswith("in_proj.weight"):
            kept[name] = tensor[:config.d_in_proj]
    return kept, config


# ---- a checkpoint's two parts --------------------------------------------------------------------


FILENAME = "best_hydra_mark.ckpt"  # in a repository of the hub: mark-ssm/hydra_mark_hypernet, say
CONDITIONING = re.compile(r"hydra\.embeddings\.(?=freqs$|time_mlp\.)")
LAYER = re.compile(r"hydra\.encoder\.layer\.(\d+)\.layer\.mixer\.mark\.")


def is_published(tensors):
    """Whether tensors by name are those of a checkpoint of the public code."""
    return any(name.startswith("inner.hydra.") for name in tensors)


def split_checkpoint(tensors, path):
    """The two parts of a checkpoint of the public code: (backbone, adapter).

    backbone: its tensors by the released names. adapter: by the public code's, "time." and
    "{layer}." in place of the long prefixes. Every tensor is there twice, as inner.* and module.*,
    which have to be equal. Raises UserError, naming the tensor.
    """
    inner = {}
    again = {}
    for key, tensor in tensors.items():
        root, _, name = key.partition(".")
        if root not in ("inner", "module"):
            raise UserError(f"{path}: {key} is no tensor of the paper's public code")
        (inner if root == "inner" else again)[name] = tensor
    for name, tensor in again.items():
        if name not in inner or not torch.equal(inner[name], tensor):
            raise UserError(f"{path}: module.{name} is not the same as inner.{name}")
    backbone = {}
    adapter = {}
    for name, tensor in inner.items():
        if CONDITIONING.match(name):
            adapter["time." + CONDITIONING.sub("", name)] = tensor
        elif LAYER.match(name):
            adapter[LAYER.sub(r"\1.", name)] = tensor
        else:
            backbone[re.sub(r"^hydra\.", "bert.", name)] = tensor
    return backbone, adapter


# ---- the adapter ---------------------------------------------------------------------------------


MAGNITUDES = ("A_beta", "dt_beta", "D_beta", "B_alpha", "B_beta", "C_alpha", "C_beta")
SHIFTS = ("A", "dt", "D")
FACTORS = ("B_scale", "B_shift", "C_scale", "C_shift")


class Source:
    """The adapter's tensors of a checkpoint, each to be taken once."""

    def __init__(self, tensors, path):
        self.left = dict(tensors)
        self.path = path

    def take(self, name):
        """One tensor, in float32."""
        if name not in self.left:
            raise UserError(f"{self.path}: {name} of the adapter is missing")
        return self.left.pop(name).float()

    def linear(self, y, name):
        """A linear map of layer y with its bias as last column, (o, i + 1)."""
        weight = self.take(f"{y}.{name}.weight")                           # o i
        bias = self.take(f"{y}.{name}.bias")                               # o
        if weight.ndim != 2 or bias.shape != weight.shape[:1]:
            raise UserError(f"{self.path}: {y}.{name} of the adapter is {tuple(weight.shape)} "
                            f"with {tuple(bias.shape)}, which is no linear map")
        return torch.cat([weight, bias[:, None]], -1)                      # o (i 1)

    def shape(self, name):
        """(outputs, inputs) of a linear map of the first layer."""
        weight = self.left.get(f"0.{name}.weight")
        if weight is None or weight.ndim != 2 or 0 in weight.shape:
            raise UserError(f"{self.path}: 0.{name}.weight of the adapter is missing or no matrix")
        return weight.shape

    def end(self):
        """Raise UserError where a tensor was left."""
        if self.left:
            raise UserError(f"{self.path}: {min(self.left)} of the adapter is not known here")


def convert_adapter(tensors, config, path):
    """The adapter's part of `split_checkpoint` -> (kernel, settings of make_adapter, state dict).

    config: HydraConfig of the file's backbone. A float of bfloat16 among c_t's frequencies says
    that the run was bf16-true, whose rounding of the angle is then a setting. Raises UserError,
    naming a tensor that is missing, is left over or has an impossible shape.
    """
    source = Source(tensors, path)
    kernel, settings = infer_settings(source, config)
    time = convert_time(source)
    layers = []
    for y in range(config.n_layer):
        try:
            layers.append(convert_layer(source, y, kernel, settings))
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
            raise UserError(f"{path}: the shapes of the adapter of layer {y} do not fit together "
                            f"({problem[:120]})") from None
    source.end()
    state = stack_layers(layers, path)
    if kernel == "dct":
        state["basis"] = same_in_all(state["basis"], "cosine_basis", path)
        state["order"] = 1 + same_in_all(state["order"], "freqs", path)
    return kernel, settings, state | time


def infer_settings(source, config):
    """(kernel, settings) from the names and shapes of the first layer."""
    bf16_true = source.left.get("time.freqs", torch.empty(0)).dtype == torch.bfloat16
    settings = {"mlp_dim": source.shape("mlp.0")[0], "mlp_norm": False, "init": "published",
                "reversed_t": True, "rounded_angle": bf16_true, "stored_buffers": True}
    maps = {name.split(".")[1] for name in source.left}
    if "z_proj" in maps:
        kernel = "chebyshev"
        settings["n_shifts"] = source.shape("z_proj")[0]
        settings["degree"] = source.shape("A_proj")[0] // settings["n_shifts"]
        settings["bounded_z"] = False
    elif "spec_proj" in maps:
        kernel = "dct"
        settings["n_shifts"] = source.shape("A_shift_proj")[0]
        settings["n_freqs"] = source.shape("spec_proj")[0]
        settings["timepoints"] = source.shape("A_shift_proj")[1]
    else:
        kernel = "hypernet"
        settings["n_shifts"] = source.shape("A_shift_proj")[0]
    one_UV = source.shape("B_scale_proj" if kernel == "hypernet" else "B_scale_base_proj")[0]
    settings["rank"] = one_UV // sum(near_square(config.ngroups * config.d_state))
    if settings["n_shifts"] != config.nheads:
        raise UserError(f"{source.path}: its adapter is for {settings['n_shifts']} heads and its "
                        f"backbone has {config.nheads}")
    return kernel, settings


def convert_time(source):
    """What all layers share: c_t's two maps, and its frequencies, which ours holds times 1000."""
    frequency = source.take("time.freqs")
    if frequency.shape != (C_DIM // 2,):
        raise UserError(f"{source.path}: freqs is {tuple(frequency.shape)}, needed {C_DIM // 2}")
    state = {"timestep.angular": 1000 * frequency.double()}
    for theirs, ours in (("0", "lower"), ("2", "upper")):
        for part in ("weight", "bias"):
            state[f"timestep.{ours}.{part}"] = source.take(f"time.time_mlp.{theirs}.{part}")
    return state


def convert_layer(source, y, kernel, settings):
    """{our name: tensor} of layer y; a linear map as `Source.linear` has it."""
    def together(pattern, names):
        """The maps of some names as one."""
        return torch.cat([source.linear(y, pattern.format(name)) for name in names])

    found = {f"mlp.{j}": source.linear(y, f"mlp.{2 * j}") for j in range(4)}
    if kernel == "hypernet":
        found["shift"] = together("{}_shift_proj", SHIFTS)
        found["UV"] = together("{}_proj", FACTORS)
    if kernel == "chebyshev":
        found["z"] = source.linear(y, "z_proj")
        found["shift"] = torch.cat([by_degree(source.linear(y, f"{name}_proj"), settings)
                                    for name in SHIFTS])
        # Ours has the base first, then for each degree the four factors; theirs each factor alone.
        base = together("{}_base_proj", FACTORS)
        of_factors = [source.linear(y, f"{name}_basis_proj").chunk(settings["degree"])
                      for name in FACTORS]
        of_degrees = [torch.cat(factors) for factors in zip(*of_factors)]
        found["UV"] = torch.cat([base, *of_degrees])
    if kernel == "dct":
        found["spectrum"] = source.linear(y, "spec_proj")
        found["shift"] = together("{}_shift_proj", SHIFTS)
        found["UV"] = together("{}_base_proj", FACTORS)
        found["UV_basis"] = together("{}_basis_proj", FACTORS)
        found["alpha"] = source.take(f"{y}.alpha").view(1, 1)
        found["basis"] = source.take(f"{y}.cosine_basis")
        found["order"] = source.take(f"{y}.freqs")
    found["magnitude"] = torch.stack([source.take(f"{y}.{name}") for name in MAGNITUDES])
    return found


def by_degree(linear, settings):
    """The rows of a Chebyshev map of theirs, (s k) -> ours, (k s)."""
    return linear.unflatten(0, (settings["n_shifts"], -1)).transpose(0, 1).flatten(0, 1)


def stack_layers(layers, path):
    """Our state dict, with the layers stacked and the linear maps taken apart again."""
    state = {}
    for name in layers[0]:
        parts = [layer[name] for layer in layers]
        odd = [y for y, part in enumerate(parts) if part.shape != parts[0].shape]
        if odd:
            raise UserError(f"{path}: {name} of the adapter of layer {odd[0]} has another shape "
                            "than that of layer 0")
        stacked = torch.stack(parts)                                       # y o (i 1), or y ...
        if name in ("alpha", "basis", "order", "magnitude"):
            state[name] = stacked
        else:
            state[f"{name}.weight"] = stacked[..., :-1].mT                 # y i o
            state[f"{name}.bias"] = stacked[..., None, :, -1]              # y 1 o
    return state


def same_in_all(stacked, name, path):
    """A constant of every layer, (y, ...), as one."""
    if not (stacked == stacked[0]).all():
        raise UserError(f"{path}: {name} differs between the layers")
    return stacked[0]
