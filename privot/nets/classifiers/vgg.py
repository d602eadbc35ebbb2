"""The classifier by which GS-WGAN's inception score is taken."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import interpolate


class VGG11(nn.Module):
    """VGG-11 with batch norm for small images: eight 3x3 convolutions, five poolings, one linear layer.

    Images of 28 to 31 pixels are padded by 4; smaller ones are brought to 32, larger ones end in an average over what is left.

    >>> import torch
    >>> VGG11((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__()
        channels = shape[0]
        self.small = min(shape[1:]) < 28
        layers: list[nn.Module] = []
        for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
            if not width:
                layers.append(nn.MaxPool2d(2))
                continue
            pad = 3 if not layers and 28 <= min(shape[1:]) < 32 else 1
            layers += [
                nn.Conv2d(channels, width, 3, padding=pad, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(512, classes)

    def features(self, images: Tensor) -> Tensor:
        """[count, 512]."""
        return self.layers(interpolate(images, (32, 32), mode="bilinear") if self.small else images)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))
