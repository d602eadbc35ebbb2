"""Thirty mistakes, put into the trusted part one at a time: a test of the suite notices each."""

import collections
import dataclasses

import pytest
from assurance.mutate import Bug, Misplaced, changed, load_bugs, plant, run_in_child

BUGS = load_bugs()
COUNTS = {
    "noise": 8,
    "clip": 6,
    "sensitivity": 3,
    "sampling": 5,
    "accounting": 6,
    "side channel": 2,
}
SLIPS = (NameError, SyntaxError, AttributeError, TypeError, ImportError)  # of a bug's author


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_killed(bug, trust):
    result = run_in_child(bug.killers, lambda: plant(bug))
    assert result["code"] == 1, f"{bug} was not noticed by {bug.killers}: {result}"
    slips = {error.__name__ for error in SLIPS} | {"UnboundLocalError"}
    assert result["kind"] not in slips, f"{bug} does not run at all: {result}"
    note = f"{bug}: {result['killer'].split('/')[-1]}"
    trust("G9", "planted bugs killed", 1, of=1, note=note)


@pytest.mark.slow  # they are tests of the suite, and run there
def test_without_a_bug_every_killer_passes():
    """The control: a test that fails anyway kills nothing."""
    tests = sorted({killer for bug in BUGS for killer in bug.killers})
    result = run_in_child(tests)
    assert result["code"] == 0, f"{result['killer']} fails on the real code: {result['why']}"
    assert result["passed"] >= len(tests)


def test_the_list_is_that_of_the_specification():
    assert collections.Counter(bug.group for bug in BUGS) == COUNTS
    assert len(set(map(str, BUGS))) == 30


def test_a_bug_whose_function_changed_is_an_error():
    gone = dataclasses.replace(BUGS[0], old="text that is nowhere")
    with pytest.raises(Misplaced, match="0 times"):
        changed(gone)
    with pytest.raises(Misplaced, match="times"):
        changed(dataclasses.replace(BUGS[0], old="s"))
    result = run_in_child(gone.killers, lambda: plant(gone))
    assert result["code"] == 70, "a child that could not plant its bug must not pass for a kill"


def test_a_harmless_change_is_not_killed():
    """The suite does not fail at any change whatever."""
    factors = ("total.double() * grid", "grid * total.double()")
    same = Bug("none", "factors swapped", BUGS[0].target, *factors, BUGS[0].killers)
    assert run_in_child(same.killers, lambda: plant(same))["code"] == 0
