"""What the published setup does to t: is it told apart, is it kept, is it worth anything?

Run:      python -m experiments.published_t                (350 steps, 3 seeds: 50 minutes)
          python -m experiments.published_t --steps 2000   (5 hours; a third with --paths published)
Last line: "wrote runs/published_t/hypernet_350/result.json"

An adapter is trained on the small backbone along several paths from t to h, and beside each run a
blind twin, told t = 0.5 in training and afterwards. What t is worth is the twin's loss less the
adapter's, on the same windows, t and masks. The same command goes on with what was begun.

    published     --preset published of train.py, but for sizes and backbone
    exact angle   the same without the rounding of bf16-true
    kept          the same with the start and the norm that we recommend, and the angle exact

Before any training it is counted how many different embeddings of t the rounded angle leaves, over
all t that the public code can draw: c_t is a function of one number, round(1000 (1 - t)).

Symbols:  spread   standard deviation over t in [0, 1], averaged over layers and outputs
          worth    ELBO of the blind twin less the adapter's, nats per token
Differs from the paper: a backbone a hundredth of the size, and tens of times fewer steps. So this
          says what follows from the code at this size, and nothing about the authors' runs.
Upstream: github.com/ibitec7/mark, commit 18a855b: src/train.py, src/hydra_modules.py.
"""
import contextlib
import dataclasses
import time
from typing import Literal

import torch

import common
import train
from checkpoint import load_adapter, load_backbone
from data import held_out_split, load_corpus
from evaluate import elbo_difference, make_draws, sequence_losses, wrong_t_losses
from hydra_ssm import HydraConfig
from mark_adapters import GEOMETRIES, make_adapter
from text import make_tokenizer


ELSEWHERE = ("kernel", "sliced")  # of the preset; the small backbone keeps all its heads
PUBLISHED = {name: v for name, v in train.PUBLISHED.items() if name not in ELSEWHERE}
PATHS = {  # {name: settings of train.Config}
    "published": PUBLISHED,
    "exact angle": PUBLISHED | {"rounded_angle": False},
    "kept": PUBLISHED | {"rounded_angle": False, "init": "keep", "mlp_norm": True},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Train adapters and their blind twins along several paths from t to h."""
    kernel: str = "hypernet"               # a geometry: hypernet, chebyshev or dct
    paths: tuple[Literal[tuple(PATHS)], ...] = tuple(PATHS)
    steps: int = 350                       # of each training
    seeds: int = 3                         # 42, 142, ...
    seqlen: int = 128                      # tokens of a window
    global_batch: int = 16                 # windows of a step
    windows: int = 512                     # held-out windows that all are scored on
    data: tuple[str, ...] = ("embedded",)  # text to train on; its held-out part is scored
    weights: str = "small"                 # backbone: "small", "goombalab/hydra" or a path
    out: str = "runs/published_t"          # a folder in it holds the result


# ---- the angle -----------------------------------------------------------------------------------


def reachable_times():
    """Every t that the public code can draw, in ascending order: 1 - current / total."""
    times = set()
    for total in range(10, 1000):
        for current in range(total):
            times.add(1 - current / total)
    return torch.tensor(sorted(times), dtype=torch.float64)


@torch.no_grad()
def distinct_embeddings():
    """How many sinusoids of c_t differ over all reachable t: in tenths of t and in all, with the
    rounded angle and the exact one in float32.
    """
    t = reachable_times().float()
    found = {"reachable": len(t)}
    for name, rounded in (("rounded", True), ("exact", False)):
        config = HydraConfig(20, 8, 1, 4, headdim=8)
        settings = {"reversed_t": True, "rounded_angle": rounded, "mlp_dim": 4}
        time_embedding = make_adapter("hypernet", config, **settings).timestep
        angle = time_embedding.angle(t)[:, 0]  # of the fastest; all others follow from it
        tenths = []
        for k in range(10):
            inside = (t > k / 10) & (t <= (k + 1) / 10)
            tenths.append(len(angle[inside].unique()))
        found[name] = {"all": len(angle.unique()), "tenths": tenths}
    return found


# ---- one training --------------------------------------------------------------------------------


def train_settings(cfg, path, seed, blind):
    """The train.Config of one run. The warm-up keeps its share of the schedule, 5 %."""
    name = f"published_t/{cfg.kernel}_{cfg.steps}_{path.replace(' ', '-')}_{seed}"
    preset = train.PRESETS["published"]
    warmup = max(1, round(cfg.steps * preset["warmup"] / preset["steps"]))
    return train.Config(
        kernel=cfg.kernel, name=name + ("_blind" if blind else ""), weights=cfg.weights,
        data=cfg.data, seqlen=cfg.seqlen, global_batch=cfg.global_batch,
        micro_batch=cfg.global_batch, steps=cfg.steps, warmup=warmup, lr=preset["lr"],
        eval_every=0, eval_windows=32, save_every=100, device="cpu", resume=True, seed=seed,
        blind=blind, mlp_dim=preset["mlp_dim"], **PATHS[path])


def trained(cfg, path, seed, blind, model):
    """The adapter of a run, which is begun, gone on with, or only read: (adapter, its spread)."""
    settings = train_settings(cfg, path, seed, blind)
    folder = common.ROOT / "runs" / settings.name
    if not (folder / "result.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.log", "a", encoding="utf-8") as log:
            with contextlib.redirect_stdout(log):
                done = train.main(settings, model)
        if "rows" not in done:
            raise common.UserError(f"{settings.name} was stopped; the same command goes on")
    saved = common.read_json(folder / "result.json", "metrics", "config")
    wanted = common.plain(settings)
    other = [name for name, v in saved["config"].items() if wanted.get(name, v) != v]
    if set(other) - set(train.FREE):
        raise common.UserError(f"{folder} was trained with another {other[0]}; remove it")
    adapter, _ = load_adapter(folder, model.config)
    return adapter, saved["metrics"]["spread"]


# ---- what t is worth -----------------------------------------------------------------------------


def compare_twins(cfg, path, seed, model, draws, frozen):
    """One seed of a path, as numbers: gain of the adapter, worth of t, cost of a wrong t, spreads.
    """
    adapter, spread = trained(cfg, path, seed, False, model)
    twin, _ = trained(cfg, path, seed, True, model)
    own = sequence_losses(model, adapter, draws)
    blind = sequence_losses(model, twin, draws)
    wrong = wrong_t_losses(model, adapter, draws, seed=seed)
    return {"gain": elbo_difference(frozen, own, draws),
            "worth": elbo_difference(blind, own, draws),
            "wrong_t_cost": elbo_difference(wrong, own, draws),
            "spread": spread}


def summary(found):
    """A row of the table: the Intervals of a path over its seeds."""
    cells = []
    for moment in ("start", "end"):
        spreads = [one["spread"][moment]["hidden"] for one in found]
        cells.append(f"{sum(spreads) / len(spreads):.1e}")
    for name in ("gain", "worth", "wrong_t_cost"):
        over_seeds = common.interval([one[name].mean for one in found])
        cells.append(over_seeds.show("+", 5))
    return cells


def tables(by_path, embeddings):
    """{title: Markdown}."""
    rows = [[path, *summary(found)] for path, found in by_path.items()]
    of_paths = common.markdown(
        ["path from t to h", "spread of h, start", "end", "gain over frozen", "worth of t",
         "cost of a wrong t"], *rows)
    lines = []
    for name in ("rounded", "exact"):
        counts = embeddings[name]
        lines.append([name, f"{counts['all']:,}", *(f"{n:,}" for n in counts["tenths"])])
    of_angles = common.markdown(
        ["angle", "all t", *(f"to {(k + 1) / 10}" for k in range(10))], *lines)
    return {"paths": of_paths, "embeddings": of_angles}


def check(cfg):
    """Refuse, before any work, what could only fail later."""
    if cfg.kernel not in GEOMETRIES:
        raise common.UserError(f"--kernel: got {cfg.kernel}, need one of {', '.join(GEOMETRIES)}")
    if cfg.seeds > len(common.SEEDS):
        raise common.UserError(f"--seeds {cfg.seeds}: need at most {len(common.SEEDS)}")


def main(cfg):
    check(cfg)
    model = load_backbone(cfg.weights)
    env = common.banner("published_t.py", cfg, "cpu", model)
    embeddings = distinct_embeddings()
    tokenizer = make_tokenizer("bytes")
    valid = load_corpus(cfg.data, tokenizer, held_out_split(cfg.data, cfg.data))
    draws = make_draws(valid, tokenizer, cfg.seqlen, cfg.windows)
    frozen = sequence_losses(model, None, draws)
    by_path = {}
    for path in cfg.paths:
        by_path[path] = []
        for seed in common.SEEDS[:cfg.seeds]:
            began = time.time()
            by_path[path].append(compare_twins(cfg, path, seed, model, draws, frozen))
            common.log(f"{path}, seed {seed}: worth of t {by_path[path][-1]['worth'].show('+', 5)} "
                       f"over windows; {time.time() - began:.0f} s")
    shown = tables(by_path, embeddings)
    common.log(f"\nnats per token, ELBO; ± Student's 95 % over {cfg.seeds} training seeds"
               f"\n\n{shown['paths']}\n")
    common.log(f"different embeddings of the {embeddings['reachable']:,} t that the public code "
               f"can draw, by tenths of t\n\n{shown['embeddings']}\n")
    name = f"{cfg.kernel}_{cfg.steps}"
    folder = common.ROOT / cfg.out / name
    result = {"paths": by_path, "embeddings": embeddings, "tables": shown,
              "windows": draws.distinct}
    common.save_result(folder / "result.json", result, cfg, env)
    common.log(f"wrote {cfg.out}/{name}/result.json")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
