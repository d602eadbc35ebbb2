"""The two networks of a conditional deep convolutional GAN: a generator that knows its label, and a critic of bounded slope."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, embedding, interpolate, leaky_relu, linear, normalize, one_hot


def doublings(height: int, width: int) -> int:
    """How often a side can be halved without falling below 4 pixels: 8 px 1, 28 px 2, 32 px 3, 64 px 4."""
    return max(0, int(math.log2(min(height, width) / 4))) if min(height, width) >= 4 else 0


def doubled(x: Tensor) -> Tensor:
    """Maps [count, channels, height, width] with every place repeated in both directions, as wide as they come.

    >>> doubled(torch.tensor([[[[1.0, 2.0]]]])).tolist()
    [[[[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]]]]
    """
    with torch.autocast(x.device.type, enabled=False):  # autocast would widen the maps, and twice the memory is twice the time
        return interpolate(x, scale_factor=2)


class LabelledNorm(nn.Module):
    """Batch norm whose gain and shift belong to the label."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain, self.shift = (nn.Parameter(torch.zeros(classes, channels)) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        # As wide as the maps: float32 would widen these, and twice the memory is twice the time.
        gain, shift = (embedding(labels, each)[:, :, None, None].to(x.dtype) for each in (1 + self.gain, self.shift))
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
        self.shape, self.classes, self.code = (shape[0], shape[1], shape[2]), classes, code
        rounds = doublings(shape[1], shape[2])
        self.plane = (width * 2**rounds, math.ceil(shape[1] / 2**rounds), math.ceil(shape[2] / 2**rounds))
        widths = [width * 2**each for each in range(rounds, -1, -1)]
        self.dense = nn.Linear(code + classes, math.prod(self.plane))
        self.norms = nn.ModuleList(LabelledNorm(each, classes) for each in widths)
        self.layers = nn.ModuleList(nn.Conv2d(old, new, 3, padding=1) for old, new in pairwise(widths))
        self.last = nn.Conv2d(width, shape[0], 3, padding=1)

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        x = self.dense(torch.cat([codes, one_hot(labels, self.classes).to(codes.dtype)], 1)).view(-1, *self.plane)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = layer(doubled(norm(x, labels).relu()))
        x = self.last(self.norms[-1](x, labels).relu())
        return x[:, :, : self.shape[1], : self.shape[2]].sigmoid()


class ProjectionCritic(nn.Module):
    """Image in [0, 1] and label to one score: convolutions of norm 1 each, then a dense part plus a projection on the label.

    Every weight is divided by its largest singular value (spectral norm), found by one step of power iteration at each use, so that
    the slope of the score in the image is bounded whatever the generator does, without a second derivative.

    >>> ProjectionCritic((1, 28, 28), classes=10, width=8)(torch.zeros(2, 1, 28, 28), torch.tensor([3, 7])).shape
    torch.Size([2])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 64):
        super().__init__()
        rounds = doublings(shape[1], shape[2])
        layers, channels = [], shape[0]
        for each in range(rounds + 1):
            layers.append(nn.Conv2d(channels, width * 2**each, 3, padding=1))
            channels = width * 2**each
            if each < rounds:
                layers.append(nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1))
                channels *= 2
        self.layers = nn.ModuleList(layers)
        self.score, self.projection = nn.Linear(channels, 1), nn.Linear(channels, classes, bias=False)
        for place, layer in enumerate(self._weighted()):  # no randomness: any start that is not orthogonal to the answer will do
            self.register_buffer(f"direction{place}", normalize(torch.ones(len(layer.weight)), dim=0))

    def _weighted(self) -> list[Any]:
        return [*self.layers, self.score, self.projection]

    def _bounded(self) -> list[Tensor]:
        """The weights, each over its largest singular value."""
        result = []
        for place, layer in enumerate(self._weighted()):
            matrix, left = layer.weight.flatten(1), self.get_buffer(f"direction{place}")
            with torch.autocast(matrix.device.type, enabled=False):  # singular values want more digits than images do
                with torch.no_grad():
                    right = normalize(matrix.T @ left, dim=0)
                    if self.training:
                        left.copy_(normalize(matrix @ right, dim=0))
                    kept = left.clone()  # the next use changes the buffer, while the gradient of this one still needs it
                result.append(layer.weight / (kept @ matrix @ right))
        return result

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        *weights, score, projection = self._bounded()
        x = 2 * images - 1
        for layer, weight in zip(self._weighted(), weights, strict=False):
            x = leaky_relu(conv2d(x, weight, layer.bias, layer.stride, layer.padding), 0.1)
        x = x.sum((2, 3))
        return linear(x, score, self.score.bias)[:, 0] + (x * embedding(labels, projection)).sum(1)
