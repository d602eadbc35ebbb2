"""Orthonormal discrete cosine transforms (DCT), and images that are optimized in them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dct_basis(side: int, num_frequencies: int) -> Tensor:
    """Return the lowest DCT basis vectors as orthonormal columns: [side, num_frequencies].

    >>> basis = dct_basis(8, 3)
    >>> torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-6)
    True
    """
    columns = torch.cos(
        math.pi * (torch.arange(side)[:, None] + 0.5) * torch.arange(num_frequencies)[None] / side
    )
    return columns / columns.norm(dim=0)


def centered_dct_basis(side: int, window: int, num_frequencies: int) -> Tensor:
    """Return the lowest DCT basis vectors of a centered window, zero outside of the window.

    Args:
        side: Number of pixels of an image's side.
        window: Number of pixels of the window.
        num_frequencies: Number of basis vectors.

    Returns:
        Orthonormal columns [side, num_frequencies].

    >>> basis = centered_dct_basis(8, 4, 2)
    >>> torch.allclose(basis.T @ basis, torch.eye(2), atol=1e-6), basis[:2].any().item()
    (True, False)
    """
    before = (side - window) // 2
    return torch.nn.functional.pad(
        dct_basis(window, num_frequencies), (0, 0, before, side - window - before)
    )


class LearnableImages:
    """Images that an optimizer changes, either as pixels or as their lowest DCT coefficients.

    Args:
        images: Initial images [count, channels, height, width] in [0, 1].
        frequency_fraction: Fraction of the DCT coefficients of each side that are learnable, in
            (0, 1]. At 1 the pixels themselves are learnable.

    Attributes:
        learnable: The tensor that the optimizer changes.

    >>> images = torch.rand(2, 1, 8, 8)
    >>> torch.allclose(LearnableImages(images, 1.0).to_images(), images)
    True
    >>> LearnableImages(images, 0.5).learnable.shape
    torch.Size([2, 1, 4, 4])
    """

    def __init__(self, images: Tensor, frequency_fraction: float):
        self.in_pixel_space = frequency_fraction == 1
        if not self.in_pixel_space:
            self.row_basis, self.column_basis = (
                dct_basis(side, max(1, round(frequency_fraction * side))).to(images)
                for side in images.shape[2:]
            )
            images = self.row_basis.T @ images @ self.column_basis
        self.learnable = images.detach().clone().requires_grad_()

    def to_images(self) -> Tensor:
        """Return the images. Images from DCT coefficients may leave [0, 1]."""
        if self.in_pixel_space:
            return self.learnable
        return self.row_basis @ self.learnable @ self.column_basis.T

    def clamp_pixels(self) -> None:
        """Clamp learnable pixels to [0, 1]. DCT coefficients stay as they are."""
        if self.in_pixel_space:
            with torch.no_grad():
                self.learnable.clamp_(0, 1)
