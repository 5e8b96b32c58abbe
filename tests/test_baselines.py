"""Injection, AdaLN and LoRA act from outside: against edited weights, hooks removed, combined."""
import dataclasses

import pytest
import tiny
import torch

from baselines import Conditioning
from hydra_ssm import FIELDS, HydraBert, Modulation
from mark_adapters import (KERNELS, adapter_size, make_adapter, modulation_spread,
                           reads_t)

CONFIG = tiny.CONFIG
T = torch.tensor([0.1, 0.6, 1.0])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return HydraBert(CONFIG).double().requires_grad_(False)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(256, (3, 21), generator=torch.Generator().manual_seed(1))


def awake(kernel, **settings):
    torch.manual_seed(2)
    return tiny.awake(make_adapter(kernel, CONFIG, mlp_dim=16, **settings)).double()


def hooks_of(model):
    return [hook for module in model.modules() for hook in module._forward_hooks]


def test_lora_equals_adding_its_product_to_the_weights(model, ids):
    adapter = awake("lora", lora_rank=3)
    edited = HydraBert(CONFIG).double().requires_grad_(False)
    edited.load_state_dict(model.state_dict())
    for y, layer in enumerate(edited.layers):
        layer.mixer.in_proj.weight += adapter.in_up[y].detach() @ adapter.in_down[y].detach()
        layer.mixer.out_proj.weight += adapter.out_up[y].detach() @ adapter.out_down[y].detach()
    torch.testing.assert_close(model(ids, adapter(T)).detach(), edited(ids), rtol=0, atol=1e-11)


@pytest.mark.parametrize("geometry", ["hypernet", "chebyshev", "dct"])
def test_lora_with_a_geometry_is_both_at_once(model, ids, geometry):
    both = awake(f"lora+{geometry}")
    edited = HydraBert(CONFIG).double().requires_grad_(False)
    edited.load_state_dict(model.state_dict())
    for y, layer in enumerate(edited.layers):
        layer.mixer.in_proj.weight += both.lora.in_up[y].detach() @ both.lora.in_down[y].detach()
        layer.mixer.out_proj.weight += both.lora.out_up[y].detach() @ both.lora.out_down[y].detach()
    want = edited(ids, both.geometry(T))
    torch.testing.assert_close(model(ids, both(T)), want, rtol=0, atol=1e-11)
    assert adapter_size(both) == adapter_size(both.lora) + adapter_size(both.geometry)
    assert set(modulation_spread(both)) == set(modulation_spread(both.geometry))
    assert isinstance(both(T).keep("none"), Conditioning) and both(T).keep("none").A is None


def test_a_static_operator_equals_edited_parameters(model, ids):
    adapter = awake("static", static_rate=2.0)
    assert adapter_size(adapter) == CONFIG.n_layer * (3 * CONFIG.nheads + 4 * CONFIG.d_state)
    edited = HydraBert(CONFIG).double().requires_grad_(False)
    edited.load_state_dict(model.state_dict())
    for y, layer in enumerate(edited.layers):
        layer.mixer.A_log += 2 * adapter.A[y, 0].detach()
        layer.mixer.dt_bias += 2 * adapter.dt[y, 0].detach()
        layer.mixer.D += 2 * adapter.D[y, 0].detach()
    changes = vars(adapter(T))
    only = Modulation(**{name: changes[name] for name in FIELDS["BC"]})
    want = edited(ids, only)
    torch.testing.assert_close(model(ids, adapter(T)).detach(), want.detach(), rtol=0, atol=1e-11)
    plain = edited(ids)
    assert not torch.allclose(want, plain)  # its B and C do something too


@pytest.mark.parametrize("geometry", ["hypernet", "chebyshev", "dct"])
def test_a_geometry_modulates_what_the_static_operator_has_made(model, ids, geometry):
    """B and C, in float64: first the static scale and shift, then the geometry's."""
    both = awake(f"static+{geometry}")
    base, m, joint = both.static(), both.geometry(T), both(T)
    v = torch.randn(CONFIG.n_layer, 3, CONFIG.d_state, generator=torch.Generator().manual_seed(4))
    v = v.double()
    for name in "BC":
        static = getattr(base, f"{name}_scale") * v + getattr(base, f"{name}_shift")
        want = getattr(m, f"{name}_scale") * static + getattr(m, f"{name}_shift")
        got = getattr(joint, f"{name}_scale") * v + getattr(joint, f"{name}_shift")
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for name in ("A", "dt", "D"):
        torch.testing.assert_close(getattr(joint, name), getattr(base, name) + getattr(m, name),
                                   rtol=0, atol=1e-12)
    beta_A = both.geometry.effective_magnitudes()[:, :1, None]
    assert ((joint.A - base.A).abs() <= beta_A).all()  # around static.A, within the paper's bound


@pytest.mark.parametrize("kernel", ["chebyshev", "adaln", "lora+dct", "static+hypernet"])
def test_a_blind_adapter_is_the_same_at_every_t(model, ids, kernel):
    blind, seeing = awake(kernel, blind=True), awake(kernel)
    assert not reads_t(blind) and reads_t(seeing) and not reads_t(awake("static"))
    at_half = model(ids, seeing(torch.full((3,), 0.5)))
    torch.testing.assert_close(model(ids, blind(T)), at_half, rtol=0, atol=0)
    assert not torch.allclose(model(ids, seeing(T)), at_half)


def test_the_combinations_start_as_the_identity_bit_for_bit(ids):
    torch.manual_seed(0)
    plain = HydraBert(CONFIG)
    for name in KERNELS:
        adapter = make_adapter(name, CONFIG, mlp_dim=16)
        with torch.no_grad():
            assert torch.equal(plain(ids, adapter(T)), plain(ids)), name


def test_nothing_stays_on_the_model_even_after_an_error(model, ids, monkeypatch):
    adapter = awake("lora")
    model(ids, adapter(T))
    assert not hooks_of(model)
    monkeypatch.setattr(type(model.layers[1].mixer), "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, adapter(T))
    assert not hooks_of(model)


@pytest.mark.parametrize("kernel", ["inject", "adaln", "lora", "lora+dct"])
def test_recomputing_layers_in_the_backward_pass_leaves_gradients_as_they_are(model, ids, kernel):
    """Hooks are gone when the backward pass begins: the recomputation has to set its own."""
    found = []
    for checkpointing in (False, True):
        adapter = awake(kernel)
        model.checkpointing = checkpointing
        model.hidden(ids, adapter(T)).square().sum().backward()
        found.append({name: p.grad for name, p in adapter.named_parameters()})
    model.checkpointing = False
    for name, gradient in found[0].items():
        assert gradient.any(), name
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=1e-14)


def test_times_of_a_sampler_are_picked_from_one_evaluation(model, ids):
    """LoRA has no t to pick; all else does."""
    index = torch.tensor([2, 0, 0])
    for kernel in ("adaln", "lora", "lora+hypernet"):
        adapter = awake(kernel)
        torch.testing.assert_close(model(ids, adapter(T).at(index)), model(ids, adapter(T[index])),
                                   rtol=0, atol=1e-11)


def test_injection_and_adaln_are_their_formulas(model, ids):
    """mixer(h + W c), and (1 + g) mixer((1 + s) h + b), layer by layer."""
    c = torch.randn(3, 128, generator=torch.Generator().manual_seed(3)).double()
    inject, adaln = awake("inject"), awake("adaln")
    states = {"inject": model.embed(ids), "adaln": model.embed(ids)}
    layers = Modulation().by_layer(model)
    silu = c * torch.sigmoid(c)
    for y, (layer, m) in enumerate(zip(model.layers, layers)):
        h = states["inject"]
        shift = c @ inject.W.weight[y] + inject.W.bias[y]
        states["inject"] = layer.norm(h + layer.mixer(h + shift[:, None], m))
        h = states["adaln"]
        scale, shift, gate = (silu @ adaln.W.weight[y] + adaln.W.bias[y]).chunk(3, -1)
        u = (1 + scale[:, None]) * h + shift[:, None]
        states["adaln"] = layer.norm(h + (1 + gate[:, None]) * layer.mixer(u, m))
    for name, adapter in (("inject", inject), ("adaln", adaln)):
        got = model.hidden(ids, adapter(c))
        torch.testing.assert_close(got, states[name], rtol=0, atol=1e-11)


def test_mixer_and_layer_know_nothing_of_baselines(model, ids):
    """A model that was never told of this file runs them: they come in through `around` alone."""
    assert not {"lora", "in_shift", "in_scale", "out_gate"} & {
        field.name for field in dataclasses.fields(Modulation)}
    plain = Modulation()
    assert plain.around(model.layers) is model.layers
