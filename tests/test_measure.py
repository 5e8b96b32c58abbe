"""measure.py: the operations, bytes and reads that Count sees, against what was written down."""
import pytest
import torch
from experiments import measure
from hydra_ssm import HydraConfig

SMALL = HydraConfig(vocab_size=20, d_model=16, n_layer=1, d_state=4, headdim=8)


def test_count_sees_operations_that_are_no_views_and_the_bytes_that_are_alive_at_once():
    old = torch.zeros(500)
    with measure.Count() as count:
        a = torch.zeros(1000)              # 4,000 bytes
        b = a.view(10, 100).T + 1          # 4,000 more, and two views
        del a
        c = b.double()                     # 8,000 while b is alive: the peak
        b.add_(1)                          # in place: nothing new
        old.add_(1)
        del b
        d = c[0] * 2                       # 80
    assert (count.operations, count.peak) == (6, 12_000)
    assert count.sizes == [1000, 1000, 1000, 10]
    assert count.live == 8_080
    del c, d
    assert count.live == 0


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_count_sees_what_reads_a_watched_tensor_or_one_made_of_such_alone(device):
    scale, x = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    other = torch.zeros(3, device=device)
    with measure.Count(watched={"scale": scale}) as count:
        rows = scale.unbind(0)             # views
        factor = 1 + rows[0]               # reads it
        y = x * factor                     # reads what is made of it alone
        z = y + other                      # y is made of x too
        z = z + rows[1]                    # reads it
        z.mul_(2)
    assert (count.reading, count.operations) == (3, 5)


def test_the_peak_holds_what_the_backward_pass_needs():
    x = torch.ones(1000, requires_grad=True)
    with measure.Count() as count:
        x.exp().exp().exp().sum().backward()
    assert count.peak >= 4 * 1000 * 4, "three saved outputs and a gradient"
    assert count.live <= 4 * 1000 + 4, "the gradient of x alone is left"


def test_the_peak_of_a_call_is_its_new_tensors_and_the_weights():
    weights = torch.nn.Linear(64, 1024, bias=False), torch.nn.Linear(3, 4).double()
    x = torch.ones(256, 64)
    with torch.no_grad():
        found = measure.peak_mib(lambda: weights[0](x), *weights)
    assert found * 2**20 == 256 * 1024 * 4 + 64 * 1024 * 4 + (3 * 4 + 4) * 8


def test_a_timed_call_gives_its_result_and_its_time():
    result, ms = measure.timed(torch.add, torch.ones(3), 2, device="cpu")
    assert torch.equal(result, torch.full((3,), 3.0)) and ms > 0
    assert measure.milliseconds(lambda: None, "cpu") >= 0


@pytest.mark.parametrize("dtype, kept", ((torch.bfloat16, torch.float32),
                                         (torch.float64, torch.float64), (None, torch.float32)))
def test_a_random_model_is_frozen_and_keeps_what_is_exponentiated_in_float32(dtype, kept):
    model = measure.make_model(SMALL, "cpu", dtype)
    mixer = model.layers[0].mixer
    assert model.word_embeddings.weight.dtype == (dtype or torch.float32)
    assert {mixer.A_log.dtype, mixer.dt_bias.dtype, mixer.D.dtype} == {kept}
    assert not any(p.requires_grad for p in model.parameters())
