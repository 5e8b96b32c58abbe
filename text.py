"""Text to documents and tokens: files, the embedded text, and the two tokenizers (section C.1).

Run:      not a script; data.py imports it, and `python data.py` shows what it reads.
Symbols:  ids   token ids, (n,) uint16; which of them are special, by tokenizer:
                            [PAD]  [CLS]  [SEP]  [MASK]   vocabulary
                bytes         256    257    258     259          260
                WordPiece       0    101    102     103       30,522   (bert-base-uncased)

A text is documents. In .txt a blank line ends one, and a single newline does not; in .jsonl each
line is one, in its field "text"; .gz and .zst are read through.

A file counts once, however many links and paths lead to it; what is left out is counted. Linked
folders are followed, without circles. Counted too: bytes that are not UTF-8, each becoming U+FFFD,
and cuts, at a space or line break, in .txt documents above 2^20 characters.

Refused: NUL in .txt, which binary files and UTF-16 have. Not noticed: copies; a .zst file cut
short, which reads as if it ended there; a folder in a folder that may not be read. Memory does not
grow with a .txt file; a line of .jsonl is held whole, in ten times its size.

Differs from the paper: it has no bytes; they are for the small backbone, which needs no vocabulary.
"""
import gzip
import hashlib
import io
import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np

from common import SOURCE, SURROGATE, UserError, log, progress

EMBEDDED = SOURCE / "assets" / "tinyshakespeare.txt"  # what "embedded" names
LONGEST = 1 << 20                                  # characters of a .txt document
TEXT = re.compile(r"\.(txt|jsonl)(\.gz|\.zst)?$")  # the files we read
HUB_SECONDS = 5                                    # to wait for the hub's first answer

BERT = "google-bert/bert-base-uncased"
BERT_SIZE = 231_508                                # bytes of its vocab.txt
BERT_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"


def clean(text, counts=None):
    """Lone surrogates become U+FFFD; counts, a Counter, receives their number."""
    if text.isascii():
        return text
    text, n = SURROGATE.subn("\ufffd", text)
    if counts is not None:
        counts["invalid_utf8"] += n
    return text


# ---------------------------------------------------------------------------------- tokenizers

class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 [PAD], 257 [CLS], 258 [SEP], 259 [MASK]."""
    name = "bytes"
    vocab_size = 260
    pad_id = 256
    cls_id = 257
    sep_id = 258
    mask_id = 259
    special_ids = (256, 257, 258, 259)
    fingerprint = hashlib.sha256(b"bytes [PAD] [CLS] [SEP] [MASK]").hexdigest()

    def encode(self, text):
        """str -> (n,) uint16, no special tokens."""
        raw = clean(text).encode("utf-8")
        return np.frombuffer(raw, np.uint8).astype(np.uint16)

    def encode_batch(self, texts):
        """[str] -> [(n,) uint16]."""
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        """Ids -> str; [MASK] reads "_", [SEP] a blank line, [CLS] and [PAD] nothing."""
        raw = bytearray()
        for i in map(int, ids):
            if i < 256:
                raw.append(i)
            elif i == self.mask_id:
                raw += b"_"
            elif i == self.sep_id:
                raw += b"\n\n"
        return raw.decode("utf-8", "replace")


class WordPiece:
    """bert-base-uncased's tokenizer over a vocab.txt: lower case, accents stripped.

    The model knows no special tokens, so a text that says "[MASK]" is never masked by it. A word
    of more than 100 characters is one [UNK], as in the original.
    """
    # A long text is encoded in pieces cut at white space, across which WordPiece never looks: that
    # takes far less memory.
    PIECE = re.compile(r".{1,65536}(?=\s|$)|.{1,65536}", re.DOTALL)

    def __init__(self, vocab_path, name=None):
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
        vocab, self.fingerprint = read_vocabulary(vocab_path)
        self.name = name or str(vocab_path)
        self.vocab_size = len(vocab)
        self.pad_id = vocab["[PAD]"]
        self.cls_id = vocab["[CLS]"]
        self.sep_id = vocab["[SEP]"]
        self.mask_id = vocab["[MASK]"]
        self.special_ids = (self.pad_id, self.cls_id, self.sep_id, self.mask_id)
        self.model = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        self.model.normalizer = normalizers.BertNormalizer(lowercase=True)
        self.model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self.model.decoder = decoders.WordPiece()

    def encode(self, text):
        """str -> (n,) uint16, no special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts):
        """[str] -> [(n,) uint16]."""
        pieces = []
        counts = []  # pieces of each text
        for text in texts:
            found = self.PIECE.findall(clean(text)) or [""]
            pieces += found
            counts.append(len(found))
        encoded = iter(self.model.encode_batch_fast(pieces))
        ids = []
        for count in counts:
            parts = [np.array(e.ids, np.uint16) for e in itertools.islice(encoded, count)]
            ids.append(np.concatenate(parts))
        return ids

    def decode(self, ids):
        """Ids -> str; [MASK] reads "_", [SEP] a blank line, [CLS] and [PAD] nothing."""
        shown = [i for i in map(int, ids) if i not in (self.pad_id, self.cls_id)]
        text = self.model.decode(shown).replace("[MASK]", "_")
        return re.sub(r" ?\[SEP\] ?", "\n\n", text)


def read_vocabulary(path):
    """The {token: id} and the sha256 of a vocab.txt. Raises UserError."""
    needed = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    try:
        raw = Path(path).read_bytes()
        words = raw.decode("utf-8").replace("\r", "").removesuffix("\n").split("\n")
        vocab = {word: i for i, word in enumerate(words)}
        missing = sorted(needed - vocab.keys())
        if len(words) > 1 << 16 or len(vocab) < len(words):
            raise ValueError(f"{len(words)} tokens, {len(vocab)} of them distinct")
        if missing:
            raise ValueError(f"lacks {' '.join(missing)}")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no WordPiece vocabulary ({error}): give the path of "
                        "bert-base-uncased's vocab.txt, or one like it of at most 65536 tokens"
                        ) from None
    return vocab, hashlib.sha256(raw).hexdigest()


def make_tokenizer(name):
    """"bytes", "bert-base-uncased" (the hub's cache, else the hub) or the path of a vocab.txt."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "bert-base-uncased":
        path = fetch(BERT, "vocab.txt", BERT_SIZE, BERT_SHA256, "the path of a vocab.txt")
        return WordPiece(path, name)
    return WordPiece(name)


def fetch(repo, filename, size, sha256, instead, revision=None):
    """The path of a hub's file in huggingface_hub's cache, fetched where it is not there yet.

    Its size and hash are checked; where they are not known (None), they are printed. Raises
    UserError, without a network within seconds; `instead` says in the message what the user can
    give in place of the file.
    """
    import huggingface_hub as hub
    try:
        path = hub.try_to_load_from_cache(repo, filename, revision=revision)
        if not isinstance(path, str):
            # The hub is asked once: hf_hub_download alone tries for half a minute.
            url = hub.hf_hub_url(repo, filename, revision=revision)
            hub.get_hf_file_metadata(url, timeout=HUB_SECONDS)
            path = hub.hf_hub_download(repo, filename, revision=revision)
    except Exception as error:  # connection, HTTP status, offline mode: classes of several packages
        raise UserError(f"could not fetch {filename} of {repo} ({type(error).__name__}), and it is "
                        "not cached: connect, set HF_ENDPOINT to a mirror, unset HF_HUB_OFFLINE, "
                        f"or give {instead}") from None
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    got = os.path.getsize(path)
    if sha256 is None:
        log(f"{filename} of {repo}@{revision}: {got:,} bytes, sha256 {digest.hexdigest()}; no hash "
            "of it is known here, so compare it with the one that the hub shows")
    elif (got, digest.hexdigest()) != (size, sha256):
        # The path in the cache is a link: deleting it alone would leave what it leads to.
        raise UserError(f"{os.path.realpath(path)}: {got} bytes with sha256 {digest.hexdigest()}, "
                        f"expected {size} and {sha256}; delete the file and try again")
    return Path(path)


# --------------------------------------------------------------------------------------- files

def resolve(path):
    """The Path that a source names: "embedded" is the text in this repository."""
    return EMBEDDED if str(path) == "embedded" else Path(path)


def identity(path):
    """What two names of one file share, and two files do not: its device and number."""
    status = os.stat(resolve(path))
    return status.st_dev, status.st_ino


def files_below(path, counts=None):
    """The text files that `path` is or holds, sorted; none where it does not exist.

    Linked folders are followed. A folder that was already walked is left out; counts, a Counter,
    receives their number as "repeats".
    """
    if not os.path.isdir(path):
        file = resolve(path)
        return [file] if file.is_file() and TEXT.search(file.name) else []
    counts = Counter() if counts is None else counts
    found = []
    walked = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        folders.sort()
        if identity(folder) in walked:
            counts["repeats"] += 1
            folders.clear()  # not entered again
            continue
        walked.add(identity(folder))
        for name in names:
            file = Path(folder, name)
            if TEXT.search(name) and file.is_file():
                found.append(file)
    return sorted(found)


def find_files(paths, counts=None, seen=None):
    """The files of `paths` in the given order, those of a folder sorted; each file once.

    A file is known by what it is and not by its name; of several paths and links the first counts.
    counts, a Counter, receives "repeats", the files and folders left out; seen, a set, takes what
    was found from one call to the next.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else paths
    counts = Counter() if counts is None else counts
    seen = set() if seen is None else seen
    files = []
    for path in paths:
        found = files_below(path, counts)
        if not found:
            what = "holds no text" if path and os.path.exists(path) else "does not exist"
            raise UserError(f"{path or 'an empty path'} {what}: give a .txt or .jsonl file (.gz, "
                            ".zst allowed), a directory of them, or a shard folder with its "
                            "manifest.json")
        for file in found:
            if identity(file) in seen:
                counts["repeats"] += 1
                continue
            seen.add(identity(file))
            files.append(file)
            if file.stat().st_size == 0:
                raise UserError(f"{file} is empty: remove it, or leave it out")
    return files


# ----------------------------------------------------------------------------------- documents

def read_documents(paths, counts=None, seen=None):
    """Yield the documents of `paths` as str, stripped and not empty, in bounded memory.

    counts, a Counter, receives "invalid_utf8" (bytes), "cut_documents" (cuts) and "repeats"
    (`find_files`, which also explains `seen`).
    """
    counts = Counter() if counts is None else counts
    files = find_files(paths, counts, seen)
    total = sum(file.stat().st_size for file in files)
    before = 0  # bytes of the files that are done
    with progress(total=total, desc="reading", unit="B", unit_scale=True) as bar:
        for file in files:
            for document, position in _read_file(file, counts):
                yield document
                bar.update(before + position - bar.n)
            before += file.stat().st_size


def _read_file(path, counts):
    """Yield (document, position in the file)."""
    is_jsonl = TEXT.search(path.name)[1] == "jsonl"
    split = _split_lines if is_jsonl else _split_blank
    try:
        with open(path, "rb") as raw, _open_text(path, raw) as file:
            for document in split(path, file, counts):
                yield document, raw.tell()
    except UserError:
        raise
    except Exception as error:  # gzip, zlib and zstandard have their own classes
        raise UserError(f"cannot read {path} ({type(error).__name__}: {error}): "
                        "fetch it again, or leave it out") from error


def _open_text(path, raw):
    """As text; a byte that is not UTF-8 comes out as a lone surrogate, for `clean`."""
    if path.suffix == ".gz":
        raw = gzip.open(raw)
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise UserError(f"reading {path} needs zstandard: pip install zstandard") from None
        raw = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape")


def _split_blank(path, file, counts):
    """Yield the documents of a .txt: what is between blank lines."""
    rest = ""  # the document that the next block goes on with
    while block := file.read(1 << 20):
        if "\0" in block:
            raise UserError(f"{path} holds NUL, so it is no UTF-8 text: convert or leave it out")
        *documents, rest = re.split(r"\n[ \t]*\n", rest + clean(block, counts))
        if len(rest) > LONGEST:
            space = max(rest.rfind("\n"), rest.rfind(" "))
            cut = space + 1 if space >= 0 else len(rest)
            documents.append(rest[:cut])
            rest = rest[cut:]
            counts["cut_documents"] += 1
        yield from filter(None, map(str.strip, documents))
    yield from filter(None, [rest.strip()])


def _split_lines(path, file, counts):
    """Yield the documents of a .jsonl: the field "text" of each line."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(clean(line, counts))["text"]
            text = clean(text, counts).strip()  # again: JSON can spell a lone surrogate
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f'{path}:{number} is no JSON object with a string "text" '
                            f"({type(error).__name__}: {error}): mend or remove the line") from None
        if text:
            yield text
