"""Downstream accuracy: high on real data, chance on nonsense, and never publishable when the test set is sensitive."""

import dataclasses

import numpy as np
import pytest
import torch

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
def test_set():
    return load_dataset("digits", "test", public=True)


def test_real_digits_are_recognised(train, test_set):
    """Without this a low accuracy on released data could be the classifier's fault."""
    found = {each.name: each for each in measure_downstream(train.images, train.labels, test_set)}
    assert found["logistic_accuracy"].value > 0.9
    assert found["mlp_accuracy"].value > 0.9
    assert found["cnn_accuracy"].value > 0.93
    for each in found.values():
        assert each.reference_size == 359
        assert (each.reference, each.num_samples) == ("digits/test", 1438)
        assert each.better == "higher"
        assert each.standard_error == pytest.approx(np.sqrt(each.value * (1 - each.value) / 359))
        assert each.seconds > 0
    assert (
        found["cnn_accuracy"].protocol
        == "LeNet, 50 epochs, batch 128, SGD 0.02 momentum 0.9, weight decay 0.0001, "
        "rate x0.1 after epochs 40"
    )
    assert "GS-WGAN" in found["mlp_accuracy"].protocol


def test_shuffled_labels_are_chance(train, test_set):
    """So that the test above can fail. 359 images: three standard errors around 0.1 end at 0.15."""
    mixed = train.labels[
        torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(0))
    ]
    for reading in measure_downstream(
        train.images[:300], mixed[:300], test_set, ("logistic", "cnn")
    ):
        assert reading.value < 0.22


def test_the_seed_replays(train, test_set):
    small = train.images[:60], train.labels[:60]
    one, two = (measure_downstream(*small, test_set, ("cnn",), seed=5)[0] for _ in range(2))
    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(two, seconds=0)


def test_a_number_of_a_sensitive_test_set_is_not_publishable(train):
    images = np.zeros((4, 1, 8, 8), np.float32)
    labels = np.arange(4) % 2
    spec = Spec((1, 8, 8), 10)
    for kind, publishable in ((Sensitive, False), (Public, True)):
        [reading] = measure_downstream(
            train.images[:100],
            train.labels[:100],
            kind(images, labels, spec, name="x"),
            ("logistic",),
        )
        assert isinstance(reading, MetricResult)
        assert reading.publishable is publishable


def test_progress_sees_stages_and_steps_alone(train, test_set):
    seen = []
    measure_downstream(
        train.images[:100],
        train.labels[:100],
        test_set,
        ("cnn", "logistic"),
        progress=lambda *step, **more: seen.append((step, more)),
    )
    assert {step[0] for step, _ in seen} == {"training cnn", "training the classical classifiers"}
    assert all(more == {} for _, more in seen)  # no loss, no accuracy on the way
    assert seen[-1][0][1:] == (1, 1)


@pytest.fixture(scope="module")
def thirteen(train, test_set):
    """All thirteen on a hundred digits, without and with a ceiling."""
    small = train.images[:100], train.labels[:100]
    first = measure_downstream(*small, test_set, GS_WGAN_CLASSIFIERS)
    ceiling = [
        dataclasses.replace(each, value=0.5 + place / 40) for place, each in enumerate(first)
    ]
    return (
        first,
        ceiling,
        measure_downstream(*small, test_set, GS_WGAN_CLASSIFIERS, real_data_results=ceiling),
    )


def test_the_thirteen_have_a_mean(thirteen):
    first, _, again = thirteen
    assert [each.name for each in first] == [
        *(f"{name}_accuracy" for name in GS_WGAN_CLASSIFIERS),
        "avg_accuracy",
    ]
    assert first[-1].value == pytest.approx(np.mean([each.value for each in first[:13]]))
    assert first[-1].seconds == pytest.approx(sum(each.seconds for each in first[:13]))
    assert (
        0 < first[-1].standard_error < np.mean([each.standard_error for each in first[:13]]) + 1e-12
    )  # errors of one test set add up at most
    assert 0.3 < first[-1].value < 1
    assert [each.value for each in again[:14]] == [each.value for each in first]


def test_the_calibrated_accuracy_is_the_mean_of_ratios_to_real_data(thirteen):
    first, ceiling, again = thirteen
    assert again[-1].name == "calibrated_accuracy"
    ratios = [each.value / top.value for each, top in zip(first[:13], ceiling[:13], strict=True)]
    assert again[-1].value == pytest.approx(np.mean(ratios))
    assert again[-1].publishable
    assert again[-1].reference_size == 359


def test_a_number_that_rests_on_a_secret_ceiling_is_secret(train, test_set, thirteen, monkeypatch):
    monkeypatch.setattr(downstream, "GS_WGAN_CLASSIFIERS", ("gaussian_nb", "lda"))
    _, ceiling, _ = thirteen
    hidden = [
        dataclasses.replace(each, publishable=each.name != "lda_accuracy") for each in ceiling
    ]
    found = measure_downstream(
        train.images[:100],
        train.labels[:100],
        test_set,
        ("gaussian_nb", "lda"),
        real_data_results=hidden,
    )
    assert {each.name: each.publishable for each in found} == {
        "gaussian_nb_accuracy": True,
        "lda_accuracy": True,
        "avg_accuracy": True,
        "calibrated_accuracy": False,
    }


def test_fewer_than_thirteen_have_neither_and_another_ceiling_is_refused(
    train, test_set, thirteen, monkeypatch
):
    small = train.images[:100], train.labels[:100]
    names = [
        each.name
        for each in measure_downstream(
            *small, test_set, ("lda", "gaussian_nb"), real_data_results=thirteen[1]
        )
    ]
    assert names == ["lda_accuracy", "gaussian_nb_accuracy"]
    monkeypatch.setattr(downstream, "GS_WGAN_CLASSIFIERS", ("gaussian_nb", "lda"))
    sound = [each for each in thirteen[1] if each.name in ("lda_accuracy", "gaussian_nb_accuracy")]
    assert (
        measure_downstream(*small, test_set, ("gaussian_nb", "lda"), real_data_results=sound)[
            -1
        ].name
        == "calibrated_accuracy"
    )
    for wrong in (
        {"reference": "mnist/test"},
        {"protocol": "another"},
        {"value": 0.0},
        {"name": "svm_accuracy"},
    ):
        with pytest.raises(SettingError, match="calibrated accuracy needs"):
            measure_downstream(
                *small,
                test_set,
                ("gaussian_nb", "lda"),
                real_data_results=[dataclasses.replace(sound[0], **wrong), sound[1]],
            )


def test_long_protocols_shrink_on_large_sets_and_drops_with_them():
    long = DOWNSTREAM_NETWORKS["convnet"][1]
    assert shorten_recipe(long, 500) == shorten_recipe(long, 11 * 256) == long
    found = shorten_recipe(long, 60_000)
    assert found.epochs * (60_000 // long.batch_size) == pytest.approx(MAX_TRAINING_STEPS, rel=0.02)
    assert found.lr_milestones[0] / found.epochs == pytest.approx(0.5, abs=0.02)
    assert dataclasses.replace(found, epochs=long.epochs, lr_milestones=long.lr_milestones) == long
    for name in ("cnn", "resnet"):
        assert shorten_recipe(DOWNSTREAM_NETWORKS[name][1], 10**6) == DOWNSTREAM_NETWORKS[name][1]


def test_what_is_refused(train, test_set):
    with pytest.raises(
        SettingError,
        match=r"no classifier 'oracle'. Choose from logistic, .*xgboost, cnn, convnet, resnet.$",
    ):
        measure_downstream(train.images, train.labels, test_set, ("logistic", "oracle"))
    with pytest.raises(SettingError, match=r"\[1, 8, 8\].*\[1, 7, 8\]"):
        measure_downstream(train.images[:, :, 1:], train.labels, test_set)
    with pytest.raises(SettingError, match="two classes"):
        measure_downstream(train.images[:3], torch.zeros(3, dtype=torch.int64), test_set)
    with pytest.raises(SettingError, match="two classes"):
        measure_downstream(train.images[:3], train.labels[:2], test_set)


@pytest.fixture
def quick(monkeypatch):
    """The ConvNets' protocol cut to two trainings of a few epochs."""
    build, recipe = DOWNSTREAM_NETWORKS["convnet"]
    monkeypatch.setitem(
        DOWNSTREAM_NETWORKS,
        "convnet",
        (build, dataclasses.replace(recipe, epochs=8, lr_milestones=(6,), num_repeats=2)),
    )


def test_the_convnet_s_number_is_the_mean_of_its_trainings_and_their_spread(
    train, test_set, quick, monkeypatch
):
    seen = []
    guesses = Classifier.predict
    monkeypatch.setattr(
        Classifier, "predict", lambda self, images: seen.append(guesses(self, images)) or seen[-1]
    )
    [found] = measure_downstream(train.images[:100], train.labels[:100], test_set, ["convnet"])
    [guessed] = seen
    values = (guessed == test_set.records().labels).double().mean(1)
    assert values.shape == (2,)
    assert found.value == pytest.approx(values.mean().item())
    assert found.value > 0.4
    assert found.standard_error == pytest.approx(values.std().item())
    assert found.standard_error > 0
    assert found.reference_size == 359
    assert found.protocol == (
        "ConvNet, 8 epochs, batch 256, SGD 0.01 momentum 0.9, weight decay 0.0005, "
        "rate x0.1 after epochs 6, augmented by color/crop/cutout/scale/rotate, "
        "2 trainings; mean over the trainings, the error is their standard deviation"
    )


def test_the_convnet_s_protocol_is_the_condensation_papers():
    recipe = DOWNSTREAM_NETWORKS["convnet"][1]
    assert (
        recipe.epochs,
        recipe.lr_milestones,
        recipe.batch_size,
        recipe.num_repeats,
        recipe.augmentations,
    ) == (
        1000,
        (500,),
        256,
        5,
        AUGMENTATIONS,
    )
    assert (
        recipe.learning_rate,
        recipe.momentum,
        recipe.weight_decay,
        recipe.use_adam,
        recipe.even_batches,
    ) == (
        0.01,
        0.9,
        5e-4,
        False,
        True,
    )


@pytest.fixture
def asked(monkeypatch):
    """What `train` is asked for in place of a training: name of the network -> (labels, recipe)."""
    seen = {}

    class Blind:
        def predict(self, images):
            return (
                torch.zeros(
                    seen["ConvNet"][1].num_repeats if seen.keys() == {"ConvNet"} else 1, len(images)
                )
                .squeeze(0)
                .long()
            )

    def train(build, images, labels, classes, recipe, device, **more):
        seen[build.__name__] = (labels, recipe)
        return Blind()

    monkeypatch.setattr(downstream_networks, "train_classifier", train)
    return seen


def test_grey_images_are_not_mirrored_and_colour_ones_are_unless_declared(asked):
    without = ("color", "crop", "cutout", "scale", "rotate")
    for channels, mirror, operations in (
        (1, None, without),
        (3, None, AUGMENTATIONS),
        (1, True, AUGMENTATIONS),
        (3, False, without),
    ):
        images = torch.rand(20, channels, 8, 8)
        labels = torch.arange(20) % 10
        test = Public(
            np.zeros((4, channels, 8, 8), np.float32),
            np.arange(4),
            Spec((channels, 8, 8), 10, flip_invariant=mirror),
            name="x",
        )
        measure_downstream(images, labels, test, ["convnet"])
        assert asked["ConvNet"][1].augmentations == operations


def test_networks_learn_soft_labels_and_classical_classifiers_hard_ones(
    train, test_set, asked, monkeypatch
):
    soft = torch.rand(40, 8).softmax(1)
    known = {}
    labels = torch.arange(40) % 8
    fit_predict_all = downstream.fit_predict_all

    def spy(names, records, *rest, **more):
        known["labels"] = records.labels
        return fit_predict_all(names, records, *rest, **more)

    monkeypatch.setattr(downstream, "fit_predict_all", spy)
    found = measure_downstream(
        train.images[:40], labels, test_set, ("cnn", "resnet", "gaussian_nb"), soft_labels=soft
    )
    for name in ("LeNet", "ResNet18"):
        assert torch.equal(asked[name][0][:, :8], soft)
        assert asked[name][0].shape == (
            40,
            10,
        )  # the test data has two classes more, which have no part in it
        assert asked[name][0][:, 8:].abs().sum() == 0
    assert torch.equal(known["labels"], labels)
    assert ["soft labels" in each.protocol for each in found] == [True, True, False]
    assert not any(
        "soft" in each.protocol
        for each in measure_downstream(train.images[:40], labels, test_set, ("cnn", "gaussian_nb"))
    )
    for wrong in (soft[:39], torch.rand(40, 11).softmax(1)):
        with pytest.raises(SettingError, match="soft labels"):
            measure_downstream(train.images[:40], labels, test_set, ("cnn",), soft_labels=wrong)


def test_soft_labels_decide_what_a_network_says(train, test_set):
    """Hard labels of nonsense beside soft ones that are right."""
    soft = torch.nn.functional.one_hot(train.labels[:400], 10) * 0.9 + 0.01
    nonsense = train.labels[torch.randperm(400, generator=torch.Generator().manual_seed(0))]
    [found] = measure_downstream(train.images[:400], nonsense, test_set, ("cnn",), soft_labels=soft)
    assert found.value > 0.8
