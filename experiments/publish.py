"""Copy a run's numbers and figures to where the repository keeps them: results/ and figures/.

Run:      python -m experiments.publish runs/certify/shipped --name small
Last line: "published results/certify/small.json, figures/fig1_certificate.png"

A run writes into runs/, which git ignores. Its result.json already holds the commit, the command,
the versions and the hardware; this command refuses one that was made from uncommitted code. With
`--assets` it also replaces the file in assets/ that such a run is the origin of (`train.py --preset
shipped`, `experiments.pretrain --preset small`, `experiments.hrm_adapter --make-backbone`).

Symbols:  none.
Differs from the paper: nothing.
"""
import dataclasses
import shutil
from pathlib import Path
from typing import Annotated

import torch
import tyro

import common
from checkpoint import ASSETS, copy_adapter
from mark_adapters import GEOMETRIES


@dataclasses.dataclass(frozen=True)
class Config:
    """Publish a finished run."""
    run: Annotated[str, tyro.conf.Positional] = ""  # folder of a finished run: runs/certify/shipped
    name: str = ""             # of the result; default: the folder's name
    assets: bool = False       # also replace the file in assets/ that such a run is the origin of
    dirty: bool = False        # allow a run of uncommitted code


def copy(source, target):
    """Copy a file, atomically."""
    with common.atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)
    return target


def publish(run, name="", dirty=False, assets=False):
    """The paths written for the run folder `run`. Raises UserError."""
    run = Path(run)
    source = run / "result.json"
    if not source.is_file():
        raise common.UserError(f"{run} holds no result.json; give the folder of a finished run")
    found = common.read_json(source, "metrics", "config", "script", "commit", "dirty")
    if (found["dirty"] or found["commit"] == "unknown") and not dirty:
        raise common.UserError(f"{source} was made from code that is not committed, or of which "
                               f"this is not known (commit {found['commit']}); commit and run "
                               "again, or give --dirty")
    script = found["script"]
    name = name or run.resolve().name
    if Path(name).name != name:
        raise common.UserError(f"--name: got {name!r}, need a file's name without folders")
    written = [copy(source, common.ROOT / "results" / script / f"{name}.json")]
    for figure in sorted(run.glob("*.png")):
        # Pictures are drawn after the result is written: an older one is of another run.
        if figure.stat().st_mtime >= source.stat().st_mtime:
            written.append(copy(figure, common.ROOT / "figures" / figure.name))
    if assets:
        written += publish_assets(run, script, found["config"])
    return written


def publish_assets(run, script, config):
    """The files in assets/ that this run is the origin of: their paths. Raises UserError."""
    if script == "train" and config["preset"] == "shipped" and config["kernel"] in GEOMETRIES:
        target = ASSETS / f"adapter_{config['kernel']}.safetensors"
        copy_adapter(run / "adapter.safetensors", target, torch.float16)
        return [target]
    if script == "pretrain" and config["preset"] == "small":
        return [copy(run / "backbone.safetensors", ASSETS / "hydra_small.safetensors")]
    if script == "hrm_adapter" and config["make_backbone"]:
        name = "transformer_small.safetensors"
        return [copy(run / name, ASSETS / name)]
    raise common.UserError(f"--assets: no file in assets/ comes from such a run of {script}")


def main(cfg):
    if not cfg.run:
        raise common.UserError("nothing to publish: give the folder of a run, such as "
                               "runs/certify/shipped")
    written = publish(cfg.run, cfg.name, cfg.dirty, cfg.assets)
    names = [path.relative_to(common.ROOT) if path.is_relative_to(common.ROOT) else path
             for path in written]
    common.log(f"published {', '.join(map(str, names))}")
    return {"written": written}


if __name__ == "__main__":
    common.run_cli(Config, main)
