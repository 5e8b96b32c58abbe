"""Token ids to corrupted windows (3.2, C.1): corpora, shards, counter-based noise.

Run:      python data.py    (10 s)
          python data.py --data books/*.txt --out shards/ --vocab bytes
Last line: "pack your own: python data.py --data books/*.txt --out shards/"
Symbols:  x0       clean token ids, (l,) int64 (3.2)     l           window length, `seqlen`
          x_t      x0 with [MASK] where masked           t           masking probability in [0, 1]
          masked   (l,) bool, where x_t is [MASK]        step, slot  a sample's place in training

A corpus is one stream of ids, each document followed by [SEP], no [CLS], cut into windows without
regard to documents. A text shorter than a window, or a corpus's last window, is padded and scored,
never dropped. The paper's own corpus (Table 5) is made by experiments/mixture.py.

Differs from the paper: documents go to a split by their BLAKE2b hash; the paper does not say how.
"""
import hashlib
import os
import shutil
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from cart import corrupt
from common import UserError, banner, log, read_json, readable, run_cli, write_json
from text import files_below, identity, make_tokenizer, read_documents

SPLITS = {"train": 0.95, "valid": 0.05}  # shares of the documents, by hash


@dataclass(frozen=True)
class Config:
    """Without --out: statistics of the text, and one window clean and corrupted."""
    OLD_FLAGS: ClassVar = {"--text": "--data", "--tokenizer": "--vocab"}
    data: tuple[str, ...] = ("embedded",)  # files, directories, or "embedded"
    out: str = ""                          # shard folder to write
    vocab: str = "bytes"                   # "bytes", "bert-base-uncased" or the path of a vocab.txt
    overwrite: bool = False                # replace the shard folder --out
    t: float = 0.5                         # masking probability of the window shown
    seed: int = 42                         # of the window shown


def maskable_tokens(ids, tokenizer):
    """Ids (...) -> bool (...): what may be masked, neither [CLS], [SEP] nor [PAD]."""
    return (ids != tokenizer.cls_id) & (ids != tokenizer.sep_id) & (ids != tokenizer.pad_id)


def split_of(text, splits):
    """The split a document belongs to, by its hash: the same on every machine, in any order."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    u = int.from_bytes(digest, "little") / 2**64  # in [0, 1]
    for name, share in splits.items():
        u -= share
        if u < 0:
            break
    return name


def tokenise(documents, tokenizer):
    """Yield (text, ids with the closing [SEP]) of each document, encoded in batches of 1 MB."""
    def encoded(texts):
        for text, ids in zip(texts, tokenizer.encode_batch(texts)):
            yield text, np.append(ids, np.uint16(tokenizer.sep_id))

    batch = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document) + 1024  # of memory that even a short one takes
        if size > 1 << 20:
            yield from encoded(batch)
            batch = []
            size = 0
    yield from encoded(batch)


# ------------------------------------------------------------------------------------- corpora

class Stream:
    """uint16 arrays and shard files read as one array; a worker process maps the files anew."""
    dtype = np.dtype(np.uint16)

    def __init__(self, sources):
        self.sources = sources
        self.parts = []
        self.starts = [0]  # of each part in the stream, and the end
        for source in sources:
            part = np.memmap(source, "<u2", "r") if isinstance(source, Path) else source
            self.parts.append(part)
            self.starts.append(self.starts[-1] + len(part))

    def __reduce__(self):
        return Stream, (self.sources,)

    def __len__(self):
        return self.starts[-1]

    def __getitem__(self, where):
        """A slice of step 1 -> (n,) uint16."""
        start, stop, step = where.indices(len(self))
        assert step == 1, f"step {step}"
        pieces = [np.zeros(0, np.uint16)]
        for part, at in zip(self.parts, self.starts):
            if at < stop and start < at + len(part):
                pieces.append(part[max(start - at, 0):stop - at])
        return np.concatenate(pieces)

    def __array__(self, dtype=None, copy=None):
        return self[:].astype(dtype or self.dtype)


@dataclass
class Corpus:
    """The packed stream: every document followed by [SEP].

    The fingerprint tells whether two corpora are the same tokens in the same order by the same
    tokenizer. Of text it is a hash of the ids, so moving, linking or renaming files changes nothing
    and any change of the text does. Of shards it is a hash of their sizes and CRC-32s, which
    `load_corpus` has compared with the files; the same text in other shards has another.
    """
    ids: np.ndarray        # (n,) uint16, in memory, or a Stream of memory-mapped shards
    n_bytes: int           # UTF-8 bytes of the documents' text, for bits per byte
    n_docs: int
    tokenizer: str         # its name
    fingerprint: str = ""  # hex; empty where the ids come from no file


class Part(NamedTuple):
    """What one source gives to a corpus."""
    sources: list          # as of a Stream
    n_bytes: int
    n_docs: int
    content: bytes         # or an array: what the fingerprint is a hash of


def load_corpus(source, tokenizer, split=None):
    """Text or shards -> Corpus.

    source: "embedded", a .txt or .jsonl file (.gz, .zst), a directory of them, a shard folder, or
    several of these; what is given twice, under any name, counts once. split: "train", "valid", or
    None for everything. Text is held in memory, 2 bytes a token, and about 5 % of its documents are
    "valid"; shards are mapped, and were split when they were made.
    """
    sources = _listed(source)
    digest = hashlib.sha256(tokenizer.fingerprint.encode("utf-8"))
    parts = []
    n_bytes = 0
    n_docs = 0
    seen = set()  # files, by identity
    for one in sources:
        load = _load_shards if is_shard_folder(one) else _load_text
        part = load(one, tokenizer, split, seen)
        parts += part.sources
        n_bytes += part.n_bytes
        n_docs += part.n_docs
        digest.update(part.content)
    if n_docs == 0:
        wanted = f"{split} document" if split else "document"
        raise UserError(f"no {wanted} in {', '.join(map(str, sources))}: give more text (of few "
                        "documents, none may fall into the 5 % that are valid)")
    in_memory = len(parts) == 1 and isinstance(parts[0], np.ndarray)
    ids = parts[0] if in_memory else Stream(parts)
    return Corpus(ids, n_bytes, n_docs, tokenizer.name, digest.hexdigest())


def held_out_split(sources, trained_on):
    """The split to score on: "valid" of embedded, of shards and of what was trained on, else all.

    Files are compared, not paths: another spelling, a link, a file in a folder that was trained on
    and a folder with such a file in it are known; a copy is not.
    """
    sources = _listed(sources)
    for source in sources:
        if str(source) == "embedded" or is_shard_folder(source):
            return "valid"
    trained = _identities(_listed(trained_on))
    return None if trained.isdisjoint(_identities(sources)) else "valid"


def named_sources(items):
    """("NAME=PATH,PATH", ...) -> {name: [paths]}; a bare PATH is named by its stem."""
    named = {}
    for item in items:
        name, _, paths = item.rpartition("=")
        name = readable(name or Path(paths).stem)
        if name in named:
            raise UserError(f"two data sets are called {name}: write NAME=PATH for one of them")
        named[name] = paths.split(",")
    return named


def is_shard_folder(source):
    """Whether `source` is a folder with a manifest, as write_shards makes it."""
    return Path(source, "manifest.json").is_file()


def _listed(sources):
    """One source, or several, as a list."""
    return [sources] if isinstance(sources, (str, Path)) else list(sources)


def _identities(sources):
    """The identities of the text files of sources that exist."""
    found = set()
    for source in sources:
        found.update(map(identity, files_below(source)))
    return found


def _load_text(source, tokenizer, split, seen):
    """-> Part. seen: the files that the corpus has already."""
    counts = Counter()
    packed = bytearray()
    n_bytes = 0
    n_docs = 0
    documents = read_documents(source, counts, seen)
    wanted = (d for d in documents if split is None or split_of(d, SPLITS) == split)
    for text, ids in tokenise(wanted, tokenizer):
        packed += ids.tobytes()
        n_bytes += len(text.encode("utf-8"))
        n_docs += 1
    report_counts(source, counts)
    ids = np.frombuffer(packed, np.uint16)
    return Part([ids], n_bytes, n_docs, content=ids.astype("<u2", copy=False))


def report_counts(name, counts):
    """Say what `read_documents` counted, if anything."""
    if counts["invalid_utf8"] or counts["cut_documents"]:
        log(f"{name}: {counts['invalid_utf8']} bytes that are not UTF-8 became U+FFFD, "
            f"{counts['cut_documents']} cuts in long documents")
    if counts["repeats"]:
        log(f"{name}: left out {counts['repeats']} files or folders that another path or link had "
            "already led to")


# -------------------------------------------------------------------------------------- shards

class Shard(NamedTuple):
    """A file of ids, as its manifest describes it."""
    path: Path
    tokens: int
    crc32: int


class Manifest(NamedTuple):
    """What a manifest.json says of some splits."""
    tokenizer: str
    fingerprint: str       # of the tokenizer
    shards: list[Shard]
    n_bytes: int
    n_docs: int


def read_manifest(folder, split=None):
    """The Manifest of a shard folder, of one split or all. Raises UserError where it is damaged."""
    path = Path(folder, "manifest.json")
    found = read_json(path)
    shards = []
    n_bytes = 0
    n_docs = 0
    try:
        for name in [split] if split else found["splits"]:
            part = found["splits"][name]
            n_bytes += int(part["bytes"])
            n_docs += int(part["documents"])
            for entry in part["shards"]:
                shard = Shard(Path(folder, entry["file"]), int(entry["tokens"]),
                              int(entry["crc32"]))
                if shard.tokens < 1:
                    raise ValueError(f"{entry['file']} of {shard.tokens} tokens")
                shards.append(shard)
        return Manifest(found["tokenizer"], found["fingerprint"], shards, n_bytes, n_docs)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): remove the folder, "
                        "and build the shards again with data.py --out") from None


def _load_shards(folder, tokenizer, split, seen):
    """-> Part; the shards are checked against their manifest and the tokenizer."""
    key = identity(Path(folder, "manifest.json"))
    if key in seen:
        report_counts(folder, Counter(repeats=1))
        return Part([], 0, 0, b"")
    seen.add(key)
    manifest = read_manifest(folder, split)
    if manifest.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{folder} was made with the vocabulary of {manifest.tokenizer} "
                        f"({str(manifest.fingerprint)[:12]}), not of {tokenizer.name} "
                        f"({tokenizer.fingerprint[:12]}): use that tokenizer, or build the shards "
                        "again")
    content = "shards"
    for shard in manifest.shards:
        _check_shard(shard, tokenizer.vocab_size)
        content += f" {shard.tokens}:{shard.crc32}"
    paths = [shard.path for shard in manifest.shards]
    return Part(paths, manifest.n_bytes, manifest.n_docs, content.encode("utf-8"))


def _check_shard(shard, vocab_size):
    """Raise UserError unless a file is as its manifest says; some seconds for the paper's 7 GB."""
    path = shard.path
    size = path.stat().st_size if path.is_file() else "no"
    if size != 2 * shard.tokens:
        raise UserError(f"shard {path} has {size} bytes, its manifest says {2 * shard.tokens}: "
                        "copy or build it again")
    ids = np.memmap(path, "<u2", "r")
    top = 0
    crc32 = 0
    for start in range(0, shard.tokens, 1 << 22):
        block = ids[start:start + (1 << 22)]
        top = max(top, int(block.max()))
        crc32 = zlib.crc32(block, crc32)
    if top >= vocab_size or crc32 != shard.crc32:
        raise UserError(f"shard {path} has CRC-32 {crc32} and ids up to {top}, needed "
                        f"{shard.crc32} and at most {vocab_size - 1}: copy or build it again")


def write_shards(documents, out, tokenizer, counts=None, splits=SPLITS, train_tokens=None,
                 overwrite=False, shard_tokens=50_000_000):
    """Documents -> the folder `out`, which appears when it is whole. Returns its manifest.

    Files of `shard_tokens` little-endian uint16, cut without regard to documents: shard_00000.bin
    and on for "train", valid_00000.bin and on; manifest.json. `train_tokens` ends the stream early.
    `overwrite` replaces a folder that holds shards and nothing else. counts: what the documents'
    reader counts.
    """
    counts = Counter() if counts is None else counts
    _check_out(out, overwrite)
    folder = Path(out).resolve()  # where a link leads: there is room for the shards
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    replaced = folder.with_name(f".{folder.name}.{os.getpid()}.replaced")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    writers = {name: _SplitWriter(temporary, name, shard_tokens) for name in splits}
    train = writers["train"].entry
    try:
        for text, ids in tokenise(documents, tokenizer):
            writers[split_of(text, splits)].add(text, ids)
            if train_tokens is not None and train["tokens"] >= train_tokens:
                break
        if not train["tokens"]:
            raise UserError(f"nothing to train on for {out}: give more text")
        for writer in writers.values():
            writer.close()
        manifest = {"tokenizer": tokenizer.name, "fingerprint": tokenizer.fingerprint,
                    "vocab_size": tokenizer.vocab_size, "train_tokens": train_tokens,
                    "invalid_utf8": counts["invalid_utf8"],
                    "cut_documents": counts["cut_documents"],
                    "splits": {name: writer.entry for name, writer in writers.items()}}
        write_json(temporary / "manifest.json", manifest)
        _check_out(out, overwrite)  # again: another may have been faster
        if folder.exists():
            os.rename(folder, replaced)  # a kill between the two renames loses neither
        os.rename(temporary, folder)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    report_counts(out, counts)
    return manifest


class _SplitWriter:
    """The shard files of one split, and what the manifest says of them."""
    def __init__(self, folder, split, shard_tokens):
        self.folder = folder
        self.stem = "shard" if split == "train" else split
        self.shard_tokens = shard_tokens
        self.entry = {"tokens": 0, "bytes": 0, "documents": 0, "shards": []}
        self.file = None

    def add(self, text, ids):
        """Append a document, ids (n,) uint16."""
        self.entry["tokens"] += len(ids)
        self.entry["bytes"] += len(text.encode("utf-8"))
        self.entry["documents"] += 1
        while len(ids):
            shard = self._shard_with_room()
            now = ids[:self.shard_tokens - shard["tokens"]]
            ids = ids[len(now):]
            raw = now.astype("<u2").tobytes()
            self.file.write(raw)
            shard["tokens"] += len(now)
            shard["crc32"] = zlib.crc32(raw, shard["crc32"])

    def _shard_with_room(self):
        """The entry of the last file, or of a new one where that is full."""
        shards = self.entry["shards"]
        if not shards or shards[-1]["tokens"] == self.shard_tokens:
            self.close()
            name = f"{self.stem}_{len(shards):05d}.bin"
            self.file = open(self.folder / name, "wb")
            shards.append({"file": name, "tokens": 0, "crc32": 0})
        return shards[-1]

    def close(self):
        if self.file is not None:
            self.file.close()


def _check_out(out, overwrite):
    """Raise UserError unless `out` is new, empty or, to overwrite, shards and nothing else."""
    out = Path(out)
    is_empty = out.is_dir() and not any(out.iterdir())
    if is_empty or not out.exists():
        return
    if not _holds_only_shards(out):
        raise UserError(f"{out} exists and is not empty: choose another --out (--overwrite "
                        "replaces a folder that holds shards and nothing else)")
    if not overwrite:
        raise UserError(f"{out} exists and is a shard folder: choose another --out, or --overwrite")


def _holds_only_shards(folder):
    """Whether `folder` is what write_shards wrote, with nothing beside it."""
    if not is_shard_folder(folder):
        return False
    try:
        shards = read_manifest(folder).shards
    except UserError:
        return False
    ours = {folder / "manifest.json", *(shard.path for shard in shards)}
    return ours.issuperset(folder.iterdir())


# ---------------------------------------------------------------------- windows and their noise

class Windows:
    """A corpus in windows of `seqlen`, in order; the last is padded, so no token is dropped."""
    def __init__(self, corpus, seqlen, pad_id):
        self.corpus = corpus
        self.seqlen = seqlen
        self.pad_id = pad_id

    def __len__(self):
        return -(-len(self.corpus.ids) // self.seqlen)

    def __getitem__(self, i):
        """-> (l,) int64."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        window = np.full(self.seqlen, self.pad_id, np.int64)
        ids = self.corpus.ids[i * self.seqlen:(i + 1) * self.seqlen]
        window[:len(ids)] = ids
        return window

    def evenly(self, n, phase=0.5):
        """n windows at even distances, or all where there are fewer -> (n, l) int64 tensor.

        phase in [0, 1): where in its n-th of the corpus a window is taken.
        """
        n = min(n, len(self))
        places = ((np.arange(n) + phase) * len(self) / n).astype(int)
        return torch.from_numpy(np.stack([self[i] for i in places]))


def noise_generator(*counters, device="cpu"):
    """Integers -> their own random stream: the same everywhere on that kind of device, whatever was
    drawn before.

    torch's CPU generator keeps 32 bits of a seed, so two tuples share a stream with chance 2^-32.
    """
    name = repr([int(c) for c in counters])
    digest = hashlib.blake2b(name.encode("utf-8"), digest_size=4).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def published_time(noise):
    """t as the paper's public code draws it (sample_timestep in src/train.py), () float32.

    1 - current / total, with total from 10 to 999 and current from 0 to total - 1.
    """
    total = torch.randint(10, 1000, (), generator=noise)
    current = (torch.rand((), generator=noise, dtype=torch.float64) * total).long()
    return (1 - current / total).float()


class DiffusionDataset(torch.utils.data.Dataset):
    """Item k = step * global_batch + slot of training: a window, its t, its mask.

    A pure function of k: any split over ranks, micro-batches and workers gives the same samples,
    and a resumed run needs no random state. Windows come in a new permutation each epoch.
    t ~ U(0, 1) per sequence; `stratified` puts one in each of global_batch equal intervals, in
    random order. t_hole is an interval that no t falls into; the others are stretched over the
    rest. Then t is clipped to [t_min, t_max]; pretraining masks at one rate, t_min = t_max.
    t_per_batch draws one t for a step, as the paper's public code does. t_jitter is the standard
    deviation of noise in the masking rate, within [t_min, 1 - t_min]; "t", what the adapter is
    told, is without it.
    """
    def __init__(self, windows, tokenizer, global_batch, steps, seed, t_min=1e-3, t_max=1.0,
                 stratified=False, t_hole=(0.0, 0.0), t_per_batch=False, t_jitter=0.0):
        self.windows = windows
        self.tokenizer = tokenizer
        self.global_batch = global_batch
        self.steps = steps
        self.seed = seed
        self.t_min = t_min
        self.t_max = t_max
        self.stratified = stratified
        self.t_hole = t_hole
        self.t_per_batch = t_per_batch
        self.t_jitter = t_jitter
        self.epoch = None  # of the permutation that is kept: items come nearly in order
        self.order = None

    def __len__(self):
        return self.steps * self.global_batch

    def __getitem__(self, k):
        """-> x0 (l,) int64, x_t (l,) int64, masked (l,) bool, t () float32."""
        if not 0 <= k < len(self):
            raise IndexError(k)
        step, slot = divmod(k, self.global_batch)
        noise = noise_generator(self.seed, step, slot)
        t, rate = self._time_and_rate(step, slot, noise)
        x0 = torch.from_numpy(self.windows[self._place(k)])                            # l
        maskable = maskable_tokens(x0, self.tokenizer)
        x_t, masked = corrupt(x0, rate, self.tokenizer.mask_id, maskable, noise)       # l
        return {"x0": x0, "x_t": x_t, "masked": masked, "t": t}

    def _place(self, k):
        """The window of item k."""
        n = len(self.windows)
        epoch, i = divmod(k, n)
        if epoch != self.epoch:
            self.order = torch.randperm(n, generator=noise_generator(self.seed, epoch))
            self.epoch = epoch
        return int(self.order[i])

    def _time_and_rate(self, step, slot, noise):
        """t of a sample and the probability that its tokens are masked with, both () float32."""
        if self.t_per_batch:
            noise = noise_generator(self.seed, step, self.global_batch)  # no sample has that slot
            t = published_time(noise)
        else:
            t = self._time(step, slot, noise)
        if not self.t_jitter:
            return t, t
        jitter = self.t_jitter * torch.randn((), generator=noise, dtype=torch.float32)
        return t, (t + jitter).clamp(self.t_min, 1 - self.t_min)

    def _time(self, step, slot, noise):
        """t of a sample, () float32."""
        t = torch.rand((), generator=noise, dtype=torch.float32)
        if self.stratified:
            # Of the step, not of a sample: no sample has the slot global_batch.
            strata = noise_generator(self.seed, step, self.global_batch)
            stratum = torch.randperm(self.global_batch, generator=strata)[slot]
            t = (stratum + t) / self.global_batch
        begin, end = self.t_hole
        hole = end - begin
        t = t * (1 - hole)
        t = t + hole * (t >= begin)
        return t.clamp(self.t_min, self.t_max)


# ---------------------------------------------------------------------------------------- main

def main(cfg):
    """Write shards, or show what a corpus, a window and its corruption look like."""
    tokenizer = make_tokenizer(cfg.vocab)
    banner("data.py", cfg)
    if cfg.t > 1:
        raise UserError(f"--t {cfg.t}: a masking probability is at most 1")
    return pack(cfg, tokenizer) if cfg.out else show(cfg, tokenizer)


def pack(cfg, tokenizer):
    """Write --data as shards. Returns their manifest."""
    counts = Counter()
    manifest = write_shards(read_documents(cfg.data, counts), cfg.out, tokenizer, counts,
                            overwrite=cfg.overwrite)
    log_manifest(manifest, cfg.out)
    return manifest


def log_manifest(manifest, out):
    """Say what was written, and what to do with it."""
    for split, part in manifest["splits"].items():
        log(f"{split}: {part['documents']:,} documents, {part['bytes']:,} bytes, "
            f"{part['tokens']:,} tokens, {len(part['shards'])} shards")
    log(f"wrote {out}; next: python train.py --data {out}")


def show(cfg, tokenizer):
    """Print the size of --data, its first window, and that window corrupted. Returns the sizes."""
    corpus = load_corpus(cfg.data, tokenizer)
    windows = Windows(corpus, 128, tokenizer.pad_id)
    log(f"{' '.join(cfg.data)}: {corpus.n_docs:,} documents, {corpus.n_bytes:,} bytes, "
        f"{len(corpus.ids):,} tokens of {tokenizer.name}, {len(windows):,} windows of 128")
    x0 = torch.from_numpy(windows[0])                                                  # l
    maskable = maskable_tokens(x0, tokenizer)
    noise = noise_generator(cfg.seed)
    x_t, masked = corrupt(x0, cfg.t, tokenizer.mask_id, maskable, noise)               # l
    log(f"\nx0 of the first:\n  {tokenizer.decode(x0)}")
    log(f"x_t at t = {cfg.t}, {int(masked.sum())} masked:\n  {tokenizer.decode(x_t)}\n")
    log("pack your own: python data.py --data books/*.txt --out shards/")
    return {"documents": corpus.n_docs, "bytes": corpus.n_bytes, "tokens": len(corpus.ids)}


if __name__ == "__main__":
    run_cli(Config, main)
