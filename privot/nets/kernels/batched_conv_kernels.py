"""Triton kernels for the convolutions of many small networks, as tiled matrix products.

The rows of a tile are gathered while it is loaded, so nothing is unfolded in memory. Maps have
channels last, so a row of a tile is one stretch of memory. No sum is split over programs, and tiles
do not depend on the number of networks: a network has the same bits alone or among others.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Replaces the row of a position that does not exist, so that all its taps lie outside the map.
FAR_OUTSIDE = tl.constexpr(-1_000_000)


@triton.jit
def _is_inside(row, column, height: tl.constexpr, width: tl.constexpr):
    """Return whether positions lie inside a map of these sides."""
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


@triton.jit
def _conv_kernel(
    x,
    w,
    y,
    x_net_stride,
    w_net_stride,
    num_images,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    out_channels: tl.constexpr,
    out_height: tl.constexpr,
    out_width: tl.constexpr,
    kernel_size: tl.constexpr,
    stride: tl.constexpr,
    padding: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute the maps of one tile: rows are output positions, columns output channels.

    Maps are [n, height, width, channels], weights [out_channels, kernel_size, kernel_size,
    channels] and outputs [n * out_height * out_width, out_channels].
    """
    positions: tl.constexpr = out_height * out_width
    terms: tl.constexpr = kernel_size * kernel_size * channels
    column_tiles: tl.constexpr = (out_channels + columns - 1) // columns
    tiles = tl.cdiv(num_images * positions, rows) * column_tiles
    net = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = tile // column_tiles * rows + tl.arange(0, rows)
    column = tile % column_tiles * columns + tl.arange(0, columns)
    row_exists = row < num_images * positions
    column_exists = (column < out_channels)[:, None]
    top = row % positions // out_width * stride - padding
    left = row % out_width * stride - padding
    corner = row // positions * (height * width * channels) + (top * width + left) * channels
    top = tl.where(row_exists, top, FAR_OUTSIDE)
    x = x + net * x_net_stride
    w = w + net * w_net_stride
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, terms, depth):
        term = start + tl.arange(0, depth)
        if channels % depth == 0:  # one tap at a time: only the row decides what lies outside
            tap = start // channels
            down = tap // kernel_size
            right = tap % kernel_size
            inside = _is_inside(top + down, left + right, height, width)[:, None]
            channel = start % channels + tl.arange(0, depth)
            offset = corner[:, None] + ((down * width + right) * channels + channel)[None, :]
            weight_exists = column_exists
        else:
            tap = term // channels
            down = tap // kernel_size
            right = tap % kernel_size
            inside = _is_inside(
                top[:, None] + down[None, :], left[:, None] + right[None, :], height, width
            )
            inside = inside & (term < terms)[None, :]
            channel = term % channels
            offset = corner[:, None] + ((down * width + right) * channels + channel)[None, :]
            weight_exists = column_exists & (term < terms)[None, :]
        a = tl.load(x + offset, mask=inside, other=0.0)
        b = tl.load(w + column[:, None] * terms + term[None, :], mask=weight_exists, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=precision)
    y += net * num_images * (positions * out_channels)
    tl.store(
        y + row[:, None] * out_channels + column[None, :],
        total,
        mask=row_exists[:, None] & (column < out_channels)[None, :],
    )


@triton.jit
def _conv_input_grad_kernel(
    dy,
    w,
    dx,
    dy_net_stride,
    w_net_stride,
    num_images,
    w_out_stride: tl.constexpr,
    w_tap_stride: tl.constexpr,
    w_channel_stride: tl.constexpr,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    out_channels: tl.constexpr,
    out_height: tl.constexpr,
    out_width: tl.constexpr,
    kernel_size: tl.constexpr,
    stride: tl.constexpr,
    padding: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute the input gradient of one tile: rows are input positions, columns input channels.

    Output gradients are [n, out_height, out_width, out_channels] and results [n, height, width,
    channels]. Input positions fall into stride^2 phases, by the taps that ever reach them. The
    positions of a program have one phase, and the program sums over the taps of that phase alone.
    """
    phases: tl.constexpr = stride * stride
    max_positions: tl.constexpr = ((height + stride - 1) // stride) * (
        (width + stride - 1) // stride
    )
    column_tiles: tl.constexpr = (channels + columns - 1) // columns
    tiles = tl.cdiv(num_images * max_positions, rows) * column_tiles
    net = (tl.program_id(0) // (tiles * phases)).to(tl.int64)
    tile = tl.program_id(0) % (tiles * phases)
    phase = tile // tiles
    tile = tile % tiles
    # A phase has the rows with (row + padding) % stride == row_phase, and the same for columns.
    row_phase = phase // stride
    column_phase = phase % stride
    first_row = (padding - row_phase + stride - 1) // stride
    first_column = (padding - column_phase + stride - 1) // stride
    phase_height = (height - 1 + padding - row_phase + stride) // stride - first_row
    phase_width = (width - 1 + padding - column_phase + stride) // stride - first_column
    taps_down = (kernel_size - row_phase + stride - 1) // stride
    taps_across = (kernel_size - column_phase + stride - 1) // stride
    terms = taps_down * taps_across * out_channels
    row = tile // column_tiles * rows + tl.arange(0, rows)
    column = tile % column_tiles * columns + tl.arange(0, columns)
    row_exists = row < num_images * phase_height * phase_width
    column_exists = (column < channels)[:, None]
    positions = tl.maximum(phase_height * phase_width, 1)  # a phase may be empty
    image = row // positions
    top = row % positions // tl.maximum(phase_width, 1) + first_row
    left = row % tl.maximum(phase_width, 1) + first_column
    input_row = image * height + top * stride + row_phase - padding
    position = input_row * width + left * stride + column_phase - padding
    corner = ((image * out_height + top) * out_width + left) * out_channels
    top = tl.where(row_exists, top, FAR_OUTSIDE)
    dy = dy + net * dy_net_stride
    w = w + net * w_net_stride
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, terms, depth):
        term = start + tl.arange(0, depth)
        if out_channels % depth == 0:  # one tap at a time
            tap = start // out_channels
            up = tap // taps_across
            back = tap % taps_across
            inside = _is_inside(top - up, left - back, out_height, out_width)[:, None]
            out = start % out_channels + tl.arange(0, depth)
            weight_exists = column_exists
        else:
            tap = term // out_channels
            out = term % out_channels
            up = tap // taps_across
            back = tap % taps_across
            inside = _is_inside(
                top[:, None] - up[None, :], left[:, None] - back[None, :], out_height, out_width
            )
            inside = inside & (term < terms)[None, :]
            weight_exists = column_exists & (term < terms)[None, :]
        offset = corner[:, None] + (out - (up * out_width + back) * out_channels)[None, :]
        tap_index = (row_phase + stride * up) * kernel_size + column_phase + stride * back
        weight_offset = tap_index * w_tap_stride + out * w_out_stride
        a = tl.load(dy + offset, mask=inside, other=0.0)
        b = tl.load(
            w + column[:, None] * w_channel_stride + weight_offset[None, :],
            mask=weight_exists,
            other=0.0,
        )
        total = tl.dot(a, tl.trans(b), total, input_precision=precision)
    dx += net * num_images * (height * width * channels)
    tl.store(
        dx + position[:, None] * channels + column[None, :],
        total,
        mask=row_exists[:, None] & (column < channels)[None, :],
    )


@triton.jit
def _conv_weight_grad_kernel(
    x,
    dy,
    dw,
    x_net_stride,
    dy_net_stride,
    num_images,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    out_channels: tl.constexpr,
    out_height: tl.constexpr,
    out_width: tl.constexpr,
    kernel_size: tl.constexpr,
    stride: tl.constexpr,
    padding: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute the weight gradient of one tile: rows are output channels, columns taps x channels.

    Maps are [n, height, width, channels], output gradients [n, out_height, out_width,
    out_channels] and results [out_channels, kernel_size * kernel_size * channels].
    """
    positions: tl.constexpr = out_height * out_width
    num_columns: tl.constexpr = kernel_size * kernel_size * channels
    column_tiles: tl.constexpr = (num_columns + columns - 1) // columns
    tiles: tl.constexpr = ((out_channels + rows - 1) // rows) * column_tiles
    net = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = tile // column_tiles * rows + tl.arange(0, rows)
    column = tile % column_tiles * columns + tl.arange(0, columns)
    tap = column // channels
    down = (tap // kernel_size)[None, :]
    right = (tap % kernel_size)[None, :]
    tap_offset = (down * width + right) * channels + (column % channels)[None, :]
    if channels % columns == 0:  # one tap for all columns
        down = tile % column_tiles * columns // channels // kernel_size
        right = tile % column_tiles * columns // channels % kernel_size
    x = x + net * x_net_stride
    dy = dy + net * dy_net_stride
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, num_images * positions, depth):
        term = start + tl.arange(0, depth)
        term_exists = (term < num_images * positions)[:, None]
        top = (term % positions // out_width * stride - padding)[:, None]
        left = (term % out_width * stride - padding)[:, None]
        image_offset = (term // positions * (height * width * channels))[:, None]
        corner = image_offset + (top * width + left) * channels
        inside = _is_inside(top + down, left + right, height, width) & term_exists
        if num_columns % columns != 0:
            inside = inside & (column < num_columns)[None, :]
        a = tl.load(
            dy + term[:, None] * out_channels + row[None, :],
            mask=term_exists & (row < out_channels)[None, :],
            other=0.0,
        )
        b = tl.load(x + corner + tap_offset, mask=inside, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=precision)
    dw += net * (out_channels * num_columns)
    tl.store(
        dw + row[:, None] * num_columns + column[None, :],
        total,
        mask=(row < out_channels)[:, None] & (column < num_columns)[None, :],
    )
