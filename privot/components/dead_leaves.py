"""Synthetic "dead leaves" images, on which networks are pretrained without any data.

Each class has its own colors, shapes, sizes, directions and stripes. An image is a pile of such
shapes on a color gradient. No data set is involved, so networks that are trained to separate the
classes are public and cost no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_LEAVES = 24  # shapes in an image
COLORS_PER_CLASS = 4


class _Sampler:
    """Draws uniform random numbers on the CPU and moves them to the device.

    Args:
        generator: Random generator on the CPU.
        device: Device of the numbers.
        count: Number of images.
    """

    def __init__(self, generator: torch.Generator, device: torch.device, count: int):
        self.generator = generator
        self.device = device
        self.count = count

    def uniform(self, *size: int) -> Tensor:
        """Draw numbers in [0, 1)."""
        return torch.rand(*size, generator=self.generator).to(self.device)

    def per_image(self, *size: int) -> Tensor:
        """Draw numbers in [0, 1) for each image: [count, *size]."""
        return self.uniform(self.count, *size)

    def jitter(self, width: float, *size: int) -> Tensor:
        """Draw numbers around 0 for each image, of a range of this width: [count, *size]."""
        return width * (self.per_image(*size) - 0.5)


@dataclass(frozen=True)
class _LeafStyle:
    """Style of the shapes of each image: [count, 1, 1] where nothing else is said."""

    palette: Tensor  # colors to choose from, [count, COLORS_PER_CLASS, 3]
    exponent: Tensor  # of the superellipse: 1 is a diamond, 2 an ellipse, 8 almost a rectangle
    size: Tensor  # half axis, in half image sides
    aspect_ratio: Tensor  # of the shorter axis to the longer one
    angle: Tensor  # mean direction, in radians
    angle_spread: Tensor  # how much directions vary, 0 to 1
    stripe_frequency: Tensor
    stripe_angle: Tensor  # in radians
    stripe_contrast: Tensor


def generate_dead_leaves(
    num_classes: int,
    images_per_class: int,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Generate synthetic images of several classes.

    Args:
        num_classes: Number of classes.
        images_per_class: Images of each class.
        shape: Channels (1 or 3), height and width of an image.
        generator: Random generator on the CPU.
        device: Device of the images.

    Returns:
        Images [num_classes * images_per_class, *shape] in [0, 1], and their classes.

    >>> rng = torch.Generator().manual_seed(0)
    >>> images, labels = generate_dead_leaves(3, 2, (3, 16, 16), rng, torch.device("cpu"))
    >>> images.shape, labels.tolist()
    (torch.Size([6, 3, 16, 16]), [0, 0, 1, 1, 2, 2])
    """
    labels = torch.arange(num_classes, device=device).repeat_interleave(images_per_class)
    sampler = _Sampler(generator, device, len(labels))
    style = _draw_style(sampler, num_classes, labels)
    x = torch.linspace(-1, 1, shape[2], device=device).view(1, 1, -1)
    y = torch.linspace(-1, 1, shape[1], device=device).view(1, -1, 1)
    images = style.palette[:, 0].view(-1, 3, 1, 1) + sampler.jitter(0.3, 3, 1, 1)
    horizontal = sampler.jitter(0.5, 3, 1, 1) * x[:, None]
    vertical = sampler.jitter(0.5, 3, 1, 1) * y[:, None]
    images = images + horizontal + vertical
    for _ in range(NUM_LEAVES):
        images = _paint_leaf(images, style, sampler, x, y)
    images = images.clamp(0, 1)
    return (images if shape[0] == 3 else images.mean(1, keepdim=True)), labels


def _draw_style(sampler: _Sampler, num_classes: int, labels: Tensor) -> _LeafStyle:
    """Draw the style of each class. The order of the draws fixes the images of a seed.

    Args:
        sampler: Source of the random numbers.
        num_classes: Number of classes.
        labels: Classes of the images [count].

    Returns:
        The style of each image.
    """

    def per_class() -> Tensor:
        return sampler.uniform(num_classes)

    def expand_per_image(values: Tensor) -> Tensor:
        return values[labels].view(-1, 1, 1)

    colors = sampler.uniform(num_classes, COLORS_PER_CLASS, 3)
    exponents = torch.tensor([1.0, 2.0, 8.0], device=sampler.device)
    return _LeafStyle(
        palette=colors[labels],
        exponent=expand_per_image(exponents[(per_class() * 3).long()]),
        size=expand_per_image(0.08 + 0.35 * per_class()),
        aspect_ratio=expand_per_image(0.3 + 0.7 * per_class()),
        angle=expand_per_image(math.pi * per_class()),
        angle_spread=expand_per_image(per_class()),
        stripe_frequency=expand_per_image(10 * per_class()),
        stripe_angle=expand_per_image(math.pi * per_class()),
        stripe_contrast=expand_per_image(0.5 * per_class() * (per_class() < 0.6)),
    )


def _paint_leaf(
    images: Tensor, style: _LeafStyle, sampler: _Sampler, x: Tensor, y: Tensor
) -> Tensor:
    """Paint one random shape over each image.

    Args:
        images: Images [count, 3, height, width].
        style: Style of each image.
        sampler: Source of the random numbers.
        x: Horizontal coordinates in [-1, 1], [1, 1, width].
        y: Vertical coordinates in [-1, 1], [1, height, 1].

    Returns:
        The new images.
    """
    offset_x = x - 2 * sampler.per_image(1, 1) + 1
    offset_y = y - 2 * sampler.per_image(1, 1) + 1
    half_axis = style.size * (0.3 + 2 * sampler.per_image(1, 1) * sampler.per_image(1, 1))
    angle = style.angle + style.angle_spread * sampler.jitter(math.pi, 1, 1)
    along = (offset_x * angle.cos() + offset_y * angle.sin()) / half_axis
    across = (offset_y * angle.cos() - offset_x * angle.sin()) / (half_axis * style.aspect_ratio)
    is_inside = (
        along.abs().clamp(max=9) ** style.exponent + across.abs().clamp(max=9) ** style.exponent < 1
    )
    color_index = (COLORS_PER_CLASS * sampler.per_image()).long()
    colors = style.palette[torch.arange(len(images), device=images.device), color_index]
    colors = colors.view(-1, 3, 1, 1) + sampler.jitter(0.2, 3, 1, 1)
    stripe_angle = style.stripe_angle + sampler.jitter(0.3, 1, 1)
    stripes = torch.sin(
        math.pi * style.stripe_frequency * (x * stripe_angle.cos() + y * stripe_angle.sin())
        + 2 * math.pi * sampler.per_image(1, 1)
    )
    contrast = (style.stripe_contrast * stripes)[:, None]
    colors = colors + contrast * (0.5 + 0.5 * sampler.per_image(3, 1, 1))
    return torch.where(is_inside[:, None], colors, images)
