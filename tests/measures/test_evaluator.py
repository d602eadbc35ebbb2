"""All measures through one pipeline: names, what is refused, published, and what progress shows."""

import dataclasses
import math

import pytest
import torch
from support.factories import make_release
from support.noise_data import make_generator, make_noise_data

from privot import io
from privot.data import Public, Sensitive
from privot.errors import DataError, SettingError
from privot.measures import (
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

pytestmark = pytest.mark.usefixtures("one_thread")
INCEPTION = ["fid", "kid", "precision", "recall", "density", "coverage"]
DOMAIN = [f"domain_{name}" for name in ("fd", "kd", *INCEPTION[2:])]


@pytest.fixture(autouse=True)
def empty_data_folders(monkeypatch, tmp_path):
    """No weights anywhere, and a score classifier of one epoch."""

    def build(shape, classes):
        return ConvNet(shape, classes, width=4, depth=1)

    monkeypatch.setattr(io, "list_data_folders", lambda: [tmp_path / "data"])
    monkeypatch.setattr(inception_score, "SCORE_CLASSIFIER_RECIPE", Recipe(1, 0.01))
    monkeypatch.setattr(inception_score, "VGG11", build)
    return tmp_path / "data"


@pytest.fixture
def inception(monkeypatch):
    """Eight pixels in place of the Inception network; the images that went through it."""
    seen = []

    def extract(images, progress):
        seen.append(images)
        for count in range(len(images)):
            progress("Inception features", count + 1, len(images))
        return images.flatten(1)[:, 20:28]

    def classify(images, progress):
        return extract(images, progress).softmax(1)

    extractor = FeatureExtractor("", "eight pixels", True, extract, classify)
    monkeypatch.setattr(reference, "load_inception_extractor", lambda *_: extractor)
    return seen


def make_real(kind=Public, count=90, seed=0, **more):
    return make_noise_data(kind, count, seed, **more)


def make_samples(count=60, seed=7):
    images = torch.rand(count, 1, 8, 8, generator=make_generator(seed))
    return Samples("noise", images, torch.arange(count) % 3, 3, publishable=True)


def list_names(results):
    return [result.name for result in results]


def measure_by_name(*args, **more):
    return {result.name: result for result in measure(*args, **more)}


# Names


def test_groups_are_spelt_out_and_nothing_comes_twice():
    assert expand_metrics(["fid", "cnn", "fid"]) == ("fid", "cnn")
    assert expand_metrics(["gs_wgan"]) == GS_WGAN_CLASSIFIERS
    assert len(GS_WGAN_CLASSIFIERS) == 13
    others = [name for name in METRIC_GROUPS["default"] if name != "cnn"]
    assert expand_metrics(["cnn", "default"]) == ("cnn", *others)
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
    reason = rf"^There is no metric '{slip}'\. Did you mean '{meant}'\?$"
    with pytest.raises(SettingError, match=reason):
        expand_metrics(["fid", slip])


@pytest.mark.parametrize("name", ["", "oracle", "FID"])
def test_a_name_near_none_is_answered_by_all(name):
    with pytest.raises(SettingError) as refusal:
        expand_metrics([name])
    for choice in ("fid", "imagenet_is", "gs_wgan", *DOWNSTREAM_CLASSIFIERS):
        assert choice in str(refusal.value)


# Feature extractors


@pytest.mark.parametrize("damaged", [False, True])
def test_without_sound_weights_only_domain_numbers_come_back(empty_data_folders, damaged):
    path = empty_data_folders / "weights" / INCEPTION_WEIGHTS
    if damaged:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"junk")
    cautions = []
    metrics = ["kid"] if damaged else ["fid", "kid", "precision"]
    results = measure(make_samples(), make_real(), metrics, on_warning=cautions.append)
    assert list_names(results) == DOMAIN  # never a number under the name of another extractor
    assert not any("Inception" in result.protocol for result in results)
    assert INCEPTION_WEIGHTS in cautions[0]
    reason = f"{INCEPTION_WEIGHTS}: not the weights" if damaged else str(path.parent)
    assert reason in cautions[0]
    assert cautions[0].endswith("The domain_ metrics of a small network are measured instead.")


def test_named_weights_that_are_missing_or_damaged_are_refused(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"junk")
    for wrong in ("w.safetensors", "nothing.safetensors"):
        with pytest.raises(DataError, match=f"{wrong}: not the weights"):
            measure(make_samples(), make_real(), ["fid"], inception_weights=tmp_path / wrong)


def test_with_weights_domain_numbers_come_only_if_asked(inception):
    for metrics, names in ((["precision"], INCEPTION[2:]), (["fid", "domain"], ["fid", *DOMAIN])):
        assert list_names(measure(make_samples(), make_real(), metrics)) == names


def test_the_numbers_are_those_of_their_functions(inception):
    samples = make_samples()
    data = make_real()
    metrics = ["fid", "kid", "precision", "sliced", "exact"]
    results = measure_by_name(samples, data, metrics)
    assert list(results)[: len(INCEPTION)] == INCEPTION
    fake = samples.images.flatten(1)
    real = data.records().images.flatten(1)
    features = (real[:, 20:28], fake[:, 20:28])

    def read(name):
        return results[name].value, results[name].standard_error

    frechet = image_metrics.frechet_distance(*features, make_generator())
    assert read("fid") == pytest.approx((frechet.value, frechet.standard_error))
    kernel = image_metrics.kernel_distance(*features, make_generator())
    assert read("kid")[0] == pytest.approx(kernel[0])
    quality = image_metrics.precision_recall(*features)
    for position, name in enumerate(INCEPTION[2:]):
        assert read(name) == pytest.approx((quality[position], quality[position + 4]))
    exact = image_metrics.exact_wasserstein(real, fake).value
    assert read("exact_wasserstein") == pytest.approx((exact, math.nan), rel=1e-5, nan_ok=True)
    assert results["sliced_wasserstein"].value < exact
    lower = {name for name, result in results.items() if result.better == "lower"}
    assert lower == {"fid", "kid", "sliced_wasserstein", "exact_wasserstein"}
    for result in results.values():
        assert (result.num_samples, result.reference_size) == (60, 90)
        assert result.reference == "noise"
        assert result.protocol
        assert result.seconds > 0


def test_features_are_compared_with_the_training_data_where_it_is_named(inception):
    """And neither a protocol nor a warning says which path the data has."""
    test = make_real(seed=1, name="/home/ann/test.npz")
    train = make_real(seed=2, count=120, name="/home/ann/train.npz")
    metrics = ["fid", "is", "domain", "sliced", "gaussian_nb", "cnn"]
    results = measure_by_name(make_samples(), test, metrics, training_data=train)
    for name, result in results.items():
        data, count = (test, 90) if name.endswith("accuracy") else (train, 120)
        assert (result.reference, result.reference_size) == (data.name, count), name
        assert "ann" not in result.protocol + result.warning
    assert 1 <= results["is"].value <= 3


def test_on_a_cpu_a_random_part_goes_through_inception(inception, monkeypatch):
    """Not the first ones: a folder of class folders begins with one class."""
    monkeypatch.setattr(reference, "MAX_INCEPTION_IMAGES_ON_CPU", 30)
    real = make_real(sort=True)
    [fid] = measure(make_samples(), real, ["fid"])
    assert (fid.num_samples, fid.reference_size) == (30, 30)
    images, labels = real.records()
    chosen = [(images == image).flatten(1).all(1).nonzero().item() for image in inception[0]]
    assert len(set(chosen)) == 30
    assert labels[chosen].unique().tolist() == [0, 1, 2]


def test_what_depends_on_the_real_data_alone_is_computed_once(inception):
    metrics = ["fid", "domain", "is"]
    test = make_real(seed=1)
    train = make_real(seed=2)
    evaluator = Evaluator(test, train)
    one, two = (evaluator.measure(make_samples(seed=seed), metrics) for seed in (7, 8))
    assert [len(images) for images in inception] == [90, 60, 60]
    alone = measure(make_samples(seed=8), test, metrics, training_data=train)
    assert [result.value for result in two] == [result.value for result in alone]
    assert list_names(one) == list_names(two)


def test_few_samples_get_a_warning_with_the_bias(inception, monkeypatch):
    cautions = []
    samples = make_samples()
    [few] = measure(samples, make_real(), ["fid"], on_warning=cautions.append)
    sides = (make_real().records().images, samples.images)
    features = (images.flatten(1)[:, 20:28] for images in sides)
    bias = image_metrics.frechet_distance(*features, make_generator()).bias
    assert f"about {bias:.2g} of the value" in few.warning
    assert cautions == [f"fid: {few.warning}"]
    monkeypatch.setattr(image_metrics, "FID_MIN_SAMPLES", 10)
    [enough] = measure(samples, make_real(), ["fid"], on_warning=cautions.append)
    assert (enough.warning, len(cautions)) == ("", 1)


def test_scores_ask_for_training_data_and_for_logits(inception, monkeypatch):
    with pytest.raises(SettingError, match=r'metric "is" needs .*--train'):
        measure(make_samples(), make_real(), ["is"])
    [score] = measure(make_samples(), make_real(), ["imagenet_is"])
    assert (score.name, score.reference, score.reference_size) == ("imagenet_is", "ImageNet", 0)
    bare = FeatureExtractor("", "bare", True, lambda images, progress: images.flatten(1))
    monkeypatch.setattr(reference, "load_inception_extractor", lambda *_: bare)
    with pytest.raises(DataError, match="imagenet_is needs Inception weights with logits"):
        measure(make_samples(), make_real(), ["imagenet_is"])


def test_the_seed_replays(inception):
    metrics = ["fid", "kid", "domain", "sliced", "decision_tree", "is"]
    sides = (make_samples(), make_real(seed=1))
    train = make_real(seed=2)
    one, two, other = (
        [result.value for result in measure(*sides, metrics, seed=seed, training_data=train)]
        for seed in (3, 3, 4)
    )
    assert one == two
    assert one != other


# What may be published, and what progress shows


@pytest.mark.parametrize("train", [None, Public, Sensitive])
@pytest.mark.parametrize("test", [Public, Sensitive])
def test_a_number_is_publishable_only_if_all_real_data_is_public(inception, test, train):
    data = train and make_real(train, seed=2)
    metrics = ["fid", "kid", "precision", "domain", "imagenet_is", "sliced", "exact", "gaussian_nb"]
    if train:
        metrics.append("is")
    results = measure(make_samples(), make_real(test, seed=1), metrics, training_data=data)
    assert len(results) == 16 + bool(train)
    assert {result.publishable for result in results} == {Sensitive not in (test, train)}


def test_numbers_about_unprotected_images_are_not_publishable():
    unprotected = make_release(claim=NoGuarantee("none"))
    for samples, publishable in (
        (dataclasses.replace(make_samples(), publishable=False), False),
        (Samples.from_release(unprotected, "x", 60), False),
        (Samples.from_release(make_release(), "x", 60), True),
    ):
        [result] = measure(samples, make_real(seed=1), ["gaussian_nb"])
        assert result.publishable is publishable


@pytest.mark.parametrize("weights", [True, False])
def test_progress_shows_nothing_of_a_sensitive_set(request, empty_data_folders, weights):
    """privacy: two sets of other size and content, and progress and notices are the same."""
    if weights:
        request.getfixturevalue("inception")
    metrics = [
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
    runs = []
    for turn, count in enumerate((93, 141)):
        seen = []
        results = measure(
            make_samples(),
            make_real(Sensitive, count, seed=turn),
            metrics,
            training_data=make_real(Sensitive, count + 5, seed=10 + turn),
            progress=lambda *step, seen=seen, **facts: seen.append((step, facts)),
            on_warning=seen.append,
        )
        assert not any(result.publishable for result in results)
        runs.append(seen)
    assert runs[0] == runs[1]
    assert any("so few images (60 samples)" in str(event) for event in runs[0])
    assert not empty_data_folders.exists()  # and nothing of it is kept


def test_a_declared_size_may_be_counted(inception):
    steps = []
    real = make_real(Sensitive, 93, size=93)
    measure(make_samples(), real, ["fid"], progress=lambda *step, **_: steps.append(step))
    assert ("Inception features", 93, 93) in steps
