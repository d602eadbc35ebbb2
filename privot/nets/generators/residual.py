"""The generator of GS-WGAN: residual blocks that double the sides, without batch norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, one_hot

from privot.nets.generators.dcgan import count_doublings


def pixel_norm(x: Tensor) -> Tensor:
    """Scale each position of the maps so that its channels have mean square 1."""
    return x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()


class UpsampleBlock(nn.Module):
    """Double the sides of the maps by two convolutions beside a 1x1 shortcut."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        upsampled = interpolate(pixel_norm(x).relu(), scale_factor=2)
        residual = self.conv2(pixel_norm(self.conv1(upsampled)).relu())
        return residual + interpolate(self.shortcut(x), scale_factor=2)


class ResidualGenerator(nn.Module):
    """Map a latent and a label to an image in [0, 1].

    A dense layer gives a small map. Residual blocks then double its sides.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        latent_dim: Dimension of the standard Gaussian latents [batch, latent_dim].
        channels: Channels of all maps.

    >>> net = ResidualGenerator((1, 28, 28), classes=10, channels=8)
    >>> net(torch.zeros(2, net.latent_dim), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, latent_dim: int = 16, channels: int = 128
    ):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.latent_dim = latent_dim
        num_blocks = count_doublings(shape[1], shape[2])
        self.base_shape = (
            channels,
            math.ceil(shape[1] / 2**num_blocks),
            math.ceil(shape[2] / 2**num_blocks),
        )
        self.dense = nn.Linear(latent_dim + classes, math.prod(self.base_shape))
        self.blocks = nn.ModuleList(UpsampleBlock(channels) for _ in range(num_blocks))
        self.output_conv = nn.Conv2d(channels, shape[0], 3, padding=1)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        one_hot_labels = one_hot(labels, self.classes).to(latents.dtype)
        x = self.dense(torch.cat([latents, one_hot_labels], 1)).view(-1, *self.base_shape)
        for block in self.blocks:
            x = block(x)
        x = self.output_conv(pixel_norm(x).relu())
        return x[:, :, : self.shape[1], : self.shape[2]].sigmoid()
