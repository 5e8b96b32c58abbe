"""Pretraining: the trigram by counting in dictionaries, fixed masks, a run that learns."""
import json
import math
import os
import random
import signal
from collections import Counter

import numpy as np
import pytest
import tiny
import torch
from tiny import command

import checkpoint
import train
from checkpoint import load_backbone
from data import Windows, load_corpus
from experiments import pretrain
from hydra_ssm import HydraBert
from text import ByteTokenizer

TOKENIZER = ByteTokenizer()
RUN = ("--seqlen", 32, "--batch", 4, "--steps", 20, "--d-model", 32, "--n-layer", 2, "--d-state", 4,
       "--headdim", 16, "--save-every", 10, "--eval-windows", 30, "--lr", 0.02)


def start(work, name, *more):
    text = work / "text.txt"
    return command("experiments.pretrain", *RUN, "--data", text, "--valid", f"held-out={text}",
                   "--name", name, *more)


def held_out_of(work, name):
    """What the run's result says of each held-out text."""
    result = json.loads((work / "runs" / name / "result.json").read_text("utf-8"))
    return result["metrics"]["held_out"]


@pytest.fixture(scope="module")
def whole(work):
    run = start(work, "whole")
    assert run.status == 0, run.err
    return run


# -------------------------------------------------------------------------------------- yardstick

def test_the_trigram_is_what_counting_in_dictionaries_gives():
    draw = random.Random(3)
    text = "".join(draw.choice("aaabbc") + draw.choice("ab") for _ in range(200))
    scored = "abacabbacaab" + "zz"
    holes = (0, 1, 4, 5, 8, 9, 12, 13)  # both ends, and letters that the text does not have
    ids, x0 = (np.frombuffer(s.encode(), np.uint8).astype(np.uint16) for s in (text, scored))
    x0 = torch.from_numpy(x0.astype(np.int64))[None]
    masked = torch.zeros_like(x0, dtype=torch.bool)
    masked[0, list(holes)] = True

    triples, pairs = Counter(zip(text, text[1:], text[2:])), Counter()
    after, before = Counter(), Counter()  # of the middle, given its left or right neighbour
    for (left, x, right), n in triples.items():
        pairs[left, right] += n
        after[left, x] += n
        before[x, right] += n
    v, best = 260, math.inf
    for k in (.3, 1, 3, 10, 30, 100, 300):
        total = 0.0
        for i in holes:
            left = scored[i - 1] if i else None
            right = scored[i + 1] if i + 1 < len(scored) else None
            x = scored[i]
            lefts = sum(n for (a, _), n in after.items() if a == left)
            rights = sum(n for (_, a), n in before.items() if a == right)
            q = 0.5 * ((after[left, x] + 0.5) / (lefts + 0.5 * v)
                       + (before[x, right] + 0.5) / (rights + 0.5 * v))
            total -= math.log((triples[left, x, right] + k * q) / (pairs[left, right] + k))
        best = min(best, total / len(holes))
    # Both in float64: sums in another order.
    assert pretrain.trigram_nats(ids, x0, masked, v) == pytest.approx(best, rel=1e-12)


def test_held_out_windows_and_masks_never_change(work):
    windows = Windows(load_corpus(work / "text.txt", TOKENIZER), 32, TOKENIZER.pad_id)
    first = pretrain.held_out(windows, 50, 0.3, TOKENIZER, 42)
    torch.rand(5)
    for a, b in zip(first, pretrain.held_out(windows, 50, 0.3, TOKENIZER, 42)):
        assert torch.equal(a, b)
    x0, x_t, masked = first
    assert len(x0) == 50 < len(windows)
    for i in (0, 30, 49):                                  # the middle of each fiftieth
        assert torch.equal(x0[i], torch.from_numpy(windows[int((i + 0.5) * len(windows) / 50)]))
    assert torch.equal(x_t, x0.masked_fill(masked, TOKENIZER.mask_id))
    assert not (masked & (x0 > 255)).any()
    share = masked.sum() / (x0 < 256).sum()
    assert 0.26 < share < 0.34  # 0.3 +- 3.5 standard errors of 1,500 draws
    assert not torch.equal(pretrain.held_out(windows, 50, 0.3, TOKENIZER, 43)[2], masked)


def test_the_models_nats_are_the_mean_over_masked_bytes_of_all_batches(work):
    model = load_backbone(work / "backbone.safetensors")
    windows = Windows(load_corpus(work / "text.txt", TOKENIZER), 32, TOKENIZER.pad_id)
    x0, x_t, masked = pretrain.held_out(windows, 60, 0.3, TOKENIZER, 42)
    total = 0.0
    with torch.no_grad():
        for clean, corrupted, holes in zip(x0, x_t, masked):
            real = clean != TOKENIZER.pad_id
            logp = model(corrupted[real][None])[0].log_softmax(-1).double()
            total -= sum(logp[i, clean[i]].item() for i in holes.nonzero().flatten().tolist())
    got = pretrain.model_nats(model, x0, x_t, masked, TOKENIZER.pad_id, batch=7)
    assert got == pytest.approx(total / masked.sum().item(), rel=1e-5)  # a float32 model


# ---------------------------------------------------------------------------------------- the run

def test_a_short_run_learns_and_its_weights_load(work, whole):
    folder = work / "runs/whole"
    valid = [row["valid"]["held-out"] for row in checkpoint.read_metrics(folder) if "valid" in row]
    assert len(valid) == 2 and valid[1] < valid[0] < math.log(260) + 0.5
    result = json.loads((folder / "result.json").read_text())["metrics"]
    held = result["held_out"]["held-out"]
    assert held["model"] < 4.0 < math.log(256) == pytest.approx(result["uniform"])
    model = load_backbone(folder / "backbone.safetensors")
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
    state = torch.load(folder / "last.pt", weights_only=True)["model"]
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert sum(p.numel() for p in model.parameters()) == result["parameters"]
    # The loaded model scores what the run reports, on the held-out 5 %, not on the training text.
    windows = Windows(load_corpus(work / "text.txt", TOKENIZER, "valid"), 32, TOKENIZER.pad_id)
    scored = pretrain.held_out(windows, 30, 0.3, TOKENIZER, 42)
    assert pretrain.model_nats(model, *scored, TOKENIZER.pad_id) == pytest.approx(held["model"])
    assert int(scored[2].sum()) == held["masked"]
    last = whole.out.strip().splitlines()[-1]
    assert f"{held['model']:.3f}" in last and f"{held['trigram']:.3f}" in last


def test_a_stopped_run_resumes_bit_equal(work, whole, monkeypatch):
    save = checkpoint.save_state

    def save_and_die(path, **state):
        save(path, **state)
        raise RuntimeError("killed")

    monkeypatch.setattr(checkpoint, "save_state", save_and_die)
    with pytest.raises(RuntimeError, match="killed"):
        start(work, "stopped")
    monkeypatch.undo()
    assert torch.load(work / "runs/stopped/last.pt", weights_only=True)["step"] == 10
    assert start(work, "stopped", "--resume").status == 0
    states = [torch.load(work / "runs" / name / "last.pt", weights_only=True)["model"]
              for name in ("whole", "stopped")]
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())
    one, two = (held_out_of(work, name) for name in ("whole", "stopped"))
    assert one == two


def test_sigterm_saves_the_step_and_the_run_ends_bit_equal(work, whole, monkeypatch):
    rate, asked = train.learning_rate, []

    def rate_and_signal(step, *args):
        if step == 6 and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
        return rate(step, *args)

    monkeypatch.setattr(train, "learning_rate", rate_and_signal)
    run = start(work, "asked")
    assert run.status == 0 and "stopped at step 7 of 20 and saved" in run.out.splitlines()[-1]
    assert torch.load(work / "runs/asked/last.pt", weights_only=True)["step"] == 7
    assert start(work, "asked", "--resume").status == 0
    states = [torch.load(work / "runs" / name / "last.pt", weights_only=True)["model"]
              for name in ("whole", "asked")]
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())


def test_a_run_killed_before_its_first_checkpoint_is_resumed_at_its_beginning(work, whole):
    assert start(work, "early", "--steps", 10).status == 0
    (work / "runs/early/last.pt").unlink()
    assert start(work, "early", "--steps", 10, "--resume").status == 0
    assert torch.load(work / "runs/early/last.pt", weights_only=True)["step"] == 10


def test_a_loss_that_is_not_finite_names_the_step_and_overwrites_nothing(work, whole):
    assert start(work, "explodes").status == 0
    path = work / "runs/explodes/last.pt"
    state = torch.load(path, weights_only=True)
    state["model"]["decoder_bias"][0], state["step"] = math.nan, 15
    checkpoint.save_state(path, **state)
    before = path.read_bytes()
    run = start(work, "explodes", "--resume")
    assert run.status == 2 and run.err.count("\n") == 1 and "step 16" in run.err
    assert path.read_bytes() == before


def test_batches_of_one_byte_of_which_most_mask_nothing_stay_finite(work):
    run = start(work, "bytes", "--seqlen", 1, "--batch", 1, "--eval-windows", 300)
    assert run.status == 0, run.err
    held = held_out_of(work, "bytes")["held-out"]
    assert held["model"] < 10 and held["masked"] > 50


def test_matrices_decay_and_norms_biases_and_a_log_do_not(work, whole):
    state = torch.load(work / "runs/whole/last.pt", weights_only=True)
    decayed, spared = state["optimizer"]["param_groups"]
    parameters = list(HydraBert(tiny.CONFIG).parameters())
    assert decayed["weight_decay"] > 0 == spared["weight_decay"]
    assert len(decayed["params"]) == sum(p.ndim > 1 for p in parameters)
    assert len(decayed["params"]) + len(spared["params"]) == len(parameters)


@pytest.mark.parametrize("argv, words", [
    (("--preset", "huge"), ("--preset", "huge", "small")),
    (("--data", "nowhere.txt"), ("nowhere.txt",)),
    (("--valid", "x=nowhere.txt"), ("nowhere.txt",)),
])
def test_a_wrong_setting_is_one_line_and_no_folder(work, argv, words):
    run = start(work, "wrong", *argv)
    assert run.status == 2 and run.err.count("\n") == 1, run.err
    assert all(word in run.err for word in words), run.err
    assert not (work / "runs/wrong").exists()


def test_an_existing_run_is_refused_and_other_settings_are_named(work, whole):
    run = start(work, "whole")
    assert run.status == 2 and "--overwrite" in run.err
    run = start(work, "whole", "--resume", "--batch", 8)
    assert run.status == 2 and "batch was 4" in run.err
