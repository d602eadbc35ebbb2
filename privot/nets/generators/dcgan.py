"""The two networks of a conditional deep convolutional GAN: a generator that knows its label, and a critic."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, interpolate, leaky_relu, one_hot


def doublings(height: int, width: int) -> int:
    """How often a side can be halved without falling below 4 pixels: 8 px 1, 28 px 2, 32 px 3, 64 px 4."""
    return max(0, int(math.log2(min(height, width) / 4))) if min(height, width) >= 4 else 0


class LabelledNorm(nn.Module):
    """Batch norm whose gain and shift belong to the label."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain, self.shift = (nn.Parameter(torch.zeros(classes, channels)) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        # As wide as the maps: float32 would widen these, and twice the memory is twice the time.
        gain, shift = (
            embedding(labels, each)[:, :, None, None].to(x.dtype)
            for each in (1 + self.gain, self.shift)
        )
        return torch.addcmul(shift, self.norm(x), gain)


class DeepConvGenerator(nn.Module):
    """Code and label to an image in [0, 1]: a dense layer to a small plane, then rounds of (upsample, 3x3 convolution, labelled norm).

    ``shape`` is (channels, height, width); codes are standard Gaussian, [batch, code]. ``width`` counts the channels of the last
    round, each earlier one has twice as many. Upsampling and convolving leaves no chequered pattern, as transposed convolutions do.

    >>> net = DeepConvGenerator((3, 32, 32), classes=10, width=8)
    >>> net(torch.zeros(2, net.code), torch.tensor([3, 7])).shape
    torch.Size([2, 3, 32, 32])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, code: int = 64, width: int = 64):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.code = code
        rounds = doublings(shape[1], shape[2])
        self.plane = (
            width * 2**rounds,
            math.ceil(shape[1] / 2**rounds),
            math.ceil(shape[2] / 2**rounds),
        )
        widths = [width * 2**each for each in range(rounds, -1, -1)]
        self.dense = nn.Linear(code + classes, math.prod(self.plane))
        self.norms = nn.ModuleList(LabelledNorm(each, classes) for each in widths)
        self.layers = nn.ModuleList(
            nn.Conv2d(old, new, 3, padding=1) for old, new in pairwise(widths)
        )
        self.last = nn.Conv2d(width, shape[0], 3, padding=1)

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        x = self.dense(torch.cat([codes, one_hot(labels, self.classes).to(codes.dtype)], 1)).view(
            -1, *self.plane
        )
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = layer(interpolate(norm(x, labels).relu(), scale_factor=2))
        x = self.last(self.norms[-1](x, labels).relu())
        return x[:, :, : self.shape[1], : self.shape[2]].sigmoid()


class ProjectionCritic(nn.Module):
    """Image in [0, 1] and label to one score: convolutions, a sum over places, then a dense part plus a projection on the label.

    >>> ProjectionCritic((1, 28, 28), classes=10, width=8)(torch.zeros(2, 1, 28, 28), torch.tensor([3, 7])).shape
    torch.Size([2])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 64):
        super().__init__()
        rounds = doublings(shape[1], shape[2])
        layers = []
        channels = shape[0]
        for each in range(rounds + 1):
            layers.append(nn.Conv2d(channels, width * 2**each, 3, padding=1))
            channels = width * 2**each
            if each < rounds:
                layers.append(nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1))
                channels *= 2
        self.layers = nn.ModuleList(layers)
        self.score = nn.Linear(channels, 1)
        self.projection = nn.Linear(channels, classes, bias=False)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = 2 * images - 1
        for layer in self.layers:
            x = leaky_relu(layer(x), 0.1)
        x = x.sum((2, 3))
        return self.score(x)[:, 0] + (x * embedding(labels, self.projection.weight)).sum(1)


def steepness(scores: Tensor, images: Tensor) -> Tensor:
    r"""How steep scores are at their images: the mean of |\nabla_x D(x)|^2, for pixels in [-1, 1] as a critic sees them; a scalar.

    ``images`` [count, ...] in [0, 1] led to ``scores`` [count] and asked for gradients. It can be differentiated once more, for R1
    (Mescheder et al. 2018).

    >>> x = torch.zeros(3, 1, 2, 2, requires_grad=True)
    >>> steepness((2 * x - 1).sum((1, 2, 3)), x)
    tensor(4.)
    """
    (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
    return (slope / 2).square().flatten(1).sum(1).mean()
