"""The recurrence and its FFT, insertion, balanced truncation beside scipy, the two tasks."""
import math

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn

import common
from experiments import hrm_adapter as hrm
import markov
from data import noise_generator

SETTINGS = dict(steps=2, windows=2, size=512, rank=2)


def random_adapter(d=5, m=7, seed=0):
    torch.manual_seed(seed)
    adapter = hrm.HRM(m, d, gate=0.7).double()
    for parameter in (adapter.log_A, adapter.log_dt):
        nn.init.normal_(parameter)
    return adapter


def random_system(d=6, m=3, p=4, seed=0):
    """Poles of rate 0.002 to 1, as a trained adapter has them."""
    rng = np.random.default_rng(seed)
    return hrm.System(torch.from_numpy(np.exp(rng.uniform(-6, 0, d))),
                      torch.from_numpy(rng.normal(size=(d, m))),
                      torch.from_numpy(rng.normal(size=(p, d))))


def lyapunov(A, B, C):
    return (scipy.linalg.solve_discrete_lyapunov(A, B @ B.T),
            scipy.linalg.solve_discrete_lyapunov(A.T, C.T @ C))


def dense(system):
    A = system.A.numpy()
    A = np.diag(np.exp(-A)) if A.ndim == 1 else A
    return A, system.B.numpy(), system.C.numpy()


def response(system, w):
    """sum over k of C A^k B e^{-i w k}, p m."""
    A, B, C = dense(system)
    return C @ np.linalg.solve(np.eye(len(A)) - A * np.exp(-1j * w), B)


# ---- the adapter ---------------------------------------------------------------------------------


def test_the_fft_equals_the_recurrence_in_values_and_gradients():
    """1e-10: both are float64, and 37 steps of eleven-digit sums."""
    adapter = random_adapter()
    h = torch.randn(2, 37, 7, dtype=torch.float64, requires_grad=True)
    leaves = [h, *adapter.parameters()]
    abar = torch.exp(-torch.exp(adapter.log_A) * torch.exp(adapter.log_dt))
    Bbar = ((1 - abar) / torch.exp(adapter.log_A))[:, None] * adapter.B
    s, y = torch.zeros(2, 5, dtype=torch.float64), []
    for t in range(37):
        s = abar * s + h[:, t] @ Bbar.T
        y.append(adapter.gate * s @ adapter.C.T)
    want, weight = torch.stack(y, 1), torch.randn(2, 37, 7, dtype=torch.float64)
    assert torch.allclose(adapter(h), want, rtol=0, atol=1e-10)
    for a, b in zip(torch.autograd.grad((adapter(h) * weight).sum(), leaves),
                    torch.autograd.grad((want * weight).sum(), leaves)):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


def test_the_input_matrix_is_the_zero_order_hold_of_the_continuous_system():
    """exp([[A, B], [0, 0]] dt) = [[abar, Bbar], [0, 1]], state by state."""
    adapter = random_adapter().requires_grad_(False)
    rate, B, _ = adapter.system()
    for i in range(5):
        block = np.zeros((8, 8))
        block[0, 0], block[0, 1:] = -math.exp(adapter.log_A[i]), adapter.B[i]
        held = scipy.linalg.expm(block * math.exp(adapter.log_dt[i]))
        assert math.isclose(held[0, 0], math.exp(-rate[i]), rel_tol=1e-12)
        assert np.allclose(held[0, 1:], B[i], rtol=1e-10)


@pytest.mark.parametrize("scale", [0.01, 1, 5])
def test_every_parameter_value_is_stable_and_the_count_is_as_stated(scale):
    adapter = random_adapter()
    assert sum(p.numel() for p in adapter.parameters()) == 2 * 5 * 7 + 2 * 5 + 1
    for parameter in adapter.parameters():
        nn.init.normal_(parameter, std=scale)
    rate = adapter.system().A
    assert (rate > 0).all() and torch.isfinite(adapter(torch.ones(1, 50, 7).double())).all()


def test_it_is_causal_at_any_length_and_bfloat16_is_computed_in_float32():
    """bfloat16 keeps 8 bits: the output is the float32 one, rounded once."""
    adapter = random_adapter().float()
    h = torch.randn(1, 33, 7).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = adapter(h)
    assert y.dtype == torch.bfloat16 and torch.equal(y, adapter(h.float()).bfloat16())
    for l in (1, 2, 17):
        assert torch.allclose(adapter(h[:, :l].float()), adapter(h.float())[:, :l], atol=1e-5)


def test_a_gate_of_one_warns_and_the_default_starts_small(capsys):
    assert hrm.HRM(4, 2).gate.item() == pytest.approx(0.01)
    assert capsys.readouterr().out == ""
    hrm.HRM(4, 2, gate=1.0)
    assert "diverged" in capsys.readouterr().out


def test_lora_is_a_change_of_the_projection_and_starts_at_none():
    lora, projection, x = hrm.make_lora(6, 2), nn.Linear(6, 6, bias=False), torch.randn(3, 5, 6)
    model, (A, B) = nn.Sequential(projection), lora.parameters()
    with hrm.inserted(model, {"0": lora}):
        assert torch.equal(model(x), x @ projection.weight.T)
        nn.init.normal_(B)
        assert torch.allclose(model(x), x @ (projection.weight + B @ A).T, atol=1e-5)
    assert sum(p.numel() for p in lora.parameters()) == 2 * 2 * 6


# ---- insertion -----------------------------------------------------------------------------------


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("site", ["layers.1.linear1:layers.1.linear2", "layers.1.self_attn"])
def test_torch_s_own_layer_takes_an_adapter_in_evaluation_too_and_gives_it_back(site):
    """Its fused evaluation path goes round the submodules, unless they have hooks."""
    model, adapter, x = encoder(), random_adapter(3, 8).float(), torch.randn(2, 9, 8)
    with torch.no_grad():
        before = model(x)
        layer, between = model.layers[1], model.layers[0](x)
        with hrm.inserted(model, {site: adapter}):
            u = layer.norm1(between)
            attended = between + layer.self_attn(u, u, u)[0]  # with the adapter, if here
            if "linear" in site:
                u = layer.norm2(attended)
                want = attended + F.linear(layer.linear1(u).relu(), layer.linear2.weight,
                                           layer.linear2.bias) + adapter(u)
            else:
                want = attended + layer.linear2(layer.linear1(layer.norm2(attended)).relu())
            assert torch.allclose(model(x), want, atol=1e-5)
        assert torch.equal(model(x), before)
        assert not torch.allclose(want, before, atol=1e-3)


def test_the_adapter_adds_its_output_to_that_of_the_site():
    model, adapter = nn.Sequential(nn.Linear(7, 7)), random_adapter().float()
    x = torch.randn(2, 9, 7)
    plain, keys = model(x), list(model.state_dict())
    with hrm.inserted(model, {"0": adapter}):
        assert torch.equal(model(x), plain + adapter(x)) and list(model.state_dict()) == keys
    assert torch.equal(model(x), plain)


def test_a_wrong_name_and_a_wrong_layout_are_refused():
    for model, name in ((hrm.Transformer(), "layers.9.mlp"),
                        (nn.TransformerEncoderLayer(8, 2), "linear1")):
        with pytest.raises(common.UserError, match=f"at '{name}'.*batch_first=True"):
            with hrm.inserted(model, {name: None}):
                pass


# ---- Gramians and balanced truncation ------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_closed_forms_solve_the_lyapunov_equations(seed):
    """scipy's solver loses digits where abar is near 1 (0.998 here): 1e-8."""
    system = random_system(seed=seed)
    for ours, scipys in zip(hrm.gramians(system), lyapunov(*dense(system))):
        assert np.allclose(ours, scipys, rtol=1e-8)


def test_the_hankel_values_are_the_singular_values_of_the_hankel_matrix():
    """The matrix [g_{i+j}] of 100 lags; rates are at least e^-1.5, so what is cut off is e^-22."""
    rng = np.random.default_rng(1)
    system = random_system(4)._replace(A=torch.from_numpy(np.exp(rng.uniform(-1.5, 0, 4))))
    A, B, C = dense(system)
    g = [C @ np.linalg.matrix_power(A, k) @ B for k in range(199)]
    matrix = np.block([[g[i + j] for j in range(100)] for i in range(100)])
    want = scipy.linalg.svdvals(matrix)[:4]
    assert np.allclose(hrm.hankel_singular_values(*hrm.gramians(system)), want, rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_balanced_system_is_the_same_map_with_equal_diagonal_gramians(seed):
    """1e-7: the inverse of a state of sigma 1e-4 of the largest multiplies rounding errors."""
    system = random_system(seed=seed)
    balanced, sigma = hrm.balance(system)
    scale = sigma[0].item()
    for W in lyapunov(*dense(balanced)):
        assert np.allclose(W, np.diag(sigma), atol=1e-7 * scale)
    for w in (0, 0.01, 1, 3):
        assert np.allclose(response(system, w), response(balanced, w), atol=1e-7 * scale)


def test_a_state_that_nothing_reaches_is_left_out():
    """Two equal poles that only one combination of is driven and seen: order 3 of 4."""
    system = random_system(4, 1, 1)
    system.A[1] = system.A[0]
    balanced, sigma = hrm.balance(system)
    assert len(balanced.A) == 3 and sigma[3] < 1e-7 * sigma[0]
    assert np.allclose(response(system, 0.1), response(balanced, 0.1), rtol=1e-6)


def test_a_closed_gate_leaves_one_state_that_does_nothing():
    system = hrm.System(*(v.detach() for v in hrm.HRM(6, 3, gate=0.0).system()))
    reduced = hrm.truncate(system, share=0.9)
    assert len(reduced.A) == 1 and hrm.h_infinity_error(system, reduced) == 0
    assert torch.equal(hrm.run(reduced, torch.ones(1, 5, 6)), torch.zeros(1, 5, 6))


@pytest.mark.parametrize("seed", range(8))
def test_truncation_is_stable_and_within_glovers_bound_and_above_the_next_value(seed):
    """sigma_{n+1} <= error <= 2 (sigma_{n+1} + ...); 1e-6 for the grid and rounding."""
    system = random_system(8, seed=seed)
    sigma = hrm.hankel_singular_values(*hrm.gramians(system))
    for share in (0.5, 0.8, 0.9, 0.99):
        reduced = hrm.truncate(system, share=share)
        n = len(reduced.A)
        assert reduced.A.dtype == torch.float64  # real
        assert np.abs(np.linalg.eigvals(reduced.A)).max() < 1
        assert sigma[:n].sum() >= share * sigma.sum() * (1 - 1e-9)
        assert n == 1 or sigma[:n - 1].sum() < share * sigma.sum()
        error = hrm.h_infinity_error(system, reduced)
        assert sigma[n] * (1 - 1e-6) <= error <= 2 * sigma[n:].sum() * (1 + 1e-6)


def test_the_rule_of_a_bound_keeps_as_few_states_as_keep_it():
    system = random_system(8, seed=3)
    sigma = hrm.hankel_singular_values(*hrm.gramians(system))
    for bound in (1e3, 10, 1, 0.1):
        n = len(hrm.truncate(system, bound=bound).A)
        assert 2 * sigma[n:].sum() <= bound and (n == 1 or 2 * sigma[n - 1:].sum() > bound)


def test_the_error_is_the_largest_over_frequencies_of_the_whole_matrix():
    system = random_system(6, 9, 8, seed=2)
    reduced = hrm.truncate(system, share=0.7)
    grid = [*np.logspace(-7, 0.49, 400), *np.linspace(0, np.pi, 400)]
    want = max(scipy.linalg.svdvals(response(system, w) - response(reduced, w))[0] for w in grid)
    assert hrm.h_infinity_error(system, reduced) == pytest.approx(want, rel=2e-3)  # finer grid


@pytest.mark.parametrize("share", [None, 0.8])
def test_a_system_runs_as_its_recurrence(share):
    system, h = random_system(), torch.randn(2, 21, 3, dtype=torch.float64)
    if share:
        system = hrm.truncate(system, share=share)
    A, B, C = (torch.from_numpy(v) for v in dense(system))
    s, y = torch.zeros(2, len(A), dtype=torch.float64), []
    for t in range(21):
        s = s @ A.T + h[:, t] @ B.T
        y.append(s @ C.T)
    assert torch.allclose(hrm.run(system, h), torch.stack(y, 1), atol=1e-10)
    assert hrm.run(system, h.float()).dtype == torch.float32


def test_the_closed_form_of_markov_is_the_hankel_value_of_a_small_diagonal_system():
    """A head: one decay for all of its states, so one value, |C' Bbar'| / (1 - abar^2)."""
    rng = np.random.default_rng(0)
    rate, B, C = 0.03, torch.from_numpy(rng.normal(size=(5, 1))), torch.from_numpy(
        rng.normal(size=(1, 5)))
    op = markov.Operator(*(torch.full((1, 1, 1, 1), v, dtype=torch.float64)
                           for v in ((C @ B).item(), rate, 1, 1, 1)))
    sigma = hrm.hankel_singular_values(*hrm.gramians(
        hrm.System(torch.full((5,), rate).double(), B, C)))
    want = abs((C @ B).item()) / (1 - math.exp(-2 * rate))
    assert markov.hankel_singular_value(op).item() == pytest.approx(want, rel=1e-10)
    assert sigma[0].item() == pytest.approx(want, rel=1e-7)  # float32's rate
    assert (sigma[1:] < 1e-6 * want).all()  # square roots of rounding errors


# ---- empirical Gramians --------------------------------------------------------------------------


def test_empirical_gramians_are_those_of_a_plain_loop():
    rng = np.random.default_rng(0)
    n, l, d = 3, 10, 4
    rate, B, C, h = (torch.from_numpy(rng.uniform(0.1, 1, s)) for s in (
        (d,), (n, l, d, 2), (n, l, 3, d), (n, l, 2)))
    W_c, W_o = np.zeros((d, d)), np.zeros((d, d))
    for i in range(n):
        s, released = np.zeros(d), np.eye(d)
        for t in range(l):
            s = np.exp(-rate.numpy()) * s + (B[i, t] @ h[i, t]).numpy()
            W_c += np.outer(s, s) / (n * l / 2) * (t >= l // 2)
            y = C[i, t].numpy() @ released
            W_o += y.T @ y / n
            released = np.diag(np.exp(-rate.numpy())) @ released
    for ours, loop in zip(hrm.empirical_gramians(rate, B, C, h), (W_c, W_o)):
        assert np.allclose(ours, loop, rtol=1e-10)


def test_empirical_gramians_converge_as_the_root_of_the_number_of_inputs():
    """-1/2; the slope of five points scatters by about 0.1 over seeds, the mean of four less."""
    slopes = [np.polyfit(*np.log(hrm.convergence(seed)).T, 1)[0] for seed in range(4)]
    assert -0.65 < np.mean(slopes) < -0.35


def test_empirical_gramians_can_be_balanced():
    system = random_system(4)
    W = hrm.gramians(system)
    reduced = hrm.truncate(system, share=0.9, W=W)
    assert all(torch.equal(a, b) for a, b in zip(reduced, hrm.truncate(system, share=0.9)))
    _, sigma = hrm.balance(system, [2 * W[0], 2 * W[1]])
    assert torch.allclose(sigma, 2 * hrm.balance(system)[1])


# ---- the transformer and the tasks ---------------------------------------------------------------


def test_attention_is_a_plain_loop_over_the_window():
    """float32 in another order of summation: 1e-5. Before the text lie keys and values of zero."""
    torch.manual_seed(0)
    attention, x = hrm.Attention(8, 2, 4), torch.randn(1, 10, 8)
    nn.init.normal_(attention.bias)
    q, k, v = (f(x)[0].detach().reshape(10, 2, 4) for f in (attention.q, attention.k, attention.v))
    y = torch.zeros(10, 2, 4)
    for t in range(10):
        for head in range(2):
            score, values = [], []
            for back in range(4):
                key, value = ((k[t - back, head], v[t - back, head]) if back <= t
                              else (torch.zeros(4), torch.zeros(4)))
                score.append(q[t, head] @ key / 2 + attention.bias[head, back])
                values.append(value)
            y[t, head] = torch.softmax(torch.stack(score), 0) @ torch.stack(values)
    assert torch.allclose(attention(x)[0], attention.out(y.flatten(1)), atol=1e-5)


def test_the_transformer_sees_sixty_bytes_back_and_none_ahead():
    torch.manual_seed(0)
    model, ids = hrm.Transformer().double(), torch.randint(256, (1, 150))
    changed = ids.clone()
    changed[0, 50] = (ids[0, 50] + 1) % 256
    differs = (model(ids) != model(changed)).any(-1)[0].nonzero()[:, 0]
    assert (differs.min(), differs.max()) == (50, 110)


def test_recall_asks_for_a_key_that_is_seen_once():
    text = torch.randint(32, 127, (5000,))
    ids, target = hrm.recall(text, 4096, 128, noise_generator(0))
    assert ids.shape == target.shape == (32, 129)
    asked = target != hrm.UNSCORED
    assert asked.nonzero()[:, 1].unique().tolist() == [32, 64, 96, 128]
    assert torch.equal(asked, ids == hrm.CUE)
    assert torch.equal(torch.isin(ids, hrm.KEYS).sum(1), torch.ones(32, dtype=torch.int64))
    assert torch.equal(hrm.KEYS[target[:, 32]], ids[:, 0])
    assert len(set(target[:, 32].tolist())) == len(hrm.KEYS)
    again = hrm.recall(text, 4096, 128, noise_generator(0))[0]
    assert torch.equal(ids, again)


def test_language_asks_for_the_next_byte():
    ids, target = hrm.language(torch.arange(2000), 1024, 32, noise_generator(0))
    assert ids.shape == (2, 512) and torch.equal(target, ids + 1)


def test_the_shipped_transformer_is_small_and_knows_english():
    """A licence, unlike anything it was trained on; counting its letters leaves 3.0 nats a byte."""
    assert hrm.BACKBONE.stat().st_size <= 2_000_000
    text = torch.tensor(list((common.ROOT / "LICENSE").read_bytes()))
    assert max(hrm.score(hrm.Transformer(hrm.BACKBONE), "language", text, 8)[2:]) < 2.5


# ---- the script ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """main() on a text of 200 paragraphs, with figures and results below a folder of its own."""
    folder, patch = tmp_path_factory.mktemp("hrm"), pytest.MonkeyPatch()
    text = folder / "text.txt"
    words = "the of and to in is <that> [it] was for".split()
    words = np.random.default_rng(0).choice(words, 20_000)
    text.write_text("\n\n".join(" ".join(words[i:i + 100]) for i in range(0, 20_000, 100)))
    patch.setattr(common, "ROOT", folder)
    patch.setattr(hrm, "cost", lambda *_: [[256, 1.0, 2.0]])
    yield hrm.main(hrm.Config(text=(str(text),), seeds=2, publish=True, **SETTINGS)), folder
    patch.undo()


def test_the_script_measures_every_row_and_publishes(small_run):
    result, folder = small_run
    assert set(result["rows"]) == set(hrm.ROWS)
    assert (folder / "figures" / "hrm_adapter.png").stat().st_size > 10_000
    assert (folder / "results" / "hrm_adapter" / "small.json").exists()
    for row in result["table"].splitlines()[2:]:
        assert "nan" not in row
    assert result["table"].count("±") == 6 * 5 and result["table"].count("n/a") == 6  # frozen


def test_the_rows_have_the_same_size_and_learn_only_what_they_should(small_run):
    rows = small_run[0]["rows"]
    sizes = {row: found["recall"][0]["parameters"] for row, found in rows.items()}
    layers, m, r = 4, 64, 2
    assert sizes["frozen"] == 0 and sizes["LoRA, Q and V"] == layers * 4 * r * m
    assert sizes["HRM, MLP"] == sizes["HRM, attention"] == layers * (4 * r * m + 4 * r + 1)
    assert sizes["HRM, both"] == layers * (4 * r * m + 4 * r + 2)
    assert sizes["HRM, MLP, gate frozen"] == sizes["HRM, MLP"] - layers
    frozen = rows["HRM, MLP, gate frozen"]["recall"][0]["gates"]
    assert all(gate == pytest.approx(0.01) for gate in frozen)
    assert all(gate != pytest.approx(0.01) for gate in rows["HRM, MLP"]["recall"][0]["gates"])


def test_compression_of_trained_adapters_is_within_its_bound(small_run):
    for found in small_run[0]["rows"].values():
        for one in found["recall"] + found["language"]:
            for rule in one["rules"].values():
                for sigma, n, error, bound in zip(one["sigma"], *(rule[k] for k in (
                        "states", "error", "bound"))):
                    assert bound == pytest.approx(2 * sum(sigma[n:]))
                    assert error <= bound * (1 + 1e-6) + 1e-9  # rounding, at 0
                    if n < len(sigma):
                        assert error >= sigma[n] * (1 - 1e-6)


def test_training_on_recall_lowers_the_loss():
    torch.manual_seed(0)
    text, model = torch.randint(97, 123, (20_000,)), hrm.Transformer(hrm.BACKBONE)
    adapters = {f"layers.{y}.mlp": hrm.HRM(64, 8) for y in range(4)}
    parameters = [p for adapter in adapters.values() for p in adapter.parameters()]
    with hrm.inserted(model, adapters):
        before = hrm.score(model, "recall", text, 8)
        hrm.train(model, parameters, "recall", text, hrm.Config(steps=10, size=2048, lr=0.02), 0)
        after = hrm.score(model, "recall", text, 8)
    assert np.mean(after) < np.mean(before)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("publish", (False, True))
def test_making_the_backbone_writes_the_asset_where_it_is_published(tmp_path, monkeypatch, publish):
    monkeypatch.setattr(hrm, "BACKBONE", tmp_path / "transformer.safetensors")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {i} says that {i * i} is a square" for i in range(999)))
    hrm.main(hrm.Config(text=(str(text),), make_backbone=True, lr=1e-3, publish=publish,
                        **SETTINGS))
    path = hrm.BACKBONE if publish else tmp_path / "runs/hrm_adapter/transformer.safetensors"
    assert hrm.Transformer(path).embedding.weight.shape == (260, 64)
    assert hrm.BACKBONE.exists() == publish


def test_nonsense_settings_short_texts_and_a_diverging_run_end_with_one_line(tmp_path):
    (tmp_path / "short.txt").write_text("\n\n".join(f"line {i}" for i in range(200)))
    for wrong, said in (({"seeds": 16}, "at most 15"), ({"size": 100}, "size from 512"),
                        ({"text": (str(tmp_path / "short.txt"),)}, "need 1024 of each")):
        with pytest.raises(common.UserError, match=said):
            hrm.main(hrm.Config(**wrong))
    model, text = hrm.Transformer(hrm.BACKBONE), torch.randint(97, 123, (2000,))
    adapter = hrm.HRM(64, 2)
    nn.init.constant_(adapter.C, math.inf)
    with pytest.raises(common.UserError, match="step 1: the loss is nan"):
        with hrm.inserted(model, {"layers.0.mlp": adapter}):
            hrm.train(model, list(adapter.parameters()), "recall", text, hrm.Config(**SETTINGS), 0)


def test_a_site_that_the_model_never_calls_is_refused():
    """torch.nn.MultiheadAttention reads the weight of its out_proj and never calls it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(common.UserError, match="never calls 'self_attn.out_proj'"):
        with hrm.inserted(layer, {"self_attn.out_proj": hrm.HRM(8, 2)}):
            layer(torch.randn(1, 5, 8))
