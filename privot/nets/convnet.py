"""The convolutional classifier of the condensation papers."""

from __future__ import annotations

import math

from torch import Tensor, nn


class ConvNet(nn.Module):
    """Blocks of 3x3 convolution, instance norm, ReLU and average pooling, then one linear layer ("ConvNet3" at depth 3, width 128).

    28-pixel images are padded to 32. Images too small for so many poolings get fewer blocks.

    >>> import torch
    >>> net = ConvNet((3, 32, 32), 10)
    >>> net.features(torch.zeros(2, 3, 32, 32)).shape, sum(each.numel() for each in net.parameters())
    (torch.Size([2, 2048]), 320010)
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 128, depth: int = 3):
        super().__init__()
        channels, height, width_in = shape
        padded = 4 if (height, width_in) == (28, 28) else 0
        sides = [height + padded, width_in + padded]
        layers: list[nn.Module] = []
        for _ in range(min(depth, int(math.log2(min(sides))) - 1)):
            pad = 3 if not layers and padded else 1
            norm = nn.GroupNorm(width, width, affine=True)
            layers += [nn.Conv2d(channels, width, 3, padding=pad), norm, nn.ReLU(inplace=True), nn.AvgPool2d(2)]
            channels, sides = width, [side // 2 for side in sides]
        self.layers, self.head = nn.Sequential(*layers, nn.Flatten()), nn.Linear(channels * math.prod(sides), classes)

    def features(self, images: Tensor) -> Tensor:
        """[count, width * height' * width'], 2048 for 28 and 32 pixels at the usual size."""
        return self.layers(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))
