"""A residual classifier, as the image benchmarks of the field use."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        return (self.body(images) + self.short(images)).relu()


class ResNet18(nn.Module):
    """ResNet-18 for small images: a 3x3 stem without pooling, four stages of two blocks (64 to 512), global average.

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
        before = 64
        for width in (64, 128, 256, 512):
            layers += [Block(before, width, 1 if width == 64 else 2), Block(width, width, 1)]
            before = width
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images))
