"""The paper's own checkpoints and its sliced backbone: numbers of its public code, faults named.

fixtures/public_code_*.safetensors hold random weights under that code's names and what its modules
returned for them, in float64 and in bfloat16 (github.com/ibitec7/mark, commit 18a855b).
"""
import contextlib
import dataclasses
import json
import math
import os
import time

import pytest
import tiny
import torch
from helpers import (FIXTURES, ROOT, public_code_state, write_lightning_layout,
                     write_released_layout)
from safetensors import safe_open

import checkpoint
import common
import evaluate
import markov
import text
import train
from cart import cart_loss, cart_weights
from chunk_scan import bidirectional_scan, narrow_heads
from checkpoint import load_adapter, load_adapters, load_backbone, save_adapter
from experiments import pretrain
from hydra_ssm import MODES, HydraBert, HydraConfig
from mark_adapters import GEOMETRIES, adapter_size, make_adapter
from published import SlicedHydra, sliced_backbone

CONFIG = HydraConfig(vocab_size=50, d_model=64, n_layer=2, d_state=24, headdim=32)  # 4 heads
FIELDS = ("A", "dt", "D", "B_scale", "B_shift", "C_scale", "C_shift")
ADAPTER = "inner.hydra.encoder.layer.{}.layer.mixer.mark."
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]])


def golden(name):
    """(the tensors, the metadata) of a fixture."""
    with safe_open(FIXTURES / f"public_code_{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()


def adapter_of(kernel, bf16=False):
    """The fixture's adapter as a run saves it; of a bf16-true run its constants are bfloat16."""
    tensors = {key: v for key, v in golden(kernel)[0].items() if key.startswith("inner.")}
    return {key: v.bfloat16() if bf16 else v for key, v in tensors.items()}


def write(path, kernel, bf16=False, config=CONFIG, without=(), **extra):
    """A whole checkpoint around the fixture's adapter; returns its state_dict."""
    state = public_code_state(adapter_of(kernel, bf16), config)
    state = {key: v for key, v in state.items() if key.partition(".")[2] not in without}
    write_lightning_layout(path, state | extra)
    return state


def refusal(load, *arguments):
    """The one line of the UserError that a call ends with."""
    with pytest.raises(common.UserError) as caught:
        load(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 400, message
    return message


# ---- the adapter of a checkpoint -----------------------------------------------------------------


@pytest.mark.parametrize("kernel", GEOMETRIES)
def test_an_adapter_gives_what_the_public_code_gave_in_float64(tmp_path, kernel):
    """1 - t is what that code feeds. 1e-10: the angle reaches 1,000, in 16 digits."""
    write(tmp_path / "best.ckpt", kernel)
    adapter, about = load_adapter(tmp_path / "best.ckpt", CONFIG, dtype=torch.float64)
    tensors, _ = golden(kernel)
    found = adapter(1 - tensors["timestep_ratio"])
    for field in FIELDS:
        difference = (getattr(found, field) - tensors[f"out.{field}"]).abs().max()
        assert difference < 1e-10, (field, difference)
    assert (adapter.kernel, about) == (kernel, {})


@pytest.mark.parametrize("kernel", GEOMETRIES)
def test_an_adapter_of_a_bf16_true_run_gives_what_that_gave(tmp_path, kernel):
    """2e-2: bfloat16 keeps 8 bits, of numbers up to 2. Without the rounded angle it is 20 times as
    much: its steps of 4 radians are the one thing that the loader has to repeat.
    """
    write(tmp_path / "best.ckpt", kernel, bf16=True)
    adapter, _ = load_adapter(tmp_path / "best.ckpt", CONFIG)
    assert adapter.settings["rounded_angle"]
    tensors, _ = golden(kernel)
    t = 1 - tensors["timestep_ratio"].float()
    differences = []
    for rounded in (True, False):
        adapter.timestep.rounded_angle = rounded
        found = adapter(t)
        differences.append(max((getattr(found, f) - tensors[f"out_bfloat16.{f}"]).abs().max()
                               for f in FIELDS))
    assert differences[0] < 2e-2 and differences[1] > 0.1, differences


@pytest.mark.parametrize("kernel", GEOMETRIES)
def test_sizes_and_conventions_are_read_off_the_file_and_recorded(tmp_path, kernel):
    """And the adapter is saved and loaded like any other."""
    write(tmp_path / "best.ckpt", kernel, bf16=True)
    model = load_backbone(tmp_path / "best.ckpt")
    adapter, _ = load_adapter(tmp_path / "best.ckpt", model.config)
    sizes = json.loads(golden(kernel)[1]["sizes"])
    want = {"n_shifts": sizes["n_heads"], "mlp_dim": 32, "rank": 2, "mlp_norm": False,
            "init": "published", "reversed_t": True, "rounded_angle": True, "stored_buffers": True}
    if kernel == "chebyshev":
        want |= {"degree": 5, "bounded_z": False}
    if kernel == "dct":
        want |= {"n_freqs": 8, "timepoints": 64}
    assert adapter.settings == want
    assert adapter.backbone == model.config.weights != ""
    save_adapter(tmp_path / "again.safetensors", adapter)
    again, _ = load_adapter(tmp_path / "again.safetensors", model.config)
    t = torch.tensor([0.0, 0.3, 0.99])
    for field in FIELDS:
        assert torch.equal(getattr(again(t), field), getattr(adapter(t), field))


def test_cart_weights_and_loss_are_those_of_the_public_code():
    """1e-12: a convolution of 96 terms in float64, summed in another order."""
    tensors, about = golden("cart")
    masked, ce = tensors["masked"].bool(), tensors["cross_entropy"]          # n l
    for i, p in enumerate(json.loads(about["p"])):
        w = cart_weights(masked, p, dtype=torch.float64)
        assert (w - tensors["weights"][i]).abs().max() < 1e-12
        losses = [cart_loss(ce[n:n + 1], masked[n:n + 1], w[n:n + 1]) for n in range(len(masked))]
        # It adds 1e-8 to every weight, so that none is zero: 1e-8 times a loss of a few nats.
        torch.testing.assert_close(torch.stack(losses), tensors["loss"][i], rtol=0, atol=1e-7)


# ---- the backbone of a checkpoint ----------------------------------------------------------------


def test_the_backbone_of_a_checkpoint_has_its_own_weights_and_a_silu_head(tmp_path):
    state = write(tmp_path / "best.ckpt", "hypernet")
    model = load_backbone(tmp_path / "best.ckpt")
    assert isinstance(model, SlicedHydra) and "NOT the released" in model.misreading
    assert dataclasses.replace(model.config, weights="", chunk_size=64) == CONFIG
    in_proj = state["inner.hydra.encoder.layer.1.layer.mixer.in_proj.weight"]
    assert torch.equal(model.layers[1].mixer.in_proj.weight, in_proj.float())
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    inner = model.head_dense(hidden)
    want = model.head_norm(inner * torch.sigmoid(inner)) @ model.word_embeddings.weight.T
    torch.testing.assert_close(model.head(hidden), want + model.decoder_bias)
    sliced_again = load_backbone(tmp_path / "best.ckpt", sliced=True)
    assert torch.equal(sliced_again(IDS), model(IDS)), "it is sliced already"


def test_slicing_while_loading_is_slicing_what_was_loaded(tmp_path):
    tiny.write_inputs(tmp_path)
    model = load_backbone(tmp_path / "backbone.safetensors")
    sliced = load_backbone(tmp_path / "backbone.safetensors", sliced=True)
    by_hand = sliced_backbone(model)
    assert torch.equal(sliced(IDS), by_hand(IDS)) and not torch.equal(sliced(IDS), model(IDS))
    assert dataclasses.replace(sliced.config, weights="") == by_hand.config
    assert sliced.config.weights not in ("", model.config.weights)
    odd = HydraConfig(20, d_model=6, n_layer=1, d_state=2, headdim=4, chunk_size=32)  # 3 heads
    assert "3 heads" in refusal(sliced_backbone, HydraBert(odd))


def test_the_sliced_backbone_is_the_one_of_the_public_code_row_by_row(tmp_path):
    tiny.write_inputs(tmp_path)
    model = load_backbone(tmp_path / "backbone.safetensors")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    sliced = sliced_backbone(model)
    full, half = tiny.CONFIG, sliced.config
    assert (half.nheads, half.headdim) == (full.nheads // 2, 2 * full.headdim)
    rows = 2 * full.d_inner + 4 * full.d_state           # of z, x, B and C
    for layer, whole in zip(sliced.layers, model.layers):
        old, new = whole.mixer.in_proj.weight, layer.mixer.in_proj.weight
        assert torch.equal(new[:rows], old[:rows])
        forward = old[rows:rows + full.nheads]           # of the forward dt: 4 heads
        assert torch.equal(new[rows:], forward)          # its second half now is the backward dt
        for name in ("A_log", "dt_bias", "D"):
            assert torch.equal(getattr(layer.mixer, name), getattr(whole.mixer, name)[:half.nheads])
        assert torch.equal(layer.mixer.fc_D.weight, whole.mixer.fc_D.weight[:half.nheads])
        assert torch.equal(layer.mixer.out_proj.weight, whole.mixer.out_proj.weight)
    hidden = torch.randn(3, full.d_model, generator=torch.Generator().manual_seed(0))
    inner = sliced.head_dense(hidden)
    want = sliced.head_norm(inner * torch.sigmoid(inner)) @ sliced.word_embeddings.weight.T
    torch.testing.assert_close(sliced.head(hidden), want + sliced.decoder_bias)
    assert not torch.allclose(sliced.head(hidden), model.head(hidden), atol=1e-3)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert (HydraConfig(headdim=128).d_in_proj, HydraConfig(headdim=128).nheads) == (3352, 12)


def test_an_adapter_of_the_sliced_model_is_not_loaded_into_the_whole_one(tmp_path):
    """Both have 12 shifts where there are 24 heads and 12, so shapes cannot tell."""
    whole = HydraConfig(20, d_model=48, n_layer=1, d_state=4, headdim=4, chunk_size=32)  # 24 heads
    pretrain.save_backbone(tmp_path / "b.safetensors", HydraBert(whole))
    models = [load_backbone(tmp_path / "b.safetensors", sliced=sliced) for sliced in (False, True)]
    for model, other in (models, models[::-1]):
        adapter = make_adapter("dct", model.config, mlp_dim=8)
        save_adapter(tmp_path / "a.safetensors", adapter)
        load_adapter(tmp_path / "a.safetensors", model.config)
        said = refusal(load_adapter, tmp_path / "a.safetensors", other.config)
        assert "belongs to another backbone" in said


def test_a_checkpoints_adapter_is_refused_by_a_backbone_with_other_heads(tmp_path):
    write(tmp_path / "best.ckpt", "chebyshev")
    other = dataclasses.replace(CONFIG, headdim=16)
    said = refusal(load_adapter, tmp_path / "best.ckpt", other)
    assert "4 heads of 32" in said and "8 of 16" in said
    # And so is a backbone whose weights are others.
    stranger = dataclasses.replace(CONFIG, weights="0" * 64)
    assert "belongs to another backbone" in refusal(load_adapter, tmp_path / "best.ckpt", stranger)
    # Within one file too.
    write(tmp_path / "odd.ckpt", "chebyshev", config=other)
    assert "4 heads and its backbone has 8" in refusal(load_adapter, tmp_path / "odd.ckpt", other)


@pytest.mark.parametrize("per_sample", [False, True])
def test_wide_heads_as_several_narrow_ones_give_the_same_scan_and_gradients(per_sample):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    A = normal(2, 3) if per_sample else normal(3)
    x, dt, B, C, D = (normal(2, 9, 3, 8), normal(2, 9, 2, 3), normal(2, 9, 2, 1, 5),
                      normal(2, 9, 2, 1, 5), normal(2, 9, 3))
    inputs = (x, dt.exp(), -A.exp(), B, C, D)
    narrow = narrow_heads(*inputs, 4)
    assert narrow[0].shape == (2, 9, 6, 4) and narrow_heads(*inputs, 8) == inputs
    weight = normal(2, 9, 3, 8).detach()
    found = []
    for y in (bidirectional_scan(*inputs, 4), bidirectional_scan(*narrow, 4).reshape(x.shape)):
        found.append([y, *torch.autograd.grad((y * weight).sum(), (x, dt, A, B, C, D),
                                              retain_graph=True)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", GEOMETRIES)
def test_each_missing_tensor_of_an_adapter_is_named(tmp_path, kernel):
    for key in adapter_of(kernel):
        name = key.removeprefix("inner.")
        if ".layer.1." in key and name.endswith("bias"):
            continue  # the same code as for the weight
        write(tmp_path / "best.ckpt", kernel, without=(name,))
        said = refusal(load_adapter, tmp_path / "best.ckpt", CONFIG)
        short = name.rpartition("mark.")[2].removeprefix("hydra.embeddings.")
        stem = short.removesuffix(".weight").removesuffix(".bias")
        assert stem in said, (name, said)


@pytest.mark.parametrize("load", [load_backbone, lambda path: load_adapter(path, CONFIG)])
@pytest.mark.parametrize("extra", [
    "inner.hydra.pooler.dense.weight", "inner.hydra.encoder.mark.mod_list.0.A_beta",
    "inner.hydra.encoder.layer.1.layer.mixer.mark.colour", "other.thing", "teacher.cls.x"])
def test_an_extra_tensor_is_named(tmp_path, extra, load):
    write(tmp_path / "best.ckpt", "hypernet", **{extra: torch.ones(2)})
    of_the_adapter_alone = extra.endswith("colour") and load is load_backbone
    if of_the_adapter_alone:
        load(tmp_path / "best.ckpt")
        return
    of_the_backbone = "pooler" in extra or "mod_list" in extra
    if of_the_backbone and load is not load_backbone:
        return  # it is the backbone's loading that names it
    assert extra.rpartition(".")[2] in refusal(load, tmp_path / "best.ckpt")


def test_two_copies_that_differ_are_named(tmp_path):
    name = "hydra.embeddings.time_mlp.0.bias"
    write(tmp_path / "best.ckpt", "dct", **{f"module.{name}": torch.zeros(128)})
    for load in (load_backbone, lambda path: load_adapter(path, CONFIG)):
        assert f"module.{name}" in refusal(load, tmp_path / "best.ckpt")


def test_a_layer_of_another_shape_and_a_constant_of_one_layer_are_named(tmp_path):
    def changed(key, tensor):
        name = key.removeprefix("inner.")
        write(tmp_path / "best.ckpt", "dct", **{key: tensor, f"module.{name}": tensor})
        return refusal(load_adapter, tmp_path / "best.ckpt", CONFIG)

    prefix = ADAPTER.format(1)
    assert "spectrum" in changed(prefix + "spec_proj.weight", torch.ones(8, 31))
    assert "spec_proj" in changed(prefix + "spec_proj.bias", torch.ones(7))
    assert "layer 1 do not fit" in changed(prefix + "A_beta", torch.ones(2))
    assert "cosine_basis" in changed(prefix + "cosine_basis", torch.ones(8, 64))
    assert "freqs" in changed("inner.hydra.embeddings.freqs", torch.ones(63))


class Plant:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.system, (f"echo run > {self.path}",))


def test_a_pickle_planted_anywhere_in_a_checkpoint_writes_nothing(tmp_path):
    path, planted = tmp_path / "best.ckpt", tmp_path / "planted"
    state = public_code_state(adapter_of("dct"), CONFIG)
    for content in ({"callbacks": Plant(planted)}, {"hyper_parameters": {"cfg": Plant(planted)}},
                    {"state_dict": state | {"inner.planted": Plant(planted)}},
                    {"optimizer_states": [Plant(planted)]}):
        write_lightning_layout(path, state, **content)
        load_backbone(path)
        load_adapter(path, CONFIG)
    write_lightning_layout(path, state, state_dict=Plant(planted))
    refusal(load_backbone, path)
    refusal(load_adapter, path, CONFIG)
    assert not planted.exists()
    with contextlib.suppress(Exception):
        torch.load(path, weights_only=False)  # the bait works
    assert planted.exists()


def test_a_zip_of_something_else_is_no_adapter(tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "plain.pt")
    assert "plain.pt" in refusal(load_adapter, tmp_path / "plain.pt", CONFIG)
    torch.save(load_backbone("small").state_dict(), tmp_path / "backbone.pt")
    assert "adapter" in refusal(load_adapter, tmp_path / "backbone.pt", CONFIG)


# ---- the run -------------------------------------------------------------------------------------


def test_the_preset_differs_from_the_papers_by_what_the_public_code_does():
    differs = {name: value for name, value in train.PRESETS["published"].items()
               if train.PRESETS["paper"].get(name) != value}
    assert differs == train.PUBLISHED
    cfg = common.from_preset(train.Config, train.PRESETS, "published")
    assert (cfg.global_batch, cfg.warmup, cfg.steps, cfg.lr) == (112, 720, 14_400, 6e-4)
    assert cfg.beta_A == pytest.approx(0.5 * torch.tensor(0.2).sigmoid().item())
    rates = [train.learning_rate(k, 14_400, 720, 6e-4, 0.1, cfg.warmup_from_zero)
             for k in (0, 1, 720)]
    assert rates == pytest.approx([0, 6e-4 / 720, 6e-4])


def test_pads_are_context_only_where_the_public_code_is_followed():
    tokenizer = text.ByteTokenizer()
    x0 = torch.full((1, 12), 65)
    x0[:, 6:] = tokenizer.pad_id
    masked = torch.zeros(1, 12, dtype=torch.bool)
    masked[0, 5] = True
    item = {"x0": x0, "masked": masked, "t": torch.tensor([0.5])}
    w, _ = train.weigh(train.Config(pads_as_context=True), item, tokenizer)
    half = sum(0.45 * 0.55 ** k for k in range(5)) / 2
    more = sum(0.45 * 0.55 ** k for k in range(6)) / 2
    assert w[0, 5].item() == pytest.approx(half + more, rel=1e-6)
    w, _ = train.weigh(train.Config(), item, tokenizer)
    assert w[0, 5].item() == pytest.approx(half, rel=1e-6)


@pytest.mark.parametrize("flag, value", [("--stratified", ()), ("--t-hole", (0.2, 0.4))])
def test_settings_that_one_t_per_batch_excludes_are_refused(flag, value):
    run = tiny.command("train.py", "--t-per-batch", flag, *value)
    assert run.status == 2 and "--t-per-batch" in run.err and run.err.count("\n") == 1
    run = tiny.command("train.py", "--t-jitter", 0.05, "--weighting", "elbo")
    assert run.status == 2 and "--t-jitter" in run.err


@pytest.fixture
def released(tmp_path, monkeypatch):
    """Flags of a small backbone in the released layout, whose results go to tmp_path."""
    monkeypatch.setattr(common, "ROOT", tmp_path)
    tiny.write_inputs(tmp_path)
    config = dataclasses.replace(CONFIG, vocab_size=260, headdim=16)  # sliced, 4 heads of 32
    write_released_layout(tmp_path / "hydra.pt", config, rows=260)
    return ["--weights", tmp_path / "hydra.pt", "--vocab", "bytes"]


@pytest.mark.parametrize("kernel", GEOMETRIES)
def test_the_published_run_trains_scores_and_says_that_it_is_a_misreading(released, tmp_path,
                                                                          kernel):
    run = tiny.command("train.py", "--preset", "published", "--kernel", kernel, *released,
                       "--data", tmp_path / "text.txt", "--device", "cpu", "--seqlen", 32,
                       "--global-batch", 4, "--max-steps", 2, "--workers", 0, "--eval-windows", 4,
                       "--eval-every", 0)
    assert run.status == 0, run.err
    assert "NOT the released Hydra-BERT" in run.out and "--sliced" in run.out
    folder = tmp_path / f"runs/published_{kernel}"
    losses = [row for row in checkpoint.read_metrics(folder) if "loss" in row]
    assert losses[-1]["lr"] == pytest.approx(6e-4 / 720), "the second step's: the first has none"
    result = json.loads((folder / "result.json").read_text())
    assert result["metrics"]["spread"]["start"]["hidden"] < 1e-4
    model = load_backbone(released[1], sliced=True)
    adapter, about = load_adapter(folder, model.config)
    assert about["sliced"] is True and adapter.settings["rounded_angle"]
    assert "belongs to another" in refusal(load_adapter, folder, load_backbone(released[1]).config)
    scored = tiny.command("evaluate.py", "--adapter", folder, *released, "--sliced", "--windows", 4,
                          "--seeds", 1, "--data", tmp_path / "text.txt")
    assert scored.status == 0, scored.err
    assert "NOT the released Hydra-BERT" in scored.out and "shuffled t" in scored.out


@pytest.mark.slow
def test_full_size_rehearsal_of_the_published_run(tmp_path):
    """Random weights of the released layout, sliced; length 512 in place of 4,096; two steps.

    MARK_PUBLISH=1 writes the measurement to runs/rehearsal_published/, for experiments.publish.
    """
    from test_train import launch, write_full_size_inputs
    write_full_size_inputs(tmp_path)
    given = ["--preset", "published", "--weights", str(tmp_path / "hydra.pt"), "--vocab",
             str(tmp_path / "vocab.txt"), "--data", str(tmp_path / "text.txt"), "--device", "cpu",
             "--seqlen", "512", "--global-batch", "2", "--max-steps", "2", "--workers", "1"]
    began = time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARK_ROOT", str(tmp_path))
        lines, peak = launch(str(ROOT / "train.py"), *given, cwd=tmp_path)
    seconds = time.time() - began
    assert any("NOT the released Hydra-BERT" in line for line in lines)
    folder = tmp_path / "runs/published_hypernet"
    trained = [row for row in checkpoint.read_metrics(folder) if "loss" in row]
    assert trained[-1]["step"] == 2 and math.isfinite(trained[-1]["loss"])
    model = load_backbone(tmp_path / "hydra.pt", sliced=True)
    assert (model.config.nheads, model.config.headdim) == (12, 128)
    adapter, _ = load_adapter(folder, model.config)
    assert adapter_size(adapter) == 6_268_765
    env = {"script": "train", "began": began, **common.environment()}
    result = {"command": ["train.py", *given[:2], *given[8:]], "seconds": seconds,
              "tokens_per_second": trained[-1]["tokens_per_second"], "peak_bytes": peak,
              "parameters": sum(p.numel() for p in model.parameters()),
              "adapter_parameters": adapter_size(adapter)}
    if os.environ.get("MARK_PUBLISH"):
        settings = {"preset": "published", "kernel": "hypernet"}
        common.save_result(ROOT / "runs/rehearsal_published/result.json", result, settings, env)
    print(json.dumps(result, indent=1))


def test_a_checkpoint_is_scored_with_our_controls_by_one_command(released, tmp_path):
    path = tmp_path / "best_hydra_mark.ckpt"
    write(path, "chebyshev", bf16=True, config=dataclasses.replace(CONFIG, vocab_size=260))
    run = tiny.command("evaluate.py", "--adapter", path, "--weights", path, "--vocab", "bytes",
                       "--data", f"text={tmp_path / 'text.txt'}", "--windows", 4, "--seeds", 2)
    assert run.status == 0, run.err
    assert "NOT the released Hydra-BERT" in run.out and "constant t" in run.out
    found = json.loads((tmp_path / "runs/evaluate/best_hydra_mark.ckpt/result.json").read_text())
    assert "best_hydra_mark.ckpt, shuffled t" in found["metrics"]["scores"]["text"]


@pytest.mark.parametrize("script", ["sample.py", "certify.py", "markov.py"])
def test_the_other_scripts_take_a_checkpoint_too(released, tmp_path, script):
    path = tmp_path / "best_hydra_mark.ckpt"
    write(path, "dct", config=dataclasses.replace(CONFIG, vocab_size=260))
    small = {"sample.py": ["--steps", 2, "--length", 8], "certify.py": ["--windows", 2],
             "markov.py": ["--windows", 2, "--grid", 5, "--seqlen", 32]}[script]
    run = tiny.command(script, "--adapter", path, "--weights", path, *small)
    assert run.status == 0, run.err
    assert "NOT the released Hydra-BERT" in run.out
    run = tiny.command(script, *released[:2], "--sliced", "--adapter", path, *small)
    assert run.status == 2 and "belongs to another backbone" in run.err


# ---- Figure 3 and Table 2 ------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("length", [20, 400])
def test_figure_3_by_the_public_recipe_is_its_formula_head_by_head(tmp_path, length):
    """A loop over layers, heads and lags in float64. A text of 20 tokens is a pad at position 256:
    there B and C are SiLU of the convolution's bias; one of 400 is read.
    """
    write(tmp_path / "best.ckpt", "dct")
    model = load_backbone(tmp_path / "best.ckpt", torch.float64)
    adapter, _ = load_adapter(tmp_path / "best.ckpt", model.config, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (length,), generator=draw)
    found = markov.published_profiles(model, adapter, ids, pad_id=0)

    d_inner, n = model.config.d_inner, model.config.d_state
    Bs, Cs = [], []
    for y, layer in enumerate(model.layers):
        if length == 20:
            bias = layer.mixer.conv1d.bias
            BC = bias * torch.sigmoid(bias)
        else:
            padded = torch.nn.functional.pad(ids, (0, 512 - length))[None]
            u = markov.mixer_inputs(model, padded, adapter(0.5), padded != 0)[y]
            rows = layer.mixer.in_proj(u)[0, 253:260, d_inner:2 * d_inner + 4 * n]   # 7 channels
            BC = (rows * layer.mixer.conv1d.weight[:, 0].T).sum(0) + layer.mixer.conv1d.bias
            BC = BC * torch.sigmoid(BC)
        Bs.append(BC[d_inner:d_inner + n])
        Cs.append(BC[d_inner + n:d_inner + 2 * n])
    lags = markov.LAGS.tolist()
    for i, tau in enumerate((0.0, 0.25, 0.5, 0.75, 1.0, None)):
        m = None if tau is None else adapter(1 - tau)
        for k in (0, 1, 64, 100):
            total = 0.0
            for y, layer in enumerate(model.layers):
                B, C, A_log, dt = Bs[y], Cs[y], layer.mixer.A_log, layer.mixer.dt_bias
                if m is not None:
                    B = B * m.B_scale[y, 0] + m.B_shift[y, 0]
                    C = C * m.C_scale[y, 0] + m.C_shift[y, 0]
                    A_log, dt = A_log + m.A[y, 0], dt + m.dt[y, 0]
                for h in range(4):
                    own = slice(6 * h, 6 * h + 6)                  # 24 states for 4 heads
                    decay = math.exp(-math.exp(A_log[h]) * math.log1p(math.exp(dt[h])))
                    total += (B[own] @ C[own] * decay ** lags[k]).item() ** 2
            assert found[i][k] == pytest.approx(math.sqrt(total), rel=1e-9), (tau, k)


def test_the_public_figure_and_table_2_are_options_of_the_scripts(released, tmp_path):
    path = tmp_path / "best_hydra_mark.ckpt"
    write(path, "hypernet", config=dataclasses.replace(CONFIG, vocab_size=260))
    given = ["--adapter", path, "--weights", path]
    run = tiny.command("markov.py", *given, "--published", "--windows", 2, "--grid", 5,
                       "--seqlen", 32, "--data", tmp_path / "text.txt")
    assert run.status == 0, run.err
    folder = tmp_path / "runs/markov/best_hydra_mark.ckpt"
    found = json.loads((folder / "result.json").read_text())["metrics"]
    assert len(found["published"]["best_hydra_mark.ckpt"]) == 6
    assert (folder / "fig3_published.png").stat().st_size > 1000

    assert evaluate.PRESETS["table2"] == {"seeds": 10, "modulate": MODES}
    run = tiny.command("evaluate.py", "--preset", "table2", *given, "--seeds", 2, "--data",
                       f"wikitext={tmp_path / 'text.txt'}", "--train", tmp_path / "text.txt",
                       "--windows", 2, "--seqlen", 32)
    assert run.status == 0, run.err
    found = json.loads((tmp_path / "runs/evaluate/best_hydra_mark.ckpt/result.json").read_text())
    scores = found["metrics"]["scores"]["wikitext"]
    rows = [f"best_hydra_mark.ckpt, {mode}" for mode in MODES[1:]]
    assert {"best_hydra_mark.ckpt", "frozen", *rows} <= set(scores)
    assert all(len(scores[row]["cart"]) == 2 for row in rows)
    assert scores["best_hydra_mark.ckpt, none"]["cart"] == scores["frozen"]["cart"]


# ---- the hub -------------------------------------------------------------------------------------


def test_a_hub_name_needs_a_revision_and_is_fetched_at_it(tmp_path, monkeypatch, capsys):
    """What huggingface_hub itself does is tested in test_loading.py, against a server."""
    import huggingface_hub
    write(tmp_path / "best_hydra_mark.ckpt", "hypernet")
    asked = []

    def from_cache(repo, filename, revision):
        asked.append((repo, filename, revision))
        return str(tmp_path / "best_hydra_mark.ckpt")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", from_cache)
    name = "mark-ssm/hydra_mark_hypernet"
    for load in (load_backbone, lambda source: load_adapter(source, CONFIG)):
        assert f"{name}@REVISION" in refusal(load, name)
        load(f"{name}@{'ab' * 20}")
    assert asked == 2 * [(name, "best_hydra_mark.ckpt", "ab" * 20)]
    said = capsys.readouterr().out
    assert "sha256" in said and "no hash of it is known here" in said
    adapters = load_adapters([f"{name}@{'ab' * 20}"], CONFIG)
    assert list(adapters) == [f"hydra_mark_hypernet@{'ab' * 20}"]
    assert "no file" in refusal(load_backbone, "runs/none")
