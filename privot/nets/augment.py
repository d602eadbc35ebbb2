"""Differentiable siamese augmentation (DSA) as in the condensation papers, for whole batches.

Every operation is one affine map of the plane, a mask, and a change of colors. Sampling the
parameters is separate from applying them, so that real and synthetic images can share parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

AUGMENTATIONS = ("color", "crop", "cutout", "flip", "scale", "rotate")


def list_augmentations(flip_invariant: bool) -> tuple[str, ...]:
    """List the operations for images that may be mirrored, or that may not.

    >>> list_augmentations(flip_invariant=False)
    ('color', 'crop', 'cutout', 'scale', 'rotate')
    """
    return tuple(name for name in AUGMENTATIONS if flip_invariant or name != "flip")


class AugmentParams(NamedTuple):
    """Parameters of ``count`` augmentations. Operations that were not chosen change nothing."""

    affine: Tensor  # [count, 2, 3]: from positions in the result to positions in the image, [-1, 1]
    cutout: Tensor  # [count, 4]: top, left, bottom, right in pixels; none where bottom is 0
    color: Tensor  # [count, 3]: added brightness, saturation factor, contrast factor

    def select(self, index: Tensor) -> AugmentParams:
        """Return the parameters at these indices."""
        return AugmentParams(*(values[index] for values in self))

    def to(self, device: torch.device) -> AugmentParams:
        return AugmentParams(*(values.to(device) for values in self))


def sample_augment_params(
    count: int,
    side: int | tuple[int, int],
    generator: torch.Generator,
    augmentations: tuple[str, ...] = AUGMENTATIONS,
) -> AugmentParams:
    """Choose one operation for each image and sample its parameters.

    The operations are color, crop (a shift of at most 1/8 of the side), cutout (half a side), flip,
    scale (a factor of at most 1.2) and rotate (at most 15 degrees).

    Args:
        count: Number of augmentations.
        side: Side of the images in pixels, or (height, width).
        generator: Source of the random numbers. The parameters lie on its device, and sampling
            does not synchronize with the device.
        augmentations: The operations to choose from.

    Returns:
        The parameters.

    >>> sample_augment_params(3, 28, torch.Generator().manual_seed(0)).affine.shape
    torch.Size([3, 2, 3])
    """
    height, width = (side, side) if isinstance(side, int) else side
    sampler = _Sampler(count, generator)
    chosen = sampler.integers(0, len(augmentations) - 1)
    never = torch.zeros_like(chosen, dtype=torch.bool)
    is_active = {
        name: chosen == augmentations.index(name) if name in augmentations else never
        for name in AUGMENTATIONS
    }
    affine = _sample_affine(sampler, is_active, height, width)
    cutout = _sample_cutout(sampler, is_active["cutout"], height, width)
    color = _sample_color(sampler, is_active["color"])
    return AugmentParams(affine, cutout, color)


@dataclass(frozen=True)
class _Sampler:
    """Draws ``count`` random numbers at a time on the generator's device."""

    count: int
    generator: torch.Generator

    def uniform(self, low: float, high: float) -> Tensor:
        device = self.generator.device
        unit = torch.rand(self.count, generator=self.generator, dtype=torch.float64, device=device)
        return low + (high - low) * unit

    def integers(self, low: int, high: int) -> Tensor:
        device = self.generator.device
        return torch.randint(low, high + 1, (self.count,), generator=self.generator, device=device)


def _sample_affine(
    sampler: _Sampler, is_active: dict[str, Tensor], height: int, width: int
) -> Tensor:
    """Sample crops, scales, rotations and flips as affine maps.

    Args:
        sampler: Source of the random numbers.
        is_active: For each operation, whether each image gets it, [count].
        height: Height of the images.
        width: Width of the images.

    Returns:
        The maps, [count, 2, 3].
    """
    right, down = (
        torch.where(
            is_active["crop"],
            sampler.integers(-round(pixels / 8), round(pixels / 8)) * 2 / pixels,
            0.0,
        )
        for pixels in (width, height)
    )
    x_scale, y_scale = (
        torch.where(is_active["scale"], sampler.uniform(1 / 1.2, 1.2), 1.0) for _ in range(2)
    )
    angle = torch.where(is_active["rotate"], sampler.uniform(-math.pi / 12, math.pi / 12), 0.0)
    mirror = torch.where(is_active["flip"] & (sampler.uniform(0, 1) < 0.5), -1.0, 1.0)
    # Positions are in [-1, 1] whatever the number of pixels. The rotation of an image that is not
    # square is therefore corrected by the ratio of its sides.
    entries = [
        angle.cos() * x_scale * mirror,
        -angle.sin() * height / width,
        right,
        angle.sin() * width / height,
        angle.cos() * y_scale,
        down,
    ]
    return torch.stack(entries, 1).view(-1, 2, 3).float()


def _sample_cutout(sampler: _Sampler, is_active: Tensor, height: int, width: int) -> Tensor:
    """Sample rectangles of half a side.

    Args:
        sampler: Source of the random numbers.
        is_active: Whether each image gets a rectangle, [count].
        height: Height of the images.
        width: Width of the images.

    Returns:
        Top, left, bottom and right in pixels, 0 without a rectangle: [count, 4].
    """
    sides = (height, width)
    centers = [sampler.integers(0, side) for side in sides]
    starts = [
        (center - side // 4).clamp(min=0) for center, side in zip(centers, sides, strict=True)
    ]
    ends = [
        (center + side // 4).clamp(max=side) for center, side in zip(centers, sides, strict=True)
    ]
    return torch.where(is_active[:, None], torch.stack(starts + ends, 1), 0).float()


def _sample_color(sampler: _Sampler, is_active: Tensor) -> Tensor:
    """Sample brightness, saturation and contrast where ``is_active``: [count, 3]."""
    ranges_and_neutral = (((-0.5, 0.5), 0.0), ((0, 2), 1.0), ((0.5, 1.5), 1.0))
    values = [
        torch.where(is_active, sampler.uniform(*limits), neutral)
        for limits, neutral in ranges_and_neutral
    ]
    return torch.stack(values, 1).float()


def apply_augmentations(images: Tensor, params: AugmentParams) -> Tensor:
    """Augment each image by its own parameters.

    Args:
        images: Images, [count, channels, height, width].
        params: Parameters of ``count`` augmentations.

    Returns:
        Augmented images of the same shape. Pixels from outside an image are 0.

    >>> images = torch.rand(2, 1, 8, 8)
    >>> identity, no_cutout = torch.eye(2, 3).expand(2, 2, 3), torch.zeros(2, 4)
    >>> neutral = AugmentParams(identity, no_cutout, torch.tensor([0.0, 1.0, 1.0]).expand(2, 3))
    >>> bool((apply_augmentations(images, neutral) - images).abs().max() < 1e-5)
    True
    """
    brightness, saturation, contrast = (
        values.view(-1, 1, 1, 1) for values in params.color.to(images.dtype).unbind(1)
    )
    images = images + brightness
    grey = images.mean(1, keepdim=True)
    images = (images - grey) * saturation + grey
    level = images.mean((1, 2, 3), keepdim=True)
    images = (images - level) * contrast + level
    # Positions in half precision would be off by a tenth of a pixel.
    with torch.autocast(images.device.type, enabled=False):
        grid = affine_grid(params.affine.to(images.dtype), list(images.shape), align_corners=False)
    images = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    top, left, bottom, right = (values.view(-1, 1, 1, 1) for values in params.cutout.unbind(1))
    rows = torch.arange(images.shape[2], device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(images.shape[3], device=images.device).view(1, 1, 1, -1)
    is_cut = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    return images.masked_fill(is_cut, 0)
