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


def draw(count: int, side: int, generator: torch.Generator, operations: tuple[str, ...] = OPERATIONS) -> Drawn:
    """Draw one operation for each of ``count``: colour, crop (shift by 1/8), cutout (half a side), flip, scale (1.2), rotate (15 degrees).

    >>> draw(3, 28, torch.Generator().manual_seed(0)).plane.shape
    torch.Size([3, 2, 3])
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator, dtype=torch.float64)

    kind = torch.randint(len(operations), (count,), generator=generator)
    on = {name: kind == operations.index(name) if name in operations else torch.zeros(count, dtype=torch.bool) for name in OPERATIONS}
    reach = round(side / 8)
    shift = torch.randint(-reach, reach + 1, (count, 2), generator=generator) * 2 / side
    scale, angle = uniform(1 / 1.2, 1.2, 2), uniform(-math.pi / 12, math.pi / 12)
    mirrored = torch.rand(count, generator=generator) < 0.5
    plane = torch.zeros(count, 2, 3, dtype=torch.float64)
    plane[:, 0, 0] = plane[:, 1, 1] = 1
    plane[:, :, 2] = torch.where(on["crop"][:, None], shift.double(), 0)
    plane[:, [0, 1], [0, 1]] = torch.where(on["scale"][:, None], scale, plane[:, [0, 1], [0, 1]])
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2)
    plane[:, :, :2] = torch.where(on["rotate"][:, None, None], turn, plane[:, :, :2])
    plane[:, 0, 0] = torch.where(on["flip"] & mirrored, -1, plane[:, 0, 0])
    middle, half = torch.randint(side + 1, (count, 2), generator=generator), side // 4
    hole = torch.cat([(middle - half).clamp(min=0), (middle + half).clamp(max=side)], 1)
    hole = torch.where(on["cutout"][:, None], hole, 0)
    plain = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    colour = torch.stack([uniform(-0.5, 0.5), uniform(0, 2), uniform(0.5, 1.5)], 1)
    return Drawn(plane.float(), hole.float(), torch.where(on["colour"][:, None], colour, plain).float())


def apply(images: Tensor, drawn: Drawn) -> Tensor:
    """Augment images [count, channels, side, side] each by its own numbers; what comes from outside an image is 0.

    >>> images = torch.rand(2, 1, 8, 8)
    >>> still = Drawn(torch.eye(2, 3).expand(2, 2, 3), torch.zeros(2, 4), torch.tensor([0.0, 1.0, 1.0]).expand(2, 3))
    >>> bool((apply(images, still) - images).abs().max() < 1e-5)
    True
    """
    bright, vivid, sharp = (each.view(-1, 1, 1, 1) for each in drawn.colour.to(images.dtype).unbind(1))
    images = images + bright
    grey = images.mean(1, keepdim=True)
    images = (images - grey) * vivid + grey
    level = images.mean((1, 2, 3), keepdim=True)
    images = (images - level) * sharp + level
    grid = affine_grid(drawn.plane.to(images.dtype), list(images.shape), align_corners=False)
    images = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    top, left, bottom, right = (each.view(-1, 1, 1, 1) for each in drawn.hole.unbind(1))
    rows = torch.arange(images.shape[2], device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(images.shape[3], device=images.device).view(1, 1, 1, -1)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    return images.masked_fill(inside, 0)
