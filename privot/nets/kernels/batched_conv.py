"""Convolutions of many small networks in one launch.

cuDNN's grouped convolutions leave a GPU idle at these sizes. The kernels are in
`batched_conv_kernels`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from privot.nets.kernels.batched_conv_kernels import (
    _conv_input_grad_kernel,
    _conv_kernel,
    _conv_weight_grad_kernel,
)


class Tile(NamedTuple):
    """The part of a matrix product that one program computes, at most."""

    rows: int
    columns: int
    depth: int  # terms of the sum that are added at a time
    num_warps: int
    num_stages: int


TILES = {
    "forward": Tile(128, 128, 32, 4, 3),
    "input": Tile(128, 64, 32, 4, 3),
    "weights": Tile(32, 128, 32, 4, 4),
}
# From this number of images on, the input gradient first moves the output channels of the weights
# last: one pass over the weights, and no tile needs to be transposed.
WEIGHT_TRANSPOSE_MIN_IMAGES = 8
# A weight gradient that fits one program is summed in parts from this number of images on. The
# parts do not depend on the number of networks.
SPLIT_SUM_MIN_IMAGES = 32
NUM_SUM_SPLITS = 4


def _fit_tile(tile: Tile, rows: int, columns: int, depth: int) -> dict[str, Any]:
    """Shrink a tile to the size of a product, but not below the 16 that tensor cores need.

    Args:
        tile: The largest tile.
        rows: Rows of the product.
        columns: Columns of the product.
        depth: Terms of its sums.

    Returns:
        Keyword arguments of a kernel.
    """
    tile_rows, tile_columns, tile_depth = (
        min(largest, max(16, 1 << (size - 1).bit_length()))
        for largest, size in zip(tile[:3], (rows, columns, depth), strict=True)
    )
    return {
        "rows": tile_rows,
        "columns": tile_columns,
        "depth": tile_depth,
        "precision": "tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _to_channels_last(x: Tensor) -> Tensor:
    """Turn [nets, n, channels, height, width] into [nets, n, height, width, channels].

    Each net is contiguous. Nets that share one tensor still share it.
    """
    x = x.permute(0, 1, 3, 4, 2)
    if x.stride(0) == 0:
        return x[:1].contiguous().expand(x.shape)
    return x if x[0].is_contiguous() else x.contiguous()


def conv_forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve the maps of each network with its weights.

    Args:
        x: Maps, [nets, n, channels, height, width].
        weight: Weights, [nets, out_channels, channels, kernel_size, kernel_size].
        stride: Stride of both sides.
        padding: Padding of both sides.

    Returns:
        Maps, [nets, n, out_channels, out_height, out_width].
    """
    x = _to_channels_last(x)
    weight = _to_channels_last(weight)
    (nets, n, height, width, channels) = x.shape
    (_, out_channels, kernel_size, _, _) = weight.shape
    out_height, out_width = (
        (side + 2 * padding - kernel_size) // stride + 1 for side in (height, width)
    )
    y = x.new_empty(nets, n, out_height, out_width, out_channels)
    rows = n * out_height * out_width
    tile = _fit_tile(TILES["forward"], rows, out_channels, kernel_size * kernel_size * channels)
    grid = nets * math.ceil(rows / tile["rows"]) * math.ceil(out_channels / tile["columns"])
    _conv_kernel[(grid,)](
        x,
        weight,
        y,
        x.stride(0),
        weight.stride(0),
        n,
        channels,
        height,
        width,
        out_channels,
        out_height,
        out_width,
        kernel_size,
        stride,
        padding,
        **tile,
    )
    return y.permute(0, 1, 4, 2, 3)


def conv_input_grad(
    dy: Tensor, weight: Tensor, height: int, width: int, stride: int, padding: int
) -> Tensor:
    """Compute the gradient of each network's convolution with respect to its maps.

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
    dy = _to_channels_last(dy)
    weight = _to_channels_last(weight)
    (nets, n, out_height, out_width, out_channels) = dy.shape
    (_, _, kernel_size, _, channels) = weight.shape
    # Strides of an output channel, a tap and an input channel.
    weight_strides = (kernel_size * kernel_size * channels, channels, 1)
    if n >= WEIGHT_TRANSPOSE_MIN_IMAGES and out_channels > 1:
        weight = weight.permute(0, 4, 2, 3, 1).contiguous()
        weight_strides = (1, out_channels, kernel_size * kernel_size * out_channels)
    dx = dy.new_empty(nets, n, height, width, channels)
    max_rows = n * math.ceil(height / stride) * math.ceil(width / stride)
    terms = math.ceil(kernel_size / stride) ** 2 * out_channels
    tile = _fit_tile(TILES["input"], max_rows, channels, terms)
    tiles = math.ceil(max_rows / tile["rows"]) * math.ceil(channels / tile["columns"])
    _conv_input_grad_kernel[(nets * stride**2 * tiles,)](
        dy,
        weight,
        dx,
        dy.stride(0),
        weight.stride(0),
        n,
        *weight_strides,
        channels,
        height,
        width,
        out_channels,
        out_height,
        out_width,
        kernel_size,
        stride,
        padding,
        **tile,
    )
    return dx.permute(0, 1, 4, 2, 3)


def conv_weight_grad(x: Tensor, dy: Tensor, kernel_size: int, stride: int, padding: int) -> Tensor:
    """Compute the gradient of each network's convolution with respect to its weights.

    Args:
        x: Maps, [nets, n, channels, height, width].
        dy: Output gradients, [nets, n, out_channels, out_height, out_width].
        kernel_size: Side of the convolution's windows.
        stride: Stride of both sides.
        padding: Padding of both sides.

    Returns:
        Gradients, [nets, out_channels, channels, kernel_size, kernel_size].
    """
    n = x.shape[1]
    num_columns = kernel_size * kernel_size * x.shape[2]
    fits_one_program = (
        dy.shape[2] <= TILES["weights"].rows and num_columns <= TILES["weights"].columns
    )
    if fits_one_program and n >= SPLIT_SUM_MIN_IMAGES and n % NUM_SUM_SPLITS == 0:
        x = x.unflatten(1, (NUM_SUM_SPLITS, -1)).flatten(0, 1)
        dy = dy.unflatten(1, (NUM_SUM_SPLITS, -1)).flatten(0, 1)
        split_sums = conv_weight_grad(x, dy, kernel_size, stride, padding)
        # A fixed order of additions, so that the bits repeat.
        return functools.reduce(torch.add, split_sums.unflatten(0, (-1, NUM_SUM_SPLITS)).unbind(1))
    x = _to_channels_last(x)
    dy = _to_channels_last(dy)
    (nets, n, height, width, channels) = x.shape
    (_, _, out_height, out_width, out_channels) = dy.shape
    dw = x.new_empty(nets, out_channels, kernel_size, kernel_size, channels)
    tile = _fit_tile(TILES["weights"], out_channels, num_columns, n * out_height * out_width)
    tiles = math.ceil(out_channels / tile["rows"]) * math.ceil(num_columns / tile["columns"])
    _conv_weight_grad_kernel[(nets * tiles,)](
        x,
        dy,
        dw,
        x.stride(0),
        dy.stride(0),
        n,
        channels,
        height,
        width,
        out_channels,
        out_height,
        out_width,
        kernel_size,
        stride,
        padding,
        **tile,
    )
    return dw.permute(0, 1, 4, 2, 3)
