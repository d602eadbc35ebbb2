"""A small generator as functions of one flat vector of weights, for the warm-up of critics.

Every function computes one generator. ``torch.func.vmap`` maps it over thousands of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate, leaky_relu

from privot.nets.flat_weights import Shapes, draw_weights, unflatten_weights
from privot.nets.vmap_conv import convolve


@dataclass(frozen=True)
class TinyGenerator:
    """A small generator for warm-up, thrown away afterwards.

    A dense layer gives a small map. Two rounds of upsampling and 3x3 convolution follow.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        latent_dim: Dimension of the latents.
        channels: Channels of the second map; the first has twice as many.

    >>> generator = TinyGenerator((1, 28, 28), classes=10)
    >>> weights = generator.init_weights(1, torch.Generator().manual_seed(0))[0]
    >>> latents = torch.zeros(2, generator.latent_dim)
    >>> generator.generate(weights, latents, torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    shape: tuple[int, int, int]
    classes: int
    latent_dim: int = 16
    channels: int = 16

    @property
    def base_shape(self) -> tuple[int, int, int]:
        """Shape of the first map."""
        return 2 * self.channels, math.ceil(self.shape[1] / 4), math.ceil(self.shape[2] / 4)

    @property
    def parameter_shapes(self) -> Shapes:
        """Shapes of the parameters by name, in the order of the flat weights."""
        return {
            "dense": (math.prod(self.base_shape), self.latent_dim + self.classes),
            "dense_bias": (math.prod(self.base_shape),),
            "conv0": (self.channels, 2 * self.channels, 3, 3),
            "bias0": (self.channels,),
            "conv1": (self.shape[0], self.channels, 3, 3),
            "bias1": (self.shape[0],),
        }

    def init_weights(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the weights of ``count`` new generators, [count, num_weights]."""
        return draw_weights(count, self.parameter_shapes, generator)

    def generate(self, weights: Tensor, latents: Tensor, labels: Tensor) -> Tensor:
        """Generate images with one generator.

        Args:
            weights: Flat weights of the generator.
            latents: Latents, [batch, latent_dim].
            labels: Class labels, [batch].

        Returns:
            Images in [0, 1], [batch, channels, height, width].
        """
        parameters = unflatten_weights(weights, self.parameter_shapes)
        one_hot = torch.eye(self.classes, dtype=latents.dtype, device=latents.device)[labels]
        inputs = torch.cat([latents, one_hot], 1)
        x = inputs @ parameters["dense"].T + parameters["dense_bias"]
        x = interpolate(leaky_relu(x, 0.1).view(-1, *self.base_shape), scale_factor=2)
        x = leaky_relu(convolve(x, parameters["conv0"], parameters["bias0"], padding=1), 0.1)
        x = interpolate(x, scale_factor=2)
        x = convolve(x, parameters["conv1"], parameters["bias1"], padding=1)
        return x[:, :, : self.shape[1], : self.shape[2]].sigmoid()
