"""Metrics that compare synthetic images with real ones: by features, classes or pixels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from privot.data.dataset import Public
from privot.measures.feature_extractors import FeatureExtractor
from privot.measures.fid_kid import frechet_distance, kernel_distance
from privot.measures.inception_score import inception_score
from privot.measures.precision_recall import precision_recall
from privot.measures.reference import Reference
from privot.measures.result import MetricResult
from privot.measures.samples import Samples
from privot.measures.wasserstein import exact_wasserstein, sliced_wasserstein
from privot.nets.training import Classifier

FID_MIN_SAMPLES = 10_000  # with fewer samples, FID is noticeably too high
PRECISION_RECALL_POINTS = 10_000  # of each set; the work grows with the square
PRECISION_RECALL_NEIGHBOUR = 3
SLICED_WASSERSTEIN_POINTS = 60_000  # of each set
SLICED_WASSERSTEIN_PROJECTIONS = 500
EXACT_WASSERSTEIN_POINTS = 2000  # of each set


def measure_features(
    samples: Samples,
    metrics: Sequence[str],
    extractors: Sequence[FeatureExtractor],
    reference: Reference,
    on_warning: Callable[[str], None],
) -> list[MetricResult]:
    """Measure FID, KID, precision, recall, density and coverage with each feature extractor.

    Args:
        samples: The synthetic images.
        metrics: Names of metrics. The domain extractor always gives all of them.
        extractors: The feature extractors.
        reference: The real data.
        on_warning: Called with a warning if there are too few samples for FID.

    Returns:
        The results, by extractor.
    """
    results: list[MetricResult] = []
    for extractor in extractors:
        start = time.perf_counter()
        is_domain = bool(extractor.metric_prefix)
        real = reference.extract_features(extractor)
        indices = reference.select_indices(extractor, len(samples.images))
        fake = extractor.extract_features(samples.images[indices], reference.progress)
        if "fid" in metrics or is_domain:
            results.append(_measure_fid(real, fake, extractor, reference, on_warning, start))
        start = time.perf_counter()
        if "kid" in metrics or is_domain:
            value, error = kernel_distance(real, fake, reference.build_generator())
            results.append(
                reference.build_result(
                    "domain_kd" if is_domain else "kid",
                    value,
                    error,
                    len(fake),
                    extractor.description,
                    start,
                    reference_size=len(real),
                    is_public=extractor.is_public,
                    better="lower",
                )
            )
        if "precision" in metrics or is_domain:
            results += _measure_precision_recall(real, fake, extractor, reference)
    return results


def _measure_fid(
    real: Tensor,
    fake: Tensor,
    extractor: FeatureExtractor,
    reference: Reference,
    on_warning: Callable[[str], None],
    start_time: float,
) -> MetricResult:
    """Measure FID, with a warning if the number of samples is too small.

    Args:
        real: Features of real images [n, d].
        fake: Features of synthetic images [m, d].
        extractor: The feature extractor.
        reference: The real data.
        on_warning: Called with the warning.
        start_time: When the extraction of the features started.

    Returns:
        The result.
    """
    distance = frechet_distance(real, fake, reference.build_generator())
    name = "domain_fd" if extractor.metric_prefix else "fid"
    notice = f"so few images ({len(fake)} samples) raise it"
    warning = ""
    if min(len(real), len(fake)) < FID_MIN_SAMPLES:
        warning = f"{notice}: at least about {distance.bias:.2g} of the value is due to that alone"
    if isinstance(reference.data, Public) and warning:
        on_warning(f"{name}: {warning}")
    elif len(fake) < FID_MIN_SAMPLES:
        # privacy: the bias and the number of sensitive records only go into the result, which is
        # not publishable; the notice depends on the synthetic images alone.
        on_warning(f"{name}: {notice}")
    return reference.build_result(
        name,
        distance.value,
        distance.standard_error,
        len(fake),
        extractor.description,
        start_time,
        reference_size=len(real),
        is_public=extractor.is_public,
        better="lower",
        warning=warning,
    )


def _measure_precision_recall(
    real: Tensor, fake: Tensor, extractor: FeatureExtractor, reference: Reference
) -> list[MetricResult]:
    """Measure precision, recall, density and coverage on random subsets of the features.

    Args:
        real: Features of real images [n, d].
        fake: Features of synthetic images [m, d].
        extractor: The feature extractor.
        reference: The real data.

    Returns:
        Four results.
    """
    start = time.perf_counter()
    real_subset, fake_subset = (
        features[
            reference.subsample_indices(len(features), PRECISION_RECALL_POINTS).to(features.device)
        ]
        for features in (real, fake)
    )
    scores = precision_recall(real_subset, fake_subset, PRECISION_RECALL_NEIGHBOUR)
    return [
        reference.build_result(
            extractor.metric_prefix + name,
            scores[index],
            scores[index + 4],
            len(fake_subset),
            f"{extractor.description}, k={PRECISION_RECALL_NEIGHBOUR}",
            start,
            reference_size=len(real_subset),
            is_public=extractor.is_public,
        )
        for index, name in enumerate(("precision", "recall", "density", "coverage"))
    ]


def measure_inception_score(
    samples: Samples, classifier: Classifier, protocol: str, reference: Reference, start_time: float
) -> MetricResult:
    """Measure the inception score with a classifier trained on real data.

    Args:
        samples: The synthetic images.
        classifier: The classifier.
        protocol: Its description.
        reference: The real data it was trained on.
        start_time: When the measurement started.

    Returns:
        The result.
    """
    probabilities = classifier.predict_proba(samples.images)
    value, error = inception_score(probabilities, reference.build_generator())
    return reference.build_result("is", value, error, len(samples.images), protocol, start_time)


def measure_imagenet_score(samples: Samples, reference: Reference) -> MetricResult:
    """Measure the inception score with the classes of ImageNet; it says little about digits."""
    start = time.perf_counter()
    extractor = reference.inception_extractor
    assert extractor.predict_probabilities is not None
    images = samples.images[reference.select_indices(extractor, len(samples.images))]
    probabilities = extractor.predict_probabilities(images, reference.progress)
    value, error = inception_score(probabilities, reference.build_generator())
    return MetricResult(
        "imagenet_is",
        value,
        error,
        len(images),
        "ImageNet",
        0,
        True,
        f"1008 classes of {extractor.description}",
        seconds=time.perf_counter() - start,
    )


def measure_wasserstein(
    samples: Samples, metrics: Sequence[str], reference: Reference
) -> list[MetricResult]:
    """Measure Wasserstein distances between the pixels of random subsets.

    Args:
        samples: The synthetic images.
        metrics: Names of metrics, of which "sliced" and "exact" are measured.
        reference: The real data.

    Returns:
        At most two results.
    """
    results = []
    for name in ("sliced", "exact"):
        if name not in metrics:
            continue
        start = time.perf_counter()
        max_points = EXACT_WASSERSTEIN_POINTS if name == "exact" else SLICED_WASSERSTEIN_POINTS
        real, fake = (
            images[reference.subsample_indices(len(images), max_points)]
            .flatten(1)
            .to(reference.device)
            for images in (reference.data._read_records(slice(None)).images, samples.images)
        )
        if name == "sliced":
            value, error = sliced_wasserstein(
                real, fake, SLICED_WASSERSTEIN_PROJECTIONS, reference.build_generator()
            )
            protocol = f"pixels, {SLICED_WASSERSTEIN_PROJECTIONS} directions, order 2"
        else:
            value = exact_wasserstein(real.cpu(), fake.cpu()).value
            error = math.nan  # the solver is exact; the error over samples is unknown
            protocol = "pixels, order 2"
        results.append(
            reference.build_result(
                f"{name}_wasserstein",
                value,
                error,
                len(fake),
                protocol,
                start,
                reference_size=len(real),
                better="lower",
            )
        )
    return results
