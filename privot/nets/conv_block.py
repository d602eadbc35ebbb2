"""The block of a ConvNet: convolution, instance norm, ReLU and average pooling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, group_norm, pad

from privot.runtime.kernels import kernels_available

HALF_DTYPES = (torch.bfloat16, torch.float16)


@cache
def choose_compute_dtype(device: torch.device) -> torch.dtype:
    """Return the fastest precision of a device: bfloat16 on a GPU that has it, else float32."""
    return (
        torch.bfloat16
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        else torch.float32
    )


def autocast_half(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that computes in half precision where the device is faster with it.

    What is computed inside may be differentiated at most once. Weights may change between captured
    steps, so autocast caches none of them.
    """
    return (
        torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        if choose_compute_dtype(device) in HALF_DTYPES
        else nullcontext()
    )


def apply_conv_block(
    x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, padding: int
) -> Tensor:
    """Apply a 3x3 convolution, instance norm, ReLU and 2x2 average pooling.

    In half precision on a GPU, fused kernels do it, which can be differentiated once. In all other
    cases PyTorch's functions do it.

    Args:
        x: Images or maps, [count, channels, height, width].
        weight: Weights of the convolution, [width, channels, 3, 3].
        bias: Bias of the convolution, [width].
        gain: Gain of the norm, [width].
        shift: Shift of the norm, [width].
        padding: Padding of the convolution.

    Returns:
        Maps [count, width, height / 2, width / 2] for a padding of 1.

    >>> x, ones = torch.rand(2, 1, 8, 8), torch.ones(4)
    >>> apply_conv_block(x, torch.rand(4, 1, 3, 3), ones, ones, ones, padding=1).shape
    torch.Size([2, 4, 4, 4])
    """
    if x.is_cuda and (dtype := _compute_dtype(x)) in HALF_DTYPES and kernels_available():
        from privot.nets.kernels import conv_norm_relu_pool, norm_relu_pool

        x = x.to(dtype)
        weight = weight.to(dtype)
        if conv_norm_relu_pool.supports_conv_norm_relu_pool(x, weight, gain, padding):
            return conv_norm_relu_pool.conv_norm_relu_pool(x, weight, gain, shift, padding)
        x, weight = _pad_channels(x, weight)
        # The norm would remove the bias again, so none is added.
        maps = conv2d(x, weight, None, padding=padding)
        if norm_relu_pool.supports_norm_relu_pool(maps):
            return norm_relu_pool.norm_relu_pool(maps, gain, shift)
    else:
        maps = conv2d(x, weight, bias.to(weight.dtype), padding=padding)
    # Autocast would widen the maps, and twice the memory is twice the time.
    with torch.autocast(maps.device.type, enabled=False):
        normalized = group_norm(maps, maps.shape[1], gain.to(maps.dtype), shift.to(maps.dtype))
        return avg_pool2d(normalized.relu(), 2)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the precision that convolutions of ``x`` will have."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def _pad_channels(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Add zero channels up to a multiple of 8 and lay out the weights with channels last.

    A GPU's matrix units can read operands of this form without rearranging them.
    """
    num_missing = -weight.shape[1] % 8
    if num_missing:
        padding = (0, 0, 0, 0, 0, num_missing)
        x = pad(x, padding)
        weight = pad(weight, padding)
    return x, weight.contiguous(memory_format=torch.channels_last)
