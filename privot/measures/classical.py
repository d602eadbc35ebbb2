"""The twelve classical classifiers by which GS-WGAN and DP-MERF judge synthetic images: train on released, test on real.

Settings are those of the papers' code; what they leave open is scikit-learn's default. Where this departs:

- Images are rounded to 8 bits, as in an image file. The papers train on the generator's floats, whose background is never quite 0:
  trees then split on differences that no real image has, and all is slower. On 6,000 samples of a DP-MERF release rounding moved the mean
  of the twelve from 73.8 to 77.0 %, all of it through the trees (``bench/rounding.py``). ``rounded=False`` is the papers' way.
- ``adaboost`` is SAMME (the papers' SAMME.R is gone from scikit-learn), on 8-bit images by `StumpBoost`.
- ``lda`` keeps all classes - 1 components, 9 of 10 classes; its guesses do not depend on that number.
- ``xgboost`` grows exact trees, as it did by itself on data of this size when the papers were written.

``linear_svc`` mostly ends at its 10,000 iterations, short of its tolerance of 1e-8; on MNIST 1,000 give the same accuracy to 0.1 point.
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
from privot.errors import SettingError, refusing
from privot.measures.adaboost import StumpBoost
from privot.progress import Progress, silent


def _xgboost(seed: int) -> Any:
    try:
        from xgboost import XGBClassifier
    except ImportError:
        raise SettingError(
            "the classifier xgboost needs the package xgboost: pip install 'privot[measures]'"
        ) from None
    return XGBClassifier(
        n_estimators=50, colsample_bytree=0.1, tree_method="exact", random_state=seed, n_jobs=1
    )


CLASSICAL: dict[str, Callable[[int], Any]] = {
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
    "adaboost": lambda seed: StumpBoost(rounds=100),
    "mlp": lambda seed: MLPClassifier(random_state=seed),
    "bagging": lambda seed: BaggingClassifier(n_estimators=20, max_samples=0.1, random_state=seed),
    "gbm": lambda seed: GradientBoostingClassifier(
        n_estimators=50, subsample=0.1, random_state=seed
    ),
    "xgboost": _xgboost,
}
"""Name -> seed -> unfitted estimator."""

FLOATS: dict[str, Callable[[int], Any]] = {
    "adaboost": lambda seed: AdaBoostClassifier(n_estimators=100, random_state=seed)
}
"""Those that are others when images are not rounded."""

SLOW = (
    "linear_svc",
    "mlp",
    "gbm",
    "xgboost",
    "logistic",
    "random_forest",
)  # begun first, so that none is left for the end alone


def fit_predict(
    name: str, train: Records, test: Tensor, classes: int, seed: int, *, rounded: bool = True
) -> Tensor:
    """Guesses int64 [n] for ``test`` [n, c, h, w] of the classifier ``name``, trained on ``train``, with one thread.

    The released set may lack a class: it is then never guessed. A classifier that cannot be trained is a `SettingError` that names it.

    >>> images = torch.tensor([0.0, 0.1, 0.9, 1.0]).view(4, 1, 1, 1)
    >>> fit_predict("decision_tree", Records(images, torch.tensor([3, 3, 7, 7])), images, classes=10, seed=0)
    tensor([3, 3, 7, 7])
    """
    return run_all([name], train, test, classes, seed, 1, rounded=rounded)[name][0]


def run_all(
    names: Iterable[str],
    train: Records,
    test: Tensor,
    classes: int,
    seed: int,
    workers: int | None = None,
    progress: Progress = silent,
    *,
    failed: dict[str, SettingError] | None = None,
    rounded: bool = True,
) -> dict[str, tuple[Tensor, float]]:
    """Guesses [n] and seconds of each classifier in ``names``, ``workers`` of them at a time; None is one for each core.

    Each computes with one thread, so that no sum is added in another order: the guesses do not depend on ``workers``. One that fails
    is noted in ``failed`` and left out; without ``failed`` its error is raised. Seconds are wall time, with the others at work.
    """
    names = list(dict.fromkeys(names))
    if unknown := [name for name in names if name not in CLASSICAL]:
        raise SettingError(f"no classifier {unknown[0]!r}: {', '.join(CLASSICAL)}")
    if len(train.labels) == 0 or train.labels.min() < 0 or train.labels.max() >= classes:
        raise SettingError(
            f"labels of {len(train.labels)} training images: at least one is needed, and they go from 0 to {classes - 1}"
        )
    if train.images.shape[1:] != test.shape[1:]:
        raise SettingError(
            f"test images are {list(test.shape[1:])}, training images {list(train.images.shape[1:])}"
        )
    makers = CLASSICAL if rounded else CLASSICAL | FLOATS
    models = {}
    for name in sorted(names, key=lambda name: SLOW.index(name) if name in SLOW else len(SLOW)):
        with _noted(name, failed):  # a missing package shows before any work
            models[name] = makers[name](seed % 2**32)
    images = ((each * 255).round() / 255 if rounded else each for each in (train.images, test))
    arrays = [each.detach().cpu().flatten(1).numpy() for each in images]
    present, labels = train.labels.cpu().unique(
        return_inverse=True
    )  # xgboost wants 0 to k - 1 without a gap

    def work(name: str) -> tuple[Tensor, float]:
        start = time.perf_counter()
        with refusing(SettingError, f"the classifier {name} cannot be trained on these images"):
            guesses = torch.as_tensor(
                models[name].fit(arrays[0], labels.numpy()).predict(arrays[1])
            )
        return present[guesses.long()], time.perf_counter() - start

    found: dict[str, tuple[Tensor, float]] = {}
    with (
        warnings.catch_warnings(),
        threadpool_limits(1),
    ):  # of the process, so here and not in the threads
        warnings.simplefilter(
            "ignore"
        )  # not converged, constant pixels: the papers' protocol goes on too
        pool = ThreadPoolExecutor(
            workers or os.cpu_count(), initializer=lambda: threadpool_limits(1)
        )  # OpenMP counts by thread
        try:
            jobs = {pool.submit(work, name): name for name in models}
            for step, job in enumerate(as_completed(jobs), 1):
                with _noted(jobs[job], failed):
                    found[jobs[job]] = job.result()
                progress("training the classical classifiers", step, len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)
    return {name: found[name] for name in names if name in found}


@contextmanager
def _noted(name: str, failed: dict[str, SettingError] | None) -> Iterator[None]:
    try:
        yield
    except SettingError as error:
        if failed is None:
            raise
        failed[name] = error
