"""The twelve classical classifiers of GS-WGAN's and DP-MERF's evaluation.

Each is trained on synthetic images and tested on real ones. The settings are those of the papers'
code; what the papers leave open has scikit-learn's default. Differences from the papers:

- Images are rounded to 8 bits, as in an image file. The papers train on the generator's floats,
  whose background is never exactly 0. Trees then split on differences that no real image has, and
  training is slower. On 6,000 samples of a DP-MERF release, rounding raised the mean accuracy of
  the twelve from 73.8 to 77.0 %, all of it through the trees (``bench/rounding.py``).
  ``round_to_8_bits=False`` follows the papers.
- ``adaboost`` is SAMME, on 8-bit images by `HistogramAdaBoost`. The papers used SAMME.R, which
  scikit-learn has removed.
- ``lda`` uses all ``num_classes - 1`` components. Its predictions do not depend on that number.
- ``xgboost`` grows exact trees, which was its default on data of this size at the time.

``linear_svc`` mostly stops at 10,000 iterations, before it reaches its tolerance of 1e-8. On MNIST,
1,000 iterations give the same accuracy to within 0.1 points.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

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
from threadpoolctl import threadpool_limits
from torch import Tensor

from privot.data.dataset import Records
from privot.errors import SettingError, reraise_as
from privot.measures.adaboost import HistogramAdaBoost
from privot.progress import Progress, ignore_progress


def _build_xgboost(seed: int) -> Any:
    try:
        from xgboost import XGBClassifier
    except ImportError:
        raise SettingError(
            "The classifier xgboost needs the package xgboost. Run pip install 'privot[measures]'."
        ) from None
    return XGBClassifier(
        n_estimators=50, colsample_bytree=0.1, tree_method="exact", random_state=seed, n_jobs=1
    )


ClassifierBuilder = Callable[[int], Any]

CLASSICAL_CLASSIFIERS: dict[str, ClassifierBuilder] = {
    "logistic": lambda seed: LogisticRegression(solver="lbfgs", max_iter=5000, random_state=seed),
    "random_forest": lambda seed: RandomForestClassifier(
        n_estimators=100, class_weight="balanced", random_state=seed
    ),
    "gaussian_nb": lambda seed: GaussianNB(),
    "bernoulli_nb": lambda seed: BernoulliNB(binarize=0.5),
    "linear_svc": lambda seed: LinearSVC(
        loss="hinge", max_iter=10_000, tol=1e-8, random_state=seed
    ),
    "decision_tree": lambda seed: DecisionTreeClassifier(
        criterion="gini", class_weight="balanced", random_state=seed
    ),
    "lda": lambda seed: LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.5, tol=1e-8),
    "adaboost": lambda seed: HistogramAdaBoost(n_estimators=100),
    "mlp": lambda seed: MLPClassifier(random_state=seed),
    "bagging": lambda seed: BaggingClassifier(n_estimators=20, max_samples=0.1, random_state=seed),
    "gbm": lambda seed: GradientBoostingClassifier(
        n_estimators=50, subsample=0.1, random_state=seed
    ),
    "xgboost": _build_xgboost,
}
"""Name -> function of a seed that builds the unfitted estimator."""

UNROUNDED_CLASSIFIERS: dict[str, ClassifierBuilder] = {
    "adaboost": lambda seed: AdaBoostClassifier(n_estimators=100, random_state=seed)
}
"""Replacements for images that are not rounded to 8 bits."""

# Slowest first. They start first, so that none of them runs alone at the end.
SLOWEST_CLASSIFIERS = ("linear_svc", "mlp", "gbm", "xgboost", "logistic", "random_forest")


def fit_predict(
    name: str,
    train: Records,
    test_images: Tensor,
    num_classes: int,
    seed: int,
    *,
    round_to_8_bits: bool = True,
) -> Tensor:
    """Train one classical classifier in one thread and predict the classes of test images.

    Args:
        name: A key of `CLASSICAL_CLASSIFIERS`.
        train: Training images [count, channels, height, width] in [0, 1] and labels [count]. A
            class may have no image; it is then never predicted.
        test_images: Images [n, channels, height, width] in [0, 1].
        num_classes: Number of classes.
        seed: Seed of the estimator.
        round_to_8_bits: Whether images are rounded to 8 bits first.

    Returns:
        Predicted labels, int64 [n].

    Raises:
        SettingError: The name is unknown, the inputs do not fit, or the training fails.

    >>> images = torch.tensor([0.0, 0.1, 0.9, 1.0]).view(4, 1, 1, 1)
    >>> train = Records(images, torch.tensor([3, 3, 7, 7]))
    >>> fit_predict("decision_tree", train, images, num_classes=10, seed=0)
    tensor([3, 3, 7, 7])
    """
    return fit_predict_all(
        [name], train, test_images, num_classes, seed, 1, round_to_8_bits=round_to_8_bits
    )[name][0]


def fit_predict_all(
    names: Iterable[str],
    train: Records,
    test_images: Tensor,
    num_classes: int,
    seed: int,
    num_workers: int | None = None,
    progress: Progress = ignore_progress,
    *,
    failures: dict[str, SettingError] | None = None,
    round_to_8_bits: bool = True,
) -> dict[str, tuple[Tensor, float]]:
    """Train several classical classifiers at the same time and predict with each.

    Each classifier uses one thread, so the order of its floating-point sums, and with it the
    predictions, does not depend on ``num_workers``.

    Args:
        names: Keys of `CLASSICAL_CLASSIFIERS`.
        train: Training images [count, channels, height, width] in [0, 1] and labels [count].
        test_images: Images [n, channels, height, width] in [0, 1].
        num_classes: Number of classes.
        seed: Seed of every estimator.
        num_workers: How many classifiers run at a time; None for one per core.
        progress: Called after each classifier.
        failures: If given, receives the error of each classifier that fails, and the classifier is
            missing in the result. If None, the first error is raised.
        round_to_8_bits: Whether images are rounded to 8 bits first.

    Returns:
        Name -> predicted labels, int64 [n], and elapsed seconds, during which other classifiers
        were running too.

    Raises:
        SettingError: A name is unknown, the inputs do not fit, or a training fails.
    """
    names = list(dict.fromkeys(names))
    _check_inputs(names, train, test_images, num_classes)
    models = _build_models(names, seed, failures, round_to_8_bits)
    train_array, test_array = (
        _to_array(images, round_to_8_bits) for images in (train.images, test_images)
    )
    # xgboost requires labels from 0 to k - 1 without a gap.
    present_labels, labels = train.labels.cpu().unique(return_inverse=True)

    def fit_one(name: str) -> tuple[Tensor, float]:
        start = time.perf_counter()
        with reraise_as(SettingError, f"The classifier {name} cannot be trained on these images"):
            model = models[name].fit(train_array, labels.numpy())
            predictions = torch.as_tensor(model.predict(test_array))
        return present_labels[predictions.long()], time.perf_counter() - start

    results = _run_in_threads(fit_one, list(models), num_workers, progress, failures)
    return {name: results[name] for name in names if name in results}


def _run_in_threads(
    function: Callable[[str], tuple[Tensor, float]],
    names: list[str],
    num_workers: int | None,
    progress: Progress,
    failures: dict[str, SettingError] | None,
) -> dict[str, tuple[Tensor, float]]:
    """Run a function for each classifier, each in one thread.

    Args:
        function: The function of the name of a classifier.
        names: Names of classifiers, in the order in which they start.
        num_workers: How many run at a time; None for one per core.
        progress: Called after each classifier.
        failures: Receives errors, see `fit_predict_all`.

    Returns:
        The results by name.
    """
    results: dict[str, tuple[Tensor, float]] = {}
    # Both limits hold for the whole process, so they are set here and not in the threads.
    with warnings.catch_warnings(), threadpool_limits(1):
        # Missing convergence and constant pixels do not stop the papers' protocol either.
        warnings.simplefilter("ignore")
        # OpenMP counts its threads per calling thread, so each worker needs its own limit.
        pool = ThreadPoolExecutor(
            num_workers or os.cpu_count(), initializer=lambda: threadpool_limits(1)
        )
        try:
            jobs = {pool.submit(function, name): name for name in names}
            for step, job in enumerate(as_completed(jobs), 1):
                with _collect_failure(jobs[job], failures):
                    results[jobs[job]] = job.result()
                progress("training the classical classifiers", step, len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)
    return results


def _check_inputs(names: list[str], train: Records, test_images: Tensor, num_classes: int) -> None:
    """Raise a SettingError for unknown names, missing or wrong labels, or images of two shapes."""
    unknown = [name for name in names if name not in CLASSICAL_CLASSIFIERS]
    if unknown:
        raise SettingError(
            f"There is no classifier {unknown[0]!r}. "
            f"Choose from {', '.join(CLASSICAL_CLASSIFIERS)}."
        )
    if len(train.labels) == 0 or train.labels.min() < 0 or train.labels.max() >= num_classes:
        raise SettingError(
            f"The labels of {len(train.labels)} training images do not fit. At least one image is "
            f"needed, with labels from 0 to {num_classes - 1}."
        )
    if train.images.shape[1:] != test_images.shape[1:]:
        raise SettingError(
            f"The test images are {list(test_images.shape[1:])} and the training images are "
            f"{list(train.images.shape[1:])}. Both need the same shape."
        )


def _build_models(
    names: list[str], seed: int, failures: dict[str, SettingError] | None, round_to_8_bits: bool
) -> dict[str, Any]:
    """Build the unfitted estimators, the slowest first. A missing package fails here, early."""
    builders = CLASSICAL_CLASSIFIERS
    if not round_to_8_bits:
        builders = CLASSICAL_CLASSIFIERS | UNROUNDED_CLASSIFIERS

    def start_order(name: str) -> int:
        is_slow = name in SLOWEST_CLASSIFIERS
        return SLOWEST_CLASSIFIERS.index(name) if is_slow else len(SLOWEST_CLASSIFIERS)

    models = {}
    for name in sorted(names, key=start_order):
        with _collect_failure(name, failures):
            models[name] = builders[name](seed % 2**32)
    return models


def _to_array(images: Tensor, round_to_8_bits: bool) -> Any:
    """Flatten images to an array [count, pixels]."""
    rounded = (images * 255).round() / 255 if round_to_8_bits else images
    return rounded.detach().cpu().flatten(1).numpy()


@contextmanager
def _collect_failure(name: str, failures: dict[str, SettingError] | None) -> Iterator[None]:
    """Store a SettingError of the block in ``failures``, or raise it if that is None."""
    try:
        yield
    except SettingError as error:
        if failures is None:
            raise
        failures[name] = error
