"""Several outputs side by side."""

import json
import re
from dataclasses import replace

import pytest
import torch
from support.factories import GAUSSIAN, NO_GUARANTEE, make_metric_result, make_release

from privot.errors import ReleaseError
from privot.measures import Samples
from privot.privacy.guarantee import NoGuarantee
from privot.privacy.plan import Neighbours
from privot.report import compare


def subject(name, release=None, readings=(), count=12):
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return Samples(
        name, images, torch.arange(count) % 3, 3, ("cat", "dog", "ship"), release
    ), tuple(readings)


def facts(page):
    return json.loads(page.with_name("comparison.json").read_text())


def bests(page):
    return {
        row["name"]: [bool(cell and cell["best"]) for cell in row["cells"]]
        for row in facts(page)["measures"]
    }


def test_the_best_is_bold_by_the_reading_s_own_word(tmp_path):
    low = {"better": "lower"}
    one = subject(
        "one",
        make_release(),
        [make_metric_result(value=0.8), make_metric_result("fid", 20.0, **low)],
    )
    two = subject(
        "two",
        make_release(claim=NO_GUARANTEE),
        [
            make_metric_result(value=0.9),
            make_metric_result("fid", 30.0, **low),
            make_metric_result("is", 3.0),
        ],
    )
    page = compare([one, two], tmp_path / "out")
    assert bests(page) == {
        "cnn_accuracy": [False, True],
        "fid": [True, False],
        "is": [False, False],
    }
    assert page.read_text().count('<span class="best">') == 2


@pytest.mark.parametrize("public", [True, False])
def test_what_may_not_be_published_is_the_user_s_alone(tmp_path, public):
    page = compare(
        [subject("one", make_release(), [make_metric_result(publishable=public)])], tmp_path / "out"
    )
    assert (page.stat().st_mode & 0o777 == 0o600, page.parent.stat().st_mode & 0o777 == 0o700) == (
        not public,
        not public,
    )


def test_different_rulers_are_flagged_and_have_no_best(tmp_path):
    one = subject("one", None, [make_metric_result(value=0.8)])
    two = subject("two", None, [make_metric_result(value=0.9, protocol="another")])
    page = compare([one, two], tmp_path / "out")
    assert bests(page) == {"cnn_accuracy": [False, False]}
    assert "different protocols" in page.read_text()
    assert "another" in page.read_text()
    page = compare([one, (two[0], (make_metric_result(value=0.9),))], tmp_path / "out")
    assert "different protocols" not in page.read_text()


def test_each_says_what_it_promises(tmp_path):
    sound = make_release()
    page = compare(
        [
            subject("one", sound),
            subject("two", make_release(claim=NoGuarantee("seeded"))),
            subject("three"),
        ],
        tmp_path / "out",
    )
    assert [each["verdict"] for each in facts(page)["outputs"]][1:] == [
        "No guarantee: seeded",
        "foreign: no certificate",
    ]
    assert facts(page)["outputs"][0]["epsilon"] == sound.guarantee.epsilon
    other = make_release(replace(GAUSSIAN, neighbours=Neighbours.ADD_REMOVE))
    for two, words in (
        (other, "different neighbours (add-remove, replace)"),
        (make_release(delta=1e-6), "different delta (1e-6, 1e-5)"),
    ):
        mixed = compare([subject("one", sound), subject("two", two)], tmp_path / "out").read_text()
        assert mixed.count("not directly comparable") == 1
        assert words in mixed
    assert (
        "not directly comparable"
        not in compare([subject("one", sound)] * 2, tmp_path / "out").read_text()
    )


def test_a_promise_that_nothing_proves_is_not_compared(tmp_path):
    sound = make_release()
    false = replace(sound, guarantee=replace(sound.guarantee, epsilon=0.01))
    for release in (
        false,
        replace(sound, metadata={}),
        replace(sound, metadata={**sound.metadata, "event": "none"}),
    ):
        with pytest.raises(ReleaseError, match=r"^the liar: "):
            compare([subject("sound", sound), subject("the liar", release)], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [{"num_samples": 100}, {"reference_size": 9999}])
def test_readings_of_different_numbers_have_no_best(tmp_path, other):
    one = subject("one", None, [make_metric_result(value=0.8)])
    two = subject("two", None, [make_metric_result(value=0.9, **other)])
    page = compare([one, two], tmp_path / "out")
    assert bests(page) == {"cnn_accuracy": [False, False]}
    assert "different numbers of images or records: not comparable" in page.read_text()
    assert "6,000 images, 10,000 records" in page.read_text()


def test_warnings_prices_and_odd_characters_of_readings(tmp_path):
    ruler = "LeNet \ud800; through the gate at epsilon 0.1, delta 1e-05, replace neighbours"
    page = compare(
        [
            subject(
                "one",
                None,
                [
                    make_metric_result(
                        warning="few samples", protocol=ruler, reference="scans\ud800"
                    )
                ],
            )
        ],
        tmp_path / "out",
    )
    assert "few samples" in page.read_text()
    assert "epsilon of its own on the test data" in page.read_text()
    assert facts(page)["outputs"][0]["results"][0]["reference"] == "scans"


def test_the_chart_holds_those_with_epsilon_and_accuracy(tmp_path):
    sound = make_release()
    accuracy = [make_metric_result()]
    known = [
        subject("one", sound, accuracy),
        subject("two", make_release(GAUSSIAN.scale_noise(0.2)), accuracy),
    ]
    page = compare(
        [*known, subject("no accuracy", sound), subject("foreign", None, accuracy)],
        tmp_path / "out",
    )
    assert re.findall(r'<text class="name"[^>]*>(.*?)</text>', page.read_text()) == ["1", "2"]
    assert re.findall(r"<li><bdi>(.*?)</bdi>", page.read_text()) == ["one", "two"]
    assert "<svg" not in compare([subject("foreign", None, accuracy)], tmp_path / "out").read_text()


def test_internal_numbers_mark_the_page(tmp_path):
    assert (
        "not for publication"
        in compare(
            [subject("one", None, [make_metric_result(publishable=False)])], tmp_path / "out"
        ).read_text()
    )
    assert (
        "not for publication"
        not in compare([subject("one", None, [make_metric_result()])], tmp_path / "out").read_text()
    )


def test_nothing_foreign_is_overwritten(tmp_path):
    with pytest.raises(ReleaseError, match="nothing to compare"):
        compare([], tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text('{"privot": 1}')
    with pytest.raises(ReleaseError, match="contains other files"):
        compare([subject("one")], tmp_path / "out")


def test_many_large_outputs_stay_a_small_page(tmp_path):
    images = torch.rand(100, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    page = compare(
        [(Samples(f"s{turn}", images, torch.arange(100) % 10, 10), ()) for turn in range(6)],
        tmp_path / "out",
    )
    assert page.stat().st_size < 3e6
