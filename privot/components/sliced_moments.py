"""Noisy class means and covariances of points: the query, and the removal of noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from privot.components.latent_space import LatentSpace
from privot.components.transforms import ImageTransform

# Share of a record's norm for the mean; the rest is for second moments, which are more numbers and
# carry more information.
MEAN_NORM_SHARE = 0.5


def compute_record_moments(
    image: Tensor, label: Tensor, space: ImageTransform | LatentSpace, radius: float
) -> Tensor:
    """Compute a record's point and the upper triangle of its outer product, of norm 1 at most.

    Args:
        image: One image [channels, height, width].
        label: Its label [], which the gate uses to sum by class.
        space: The space of the points.
        radius: Radius of the ball to which the point is clipped.

    Returns:
        The vector [dim + dim * (dim + 1) / 2].
    """
    point = space.encode_image(image) / radius
    point = point / point.norm().clamp(min=1)
    row, column = torch.triu_indices(len(point), len(point), device=point.device)
    # The factor gives the upper triangle the norm of the whole product.
    products = point[row] * point[column] * torch.where(row == column, 1.0, math.sqrt(2))
    return torch.cat([MEAN_NORM_SHARE * point, math.sqrt(1 - MEAN_NORM_SHARE**2) * products])


def estimate_gaussians(averages: Tensor, noise_std: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    r"""Estimate means and covariances of the classes from noisy averages of record moments.

    The mean covariance of all classes, and the deviation of each class from it, are denoised by
    their eigenvalues (see `denoise_spectrum`). Where this removes variance of a coordinate from the
    mean covariance, the variance is added back without its correlations, because a class with too
    little variance is worse for training than one with too much.

    Args:
        averages: Class averages of `compute_record_moments` [classes, dim + dim * (dim + 1) / 2].
        noise_std: Standard deviation of the noise of each class [classes].
        radius: Radius of the ball of the points.

    Returns:
        Means [classes, dim] and covariances [classes, dim, dim].
    """
    classes = len(averages)
    approximate_dim = math.isqrt(2 * averages.shape[1])
    dim = next(
        candidate
        for candidate in range(approximate_dim - 2, approximate_dim + 1)
        if candidate + candidate * (candidate + 1) // 2 == averages.shape[1]
    )
    means = averages[:, :dim] * (radius / MEAN_NORM_SHARE)
    triangles = averages[:, dim:] * (radius**2 / math.sqrt(1 - MEAN_NORM_SHARE**2))
    row, column = torch.triu_indices(dim, dim, device=averages.device)
    halves = averages.new_zeros(classes, dim, dim)
    halves[:, row, column] = triangles * torch.where(row == column, 0.5, math.sqrt(0.5))
    covariances = halves + halves.mT - means[:, :, None] * means[:, None]
    # Variance of the noise of an entry off the diagonal.
    noise_variance = (noise_std * radius**2 / math.sqrt(2 * (1 - MEAN_NORM_SHARE**2))).square()
    common = covariances.mean(0)
    common_variance = noise_variance.sum() / classes**2
    deviation_variance = (noise_variance * (1 - 2 / classes) + common_variance).clamp(min=0)
    denoised = denoise_spectrum(common, common_variance.sqrt()) + denoise_spectrum(
        covariances - common, deviation_variance.sqrt()
    )
    lost_variance = (common.diagonal() - denoised.diagonal(dim1=1, dim2=2)).clamp(min=0)
    return means, denoised + torch.diag_embed(lost_variance * bool(noise_variance.any()))


def denoise_spectrum(matrix: Tensor, noise_std: Tensor) -> Tensor:
    r"""Denoise symmetric matrices by shrinking their eigenvalues.

    Eigenvalues inside the semicircle of the noise, :math:`2\sigma\sqrt d`, become 0. The noise
    moves an eigenvalue :math:`\lambda` outside of it to :math:`\lambda+\sigma^2 d/\lambda`, and
    this is undone.

    Args:
        matrix: Symmetric matrices [..., d, d].
        noise_std: Standard deviation of the noise of their entries [...].

    Returns:
        The denoised matrices [..., d, d].
    """
    values, vectors = torch.linalg.eigh(matrix)
    edge = 2 * noise_std[..., None] * math.sqrt(matrix.shape[-1])
    discriminant = (values.square() - edge.square()).clamp(min=0)
    corrected = (values + values.sign() * discriminant.sqrt()) / 2
    shrunk_values = torch.where(values.abs() >= edge, corrected, 0.0)
    return (vectors * shrunk_values[..., None, :]) @ vectors.mT
