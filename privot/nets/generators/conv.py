"""A small conditional image generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ConvGenerator(nn.Module):
    """Code and one-hot label to an image in [0, 1]: two dense layers, then two rounds of (upsample, 5x5 convolution).

    ``shape`` is (channels, height, width); codes are standard Gaussian, [batch, code].

    >>> net = ConvGenerator((1, 28, 28), classes=10)
    >>> net(torch.zeros(2, net.code), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        code: int = 5,
        hidden: int = 200,
        width: int = 16,
    ):
        super().__init__()
        self.shape = tuple(shape)
        self.classes = classes
        self.code = code
        self.width = width
        self.base = (math.ceil(shape[1] / 4), math.ceil(shape[2] / 4))
        cells = width * self.base[0] * self.base[1]
        self.dense = nn.Sequential(
            nn.Linear(code + classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, cells),
            nn.BatchNorm1d(cells),
        )
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.first = nn.Conv2d(width, width // 2, 5, padding=2)
        self.last = nn.Conv2d(width // 2, shape[0], 5, padding=2)

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(labels, self.classes).to(codes.dtype)
        x = self.dense(torch.cat([codes, one_hot], 1)).relu().view(-1, self.width, *self.base)
        x = self.last(self.grow(self.first(self.grow(x)).relu()))
        return x[:, :, : self.shape[1], : self.shape[2]].sigmoid()


def initialise(net: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draw every weight from the given public generator (PyTorch's usual laws), so that a run replays exactly."""
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            reach = 1 / math.sqrt(module.weight[0].numel())
            for parameter in module.parameters(recurse=False):
                nn.init.uniform_(parameter, -reach, reach, generator=generator)
    return net
