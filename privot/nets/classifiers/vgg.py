"""The classifier behind the inception scores of GS-WGAN."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import interpolate

# output channels of the convolutions; 0 stands for a pooling
LAYER_CHANNELS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


class VGG11(nn.Module):
    """VGG-11 with batch norm for small images.

    It has eight 3x3 convolutions, five poolings and one linear layer. Images of 28 to 31 pixels a
    side are padded by 4 pixels. Smaller images are resized to 32 pixels. The maps of larger images
    are averaged at the end.

    Args:
        shape: Channels, height and width of the images.
        classes: Number of classes.

    >>> import torch
    >>> VGG11((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__()
        in_channels = shape[0]
        self.resizes = min(shape[1:]) < 28
        layers: list[nn.Module] = []
        for out_channels in LAYER_CHANNELS:
            if out_channels == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            padding = 3 if not layers and 28 <= min(shape[1:]) < 32 else 1
            layers += [
                nn.Conv2d(in_channels, out_channels, 3, padding=padding, bias=False),
                nn.BatchNorm2d(out_channels),
                nn.ReLU(inplace=True),
            ]
            in_channels = out_channels
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(512, classes)

    def features(self, images: Tensor) -> Tensor:
        """Return the inputs of the last layer, [count, 512]."""
        if self.resizes:
            images = interpolate(images, (32, 32), mode="bilinear")
        return self.layers(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))
