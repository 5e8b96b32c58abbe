"""What the repository ships: its sizes, that it loads, and that it is trained."""
import pytest
import torch
from helpers import ROOT

import hydra_ssm
from experiments import pretrain
from checkpoint import load_adapter
from data import Windows, load_corpus
from hydra_ssm import load_backbone
from text import ByteTokenizer

KERNELS = ("hypernet", "chebyshev", "dct")


def test_the_files_are_as_small_as_promised():
    size = {path.name: path.stat().st_size for path in (ROOT / "assets").glob("*.safetensors")}
    adapters = {f"adapter_{kernel}.safetensors" for kernel in KERNELS}
    assert size.keys() == {"hydra_small.safetensors", "transformer_small.safetensors", *adapters}
    assert size.pop("hydra_small.safetensors") <= 4_000_000
    assert size.pop("transformer_small.safetensors") <= 2_000_000
    assert sum(size.values()) <= 3_000_000


def test_the_backbone_beats_the_trigram_on_text_of_a_third_kind():
    """Python's documentation, unlike the text it was trained on; the trigram was counted on it."""
    tokenizer, model = ByteTokenizer(), load_backbone("small")
    windows = Windows(load_corpus("embedded", tokenizer, "valid"), 256, tokenizer.pad_id)
    x0, x_t, masked = pretrain.held_out(windows, 40, 0.3, tokenizer, 42)
    ids = load_corpus("embedded", tokenizer, "train").ids
    ours = pretrain.model_nats(model, x0, x_t, masked, tokenizer.pad_id)
    assert ours < pretrain.trigram_nats(ids, x0, masked, tokenizer.vocab_size) - 0.1


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_adapter_is_trained_and_reads_t(kernel):
    model = load_backbone("small")
    adapter, about = load_adapter(ROOT / "assets" / f"adapter_{kernel}.safetensors", model.config)
    assert adapter.kernel == kernel and about["vocab"] == ByteTokenizer.fingerprint
    modulation = adapter(torch.tensor([0.2, 0.8]))
    assert (modulation.A != 0).all()
    assert not torch.allclose(modulation.A[:, 0], modulation.A[:, 1], atol=1e-3)


def test_the_demonstration_fills_every_hole_and_draws(monkeypatch, tmp_path):
    monkeypatch.setattr(hydra_ssm.common, "ROOT", tmp_path)
    result = hydra_ssm.main(hydra_ssm.Config())
    assert bytes(result["filled"]) == b"eegi"
    assert (tmp_path / "runs/hydra_ssm/mixer_matrix.png").stat().st_size > 10_000


def test_the_mixer_matrix_times_the_input_is_what_the_mixer_scans():
    model, seen = load_backbone("small", torch.float64), []
    ids = torch.tensor(list(b"the mixer is a matrix"))
    mixer = model.layers[2].mixer
    hook = mixer.register_forward_pre_hook(lambda module, args: seen.append(args))
    model.hidden(ids[None])
    hook.remove()
    u, op, mask = seen[0]
    _, x, dt, B, C, D = mixer.project(u, op, mask)
    M = hydra_ssm.mixer_matrix(model, ids, layer=2)                        # h l l
    y = hydra_ssm.bidirectional_scan(x, dt, op.A, B, C, D, 32)
    assert torch.allclose(torch.einsum("hij,bjhp->bihp", M, x), y, atol=1e-12)
