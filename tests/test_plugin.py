"""--plugin FILE: a geometry of a user's own is trained, scored and analysed as the others are."""
import pytest
import tiny

import checkpoint
import common
import mark_adapters
import train

FOURIER = '''
import torch
from mark_adapters import KERNELS, MarkAdapter


class Fourier(MarkAdapter):
    def __init__(self, config, cfg):
        super().__init__(config, cfg)
        self.phase = self.readout(16)
        self.shift = self.readout(self.shift_size, zero=True, n_in=32)
        self.UV = self.readout_UV(n_in=32)

    def heads(self, h):
        phase = self.phase(h)
        wave = torch.cat([phase.sin(), phase.cos()], -1)
        return self.shift(wave), self.UV(wave)


KERNELS["fourier"] = Fourier
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A backbone, a text, a plugin, and an adapter that was trained with it."""
    folder = tmp_path_factory.mktemp("plugin")
    tiny.write_inputs(folder)
    (folder / "fourier.py").write_text(FOURIER, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "ROOT", folder)
        flags = tiny.arguments(folder, kernel="fourier", plugin=folder / "fourier.py", name="own")
        run = tiny.command("train.py", *flags)
    mark_adapters.KERNELS.pop("fourier")
    assert run.status == 0, run.err
    assert f"--plugin {folder / 'fourier.py'}" in run.out  # in the next command
    return folder


@pytest.fixture(autouse=True)
def elsewhere(work, monkeypatch):
    """Runs go to the folder `work`, and the registry is after each test as it was."""
    monkeypatch.setattr(common, "ROOT", work)
    yield
    mark_adapters.KERNELS.pop("fourier", None)


def flags_of(script):
    if script == "sample.py":
        return ("--length", 16, "--steps", 2)
    return ("--seqlen", 24, "--windows", 2)


@pytest.mark.parametrize("script", ["evaluate.py", "sample.py", "certify.py", "markov.py"])
def test_an_adapter_of_a_plugin_is_looked_at_by_every_script(work, script):
    adapter = ("--adapter", work / "runs/own", "--weights", work / "backbone.safetensors")
    flags = (*adapter, "--data", work / "text.txt", *flags_of(script))
    if script == "evaluate.py":
        flags += ("--train", work / "text.txt")
    run = tiny.command(script, *flags)
    assert run.status == 2 and "fourier" in run.err and "--plugin" in run.err
    run = tiny.command(script, *flags, "--plugin", work / "fourier.py")
    assert run.status == 0, run.err


def test_a_plugin_works_from_python_too(work):
    with pytest.raises(common.UserError, match="--plugin"):
        checkpoint.load_adapter(work / "runs/own", tiny.CONFIG)
    checkpoint.run_plugin(work / "fourier.py")
    adapter, _ = checkpoint.load_adapter(work / "runs/own", tiny.CONFIG)
    assert type(adapter).__name__ == "Fourier"
    cfg = tiny.config(work, kernel="fourier", name="python")
    assert train.main(cfg)["step"] == 6


@pytest.mark.parametrize("content, said", [(None, "--plugin: no file"),
                                           ("KERNELS = {}", "--kernel: got fourier, need")])
def test_a_plugin_that_is_missing_or_adds_nothing_is_one_line(work, tmp_path, content, said):
    path = tmp_path / "own.py"
    if content is not None:
        path.write_text(content, "utf-8")
    run = tiny.command("train.py", *tiny.arguments(work, kernel="fourier", plugin=path))
    assert run.status == 2 and said in run.err and len(run.err.splitlines()) == 1


def test_the_help_of_train_names_every_kernel():
    shown = tiny.command("train.py", "--help").out
    for kernel in set(mark_adapters.KERNELS) - {"none"}:
        assert kernel in shown
