"""The optimization of KIP: move a set until kernel ridge regression predicts the records."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privot.baselines.augmentation_buffer import AugmentationBuffer
from privot.baselines.condensation import PIXEL_STATS, ClassPool, standardize_images
from privot.baselines.kernel_ridge import ConvFeatureRegression, DenseNtkRegression
from privot.baselines.zca import ZcaWhitening
from privot.nets.augment import AugmentParams, apply_augmentations
from privot.runtime import Progress

STEPS_PER_REPORT = 25


def center_labels(labels: Tensor, classes: int) -> Tensor:
    """Compute the targets of the regression, one-hot minus 1/classes: [count, classes]."""
    return one_hot(labels, classes).float() - 1 / classes


def project_to_simplex(labels: Tensor) -> Tensor:
    """Project regression labels plus 1/classes to the nearest probability vectors.

    Args:
        labels: Regression labels [count, classes].

    Returns:
        Probabilities [count, classes], nearest in Euclidean distance.

    >>> project_to_simplex(torch.tensor([[0.5, -0.5], [1.5, -0.5], [0.1, -0.1]]))
    tensor([[1.0000, 0.0000],
            [1.0000, 0.0000],
            [0.6000, 0.4000]])
    """
    rows = labels + 1 / labels.shape[1]
    sorted_rows = rows.sort(1, descending=True).values
    ranks = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    # What is subtracted from each of the k largest entries, for every k.
    thresholds = (sorted_rows.cumsum(1) - 1) / ranks
    num_positive = (sorted_rows > thresholds).sum(1, keepdim=True)
    projection = (rows - thresholds.gather(1, num_positive - 1)).clamp(min=0)
    return projection / projection.sum(1, keepdim=True)  # corrects rounding of distant labels


class KipRun:
    """The set and its optimizer.

    Args:
        images: Initial images in [0, 1] [count, ...].
        labels: Their labels [count].
        pool: The records.
        regression: The kernel.
        whitening: Whitening of the pixels, or None.
        augmentations: One operation for each step, or None.
        learning_rate: Learning rate of Adam.
        batch_per_class: Records of each class in a step.
        ridge: Ridge of the regression.
        learn_labels: Whether labels are optimized, too.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        pool: ClassPool,
        regression: DenseNtkRegression | ConvFeatureRegression,
        whitening: ZcaWhitening | None,
        augmentations: AugmentationBuffer | None,
        *,
        learning_rate: float,
        batch_per_class: int,
        ridge: float,
        learn_labels: bool,
    ):
        self.images = images
        self.pool = pool
        self.regression = regression
        self.whitening = whitening
        self.augmentations = augmentations
        self.batch_per_class = batch_per_class
        self.ridge = ridge
        self.learn_labels = learn_labels
        self.classes = len(pool.is_record)
        self.pixels = self._transform(standardize_images(images)).requires_grad_()
        self.soft_labels = center_labels(labels, self.classes)
        parameters = [self.pixels]
        if learn_labels:
            parameters.append(self.soft_labels.requires_grad_())
        self.optimizer = torch.optim.Adam(parameters, lr=learning_rate)

    def run(self, steps: int, rng: torch.Generator, progress: Progress) -> tuple[Tensor, Tensor]:
        """Run all steps; nothing in the loop waits for the device.

        Args:
            steps: Number of steps.
            rng: Random generator on the records' device.
            progress: Shows the progress.

        Returns:
            Images in [0, 1] [count, ...] and regression labels [count, classes].
        """
        for step in range(steps):
            loss = self._compute_loss(rng)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self._project()
            if (step + 1) % STEPS_PER_REPORT == 0 or step + 1 == steps:
                progress("moving the set", step + 1, steps)
        return self.images, self.soft_labels.detach()

    def _transform(self, pixels: Tensor) -> Tensor:
        """Whiten standardized pixels, if the set is optimized in whitened pixels."""
        return self.whitening(pixels) if self.whitening else pixels

    def _compute_loss(self, rng: torch.Generator) -> Tensor:
        self.regression.resample(rng)
        records, weights = self.pool.sample(self.batch_per_class, rng)
        record_labels = torch.arange(self.classes, device=records.device).repeat_interleave(
            weights.shape[1]
        )
        targets = center_labels(record_labels, self.classes)
        support = self.pixels
        real = self._transform(records.flatten(0, 1))
        if self.augmentations:
            self.augmentations.refill_if_empty()
            params = self.augmentations.next_params()
            support, real = (_augment_alike(images, params) for images in (support, real))
        predictions = self.regression.predict(support, self.soft_labels, real, self.ridge)
        errors = (predictions - targets).square().mean(1)
        return (errors * weights.flatten()).sum() / self.classes / 2

    def _project(self) -> None:
        """Restrict the set to what can be released, so that nothing is cut off at the end."""
        mean, std = PIXEL_STATS[self.images.shape[1]]
        with torch.no_grad():
            pixels = self.pixels
            if self.whitening:
                pixels = self.whitening.inverse_transform(pixels)
            self.images = (pixels * std + mean).clamp(0, 1)
            self.pixels.copy_(self._transform(standardize_images(self.images)))
            if self.learn_labels:
                self.soft_labels.copy_(project_to_simplex(self.soft_labels) - 1 / self.classes)


def _augment_alike(images: Tensor, params: AugmentParams) -> Tensor:
    """Apply the one operation in ``params`` to all images."""
    expanded = (values.expand(len(images), *values.shape[1:]) for values in params)
    return apply_augmentations(images, AugmentParams(*expanded))
