"""An auto-encoder for per-example gradients: dense layers on the lowest DCT coefficients.

It has few weights, since the norm of the gradient noise grows with the square root of their number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, normalize, one_hot

from privot.nets.dp_critic import NEGATIVE_SLOPE
from privot.nets.generators.dense import scaled_dct_basis


class Encoder(nn.Module):
    """Map an image in [0, 1] to a latent on the sphere of radius sqrt(latent_dim).

    Two dense layers map the lowest DCT coefficients of the image to the latent.

    Args:
        shape: Channels, height and width of an image.
        latent_dim: Dimension of the latent.
        hidden_dim: Units of the hidden layer.
        num_frequencies: DCT frequencies per side, at most the side.

    >>> latents = Encoder((1, 28, 28), latent_dim=16)(torch.rand(2, 1, 28, 28))
    >>> [round(norm.item(), 3) for norm in latents.norm(dim=1)]
    [4.0, 4.0]
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        latent_dim: int,
        hidden_dim: int = 128,
        num_frequencies: int = 14,
    ):
        super().__init__()
        rows = min(num_frequencies, shape[1])
        columns = min(num_frequencies, shape[2])
        self.hidden_layer = nn.Linear(shape[0] * rows * columns, hidden_dim)
        self.output = nn.Linear(hidden_dim, latent_dim)
        # Scaled so that the coefficients of an image are about as large as its pixels.
        row_basis = scaled_dct_basis(shape[1], rows) / math.sqrt(shape[1])
        column_basis = scaled_dct_basis(shape[2], columns) / math.sqrt(shape[2])
        self.row_basis: Tensor
        self.column_basis: Tensor
        self.register_buffer("row_basis", row_basis, persistent=False)
        self.register_buffer("column_basis", column_basis, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        coefficients = (self.row_basis.T @ (2 * images - 1) @ self.column_basis).flatten(1)
        hidden = leaky_relu(self.hidden_layer(coefficients), NEGATIVE_SLOPE)
        return project_to_sphere(self.output(hidden))


class Decoder(nn.Module):
    """Map a latent to the logits of an image's pixels, through its lowest DCT coefficients.

    Args:
        shape: Channels, height and width of an image.
        latent_dim: Dimension of the latent.
        hidden_dim: Units of the hidden layer.
        num_frequencies: DCT frequencies per side, at most the side.

    >>> Decoder((1, 28, 28), latent_dim=16)(torch.zeros(2, 16)).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        latent_dim: int,
        hidden_dim: int = 128,
        num_frequencies: int = 14,
    ):
        super().__init__()
        rows = min(num_frequencies, shape[1])
        columns = min(num_frequencies, shape[2])
        self.coefficient_shape = (shape[0], rows, columns)
        self.hidden_layer = nn.Linear(latent_dim, hidden_dim)
        self.output = nn.Linear(hidden_dim, math.prod(self.coefficient_shape))
        self.row_basis: Tensor
        self.column_basis: Tensor
        self.register_buffer("row_basis", scaled_dct_basis(shape[1], rows), persistent=False)
        self.register_buffer("column_basis", scaled_dct_basis(shape[2], columns), persistent=False)

    def forward(self, latents: Tensor) -> Tensor:
        hidden = leaky_relu(self.hidden_layer(latents), NEGATIVE_SLOPE)
        coefficients = self.output(hidden).unflatten(1, self.coefficient_shape)
        return self.row_basis @ coefficients @ self.column_basis.T


class Autoencoder(nn.Module):
    """Map an image through a latent to the logits of its own pixels.

    Args:
        shape: Channels, height and width of an image.
        latent_dim: Dimension of the latent.
        hidden_dim: Units of the hidden layers of encoder and decoder.
        num_frequencies: DCT frequencies per side, at most the side.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        latent_dim: int,
        hidden_dim: int = 128,
        num_frequencies: int = 14,
    ):
        super().__init__()
        self.encoder = Encoder(shape, latent_dim, hidden_dim, num_frequencies)
        self.decoder = Decoder(shape, latent_dim, hidden_dim, num_frequencies)

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


class AutoencoderGenerator(nn.Module):
    """Map a latent and a label to a latent of an auto-encoder, and decode it to an image in [0, 1].

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        latent_dim: Dimension of the standard Gaussian latents [batch, latent_dim].
        hidden_dim: Units of the hidden dense layers.
        autoencoder_dim: Dimension of the auto-encoder's latents.
        autoencoder_hidden_dim: Units of the decoder's hidden layer.
        num_frequencies: DCT frequencies per side of the decoder.

    >>> net = AutoencoderGenerator((1, 28, 28), classes=10)
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
        autoencoder_hidden_dim: int = 128,
        num_frequencies: int = 14,
    ):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.latent_dim = latent_dim
        self.layers = nn.Sequential(
            nn.Linear(latent_dim + classes, hidden_dim),
            nn.BatchNorm1d(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.BatchNorm1d(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, autoencoder_dim),
        )
        self.decoder: nn.Module = Decoder(
            self.shape, autoencoder_dim, autoencoder_hidden_dim, num_frequencies
        )

    def generate_latents(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Return the auto-encoder latents, which are the decoder's inputs.

        Args:
            latents: Standard Gaussian latents, [batch, latent_dim].
            labels: Class labels, [batch].

        Returns:
            Latents on the sphere, [batch, autoencoder_dim].
        """
        one_hot_labels = one_hot(labels, self.classes).to(latents.dtype)
        return project_to_sphere(self.layers(torch.cat([latents, one_hot_labels], 1)))

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        return self.decoder(self.generate_latents(latents, labels)).sigmoid()


def project_to_sphere(latents: Tensor) -> Tensor:
    """Scale latents [batch, dim] to norm sqrt(dim).

    Kernel bandwidths then have the same meaning for every encoder.
    """
    return normalize(latents, dim=1) * math.sqrt(latents.shape[1])
