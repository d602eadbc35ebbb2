"""Several outputs side by side."""

import json
import re
from dataclasses import replace

import pytest
import torch
from specimens import hand, reading

from privot.errors import ReleaseError
from privot.measures import Subject
from privot.release import NoGuarantee
from privot.report import compare


def subject(name, claim=None, readings=(), count=12):
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    release = replace(hand(), guarantee=claim) if claim else None
    return Subject(name, images, torch.arange(count) % 3, 3, ("cat", "dog", "ship"), release), tuple(readings)


def facts(page):
    return json.loads(page.with_name("comparison.json").read_text())


def bests(page):
    return {row["name"]: [bool(cell and cell["best"]) for cell in row["cells"]] for row in facts(page)["measures"]}


def test_the_best_is_bold_by_the_reading_s_own_word(tmp_path):
    low = {"better": "lower"}
    one = subject("one", hand().guarantee, [reading(value=0.8), reading("fid", 20.0, **low)])
    two = subject("two", NoGuarantee("none"), [reading(value=0.9), reading("fid", 30.0, **low), reading("is", 3.0)])
    page = compare([one, two], tmp_path / "out")
    assert bests(page) == {"cnn_accuracy": [False, True], "fid": [True, False], "is": [False, False]}
    assert page.read_text().count('<span class="best">') == 2


def test_different_rulers_are_flagged_and_have_no_best(tmp_path):
    one, two = subject("one", None, [reading(value=0.8)]), subject("two", None, [reading(value=0.9, ruler="another")])
    page = compare([one, two], tmp_path / "out")
    assert bests(page) == {"cnn_accuracy": [False, False]}
    assert "different rulers" in page.read_text()
    assert "another" in page.read_text()
    page = compare([one, (two[0], (reading(value=0.9),))], tmp_path / "out")
    assert "different rulers" not in page.read_text()


def test_each_says_what_it_promises(tmp_path):
    claim = hand().guarantee
    page = compare([subject("one", claim), subject("two", NoGuarantee("seeded")), subject("three")], tmp_path / "out")
    assert [each["verdict"] for each in facts(page)["subjects"]][1:] == ["No guarantee: seeded", "foreign: no certificate"]
    assert facts(page)["subjects"][0]["epsilon"] == claim.epsilon
    mixed = compare([subject("one", claim), subject("two", replace(claim, neighbours="add-remove"))], tmp_path / "out")
    assert "do not compare directly" in mixed.read_text()
    assert "do not compare directly" not in compare([subject("one", claim)] * 2, tmp_path / "out").read_text()


def test_the_chart_holds_those_with_epsilon_and_accuracy(tmp_path):
    claim, accuracy = hand().guarantee, [reading()]
    known = [subject("one", claim, accuracy), subject("two", replace(claim, epsilon=8.0), accuracy)]
    page = compare([*known, subject("no accuracy", claim), subject("foreign", None, accuracy)], tmp_path / "out")
    assert re.findall(r'<text class="name"[^>]*>(.*?)</text>', page.read_text()) == ["1", "2"]
    assert re.findall(r"<li><bdi>(.*?)</bdi>", page.read_text()) == ["one", "two"]
    assert "<svg" not in compare([subject("foreign", None, accuracy)], tmp_path / "out").read_text()


def test_internal_numbers_mark_the_page(tmp_path):
    assert "not for publication" in compare([subject("one", None, [reading(publishable=False)])], tmp_path / "out").read_text()
    assert "not for publication" not in compare([subject("one", None, [reading()])], tmp_path / "out").read_text()


def test_nothing_foreign_is_overwritten(tmp_path):
    with pytest.raises(ReleaseError, match="nothing to compare"):
        compare([], tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text('{"privot": 1}')
    with pytest.raises(ReleaseError, match="something else"):
        compare([subject("one")], tmp_path / "out")


def test_many_large_outputs_stay_a_small_page(tmp_path):
    images = torch.rand(100, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    page = compare([(Subject(f"s{turn}", images, torch.arange(100) % 10, 10), ()) for turn in range(6)], tmp_path / "out")
    assert page.stat().st_size < 3e6
