"""The classifier by which GAN papers measure synthetic digits."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """LeNet-5: two 5x5 convolutions (6, 16) with pooling, then 120-84-classes. Images under 20 pixels a side are pooled once.

    >>> import torch
    >>> LeNet((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__()
        channels, height, width = shape
        small = min(height, width) < 20
        pad = 2 if small or height == 28 else 0
        after = [(side + 2 * pad - 4) // 2 for side in (height, width)]
        after = [side - 4 + (4 if small else 0) for side in after]
        after = [side // (1 if small else 2) for side in after]
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=pad),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5, padding=2 if small else 0),
            nn.ReLU(),
            nn.Identity() if small else nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * after[0] * after[1], 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)
