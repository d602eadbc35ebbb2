"""The neural tangent kernel of an infinitely wide dense ReLU network, in closed form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Variances of the weights (times the fan-in) and of the biases, as in the code of KIP.
WEIGHT_VARIANCE = 2.0
BIAS_VARIANCE = 0.01


def compute_neural_tangent_kernel(left: Tensor, right: Tensor, depth: int = 1) -> Tensor:
    r"""Compute the neural tangent kernel between two sets of images.

    The inputs of a ReLU have covariance :math:`K` and angle
    :math:`\theta=\arccos(K_{xy}/\sqrt{K_{xx}K_{yy}})`. Its outputs have covariance
    :math:`\sqrt{K_{xx}K_{yy}}(\sin\theta+(\pi-\theta)\cos\theta)/2\pi`, and its derivatives
    :math:`(\pi-\theta)/2\pi` (arc-cosine kernels). In each layer the tangent kernel is multiplied
    by the latter, and the dense layer adds its own covariance.

    Args:
        left: Images [n, ...].
        right: Images [m, ...].
        depth: Number of hidden layers.

    Returns:
        The kernel [n, m], in the precision of the images.

    >>> image = torch.ones(1, 4, dtype=torch.float64)
    >>> round(compute_neural_tangent_kernel(image, image, depth=1).item(), 4)
    4.03
    """
    left = left.flatten(1)
    right = right.flatten(1)
    num_pixels = left.shape[1]
    covariance = WEIGHT_VARIANCE * (left @ right.T) / num_pixels + BIAS_VARIANCE  # [n, m]
    left_variance, right_variance = (
        WEIGHT_VARIANCE * images.square().sum(1) / num_pixels + BIAS_VARIANCE
        for images in (left, right)
    )
    kernel = covariance
    for _ in range(depth):
        scale = (left_variance[:, None] * right_variance[None, :]).sqrt()
        angle, cosine = _compute_safe_angle(covariance / scale)
        output_covariance = scale * (angle.sin() + (math.pi - angle) * cosine) / (2 * math.pi)
        covariance = WEIGHT_VARIANCE * output_covariance + BIAS_VARIANCE
        kernel = WEIGHT_VARIANCE * kernel * (math.pi - angle) / (2 * math.pi) + covariance
        left_variance, right_variance = (
            WEIGHT_VARIANCE * variance / 2 + BIAS_VARIANCE
            for variance in (left_variance, right_variance)
        )
    return kernel


def _compute_safe_angle(cosine: Tensor) -> tuple[Tensor, Tensor]:
    """Return the angle and its cosine, with finite derivatives.

    The angle of an image with itself is 0 with an infinite derivative. Since the angle stays 0, its
    derivative is set to 0.
    """
    is_parallel = cosine.abs() >= 1 - 8 * torch.finfo(cosine.dtype).eps
    angle = cosine.masked_fill(is_parallel, 0).acos()
    parallel_angle = torch.where(cosine > 0, 0.0, math.pi).to(cosine.dtype)
    return torch.where(is_parallel, parallel_angle, angle), cosine.clamp(-1, 1)
