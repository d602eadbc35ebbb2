"""Networks whose gradients are taken record by record: convolutions as plain matrix products, nothing that couples two images."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, linear, normalize, one_hot, pad

from privot.nets.generators.dense import cosines

SLOPE = 0.2  # of leaky ReLU, as in DCGAN


def halvings(height: int, width: int) -> int:
    """How often the shorter side can be halved, rounding up, until it is 4 pixels or less: 8 px 1, 28 px 3, 32 px 3, 64 px 4."""
    return max(0, math.ceil(math.log2(min(height, width) / 4)))


def halved(size: int, times: int) -> int:
    """A side after so many halvings, rounded up each time."""
    return math.ceil(size / 2**times)


def convolved(images: Tensor, layer: Any) -> Tensor:
    """A 4x4 convolution of stride 2 as one matrix product: [batch, in, height, width] to [batch, out, half, half].

    The gradient of a convolution's weights for each image alone would be one small convolution an image; that of a matrix product is
    one batched matrix product, which a GPU does at full speed and in a fixed order. Windows are not unfolded (on a GPU that is one
    launch an image): squares of 2x2 pixels become channels, and a window is then four neighbours.
    """
    (height, width) = images.shape[2:]
    (down, across) = (halved(each, 1) for each in images.shape[2:])
    squares = (
        pad(images, (1, 1 + width % 2, 1, 1 + height % 2))
        .unflatten(3, (across + 1, 2))
        .unflatten(2, (down + 1, 2))
    )
    squares = squares.permute(0, 1, 3, 5, 2, 4).flatten(
        1, 3
    )  # [batch, in * 2 * 2, down + 1, across + 1]
    places = torch.cat(
        [
            squares[:, :, row : row + down, column : column + across]
            for row in (0, 1)
            for column in (0, 1)
        ],
        1,
    )
    return (layer.weight @ places.flatten(2) + layer.bias[:, None]).unflatten(2, (down, across))


def halving_layers(channels: int, width: int, rounds: int) -> nn.ModuleList:
    """Layers for `convolved`: ``width`` channels after the first, twice as many after each further one.

    Weights are [out, 16 * in], in the order of the windows that `convolved` makes: so the gradient of each image lies as it is needed.
    """
    sizes = [channels, *(width * 2**each for each in range(rounds))]
    return nn.ModuleList(nn.Linear(16 * old, new) for old, new in pairwise(sizes))


def critic_work(shape: tuple[int, int, int], width: int) -> float:
    """Multiplications of one image's way through the convolutions of a `PrivateCritic`.

    Args:
        shape: Channels, height and width of the images.
        width: Channels after the first layer.

    Returns:
        The number of multiplications.

    >>> critic_work((1, 8, 8), 32)
    8192.0
    """
    channels, height, across = shape
    layers = halvings(height, across)
    # Each weight of a layer is used once a place. A further layer has four times the weights and a quarter of the places.
    return height * across / 4 * 16 * width * (channels + 2 * width * max(0, layers - 1) / 4)


class PrivateCritic(nn.Module):
    """Image in [0, 1] and label to one score: strided convolutions without norms, then a dense part plus one that belongs to the label.

    There is no batch norm, since an image's score may depend on that image alone. It is small on purpose: the noise in its gradient
    grows with the root of the number of weights, the signal does not.

    >>> critic = PrivateCritic((1, 28, 28), classes=10)
    >>> critic(torch.zeros(2, 1, 28, 28), torch.tensor([3, 7])).shape, sum(each.numel() for each in critic.parameters())
    (torch.Size([2]), 187115)
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 32):
        super().__init__()
        self.classes = classes
        rounds = halvings(*shape[1:])
        self.layers = halving_layers(shape[0], width, rounds)
        channels = width * 2 ** (rounds - 1) if rounds else shape[0]
        self.score = nn.Linear(
            channels * halved(shape[1], rounds) * halved(shape[2], rounds), 1 + classes
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = 2 * images - 1
        for layer in self.layers:
            x = leaky_relu(convolved(x, layer), SLOPE)
        scores = linear(x.flatten(1), self.score.weight, self.score.bias)
        known = (
            torch.arange(self.classes, device=labels.device) == labels[:, None]
        )  # [batch, classes]; not indexed: order stays fixed
        return scores[:, 0] + (scores[:, 1:] * known).sum(1)


class Encoder(nn.Module):
    """Image in [0, 1] to a code on the sphere of radius sqrt(code), by two dense layers from its lowest ``waves`` x ``waves`` cosines.

    >>> [round(each.item(), 3) for each in Encoder((1, 28, 28), code=16)(torch.rand(2, 1, 28, 28)).norm(dim=1)]
    [4.0, 4.0]
    """

    def __init__(self, shape: tuple[int, int, int], code: int, hidden: int = 128, waves: int = 14):
        super().__init__()
        waves_down = min(waves, shape[1])
        waves_across = min(waves, shape[2])
        self.first = nn.Linear(shape[0] * waves_down * waves_across, hidden)
        self.last = nn.Linear(hidden, code)
        # Scaled so that the coefficients of an image are about as large as its pixels.
        self.register_buffer(
            "rows", cosines(shape[1], waves_down) / math.sqrt(shape[1]), persistent=False
        )
        self.register_buffer(
            "columns", cosines(shape[2], waves_across) / math.sqrt(shape[2]), persistent=False
        )

    def forward(self, images: Tensor) -> Tensor:
        waves = (self.rows.T @ (2 * images - 1) @ self.columns).flatten(1)  # type: ignore[operator]
        return on_sphere(self.last(leaky_relu(self.first(waves), SLOPE)))


class Decoder(nn.Module):
    """A code to the logits of an image's pixels, drawn in its lowest ``waves`` x ``waves`` cosines: the other way round.

    >>> Decoder((1, 28, 28), code=16)(torch.zeros(2, 16)).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(self, shape: tuple[int, int, int], code: int, hidden: int = 128, waves: int = 14):
        super().__init__()
        self.shape = (shape[0], min(waves, shape[1]), min(waves, shape[2]))
        self.first = nn.Linear(code, hidden)
        self.last = nn.Linear(hidden, math.prod(self.shape))
        self.register_buffer("rows", cosines(shape[1], self.shape[1]), persistent=False)
        self.register_buffer("columns", cosines(shape[2], self.shape[2]), persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        waves = self.last(leaky_relu(self.first(codes), SLOPE)).unflatten(1, self.shape)
        return self.rows @ waves @ self.columns.T


class Autoencoder(nn.Module):
    """An image to the logits of itself, through a code."""

    def __init__(self, shape: tuple[int, int, int], code: int, hidden: int = 128, waves: int = 14):
        super().__init__()
        self.encoder = Encoder(shape, code, hidden, waves)
        self.decoder = Decoder(shape, code, hidden, waves)

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


class DecodedGenerator(nn.Module):
    """Code and label to a code of an autoencoder, and from there by its decoder to an image in [0, 1].

    ``inner`` is the autoencoder's code, ``drawing`` its hidden layer. Codes are standard Gaussian, [batch, code].

    >>> net = DecodedGenerator((1, 28, 28), classes=10)
    >>> net(torch.zeros(2, net.code), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        code: int = 5,
        hidden: int = 256,
        inner: int = 16,
        drawing: int = 128,
        waves: int = 14,
    ):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.code = code
        self.layers = nn.Sequential(
            nn.Linear(code + classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, inner),
        )
        self.decoder = Decoder(self.shape, inner, drawing, waves)

    def coded(self, codes: Tensor, labels: Tensor) -> Tensor:
        """What the decoder will be given, on its sphere: [batch, inner]."""
        return on_sphere(
            self.layers(torch.cat([codes, one_hot(labels, self.classes).to(codes.dtype)], 1))
        )

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        return self.decoder(self.coded(codes, labels)).sigmoid()


def on_sphere(codes: Tensor) -> Tensor:
    """Scaled to norm sqrt(dim): kernel widths then mean the same for every encoder."""
    return normalize(codes, dim=1) * math.sqrt(codes.shape[1])
