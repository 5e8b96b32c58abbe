"""Masked-language-model pretraining of a small Hydra-BERT: how the shipped backbone was made (3.1).

Run:      python -m experiments.pretrain      (a tiny model on the embedded corpus, 1 minute)
          python -m experiments.pretrain --preset small --data ... --valid NAME=PATH,...
          python -m experiments.publish runs/pretrain_small --name small
Last line: "held-out: N.NN nats per masked byte (trigram N.NN); weights: runs/..."

Symbols:  mask_rate   share of the bytes that become [MASK]; 0.3 as for the released backbone, or
                      with --uniform-t another share for each window, as in masked diffusion
          trigram     p(x_i | x_{i-1}, x_{i+1}) counted on the training text, the yardstick
Differs from the paper: the released Hydra-BERT has 112 M parameters and WordPiece tokens, and was
          pretrained on C4 at length 128. Here 1 M parameters read bytes at length 256, and every
          masked byte becomes [MASK], as in the diffusion to come.
"""
import dataclasses
import time
from typing import ClassVar, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader

import common
from cart import corrupt, masked_cross_entropy, uniform_nats
from checkpoint import (append_metrics, check_free, open_run, read_metrics, restore_state,
                        run_folder, save_state, save_tensors, unlock)
from data import (DiffusionDataset, Windows, held_out_split, load_corpus, maskable_tokens,
                  named_sources, noise_generator)
from hydra_ssm import HydraBert, HydraConfig
from text import ByteTokenizer
from train import check_finite, learning_rate


@dataclasses.dataclass(frozen=True)
class Config:
    """The defaults are a tiny run; --preset small is the shipped backbone's."""
    OLD_FLAGS: ClassVar = {"--text": "--data"}
    preset: Literal["tiny", "small"] = "tiny"   # from Python a label: see common.from_preset
    data: tuple[str, ...] = ("embedded",)       # training text; 5 % of its documents are held out
    valid: tuple[str, ...] = ("held-out=embedded",)  # NAME=PATH[,PATH...]; of --data: the 5 %
    name: str = ""                              # run folder under runs/; default pretrain_<preset>
    steps: int = 400
    batch: int = 8                              # sequences per step
    seqlen: int = 256                           # bytes
    mask_rate: float = 0.3
    uniform_t: bool = False                     # train at t ~ U(0, 1), score at mask_rate
    lr: float = 2e-3                            # peak; linear warm-up over 5 %, cosine to 2 %
    weight_decay: float = 0.01                  # of matrices, not of norms, biases or A_log
    d_model: int = 64
    n_layer: int = 4
    d_state: int = 16
    headdim: int = 32
    bf16: bool = False                          # autocast matrix products to bfloat16
    compile: bool = False                       # torch.compile each layer (needs a C++ compiler)
    eval_windows: int = 500                     # held-out windows per set at the end
    save_every: int = 500
    resume: bool = False                        # continue the run, or start it
    overwrite: bool = False                     # replace it
    seed: int = 42


PRESETS = {
    "tiny": {},
    "small": dict(d_model=128, n_layer=8, steps=9_000, bf16=True, compile=True),
}
FREE = ("resume", "overwrite", "save_every", "compile")  # what a resumed run may change


def trigram_nats(ids, x0, masked, vocab_size):
    """Cross-entropy (nats per masked byte) of p(x_i | x_{i-1}, x_{i+1}) counted on `ids`.

    It sees the true neighbours, also where the model sees a [MASK]. Counts c(l, x, r) are smoothed
    towards q, the mean of p(x | l) and p(x | r), by (c + k q) / (c(l, r) + k), and k is the best of
    seven on the scored text itself, which favours the trigram. Past a window's ends it sees [PAD].
    """
    v = vocab_size
    ids = np.asarray(ids).astype(np.int64)
    triples = (ids[:-2] * v + ids[1:-1]) * v + ids[2:]
    counts = np.bincount(triples, minlength=v ** 3).reshape(v, v, v)       # (l, x, r)
    x = np.pad(x0.numpy(), ((0, 0), (1, 1)), constant_values=ByteTokenizer.pad_id)
    i, j = masked.numpy().nonzero()
    left = x[i, j]
    true = x[i, j + 1]
    right = x[i, j + 2]
    after = counts.sum(2) + 0.5                                            # (l, x)
    before = counts.sum(0) + 0.5                                           # (x, r)
    given_left = after[left, true] / after[left].sum(-1)
    given_right = before[true, right] / before[:, right].sum(0)
    q = (given_left + given_right) / 2
    seen = counts[left, true, right]
    total = counts.sum(1)[left, right]
    found = []
    for k in (0.3, 1, 3, 10, 30, 100, 300):
        found.append(float(-np.log((seen + k * q) / (total + k)).mean()))
    return min(found)


def held_out(windows, n, mask_rate, tokenizer, seed):
    """(x0, x_t, masked), n l each: evenly spaced windows under masks that never change."""
    x0 = windows.evenly(n)                                                 # n l
    t = torch.full((len(x0),), mask_rate)
    maskable = maskable_tokens(x0, tokenizer)
    return x0, *corrupt(x0, t, tokenizer.mask_id, maskable, noise_generator(seed, 0))


@torch.no_grad()
def model_nats(model, x0, x_t, masked, pad_id, batch=32):
    """Mean cross-entropy of the masked bytes, nats."""
    ce = [masked_cross_entropy(model.hidden(t, None, c != pad_id)[m], c[m], model.head)
          for c, t, m in zip(x0.split(batch), x_t.split(batch), masked.split(batch))]
    return torch.cat(ce).mean().item()


def train_step(model, optimizer, item, pad_id, bf16, step):
    """One step on one batch of DiffusionDataset -> its loss, nats per masked byte."""
    masked, x0 = item["masked"], item["x0"]                                # b l
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = model.hidden(item["x_t"], None, x0 != pad_id)             # b l d
        ce = masked_cross_entropy(hidden[masked], x0[masked], model.head)
    loss = ce.sum() / max(1, len(ce))  # 0 where nothing is masked
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    check_finite(step + 1, loss, norm, "lower --lr and start again")
    optimizer.step()
    return loss.item()


def train_steps(cfg, model, optimizer, dataset, sets, folder, start):
    """All steps from `start` -> the number done, which is less where a signal asked to stop."""
    pad_id = ByteTokenizer.pad_id
    remaining = range(start * cfg.batch, cfg.steps * cfg.batch)
    batches = DataLoader(dataset, cfg.batch, sampler=remaining)
    began = time.time()
    mean_loss = None
    with common.stop_signals() as caught:
        for step, item in enumerate(common.progress(batches, desc="pretrain"), start):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, cfg.steps, max(1, cfg.steps // 20), cfg.lr, 0.02)
            loss = train_step(model, optimizer, item, pad_id, cfg.bf16, step)
            mean_loss = loss if mean_loss is None else 0.98 * mean_loss + 0.02 * loss
            done = step + 1
            if done % 100 == 0:
                rate = (done - start) * cfg.batch * cfg.seqlen / (time.time() - began)
                append_metrics(folder, step=done, loss=mean_loss, bytes_per_second=rate)
                common.log(f"step {done:6d}  loss {mean_loss:.4f} nats  {rate:,.0f} bytes/s")
            stop = bool(caught) and done < cfg.steps
            if done % cfg.save_every == 0 or done == cfg.steps or stop:
                save_state(folder / "last.pt", step=done, model=model.state_dict(),
                           optimizer=optimizer.state_dict())
                few = {}
                for name, (x0, x_t, masked) in sets.items():
                    few[name] = model_nats(model, x0[:64], x_t[:64], masked[:64], pad_id)
                append_metrics(folder, step=done, valid=few)
                common.log("  held out: " + "  ".join(f"{k} {v:.4f}" for k, v in few.items()))
            if stop:
                return done
    return max(start, cfg.steps)


def load_sets(cfg, tokenizer):
    """{name: (x0, x_t, masked)} of the held-out texts, and {name: fingerprint of the text}."""
    sets, fingerprints = {}, {}
    for name, paths in named_sources(cfg.valid).items():
        valid = load_corpus(paths, tokenizer, held_out_split(paths, cfg.data))
        windows = Windows(valid, cfg.seqlen, tokenizer.pad_id)
        sets[name] = held_out(windows, cfg.eval_windows, cfg.mask_rate, tokenizer, cfg.seed)
        fingerprints[f"valid {name}"] = valid.fingerprint
    return sets, fingerprints


def make_optimizer(model, cfg):
    """AdamW with weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.98))


def score_backbone(cfg, model, corpus, sets, seconds):
    """What the run is judged by: nats per masked byte of each held-out text, beside a trigram."""
    result = {"train_bytes": corpus.n_bytes, "seconds": seconds,
              "parameters": sum(p.numel() for p in model.parameters()),
              "uniform": uniform_nats(256), "held_out": {}}
    for name, (x0, x_t, masked) in sets.items():
        result["held_out"][name] = {
            "model": model_nats(model, x0, x_t, masked, ByteTokenizer.pad_id),
            "trigram": trigram_nats(corpus.ids, x0, masked, ByteTokenizer.vocab_size),
            "masked": int(masked.sum())}
    return result


def check(cfg):
    """Refuse, before any work, what could only fail later or mean something else."""
    if not 0 < cfg.mask_rate <= 1:
        raise common.UserError(f"--mask-rate: got {cfg.mask_rate}, need a share above 0, at most 1")
    HydraConfig(d_model=cfg.d_model, headdim=cfg.headdim)


def main(cfg):
    check(cfg)
    cfg = dataclasses.replace(cfg, name=cfg.name or f"pretrain_{cfg.preset}")
    folder = run_folder(cfg.name)
    check_free(folder, cfg)
    try:
        return run(cfg, folder)
    finally:
        unlock(folder)


def run(cfg, folder):
    """Pretrain, score and save in the run folder."""
    torch.manual_seed(cfg.seed)
    tokenizer = ByteTokenizer()
    model = HydraBert(HydraConfig(tokenizer.vocab_size, cfg.d_model, cfg.n_layer, cfg.d_state,
                                  headdim=cfg.headdim, chunk_size=32))
    env = common.banner("pretrain.py", cfg, "cpu", model)
    corpus = load_corpus(cfg.data, tokenizer, "train")
    sets, fingerprints = load_sets(cfg, tokenizer)
    inputs = {"data": corpus.fingerprint, **fingerprints}
    goes_on = open_run(folder, cfg, inputs, env, FREE)
    windows = Windows(corpus, cfg.seqlen, tokenizer.pad_id)
    lowest, highest = (1e-3, 1.0) if cfg.uniform_t else (cfg.mask_rate, cfg.mask_rate)
    dataset = DiffusionDataset(windows, tokenizer, cfg.batch, cfg.steps, cfg.seed,
                               t_min=lowest, t_max=highest)
    common.log(f"{corpus.n_docs:,} documents, {corpus.n_bytes:,} bytes; "
               f"{cfg.steps * cfg.batch * cfg.seqlen / len(corpus.ids):.2f} epochs")

    optimizer = make_optimizer(model, cfg)
    start = 0
    if goes_on:
        state = restore_state(folder / "last.pt", model=model, optimizer=optimizer)
        start = state["step"]
        common.log(f"resumed at step {start}")
    read_metrics(folder, up_to_step=start)
    if cfg.compile:
        for layer in model.layers:  # one graph serves all layers
            layer.compile()

    done = train_steps(cfg, model, optimizer, dataset, sets, folder, start)
    if done < cfg.steps:
        common.log(f"stopped at step {done} of {cfg.steps} and saved; continue with --resume")
        return {"step": done}
    result = score_backbone(cfg, model, corpus, sets, time.time() - env["began"])
    save_backbone(folder / "backbone.safetensors", model)
    common.save_result(folder / "result.json", result, cfg, env)
    for name, row in result["held_out"].items():
        common.log(f"{name}: {row['model']:.3f} nats per masked byte (trigram "
                   f"{row['trigram']:.3f}); weights: runs/{cfg.name}/backbone.safetensors")
    return result


def save_backbone(path, model):
    """The weights in float32, readable by `load_backbone`."""
    tensors = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    save_tensors(path, tensors)


if __name__ == "__main__":
    common.run_cli(Config, main, PRESETS)
