"""The inception score: closed forms, and a judge that is kept if it saw public data and never else."""

import math

import numpy as np
import pytest
import torch

from privot.data import Public, Sensitive, Spec, load_dataset
from privot.errors import DataError
from privot.measures import inception_score as module
from privot.measures.inception_score import inception_score, load_or_train_score_classifier
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.training import Recipe

CPU = torch.device("cpu")


class Small(ConvNet):
    def __init__(self, shape, classes):
        super().__init__(shape, classes, width=4, depth=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """A judge of one epoch, an empty data folder, and one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "SCORE_CLASSIFIER_RECIPE", Recipe(1, 0.05, batch_size=64))
    monkeypatch.setattr(module, "VGG11", Small)
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path / "data"))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def training(monkeypatch):
    """How often a judge was trained."""
    calls = []
    train = module.train_classifier
    monkeypatch.setattr(
        module,
        "train_classifier",
        lambda *args, **more: (calls.append(more["stage"]), train(*args, **more))[1],
    )
    return calls


def box(kind=Public, seed=0, name="box"):
    images = np.random.default_rng(seed).random((80, 1, 8, 8), np.float32)
    return kind(images, np.arange(80) % 4, Spec((1, 8, 8), 4), name=name)


def kept(tmp_path):
    return sorted((tmp_path / "data").rglob("*"))


def score(probabilities, num_splits=1):
    return inception_score(probabilities, torch.Generator().manual_seed(0), num_splits)


@pytest.mark.parametrize("classes", [2, 10, 1008])
def test_the_closed_forms(classes):
    assert score(torch.full((500, classes), 1 / classes))[0] == pytest.approx(1)
    assert score(torch.eye(classes).repeat(5, 1))[0] == pytest.approx(classes)
    assert score(torch.eye(classes)[:1].repeat(500, 1))[0] == pytest.approx(1)


def test_half_sure_images_lie_between():
    """p on one of two classes in turn: the score is exp(log 2 - H(p))."""
    p = 0.9
    rows = torch.tensor([[p, 1 - p], [1 - p, p]]).repeat(50, 1)
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert score(rows)[0] == pytest.approx(2 * math.exp(-entropy), rel=1e-6)


def test_the_score_is_the_mean_over_parts_and_the_error_theirs():
    rows = torch.rand(95, 5, generator=torch.Generator().manual_seed(1)).softmax(1)
    order = torch.randperm(95, generator=torch.Generator().manual_seed(0))
    parts = [each.double().numpy() for each in rows[order].chunk(10)]
    scores = [np.exp(np.mean(np.sum(part * np.log(part / part.mean(0)), 1))) for part in parts]
    value, error = score(rows, num_splits=10)
    assert value == pytest.approx(np.mean(scores))
    assert error == pytest.approx(np.std(scores, ddof=1) / 10**0.5)


def test_one_part_has_no_error_and_few_images_make_fewer_parts():
    assert math.isnan(score(torch.eye(3))[1])
    assert score(torch.eye(3), num_splits=10)[0] == pytest.approx(
        1
    )  # parts of one image each: nothing to differ from


def test_a_judge_of_public_data_is_kept_and_read_back(tmp_path, training):
    images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    one, text = load_or_train_score_classifier(box(), CPU)
    assert [path.suffix for path in kept(tmp_path)] == [
        "",
        ".safetensors",
    ]  # no part of a file beside it
    two, again = load_or_train_score_classifier(box(), CPU)
    assert training == ["training the score classifier"]
    assert text == again
    assert torch.equal(one.predict_proba(images), two.predict_proba(images))
    assert not two.net.training


def test_other_records_seeds_and_recipes_get_a_judge_of_their_own(tmp_path, training, monkeypatch):
    load_or_train_score_classifier(box(), CPU)
    load_or_train_score_classifier(box(seed=1), CPU)
    load_or_train_score_classifier(box(), CPU, seed=1)
    monkeypatch.setattr(module, "SCORE_CLASSIFIER_RECIPE", Recipe(2, 0.05))
    load_or_train_score_classifier(box(), CPU)
    assert len(training) == len([path for path in kept(tmp_path) if path.is_file()]) == 4


def test_a_judge_of_sensitive_data_touches_no_disk(tmp_path, training):
    """privacy: its weights are a function of the records."""
    for _ in range(2):
        made, _ = load_or_train_score_classifier(box(Sensitive), CPU)
    assert made.predict_proba(torch.rand(3, 1, 8, 8)).shape == (3, 4)
    assert len(training) == 2
    assert list(tmp_path.iterdir()) == []
    load_or_train_score_classifier(
        box(), CPU
    )  # nor is one of the same records taken from where the public kind lies
    load_or_train_score_classifier(box(Sensitive), CPU)
    assert len(training) == 4


@pytest.mark.parametrize("harm", [b"", b"junk", None])
def test_a_damaged_judge_is_one_clear_line(tmp_path, harm):
    load_or_train_score_classifier(box(), CPU)
    [path] = [each for each in kept(tmp_path) if each.is_file()]
    path.write_bytes(path.read_bytes()[:-20] if harm is None else harm)
    with pytest.raises(
        DataError, match=r"score_classifiers/.*safetensors: the cached score classifier is damaged"
    ) as refusal:
        load_or_train_score_classifier(box(), CPU)
    assert "\n" not in str(refusal.value)
    path.unlink()
    load_or_train_score_classifier(box(), CPU)


def test_a_folder_that_cannot_be_written_costs_the_judge_not_the_score(tmp_path):
    (tmp_path / "data").write_text("a file where a folder should be")
    made, _ = load_or_train_score_classifier(box(), CPU)
    assert made.predict_proba(torch.rand(2, 1, 8, 8)).shape == (2, 4)


def test_the_description_names_the_protocol_and_no_place_on_this_machine():
    _, text = load_or_train_score_classifier(box(name="/home/ann/scans.npz"), CPU)
    assert "VGG11-BN" in text
    assert "1 epochs, batch 64" in text
    assert "ann" not in text


def test_a_trained_judge_tells_real_digits_from_noise(monkeypatch):
    """Without this a low score could be the judge's fault."""
    monkeypatch.setattr(
        module, "SCORE_CLASSIFIER_RECIPE", Recipe(8, 0.01, batch_size=32, use_adam=True)
    )
    monkeypatch.setattr(module, "VGG11", lambda shape, classes: ConvNet(shape, classes, width=16))
    made, _ = load_or_train_score_classifier(load_dataset("digits", public=True), CPU)
    digits = load_dataset("digits", "test", public=True).records().images
    noise = torch.rand(359, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    high, low = (score(made.predict_proba(each))[0] for each in (digits, noise))
    assert 6 < high <= 10
    assert low < high - 2
