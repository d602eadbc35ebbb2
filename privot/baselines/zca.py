"""ZCA whitening of images, and its inverse."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_SIZE = 10_000  # images in float64 at a time


class ZcaWhitening:
    """An invertible linear map that decorrelates the pixels of the images it is fitted to.

    It multiplies by (C + ridge * trace(C)/d * I)^(-1/2) for the covariance C of the d pixels. Of
    all whitening maps it changes images least. Without the ridge, directions in which images hardly
    vary would be amplified beyond the precision of the inverse; with it, their variance is below 1.

    Args:
        images: Images to fit [count, channels, height, width].
        ridge: Share of the mean variance that is added to each variance.

    >>> images = torch.rand(50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> whitening = ZcaWhitening(images)
    >>> restored = whitening.inverse_transform(whitening(images))
    >>> bool((restored - images).abs().max() < 1e-5)
    True
    """

    def __init__(self, images: Tensor, ridge: float = 0.1):
        pixels = images.flatten(1)
        num_pixels = pixels.shape[1]
        self.mean = pixels.mean(0)
        covariance = torch.zeros(num_pixels, num_pixels, dtype=torch.float64, device=pixels.device)
        for chunk in pixels.split(CHUNK_SIZE):
            centered = (chunk - self.mean).double()
            covariance += centered.T @ centered / len(pixels)
        variances, directions = torch.linalg.eigh(covariance)
        # Images that are all alike have no variance at all.
        variances = (variances.clamp(min=0) + ridge * variances.mean()).clamp(min=1e-12)
        whitening_matrix = (directions / variances.sqrt()) @ directions.T
        inverse_matrix = (directions * variances.sqrt()) @ directions.T
        self.whitening_matrix = whitening_matrix.to(pixels.dtype)
        self.inverse_matrix = inverse_matrix.to(pixels.dtype)

    def __call__(self, images: Tensor) -> Tensor:
        """Whiten images."""
        return ((images.flatten(1) - self.mean) @ self.whitening_matrix).view_as(images)

    def inverse_transform(self, images: Tensor) -> Tensor:
        """Map whitened images to pixels, which may lie outside the range of pixels."""
        return (images.flatten(1) @ self.inverse_matrix + self.mean).view_as(images)
