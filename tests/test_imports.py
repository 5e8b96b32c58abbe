"""Importing a file does nothing, follows the reading order, and needs neither CUDA nor triton."""
import ast
import json
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

READING_ORDER = (
    "common", "chunk_scan_triton", "chunk_scan", "text", "hydra_ssm", "mark_adapters", "cart",
    "data", "checkpoint", "pretrain", "evaluate", "sample", "train", "study", "certify",
    "hrm_adapter", "markov", "synth_lpv", "gpu_check", "bench")
FILES = sorted(ROOT.glob("*.py"))
TESTS = sorted((ROOT / "tests").glob("*.py"))
MACHINE = re.compile(r"(?<![\w.])/(home|root|work|mnt|Users|scratch)/\w+|\.\./shared")

# One process that has imported only third parties, and a fork of it per file: as good as fresh.
DRIVER = """
import importlib, json, os, random, sys
sys.modules["triton"] = None                # any `import triton` now raises ImportError
import numpy, torch

def state():
    kind, keys, *rest = numpy.random.get_state()
    return {"torch's random state": torch.get_rng_state().tolist(),
            "numpy's random state": [kind, keys.tolist(), rest],
            "python's random state": random.getstate(),
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "default dtype": str(torch.get_default_dtype()), "grad mode": torch.is_grad_enabled(),
            "environment": dict(os.environ), "folder": os.getcwd(), "files": sorted(os.listdir())}

for name in sys.argv[1:]:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 1), os.dup2(writer, 2)
        before, faults = state(), []
        importlib.import_module(name)
        faults += [what for what, value in state().items() if value != before[what]]
        faults += ["CUDA was initialised"] * torch.cuda.is_initialized()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0 if not faults else print(name, "changed", faults, flush=True) or 1)
    os.close(writer)
    with os.fdopen(reader) as output:
        said = output.read()
    print(json.dumps([name, os.wait()[1], said]))
"""


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            yield node.module.split(".")[0]


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    clean |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", DRIVER, *(f.stem for f in FILES)], text=True,
                         capture_output=True, cwd=tmp_path_factory.mktemp("elsewhere"),
                         timeout=120, env=clean)
    assert run.returncode == 0, run.stderr
    return {name: rest for name, *rest in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_importing_a_file_says_and_changes_nothing(imports, path):
    status, said = imports[path.stem]
    assert (status, said) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_file_imports_only_files_before_it(path):
    assert path.stem in READING_ORDER, "add the file to the reading order, here and in the README"
    own = {p.stem for p in FILES}
    allowed = set(READING_ORDER[:READING_ORDER.index(path.stem)])
    assert set(imported_names(path)) & own <= allowed


@pytest.mark.parametrize("path", FILES + TESTS, ids=lambda p: p.stem)
def test_a_file_fits_the_page_and_names_no_machine(path):
    text = path.read_text()
    long = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 100]
    assert not long, f"lines over 100 columns: {long}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = MACHINE.search(node.value)
            assert not found, f"line {node.lineno}: {found[0]}"


def lines_of_code(path):
    """Lines that are neither blank, nor a comment, nor of a docstring."""
    text, prose = path.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        has_doc = isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        if has_doc and ast.get_docstring(node):
            prose |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in prose
               for i, line in enumerate(text.splitlines(), 1))


def test_the_repository_stays_minimal():
    assert sum(map(lines_of_code, FILES)) < 5000
