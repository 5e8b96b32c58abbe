"""The paper's training corpus: fourteen sources from the hub, mixed as in Table 5 (section C.1).

Run:      python -m experiments.mixture    (some seconds: the shares alone, nothing is fetched)
          python -m experiments.mixture --tokens 3.54e9 --out corpus/ --vocab bert-base-uncased
                                           (needs a network and `pip install datasets`)
Last line: "build it: python -m experiments.mixture --out corpus/", or with --out "wrote corpus/;
          next: python train.py --data corpus/"
Symbols:  none.

Each source becomes a shard folder of its own, so that a build goes on where it was stopped: the
same command again keeps the sources that are whole. The folder --out is a corpus once all are.

Differs from the paper: Table 5's percentages sum to 105.00, so we normalise, as its caption says. A
source smaller than its share gives all it has, once, and is reported. Documents go to train, valid
and test by their hash, 70, 15 and 15 %. Built from local sources of the hub's layout only: the
hub's own could not be reached.
"""
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common import UserError, banner, log, markdown, progress, read_json, run_cli, write_json
from data import log_manifest, write_shards
from text import clean, make_tokenizer

PAPER_MIXTURE = {  # Table 5, percent; hub names as in the paper's public code
    "common-pile/stackexchange_filtered": 10.00,
    "common-pile/libretexts_filtered": 1.67,
    "common-pile/youtube_filtered": 22.50,
    "common-pile/pubmed_filtered": 7.50,
    "common-pile/cccc_filtered": 10.00,
    "common-pile/project_gutenberg_filtered": 5.00,
    "common-pile/arxiv_papers_filtered": 7.50,
    "common-pile/news_filtered": 1.67,
    "common-pile/doab_filtered": 15.00,
    "common-pile/pressbooks_filtered": 1.67,
    "common-pile/data_provenance_initiative_filtered": 8.33,
    "common-pile/wikimedia_filtered": 8.33,
    "common-pile/arxiv_abstracts_filtered": 3.33,
    "iohadrubin/wikitext-103-raw-v1": 2.50}
MIXTURE_SPLITS = {"train": 0.70, "valid": 0.15, "test": 0.15}


@dataclass(frozen=True)
class Config:
    """Without --out: the tokens that each source gives. With it: build the corpus."""
    OLD_FLAGS: ClassVar = {"--tokenizer": "--vocab"}
    out: str = ""                         # folder to build, or to go on with
    tokens: float = 3.54e9                # training tokens in all
    vocab: str = "bert-base-uncased"      # "bytes", "bert-base-uncased" or a vocab.txt


def hub_source(name):
    """A data set's rows, streamed."""
    try:
        import datasets
    except ImportError:
        raise UserError("the mixture needs the package datasets: pip install datasets") from None
    return datasets.load_dataset(name, split="train", streaming=True)


def tokens_of(mixture, tokens):
    """{source: percent} -> {source: its share of `tokens` training tokens}."""
    total = sum(mixture.values())
    return {source: round(tokens * share / total) for source, share in mixture.items()}


def build_mixture(out, tokenizer, tokens, open_source=hub_source, mixture=PAPER_MIXTURE):
    """The paper's corpus of `tokens` training tokens: a shard folder per source, then the whole.

    open_source(name) gives the rows of a source, dicts with a "text". Called again after a kill it
    keeps the sources that are whole; `out` loads as one shard folder once all are. Returns its
    manifest. Raises UserError.
    """
    out = Path(out)
    made = {}
    for source, needed in tokens_of(mixture, tokens).items():
        name = source.split("/")[-1]
        folder = out / name
        if not (folder / "manifest.json").is_file():
            build_source(source, folder, tokenizer, needed, open_source)
        manifest = read_json(folder / "manifest.json", "fingerprint", "train_tokens", "splits")
        if (manifest["fingerprint"], manifest["train_tokens"]) != (tokenizer.fingerprint, needed):
            raise UserError(f"{folder} was made with another tokenizer or other --tokens: choose "
                            "another --out")
        got = manifest["splits"]["train"]["tokens"]
        all_it_has = ", the source has no more" if got < needed else ""
        log(f"{name}: {got:,} of {needed:,} training tokens{all_it_has}")
        made[name] = manifest
    whole = {"tokenizer": tokenizer.name, "fingerprint": tokenizer.fingerprint,
             "vocab_size": tokenizer.vocab_size, "train_tokens": tokens,
             "invalid_utf8": sum(m["invalid_utf8"] for m in made.values()),
             "cut_documents": sum(m["cut_documents"] for m in made.values()),
             "splits": {split: joined(made, split) for split in MIXTURE_SPLITS},
             "mixture": mixture}
    write_json(out / "manifest.json", whole)
    return whole


def build_source(source, folder, tokenizer, needed, open_source):
    """Stream one source into a shard folder, until it has given `needed` training tokens."""
    for stale in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a build that was killed
        shutil.rmtree(stale)
    counts = Counter()

    def texts():
        for row in progress(open_source(source), desc=folder.name):
            text = clean(row["text"] or "", counts).strip()
            if text:
                yield text

    try:
        write_shards(texts(), folder, tokenizer, counts, MIXTURE_SPLITS, needed)
    except UserError:
        raise
    except Exception as error:  # the hub's packages and the network have many classes
        raise UserError(f"cannot stream {source} ({type(error).__name__}: {error}): run the same "
                        "command again, whole sources are kept") from error


def joined(made, split):
    """What the whole manifest says of a split: the sums and the shards of {name: manifest}."""
    entry = {"tokens": 0, "bytes": 0, "documents": 0, "shards": []}
    for name, manifest in made.items():
        part = manifest["splits"][split]
        for key in ("tokens", "bytes", "documents"):
            entry[key] += part[key]
        for shard in part["shards"]:
            entry["shards"].append({**shard, "file": f"{name}/{shard['file']}"})
    return entry


def main(cfg):
    """Build the corpus, or show what it is made of."""
    if cfg.out:
        tokenizer = make_tokenizer(cfg.vocab)
        banner("mixture.py", cfg)
        manifest = build_mixture(cfg.out, tokenizer, cfg.tokens)
        log_manifest(manifest, cfg.out)
        return manifest
    banner("mixture.py", cfg)
    shares = tokens_of(PAPER_MIXTURE, cfg.tokens)
    rows = [(source, f"{PAPER_MIXTURE[source]:.2f}", f"{n:,}") for source, n in shares.items()]
    log(markdown(("source", "% in Table 5", "training tokens"), *rows))
    log("\nbuild it: python -m experiments.mixture --out corpus/")
    return shares


if __name__ == "__main__":
    run_cli(Config, main)
