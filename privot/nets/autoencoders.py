"""Convolutional auto-encoders whose codes lie on a sphere: for images of up to 32 pixels, and for larger ones.

They are meant for public data, where nothing keeps a net small; `private_critic` has one for noisy gradients. No batch norm: a code
depends on its image alone.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, leaky_relu

from privot.nets.dp_networks import SLOPE, DecodedGenerator, halvings, on_sphere

SMALL = 32  # pixels a side up to which one halving is enough, as in Liutkus et al.; larger ones are halved down to 4, as in DCGAN


def widths(shape: tuple[int, int, int], width: int) -> list[int]:
    """Channels before and after each halving.

    >>> widths((1, 28, 28), 16), widths((3, 64, 64), 16)
    ([16, 16], [16, 32, 64, 128, 256])
    """
    if max(shape[1:]) <= SMALL:
        return [width] * (1 + (min(shape[1:]) > 1))
    return [width * 2**each for each in range(halvings(*shape[1:]) + 1)]


class ConvEncoder(nn.Module):
    """Image in [0, 1] to a code on the sphere of radius sqrt(code): a convolution, halvings, two more convolutions, a dense layer.

    >>> [round(each.item(), 3) for each in ConvEncoder((3, 64, 64), code=16, width=4)(torch.rand(2, 3, 64, 64)).norm(dim=1)]
    [4.0, 4.0]
    """

    def __init__(self, shape: tuple[int, int, int], code: int, width: int = 16):
        super().__init__()
        channels = widths(shape, width)
        self.first = nn.Conv2d(shape[0], channels[0], 3, padding=1)
        self.shrink = nn.ModuleList(
            nn.Conv2d(old, new, 2, stride=2) for old, new in pairwise(channels)
        )
        self.then = nn.ModuleList(
            nn.Conv2d(channels[-1], channels[-1], 3, padding=1) for _ in range(2)
        )
        cells = math.prod(side // 2 ** len(self.shrink) for side in shape[1:])
        self.last = nn.Linear(channels[-1] * cells, code)

    def forward(self, images: Tensor) -> Tensor:
        return on_sphere(self.raw(images))

    def raw(self, images: Tensor) -> Tensor:
        """Codes before they are put on the sphere."""
        x = leaky_relu(self.first(2 * images - 1), SLOPE)
        for layer in (*self.shrink, *self.then):
            x = leaky_relu(layer(x), SLOPE)
        return self.last(x.flatten(1))

    @torch.no_grad()
    def spread(self, images: Tensor) -> None:
        """Make the codes of these (public) images lie all round the sphere; else all begin as nearly one, and learning waits.

        >>> images, net = torch.rand(50, 1, 8, 8), ConvEncoder((1, 8, 8), code=4)
        >>> net.spread(images)
        >>> bool(net.raw(images).mean(0).abs().max() < 1e-3)
        True
        """
        codes = self.raw(images)
        middle = codes.mean(0)
        width = codes.std(0).clamp(min=1e-6)
        self.last.weight.div_(width[:, None])
        self.last.bias.sub_(middle).div_(width)


class ConvDecoder(nn.Module):
    """A code to the logits of an image's pixels: the other way round, with plain doubling, which leaves no chequered pattern.

    >>> ConvDecoder((1, 28, 28), code=8)(torch.zeros(2, 8)).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(self, shape: tuple[int, int, int], code: int, width: int = 16):
        super().__init__()
        channels = widths(shape, width)[::-1]
        self.sides = (shape[1], shape[2])
        self.plane = (
            channels[0],
            *(math.ceil(side / 2 ** (len(channels) - 1)) for side in self.sides),
        )
        self.first = nn.Linear(code, math.prod(self.plane))
        self.then = nn.ModuleList(
            nn.Conv2d(channels[0], channels[0], 3, padding=1) for _ in range(2)
        )
        self.grow = nn.ModuleList(
            nn.Conv2d(old, new, 3, padding=1) for old, new in pairwise(channels)
        )
        self.last = nn.Conv2d(channels[-1], shape[0], 3, padding=1)

    def forward(self, codes: Tensor) -> Tensor:
        x = leaky_relu(self.first(codes), SLOPE).unflatten(1, self.plane)
        for layer in self.then:
            x = leaky_relu(layer(x), SLOPE)
        for layer in self.grow:
            x = leaky_relu(layer(interpolate(x, scale_factor=2)), SLOPE)
        return self.last(x)[:, :, : self.sides[0], : self.sides[1]]


class ConvAutoencoder(nn.Module):
    """An image to the logits of itself, through a code."""

    def __init__(self, shape: tuple[int, int, int], code: int, width: int = 16):
        super().__init__()
        self.encoder = ConvEncoder(shape, code, width)
        self.decoder = ConvDecoder(shape, code, width)

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


class ConvDecodedGenerator(DecodedGenerator):
    """Code and label to a code of a `ConvAutoencoder`, and from there by its decoder to an image in [0, 1].

    >>> net = ConvDecodedGenerator((1, 28, 28), classes=10)
    >>> net(torch.zeros(2, net.code), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        code: int = 5,
        hidden: int = 256,
        inner: int = 16,
        width: int = 16,
    ):
        super().__init__(
            shape, classes, code, hidden, inner, drawing=1, waves=1
        )  # of its decoder the next line leaves nothing
        self.decoder = ConvDecoder(self.shape, inner, width)  # type: ignore[assignment]
