"""Token ids to corrupted windows (3.2, C.1): corpora, shards, counter-based noise.

Run:      python data.py    (10 s; ends with "pack your own: python data.py --text ... --out ...")
          python data.py --text books/*.txt --out shards/ --tokenizer bytes
          python data.py --mixture paper --tokens 3.54e9 --out corpus/ --tokenizer bert-base-uncased
Symbols:  x0       clean token ids, (l,) int64 (3.2)     l           window length, `seqlen`
          x_t      x0 with [MASK] where masked           t           masking probability in [0, 1]
          masked   (l,) bool, where x_t is [MASK]        step, slot  a sample's place in training

A corpus is one stream of ids, each document followed by [SEP], no [CLS], cut into windows without
regard to documents. A text shorter than a window, or a corpus's last window, is padded and scored,
never dropped.

Differs from the paper: Table 5's percentages sum to 105.00, so we normalise, as its caption says. A
source smaller than its share gives all it has, once, and is reported. Documents go to a split by
their BLAKE2b hash; the paper does not say how.
"""
import hashlib
import json
import os
import shutil
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cart import corrupt
from common import UserError, banner, log, progress, run_cli, write_json
from text import clean, make_tokenizer, read_documents

SPLITS = {"train": 0.95, "valid": 0.05}  # shares of the documents, by hash


@dataclass(frozen=True)
class Config:
    """Without --out: statistics of the text, and one window clean and corrupted."""
    text: tuple[str, ...] = ("embedded",)  # files, directories, or "embedded"
    out: str = ""                          # shard folder to write
    tokenizer: str = "bytes"               # "bytes", "bert-base-uncased" or the path of a vocab.txt
    overwrite: bool = False                # replace the shard folder --out
    mixture: str = ""                      # "paper": the 14 sources of Table 5 in place of --text
    tokens: float = 3.54e9                 # training tokens of the mixture
    t: float = 0.5                         # masking probability of the window shown
    seed: int = 42                         # of the window shown


def maskable_tokens(ids, tokenizer):
    """Ids (...) -> bool (...): what may be masked, neither [CLS], [SEP] nor [PAD]."""
    return (ids != tokenizer.cls_id) & (ids != tokenizer.sep_id) & (ids != tokenizer.pad_id)


def split_of(text, splits):
    """The split a document belongs to, by its hash: the same on every machine, in any order."""
    u = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
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
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document) + 1024  # of memory that even a short one takes
        if size > 1 << 20:
            yield from encoded(batch)
            batch, size = [], 0
    yield from encoded(batch)


# -------------------------------------------------------------------------- corpora and shards

class Stream:
    """uint16 arrays and shard files read as one array; a worker process maps the files anew."""
    dtype = np.dtype(np.uint16)

    def __init__(self, sources):
        self.sources = sources
        self.parts = [np.memmap(s, "<u2", "r") if isinstance(s, Path) else s for s in sources]
        self.starts = np.cumsum([0] + [len(p) for p in self.parts])

    def __reduce__(self):
        return Stream, (self.sources,)

    def __len__(self):
        return int(self.starts[-1])

    def __getitem__(self, where):
        """A slice of step 1 -> (n,) uint16."""
        start, stop, step = where.indices(len(self))
        assert step == 1, f"step {step}"
        return np.concatenate([np.zeros(0, np.uint16)] + [
            part[max(start - at, 0):stop - at] for part, at in zip(self.parts, self.starts)
            if at < stop and at + len(part) > start])

    def __array__(self, dtype=None, copy=None):
        return self[:].astype(dtype or self.dtype)


@dataclass
class Corpus:
    """The packed stream: every document followed by [SEP]."""
    ids: np.ndarray    # (n,) uint16, in memory, or a Stream of memory-mapped shards
    n_bytes: int       # UTF-8 bytes of the documents' text, for bits per byte
    n_docs: int
    tokenizer: str     # its name
    fingerprint: str = ""


def load_corpus(source, tokenizer, split=None):
    """Text or shards -> Corpus.

    source: "embedded", a .txt or .jsonl file (.gz, .zst), a directory of them, a shard folder, or
    several of these. split: "train", "valid", or None for everything. Text is held in memory, 2
    bytes a token, and about 5 % of its documents are "valid"; shards are mapped, and were split
    when they were made.
    """
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    parts, n_bytes, n_docs = [], 0, 0
    for one in sources:
        load = _load_shards if Path(one, "manifest.json").is_file() else _load_text
        more, more_bytes, more_docs = load(one, tokenizer, split)
        parts, n_bytes, n_docs = parts + more, n_bytes + more_bytes, n_docs + more_docs
    if n_docs == 0:
        raise UserError(f"no {split + ' ' if split else ''}document in "
                        f"{', '.join(map(str, sources))}: give more text (of few documents, none "
                        "may fall into the 5 % that are valid)")
    ids = parts[0] if len(parts) == 1 and isinstance(parts[0], np.ndarray) else Stream(parts)
    return Corpus(ids, n_bytes, n_docs, tokenizer.name)


def held_out_split(sources, trained_on):
    """The split to score on: "valid" of embedded, of shards and of what was trained on, else all.

    Sources are compared as they are spelled.
    """
    known = {"embedded", *map(str, trained_on)}
    return "valid" if any(str(s) in known or Path(s, "manifest.json").is_file()
                          for s in sources) else None


def named_sources(items):
    """("NAME=PATH,PATH", ...) -> {name: [paths]}; a bare PATH is named by its stem."""
    named = {}
    for item in items:
        name, _, paths = item.rpartition("=")
        name = name or Path(paths).stem
        if name in named:
            raise UserError(f"two data sets are called {name}: write NAME=PATH for one of them")
        named[name] = paths.split(",")
    return named


def _load_text(source, tokenizer, split):
    packed, n_bytes, n_docs, counts = bytearray(), 0, 0, Counter()
    documents = (d for d in read_documents(source, counts)
                 if split is None or split_of(d, SPLITS) == split)
    for text, ids in tokenise(documents, tokenizer):
        packed += ids.tobytes()
        n_bytes += len(text.encode())
        n_docs += 1
    _report(source, counts)
    return [np.frombuffer(packed, np.uint16)], n_bytes, n_docs


def _report(name, counts):
    if counts.total():
        log(f"{name}: {counts['invalid_utf8']} bytes that are not UTF-8 became U+FFFD, "
            f"{counts['cut_documents']} cuts in long documents")


def _load_shards(folder, tokenizer, split):
    """Check a shard folder against its manifest and the tokenizer -> paths, bytes, documents."""
    try:
        manifest = json.loads(Path(folder, "manifest.json").read_text("utf-8"))
        made_with, fingerprint = manifest["tokenizer"], manifest["fingerprint"]
        parts = [manifest["splits"][s] for s in ([split] if split else manifest["splits"])]
        shards = [(Path(folder, s["file"]), s["tokens"], s["crc32"])
                  for p in parts for s in p["shards"]]
        totals = [sum(p[k] for p in parts) for k in ("bytes", "documents")]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/manifest.json is damaged ({type(error).__name__}: {error}): "
                        "build the shards again with data.py --out") from None
    if fingerprint != tokenizer.fingerprint:
        raise UserError(f"{folder} was made with the vocabulary of {made_with} ({fingerprint[:12]})"
                        f", not of {tokenizer.name} ({tokenizer.fingerprint[:12]}): use that "
                        "tokenizer, or build the shards again")
    for path, n, crc32 in shards:
        size = path.stat().st_size if path.is_file() else "no"
        if size != 2 * n:
            raise UserError(f"shard {path} has {size} bytes, its manifest says {2 * n}: copy or "
                            "build it again")
        ids = np.memmap(path, "<u2", "r")  # one pass, some seconds for the paper's 7 GB
        top = crc = 0
        for block in (ids[i:i + (1 << 22)] for i in range(0, n, 1 << 22)):
            top, crc = max(top, int(block.max())), zlib.crc32(block, crc)
        if top >= tokenizer.vocab_size or crc != crc32:
            raise UserError(f"shard {path} has CRC-32 {crc} and ids up to {top}, needed {crc32} "
                            f"and at most {tokenizer.vocab_size - 1}: copy or build it again")
    return [path for path, *_ in shards], *totals


def write_shards(documents, out, tokenizer, counts=None, splits=SPLITS, train_tokens=None,
                 overwrite=False, shard_tokens=50_000_000):
    """Documents -> the folder `out`, which appears when it is whole. Returns its manifest.

    Files of `shard_tokens` little-endian uint16, cut without regard to documents: shard_00000.bin
    and on for "train", valid_00000.bin and on; manifest.json. `train_tokens` ends the stream early.
    `overwrite` replaces a shard folder, and no other.
    """
    out, counts = Path(out), Counter() if counts is None else counts
    known = (out / "manifest.json").is_file()
    if (out.is_file() or out.is_dir() and any(out.iterdir())) and not (overwrite and known):
        raise UserError(f"{out} exists and is {'a shard folder' if known else 'not empty'}: choose "
                        f"another --out{', or --overwrite' if known else ''}")
    temporary, replaced = (out.absolute().with_name(f".{out.name}.{os.getpid()}.{kind}")
                           for kind in ("tmp", "replaced"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    made = {s: {"tokens": 0, "bytes": 0, "documents": 0, "shards": []} for s in splits}
    files = {}
    try:
        for text, ids in tokenise(documents, tokenizer):
            split = split_of(text, splits)
            part, shards = made[split], made[split]["shards"]
            part["tokens"] += len(ids)
            part["bytes"] += len(text.encode())
            part["documents"] += 1
            while len(ids):
                if not shards or shards[-1]["tokens"] == shard_tokens:
                    stem = "shard" if split == "train" else split
                    name = f"{stem}_{len(shards):05d}.bin"
                    shards.append({"file": name, "tokens": 0, "crc32": 0})
                    if split in files:
                        files[split].close()
                    files[split] = open(temporary / shards[-1]["file"], "wb")
                now, ids = np.split(ids, [shard_tokens - shards[-1]["tokens"]])
                raw = now.astype("<u2").tobytes()
                files[split].write(raw)
                shards[-1]["crc32"] = zlib.crc32(raw, shards[-1]["crc32"])
                shards[-1]["tokens"] += len(now)
            if train_tokens is not None and made["train"]["tokens"] >= train_tokens:
                break
        if not made["train"]["tokens"]:
            raise UserError(f"nothing to train on for {out}: give more text")
        for file in files.values():
            file.close()
        manifest = {"tokenizer": tokenizer.name, "fingerprint": tokenizer.fingerprint,
                    "vocab_size": tokenizer.vocab_size, "train_tokens": train_tokens,
                    "invalid_utf8": counts["invalid_utf8"],
                    "cut_documents": counts["cut_documents"], "splits": made}
        write_json(temporary / "manifest.json", manifest)
        if out.exists():
            os.rename(out, replaced)  # a kill between the two renames loses neither
        os.rename(temporary, out)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _report(out, counts)
    return manifest


# ---------------------------------------------------------------------- windows and their noise

class Windows:
    """A corpus in windows of `seqlen`, in order; the last is padded, so no token is dropped."""
    def __init__(self, corpus, seqlen, pad_id):
        self.corpus, self.seqlen, self.pad_id = corpus, seqlen, pad_id

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
        at = ((np.arange(n) + phase) * len(self) / n).astype(int)
        return torch.from_numpy(np.stack([self[i] for i in at]))


def noise_generator(*counters):
    """Integers -> their own random stream: the same everywhere, whatever was drawn before.

    torch's CPU generator keeps 32 bits of a seed, so two tuples share a stream with chance 2^-32.
    """
    digest = hashlib.blake2b(repr([int(c) for c in counters]).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class DiffusionDataset(torch.utils.data.Dataset):
    """Item k = step * global_batch + slot of training: a window, its t, its mask.

    A pure function of k: any split over ranks, micro-batches and workers gives the same samples,
    and a resumed run needs no random state. Windows come in a new permutation each epoch.
    t ~ U(0, 1) per sequence; `stratified` puts one in each of global_batch equal intervals, in
    random order. t_hole is an interval that no t falls into; the others are stretched over the
    rest. Then t is clipped to [t_min, t_max]; pretraining masks at one rate, t_min = t_max.
    """
    def __init__(self, windows, tokenizer, global_batch, steps, seed, t_min=1e-3, t_max=1.0,
                 stratified=False, t_hole=(0.0, 0.0)):
        self.windows, self.tokenizer, self.t_hole = windows, tokenizer, t_hole
        self.global_batch, self.steps, self.seed = global_batch, steps, seed
        self.t_min, self.t_max, self.stratified, self.epoch = t_min, t_max, stratified, None

    def __len__(self):
        return self.steps * self.global_batch

    def __getitem__(self, k):
        """-> x0 (l,) int64, x_t (l,) int64, masked (l,) bool, t () float32."""
        if not 0 <= k < len(self):
            raise IndexError(k)
        step, slot = divmod(k, self.global_batch)
        epoch, place = divmod(k, len(self.windows))
        if epoch != self.epoch:  # items come nearly in order, so one permutation is kept
            self.epoch, self.order = epoch, torch.randperm(
                len(self.windows), generator=noise_generator(self.seed, epoch))
        noise = noise_generator(self.seed, step, slot)
        t = torch.rand((), generator=noise, dtype=torch.float32)
        if self.stratified:  # global_batch is no sample's slot
            strata = noise_generator(self.seed, step, self.global_batch)
            t = (torch.randperm(self.global_batch, generator=strata)[slot] + t) / self.global_batch
        hole = self.t_hole[1] - self.t_hole[0]
        t = t * (1 - hole)
        t = (t + hole * (t >= self.t_hole[0])).clamp(self.t_min, self.t_max)
        x0 = torch.from_numpy(self.windows[int(self.order[place])])                    # l
        maskable = maskable_tokens(x0, self.tokenizer)
        x_t, masked = corrupt(x0, t, self.tokenizer.mask_id, maskable, noise)          # l
        return {"x0": x0, "x_t": x_t, "masked": masked, "t": t}


# ------------------------------------------------------------------------- the paper's mixture

PAPER_MIXTURE = {  # Table 5, percent; hub names as in the paper's public code
    **{f"common-pile/{name}_filtered": share for name, share in {
        "stackexchange": 10.00, "libretexts": 1.67, "youtube": 22.50, "pubmed": 7.50,
        "cccc": 10.00, "project_gutenberg": 5.00, "arxiv_papers": 7.50, "news": 1.67, "doab": 15.00,
        "pressbooks": 1.67, "data_provenance_initiative": 8.33, "wikimedia": 8.33,
        "arxiv_abstracts": 3.33}.items()},
    "iohadrubin/wikitext-103-raw-v1": 2.50}


def hub_source(name):
    """A data set's rows, streamed."""
    try:
        import datasets
    except ImportError:
        raise UserError("--mixture needs the package datasets: pip install datasets") from None
    return datasets.load_dataset(name, split="train", streaming=True)


def build_mixture(out, tokenizer, tokens, open_source=hub_source, mixture=PAPER_MIXTURE):
    """The paper's corpus of `tokens` training tokens: a shard folder per source, then the whole.

    Documents are split 70/15/15 into train, valid and test. Called again after a kill it keeps the
    sources that are whole; `out` loads as one shard folder once all are. Returns its manifest.
    """
    out, total, made = Path(out), sum(mixture.values()), {}
    for stale in out.glob(".*.tmp"):
        shutil.rmtree(stale)
    for source, share in mixture.items():
        name, needed, counts = source.split("/")[-1], round(tokens * share / total), Counter()
        if not (out / name / "manifest.json").is_file():
            try:
                rows = progress(open_source(source), desc=name)
                texts = (clean(row["text"] or "", counts).strip() for row in rows)
                write_shards(filter(None, texts), out / name, tokenizer, counts,
                             {"train": 0.70, "valid": 0.15, "test": 0.15}, needed)
            except UserError:
                raise
            except Exception as error:  # the hub's packages and the network have many classes
                raise UserError(f"cannot stream {source} ({type(error).__name__}: {error}): run "
                                "the same command again, whole sources are kept") from error
        one = made[name] = json.loads((out / name / "manifest.json").read_text("utf-8"))
        if (one["fingerprint"], one["train_tokens"]) != (tokenizer.fingerprint, needed):
            raise UserError(f"{out / name} was made with another tokenizer or other --tokens: "
                            "choose another --out")
        got = one["splits"]["train"]["tokens"]
        log(f"{name}: {got:,} of {needed:,} training tokens"
            f"{', the source has no more' if got < needed else ''}")
    whole = {**one, "train_tokens": tokens, "mixture": mixture, "splits": {}}
    whole |= {k: sum(m[k] for m in made.values()) for k in ("invalid_utf8", "cut_documents")}
    for split in one["splits"]:
        parts = {n: m["splits"][split] for n, m in made.items()}
        whole["splits"][split] = {
            **{k: sum(p[k] for p in parts.values()) for k in ("tokens", "bytes", "documents")},
            "shards": [{**s, "file": f"{n}/{s['file']}"}
                       for n, p in parts.items() for s in p["shards"]]}
    write_json(out / "manifest.json", whole)
    return whole


# ---------------------------------------------------------------------------------------- main

def main(cfg):
    """Write shards, or show what a corpus, a window and its corruption look like."""
    tokenizer = make_tokenizer(cfg.tokenizer)
    banner("data.py", cfg)
    if cfg.t > 1 or cfg.mixture not in ("", "paper") or cfg.mixture and not cfg.out:
        raise UserError(f"--t {cfg.t} --mixture {cfg.mixture} --out '{cfg.out}': t is at most 1; "
                        "the one mixture is paper, and it needs --out, the folder to build")
    if cfg.out:
        counts = Counter()
        manifest = build_mixture(cfg.out, tokenizer, cfg.tokens) if cfg.mixture else write_shards(
            read_documents(cfg.text, counts), cfg.out, tokenizer, counts, overwrite=cfg.overwrite)
        for split, part in manifest["splits"].items():
            log(f"{split}: {part['documents']:,} documents, {part['bytes']:,} bytes, "
                f"{part['tokens']:,} tokens, {len(part['shards'])} shards")
        log(f"wrote {cfg.out}; next: python train.py --data {cfg.out}")
        return manifest
    corpus = load_corpus(cfg.text, tokenizer)
    windows = Windows(corpus, 128, tokenizer.pad_id)
    log(f"{' '.join(cfg.text)}: {corpus.n_docs:,} documents, {corpus.n_bytes:,} bytes, "
        f"{len(corpus.ids):,} tokens of {tokenizer.name}, {len(windows):,} windows of 128")
    x0 = torch.from_numpy(windows[0])
    x_t, masked = corrupt(x0, cfg.t, tokenizer.mask_id, maskable_tokens(x0, tokenizer),
                          noise_generator(cfg.seed))
    log(f"\nx0 of the first:\n  {tokenizer.decode(x0)}")
    log(f"x_t at t = {cfg.t}, {int(masked.sum())} masked:\n  {tokenizer.decode(x_t)}\n")
    log("pack your own: python data.py --text books/*.txt --out shards/")
    return {"documents": corpus.n_docs, "bytes": corpus.n_bytes, "tokens": len(corpus.ids)}


if __name__ == "__main__":
    run_cli(Config, main)
