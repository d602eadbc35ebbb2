"""What the kernels of both ConvNet blocks share: norm, ReLU and pooling of one tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def normalize_and_pool(a, b, c, d, gain, shift, positions: tl.constexpr):
    """Normalize the four corners of each 2x2 window, apply ReLU, and average them.

    Args:
        a: Top left corners, [positions, channels].
        b: Top right corners.
        c: Bottom left corners.
        d: Bottom right corners.
        gain: Gain of the norm, [channels].
        shift: Shift of the norm, [channels].
        positions: Number of windows.

    Returns:
        Averages [positions, channels], and for each channel the mean and the reciprocal of the
        standard deviation.
    """
    mean = tl.sum(a + b + c + d, 0) / (4 * positions)
    a = a - mean[None, :]
    b = b - mean[None, :]
    c = c - mean[None, :]
    d = d - mean[None, :]
    rstd = 1 / tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 0) / (4 * positions) + 1e-5)
    scale = (gain * rstd)[None, :]
    offset = shift[None, :]
    total = tl.maximum(a * scale + offset, 0) + tl.maximum(b * scale + offset, 0)
    total += tl.maximum(c * scale + offset, 0) + tl.maximum(d * scale + offset, 0)
    return total * 0.25, mean, rstd


@triton.jit
def normalize_and_mask_gradient(x, mean, rstd, gain, shift, gradient):
    """Normalize values again, and zero their gradient where ReLU blocked it.

    Args:
        x: Values before the norm, [positions, channels].
        mean: Mean of each channel, [1, channels].
        rstd: Reciprocal of the standard deviation of each channel, [1, channels].
        gain: Gain of the norm, [1, channels].
        shift: Shift of the norm, [1, channels].
        gradient: Gradient after ReLU, [positions, channels].

    Returns:
        Normalized values and the gradient before ReLU, [positions, channels] each.
    """
    normalized = (x.to(tl.float32) - mean) * rstd
    return normalized, tl.where(normalized * gain + shift > 0, gradient, 0.0)


def empty_pooled_maps(count: int, channels: int, height: int, width: int, like: Tensor) -> Tensor:
    """Allocate pooled maps with channels last.

    Args:
        count: Number of images.
        channels: Number of channels.
        height: Height before the pooling.
        width: Width before the pooling.
        like: Tensor of the same precision and device.

    Returns:
        Uninitialized maps [count, channels, height / 2, width / 2].
    """
    return torch.empty(
        count,
        channels,
        height // 2,
        width // 2,
        dtype=like.dtype,
        device=like.device,
        memory_format=torch.channels_last,
    )
