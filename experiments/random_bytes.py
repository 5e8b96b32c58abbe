"""Another noise than masks: bytes become random bytes, so that the input does not show t.

Run:      not a script; study.py trains and scores on it.

A mask says of itself that it is noise, so a model can count masks and read t off its input. A
random byte does not. Here every byte is replaced with probability t by one drawn evenly from the
text's alphabet (it may be the same one), and the model is asked for the clean byte at every place:

    x_t,i = x_0,i with probability 1 - t, else uniform      loss: mean over i of -log p(x_0,i | x_t)

This is the uniform process of D3PM (arXiv 2107.03006), which arXiv 2412.10193 trains as a model of
text. What is reported is this cross-entropy, in nats per byte, not a bound on the likelihood.

Symbols:  alphabet  the ids that occur in the training text     (a,)
          masked    here the places that are scored: all but special tokens    (b, l)
Differs from the paper: it has masks alone (eq. 12).
"""
import dataclasses

import numpy as np
import torch

from data import maskable_tokens, noise_generator
from evaluate import HeldOut


def alphabet_of(corpus):
    """The ids of the bytes that occur in a byte corpus, (a,) int64."""
    ids = np.unique(np.asarray(corpus.ids[:]).astype(np.int64))
    return torch.from_numpy(ids[ids < 256])


def replace(x0, chosen, alphabet, generator):
    """x0 (..., l) with the chosen places drawn anew from the alphabet."""
    drawn = torch.randint(len(alphabet), x0.shape, generator=generator)
    return torch.where(chosen, alphabet[drawn], x0)


class RandomBytes(torch.utils.data.Dataset):
    """A DiffusionDataset with the same windows and t, where what it masks becomes random."""

    def __init__(self, dataset, alphabet):
        self.dataset = dataset
        self.alphabet = alphabet

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, k):
        item = self.dataset[k]
        step, slot = divmod(k, self.dataset.global_batch)
        noise = noise_generator(self.dataset.seed, step, slot, 1)  # not that of t and the mask
        x_t = replace(item["x0"], item["masked"], self.alphabet, noise)
        scored = maskable_tokens(item["x0"], self.dataset.tokenizer)
        return {**item, "x_t": x_t, "masked": scored}


def weigh_all(cfg, item, tokenizer):
    """As train.weigh: every scored byte counts alike, so that the loss is their mean."""
    return item["masked"].float(), item["masked"].sum()


@dataclasses.dataclass(frozen=True)
class RandomByteTexts(HeldOut):
    """Texts whose draws have random bytes: "elbo" of their metrics is the mean cross-entropy."""
    alphabet: torch.Tensor

    def draw(self, name, seed):
        draws = super().draw(name, seed)
        noise = noise_generator(seed, self.windows, 1)
        x_t = replace(draws.x0, draws.masked, self.alphabet, noise)
        scored = maskable_tokens(draws.x0, self.tokenizer)
        return dataclasses.replace(draws, x_t=x_t, masked=scored, w=scored.float())
