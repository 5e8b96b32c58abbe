"""Text to documents and tokens: files, the embedded corpus, and the two tokenizers (section C.1).

Run:      not a script; data.py imports it, and `python data.py` shows what it reads.
Symbols:  ids   token ids, (n,) uint16; which of them are special, by tokenizer:
                            [PAD]  [CLS]  [SEP]  [MASK]   vocabulary
                bytes         256    257    258     259          260
                WordPiece       0    101    102     103       30,522   (bert-base-uncased)

A text is documents: in .txt a blank line ends one (a single newline is a paragraph break), in
.jsonl each line is one, in its field "text"; .gz and .zst are read through. Counted: bytes that are
not UTF-8, each becoming U+FFFD; cuts, at a space or line break, in .txt documents above 2^20
characters. Refused: NUL in .txt, which binary files and UTF-16 have. Not noticed: a .zst file cut
short, which reads as if it ended there, and a folder in a folder that may not be read. Memory does
not grow with a .txt file; a line of .jsonl is held whole, in ten times its size.

Differs from the paper: it has no bytes; they are for the small backbone, which needs no vocabulary.
"""
import ast
import contextlib
import gzip
import hashlib
import io
import json
import re
import sysconfig
import warnings
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np

from common import UserError, progress

LONGEST = 1 << 20                                  # characters of a .txt document
TEXT = re.compile(r"\.(txt|jsonl)(\.gz|\.zst)?$")  # the files we read
BERT_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"


# ---------------------------------------------------------------------------------- tokenizers

class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 [PAD], 257 [CLS], 258 [SEP], 259 [MASK]."""
    name, vocab_size = "bytes", 260
    pad_id, cls_id, sep_id, mask_id = special_ids = (256, 257, 258, 259)
    fingerprint = hashlib.sha256(b"bytes [PAD] [CLS] [SEP] [MASK]").hexdigest()

    def encode(self, text):
        """str -> (n,) uint16, no special tokens."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        """Ids -> str; [MASK] reads "_", [SEP] a blank line, [CLS] and [PAD] nothing."""
        show = {self.mask_id: b"_", self.sep_id: b"\n\n"}
        parts = (bytes([i]) if i < 256 else show.get(i, b"") for i in map(int, ids))
        return b"".join(parts).decode("utf-8", "replace")


class WordPiece:
    """bert-base-uncased's tokenizer over a vocab.txt: lower case, accents stripped.

    The model knows no special tokens, so a text that says "[MASK]" is never masked by it. A word
    of more than 100 characters is one [UNK], as in the original.
    """
    def __init__(self, vocab_path, name=None):
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
        special = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
        try:
            raw = Path(vocab_path).read_bytes()
            words = raw.decode().replace("\r", "").removesuffix("\n").split("\n")
            vocab = {word: i for i, word in enumerate(words)}
            if len(words) > 1 << 16 or len(vocab) < len(words):
                raise ValueError(f"{len(words)} tokens, {len(vocab)} of them distinct")
            if missing := {*special, "[UNK]"} - vocab.keys():
                raise ValueError(f"lacks {' '.join(sorted(missing))}")
        except (OSError, ValueError) as error:
            raise UserError(f"{vocab_path} is no WordPiece vocabulary ({error}): give the path of "
                            "bert-base-uncased's vocab.txt, or one like it of at most 65536 tokens"
                            ) from None
        self.name, self.vocab_size = name or str(vocab_path), len(words)
        self.fingerprint = hashlib.sha256(raw).hexdigest()
        self.special_ids = tuple(vocab[s] for s in special)
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self.model = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        self.model.normalizer = normalizers.BertNormalizer(lowercase=True)
        self.model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self.model.decoder = decoders.WordPiece()

    def encode(self, text):
        """str -> (n,) uint16, no special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts):
        """In pieces cut at white space, across which WordPiece never looks: far less memory."""
        pieces = [re.findall(r".{1,65536}(?=\s|$)|.{1,65536}", t, re.S) or [""] for t in texts]
        encoded = iter(self.model.encode_batch_fast([p for ps in pieces for p in ps]))
        return [np.concatenate([np.array(next(encoded).ids, np.uint16) for _ in ps])
                for ps in pieces]

    def decode(self, ids):
        """Ids -> str; [MASK] reads "_", [SEP] a blank line, [CLS] and [PAD] nothing."""
        text = self.model.decode([i for i in map(int, ids) if i not in (self.pad_id, self.cls_id)])
        return re.sub(r" ?\[SEP\] ?", "\n\n", text.replace("[MASK]", "_"))


def make_tokenizer(name):
    """"bytes", "bert-base-uncased" (the hub's cache, else the hub) or the path of a vocab.txt."""
    if name == "bytes":
        return ByteTokenizer()
    if name != "bert-base-uncased":
        return WordPiece(name)
    import huggingface_hub
    try:
        path = huggingface_hub.hf_hub_download("google-bert/bert-base-uncased", "vocab.txt")
    except Exception as error:  # classes of several packages, all meaning "not to be had"
        raise UserError("bert-base-uncased's vocab.txt is not cached and the hub not reachable "
                        f"({type(error).__name__}): connect, set HF_ENDPOINT to a mirror, or give "
                        "the path of a vocab.txt") from None
    tokenizer = WordPiece(path, name)
    if tokenizer.fingerprint != BERT_SHA256:
        raise UserError(f"{path} has sha256 {tokenizer.fingerprint}, bert-base-uncased's vocabulary"
                        f" {BERT_SHA256}: delete the file and try again")
    return tokenizer


# ----------------------------------------------------------------------------------- documents

def find_files(paths):
    """The files of `paths` in the given order, directories walked in sorted order."""
    files = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        inside = sorted(Path(path).rglob("*")) if path and Path(path).is_dir() else [Path(path)]
        found = [p for p in inside if str(p) == "embedded" or p.is_file() and TEXT.search(p.name)]
        if not found:
            what = "holds no text" if Path(path).exists() else "does not exist"
            raise UserError(f"{path or 'an empty path'} {what}: give a .txt or .jsonl file (.gz, "
                            ".zst allowed), a directory of them, or a shard folder with its "
                            "manifest.json")
        files += found
    for path in files:
        if str(path) != "embedded" and path.stat().st_size == 0:
            raise UserError(f"{path} is empty: remove it, or leave it out")
    return files


def read_documents(paths, counts=None):
    """Yield the documents of `paths` as str, stripped and not empty, in bounded memory.

    `counts`, a Counter, receives "invalid_utf8" (bytes) and "cut_documents" (cuts).
    """
    counts, files = Counter() if counts is None else counts, find_files(paths)
    sizes = [0 if str(f) == "embedded" else f.stat().st_size for f in files]
    with progress(total=sum(sizes), desc="reading", unit="B", unit_scale=True) as bar:
        for i, path in enumerate(files):
            if str(path) == "embedded":
                yield from embedded_documents()
                continue
            split = _split_lines if TEXT.search(path.name)[1] == "jsonl" else _split_blank
            try:
                with open(path, "rb") as raw, _open_text(path, raw) as file:
                    for document in split(path, file, counts):
                        yield document
                        bar.update(sum(sizes[:i]) + raw.tell() - bar.n)
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


def clean(text, counts):
    """Lone surrogates become U+FFFD, and are counted."""
    if not text.isascii():
        text, n = re.subn("[\ud800-\udfff]", "\ufffd", text)
        counts["invalid_utf8"] += n
    return text


def _split_blank(path, file, counts):
    rest = ""
    while chunk := file.read(1 << 20):
        if "\0" in chunk:
            raise UserError(f"{path} holds NUL, so it is no UTF-8 text: convert or leave it out")
        *documents, rest = re.split(r"\n[ \t]*\n", rest + clean(chunk, counts))
        if len(rest) > LONGEST:
            at = max(rest.rfind("\n"), rest.rfind(" ")) + 1 or len(rest)
            documents, rest = [*documents, rest[:at]], rest[at:]
            counts["cut_documents"] += 1
        yield from filter(None, map(str.strip, documents))
    yield from filter(None, [rest.strip()])


def _split_lines(path, file, counts):
    for number, line in enumerate(file, 1):
        try:
            text = json.loads(clean(line, counts))["text"] if line.strip() else ""
            text = clean(text, counts).strip()  # again: JSON can spell a lone surrogate
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f'{path}:{number} is no JSON object with a string "text" '
                            f"({type(error).__name__}: {error}): mend or remove the line") from None
        if text:
            yield text


@lru_cache(maxsize=1)
def embedded_documents():
    """English that every machine has: about 1 MB from Python's own documentation, in some seconds.

    The language reference (`pydoc_data.topics`) and the docstrings of the standard library, parsed,
    never imported; code and markup dropped, no paragraph twice, about 4,000 characters a document.
    It differs between Python versions.
    """
    root, documents, seen = Path(sysconfig.get_path("stdlib")), [], set()
    skip = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "site-packages",
            "dist-packages", "ensurepip"}
    for path in sorted(p for p in root.rglob("*.py") if not skip & {*p.relative_to(root).parts}):
        with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree, size = ast.parse(path.read_text("utf-8", "replace")), LONGEST
            read = _strings if path.parent.name == "pydoc_data" else _docstrings
            for paragraph in (p for text in read(tree) for p in _prose(text) if p not in seen):
                seen.add(paragraph)
                if size > 4000:
                    documents.append([])
                    size = 0
                documents[-1].append(paragraph)
                size += len(paragraph)
    if not documents:
        raise UserError(f"{root} has no sources to make the embedded corpus of: give text files")
    return ["\n".join(paragraphs) for paragraphs in documents]


def _docstrings(node):
    yield ast.get_docstring(node) or ""
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child)


def _strings(tree):
    constants = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
    return [c for c in constants if isinstance(c, str)]


def _prose(text):
    """The paragraphs that read as English: not indented, a sentence's two ends, mostly words."""
    word = re.compile(r"[A-Za-z][a-z]*(?:['-][a-z]+)?[.,;:!?)]*$")
    for block in re.split(r"\n\s*\n", text):
        if ">>>" in block or block.startswith("    "):
            continue
        block = re.sub(r":[a-z:]+:`~?([^`]*)`", r"\1", block).replace("`", "").replace("::", ":")
        block = " ".join(re.sub(r"^\s*([*+-]|\d+[.)])\s+", "", block).split())
        words = block.split(" ")
        if (len(words) >= 8 and block[0].isupper() and block[-1] in ".!?:"
                and sum(bool(word.match(w)) for w in words) >= 0.8 * len(words)):
            yield block
