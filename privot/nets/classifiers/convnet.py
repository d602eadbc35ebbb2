"""The convolutional classifier of the condensation papers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from privot.nets.conv_block import block
from privot.nets.conv_shapes import Outline


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
        outline = Outline(shape, width, depth)
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        for number in range(outline.blocks):
            inputs, pad = (width, 1) if number else (shape[0], outline.pad)
            self.convs.append(nn.Conv2d(inputs, width, 3, padding=pad))
            self.norms.append(nn.GroupNorm(width, width))
        self.head = nn.Linear(outline.numbers, classes)

    def features(self, images: Tensor) -> Tensor:
        """[count, width * height' * width'], 2048 for 28 and 32 pixels at the usual size."""
        conv: Any
        norm: Any
        for conv, norm in zip(self.convs, self.norms, strict=True):
            images = block(
                images, conv.weight, conv.bias, norm.weight, norm.bias, padding=conv.padding[0]
            )
        return images.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))
