"""How good a reconstruction is: images clamped to the box, matched with the true ones of their batch, labels judged apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from privot.attacks.inversion.problem import Found
from privot.audit.operating_points import least, most
from privot.errors import DataError
from privot.measures.image_similarity import lpips, mse, psnr, ssim

THRESHOLD = 1e-2  # of the mean squared error, values in [0, 1]: the first papers state none


@dataclass(frozen=True)
class Judgement:
    """Of each image [N, batch], as matched: ``mse``, ``psnr``, ``ssim``, and ``lpips`` if asked for; ``labels`` [N], how many are right.

    ``nearest`` [N, batch] is the error of the found image that comes nearest to each true one, whichever was matched with it: an image is
    leaked when that is under ``threshold``. ``leaked`` is the share of victims of whom any image is, between ``low`` and
    ``high`` at ``confidence`` (Clopper-Pearson; images of one update are no independent trials).
    ``order`` [N, batch] says which found image stands for each true one.
    """

    mse: Tensor
    nearest: Tensor
    psnr: Tensor
    ssim: Tensor
    lpips: Tensor | None
    labels: Tensor
    order: Tensor
    threshold: float
    leaked: float
    low: float
    high: float
    confidence: float

    def to_json(self) -> dict[str, Any]:
        """Means and rates, for a report."""
        rows = {name: getattr(self, name) for name in ("mse", "psnr", "ssim", "lpips")}
        return {
            "victims": len(self.mse),
            "batch": self.mse.shape[1],
            "threshold": self.threshold,
            "leaked": self.leaked,
            "low": self.low,
            "high": self.high,
            "confidence": self.confidence,
            "label_accuracy": float(self.labels.mean()),
            "median_mse": float(self.mse.median()),
            **{
                name: float(each.clamp(max=200).mean())
                for name, each in rows.items()
                if each is not None
            },
        }


def judge(
    found: Found,
    images: Tensor,
    labels: Tensor,
    threshold: float = THRESHOLD,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    perceptual: bool = False,
    confidence: float = 0.95,
) -> Judgement:
    """Compare with the true ``images`` [N, batch, c, h, w] and ``labels`` [N, batch]; values are brought from ``bounds`` to [0, 1].

    Within a batch the order of images is lost in the sum, so found and true ones are matched for the least total error.
    """
    if found.images.shape != images.shape or labels.shape[:2] != images.shape[:2]:
        raise DataError(
            f"found {list(found.images.shape)}, true {list(images.shape)}, labels {list(labels.shape)}: all [N, batch, ...] alike"
        )
    low, high = bounds
    guess, truth = (
        ((each.detach().double() - low) / (high - low)).nan_to_num(nan=0.5).clamp(0, 1)
        for each in (found.images, images)
    )
    # not by a product of matrices, which would round small distances away: [N, true, found]
    costs = torch.cdist(
        truth.flatten(2), guess.flatten(2), compute_mode="donot_use_mm_for_euclid_dist"
    ).square()
    order = matched(costs).to(guess.device)
    guess = torch.stack([one[place] for one, place in zip(guess, order, strict=True)])
    one = guess.flatten(0, 1)
    two = truth.flatten(0, 1)
    count = images.shape[:2]
    error = mse(one, two).view(count)
    # The least total error may part an image from its exact copy, where that helps the others.
    nearest = torch.minimum(error, costs.amin(2) / truth[0, 0].numel())
    caught = (nearest < threshold).any(1)
    hits = int(caught.sum())
    trials = len(error)
    tail = (1 - confidence) / 2
    return Judgement(
        error,
        nearest,
        psnr(one, two).view(count),
        ssim(one, two).view(count),
        lpips(one, two).view(count) if perceptual else None,
        overlap(found.labels, labels),
        order,
        threshold,
        hits / trials,
        float(least(hits, trials, tail)),
        float(most(hits, trials, tail)),
        confidence,
    )


def matched(costs: Tensor) -> Tensor:
    """[N, batch]: for each true image the place of its match among the found ones, by assignment of least total ``costs`` [N, true, found].

    >>> matched(torch.tensor([[[0.81, 0.01], [0.04, 0.64]]]))
    tensor([[1, 0]])
    """
    return torch.stack(
        [torch.as_tensor(linear_sum_assignment(each)[1]) for each in costs.cpu().numpy()]
    )


def overlap(guess: Tensor, truth: Tensor) -> Tensor:
    """[N]: which share of the labels of a batch was found, each as often as it is there; labels are leaked without their images.

    >>> overlap(torch.tensor([[3, 3, 5]]), torch.tensor([[5, 3, 4]]))
    tensor([0.6667], dtype=torch.float64)
    """
    classes = int(torch.maximum(guess.max(), truth.max())) + 1
    counts = [torch.nn.functional.one_hot(each.long(), classes).sum(1) for each in (guess, truth)]
    return torch.minimum(*counts).sum(1).double() / truth.shape[1]
