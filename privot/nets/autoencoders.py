"""Convolutional auto-encoders whose latents lie on a sphere.

They are trained on public data, so their size is not limited by privacy. Networks whose gradients
get noise are in `dp_critic` and `dp_autoencoder`. There is no batch norm: the latent of an image
depends on that image alone.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, leaky_relu

from privot.nets.dp_autoencoder import AutoencoderGenerator, project_to_sphere
from privot.nets.dp_critic import NEGATIVE_SLOPE, count_halvings

# Pixels a side up to which one halving is enough, as in Liutkus et al. Larger images are halved
# down to 4 pixels, as in DCGAN.
MAX_SINGLE_HALVING_SIDE = 32


def layer_channels(shape: tuple[int, int, int], first_channels: int) -> list[int]:
    """Return the channels before and after each halving.

    >>> layer_channels((1, 28, 28), 16), layer_channels((3, 64, 64), 16)
    ([16, 16], [16, 32, 64, 128, 256])
    """
    if max(shape[1:]) <= MAX_SINGLE_HALVING_SIDE:
        return [first_channels] * (1 + (min(shape[1:]) > 1))
    return [first_channels * 2**level for level in range(count_halvings(*shape[1:]) + 1)]


class ConvEncoder(nn.Module):
    """Map an image in [0, 1] to a latent on the sphere of radius sqrt(latent_dim).

    The layers are a convolution, strided convolutions that halve the sides, two more convolutions
    and a dense layer.

    Args:
        shape: Channels, height and width of an image.
        latent_dim: Dimension of the latent.
        channels: Channels of the first convolution.

    >>> encoder = ConvEncoder((3, 64, 64), latent_dim=16, channels=4)
    >>> [round(norm.item(), 3) for norm in encoder(torch.rand(2, 3, 64, 64)).norm(dim=1)]
    [4.0, 4.0]
    """

    def __init__(self, shape: tuple[int, int, int], latent_dim: int, channels: int = 16):
        super().__init__()
        level_channels = layer_channels(shape, channels)
        last_channels = level_channels[-1]
        self.stem = nn.Conv2d(shape[0], level_channels[0], 3, padding=1)
        self.downsample_convs = nn.ModuleList(
            nn.Conv2d(in_channels, out_channels, 2, stride=2)
            for in_channels, out_channels in pairwise(level_channels)
        )
        self.convs = nn.ModuleList(
            nn.Conv2d(last_channels, last_channels, 3, padding=1) for _ in range(2)
        )
        num_positions = math.prod(side // 2 ** len(self.downsample_convs) for side in shape[1:])
        self.output = nn.Linear(last_channels * num_positions, latent_dim)

    def forward(self, images: Tensor) -> Tensor:
        return project_to_sphere(self.encode_unnormalized(images))

    def encode_unnormalized(self, images: Tensor) -> Tensor:
        """Return the latents before their projection to the sphere, [count, latent_dim]."""
        x = leaky_relu(self.stem(2 * images - 1), NEGATIVE_SLOPE)
        for layer in (*self.downsample_convs, *self.convs):
            x = leaky_relu(layer(x), NEGATIVE_SLOPE)
        return self.output(x.flatten(1))

    @torch.no_grad()
    def standardize_latents(self, images: Tensor) -> None:
        """Rescale the last layer so that the latents of public images surround the origin.

        Otherwise all latents start close together, and training makes no progress at first.

        >>> images, encoder = torch.rand(50, 1, 8, 8), ConvEncoder((1, 8, 8), latent_dim=4)
        >>> encoder.standardize_latents(images)
        >>> bool(encoder.encode_unnormalized(images).mean(0).abs().max() < 1e-3)
        True
        """
        latents = self.encode_unnormalized(images)
        mean = latents.mean(0)
        std = latents.std(0).clamp(min=1e-6)
        self.output.weight.div_(std[:, None])
        self.output.bias.sub_(mean).div_(std)


class ConvDecoder(nn.Module):
    """Map a latent to the logits of an image's pixels.

    The layers mirror those of `ConvEncoder`. Nearest-neighbour upsampling before a convolution
    leaves no checkerboard pattern.

    Args:
        shape: Channels, height and width of an image.
        latent_dim: Dimension of the latent.
        channels: Channels of the last convolution's input.

    >>> ConvDecoder((1, 28, 28), latent_dim=8)(torch.zeros(2, 8)).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(self, shape: tuple[int, int, int], latent_dim: int, channels: int = 16):
        super().__init__()
        level_channels = layer_channels(shape, channels)[::-1]
        first_channels = level_channels[0]
        num_doublings = len(level_channels) - 1
        self.resolution = (shape[1], shape[2])
        self.base_shape = (
            first_channels,
            *(math.ceil(side / 2**num_doublings) for side in self.resolution),
        )
        self.dense = nn.Linear(latent_dim, math.prod(self.base_shape))
        self.convs = nn.ModuleList(
            nn.Conv2d(first_channels, first_channels, 3, padding=1) for _ in range(2)
        )
        self.upsample_convs = nn.ModuleList(
            nn.Conv2d(in_channels, out_channels, 3, padding=1)
            for in_channels, out_channels in pairwise(level_channels)
        )
        self.output_conv = nn.Conv2d(level_channels[-1], shape[0], 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = leaky_relu(self.dense(latents), NEGATIVE_SLOPE).unflatten(1, self.base_shape)
        for layer in self.convs:
            x = leaky_relu(layer(x), NEGATIVE_SLOPE)
        for layer in self.upsample_convs:
            x = leaky_relu(layer(interpolate(x, scale_factor=2)), NEGATIVE_SLOPE)
        return self.output_conv(x)[:, :, : self.resolution[0], : self.resolution[1]]


class ConvAutoencoder(nn.Module):
    """Map an image through a latent to the logits of its own pixels.

    Args:
        shape: Channels, height and width of an image.
        latent_dim: Dimension of the latent.
        channels: Channels of the encoder's first convolution.
    """

    def __init__(self, shape: tuple[int, int, int], latent_dim: int, channels: int = 16):
        super().__init__()
        self.encoder = ConvEncoder(shape, latent_dim, channels)
        self.decoder = ConvDecoder(shape, latent_dim, channels)

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


class ConvAutoencoderGenerator(AutoencoderGenerator):
    """Map a latent and a label to a `ConvAutoencoder` latent, and decode it to an image in [0, 1].

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        latent_dim: Dimension of the standard Gaussian latents [batch, latent_dim].
        hidden_dim: Units of the hidden dense layers.
        autoencoder_dim: Dimension of the auto-encoder's latents.
        channels: Channels of the auto-encoder.

    >>> net = ConvAutoencoderGenerator((1, 28, 28), classes=10)
    >>> net(torch.zeros(2, net.latent_dim), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        latent_dim: int = 5,
        hidden_dim: int = 256,
        autoencoder_dim: int = 16,
        channels: int = 16,
    ):
        # The decoder of the base class is replaced below, so it is built as small as possible.
        super().__init__(
            shape,
            classes,
            latent_dim,
            hidden_dim,
            autoencoder_dim,
            autoencoder_hidden_dim=1,
            num_frequencies=1,
        )
        self.decoder = ConvDecoder(self.shape, autoencoder_dim, channels)
