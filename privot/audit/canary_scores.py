"""Scores of canaries: how much a release looks as if a canary had been among the records."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from privot.audit.neighbouring import CommonRecords
from privot.data.dataset import Records
from privot.release import Release

SAMPLES_PER_CLASS = 500  # that a generator samples for the class of a canary
MIN_NORM = 1e-9  # of the direction from a class mean to a canary


def score_mean_shift(images: Tensor, canary: Tensor, class_mean: Tensor) -> float:
    """Measure how far the mean of released images is shifted towards a canary.

    This is all that a method which matches means can reveal.

    Args:
        images: Released images of the canary's class, [count, channels, height, width].
        canary: The canary, [channels, height, width].
        class_mean: Mean image of the class without canaries, [channels, height, width].

    Returns:
        The score.
    """
    direction = (canary - class_mean).flatten().double()
    shift = (images.double().mean(0) - class_mean).flatten()
    return float(shift @ direction / direction.norm().clamp(min=MIN_NORM))


def score_nearest_image(images: Tensor, canary: Tensor, class_mean: Tensor) -> float:
    """Measure minus the distance of a canary to the nearest released image.

    Args:
        images: Released images of the canary's class, [count, channels, height, width].
        canary: The canary, [channels, height, width].
        class_mean: Not used; it makes the signature that of `score_mean_shift`.

    Returns:
        The score.
    """
    return -float((images - canary).flatten(1).double().norm(dim=1).min())


CANARY_SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], float]] = {
    "mean": score_mean_shift,
    "nearest": score_nearest_image,
}


def score_canaries(
    score_name: str,
    release: Release,
    records: CommonRecords,
    canary_records: Records,
    device: torch.device,
) -> list[float]:
    """Score all canaries under a release.

    Args:
        score_name: One of `CANARY_SCORES`.
        release: The release of a run.
        records: Records that every run has, which the adversary knows.
        canary_records: The canaries.
        device: Where a generator runs.

    Returns:
        One score for each canary.
    """
    score = CANARY_SCORES[score_name]
    canary_labels = canary_records.labels.tolist()
    class_means = {label: _compute_class_mean(records, label) for label in set(canary_labels)}
    class_images = {label: _get_class_images(release, label, device) for label in class_means}
    return [
        score(class_images[label], image, class_means[label])
        for image, label in zip(canary_records.images, canary_labels, strict=True)
    ]


def _get_class_images(release: Release, label: int, device: torch.device) -> Tensor:
    """Get the released images of a class: all of a set, or samples of a generator."""
    if release.artifact.kind == "set":
        return release.artifact.tensors["images"][release.artifact.tensors["labels"] == label]
    labels = torch.full((SAMPLES_PER_CLASS,), label)
    images, _ = release.sample(SAMPLES_PER_CLASS, labels, device=device)
    return images


def _compute_class_mean(records: CommonRecords, label: int) -> Tensor:
    """Compute the mean image of a class without canaries, float64 [channels, height, width]."""
    images = records.images[records.labels == label]
    if len(images):
        mean = images.mean(0, np.float64) / (255 if images.dtype == np.uint8 else 1)
    else:
        mean = np.full(records.images.shape[1:], 0.5)
    return torch.from_numpy(np.asarray(mean, np.float64))
