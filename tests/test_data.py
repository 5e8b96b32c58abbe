"""data.py: nothing of a text is lost on the way to windows, and every sample is a function of k."""
import json
import os
import pickle
import struct
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from common import UserError
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from text import ByteTokenizer, WordPiece

BYTES = ByteTokenizer()
DOCUMENTS = [f"document {i} says {'naïve ' * (i % 7)}things" for i in range(400)]


def write_text(path, documents=DOCUMENTS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


def packed(documents):
    """The stream, by its definition: bytes, 258, bytes, 258, ..."""
    ids = []
    for document in documents:
        ids += [*document.encode("utf-8"), 258]
    return ids


def wordpiece(path):
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "document", "says"]))
    return WordPiece(path)


@pytest.fixture
def corpus(tmp_path):
    return data.load_corpus(write_text(tmp_path / "a.txt"), BYTES)


@pytest.fixture
def shards(tmp_path):
    data.write_shards(DOCUMENTS, tmp_path / "shards", BYTES, shard_tokens=1000)
    return tmp_path / "shards"


# ------------------------------------------------------------------------------ corpora, splits

def test_a_corpus_is_every_document_followed_by_sep(corpus):
    assert corpus.ids.dtype == np.uint16 and corpus.ids.tolist() == packed(DOCUMENTS)
    assert corpus.n_docs == 400 and corpus.tokenizer == "bytes"
    assert corpus.n_bytes == sum(len(d.encode("utf-8")) for d in DOCUMENTS)


def test_bytes_are_those_of_the_text_whatever_the_tokenizer(tmp_path):
    corpus = data.load_corpus(write_text(tmp_path / "a.txt"), wordpiece(tmp_path / "v"))
    assert corpus.n_bytes == sum(len(d.encode("utf-8")) for d in DOCUMENTS)
    assert corpus.ids[:3].tolist() == [5, 1, 6] and (corpus.ids == 3).sum() == 400


def test_train_and_valid_part_the_documents_by_what_they_say(tmp_path):
    sets = {}
    for order in (1, -1):
        path = write_text(tmp_path / f"{order}.txt", DOCUMENTS[::order])
        for split in ("train", "valid"):
            ids = data.load_corpus(path, BYTES, split).ids
            sets[split, order] = Counter(BYTES.decode(ids).split("\n\n")[:-1])
    assert sets["train", 1] == sets["train", -1] and sets["valid", 1] == sets["valid", -1]
    assert sets["train", 1] + sets["valid", 1] == Counter(DOCUMENTS)
    shares = Counter(data.split_of(f"text {i}", {"a": 0.7, "b": 0.15, "c": 0.15})
                     for i in range(20_000))
    for name, share in (("a", 0.7), ("b", 0.15), ("c", 0.15)):  # 5 standard deviations
        assert abs(shares[name] / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_several_sources_are_one_stream(tmp_path, shards):
    first = write_text(tmp_path / "a.txt", ["first"])
    last = write_text(tmp_path / "b.txt", ["last"])
    ids = np.asarray(data.load_corpus([first, shards, str(last)], BYTES).ids).tolist()
    middle = np.asarray(data.load_corpus(shards, BYTES).ids).tolist()
    assert ids == packed(["first"]) + middle + packed(["last"])


def test_what_is_given_twice_counts_once_and_that_is_said(tmp_path, shards, capsys):
    path = write_text(tmp_path / "texts" / "a.txt", ["first"])
    (tmp_path / "link").symlink_to(shards)
    once = data.load_corpus([path, shards], BYTES)
    assert "left out" not in capsys.readouterr().out
    twice = data.load_corpus([path, shards, tmp_path / "texts", tmp_path / "link"], BYTES)
    assert np.array_equal(np.asarray(twice.ids), np.asarray(once.ids))
    assert (twice.n_docs, twice.n_bytes) == (401, once.n_bytes)
    assert twice.fingerprint == once.fingerprint
    said = [line for line in capsys.readouterr().out.splitlines() if "left out 1 files" in line]
    assert [line.split(":")[0] for line in said] == [f"{tmp_path}/texts", f"{tmp_path}/link"]


def test_a_text_without_the_wanted_documents_is_named(tmp_path):
    with pytest.raises(UserError, match="no valid document in .*a.txt"):
        data.load_corpus(write_text(tmp_path / "a.txt", ["alone"]), BYTES, "valid")
    with pytest.raises(UserError, match="no  ?document in .*b.txt"):
        data.load_corpus(write_text(tmp_path / "b.txt", [" \n"]), BYTES)


def test_invalid_utf8_is_counted_and_said(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    corpus = data.load_corpus(tmp_path / "a.txt", BYTES)
    assert "1 bytes that are not UTF-8" in capsys.readouterr().out
    assert corpus.n_bytes == len(corpus.ids) - 1 == len("caf\ufffd au lait".encode())


# -------------------------------------------------------------------------------- fingerprints

def test_the_fingerprint_of_text_is_of_its_ids_and_not_of_its_files(tmp_path):
    def fingerprint(*paths, tokenizer=BYTES, split=None):
        return data.load_corpus(paths, tokenizer, split).fingerprint

    whole = write_text(tmp_path / "a.txt")
    known = fingerprint(whole)
    assert len(known) == 64 and int(known, 16)
    parts = [write_text(tmp_path / "parts" / name, documents) for name, documents in (
        ("1.txt", DOCUMENTS[:150]), ("2.txt", DOCUMENTS[150:]))]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"text": d}) for d in DOCUMENTS), encoding="utf-8")
    (tmp_path / "link.txt").symlink_to(whole)
    moved = write_text(tmp_path / "elsewhere" / "b.txt")
    for same in ([moved], [tmp_path / "link.txt"], [lines], parts, [tmp_path / "parts"]):
        assert fingerprint(*same) == known
    changed = [known, fingerprint(*parts[::-1]), fingerprint(parts[0]),
               fingerprint(whole, tokenizer=wordpiece(tmp_path / "v")),
               fingerprint(whole, split="train"), fingerprint(whole, split="valid")]
    with open(whole, "a", encoding="utf-8") as file:
        file.write("\n\nappended")
    changed.append(fingerprint(whole))
    assert len(set(changed)) == len(changed)


def test_the_fingerprint_of_shards_is_of_their_manifest(tmp_path, shards):
    def fingerprint(*paths, split=None):
        return data.load_corpus(paths, BYTES, split).fingerprint

    data.write_shards(DOCUMENTS, tmp_path / "again", BYTES, shard_tokens=1000)
    data.write_shards(DOCUMENTS, tmp_path / "cut", BYTES, shard_tokens=1001)
    data.write_shards([*DOCUMENTS, "appended"], tmp_path / "more", BYTES, shard_tokens=1000)
    text = write_text(tmp_path / "a.txt")
    assert fingerprint(shards) == fingerprint(tmp_path / "again")
    different = [fingerprint(shards), fingerprint(tmp_path / "cut"), fingerprint(tmp_path / "more"),
                 fingerprint(shards, split="train"), fingerprint(shards, split="valid"),
                 fingerprint(shards, text), fingerprint(text, shards), fingerprint(text)]
    assert len(set(different)) == len(different)


def test_a_corpus_made_in_memory_has_no_fingerprint():
    assert data.Corpus(np.zeros(3, np.uint16), 3, 0, "bytes").fingerprint == ""


# -------------------------------------------------------------------------------------- shards

def test_shards_on_disk_are_little_endian_and_one_stream(shards):
    manifest = json.loads((shards / "manifest.json").read_text())
    stream = {}
    for split, part in manifest["splits"].items():
        raw = b"".join((shards / s["file"]).read_bytes() for s in part["shards"])
        stream[split] = list(struct.unpack(f"<{len(raw) // 2}H", raw))
        texts = BYTES.decode(stream[split]).split("\n\n")[:-1]
        assert stream[split] == packed([d for d in DOCUMENTS if d in set(texts)])  # in order
        assert part["tokens"] == len(stream[split]) == sum(s["tokens"] for s in part["shards"])
        assert part["documents"] == len(texts)
        assert part["bytes"] == sum(len(t.encode()) for t in texts)
        sizes = [s["tokens"] for s in part["shards"]]
        assert all(n == 1000 for n in sizes[:-1]) and 0 < sizes[-1] <= 1000
    assert len(manifest["splits"]["train"]["shards"]) > 2
    assert sum(p["documents"] for p in manifest["splits"].values()) == 400
    assert (manifest["tokenizer"], manifest["fingerprint"]) == ("bytes", BYTES.fingerprint)
    assert sorted(p.name for p in shards.iterdir()) == sorted(
        ["manifest.json"] + [s["file"] for p in manifest["splits"].values() for s in p["shards"]])


@pytest.mark.parametrize("split", ["train", "valid"])
def test_shards_and_text_give_the_same_corpus(tmp_path, shards, split):
    text = data.load_corpus(write_text(tmp_path / "a.txt"), BYTES, split)
    stream = data.load_corpus(shards, BYTES, split)
    assert (stream.n_bytes, stream.n_docs) == (text.n_bytes, text.n_docs)
    ours, theirs = (data.Windows(c, 37, 256) for c in (stream, text))
    assert len(ours) == len(theirs)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(-5, 50),
       st.integers(-5, 50))
def test_a_stream_is_sliced_like_one_array(lengths, start, stop):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    stream = data.Stream(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(stream) == len(whole) and np.array_equal(np.asarray(stream), whole)
    assert np.array_equal(stream[start:stop], whole[start:stop])


def test_a_worker_gets_paths_and_not_the_shards(shards):
    corpus = data.load_corpus(shards, BYTES)
    sent = pickle.dumps(corpus)
    assert len(sent) < 10_000 < 2 * len(corpus.ids)
    assert np.array_equal(pickle.loads(sent).ids[500:2500], corpus.ids[500:2500])


def first_shard_says(folder, tokens):
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    manifest["splits"]["train"]["shards"][0]["tokens"] = tokens
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "shard_00000.bin").write_bytes(b"")


@pytest.mark.parametrize("fault, said", [
    (lambda f: (f / "shard_00001.bin").unlink(), r"shard_00001.bin has no bytes.*2000"),
    (lambda f: os.truncate(f / "shard_00001.bin", 1998), r"shard_00001.bin has 1998 bytes.*2000"),
    (lambda f: (f / "shard_00001.bin").write_bytes(b"\x04\x01" * 1000), "ids up to 260.*most 259"),
    (lambda f: (f / "shard_00001.bin").write_bytes(b"a\0" * 1000), r"shard_00001.bin has CRC-32"),
    (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged"),
    (lambda f: (f / "manifest.json").write_text(""), "manifest.json is damaged"),
    (lambda f: (f / "manifest.json").write_bytes(b"\xff{}"), "manifest.json is damaged"),
    (lambda f: first_shard_says(f, 0), "manifest.json is damaged.*shard_00000.bin of 0 tokens"),
    (lambda f: first_shard_says(f, "many"), "manifest.json is damaged"),
    (lambda f: (f / "manifest.json").write_text('{"splits": {}}'), "manifest.json is damaged"),
    (lambda f: (f / "manifest.json").unlink(), "shards holds no text")])
def test_shards_that_are_not_whole_are_refused(shards, fault, said):
    fault(shards)
    with pytest.raises(UserError, match=said) as error:
        data.load_corpus(shards, BYTES)
    assert "\n" not in str(error.value)


def test_shards_of_another_vocabulary_are_refused(tmp_path, shards):
    with pytest.raises(UserError, match="made with the vocabulary of bytes"):
        data.load_corpus(shards, wordpiece(tmp_path / "vocab.txt"))


def test_an_interrupted_build_leaves_nothing(tmp_path):
    def interrupted():
        yield from DOCUMENTS * 10  # over a batch, so files have been written
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        data.write_shards(interrupted(), tmp_path / "out", BYTES, shard_tokens=1000)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_does_not_load_and_can_be_done_again(tmp_path):
    killed = ("import os, sys, data, text\n"
              "def documents():\n"
              "    for i in range(100_000): yield f'document {i} ' * 9\n"
              "    os.kill(os.getpid(), 9)\n"
              "data.write_shards(documents(), sys.argv[1], text.ByteTokenizer())")
    out = tmp_path / "out"
    process = subprocess.run([sys.executable, "-c", killed, out], cwd=ROOT)
    assert process.returncode == -9 and not out.exists() and any(tmp_path.iterdir())
    with pytest.raises(UserError, match="does not exist"):
        data.load_corpus(out, BYTES)
    data.write_shards(DOCUMENTS, out, BYTES)
    assert data.load_corpus(out, BYTES).n_docs == 400


def test_an_existing_folder_is_replaced_only_if_asked_and_only_if_shards(tmp_path, shards):
    with pytest.raises(UserError, match="is a shard folder.*--overwrite"):
        data.write_shards(["new"], shards, BYTES)
    data.write_shards(["new words", "and more"], shards, BYTES, overwrite=True)
    assert np.asarray(data.load_corpus(shards, BYTES).ids).tolist() == packed(
        ["new words", "and more"])
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(UserError, match="is not empty"):
            data.write_shards(["new"], tmp_path / "home", BYTES, overwrite=overwrite)
    assert (tmp_path / "home" / "thesis.tex").exists()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "of a web page"}')
    (shards / "notes.txt").write_text("which text this was")
    for folder in (tmp_path / "app", shards):
        before = sorted(folder.iterdir())
        with pytest.raises(UserError, match="not empty.*shards and nothing else"):
            data.write_shards(["new"], folder, BYTES, overwrite=True)
        assert sorted(folder.iterdir()) == before
    (tmp_path / "empty").mkdir()
    data.write_shards(["new"], tmp_path / "empty", BYTES)
    with pytest.raises(UserError, match="nothing to train on"):
        data.write_shards([], tmp_path / "none", BYTES)
    assert not (tmp_path / "none").exists()


def test_shards_go_where_a_link_leads(tmp_path):
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "large_disk")
    for text in ("some words", "other words"):
        data.write_shards([text], tmp_path / "out", BYTES, overwrite=True)
        assert data.load_corpus(tmp_path / "large_disk", BYTES).n_bytes == len(text)
    assert (tmp_path / "out").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large_disk", "out"]


# ------------------------------------------------------------------------------------- windows

@pytest.mark.parametrize("seqlen", [1, 7, 128, 100_000])
def test_windows_keep_every_token_and_pad_only_the_last(corpus, seqlen):
    windows = list(data.Windows(corpus, seqlen, 256))
    ids = np.concatenate(windows)
    n = len(corpus.ids)
    assert all(w.shape == (seqlen,) and w.dtype == np.int64 for w in windows)
    assert ids[:n].tolist() == packed(DOCUMENTS)
    assert (ids[n:] == 256).all() and len(ids) - n < seqlen


def test_only_content_is_maskable():
    ids = torch.tensor([[257, 65, 0, 255, 258, 256, 259]])
    assert data.maskable_tokens(ids, BYTES).tolist() == [[False, True, True, True, False, False,
                                                          True]]


# --------------------------------------------------------------------------------------- noise

def dataset(corpus, seqlen=64, **changes):
    settings = dict(global_batch=6, steps=50, seed=42) | changes
    return data.DiffusionDataset(data.Windows(corpus, seqlen, 256), BYTES, **settings)


def same(a, b):
    return all(torch.equal(a[key], b[key]) for key in ("x0", "x_t", "masked", "t"))


def test_noise_depends_on_its_counters_and_on_nothing_else():
    def draw(*counters):
        return tuple(torch.rand(4, generator=data.noise_generator(*counters)).tolist())
    first = draw(42, 3, 5)
    torch.manual_seed(1), torch.rand(9), draw(1, 2)
    assert draw(42, 3, 5) == first == draw(np.int64(42), torch.tensor(3), 5)
    counters = [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (1, 0, 0), (12, 3), (1, 23), (2**32,),
                (0, 0, 1), (2**32 + 1,), (-1,), (42, 3, 6), (42, 4, 5), (142, 3, 5)]
    assert len({draw(*c) for c in counters}) == len(counters)


def test_items_have_the_stated_types_and_a_consistent_mask(corpus):
    for k, item in enumerate(dataset(corpus, steps=20)):
        assert [(v.dtype, tuple(v.shape)) for v in item.values()] == [
            (torch.int64, (64,)), (torch.int64, (64,)), (torch.bool, (64,)), (torch.float32, ())]
        for clean, noisy, masked in zip(*(item[n].tolist() for n in ("x0", "x_t", "masked"))):
            assert noisy == (259 if masked else clean)
            assert not (masked and clean in (256, 257, 258))
        assert 1e-3 <= item["t"] <= 1
    assert k == 20 * 6 - 1


def test_an_item_is_a_function_of_its_place_alone(corpus):
    for stratified in (False, True):
        reference = list(dataset(corpus, stratified=stratified))
        other = dataset(corpus, stratified=stratified)
        torch.manual_seed(7)
        for k in torch.randperm(300).tolist():  # also across epochs, back and forth
            assert same(other[k], reference[k])
        longer = dataset(corpus, stratified=stratified, steps=90)
        assert all(same(longer[k], reference[k]) for k in (0, 17, 299))


@pytest.mark.parametrize("workers, batch", [(0, 4), (1, 6), (2, 2)])
def test_workers_and_batch_splits_change_nothing(shards, workers, batch):
    items = dataset(data.load_corpus(shards, BYTES), steps=4)
    sent = pickle.loads(pickle.dumps(items))  # what a spawned worker gets
    loader = torch.utils.data.DataLoader(sent, batch_size=batch, num_workers=workers)
    got = [dict(zip(b, values)) for b in loader for values in zip(*b.values())]
    assert len(got) == 24 and all(same(a, b) for a, b in zip(got, items))


def test_each_epoch_visits_each_window_once_in_its_own_order(corpus):
    items = dataset(corpus, seqlen=256, steps=60)
    n = len(items.windows)
    place = {w.tobytes(): i for i, w in enumerate(items.windows)}
    assert n > 40 and len(place) == n  # no two windows alike
    order = [place[items[k]["x0"].numpy().tobytes()] for k in range(3 * n)]
    epochs = [order[i * n:(i + 1) * n] for i in range(3)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(n))}) == 4
    masks = [items[k]["masked"] for k in range(3 * n) if order[k] == order[0]]
    assert not torch.equal(masks[0], masks[1])  # the same window, other noise


def test_t_is_uniform_and_its_mask_has_that_share(corpus):
    items = list(dataset(corpus, steps=250))
    t = torch.stack([i["t"] for i in items]).double().sort().values
    steps = torch.arange(1, len(t) + 1) / len(t)
    assert (t - steps).abs().max() < 1.95 / len(t) ** 0.5  # Kolmogorov-Smirnov, 0.1 %
    maskable = torch.stack([data.maskable_tokens(i["x0"], BYTES).sum() for i in items])
    masked, t = (torch.stack([f(i) for i in items]) for f in (lambda i: i["masked"].sum(),
                                                              lambda i: i["t"]))
    z = (masked - t * maskable).sum() / (maskable * t * (1 - t)).sum().sqrt()
    assert abs(z) < 4  # of a sum of independent Bernoulli draws


def test_no_t_falls_into_the_hole_and_the_rest_is_even(corpus):
    def times(**how):
        items = dataset(corpus, global_batch=16, steps=60, t_min=0.0, **how)
        return torch.stack([item["t"] for item in items])

    whole, holed = times(), times(t_hole=(0.4, 0.6))
    assert ((holed < 0.4) | (holed >= 0.6)).all()
    expected = torch.where(0.8 * whole < 0.4, 0.8 * whole, 0.8 * whole + 0.2)
    torch.testing.assert_close(holed, expected, rtol=1e-6, atol=0)
    assert torch.equal(whole, times(t_hole=(0.0, 0.0)))


def test_stratified_t_falls_once_into_each_interval_of_the_global_batch(corpus):
    items = dataset(corpus, global_batch=16, steps=30, stratified=True, t_min=0.0)
    t = torch.stack([i["t"] for i in items]).reshape(30, 16)
    strata = (t * 16).floor().long()
    assert torch.equal(strata.sort(-1).values, torch.arange(16).expand(30, 16))
    assert len({tuple(row) for row in strata.tolist()}) == 30  # in another order each step
    within = t * 16 - strata
    assert within.std() > 0.2 and abs(within.mean() - 0.5) < 0.06


def test_one_t_and_one_jittered_masking_rate_for_each_batch(corpus):
    """Three sequences, one t, and one rate that has noise of 0.05 beside it."""
    items = dataset(corpus, seqlen=400, global_batch=3, steps=400, t_per_batch=True, t_jitter=0.05)
    t = torch.stack([i["t"] for i in items]).reshape(400, 3)
    assert (t == t[:, :1]).all() and len(t.unique()) > 300
    assert abs(t[:, 0].mean() - 0.5) < 0.05 and 0 < t.min() < 0.05 and t.max() <= 1
    maskable = torch.stack([data.maskable_tokens(i["x0"], BYTES).sum() for i in items])
    masked = torch.stack([i["masked"].sum() for i in items])
    rate = (masked / maskable).reshape(400, 3)
    middle = (t[:, 0] > 0.2) & (t[:, 0] < 0.8)
    noise = (rate.mean(-1) - t[:, 0])[middle]  # the binomial part of it is below 0.015
    assert 0.044 < noise.std() < 0.06 and abs(noise.mean()) < 0.01
    assert (rate[middle].std(-1) < 0.07).all(), "the three of a batch have one rate"


def test_the_published_t_is_one_less_a_step_of_10_to_999():
    """current = 0, hence t = 1, has probability sum of 1/n over n = 10..999, by 990: 0.0047."""
    noise = torch.Generator().manual_seed(0)
    t = torch.stack([data.published_time(noise) for _ in range(20_000)])
    assert t.dtype == torch.float32 and t.min() >= 1 / 999 - 1e-7 and t.max() == 1
    share = sum(1 / n for n in range(10, 1000)) / 990
    assert abs((t == 1).float().mean() - share) < 5 * (share / 20_000) ** 0.5
    halves = (t == 0.5).float().mean()  # of every even total
    share = sum(1 / n for n in range(10, 1000, 2)) / 990
    assert abs(halves - share) < 5 * (share / 20_000) ** 0.5


def test_jitter_alone_leaves_t_as_it_was_and_plain_noise_as_it_was(corpus):
    plain, jittered = dataset(corpus, steps=20), dataset(corpus, steps=20, t_jitter=0.05)
    assert all(a["t"] == b["t"] for a, b in zip(plain, jittered))
    assert any(not torch.equal(a["masked"], b["masked"]) for a, b in zip(plain, jittered))


def test_t_is_clipped_and_seeds_differ(corpus):
    assert all(i["t"] >= 0.4 for i in dataset(corpus, t_min=0.4, steps=9))
    fixed = dataset(corpus, t_min=0.3, t_max=0.3, steps=9)
    assert {i["t"].item() for i in fixed} == {np.float32(0.3)}
    one, two = dataset(corpus), dataset(corpus, seed=142)
    assert not torch.equal(one[0]["x0"], two[0]["x0"]) and one[0]["t"] != two[0]["t"]
    assert not torch.equal(one[0]["masked"], one[1]["masked"])
    with pytest.raises(IndexError):
        one[300]


# -------------------------------------------------------------------------------- command line

def run(*arguments, **environment):
    return subprocess.run([sys.executable, ROOT / "data.py", *map(str, arguments)], text=True,
                          capture_output=True, env=os.environ | environment)


def test_the_command_packs_a_directory_and_says_what_it_did(tmp_path):
    write_text(tmp_path / "in" / "a.txt", DOCUMENTS[:200])
    write_text(tmp_path / "in" / "b.txt", [*DOCUMENTS[200:]])
    with open(tmp_path / "in" / "b.txt", "ab") as file:
        file.write(b" \xff")
    done = run("--data", tmp_path / "in" / "a.txt", tmp_path / "in" / "b.txt", "--out",
               tmp_path / "out")
    assert done.returncode == 0 and "train: " in done.stdout and "valid: " in done.stdout
    assert "1 bytes that are not UTF-8" in done.stdout
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["invalid_utf8"] == 1
    assert data.load_corpus(tmp_path / "out", BYTES).n_docs == 400
    with pytest.raises(UserError, match="--overwrite"):
        data.main(data.Config(data=(str(tmp_path / "in"),), out=str(tmp_path / "out")))


def test_no_network_is_one_line_and_status_2_without_a_retry(tmp_path):
    done = run("--vocab", "bert-base-uncased", HF_ENDPOINT="http://127.0.0.1:9", NO_PROXY="*",
               HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "HF_ENDPOINT" in done.stderr and "path of a vocab.txt" in done.stderr


def test_a_rank_left_in_the_environment_silences_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    data.main(data.Config(data=(str(write_text(tmp_path / "a.txt")),)))
    assert "pack your own" in capsys.readouterr().out


def test_names_that_are_not_utf8_are_read_packed_and_printed(tmp_path, capsys):
    latin = os.fsdecode(b"caf\xe9.txt")
    try:
        write_text(tmp_path / latin, ["some words"])
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    out = tmp_path / os.fsdecode(b"\xe9")
    data.main(data.Config(data=(str(tmp_path / latin),)))
    data.main(data.Config(data=(str(tmp_path / latin),), out=str(out)))
    said = capsys.readouterr().out
    assert f"{tmp_path}/caf\ufffd.txt: 1 documents" in said and f"wrote {tmp_path}/\ufffd;" in said
    assert data.load_corpus(out, BYTES).n_bytes == len("some words")
    assert data.named_sources((str(tmp_path / latin),)) == {"caf\ufffd": [str(tmp_path / latin)]}


def test_the_bare_command_shows_a_window_and_its_corruption(capsys):
    counts = data.main(data.Config())
    said = capsys.readouterr().out
    assert f"{counts['documents']:,} documents" in said and "_" in said.split("x_t at t = 0.5")[1]


def test_named_sources_are_named_by_the_user_or_by_their_stem():
    named = data.named_sources(("books=a.txt,b.txt", "corpora/wiki.txt", "embedded"))
    assert named == {"books": ["a.txt", "b.txt"], "wiki": ["corpora/wiki.txt"],
                     "embedded": ["embedded"]}
    with pytest.raises(UserError, match="wiki"):
        data.named_sources(("x/wiki.txt", "y/wiki.txt"))


def test_what_was_trained_on_is_scored_on_its_held_out_part_only(tmp_path):
    trained, other = write_text(tmp_path / "a.txt"), tmp_path / "b.txt"
    assert data.held_out_split([trained], [str(trained)]) == "valid"
    assert data.held_out_split([other], [str(trained)]) is None
    assert data.held_out_split(["embedded"], []) == "valid"
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "manifest.json").write_text("{}")
    assert data.held_out_split([tmp_path / "shards"], []) == "valid"


def test_what_was_trained_on_is_known_by_any_name(tmp_path, monkeypatch):
    abc = write_text(tmp_path / "books" / "abc.txt")
    write_text(tmp_path / "books" / "sub" / "deep.txt")
    write_text(tmp_path / "books" / "other.txt")
    (tmp_path / "link.txt").symlink_to(abc)
    os.link(abc, tmp_path / "hard.txt")
    (tmp_path / "shelf").symlink_to(tmp_path / "books")
    write_text(tmp_path / "apart.txt")  # a copy is another file
    monkeypatch.chdir(tmp_path / "books")
    for source in ("abc.txt", "./abc.txt", "../books/abc.txt", abc, tmp_path / "link.txt",
                   tmp_path / "hard.txt", tmp_path / "shelf" / "abc.txt", ".", tmp_path):
        assert data.held_out_split([source], ["abc.txt"]) == "valid", source
        assert data.held_out_split(["other.txt", source], [str(abc), "gone.txt"]) == "valid", source
    assert data.held_out_split(["sub/deep.txt"], [tmp_path / "shelf"]) == "valid"
    assert data.held_out_split("abc.txt", str(abc)) == "valid"
    for source in ("other.txt", "sub", "../apart.txt", "gone.txt"):
        assert data.held_out_split([source], ["abc.txt", "gone.txt"]) is None, source
    assert data.held_out_split(["abc.txt"], ["embedded"]) is None


def test_windows_at_even_distances_reach_both_ends_and_repeat_none():
    corpus = data.Corpus(np.arange(95, dtype=np.uint16), 95, 0, "bytes")
    windows = data.Windows(corpus, 10, 256)
    assert windows.evenly(5)[:, 0].tolist() == [10, 30, 50, 70, 90]
    assert windows.evenly(5, 0)[:, 0].tolist() == [0, 20, 40, 60, 80]
    assert windows.evenly(4, 0.9)[:, 0].tolist() == [20, 40, 70, 90]
    assert windows.evenly(99)[:, 0].tolist() == list(range(0, 100, 10))
    assert windows.evenly(1).shape == (1, 10)
