"""The sampler against enumeration: its distribution, its schedule, and what must not matter."""
import io
import itertools
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from scipy import stats
from tiny import command, make_denoiser

import common
import sample
from baselines import Conditioning
from checkpoint import save_adapter
from data import noise_generator
from hydra_ssm import HydraBert, HydraConfig, Modulation
from mark_adapters import KERNELS, make_adapter
from sample import ORDERS, unmask
from text import ByteTokenizer, WordPiece

TOKENIZER = ByteTokenizer()
MASK, SEP, PAD = TOKENIZER.mask_id, TOKENIZER.sep_id, TOKENIZER.pad_id
L, V = 3, 3
TOY = SimpleNamespace(mask_id=3, pad_id=4, cls_id=5, sep_id=6, special_ids=(4, 5, 6, 3),
                      vocab_size=7)


@pytest.fixture(scope="module")
def denoiser(work):
    return make_denoiser(work, torch.float64)


class Table:
    """A model given by a table: the visible tokens of a row -> logits (l, 9), 50 for the five ids
    that are none of its three tokens: the four special ones and two padded rows."""

    def __init__(self, log_probs):
        self.logits = torch.full((4,) * L + (L, 9), 50.0, dtype=torch.float64)
        for row in itertools.product(range(4), repeat=L):
            self.logits[row][:, :V] = torch.from_numpy(log_probs(row))

    def hidden(self, ids, modulation=None, attention_mask=None):
        assert attention_mask is None
        return self.logits[tuple(ids.T)]

    def head(self, hidden):
        return hidden.clone()


def conditionals(joint):
    """row -> log p(x_i = . | the visible tokens of the row) by summing the joint, (l, v)."""
    def log_probs(row):
        out = np.zeros((L, V))
        for values, p in np.ndenumerate(joint):
            if all(r in (3, v) for r, v in zip(row, values)):
                for i in range(L):
                    out[i, values[i]] += p
        return np.log(np.maximum(out / out.sum(-1, keepdims=True), 1e-300))
    return log_probs


def joint_of(seed=0, sharpness=0.4):
    return np.random.default_rng(seed).dirichlet(np.full(V ** L, sharpness)).reshape((V,) * L)


def p_value(texts, expected):
    """Chi-square of texts (n, l) against the probability of each; the rare are one class."""
    texts, expected = texts.numpy(), np.asarray(expected).flatten()
    seen = np.bincount(np.ravel_multi_index(texts.T, (V,) * texts.shape[1]),
                       minlength=len(expected))
    rare = expected * len(texts) < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    mean = np.append(expected[~rare], expected[rare].sum()) * len(texts)
    keep = mean > 0
    assert seen[~keep].sum() == 0
    return stats.chisquare(seen[keep], mean[keep]).pvalue


# ------------------------------------------------------------------------------ the distribution

@pytest.mark.parametrize("seed", [0, 1])
def test_one_token_a_step_in_random_order_draws_from_the_models_own_distribution(seed):
    """12,000 texts against the joint that the conditionals were summed from; 1 in 1,000 fails."""
    joint = joint_of(seed)
    texts = unmask(Table(conditionals(joint)), None, torch.full((12_000, L), 3), TOY, steps=L,
                   order="random", seed=seed)
    assert p_value(texts, joint) > 1e-3


def test_conditionals_without_a_joint_are_averaged_over_all_orders():
    """The law of any model: the mean over 3! orders of the product of what each step is told."""
    rng = np.random.default_rng(5)
    table = {row: rng.dirichlet(np.ones(V), L) for row in itertools.product(range(4), repeat=L)}
    law = np.zeros((V,) * L)
    for order in itertools.permutations(range(L)):
        for x in np.ndindex(law.shape):
            row, p = [3] * L, 1 / math.factorial(L)
            for i in order:
                p *= table[tuple(row)][i, x[i]]
                row[i] = x[i]
            law[x] += p
    texts = unmask(Table(lambda row: np.log(table[row])), None, torch.full((12_000, L), 3), TOY,
                   steps=L, order="random")
    assert p_value(texts, law) > 1e-3


def test_all_tokens_in_one_step_are_drawn_as_if_independent():
    """And are told from the joint by the same chi-square: it has the power to see a difference."""
    joint = joint_of()
    texts = unmask(Table(conditionals(joint)), None, torch.full((6_000, L), 3), TOY, steps=1)
    marginals = [joint.sum(axis=tuple({0, 1, 2} - {i})) for i in range(L)]
    assert p_value(texts, np.einsum("i,j,k->ijk", *marginals)) > 1e-3
    assert p_value(texts, joint) < 1e-12


def test_a_template_is_filled_by_the_conditional_given_its_tokens():
    joint = joint_of(2)
    ids = torch.tensor([3, 1, 3]).expand(6_000, -1)
    texts = unmask(Table(conditionals(joint)), None, ids, TOY, steps=2, order="random")
    assert (texts[:, 1] == 1).all()
    assert p_value(texts[:, [0, 2]], joint[:, 1] / joint[:, 1].sum()) > 1e-3


@pytest.mark.parametrize("temperature, top_p", [(0.5, 1.0), (2.0, 1.0), (1.0, 0.75), (0.5, 0.8)])
def test_temperature_and_top_p_draw_from_the_law_that_they_name(temperature, top_p):
    p = np.array([0.2, 0.5, 0.3])
    law = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
    likely, total, kept = np.argsort(-law), 0.0, np.zeros(V)
    for i in likely:  # the fewest that reach top_p
        if total < top_p:
            kept[i] = law[i]
            total += law[i]
    u = torch.rand(20_000, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_p = torch.from_numpy(np.log(p)).float().expand(20_000, -1)
    tokens = sample.draw_tokens(log_p, temperature, top_p, u)
    assert p_value(tokens[:, None], kept / kept.sum()) > 1e-3
    assert (top_p == 1) == (kept > 0).all()


def test_the_noise_reaches_what_float32_cannot():
    """A token of probability e^-30 is drawn where the uniform says so; u = 0 breaks nothing."""
    log_p = torch.tensor([[0.0, -30.0]])
    for u, token in (((0.5, 1 - 1e-14), 1), ((0.5, 1 - 1e-10), 0), ((0, 0.5), 1), ((0.5, 0), 0)):
        u = torch.tensor([u], dtype=torch.float64)
        assert sample.draw_tokens(log_p, 1.0, 1.0, u).item() == token


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_smallest_temperature_takes_the_best_token_as_0_does(top_p):
    """1e-310 makes every log-probability but 0 infinite; two that are equal stay a fair choice."""
    log_p = torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1], [0.1, 0.45, 0.45]]).log()
    log_p = log_p.repeat(200, 1)
    u = torch.rand(log_p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = sample.draw_tokens(log_p, 1e-310, top_p, u).view(200, 3)
    assert (tokens[:, 0] == 1).all() and (tokens[:, 1] == 0).all()
    assert 60 < (tokens[:, 2] == 1).sum() < 140 and (tokens[:, 2] > 0).all()


def drawn_by_definition(log_p, temperature, top_p, u):
    """The law in its shortest form: sort, cut, add Gumbel noise to every token."""
    z = log_p.double()
    z = (z - z.amax(-1, keepdim=True)) / temperature
    p, order = z.softmax(-1).sort(dim=-1, descending=True, stable=True)
    surplus = p.cumsum(-1) - p >= top_p if top_p < 1 else torch.zeros_like(p, dtype=torch.bool)
    z = z.masked_fill(surplus.gather(-1, order.argsort(-1)), -math.inf)
    return (z - (-u.log()).log()).argmax(-1)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.3, 1.0), (4.0, 1.0), (1e-310, 1.0),
                                                (1.0, 0.9), (4.0, 0.5), (0.5, 0.99), (1.0, 1e-9)])
@pytest.mark.parametrize("v", [2, 63, 700, 9_000])
def test_noise_that_is_not_computed_could_not_have_won(v, temperature, top_p):
    """Token by token; flat, peaked and forbidden ones, and many of equal probability."""
    draw = torch.Generator().manual_seed(v)
    logits = torch.rand(120, v, generator=draw) ** 4 * torch.linspace(0, 40, 120)[:, None]
    logits[::3] = logits[::3].round()          # equal ones, at the edge of the likeliest too
    logits[:, v // 2:][:, 1:3] = -math.inf     # special tokens
    log_p = logits.log_softmax(-1)
    u = torch.rand(120, v, dtype=torch.float64, generator=draw)
    u[::5] = u[::5] ** 0.001                   # near 1, where the noise is large
    tokens = sample.draw_tokens(log_p, temperature, top_p, u)
    assert torch.equal(tokens, drawn_by_definition(log_p, temperature, top_p, u))


@pytest.mark.parametrize("k", [1, 2, 18])
def test_how_many_of_the_likeliest_are_looked_at_first_changes_nothing(k):
    draw = torch.Generator().manual_seed(k)
    log_p = (3 * torch.rand(50, 300, generator=draw)).round().log_softmax(-1)
    u = torch.rand(50, 300, dtype=torch.float64, generator=draw)
    z = sample.tempered(log_p, log_p.amax(-1, keepdim=True), 1.0)
    expected = drawn_by_definition(log_p, 1.0, 1.0, u)
    assert torch.equal(sample.gumbel_argmax(log_p, 1.0, u, k), expected)
    for top_p in (0.01, 0.5, 0.95):
        kept = sample.nucleus(z, top_p, k)
        assert torch.equal(kept, sample.nucleus(z, top_p, 300))
        assert torch.equal(log_p.where(kept, -math.inf).exp().sum(-1) >= top_p - 1e-6, kept.any(-1))


GOLDEN = (  # vocabulary, how peaked, temperature, top_p, tokens of 8 holes
    (264, 2.0, 1.0, 1.0, [67, 43, 202, 123, 162, 241, 81, 176]),
    (264, 2.0, 0.7, 1.0, [67, 43, 21, 123, 189, 241, 81, 176]),
    (264, 2.0, 1.0, 0.9, [67, 43, 202, 123, 162, 63, 114, 176]),
    (264, 2.0, 2.0, 0.5, [193, 43, 21, 123, 162, 63, 114, 176]),
    (264, 12.0, 1.0, 1.0, [196, 128, 115, 171, 262, 75, 114, 176]),
    (264, 12.0, 0.7, 1.0, [196, 128, 186, 171, 262, 75, 114, 176]),
    (264, 12.0, 1.0, 0.9, [196, 128, 115, 171, 262, 75, 114, 176]),
    (264, 12.0, 2.0, 0.5, [183, 128, 115, 171, 259, 75, 114, 3]),
    (30522, 2.0, 1.0, 1.0, [25953, 10607, 17801, 6180, 12182, 12663, 2259, 881]),
    (30522, 2.0, 0.7, 1.0, [26536, 10607, 17801, 6180, 26334, 12663, 2259, 881]),
    (30522, 2.0, 1.0, 0.9, [25953, 1510, 17801, 6180, 12182, 28299, 2259, 881]),
    (30522, 2.0, 2.0, 0.5, [26536, 1510, 17801, 6180, 12182, 20897, 2259, 4135]),
    (30522, 12.0, 1.0, 1.0, [10172, 30216, 4308, 339, 1019, 15364, 28959, 881]),
    (30522, 12.0, 0.7, 1.0, [10172, 30216, 4308, 339, 1019, 15364, 28959, 881]),
    (30522, 12.0, 1.0, 0.9, [10172, 30216, 4308, 339, 1019, 15364, 28959, 881]),
    (30522, 12.0, 2.0, 0.5, [10172, 6358, 4308, 339, 1019, 15364, 28959, 881]),
)


@pytest.mark.parametrize("v, peak, temperature, top_p, tokens", GOLDEN)
def test_a_seed_draws_the_tokens_that_it_always_drew(v, peak, temperature, top_p, tokens):
    u = torch.rand(8, v, generator=noise_generator(7, v))
    log_p = (peak * u ** 4).log_softmax(-1)
    noise = sample.hole_noise(42, 3, torch.arange(2), torch.tensor([5, 3]), 1 + v)
    assert sample.draw_tokens(log_p, temperature, top_p, noise[:, 1:]).tolist() == tokens


def test_noise_is_made_on_the_device_of_the_model(monkeypatch):
    """By a generator of that device, with the seed and step of each row. No GPU is needed to see
    what is asked for."""
    asked = []
    monkeypatch.setattr(sample, "noise_generator", lambda *counters, device: (counters, device))
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda part, generator: asked.append(
        (tuple(part.shape), generator)))
    u = sample.hole_noise(7, 2, torch.tensor([0, 4]), torch.tensor([2, 1]), 5, "meta")
    assert u.device.type == "meta" and u.shape == (3, 5)
    assert asked == [((2, 5), ((7, 2), "meta")), ((1, 5), ((407, 2), "meta"))]


def test_temperature_0_takes_the_best_token_whatever_the_seed():
    joint, ids = joint_of(3), torch.full((4, L), 3)
    texts = [unmask(Table(conditionals(joint)), None, ids, TOY, steps=L, seed=seed, temperature=0)
             for seed in (1, 2)]
    row, log_probs = [3] * L, conditionals(joint)
    for _ in range(L):  # by hand: the most probable token of any hole, and so on
        table = log_probs(tuple(row))
        i = max((i for i in range(L) if row[i] == 3), key=lambda i: table[i].max())
        row[i] = int(table[i].argmax())
    assert texts[0].tolist() == texts[1].tolist() == [row] * 4


# --------------------------------------------------------------------------------- the schedule

class Recorder:
    """Random logits that depend on the ids; notes what each call sees and is modulated by."""

    def __init__(self, v=260, bias=0.0, dtype=torch.float32):
        self.v, self.dtype, self.calls, self.rows = v, dtype, [], []
        self.bias = torch.zeros(v)
        self.bias[[*TOKENIZER.special_ids, *range(260, v)]] = bias
        self.word_embeddings = SimpleNamespace(weight=torch.zeros(1))

    def hidden(self, ids, modulation=None, attention_mask=None):
        self.calls.append((ids.clone(), modulation, attention_mask))
        noise = [torch.Generator().manual_seed(hash(tuple(row)) % 2**31) for row in ids.tolist()]
        return torch.stack([torch.randn(ids.shape[1], self.v, generator=g) * 3 for g in noise])

    def head(self, hidden):
        self.rows.append(len(hidden))
        return (hidden + self.bias).to(self.dtype)


def ragged():
    """Rows with 10, 7, 1 and 0 holes among given tokens, [SEP]s and pads."""
    ids = torch.randint(97, 123, (4, 14), generator=torch.Generator().manual_seed(0))
    ids[0, 2:12], ids[1, ::2], ids[2, 5] = MASK, MASK, MASK
    ids[1, 1], ids[2, -3:], ids[3, 4] = SEP, PAD, SEP
    return ids


@pytest.mark.parametrize("remask", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [1, 3, 10, 25])
def test_each_row_fills_its_own_exact_number_of_holes(order, remask, steps):
    """n // S a step, the first n mod S steps one more; a row that is done is computed no more."""
    model, ids = Recorder(), ragged()
    seen = []
    out = unmask(model, None, ids, TOKENIZER, steps, order=order, remask=remask,
                 watch=lambda step, rows, ids: seen.append((rows.tolist(), ids.clone())))
    holes, given = ids == MASK, ids != MASK
    assert torch.equal(out[given], ids[given]) and (out[holes] < 256).all()
    left, before = holes.sum(-1).tolist(), ids
    for step, (rows, after) in enumerate(seen):
        assert rows == [i for i in range(4) if left[i]]
        assert torch.equal(model.calls[step][0], before[rows])
        assert model.rows[step] == sum(left)  # only holes reach the vocabulary
        for i, n in enumerate([10, 7, 1, 0]):
            left[i] -= n // steps + (step < n % steps)
        assert (after == MASK).sum(-1).tolist() == left
        assert torch.equal(after[given], ids[given])
        if not remask:
            assert torch.equal(after[before != MASK], before[before != MASK])
        before = after
    assert len(seen) == len(model.calls) == min(steps, 10)
    assert torch.equal(before, out) and left == [0] * 4


def test_nothing_to_fill_returns_the_text_and_runs_no_model():
    ids = ragged()[3:]
    model = Recorder()
    assert torch.equal(unmask(model, None, ids, TOKENIZER), ids) and not model.calls
    nothing = torch.full((1, 5), PAD)  # not even a maskable token
    frozen = make_adapter("none", tiny.CONFIG)
    assert torch.equal(unmask(model, frozen, nothing, TOKENIZER), nothing)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_each_sequence_is_told_its_own_share_of_masked_tokens_in_one_adapter_call(batch):
    model, ids, told = Recorder(), ragged(), []

    def adapter(t):
        told.append(t)
        return Conditioning(A=t[None, :, None].expand(2, -1, 3), lora=("for", "all", "t"))

    unmask(model, adapter, ids, TOKENIZER, 4, batch=batch)
    assert len(told) == 1 and told[0].dtype == torch.float32
    for x, modulation, mask in model.calls:
        assert modulation.lora == ("for", "all", "t") and modulation.A.shape == (2, len(x), 3)
        for row, A in zip(x, modulation.A[0]):
            share = (row == MASK).sum().item() / ((row < 256) | (row == MASK)).sum().item()
            assert A.tolist() == pytest.approx([share] * 3, rel=1e-6)  # float32
        pads = x == PAD
        assert (mask is None) == (not pads.any()) and (mask is None or torch.equal(mask, ~pads))


@pytest.mark.parametrize("kernel", KERNELS)
def test_modulations_made_at_once_are_those_made_step_by_step(kernel, work):
    """One hole at a time, the surest first, against plain calls of every adapter in turn."""
    torch.manual_seed(0)
    model = make_denoiser(work, torch.float64).backbone
    adapter, ids = make_adapter(kernel, tiny.CONFIG, mlp_dim=16).double(), ragged()[:1]
    for seed in range(20):
        tiny.awake(adapter, seed)
    out = unmask(model, adapter, ids, TOKENIZER, 10, temperature=0)
    with torch.no_grad():
        for left in range(10, 0, -1):
            holes = (ids[0] == MASK).nonzero().flatten()
            logits = model(ids, adapter(torch.tensor([left / 14])))[0, holes, :256]
            best = logits.log_softmax(-1).max(-1)
            at = best.values.argmax()
            ids[0, holes[at]] = best.indices[at]
    assert torch.equal(out, ids)


# ------------------------------------------------------------------------------------- the order

def test_orders_rank_by_what_they_are_named_after():
    """By hand, in float64; confidence is that of the token drawn, the others' of the hole."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.6, 0.05, 0.05, 0.3], [0.25, 0.25, 0.25, 0.25]])
    tokens, u = torch.tensor([1, 0, 3]), torch.tensor([0.7, 0.1, 0.4], dtype=torch.float64)
    expected = {
        "confidence": [math.log(0.3), math.log(0.6), math.log(0.25)],
        "entropy": [sum(x * math.log(x) for x in row if x) for row in p.double().tolist()],
        "margin": [0.2, 0.3, 0.0], "random": u.tolist()}
    for order in ORDERS:
        got = sample.certainty(order, p.log(), tokens, u)
        assert got.dtype == torch.float32
        assert got.tolist() == pytest.approx(expected[order], abs=1e-6), order  # float32


@pytest.mark.parametrize("temperature, top_p", [(0.3, 1.0), (1.0, 0.6)])
def test_confidence_ignores_temperature_and_top_p(temperature, top_p):
    """The first hole's two tokens are likelier than any of the second's, and go first.

    Tempered, or cut and normalised, the second's 0.4 would become 0.56 or 0.57, the first's 0.5
    only 0.52 or 0.51.
    """
    model, states = Table(lambda row: np.log([[0.5, 0.49, 0.01], [0.4, 0.3, 0.3], 3 * [1 / 3]])), []
    unmask(model, None, torch.tensor([[3, 3, 0]]).expand(50, -1), TOY, 2, temperature, top_p,
           watch=lambda step, rows, ids: states.append(ids.clone()))
    assert (states[0][:, 0] < 2).all() and (states[0][:, 1] == 3).all()
    assert len(states[0].unique(dim=0)) == 2 and (states[1] < 3).all()


def test_half_precision_logits_are_ranked_in_float32():
    """Two holes whose confidences are one number in bfloat16: the second is the surer one."""
    logits = torch.zeros(1, 2, 260)
    logits[0, :, 65], logits[0, 1, 66:69] = 8, -8
    log_p = logits.bfloat16().log_softmax(-1).max(-1).values[0]
    assert log_p[0] == log_p[1]
    model, states = Recorder(dtype=torch.bfloat16), []
    model.hidden = lambda ids, *given: logits
    unmask(model, None, torch.full((1, 2), MASK), TOKENIZER, 2, temperature=0,
           watch=lambda step, rows, ids: states.append(ids.tolist()[0]))
    assert states == [[MASK, 65], [65, 65]]


@pytest.mark.parametrize("remask, second", [(True, [3, 0, 0]), (False, [0, 0, 3])])
def test_remasking_sends_back_the_least_certain_of_all_filled_tokens(remask, second):
    """The first token is filled at p = 0.4, and then the others can be had at 0.9."""
    flat, sure = np.log([0.4, 0.3, 0.3]), np.log([0.9, 0.05, 0.05])

    def log_probs(row):
        return np.stack([flat, *(2 * [flat if row == (3, 3, 3) else sure])])

    states = []
    unmask(Table(log_probs), None, torch.tensor([[3, 3, 3]]), TOY, 3, temperature=0, remask=remask,
           watch=lambda step, rows, ids: states.append(ids.tolist()[0]))
    assert states == [[0, 3, 3], second, [0, 0, 0]]


def test_two_passes_over_four_holes_fill_the_surer_two_first():
    model, told = Recorder(), []
    logits = torch.zeros(1, 8, 260)
    logits[0, torch.arange(8), torch.arange(8)] = torch.tensor([0., 1, 0, 9, 0, 5, 0, 3])
    model.hidden = lambda ids, *given: logits
    ids = torch.tensor([[50, MASK] * 4])
    states = []
    out = unmask(model, lambda t: told.append(t.tolist()) or Modulation(), ids, TOKENIZER, 2,
                 temperature=0, watch=lambda step, rows, ids: states.append(ids[0].tolist()))
    assert told == [[0.25, 0.5]]
    assert states == [[50, MASK, 50, 3, 50, 5, 50, MASK], [50, 1, 50, 3, 50, 5, 50, 7]]
    assert out.tolist() == states[1:]


# --------------------------------------------------------------------------- what never happens

@pytest.mark.parametrize("order", ORDERS)
def test_forbidden_ids_are_never_produced_nor_felt_whatever_their_logits(order):
    """+50 on [PAD] [CLS] [SEP] [MASK] and on four padded rows: the same text as with -50."""
    ids = ragged()
    texts = [unmask(Recorder(264, bias), None, ids, TOKENIZER, 5, temperature=1.5, order=order,
                    remask=True) for bias in (50.0, -50.0)]
    assert (texts[0][ids == MASK] < 256).all()
    assert torch.equal(*texts)


def test_the_input_is_left_as_it_was(denoiser):
    ids = ragged()
    before = ids.clone()
    unmask(denoiser.backbone, denoiser.adapter, ids, TOKENIZER, 3)
    assert torch.equal(ids, before)


@pytest.mark.parametrize("setting", [{"steps": 0}, {"temperature": -0.1}, {"top_p": 0.0},
                                     {"temperature": math.inf}, {"top_p": 1.1}, {"order": "best"},
                                     {"temperature": math.nan}])
def test_a_setting_out_of_range_is_refused_by_its_name(setting):
    with pytest.raises(common.UserError, match=next(iter(setting))):
        unmask(Recorder(), None, ragged(), TOKENIZER, **setting)


# ------------------------------------------------------------------------------- the same texts

@pytest.mark.parametrize("order", ORDERS)
def test_a_seed_gives_the_same_text_for_any_batch_and_company(denoiser, order):
    """In float64, where the rounding of other shapes, 1e-15, tips no choice among so few."""
    ids = torch.full((5, 24), MASK)
    ids[:, :4] = torch.tensor(list(b"the "))
    how = {"steps": 9, "order": order, "remask": order == "margin", "top_p": 0.95}
    model, adapter = denoiser.backbone, denoiser.adapter
    together = unmask(model, adapter, ids, TOKENIZER, **how)
    assert len({tuple(row) for row in together.tolist()}) == 5
    for batch in (1, 2, 5):
        assert torch.equal(unmask(model, adapter, ids, TOKENIZER, batch=batch, **how), together)
    alone = unmask(model, adapter, ids[3:4], TOKENIZER, seed=342, **how)  # row 3's own seed
    assert torch.equal(alone, together[3:4])
    ids[0], ids[1, 10:] = 65, PAD  # the neighbours change, and one is padded
    assert torch.equal(unmask(model, adapter, ids, TOKENIZER, **how)[2:], together[2:])
    other = unmask(model, adapter, ids, TOKENIZER, seed=43, **how)
    assert not (other[2:] == together[2:]).all(-1).any()


def test_padding_changes_no_text(denoiser):
    """Row i of a padded batch has the text of the row alone: pads are exact, and take no noise."""
    ids = torch.full((1, 20), MASK)
    padded = torch.nn.functional.pad(ids, (0, 7), value=PAD)
    model, adapter = denoiser.backbone, denoiser.adapter
    for order in ORDERS:
        text = unmask(model, adapter, ids, TOKENIZER, 6, order=order)
        assert torch.equal(unmask(model, adapter, padded, TOKENIZER, 6, order=order)[:, :20], text)


def test_sampling_moves_no_global_random_state(denoiser):
    before = torch.get_rng_state()
    unmask(denoiser.backbone, denoiser.adapter, ragged(), TOKENIZER, 2)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------- prompts and templates

def text_of(ids):
    return "".join("[M]" if i == MASK else chr(i) for i in ids.tolist())


def test_prompts_and_templates_become_the_ids_that_they_say():
    holed = sample.holed
    assert text_of(holed("", "The [MASK] of [MASK:3]!", 5, TOKENIZER)) == "The [M] of [M][M][M]!"
    assert text_of(holed("", "[MASK:2][MASK]", 5, TOKENIZER)) == "[M][M][M]"
    assert text_of(holed("", "[MASK] no hole [MASK:x]", 5, TOKENIZER)) == "[M] no hole [MASK:x]"
    assert text_of(holed("ab[MASK]", "", 10, TOKENIZER)) == "ab[MASK][M][M]"  # a prompt is text
    assert text_of(holed("", "", 3, TOKENIZER)) == "[M][M][M]"
    assert text_of(holed("full", "", 4, TOKENIZER)) == "full"


def test_a_prompt_longer_than_the_text_and_other_wishes_are_refused_with_numbers(denoiser):
    for given, words in ((dict(prompt="four", length=3), "got 3, need at least 4"),
                         (dict(length=0), "got 0, need at least 1"),
                         (dict(prompt="a", template="[MASK]"), "got both")):
        with pytest.raises(common.UserError, match=words):
            sample.sample(denoiser.backbone, denoiser.adapter, TOKENIZER, **given)


def test_the_function_for_notebooks_returns_texts_that_keep_the_prompt(denoiser):
    model, adapter = denoiser.backbone, denoiser.adapter
    texts = sample.sample(model, adapter, TOKENIZER, prompt="né", length=12, samples=3, steps=4,
                          temperature=0.7, top_p=0.9, order="entropy", remask=True, seed=7)
    assert len(texts) == 3 == len(set(texts)) and all(t.startswith("né") for t in texts)
    filled = sample.sample(model, adapter, TOKENIZER, template="a[MASK:2]b[MASK]c", temperature=0)
    ids = torch.tensor([[97, MASK, MASK, 98, MASK, 99]])
    assert filled == [TOKENIZER.decode(unmask(model, adapter, ids, TOKENIZER, temperature=0)[0])]


def test_bytes_that_are_no_utf8_read_as_replacement_characters():
    model = Recorder()
    model.hidden = lambda ids, *a: torch.nn.functional.one_hot(
        torch.tensor([0xC3, 0x28, 0x1B, 0xFF]), 260).float()[None] * 99
    text, = sample.sample(model, None, TOKENIZER, length=4, steps=2)
    assert text == "\ufffd(\x1b\ufffd"
    assert sample.one_line(text + "\r\n\té") == "\ufffd(\ufffd\ufffd   é"


def test_a_wordpiece_vocabulary_is_sampled_as_bytes_are(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "sea", "##s", ".", "whale"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = WordPiece(tmp_path / "vocab.txt")
    torch.manual_seed(0)
    model = HydraBert(HydraConfig(12, d_model=32, n_layer=2, d_state=4, headdim=16)).eval()
    with torch.no_grad():  # two padded rows and the special tokens would win
        model.decoder_bias[[0, 2, 3, 4, 10, 11]] += 50
    ids = sample.holed("", "The [MASK:30] sea.", 1, tokenizer)
    out = unmask(model, None, ids.expand(4, -1), tokenizer)
    assert (out[:, [0, 31, 32]] == torch.tensor([5, 6, 8])).all()
    assert set(out.unique().tolist()) <= {1, 5, 6, 7, 8, 9} and len(out.unique(dim=0)) == 4
    texts = sample.sample(model, None, tokenizer, template="The [MASK:30] sea.", samples=4)
    assert texts == [tokenizer.decode(row) for row in out]
    assert all(text.startswith("the ") and text.endswith(" sea.") for text in texts)


# ------------------------------------------------------------------------------- how good it is

def test_diversity_is_counted_by_hand():
    ids = torch.tensor([list(b"abab"), list(b"abac")])
    p = {"a": 4 / 8, "b": 3 / 8, "c": 1 / 8}
    entropy = -sum(x * math.log2(x) for x in p.values())
    assert sample.diversity(ids, 2) == (pytest.approx(entropy, abs=1e-12), 3 / 6)  # ab ba ac
    assert sample.diversity(ids, 4)[1] == 1.0
    assert sample.diversity(ids[[0, 0]], 4)[1] == 0.5  # what two texts share is repeated


def test_scores_are_the_bound_of_each_text_with_jackknife_errors(denoiser):
    """Bits per byte against the sum over all masks of five tokens.

    1,000 masks a text leave errors of about 0.06 bits in each text's bound.
    """
    model, texts = denoiser.backbone, ("abcde", "xyz,.", "aaaaa", "q-q-q")
    ids = torch.tensor([list(text.encode()) for text in texts])
    bits = []
    with torch.no_grad():
        for text in ids:
            bound = 0.0  # E_k [5 / k sum of ce] = sum over k of the mean sum / k
            for k in range(1, 6):
                subsets = list(itertools.combinations(range(5), k))
                x = text.repeat(len(subsets), 1)
                for row, subset in zip(x, subsets):
                    row[list(subset)] = MASK
                log_p = model(x).log_softmax(-1)
                ce = [-log_p[r, i, text[i]].item() for r, s in enumerate(subsets) for i in s]
                bound += sum(ce) / len(subsets) / k
            bits.append(bound / 5 / math.log(2))
    got = sample.score_texts(model, ids, TOKENIZER, 1.0, draws=1000)
    assert np.std(bits) > 0.2  # or the errors below would test nothing
    assert got["bits_per_byte"][0] == pytest.approx(np.mean(bits), abs=0.1)
    assert got["bits_per_byte"][1] == pytest.approx(1.96 * np.std(bits, ddof=1) / 2, abs=0.1)
    one, half = (sample.score_texts(model, ids, TOKENIZER, x)["bits_per_byte"] for x in (1.0, 0.5))
    assert half[:2] == pytest.approx([x / 2 for x in one[:2]], rel=1e-5)  # the error in float32
    assert half.n == 4
    for place, name in enumerate(("entropy", "distinct")):
        without = [sample.diversity(ids[[j for j in range(4) if j != i]])[place] for i in range(4)]
        error = 1.96 * math.sqrt(3 / 4 * sum((x - np.mean(without)) ** 2 for x in without))
        # the jackknife's variance is summed in float32
        assert got[name][:2] == pytest.approx((sample.diversity(ids)[place], error), rel=1e-5)


# ------------------------------------------------------------------------------------ the command

@pytest.fixture(scope="module")
def strong(work):
    """A denoiser whose adapter reaches the texts of a random backbone, saved as a run folder."""
    denoiser = make_denoiser(work, kernel="adaln")
    for seed in range(20):
        tiny.awake(denoiser.adapter, seed)
    save_adapter(work / "run" / "adapter.safetensors", denoiser.adapter)
    return denoiser


@pytest.fixture
def given(work, strong):
    """Flags for the tiny backbone and that run folder."""
    return ("--weights", work / "backbone.safetensors", "--adapter", work / "run")


def test_the_command_samples_shows_and_writes_its_history(work, given, strong):
    run = command("sample.py", *given, "--prompt", "the ", "--length", 20, "--steps", 8,
                  "--samples", 2, "--seed", 5, "--show", "--history", work / "history.json")
    assert run.status == 0, run.err
    assert run.out.rstrip().splitlines()[-1] == "wrote runs/sample/run/result.json"
    metrics = json.loads((work / "runs/sample/run/result.json").read_text())["metrics"]
    (name, texts), = metrics.items()
    assert name.startswith("the [MASK]") and len(texts) == 2
    states = json.loads((work / "history.json").read_text())["history"][name]
    assert len(states) == 8 and states[-1] == texts
    assert all(text.startswith("the ") for state in states for text in state)
    assert [state[0].count("_") - texts[0].count("_") for state in states] == [
        14, 12, 10, 8, 6, 4, 2, 0]
    for line in ("step    1: the ", "step    8: the ", "seed 5: the ", "seed 105: the "):
        assert line in run.out
    assert texts == sample.sample(strong.backbone, strong.adapter, TOKENIZER, prompt="the ",
                                  length=20, steps=8, samples=2, seed=5)


def test_a_backbone_in_bf16_fills_every_hole(work, given):
    run = command("sample.py", *given, "--length", 12, "--steps", 4, "--precision", "bf16")
    assert run.status == 0 and "in bfloat16, trainable" in run.out, run.err
    metrics = json.loads((work / "runs/sample/run/result.json").read_text())["metrics"]
    assert all("_" not in text for texts in metrics.values() for text in texts)


def test_bare_it_samples_with_a_shipped_adapter_and_fills_a_template(work):
    outs = {}
    for adapter in ("chebyshev", "dct", "none"):
        run = command("sample.py", "--length", 24, "--steps", 4, "--samples", 1,
                      "--adapter", adapter)
        assert run.status == 0, run.err
        metrics = json.loads((work / f"runs/sample/{adapter}/result.json").read_text())["metrics"]
        (_, (text,)), (template, (filled,)) = metrics.items()
        assert len(text.encode()) >= 24 and template == sample.TEMPLATE
        given = re.split(r"\[MASK:\d\]", template)
        assert filled.startswith(given[0]) and filled.endswith(given[-1]) and "[MASK" not in filled
        outs[adapter] = (text, filled)
    assert len(set(outs.values())) == 3


def test_a_wrong_wish_ends_the_command_with_one_line(work, given):
    for flags, words in ((("--samples", 0), "--samples"), (("--top-p", 0.0), "top_p"),
                         (("--order", "best"), "'margin'"), (("--device", "gpu"), "'cuda'"),
                         (("--prompt", "long", "--length", 2), "need at least 4"),
                         (("--adapter", "nowhere"), "nowhere"),
                         (("--template", "no holes"), "need a hole"),
                         (("--judge", "--length", 3), "--length"),
                         (("--judge", "--judged", 1), "--judged"),
                         (("--judge", "--judged", 10 ** 5), "windows of that length")):
        run = command("sample.py", *given, "--data", work / "text.txt", *flags)
        assert run.status == 2 and run.err.count("\n") == 1 and words in run.err, run.err


def test_bytes_of_the_command_line_that_are_no_utf8_become_replacement_characters(work, given):
    """The shell's $'It was \\xff' reaches Python as the surrogate U+DCFF."""
    short = ("--length", 24, "--steps", 2, "--samples", 1, "--history", work / "odd.json")
    for flags, name in ((("--prompt", "It was \udcff"), "It was \ufffd[MASK] ..."),
                        (("--template", "a\udce9[MASK:3]"), "a\ufffd[MASK:3]")):
        run = command("sample.py", *given, *short, *flags)
        assert run.status == 0, run.err
        assert name in run.out
        texts = common.read_json(work / "runs/sample/run/result.json")["metrics"][name]
        assert texts[0].startswith(name.partition("[")[0])
        assert common.read_json(work / "odd.json")["history"][name][-1] == texts


def test_a_terminal_is_repainted_and_never_sent_a_control_character(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, history = Terminal(), []
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: (10, 4))
    watch = sample.Watcher(TOKENIZER, 2, history, show=True)
    ids = torch.tensor([list(b"abcdefghijklm"), [MASK] * 6 + list(b"[2J\x1b\nz.")])
    watch(0, torch.arange(2), ids)
    watch(1, torch.arange(2), ids)
    frame = "\x1b[Jabcdefghij\nklm\n______[2J\ufffd\n"  # three of the four lines
    assert terminal.getvalue() == f"\r{frame}\x1b[3F{frame}"
    assert history == 2 * [["abcdefghijklm", "______[2J\x1b\nz."]]


def test_the_judgement_is_written_as_numbers_a_table_three_texts_and_then_a_figure(
        work, strong, monkeypatch):
    """Beside the texts that every run samples, whose flags keep their meaning."""
    result = work / "judged" / "runs/sample/run/result.json"
    save_figure = common.save_figure

    def save_after_the_result(figure, path):
        assert common.read_json(result)["metrics"]["table"]
        save_figure(figure, path)

    monkeypatch.setattr(common, "save_figure", save_after_the_result)
    monkeypatch.setattr(sample, "JUDGED_STEPS", (8, 32, 128))
    asked = {"temperature": 0.7, "top_p": 0.9, "length": 8}
    cfg = sample.Config(judge=True, judged=3, data=(str(work / "text.txt"),), prompt="the ",
                        steps=3, samples=2, order="entropy", history=str(work / "judged.json"),
                        weights=str(work / "backbone.safetensors"), adapter=str(work / "run"),
                        **asked)
    with tiny.root_at(work / "judged"):
        returned = sample.main(cfg)
    metrics = common.read_json(result, "script", "commit")["metrics"]
    assert metrics == common.plain(returned)
    assert metrics["the [MASK] ..."] == sample.sample(
        strong.backbone, strong.adapter, TOKENIZER, prompt="the ", samples=2, steps=3,
        order="entropy", **asked)
    assert len(common.read_json(work / "judged.json")["history"]["the [MASK] ..."]) == 3

    rows = {(row["text"], row["steps"]): row for row in metrics["rows"]}
    assert len(rows) == 2 + len(sample.JUDGED) * len(sample.JUDGED_STEPS)
    for (text, steps), row in rows.items():
        assert all(len(row[name]) == 2 and row[name][1] >= 0 for name in sample.NUMBERS)
        assert (steps == 0) == ("samples" not in row)
    for adapter, text in ((strong.adapter, "random"), (None, "random, frozen")):
        texts = sample.sample(strong.backbone, adapter, TOKENIZER, samples=3, steps=8,
                              order="random", **asked)  # seeds 42, 142 and 242
        assert rows[text, 8]["samples"] == [sample.one_line(text) for text in texts]
    assert rows["random", 8]["samples"] != rows["random, frozen", 8]["samples"]
    assert rows["random", 8]["samples"] != rows["random, remask", 8]["samples"]
    lines = metrics["table"].splitlines()
    assert len(lines) == 4 + len(sample.JUDGED) and {line.count("|") for line in lines} == {5}
    cell = "{:.2f} ± {:.2f}".format(*rows["margin", 32]["bits_per_byte"])
    assert cell in next(line for line in lines if line.startswith("| margin |")).split("|")[3]
    assert result.with_name("sampling.png").read_bytes().startswith(b"\x89PNG")


def test_published_judgements_have_the_labels_and_keys_of_these():
    numbers = {name: common.Interval(1.0, 0.5, 3) for name in sample.NUMBERS}
    published = common.read_json(common.SOURCE / "results/sample/small.json")["metrics"]["rows"]
    expected = [sample.Judgement(label, numbers).record()
                for label in (sample.HELD_OUT, sample.ITS_UNIGRAM)]
    expected += [sample.Judgement(sampler.label, numbers, steps, sampler, ("x",)).record()
                 for sampler in sample.JUDGED for steps in sample.JUDGED_STEPS]
    assert [(row["text"], row["steps"], list(row)) for row in published] \
        == [(row["text"], row["steps"], list(row)) for row in expected]


def test_the_table_repeats_what_has_no_steps_and_picks_those_that_it_shows():
    def numbers(value):
        return {name: common.Interval(value, 0.5, 3) for name in sample.NUMBERS}

    random = sample.Sampler("random")
    found = [sample.Judgement("held-out text", numbers(9.0))]
    found += [sample.Judgement("random", numbers(float(n)), n, random) for n in (1, 2, 4)]
    lines = sample.judgement_table(found, (1, 4)).splitlines()
    assert lines[0] == "| bits per byte / entropy, bits / distinct-4 | 1 steps | 4 steps |"
    for line, label, values in ((lines[2], "held-out text", (9, 9)), (lines[3], "random", (1, 4))):
        cells = [" / ".join([f"{value:.2f} ± 0.50"] * 3) for value in values]
        assert line == f"| {label} | {cells[0]} | {cells[1]} |"
