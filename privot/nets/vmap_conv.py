"""A convolution that stays fast when ``torch.func.vmap`` maps it over many networks.

A convolution is linear in its maps and in its weights. Its inner product with an output gradient is
one trilinear form of (maps, weights, output gradient). The partial derivatives of this form are the
convolution (`Conv`), the gradient of its maps (`ConvInputGrad`) and that of its weights
(`ConvWeightGrad`). The derivatives of each of the three are the other two, so the three operations
suffice for derivatives of any order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import grad
from torch.nn.functional import conv2d

from privot.runtime.kernels import kernels_available

MAX_INDEXABLE_ELEMENTS = 2**31  # elements of one network's maps that the kernels can index


def convolve(x: Tensor, weight: Tensor, bias: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolve maps; the result can be differentiated any number of times.

    Our own kernels compute it in single precision on a GPU, and PyTorch elsewhere.

    Args:
        x: Maps, [n, channels, height, width].
        weight: Weights, [out_channels, channels, kernel_size, kernel_size].
        bias: Bias, [out_channels].
        stride: Stride of both sides.
        padding: Padding of both sides.

    Returns:
        Maps, [n, out_channels, out_height, out_width].

    >>> convolve(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), torch.zeros(1), padding=1)[0, 0, 0]
    tensor([4., 6., 4.])
    """
    is_float32 = x.dtype == weight.dtype == torch.float32
    if not (x.is_cuda and kernels_available() and is_float32):
        return conv2d(x, weight, bias, stride, padding)
    return batched_conv(x, weight, bias, stride, padding)


def batched_conv(
    x: Tensor, weight: Tensor, bias: Tensor, stride: int = 1, padding: int = 0
) -> Tensor:
    """Convolve maps by `Conv`, with a leading axis of one network that vmap extends.

    Args:
        x: Maps, [n, channels, height, width].
        weight: Weights, [out_channels, channels, kernel_size, kernel_size].
        bias: Bias, [out_channels].
        stride: Stride of both sides.
        padding: Padding of both sides.

    Returns:
        Maps, [n, out_channels, out_height, out_width].
    """
    # Channels last, as the kernels read weights; done once here for all derivatives.
    weight = weight.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    maps = Conv.apply(x.unsqueeze(0), weight.unsqueeze(0), stride, padding).squeeze(0)
    return maps + bias.view(-1, 1, 1)


def _select_kernels(x: Tensor, *sizes: int) -> Any:
    """Return the module of our kernels, or None where PyTorch must compute.

    Our kernels need a GPU and maps small enough to be indexed.
    """
    if not x.is_cuda or math.prod(sizes) >= MAX_INDEXABLE_ELEMENTS:
        return None
    from privot.nets.kernels import batched_conv

    return batched_conv


def _merge_nets_into_channels(x: Tensor) -> Tensor:
    """Turn [nets, n, channels, ...] into one batch of wide maps, [n, nets * channels, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _merge_vmap_axis(num_nets: int, *tensors: tuple[Tensor, int | None]) -> list[Tensor]:
    """Merge the axis of vmap into the axis of networks.

    Args:
        num_nets: Size of the axis of vmap.
        tensors: Tensors [nets, ...], each with the position of its vmap axis or None.

    Returns:
        Tensors [num_nets * nets, ...].
    """
    stacked = [
        x.expand(num_nets, *x.shape) if axis is None else x.movedim(axis, 0) for x, axis in tensors
    ]
    return [x.flatten(0, 1) for x in stacked]


class Conv(torch.autograd.Function):
    """The convolution of each network."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        """Convolve the maps of each network with its weights.

        Args:
            x: Maps, [nets, n, channels, height, width].
            weight: Weights, [nets, out_channels, channels, kernel_size, kernel_size].
            stride: Stride of both sides.
            padding: Padding of both sides.

        Returns:
            Maps, [nets, n, out_channels, out_height, out_width].
        """
        if kernels := _select_kernels(x, x.shape[1], *x.shape[3:], max(weight.shape[1:3])):
            return kernels.conv_forward(x, weight, stride, padding)
        wide_maps = _merge_nets_into_channels(x)
        y = conv2d(wide_maps, weight.flatten(0, 1), None, stride, padding, groups=len(x))
        return y.unflatten(1, (len(x), -1)).transpose(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what `backward` needs.

        Args:
            ctx: The context of autograd.
            inputs: The arguments of `forward`.
            output: What `forward` returned.
        """
        ctx.save_for_backward(*inputs[:2])
        ctx.stride_and_padding = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        conv_args = ctx.stride_and_padding
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = ConvInputGrad.apply(grad_output, weight, *x.shape[3:], *conv_args)
        if ctx.needs_input_grad[1]:
            dw = ConvWeightGrad.apply(x, grad_output, weight.shape[3], *conv_args)
        return dx, dw, None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], x: Tensor, weight: Tensor, *conv_args: int
    ) -> tuple[Tensor, int]:
        """Treat the axis of vmap as more networks or, with shared weights, as a larger batch.

        Args:
            info: Has the size of the axis.
            dims: Position of the axis in each argument, or None.
            x: Maps.
            weight: Weights.
            conv_args: The other arguments of `forward`.

        Returns:
            The results, and the position of the axis in them.
        """
        if dims[1] is None and dims[0] is not None:  # shared weights: a larger batch
            x = x.movedim(dims[0], 1)
            return Conv.apply(x.flatten(1, 2), weight, *conv_args).unflatten(1, x.shape[1:3]), 1
        merged = _merge_vmap_axis(info.batch_size, (x, dims[0]), (weight, dims[1]))
        return Conv.apply(*merged, *conv_args).unflatten(0, (info.batch_size, -1)), 0


class ConvInputGrad(torch.autograd.Function):
    """The gradient of each network's convolution with respect to its maps."""

    @staticmethod
    def forward(
        dy: Tensor, weight: Tensor, height: int, width: int, stride: int, padding: int
    ) -> Tensor:
        """Compute the gradients of the maps.

        Args:
            dy: Output gradients, [nets, n, out_channels, out_height, out_width].
            weight: Weights, [nets, out_channels, channels, kernel_size, kernel_size].
            height: Height of the maps.
            width: Width of the maps.
            stride: Stride of both sides.
            padding: Padding of both sides.

        Returns:
            Gradients, [nets, n, channels, height, width].
        """
        if kernels := _select_kernels(dy, dy.shape[1], height, width, max(weight.shape[1:3])):
            return kernels.conv_input_grad(dy, weight, height, width, stride, padding)
        nets, n = dy.shape[:2]
        size = (n, nets * weight.shape[2], height, width)
        wide_dy = _merge_nets_into_channels(dy)
        dx = grad.conv2d_input(size, weight.flatten(0, 1), wide_dy, stride, padding, groups=nets)
        return dx.unflatten(1, (nets, -1)).transpose(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what `backward` needs.

        Args:
            ctx: The context of autograd.
            inputs: The arguments of `forward`.
            output: What `forward` returned.
        """
        ctx.save_for_backward(*inputs[:2])
        ctx.stride_and_padding = inputs[4:]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        dy, weight = ctx.saved_tensors
        conv_args = ctx.stride_and_padding
        ddy = dw = None
        if ctx.needs_input_grad[0]:
            ddy = Conv.apply(grad_output, weight, *conv_args)
        if ctx.needs_input_grad[1]:
            dw = ConvWeightGrad.apply(grad_output, dy, weight.shape[3], *conv_args)
        return ddy, dw, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], dy: Tensor, weight: Tensor, *conv_args: int
    ) -> tuple[Tensor, int]:
        """Treat the axis of vmap as more networks or, with shared weights, as a larger batch.

        Args:
            info: Has the size of the axis.
            dims: Position of the axis in each argument, or None.
            dy: Output gradients.
            weight: Weights.
            conv_args: The other arguments of `forward`.

        Returns:
            The results, and the position of the axis in them.
        """
        if dims[1] is None and dims[0] is not None:  # shared weights: a larger batch
            dy = dy.movedim(dims[0], 1)
            dx = ConvInputGrad.apply(dy.flatten(1, 2), weight, *conv_args)
            return dx.unflatten(1, dy.shape[1:3]), 1
        merged = _merge_vmap_axis(info.batch_size, (dy, dims[0]), (weight, dims[1]))
        return ConvInputGrad.apply(*merged, *conv_args).unflatten(0, (info.batch_size, -1)), 0


class ConvWeightGrad(torch.autograd.Function):
    """The gradient of each network's convolution with respect to its weights."""

    @staticmethod
    def forward(x: Tensor, dy: Tensor, kernel_size: int, stride: int, padding: int) -> Tensor:
        """Compute the gradients of the weights.

        Args:
            x: Maps, [nets, n, channels, height, width].
            dy: Output gradients, [nets, n, out_channels, out_height, out_width].
            kernel_size: Side of the convolution's windows.
            stride: Stride of both sides.
            padding: Padding of both sides.

        Returns:
            Gradients, [nets, out_channels, channels, kernel_size, kernel_size].
        """
        if kernels := _select_kernels(x, x.shape[1], *x.shape[3:], max(x.shape[2], dy.shape[2])):
            return kernels.conv_weight_grad(x, dy, kernel_size, stride, padding)
        nets = len(x)
        size = (nets * dy.shape[2], x.shape[2], kernel_size, kernel_size)
        wide_maps = _merge_nets_into_channels(x)
        wide_dy = _merge_nets_into_channels(dy)
        dw = grad.conv2d_weight(wide_maps, size, wide_dy, stride, padding, groups=nets)
        return dw.unflatten(0, (nets, -1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what `backward` needs.

        Args:
            ctx: The context of autograd.
            inputs: The arguments of `forward`.
            output: What `forward` returned.
        """
        ctx.save_for_backward(*inputs[:2])
        ctx.stride_and_padding = inputs[3:]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, dy = ctx.saved_tensors
        conv_args = ctx.stride_and_padding
        dx = ddy = None
        if ctx.needs_input_grad[0]:
            dx = ConvInputGrad.apply(dy, grad_output, *x.shape[3:], *conv_args)
        if ctx.needs_input_grad[1]:
            ddy = Conv.apply(x, grad_output, *conv_args)
        return dx, ddy, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], x: Tensor, dy: Tensor, *conv_args: int
    ) -> tuple[Tensor, int]:
        """Treat the axis of vmap as more networks.

        Args:
            info: Has the size of the axis.
            dims: Position of the axis in each argument, or None.
            x: Maps.
            dy: Output gradients.
            conv_args: The other arguments of `forward`.

        Returns:
            The results, and the position of the axis in them.
        """
        merged = _merge_vmap_axis(info.batch_size, (x, dims[0]), (dy, dims[1]))
        return ConvWeightGrad.apply(*merged, *conv_args).unflatten(0, (info.batch_size, -1)), 0
