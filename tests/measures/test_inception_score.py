"""The inception score: closed forms, and a classifier that is cached if its data is public, else never."""

import math

import numpy as np
import pytest
import torch
from support.noise_data import make_generator, make_noise_data

from privot.data import Sensitive, load_dataset
from privot.errors import DataError
from privot.measures import inception_score as module
from privot.measures.inception_score import inception_score, load_or_train_score_classifier
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.training import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


IMAGES = torch.rand(20, 1, 8, 8, generator=make_generator(5))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The empty data folder; classifiers are small and trained for one epoch."""

    def build(shape, classes):
        return ConvNet(shape, classes, width=4, depth=1)

    monkeypatch.setattr(module, "SCORE_CLASSIFIER_RECIPE", Recipe(1, 0.05, batch_size=64))
    monkeypatch.setattr(module, "VGG11", build)
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def trainings(monkeypatch):
    """The stages of all trainings of a score classifier."""
    stages = []
    train = module.train_classifier

    def spy(*args, **more):
        stages.append(more["stage"])
        return train(*args, **more)

    monkeypatch.setattr(module, "train_classifier", spy)
    return stages


def load_classifier(**more):
    return load_or_train_score_classifier(make_noise_data(count=80, classes=4, **more), CPU)


def list_files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def score(probabilities, num_splits=1):
    return inception_score(probabilities, make_generator(), num_splits)


@pytest.mark.parametrize("classes", [2, 10, 1008])
def test_the_closed_forms(classes):
    for rows, expected in (
        (torch.full((500, classes), 1 / classes), 1),
        (torch.eye(classes).repeat(5, 1), classes),
        (torch.eye(classes)[:1].repeat(500, 1), 1),
    ):
        assert score(rows)[0] == pytest.approx(expected)


def test_half_sure_images_lie_between():
    """p on one of two classes in turn: the score is exp(log 2 - H(p))."""
    p = 0.9
    rows = torch.tensor([[p, 1 - p], [1 - p, p]]).repeat(50, 1)
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert score(rows)[0] == pytest.approx(2 * math.exp(-entropy), rel=1e-6)


def test_the_score_is_the_mean_over_parts_and_the_error_theirs():
    rows = torch.rand(95, 5, generator=make_generator(1)).softmax(1)
    order = torch.randperm(95, generator=make_generator())
    parts = [part.double().numpy() for part in rows[order].chunk(10)]
    scores = [np.exp(np.mean(np.sum(part * np.log(part / part.mean(0)), 1))) for part in parts]
    expected = (np.mean(scores), np.std(scores, ddof=1) / 10**0.5)
    assert score(rows, num_splits=10) == pytest.approx(expected)
    assert math.isnan(score(torch.eye(3))[1])  # one part has no error
    # few images make fewer parts, of one image each: nothing to differ from
    assert score(torch.eye(3), num_splits=10)[0] == pytest.approx(1)


def test_a_classifier_of_public_data_is_cached(folder, trainings):
    one, text = load_classifier(name="/home/ann/scans.npz")
    [path] = list_files(folder)
    assert path.suffix == ".safetensors"
    two, again = load_classifier(name="/home/ann/scans.npz")
    assert trainings == ["training the score classifier"]
    assert text == again
    assert torch.equal(one.predict_proba(IMAGES), two.predict_proba(IMAGES))
    assert not two.net.training
    assert "VGG11-BN" in text
    assert "1 epochs, batch 64" in text
    assert "ann" not in text  # nor a path of this machine


def test_other_records_seeds_and_recipes_get_a_classifier_of_their_own(
    folder, trainings, monkeypatch
):
    load_classifier()
    load_classifier(seed=1)
    load_or_train_score_classifier(make_noise_data(count=80, classes=4), CPU, seed=1)
    monkeypatch.setattr(module, "SCORE_CLASSIFIER_RECIPE", Recipe(2, 0.05))
    load_classifier()
    assert len(trainings) == len(list_files(folder)) == 4


def test_a_classifier_of_sensitive_data_touches_no_disk(folder, trainings):
    """privacy: its weights are a function of the records."""
    for _ in range(2):
        classifier, _ = load_classifier(kind=Sensitive)
    assert classifier.predict_proba(IMAGES).shape == (20, 4)
    assert len(trainings) == 2
    assert not folder.exists()
    load_classifier()
    load_classifier(kind=Sensitive)  # is not read from the cache of the same public records
    assert len(trainings) == 4


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: b"junk", lambda data: data[:-20]]
)
def test_a_damaged_classifier_is_refused_in_one_line(folder, damage):
    load_classifier()
    [path] = list_files(folder)
    path.write_bytes(damage(path.read_bytes()))
    reason = r"score_classifiers/.*safetensors: the cached score classifier is damaged"
    with pytest.raises(DataError, match=reason) as refusal:
        load_classifier()
    assert "\n" not in str(refusal.value)
    path.unlink()
    load_classifier()


def test_a_folder_that_cannot_be_written_costs_the_cache_not_the_score(folder):
    folder.write_text("a file where a folder should be")
    assert load_classifier()[0].predict_proba(IMAGES).shape == (20, 4)


@pytest.mark.slow
def test_a_trained_classifier_tells_real_digits_from_noise(monkeypatch):
    """Without this a low score could be the classifier's fault."""
    recipe = Recipe(8, 0.01, batch_size=32, use_adam=True)
    monkeypatch.setattr(module, "SCORE_CLASSIFIER_RECIPE", recipe)
    monkeypatch.setattr(module, "VGG11", lambda shape, classes: ConvNet(shape, classes, width=16))
    classifier, _ = load_or_train_score_classifier(load_dataset("digits", public=True), CPU)
    digits = load_dataset("digits", "test", public=True).records().images
    noise = torch.rand(359, 1, 8, 8, generator=make_generator())
    high, low = (score(classifier.predict_proba(images))[0] for images in (digits, noise))
    assert 6 < high <= 10
    assert low < high - 2
