"""Instance norm, ReLU and 2x2 average pooling as one pass over the maps, for half precision on a GPU.

The blocks of a ConvNet move bytes more than they compute: a norm, a ReLU and a pooling on their own read and write the largest maps five
times. Here they are read once and a quarter is written (backwards: read once, written once). Imported only where there is Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16_384  # numbers of a map that one program holds: as many channels as fit


@triton.jit
def pooled(
    a,
    b,
    c,
    d,
    gain,
    shift,
    y,
    mean,
    scale,
    image,
    channel,
    places: tl.constexpr,
    channels: tl.constexpr,
):
    """Norm, ReLU and mean of the four corners of each window, [places, channels] each; stores the result, the mean and the scale."""
    place = tl.arange(0, places)
    middle = tl.sum(a + b + c + d, 0) / (4 * places)
    a = a - middle[None, :]
    b = b - middle[None, :]
    c = c - middle[None, :]
    d = d - middle[None, :]
    steep = 1 / tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 0) / (4 * places) + 1e-5)
    factor = (tl.load(gain + channel) * steep)[None, :]
    plus = tl.load(shift + channel)[None, :]
    total = tl.maximum(a * factor + plus, 0) + tl.maximum(b * factor + plus, 0)
    total += tl.maximum(c * factor + plus, 0) + tl.maximum(d * factor + plus, 0)
    tl.store(
        y + image * places * channels + (place * channels)[:, None] + channel[None, :],
        (total * 0.25).to(y.dtype.element_ty),
    )
    tl.store(mean + image * channels + channel, middle)
    tl.store(scale + image * channels + channel, steep)


@triton.jit
def lit(raw, middle, steep, factor, plus, slope):
    """The normalised map, and the slope where ReLU let it through."""
    normal = (raw.to(tl.float32) - middle) * steep
    return normal, tl.where(normal * factor + plus > 0, slope, 0.0)


@triton.jit
def _forward(
    x,
    gain,
    shift,
    y,
    mean,
    scale,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    part: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * part + tl.arange(0, part)
    places: tl.constexpr = (height // 2) * (width // 2)
    place = tl.arange(0, places)
    # The four corners of each 2x2 window, [places, channels] each.
    corner = (
        image * height * width * channels
        + ((2 * (place // (width // 2)) * width + 2 * (place % (width // 2))) * channels)[:, None]
        + channel[None, :]
    )
    a = tl.load(x + corner).to(tl.float32)
    b = tl.load(x + corner + channels).to(tl.float32)
    c = tl.load(x + corner + width * channels).to(tl.float32)
    d = tl.load(x + corner + width * channels + channels).to(tl.float32)
    pooled(a, b, c, d, gain, shift, y, mean, scale, image, channel, places, channels)


@triton.jit
def _backward(
    x,
    gain,
    shift,
    mean,
    scale,
    dy,
    dx,
    dgain,
    dshift,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    part: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * part + tl.arange(0, part)
    places: tl.constexpr = (height // 2) * (width // 2)
    place = tl.arange(0, places)
    corner = (
        image * height * width * channels
        + ((2 * (place // (width // 2)) * width + 2 * (place % (width // 2))) * channels)[:, None]
        + channel[None, :]
    )
    middle = tl.load(mean + image * channels + channel)[None, :]
    steep = tl.load(scale + image * channels + channel)[None, :]
    factor = tl.load(gain + channel)[None, :]
    plus = tl.load(shift + channel)[None, :]
    slope = (
        tl.load(dy + image * places * channels + (place * channels)[:, None] + channel[None, :]).to(
            tl.float32
        )
        * 0.25
    )
    a, da = lit(tl.load(x + corner), middle, steep, factor, plus, slope)
    b, db = lit(tl.load(x + corner + channels), middle, steep, factor, plus, slope)
    c, dc = lit(tl.load(x + corner + width * channels), middle, steep, factor, plus, slope)
    d, dd = lit(
        tl.load(x + corner + width * channels + channels), middle, steep, factor, plus, slope
    )
    first = tl.sum(da + db + dc + dd, 0)
    second = tl.sum(da * a + db * b + dc * c + dd * d, 0)
    tl.store(dshift + image * channels + channel, first)
    tl.store(dgain + image * channels + channel, second)
    flat = (first / (4 * places))[None, :]
    tilt = (second / (4 * places))[None, :]
    outer = steep * factor
    kind = dx.dtype.element_ty
    tl.store(dx + corner, (outer * (da - flat - a * tilt)).to(kind))
    tl.store(dx + corner + channels, (outer * (db - flat - b * tilt)).to(kind))
    tl.store(dx + corner + width * channels, (outer * (dc - flat - c * tilt)).to(kind))
    tl.store(dx + corner + width * channels + channels, (outer * (dd - flat - d * tilt)).to(kind))


def suits(x: Tensor) -> bool:
    """Whether maps [count, channels, height, width] can go this way: sides powers of two up to 64, channels that fill whole parts."""
    height, width = x.shape[-2:]
    return (
        2 <= height <= 64
        and 2 <= width <= 64
        and not height & height - 1
        and not width & width - 1
        and x.shape[-3] % _part(x) == 0
    )


def _part(x: Tensor) -> int:
    """Channels of one program: a power of two."""
    channels, height, width = x.shape[-3:]
    return max(8, min(1 << channels.bit_length() - 1, TILE // (height * width)))


@torch.library.custom_op("privot::norm_relu_pool", mutates_args=())
def _whole(x: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.empty(
        count,
        channels,
        height // 2,
        width // 2,
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    mean, scale = (torch.empty(count, channels, device=x.device) for _ in range(2))
    part = _part(x)
    _forward[count, channels // part](
        x, gain, shift, y, mean, scale, height, width, channels, part, num_warps=4
    )
    return y, mean, scale


@_whole.register_fake
def _(x: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count, channels, height, width = x.shape
    y = torch.empty(
        count,
        channels,
        height // 2,
        width // 2,
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    return y, gain.new_empty(count, channels), gain.new_empty(count, channels)


@torch.library.custom_op("privot::norm_relu_pool_backward", mutates_args=())
def _whole_backward(
    x: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, scale: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes of the maps, and image by image of gain and shift."""
    count, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    dx = torch.empty_like(x)
    part = _part(x)
    dgain, dshift = (torch.empty_like(mean) for _ in range(2))
    _backward[count, channels // part](
        x,
        gain,
        shift,
        mean,
        scale,
        dy,
        dx,
        dgain,
        dshift,
        height,
        width,
        channels,
        part,
        num_warps=4,
    )
    return dx, dgain, dshift


@_whole_backward.register_fake
def _(
    x: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, scale: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dgain, dshift = _whole_backward(*ctx.saved_tensors, dy)
    _, gain, shift = ctx.needs_input_grad
    return dx, dgain.sum(0) if gain else None, dshift.sum(0) if shift else None


_whole.register_autograd(_gradient, setup_context=_setup)


@_whole.register_vmap
def _(
    info: Any, dims: tuple[int | None, ...], x: Tensor, gain: Tensor, shift: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Many records are one larger batch: each image is normalised alone."""
    if dims[1:] != (None, None) or dims[0] is None:
        raise NotImplementedError("only images may be many")
    found = _whole(x.movedim(dims[0], 0).flatten(0, 1), gain, shift)
    return tuple(each.unflatten(0, (info.batch_size, -1)) for each in found), (0, 0, 0)


def norm_relu_pool(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Maps [count, channels, height, width] to [count, channels, height / 2, width / 2]; differentiable once."""
    return _whole(x, gain.float(), shift.float())[0]
