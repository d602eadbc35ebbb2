"""A small conditional image generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ConvGenerator(nn.Module):
    """Map a latent and a label to an image in [0, 1].

    Two dense layers give a small map. Two rounds of upsampling and 5x5 convolution follow.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        latent_dim: Dimension of the standard Gaussian latents [batch, latent_dim].
        hidden_dim: Units of the hidden dense layer.
        channels: Channels of the first map.

    >>> net = ConvGenerator((1, 28, 28), classes=10)
    >>> net(torch.zeros(2, net.latent_dim), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        latent_dim: int = 5,
        hidden_dim: int = 200,
        channels: int = 16,
    ):
        super().__init__()
        self.shape = tuple(shape)
        self.classes = classes
        self.latent_dim = latent_dim
        self.channels = channels
        self.base_resolution = (math.ceil(shape[1] / 4), math.ceil(shape[2] / 4))
        base_dim = channels * self.base_resolution[0] * self.base_resolution[1]
        self.dense = nn.Sequential(
            nn.Linear(latent_dim + classes, hidden_dim),
            nn.BatchNorm1d(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, base_dim),
            nn.BatchNorm1d(base_dim),
        )
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.hidden_conv = nn.Conv2d(channels, channels // 2, 5, padding=2)
        self.output_conv = nn.Conv2d(channels // 2, shape[0], 5, padding=2)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(labels, self.classes).to(latents.dtype)
        x = self.dense(torch.cat([latents, one_hot], 1)).relu()
        x = x.view(-1, self.channels, *self.base_resolution)
        x = self.output_conv(self.upsample(self.hidden_conv(self.upsample(x)).relu()))
        return x[:, :, : self.shape[1], : self.shape[2]].sigmoid()


def initialize_weights(net: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draw the weights of all linear and convolutional layers from `generator`, in place.

    The distribution is PyTorch's default, uniform within 1 / sqrt(fan-in). With a seeded public
    generator the weights repeat exactly.

    Args:
        net: The network. Other layers, such as norms, stay as they are.
        generator: Source of the random numbers.

    Returns:
        The same network.
    """
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            limit = 1 / math.sqrt(module.weight[0].numel())
            for parameter in module.parameters(recurse=False):
                nn.init.uniform_(parameter, -limit, limit, generator=generator)
    return net
