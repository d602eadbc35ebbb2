"""ResNet-18 for small images, as the field's image benchmarks use it."""

from __future__ import annotations

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Stride of the first convolution and of the shortcut.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        keeps_shape = in_channels == out_channels and stride == 1
        self.shortcut = (
            nn.Identity()
            if keeps_shape
            else nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        return (self.body(images) + self.shortcut(images)).relu()


class ResNet18(nn.Module):
    """ResNet-18 with a 3x3 stem without pooling, four stages of two blocks and a global average.

    Args:
        shape: Channels, height and width of the images.
        classes: Number of classes.

    >>> import torch
    >>> ResNet18((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
        ]
        in_channels = 64
        for out_channels in (64, 128, 256, 512):
            layers += [
                ResidualBlock(in_channels, out_channels, 1 if out_channels == 64 else 2),
                ResidualBlock(out_channels, out_channels, 1),
            ]
            in_channels = out_channels
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(in_channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images))
