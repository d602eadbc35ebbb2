"""The convolutional classifier of the dataset condensation papers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from privot.nets.conv_block import apply_conv_block
from privot.nets.conv_shapes import ConvNetShapes


class ConvNet(nn.Module):
    """Blocks of 3x3 convolution, instance norm, ReLU and average pooling, then one linear layer.

    With depth 3 and width 128 it is the "ConvNet3" of the papers. Images of 28 pixels a side are
    padded to 32. Images too small for `depth` poolings get fewer blocks.

    Args:
        shape: Channels, height and width of the images.
        classes: Number of classes.
        width: Channels of every block.
        depth: Number of blocks.

    >>> import torch
    >>> net = ConvNet((3, 32, 32), 10)
    >>> net.features(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 2048])
    >>> sum(parameter.numel() for parameter in net.parameters())
    320010
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 128, depth: int = 3):
        super().__init__()
        shapes = ConvNetShapes(shape, width, depth)
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        for block in range(shapes.num_blocks):
            in_channels = width if block else shape[0]
            padding = 1 if block else shapes.padding
            self.convs.append(nn.Conv2d(in_channels, width, 3, padding=padding))
            self.norms.append(nn.GroupNorm(width, width))
        self.head = nn.Linear(shapes.num_features, classes)

    def features(self, images: Tensor) -> Tensor:
        """Return the inputs of the last layer.

        They are [count, width * height' * width'] with the sides of the last map, which makes
        2048 features for 28 and 32 pixels a side at the default size.
        """
        conv: Any
        norm: Any
        for conv, norm in zip(self.convs, self.norms, strict=True):
            images = apply_conv_block(
                images, conv.weight, conv.bias, norm.weight, norm.bias, padding=conv.padding[0]
            )
        return images.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))
