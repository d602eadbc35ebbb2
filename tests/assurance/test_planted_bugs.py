"""Thirty mistakes, put into the trusted part one at a time: the suite notices each, and says which test did."""

import dataclasses

import pytest
from assurance.mutate import SLIPS, Bug, Misplaced, changed, plant, trial
from assurance.planted_bugs import BUGS

WANTED = {"noise": 8, "clip": 6, "sensitivity": 3, "sampling": 5, "accounting": 6, "side door": 2}


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_killed(bug, trust):
    seen = trial(bug.killers, lambda: plant(bug))
    assert seen["code"] == 1, (
        f"{bug} was not noticed by {bug.killers} (pytest's code {seen['code']}, {seen['why']}): {seen}"
    )
    assert seen["kind"] not in SLIPS, (
        f"{bug} does not run at all ({seen['kind']}: {seen['why']}), so it proves nothing"
    )
    trust("G9", "planted bugs killed", 1, of=1, note=f"{bug}: {seen['killer'].split('/')[-1]}")


@pytest.mark.slow  # they are tests of the suite, and run there
def test_without_a_bug_every_killer_passes():
    """The control: a test that fails anyway kills nothing."""
    tests = sorted({killer for bug in BUGS for killer in bug.killers})
    seen = trial(tests)
    assert seen["code"] == 0, f"{seen['killer']} fails on the real code: {seen['why']}"
    assert seen["passed"] >= len(tests)


def test_the_list_is_that_of_the_specification():
    assert {group: sum(bug.group == group for bug in BUGS) for group in WANTED} == WANTED
    assert len(set(map(str, BUGS))) == 30


def test_a_bug_that_lost_its_place_is_an_error():
    gone = dataclasses.replace(BUGS[0], old="text that is nowhere")
    with pytest.raises(Misplaced, match="0 times"):
        changed(gone)
    with pytest.raises(Misplaced, match="times"):
        changed(dataclasses.replace(BUGS[0], old="s"))
    assert trial(gone.killers, lambda: plant(gone))["code"] == 70, (
        "a child that could not plant its bug must not pass for a kill"
    )


def test_a_harmless_change_is_not_killed():
    """The suite does not cry at any change whatever."""
    same = Bug(
        "none",
        "two factors the other way round",
        BUGS[0].place,
        "total.double() * grid",
        "grid * total.double()",
        BUGS[0].killers,
    )
    assert trial(same.killers, lambda: plant(same))["code"] == 0
