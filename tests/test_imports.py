"""Importing a file does nothing, follows the reading order, and needs neither CUDA nor triton."""
import ast
import json
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

IMPORT_ORDER = (  # the paper, and on it, on the second floor, the experiments
    "common", "chunk_scan_triton", "mixer_triton", "chunk_scan", "text", "hydra_ssm",
    "mark_adapters", "baselines", "cart", "data", "published", "checkpoint", "evaluate", "sample",
    "certify", "markov", "train", "synth_lpv",
    *(f"experiments.{name}" for name in (
        "mixture", "trivial", "pretrain", "byte_transformer", "hankel", "hrm_adapter", "scan_bench",
        "measure", "plan", "isolated", "gpu_check", "bench", "peers", "study_cells", "random_bytes",
        "study_train", "study_tables", "study_worth", "study_figures", "study", "bases",
        "published_t", "publish", "report_pieces", "report_scores", "report_operators",
        "report_worth", "report_study", "report_cost", "report_published", "report_hrm",
        "report_figures", "report_claims", "report")))
ROOT_FLOOR = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
EXPERIMENTS = {f"experiments.{path.stem}": path
               for path in sorted(ROOT.glob("experiments/*.py")) if path.stem != "__init__"}
FILES = ROOT_FLOOR | EXPERIMENTS  # by the name they are imported as
TESTS = sorted((ROOT / "tests").glob("*.py"))
MACHINE = re.compile(r"(?<![\w.])/(home|root|work|mnt|Users|scratch)/\w+|\.\./shared")

# One process that has imported only third parties, and a fork of it per file: as good as fresh.
DRIVER = """
import importlib, json, os, random, sys
sys.modules["triton"] = None  # any `import triton` now raises ImportError
import einops, numpy, torch, tqdm, tyro

def state():
    kind, keys, *rest = numpy.random.get_state()
    return {"torch's random state": torch.get_rng_state().tolist(),
            "numpy's random state": [kind, keys.tolist(), rest],
            "python's random state": random.getstate(),
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "default dtype": str(torch.get_default_dtype()), "grad mode": torch.is_grad_enabled(),
            "environment": dict(os.environ), "folder": os.getcwd(), "files": sorted(os.listdir())}

def changed_by(name):
    before = state()
    importlib.import_module(name)
    faults = [what for what, value in state().items() if value != before[what]]
    if torch.cuda.is_initialized():
        faults.append("CUDA was initialised")
    return faults

for name in sys.argv[1:]:
    reader, writer = os.pipe()
    if os.fork() == 0:
        for stream in (1, 2):
            os.dup2(writer, stream)
        faults = changed_by(name)
        if faults:
            print(name, "changed", faults)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(bool(faults))
    os.close(writer)
    with os.fdopen(reader) as output:
        said = output.read()
    print(json.dumps([name, os.wait()[1], said]))
"""


def imported_names(path):
    """The dotted names that a file imports anywhere in it: `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    clean |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", DRIVER, *FILES], text=True, capture_output=True,
                         cwd=tmp_path_factory.mktemp("elsewhere"), timeout=120, env=clean)
    assert run.returncode == 0, run.stderr
    return {name: rest for name, *rest in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("name", FILES)
def test_importing_a_file_says_and_changes_nothing(imports, name):
    status, said = imports[name]
    assert (status, said) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_files_before_it(name):
    """Both floors in one order, so no file of the root imports an experiment."""
    assert name in IMPORT_ORDER, "add the file to the reading order, here and in the README"
    before = set(IMPORT_ORDER[:IMPORT_ORDER.index(name)])
    assert imported_names(FILES[name]) & FILES.keys() <= before


def test_the_root_imports_no_experiment_and_holds_at_most_18_files():
    assert len(ROOT_FLOOR) <= 18
    for name, path in ROOT_FLOOR.items():
        names = imported_names(path)
        assert not any(n.split(".")[0] == "experiments" for n in names), f"{name} imports {names}"


@pytest.mark.parametrize("path", [*FILES.values(), *TESTS], ids=lambda p: p.stem)
def test_a_file_fits_the_page_and_names_no_machine(path):
    text = path.read_text("utf-8")
    long = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 100]
    assert not long, f"lines over 100 columns: {long}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = MACHINE.search(node.value)
            assert not found, f"line {node.lineno}: {found[0]}"
