"""Evaluator: all metrics of synthetic images against the same real data, for every method alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from privot.data.dataset import Public, Sensitive
from privot.errors import DataError, SettingError
from privot.measures.classical import CLASSICAL_CLASSIFIERS
from privot.measures.downstream import DOWNSTREAM_CLASSIFIERS, measure_downstream
from privot.measures.feature_extractors import FeatureExtractor
from privot.measures.fid_kid import import_torchmetrics
from privot.measures.image_metrics import (
    measure_features,
    measure_imagenet_score,
    measure_inception_score,
    measure_wasserstein,
)
from privot.measures.inception_score import load_or_train_score_classifier
from privot.measures.metric_names import FEATURE_METRICS, expand_metrics
from privot.measures.reference import Reference
from privot.measures.result import MetricResult
from privot.measures.samples import Samples, check_matching_spec, load_training_data, refuse_overlap
from privot.measures.wasserstein import exact_wasserstein
from privot.nets.training import Classifier
from privot.progress import Progress, ignore_progress
from privot.runtime import Runtime


def measure(
    samples: Samples,
    test_data: Sensitive | Public,
    metrics: Sequence[str] = ("default",),
    *,
    training_data: Sensitive | Public | None = None,
    real_data_results: Sequence[MetricResult] = (),
    inception_weights: Path | None = None,
    runtime: Runtime | None = None,
    seed: int = 0,
    progress: Progress = ignore_progress,
    on_warning: Callable[[str], None] = lambda text: None,
) -> list[MetricResult]:
    """Measure one set of synthetic images against real data. For several, use `Evaluator`.

    Args:
        samples: The synthetic images.
        test_data: See `Evaluator`.
        metrics: Names of metrics or groups, see `expand_metrics`.
        training_data: See `Evaluator`.
        real_data_results: Results of real training data, for the calibrated accuracy.
        inception_weights: See `Evaluator`.
        runtime: See `Evaluator`.
        seed: See `Evaluator`.
        progress: See `Evaluator`.
        on_warning: See `Evaluator`.

    Returns:
        The results.

    >>> from privot.data import load_dataset
    >>> samples = Samples.from_source("digits", 500)
    >>> [result] = measure(samples, load_dataset("digits", "test", public=True), ["logistic"])
    >>> result.name, result.num_samples, result.publishable
    ('logistic_accuracy', 500, True)
    """
    evaluator = Evaluator(
        test_data,
        training_data,
        inception_weights=inception_weights,
        runtime=runtime or Runtime(),
        seed=seed,
        progress=progress,
        on_warning=on_warning,
    )
    return evaluator.measure(samples, metrics, real_data_results)


@dataclass
class Evaluator:
    """Measures any number of sets of synthetic images against the same real data.

    What depends only on the real data is computed once. Results are publishable if the real data
    and the synthetic images are.

    Attributes:
        test_data: Real data on which classifiers are tested. Features are compared with it if there
            is no ``training_data``.
        training_data: Real training data. Features are compared with it, as in GS-WGAN's table, and
            the classifier of the inception score is trained on it.
        inception_weights: File of the Inception weights; None to look in the data folders.
        runtime: Device of the networks.
        seed: Seed of subsets and trainings.
        progress: Called while metrics are computed.
        on_warning: Called with warnings, such as missing weights.
    """

    test_data: Sensitive | Public
    training_data: Sensitive | Public | None = None
    _: KW_ONLY
    inception_weights: Path | None = None
    runtime: Runtime = field(default_factory=Runtime)
    seed: int = 0
    progress: Progress = ignore_progress
    on_warning: Callable[[str], None] = lambda text: None

    def measure(
        self,
        samples: Samples,
        metrics: Sequence[str] = ("default",),
        real_data_results: Sequence[MetricResult] = (),
    ) -> list[MetricResult]:
        """Measure synthetic images.

        Args:
            samples: The synthetic images.
            metrics: Names of metrics or groups, see `expand_metrics`.
            real_data_results: Results of real training data, for the calibrated accuracy.

        Returns:
            The results: of features, the inception scores, Wasserstein distances and classifiers.

        Raises:
            SettingError: A metric is unknown, or lacks data or a package.
            DataError: The test data overlaps data that was trained on.
        """
        names = expand_metrics(metrics)
        self._check_data(samples, names)
        self._check_requirements(names)
        results = measure_features(
            samples, names, self._select_extractors(names), self._reference, self.on_warning
        )
        if "is" in names:
            start = time.perf_counter()
            classifier, protocol = self._score_classifier
            results.append(
                measure_inception_score(samples, classifier, protocol, self._reference, start)
            )
        if "imagenet_is" in names:
            results.append(measure_imagenet_score(samples, self._reference))
        results += measure_wasserstein(samples, names, self._reference)
        classifiers = [name for name in names if name in DOWNSTREAM_CLASSIFIERS]
        if classifiers:
            results += measure_downstream(
                samples.images,
                samples.labels,
                self.test_data,
                classifiers,
                soft_labels=samples.soft_labels,
                real_data_results=real_data_results,
                runtime=self.runtime,
                seed=self.seed,
                progress=self.progress,
            )
        # privacy: the checks above read both real datasets, and every result depends on the
        # synthetic images. So a result is publishable only if all three are.
        is_public = samples.publishable and all(
            isinstance(data, Public)
            for data in (self.test_data, self.training_data)
            if data is not None
        )
        return [replace(result, publishable=result.publishable and is_public) for result in results]

    def _check_data(self, samples: Samples, metrics: Sequence[str]) -> None:
        """Raise unless the test data fits the samples and was not trained on."""
        check_matching_spec(samples, self.test_data)
        if "is" in metrics and self.training_data is None:
            raise SettingError(
                'The metric "is" needs real training data for its classifier. Name the data with '
                "--train."
            )
        for training_data in (self.training_data, load_training_data(samples)):
            if training_data is not None:
                refuse_overlap(self.test_data, training_data, "the training data")
        refuse_overlap(self.test_data, samples.images, "the released images")

    def _check_requirements(self, metrics: Sequence[str]) -> None:
        """Raise if a package or weights are missing, before the work starts."""
        if {"fid", "kid", "domain"} & set(metrics):
            import_torchmetrics("fid")
        if "exact" in metrics:
            exact_wasserstein(torch.zeros(1, 1), torch.zeros(1, 1))
        if "xgboost" in metrics:
            CLASSICAL_CLASSIFIERS["xgboost"](0)
        if (
            "imagenet_is" in metrics
            and self._reference.inception_extractor.predict_probabilities is None
        ):
            raise DataError(
                "The metric imagenet_is needs Inception weights with logits. docs/measures.md says "
                "how to make such a file."
            )

    @cached_property
    def _reference(self) -> Reference:
        """The real data that image metrics compare with."""
        return Reference(
            self.test_data if self.training_data is None else self.training_data,
            self.runtime.torch_device,
            self.inception_weights,
            self.seed,
            self.progress,
        )

    @cached_property
    def _score_classifier(self) -> tuple[Classifier, str]:
        """The classifier of the inception score and its description."""
        assert self.training_data is not None
        return load_or_train_score_classifier(
            self.training_data, self.runtime.torch_device, self.seed, self.progress
        )

    def _select_extractors(self, metrics: Sequence[str]) -> list[FeatureExtractor]:
        """Choose feature extractors. Without Inception weights, the domain extractor is used."""
        extractors = []
        needs_inception = any(name in FEATURE_METRICS for name in metrics)
        if needs_inception:
            try:
                extractors.append(self._reference.inception_extractor)
            except DataError as error:
                if self.inception_weights is not None:
                    raise
                message = str(error).rstrip(".")
                self.on_warning(
                    f"{message}. The domain_ metrics of a small network are measured instead."
                )
        if "domain" in metrics or (needs_inception and not extractors):
            extractors.append(self._reference.domain_extractor)
        return extractors
