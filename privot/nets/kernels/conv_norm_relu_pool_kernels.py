"""Triton kernels for the first block of a fixed ConvNet in one pass.

The maps before the pooling are a hundred times as large as the images. Here neither these maps nor
their gradients reach memory: each program holds the maps of one image and a few channels, and the
backward pass computes them again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from privot.nets.kernels.pooling_tiles import normalize_and_mask_gradient, normalize_and_pool


@triton.jit
def _load_patches(x, row, column, channel, height: tl.constexpr, width: tl.constexpr, mask):
    """Load the pixels under each tap of the convolution, 0 outside the image: [positions, taps]."""
    inside = mask & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return tl.load(x + channel * height * width + row * width + column, mask=inside, other=0.0)


@triton.jit
def _locate_taps(
    in_channels: tl.constexpr,
    padding: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    taps: tl.constexpr,
):
    """Locate the pixels under each tap for the top left corner of each 2x2 window.

    Returns:
        Rows and columns [positions, taps], channels and which taps are real [1, taps].
    """
    position = tl.arange(0, (height // 2) * (width // 2))
    tap = tl.arange(0, taps)
    row = (2 * (position // (width // 2)))[:, None] + (tap % 9 // 3)[None, :] - padding
    column = (2 * (position % (width // 2)))[:, None] + (tap % 3)[None, :] - padding
    return row, column, (tap // 9)[None, :], (tap < in_channels * 9)[None, :]


@triton.jit
def _load_weights(weight, channel, in_channels: tl.constexpr, taps: tl.constexpr):
    """Load the weights of some output channels, [taps, channels]."""
    tap = tl.arange(0, taps)
    return tl.load(
        weight + channel[None, :] * (in_channels * 9) + tap[:, None],
        mask=(tap < in_channels * 9)[:, None],
        other=0.0,
    )


@triton.jit
def _conv_norm_relu_pool_kernel(
    x,
    weight,
    gain,
    shift,
    y,
    mean,
    rstd,
    in_channels: tl.constexpr,
    in_height: tl.constexpr,
    in_width: tl.constexpr,
    padding: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    channels_per_program: tl.constexpr,
    taps: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * channels_per_program + tl.arange(0, channels_per_program)
    positions: tl.constexpr = (height // 2) * (width // 2)
    row, column, source, real = _locate_taps(in_channels, padding, height, width, taps)
    weights = _load_weights(weight, channel, in_channels, taps)
    x += image * in_channels * in_height * in_width
    a = tl.dot(_load_patches(x, row, column, source, in_height, in_width, real), weights)
    b = tl.dot(_load_patches(x, row, column + 1, source, in_height, in_width, real), weights)
    c = tl.dot(_load_patches(x, row + 1, column, source, in_height, in_width, real), weights)
    d = tl.dot(_load_patches(x, row + 1, column + 1, source, in_height, in_width, real), weights)
    pooled, channel_mean, channel_rstd = normalize_and_pool(
        a, b, c, d, tl.load(gain + channel), tl.load(shift + channel), positions
    )
    position = tl.arange(0, positions)
    out = image * positions * channels + (position * channels)[:, None] + channel[None, :]
    tl.store(y + out, pooled.to(y.dtype.element_ty))
    tl.store(mean + image * channels + channel, channel_mean)
    tl.store(rstd + image * channels + channel, channel_rstd)


@triton.jit
def _backpropagate_to_patches(
    normalized,
    gradient,
    mean_gradient,
    mean_projection,
    output_scale,
    weights_t,
    dtype: tl.constexpr,
):
    """Backpropagate from one corner of the windows to the pixels under its taps.

    Args:
        normalized: Normalized values, [positions, channels].
        gradient: Gradient before ReLU, [positions, channels].
        mean_gradient: Mean of the gradient over each map, [1, channels].
        mean_projection: Mean of gradient times normalized value, [1, channels].
        output_scale: Gain over standard deviation, [1, channels].
        weights_t: Weights of the convolution, [channels, taps].
        dtype: Precision of the product.

    Returns:
        Gradients of the pixels, [positions, taps].
    """
    return tl.dot(
        (output_scale * (gradient - mean_gradient - normalized * mean_projection)).to(dtype),
        weights_t,
    )


@triton.jit
def _scatter_add_patches(
    dx, values, row, column, channel, height: tl.constexpr, width: tl.constexpr, mask
):
    """Add values [positions, taps] to the pixels under each tap."""
    inside = mask & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    tl.atomic_add(dx + channel * height * width + row * width + column, values, mask=inside)


@triton.jit
def _conv_norm_relu_pool_backward_kernel(
    x,
    weight,
    gain,
    shift,
    mean,
    rstd,
    dy,
    dx,
    in_channels: tl.constexpr,
    in_height: tl.constexpr,
    in_width: tl.constexpr,
    padding: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    channels_per_program: tl.constexpr,
    taps: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    positions: tl.constexpr = (height // 2) * (width // 2)
    dtype: tl.constexpr = x.dtype.element_ty
    position = tl.arange(0, positions)
    row, column, source, real = _locate_taps(in_channels, padding, height, width, taps)
    # Pixels, and below their gradients, for the four corners of each 2x2 window.
    x += image * in_channels * in_height * in_width
    xa = _load_patches(x, row, column, source, in_height, in_width, real)
    xb = _load_patches(x, row, column + 1, source, in_height, in_width, real)
    xc = _load_patches(x, row + 1, column, source, in_height, in_width, real)
    xd = _load_patches(x, row + 1, column + 1, source, in_height, in_width, real)
    za = tl.zeros([positions, taps], tl.float32)
    zb = tl.zeros([positions, taps], tl.float32)
    zc = tl.zeros([positions, taps], tl.float32)
    zd = tl.zeros([positions, taps], tl.float32)
    for start in range(0, channels, channels_per_program):
        channel = start + tl.arange(0, channels_per_program)
        weights = _load_weights(weight, channel, in_channels, taps)
        m = tl.load(mean + image * channels + channel)[None, :]
        r = tl.load(rstd + image * channels + channel)[None, :]
        g = tl.load(gain + channel)[None, :]
        s = tl.load(shift + channel)[None, :]
        out = image * positions * channels + (position * channels)[:, None] + channel[None, :]
        # Each corner has a quarter of its window's gradient.
        gradient = tl.load(dy + out).to(tl.float32) * 0.25
        a, da = normalize_and_mask_gradient(tl.dot(xa, weights), m, r, g, s, gradient)
        b, db = normalize_and_mask_gradient(tl.dot(xb, weights), m, r, g, s, gradient)
        c, dc = normalize_and_mask_gradient(tl.dot(xc, weights), m, r, g, s, gradient)
        d, dd = normalize_and_mask_gradient(tl.dot(xd, weights), m, r, g, s, gradient)
        mean_gradient = (tl.sum(da + db + dc + dd, 0) / (4 * positions))[None, :]
        projection = tl.sum(da * a + db * b + dc * c + dd * d, 0)
        mean_projection = (projection / (4 * positions))[None, :]
        weights_t = tl.trans(weights)
        scale = r * g
        za += _backpropagate_to_patches(
            a, da, mean_gradient, mean_projection, scale, weights_t, dtype
        )
        zb += _backpropagate_to_patches(
            b, db, mean_gradient, mean_projection, scale, weights_t, dtype
        )
        zc += _backpropagate_to_patches(
            c, dc, mean_gradient, mean_projection, scale, weights_t, dtype
        )
        zd += _backpropagate_to_patches(
            d, dd, mean_gradient, mean_projection, scale, weights_t, dtype
        )
    dx += image * in_channels * in_height * in_width
    _scatter_add_patches(dx, za, row, column, source, in_height, in_width, real)
    _scatter_add_patches(dx, zb, row, column + 1, source, in_height, in_width, real)
    _scatter_add_patches(dx, zc, row + 1, column, source, in_height, in_width, real)
    _scatter_add_patches(dx, zd, row + 1, column + 1, source, in_height, in_width, real)
