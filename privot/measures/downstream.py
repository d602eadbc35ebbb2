"""Accuracy of classifiers that are trained on synthetic images and tested on real ones.

Twelve classifiers are classical (see `classical`). Three are networks: ``cnn`` (LeNet-5, the
network of GS-WGAN's and DP-MERF's tables), ``convnet`` (the ConvNet3 of the condensation papers,
trained five times) and ``resnet`` (for image benchmarks). The accuracy is that of the last epoch,
never of the best one. Networks train on soft labels where a released set has them; the classical
classifiers only use hard labels.

``avg_accuracy`` is the mean over the thirteen classifiers of GS-WGAN's evaluation, the classical
ones and ``cnn``. ``calibrated_accuracy`` is the mean of their ratios to the same classifiers
trained on real data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.measures.classical import CLASSICAL_CLASSIFIERS, fit_predict_all
from privot.measures.downstream_networks import DOWNSTREAM_NETWORKS, train_downstream_network
from privot.measures.result import MetricResult
from privot.progress import Progress, ignore_progress
from privot.runtime import Runtime

GS_WGAN_CLASSIFIERS = (*CLASSICAL_CLASSIFIERS, "cnn")
DOWNSTREAM_CLASSIFIERS = (*CLASSICAL_CLASSIFIERS, *DOWNSTREAM_NETWORKS)
CLASSICAL_PROTOCOL = "scikit-learn type on 8-bit pixels, settings of GS-WGAN's evaluation"


class _Predictions(NamedTuple):
    """Which test records a classifier gets right.

    Attributes:
        is_correct: bool [records], or [trainings, records] for several trainings.
        seconds: Wall time of training and prediction.
        protocol: Network and settings.
    """

    is_correct: Tensor
    seconds: float
    protocol: str


def measure_downstream(
    images: Tensor,
    labels: Tensor,
    test_data: Sensitive | Public,
    classifiers: Sequence[str] = ("logistic", "mlp", "cnn"),
    *,
    soft_labels: Tensor | None = None,
    real_data_results: Sequence[MetricResult] = (),
    runtime: Runtime | None = None,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> list[MetricResult]:
    """Train classifiers on synthetic images and measure their accuracy on real test data.

    Args:
        images: Synthetic images [count, channels, height, width] in [0, 1].
        labels: Their labels [count].
        test_data: Real test data.
        classifiers: Names of `DOWNSTREAM_CLASSIFIERS`.
        soft_labels: Soft labels [count, classes], which networks use instead of ``labels``.
        real_data_results: Results of the same classifiers trained on real data, for the calibrated
            accuracy.
        runtime: Device of the networks.
        seed: Seed of all trainings.
        progress: Called after each epoch of a network and after each classical classifier.

    Returns:
        One accuracy per classifier, in the order of ``classifiers``, followed by the average and
        the calibrated accuracy if all thirteen GS-WGAN classifiers are named. The standard error is
        that of the test records. For a network trained several times, the value is the mean and the
        error the standard deviation over the trainings.

    Raises:
        SettingError: A name is unknown, or images, labels or results do not fit.

    >>> from privot.data import load_dataset
    >>> records = load_dataset("digits", public=True).records()
    >>> test_data = load_dataset("digits", "test", public=True)
    >>> [result] = measure_downstream(*records, test_data, ["logistic"])
    >>> result.name, result.value > 0.9
    ('logistic_accuracy', True)
    """
    _check_inputs(images, labels, soft_labels, test_data, classifiers)
    test_records = test_data._read_records(slice(None))
    predictions = _predict_with_networks(
        [name for name in classifiers if name in DOWNSTREAM_NETWORKS],
        images,
        labels,
        soft_labels,
        test_records,
        test_data.spec,
        (runtime or Runtime()).torch_device,
        seed,
        progress,
    )
    predictions |= _predict_with_classical(
        [name for name in classifiers if name in CLASSICAL_CLASSIFIERS],
        Records(images, labels),
        test_records,
        test_data.spec.num_classes,
        seed,
        progress,
    )
    results = [
        _build_result(f"{name}_accuracy", predictions[name], len(images), test_data)
        for name in classifiers
    ]
    if set(classifiers) >= set(GS_WGAN_CLASSIFIERS):
        results += _average_accuracies(
            results, predictions, len(images), test_data, real_data_results
        )
    return results


def _check_inputs(
    images: Tensor,
    labels: Tensor,
    soft_labels: Tensor | None,
    test_data: Sensitive | Public,
    classifiers: Sequence[str],
) -> None:
    """Raise a SettingError for unknown classifiers, or images or labels of the wrong shape."""
    unknown = [name for name in classifiers if name not in DOWNSTREAM_CLASSIFIERS]
    if unknown:
        raise SettingError(
            f"There is no classifier {unknown[0]!r}. "
            f"Choose from {', '.join(DOWNSTREAM_CLASSIFIERS)}."
        )
    if images.shape[1:] != test_data.spec.shape:
        raise SettingError(
            f"The test images are {list(test_data.spec.shape)} and the released images are "
            f"{list(images.shape[1:])}. Both need the same shape."
        )
    if len(images) != len(labels) or len(labels.unique()) < 2:
        raise SettingError(
            f"There are {len(images)} released images and {len(labels)} labels of "
            f"{len(labels.unique())} classes. A classifier needs one label per image and at least "
            "two classes."
        )
    num_classes = test_data.spec.num_classes
    if soft_labels is not None and (
        len(soft_labels) != len(labels) or soft_labels.shape[1] > num_classes
    ):
        raise SettingError(
            f"The soft labels are {list(soft_labels.shape)}. One row is needed for each of the "
            f"{len(labels)} images, with at most {num_classes} columns."
        )


def _predict_with_networks(
    names: list[str],
    images: Tensor,
    labels: Tensor,
    soft_labels: Tensor | None,
    test_records: Records,
    spec: Spec,
    device: torch.device,
    seed: int,
    progress: Progress,
) -> dict[str, _Predictions]:
    """Train networks on synthetic images, one after the other, and predict the test records.

    Args:
        names: Keys of `DOWNSTREAM_NETWORKS`.
        images: Synthetic images [count, channels, height, width] in [0, 1].
        labels: Their labels [count].
        soft_labels: Soft labels [count, classes], used instead of ``labels``.
        test_records: The test records.
        spec: Spec of the test data.
        device: Where the networks run.
        seed: Seed of the trainings.
        progress: Called after each epoch.

    Returns:
        The predictions by name.
    """
    predictions = {}
    for name in names:
        start = time.perf_counter()
        classifier, protocol = train_downstream_network(
            name,
            images,
            labels,
            spec,
            device,
            seed,
            progress,
            soft_labels=soft_labels,
            repeats=DOWNSTREAM_NETWORKS[name][1].num_repeats,
        )
        is_correct = classifier.predict(test_records.images) == test_records.labels
        predictions[name] = _Predictions(is_correct, time.perf_counter() - start, protocol)
    return predictions


def _predict_with_classical(
    names: list[str],
    train: Records,
    test_records: Records,
    num_classes: int,
    seed: int,
    progress: Progress,
) -> dict[str, _Predictions]:
    """Train classical classifiers at the same time, and predict the test records.

    Args:
        names: Keys of `CLASSICAL_CLASSIFIERS`.
        train: Synthetic images and labels.
        test_records: The test records.
        num_classes: Number of classes of the test data.
        seed: Seed of the classifiers.
        progress: Called after each classifier.

    Returns:
        The predictions by name.
    """
    results = fit_predict_all(
        names, train, test_records.images, num_classes, seed, progress=progress
    )
    return {
        name: _Predictions(labels == test_records.labels, seconds, CLASSICAL_PROTOCOL)
        for name, (labels, seconds) in results.items()
    }


def _build_result(
    name: str,
    predictions: _Predictions,
    num_samples: int,
    test_data: Sensitive | Public,
    publishable: bool = True,
) -> MetricResult:
    """Compute mean and error of per-record scores.

    Args:
        name: Name of the metric.
        predictions: ``is_correct`` may also hold real-valued scores per record.
        num_samples: Number of synthetic images.
        test_data: The test data.
        publishable: Whether everything but the test data allows publication.

    Returns:
        The result.
    """
    scores = predictions.is_correct.double()
    num_records = scores.shape[-1]
    if scores.ndim == 1:
        error = (scores.var(correction=0) / num_records).sqrt()
    else:
        error = scores.mean(1).std()
    return MetricResult(
        name,
        scores.mean().item(),
        error.item(),
        num_samples,
        test_data.name,
        num_records,
        publishable and isinstance(test_data, Public),
        predictions.protocol,
        seconds=predictions.seconds,
    )


def _average_accuracies(
    results: list[MetricResult],
    predictions: dict[str, _Predictions],
    num_samples: int,
    test_data: Sensitive | Public,
    real_data_results: Sequence[MetricResult],
) -> list[MetricResult]:
    """Average over the GS-WGAN classifiers: the accuracy, and its ratio to real training data.

    Args:
        results: The accuracy of each classifier.
        predictions: The predictions of each classifier, by its name.
        num_samples: Number of synthetic images.
        test_data: The test data.
        real_data_results: Results of the same classifiers trained on real data, or nothing.

    Returns:
        The average accuracy, and the calibrated accuracy if there are results on real data.

    Raises:
        SettingError: The results on real data have another protocol or test data, or are 0.
    """
    scores = torch.stack([predictions[name].is_correct.double() for name in GS_WGAN_CLASSIFIERS])
    seconds = math.fsum(predictions[name].seconds for name in GS_WGAN_CLASSIFIERS)
    protocol = f"mean over {len(GS_WGAN_CLASSIFIERS)} classifiers"
    average = _Predictions(scores.mean(0), seconds, protocol)
    averages = [_build_result("avg_accuracy", average, num_samples, test_data)]
    if not real_data_results:
        return averages
    real = {result.name.removesuffix("_accuracy"): result for result in real_data_results}
    protocols = {result.name: (result.protocol, result.reference) for result in results}
    is_comparable = all(
        name in real
        and (real[name].protocol, real[name].reference) == protocols[f"{name}_accuracy"]
        for name in GS_WGAN_CLASSIFIERS
    )
    if not is_comparable or min(real[name].value for name in GS_WGAN_CLASSIFIERS) <= 0:
        raise SettingError(
            "The calibrated accuracy needs real-data results of the same thirteen classifiers on "
            "the same test data, all above 0."
        )
    real_accuracies = torch.tensor(
        [real[name].value for name in GS_WGAN_CLASSIFIERS], dtype=torch.float64
    )
    ratios = (scores / real_accuracies[:, None]).mean(0)
    calibrated = _Predictions(ratios, seconds, "mean of ratios to real training data")
    publishable = all(real[name].publishable for name in GS_WGAN_CLASSIFIERS)
    averages.append(
        _build_result("calibrated_accuracy", calibrated, num_samples, test_data, publishable)
    )
    return averages
