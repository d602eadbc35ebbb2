"""A convolution that stays quick when ``torch.func.vmap`` makes it one of many networks, each with its own weights.

It is linear in the maps and in the weights. Paired with a slope of its result it is one trilinear form of (maps, weights, slope), and its
three faces, each towards one of them, are all that derivatives of any order need: the slope of a face is the other two.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import grad
from torch.nn.functional import conv2d

TRITON = find_spec("triton") is not None
REACH = 2**31  # numbers of one network's maps that the kernels can count


def convolve(x: Tensor, weight: Tensor, bias: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Maps [n, channels, height, width] and weights [outs, channels, side, side] to [n, outs, ...], differentiable any number of times.

    In single precision on a GPU by kernels of our own, elsewhere by torch's.

    >>> convolve(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), torch.zeros(1), padding=1)[0, 0, 0]
    tensor([4., 6., 4.])
    """
    if not (x.is_cuda and TRITON and x.dtype == weight.dtype == torch.float32):
        return conv2d(x, weight, bias, stride, padding)
    return by_faces(x, weight, bias, stride, padding)


def by_faces(x: Tensor, weight: Tensor, bias: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """The same, as a network of its own beside those that vmap adds."""
    # Laid channels last here, once for all derivatives, as the kernels want it.
    laid = weight.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return ToOutput.apply(x.unsqueeze(0), laid.unsqueeze(0), stride, padding).squeeze(
        0
    ) + bias.view(-1, 1, 1)


def _kernels(x: Tensor, *sizes: int) -> Any:
    """Our own, if x lies on a GPU and maps of these sizes can be counted there."""
    if not x.is_cuda or math.prod(sizes) >= REACH:
        return None
    from privot.nets.kernels import batched_conv

    return batched_conv


def _grouped(x: Tensor) -> Tensor:
    """[nets, n, channels, ...] as one batch of wide maps, [n, nets * channels, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _many(size: int, *given: tuple[Tensor, int | None]) -> list[Tensor]:
    """Tensors [nets, ...] with an axis of vmap each, or without it: that axis becomes part of the nets."""
    spread = [x.expand(size, *x.shape) if at is None else x.movedim(at, 0) for x, at in given]
    return [x.flatten(0, 1) for x in spread]


class ToOutput(torch.autograd.Function):
    """Maps [nets, n, channels, height, width] and weights [nets, outs, channels, side, side] to [nets, n, outs, high, wide]."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        if kernels := _kernels(x, x.shape[1], *x.shape[3:], max(weight.shape[1:3])):
            return kernels.to_output(x, weight, stride, padding)
        y = conv2d(_grouped(x), weight.flatten(0, 1), None, stride, padding, groups=len(x))
        return y.unflatten(1, (len(x), -1)).transpose(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.how = inputs[2:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = ToInput.apply(g, weight, *x.shape[3:], *ctx.how) if ctx.needs_input_grad[0] else None
        return (
            dx,
            ToWeights.apply(x, g, weight.shape[3], *ctx.how) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], x: Tensor, weight: Tensor, *how: int
    ) -> tuple[Tensor, int]:
        if dims[1] is None and dims[0] is not None:  # the same weights: a larger batch
            x = x.movedim(dims[0], 1)
            return ToOutput.apply(x.flatten(1, 2), weight, *how).unflatten(1, x.shape[1:3]), 1
        found = ToOutput.apply(*_many(info.batch_size, (x, dims[0]), (weight, dims[1])), *how)
        return found.unflatten(0, (info.batch_size, -1)), 0


class ToInput(torch.autograd.Function):
    """Slopes [nets, n, outs, high, wide] and weights to those of the maps [nets, n, channels, height, width]."""

    @staticmethod
    def forward(
        dy: Tensor, weight: Tensor, height: int, width: int, stride: int, padding: int
    ) -> Tensor:
        if kernels := _kernels(dy, dy.shape[1], height, width, max(weight.shape[1:3])):
            return kernels.to_input(dy, weight, height, width, stride, padding)
        nets = len(dy)
        n = dy.shape[1]
        channels = weight.shape[2]
        size = (n, nets * channels, height, width)
        dx = grad.conv2d_input(
            size, weight.flatten(0, 1), _grouped(dy), stride, padding, groups=nets
        )
        return dx.unflatten(1, (nets, -1)).transpose(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.how = inputs[4:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dy, weight = ctx.saved_tensors
        first = ToOutput.apply(g, weight, *ctx.how) if ctx.needs_input_grad[0] else None
        second = (
            ToWeights.apply(g, dy, weight.shape[3], *ctx.how) if ctx.needs_input_grad[1] else None
        )
        return first, second, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], dy: Tensor, weight: Tensor, *how: int
    ) -> tuple[Tensor, int]:
        if dims[1] is None and dims[0] is not None:
            dy = dy.movedim(dims[0], 1)
            return ToInput.apply(dy.flatten(1, 2), weight, *how).unflatten(1, dy.shape[1:3]), 1
        found = ToInput.apply(*_many(info.batch_size, (dy, dims[0]), (weight, dims[1])), *how)
        return found.unflatten(0, (info.batch_size, -1)), 0


class ToWeights(torch.autograd.Function):
    """Maps and slopes to the slopes of the weights [nets, outs, channels, side, side]."""

    @staticmethod
    def forward(x: Tensor, dy: Tensor, side: int, stride: int, padding: int) -> Tensor:
        if kernels := _kernels(x, x.shape[1], *x.shape[3:], max(x.shape[2], dy.shape[2])):
            return kernels.to_weights(x, dy, side, stride, padding)
        nets = len(x)
        channels = x.shape[2]
        outs = dy.shape[2]
        size = (nets * outs, channels, side, side)
        dw = grad.conv2d_weight(_grouped(x), size, _grouped(dy), stride, padding, groups=nets)
        return dw.unflatten(0, (nets, -1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.how = inputs[3:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, dy = ctx.saved_tensors
        first = ToInput.apply(dy, g, *x.shape[3:], *ctx.how) if ctx.needs_input_grad[0] else None
        second = ToOutput.apply(x, g, *ctx.how) if ctx.needs_input_grad[1] else None
        return first, second, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], x: Tensor, dy: Tensor, *how: int
    ) -> tuple[Tensor, int]:
        found = ToWeights.apply(*_many(info.batch_size, (x, dims[0]), (dy, dims[1])), *how)
        return found.unflatten(0, (info.batch_size, -1)), 0
