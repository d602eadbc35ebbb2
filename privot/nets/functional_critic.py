"""A WGAN-GP critic as functions of one flat vector of weights.

Every function computes one critic. ``torch.func.vmap`` maps it over thousands of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import leaky_relu, normalize

from privot.nets.flat_weights import Shapes, draw_weights, unflatten_weights
from privot.nets.vmap_conv import convolve

SQRT_EPS = 1e-12  # added under a square root, so that its gradient at zero is finite
GRADIENT_PENALTY_WEIGHT = 10  # as in WGAN-GP
DRIFT_WEIGHT = 0.001  # of the squared scores of real images


@dataclass(frozen=True)
class Critic:
    """A WGAN-GP critic: maps an image in [0, 1] and its label to one score.

    The layers are 5x5 convolutions of stride 2, then a dense layer plus a projection on the label.
    Each convolution is divided by its largest singular value (spectral norm), which power iteration
    approximates; ``left_vectors`` holds the left singular vectors of all convolutions. The dense
    layer and the projection are not normalized and start at 0. A new critic therefore has no input
    gradient, and its first one points toward the data.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        channels: Channels after the first convolution. Each further one has twice as many.

    >>> critic = Critic((1, 28, 28), classes=10, channels=8)
    >>> weights, left_vectors = critic.init_weights(3, torch.Generator().manual_seed(0))
    >>> images, labels = torch.rand(3, 2, 1, 28, 28), torch.zeros(3, 2, dtype=torch.int64)
    >>> torch.func.vmap(critic.score)(weights, left_vectors, images, labels).shape
    torch.Size([3, 2])
    """

    shape: tuple[int, int, int]
    classes: int
    channels: int = 64

    @property
    def map_sides(self) -> list[tuple[int, int]]:
        """Height and width of the image and of the maps after each convolution.

        No side falls below 3 unless that of the image does.
        """
        shorter = min(self.shape[1:])
        num_convs = max(1, int(math.log2(shorter / 3.5))) if shorter > 3 else 1
        sides = accumulate(
            range(num_convs),
            lambda side, _: ((side[0] + 1) // 2, (side[1] + 1) // 2),
            initial=self.shape[1:],
        )
        return [(height, width) for height, width in sides]

    @property
    def parameter_shapes(self) -> Shapes:
        """Shapes of the parameters by name, in the order of the flat weights."""
        num_convs = len(self.map_sides) - 1
        channels = [self.shape[0], *(self.channels * 2**level for level in range(num_convs))]
        shapes: Shapes = {}
        for level, (in_channels, out_channels) in enumerate(pairwise(channels)):
            shapes[f"conv{level}"] = (out_channels, in_channels, 5, 5)
            shapes[f"bias{level}"] = (out_channels,)
        num_features = channels[-1] * math.prod(self.map_sides[-1])
        shapes["dense"] = (1, num_features)
        shapes["dense_bias"] = (1,)
        shapes["label_projection"] = (self.classes, num_features)
        return shapes

    @property
    def flops(self) -> int:
        """Floating-point operations of the convolutions for one image."""
        return sum(
            2 * math.prod(shape) * math.prod(side)
            for shape, side in zip(self._conv_shapes().values(), self.map_sides[1:], strict=True)
        )

    def init_weights(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw the weights of new critics.

        Args:
            count: Number of critics.
            generator: Source of the random numbers.

        Returns:
            Weights [count, num_weights], and left singular vectors to start power iteration
            from, [count, rows of all convolutions].
        """
        weights = draw_weights(count, self.parameter_shapes, generator)
        num_conv_weights = sum(
            math.prod(shape)
            for name, shape in self.parameter_shapes.items()
            if name.startswith(("conv", "bias"))
        )
        weights[:, num_conv_weights:] = 0
        return weights, torch.randn(count, sum(self._conv_rows()), generator=generator)

    def _conv_shapes(self) -> Shapes:
        return {
            name: shape for name, shape in self.parameter_shapes.items() if name.startswith("conv")
        }

    def _conv_rows(self) -> list[int]:
        """Return the rows of each convolution's matrix: its output channels."""
        return [shape[0] for shape in self._conv_shapes().values()]

    def power_iterate(self, weights: Tensor, left_vectors: Tensor) -> Tensor:
        """Apply one step of power iteration to every convolution.

        Args:
            weights: Flat weights of one critic.
            left_vectors: Left singular vectors of its convolutions, one after another.

        Returns:
            The next left singular vectors.
        """
        parameters = unflatten_weights(weights, self.parameter_shapes)
        vectors = []
        left_per_conv = left_vectors.split(self._conv_rows())
        for name, left in zip(self._conv_shapes(), left_per_conv, strict=True):
            matrix = parameters[name].flatten(1)
            vectors.append(normalize(matrix @ normalize(matrix.T @ left, dim=0), dim=0))
        return torch.cat(vectors)

    def score(
        self, weights: Tensor, left_vectors: Tensor, images: Tensor, labels: Tensor
    ) -> Tensor:
        """Score images by one critic.

        Args:
            weights: Flat weights of the critic.
            left_vectors: Left singular vectors of its convolutions.
            images: Images in [0, 1], [batch, channels, height, width].
            labels: Class labels, [batch].

        Returns:
            Scores, [batch].
        """
        return self._compute_scores(self._normalize_convs(weights, left_vectors), images, labels)

    def _normalize_convs(self, weights: Tensor, left_vectors: Tensor) -> dict[str, Tensor]:
        """Return the parameters of one critic, with convolutions of spectral norm 1."""
        parameters = unflatten_weights(weights, self.parameter_shapes)
        left_per_conv = left_vectors.split(self._conv_rows())
        for name, left in zip(self._conv_shapes(), left_per_conv, strict=True):
            matrix = parameters[name].flatten(1)
            right = normalize(matrix.detach().T @ left, dim=0)
            spectral_norm = normalize(left, dim=0) @ matrix @ right
            parameters[name] = parameters[name] / (spectral_norm + SQRT_EPS)
        return parameters

    def _compute_scores(
        self, parameters: dict[str, Tensor], images: Tensor, labels: Tensor
    ) -> Tensor:
        """Score images with normalized parameters: [batch].

        Args:
            parameters: Parameters of one critic, with normalized convolutions.
            images: Images in [0, 1], [batch, channels, height, width].
            labels: Class labels, [batch].

        Returns:
            Scores, [batch].
        """
        x = 2 * images - 1
        for level in range(len(self.map_sides) - 1):
            x = convolve(x, parameters[f"conv{level}"], parameters[f"bias{level}"], 2, 2)
            x = leaky_relu(x, 0.1)
        x = x.flatten(1)
        projections = (x * parameters["label_projection"][labels]).sum(1)
        return x @ parameters["dense"][0] + parameters["dense_bias"] + projections

    def loss(
        self,
        weights: Tensor,
        left_vectors: Tensor,
        real: Tensor,
        fake: Tensor,
        labels: Tensor,
        mix_weights: Tensor,
    ) -> Tensor:
        r"""Compute the WGAN-GP loss of one critic.

        .. math:: E D(fake) - E D(real) + 10 E(|\nabla D(mid)| - 1)^2 + 0.001 E D(real)^2

        where ``mid`` lies between real and fake images.

        Args:
            weights: Flat weights of the critic.
            left_vectors: Left singular vectors of its convolutions.
            real: Real images in [0, 1], [batch, channels, height, width].
            fake: Generated images of the same labels and shape.
            labels: Class labels, [batch].
            mix_weights: Weight of the real image in ``mid``, in [0, 1]: [batch].

        Returns:
            The loss, a scalar.
        """
        # Normalized once for scores and penalty, since it passes over all weights many times.
        parameters = self._normalize_convs(weights, left_vectors)
        batch = len(labels)
        scores = self._compute_scores(parameters, torch.cat([real, fake]), labels.repeat(2))
        mid = torch.lerp(fake, real, mix_weights.view(-1, 1, 1, 1))
        input_gradient = grad(lambda x: self._compute_scores(parameters, x, labels).sum())(mid)
        gradient_norms = (input_gradient.flatten(1).square().sum(1) + SQRT_EPS).sqrt()
        penalty = (gradient_norms - 1).square().mean()
        gap = scores[batch:].mean() - scores[:batch].mean()
        drift = scores[:batch].square().mean()
        return gap + GRADIENT_PENALTY_WEIGHT * penalty + DRIFT_WEIGHT * drift
