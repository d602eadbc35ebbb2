"""All measures through one pipeline: names, what is refused, what may be published, and what nobody may watch."""

import dataclasses
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from support.factories import make_release

from privot import io
from privot.data import Public, Sensitive, Spec
from privot.errors import DataError, SettingError
from privot.io import to_jsonable
from privot.measures import (
    MetricResult,
    Samples,
    image_metrics,
    inception_score,
    measure,
    reference,
)
from privot.measures.downstream import DOWNSTREAM_CLASSIFIERS, GS_WGAN_CLASSIFIERS
from privot.measures.evaluator import Evaluator
from privot.measures.feature_extractors import INCEPTION_WEIGHTS, FeatureExtractor
from privot.measures.metric_names import METRIC_GROUPS, expand_metrics
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.training import Recipe
from privot.privacy.guarantee import NoGuarantee

DOMAIN = [
    "domain_fd",
    "domain_kd",
    "domain_precision",
    "domain_recall",
    "domain_density",
    "domain_coverage",
]
INCEPTION = ["fid", "kid", "precision", "recall", "density", "coverage"]


@pytest.fixture(autouse=True)
def empty_data_folders(monkeypatch, tmp_path):
    """No weights anywhere, a judge of one epoch, and one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(io, "list_data_folders", lambda: [tmp_path / "data"])
    monkeypatch.setattr(inception_score, "SCORE_CLASSIFIER_RECIPE", Recipe(1, 0.01))
    monkeypatch.setattr(
        inception_score, "VGG11", lambda shape, classes: ConvNet(shape, classes, width=4, depth=1)
    )
    yield tmp_path / "data"
    torch.set_num_threads(before)


@pytest.fixture
def stand_in(monkeypatch):
    """A ruler in place of the Inception network: eight pixels, and progress image by image; it notes what it saw."""
    seen = []

    def features(images, progress):
        seen.append(images)
        for place in range(len(images)):
            progress("Inception features", place + 1, len(images))
        return images.flatten(1)[:, 20:28]

    ruler = FeatureExtractor(
        "",
        "eight pixels",
        True,
        features,
        lambda images, progress: features(images, progress).softmax(1),
    )
    monkeypatch.setattr(reference, "load_inception_extractor", lambda *_: ruler)
    return seen


def box(kind=Public, count=90, seed=0, size=None, name="box", ordered=False):
    images = np.random.default_rng(seed).random((count, 1, 8, 8), np.float32)
    labels = np.sort(np.arange(count) % 3) if ordered else np.arange(count) % 3
    return kind(images, labels, Spec((1, 8, 8), 3, size), name=name)


def output(count=60, seed=7):
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return Samples("noise", images, torch.arange(count) % 3, 3, publishable=True)


def names(readings):
    return [each.name for each in readings]


# Names


def test_groups_are_spelt_out_and_nothing_comes_twice():
    assert expand_metrics(["fid", "cnn", "fid"]) == ("fid", "cnn")
    assert expand_metrics(["gs_wgan"]) == GS_WGAN_CLASSIFIERS
    assert len(GS_WGAN_CLASSIFIERS) == 13
    assert expand_metrics(["cnn", "default"]) == (
        "cnn",
        *(each for each in METRIC_GROUPS["default"] if each != "cnn"),
    )
    for group in METRIC_GROUPS.values():
        assert expand_metrics(group) == group


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("fdi", "fid"),
        ("precison", "precision"),
        ("logistics", "logistic"),
        ("gs_wgam", "gs_wgan"),
        ("slice", "sliced"),
    ],
)
def test_a_slip_is_answered_by_the_nearest_name(slip, meant):
    with pytest.raises(
        SettingError, match=rf"^There is no metric '{slip}'\. Did you mean '{meant}'\?$"
    ):
        expand_metrics(["fid", slip])


@pytest.mark.parametrize("name", ["", "oracle", "FID"])
def test_a_name_near_none_is_answered_by_all(name):
    with pytest.raises(SettingError) as refusal:
        expand_metrics([name])
    assert all(
        each in str(refusal.value)
        for each in ("fid", "imagenet_is", "gs_wgan", *DOWNSTREAM_CLASSIFIERS)
    )


# Rulers


def test_without_weights_only_domain_numbers_come_back(empty_data_folders):
    told = []
    found = measure(output(), box(), ["fid", "kid", "precision"], on_warning=told.append)
    assert names(found) == DOMAIN
    assert INCEPTION_WEIGHTS in told[0]
    assert str(empty_data_folders / "weights") in told[0]
    assert told[0].endswith("The domain_ metrics of a small network are measured instead.")
    assert (
        names(measure(output(), box(), ["kid"])) == DOMAIN
    )  # never a number under the name of another ruler
    assert not any("Inception" in each.protocol for each in found)


def test_weights_named_and_not_there_are_refused(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"junk")
    for wrong in ("w.safetensors", "nothing.safetensors"):
        with pytest.raises(DataError, match=f"{wrong}: not the weights"):
            measure(output(), box(), ["fid"], inception_weights=tmp_path / wrong)


def test_damaged_weights_that_were_found_are_named_in_the_notice(empty_data_folders):
    (empty_data_folders / "weights").mkdir(parents=True)
    (empty_data_folders / "weights" / INCEPTION_WEIGHTS).write_bytes(b"junk")
    told = []
    assert names(measure(output(), box(), ["fid"], on_warning=told.append)) == DOMAIN
    assert f"{INCEPTION_WEIGHTS}: not the weights" in told[0]


def test_with_weights_domain_numbers_come_only_if_asked(stand_in):
    assert names(measure(output(), box(), ["fid", "kid", "precision"])) == INCEPTION
    assert names(measure(output(), box(), ["precision"])) == INCEPTION[2:]
    assert names(measure(output(), box(), ["fid", "domain"])) == ["fid", *DOMAIN]


def test_the_numbers_are_those_of_their_functions(stand_in):
    subject = output()
    real = box()
    found = {
        each.name: each
        for each in measure(subject, real, ["fid", "kid", "precision", "sliced", "exact"])
    }
    ours = subject.images.flatten(1)
    theirs = real.records().images.flatten(1)
    generator = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    value = image_metrics.frechet_distance(theirs[:, 20:28], ours[:, 20:28], generator())
    assert (found["fid"].value, found["fid"].standard_error) == pytest.approx(
        (value.value, value.standard_error)
    )
    assert found["kid"].value == pytest.approx(
        image_metrics.kernel_distance(theirs[:, 20:28], ours[:, 20:28], generator())[0]
    )
    quality = image_metrics.precision_recall(theirs[:, 20:28], ours[:, 20:28])
    assert [found[name].value for name in INCEPTION[2:]] == pytest.approx(quality[:4])
    assert [found[name].standard_error for name in INCEPTION[2:]] == pytest.approx(quality[4:])
    assert found["exact_wasserstein"].value == pytest.approx(
        image_metrics.exact_wasserstein(theirs, ours).value, rel=1e-5
    )
    assert math.isnan(found["exact_wasserstein"].standard_error)
    assert found["sliced_wasserstein"].value < found["exact_wasserstein"].value
    better = {each.name: each.better for each in found.values()}
    assert {name for name, way in better.items() if way == "lower"} == {
        "fid",
        "kid",
        "sliced_wasserstein",
        "exact_wasserstein",
    }
    for each in found.values():
        assert (each.num_samples, each.reference_size, each.reference) == (60, 90, "box")
        assert each.protocol
        assert each.seconds > 0


def test_features_are_compared_with_the_training_data_where_it_is_named(stand_in):
    test = box(seed=1, name="test")
    train = box(seed=2, count=120, name="train")
    found = {
        each.name: each
        for each in measure(
            output(), test, ["fid", "is", "sliced", "gaussian_nb"], training_data=train
        )
    }
    against = {name: (each.reference, each.reference_size) for name, each in found.items()}
    assert against == {
        "fid": ("train", 120),
        "is": ("train", 120),
        "sliced_wasserstein": ("train", 120),
        "gaussian_nb_accuracy": ("test", 90),
    }
    assert 1 <= found["is"].value <= 3


def test_on_a_cpu_a_random_part_goes_through_inception(stand_in, monkeypatch):
    """Not the first ones: a folder of class folders begins with one class."""
    monkeypatch.setattr(reference, "MAX_INCEPTION_IMAGES_ON_CPU", 30)
    real = box(ordered=True)
    [fid] = measure(output(), real, ["fid"])
    assert (fid.num_samples, fid.reference_size) == (30, 30)
    labels = real.records().labels
    where = [
        (real.records().images == image).flatten(1).all(1).nonzero().item() for image in stand_in[0]
    ]
    assert len(set(where)) == 30
    assert labels[where].unique().tolist() == [0, 1, 2]


def test_what_depends_on_the_real_data_alone_is_computed_once(stand_in):
    bench = Evaluator(box(seed=1), box(seed=2))
    one, two = (bench.measure(output(seed=seed), ["fid", "domain", "is"]) for seed in (7, 8))
    assert [len(images) for images in stand_in] == [90, 60, 60]
    alone = measure(output(seed=8), box(seed=1), ["fid", "domain", "is"], training_data=box(seed=2))
    assert [each.value for each in two] == [each.value for each in alone]
    assert names(one) == names(two)


def test_few_samples_get_a_warning_with_the_bias(stand_in, monkeypatch):
    told = []
    [few] = measure(output(), box(), ["fid"], on_warning=told.append)
    generator = torch.Generator().manual_seed(0)
    bias = image_metrics.frechet_distance(
        box().records().images.flatten(1)[:, 20:28], output().images.flatten(1)[:, 20:28], generator
    ).bias
    assert f"about {bias:.2g} of the value" in few.warning
    assert told == [f"fid: {few.warning}"]
    monkeypatch.setattr(image_metrics, "FID_MIN_SAMPLES", 10)
    told.clear()
    assert measure(output(), box(), ["fid"], on_warning=told.append)[0].warning == ""
    assert told == []


def test_the_inception_score_asks_for_training_data():
    with pytest.raises(SettingError, match=r'metric "is" needs .*--train'):
        measure(output(), box(), ["is"])


def test_the_imagenet_score_asks_for_logits(stand_in, monkeypatch):
    [found] = measure(output(), box(), ["imagenet_is"])
    assert (found.name, found.reference, found.reference_size) == ("imagenet_is", "ImageNet", 0)
    bare = FeatureExtractor("", "bare", True, lambda images, progress: images.flatten(1))
    monkeypatch.setattr(reference, "load_inception_extractor", lambda *_: bare)
    with pytest.raises(DataError, match="imagenet_is needs Inception weights with logits"):
        measure(output(), box(), ["imagenet_is"])


def test_the_seed_replays(stand_in):
    only = ["fid", "kid", "domain", "sliced", "decision_tree", "is"]
    one, two, other = (
        [
            each.value
            for each in measure(output(), box(seed=1), only, training_data=box(seed=2), seed=seed)
        ]
        for seed in (3, 3, 4)
    )
    assert one == two
    assert one != other


# What may be published, and what may be watched


@pytest.mark.parametrize("train", [None, Public, Sensitive])
@pytest.mark.parametrize("test", [Public, Sensitive])
def test_a_number_is_publishable_only_if_all_real_data_is_public(stand_in, test, train):
    real = train and box(train, seed=2)
    only = [
        "fid",
        "kid",
        "precision",
        "domain",
        "imagenet_is",
        "sliced",
        "exact",
        "gaussian_nb",
        *(["is"] if train else []),
    ]
    found = measure(output(), box(test, seed=1), only, training_data=real)
    assert len(found) == 16 + bool(train)
    assert {each.publishable for each in found} == {Sensitive not in (test, train)}


def test_numbers_about_unprotected_images_are_not_publishable():
    for bare in (
        dataclasses.replace(output(), publishable=False),
        Samples.from_release(make_release(claim=NoGuarantee("none")), "x", 60),
    ):
        assert not measure(bare, box(Public, seed=1), ["gaussian_nb"])[0].publishable
    assert measure(
        Samples.from_release(make_release(), "x", 60), box(Public, seed=1), ["gaussian_nb"]
    )[0].publishable


@pytest.mark.parametrize("weights", [True, False])
def test_nobody_watches_a_sensitive_set(request, empty_data_folders, weights):
    """privacy: two sets of other size and content, and whoever reads progress and notices sees no difference."""
    if weights:
        request.getfixturevalue("stand_in")
    seen = []
    for turn, count in enumerate((93, 141)):
        watched = []
        only = [
            "fid",
            "kid",
            "precision",
            "domain",
            "is",
            "sliced",
            "exact",
            "gaussian_nb",
            "bernoulli_nb",
        ]
        found = measure(
            output(),
            box(Sensitive, count, seed=turn),
            only,
            training_data=box(Sensitive, count + 5, seed=10 + turn),
            progress=lambda *step, watched=watched, **facts: watched.append((step, facts)),
            on_warning=watched.append,
        )
        assert not any(each.publishable for each in found)
        seen.append(watched)
    assert seen[0] == seen[1]
    assert any("so few images (60 samples)" in str(each) for each in seen[0])
    assert not empty_data_folders.exists()  # and nothing of it is kept


def test_a_declared_size_may_be_counted(stand_in):
    watched = []
    measure(
        output(),
        box(Sensitive, 93, size=93),
        ["fid"],
        progress=lambda *step, **facts: watched.append(step),
    )
    assert ("Inception features", 93, 93) in watched


def test_readings_go_through_json(stand_in):
    found = measure(output(), box(), ["fid", "exact", "gaussian_nb"])
    text = json.dumps(to_jsonable([asdict(each) for each in found]), allow_nan=False)
    again = [MetricResult.from_json(each) for each in json.loads(text)]
    assert [repr(each) for each in again] == [repr(each) for each in found]
    assert math.isnan(again[1].standard_error)


def test_no_ruler_says_where_the_data_lies(stand_in):
    """A public reading is published with its ruler; its reference the report shortens itself."""
    test = box(seed=1, name="/home/ann/test.npz")
    train = box(seed=2, name="/home/ann/train.npz")
    for each in measure(
        output(), test, ["fid", "domain", "is", "sliced", "gaussian_nb", "cnn"], training_data=train
    ):
        assert "ann" not in each.protocol + each.warning
