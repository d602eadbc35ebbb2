"""A critic for per-example gradients: convolutions as matrix products, no batch statistics.

No layer couples two images, so the gradient of a sum of losses is a sum of per-example gradients.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, linear, pad

NEGATIVE_SLOPE = 0.2  # of leaky ReLU, as in DCGAN


def count_halvings(height: int, width: int) -> int:
    """Count the halvings, rounded up, after which the shorter side is 4 pixels or less.

    >>> [count_halvings(side, side) for side in (8, 28, 32, 64)]
    [1, 3, 3, 4]
    """
    return max(0, math.ceil(math.log2(min(height, width) / 4)))


def halve_side(side: int, times: int) -> int:
    """Return a side after so many halvings, each rounded up."""
    return math.ceil(side / 2**times)


def convolve_as_matmul(images: Tensor, layer: Any) -> Tensor:
    """Apply a 4x4 convolution of stride 2 as one matrix product.

    The per-example weight gradient of a convolution would be one small convolution for each image.
    That of a matrix product is one batched matrix product, which a GPU computes at full speed and
    in a fixed order. Windows are not unfolded, since that would be one GPU launch for each image.
    Instead, blocks of 2x2 pixels become channels, and a window is then four neighbouring blocks.

    Args:
        images: Images or maps, [batch, in_channels, height, width].
        layer: Linear layer with weights [out_channels, 16 * in_channels].

    Returns:
        Maps of half the sides, rounded up: [batch, out_channels, height', width'].
    """
    (height, width) = images.shape[2:]
    out_height = halve_side(height, 1)
    out_width = halve_side(width, 1)
    padded = pad(images, (1, 1 + width % 2, 1, 1 + height % 2))
    blocks = padded.unflatten(3, (out_width + 1, 2)).unflatten(2, (out_height + 1, 2))
    # [batch, in_channels * 2 * 2, out_height + 1, out_width + 1]
    blocks = blocks.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    windows = torch.cat(
        [
            blocks[:, :, row : row + out_height, column : column + out_width]
            for row in (0, 1)
            for column in (0, 1)
        ],
        1,
    )
    maps = layer.weight @ windows.flatten(2) + layer.bias[:, None]
    return maps.unflatten(2, (out_height, out_width))


def build_downsampling_layers(
    in_channels: int, first_channels: int, num_layers: int
) -> nn.ModuleList:
    """Build linear layers for `convolve_as_matmul`.

    Weights are [out_channels, 16 * in_channels], in the order of the windows that
    `convolve_as_matmul` forms. The gradient of each image then needs no rearranging.

    Args:
        in_channels: Channels of the images.
        first_channels: Output channels of the first layer. Each further layer has twice as many.
        num_layers: Number of layers.

    Returns:
        The layers.
    """
    channels = [in_channels, *(first_channels * 2**level for level in range(num_layers))]
    return nn.ModuleList(nn.Linear(16 * inputs, outputs) for inputs, outputs in pairwise(channels))


def count_critic_multiplications(shape: tuple[int, int, int], channels: int) -> float:
    """Count the multiplications of one image's forward pass through a `PrivateCritic`.

    Args:
        shape: Channels, height and width of the images.
        channels: Channels after the first layer.

    Returns:
        The number of multiplications in the convolutions.

    >>> count_critic_multiplications((1, 8, 8), 32)
    8192.0
    """
    in_channels, height, width = shape
    num_layers = count_halvings(height, width)
    # Each weight of a layer is used once per position. Each further layer has four times the
    # weights and a quarter of the positions.
    weights = in_channels + 2 * channels * max(0, num_layers - 1) / 4
    return height * width / 4 * 16 * channels * weights


class PrivateCritic(nn.Module):
    """Map an image in [0, 1] and a label to one score, for training with noisy gradients.

    Strided convolutions without norms give features. The score is a dense output plus the output
    of the label's class. The score of an image depends on that image alone, so there is no batch
    norm. The critic is small: the norm of the gradient noise grows with the square root of the
    number of weights, while the signal does not.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        channels: Channels after the first layer.

    >>> critic = PrivateCritic((1, 28, 28), classes=10)
    >>> critic(torch.zeros(2, 1, 28, 28), torch.tensor([3, 7])).shape
    torch.Size([2])
    >>> sum(parameter.numel() for parameter in critic.parameters())
    187115
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, channels: int = 32):
        super().__init__()
        self.classes = classes
        num_layers = count_halvings(*shape[1:])
        self.layers = build_downsampling_layers(shape[0], channels, num_layers)
        last_channels = channels * 2 ** (num_layers - 1) if num_layers else shape[0]
        num_positions = halve_side(shape[1], num_layers) * halve_side(shape[2], num_layers)
        self.output = nn.Linear(last_channels * num_positions, 1 + classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = 2 * images - 1
        for layer in self.layers:
            x = leaky_relu(convolve_as_matmul(x, layer), NEGATIVE_SLOPE)
        outputs = linear(x.flatten(1), self.output.weight, self.output.bias)
        # A mask instead of indexing keeps the order of sums fixed.
        is_label = torch.arange(self.classes, device=labels.device) == labels[:, None]
        return outputs[:, 0] + (outputs[:, 1:] * is_label).sum(1)
