"""Triton kernels for instance norm, ReLU and 2x2 average pooling in one pass, in half precision.

The blocks of a ConvNet are limited by memory traffic. A norm, a ReLU and a pooling on their own
read and write the largest maps five times. These kernels read the maps once and write a quarter of
them; the backward pass reads once and writes once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from privot.nets.kernels.pooling_tiles import (
    empty_pooled_maps,
    normalize_and_mask_gradient,
    normalize_and_pool,
)

ELEMENTS_PER_PROGRAM = 16_384  # elements of a map that one program holds: as many channels as fit


@triton.jit
def _norm_relu_pool_kernel(
    x,
    gain,
    shift,
    y,
    mean,
    rstd,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    channels_per_program: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * channels_per_program + tl.arange(0, channels_per_program)
    positions: tl.constexpr = (height // 2) * (width // 2)
    position = tl.arange(0, positions)
    # The top left corner of each 2x2 window, [positions, channels].
    corner = (
        image * height * width * channels
        + ((2 * (position // (width // 2)) * width + 2 * (position % (width // 2))) * channels)[
            :, None
        ]
        + channel[None, :]
    )
    a = tl.load(x + corner).to(tl.float32)
    b = tl.load(x + corner + channels).to(tl.float32)
    c = tl.load(x + corner + width * channels).to(tl.float32)
    d = tl.load(x + corner + width * channels + channels).to(tl.float32)
    pooled, channel_mean, channel_rstd = normalize_and_pool(
        a, b, c, d, tl.load(gain + channel), tl.load(shift + channel), positions
    )
    out = image * positions * channels + (position * channels)[:, None] + channel[None, :]
    tl.store(y + out, pooled.to(y.dtype.element_ty))
    tl.store(mean + image * channels + channel, channel_mean)
    tl.store(rstd + image * channels + channel, channel_rstd)


@triton.jit
def _norm_relu_pool_backward_kernel(
    x,
    gain,
    shift,
    mean,
    rstd,
    dy,
    dx,
    dgain,
    dshift,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    channels_per_program: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * channels_per_program + tl.arange(0, channels_per_program)
    positions: tl.constexpr = (height // 2) * (width // 2)
    position = tl.arange(0, positions)
    corner = (
        image * height * width * channels
        + ((2 * (position // (width // 2)) * width + 2 * (position % (width // 2))) * channels)[
            :, None
        ]
        + channel[None, :]
    )
    m = tl.load(mean + image * channels + channel)[None, :]
    r = tl.load(rstd + image * channels + channel)[None, :]
    g = tl.load(gain + channel)[None, :]
    s = tl.load(shift + channel)[None, :]
    out = image * positions * channels + (position * channels)[:, None] + channel[None, :]
    # Each corner has a quarter of its window's gradient.
    gradient = tl.load(dy + out).to(tl.float32) * 0.25
    a, da = normalize_and_mask_gradient(tl.load(x + corner), m, r, g, s, gradient)
    b, db = normalize_and_mask_gradient(tl.load(x + corner + channels), m, r, g, s, gradient)
    c, dc = normalize_and_mask_gradient(
        tl.load(x + corner + width * channels), m, r, g, s, gradient
    )
    d, dd = normalize_and_mask_gradient(
        tl.load(x + corner + width * channels + channels), m, r, g, s, gradient
    )
    gradient_sum = tl.sum(da + db + dc + dd, 0)
    projection = tl.sum(da * a + db * b + dc * c + dd * d, 0)
    tl.store(dshift + image * channels + channel, gradient_sum)
    tl.store(dgain + image * channels + channel, projection)
    mean_gradient = (gradient_sum / (4 * positions))[None, :]
    mean_projection = (projection / (4 * positions))[None, :]
    scale = r * g
    dtype = dx.dtype.element_ty
    tl.store(dx + corner, (scale * (da - mean_gradient - a * mean_projection)).to(dtype))
    tl.store(dx + corner + channels, (scale * (db - mean_gradient - b * mean_projection)).to(dtype))
    tl.store(
        dx + corner + width * channels,
        (scale * (dc - mean_gradient - c * mean_projection)).to(dtype),
    )
    tl.store(
        dx + corner + width * channels + channels,
        (scale * (dd - mean_gradient - d * mean_projection)).to(dtype),
    )


def supports_norm_relu_pool(x: Tensor) -> bool:
    """Return whether the kernels support maps [count, channels, height, width].

    Sides must be powers of two up to 64, and the channels must fill whole programs.
    """
    height, width = x.shape[-2:]
    return (
        2 <= height <= 64
        and 2 <= width <= 64
        and not height & height - 1
        and not width & width - 1
        and x.shape[-3] % _choose_channels_per_program(x) == 0
    )


def _choose_channels_per_program(x: Tensor) -> int:
    """Return the channels of one program: a power of two."""
    channels, height, width = x.shape[-3:]
    return max(8, min(1 << channels.bit_length() - 1, ELEMENTS_PER_PROGRAM // (height * width)))


@torch.library.custom_op("privot::norm_relu_pool", mutates_args=())
def _norm_relu_pool_op(x: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the pooled maps, and the mean and reciprocal deviation of each map."""
    count, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    y = empty_pooled_maps(count, channels, height, width, x)
    mean = torch.empty(count, channels, device=x.device)
    rstd = torch.empty(count, channels, device=x.device)
    channels_per_program = _choose_channels_per_program(x)
    _norm_relu_pool_kernel[count, channels // channels_per_program](
        x,
        gain,
        shift,
        y,
        mean,
        rstd,
        height,
        width,
        channels,
        channels_per_program,
        num_warps=4,
    )
    return y, mean, rstd


@_norm_relu_pool_op.register_fake
def _(x: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count, channels, height, width = x.shape
    y = empty_pooled_maps(count, channels, height, width, x)
    return y, gain.new_empty(count, channels), gain.new_empty(count, channels)


@torch.library.custom_op("privot::norm_relu_pool_backward", mutates_args=())
def _norm_relu_pool_backward_op(
    x: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the maps, and for each image those of gain and shift."""
    count, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    dx = torch.empty_like(x)
    dgain = torch.empty_like(mean)
    dshift = torch.empty_like(mean)
    channels_per_program = _choose_channels_per_program(x)
    _norm_relu_pool_backward_kernel[count, channels // channels_per_program](
        x,
        gain,
        shift,
        mean,
        rstd,
        dy,
        dx,
        dgain,
        dshift,
        height,
        width,
        channels,
        channels_per_program,
        num_warps=4,
    )
    return dx, dgain, dshift


@_norm_relu_pool_backward_op.register_fake
def _(
    x: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _compute_gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dgain, dshift = _norm_relu_pool_backward_op(*ctx.saved_tensors, dy)
    _, needs_gain, needs_shift = ctx.needs_input_grad
    return dx, dgain.sum(0) if needs_gain else None, dshift.sum(0) if needs_shift else None


_norm_relu_pool_op.register_autograd(_compute_gradients, setup_context=_setup_context)


@_norm_relu_pool_op.register_vmap
def _(
    info: Any, dims: tuple[int | None, ...], x: Tensor, gain: Tensor, shift: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Treat an axis of records as a larger batch: each image is normalized alone."""
    if dims[1:] != (None, None) or dims[0] is None:
        raise NotImplementedError("vmap may map the images only, not gain or shift.")
    outputs = _norm_relu_pool_op(x.movedim(dims[0], 0).flatten(0, 1), gain, shift)
    return tuple(output.unflatten(0, (info.batch_size, -1)) for output in outputs), (0, 0, 0)


def norm_relu_pool(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Apply instance norm, ReLU and 2x2 average pooling; differentiable once.

    Args:
        x: Maps in half precision, [count, channels, height, width].
        gain: Gain of the norm, [channels].
        shift: Shift of the norm, [channels].

    Returns:
        Maps [count, channels, height / 2, width / 2].
    """
    return _norm_relu_pool_op(x, gain.float(), shift.float())[0]
