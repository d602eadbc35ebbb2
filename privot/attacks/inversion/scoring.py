"""Score reconstructions: match them with the true images of their batch, and count labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from privot.attacks.inversion.problem import Reconstruction
from privot.audit.operating_points import clopper_pearson_lower, clopper_pearson_upper
from privot.errors import DataError
from privot.measures.image_similarity import lpips, mse, psnr, ssim

# mean squared error below which an image counts as leaked, values in [0, 1]; the first papers do
# not state a threshold
LEAK_MSE_THRESHOLD = 1e-2
MAX_PSNR_IN_REPORT = 200.0


@dataclass(frozen=True)
class ReconstructionScores:
    """How good a reconstruction is.

    Attributes:
        mse: [N, batch], of each true image and its match.
        nearest_mse: [N, batch], of each true image and the reconstructed image that is nearest to
            it, whichever it is matched with.
        psnr: [N, batch].
        ssim: [N, batch].
        lpips: [N, batch], or None.
        label_accuracy: [N], share of the labels that are right.
        matching: [N, batch], index of the reconstructed image that is matched with each true image.
        threshold: An image is leaked when its ``nearest_mse`` is below.
        leak_rate: Share of victims of whom any image is leaked.
        leak_rate_low: Lower Clopper-Pearson bound. Images of one update are not independent
            trials, so victims are counted.
        leak_rate_high: Upper Clopper-Pearson bound of ``leak_rate``.
        confidence: Confidence level of both bounds together.
    """

    mse: Tensor
    nearest_mse: Tensor
    psnr: Tensor
    ssim: Tensor
    lpips: Tensor | None
    label_accuracy: Tensor
    matching: Tensor
    threshold: float
    leak_rate: float
    leak_rate_low: float
    leak_rate_high: float
    confidence: float

    def to_json(self) -> dict[str, Any]:
        """Return means and rates, for a report."""
        scores = {name: getattr(self, name) for name in ("mse", "psnr", "ssim", "lpips")}
        return {
            "victims": len(self.mse),
            "batch": self.mse.shape[1],
            "threshold": self.threshold,
            "leak_rate": self.leak_rate,
            "leak_rate_low": self.leak_rate_low,
            "leak_rate_high": self.leak_rate_high,
            "confidence": self.confidence,
            "label_accuracy": float(self.label_accuracy.mean()),
            "median_mse": float(self.mse.median()),
            **{
                name: float(score.clamp(max=MAX_PSNR_IN_REPORT).mean())
                for name, score in scores.items()
                if score is not None
            },
        }


def score_reconstruction(
    reconstruction: Reconstruction,
    images: Tensor,
    labels: Tensor,
    threshold: float = LEAK_MSE_THRESHOLD,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    with_lpips: bool = False,
    confidence: float = 0.95,
) -> ReconstructionScores:
    """Compare a reconstruction with the truth.

    The gradient of a batch does not depend on the order of its images, so reconstructed and true
    images are matched for the smallest total error.

    Args:
        reconstruction: Reconstruction of N victims.
        images: The true images [N, batch, c, h, w].
        labels: The true labels [N, batch].
        threshold: Mean squared error below which an image counts as leaked.
        bounds: Smallest and largest value of a pixel. Values are mapped to [0, 1] and clamped.
        with_lpips: Whether LPIPS is computed.
        confidence: Confidence level of the bounds of the leak rate.

    Returns:
        The scores.

    Raises:
        DataError: The shapes differ.
    """
    if reconstruction.images.shape != images.shape or labels.shape[:2] != images.shape[:2]:
        raise DataError(
            f"reconstructed images {list(reconstruction.images.shape)}, true images "
            f"{list(images.shape)}, labels {list(labels.shape)}: all must be [N, batch, ...] with "
            "the same N and batch."
        )
    low, high = bounds
    guess, truth = (
        ((pixels.detach().double() - low) / (high - low)).nan_to_num(nan=0.5).clamp(0, 1)
        for pixels in (reconstruction.images, images)
    )
    # [N, true, reconstructed]; a matrix product would round small distances away
    costs = torch.cdist(
        truth.flatten(2), guess.flatten(2), compute_mode="donot_use_mm_for_euclid_dist"
    ).square()
    matching = match_images(costs).to(guess.device)
    guess = torch.stack([batch[indices] for batch, indices in zip(guess, matching, strict=True)])
    flat_guess = guess.flatten(0, 1)
    flat_truth = truth.flatten(0, 1)
    count = images.shape[:2]
    error = mse(flat_guess, flat_truth).view(count)
    # The smallest total error may match an image with another than its exact copy.
    nearest_error = torch.minimum(error, costs.amin(2) / truth[0, 0].numel())
    is_leaked = (nearest_error < threshold).any(1)
    num_leaked = int(is_leaked.sum())
    num_victims = len(error)
    tail = (1 - confidence) / 2
    return ReconstructionScores(
        error,
        nearest_error,
        psnr(flat_guess, flat_truth).view(count),
        ssim(flat_guess, flat_truth).view(count),
        lpips(flat_guess, flat_truth).view(count) if with_lpips else None,
        compute_label_overlap(reconstruction.labels, labels),
        matching,
        threshold,
        num_leaked / num_victims,
        float(clopper_pearson_lower(num_leaked, num_victims, tail)),
        float(clopper_pearson_upper(num_leaked, num_victims, tail)),
        confidence,
    )


def match_images(costs: Tensor) -> Tensor:
    """Match images so that the total of ``costs`` [N, true, reconstructed] is smallest.

    Returns the index [N, batch] of the match of each true image.

    >>> match_images(torch.tensor([[[0.81, 0.01], [0.04, 0.64]]]))
    tensor([[1, 0]])
    """
    return torch.stack(
        [torch.as_tensor(linear_sum_assignment(cost)[1]) for cost in costs.cpu().numpy()]
    )


def compute_label_overlap(guessed_labels: Tensor, true_labels: Tensor) -> Tensor:
    """Compute the share [N] of the labels [N, batch] that were found, counted with multiplicity.

    >>> compute_label_overlap(torch.tensor([[3, 3, 5]]), torch.tensor([[5, 3, 4]]))
    tensor([0.6667], dtype=torch.float64)
    """
    classes = int(torch.maximum(guessed_labels.max(), true_labels.max())) + 1
    counts = [
        torch.nn.functional.one_hot(labels.long(), classes).sum(1)
        for labels in (guessed_labels, true_labels)
    ]
    return torch.minimum(*counts).sum(1).double() / true_labels.shape[1]
