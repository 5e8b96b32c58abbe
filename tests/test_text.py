"""text.py: every byte of every file format arrives, and the tokenizers do what their tables say."""
import gzip
import hashlib
import json
import os
import sys
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from common import UserError
from hypothesis import given
from hypothesis import strategies as st

import text

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("a", "b", "ab", "abc", "c", "##a", "##b", "##bc", "##ca", ",", ".", "[", "]", "mask")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A vocabulary with the special tokens in an unusual place."""
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(WORDS[:3] + SPECIALS + WORDS[3:]) + "\n")
    return text.WordPiece(path)


def pieces_by_longest_match(word):
    """WordPiece for one lower-case word, as its definition reads."""
    found, at = [], 0
    while at < len(word):
        prefix = "##" if at else ""
        ends = [e for e in range(len(word), at, -1) if prefix + word[at:e] in WORDS]
        if not ends:
            return ["[UNK]"]
        found.append(prefix + word[at:ends[0]])
        at = ends[0]
    return found


# ---------------------------------------------------------------------------------- tokenizers

@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_ids_are_the_bytes_and_decode_to_the_text(string):
    ids = text.ByteTokenizer().encode(string)
    assert ids.dtype == np.uint16 and ids.tolist() == list(string.encode("utf-8"))
    assert text.ByteTokenizer().decode(ids) == string


def test_special_bytes_are_the_four_after_the_bytes_and_decode_visibly():
    tokenizer = text.make_tokenizer("bytes")
    assert (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == \
        (256, 257, 258, 259) == tokenizer.special_ids
    assert tokenizer.vocab_size == 260
    assert tokenizer.decode([257, 65, 259, 66, 258, 67, 256]) == "A_B\n\nC"
    assert tokenizer.decode([0xC3, 259, 0xA9]) == "\ufffd_\ufffd"  # a masked half of a letter


@given(st.lists(st.text("abcx", min_size=1, max_size=6), max_size=8))
def test_wordpiece_takes_the_longest_match_first(tiny, words):
    expected = [piece for word in words for piece in pieces_by_longest_match(word)]
    vocabulary = WORDS[:3] + SPECIALS + WORDS[3:]
    assert tiny.encode(" ".join(words)).tolist() == [vocabulary.index(p) for p in expected]


def test_wordpiece_lowers_case_strips_accents_and_splits_punctuation(tiny):
    assert tiny.encode("ÁB,Abc.").tolist() == tiny.encode("ab , abc .").tolist()
    assert tiny.encode("").tolist() == [] and tiny.encode("").dtype == np.uint16


def test_a_text_that_spells_a_special_token_does_not_become_one(tiny):
    ids = tiny.encode("a [MASK] b [SEP] [PAD]").tolist()
    assert not set(ids) & set(tiny.special_ids)


def test_a_long_text_is_encoded_as_word_by_word(tiny):
    words = ["abcca"] * 30_000 + ["ab", "b,", "xyz", "Ábc."] * 9_000  # a cut word reads otherwise
    whole = tiny.encode_batch(["".join(w + " \n\t"[i % 3] for i, w in enumerate(words)), "", "ab"])
    by_word = {w: tiny.encode(w).tolist() for w in set(words)}
    assert whole[0].tolist() == [i for w in words for i in by_word[w]]
    assert whole[1].tolist() == [] and whole[2].tolist() == tiny.encode("ab").tolist()


def test_wordpiece_decodes_to_text_with_visible_masks(tiny):
    ids = [tiny.cls_id, *tiny.encode("abca, b"), tiny.mask_id, tiny.sep_id, *tiny.encode("a"),
           tiny.pad_id]
    assert tiny.decode(np.array(ids, np.int64)) == "abca, b _\n\na"


def test_the_fingerprint_is_of_the_vocabulary_and_not_of_its_path(tiny, tmp_path):
    content = "\n".join(SPECIALS)
    (tmp_path / "one.txt").write_text(content)
    (tmp_path / "two.txt").write_text(content)
    one, two = (text.WordPiece(tmp_path / f"{n}.txt") for n in ("one", "two"))
    assert one.fingerprint == two.fingerprint
    assert len({one.fingerprint, tiny.fingerprint, text.ByteTokenizer.fingerprint}) == 3


@pytest.mark.parametrize("content, said", [
    (b"the\nof\nand\n", "lacks [CLS] [MASK] [PAD] [SEP] [UNK]"),
    ("\n".join(SPECIALS[:4]).encode(), "lacks [MASK]"),
    ("\n".join(SPECIALS + ("a", "a")).encode(), "7 tokens, 6 of them distinct"),
    ("\n".join(SPECIALS + tuple(map(str, range(65532)))).encode(), "65537 tokens"),
    (b"\xff\xfe\x00\x01", "decode"), (b"", "lacks"), (None, "No such file")])
def test_a_file_that_is_no_vocabulary_is_refused_in_one_line(tmp_path, content, said):
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        text.make_tokenizer(str(path))
    assert said in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_byte_that_is_not_utf8_is_the_replacement_character_in_either_tokenizer(tiny):
    argument = os.fsdecode(b"It was \xff")  # as in --prompt
    for tokenizer in (text.ByteTokenizer(), tiny):
        for odd in (argument, "It was \ud83d"):
            ids = tokenizer.encode(odd).tolist()
            assert ids == tokenizer.encode("It was \ufffd").tolist()
    assert text.ByteTokenizer().decode(text.ByteTokenizer().encode(argument)) == "It was \ufffd"


# ----------------------------------------------------------------------------------------- hub

@pytest.fixture
def hub(monkeypatch):
    """huggingface_hub, in which each use is noted, nothing is cached and no network is there."""
    import huggingface_hub
    used = []

    def answer(name, result=None):
        def used_now(*args, **settings):
            used.append(name)
            if isinstance(result, Exception):
                raise result
            return result
        monkeypatch.setattr(huggingface_hub, name, used_now)

    answer("try_to_load_from_cache")
    answer("get_hf_file_metadata", ConnectionError("the cable"))
    answer("hf_hub_download", AssertionError("this would try for half a minute"))
    return SimpleNamespace(answer=answer, used=used)


def test_the_hubs_vocabulary_must_have_its_hash_and_a_path_need_not(tiny, hub):
    hub.answer("try_to_load_from_cache", tiny.name)
    said = f"{tiny.name}: .*{tiny.fingerprint}.*{text.BERT_SHA256}.*delete the file"
    with pytest.raises(UserError, match=said):
        text.make_tokenizer("bert-base-uncased")
    assert text.make_tokenizer(tiny.name).vocab_size == len(WORDS) + len(SPECIALS)


def test_a_file_of_the_hub_is_taken_from_the_cache_or_asked_for_once(tiny, hub):
    size = os.path.getsize(tiny.name)

    def fetch():
        return str(text.fetch("a/b", "vocab.txt", size, tiny.fingerprint, "its path"))

    said = r"vocab.txt of a/b \(ConnectionError\).*give its path$"
    with pytest.raises(UserError, match=said) as error:
        fetch()
    assert "\n" not in str(error.value)
    assert hub.used == ["try_to_load_from_cache", "get_hf_file_metadata"]
    hub.answer("get_hf_file_metadata")
    hub.answer("hf_hub_download", tiny.name)
    assert fetch() == tiny.name and hub.used[2:] == [
        "try_to_load_from_cache", "get_hf_file_metadata", "hf_hub_download"]
    hub.answer("try_to_load_from_cache", tiny.name)
    assert fetch() == tiny.name and hub.used[5:] == ["try_to_load_from_cache"]


# --------------------------------------------------------------------------------------- files

def write_files(folder, *names):
    """Files that hold their own names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_files_are_in_the_order_of_sorted_paths(tmp_path):
    write_files(tmp_path, "b.txt", "sub/z.txt", "sub.txt", "sub/a/x.txt", "sub-2/y.txt", "Z/q.txt",
                ".hidden/h.txt", "sub/a.txt")
    assert text.find_files(tmp_path) == sorted(p for p in tmp_path.rglob("*") if p.is_file())


def test_a_file_counts_once_however_many_links_lead_to_it(tmp_path):
    write_files(tmp_path, "in/b.txt", "in/c.txt", "elsewhere/d.txt")
    (tmp_path / "in/d.txt").symlink_to("b.txt")
    (tmp_path / "in/a.txt").symlink_to("c.txt")
    os.link(tmp_path / "in/b.txt", tmp_path / "in/e.txt")
    (tmp_path / "in/gone.txt").symlink_to("nowhere.txt")
    counts = Counter()
    assert list(text.read_documents(tmp_path / "in", counts)) == ["in/c.txt", "in/b.txt"]
    assert counts["repeats"] == 3  # of a, b, c, d, e two are left
    both = [tmp_path / "in/b.txt", str(tmp_path / "in/../in/b.txt"), tmp_path / "in"]
    counts = Counter()
    assert list(text.read_documents(both, counts)) == ["in/b.txt", "in/c.txt"]
    assert counts["repeats"] == 5
    counts, seen = Counter(), set()
    assert len(text.find_files(tmp_path / "in", counts, seen)) == 2
    assert text.find_files([tmp_path / "in/d.txt", "embedded"], counts, seen) == [text.EMBEDDED]
    assert text.find_files(["embedded", tmp_path / "elsewhere"], counts, seen) == [
        tmp_path / "elsewhere/d.txt"]


def test_linked_folders_are_followed_without_circles(tmp_path):
    write_files(tmp_path, "in/b.txt", "in/sub/c.txt", "elsewhere/d.txt", "elsewhere/deep/e.txt")
    (tmp_path / "in/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/again").symlink_to(tmp_path / "elsewhere/deep")
    (tmp_path / "in/sub/up").symlink_to("..")
    (tmp_path / "in/self").symlink_to("self")
    (tmp_path / "elsewhere/deep/back").symlink_to(tmp_path / "in")
    counts = Counter()
    assert text.find_files(tmp_path / "in", counts) == [
        tmp_path / "in" / name for name in ("again/e.txt", "b.txt", "link/d.txt", "sub/c.txt")]
    assert counts["repeats"] == 3  # in/again/back, in/link/deep and in/sub/up
    assert text.find_files(tmp_path / "in/link") == [
        tmp_path / "in/link" / name for name in (
            "d.txt", "deep/back/b.txt", "deep/back/sub/c.txt", "deep/e.txt")]


# ----------------------------------------------------------------------------------- documents

DOCUMENTS = ["one line", "two\nlines: naïve 中文 🙂", "  ".join("abc")]


def test_a_blank_line_ends_a_document_and_a_newline_does_not(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeff\n\n one line\r\n \t\r\ntwo\nlines: naïve 中文 🙂\n\n\n\r\n"
                     "a  b  c\n".encode())
    assert list(text.read_documents(path)) == DOCUMENTS
    path.write_text("no newline at the end")
    assert list(text.read_documents([str(path)])) == ["no newline at the end"]


def test_every_format_gives_the_same_documents(tmp_path):
    plain = "\n\n".join(DOCUMENTS).encode()
    lines = "\n".join(json.dumps({"id": 1, "text": d}) for d in DOCUMENTS).encode() + b"\n\n"
    half = len(plain) // 2
    zip_ = zstandard.ZstdCompressor().compress
    for name, content in {
            "a.txt": plain, "a.jsonl": lines, "a.txt.gz": gzip.compress(plain),
            "a.jsonl.gz": gzip.compress(lines[:9]) + gzip.compress(lines[9:]),  # two members
            "a.txt.zst": zip_(plain[:half]) + zip_(plain[half:]),               # two frames
            "a.jsonl.zst": zip_(lines)}.items():
        (tmp_path / name).write_bytes(content)
        assert list(text.read_documents(tmp_path / name)) == DOCUMENTS, name


def test_a_directory_is_walked_in_sorted_order_and_other_files_left_alone(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/c.jsonl", "a/notes.md", "c.txt.bak", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) if "jsonl" in name else name)
    assert list(text.read_documents(tmp_path)) == ["a/c.jsonl", "a/z.txt", "b.txt"]
    given_order = [tmp_path / "b.txt", tmp_path / "a"]
    assert list(text.read_documents(given_order)) == ["b.txt", "a/c.jsonl", "a/z.txt"]


def test_documents_and_letters_across_the_reading_blocks_are_whole(tmp_path):
    rng = np.random.default_rng(1)
    documents = [f"{i} " + "é中🙂\n"[i % 3] * int(n) + "." for i, n in
                 enumerate(rng.integers(1, 3000, 2500))]
    (tmp_path / "a.txt").write_text("\n\n".join(documents), encoding="utf-8")
    expected = [d for d in "\n\n".join(documents).split("\n\n") if d.strip()]
    assert (tmp_path / "a.txt").stat().st_size > 4 << 20
    assert list(text.read_documents(tmp_path / "a.txt")) == expected


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 \xff\xfe ok \xef\xbf\xbd")  # the last is a real one
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x\x80y"}\n{"text": "\\ud83d alone"}\n'
                                       b'{"text": "\\ud83d\\ude42"}\n')
    counts = Counter()
    assert list(text.read_documents(tmp_path, counts)) == [
        "caf\ufffd \ufffd\ufffd ok \ufffd", "x\ufffdy", "\ufffd alone", "🙂"]
    assert counts["invalid_utf8"] == 5


def test_an_endless_document_is_cut_between_words_and_counted(tmp_path):
    words = [f"word{i}" for i in range(600_000)]
    (tmp_path / "a.txt").write_text(" ".join(words))
    counts = Counter()
    documents = list(text.read_documents(tmp_path / "a.txt", counts))
    assert " ".join(documents).split() == words
    assert len(documents) == counts["cut_documents"] + 1 > 2
    assert max(map(len, documents)) <= 2 * text.LONGEST
    (tmp_path / "a.txt").write_text("x" * (3 << 20))  # no place to cut
    assert sum(map(len, text.read_documents(tmp_path / "a.txt"))) == 3 << 20


def test_reading_takes_no_more_memory_for_a_longer_file(tmp_path):
    (tmp_path / "a.txt").write_text(("x" * 9_998 + "\n\n") * 4_000)
    tracemalloc.start()
    try:
        assert sum(len(d) for d in text.read_documents(tmp_path / "a.txt")) == 4_000 * 9_998
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20  # of 40 MB; a block is 1 MB, held a few times over


@pytest.mark.parametrize("line", ['{"text": "cut', '{"body": "x"}', '{"text": 3}', '["text"]',
                                  '{"text": null}', "plain"])
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl:3 .*\"text\"") as error:
        list(text.read_documents(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, content, said", [
    ("a.txt", b"", "a.txt is empty"), ("a.pdf", b"%PDF", "holds no text"),
    ("folder/a.md", b"x", "holds no text"), (None, b"", "does not exist"),
    ("a.txt.gz", b"not gzip", "a.txt.gz"), ("a.txt.zst", b"not zstd", "a.txt.zst"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 999)[:40], "a.jsonl.gz")])
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, said):
    path = tmp_path / (name or "nothing.txt")
    if name:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        list(text.read_documents(path.parent if "/" in str(name) else path))
    assert "\n" not in str(error.value)


def test_zst_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match="pip install zstandard"):
        list(text.read_documents(tmp_path))


def test_the_embedded_text_is_the_file_in_assets_by_any_name():
    documents = list(text.read_documents("embedded"))
    assert len(documents) == 7222 and documents[0].startswith("First Citizen:\nBefore we proceed")
    seen = set()
    counts = Counter()
    assert text.find_files(["embedded", text.EMBEDDED], counts, seen) == [text.EMBEDDED]
    assert counts["repeats"] == 1
    raw = text.EMBEDDED.read_bytes()
    assert b"\r" not in raw and hashlib.sha256(raw).hexdigest().startswith("3cb64b82e7f3")
