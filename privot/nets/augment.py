"""Differentiable augmentation as in the condensation papers (DSA), for whole batches at once and for many nets side by side.

Every operation is one affine map of the plane, a mask, and a colour change; drawing is apart from applying, so that the same drawn
numbers can be applied to real and synthetic images alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

OPERATIONS = ("colour", "crop", "cutout", "flip", "scale", "rotate")


def operations(mirrored: bool) -> tuple[str, ...]:
    """Which there are for images that may be mirrored, or may not.

    >>> operations(mirrored=False)
    ('colour', 'crop', 'cutout', 'scale', 'rotate')
    """
    return tuple(each for each in OPERATIONS if mirrored or each != "flip")


class Drawn(NamedTuple):
    """The numbers of ``count`` augmentations; an operation that was not drawn has the numbers that change nothing."""

    plane: Tensor  # [count, 2, 3] from places in the result to places in the image, in [-1, 1]
    hole: Tensor  # [count, 4]: top, left, bottom, right in pixels; none where bottom is 0
    colour: Tensor  # [count, 3]: brightness added, saturation factor, contrast factor

    def chosen(self, index: Tensor) -> Drawn:
        """Those at these places."""
        return Drawn(*(each[index] for each in self))

    def to(self, device: torch.device) -> Drawn:
        return Drawn(*(each.to(device) for each in self))


def draw(
    count: int,
    side: int | tuple[int, int],
    generator: torch.Generator,
    operations: tuple[str, ...] = OPERATIONS,
) -> Drawn:
    """Draw one operation for each of ``count``: colour, crop (shift by 1/8), cutout (half a side), flip, scale (1.2), rotate (15 degrees).

    ``side`` is that of the images, or (height, width). Numbers lie where the generator does, and drawing never waits for a device.

    >>> draw(3, 28, torch.Generator().manual_seed(0)).plane.shape
    torch.Size([3, 2, 3])
    """
    height, width = (side, side) if isinstance(side, int) else side
    device = generator.device

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(
            count, generator=generator, dtype=torch.float64, device=device
        )

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (count,), generator=generator, device=device)

    kind = whole(0, len(operations) - 1)
    on = {
        name: kind == operations.index(name)
        if name in operations
        else torch.zeros_like(kind, dtype=torch.bool)
        for name in OPERATIONS
    }
    right, down = (
        torch.where(on["crop"], whole(-round(each / 8), round(each / 8)) * 2 / each, 0.0)
        for each in (width, height)
    )
    wide, high = (torch.where(on["scale"], uniform(1 / 1.2, 1.2), 1.0) for _ in range(2))
    angle = torch.where(on["rotate"], uniform(-math.pi / 12, math.pi / 12), 0.0)
    mirrored = torch.where(on["flip"] & (uniform(0, 1) < 0.5), -1.0, 1.0)
    # Sides are 2 long whatever their pixels, so a turn of an oblong image is squeezed by its proportions.
    rows = [
        angle.cos() * wide * mirrored,
        -angle.sin() * height / width,
        right,
        angle.sin() * width / height,
        angle.cos() * high,
        down,
    ]
    middles = [whole(0, each) for each in (height, width)]
    hole = [
        (each - side // 4).clamp(min=0) for each, side in zip(middles, (height, width), strict=True)
    ]
    hole += [
        (each + side // 4).clamp(max=side)
        for each, side in zip(middles, (height, width), strict=True)
    ]
    colour = [
        torch.where(on["colour"], uniform(*reach), plain)
        for reach, plain in (((-0.5, 0.5), 0.0), ((0, 2), 1.0), ((0.5, 1.5), 1.0))
    ]
    return Drawn(
        torch.stack(rows, 1).view(-1, 2, 3).float(),
        torch.where(on["cutout"][:, None], torch.stack(hole, 1), 0).float(),
        torch.stack(colour, 1).float(),
    )


def apply(images: Tensor, drawn: Drawn) -> Tensor:
    """Augment images [count, channels, height, width] each by its own numbers; what comes from outside an image is 0.

    >>> images = torch.rand(2, 1, 8, 8)
    >>> still = Drawn(torch.eye(2, 3).expand(2, 2, 3), torch.zeros(2, 4), torch.tensor([0.0, 1.0, 1.0]).expand(2, 3))
    >>> bool((apply(images, still) - images).abs().max() < 1e-5)
    True
    """
    bright, vivid, sharp = (
        each.view(-1, 1, 1, 1) for each in drawn.colour.to(images.dtype).unbind(1)
    )
    images = images + bright
    grey = images.mean(1, keepdim=True)
    images = (images - grey) * vivid + grey
    level = images.mean((1, 2, 3), keepdim=True)
    images = (images - level) * sharp + level
    with torch.autocast(
        images.device.type, enabled=False
    ):  # places in half precision would be off by a tenth of a pixel
        grid = affine_grid(drawn.plane.to(images.dtype), list(images.shape), align_corners=False)
    images = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    top, left, bottom, right = (each.view(-1, 1, 1, 1) for each in drawn.hole.unbind(1))
    rows = torch.arange(images.shape[2], device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(images.shape[3], device=images.device).view(1, 1, 1, -1)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    return images.masked_fill(inside, 0)
