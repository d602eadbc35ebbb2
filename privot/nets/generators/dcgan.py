"""The two networks of a conditional deep convolutional GAN: a generator and a critic."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, interpolate, leaky_relu, one_hot


def count_doublings(height: int, width: int) -> int:
    """Count how often the shorter side can be halved without falling below 4 pixels.

    >>> [count_doublings(side, side) for side in (3, 8, 28, 32, 64)]
    [0, 1, 2, 3, 4]
    """
    return max(0, int(math.log2(min(height, width) / 4))) if min(height, width) >= 4 else 0


class ConditionalBatchNorm(nn.Module):
    """Batch norm with a gain and a shift of its own for each class."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain = nn.Parameter(torch.zeros(classes, channels))
        self.shift = nn.Parameter(torch.zeros(classes, channels))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        # The precision of the maps: float32 would widen them, and twice the memory is twice
        # the time.
        gain = embedding(labels, 1 + self.gain)[:, :, None, None].to(x.dtype)
        shift = embedding(labels, self.shift)[:, :, None, None].to(x.dtype)
        return torch.addcmul(shift, self.norm(x), gain)


class DcganGenerator(nn.Module):
    """Map a latent and a label to an image in [0, 1].

    A dense layer gives a small map. Rounds of upsampling, 3x3 convolution and conditional batch
    norm follow. Upsampling before a convolution leaves no checkerboard pattern, which transposed
    convolutions do.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        latent_dim: Dimension of the standard Gaussian latents [batch, latent_dim].
        channels: Channels of the last round. Each earlier round has twice as many.

    >>> net = DcganGenerator((3, 32, 32), classes=10, channels=8)
    >>> net(torch.zeros(2, net.latent_dim), torch.tensor([3, 7])).shape
    torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, latent_dim: int = 64, channels: int = 64
    ):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.latent_dim = latent_dim
        num_rounds = count_doublings(shape[1], shape[2])
        self.base_shape = (
            channels * 2**num_rounds,
            math.ceil(shape[1] / 2**num_rounds),
            math.ceil(shape[2] / 2**num_rounds),
        )
        layer_channels = [channels * 2**level for level in range(num_rounds, -1, -1)]
        self.dense = nn.Linear(latent_dim + classes, math.prod(self.base_shape))
        self.norms = nn.ModuleList(ConditionalBatchNorm(count, classes) for count in layer_channels)
        self.convs = nn.ModuleList(
            nn.Conv2d(in_channels, out_channels, 3, padding=1)
            for in_channels, out_channels in pairwise(layer_channels)
        )
        self.output_conv = nn.Conv2d(channels, shape[0], 3, padding=1)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        one_hot_labels = one_hot(labels, self.classes).to(latents.dtype)
        x = self.dense(torch.cat([latents, one_hot_labels], 1)).view(-1, *self.base_shape)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = conv(interpolate(norm(x, labels).relu(), scale_factor=2))
        x = self.output_conv(self.norms[-1](x, labels).relu())
        return x[:, :, : self.shape[1], : self.shape[2]].sigmoid()


class ProjectionCritic(nn.Module):
    """Map an image in [0, 1] and a label to one score.

    Convolutions and a sum over positions give features. The score is a dense layer of the
    features plus their projection on an embedding of the label.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        channels: Channels of the first convolution.

    >>> critic = ProjectionCritic((1, 28, 28), classes=10, channels=8)
    >>> critic(torch.zeros(2, 1, 28, 28), torch.tensor([3, 7])).shape
    torch.Size([2])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, channels: int = 64):
        super().__init__()
        num_halvings = count_doublings(shape[1], shape[2])
        layers = []
        in_channels = shape[0]
        for level in range(num_halvings + 1):
            layers.append(nn.Conv2d(in_channels, channels * 2**level, 3, padding=1))
            in_channels = channels * 2**level
            if level < num_halvings:
                layers.append(nn.Conv2d(in_channels, 2 * in_channels, 4, stride=2, padding=1))
                in_channels *= 2
        self.layers = nn.ModuleList(layers)
        self.output = nn.Linear(in_channels, 1)
        self.projection = nn.Linear(in_channels, classes, bias=False)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = 2 * images - 1
        for layer in self.layers:
            x = leaky_relu(layer(x), 0.1)
        x = x.sum((2, 3))
        return self.output(x)[:, 0] + (x * embedding(labels, self.projection.weight)).sum(1)


def gradient_penalty(scores: Tensor, images: Tensor) -> Tensor:
    r"""Compute the R1 gradient penalty (Mescheder et al. 2018), :math:`mean |\nabla_x D(x)|^2`.

    The gradient is with respect to pixels in [-1, 1], which is the range that a critic receives.
    The penalty can be differentiated once more.

    Args:
        scores: Scores of the images, [count].
        images: The images in [0, 1] that led to the scores, [count, ...]. They require gradients.

    Returns:
        The penalty, a scalar.

    >>> images = torch.zeros(3, 1, 2, 2, requires_grad=True)
    >>> gradient_penalty((2 * images - 1).sum((1, 2, 3)), images)
    tensor(4.)
    """
    (gradient,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
    return (gradient / 2).square().flatten(1).sum(1).mean()
