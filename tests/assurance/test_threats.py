"""docs/threats.md says what the suite has recorded, and names tests that are there."""

import json
import re

import pytest
from assurance.threats import (
    GOALS,
    KEPT,
    PACES,
    PAGE,
    THREATS,
    added,
    missing,
    page,
    recording,
    results,
)


def kept():
    return json.loads(KEPT.read_text())


def test_the_page_is_what_the_record_gives():
    assert PAGE.read_text() == page(kept()), (
        "docs/threats.md was edited, or goals changed: run python tests/assurance/threats.py --page"
    )


def test_there_are_26_classes_and_each_is_answered():
    assert [threat["id"] for threat in THREATS] == [f"V{number}" for number in range(1, 27)]
    answered = {each for goal in GOALS for each in goal["answers"]}
    assert answered <= {threat["id"] for threat in THREATS}, "a goal answers a class that is none"
    open_ = {threat["id"] for threat in THREATS if threat.get("promised", True)} - answered
    assert open_ == set(), f"no goal shows the answer to {sorted(open_)}"


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal["id"])
def test_a_goal_names_tests_that_exist(goal):
    assert [missing(test) for test in goal["tests"] if missing(test)] == [], (
        "the page would name a test that is not there"
    )
    assert goal["pace"] in PACES
    assert goal["tests"]


def test_goals_have_names_of_their_own():
    assert len({goal["id"] for goal in GOALS}) == len(GOALS)


def test_whatever_records_is_run_by_make_trust():
    named = [test for goal in GOALS for test in goal["tests"]]
    lost = [
        file
        for file in recording()
        if not any(file.startswith(each) or each.startswith(file) for each in named)
    ]
    assert lost == [], "these tests record figures, and no goal names them"


def test_what_was_kept_is_of_goals_and_tests_that_exist():
    for name, result in kept().items():
        assert name in {goal["id"] for goal in GOALS}, (
            f"docs/trust.json has {name}, which is no goal"
        )
        for figure in result["figures"]:
            gone = [missing(test) for test in figure["tests"] if missing(test)]
            assert gone == [], f"{name}: {figure['what']} was counted by a test that is gone"


def test_a_page_cannot_hide_a_failure():
    goal = GOALS[0]
    lines = [{"test": f"{goal['tests'][0]}::test_x", "outcome": "failed", "seconds": 1.0}]
    found = results(lines, [goal], {"date": "2026-01-01", "commit": "abc", "machine": "any"})
    assert found[goal["id"]]["failed"] == [f"{goal['tests'][0]}::test_x"]
    shown = page(found)
    assert "**1 FAILED**" in shown
    assert re.search(rf"\[{goal['id']}\]\(#{goal['id'].lower()}\) fails", shown)


def test_figures_of_one_name_are_added_up():
    lines = [
        {
            "what": "pairs",
            "figure": each,
            "of": 5,
            "note": "",
            "test": f"tests/x.py::test_y[{each}]",
        }
        for each in (3, 5)
    ]
    assert added("pairs", lines) == {
        "what": "pairs",
        "figure": 8,
        "of": 10,
        "tests": ["tests/x.py::test_y"],
    }
    assert (
        added("lone", [{"figure": "chance", "of": None, "test": "tests/x.py::test_y"}])["figure"]
        == "chance"
    )
