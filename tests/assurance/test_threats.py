"""docs/threats.md says what the suite has recorded, and names tests that exist."""

import json
import re

import pytest
from assurance import threats
from assurance.threats import GOALS, THREATS, find_missing


def read_stored():
    return json.loads(threats.STORED.read_text())


def test_the_page_is_what_the_record_gives():
    assert threats.PAGE.read_text() == threats.build_page(read_stored()), (
        "docs/threats.md was edited, or goals changed: run python tests/assurance/threats.py --page"
    )


def test_there_are_26_classes_and_each_is_answered():
    assert [threat["id"] for threat in THREATS] == [f"V{number}" for number in range(1, 27)]
    answered = {name for goal in GOALS for name in goal["answers"]}
    promised = {threat["id"] for threat in THREATS if threat.get("promised", True)}
    assert answered <= {threat["id"] for threat in THREATS}, "a goal answers a class that is none"
    assert promised <= answered, "no goal shows the answer to a class"


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal["id"])
def test_a_goal_names_tests_that_exist(goal):
    assert goal["tests"]
    assert [test for test in goal["tests"] if find_missing(test)] == []
    assert goal["pace"] in threats.PACES
    assert [other["id"] for other in GOALS].count(goal["id"]) == 1


def test_whatever_records_is_run_by_make_trust():
    tests = [test for goal in GOALS for test in goal["tests"]]
    for file in threats.list_recording_files():
        is_named = any(file.startswith(test) or test.startswith(file) for test in tests)
        assert is_named, f"{file} records figures, and no goal names it"


def test_stored_figures_are_of_goals_and_tests_that_exist():
    results = read_stored()
    assert set(results) <= {goal["id"] for goal in GOALS}
    figures = [(name, figure) for name, result in results.items() for figure in result["figures"]]
    for name, figure in figures:
        gone = [test for test in figure["tests"] if find_missing(test)]
        assert gone == [], f"{name}: {figure['what']} was counted by a test that is gone"


def test_a_page_cannot_hide_a_failure():
    goal = GOALS[0]
    test = f"{goal['tests'][0]}::test_x"
    lines = [{"test": test, "outcome": "failed", "seconds": 1.0}]
    facts = {"date": "2026-01-01", "commit": "abc", "machine": "any"}
    results = threats.summarize(lines, [goal], facts)
    assert results[goal["id"]]["failed"] == [test]
    page = threats.build_page(results)
    assert "**1 FAILED**" in page
    assert re.search(rf"\[{goal['id']}\]\(#{goal['id'].lower()}\) fails", page)


def test_figures_of_one_name_are_added_up():
    line = {"what": "pairs", "of": 5, "note": ""}
    lines = [line | {"figure": n, "test": f"tests/x.py::test_y[{n}]"} for n in (3, 5)]
    total = {"what": "pairs", "figure": 8, "of": 10, "tests": ["tests/x.py::test_y"]}
    assert threats.add_figures("pairs", lines) == total
    text = {"figure": "chance", "of": None, "test": "tests/x.py::test_y"}
    assert threats.add_figures("lone", [text])["figure"] == "chance"
