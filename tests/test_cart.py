"""cart.py against plain float64 loops over eq. 22, hand-made sums, and counts of the masks."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cart
from experiments.bench import Count
from common import UserError

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weights_by_double_loop(masked, p, visible):
    """Eq. 22 as printed, for one sequence: lists of booleans in, float64 numbers out."""
    w = [0.0] * len(masked)
    for i in range(len(masked)):
        for j in range(len(masked)):
            if masked[i] and visible[j] and not masked[j]:
                w[i] += 0.5 * p * (1 - p) ** (abs(i - j) - 1)
    return w


# ---- eq. 22 --------------------------------------------------------------------------------------


def test_the_golden_weights():
    w = cart.cart_weights(torch.tensor([0, 1, 1, 0, 1]), dtype=F64)
    torch.testing.assert_close(w, torch.tensor([0, .34875, .34875, 0, .2624344], dtype=F64),
                               atol=5e-8, rtol=0)  # the last one is printed to 7 decimals


@pytest.mark.parametrize("p", [0.01, 0.45, 0.9, 1])
@pytest.mark.parametrize("length", [1, 2, 5, 64, 65, 257])
def test_weights_are_the_double_loop_of_eq_22(length, p):
    t = torch.tensor([[0.1], [0.5], [0.9], [1.0]])
    masked = torch.rand(4, length, generator=generator(length)) < t
    real = torch.arange(length) < torch.tensor([[length], [length - 1], [length // 2], [length]])
    for visible in (None, real):
        loops = [weights_by_double_loop(m, p, v) for m, v in zip(
            masked.tolist(), (torch.ones_like(masked) if visible is None else real).tolist())]
        exact = cart.cart_weights(masked, p, visible, dtype=F64)
        # Sums of at most 257 positive terms: a few hundred roundings of 1.1e-16 (6e-8) each.
        torch.testing.assert_close(exact, torch.tensor(loops, dtype=F64), rtol=1e-13, atol=0)
        single = cart.cart_weights(masked, p, visible)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), exact, rtol=2e-6, atol=1e-37)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_weights_of_any_mask_are_the_double_loop(data):
    masked = data.draw(st.lists(st.booleans(), min_size=1, max_size=24))
    visible = data.draw(st.lists(st.booleans(), min_size=len(masked), max_size=len(masked)))
    p = data.draw(st.floats(1e-3, 1, allow_subnormal=False))
    w = cart.cart_weights(torch.tensor(masked), p, torch.tensor(visible), dtype=F64)
    loop = torch.tensor(weights_by_double_loop(masked, p, visible), dtype=F64)
    torch.testing.assert_close(w, loop, rtol=1e-13, atol=1e-300)  # powers may fall below 1e-300
    assert (w >= 0).all() and (w <= 1).all()
    assert not w[~torch.tensor(masked)].any()


def test_weights_of_long_sequences_match_the_one_step_recurrence():
    masked = torch.rand(2, 4096, generator=generator()) < torch.tensor([[0.5], [0.999]])
    for p in (0.001, 0.45):
        left, right = torch.zeros(2, 4096, dtype=F64), torch.zeros(2, 4096, dtype=F64)
        for i in range(1, 4096):
            left[:, i] = (1 - p) * left[:, i - 1] + (~masked)[:, i - 1]
            right[:, -1 - i] = (1 - p) * right[:, -i] + (~masked)[:, -i]
        # atol: an only neighbour hundreds of positions away weighs less than float64 can hold
        torch.testing.assert_close(cart.cart_weights(masked, p, dtype=F64),
                                   p / 2 * (left + right) * masked, rtol=1e-12, atol=1e-300)


def test_p_of_one_counts_the_immediate_neighbours_only():
    w = cart.cart_weights(torch.tensor([[1, 0, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]), p=1)
    assert w.tolist() == [[0.5, 0, 1, 0, 0.5, 0, 0], [0, 0.5, 0, 0, 0, 0, 0]]


def test_padding_is_no_context_and_changes_no_weight():
    masked = torch.rand(3, 20, generator=generator()) < 0.5
    padded = torch.cat([masked, torch.zeros(3, 9, dtype=torch.bool)], 1)
    real = (torch.arange(29) < 20).expand(3, -1)
    assert torch.equal(cart.cart_weights(padded, 0.3, real)[:, :20], cart.cart_weights(masked, 0.3))
    assert not torch.equal(cart.cart_weights(padded, 0.3)[:, :20], cart.cart_weights(masked, 0.3))


def test_weights_are_zero_where_nothing_is_visible_or_nothing_is_masked():
    assert not cart.cart_weights(torch.ones(2, 9, dtype=torch.bool)).any()
    assert not cart.cart_weights(torch.zeros(2, 9, dtype=torch.bool)).any()


@pytest.mark.parametrize("p", [0, -0.1, 1.001, math.nan, math.inf])
def test_an_impossible_sharpness_is_refused(p):
    with pytest.raises(UserError, match="p must be in"):
        cart.cart_weights(torch.ones(1, 3, dtype=torch.bool), p)


# ---- corruption ----------------------------------------------------------------------------------


def test_corruption_masks_each_maskable_token_with_probability_t():
    t, n = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]), 20_000
    x0 = torch.randint(0, 256, (5, n), generator=generator())
    maskable = torch.rand(5, n, generator=generator(1)) < 0.8
    before = x0.clone()
    x_t, masked = cart.corrupt(x0, t, 259, maskable, generator(2))
    assert torch.equal(x0, before) and masked.dtype == torch.bool and x_t.dtype == torch.int64
    assert not (masked & ~maskable).any()
    assert torch.equal(x_t, torch.where(masked, torch.tensor(259), x0))
    trials, share = maskable.sum(1), masked.sum(1) / maskable.sum(1)
    # Five standard deviations of a binomial share; exact at t = 0 and t = 1.
    assert ((share - t).abs() <= 5 * (t * (1 - t) / trials).sqrt()).all()
    # Neighbours are independent: both masked with probability t^2.
    both = (masked[2, 1:] & masked[2, :-1]).sum() / (maskable[2, 1:] & maskable[2, :-1]).sum()
    assert abs(both - 0.25) < 0.02


def test_corruption_draws_from_the_given_generator_only():
    x0, maskable = torch.arange(64).reshape(2, 32), torch.ones(2, 32, dtype=torch.bool)
    state = torch.get_rng_state()
    for masking, amount in ((cart.corrupt, torch.tensor([0.3, 0.6])), (cart.corrupt_exactly, 7)):
        first, second, other = (masking(x0, amount, 99, maskable, generator(seed))[0]
                                for seed in (5, 5, 6))
        assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_corruption_accepts_one_sequence_and_any_default_dtype():
    x0, maskable = torch.arange(50), torch.arange(50) % 5 > 0
    expected = cart.corrupt(x0[None], torch.tensor([0.5]), 99, maskable[None], generator())
    torch.set_default_dtype(F64)
    try:
        x_t, masked = cart.corrupt(x0, 0.5, 99, maskable, generator())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(x_t, expected[0][0]) and torch.equal(masked, expected[1][0])


def test_exact_corruption_masks_k_tokens_and_every_subset_equally_often():
    maskable = torch.tensor([1, 0, 1, 1, 1, 0, 1]).bool().expand(20_000, -1)
    x0 = torch.arange(7).expand(20_000, -1)
    x_t, masked = cart.corrupt_exactly(x0, 2, 99, maskable, generator())
    assert (masked.sum(1) == 2).all() and not (masked & ~maskable).any()
    assert torch.equal(x_t, torch.where(masked, torch.tensor(99), x0))
    subsets, counts = masked.unique(dim=0, return_counts=True)
    assert len(subsets) == 10                                   # 5 choose 2
    expected = 2_000
    assert ((counts - expected) ** 2 / expected).sum() < 27.9   # chi-square(9), 0.1 % tail


def test_exact_corruption_takes_one_k_per_sequence_and_refuses_too_many():
    maskable = torch.arange(10) < torch.tensor([[10], [4], [0]])
    x0 = torch.zeros(3, 10, dtype=torch.int64)
    for k in ([0, 4, 0], [10, 0, 0], [3, 2, 0]):
        _, masked = cart.corrupt_exactly(x0, torch.tensor(k), 1, maskable, generator())
        assert masked.sum(1).tolist() == k and not (masked & ~maskable).any()
    for k in ([1, 5, 0], [-1, 0, 0]):
        with pytest.raises(UserError, match="choose k"):
            cart.corrupt_exactly(x0, torch.tensor(k), 1, maskable, generator())


# ---- losses --------------------------------------------------------------------------------------


MASKED = torch.tensor([[True, False, True], [False, False, True]])
WEIGHTS = torch.tensor([[.5, 0, .25], [0, 0, 1]])
CE = torch.tensor([2., 4., 3.])                                 # sum w ce = 1 + 1 + 3 = 5


@pytest.mark.parametrize("reduction, value",
                         [("sum", 5.), ("masked_mean", 5 / 3), ("weight_mean", 5 / 1.75)])
def test_the_three_reductions_by_hand(reduction, value):
    full = torch.full((2, 3), 7.).masked_scatter(MASKED, CE)    # 7: must not be looked at
    for ce in (CE, full):
        assert cart.cart_loss(ce, MASKED, WEIGHTS, reduction).item() == pytest.approx(value, 1e-6)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(UserError, match="masked_mean, sum, weight_mean"):
        cart.cart_loss(CE, MASKED, WEIGHTS, "mean")


@pytest.mark.parametrize("reduction", cart.REDUCTIONS)
@pytest.mark.parametrize("share", ["nothing masked", "nothing visible"])
def test_a_loss_without_terms_is_exactly_zero_with_zero_gradient(reduction, share):
    masked = torch.full((2, 6), share == "nothing visible")
    hidden = torch.randn(2, 6, 4, generator=generator(), requires_grad=True)
    x0, head = torch.ones(2, 6, dtype=torch.int64), torch.nn.Linear(4, 9)
    ce = cart.masked_cross_entropy(hidden[masked], x0[masked], head)
    assert ce.shape == (masked.sum(),)
    loss = cart.cart_loss(ce, masked, cart.cart_weights(masked), reduction)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


@pytest.mark.parametrize("reduction", cart.REDUCTIONS)
def test_parts_over_a_common_divisor_equal_the_whole(reduction):
    t = torch.tensor([0, 0.02, 0.2, 0.5, 0.9, 1])[:, None]
    masked = torch.rand(6, 40, generator=generator()) < t
    ce = torch.rand(6, 40, generator=generator(1), dtype=F64).requires_grad_()
    w = cart.cart_weights(masked, dtype=F64)
    whole = cart.cart_loss(ce[masked], masked, w, reduction)
    (expected,) = torch.autograd.grad(whole, ce)
    sizes = (1, 2, 3)                                           # the first part has nothing masked
    parts = list(zip(ce.split(sizes), masked.split(sizes), w.split(sizes)))
    norm = 1 if reduction == "sum" else sum(cart.loss_norm(m, v, reduction) for _, m, v in parts)
    total = sum(cart.cart_loss(c[m], m, v, "sum") / norm for c, m, v in parts)
    (gradient,) = torch.autograd.grad(total, ce)
    torch.testing.assert_close(total, whole, rtol=1e-13, atol=0)  # float64, another order of sums
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=0)


def test_elbo_weights_are_one_over_t_at_masked_tokens():
    w = cart.elbo_weights(MASKED, torch.tensor([0.5, 0.25]))
    assert w.tolist() == [[2, 0, 2], [0, 0, 4]]
    assert cart.elbo_weights(MASKED[0], 0.5).tolist() == [2, 0, 2]
    assert cart.cart_loss(CE, MASKED, w, "sum").item() == 2 * 2 + 2 * 4 + 4 * 3


# ---- chunked cross-entropy -----------------------------------------------------------------------


def make_head(d=6, v=50, dtype=F64):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(d, d), torch.nn.GELU(), torch.nn.LayerNorm(d),
                               torch.nn.Linear(d, v)).to(dtype)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 32])
def test_chunks_change_neither_values_nor_gradients(rows, frozen):
    head = make_head().requires_grad_(not frozen)
    hidden = torch.randn(rows, 6, generator=generator(), dtype=F64, requires_grad=True)
    targets = torch.randint(0, 50, (rows,), generator=generator())
    log_p = head(hidden) - head(hidden).exp().sum(-1, keepdim=True).log()   # straight from softmax
    expected = torch.stack([-log_p[i, targets[i]] for i in range(rows)])
    wanted = [hidden] if frozen else [hidden, *head.parameters()]
    upstream = torch.rand(rows, generator=generator(1), dtype=F64)
    ce = cart.masked_cross_entropy(hidden, targets, head, chunk=8)
    torch.testing.assert_close(ce, expected, rtol=1e-12, atol=1e-12)  # float64 roundings only
    for got, want in zip(torch.autograd.grad(ce, wanted, upstream),
                         torch.autograd.grad(expected, wanted, upstream)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(cart.masked_cross_entropy(hidden, targets, head, chunk=8), ce)


def test_no_tensor_holds_more_than_one_chunk_of_logits_and_none_is_kept_for_backward():
    rows, v, chunk = 100, 500, 16
    head = make_head(v=v, dtype=torch.float32).requires_grad_(False)
    hidden = torch.randn(rows, 6, generator=generator(), requires_grad=True)
    kept = []
    with Count() as count, torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x):
        ce = cart.masked_cross_entropy(hidden, torch.zeros(rows, dtype=torch.int64), head, chunk)
        assert all(n < chunk * v for n in kept)
        ce.sum().backward()
    assert max(count.sizes) == chunk * v
    assert hidden.grad.abs().sum() > 0


def test_half_precision_logits_are_normalised_in_float32():
    head = make_head(dtype=torch.bfloat16)
    hidden = torch.randn(20, 6, generator=generator()).bfloat16()
    targets = torch.randint(0, 50, (20,), generator=generator())
    ce = cart.masked_cross_entropy(hidden, targets, head)
    assert ce.dtype == torch.float32
    exact = cart.masked_cross_entropy(hidden, targets, lambda h: head(h).double())
    torch.testing.assert_close(ce.double(), exact, rtol=1e-6, atol=1e-6)  # float32, not bf16's 4e-3


# ---- reference predictors and the script ---------------------------------------------------------


def test_a_uniform_guess_costs_ln_n():
    assert cart.uniform_nats(256) == pytest.approx(8 * math.log(2))


def test_unigram_probabilities_are_add_one_counts_without_the_excluded():
    ids = np.array([[0, 0, 1], [4, 0, 4]], dtype=np.uint16)
    for block in (1 << 24, 2):
        p = cart.unigram_log_probs(ids, 6, exclude=(4, 5), block=block).exp()
        torch.testing.assert_close(p, torch.tensor([4, 2, 1, 1, 0, 0]) / 8)


def test_the_script_prints_the_golden_weights_and_a_uniform_guess_scores_a_third(tmp_path, capsys):
    result = cart.main(cart.Config(out=str(tmp_path)))
    assert result["w"] == pytest.approx([0, .34875, .34875, 0, .2624344], abs=1e-6)
    # E[t (1 - t)] / E[t] = 1/3; 500,000 masked tokens and the two ends leave less than 0.002.
    assert result["mean_weight"] == pytest.approx(1 / 3, abs=2e-3)
    assert "w_5 = 0.26243" in capsys.readouterr().out
    assert (tmp_path / "cart_weights.png").stat().st_size > 10_000
    assert (tmp_path / "result.json").exists()
    with pytest.raises(UserError, match="one digit"):
        cart.main(cart.Config(mask="01", out=str(tmp_path)))
