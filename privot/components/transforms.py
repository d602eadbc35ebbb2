r"""Fixed linear transforms between images and short vectors, which cost no privacy.

A transform is :math:`z = w \odot D^T C(x - g) A`. The columns of D and A are orthonormal: cosines
or wavelets of each side, the coarsest first. g is a public gray level, C turns colors into
brightness and two color differences, and the weights w share the ball out over the frequencies.
Without weights the transform is orthonormal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from privot.components.dct import dct_basis
from privot.errors import SettingError

# By number of channels: the gray level subtracted from every pixel, a guess made without any data.
GRAY_LEVELS = {1: 0.2, 3: 0.45}
TRANSFORMS = ("cosines", "wavelets", "haar")
# Low-pass filters; "wavelets" are Daubechies' filters of four coefficients.
WAVELET_FILTERS = {
    "haar": [math.sqrt(0.5), math.sqrt(0.5)],
    "wavelets": [
        (1 + 3**0.5) / 32**0.5,
        (3 + 3**0.5) / 32**0.5,
        (3 - 3**0.5) / 32**0.5,
        (1 - 3**0.5) / 32**0.5,
    ],
}


class ImageTransform(NamedTuple):
    """A fixed linear transform; its points have channels * p * q dimensions.

    Attributes:
        row_basis: Orthonormal columns [height, p].
        column_basis: Orthonormal columns [width, q].
        weights: Weight of each coefficient [p, q].
        gray_level: Value subtracted from every pixel.
        color_basis: Orthonormal matrix [channels, channels].

    >>> transform = build_image_transform("cosines", (1, 8, 8), 8)
    >>> image = torch.rand(1, 8, 8)
    >>> torch.allclose(transform.decode_point(transform.encode_image(image), 1), image, atol=1e-6)
    True
    """

    row_basis: Tensor
    column_basis: Tensor
    weights: Tensor
    gray_level: float
    color_basis: Tensor

    def dim(self, channels: int) -> int:
        """Return the dimension of a point."""
        return channels * self.weights.numel()

    def encode_image(self, image: Tensor) -> Tensor:
        """Encode images [..., channels, height, width] to points [..., dim]."""
        colors = (self.color_basis @ (image - self.gray_level).flatten(-2)).view(image.shape)
        return (self.row_basis.T @ colors @ self.column_basis * self.weights).flatten(-3)

    def decode_point(self, point: Tensor, channels: int) -> Tensor:
        """Decode points [..., dim] to images [..., channels, height, width], not clamped."""
        coefficients = point.unflatten(-1, (channels, *self.weights.shape)) / self.weights
        colors = self.row_basis @ coefficients @ self.column_basis.T
        return (self.color_basis.T @ colors.flatten(-2)).view(colors.shape) + self.gray_level

    def build_thumbnail_basis(self) -> Tensor:
        """Return the DCT basis that shows a channel's coefficients as a thumbnail of p x q pixels.

        Returns:
            An orthonormal matrix [p * q, p * q].

        >>> basis = build_image_transform("cosines", (1, 8, 8), 4).build_thumbnail_basis()
        >>> torch.allclose(basis.T @ basis, torch.eye(16), atol=1e-6)
        True
        """
        height, width = self.weights.shape
        return torch.kron(dct_basis(height, height), dct_basis(width, width)).to(self.weights)

    def to(self, device: torch.device) -> ImageTransform:
        """Move the tensors to a device."""
        return ImageTransform(
            self.row_basis.to(device),
            self.column_basis.to(device),
            self.weights.to(device),
            self.gray_level,
            self.color_basis.to(device),
        )


def build_image_transform(
    transform: str,
    shape: tuple[int, int, int],
    num_frequencies: int,
    fine_weight: float = 0.0,
    gray_level: float = 0.0,
) -> ImageTransform:
    r"""Build the transform to the coarsest cosines or wavelets of each side.

    A `fine_weight` above 0 makes fine coefficients larger before the ball clips the point, so that
    noise affects them less: :math:`w_f \propto (1+|f|^2)^{fine\_weight/2}`. The weights are scaled
    so that an image whose coefficients fall off as :math:`1/|f|` keeps its norm.

    Args:
        transform: "cosines", "wavelets" or "haar".
        shape: Channels, height and width of an image.
        num_frequencies: Coefficients of each side, at most its number of pixels.
        fine_weight: Exponent of the weights.
        gray_level: Value subtracted from every pixel.

    Returns:
        The transform.

    Raises:
        SettingError: The name of the transform is unknown.
    """
    if transform not in TRANSFORMS:
        raise SettingError(f"space={transform!r} is unknown. Choose {', '.join(TRANSFORMS)}.")
    row_basis, column_basis = (
        build_side_basis(transform, side, min(num_frequencies, side)) for side in shape[1:]
    )
    squared_frequencies = (
        torch.arange(row_basis.shape[1])[:, None].square()
        + torch.arange(column_basis.shape[1]).square()
        + 1.0
    )
    weights = squared_frequencies.pow(fine_weight / 2)
    typical_energy = 1 / squared_frequencies
    return ImageTransform(
        row_basis,
        column_basis,
        weights / ((weights.square() * typical_energy).sum() / typical_energy.sum()).sqrt(),
        gray_level,
        build_opponent_color_basis(shape[0]),
    )


def build_opponent_color_basis(channels: int) -> Tensor:
    """Return the orthonormal basis of brightness and two color differences, [1, 1] for gray images.

    Red, green and blue of natural images are strongly correlated; brightness and these differences
    are not. Noise, and coefficients that are generated without correlations, would otherwise show
    as random colors.

    >>> basis = build_opponent_color_basis(3)
    >>> torch.allclose(basis @ basis.T, torch.eye(3), atol=1e-6)
    True
    """
    if channels == 1:
        return torch.ones(1, 1)
    return torch.nn.functional.normalize(
        torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]]), dim=1
    )


def build_side_basis(transform: str, side: int, count: int) -> Tensor:
    """Build the coarsest basis vectors of one side.

    Args:
        transform: "cosines", "wavelets" or "haar".
        side: Number of pixels of the side.
        count: Number of basis vectors.

    Returns:
        Orthonormal columns, the coarsest first [side, count].

    >>> columns = build_side_basis("wavelets", 12, 5)
    >>> torch.allclose(columns.T @ columns, torch.eye(5), atol=1e-6)
    True
    """
    if transform == "cosines":
        return dct_basis(side, count)
    columns = torch.eye(side, dtype=torch.float64)
    num_coarse = side
    taps = torch.tensor(WAVELET_FILTERS[transform], dtype=torch.float64)
    # Each level filters the sums of the level before, as long as their number is even. Sides are
    # periodic.
    while num_coarse % 2 == 0:
        low_pass, high_pass = torch.zeros(2, num_coarse, num_coarse // 2, dtype=torch.float64)
        for column in range(num_coarse // 2):
            for tap_index, tap in enumerate(taps):
                row = (2 * column + tap_index) % num_coarse
                low_pass[row, column] += tap
                high_pass[row, column] += (-1) ** tap_index * taps[-1 - tap_index]
        columns[:, :num_coarse] = columns[:, :num_coarse] @ torch.cat([low_pass, high_pass], 1)
        num_coarse //= 2
    return columns[:, :count].float()
