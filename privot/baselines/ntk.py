"""The neural tangent kernel of an infinitely wide dense ReLU network, in closed form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# variances of the weights (over the fan-in) and of the biases: the dense network of the KIP code
WEIGHT = 2.0
BIAS = 0.01


def tangent_kernel(left: Tensor, right: Tensor, depth: int = 1) -> Tensor:
    r"""Kernel of ``depth`` hidden layers between images [n, ...] and [m, ...]: [n, m], in their own precision.

    Layer by layer, with covariance :math:`K` and angle :math:`\theta=\arccos(K_{xy}/\sqrt{K_{xx}K_{yy}})` of the inputs to a ReLU, the
    outputs have covariance :math:`\sqrt{K_{xx}K_{yy}}(\sin\theta+(\pi-\theta)\cos\theta)/2\pi` and slopes :math:`(\pi-\theta)/2\pi`
    (arc-cosine kernels); the tangent kernel is multiplied by the slopes, and each dense layer adds its own part.

    >>> one = torch.ones(1, 4, dtype=torch.float64)
    >>> round(tangent_kernel(one, one, depth=1).item(), 4)  # 2.01 from below by 2 times the slope 1/2, and 2.02
    4.03
    """
    left = left.flatten(1)
    right = right.flatten(1)
    size = left.shape[1]
    covariance = WEIGHT * (left @ right.T) / size + BIAS  # [n, m]
    own, other = (WEIGHT * each.square().sum(1) / size + BIAS for each in (left, right))  # [n], [m]
    tangent = covariance
    for _ in range(depth):
        scale = (own[:, None] * other[None, :]).sqrt()
        angle, cosine = _angle(covariance / scale)
        after = scale * (angle.sin() + (math.pi - angle) * cosine) / (2 * math.pi)
        covariance = WEIGHT * after + BIAS
        tangent = WEIGHT * tangent * (math.pi - angle) / (2 * math.pi) + covariance
        own, other = (WEIGHT * each / 2 + BIAS for each in (own, other))
    return tangent


def _angle(cosine: Tensor) -> tuple[Tensor, Tensor]:
    """The angle and its cosine. An image with itself has angle 0 with a slope that would be infinite; it is 0, as the angle stays 0."""
    same = cosine.abs() >= 1 - 8 * torch.finfo(cosine.dtype).eps
    inside = cosine.masked_fill(same, 0).acos()
    edge = torch.where(cosine > 0, 0.0, math.pi).to(cosine.dtype)
    return torch.where(same, edge, inside), cosine.clamp(-1, 1)
