"""The list of breaks fits the code and the tests, and (slow) each of them is noticed."""
import pytest
from helpers import ROOT
from mutations import BREAKS, Config, main


def test_every_break_still_has_its_line_and_its_test():
    assert len(BREAKS) >= 10 and len(set(BREAKS)) == len(BREAKS)
    for file, old, new, test in BREAKS:
        text = (ROOT / file).read_text("utf-8")
        assert text.count(old) == 1 and old != new, f"{file}: {old}"
        module, name = test.split("::")
        assert f"\ndef {name.split('[')[0]}(" in (ROOT / "tests" / module).read_text("utf-8"), test
        compile(text.replace(old, new), file, "exec")


@pytest.mark.slow
def test_every_break_is_noticed():
    result = main(Config())
    assert result["noticed"] == len(BREAKS), [b for b in result["breaks"] if not b["noticed"]]
