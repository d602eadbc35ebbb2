r"""Distances between two sets of features: Fréchet (FID) and kernel (KID), through torchmetrics.

.. math:: FID = \|m_1-m_2\|^2 + tr(S_1+S_2-2(S_1S_2)^{1/2})
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from privot.errors import SettingError

NUM_HALF_SAMPLES = 5  # random half samples, which estimate the standard error and the bias
FID_BATCH_SIZE = 10_000  # features per update of torchmetrics


class FrechetDistance(NamedTuple):
    """A Fréchet distance.

    Attributes:
        value: The distance.
        standard_error: Standard error over samples.
        bias: How much the finite number of samples raises the value. The value includes it.
    """

    value: float
    standard_error: float
    bias: float


class _IdentityFeatures(nn.Module):
    """Returns its input. It lets torchmetrics take features where it expects a network."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def frechet_distance(real: Tensor, fake: Tensor, generator: torch.Generator) -> FrechetDistance:
    """Compute the FID of two sets of features.

    The value is that of torchmetrics. Random halves of the fake set estimate error and bias: their
    values vary as the value itself varies over fresh samples (:math:`1/(m/2)-1/m=1/m`). Since the
    bias goes as :math:`1/m`, their mean exceeds the value by as much as the value exceeds that of
    infinitely many samples. With fewer samples than features, the bias decreases more slowly, and a
    small real set adds its own: ``bias`` is then too low.

    Args:
        real: Features of real images [n, d].
        fake: Features of synthetic images [m, d].
        generator: Draws the halves.

    Returns:
        Value, standard error and bias.

    Raises:
        SettingError: A set has fewer than two images, or torchmetrics is missing.

    >>> points = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> round(frechet_distance(points, points + 1, torch.Generator()).value, 3)
    3.0
    """
    if min(len(real), len(fake)) < 2:
        raise SettingError("FID needs at least two real and two synthetic images.")
    metric = (
        import_torchmetrics("fid")
        .FrechetInceptionDistance(feature=_IdentityFeatures(real.shape[1]))
        .to(real.device)
        .set_dtype(torch.float64)
    )
    for features, is_real in ((real, True), (fake, False)):
        for batch in features.split(FID_BATCH_SIZE):
            metric.update(batch.double(), real=is_real)
    value = float(metric.compute())
    mean, covariance = _compute_moments(real)
    covariance_sqrt = _matrix_sqrt(covariance)
    half_values = []
    for _ in range(NUM_HALF_SAMPLES):
        order = torch.randperm(len(fake), generator=generator)
        indices = order[: max(2, len(fake) // 2)].to(fake.device)
        half_values.append(
            _frechet_from_moments(
                mean, covariance, covariance_sqrt, *_compute_moments(fake[indices])
            )
        )
    halves = torch.tensor(half_values, dtype=torch.float64)
    return FrechetDistance(value, halves.std().item(), halves.mean().item() - value)


def _compute_moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean [d] and the covariance [d, d] of features [n, d]."""
    features = features.double()
    mean = features.mean(0)
    return mean, (features - mean).T @ (features - mean) / (len(features) - 1)


def _matrix_sqrt(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def _frechet_from_moments(
    mean: Tensor,
    covariance: Tensor,
    covariance_sqrt: Tensor,
    other_mean: Tensor,
    other_covariance: Tensor,
) -> float:
    """Compute the Fréchet distance of two Gaussians from their means and covariances."""
    product = covariance_sqrt @ other_covariance @ covariance_sqrt
    cross = torch.linalg.eigvalsh(product).clamp(min=0).sqrt().sum()
    return float(
        (mean - other_mean).square().sum()
        + covariance.trace()
        + other_covariance.trace()
        - 2 * cross
    )


def kernel_distance(
    real: Tensor,
    fake: Tensor,
    generator: torch.Generator,
    num_subsets: int = 100,
    subset_size: int = 1000,
) -> tuple[float, float]:
    """Compute the KID of two sets of features: the unbiased squared MMD with a cubic kernel.

    The value is the mean over random subsets. Subsets of s out of m samples vary as
    :math:`1/s-1/m`, and fresh samples as :math:`1/m`, so the variance of the subsets gives the
    standard error over samples. The variance from the choice of the subsets is added.

    Args:
        real: Features of real images [n, d].
        fake: Features of synthetic images [m, d].
        generator: Draws the subsets.
        num_subsets: Number of subsets.
        subset_size: Images per subset, at most half of the smaller set.

    Returns:
        Value and standard error. The error is NaN for fewer than 3 samples, which have no half.
    """
    kid = import_torchmetrics("kid")
    min_size = min(len(real), len(fake))
    subset_size = max(2, min(subset_size, min_size // 2))
    distances = []
    for _ in range(num_subsets):
        real_subset, fake_subset = (
            features[
                torch.randperm(len(features), generator=generator)[:subset_size].to(features.device)
            ]
            for features in (real, fake)
        )
        distances.append(float(kid.poly_mmd(real_subset.double(), fake_subset.double())))
    values = torch.tensor(distances, dtype=torch.float64)
    error = math.nan
    if min_size > subset_size:
        scale = (1 / (min_size / subset_size - 1) + 1 / num_subsets) ** 0.5
        error = values.std().item() * scale
    return values.mean().item(), error


def import_torchmetrics(submodule: str) -> Any:
    """Import a submodule of ``torchmetrics.image``, an optional dependency.

    Raises:
        SettingError: It is not installed.
    """
    try:
        return import_module(f"torchmetrics.image.{submodule}")
    except ImportError:
        raise SettingError(
            "FID and KID need the package torchmetrics. Run pip install 'privot[measures]'."
        ) from None
