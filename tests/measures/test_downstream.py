"""Downstream accuracy: high on real data, chance on nonsense, and never publishable when the test set is sensitive."""

import dataclasses

import numpy as np
import pytest
import torch

from privot.data import Public, Sensitive, Spec, load
from privot.errors import SettingError
from privot.measures import Reading, downstream
from privot.measures.downstream import NETWORKS, STEPS, THIRTEEN, shortened

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def train():
    return load("digits", public=True).records()


@pytest.fixture(scope="module")
def test_set():
    return load("digits", "test", public=True)


def test_real_digits_are_recognised(train, test_set):
    """Without this a low accuracy on released data could be the classifier's fault."""
    found = {each.name: each for each in downstream(train.images, train.labels, test_set)}
    assert found["logistic_accuracy"].value > 0.9
    assert found["mlp_accuracy"].value > 0.9
    assert found["cnn_accuracy"].value > 0.93
    for each in found.values():
        assert each.count == 359
        assert (each.reference, each.samples) == ("digits/test", 1438)
        assert each.better == "higher"
        assert each.error == pytest.approx(np.sqrt(each.value * (1 - each.value) / 359))
        assert each.seconds > 0
    assert found["cnn_accuracy"].ruler == "LeNet, 50 epochs, batch 128, SGD 0.02 momentum 0.9, decay 0.0001, x0.1 after 40"
    assert "GS-WGAN" in found["mlp_accuracy"].ruler


def test_shuffled_labels_are_chance(train, test_set):
    """So that the test above can fail. 359 images: three standard errors around 0.1 end at 0.15."""
    mixed = train.labels[torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(0))]
    for reading in downstream(train.images[:300], mixed[:300], test_set, ("logistic", "cnn")):
        assert reading.value < 0.22


def test_the_seed_replays(train, test_set):
    small = train.images[:60], train.labels[:60]
    one, two = (downstream(*small, test_set, ("cnn",), seed=5)[0] for _ in range(2))
    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(two, seconds=0)


def test_a_number_of_a_sensitive_test_set_is_not_publishable(train):
    images, labels = np.zeros((4, 1, 8, 8), np.float32), np.arange(4) % 2
    spec = Spec((1, 8, 8), 10)
    for kind, publishable in ((Sensitive, False), (Public, True)):
        [reading] = downstream(train.images[:100], train.labels[:100], kind(images, labels, spec, name="x"), ("logistic",))
        assert isinstance(reading, Reading)
        assert reading.publishable is publishable


def test_progress_sees_stages_and_steps_alone(train, test_set):
    seen = []
    downstream(
        train.images[:100], train.labels[:100], test_set, ("cnn", "logistic"), progress=lambda *step, **more: seen.append((step, more))
    )
    assert {step[0] for step, _ in seen} == {"training cnn", "training the classical classifiers"}
    assert all(more == {} for _, more in seen)  # no loss, no accuracy on the way
    assert seen[-1][0][1:] == (1, 1)


@pytest.fixture(scope="module")
def thirteen(train, test_set):
    """All thirteen on a hundred digits, without and with a ceiling."""
    small = train.images[:100], train.labels[:100]
    first = downstream(*small, test_set, THIRTEEN)
    ceiling = [dataclasses.replace(each, value=0.5 + place / 40) for place, each in enumerate(first)]
    return first, ceiling, downstream(*small, test_set, THIRTEEN, ceiling=ceiling)


def test_the_thirteen_have_a_mean(thirteen):
    first, _, again = thirteen
    assert [each.name for each in first] == [*(f"{name}_accuracy" for name in THIRTEEN), "avg_accuracy"]
    assert first[-1].value == pytest.approx(np.mean([each.value for each in first[:13]]))
    assert first[-1].seconds == pytest.approx(sum(each.seconds for each in first[:13]))
    assert 0 < first[-1].error < np.mean([each.error for each in first[:13]]) + 1e-12  # errors of one test set add up at most
    assert 0.3 < first[-1].value < 1
    assert [each.value for each in again[:14]] == [each.value for each in first]


def test_the_calibrated_accuracy_is_the_mean_of_ratios_to_real_data(thirteen):
    first, ceiling, again = thirteen
    assert again[-1].name == "calibrated_accuracy"
    ratios = [each.value / top.value for each, top in zip(first[:13], ceiling[:13], strict=True)]
    assert again[-1].value == pytest.approx(np.mean(ratios))
    assert again[-1].publishable
    assert again[-1].count == 359


def test_a_number_that_rests_on_a_secret_ceiling_is_secret(train, test_set, thirteen, monkeypatch):
    monkeypatch.setitem(downstream.__globals__, "THIRTEEN", ("gaussian_nb", "lda"))
    _, ceiling, _ = thirteen
    hidden = [dataclasses.replace(each, publishable=each.name != "lda_accuracy") for each in ceiling]
    found = downstream(train.images[:100], train.labels[:100], test_set, ("gaussian_nb", "lda"), ceiling=hidden)
    assert {each.name: each.publishable for each in found} == {
        "gaussian_nb_accuracy": True, "lda_accuracy": True, "avg_accuracy": True, "calibrated_accuracy": False,
    }  # fmt: skip


def test_fewer_than_thirteen_have_neither_and_another_ceiling_is_refused(train, test_set, thirteen, monkeypatch):
    small = train.images[:100], train.labels[:100]
    names = [each.name for each in downstream(*small, test_set, ("lda", "gaussian_nb"), ceiling=thirteen[1])]
    assert names == ["lda_accuracy", "gaussian_nb_accuracy"]
    monkeypatch.setitem(downstream.__globals__, "THIRTEEN", ("gaussian_nb", "lda"))
    sound = [each for each in thirteen[1] if each.name in ("lda_accuracy", "gaussian_nb_accuracy")]
    assert downstream(*small, test_set, ("gaussian_nb", "lda"), ceiling=sound)[-1].name == "calibrated_accuracy"
    for wrong in ({"reference": "mnist/test"}, {"ruler": "another"}, {"value": 0.0}, {"name": "svm_accuracy"}):
        with pytest.raises(SettingError, match="ceiling"):
            downstream(*small, test_set, ("gaussian_nb", "lda"), ceiling=[dataclasses.replace(sound[0], **wrong), sound[1]])


def test_long_protocols_shrink_on_large_sets_and_drops_with_them():
    long = NETWORKS["convnet"][1]
    assert shortened(long, 500) == long
    found = shortened(long, 60_000)
    assert found.epochs * (60_000 // long.batch) == pytest.approx(STEPS, rel=0.02)
    assert found.drops[0] / found.epochs == pytest.approx(0.5, abs=0.02)
    assert dataclasses.replace(found, epochs=long.epochs, drops=long.drops) == long
    for name in ("cnn", "resnet"):
        assert shortened(NETWORKS[name][1], 10**6) == NETWORKS[name][1]


def test_what_is_refused(train, test_set):
    with pytest.raises(SettingError, match=r"no classifier 'oracle': logistic, random_forest, .*xgboost, cnn, convnet, resnet$"):
        downstream(train.images, train.labels, test_set, ("logistic", "oracle"))
    with pytest.raises(SettingError, match=r"\[1, 8, 8\].*\[1, 7, 8\]"):
        downstream(train.images[:, :, 1:], train.labels, test_set)
    with pytest.raises(SettingError, match="two classes"):
        downstream(train.images[:3], torch.zeros(3, dtype=torch.int64), test_set)
    with pytest.raises(SettingError, match="two classes"):
        downstream(train.images[:3], train.labels[:2], test_set)
