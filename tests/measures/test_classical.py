"""The twelve classifiers: the papers' settings, real digits recognised, any labels taken, and the same answer on any number of workers."""

import sys
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    GradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import BernoulliNB, GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier
from support.noise_data import make_generator
from threadpoolctl import threadpool_info, threadpool_limits

from privot.data import load_dataset
from privot.data.dataset import Records
from privot.errors import SettingError
from privot.measures.adaboost import HistogramAdaBoost
from privot.measures.classical import CLASSICAL_CLASSIFIERS, fit_predict, fit_predict_all

PUBLISHED = {  # eval_sklearn.py of GS-WGAN = synth_data_benchmark.py of DP-MERF
    "logistic": LogisticRegression(solver="lbfgs", max_iter=5000),
    "random_forest": RandomForestClassifier(
        n_estimators=100, class_weight="balanced", random_state=3
    ),
    "gaussian_nb": GaussianNB(),
    "bernoulli_nb": BernoulliNB(binarize=0.5),
    "linear_svc": LinearSVC(max_iter=10000, tol=1e-8, loss="hinge", random_state=3),
    "decision_tree": DecisionTreeClassifier(
        class_weight="balanced", criterion="gini", random_state=3
    ),
    "lda": LinearDiscriminantAnalysis(solver="eigen", n_components=9, tol=1e-8, shrinkage=0.5),
    "mlp": MLPClassifier(random_state=3),
    "bagging": BaggingClassifier(max_samples=0.1, n_estimators=20, random_state=3),
    "gbm": GradientBoostingClassifier(subsample=0.1, n_estimators=50, random_state=3),
}
LOWEST = {"adaboost": 0.5, "decision_tree": 0.6, "gbm": 0.5}  # the others above 0.75
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


NAMES = [name for name in CLASSICAL_CLASSIFIERS if name != "xgboost" or find_spec("xgboost")]


@pytest.fixture(scope="module")
def train():
    records = load_dataset("digits", public=True).records()
    return Records(records.images[:500], records.labels[:500])


@pytest.fixture(scope="module")
def real():
    return load_dataset("digits", "test", public=True).records()


@pytest.fixture(scope="module")
def answers(train, real):
    """{name: (predictions, seconds)} of all classifiers."""
    return fit_predict_all(NAMES, train, real.images, 10, 3, num_workers=2)


def round_to_8_bits(records):
    """As an image file would give them back, [n, pixels]."""
    scaled = records.images.flatten(1).numpy() * np.float32(255)
    return np.rint(scaled).astype(np.uint8).astype(np.float32) / np.float32(255)


def test_real_digits_are_recognised(answers, real):
    assert list(answers) == NAMES
    assert set(CLASSICAL_CLASSIFIERS) == {*PUBLISHED, "adaboost", "xgboost"}
    for name, (predictions, seconds) in answers.items():
        assert (predictions.dtype, predictions.shape) == (torch.int64, real.labels.shape)
        assert seconds > 0
        assert (predictions == real.labels).double().mean() > LOWEST.get(name, 0.75), name


def test_shuffled_labels_are_chance(train, real):
    """So that the test above can fail."""
    mixed = Records(train.images, train.labels[torch.randperm(500, generator=make_generator())])
    for name in ("gaussian_nb", "bernoulli_nb", "decision_tree", "lda"):
        predictions = fit_predict(name, mixed, real.images, 10, 0)
        assert (predictions == real.labels).double().mean() < 0.25, name


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in PUBLISHED if name != "gbm"),
        pytest.param("gbm", marks=pytest.mark.slow),
        "xgboost",
    ],
)
def test_the_settings_are_the_published_ones(name, train, real, answers):
    """The predictions are those of the papers' own line of code."""
    if (model := PUBLISHED.get(name)) is None:
        settings = {"n_estimators": 50, "colsample_bytree": 0.1, "tree_method": "exact"}
        boosting = pytest.importorskip("xgboost").XGBClassifier
        model = boosting(**settings, random_state=3, n_jobs=1)
    with threadpool_limits(1):  # more threads may add in another order
        model.fit(round_to_8_bits(train), train.labels.numpy())
        assert np.array_equal(model.predict(round_to_8_bits(real)), answers[name][0].numpy())


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("decision_tree", PUBLISHED["decision_tree"]),
        ("adaboost", AdaBoostClassifier(n_estimators=100, random_state=3)),
    ],
)
def test_images_are_rounded_to_8_bits_unless_asked_otherwise(train, real, name, model):
    """A background just above 0, as of a generator, is black; the papers learn from it."""
    images = (train.images[:150] * 255).round() / 255
    dirty = (images + torch.rand(images.shape, generator=make_generator()) * 0.4 / 255).clamp(0, 1)
    labels = train.labels[:150]

    def predict(images, **more):
        return fit_predict(name, Records(images, labels), real.images, 10, 3, **more)

    assert torch.equal(predict(dirty), predict(images))
    floats = predict(dirty, round_to_8_bits=False)
    model.fit(dirty.flatten(1).numpy(), labels.numpy())
    assert np.array_equal(floats, model.predict(real.images.flatten(1).numpy()))
    assert not torch.equal(floats, predict(images))


def test_the_answer_does_not_depend_on_the_number_of_workers(train, real, answers):
    names = [name for name in NAMES if name not in ("linear_svc", "mlp", "gbm")]  # slow ones
    again = fit_predict_all(reversed(names), train, real.images, 10, 3, num_workers=1)
    assert list(again) == names[::-1]
    for name in names:
        assert torch.equal(again[name][0], answers[name][0]), name


def test_the_seed_matters_where_there_is_chance(train, real, answers):
    def bag(seed):
        return fit_predict("bagging", train, real.images, 10, seed)

    assert not torch.equal(bag(4), answers["bagging"][0])
    assert torch.equal(bag(3), answers["bagging"][0])
    assert bag(2**40 + 1).shape == real.labels.shape


def test_a_released_set_may_lack_classes_and_have_constant_pixels(train, real):
    kept, shown = (torch.isin(data.labels, torch.tensor([2, 5, 9])) for data in (train, real))
    images = train.images.clone()
    test = real.images.clone()
    for row, value in ((1, 0), (7, 1)):
        images[:, :, row] = test[:, :, row] = value
    records = Records(images[kept], train.labels[kept])
    for name, (predictions, _) in fit_predict_all(NAMES, records, test, 10, 0).items():
        assert set(predictions.tolist()) <= {2, 5, 9}, name
        assert (predictions == real.labels)[shown].double().mean() > 0.6, name


def test_one_that_fails_is_named_and_the_others_go_on(train, real):
    flat = Records(torch.zeros_like(train.images), train.labels)  # no covariance to invert
    reason = r"The classifier lda cannot be trained on these images \(LinAlgError\)"
    with pytest.raises(SettingError, match=reason):
        fit_predict("lda", flat, real.images, 10, 0)
    failures = {}
    names = ("gaussian_nb", "lda", "adaboost")
    answers = fit_predict_all(names, flat, real.images, 10, 0, failures=failures)
    assert (list(answers), list(failures)) == (["gaussian_nb", "adaboost"], ["lda"])
    commonest = train.labels.bincount().argmax()  # there is nothing to split
    assert (answers["adaboost"][0] == commonest).all()
    one_class = Records(train.images, torch.zeros_like(train.labels))
    for name in ("logistic", "adaboost"):
        with pytest.raises(SettingError, match=name):
            fit_predict(name, one_class, real.images, 10, 0)


def test_without_xgboost_the_message_says_what_to_install(train, real, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", None)
    request = (("xgboost", "gaussian_nb"), train, real.images, 10, 0)
    with pytest.raises(SettingError, match=r"pip install 'privot\[measures\]'"):
        fit_predict_all(*request)
    failures = {}
    assert list(fit_predict_all(*request, failures=failures)) == ["gaussian_nb"]
    assert "privot[measures]" in str(failures["xgboost"])


def test_refuses_wrong_names_labels_and_shapes(train, real):
    empty = Records(train.images[:0], train.labels[:0])
    for reason, request in (
        (r"no classifier 'oracle'\. Choose from logistic, ", ("oracle", train, real.images, 10)),
        ("from 0 to 8", ("lda", train, real.images, 9)),
        ("0 training images", ("lda", empty, real.images, 10)),
        (r"\[1, 7, 8\].*\[1, 8, 8\]", ("lda", train, real.images[:, :, 1:], 10)),
    ):
        with pytest.raises(SettingError, match=reason):
            fit_predict(*request, 0)


def test_the_process_is_left_as_it_was(train, real):
    """Its random state, its warnings and its threads; and progress sees steps alone."""

    def read_process():
        threads = [pool["num_threads"] for pool in threadpool_info()]
        return np.random.get_state()[1].tolist(), list(warnings.filters), threads

    before = read_process()
    seen = []

    def progress(*step, **facts):
        seen.append((*step, facts))

    fit_predict_all(("lda", "bagging"), train, real.images, 10, 0, progress=progress)
    assert read_process() == before
    assert seen == [("training the classical classifiers", step, 2, {}) for step in (1, 2)]


@pytest.mark.parametrize(
    ("count", "classes", "top"), [(60, 2, 255), (150, 3, 255), (300, 10, 255), (200, 4, 12)]
)
def test_boosted_stumps_are_those_of_scikit_learn(count, classes, top):
    """Pixel, threshold and weight of each round, and every prediction, on random 8-bit images."""
    draw = np.random.default_rng(count)
    labels = np.arange(count) % classes
    shifts = 9 * labels[:, None] * draw.random(12)
    levels = np.clip(draw.integers(0, top + 1, (count, 12)) + shifts, 0, 255).astype(int)
    other = draw.integers(0, 256, (500, 12))
    ours = HistogramAdaBoost(n_estimators=40).fit(levels / 255, labels)
    theirs = AdaBoostClassifier(n_estimators=40, random_state=0).fit(levels, labels)
    for stump, estimator in zip(ours.stumps_, theirs.estimators_, strict=True):
        tree = estimator.tree_
        low, high = (tree.value[side, 0].argmax() for side in (1, 2))
        assert stump[:4] == (tree.feature[0], tree.threshold[0], low, high)
    weights = theirs.estimator_weights_[: len(ours.stumps_)]
    assert [stump[-1] for stump in ours.stumps_] == pytest.approx(weights, rel=1e-9)
    assert np.array_equal(ours.predict(other / 255), theirs.predict(other))


def test_boosted_stumps_see_8_bits_and_stop_when_perfect():
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (80, 6)) / 255
    y = np.arange(80) % 2
    near = np.clip(x + (draw.random(x.shape) - 0.5) / 256, 0, 1)  # under half a level
    assert HistogramAdaBoost(20).fit(near, y).stumps_ == HistogramAdaBoost(20).fit(x, y).stumps_
    x[:, 3] = y * 0.5 + 0.25
    [(pixel, *_, weight)] = HistogramAdaBoost(20).fit(x, y).stumps_
    assert (pixel, weight) == (3, 1.0)
