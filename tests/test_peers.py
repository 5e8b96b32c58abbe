"""peers.py: how it times and compares; the layers themselves where transformers is installed."""
import importlib.util
import itertools
import json
import sys

import common
import pytest
import tiny
import torch
from experiments import peers
from hydra_ssm import HydraBert

NAMES = (peers.OURS, "a peer", "another")


@pytest.fixture
def clock(monkeypatch):
    """Calls as they are timed, on a clock on which each takes 2 % longer than the one before, and
    each layer its own number of ms besides.
    """
    called = []

    def milliseconds(function, device):
        u = function()
        called.append(int(u.flatten()[0]))
        return 1.02 ** len(called) * (1 + called[-1])
    monkeypatch.setattr(peers, "milliseconds", milliseconds)
    return called


def constant(k):
    """A layer that gives k."""
    return lambda u: torch.full_like(u, k)


def test_a_round_times_every_layer_once_and_the_next_begins_with_another(clock):
    functions = {name: constant(k) for k, name in enumerate(NAMES)}
    times = peers.time_layers(functions, 5, 4, 4, seed=0)
    assert clock == [0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2]
    for k, name in enumerate(NAMES):
        want = [1.02 ** (i + 1) * (1 + k) for i, which in enumerate(clock) if which == k]
        assert times[name] == pytest.approx(want)


def test_a_ratio_is_of_one_round(clock):
    """The clock slows by 2 % a call, so no ratio of neighbours is off by more than two calls."""
    functions = {name: constant(k) for k, name in enumerate(NAMES)}
    times = peers.time_layers(functions, 5, 4, 40, seed=0)
    for k, name in enumerate(NAMES[1:], 1):
        for ratio in peers.ratios(times, name):
            assert 1.02 ** -2.01 < ratio / (1 + k) < 1.02 ** 2.01
    apart = [a / b for a, b in zip(times["a peer"], reversed(times[peers.OURS]))]
    assert max(apart) > 10, "rounds far apart in time would show"


@pytest.mark.parametrize("wrong", (lambda u: u[:, 1:], lambda u: u / 0))
def test_what_is_no_layer_is_refused(wrong):
    with pytest.raises(common.UserError, match="another gives"):
        peers.time_layers({peers.OURS: constant(1), "another": wrong}, 5, 4, 1, seed=0)


@pytest.mark.parametrize("n", range(1, 14))
def test_the_ends_hold_the_median_with_95_percent_and_no_nearer_ones_do(n):
    """Every order of n signs is as likely: the median lies below the value of rank r where fewer
    than r of the n values lie below the median.
    """
    low, high = peers.ends_of_median(list(range(n))[::-1])
    assert low + high == n - 1

    def chance_of_outside(left_out):
        counted = 0
        for below in itertools.product((0, 1), repeat=n):
            counted += sum(below) <= left_out or n - sum(below) <= left_out
        return counted / 2 ** n

    assert low == 0 or chance_of_outside(low) <= 0.05
    if low + 1 < n - 1 - low:
        assert chance_of_outside(low + 1) > 0.05


def test_the_table_and_the_last_line_are_medians_of_ratios(clock):
    times = {peers.OURS: [10.0, 20.0, 40.0], "a peer": [30.0, 20.0, 80.0]}
    table = peers.time_table({512: times, "2048": times})  # JSON makes a text of a length
    assert "| 512 | 20 | 30 | 2.00 (1.00 to 3.00) |" in table and "| 2,048 | 20 |" in table
    assert peers.last_line({512: times}) == "at 512 tokens, times ours: a peer 2.0"


def test_our_layer_is_the_frozen_models():
    torch.manual_seed(0)
    module, layer = peers.our_layer(128)
    config = peers.hydra_config(128)
    model = HydraBert(config)
    model.layers[0].load_state_dict(module.state_dict())
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(layer(model.embed(ids)), model.hidden(ids))
    assert peers.hydra_config(768).nheads == 24


def test_without_transformers_one_line_says_what_to_install(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setitem(sys.modules, "transformers", None)
    run = tiny.command("experiments.peers", "--threads", threads)
    assert run.status == 2 and run.err.count("\n") == 1 and "pip install transformers" in run.err


def test_a_run_writes_its_times_and_the_version(tmp_path, monkeypatch, clock):
    modules = {name: (torch.nn.Linear(2, k + 1), constant(k)) for k, name in enumerate(NAMES)}
    monkeypatch.setattr(peers, "make_layers", lambda d_model: modules)
    monkeypatch.setattr(peers.metadata, "version", lambda name: f"of {name}")
    cfg = peers.Config(length=(3, 4), rounds=2, d_model=4, threads=torch.get_num_threads())
    with tiny.root_at(tmp_path):
        peers.main(cfg)
    found = json.loads((tmp_path / "runs/peers/result.json").read_text("utf-8"))["metrics"]
    assert found["transformers"] == "of transformers"
    assert found["parameters"] == {name: 3 * (k + 1) for k, name in enumerate(NAMES)}
    for times in found["ms"].values():
        assert all(len(ms) == 2 and min(ms) > 0 for ms in times.values())
    assert found["table"] == peers.time_table(found["ms"])


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None,
                    reason="transformers is not installed")
def test_the_peers_are_what_they_are_called():
    layers = peers.make_layers(128)
    u = torch.randn(1, 300, 128)
    assert len(layers) == 4
    changed = u.clone()
    changed[:, 200] += 1
    for name, (module, layer) in layers.items():
        with torch.no_grad():
            y, moved = layer(u), (layer(changed) - layer(u))[0].abs().sum(-1)
        assert y.shape == u.shape and y.isfinite().all()
        assert moved[200:].max() > 0
        assert (moved[:200].max() == 0) == name.startswith("Mamba-2"), "one direction alone"
    assert layers["BERT"][0].attention.self.config._attn_implementation == "sdpa"
    two = [layers[f"Mamba-2 (chunks of {q})"][0] for q in (256, 64)]
    two[1].load_state_dict(two[0].state_dict())
    with torch.no_grad():
        torch.testing.assert_close(two[0](u), two[1](u), rtol=1e-4, atol=1e-4)
