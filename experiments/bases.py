"""Are Chebyshev and DCT adapters smooth in t? What their bases are functions of (4.4, A.2).

Run:      python -m experiments.bases    (the shipped adapters, 10 seconds)
Last line: "figure: runs/bases/shipped/bases.png"

The paper says that the bases encode smoothness in t. But both are functions of h, the output of an
MLP that reads sinusoids of up to 1000 t, and not of t (eq. 16 to 20):

    DCT        u = basis^T diag(damping) W h is linear in h. So shift and UV are affine in h, and
               there is a Hypernet that equals it at every t: `hypernet_of`. Its map from h to the
               shifts has the rank of the spectrum, 8, where Hypernet's own has up to 3 n_shifts.
    Chebyshev  sum over k of theta_k(h) T_k(tanh(W_z h)): polynomials in z(h), with coefficients
               that move with h too.

So this command asks the trained adapters: how much of what they do over t do the first 5 Chebyshev
polynomials of t explain, or the first 8 cosines of t, as many as the geometries have?

Symbols:  explained   share of a modulated number's variance over even t in [0, 1] that a least-
                      squares fit explains; the mean over all layers and numbers of a field
          polynomials T_0(2 t - 1) .. T_4(2 t - 1)        cosines  cos(pi f t), f = 0 .. 7
Differs from the paper: it states smoothness (4.4) and does not measure it.
"""
import dataclasses

import numpy as np
import torch

import common
from checkpoint import load_adapters, load_backbone, result_folder
from mark_adapters import Hypernet, make_adapter

BASES = ("polynomials", "cosines")


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure how much of an adapter's modulation smooth functions of t explain."""
    adapter: tuple[str, ...] = ()  # run folders or files; default: the shipped ones
    weights: str = "small"         # backbone: "small", "goombalab/hydra" or a path
    points: int = 2001             # even times in [0, 1]
    degree: int = 5                # number of polynomials of t
    n_freqs: int = 8               # number of cosines of t


@torch.no_grad()
def hypernet_of(adapter, config):
    """The Hypernet that equals a DCT adapter at every t. config: the backbone's."""
    dtype = adapter.magnitude.dtype
    twin = make_adapter("hypernet", config, mlp_dim=adapter.mlp_dim, rank=adapter.rank,
                        n_shifts=adapter.n_shifts, mlp_norm=adapter.mlp_norm).to(dtype)
    twin.timestep.load_state_dict(adapter.timestep.state_dict())
    twin.mlp.load_state_dict(adapter.mlp.state_dict())
    twin.magnitude.copy_(adapter.magnitude)
    exponent = torch.nn.functional.softplus(adapter.alpha) + 1e-4
    u_of_h = adapter.spectrum.weight * adapter.order ** -exponent @ adapter.basis  # y h i
    u_at_0 = adapter.spectrum.bias * adapter.order ** -exponent @ adapter.basis    # y 1 i
    twin.shift.weight.copy_(u_of_h @ adapter.shift.weight)
    twin.shift.bias.copy_(adapter.shift.bias + u_at_0 @ adapter.shift.weight)
    twin.UV.weight.copy_(adapter.UV.weight + u_of_h @ adapter.UV_basis.weight)
    twin.UV.bias.copy_(adapter.UV.bias + adapter.UV_basis.bias
                       + u_at_0 @ adapter.UV_basis.weight)
    assert isinstance(twin, Hypernet)
    return twin


def design(name, t, count):
    """The first `count` functions of t of a basis, (t, count)."""
    if name == "polynomials":
        return np.polynomial.chebyshev.chebvander(2 * t - 1, count - 1)
    return np.cos(np.pi * np.outer(t, np.arange(count)))


def explained(values, functions):
    """Share of the variance over t that a least-squares fit explains, (numbers,).

    values (t, numbers), functions (t, count) with a constant among them. NaN where nothing varies.
    """
    coefficients = np.linalg.lstsq(functions, values, rcond=None)[0]
    left = (values - functions @ coefficients).var(0)
    total = values.var(0)
    with np.errstate(invalid="ignore"):
        return 1 - left / np.where(total > 1e-16, total, np.nan)


@torch.no_grad()
def shares(adapter, cfg):
    """{field: {basis: mean share explained}} of an adapter, and under "mean" of all its numbers."""
    t = torch.linspace(0, 1, cfg.points)
    counts = dict(zip(BASES, (cfg.degree, cfg.n_freqs)))
    designs = {name: design(name, t.double().numpy(), count) for name, count in counts.items()}
    found = {}
    together = {name: [] for name in BASES}
    for field, value in vars(adapter(t)).items():
        numbers = value.double().movedim(1, 0).flatten(1).numpy()                  # t (y o)
        found[field] = {}
        for name, functions in designs.items():
            share = explained(numbers, functions)
            together[name].append(share)
            found[field][name] = float(np.nanmean(share))
    found["mean"] = {name: float(np.nanmean(np.concatenate(parts)))
                     for name, parts in together.items()}
    return found


def share_table(found):
    """Markdown of {adapter: what `shares` found}."""
    lines = []
    for name, by_field in found.items():
        for basis in BASES:
            cells = [f"{by_field[field][basis]:.0%}" for field in by_field]
            lines.append([name, basis, *cells])
    fields = list(next(iter(found.values())))
    return common.markdown(["adapter", "functions of t", *fields], *lines)


@torch.no_grad()
def draw_fits(adapters, cfg, path):
    """The A shift of one head of the first layer over t, with its best fits, by adapter."""
    t = torch.linspace(0, 1, cfg.points)
    counts = dict(zip(BASES, (cfg.degree, cfg.n_freqs)))
    figure = common.new_figure(4.2 * len(adapters), 3.2)
    axes = figure.subplots(1, len(adapters), squeeze=False)[0]
    for ax, (name, adapter) in zip(axes, adapters.items()):
        shift = adapter(t).A[0].double().numpy()                                   # t h
        head = shift.var(0).argmax()
        ax.plot(t, shift[:, head], color="0.6", lw=0.8, label="the adapter")
        for i, (basis, count) in enumerate(counts.items()):
            functions = design(basis, t.double().numpy(), count)
            fit = functions @ np.linalg.lstsq(functions, shift[:, head], rcond=None)[0]
            ax.plot(t, fit, color=common.COLORS[i], lw=1.4, label=f"{count} {basis} of t")
        ax.set(title=f"{name}: layer 0, head {head}", xlabel="t (share of masked tokens)",
               ylabel="shift of A_log")
    axes[0].legend(frameon=False, fontsize=8)
    common.save_figure(figure, path)


def main(cfg):
    model = load_backbone(cfg.weights)
    adapters = load_adapters(cfg.adapter, model.config, mark_only=True)
    env = common.banner("bases.py", cfg, "cpu", model)
    found = {name: shares(adapter, cfg) for name, adapter in adapters.items()}
    folder = result_folder("bases", cfg.adapter)
    common.save_result(folder / "result.json", {"explained": found}, cfg, env)
    common.log(f"\nshare of the variance over t that smooth functions of t explain, mean over "
               f"layers and numbers\n\n{share_table(found)}\n")
    draw_fits(adapters, cfg, folder / "bases.png")
    common.log(f"figure: {(folder / 'bases.png').relative_to(common.ROOT)}")
    return found


if __name__ == "__main__":
    common.run_cli(Config, main)
