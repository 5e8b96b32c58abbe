"""README.md is true of the code: snippets run; links, names, scripts and flags exist.

Its table of claims is tested in test_report.py, with the rest of what is generated.
"""
import ast
import dataclasses
import importlib
import re

import pytest
from helpers import ROOT

from experiments.report_pieces import anchor

README = ROOT / "README.md"
PAGES = [README, ROOT / "tests/README.md", ROOT / "assets/README.md"]
PACKAGE = r"-m (experiments\.[a-z]\w*)"
FILE = r"(?<![\w/.])((?:tests/)?\w+)\.py(?!::)"
SCRIPT = re.compile(rf"(?:{PACKAGE}|{FILE})((?: [^`|#\n]*)?)")


def read(path):
    """A page, the lines of a command that end in a backslash joined."""
    return path.read_text("utf-8").replace("\\\n", " ")


# ---- what a page may name ------------------------------------------------------------------------


def anchors_of(path):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.M)
    return {anchor(heading) for heading in headings}


def broken_links(path):
    """The links of a page, into the repository, that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", path.read_text("utf-8")):
        file, _, name = target.partition("#")
        reached = (path.parent / file) if file else path
        if not reached.exists() or (name and name not in anchors_of(reached)):
            broken.append(target)
    return broken


def file_of(module):
    """The file of train, experiments.bench or tests/mutations; of conftest, which is in tests/."""
    file = ROOT / f"{module.replace('.', '/')}.py"
    in_tests = ROOT / "tests" / f"{module}.py"
    return in_tests if in_tests.is_file() else file


def config_of(module):
    """The Config of a script, or None."""
    if module.startswith("tests/"):
        module = module.removeprefix("tests/")
    return getattr(importlib.import_module(module), "Config", None)


def scripts_and_flags(text):
    """[(module, the words after it)] of the scripts that a text runs or names."""
    found = []
    for package, name, rest in SCRIPT.findall(text):
        found.append((package or name, rest.split(" && ")[0]))
    return found


def unknown_scripts(text):
    """The scripts that a text names and that do not exist."""
    return [module for module, _ in scripts_and_flags(text) if not file_of(module).is_file()]


def unknown_flags(text):
    """The flags that a text shows behind a script, and that the script does not have."""
    unknown = []
    for module, rest in scripts_and_flags(text):
        flags = re.findall(r"--([a-z][\w-]*)", rest)
        if not flags:
            continue
        fields = {field.name for field in dataclasses.fields(config_of(module))}
        for flag in flags:
            if flag.removeprefix("no-").replace("-", "_") not in fields:
                unknown.append(f"{module} --{flag}")
    return unknown


# ---- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text, unknown", [
    ("`python train.py --kernel dct --no-mlp-norm`", []),
    ("python train.py --kernels dct", ["train --kernels"]),
    ("torchrun --nproc-per-node 2 train.py --preset paper", []),
    ("python -m experiments.bench --preset paper --lr 1", ["experiments.bench --lr"]),
    ("python -m experiments.study \\\n    --frozen", ["experiments.study --frozen"]),
    ("python tests/compile_kernels.py --dtypes float32 --publish",
     ["tests/compile_kernels --publish"])])
def test_a_flag_that_no_script_has_is_found(text, unknown):
    assert unknown_flags(text.replace("\\\n", " ")) == unknown


def test_a_script_or_link_that_leads_nowhere_is_found(tmp_path):
    assert unknown_scripts("`python trian.py`, `python -m experiments.bench`") == ["trian"]
    page = tmp_path / "page.md"
    links = "[a](#one-two) [b](#one) [c](page.md#one-two) [d](gone.md)"
    page.write_text(f"# One: two\n{links}", "utf-8")
    assert broken_links(page) == ["#one", "gone.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_script_and_flag_exists(page):
    text = read(page)
    assert not broken_links(page)
    assert not unknown_scripts(text)
    assert not unknown_flags(text)


def test_every_python_snippet_runs(monkeypatch, tmp_path):
    import common
    import mark_adapters
    monkeypatch.setattr(mark_adapters, "KERNELS", dict(mark_adapters.KERNELS))  # one adds to it
    monkeypatch.setattr(common, "ROOT", tmp_path)  # one writes into runs/
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.S)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})


def names_of(node):
    """What a statement defines: a function or class, or the targets of an assignment."""
    if hasattr(node, "name"):
        return {node.name}
    targets = list(getattr(node, "targets", ()))
    if isinstance(node, ast.AnnAssign):
        targets.append(node.target)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_every_function_that_it_names_exists():
    dotted_names = re.findall(r"`((?:experiments\.)?[a-z_]+\.\w+(?:\.\w+)?)`", read(README))
    for dotted in dotted_names:
        in_experiments = dotted.startswith("experiments.")
        module, *names = dotted.removeprefix("experiments.").split(".")
        if not names or names[0] in ("py", "md", "json"):
            continue
        if in_experiments:
            module = f"experiments.{module}"
        scope = ast.parse(file_of(module).read_text("utf-8"))
        for name in names:
            scope = next((node for node in scope.body if name in names_of(node)), None)
            assert scope is not None, dotted


def test_every_test_that_the_table_of_faults_names_exists():
    table = (ROOT / "tests/README.md").read_text("utf-8")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", table)
    assert len(named) > 40
    for file, name in named:
        source = (ROOT / "tests" / file).read_text("utf-8")
        assert f"\ndef {name}(" in source, f"{file}::{name}"
