"""Markov memory profiles: what each layer remembers at each diffusion time (4.3, B.2, Figure 3).

Run:      python markov.py            (the shipped adapters on the embedded text, 20 seconds)
Last line: "figures: ... (profiles, operators, coefficients)"

Freeze one token's Delta, B and C and the time t, and a head answers an impulse k + 1 positions
later (the scan is shifted by one) with the k-th Markov parameter of eq. 7,

    h_k = C'^T Abar'^k Bbar' = gain exp(-rate k),   gain = Delta C'^T B',   rate = exp(A_log') Delta

because A is a scalar times the identity for each head. Everything follows in closed form: the
Hankel operator [h_{i+j}] has rank one, with the singular value |gain| / (1 - exp(-2 rate)); the H2
norm is |gain| / sqrt(1 - exp(-2 rate)); the half-life is ln 2 / rate steps; and for two operators,

    <H, H'> = sum over k of h_k h'_k = gain gain' / (1 - exp(-(rate + rate')))

No coordinates of the state appear, as Lemma B.1 says. Lemma B.2 bounds |h_k| by M_C M_A M_B rho^k.
Beside these, the matrix of eq. 11 is drawn as it stands for three heads of a layer on a sentence.

Symbols:  gain, rate   h_0 and -log Abar'      (y, s, 2, h)
          k            lag; lag k is distance k + 1 in the mixer
          M_A          1, as P = I             M_B, M_C   largest |Bbar'|, |C'| of a layer
          rho          certify.py's radius of a layer: own beta_A, smallest Delta of the sample
          y layer, s token of the sample, h heads, b batch, l length, d model, g groups, n state
Differs from the paper: its public figure takes the forward direction alone, Delta from the bias
          alone, and splits the state across the heads. Here B, C and Delta are those of real
          tokens, in both directions, and each head has the whole state; averages are root mean
          squares, not means of norms. Every t sees one text, masked at --masked, and each layer the
          activations of the frozen backbone, so that operators differ by their modulation alone.
          Bbar = Delta B, as in the scan that runs; --zoh takes eq. 5's zero-order hold. --published
          draws the public figure beside ours, by its own recipe (`published_profiles`).
Upstream: github.com/ibitec7/mark, commit 18a855b: analysis/dynamics_analysis.py,
          markov_head_sequence.py, markov_io_capture.py (the recipe of --published).
"""
import dataclasses
import math
import statistics
from typing import NamedTuple

import torch
import torch.nn.functional as F

import common
from cart import corrupt
from certify import certify, mixer_inputs, scan_inputs
from checkpoint import check_vocabulary, load_adapters, load_backbone, result_folder, run_plugin
from chunk_scan import A_MIN
from data import Windows, held_out_split, load_corpus, maskable_tokens, noise_generator
from hydra_ssm import Modulation
from mark_adapters import MAGNITUDES
from text import make_tokenizer

TIMES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of Figure 3
LAGS = torch.cat([torch.arange(65), torch.logspace(6, 12, 97, 2)[1:].round()]).double()  # to 4096
FAR = LAGS.tolist().index(1024)      # the lag of the table


# ---- the closed forms ----------------------------------------------------------------------------


class ImpulseResponse(NamedTuple):
    """h_k = gain exp(-rate k) of every layer y, token s, direction and head, in float64."""
    gain: torch.Tensor  # y s 2 h
    rate: torch.Tensor  # y s 2 h   nats per step
    dt: torch.Tensor    # y s 2 h
    B: torch.Tensor     # y s 2 h   |Bbar'|
    C: torch.Tensor     # y s 2 h   |C'|


def inner(one, other):
    """<H, H'> of two responses at the same tokens, averaged over y, s, directions and heads."""
    overlap = one.gain * other.gain / -torch.expm1(-(one.rate + other.rate))
    return overlap.mean().item()


def distances(responses):
    """|H - H'| between all pairs of a list, (i, i), root mean square like the H2 norm."""
    gram = torch.zeros(len(responses), len(responses), dtype=torch.float64)
    for i, one in enumerate(responses):
        for j, other in enumerate(responses):
            gram[i, j] = inner(one, other)
    norm = gram.diagonal()
    return (norm[:, None] + norm - 2 * gram).clamp(min=0).sqrt()


def hankel_singular_value(response):
    """The only one, of each y s 2 h: [h_{i+j}] has rank one, as h_{i+j} is a product over i, j."""
    return response.gain.abs() / -torch.expm1(-2 * response.rate)


def head_half_life(response):
    """Steps in which a state halves, (y, h): the geometric mean over tokens and directions."""
    return (math.log(2) / response.rate).log().mean((1, 2)).exp()


def half_life(response):
    """The same of a layer, (y,): the geometric mean over heads too."""
    return head_half_life(response).log().mean(-1).exp()


def token_profiles(response, lags):
    """Root mean square of h_k over layers, directions and heads: (k, s) for lags (k,)."""
    rows = []
    for k in lags:
        h_k = response.gain * torch.exp(-response.rate * k)               # y s 2 h
        rows.append(h_k.square().mean((0, 2, 3)).sqrt())                  # s
    return torch.stack(rows)


def profile(response, lags):
    """The same over tokens too, (k,): the curve of Figure 3."""
    return token_profiles(response, lags).square().mean(-1).sqrt()


def lemma_bound(responses, A_log, beta_A, lags):
    """Lemma B.2 for `profile`: M_C M_A M_B rho^k of each layer, then their root mean square.

    beta_A (y,). The constants hold for every one of the responses.
    """
    M_B = torch.stack([response.B.amax((1, 2, 3)) for response in responses]).amax(0)  # y
    M_C = torch.stack([response.C.amax((1, 2, 3)) for response in responses]).amax(0)  # y
    dt = torch.stack([response.dt.amin((1, 2)) for response in responses]).amin(0)     # y h
    rho = certify(A_log, beta_A[:, None], dt).radius                                   # y
    bound = (M_C * M_B)[:, None] * rho[:, None] ** lags                                # y k
    return bound.square().mean(0).sqrt()                                               # k


# ---- the responses of a model --------------------------------------------------------------------


@torch.no_grad()
def frozen_operator(model, inputs, modulation=None, attention_mask=None, zoh=False):
    """The ImpulseResponse at each real token of what the mixers read: certify.py's `mixer_inputs`.

    attention_mask (b, l) is False at pads; without it every token is real.
    """
    real = attention_mask
    if real is None:
        real = torch.ones_like(inputs[0][..., 0], dtype=torch.bool)       # b l
    layers = []
    for scan in scan_inputs(model, inputs, modulation, attention_mask):
        layers.append(layer_response(scan, real.bool(), zoh))
    return ImpulseResponse(*[torch.stack(field) for field in zip(*layers)])


def layer_response(scan, real, zoh):
    """The ImpulseResponse of one layer's ScanInputs, its fields (s, 2, h), where real (b, l)."""
    heads_of_a_group = scan.dt.shape[-1] // scan.B.shape[3]
    A = scan.A.double()[:, None].expand(*real.shape, -1)[real]            # s h
    A = A[:, None]                                                        # s 1 h
    dt = scan.dt[real].double()                                           # s 2 h
    B = scan.B[real].double()                                             # s 2 g n
    C = scan.C[real].double()                                             # s 2 g n
    CB = (C * B).sum(-1).repeat_interleave(heads_of_a_group, -1)          # s 2 h
    B = B.norm(dim=-1).repeat_interleave(heads_of_a_group, -1)            # s 2 h
    C = C.norm(dim=-1).repeat_interleave(heads_of_a_group, -1)            # s 2 h
    hold = dt                                                             # Bbar' = hold B'
    if zoh:
        hold = torch.expm1(dt * A) / A                                    # eq. 5
    return ImpulseResponse(gain=hold * CB, rate=(-dt * A).clamp(max=-A_MIN), dt=dt, B=hold * B, C=C)


@torch.no_grad()
def mixer_matrices(model, input_ids, layer):
    """Eq. 11's M of a layer of the frozen backbone on ids (l,), and its heads' half-lives:
    (h, l, l) and (h,).
    """
    inputs = mixer_inputs(model, input_ids[None])
    m = Modulation().by_layer(model)[layer]
    M = model.layers[layer].mixer.matrix(inputs[layer], m)
    return M, head_half_life(frozen_operator(model, inputs))[layer]


@torch.no_grad()
def coefficients(adapter, points=257):
    """A.2's components, by layer: the learned magnitudes (y, 7); for a DCT the exponent of its
    damping (y,) and the spectrum (y, f), for Chebyshev the coefficients of the A shift (y, k);
    both root mean square over an even grid of t.
    """
    h = adapter.hidden(torch.linspace(0, 1, points))                      # y t m
    found = {"magnitudes": adapter.effective_magnitudes()}
    if adapter.kernel == "dct":
        exponent = F.softplus(adapter.alpha) + 1e-4                       # y 1 1
        spectrum = adapter.spectrum(h) * adapter.order ** -exponent       # y t f
        found["exponent"] = exponent[:, 0, 0]
        found["spectrum"] = spectrum.square().mean(1).sqrt()
    if adapter.kernel == "chebyshev":
        theta = adapter.shift(h).unflatten(-1, (3, adapter.degree, -1))   # y t 3 k s
        found["spectrum"] = theta[:, :, 0].square().mean((1, 3)).sqrt()
    return found


# ---- the public figure's recipe ------------------------------------------------------------------


PADDED, AT = 512, 256  # a text is padded to this length, and read at this position


@torch.no_grad()
def published_profiles(model, adapter, input_ids, pad_id):
    """Figure 3 by the recipe of the paper's public code, for ids (l,): six lists over LAGS, of tau
    = TIMES and of the frozen backbone, where tau = 1 - t is what that code feeds its adapters.

    B and C are the forward ones before modulation, at position AT of the padded text, with an
    adapter that is told 0.5. The state is cut into as many parts as there are heads, Delta is that
    of dt_bias alone, and a curve is the root of a sum of squares over layers and heads. A text of
    fewer than 253 tokens is a pad there, so that B and C are SiLU of the convolution's bias,
    whatever the text.
    """
    ids = F.pad(input_ids[:PADDED], (0, PADDED - len(input_ids[:PADDED])), value=pad_id)[None]
    real = ids != pad_id                                                  # 1 l
    inputs = mixer_inputs(model, ids, adapter(0.5), real)
    scans = scan_inputs(model, inputs, None, real)
    B = torch.stack([scan.B[0, AT, 0, 0] for scan in scans])[:, None]     # y 1 n
    C = torch.stack([scan.C[0, AT, 0, 0] for scan in scans])[:, None]     # y 1 n
    told = adapter(1 - torch.tensor(TIMES))
    A_log = torch.stack([layer.mixer.A_log for layer in model.layers])[:, None]      # y 1 h
    dt_bias = torch.stack([layer.mixer.dt_bias for layer in model.layers])[:, None]  # y 1 h
    curves = published_curve(A_log + told.A, dt_bias + told.dt, B * told.B_scale + told.B_shift,
                             C * told.C_scale + told.C_shift)             # t k
    frozen = published_curve(A_log, dt_bias, B, C)                        # 1 k
    return torch.cat([curves, frozen]).tolist()


def published_curve(A_log, dt_bias, B, C):
    """sqrt of the sum over y and h of (<B, C> of the head's part of the state, times decay^k)^2:
    (t, k) of A_log and dt_bias (y t h), B and C (y t n).
    """
    rate = A_log.double().exp() * F.softplus(dt_bias.double())            # y t h
    parts = (B * C).double().tensor_split(rate.shape[-1], -1)
    gain = torch.stack([part.sum(-1) for part in parts], -1)              # y t h
    m = gain[..., None] * torch.exp(-rate[..., None] * LAGS)              # y t h k
    return m.square().sum((0, 2)).sqrt()                                  # t k


# ---- one adapter ---------------------------------------------------------------------------------


@torch.no_grad()
def analyse(model, adapter, inputs, grid, attention_mask=None, zoh=False):
    """What is drawn of one adapter's operators, as lists. grid: even times from 0 to 1, every
    (n / 4)-th of which is one of TIMES.
    """
    frozen = frozen_operator(model, inputs, None, attention_mask, zoh)
    b = len(inputs[0])
    at_grid = []
    for t in grid:
        modulation = adapter(torch.full((b,), t))
        at_grid.append(frozen_operator(model, inputs, modulation, attention_mask, zoh))
    shown = at_grid[::len(grid) // 4]                                     # at TIMES
    A_log = torch.stack([layer.mixer.A_log for layer in model.layers])
    beta_A = adapter.effective_magnitudes()[:, 0]
    norm = math.sqrt(inner(frozen, frozen))
    sigma = [hankel_singular_value(response) for response in (*shown, frozen)]
    return {
        "profile": [profile(response, LAGS).tolist() for response in shown],
        "profile_frozen": profile(frozen, LAGS).tolist(),
        "ratio_quartiles": ratio_quartiles(shown, frozen),
        "bound": lemma_bound([*shown, frozen], A_log, beta_A, LAGS).tolist(),
        "hankel": [value.square().mean().sqrt().item() for value in sigma],
        "half_life": [half_life(response).tolist() for response in at_grid],
        "half_life_frozen": half_life(frozen).tolist(),
        "distance": (distances([*at_grid, frozen]) / norm).tolist(),
    }


def memory_ratios(model, adapter, draws, modulate="full", times=(0.0, 0.5, 1.0), windows=8):
    """{t: profile h_k of the operators at t over the frozen one's, a list over LAGS}, on masked
    windows of evaluate.py's Draws. Empty for an adapter that leaves the recurrence alone.
    """
    if hasattr(adapter, "lora"):  # with a geometry: the operators are the geometry's
        adapter = getattr(adapter, "geometry", adapter)
    if adapter(0.5).A is None:
        return {}
    device = model.word_embeddings.weight.device
    x_t = draws.x_t[:windows].to(device)                                  # b l
    real = draws.x0[:windows].to(device) != draws.pad_id
    inputs = mixer_inputs(model, x_t, None, real)
    frozen = profile(frozen_operator(model, inputs, None, real), LAGS)    # k
    found = {}
    for t in times:
        modulation = adapter(torch.full((len(x_t),), t, device=device)).keep(modulate)
        at_t = profile(frozen_operator(model, inputs, modulation, real), LAGS)
        found[t] = (at_t / frozen).tolist()
    return found


def ratio_quartiles(responses, frozen):
    """Of each response, the quartiles over tokens of its profile over frozen's: [[low, high], ...],
    a list over LAGS each.
    """
    quarters = torch.tensor([0.25, 0.75], dtype=torch.float64)
    of_frozen = token_profiles(frozen, LAGS)                              # k s
    found = []
    for response in responses:
        ratio = token_profiles(response, LAGS) / of_frozen                # k s, 0/0 where both end
        found.append(ratio.nanquantile(quarters, dim=-1).tolist())
    return found


def table_row(name, found):
    """How far an adapter's operators are apart, and what becomes of the memory."""
    *at_grid, _ = found["distance"]                                       # the last row is frozen's
    between = []
    for i, row in enumerate(at_grid):
        between += row[:i]
    to_frozen = [row[-1] for row in at_grid]
    changes = []
    for row in found["half_life"]:
        changes += [now / frozen for now, frozen in zip(row, found["half_life_frozen"])]
    *hankel, hankel_frozen = found["hankel"]
    cells = [name, f"{statistics.mean(between):.3f} ({max(between):.3f})",
             f"{statistics.mean(to_frozen):.3f}", f"{min(changes):.2f} to {max(changes):.2f}"]
    for i in (0, 4):                                                      # of TIMES
        cells.append(f"{hankel[i] / hankel_frozen:.2f}")
    for i in (0, 2, 4):
        cells.append(f"{found['profile'][i][FAR] / found['profile_frozen'][FAR]:.2f}")
    return cells


def memory_table(by_adapter):
    """Markdown: a row for each adapter."""
    head = ["adapter", "distance of two times, mean (largest)", "distance to frozen, mean",
            "half-life of a layer over frozen's", "Hankel singular value over frozen's: t = 0",
            "t = 1", f"h_k over frozen's at lag {LAGS[FAR]:.0f}: t = 0", "t = 0.5", "t = 1"]
    return common.markdown(head, *[table_row(name, found) for name, found in by_adapter.items()])


# ---- figures -------------------------------------------------------------------------------------


def colors_of_times():
    """A colour for each of TIMES, from dark to light."""
    from matplotlib import colormaps
    return [colormaps["viridis"](0.9 * t) for t in TIMES]


def draw_memory(ax, ratios):
    """`memory_ratios` as one panel."""
    for i, (t, ratio) in enumerate(ratios.items(), 2):  # 0 and 1 are those of draw_gain_by_t
        ax.plot(LAGS + 1, ratio, color=common.COLORS[i], marker=common.MARKERS[i], ms=4,
                markevery=0.1, label=f"t = {t:g}")
    ax.axhline(1, color="0.3", ls="--", lw=1, label="frozen")
    title = "what t does to memory" if ratios else "the recurrence is left alone"
    ax.set(xscale="log", xlabel="distance (tokens)", ylabel="$h_k$ over the frozen one's",
           title=title)
    ax.legend(frameon=False, fontsize=8)


def draw_profiles(by_adapter, path):
    """Figure 3: h_k beside the frozen backbone's, then h_k itself; a column for each adapter."""
    figure = common.new_figure(3.6 * len(by_adapter) + 1.6, 6)
    panels = figure.subplots(2, len(by_adapter), sharex=True, sharey="row", squeeze=False)
    for (upper, lower), (name, found) in zip(panels.T, by_adapter.items()):
        draw_ratios(upper, found)
        draw_curves(lower, found)
        upper.set(title=name, xscale="log")
        lower.set(xlabel="distance k + 1 (tokens)", yscale="log")
    panels[0, 0].set_ylabel("change of $h_k$ from frozen (%)\nline: root mean square\n"
                            "band (t = 0, 1): middle half of tokens", fontsize=9)
    panels[1, 0].set_ylabel("root mean square of $h_k$\n(output per unit of input)", fontsize=9)
    figure.legend(*panels[1, 0].get_legend_handles_labels(), loc="outside right upper")
    common.save_figure(figure, path)


def draw_ratios(panel, found):
    """The change of h_k by modulation, in per cent; bands at the first and the last time."""
    frozen = torch.tensor(found["profile_frozen"])                        # k
    for i, color in enumerate(colors_of_times()):
        ratio = torch.tensor(found["profile"][i]) / frozen
        panel.plot(LAGS + 1, 100 * (ratio - 1), color=color)
        if i in (0, len(TIMES) - 1):
            low, high = 100 * (torch.tensor(found["ratio_quartiles"][i]) - 1)
            panel.fill_between(LAGS + 1, low, high, color=color, alpha=0.2, lw=0)
    panel.axhline(0, color="black", ls="--", lw=1)


def draw_curves(panel, found):
    """h_k at each time beside frozen's, and in words how far above Lemma B.2's bound lies."""
    for curve, t, color in zip(found["profile"], TIMES, colors_of_times()):
        panel.plot(LAGS + 1, curve, color=color, label=f"t = {t}")
    panel.plot(LAGS + 1, found["profile_frozen"], "k--", lw=1, label="frozen")
    above = []
    for curve in found["profile"]:
        above += [math.log10(bound / h) for bound, h in zip(found["bound"], curve) if h > 0]
    bound = (f"Lemma B.2's bound is $10^{{{min(above):.1f}}}$\n"
             f"to $10^{{{max(above):.1f}}}$ times as large")
    panel.text(0.04, 0.06, bound, transform=panel.transAxes, fontsize=9)


def draw_published(by_adapter, path):
    """The public figure: what `published_profiles` found, a panel for each adapter."""
    figure = common.new_figure(3.6 * len(by_adapter) + 1.6, 3.4)
    panels = figure.subplots(1, len(by_adapter), sharey=True, squeeze=False)[0]
    for panel, (name, (*curves, frozen)) in zip(panels, by_adapter.items()):
        for curve, tau, color in zip(curves, TIMES, colors_of_times()):
            panel.plot(LAGS, curve, color=color, label=f"tau = {tau}")
        panel.plot(LAGS, frozen, "k--", lw=1, label="frozen")
        panel.set(title=f"{name}, the public recipe", xlabel="lag k", yscale="log",
                  ylim=(1e-12, None))
    panels[0].set_ylabel("root of the sum of squares\nover layers and heads")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    common.save_figure(figure, path)


def draw_operators(by_adapter, grid, path):
    """Half-life by layer and t, and the distance between operators at two times."""
    figure = common.new_figure(3.6 * len(by_adapter) + 1.2, 6.2)
    panels = figure.subplots(2, len(by_adapter), squeeze=False)
    changes = {}                                                          # per cent, t y
    apart = {}                                                            # per cent, i i
    for name, found in by_adapter.items():
        now = torch.tensor(found["half_life"])
        changes[name] = 100 * (now / torch.tensor(found["half_life_frozen"]) - 1)
        apart[name] = 100 * torch.tensor(found["distance"])
    most_change = max(1, *[change.abs().max().item() for change in changes.values()])
    most_apart = max(1, *[distance.max().item() for distance in apart.values()])

    last = len(grid) - 1
    for (upper, lower), name in zip(panels.T, by_adapter):
        of_layers = upper.imshow(changes[name].T.numpy(), cmap="RdBu_r", vmin=-most_change,
                                 vmax=most_change, aspect="auto", interpolation="nearest")
        upper.set(title=name, xlabel="t", ylabel="layer")
        upper.yaxis.get_major_locator().set_params(integer=True)
        of_times = lower.imshow(apart[name].numpy(), cmap="magma", vmin=0, vmax=most_apart,
                                interpolation="nearest")
        lower.set(xlabel="t' (last column: frozen)", ylabel="t (last row: frozen)")
        lower.axvline(last + 0.5, color="white", lw=2)
        lower.axhline(last + 0.5, color="white", lw=2)
        for axis in (upper.xaxis, lower.xaxis, lower.yaxis):
            axis.set_ticks([0, last / 2, last], ["0", "0.5", "1"])
    figure.colorbar(of_layers, ax=panels[0], label="half-life, change from frozen (%)")
    figure.colorbar(of_times, ax=panels[1], label="distance (% of frozen's norm)")
    common.save_figure(figure, path)


def draw_coefficients(learned, path):
    """What each layer learned: the magnitudes, and a basis' components. learned: {adapter: what
    `coefficients` found}.
    """
    figure = common.new_figure(3.6 * len(learned) + 1.2, 6)
    panels = figure.subplots(2, len(learned), squeeze=False)
    largest = max(found["magnitudes"].abs().max() for found in learned.values())
    for (upper, lower), (name, found) in zip(panels.T, learned.items()):
        image = upper.imshow(found["magnitudes"].abs().numpy(), cmap="viridis", vmin=0,
                             vmax=largest, aspect="auto", interpolation="nearest")
        upper.set(title=name, ylabel="layer")
        upper.set_xticks(range(len(MAGNITUDES)), MAGNITUDES, rotation=90)
        upper.yaxis.get_major_locator().set_params(integer=True)
        if "spectrum" in found:
            draw_spectrum(figure, lower, found)
        else:
            lower.set_axis_off()
    figure.colorbar(image, ax=panels[0], label="learned magnitude, |beta| or |alpha|")
    common.save_figure(figure, path)


def draw_spectrum(figure, panel, found):
    """The components of a basis by layer: a DCT's has an exponent too, Chebyshev's has none."""
    image = panel.imshow(found["spectrum"].numpy(), cmap="viridis", vmin=0, aspect="auto",
                         interpolation="nearest")
    panel.set(xlabel="degree k of the A shift", ylabel="layer", title="root mean square over t")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.yaxis.get_major_locator().set_params(integer=True)
    if "exponent" in found:
        exponents = [f"{y}: {value:.2f}" for y, value in enumerate(found["exponent"].tolist())]
        panel.set(xlabel="frequency", ylabel="layer: exponent of its damping")
        panel.set_yticks(range(len(exponents)), exponents)
    figure.colorbar(image, ax=panel, label="coefficient")


def draw_matrices(M, half_lives, letters, layer, path):
    """Eq. 11's M of three heads: of the shortest memory, the middle one and the longest."""
    order = half_lives.argsort().tolist()
    heads = list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]]))
    side = max(3, 0.095 * len(letters))                                   # inches
    figure = common.new_figure((side + 0.5) * len(heads) + 1, side + 0.9)
    panels = figure.subplots(1, len(heads), squeeze=False)[0]
    for panel, head in zip(panels, heads):
        size = M[head].double().abs().clamp(min=1e-9).log10().numpy()
        image = panel.imshow(size, cmap="magma", vmin=-4, vmax=1, interpolation="nearest")
        digits = 1 if half_lives[head] < 10 else 0
        panel.set_title(f"layer {layer}, head {head}\nhalf of its memory is gone after "
                        f"{half_lives[head]:.{digits}f} tokens", fontsize=10)
        panel.set(xlabel="j, the token that is read", ylabel="i, the token that reads")
        if len(letters) <= 80:
            show_letters(panel, letters)
    figure.colorbar(image, ax=panels, label="weight, log10 |m_ij| (black: -4 or less)")
    common.save_figure(figure, path)


def show_letters(panel, letters):
    """The sentence along both axes, a tick for each token."""
    ticks = range(len(letters))
    small = {"fontsize": 7, "family": "monospace", "parse_math": False}
    longest = max(len(letter) for letter in letters)
    panel.set_xticks(ticks, letters, rotation=90 if longest > 1 else 0, **small)
    panel.set_yticks(ticks, letters, **small)
    panel.tick_params(length=0)


# ---- command line --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """Draw the memory profiles of adapters at frozen times, and a layer's mixer as a matrix."""
    adapter: tuple[str, ...] = ()        # run folders or files; default: the shipped ones
    weights: str = "small"               # backbone: "small", "goombalab/hydra" or a path
    sliced: bool = False                 # NOT it, but what the paper's code makes of it
    data: tuple[str, ...] = ("embedded",)  # text of the sample
    vocab: str = "bytes"                 # "bytes", "bert-base-uncased" or a vocab.txt
    seqlen: int = 128                    # tokens of a window
    windows: int = 8                     # every token of these is in the sample
    masked: float = 0.3                  # share of the sample that is masked, at every t
    grid: int = 17                       # even times in the pictures over t
    zoh: bool = False                    # Bbar by zero-order hold in place of Delta B
    published: bool = False              # Figure 3 by the recipe of the paper's public code, too
    sentence: str = "It is a truth universally acknowledged"  # whose mixer matrices are drawn
    layer: int | None = None             # of the matrices; default: the middle one
    plugin: str = ""                     # Python file of your own, run first; it adds geometries
    seed: int = 42


def check_config(cfg, model):
    """Raise UserError for what cannot be drawn."""
    if cfg.grid < 5 or cfg.grid % 4 != 1 or not 0 <= cfg.masked <= 1:
        raise common.UserError(f"got --grid {cfg.grid} and --masked {cfg.masked}, need 5, 9, 13, "
                               "... times and a share from 0 to 1")
    last = model.config.n_layer - 1
    if cfg.layer is not None and not 0 <= cfg.layer <= last:
        raise common.UserError(f"--layer: got {cfg.layer}, need 0 to {last}")
    if not cfg.sentence:
        raise common.UserError("--sentence: got nothing, need some words")


def masked_sample(cfg, tokenizer):
    """Windows of the text with a share of --masked masked, and where they are no pads: (b, l)."""
    corpus = load_corpus(cfg.data, tokenizer, held_out_split(cfg.data, ()))
    x0 = Windows(corpus, cfg.seqlen, tokenizer.pad_id).evenly(cfg.windows)     # b l
    t = torch.full((len(x0),), cfg.masked)
    x_t, _ = corrupt(x0, t, tokenizer.mask_id, maskable_tokens(x0, tokenizer),
                     noise_generator(cfg.seed))
    return x_t, x0 != tokenizer.pad_id


def main(cfg):
    run_plugin(cfg.plugin)
    tokenizer = make_tokenizer(cfg.vocab)
    model = load_backbone(cfg.weights, sliced=cfg.sliced)
    check_vocabulary(model, tokenizer)
    check_config(cfg, model)
    env = common.banner("markov.py", cfg, "cpu", model)
    x_t, real = masked_sample(cfg, tokenizer)
    inputs = mixer_inputs(model, x_t, None, real)
    grid = torch.linspace(0, 1, cfg.grid).tolist()
    by_adapter = {}
    learned = {}
    adapters = load_adapters(cfg.adapter, model.config, mark_only=True)
    for name, adapter in common.progress(adapters.items(), desc="adapters"):
        learned[name] = coefficients(adapter)
        by_adapter[name] = analyse(model, adapter, inputs, grid, real, cfg.zoh)
        by_adapter[name]["learned"] = {part: v.tolist() for part, v in learned[name].items()}
    sentence = torch.from_numpy(tokenizer.encode(cfg.sentence).astype("int64"))  # l
    layer = (model.config.n_layer - 1) // 2 if cfg.layer is None else cfg.layer
    M, half_lives = mixer_matrices(model, sentence, layer)

    public = {}
    if cfg.published:
        for name, adapter in adapters.items():
            public[name] = published_profiles(model, adapter, sentence, tokenizer.pad_id)
    table = memory_table(by_adapter)
    common.log(f"\n{real.sum()} tokens, both directions, {len(model.layers)} layers; distances as "
               f"shares of the frozen operator's norm\n\n{table}\n")
    result = {"adapters": by_adapter, "lags": LAGS.tolist(), "grid": grid, "table": table,
              "matrices": {"layer": layer, "half_life": half_lives.tolist()}}
    if public:
        result["published"] = public
    folder = result_folder("markov", cfg.adapter)
    common.save_result(folder / "result.json", result, cfg, env)
    draw_profiles(by_adapter, folder / "fig3_profiles.png")
    draw_operators(by_adapter, grid, folder / "fig3_operators.png")
    draw_coefficients(learned, folder / "fig3_coefficients.png")
    if public:
        draw_published(public, folder / "fig3_published.png")
    letters = [tokenizer.decode([i]) for i in sentence.tolist()]
    draw_matrices(M, half_lives, letters, layer, folder / "mixer_matrix.png")
    shown = folder.relative_to(common.ROOT)
    common.log(f"mixer matrices of layer {layer}: {shown}/mixer_matrix.png")
    common.log(f"figures: {shown}/fig3_*.png (profiles, operators, coefficients)")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
