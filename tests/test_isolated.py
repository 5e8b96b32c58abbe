"""isolated.py: one case that fails, dies or hangs costs no other, and time is bounded."""
import multiprocessing
import time

import fake_cases
import pytest
from experiments import isolated


def run(*kinds, seconds=60.0, make=fake_cases.make):
    """The rows of a Group of such cases."""
    cases = [{"kind": kind, "k": k} for k, kind in enumerate(kinds)]
    rows = []
    isolated.run_group(isolated.Group("fake", cases, make, (kinds,), seconds), rows.append)
    assert [{"kind": row["kind"], "k": row["k"]} for row in rows] == cases
    assert not multiprocessing.active_children()
    return rows


def test_cases_that_return_share_a_process():
    rows = run("fine", "fine", "fine")
    assert [row["value"] for row in rows] == [0, 1, 2]
    assert len({row["process"] for row in rows}) == 1


@pytest.mark.parametrize("kind, said", (
    ("raises", "RuntimeError: case 1 fails"), ("aborts", "its process died of SIGABRT"),
    ("is_killed", "its process died of SIGKILL"), ("leaves", "its process ended with status 7")))
def test_a_case_that_fails_or_faults_costs_no_other(kind, said):
    rows = run("fine", kind, "fine", "fine")
    assert rows[1]["failed"] == said and "value" not in rows[1]
    assert [row["value"] for row in rows if "value" in row] == [0, 2, 3]
    processes = [row["process"] for row in rows if "value" in row]
    assert processes[0] != processes[1] == processes[2], "a fresh one goes on"


def test_the_first_and_the_last_may_fail_and_two_in_a_row():
    rows = run("aborts", "aborts", "fine", "raises")
    assert ["failed" in row for row in rows] == [True, True, False, True]


def test_a_case_that_hangs_is_stopped_and_the_next_is_run(monkeypatch):
    monkeypatch.setattr(isolated, "CASE_SECONDS", 2)
    start = time.monotonic()
    rows = run("fine", "hangs", "fine")
    assert rows[1]["failed"] == "stopped after 2 s" and rows[2]["value"] == 2
    assert time.monotonic() - start < 15


def test_a_groups_time_is_bounded_and_what_it_did_not_reach_is_listed():
    start = time.monotonic()
    rows = run("fine", "hangs", "fine", "slow", seconds=2.0)
    assert time.monotonic() - start < 6
    assert rows[0]["value"] == 0 and rows[1]["failed"].startswith("stopped after ")
    assert [row["failed"] for row in rows[2:]] == 2 * ["not run: the 2 s of its group were over"]


def test_a_row_is_handed_on_before_the_next_case_has_run():
    seen = []
    cases = [{"k": k} for k in range(3)]
    group = isolated.Group("fake", cases, fake_cases.make, (("fine", "slow", "slow"),), 60.0)
    isolated.run_group(group, lambda row: seen.append(time.monotonic()))
    assert seen[1] - seen[0] > 0.3 and seen[2] - seen[1] > 0.3


def test_what_cannot_be_prepared_fails_in_every_case():
    rows = run("fine", "fine", make=fake_cases.make_nothing)
    assert [row["failed"] for row in rows] == 2 * ["OSError: no device"]
