"""Noisy means of blocks of order statistics, denoised to ascending quantiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from privot.components.dct import dct_basis
from privot.transport.sorting import isotonic_regression

# Shapes of quantile functions as powers of Gaussian quantiles: location, spread, skewness and so
# on.
NUM_QUANTILE_SHAPES = 8


def denoise_quantiles(block_means: Tensor, expected: Tensor, noise_std: Tensor) -> Tensor:
    r"""Denoise block means by their difference from the quantiles of Gaussians.

    The differences are written in orthonormal shapes of quantile functions. In each shape, the mean
    over classes and the deviation of each class from it are shrunk by :math:`1-\sigma^2/e`, where
    :math:`e` is the mean energy over slices. Finally each row is made to ascend.

    Args:
        block_means: Noisy block means [classes, slices, blocks].
        expected: Block means of Gaussians with the estimated moments [classes, slices, blocks].
        noise_std: Standard deviation of the noise of each class [classes].

    Returns:
        Ascending quantiles [classes, slices, blocks].
    """
    classes = len(block_means)
    noise_variance = noise_std.square()[:, None]
    shapes = build_quantile_shapes(block_means.shape[2]).to(block_means)
    coefficients = (block_means - expected) @ shapes
    common = coefficients.mean(0)
    deviations = coefficients - common
    common_variance = noise_variance.sum() / classes**2
    deviation_variance = (noise_variance * (1 - 2 / classes) + common_variance).clamp(min=0)

    def shrink(values: Tensor, variance: Tensor) -> Tensor:
        energy = values.square().mean(-2, keepdim=True)
        return values * ((energy - variance[..., None]) / energy.clamp(min=1e-30)).clamp(0, 1)

    denoised = shrink(common, common_variance[None]) + shrink(deviations, deviation_variance)
    return isotonic_regression(expected + denoised @ shapes.T)


def build_quantile_shapes(num_blocks: int) -> Tensor:
    """Build an orthonormal basis of quantile functions: powers of Gaussian quantiles, then cosines.

    Returns:
        Orthonormal columns [num_blocks, num_blocks], in float64.

    >>> shapes = build_quantile_shapes(20)
    >>> torch.allclose(shapes.T @ shapes, torch.eye(20, dtype=shapes.dtype), atol=1e-9)
    True
    """
    quantiles = torch.special.ndtri(
        (torch.arange(num_blocks, dtype=torch.float64) + 0.5) / num_blocks
    )
    powers = quantiles[:, None] ** torch.arange(min(NUM_QUANTILE_SHAPES, num_blocks))
    return torch.linalg.qr(
        torch.cat([powers / powers.norm(dim=0), dct_basis(num_blocks, num_blocks).double()], 1)
    ).Q


def compute_normal_block_means(num_blocks: int) -> Tensor:
    """Compute the means of a standard Gaussian over blocks of equal mass: [num_blocks], in float64.

    >>> compute_normal_block_means(2).round(decimals=3).tolist()
    [-0.798, 0.798]
    """
    edges = torch.special.ndtri(torch.arange(num_blocks + 1, dtype=torch.float64) / num_blocks)
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    return num_blocks * (density[:-1] - density[1:])
