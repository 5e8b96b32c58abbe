"""What the repository ships: its sizes, that it loads, that it is trained, and what it scores."""
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT

from certify import mixer_inputs
from checkpoint import load_adapter, load_backbone
from chunk_scan import bidirectional_scan
from data import Windows, load_corpus
from experiments import pretrain
from hydra_ssm import Modulation
from markov import mixer_matrices
from text import ByteTokenizer

KERNELS = ("hypernet", "chebyshev", "dct")
PASSAGE = (b"It is a truth universally acknowledged, that a single man in possession of a good "
           b"fortune, must be in want of a wife.")


def shipped(kernel, model):
    """(adapter, what its file says of it)."""
    return load_adapter(ROOT / "assets" / f"adapter_{kernel}.safetensors", model.config)


def test_the_files_are_as_small_as_promised():
    size = {path.name: path.stat().st_size for path in (ROOT / "assets").glob("*.safetensors")}
    adapters = {f"adapter_{kernel}.safetensors" for kernel in KERNELS}
    assert size.keys() == {"hydra_small.safetensors", "transformer_small.safetensors", *adapters}
    assert size.pop("hydra_small.safetensors") <= 4_000_000
    assert size.pop("transformer_small.safetensors") <= 2_000_000
    assert sum(size.values()) <= 3_000_000


def test_the_backbone_knows_text_that_it_never_saw_nearly_as_a_trigram_counted_on_it():
    """Shakespeare, and it was trained on novels and abstracts. The trigram was counted on a
    megabyte of his and sees both true neighbours, also where the backbone sees a [MASK].
    """
    tokenizer = ByteTokenizer()
    model = load_backbone("small")
    windows = Windows(load_corpus("embedded", tokenizer, "valid"), 256, tokenizer.pad_id)
    x0, x_t, masked = pretrain.held_out(windows, 40, 0.3, tokenizer, 42)
    ids = load_corpus("embedded", tokenizer, "train").ids
    ours = pretrain.model_nats(model, x0, x_t, masked, tokenizer.pad_id)
    assert ours < pretrain.trigram_nats(ids, x0, masked, tokenizer.vocab_size) + 0.1  # 1.56, 1.47


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_adapter_is_trained_and_reads_t(kernel):
    adapter, about = shipped(kernel, load_backbone("small"))
    assert adapter.kernel == kernel and about["vocab"] == ByteTokenizer.fingerprint
    modulation = adapter(torch.tensor([0.2, 0.8]))
    assert (modulation.A != 0).all()
    assert not torch.allclose(modulation.A[:, 0], modulation.A[:, 1], atol=1e-3)


@pytest.mark.parametrize("kernel, nats", [
    ("frozen", 0.575561), ("hypernet", 0.563719), ("chebyshev", 0.562424), ("dct", 0.572069)])
def test_what_each_scores_on_a_passage_is_known(kernel, nats):
    """Every third byte masked, t = 1/3; nats per masked byte. 1e-4: float32 on other machines."""
    model = load_backbone("small")
    x0 = torch.tensor([list(PASSAGE)])                                     # 1 l
    masked = torch.arange(len(PASSAGE)) % 3 == 1                           # l
    x_t = x0.masked_fill(masked, ByteTokenizer.mask_id)
    modulation = None
    if kernel != "frozen":
        adapter, _ = shipped(kernel, model)
        modulation = adapter(torch.tensor([1 / 3]))
    with torch.no_grad():
        logits = model(x_t, modulation)[0, masked]                         # masked v
    assert F.cross_entropy(logits, x0[0, masked]).item() == pytest.approx(nats, abs=1e-4)


def test_the_mixer_matrix_times_the_input_is_what_the_mixer_scans():
    model = load_backbone("small", torch.float64)
    ids = torch.tensor(list(b"the mixer is a matrix"))
    M, half_lives = mixer_matrices(model, ids, layer=2)                    # h l l
    u = mixer_inputs(model, ids[None])[2]
    m = Modulation().by_layer(model)[2]
    _, x, *rest = model.layers[2].mixer.project(u, m)
    y = bidirectional_scan(x, *rest, 32)
    assert torch.allclose(torch.einsum("hij,bjhp->bihp", M, x), y, atol=1e-12)
    assert len(half_lives) == len(M)
