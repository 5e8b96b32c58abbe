"""Training: what moves, eq. 23 and AdamW by hand, ranks and micro-batches, stops, the presets."""
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import safetensors.torch
import tiny
import torch
from helpers import ROOT, write_released_layout
from tiny import arguments, command, config, make_denoiser, run_split

import common
import train
from cart import cart_loss, cart_weights
from checkpoint import load_adapter, load_backbone
from data import DiffusionDataset, Windows, load_corpus
from hydra_ssm import HydraConfig
from mark_adapters import make_adapter
from text import ByteTokenizer


@pytest.fixture(scope="module")
def whole(work):
    """The uninterrupted run of six steps, saved along the way."""
    done = command("train.py", *arguments(work, name="whole", save_every=2, eval_every=4))
    assert done.status == 0, done.err
    return done


@pytest.fixture(scope="module")
def ranks():
    """What both ranks left behind, and the folder of their runs."""
    folder, run = tiny.two_ranks()
    assert run.returncode == 0, run.err[-2000:]
    return folder, [torch.load(folder / f"rank{r}.pt") for r in (0, 1)]


def rows_of(folder, name):
    """The training rows of metrics.jsonl, without the one number that is a speed."""
    rows = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def result_of(folder, name):
    """The metrics of result.json, whose provenance has its own test."""
    return json.loads((folder / "runs" / name / "result.json").read_text("utf-8"))["metrics"]


def adapter_of(folder, name):
    return load_adapter(folder / "runs" / name, tiny.CONFIG)[0].state_dict()


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


def distance(got, expected):
    """|got - expected| / |expected| over all tensors together."""
    square = sum((got[k].double() - v.double()).square().sum() for k, v in expected.items())
    return (square / sum(v.double().square().sum() for v in expected.values())).sqrt().item()


# ------------------------------------------------------------------------------- the rate

def test_the_rate_rises_in_a_line_and_falls_along_a_cosine():
    """Table 6 with the paper's numbers: 720 of 14,400 steps, 6e-4, floor 0.1."""
    rate = [train.learning_rate(step, 14_400, 720, 6e-4, 0.1) for step in range(14_401)]
    assert rate[0] == pytest.approx(6e-4 / 720, rel=1e-12)
    assert rate[359] == pytest.approx(3e-4, rel=1e-12)
    assert rate[719] == rate[720] == pytest.approx(6e-4, rel=1e-12)
    assert rate[720 + 13_680 // 2] == pytest.approx(0.55 * 6e-4, rel=1e-12)
    assert rate[14_400] == pytest.approx(0.6e-4, rel=1e-12)
    assert max(rate) == rate[720] and all(a < b for a, b in zip(rate[:720], rate[1:720]))
    assert all(a > b for a, b in zip(rate[720:], rate[721:]))
    for step in (1000, 5000, 14_399):
        angle = math.pi * (step - 720) / (14_400 - 720)
        assert rate[step] == pytest.approx(6e-5 + 5.4e-4 * math.cos(angle / 2) ** 2, rel=1e-12)


def test_the_rate_without_warm_up_or_past_the_end_stays_in_bounds():
    assert train.learning_rate(0, 10, 0, 1.0, 0.1) == 1.0
    assert train.learning_rate(99, 10, 2, 1.0, 0.1) == pytest.approx(0.1)
    assert train.learning_rate(5, 5, 5, 1.0, 0.1) == 1.0
    assert common.SEEDS[:3] == (42, 142, 242) and len(common.SEEDS) == 15


# ------------------------------------------------------------------------------- command line


# --------------------------------------------------------------------------------- what moves

def test_only_the_adapter_is_optimised_and_the_backbone_stays_bit_identical(work, monkeypatch):
    seen, load = {}, train.load_backbone

    def load_and_copy(*args):
        seen["backbone"] = load(*args)
        seen["before"] = {k: v.clone() for k, v in everything(seen["backbone"]).items()}
        return seen["backbone"]

    def everything(module):  # buffers that are not saved too
        return {**module.state_dict(), **dict(module.named_buffers())}

    def watch(cfg, denoiser, optimizer, *args, steps=train.train_steps):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in denoiser.adapter.parameters()}
        assert held == {id(p) for p in denoiser.parameters() if p.requires_grad}
        assert len(held) == sum(len(group["params"]) for group in optimizer.param_groups)
        seen["defaults"], seen["adapter"] = optimizer.defaults, denoiser.adapter
        seen["start"] = {k: p.detach().clone() for k, p in denoiser.adapter.named_parameters()}
        return steps(cfg, denoiser, optimizer, *args)

    monkeypatch.setattr(train, "load_backbone", load_and_copy)
    monkeypatch.setattr(train, "train_steps", watch)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    train.main(config(work, name="watched", weight_decay=0.02, checkpointing=True))
    assert_equal(everything(seen["backbone"]), seen["before"])
    assert all(p.grad is None for p in seen["backbone"].parameters())
    for key, parameter in seen["adapter"].named_parameters():
        assert not torch.equal(parameter, seen["start"][key]), f"{key} was not trained"
    assert seen["defaults"]["betas"] == (0.9, 0.999)  # Table 6
    assert seen["defaults"]["fused"] and seen["defaults"]["weight_decay"] == 0.02


@pytest.mark.parametrize("kernel", ["hypernet", "chebyshev", "dct", "inject", "adaln", "lora"])
def test_checkpointing_leaves_every_gradient_as_it_is_in_layer_0_too(work, kernel):
    gradients = []
    for checkpointing in (False, True):
        denoiser = make_denoiser(work, torch.float64, kernel)
        denoiser.backbone.checkpointing = checkpointing
        item = {k: torch.stack([tiny.Handmade((5, 20), l=40)[i][k] for i in (0, 1)])
                for k in ("x_t", "t", "x0", "masked")}
        denoiser(**item, mask=None).sum().backward()
        gradients.append({k: p.grad for k, p in denoiser.adapter.named_parameters()})
    for key, without in gradients[0].items():
        # The same operations run twice on the same numbers: equal to the last bit on one thread.
        torch.testing.assert_close(gradients[1][key], without, rtol=1e-12, atol=1e-14)
        if len(without) == tiny.CONFIG.n_layer and "timestep" not in key:
            assert without[0].any(), f"{key}: nothing reaches layer 0"


# ---------------------------------------------------------------------- eq. 23 and AdamW by hand

def loss_by_hand(denoiser, items, weighting):
    """Eq. 22 and 23 as a double sum over masked tokens, or maskable ones of eq. 13."""
    total, count = 0.0, 0
    for item in items:
        x0, masked = item["x0"], item["masked"].tolist()
        logits = denoiser.backbone(item["x_t"][None], denoiser.adapter(item["t"][None]))[0]
        for i in (i for i, hidden in enumerate(masked) if hidden):
            w = 1 / item["t"].item() if weighting == "elbo" else 0.5 * sum(
                0.45 * 0.55 ** (abs(i - j) - 1) for j, hidden in enumerate(masked) if not hidden)
            total = total - w * logits[i].log_softmax(-1)[x0[i]]
        count += len(masked) if weighting == "elbo" else sum(masked)
    return total / count


@pytest.mark.parametrize("weighting", ["cart", "elbo"])
def test_three_steps_are_adamw_on_the_clipped_gradient_of_eq_23(work, weighting):
    """In float64; clipping is active and the weight decay large."""
    cfg = config(work, max_steps=3, weighting=weighting, clip=0.01, lr=0.01, warmup=2, steps=9)
    data, tokenizer = tiny.Handmade((3, 1, 12, 0), l=16), ByteTokenizer()
    fast, slow = make_denoiser(work, torch.float64), make_denoiser(work, torch.float64)
    loader = torch.utils.data.DataLoader(data, batch_sampler=train.MicroBatches(cfg, 0, 0, 1))
    optimizer = torch.optim.AdamW(fast.adapter.parameters(), weight_decay=0.1)
    rows = []
    train.train_steps(cfg, fast, optimizer, loader, tokenizer, 0, lambda: False,
                      lambda step, numbers, stop: rows.append(numbers))

    parameters = list(slow.adapter.parameters())
    m, v = ([torch.zeros_like(p) for p in parameters] for _ in "mv")
    for step in range(3):
        loss = loss_by_hand(slow, [data[4 * step + slot] for slot in range(4)], weighting)
        gradient = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(g.square().sum().item() for g in gradient))
        lr = 0.01 * ((step + 1) / 2 if step < 2 else
                     0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / 7)) / 2)
        # w and t are float32: 1e-7. Later Adam has blown that up where gradients are near zero.
        rel = 1e-4 if step else 1e-6
        assert rows[step]["loss"] == pytest.approx(loss.item(), rel=rel)
        assert rows[step]["gradient_norm"] == pytest.approx(norm, rel=rel)
        assert rows[step]["lr"] == pytest.approx(lr, rel=1e-12)
        assert norm > 0.01
        with torch.no_grad():
            for p, g, m_, v_ in zip(parameters, gradient, m, v):
                g = g * 0.01 / norm
                m_.mul_(0.9).add_(0.1 * g)
                v_.mul_(0.999).add_(0.001 * g * g)
                p.mul_(1 - lr * 0.1)
                p -= lr * (m_ / (1 - 0.9 ** (step + 1))) / (
                    (v_ / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    start = make_denoiser(work, torch.float64).adapter.state_dict()
    ways = [{k: v - start[k] for k, v in denoiser.adapter.state_dict().items()}
            for denoiser in (fast, slow)]
    assert distance(*ways) < 1e-3


# ------------------------------------------------------------------------- ranks and micro-batches

@pytest.mark.parametrize("world, micro_batch, batch", [(1, 4, 4), (1, 2, 4), (2, 2, 4), (3, 2, 8),
                                                       (2, 1, 5), (4, 16, 7)])
def test_ranks_and_micro_batches_partition_the_global_positions_in_order(
        tmp_path, world, micro_batch, batch):
    cfg = config(tmp_path, global_batch=batch, micro_batch=micro_batch)
    samplers = [train.MicroBatches(cfg, 2, rank, world) for rank in range(world)]
    batches = [list(sampler) for sampler in samplers]
    assert all(len(s) == len(b) for s, b in zip(samplers, batches))
    assert max(len(b) for bs in batches for b in bs) <= micro_batch
    for i, step in enumerate(range(2, cfg.steps)):
        flat = [k for s, bs in zip(samplers, batches)
                for b in bs[i * len(s.slots):(i + 1) * len(s.slots)] for k in b]
        assert flat == list(range(step * batch, (step + 1) * batch))


@pytest.mark.parametrize("name", tiny.SPLITS)
def test_one_rank_two_ranks_and_two_micro_batches_train_the_same(ranks, name):
    folder, results = ranks
    one, micro = run_split(folder, name, 16), run_split(folder, name, 2)
    two = [result[name] for result in results]
    # What went in: x_t, t, x0, masked, the same integers and float32 t, in the same order.
    per_step = len(one["seen"]) // len(one["numbers"])
    assert per_step == 1
    for step, whole_batch in enumerate(one["seen"]):
        for split in ([micro["seen"]], [r["seen"] for r in two]):
            parts = [seen[i] for seen in split for n in [len(seen) // len(one["seen"])]
                     for i in range(step * n, (step + 1) * n)]
            for got, expected in zip(map(torch.cat, zip(*parts)), whole_batch):
                assert torch.equal(got, expected)
    # What came out. Sums are grouped differently: rounding alone, 1e-16 or 1e-7 a term.
    float32 = tiny.SPLITS[name][0] == torch.float32
    assert_equal(two[0]["adapter"], two[1]["adapter"])
    for other in (micro, *two):
        for got, expected in zip(other["numbers"], one["numbers"]):
            assert got["masked"] == expected["masked"] and got["lr"] == expected["lr"]
            assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5 if float32 else 1e-12)
        assert other["gradient"].keys() == one["gradient"].keys()
        if name == "nothing":
            assert all(row["loss"] == row["gradient_norm"] == 0 for row in other["numbers"])
            assert not any(g.any() for g in other["gradient"].values())
            assert all(p.isfinite().all() for p in other["adapter"].values())
        else:
            assert distance(other["gradient"], one["gradient"]) < (1e-5 if float32 else 1e-12)
            assert any(g.any() for g in one["gradient"].values())
        if not float32:
            for key, expected in one["adapter"].items():
                torch.testing.assert_close(other["adapter"][key], expected, rtol=0, atol=1e-10)


def test_the_rank_that_is_asked_to_stop_stops_all_after_the_same_step(ranks):
    _, (first, second) = ranks
    assert first["stop"]["done"] == second["stop"]["done"] == 2
    assert_equal(first["stop"]["adapter"], second["stop"]["adapter"])


def test_a_run_of_one_rank_is_resumed_by_two(ranks):
    """Float32 gradients agree to 1e-5; Adam divides small ones by themselves: 1e-3 of the way."""
    folder, _ = ranks
    torch.manual_seed(42)
    start = tiny.make_adapter("chebyshev", tiny.CONFIG, mlp_dim=16).state_dict()
    ways = [{k: v - start[k] for k, v in adapter_of(folder, name).items()}
            for name in ("resumed", "whole")]
    assert distance(*ways) < 1e-3
    two, one = (result_of(folder, name) for name in ("resumed", "whole"))
    assert two["step"] == one["step"] == 6
    for row in ("unigram", "frozen", "chebyshev"):  # ranks share the rows of an evaluation
        for key in ("cart", "elbo", "bits_per_byte"):
            assert two["rows"][row][key] == pytest.approx(one["rows"][row][key], rel=1e-5)


# --------------------------------------------------------------------------------- stop and resume

@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_run_stopped_at_any_step_and_resumed_ends_bit_equal(work, whole, k):
    name = f"stopped{k}"
    settings = {"name": name, "save_every": 2, "eval_every": 4}
    first = command("train.py", *arguments(work, **settings, max_steps=k))
    assert first.status == 0, first.err
    metrics = work / "runs" / name / "metrics.jsonl"
    with open(metrics, "a") as file:  # a later row, and one that a kill has torn
        file.write('{"step": 99, "loss": 1.0}\n{"step": 100, "lo')
    second = command("train.py", *arguments(work, **settings), "--resume")
    assert second.status == 0, second.err
    assert f"resumed at step {k}" in second.out
    assert_equal(adapter_of(work, name), adapter_of(work, "whole"))
    # Stopping evaluates and logs at step k, and the loss is logged at the last step only:
    # the rows of all other steps are equal.
    expected = [row for row in rows_of(work, "whole") if row["step"] != k]
    assert [row for row in rows_of(work, name) if row["step"] != k] == expected
    results = [result_of(work, n) for n in (name, "whole")]
    assert results[0]["rows"] == results[1]["rows"]
    assert results[0]["step"] == 6


def test_evaluating_at_every_step_or_never_changes_nothing_in_training(work, whole):
    run = command("train.py", *arguments(work, name="watched_closely", eval_every=1))
    assert run.status == 0, run.err
    assert_equal(adapter_of(work, "watched_closely"), adapter_of(work, "whole"))
    losses = [[(row["step"], row["loss"]) for row in rows_of(work, name) if "loss" in row]
              for name in ("watched_closely", "whole")]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == [6]
    evals = [row["step"] for row in rows_of(work, "watched_closely") if "eval" in row]
    assert evals == [1, 2, 3, 4, 5, 6]


def test_ranks_and_workers_together_see_each_sample_once_and_no_noise_twice(work):
    cfg, tokenizer = config(work, global_batch=5, micro_batch=2, steps=8), ByteTokenizer()
    windows = Windows(load_corpus(cfg.data, tokenizer), cfg.seqlen, tokenizer.pad_id)
    data = DiffusionDataset(windows, tokenizer, cfg.global_batch, cfg.steps, cfg.seed)
    seen = {}
    for rank in (0, 1):
        sampler = train.MicroBatches(cfg, 0, rank, 2)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=2)
        for places, item in zip(sampler, loader):
            for i, place in enumerate(places):
                assert place not in seen
                seen[place] = {key: value[i] for key, value in item.items()}
    assert sorted(seen) == list(range(len(data)))
    assert all(torch.equal(seen[k][key], data[k][key]) for k in seen for key in data[k])
    assert len({item["t"].item() for item in seen.values()}) == len(data)


def test_sigterm_saves_says_so_and_the_run_can_go_on(work, tmp_path):
    """A real process: killed while it trains a schedule that would take an hour."""
    repository = tmp_path / "repository"
    repository.mkdir()
    for path in ROOT.glob("*.py"):
        (repository / path.name).write_bytes(path.read_bytes())
    settings = arguments(work, name="long", steps=100_000, save_every=100_000, workers=1)
    process = subprocess.Popen([sys.executable, "train.py", *settings], cwd=repository, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics, folder = repository / "runs/long/metrics.jsonl", repository / "runs/long"
    deadline = time.time() + 120
    while not metrics.exists() and time.time() < deadline and process.poll() is None:
        time.sleep(0.1)
    assert metrics.exists(), process.communicate(timeout=10)
    asked = time.time()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert time.time() - asked < 20
    assert process.returncode == 0 and not err.strip(), err
    state = torch.load(folder / "last.pt", weights_only=True)
    assert 10 <= state["step"] < 100_000
    assert f"step {state['step']}" in out.splitlines()[-1] and "--resume" in out.splitlines()[-1]
    with tiny.root_at(repository):
        more = command("train.py", *settings, "--resume", "--max-steps", state["step"] + 1)
    assert more.status == 0 and f"resumed at step {state['step']}" in more.out
    straight = torch.load(folder / "last.pt", weights_only=True)
    with tiny.root_at(repository):
        settings[settings.index("long")] = "straight"
        assert command("train.py", *settings, "--max-steps", state["step"] + 1).status == 0
    other = torch.load(repository / "runs/straight/last.pt", weights_only=True)
    assert_equal(straight["adapter"], other["adapter"])


def test_the_same_command_with_resume_starts_continues_and_repeats_a_run(work, whole):
    """What torchrun --max-restarts needs: no word about which attempt it is."""
    settings = [*arguments(work, name="restarted", save_every=2, eval_every=4), "--resume"]
    assert command("train.py", *settings, "--max-steps", "3").status == 0
    run = command("train.py", *settings)
    assert run.status == 0 and "resumed at step 3" in run.out
    assert_equal(adapter_of(work, "restarted"), adapter_of(work, "whole"))
    assert command("train.py", *settings).status == 0  # nothing is left to do
    assert_equal(adapter_of(work, "restarted"), adapter_of(work, "whole"))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(work):
    settings = arguments(work, name="explodes", save_every=1)
    assert command("train.py", *settings, "--max-steps", "2").status == 0
    folder = work / "runs/explodes"
    state = torch.load(folder / "last.pt", weights_only=True)
    state["adapter"]["mlp.0.weight"][0, 0, 0] = math.nan
    torch.save(state, folder / "last.pt")
    kept = (folder / "last.pt").read_bytes()
    run = command("train.py", *settings, "--resume")
    assert run.status == 2
    assert run.err.count("\n") == 1 and "step 3" in run.err and "nan" in run.err
    assert (folder / "last.pt").read_bytes() == kept


def test_a_gradient_that_is_not_finite_moves_no_parameter(work):
    denoiser = make_denoiser(work, torch.float64)
    cfg = config(work)
    loader = torch.utils.data.DataLoader(tiny.Handmade((5, 5, 5, 5)),
                                         batch_sampler=train.MicroBatches(cfg, 0, 0, 1))
    denoiser.adapter.magnitude.register_hook(lambda gradient: gradient * math.inf)
    optimizer = torch.optim.AdamW(denoiser.adapter.parameters())
    before = {k: v.clone() for k, v in denoiser.adapter.state_dict().items()}
    with pytest.raises(common.UserError, match="step 1.*gradient"):
        train.train_steps(cfg, denoiser, optimizer, loader, ByteTokenizer(), 0, lambda: False,
                          lambda *args: pytest.fail("a step was taken"))
    assert_equal(denoiser.adapter.state_dict(), before)


# --------------------------------------------------------------------------------------- numbers

EXTREMES = {  # what each mixer or norm of the backbone is changed to
    "A_log 20": lambda mixer: mixer.A_log.fill_(20.0),
    "A_log -20": lambda mixer: mixer.A_log.fill_(-20.0),
    "dt 1e4": lambda mixer: mixer.dt_bias.fill_(1e4),
    "dt -1e4": lambda mixer: mixer.dt_bias.fill_(-1e4),
    "A_log and dt by head": lambda mixer: (
        mixer.A_log.copy_(torch.linspace(-20, 20, len(mixer.A_log))),
        mixer.dt_bias.copy_(torch.linspace(1e4, -1e4, len(mixer.dt_bias)))),
    "dt by token": lambda mixer: mixer.in_proj.weight[-2 * len(mixer.D):].mul_(1e5),
    "memory without end": lambda mixer: (mixer.A_log.fill_(-20.0), mixer.dt_bias.fill_(1e4)),
}


@pytest.mark.parametrize("hidden", [1.0, 1e4])
@pytest.mark.parametrize("kernel, dtype", [
    ("hypernet", torch.float32), ("chebyshev", torch.float32), ("dct", torch.float32),
    ("chebyshev", torch.bfloat16), ("adaln", torch.bfloat16)])
def test_extreme_weights_times_masks_and_lengths_leave_loss_and_gradients_finite(
        work, kernel, dtype, hidden):
    """Nothing, everything or one token masked, at t = 0 and 1, in windows of one token and more."""
    for name, change in EXTREMES.items():
        backbone = load_backbone(work / "backbone.safetensors", dtype)
        with torch.no_grad():
            for layer in backbone.layers:
                change(layer.mixer)
            for norm in (backbone.embedding_norm, *(layer.norm for layer in backbone.layers)):
                norm.weight *= hidden
        torch.manual_seed(0)
        adapter = tiny.awake(make_adapter(kernel, backbone.config, mlp_dim=16))
        denoiser = train.Denoiser(backbone, adapter)
        for l in (1, 2, 65):
            x0 = torch.arange(4 * l).reshape(4, l)
            masked = torch.stack([x0[0] < 0, x0[0] >= 0, x0[0] == 0, x0[0] % 2 == 0])
            ce = denoiser(x0.masked_fill(masked, 259), torch.tensor([0.0, 1.0, 1e-3, 0.5]), x0,
                          masked, torch.ones_like(masked))
            loss = cart_loss(ce, masked, cart_weights(masked)) + ce.sum()
            gradients = torch.autograd.grad(loss, list(adapter.parameters()), allow_unused=True)
            finite = [v.isfinite().all() for v in (ce, *gradients) if v is not None]
            assert all(finite) and len(finite) > 4, (name, l)


def losses_of(work, weights, text, seqlen, bf16):
    """The loss of each of 50 steps."""
    cfg, tokenizer, rows = config(work, steps=50, warmup=5, seqlen=seqlen), ByteTokenizer(), []
    backbone = load_backbone(weights, torch.bfloat16 if bf16 else torch.float32)
    torch.manual_seed(0)
    denoiser = train.Denoiser(backbone, make_adapter("chebyshev", backbone.config, mlp_dim=16))
    kept = [p for name, p in denoiser.named_parameters() if name.startswith("adapter")
            or name.endswith(("A_log", "dt_bias", "mixer.D"))]
    assert {p.dtype for p in kept} == {torch.float32}
    windows = Windows(load_corpus(text, tokenizer), seqlen, tokenizer.pad_id)
    data = DiffusionDataset(windows, tokenizer, 4, 50, 42)
    loader = torch.utils.data.DataLoader(data, batch_sampler=train.MicroBatches(cfg, 0, 0, 1))
    optimizer = torch.optim.AdamW(denoiser.adapter.parameters())
    train.train_steps(cfg, denoiser, optimizer, loader, tokenizer, 0, lambda: False,
                      lambda step, numbers, stop: rows.append(numbers["loss"]))
    return torch.tensor(rows)


def test_a_bf16_backbone_trains_within_two_percent_of_a_float32_one_over_50_steps(work):
    inputs = work, work / "backbone.safetensors", work / "text.txt", 24
    exact, rounded = losses_of(*inputs, bf16=False), losses_of(*inputs, bf16=True)
    assert ((rounded / exact - 1).abs() < 0.02).all() and not torch.equal(rounded, exact)


@pytest.mark.slow
def test_the_shipped_backbone_in_bf16_trains_within_two_percent_of_float32(work):
    exact, rounded = (losses_of(work, "small", "embedded", 64, bf16) for bf16 in (False, True))
    print("largest difference of a loss:", (rounded / exact - 1).abs().max().item())
    assert ((rounded / exact - 1).abs() < 0.02).all()


# ---------------------------------------------------------------------------------- the run folder

@pytest.mark.parametrize("weighting, unit", [("cart", "CART"), ("elbo", "ELBO")])
def test_the_figure_shows_the_loss_that_is_trained(work, weighting, unit):
    """From the frozen backbone on, in the unit of the weighting, beside its own line."""
    rows = [{"step": 1, "loss": 5.0}, {"step": 2, "eval": {"cart": 0.5, "elbo": 1.8}}]
    at_start = {"cart": 0.7, "elbo": 2.0}
    ax = common.new_figure(2, 2).subplots()
    train.draw_curve(ax, config(work, weighting=weighting), rows, at_start)
    held_out, frozen = ax.lines
    assert unit in ax.get_ylabel()
    assert list(held_out.get_xdata()) == [0, 2]
    assert list(held_out.get_ydata()) == [at_start[weighting], rows[1]["eval"][weighting]]
    assert set(frozen.get_ydata()) == {at_start[weighting]}


def test_a_run_leaves_its_files_and_says_what_was_gained_and_what_is_next(work, whole):
    folder = work / "runs/whole"
    assert {p.name for p in folder.iterdir()} - {".lock"} == {
        "config.json", "metrics.jsonl", "training_whole.png", "adapter.safetensors", "last.pt",
        "result.json"}
    about = json.loads((folder / "config.json").read_text())
    assert about["config"]["seqlen"] == 24 and set(about["inputs"]) == {"weights", "data", "valid"}
    assert {"commit", "dirty", "torch", "hardware"} <= about.keys()
    from matplotlib.image import imread
    picture = imread(folder / "training_whole.png")
    assert picture.shape[0] > 100 and picture.shape[1] > 100 and picture.std() > 0
    assert [row["step"] for row in rows_of(work, "whole") if "eval" in row] == [4, 6]
    assert all("spread" in row for row in rows_of(work, "whole") if "eval" in row)
    result = result_of(work, "whole")
    assert list(result["rows"]) == ["uniform", "unigram", "frozen", "chebyshev",
                                    "chebyshev, shuffled t"]
    assert result["tokens"] == 6 * 4 * 24
    *_, following, last = whole.out.strip().splitlines()
    gain = common.Interval(*result["comparison"]["gain"])
    assert last.startswith("chebyshev: ELBO ") and f"gain {gain.show(digits=3)}" in last
    assert f"next: python evaluate.py --adapter {os.path.relpath(work / 'runs/whole')}" in following
    assert f"--data text={work / 'text.txt'}" in following
    assert "about" in whole.out and "s left" in whole.out  # by step 5, off a terminal too
    assert whole.out.startswith("-----") and "masked" in whole.out and not whole.err


class Board:
    """In place of TensorBoard's SummaryWriter: keeps what it is given, by folder."""
    kept = {}

    def __init__(self, folder, purge_step):
        self.points = Board.kept.setdefault((folder, purge_step), {})

    def add_scalar(self, name, value, step):
        self.points.setdefault(name, []).append((step, value))

    def flush(self):
        pass


def test_tensorboard_is_given_every_number_that_is_recorded(work, monkeypatch):
    """In the run folder; what a resumed run records again replaces what a killed one did."""
    fake = SimpleNamespace(SummaryWriter=Board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setattr(Board, "kept", {})
    for more in ({"max_steps": 3}, {"resume": True}):
        run = command("train.py", *arguments(work, name="board", eval_every=2, tensorboard=True,
                                             **more))
        assert run.status == 0, run.err
    folder = work / "runs/board"
    assert list(Board.kept) == [(folder, 1), (folder, 4)]
    shown = {}
    for points in Board.kept.values():
        for name, values in points.items():
            shown.setdefault(name, []).extend(values)
    rows = rows_of(work, "board")
    for name in ("loss", "gradient_norm", "lr"):
        assert shown[name] == [(row["step"], row[name]) for row in rows if name in row]
    for name in ("elbo", "cart", "gap"):
        assert shown[name] == [(row["step"], row["eval"][name]) for row in rows if "eval" in row]
    assert len(shown["tokens_per_second"]) == len(shown["loss"]) == 2


def test_without_tensorboard_the_flag_is_refused_before_any_work_and_nothing_else(
        work, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # not installed
    run = command("train.py", *arguments(work, name="no_board", tensorboard=True))
    assert run.status == 2 and run.err.startswith("error: --tensorboard: ")
    assert run.err.count("\n") == 1 and "pip install tensorboard" in run.err and not run.out
    assert not (work / "runs/no_board").exists()
    run = command("train.py", *arguments(work, name="plain", steps=1, warmup=0, eval_every=0))
    assert run.status == 0, run.err


def test_ranks_other_than_the_first_write_no_tensorboard(work, monkeypatch):
    fake = SimpleNamespace(SummaryWriter=Board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setattr(Board, "kept", {})
    for rank, boards in ((1, 0), (0, 1)):
        monkeypatch.setattr(common, "rank_and_world", lambda: (rank, 2))
        train.Journal(config(work, tensorboard=True), work, None, None, None, 0, [])
        assert len(Board.kept) == boards


def test_the_suggested_next_command_works_as_printed(work, whole):
    following = whole.out.strip().splitlines()[-2].partition("next: python ")[2].split()
    following += ["--windows", "4", "--seeds", "1", "--seqlen", "24"]
    run = command(*following)
    assert run.status == 0, run.err
    assert "wrote " in run.out.splitlines()[-1]


def test_the_first_command_gains_on_held_out_text_and_leaves_its_files(tmp_path):
    """The demo on the shipped backbone and text, cut to 20 steps of 8 windows."""
    with tiny.root_at(tmp_path):
        run = command("train.py", "--kernel", "chebyshev", "--steps", 20, "--eval-every", 0,
                      "--eval-windows", 64, "--global-batch", 8, "--device", "cpu")
    assert run.status == 0, run.err
    folder = tmp_path / "runs/demo_chebyshev"
    for name in ("adapter.safetensors", "result.json", "metrics.jsonl",
                 "training_demo_chebyshev.png"):
        assert (folder / name).stat().st_size > 100, name
    found = result_of(tmp_path, "demo_chebyshev")["comparison"]
    gain = common.Interval(*found["gain"])
    assert gain.mean > gain.half > 0 and gain.n == 64
    assert found["frozen"]["elbo"] - found["adapter"]["elbo"] == pytest.approx(gain.mean)


def test_at_the_start_the_adapter_scores_as_the_frozen_backbone(work):
    """One step at rate 0: the identity, evaluated through the whole pipeline, bit for bit."""
    run = command("train.py", *arguments(work, name="still", max_steps=1, lr=0.0))
    assert run.status == 0, run.err
    rows = result_of(work, "still")["rows"]
    assert rows["frozen"].items() <= rows["chebyshev"].items()
    assert rows["chebyshev"]["gap"] == 0.0


def refused(run, *words):
    assert run.status == 2 and run.err.count("\n") == 1 and run.err.startswith("error: "), run
    assert all(word in run.err for word in words), run.err


def test_an_existing_folder_is_refused_without_resume_or_overwrite(work, whole):
    before = {p.name: p.read_bytes() for p in (work / "runs/whole").iterdir()}
    run = command("train.py", *arguments(work, name="whole"))
    refused(run, "--resume", "--overwrite", "--name")
    assert not run.out, "work was done before the refusal"
    assert {p.name: p.read_bytes() for p in (work / "runs/whole").iterdir()} == before


def test_overwrite_replaces_a_run_and_nothing_else(work):
    folder = work / "runs/replaced"
    settings = arguments(work, name="replaced", max_steps=1)
    assert command("train.py", *settings).status == 0
    (folder / "notes.txt").write_text("x")
    (folder / ".last.pt.7.tmp").write_text("x")
    again = command("train.py", *settings, "--overwrite")
    assert again.status == 0 and (folder / "notes.txt").exists()
    assert not (folder / ".last.pt.7.tmp").exists()
    precious = work / "runs/precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    run = command("train.py", *arguments(work, name="precious", max_steps=1), "--overwrite")
    refused(run, "precious", "--name")
    assert (precious / "thesis.txt").exists()


@pytest.mark.parametrize("flag, value, word", [("--seqlen", 16, "seqlen was 24"),
                                               ("--lr", 0.1, "lr was 0.004"),
                                               ("--kernel", "dct", "kernel was 'chebyshev'"),
                                               ("--n-shifts", 2, "n_shifts was None")])
def test_resuming_with_other_settings_names_the_setting(work, whole, flag, value, word):
    settings = arguments(work, name="whole", save_every=2, eval_every=4)
    run = command("train.py", *settings, flag, value, "--resume")
    refused(run, word)


def test_resuming_with_a_longer_text_or_other_weights_is_refused(work):
    """Under the same names: their contents count."""
    (work / "grows.txt").write_bytes((work / "text.txt").read_bytes())
    weights = work / "other.safetensors"
    weights.write_bytes((work / "backbone.safetensors").read_bytes())
    settings = arguments(work, name="grows", data="grows.txt", weights=weights)
    assert command("train.py", *settings, "--max-steps", 2).status == 0
    with open(work / "grows.txt", "a", encoding="utf-8") as file:
        file.write("\n\n" + "One more document, which goes to train or to valid. " * 3)
    refused(command("train.py", *settings, "--resume"), "has changed", "grows")
    (work / "grows.txt").write_bytes((work / "text.txt").read_bytes())
    state = safetensors.torch.load_file(weights)
    state["decoder_bias"] += 0.5
    safetensors.torch.save_file(state, weights)
    refused(command("train.py", *settings, "--resume"), "--weights has changed")


def test_a_damaged_checkpoint_is_named(work, whole):
    early = work / "runs/early"
    early.mkdir()
    about = (work / "runs/whole/config.json").read_text().replace('"whole"', '"early"')
    (early / "config.json").write_text(about)
    (early / "last.pt").write_bytes((work / "runs/whole/last.pt").read_bytes()[:-99])
    settings = arguments(work, name="early", save_every=2, eval_every=4)
    refused(command("train.py", *settings, "--resume"), "last.pt", "--overwrite")


@pytest.mark.parametrize("flag, value, words", [
    ("--kernel", "fourier", ("kernel", "fourier", "dct")),
    ("--kernel", "none", ("kernel", "none")),
    ("--modulate", "E", ("modulate", "all-except-A")),
    ("--weighting", "nll", ("weighting", "cart", "elbo")),
    ("--preset", "huge", ("preset", "huge", "paper")),
    ("--global-batch", "0", ("global-batch", "0")),
    ("--steps", "0", ("steps", "0")),
    ("--max-steps", "7", ("max-steps", "7", "6")),
    ("--max-steps", "-1", ("max-steps", "-1")),
    ("--lr", "nan", ("lr", "nan")),
    ("--workers", "-1", ("workers", "-1")),
    ("--n-shifts", "3", ("n_shifts", "3")),
    ("--cart-p", "0", ("0.0",)),
    ("--data", "nowhere.txt", ("nowhere.txt",)),
    ("--weights", "nowhere.pt", ("nowhere.pt",)),
    ("--vocab", "nowhere.txt", ("nowhere.txt",)),
])
def test_a_wrong_setting_is_one_line_and_no_folder(work, flag, value, words):
    refused(command("train.py", *arguments(work, name="wrong"), flag, value), *words)
    assert not (work / "runs/wrong").exists()


def test_more_ranks_than_sequences_are_refused(work, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    refused(command("train.py", *arguments(work, name="wrong")), "global-batch", "8")


def test_half_a_process_group_in_the_environment_is_one_line(work, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    refused(command("train.py", *arguments(work, name="wrong")), "WORLD_SIZE=2", "torchrun")


def test_a_world_size_that_is_no_number_is_one_line(work, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    refused(command("train.py", *arguments(work, name="wrong")), "WORLD_SIZE=abc")


def test_a_rank_left_in_the_environment_silences_nothing(work, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    run = command("train.py", *arguments(work, name="ranked", max_steps=1))
    assert run.status == 0 and "next: python evaluate.py" in run.out
    assert (work / "runs/ranked/adapter.safetensors").exists()


def test_a_backbone_with_another_vocabulary_is_refused(work):
    vocab = work / "four.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    refused(command("train.py", *arguments(work, name="wrong", vocab=vocab)), "6", "260", "--vocab")


# --------------------------------------------------------------------------------- the paper's run

TABLES = dict(  # Tables 6 to 8, and our reading of them
    weights="goombalab/hydra", vocab="bert-base-uncased", seqlen=4096, global_batch=112,
    steps=14_400, warmup=720, lr=6e-4, min_lr_ratio=0.1, weight_decay=0.01, clip=1.0, cart_p=0.45,
    mlp_dim=256, n_shifts=None, bf16=True, checkpointing=False, workers=8, weighting="cart",
    modulate="full", device="cuda", data=())


@pytest.fixture(scope="module")
def paper(work):
    """Flags of what the preset needs: a backbone in the released layout, its vocabulary, a GPU."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{word}" for word in words[6:]] + [f"word{i}" for i in range(6)]
    (work / "vocab.txt").write_text("\n".join(words) + "\n")
    sizes = HydraConfig(len(words), d_model=32, n_layer=3, d_state=4, headdim=16)
    write_released_layout(work / "hydra.pt", sizes)
    return {"--weights": work / "hydra.pt", "--vocab": work / "vocab.txt",
            "--data": work / "text.txt", "--device": "cpu"}


def flags(settings):
    return [str(part) for pair in settings.items() for part in pair]


def test_the_preset_holds_the_values_of_the_papers_tables(work, paper):
    """As the command resolves them: read from what the banner prints."""
    given = {k: v for k, v in paper.items() if k == "--device"} | {"--data": work / "text.txt"}
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--preset", "paper"])
        patch.setattr(train, "main", seen.append)
        common.run_cli(train.Config, train.main, train.PRESETS)
        patch.setattr(sys, "argv", ["train.py", "--seqlen", "128", "--preset=paper", "--no-bf16",
                                    "--steps", "350", *flags(given)])
        common.run_cli(train.Config, train.main, train.PRESETS)
    assert TABLES.items() <= vars(seen[0]).items()
    # What the user gives wins, also where it is the demo's default.
    assert vars(seen[1]) == {**vars(seen[0]), "seqlen": 128, "bf16": False, "steps": 350,
                             "device": "cpu", "data": (str(work / "text.txt"),)}


@pytest.mark.parametrize("missing, words", [
    ("--device", ("GPU", "--device cpu")), ("--data", ("--data", "experiments.mixture")),
    ("--weights", ("hydra_bert_23layers.pt", "--weights", "HF_ENDPOINT")),
    ("--vocab", ("vocab.txt", "HF_ENDPOINT"))])
def test_the_preset_names_the_one_thing_that_is_missing(work, paper, monkeypatch, missing, words):
    import huggingface_hub.constants as hub
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(work / "empty_cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = {k: v for k, v in paper.items() if k != missing}
    run = command("train.py", "--preset", "paper", "--name", "wrong", *flags(given))
    refused(run, *words)
    assert not run.out.strip() and not (work / "runs/wrong").exists()


def test_the_preset_runs_on_a_cpu_in_bf16_with_checkpointing(work, paper):
    run = command("train.py", "--preset", "paper", *flags(paper), "--seqlen", 32,
                  "--global-batch", 2, "--max-steps", 2, "--workers", 2, "--checkpointing")
    assert run.status == 0, run.err
    folder = work / "runs/paper_chebyshev"
    settings = json.loads((folder / "config.json").read_text())["config"]
    assert settings["bf16"] and settings["checkpointing"] and settings["warmup"] == 720
    assert "bfloat16" in run.out
    tensors, about = load_adapter(folder, load_backbone(paper["--weights"]).config)
    assert about["step"] == 2
    assert all(v.isfinite().all() for v in tensors.state_dict().values())
    state = torch.load(folder / "last.pt", weights_only=True)  # adapter and moments in float32
    assert {v.dtype for v in state["adapter"].values()} == {torch.float32}
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(6e-4 * 2 / 720)


# ----------------------------------------------------------------------------- full-size rehearsal

LOAD = """
import json, resource, sys, time
import hydra_ssm
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, began = peak(), time.time()
model = hydra_ssm.load_backbone(sys.argv[1])
print(json.dumps({"load_seconds": time.time() - began, "load_bytes": peak() - before,
                  "parameters": sum(p.numel() for p in model.parameters())}))
"""
LAUNCH = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(status)
"""


def launch(*argv, cwd):
    """Run python argv -> its output's lines, and its peak memory in bytes.

    Through a small process: Linux counts a parent's peak, here that of pytest, as its child's.
    """
    run = subprocess.run([sys.executable, "-c", LAUNCH, sys.executable, *argv], cwd=cwd, text=True,
                         capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    *lines, peak = run.stdout.splitlines()
    return lines, int(peak)


def write_full_size_inputs(folder):
    """A random checkpoint as large as the released one, 30,522 words, and text made of them."""
    write_released_layout(folder / "hydra.pt", HydraConfig(), rows=30_528)
    draw, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [".", *letters, *(f"##{letter}" for letter in letters)]
    made = set()
    while len(words) + len(made) < 30_522:
        made.add("".join(draw.choices(letters, k=draw.randint(3, 9))))
    words += sorted(made)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    documents = (" ".join(draw.choices(words[157:], k=500)) for _ in range(80))
    (folder / "text.txt").write_text("\n\n".join(documents))


@pytest.mark.slow
def test_full_size_rehearsal(tmp_path):
    """The paper's run at the released size: loads in time and memory, then trains two steps.

    MARK_PUBLISH=1 writes the measurement to runs/rehearsal/, for experiments.publish.
    """
    write_full_size_inputs(tmp_path)
    repository = tmp_path / "repository"
    repository.mkdir()
    for path in ROOT.glob("*.py"):
        (repository / path.name).write_bytes(path.read_bytes())
    lines, _ = launch("-c", LOAD, tmp_path / "hydra.pt", cwd=repository)
    result = json.loads(lines[-1])
    assert result["parameters"] == 112_082_098
    # Half of the checkpoint's size at least: else the peak was there before, and nothing measured.
    assert result["load_seconds"] < 20 and 0.22e9 < result["load_bytes"] < 1.5e9

    given = ["--preset", "paper", "--weights", "../hydra.pt", "--data", "../text.txt",
             "--vocab", "../vocab.txt", "--device", "cpu", "--seqlen", "512", "--global-batch", "2",
             "--max-steps", "2"]
    began = time.time()
    _, peak = launch("train.py", *given, cwd=repository)
    folder = repository / "runs/paper_chebyshev"
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    trained = [row for row in rows if "loss" in row]
    assert trained[-1]["step"] == 2 and math.isfinite(trained[-1]["loss"])
    result |= {"command": ["train.py", *given], "seconds": time.time() - began,
               "tokens_per_second": trained[-1]["tokens_per_second"],
               "peak_bytes": peak}
    assert result["peak_bytes"] < 12e9
    if os.environ.get("MARK_PUBLISH"):
        env = {"script": "train", "began": began, **common.environment()}
        settings = {"preset": "paper", "kernel": "chebyshev"}
        common.save_result(ROOT / "runs/rehearsal/result.json", result, settings, env)
    print(json.dumps(result, indent=1))
