"""mixture.py: the corpus has Table 5's weights, its splits, and goes on where it was stopped."""
import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from common import UserError
from helpers import ROOT

import data
from experiments import mixture
from text import ByteTokenizer, WordPiece

BYTES = ByteTokenizer()

MIXTURE = {"pile/long": 3.0, "pile/short": 1.0, "wiki/text-v1": 1.0}


def local_sources(folder, opened):
    """Files standing in for the hub: rows with more fields than "text", one of them empty."""
    for name, n in (("long", 3000), ("short", 20), ("text-v1", 3000)):
        rows = [{"id": i, "text": f"{name} {i} says something {i * i}."} for i in range(n)]
        lines = [json.dumps(row) for row in [{"id": -1, "text": None}, *rows]]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))

    def open_source(source):
        opened.append(source)
        with open(folder / f"{source.split('/')[1]}.jsonl", encoding="utf-8") as file:
            yield from map(json.loads, file)
    return open_source


def test_table_5_has_fourteen_sources_and_sums_to_105():
    assert len(mixture.PAPER_MIXTURE) == 14
    assert round(sum(mixture.PAPER_MIXTURE.values()), 2) == 105.00
    assert mixture.PAPER_MIXTURE["common-pile/youtube_filtered"] == 22.5
    assert mixture.PAPER_MIXTURE["iohadrubin/wikitext-103-raw-v1"] == 2.5


def test_a_mixture_has_its_weights_its_splits_and_loads_as_one(tmp_path, capsys):
    opened, out = [], tmp_path / "out"
    manifest = mixture.build_mixture(out, BYTES, 50_000, local_sources(tmp_path, opened), MIXTURE)
    assert opened == list(MIXTURE)
    texts = {}
    for split in ("train", "valid", "test"):
        corpus = data.load_corpus(out, BYTES, split)
        texts[split] = BYTES.decode(np.asarray(corpus.ids)).split("\n\n")[:-1]
        assert len(texts[split]) == corpus.n_docs == manifest["splits"][split]["documents"]
        assert corpus.n_bytes == sum(len(t.encode()) for t in texts[split])
    every = sum(texts.values(), [])
    assert len(set(every)) == len(every)  # no document twice, so none in two splits
    for split, share in (("train", 0.70), ("valid", 0.15), ("test", 0.15)):
        assert abs(len(texts[split]) / len(every) - share) < 0.05
    tokens = Counter()
    for t in texts["train"]:
        tokens[t.split(" ")[0]] += len(t) + 1
    # Of 50,000 tokens 3/5 and 1/5; a source stops within a document after its share.
    assert 0 <= tokens["long"] - 30_000 < 50 and 0 <= tokens["text-v1"] - 10_000 < 50
    said = capsys.readouterr().out
    assert f"short: {tokens['short']} of 10,000 training tokens, the source has no more" in said
    assert said.count("has no more") == 1


def test_a_killed_mixture_goes_on_where_it_was(tmp_path):
    opened, out = [], tmp_path / "out"
    good = local_sources(tmp_path, opened)

    def failing(source):
        yield from (row for i, row in zip(range(100), good(source)))
        if source == "wiki/text-v1":
            raise ConnectionError("the cable")
    with pytest.raises(UserError, match="cannot stream wiki/text-v1.*the cable.*whole sources"):
        mixture.build_mixture(out, BYTES, 50_000, failing, MIXTURE)
    with pytest.raises(UserError, match="holds no text"):
        data.load_corpus(out, BYTES)  # not yet a corpus
    (out / ".text-v1.1.tmp").mkdir()  # what a kill leaves
    (out / ".anything.tmp").mkdir()   # what another program does
    mixture.build_mixture(out, BYTES, 50_000, good, MIXTURE)
    assert opened == [*MIXTURE, "wiki/text-v1"] and (
        [p.name for p in out.glob(".*.tmp")] == [".anything.tmp"])
    mixture.build_mixture(out, BYTES, 50_000, good, MIXTURE)
    assert len(opened) == 4
    with pytest.raises(UserError, match="long was made with another tokenizer or other --tokens"):
        mixture.build_mixture(out, BYTES, 60_000, good, MIXTURE)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    with pytest.raises(UserError, match="another tokenizer"):
        mixture.build_mixture(out, WordPiece(tmp_path / "vocab.txt"), 50_000, good, MIXTURE)


def test_the_mixture_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        mixture.build_mixture(tmp_path / "out", BYTES, 1000)


def test_a_mixture_of_next_to_nothing_ends_though_its_source_does_not(tmp_path):
    def endless(name):
        while True:
            yield {"text": "words"}

    made = mixture.build_mixture(tmp_path / "m", BYTES, 0, endless, {"a/b": 1.0})
    assert sum(part["documents"] for part in made["splits"].values()) == 1


def test_a_damaged_manifest_of_a_source_is_one_line_that_names_it(tmp_path):
    good = local_sources(tmp_path, [])
    mixture.build_mixture(tmp_path / "out", BYTES, 5_000, good, MIXTURE)
    for content in ("", "{}", "{"):
        (tmp_path / "out" / "short" / "manifest.json").write_text(content)
        with pytest.raises(UserError, match="short/manifest.json .*damaged") as error:
            mixture.build_mixture(tmp_path / "out", BYTES, 5_000, good, MIXTURE)
        assert "\n" not in str(error.value)


def test_shards_do_not_replace_a_mixture(tmp_path):
    mixture.build_mixture(tmp_path / "out", BYTES, 5_000, local_sources(tmp_path, []), MIXTURE)
    with pytest.raises(UserError, match="shards and nothing else"):
        data.write_shards(["new"], tmp_path / "out", BYTES, overwrite=True)


# -------------------------------------------------------------------------------- command line

def run(*arguments, **environment):
    return subprocess.run([sys.executable, "-m", "experiments.mixture", *map(str, arguments)],
                          text=True, capture_output=True, cwd=ROOT, env=os.environ | environment)


def test_the_bare_command_shows_the_shares_and_fetches_nothing(tmp_path):
    done = run("--tokens", "1.05e9", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| common-pile/")]
    assert len(rows) == 13
    assert "| common-pile/youtube_filtered | 22.50 | 225,000,000 |" in rows
    assert "build it: python -m experiments.mixture" in done.stdout.splitlines()[-1]


def test_the_command_builds_what_its_sources_give(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixture, "PAPER_MIXTURE", MIXTURE)
    build, good = mixture.build_mixture, local_sources(tmp_path, [])
    monkeypatch.setattr(mixture, "build_mixture", lambda out, tokenizer, tokens: build(
        out, tokenizer, tokens, good, MIXTURE))
    out = tmp_path / "corpus"
    manifest = mixture.main(mixture.Config(out=str(out), tokens=5e3, vocab="bytes"))
    said = capsys.readouterr().out
    assert f"wrote {out}; next: python train.py --data {out}" in said
    assert data.load_corpus(out, BYTES).n_docs == sum(
        part["documents"] for part in manifest["splits"].values())
