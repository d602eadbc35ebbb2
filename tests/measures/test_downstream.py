"""Downstream accuracy: high on real data, chance on nonsense, and never publishable when the test set is sensitive."""

import dataclasses

import numpy as np
import pytest
import torch

from privot.data import Public, Sensitive, Spec, load
from privot.errors import SettingError
from privot.measures import Reading, downstream


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Networks this small are slower on two, the more so when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        assert each.reference == "digits/test"
        assert each.error == pytest.approx(np.sqrt(each.value * (1 - each.value) / 359))
        assert each.seconds > 0


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
    assert {step[0] for step, _ in seen} == {"training the CNN", "training the logistic regression"}
    assert all(more == {} for _, more in seen)  # no loss, no accuracy on the way
    assert seen[-1][0][1:] == (1, 1)


def test_what_is_refused(train, test_set):
    with pytest.raises(SettingError, match="no classifier 'oracle': logistic, mlp, cnn"):
        downstream(train.images, train.labels, test_set, ("logistic", "oracle"))
    with pytest.raises(SettingError, match=r"\[1, 8, 8\].*\[1, 7, 8\]"):
        downstream(train.images[:, :, 1:], train.labels, test_set)
    with pytest.raises(SettingError, match="two classes"):
        downstream(train.images[:3], torch.zeros(3, dtype=torch.int64), test_set)
    with pytest.raises(SettingError, match="two classes"):
        downstream(train.images[:3], train.labels[:2], test_set)
