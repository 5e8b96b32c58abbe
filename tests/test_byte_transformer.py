"""The small transformer beside a plain loop, insertion of adapters, the two tasks, training."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
from data import noise_generator
from experiments import byte_transformer as bt
from experiments.hrm_adapter import HRM, Config

SETTINGS = dict(steps=2, windows=2, size=512, rank=2)


# ---- the transformer -----------------------------------------------------------------------------


def test_attention_is_a_plain_loop_over_the_window():
    """float32 in another order of summation: 1e-5. Before the text lie keys and values of zero."""
    torch.manual_seed(0)
    attention = bt.WindowAttention(8, 2, 4)
    x = torch.randn(1, 10, 8)
    nn.init.normal_(attention.bias)
    q, k, v = (project(x)[0].detach().reshape(10, 2, 4)
               for project in (attention.q, attention.k, attention.v))
    y = torch.zeros(10, 2, 4)
    for t in range(10):
        for head in range(2):
            scores, values = [], []
            for back in range(4):
                key, value = torch.zeros(4), torch.zeros(4)
                if back <= t:
                    key, value = k[t - back, head], v[t - back, head]
                scores.append(q[t, head] @ key / 2 + attention.bias[head, back])
                values.append(value)
            y[t, head] = torch.softmax(torch.stack(scores), 0) @ torch.stack(values)
    assert torch.allclose(attention(x)[0], attention.out(y.flatten(1)), atol=1e-5)


def test_the_transformer_sees_sixty_bytes_back_and_none_ahead():
    torch.manual_seed(0)
    model = bt.ByteTransformer().double()
    ids = torch.randint(256, (1, 150))
    changed = ids.clone()
    changed[0, 50] = (ids[0, 50] + 1) % 256
    differs = (model(ids) != model(changed)).any(-1)[0].nonzero()[:, 0]
    assert (differs.min(), differs.max()) == (50, 110)


def test_the_shipped_transformer_is_small_and_knows_english():
    """A licence, unlike anything it was trained on; counting its letters leaves 3.0 nats a byte."""
    assert bt.BACKBONE.stat().st_size <= 2_000_000
    text = torch.tensor(list((common.SOURCE / "LICENSE").read_bytes()))
    nats = bt.loss_by_distance(bt.ByteTransformer(bt.BACKBONE), bt.LANGUAGE, text, 8)
    assert max(nats[2:]) < 2.5


# ---- insertion -----------------------------------------------------------------------------------


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("site", ["layers.1.linear1:layers.1.linear2", "layers.1.self_attn"])
def test_torch_s_own_layer_takes_an_adapter_in_evaluation_too_and_gives_it_back(site):
    """Its fused evaluation path goes round the submodules, unless they have hooks."""
    model = encoder()
    adapter = HRM(8, 3, gate=0.7)
    x = torch.randn(2, 9, 8)
    with torch.no_grad():
        before = model(x)
        layer = model.layers[1]
        between = model.layers[0](x)
        with bt.inserted(model, {site: adapter}):
            u = layer.norm1(between)
            attended = between + layer.self_attn(u, u, u)[0]  # with the adapter, if here
            if "linear" in site:
                u = layer.norm2(attended)
                mlp = F.linear(layer.linear1(u).relu(), layer.linear2.weight, layer.linear2.bias)
                want = attended + mlp + adapter(u)
            else:
                want = attended + layer.linear2(layer.linear1(layer.norm2(attended)).relu())
            assert torch.allclose(model(x), want, atol=1e-5)
        assert torch.equal(model(x), before)
        assert not torch.allclose(want, before, atol=1e-3)


def test_the_adapter_adds_its_output_to_that_of_the_site():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7))
    adapter = HRM(7, 5, gate=0.7)
    x = torch.randn(2, 9, 7)
    plain = model(x)
    keys = list(model.state_dict())
    with bt.inserted(model, {"0": adapter}):
        assert torch.equal(model(x), plain + adapter(x))
        assert list(model.state_dict()) == keys
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("make_model, name", [
    (bt.ByteTransformer, "layers.9.mlp"),
    (lambda: nn.TransformerEncoderLayer(8, 2), "linear1")])
def test_a_wrong_name_and_a_wrong_layout_are_refused(make_model, name):
    with pytest.raises(common.UserError, match=f"at '{name}'.*batch_first=True"):
        with bt.inserted(make_model(), {name: None}):
            pass


def test_a_site_that_the_model_never_calls_is_refused():
    """torch.nn.MultiheadAttention reads the weight of its out_proj and never calls it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(common.UserError, match="never calls 'self_attn.out_proj'"):
        with bt.inserted(layer, {"self_attn.out_proj": HRM(8, 2)}):
            layer(torch.randn(1, 5, 8))


# ---- the tasks -----------------------------------------------------------------------------------


def test_recall_asks_for_a_key_that_is_seen_once():
    text = torch.randint(32, 127, (5000,))
    ids, target = bt.recall_batch(text, 4096, 128, noise_generator(0))
    assert ids.shape == target.shape == (32, 129)
    asked = target != bt.UNSCORED
    assert asked.nonzero()[:, 1].unique().tolist() == [32, 64, 96, 128]
    assert torch.equal(asked, ids == bt.CUE)
    assert torch.equal(torch.isin(ids, bt.KEYS).sum(1), torch.ones(32, dtype=torch.int64))
    assert torch.equal(bt.KEYS[target[:, 32]], ids[:, 0])
    assert len(set(target[:, 32].tolist())) == len(bt.KEYS)
    again = bt.recall_batch(text, 4096, 128, noise_generator(0))[0]
    assert torch.equal(ids, again)


def test_language_asks_for_the_next_byte():
    ids, target = bt.language_batch(torch.arange(2000), 1024, 32, noise_generator(0))
    assert ids.shape == (2, 512)
    assert torch.equal(target, ids + 1)


def test_the_losses_by_distance_are_those_of_a_plain_loop():
    """Of the answer there, or of the bytes from half as far. float32: 1e-5."""
    torch.manual_seed(0)
    model = bt.ByteTransformer()
    text = torch.randint(32, 127, (5000,))
    for task in bt.TASKS:
        ids, target = task.make_batch(text, 3 * 512, 512, noise_generator(0))
        with torch.no_grad():
            logits = model(ids)
        if task.name == "recall":
            logits = logits[..., [ord(key) for key in "<>[]"]]
        log_p = torch.log_softmax(logits.double(), -1)
        for distance, found in zip(bt.DISTANCES, bt.loss_by_distance(model, task, text, 3)):
            where = [distance] if task.name == "recall" else range(distance // 2, distance)
            nats = [-log_p[i, t, target[i, t]].item() for i in range(3) for t in where]
            assert found == pytest.approx(np.mean(nats), rel=1e-5)


# ---- training ------------------------------------------------------------------------------------


def test_training_on_recall_lowers_the_loss():
    torch.manual_seed(0)
    text = torch.randint(97, 123, (20_000,))
    model = bt.ByteTransformer(bt.BACKBONE)
    adapters = {f"layers.{y}.mlp": HRM(64, 8) for y in range(4)}
    parameters = [p for adapter in adapters.values() for p in adapter.parameters()]
    with bt.inserted(model, adapters):
        before = bt.loss_by_distance(model, bt.RECALL, text, 8)
        bt.train_on_task(model, parameters, bt.RECALL, text, Config(steps=10, lr=0.02), 0)
        after = bt.loss_by_distance(model, bt.RECALL, text, 8)
    assert np.mean(after) < np.mean(before)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_diverging_run_ends_with_one_line_that_names_the_step():
    model = bt.ByteTransformer(bt.BACKBONE)
    text = torch.randint(97, 123, (2000,))
    adapter = HRM(64, 2)
    nn.init.constant_(adapter.C, math.inf)
    with pytest.raises(common.UserError, match="step 1: the loss is nan"):
        with bt.inserted(model, {"layers.0.mlp": adapter}):
            bt.train_on_task(model, list(adapter.parameters()), bt.RECALL, text,
                             Config(**SETTINGS), 0)
