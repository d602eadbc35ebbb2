"""GS-WGAN's generator: residual blocks that double the sides, without batch norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, one_hot

from privot.nets.generators.dcgan import doublings


def pixel_norm(x: Tensor) -> Tensor:
    """Each place scaled so that its channels have mean square 1."""
    return x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()


class UpBlock(nn.Module):
    """Twice the sides: two convolutions beside a plain shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.short = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        grown = interpolate(pixel_norm(x).relu(), scale_factor=2)
        return self.second(pixel_norm(self.first(grown)).relu()) + interpolate(
            self.short(x), scale_factor=2
        )


class ResidualGenerator(nn.Module):
    """Code and label to an image in [0, 1]: a dense layer to a small plane, then blocks that double its sides.

    ``shape`` is (channels, height, width); codes are standard Gaussian, [batch, code].

    >>> net = ResidualGenerator((1, 28, 28), classes=10, width=8)
    >>> net(torch.zeros(2, net.code), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, code: int = 16, width: int = 128):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.code = code
        rounds = doublings(shape[1], shape[2])
        self.plane = (width, math.ceil(shape[1] / 2**rounds), math.ceil(shape[2] / 2**rounds))
        self.dense = nn.Linear(code + classes, math.prod(self.plane))
        self.blocks = nn.ModuleList(UpBlock(width) for _ in range(rounds))
        self.last = nn.Conv2d(width, shape[0], 3, padding=1)

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        x = self.dense(torch.cat([codes, one_hot(labels, self.classes).to(codes.dtype)], 1)).view(
            -1, *self.plane
        )
        for block in self.blocks:
            x = block(x)
        return self.last(pixel_norm(x).relu())[:, :, : self.shape[1], : self.shape[2]].sigmoid()
