"""Loading weights: every layout people have, every fault named, and no pickled code executed."""
import collections
import contextlib
import hashlib
import http.server
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
from checkpoint import load_backbone
from common import UserError
from helpers import FIXTURES, PREFIX, ROOT, released_state, write_released_layout
from safetensors.torch import save_file

GOLDEN = FIXTURES / "hydra_bert_small.pt"
SIZES = dict(vocab_size=20, d_model=8, n_layer=3, d_state=3, d_conv=7, expand=2, headdim=4,
             ngroups=1)
DECODER = "model.cls.predictions.decoder.weight"
WORDS = "model.bert.embeddings.word_embeddings.weight"
OWN_NAMES = ((r"^bert\.embeddings\.LayerNorm", "embedding_norm"), (r"^bert\.embeddings\.", ""),
             (r"^bert\.encoder\.layer\.(\d+)\.layer", r"layers.\1"),
             ("decoder.bias", "decoder_bias"), ("transform.dense", "head_dense"),
             ("transform.LayerNorm", "head_norm"), (r"^cls\.predictions\.", ""))
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]])


def config_of(**changes):
    return types.SimpleNamespace(**SIZES | changes)


def logits_of(path, **arguments):
    return load_backbone(path, **arguments)(IDS)


def load_of(path, state, **arguments):
    torch.save(state, path)
    return load_backbone(path, **arguments)


def refusal(source, **arguments):
    """The message of the UserError that loading ends with, always one line."""
    with pytest.raises(UserError) as caught:
        load_backbone(source, **arguments)
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 600
    return message


def names_tensor(message, key):
    """The message carries the key, as released or as the model itself spells it."""
    own = key.removeprefix("model.")
    for released, ours in OWN_NAMES:
        own = re.sub(released, ours, own)
    return key.removeprefix("model.") in message or own in message


@pytest.fixture(scope="module")
def expected():
    return logits_of(GOLDEN)


@pytest.fixture(scope="module")
def golden_state():
    """The fixture's tensors, read past the loader: stand-ins by hand for the classes it names."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(GOLDEN)
    blank = [(type("Blank", (), {"__init__": lambda self, *args: None,
                                 "__setstate__": lambda self, state: None}), n) for n in names]
    with torch.serialization.safe_globals(blank):
        return dict(torch.load(GOLDEN, weights_only=True)["state"]["model"])


# ---------------------------------------------------------------------------------- what must load

def test_the_whole_config_is_read_off_the_golden_file():
    model = load_backbone(str(GOLDEN), vocab_size=90)
    want = json.loads((FIXTURES / "hydra_bert_small.json").read_text())
    for name in ("vocab_size", "d_model", "n_layer", "d_state", "headdim", "d_conv", "expand"):
        assert getattr(model.config, name) == want[name], name
    assert model.config.ngroups == 1 and model.config.nheads == 8
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("changes", (
    {}, {"n_layer": 12}, {"headdim": 16, "d_state": 5}, {"headdim": 1, "expand": 1, "d_conv": 3},
    {"expand": 3, "headdim": 6, "vocab_size": 19}, {"d_model": 20, "headdim": 40, "d_state": 1}))
def test_any_config_is_read_off_the_shapes(tmp_path, changes):
    cfg = config_of(**changes)
    write_released_layout(tmp_path / "w.pt", cfg)
    model = load_backbone(tmp_path / "w.pt", vocab_size=cfg.vocab_size)
    for name in SIZES:
        assert getattr(model.config, name) == getattr(cfg, name), name


@pytest.mark.parametrize("prefix", ("", "model.", "module.", "_orig_mod.", "module.model.",
                                    "_orig_mod.module.model.", "model._orig_mod.module."))
@pytest.mark.parametrize("suffix", (".pt", ".safetensors"))
def test_a_plain_state_dict_loads_under_prefixes(tmp_path, golden_state, expected, prefix, suffix):
    state = {prefix + k.removeprefix("model."): v.clone() for k, v in golden_state.items()}
    path = tmp_path / f"weights{suffix}"
    (torch.save if suffix == ".pt" else save_file)(state, path)
    assert torch.equal(logits_of(path), expected)


@pytest.mark.parametrize("prefix", ("", "module.", "_orig_mod."))
def test_the_models_own_state_dict_comes_back(tmp_path, expected, prefix):
    state = {prefix + k: v.clone() for k, v in load_backbone(GOLDEN).state_dict().items()}
    save_file(state, tmp_path / "own.safetensors")
    assert torch.equal(logits_of(tmp_path / "own.safetensors"), expected)


def test_a_tied_decoder_may_be_absent_but_not_different(tmp_path, golden_state, expected):
    absent = {k: v for k, v in golden_state.items() if k != DECODER}
    assert torch.equal(load_of(tmp_path / "absent.pt", absent)(IDS), expected)
    untied = golden_state | {DECODER: golden_state[DECODER] + 1}
    torch.save(untied, tmp_path / "untied.pt")
    assert "decoder.weight" in refusal(tmp_path / "untied.pt")


def test_padded_rows_are_kept_or_cut_as_asked(tmp_path, golden_state, expected):
    assert logits_of(GOLDEN).shape[-1] == 96, "a number of rows that means nothing is kept"
    cut = logits_of(GOLDEN, vocab_size=90)
    assert cut.shape[-1] == 90 and torch.allclose(cut, expected[..., :90], atol=1e-6)
    unpadded = {k: v[:90].clone() if len(v) == 96 else v for k, v in golden_state.items()}
    assert torch.equal(load_of(tmp_path / "unpadded.pt", unpadded)(IDS), cut)
    assert torch.equal(logits_of(tmp_path / "unpadded.pt", vocab_size=90), cut)
    message = refusal(GOLDEN, vocab_size=97)
    assert "96" in message and "97" in message


@pytest.mark.parametrize("rows, kept", ((30528, 30522), (30522, 30522), (30520, 30520)))
def test_only_the_released_row_count_is_cut_by_itself(tmp_path, rows, kept):
    cfg = config_of(d_model=2, headdim=2, n_layer=1)
    write_released_layout(tmp_path / "w.pt", cfg, rows=rows)
    model = load_backbone(tmp_path / "w.pt")
    assert model.config.vocab_size == kept and model(IDS).shape[-1] == kept


@pytest.mark.parametrize("stored", (torch.float16, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("asked", (torch.float32, torch.bfloat16, torch.float64))
def test_the_dtype_is_the_one_asked_for(tmp_path, golden_state, stored, asked):
    state = {k: v.to(stored) for k, v in golden_state.items()}
    model = load_of(tmp_path / "w.pt", state, dtype=asked)
    logits = model(IDS)
    assert logits.dtype == asked and torch.isfinite(logits).all()
    word = model.word_embeddings.weight
    assert torch.equal(word, golden_state[WORDS].to(stored).to(asked))


def test_the_model_does_not_hang_on_the_file(tmp_path, expected):
    """The file may be memory-mapped while loading; afterwards nothing it does reaches the model."""
    path = tmp_path / "w.pt"
    path.write_bytes(GOLDEN.read_bytes())
    model = load_backbone(path)
    np.memmap(path, mode="r+")[:] = 0
    assert torch.equal(model(IDS), expected)


# ----------------------------------------------------------------------------- what must be refused

def test_each_missing_tensor_is_named(tmp_path, golden_state):
    for key in golden_state.keys() - {DECODER}:
        torch.save({k: v for k, v in golden_state.items() if k != key}, tmp_path / "w.pt")
        message = refusal(tmp_path / "w.pt")
        assert names_tensor(message, key), (key, message)


def test_a_missing_layer_is_named(tmp_path, golden_state):
    left = {k: v for k, v in golden_state.items() if not k.startswith(f"{PREFIX}.1.")}
    torch.save(left, tmp_path / "w.pt")
    assert re.search(r"layers?\.1\.", refusal(tmp_path / "w.pt"))


@pytest.mark.parametrize("extra", ("model.bert.pooler.dense.weight", "optimizer_scale",
                                   f"{PREFIX}.0.layer.mixer.out_proj.bias"))
def test_an_extra_tensor_is_named(tmp_path, golden_state, extra):
    torch.save(golden_state | {extra: torch.zeros(64)}, tmp_path / "w.pt")
    assert ".".join(extra.split(".")[-2:]) in refusal(tmp_path / "w.pt")


def test_two_tensors_for_one_parameter_are_refused(tmp_path, golden_state):
    key = f"{PREFIX}.1.layer.mixer.D"
    torch.save(golden_state | {f"module.{key}": golden_state[key] + 1}, tmp_path / "w.pt")
    assert names_tensor(refusal(tmp_path / "w.pt"), key)


def test_each_misshapen_tensor_is_named(tmp_path):
    """Sizes are read off the embeddings and layer 0; there a fault may show at a neighbour."""
    state = released_state(config_of(n_layer=2))
    for key, tensor in state.items():
        for wrong in (tensor[..., :-1].clone(), tensor[None].clone(), tensor.flatten()[0].clone(),
                      tensor[:0].clone(), torch.cat((tensor, tensor))):
            torch.save(state | {key: wrong}, tmp_path / f"{key}.pt")
            message = refusal(tmp_path / f"{key}.pt").split(".pt: ")[1]
            sizing = "embeddings" in key or f"{PREFIX}.0." in key
            assert sizing or names_tensor(message, key), (key, tuple(wrong.shape), message)


def test_each_non_finite_tensor_is_named(tmp_path, golden_state):
    for key, tensor in golden_state.items():
        for value in (float("nan"), float("inf")):
            wrong = tensor.clone()
            wrong.view(-1)[3] = value
            state = golden_state | {key: wrong}
            if key in (WORDS, DECODER):
                state |= {WORDS: wrong, DECODER: wrong.clone()}
            torch.save(state, tmp_path / "w.pt")
            message = refusal(tmp_path / "w.pt")
            assert names_tensor(message, key) or "word_embeddings" in message, (key, message)
            assert re.search("nan|inf|finite", message.lower()), message


def test_a_truncated_file_is_refused_at_any_length(tmp_path, golden_state):
    save_file({k: v.clone() for k, v in golden_state.items()}, tmp_path / "whole.safetensors")
    for source in (GOLDEN, tmp_path / "whole.safetensors"):
        content = source.read_bytes()
        for size in (1, 7, 8, 9, 100, len(content) // 2, len(content) - 1):
            path = tmp_path / f"cut{source.suffix}"
            path.write_bytes(content[:size])
            assert path.name in refusal(path)


@pytest.mark.parametrize("name", ("weights.pt", "weights.safetensors"))
@pytest.mark.parametrize("content", (
    b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"<html>404</html>",
    b"PK\x03\x04" + b"\0" * 64, (2 ** 40).to_bytes(8, "little") + b"{}" * 9))
def test_a_file_of_something_else_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert name in refusal(tmp_path / name)


@pytest.mark.parametrize("content", (
    torch.zeros(3), [torch.zeros(3)], {}, {"epoch": 3}, {"state": 1}, {"state": {"model": {}}},
    {"state": {"model": [1]}}, 7, None))
def test_a_torch_file_of_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    assert "w.pt" in refusal(tmp_path / "w.pt")


def test_a_path_that_is_not_a_file_is_refused(tmp_path):
    assert "absent.pt" in refusal(tmp_path / "absent.pt")
    assert str(tmp_path) in refusal(tmp_path)


# --------------------------------------------------------------------------------- planted pickles

def write_marker(path):
    path.touch()


class Plant:
    """Pickles as a call that touches `marker`."""

    def __init__(self, way, marker):
        self.way, self.marker = way, str(marker)

    def __reduce__(self):
        source = f"open({self.marker!r}, 'w').close()"
        return {"system": (os.system, (f"touch '{self.marker}'",)), "exec": (exec, (source,)),
                "eval": (eval, (source,)), "open": (open, (self.marker, "w")),
                "popen": (subprocess.run, (["touch", self.marker],)),
                "own": (write_marker, (type(ROOT)(self.marker),))}[self.way]


@pytest.mark.parametrize("place", ("beside", "inside", "instead"))
@pytest.mark.parametrize("way", ("system", "exec", "eval", "open", "popen", "own"))
def test_a_planted_pickle_executes_nothing(tmp_path, golden_state, expected, way, place):
    marker = tmp_path / "executed"
    plant = Plant(way, marker)
    content = {"beside": {"state": {"model": golden_state, "timestamp": plant}, "rng": plant},
               "inside": {"state": {"model": golden_state | {"planted": plant}}},
               "instead": plant}[place]
    torch.save(content, tmp_path / "planted.pt")
    with contextlib.suppress(UserError):
        assert torch.equal(logits_of(tmp_path / "planted.pt"), expected)
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(content))
    for name in ("old.pt", "raw.pt"):
        refusal(tmp_path / name)
    assert not marker.exists(), "pickled code was executed"
    with contextlib.suppress(Exception):  # the plants are live: plain torch runs them
        torch.load(tmp_path / "planted.pt", weights_only=False)
    assert marker.exists()


def test_objects_of_absent_packages_do_not_hinder(tmp_path):
    cfg = config_of()
    state = write_released_layout(tmp_path / "composer.pt", cfg)
    assert "composer" not in sys.modules
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "composer.pt")
    assert "composer.core.time.Timestamp" in unsafe and any("numpy" in name for name in unsafe)
    plain = load_of(tmp_path / "plain.pt", state)
    assert torch.equal(logits_of(tmp_path / "composer.pt"), plain(IDS))


class Tags(dict):
    """A dict of somebody's package."""


class Steps(list):
    """A list of somebody's package."""


def test_subclasses_of_dict_and_list_beside_the_weights_do_not_hinder(tmp_path, golden_state,
                                                                      expected):
    """As the authors' Lightning files hold them: nothing of theirs is imported or called."""
    others = {"defaults": collections.defaultdict(list, lr=[1e-3]), "tags": Tags(a=1),
              "steps": Steps([1, 2]), "order": collections.OrderedDict(b=2), "set": {3, 4},
              "counter": collections.Counter("abca"), "kind": Tags, "path": tmp_path}
    content = {"state": {"model": golden_state, **others}, **others}
    torch.save(content, tmp_path / "w.pt")
    assert torch.equal(logits_of(tmp_path / "w.pt"), expected)
    torch.save(Tags(golden_state), tmp_path / "own.pt")
    assert torch.equal(logits_of(tmp_path / "own.pt"), expected)


def test_a_file_of_an_old_torch_or_a_program_is_named_as_what_it_is(tmp_path, golden_state):
    torch.save(golden_state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "before version 1.6" in refusal(tmp_path / "old.pt")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "program.pt")
    assert "TorchScript" in refusal(tmp_path / "program.pt")


# ------------------------------------------------------------------------------------------ the hub

DRIVER = """
import json, os, sys, time
import torch
import checkpoint
time.sleep = lambda seconds: None           # the library waits 23 s between its tries to connect
answers = []
for case in json.loads(sys.argv[1]):
    checkpoint.HUB_FILES["goombalab/hydra"] = checkpoint.HubFile(
        case["revision"], "hydra_bert_23layers.pt", case["size"], case["sha256"])
    try:
        logits = checkpoint.load_backbone("goombalab/hydra")(torch.tensor([case["ids"]]))
        answers.append(["logits", logits.double().sum().item()])
    except checkpoint.common.UserError as error:
        answers.append(["UserError", str(error)])
        path = str(error).split(": ")[0]
        if os.path.lexists(path):           # does what the message says: delete and try again
            os.unlink(path)
print("ANSWERS" + json.dumps(answers))
"""
GOOD, BAD, SHORT, ABSENT = ("%040x" % i for i in (1, 2, 3, 4))


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub needs of a server: HEAD and GET of .../resolve/<revision>/<file>."""
    protocol_version = "HTTP/1.1"
    requests = []

    def answer(self):
        url = r"/goombalab/hydra/resolve/([0-9a-f]{40})/hydra_bert_23layers\.pt"
        match = re.fullmatch(url, self.path)
        revision = match and match[1]
        Hub.requests.append((self.command, revision))
        content = GOLDEN.read_bytes()
        if revision == BAD and Hub.requests.count(("GET", BAD)) <= 1:  # damaged the first time
            content = content[:-5000] + bytes(5000)
        if revision == SHORT:
            content = content[:-5000]
        self.send_response(200 if revision in (GOOD, BAD, SHORT) else 404)
        if revision not in (GOOD, BAD, SHORT):
            content = b""
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.send_header("X-Repo-Commit", revision or "")
        self.send_header("ETag", f'"{revision}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET = answer

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def ask_hub(cases, home, **environment):
    """What load_backbone("goombalab/hydra") answers for each revision, in a process of its own:
    the hub's library reads its environment on import."""
    content = GOLDEN.read_bytes()
    wanted = [{"revision": r, "size": len(content), "sha256": hashlib.sha256(content).hexdigest(),
               "ids": IDS[0].tolist()} for r in cases]
    clean = {k: v for k, v in os.environ.items()
             if not k.lower().endswith("_proxy") and not k.startswith(("HF_", "HUGGING"))}
    clean |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", DRIVER, json.dumps(wanted)], capture_output=True,
                         text=True, cwd=home, timeout=120, env=clean | environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.split("ANSWERS")[1])


def assert_says_what_to_do(answer):
    kind, message = answer
    assert kind == "UserError" and "\n" not in message
    assert "path" in message and "--weights" in message and "HF_ENDPOINT" in message, message


def test_the_hub_file_is_fetched_checked_and_cached(tmp_path, expected):
    """Fetched; again, from the cache; damaged, then mended as the message says; short; unknown; and
    with HF_HUB_OFFLINE what is in the cache still loads."""
    Hub.requests.clear()
    total = expected.double().sum().item()
    with serving() as endpoint:
        answers = ask_hub((GOOD, GOOD, BAD, BAD, SHORT, ABSENT), tmp_path, HF_ENDPOINT=endpoint)
    assert Hub.requests.count(("GET", GOOD)) == 1, "the second load did not use the cache"
    for kind, value in (answers[0], answers[1], answers[3]):
        assert kind == "logits" and abs(value - total) < 1e-3, (kind, value)
    for kind, message in (answers[2], answers[4]):
        assert kind == "UserError" and "\n" not in message
        assert "sha256" in message and "try again" in message
    assert str(GOLDEN.stat().st_size) in answers[4][1]
    assert_says_what_to_do(answers[5])

    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": endpoint}
    cached, absent = ask_hub((GOOD, ABSENT), tmp_path, **offline)
    assert cached[0] == "logits" and abs(cached[1] - total) < 1e-3
    assert_says_what_to_do(absent)
    assert "HF_HUB_OFFLINE" in absent[1]


def test_no_network_is_one_line_that_says_what_to_do(tmp_path):
    with serving() as endpoint:
        pass                                               # a port that was open and is closed now
    answer, = ask_hub((GOOD,), tmp_path, HF_ENDPOINT=endpoint)
    assert_says_what_to_do(answer)


def test_the_pinned_file_is_the_released_one():
    import checkpoint
    assert checkpoint.HUB_FILES["goombalab/hydra"] == (
        "89204f45b7e595243e74d2ed0cab0afc2aa35ef6", "hydra_bert_23layers.pt", 449_652_194,
        "d38892dd98e4c71e24d3566084e7a64da5c3bfbff2ee4e2ba46e66a61202e1f9")
