"""plan.py: the paper's run against multiplications, additions and bytes that were counted by hand.
"""
import dataclasses

import chunk_scan_triton
import hydra_ssm
import pytest
import torch
from chunk_scan import A_MIN
from experiments import plan
from hydra_ssm import HydraConfig
from torch._subclasses.fake_tensor import FakeTensorMode

D, INNER, STATE, HEADS, VOCABULARY = 768, 1536, 64, 24, 30522    # of the released model
LINEAR = 23 * 2 * (D * (2 * INNER + 4 * STATE + 2 * HEADS)       # in_proj
                   + INNER * HEADS + INNER * D                   # fc_D, out_proj
                   + 7 * (INNER + 4 * STATE))                    # the convolution
HEAD = 2 * D * (D + VOCABULARY)
# A chunk of 64, of each token: C B^T in two directions, one product of both with x, and states in
# and out in two directions.
SCAN = 23 * 2 * (2 * 64 * STATE + HEADS * 64 * (64 + 4 * STATE))


@pytest.fixture(scope="module")
def found():
    return plan.paper_run()


def test_operations_are_counted_as_by_hand(found):
    """Section C.1: 14,400 steps of 112 sequences of 4,096. A step costs two passes of the linear
    maps (no gradient of a frozen weight), three of the scan, and half of the tokens reach the head,
    whose logits are computed twice.
    """
    assert found["tokens"] == 14_400 * 112 * 4096
    assert found["scan_flop"] == SCAN
    assert found["flop"] == pytest.approx(2 * LINEAR + 3 * SCAN + 1.5 * HEAD, rel=1e-3)


def test_bytes_are_counted_as_by_hand(found):
    logit = 2 * (2 + 2) + 2 + 2 + 2
    for name, layer in (("bytes", 2.12e9), ("reference_bytes", 4.97e9)):
        assert found[name] == pytest.approx(23 * 3 * layer / (8 * 4096) + VOCABULARY / 2 * logit)


def test_hours_follow_from_the_data_sheets(found):
    sheet, share, reference = found["hours"].values()
    sheets = {"A100": (312, 2.04), "GH200": (989, 4.0), "H200": (989, 4.8)}
    for gpu, (teraflops, terabytes) in sheets.items():
        seconds = found["tokens"] * (found["flop"] / teraflops + found["bytes"] / terabytes) / 1e12
        assert sheet[gpu][1] == pytest.approx(seconds / 3600)
        assert sheet[gpu][2] == pytest.approx(sheet[gpu][1] / 2)
        assert share[gpu][1] == pytest.approx(sheet[gpu][1] * found["slower_than_data_sheets"])
        assert reference[gpu][1] > 1.3 * share[gpu][1]


def test_the_share_of_the_data_sheets_is_that_of_table_3(found):
    """267.43 ms on an A100, over compute and memory of that pass at their full rates."""
    layers = 23 * 4.97e9 / 2.04e12
    full = 8 * 4096 * ((LINEAR + SCAN + HEAD) / 312e12 + 6 * VOCABULARY / 2.04e12) + layers
    assert found["slower_than_data_sheets"] == pytest.approx(0.26743 / full, rel=1e-3)


def test_all_layers_cost_the_same():
    config = HydraConfig(97, d_model=32, n_layer=3, d_state=8, headdim=16)
    one = plan.count_flop(dataclasses.replace(config, n_layer=1), 128)
    three = plan.count_flop(config, 128)
    assert (three.linear, three.scan) == pytest.approx((3 * one.linear, 3 * one.scan))
    assert three.head == one.head


def kernels_of_a_gpu(monkeypatch):
    """The model calls its kernels, which pass tensors without data on."""
    def scan(x, dt, A, B, C, D, chunk_size):
        return chunk_scan_triton.scan(x, dt, A, B, C, D, A_MIN)
    monkeypatch.setattr(hydra_ssm, "_on_gpu", lambda v: True)
    monkeypatch.setattr(hydra_ssm, "_add_norm", hydra_ssm._add_norm.__wrapped__)
    monkeypatch.setattr(hydra_ssm, "bidirectional_scan", scan)


def in_bfloat16(model):
    """The model with bfloat16 weights, but for the parameters that load_backbone leaves float32."""
    state = {}
    for name, value in model.state_dict().items():
        kept = name.split(".")[-1] in ("A_log", "dt_bias", "D")
        state[name] = torch.empty(value.shape, dtype=torch.float32 if kept else torch.bfloat16)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


def test_what_a_layer_leaves_for_the_backward_pass_is_what_autograd_saves(monkeypatch):
    """The storages that three layers save at the released sizes, but for those of the weights."""
    pytest.importorskip("triton")
    kernels_of_a_gpu(monkeypatch)
    config = HydraConfig(n_layer=3, vocab_size=40)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor
    with FakeTensorMode():
        model = in_bfloat16(hydra_ssm.HydraBert(config))
        shifts = [torch.ones(3, 2, 24, requires_grad=True) for _ in range(3)]
        factors = [torch.ones(3, 2, 64, requires_grad=True) for _ in range(4)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.hidden(torch.zeros(2, 512, dtype=torch.long),
                         hydra_ssm.Modulation(*shifts, *factors))
        for weight in model.parameters():
            saved.pop(weight.untyped_storage()._cdata, None)
        found = sum(storage.nbytes() for storage in saved.values())
    assert found / (3 * 2 * 512) == pytest.approx(plan.saved_bytes(config), rel=1e-3)


def test_the_preset_s_micro_batch_fits_80_gb_and_half_of_it_40(found):
    fitting = plan.micro_batches()
    assert plan.TRAINING_PRESETS["paper"]["micro_batch"] == fitting[80] == 2 * fitting[40]
    assert list(fitting.values()) == sorted(fitting.values())
    for gigabytes, n in fitting.items():
        assert plan.step_bytes(HydraConfig(), n, 4096) < 0.85e9 * gigabytes
    by_hand = 16 * 4096 * 23 * (2 * (3376 + 1792 + 1536 + 768) + 24 * 2 * 64 * 2 + 4 * 7 * 24)
    assert plan.step_bytes(HydraConfig(), 16, 4096) == pytest.approx(by_hand, rel=0.1)


def test_the_planned_forward_follows_from_the_compiled_kernels(capsys):
    """An A100's 60 ms and an H200's 25: the steps at the named shares of the data sheet."""
    said = plan.main(plan.Config())
    assert 45 < said["forward_ms"]["A100"] <= 60
    assert 18 < said["forward_ms"]["H200"] <= 25
    assert "8 in 40 GB, 16 in 80 GB" in capsys.readouterr().out


def test_more_of_anything_takes_longer_only_where_it_is_what_counts():
    rows = [{"kernel": "conv_fwd", "sm": 80, "dtype": "bfloat16", "instructions": 100, "loop": 10,
             "gigabytes": 0.2}]
    before = plan.forward_ms(HydraConfig(), rows, "A100")
    rows[0]["loop"] = 20  # few instructions: the bytes count
    assert plan.forward_ms(HydraConfig(), rows, "A100") == before
    rows[0]["gigabytes"] = 0.4
    after = plan.forward_ms(HydraConfig(), rows, "A100")
    assert after - before == pytest.approx(23 * 0.2e9 / (0.8 * 2.04e12) * 1e3)
