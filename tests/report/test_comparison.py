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


def make_subject(name, release=None, results=(), count=12):
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    samples = Samples(name, images, torch.arange(count) % 3, 3, ("cat", "dog", "ship"), release)
    return samples, tuple(results)


@pytest.fixture
def compare_here(tmp_path):
    """Compare these: the page, its text, and the facts beside it."""

    def run(*subjects):
        page = compare(subjects, tmp_path / "out")
        return page, page.read_text(), json.loads(page.with_name("comparison.json").read_text())

    return run


def read_best(facts):
    return {
        row["name"]: [bool(cell and cell["best"]) for cell in row["cells"]]
        for row in facts["measures"]
    }


def test_the_best_is_bold_by_the_direction_of_the_metric(compare_here):
    low = {"better": "lower"}
    one = [make_metric_result(value=0.8), make_metric_result("fid", 20.0, **low)]
    two = [make_metric_result(value=0.9), make_metric_result("fid", 30.0, **low)]
    _, text, facts = compare_here(
        make_subject("one", make_release(), one),
        make_subject(
            "two", make_release(claim=NO_GUARANTEE), [*two, make_metric_result("is", 3.0)]
        ),
    )
    best = {"cnn_accuracy": [False, True], "fid": [True, False], "is": [False, False]}
    assert read_best(facts) == best
    assert text.count('<span class="best">') == 2


@pytest.mark.parametrize("public", [True, False])
def test_internal_results_make_the_page_the_user_s_alone(compare_here, public):
    result = make_metric_result(publishable=public)
    page, text, _ = compare_here(make_subject("one", make_release(), [result]))
    assert (page.stat().st_mode & 0o777 == 0o600) is not public
    assert (page.parent.stat().st_mode & 0o777 == 0o700) is not public
    assert ("not for publication" in text) is not public


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ()),
        ({"protocol": "another"}, ("different protocols", "another")),
        *(
            (other, ("different numbers of images or records: not comparable", "6,000 images"))
            for other in ({"num_samples": 100}, {"reference_size": 9999})
        ),
    ],
)
def test_results_measured_differently_are_flagged_and_have_no_best(compare_here, other, words):
    _, text, facts = compare_here(
        make_subject("one", None, [make_metric_result(value=0.8)]),
        make_subject("two", None, [make_metric_result(value=0.9, **other)]),
    )
    assert read_best(facts) == {"cnn_accuracy": [False, not other]}
    for word in words:
        assert word in text
    assert ("different protocols" in text) is ("protocol" in other)


def test_each_states_its_guarantee(compare_here):
    sound = make_release()
    seeded = make_release(claim=NoGuarantee("seeded"))
    one = make_subject("one", sound)
    _, _, facts = compare_here(one, make_subject("two", seeded), make_subject("three"))
    assert facts["outputs"][0]["epsilon"] == sound.guarantee.epsilon
    verdicts = [output["verdict"] for output in facts["outputs"]]
    assert verdicts[1:] == ["No guarantee: seeded", "foreign: no certificate"]
    relation = make_release(replace(GAUSSIAN, neighbours=Neighbours.ADD_REMOVE))
    for release, words in (
        (relation, "different neighbours (add-remove, replace)"),
        (make_release(delta=1e-6), "different delta (1e-6, 1e-5)"),
        (sound, ""),
    ):
        _, text, _ = compare_here(one, make_subject("two", release))
        assert text.count("not directly comparable") == bool(words)
        assert words in text


def test_a_guarantee_that_nothing_proves_is_not_compared(compare_here, tmp_path):
    sound = make_release()
    for release in (
        replace(sound, guarantee=replace(sound.guarantee, epsilon=0.01)),
        replace(sound, metadata={}),
        replace(sound, metadata={**sound.metadata, "event": "none"}),
    ):
        with pytest.raises(ReleaseError, match=r"^the liar: "):
            compare_here(make_subject("sound", sound), make_subject("the liar", release))
    assert list(tmp_path.iterdir()) == []


def test_shows_warnings_and_prices_and_drops_odd_characters(compare_here):
    protocol = "LeNet \ud800; through the gate at epsilon 0.1, delta 1e-05, replace neighbours"
    reference = "scans\ud800"
    result = make_metric_result(warning="few samples", protocol=protocol, reference=reference)
    _, text, facts = compare_here(make_subject("one", None, [result]))
    assert "few samples" in text
    assert "epsilon of its own on the test data" in text
    assert facts["outputs"][0]["results"][0]["reference"] == "scans"


def test_the_chart_holds_those_with_epsilon_and_accuracy(compare_here):
    sound = make_release()
    accuracy = [make_metric_result()]
    foreign = make_subject("foreign", None, accuracy)
    _, text, _ = compare_here(
        make_subject("one", sound, accuracy),
        make_subject("two", make_release(GAUSSIAN.scale_noise(0.2)), accuracy),
        make_subject("no accuracy", sound),
        foreign,
    )
    assert re.findall(r'<text class="name"[^>]*>(.*?)</text>', text) == ["1", "2"]
    assert re.findall(r"<li><bdi>(.*?)</bdi>", text) == ["one", "two"]
    assert "<svg" not in compare_here(foreign)[1]


def test_refuses_nothing_to_compare_and_a_foreign_folder(compare_here, tmp_path):
    with pytest.raises(ReleaseError, match="nothing to compare"):
        compare_here()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text('{"privot": 1}')
    with pytest.raises(ReleaseError, match="contains other files"):
        compare_here(make_subject("one"))


def test_many_large_outputs_stay_a_small_page(compare_here):
    images = torch.rand(100, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(100) % 10
    subjects = [(Samples(f"s{number}", images, labels, 10), ()) for number in range(6)]
    page, _, _ = compare_here(*subjects)
    assert page.stat().st_size < 3e6
