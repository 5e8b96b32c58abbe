"""The backbone against the official modules' logits and against a float64 loop over the network.

The reference below is plain numpy from a state dict in released names: no torch, no shared helper.
The released modules exponentiate A_log in float32, and so does the backbone, where the reference
does not: comparisons with it allow 1e-6 of the largest entry (A is good to 6e-8). The golden
logits, made by the official modules, are matched to 1e-8: exponentiating in float64 moves
them by 2e-9, another processor's float32 exp by as much, and any fault of structure by far more.
"""
import dataclasses
import types

import numpy as np
import pytest
import torch
from baselines import Conditioning
from checkpoint import load_backbone
from common import UserError
from helpers import FIXTURES, PREFIX, released_state, write_composer_layout, write_released_layout
from hydra_ssm import Config, HydraBert, HydraConfig, Modulation, main
from scipy.special import erf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZES = dict(vocab_size=24, d_model=8, n_layer=2, d_state=3, d_conv=5, expand=2, headdim=4,
             ngroups=1)
SHIFTS = ("A", "dt", "D")
STATE_FIELDS = SHIFTS + ("B_scale", "B_shift", "C_scale", "C_shift")
BASELINE_FIELDS = ("in_scale", "in_shift", "out_gate")
REFERENCE = 1e-6


# ------------------------------------------------------------------------- the reference, in numpy

def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred ** 2).mean(-1, keepdims=True) + eps) * weight + bias


def silu(x):
    return x / (1 + np.exp(-x))


def reference_mixer(u, w, cfg, real, mod):
    """One layer on one sequence: u (l, d), real (l,) bool, w and mod of this layer and sequence."""
    length, d_inner = len(u), cfg.expand * cfg.d_model
    h, g, n, p = d_inner // cfg.headdim, cfg.ngroups, cfg.d_state, cfg.headdim
    w_in, w_out = w["in_proj.weight"], w["out_proj.weight"]
    if "lora" in mod:
        in_down, in_up, out_down, out_up = mod["lora"]
        w_in, w_out = w_in + in_up @ in_down, w_out + out_up @ out_down
    packed = u @ w_in.T
    z, convolved, dt = np.split(packed, [d_inner, 2 * d_inner + 4 * g * n], axis=1)

    taps, half = cfg.d_conv, cfg.d_conv // 2               # a two-sided window around each position
    xbc = np.zeros_like(convolved)
    for i in range(length):
        for k in range(taps):
            j = i + k - half
            if 0 <= j < length and real[j]:
                xbc[i] += w["conv1d.weight"][:, 0, k] * convolved[j]
    xbc = silu(xbc + w["conv1d.bias"])
    x = xbc[:, :d_inner]
    b_and_c = xbc[:, d_inner:].reshape(length, 4, g * n)   # B_fwd, C_fwd, B_bwd, C_bwd
    B = b_and_c[:, 0::2] * mod.get("B_scale", 1) + mod.get("B_shift", 0)
    C = b_and_c[:, 1::2] * mod.get("C_scale", 1) + mod.get("C_shift", 0)

    A = -np.exp(w["A_log"] + mod.get("A", 0))
    dt = np.logaddexp(0, dt.reshape(length, 2, h) + w["dt_bias"] + mod.get("dt", 0))
    dt[~real] = 0
    diagonal = w["D"] + mod.get("D", 0) + x @ w["fc_D.weight"].T

    y = np.zeros((length, d_inner))
    for j in range(h):
        group = j // (h // g)
        columns, states = slice(j * p, (j + 1) * p), slice(group * n, (group + 1) * n)
        y[:, columns] = diagonal[:, j:j + 1] * x[:, columns]
        for way, order, step in ((0, range(length), 1), (1, range(length)[::-1], -1)):
            state = np.zeros((p, n))
            for i in order:
                inflow = dt[i, way, j] * np.outer(x[i, columns], B[i, way, states])
                state = np.exp(dt[i, way, j] * A[j]) * state + inflow
                if 0 <= i + step < length:
                    y[i + step, columns] += state @ C[i, way, states]
    y = y / np.sqrt((y ** 2).mean(-1, keepdims=True) + 1e-5) * w["norm.weight"]
    return (y * silu(z)) @ w_out.T


def reference_logits(state, cfg, ids, real=None, modulation=None):
    """Logits (b, l, v) from released names; modulation: field -> (y, b, ...), or lora's four."""
    w = {k.removeprefix("model."): v.numpy().astype(np.float64) for k, v in state.items()}
    modulation = modulation or {}
    embedding, cls = "bert.embeddings", "cls.predictions"
    table = w[f"{embedding}.word_embeddings.weight"][:cfg.vocab_size]
    out = []
    for s, row in enumerate(ids):
        here = np.ones(len(row), bool) if real is None else np.asarray(real[s], bool)
        hid = table[row] + w[f"{embedding}.token_type_embeddings.weight"][0]
        hid = layer_norm(hid, w[f"{embedding}.LayerNorm.weight"],
                         w[f"{embedding}.LayerNorm.bias"], 1e-12)
        for y in range(cfg.n_layer):
            prefix = f"bert.encoder.layer.{y}.layer."
            own = {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}
            mixer = {k.removeprefix("mixer."): v for k, v in own.items() if k.startswith("mixer.")}
            mod = {k: [part[y] for part in v] if k == "lora" else v[y, s]
                   for k, v in modulation.items()}
            u = hid * (1 + mod.get("in_scale", 0)) + mod.get("in_shift", 0)
            change = reference_mixer(u, mixer, cfg, here, mod) * (1 + mod.get("out_gate", 0))
            hid = layer_norm(hid + change, own["norm.weight"], own["norm.bias"], 1e-5)
        hid = hid @ w[f"{cls}.transform.dense.weight"].T + w[f"{cls}.transform.dense.bias"]
        hid = hid * (1 + erf(hid / np.sqrt(2))) / 2
        hid = layer_norm(hid, w[f"{cls}.transform.LayerNorm.weight"],
                         w[f"{cls}.transform.LayerNorm.bias"], 1e-12)
        out.append(hid @ table.T + w[f"{cls}.decoder.bias"][:cfg.vocab_size])
    return np.stack(out)


# ----------------------------------------------------------------------------------------- helpers

def config_of(**changes):
    return types.SimpleNamespace(**SIZES | changes)


def build(tmp_path, seed=0, **changes):
    """(model in float64, its state in released names, its sizes)."""
    cfg = config_of(**changes)
    state = released_state(cfg, seed)
    write_composer_layout(tmp_path / "w.pt", state)
    model = load_backbone(tmp_path / "w.pt", dtype=torch.float64)
    if cfg.ngroups > 1:  # shapes cannot tell 2 groups of n from 1 of 2n: same tensors, regrouped
        regrouped = dataclasses.replace(model.config, ngroups=cfg.ngroups, d_state=cfg.d_state)
        grouped = HydraBert(regrouped).double().eval().requires_grad_(False)
        grouped.load_state_dict(model.state_dict())
        model = grouped
    return model, state, cfg


def random_ids(cfg, b, length, seed=0):
    return torch.randint(cfg.vocab_size, (b, length), generator=torch.Generator().manual_seed(seed))


def random_modulation(cfg, b, fields=STATE_FIELDS, seed=0, size=0.3):
    draw = torch.Generator().manual_seed(seed)
    d_inner = cfg.expand * cfg.d_model
    h, bc = d_inner // cfg.headdim, cfg.ngroups * cfg.d_state
    width = dict.fromkeys(SHIFTS, h) | dict.fromkeys(BASELINE_FIELDS, cfg.d_model)

    def normal(*shape):
        return size * torch.randn(cfg.n_layer, *shape, generator=draw, dtype=torch.float64)

    mod = {name: normal(b, width.get(name, bc)) + ("_scale" in name and name[0] in "BC")
           for name in STATE_FIELDS + BASELINE_FIELDS}
    packed = 2 * d_inner + 4 * bc + 2 * h
    mod["lora"] = (normal(2, cfg.d_model), normal(packed, 2),
                   normal(2, d_inner), normal(cfg.d_model, 2))
    return {name: mod[name] for name in fields}


def modulation_of(mod):
    """A Modulation of the fields in a dict; a Conditioning where a baseline's are among them."""
    kind = Modulation if set(mod) <= set(STATE_FIELDS) else Conditioning
    return kind(**mod)


def as_numpy(modulation):
    return {k: [part.numpy() for part in v] if k == "lora" else v.detach().numpy()
            for k, v in modulation.items()}


def assert_close(got, want, tolerance):
    got, want = torch.as_tensor(got).double(), torch.as_tensor(want).double()
    assert got.shape == want.shape and torch.isfinite(got).all()
    error, scale = (got - want).abs().max().item(), want.abs().max().item()
    assert error <= tolerance * scale, f"{error:.3e} at scale {scale:.3e}"


# ------------------------------------------------------------------------------------------- tests

@pytest.mark.parametrize("dtype, tolerance", ((torch.float64, 1e-8), (torch.float32, 2e-5)))
def test_logits_of_the_official_modules_are_matched(dtype, tolerance):
    golden = np.load(FIXTURES / "hydra_bert_small.npz")
    model = load_backbone(FIXTURES / "hydra_bert_small.pt", dtype=dtype, vocab_size=90)
    logits = model(torch.from_numpy(golden["input_ids"]))
    assert logits.dtype == dtype and logits.shape == (2, 50, 90)
    error = np.abs(logits.double().numpy() - golden["logits_float64"][..., :90]).max()
    assert error < tolerance


@pytest.mark.parametrize("changes, length", (
    ({}, 11), ({}, 1), ({"n_layer": 1, "d_conv": 7, "headdim": 2, "expand": 3}, 9),
    ({"ngroups": 2, "d_state": 2, "headdim": 2}, 10),
    ({"d_conv": 3, "headdim": 16, "d_state": 9}, 70)))
def test_the_whole_network_equals_the_numpy_loop(tmp_path, changes, length):
    model, state, cfg = build(tmp_path, **changes)
    ids = random_ids(cfg, 2, length)
    assert_close(model(ids), reference_logits(state, cfg, ids.numpy()), REFERENCE)
    mod = random_modulation(cfg, 2)
    assert_close(model(ids, modulation_of(mod)),
                 reference_logits(state, cfg, ids.numpy(), modulation=as_numpy(mod)), REFERENCE)


@pytest.mark.parametrize("field", STATE_FIELDS + BASELINE_FIELDS + ("lora",))
def test_each_modulated_field_alone_equals_the_numpy_loop(tmp_path, field):
    model, state, cfg = build(tmp_path)
    ids, mod = random_ids(cfg, 2, 7), random_modulation(cfg, 2, (field,))
    want = reference_logits(state, cfg, ids.numpy(), modulation=as_numpy(mod))
    assert_close(model(ids, modulation_of(mod)), want, REFERENCE)
    assert not np.allclose(want, model(ids).numpy(), rtol=0, atol=1e-3), "the field changed nothing"


def test_all_fields_together_with_padding_equal_the_numpy_loop(tmp_path):
    model, state, cfg = build(tmp_path)
    ids = random_ids(cfg, 2, 9)
    real = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    mod = random_modulation(cfg, 2, STATE_FIELDS + BASELINE_FIELDS + ("lora",))
    want = reference_logits(state, cfg, ids.numpy(), real.numpy(), as_numpy(mod))
    got = model(ids, modulation_of(mod), attention_mask=real)
    assert_close(got[real.bool()], want[real.bool().numpy()], REFERENCE)


@pytest.mark.parametrize("field", STATE_FIELDS + BASELINE_FIELDS)
def test_gradients_of_a_modulation_equal_differences_of_the_numpy_loop(tmp_path, field):
    """Central differences of a weighted sum of logits along a random direction, with step 1e-4:
    an error of 1e-8 times the third derivative, and 1e-7 from A in float32; 1e-5 is allowed."""
    model, state, cfg = build(tmp_path, n_layer=2)
    ids, mod = random_ids(cfg, 2, 6), random_modulation(cfg, 2)
    mod |= random_modulation(cfg, 2, (field,), seed=1)
    weight = torch.randn(2, 6, cfg.vocab_size, generator=torch.Generator().manual_seed(2)).double()
    leaf = mod[field].clone().requires_grad_()
    (model(ids, modulation_of(mod | {field: leaf})) * weight).sum().backward()
    for seed in (3, 4):
        direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(seed)).double()
        ends = [(reference_logits(state, cfg, ids.numpy(), modulation=as_numpy(
            mod | {field: mod[field] + sign * 1e-4 * direction})) * weight.numpy()).sum()
            for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / 2e-4
        got = (leaf.grad * direction).sum().item()
        assert abs(got - slope) < 1e-5 * (abs(slope) + leaf.grad.norm().item())


@pytest.mark.parametrize("dtype, tolerance", ((torch.float64, 1e-12), (torch.float32, 1e-5)))
def test_padding_is_exact(tmp_path, dtype, tolerance):
    """A padded batch gives each sequence the logits it has alone, on either side, for any pad."""
    write_released_layout(tmp_path / "w.pt", config_of(d_conv=7))
    model = load_backbone(tmp_path / "w.pt", dtype=dtype)
    lengths, width = (3, 40, 65, 70), 72
    mod = random_modulation(config_of(), len(lengths))
    rows = [random_ids(config_of(), 1, length, seed=length) for length in lengths]
    for pad_id in (0, 23):
        for side in ("right", "left"):
            ids = torch.full((len(rows), width), pad_id)
            real = torch.zeros(len(rows), width, dtype=torch.long)
            for i, row in enumerate(rows):
                start = 0 if side == "right" else width - row.shape[1]
                ids[i, start:start + row.shape[1]] = row
                real[i, start:start + row.shape[1]] = 1
            for modulation in (None, mod):
                batch = model(ids, modulation and modulation_of(modulation), attention_mask=real)
                for i, row in enumerate(rows):
                    own = modulation and modulation_of({k: v[:, i:i + 1] for k, v in mod.items()})
                    assert_close(batch[i][real[i].bool()], model(row, own)[0], tolerance)
    unmasked = model(ids)[0][real[0].bool()]
    assert not torch.allclose(unmasked, model(rows[0])[0], atol=1e-2), "pads matter without a mask"


def test_no_pads_in_the_mask_means_no_mask(tmp_path):
    model, _, cfg = build(tmp_path)
    ids = random_ids(cfg, 2, 8)
    assert torch.equal(model(ids, attention_mask=torch.ones(2, 8)), model(ids))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_zero_shifts_and_unit_scales_equal_no_modulation_bit_for_bit(dtype):
    model = load_backbone(FIXTURES / "hydra_bert_small.pt", dtype=dtype, vocab_size=90)
    cfg, ids = model.config, torch.arange(60).view(2, 30)
    fields = STATE_FIELDS + BASELINE_FIELDS + ("lora",)
    zeros = random_modulation(cfg, 2, fields, size=0.0)
    zeros = {k: tuple(p.float() for p in v) if k == "lora" else v.float() for k, v in zeros.items()}
    frozen = model(ids)
    assert frozen.dtype == dtype
    assert torch.equal(model(ids, Modulation()), frozen)
    assert torch.equal(model(ids, modulation_of(zeros)), frozen)
    only_state = {k: zeros[k] for k in STATE_FIELDS}
    assert torch.equal(model(ids, modulation_of(only_state)), frozen)


def bfloat16_layer():
    """The fixture's first layer in bfloat16, its model, and an input."""
    model = load_backbone(FIXTURES / "hydra_bert_small.pt", dtype=torch.bfloat16, vocab_size=90)
    u = model.embed(torch.arange(90).view(2, 45))                         # b l d
    return model, model.layers[0], u


@pytest.mark.parametrize("field", STATE_FIELDS[3:])
def test_a_factor_or_shift_below_bfloat16_s_steps_is_applied(field):
    """1.003 lies between two bfloat16 numbers, 1 and 1.0078; what it makes of B or C is rounded to
    them once, so the change is right on average, and each entry is the nearest."""
    model, layer, u = bfloat16_layer()
    shape = (model.config.n_layer, 2, model.config.ngroups * model.config.d_state)
    value = torch.full(shape, 1.003 if field.endswith("scale") else 0.0)
    at = 4 if field.startswith("B") else 5                                # in z, x, dt, A, B, C, D
    if field.endswith("shift"):
        value += 1.003  # beside a factor that removes what it is added to
        factors = {field: value, field.replace("shift", "scale"): torch.zeros(shape)}
    else:
        factors = {field: value}
    plain = layer.mixer.project(u, Modulation().by_layer(model)[0])[at].double()
    got = layer.mixer.project(u, Modulation(**factors).by_layer(model)[0])[at]
    want = value.flatten()[0].double() * (plain if field.endswith("scale") else 1) + 0 * plain
    assert got.dtype == torch.bfloat16
    if field.endswith("scale"):
        assert ((got / plain).mean() - 1.003).abs() < 1e-3
    assert (got == want.bfloat16()).double().mean() > 0.999


@pytest.mark.parametrize("field", BASELINE_FIELDS)
def test_a_baseline_s_scale_below_bfloat16_s_steps_is_applied(field):
    """As (1 + 0.003): what enters the mixer, and what leaves it for the residual sum."""
    model, layer, u = bfloat16_layer()
    d = model.config.d_model
    value = torch.full((model.config.n_layer, 2, d), 0.003)
    seen = {}

    def enters(module, inputs):
        seen["u"] = inputs[0].double()

    def leaves(module, inputs, output):
        seen["out"] = output.double()
    layer.mixer.register_forward_pre_hook(enters)
    layer.mixer.register_forward_hook(leaves)
    layer.add_norm = lambda h, out: seen.update(change=out.double()) or h
    m = Modulation().by_layer(model)[0]
    conditioned, *_ = Conditioning(**{field: value}).around(model.layers)
    conditioned(u, m, None)
    exact = value[0, 0, 0].double()
    if field == "in_scale":
        got, want = seen["u"], u.double() * (1 + exact)
    elif field == "in_shift":
        got, want = seen["u"], u.double() + exact
    else:
        got, want = seen["change"], seen["out"] * (1 + exact)
    assert (got == want.bfloat16().double()).double().mean() > 0.995
    assert ((got - want) / want).mean().abs() < 1e-3


@pytest.mark.parametrize("field, parameter", (("A", "A_log"), ("dt", "dt_bias"), ("D", "D")))
def test_a_shift_equals_editing_the_weight(tmp_path, field, parameter):
    cfg = config_of()
    state = released_state(cfg)
    shift = random_modulation(cfg, 1, (field,))[field].float()            # y 1 h
    edited = state | {f"{PREFIX}.{y}.layer.mixer.{parameter}":
                      state[f"{PREFIX}.{y}.layer.mixer.{parameter}"] + shift[y, 0]
                      for y in range(cfg.n_layer)}
    for name, tensors in (("plain.pt", state), ("edited.pt", edited)):
        write_composer_layout(tmp_path / name, tensors)
    ids = random_ids(cfg, 1, 12)
    plain = load_backbone(tmp_path / "plain.pt")
    want = load_backbone(tmp_path / "edited.pt")(ids)
    assert_close(plain(ids, modulation_of({field: shift})), want, 1e-6)    # the same float32 sum
    assert not torch.allclose(plain(ids), want, atol=1e-3)


def test_each_sequence_gets_its_own_modulation(tmp_path):
    model, _, cfg = build(tmp_path)
    ids = random_ids(cfg, 3, 10)
    mod = random_modulation(cfg, 3, STATE_FIELDS + BASELINE_FIELDS)
    together = model(ids, modulation_of(mod))
    for i in range(3):
        alone = modulation_of({k: v[:, i:i + 1] for k, v in mod.items()})
        assert_close(model(ids[i:i + 1], alone), together[i:i + 1], 1e-12)


@pytest.mark.parametrize("mode, kept", (
    ("full", STATE_FIELDS), ("none", ()), ("A", ("A",)), ("dt", ("dt",)), ("D", ("D",)),
    ("BC", STATE_FIELDS[3:]), ("all-except-A", STATE_FIELDS[1:]),
    ("all-except-dt", ("A",) + STATE_FIELDS[2:])))
def test_a_mode_keeps_exactly_what_it_names(mode, kept):
    mod = modulation_of(random_modulation(config_of(), 2))
    left = mod.keep(mode)
    for name in STATE_FIELDS:
        assert getattr(left, name) is (getattr(mod, name) if name in kept else None), name
    assert all(getattr(mod, name) is not None for name in STATE_FIELDS), "the original was changed"
    with pytest.raises(UserError, match="bc"):
        mod.keep("bc")


def test_the_head_works_on_any_leading_shape_and_completes_hidden(tmp_path):
    model, _, cfg = build(tmp_path)
    ids, mod = random_ids(cfg, 2, 6), modulation_of(random_modulation(cfg, 2))
    hidden = model.hidden(ids, mod)
    assert hidden.shape == (2, 6, cfg.d_model)
    logits = model(ids, mod)
    assert_close(model.head(hidden), logits, 1e-13)
    assert_close(model.head(hidden[1, 2]), logits[1, 2], 1e-13)
    picked = torch.tensor([[True, False] * 3, [False] * 6])
    assert_close(model.head(hidden[picked]), logits[picked], 1e-13)


def test_every_parameter_of_a_new_model_gets_a_gradient():
    torch.manual_seed(0)
    model = HydraBert(HydraConfig(vocab_size=20, d_model=16, n_layer=2, d_state=4, headdim=8))
    logits = model(torch.randint(20, (2, 12)))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(20, (24,))).backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().max() > 0, name


def test_the_full_size_has_the_released_number_of_parameters():
    with torch.device("meta"):
        model = HydraBert(HydraConfig())
    assert model.config.nheads == 24 and model.config.d_inner == 1536
    assert sum(p.numel() for p in model.parameters()) == 112_082_098


class Touched(TorchDispatchMode):
    """Sizes of what operations on given tensors, or on views of them, make; views do not count."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.sizes, self.operations = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += not func.is_view
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs))
                 if isinstance(x, torch.Tensor)}
        if given & self.storages and not func.is_view:
            self.sizes.append(out.numel())
        return out


def test_applying_a_modulation_costs_five_small_operations_a_layer(tmp_path):
    cfg = config_of(n_layer=12)
    write_released_layout(tmp_path / "w.pt", cfg)
    model = load_backbone(tmp_path / "w.pt")
    ids, mod = random_ids(cfg, 2, 16), random_modulation(cfg, 2)
    modulation = Modulation(**{k: v.float() for k, v in mod.items()})
    with torch.no_grad(), Touched(vars(modulation).values()) as touched:
        model(ids, modulation)
    assert len(touched.sizes) == 5 * cfg.n_layer
    heads, states = 2 * model.config.nheads, 2 * 16 * 2 * cfg.d_state     # b h, b l d n
    assert sorted(touched.sizes) == sorted(cfg.n_layer * [heads] * 3 + cfg.n_layer * [states] * 2)
    with torch.no_grad(), Touched([torch.zeros(1)]) as frozen:
        model(ids)
    assert frozen.operations - touched.operations <= 7  # its zeros and ones are made first


def test_the_command_shows_the_ranks_of_the_matrix_of_eq_11(capsys):
    result = main(Config(seqlen=20, d_state=3))
    assert max(result["ranks"]) == 3 and result["released"] == 112_082_098
    assert "at most 3" in capsys.readouterr().out


@pytest.mark.parametrize("settings, words", (
    ({"headdim": 1000}, "--headdim: got 1000, need a divisor of 128, which is 2 times d_model"),
    ({"headdim": 48}, "--headdim: got 48, need a divisor of 128"),
    ({"seqlen": 1}, "--seqlen: got 1, need at least 2")))
def test_sizes_that_do_not_fit_are_one_line(settings, words):
    with pytest.raises(UserError, match=words):
        main(Config(**settings))


def test_the_mixer_matrix_is_quasiseparable_and_times_x_is_y(tmp_path):
    model, _, cfg = build(tmp_path, d_state=2, headdim=4)
    mixer = model.layers[1].mixer
    u = torch.randn(1, 9, cfg.d_model, dtype=torch.float64)
    m = Modulation(**random_modulation(cfg, 1)).by_layer(model)[1]
    M = mixer.matrix(u, m)                                                # h l l
    _, x, dt, A, B, C, D = mixer.project(u, m)
    for i in range(9):  # straight from the recurrence: forward below, backward above the diagonal
        for j in range(9):
            way, between = (0, range(j + 1, i)) if i > j else (1, range(i + 1, j))
            for head in range(len(M)):
                want = D[0, i, head]
                if i != j:
                    source, reader = (i - 1, i + 1)[way], j
                    decay = sum(dt[0, k, way, head] * A[0, head] for k in between)
                    want = dt[0, reader, way, head] * torch.exp(torch.as_tensor(decay)) * (
                        C[0, source, way, 0] @ B[0, reader, way, 0])
                torch.testing.assert_close(M[head, i, j], want, rtol=1e-6, atol=1e-12)
