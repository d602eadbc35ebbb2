"""The classifier with which GAN papers evaluate synthetic digits."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """LeNet-5: two 5x5 convolutions (6 and 16 channels) with pooling, then layers of 120 and 84.

    Images of fewer than 20 pixels a side are pooled once instead of twice.

    Args:
        shape: Channels, height and width of the images.
        classes: Number of classes.

    >>> import torch
    >>> LeNet((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__()
        channels, height, width = shape
        is_small = min(height, width) < 20
        padding = 2 if is_small or height == 28 else 0
        sides = [(side + 2 * padding - 4) // 2 for side in (height, width)]
        if not is_small:
            sides = [(side - 4) // 2 for side in sides]
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5, padding=2 if is_small else 0),
            nn.ReLU(),
            nn.Identity() if is_small else nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * sides[0] * sides[1], 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)
