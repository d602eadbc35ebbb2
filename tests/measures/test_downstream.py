"""Downstream accuracy: high on real data, chance on nonsense, and never publishable when the test set is sensitive."""

import dataclasses

import numpy as np
import pytest
import torch
from support.noise_data import make_generator

from privot.data import Public, Sensitive, Spec, load_dataset
from privot.errors import SettingError
from privot.measures import MetricResult, downstream, downstream_networks, measure_downstream
from privot.measures.downstream import GS_WGAN_CLASSIFIERS
from privot.measures.downstream_networks import (
    DOWNSTREAM_NETWORKS,
    MAX_TRAINING_STEPS,
    shorten_recipe,
)
from privot.nets.augment import AUGMENTATIONS
from privot.nets.training import Classifier

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def train():
    return load_dataset("digits", public=True).records()


@pytest.fixture(scope="module")
def small(train):
    """(images, labels) of a hundred digits."""
    return train.images[:100], train.labels[:100]


@pytest.fixture(scope="module")
def test_set():
    return load_dataset("digits", "test", public=True)


def measure_by_name(*args, **more):
    return {result.name: result for result in measure_downstream(*args, **more)}


@pytest.mark.slow
def test_real_digits_are_recognised(train, test_set):
    """Without this a low accuracy on released data could be the classifier's fault."""
    results = measure_by_name(train.images, train.labels, test_set)
    assert results["logistic_accuracy"].value > 0.9
    assert results["mlp_accuracy"].value > 0.9
    assert results["cnn_accuracy"].value > 0.93


def test_shuffled_labels_are_chance(train, test_set):
    """So that the test above can fail. Three standard errors of 359 around 0.1 end at 0.15."""
    mixed = train.labels[torch.randperm(len(train.labels), generator=make_generator())]
    names = ("logistic", "cnn")
    for result in measure_downstream(train.images[:300], mixed[:300], test_set, names):
        assert result.value < 0.22


def test_the_seed_replays_and_progress_sees_stages_and_steps_alone(small, test_set):
    steps = []

    def note(*step, **facts):
        steps.append((*step, facts))

    def measure(*names):
        [result, *_] = measure_downstream(*small, test_set, names, seed=5, progress=note)
        return dataclasses.replace(result, seconds=0)

    assert measure("cnn") == measure("cnn", "gaussian_nb")
    stages = {stage for stage, *_ in steps}
    assert stages == {"training cnn", "training the classical classifiers"}
    assert all(facts == {} for *_, facts in steps)  # no loss, no accuracy on the way
    assert steps[-1][1:3] == (1, 1)


@pytest.mark.parametrize("kind", [Sensitive, Public])
def test_only_a_number_of_a_public_test_set_is_publishable(small, kind):
    images = np.zeros((4, 1, 8, 8), np.float32)
    data = kind(images, np.arange(4) % 2, Spec((1, 8, 8), 10), name="x")
    [result] = measure_downstream(*small, data, ("logistic",))
    assert isinstance(result, MetricResult)
    assert result.publishable is (kind is Public)


# Averages


def test_the_thirteen_have_a_mean(small, test_set):
    *results, mean = measure_downstream(*small, test_set, GS_WGAN_CLASSIFIERS)
    names = [result.name for result in results]
    assert names == [f"{name}_accuracy" for name in GS_WGAN_CLASSIFIERS]
    for result in results:
        assert (result.reference, result.reference_size) == ("digits/test", 359)
        assert (result.num_samples, result.better) == (100, "higher")
        error = np.sqrt(result.value * (1 - result.value) / 359)
        assert result.standard_error == pytest.approx(error)
        assert result.seconds > 0
    protocols = {result.name: result.protocol for result in results}
    assert protocols["cnn_accuracy"] == (
        "LeNet, 50 epochs, batch 128, SGD 0.02 momentum 0.9, weight decay 0.0001, "
        "rate x0.1 after epochs 40"
    )
    assert "GS-WGAN" in protocols["mlp_accuracy"]
    assert mean.name == "avg_accuracy"
    assert mean.value == pytest.approx(np.mean([result.value for result in results]))
    assert mean.seconds == pytest.approx(sum(result.seconds for result in results))
    # errors of one test set add up at most
    assert 0 < mean.standard_error < np.mean([result.standard_error for result in results]) + 1e-12
    assert 0.3 < mean.value < 1


@pytest.fixture
def measure_two(small, test_set, monkeypatch):
    """Measure by the whole group, cut to two, with these results on real data: {name: result}."""
    names = ("gaussian_nb", "lda")
    monkeypatch.setattr(downstream, "GS_WGAN_CLASSIFIERS", names)

    def run(ceiling=None):
        return measure_by_name(*small, test_set, names, real_data_results=ceiling)

    return run


def test_the_calibrated_accuracy_is_the_mean_of_ratios_to_real_data(measure_two):
    plain = measure_two()
    assert list(plain) == ["gaussian_nb_accuracy", "lda_accuracy", "avg_accuracy"]
    ceiling = [
        dataclasses.replace(result, value=0.5 + number / 40)
        for number, result in enumerate(plain.values())
    ]
    results = measure_two(ceiling)
    calibrated = results.pop("calibrated_accuracy")
    assert results.keys() == plain.keys()
    assert all(results[name].value == result.value for name, result in plain.items())
    names = list(plain)[:2]
    ratios = [plain[name].value / top.value for name, top in zip(names, ceiling, strict=False)]
    assert calibrated.value == pytest.approx(np.mean(ratios))
    assert (calibrated.publishable, calibrated.reference_size) == (True, 359)
    hidden = [ceiling[0], dataclasses.replace(ceiling[1], publishable=False)]
    publishable = {name: result.publishable for name, result in measure_two(hidden).items()}
    assert publishable == {**dict.fromkeys(plain, True), "calibrated_accuracy": False}
    for wrong in (
        {"reference": "mnist/test"},
        {"protocol": "another"},
        {"value": 0.0},
        {"name": "svm_accuracy"},
    ):
        with pytest.raises(SettingError, match="calibrated accuracy needs"):
            measure_two([dataclasses.replace(ceiling[0], **wrong), ceiling[1]])


def test_fewer_than_the_group_have_no_average(small, test_set):
    names = ("lda", "gaussian_nb")
    ceiling = measure_downstream(*small, test_set, names)
    assert [result.name for result in ceiling] == ["lda_accuracy", "gaussian_nb_accuracy"]
    again = measure_by_name(*small, test_set, names, real_data_results=ceiling)
    assert list(again) == ["lda_accuracy", "gaussian_nb_accuracy"]


def test_refuses_wrong_names_shapes_and_labels(train, test_set):
    images, labels = train
    three = images[:3]
    for reason, request in (
        (
            r"no classifier 'oracle'. Choose from logistic, .*xgboost, cnn, convnet, resnet.$",
            (images, labels, test_set, ("logistic", "oracle")),
        ),
        (r"\[1, 8, 8\].*\[1, 7, 8\]", (images[:, :, 1:], labels, test_set)),
        ("two classes", (three, torch.zeros(3, dtype=torch.int64), test_set)),
        ("two classes", (three, labels[:2], test_set)),
    ):
        with pytest.raises(SettingError, match=reason):
            measure_downstream(*request)


# Networks


def test_long_protocols_shrink_on_large_sets_and_drops_with_them():
    long = DOWNSTREAM_NETWORKS["convnet"][1]
    assert shorten_recipe(long, 500) == shorten_recipe(long, 11 * 256) == long
    short = shorten_recipe(long, 60_000)
    steps = short.epochs * (60_000 // long.batch_size)
    assert steps == pytest.approx(MAX_TRAINING_STEPS, rel=0.02)
    assert short.lr_milestones[0] / short.epochs == pytest.approx(0.5, abs=0.02)
    assert dataclasses.replace(short, epochs=long.epochs, lr_milestones=long.lr_milestones) == long
    for name in ("cnn", "resnet"):
        recipe = DOWNSTREAM_NETWORKS[name][1]
        assert shorten_recipe(recipe, 10**6) == recipe


def test_the_convnet_s_number_is_the_mean_of_its_trainings_and_their_spread(
    small, test_set, monkeypatch
):
    build, recipe = DOWNSTREAM_NETWORKS["convnet"]
    recipe = dataclasses.replace(recipe, epochs=8, lr_milestones=(6,), num_repeats=2)
    monkeypatch.setitem(DOWNSTREAM_NETWORKS, "convnet", (build, recipe))
    seen = []
    predict = Classifier.predict
    monkeypatch.setattr(
        Classifier, "predict", lambda self, images: seen.append(predict(self, images)) or seen[-1]
    )
    [result] = measure_downstream(*small, test_set, ["convnet"])
    [predictions] = seen
    values = (predictions == test_set.records().labels).double().mean(1)
    assert values.shape == (2,)
    assert result.value == pytest.approx(values.mean().item())
    assert result.value > 0.4
    assert result.standard_error == pytest.approx(values.std().item())
    assert result.standard_error > 0
    assert result.reference_size == 359
    assert result.protocol == (
        "ConvNet, 8 epochs, batch 256, SGD 0.01 momentum 0.9, weight decay 0.0005, "
        "rate x0.1 after epochs 6, augmented by color/crop/cutout/scale/rotate, "
        "2 trainings; mean over the trainings, the error is their standard deviation"
    )


def test_the_convnet_s_protocol_is_the_condensation_papers():
    published = {
        "epochs": 1000,
        "lr_milestones": (500,),
        "batch_size": 256,
        "num_repeats": 5,
        "augmentations": AUGMENTATIONS,
        "learning_rate": 0.01,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "use_adam": False,
        "even_batches": True,
    }
    assert dataclasses.asdict(DOWNSTREAM_NETWORKS["convnet"][1]).items() >= published.items()


@pytest.fixture
def trainings(monkeypatch):
    """What would have been trained: name of the network -> (labels, recipe)."""
    seen = {}

    class Blind:
        def predict(self, images):
            shape = (seen["ConvNet"][1].num_repeats,) if seen.keys() == {"ConvNet"} else ()
            return torch.zeros(*shape, len(images), dtype=torch.int64)

    def train(build, images, labels, classes, recipe, device, **more):
        seen[build.__name__] = (labels, recipe)
        return Blind()

    monkeypatch.setattr(downstream_networks, "train_classifier", train)
    return seen


@pytest.mark.parametrize(
    ("channels", "flip_invariant", "flipped"),
    [(1, None, False), (3, None, True), (1, True, True), (3, False, False)],
)
def test_grey_images_are_not_flipped_and_colour_ones_are_unless_declared(
    trainings, channels, flip_invariant, flipped
):
    spec = Spec((channels, 8, 8), 10, flip_invariant=flip_invariant)
    data = Public(np.zeros((4, channels, 8, 8), np.float32), np.arange(4), spec, name="x")
    images = torch.rand(20, channels, 8, 8)
    measure_downstream(images, torch.arange(20) % 10, data, ["convnet"])
    without = ("color", "crop", "cutout", "scale", "rotate")
    assert trainings["ConvNet"][1].augmentations == (AUGMENTATIONS if flipped else without)


def test_networks_learn_soft_labels_and_classical_classifiers_hard_ones(
    train, test_set, trainings, monkeypatch
):
    images = train.images[:40]
    labels = torch.arange(40) % 8
    soft = torch.rand(40, 8).softmax(1)
    hard = []
    fit_predict_all = downstream.fit_predict_all

    def spy(names, records, *rest, **more):
        hard.append(records.labels)
        return fit_predict_all(names, records, *rest, **more)

    monkeypatch.setattr(downstream, "fit_predict_all", spy)
    names = ("cnn", "resnet", "gaussian_nb")
    results = measure_downstream(images, labels, test_set, names, soft_labels=soft)
    # the test data has two classes more, which have no part in it
    expected = torch.cat([soft, torch.zeros(40, 2)], 1)
    for name in ("LeNet", "ResNet18"):
        assert torch.equal(trainings[name][0], expected)
    assert torch.equal(hard[0], labels)
    assert ["soft labels" in result.protocol for result in results] == [True, True, False]
    plain = measure_downstream(images, labels, test_set, ("cnn", "gaussian_nb"))
    assert not any("soft" in result.protocol for result in plain)
    for wrong in (soft[:39], torch.rand(40, 11).softmax(1)):
        with pytest.raises(SettingError, match="soft labels"):
            measure_downstream(images, labels, test_set, ("cnn",), soft_labels=wrong)


def test_soft_labels_decide_what_a_network_predicts(train, test_set):
    """Hard labels of nonsense beside soft ones that are right."""
    images = train.images[:400]
    soft = torch.nn.functional.one_hot(train.labels[:400], 10) * 0.9 + 0.01
    nonsense = train.labels[torch.randperm(400, generator=make_generator())]
    [result] = measure_downstream(images, nonsense, test_set, ("cnn",), soft_labels=soft)
    assert result.value > 0.8
