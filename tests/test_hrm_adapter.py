"""The adapter beside its recurrence, LoRA, what the script measures, writes and refuses."""
import json
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

import common
from experiments import hrm_adapter as hrm
from experiments.byte_transformer import ByteTransformer, inserted

SETTINGS = dict(steps=2, windows=2, size=512, rank=2)


def random_adapter(d=5, m=7, seed=0):
    torch.manual_seed(seed)
    adapter = hrm.HRM(m, d, gate=0.7).double()
    nn.init.normal_(adapter.log_A)
    nn.init.normal_(adapter.log_dt)
    return adapter


# ---- the adapters --------------------------------------------------------------------------------


def test_the_fft_equals_the_recurrence_in_values_and_gradients():
    """1e-10: both are float64, and 37 steps of eleven-digit sums."""
    adapter = random_adapter()
    h = torch.randn(2, 37, 7, dtype=torch.float64, requires_grad=True)
    leaves = [h, *adapter.parameters()]
    abar = torch.exp(-torch.exp(adapter.log_A) * torch.exp(adapter.log_dt))
    Bbar = ((1 - abar) / torch.exp(adapter.log_A))[:, None] * adapter.B
    s = torch.zeros(2, 5, dtype=torch.float64)
    y = []
    for t in range(37):
        s = abar * s + h[:, t] @ Bbar.T
        y.append(adapter.gate * s @ adapter.C.T)
    want = torch.stack(y, 1)
    weight = torch.randn(2, 37, 7, dtype=torch.float64)
    assert torch.allclose(adapter(h), want, rtol=0, atol=1e-10)
    ours = torch.autograd.grad((adapter(h) * weight).sum(), leaves)
    loop = torch.autograd.grad((want * weight).sum(), leaves)
    for a, b in zip(ours, loop):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


def test_the_input_matrix_is_the_zero_order_hold_of_the_continuous_system():
    """exp([[A, B], [0, 0]] dt) = [[abar, Bbar], [0, 1]], state by state."""
    adapter = random_adapter().requires_grad_(False)
    rate, B, _ = adapter.system()
    for i in range(5):
        block = np.zeros((8, 8))
        block[0, 0] = -math.exp(adapter.log_A[i])
        block[0, 1:] = adapter.B[i]
        held = scipy.linalg.expm(block * math.exp(adapter.log_dt[i]))
        assert math.isclose(held[0, 0], math.exp(-rate[i]), rel_tol=1e-12)
        assert np.allclose(held[0, 1:], B[i], rtol=1e-10)


@pytest.mark.parametrize("scale", [0.01, 1, 5])
def test_every_parameter_value_is_stable_and_the_count_is_as_stated(scale):
    adapter = random_adapter()
    assert sum(p.numel() for p in adapter.parameters()) == 2 * 5 * 7 + 2 * 5 + 1
    for parameter in adapter.parameters():
        nn.init.normal_(parameter, std=scale)
    assert (adapter.system().rate > 0).all()
    assert torch.isfinite(adapter(torch.ones(1, 50, 7).double())).all()


def test_it_is_causal_at_any_length_and_bfloat16_is_computed_in_float32():
    """bfloat16 keeps 8 bits: the output is the float32 one, rounded once."""
    adapter = random_adapter().float()
    h = torch.randn(1, 33, 7).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = adapter(h)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, adapter(h.float()).bfloat16())
    for l in (1, 2, 17):
        assert torch.allclose(adapter(h[:, :l].float()), adapter(h.float())[:, :l], atol=1e-5)


def test_a_gate_of_one_warns_and_the_default_starts_small(capsys):
    assert hrm.HRM(4, 2).gate.item() == pytest.approx(0.01)
    assert capsys.readouterr().out == ""
    hrm.HRM(4, 2, gate=1.0)
    assert "diverged" in capsys.readouterr().out


def test_lora_is_a_change_of_the_projection_and_starts_at_none():
    lora = hrm.make_lora(6, 2)
    projection = nn.Linear(6, 6, bias=False)
    x = torch.randn(3, 5, 6)
    A, B = lora.parameters()
    model = nn.Sequential(projection)
    with inserted(model, {"0": lora}):
        assert torch.equal(model(x), x @ projection.weight.T)
        nn.init.normal_(B)
        assert torch.allclose(model(x), x @ (projection.weight + B @ A).T, atol=1e-5)
    assert sum(p.numel() for p in lora.parameters()) == 2 * 2 * 6


# ---- the script ----------------------------------------------------------------------------------


def write_text(path, paragraphs):
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """(what main returned on a text of 200 paragraphs, the folder that it ran in)."""
    folder = tmp_path_factory.mktemp("hrm")
    words = "the of and to in is <that> [it] was for".split()
    words = np.random.default_rng(0).choice(words, 20_000)
    text = write_text(folder / "text.txt",
                      [" ".join(words[i:i + 100]) for i in range(0, 20_000, 100)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "ROOT", folder)
        patch.setattr(hrm, "adapter_times", lambda d_model, rank: [[256, 1.0, 2.0]])
        result = hrm.main(hrm.Config(data=(text,), seeds=2, **SETTINGS))
    return result, folder


def test_the_script_measures_every_variant_and_writes_its_result(small_run):
    result, folder = small_run
    assert set(result["rows"]) == {variant.label for variant in hrm.VARIANTS}
    run = folder / "runs" / "hrm_adapter"
    assert (run / "hrm_adapter.png").stat().st_size > 10_000
    written = common.read_json(run / "result.json", "metrics", "config", "commit", "script")
    assert written["metrics"] == json.loads(json.dumps(result))
    assert result["table"].count("±") == 6 * 5
    assert result["table"].count("n/a") == 6  # frozen
    assert "nan" not in result["table"]


def test_the_tables_of_a_result_file_are_those_of_the_run(small_run):
    result, folder = small_run
    metrics = common.read_json(folder / "runs/hrm_adapter/result.json")["metrics"]
    tables = hrm.hrm_tables(metrics["rows"], metrics["cost_ms"])
    for name in ("table", "compression", "cost"):
        assert tables[name] == result[name]


def test_tables_and_figure_are_made_from_the_published_file(tmp_path):
    path = common.SOURCE / "results" / "hrm_adapter" / "small.json"
    metrics = common.read_json(path, "metrics")["metrics"]
    tables = hrm.hrm_tables(metrics["rows"], metrics["cost_ms"])
    assert tables["table"].count("\n") == 1 + len(hrm.VARIANTS)
    assert tables["compression"].count("\n") == 1 + 4 * 2 * 2  # HRM variants, tasks, rules
    hrm.draw_hrm(metrics["rows"], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_results_are_on_disk_before_the_picture_is_drawn(small_run, tmp_path, monkeypatch):
    result, folder = small_run
    text = str(folder / "text.txt")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(hrm, "study_adapters", lambda *_: result)

    def fail(*_):
        raise ImportError("no matplotlib")

    monkeypatch.setattr(hrm, "draw_hrm", fail)
    with pytest.raises(ImportError):
        hrm.main(hrm.Config(data=(text,), **SETTINGS))
    assert (tmp_path / "runs" / "hrm_adapter" / "result.json").is_file()


def test_the_variants_have_the_same_size_and_learn_only_what_they_should(small_run):
    rows = small_run[0]["rows"]
    sizes = {label: found["recall"][0]["parameters"] for label, found in rows.items()}
    layers, m, r = 4, 64, 2
    assert sizes["frozen"] == 0
    assert sizes["LoRA, Q and V"] == layers * 4 * r * m
    assert sizes["HRM, MLP"] == sizes["HRM, attention"] == layers * (4 * r * m + 4 * r + 1)
    assert sizes["HRM, both"] == layers * (4 * r * m + 4 * r + 2)
    assert sizes["HRM, MLP, gate frozen"] == sizes["HRM, MLP"] - layers
    frozen = rows["HRM, MLP, gate frozen"]["recall"][0]["gates"]
    assert all(gate == pytest.approx(0.01) for gate in frozen)
    assert all(gate != pytest.approx(0.01) for gate in rows["HRM, MLP"]["recall"][0]["gates"])


def test_compression_of_trained_adapters_is_within_its_bound(small_run):
    """1e-9: rounding, where nothing is cut."""
    checked = 0
    for found in small_run[0]["rows"].values():
        for run in found["recall"] + found["language"]:
            for left in run["rules"].values():
                for sigma, n, error, bound in zip(run["sigma"], left["states"], left["error"],
                                                  left["bound"]):
                    assert bound == pytest.approx(2 * sum(sigma[n:]))
                    assert error <= bound * (1 + 1e-6) + 1e-9
                    if n < len(sigma):
                        assert error >= sigma[n] * (1 - 1e-6)
                    checked += 1
    assert checked == 2 * 2 * 2 * (3 * 4 + 8)  # tasks, seeds, rules; layers and sites


def test_making_the_backbone_writes_its_weights_into_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    text = write_text(tmp_path / "text.txt",
                      [f"paragraph {i} says that {i * i} is a square" for i in range(999)])
    hrm.main(hrm.Config(data=(text,), make_backbone=True, lr=1e-3, **SETTINGS))
    folder = tmp_path / "runs" / "hrm_adapter"
    model = ByteTransformer(folder / "transformer_small.safetensors")
    assert model.embedding.weight.shape == (260, 64)
    written = common.read_json(folder / "result.json", "metrics", "config", "script")
    assert written["script"] == "hrm_adapter"
    assert written["config"]["make_backbone"]
    assert len(written["metrics"]["held out, nats"]) == 5


def test_nonsense_settings_and_short_texts_end_with_one_line(tmp_path):
    short = write_text(tmp_path / "short.txt", [f"line {i}" for i in range(200)])
    for wrong, said in (({"seeds": 16}, "at most 15"), ({"size": 100}, "size from 512"),
                        ({"data": (short,)}, "need 1024 of each")):
        with pytest.raises(common.UserError, match=said):
            hrm.main(hrm.Config(**wrong))
