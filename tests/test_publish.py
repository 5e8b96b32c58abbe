"""Publishing a run: what is copied where, and what is refused."""
import json
import os

import pytest

import common
from experiments import publish

RESULT = {"metrics": {"loss": 1.0}, "config": {"preset": "demo", "kernel": "dct"},
          "script": "certify", "commit": "abc", "dirty": False}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder of a run of certify.py; results/ and figures/ are beside it."""
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "ASSETS", tmp_path / "assets")
    folder = tmp_path / "runs" / "mine"
    common.write_json(folder / "result.json", RESULT)
    (folder / "fig1.png").write_bytes(b"new")
    return folder


def test_the_result_and_the_pictures_drawn_after_it_are_copied(run, tmp_path):
    (run / "old.png").write_bytes(b"of an earlier run")
    os.utime(run / "old.png", (1, 1))
    written = publish.publish(run, "small")
    assert written == [tmp_path / "results/certify/small.json", tmp_path / "figures/fig1.png"]
    assert json.loads(written[0].read_text("utf-8")) == RESULT
    assert written[1].read_bytes() == b"new" and not (tmp_path / "assets").exists()


@pytest.mark.parametrize("change, word", [({"dirty": True}, "not committed"),
                                          ({"commit": "unknown"}, "unknown")])
def test_code_that_is_not_committed_is_refused_unless_allowed(run, change, word):
    common.write_json(run / "result.json", RESULT | change)
    with pytest.raises(common.UserError, match=word):
        publish.publish(run)
    assert publish.publish(run, dirty=True)


def test_only_the_run_that_an_asset_comes_from_replaces_it(run):
    for script, config in (("certify", {}), ("train", {"preset": "demo", "kernel": "dct"}),
                           ("train", {"preset": "shipped", "kernel": "lora"}),
                           ("pretrain", {"preset": "tiny"})):
        common.write_json(run / "result.json", RESULT | {"script": script, "config": config})
        with pytest.raises(common.UserError, match="--assets"):
            publish.publish(run, assets=True)
    common.write_json(run / "result.json", RESULT | {"script": "pretrain",
                                                     "config": {"preset": "small"}})
    (run / "backbone.safetensors").write_bytes(b"weights")
    assert publish.publish(run, assets=True)[-1].read_bytes() == b"weights"


@pytest.mark.parametrize("name", ["../x", "a/b", "."])
def test_a_name_stays_in_its_folder(run, name):
    with pytest.raises(common.UserError, match="--name"):
        publish.publish(run, name)


def test_a_folder_without_a_result_is_refused(tmp_path):
    with pytest.raises(common.UserError, match="no result.json"):
        publish.publish(tmp_path)
