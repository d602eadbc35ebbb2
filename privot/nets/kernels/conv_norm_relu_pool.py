"""The first block of a fixed ConvNet in one pass, as PyTorch operators in half precision.

Only the images have a gradient. The kernels are in `conv_norm_relu_pool_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from privot.nets.kernels.conv_norm_relu_pool_kernels import (
    _conv_norm_relu_pool_backward_kernel,
    _conv_norm_relu_pool_kernel,
)
from privot.nets.kernels.pooling_tiles import empty_pooled_maps


def _kernel_sizes(x: Tensor, weight: Tensor, padding: int) -> tuple[int, ...]:
    """Return the compile-time arguments of both kernels, from in_channels to taps.

    Args:
        x: Images, [count, in_channels, in_height, in_width].
        weight: Weights, [channels, in_channels, 3, 3].
        padding: Padding of the convolution.

    Returns:
        in_channels, in_height, in_width, padding, height, width, channels, channels_per_program
        and taps.
    """
    in_channels, in_height, in_width = x.shape[1:]
    height, width = (side + 2 * padding - 2 for side in (in_height, in_width))
    channels = len(weight)
    channels_per_program = 32 if channels % 32 == 0 else 16
    taps = 16 if in_channels == 1 else 32
    return (
        in_channels,
        in_height,
        in_width,
        padding,
        height,
        width,
        channels,
        channels_per_program,
        taps,
    )


@torch.library.custom_op("privot::conv_norm_relu_pool", mutates_args=())
def _conv_norm_relu_pool_op(
    x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the pooled maps, and the mean and reciprocal deviation of each map."""
    sizes = _kernel_sizes(x, weight, padding)
    *_, height, width, channels, channels_per_program, _ = sizes
    y = empty_pooled_maps(len(x), channels, height, width, x)
    mean = torch.empty(len(x), channels, device=x.device)
    rstd = torch.empty(len(x), channels, device=x.device)
    _conv_norm_relu_pool_kernel[len(x), channels // channels_per_program](
        x.contiguous(), weight.contiguous(), gain, shift, y, mean, rstd, *sizes, num_warps=8
    )
    return y, mean, rstd


@_conv_norm_relu_pool_op.register_fake
def _(
    x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    *_, height, width, channels, _, _ = _kernel_sizes(x, weight, padding)
    y = empty_pooled_maps(len(x), channels, height, width, x)
    return y, gain.new_empty(len(x), channels), gain.new_empty(len(x), channels)


@torch.library.custom_op("privot::conv_norm_relu_pool_backward", mutates_args=())
def _conv_norm_relu_pool_backward_op(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    shift: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dy: Tensor,
    padding: int,
) -> Tensor:
    """Compute the gradient of the images."""
    dx = torch.zeros(x.shape, device=x.device)
    dy = dy.contiguous(memory_format=torch.channels_last)
    _conv_norm_relu_pool_backward_kernel[len(x),](
        x.contiguous(),
        weight.contiguous(),
        gain,
        shift,
        mean,
        rstd,
        dy,
        dx,
        *_kernel_sizes(x, weight, padding),
        num_warps=8,
    )
    return dx.to(x.dtype)


@_conv_norm_relu_pool_backward_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    shift: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dy: Tensor,
    padding: int,
) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.padding = inputs[4]
    ctx.mark_non_differentiable(*output[1:])


def _compute_gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx = _conv_norm_relu_pool_backward_op(*ctx.saved_tensors, dy, ctx.padding)
    return dx, None, None, None, None


_conv_norm_relu_pool_op.register_autograd(_compute_gradients, setup_context=_setup_context)


@_conv_norm_relu_pool_op.register_vmap
def _(
    info: Any,
    dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    gain: Tensor,
    shift: Tensor,
    padding: int,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Treat an axis of records as a larger batch: each image is normalized alone."""
    if dims[1:4] != (None, None, None) or dims[0] is None:
        raise NotImplementedError("vmap may map the images only, not weights, gain or shift.")
    batch = x.movedim(dims[0], 0).flatten(0, 1)
    outputs = _conv_norm_relu_pool_op(batch, weight, gain, shift, padding)
    return tuple(output.unflatten(0, (info.batch_size, -1)) for output in outputs), (0, 0, 0)


def supports_conv_norm_relu_pool(x: Tensor, weight: Tensor, gain: Tensor, padding: int) -> bool:
    """Return whether the kernels support a block of images.

    They need few channels, maps whose sides are powers of two up to 32, and weights that need no
    gradient.

    Args:
        x: Images, [count, in_channels, in_height, in_width].
        weight: Weights, [channels, in_channels, 3, 3].
        gain: Gain of the norm, [channels].
        padding: Padding of the convolution.

    Returns:
        Whether `conv_norm_relu_pool` may be called.
    """
    sides = [side + 2 * padding - 2 for side in x.shape[-2:]]
    fits = (
        weight.shape[1] <= 3
        and len(weight) % 16 == 0
        and all(8 <= side <= 32 and not side & side - 1 for side in sides)
    )
    needs_gradient = torch.is_grad_enabled() and (weight.requires_grad or gain.requires_grad)
    return fits and x.dtype == weight.dtype and not needs_gradient


def conv_norm_relu_pool(
    x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, padding: int
) -> Tensor:
    """Apply convolution, instance norm, ReLU and 2x2 average pooling.

    The result can be differentiated once, with respect to the images.

    Args:
        x: Images in half precision, [count, in_channels, in_height, in_width].
        weight: Weights of the same precision, [channels, in_channels, 3, 3].
        gain: Gain of the norm, [channels].
        shift: Shift of the norm, [channels].
        padding: Padding of the convolution.

    Returns:
        Maps [count, channels, height / 2, width / 2].
    """
    return _conv_norm_relu_pool_op(x, weight, gain.float(), shift.float(), padding)[0]
