"""The first block of a fixed net, convolution and all, as one pass over the images, for half precision on a GPU.

The maps before the pooling are a hundred times the images. Here neither they nor their gradients reach memory: each program holds those of
one image and a few channels, and computes them again on the way back. Only images have a gradient. Imported only where there is Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from privot.nets.kernels.norm_relu_pool import lit, pooled


@triton.jit
def _seen(x, row, column, channel, height: tl.constexpr, width: tl.constexpr, there):
    """The pixels under each tap of the convolution, black outside: [places, taps]."""
    inside = there & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return tl.load(x + channel * height * width + row * width + column, mask=inside, other=0.0)


@triton.jit
def _first(
    x,
    conv,
    gain,
    shift,
    y,
    mean,
    scale,
    inputs: tl.constexpr,
    above: tl.constexpr,
    across: tl.constexpr,
    pad: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    part: tl.constexpr,
    taps: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * part + tl.arange(0, part)
    places: tl.constexpr = (height // 2) * (width // 2)
    place = tl.arange(0, places)
    tap = tl.arange(0, taps)
    there = (tap < inputs * 9)[None, :]
    weights = tl.load(
        conv + channel[None, :] * (inputs * 9) + tap[:, None],
        mask=(tap < inputs * 9)[:, None],
        other=0.0,
    )
    row = (2 * (place // (width // 2)))[:, None] + (tap % 9 // 3)[None, :] - pad
    column = (2 * (place % (width // 2)))[:, None] + (tap % 3)[None, :] - pad
    source = (tap // 9)[None, :]
    own = x + image * inputs * above * across
    a = tl.dot(_seen(own, row, column, source, above, across, there), weights)
    b = tl.dot(_seen(own, row, column + 1, source, above, across, there), weights)
    c = tl.dot(_seen(own, row + 1, column, source, above, across, there), weights)
    d = tl.dot(_seen(own, row + 1, column + 1, source, above, across, there), weights)
    pooled(a, b, c, d, gain, shift, y, mean, scale, image, channel, places, channels)


@triton.jit
def _back(normal, slope, flat, tilt, outer, turned, kind: tl.constexpr):
    """From the slopes of one corner of the windows to those of the pixels under its taps: [places, taps]."""
    return tl.dot((outer * (slope - flat - normal * tilt)).to(kind), turned)


@triton.jit
def _add(dx, found, row, column, channel, height: tl.constexpr, width: tl.constexpr, there):
    inside = there & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    tl.atomic_add(dx + channel * height * width + row * width + column, found, mask=inside)


@triton.jit
def _first_backward(
    x,
    conv,
    gain,
    shift,
    mean,
    scale,
    dy,
    dx,
    inputs: tl.constexpr,
    above: tl.constexpr,
    across: tl.constexpr,
    pad: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    part: tl.constexpr,
    taps: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    places: tl.constexpr = (height // 2) * (width // 2)
    kind: tl.constexpr = x.dtype.element_ty
    place = tl.arange(0, places)
    tap = tl.arange(0, taps)
    there = (tap < inputs * 9)[None, :]
    row = (2 * (place // (width // 2)))[:, None] + (tap % 9 // 3)[None, :] - pad
    column = (2 * (place % (width // 2)))[:, None] + (tap % 3)[None, :] - pad
    source = (tap // 9)[None, :]
    own = x + image * inputs * above * across
    xa = _seen(own, row, column, source, above, across, there)
    xb = _seen(own, row, column + 1, source, above, across, there)
    xc = _seen(own, row + 1, column, source, above, across, there)
    xd = _seen(own, row + 1, column + 1, source, above, across, there)
    za = tl.zeros([places, taps], tl.float32)
    zb = tl.zeros([places, taps], tl.float32)
    zc = tl.zeros([places, taps], tl.float32)
    zd = tl.zeros([places, taps], tl.float32)
    for start in range(0, channels, part):
        channel = start + tl.arange(0, part)
        weights = tl.load(
            conv + channel[None, :] * (inputs * 9) + tap[:, None],
            mask=(tap < inputs * 9)[:, None],
            other=0.0,
        )
        middle = tl.load(mean + image * channels + channel)[None, :]
        steep = tl.load(scale + image * channels + channel)[None, :]
        factor = tl.load(gain + channel)[None, :]
        plus = tl.load(shift + channel)[None, :]
        slope = (
            tl.load(
                dy + image * places * channels + (place * channels)[:, None] + channel[None, :]
            ).to(tl.float32)
            * 0.25
        )
        a, da = lit(tl.dot(xa, weights), middle, steep, factor, plus, slope)
        b, db = lit(tl.dot(xb, weights), middle, steep, factor, plus, slope)
        c, dc = lit(tl.dot(xc, weights), middle, steep, factor, plus, slope)
        d, dd = lit(tl.dot(xd, weights), middle, steep, factor, plus, slope)
        flat = (tl.sum(da + db + dc + dd, 0) / (4 * places))[None, :]
        tilt = (tl.sum(da * a + db * b + dc * c + dd * d, 0) / (4 * places))[None, :]
        turned = tl.trans(weights)
        outer = steep * factor
        za += _back(a, da, flat, tilt, outer, turned, kind)
        zb += _back(b, db, flat, tilt, outer, turned, kind)
        zc += _back(c, dc, flat, tilt, outer, turned, kind)
        zd += _back(d, dd, flat, tilt, outer, turned, kind)
    result = dx + image * inputs * above * across
    _add(result, za, row, column, source, above, across, there)
    _add(result, zb, row, column + 1, source, above, across, there)
    _add(result, zc, row + 1, column, source, above, across, there)
    _add(result, zd, row + 1, column + 1, source, above, across, there)


def _sizes(x: Tensor, conv: Tensor, padding: int) -> tuple[int, ...]:
    """What the kernels of the first block must know: of images, maps, and how much of them one program holds."""
    inputs, above, across = x.shape[1:]
    sides = [side + 2 * padding - 2 for side in (above, across)]
    channels = len(conv)
    return (
        inputs,
        above,
        across,
        padding,
        *sides,
        channels,
        32 if channels % 32 == 0 else 16,
        16 if inputs == 1 else 32,
    )


@torch.library.custom_op("privot::first_block", mutates_args=())
def _first_block(
    x: Tensor, conv: Tensor, gain: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    *_, height, width, channels, part, _ = sizes = _sizes(x, conv, padding)
    y = torch.empty(
        len(x),
        channels,
        height // 2,
        width // 2,
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    mean, scale = (torch.empty(len(x), channels, device=x.device) for _ in range(2))
    _first[len(x), channels // part](
        x.contiguous(), conv.contiguous(), gain, shift, y, mean, scale, *sizes, num_warps=8
    )
    return y, mean, scale


@_first_block.register_fake
def _(
    x: Tensor, conv: Tensor, gain: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    *_, height, width, channels, _, _ = _sizes(x, conv, padding)
    y = torch.empty(
        len(x),
        channels,
        height // 2,
        width // 2,
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    return y, gain.new_empty(len(x), channels), gain.new_empty(len(x), channels)


@torch.library.custom_op("privot::first_block_backward", mutates_args=())
def _first_block_backward(
    x: Tensor,
    conv: Tensor,
    gain: Tensor,
    shift: Tensor,
    mean: Tensor,
    scale: Tensor,
    dy: Tensor,
    padding: int,
) -> Tensor:
    dx = torch.zeros(x.shape, device=x.device)
    dy = dy.contiguous(memory_format=torch.channels_last)
    _first_backward[len(x),](
        x.contiguous(),
        conv.contiguous(),
        gain,
        shift,
        mean,
        scale,
        dy,
        dx,
        *_sizes(x, conv, padding),
        num_warps=8,
    )
    return dx.to(x.dtype)


@_first_block_backward.register_fake
def _(
    x: Tensor,
    conv: Tensor,
    gain: Tensor,
    shift: Tensor,
    mean: Tensor,
    scale: Tensor,
    dy: Tensor,
    padding: int,
) -> Tensor:
    return torch.empty_like(x)


def _first_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.padding = inputs[4]
    ctx.mark_non_differentiable(*output[1:])


def _first_gradient(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return _first_block_backward(*ctx.saved_tensors, dy, ctx.padding), None, None, None, None


_first_block.register_autograd(_first_gradient, setup_context=_first_setup)


@_first_block.register_vmap
def _(
    info: Any,
    dims: tuple[int | None, ...],
    x: Tensor,
    conv: Tensor,
    gain: Tensor,
    shift: Tensor,
    padding: int,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    if dims[1:4] != (None, None, None) or dims[0] is None:
        raise NotImplementedError("only images may be many")
    found = _first_block(x.movedim(dims[0], 0).flatten(0, 1), conv, gain, shift, padding)
    return tuple(each.unflatten(0, (info.batch_size, -1)) for each in found), (0, 0, 0)


def begins(x: Tensor, conv: Tensor, gain: Tensor, padding: int) -> bool:
    """Whether a whole block of images can go in one pass: few channels, sides of maps powers of two up to 32, and nets that are fixed."""
    sides = [side + 2 * padding - 2 for side in x.shape[-2:]]
    small = (
        conv.shape[1] <= 3
        and len(conv) % 16 == 0
        and all(8 <= side <= 32 and not side & side - 1 for side in sides)
    )
    return (
        small
        and x.dtype == conv.dtype
        and not (torch.is_grad_enabled() and (conv.requires_grad or gain.requires_grad))
    )


def first_block(x: Tensor, conv: Tensor, gain: Tensor, shift: Tensor, padding: int) -> Tensor:
    """Images [count, channels, height, width] to maps [count, width, ...] after convolution, norm, ReLU and pooling."""
    return _first_block(x, conv, gain.float(), shift.float(), padding)[0]
