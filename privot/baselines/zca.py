"""Whitened images, and the way back to pixels."""

from __future__ import annotations

import torch
from torch import Tensor


class Whitening:
    """ZCA: an invertible linear map of images [count, channels, height, width] that makes the pixels of those it is fitted to uncorrelated.

    It multiplies by (C + ridge · trace(C)/d · I)^(-1/2) for the covariance C of the d pixels: of all whitening maps the one that
    changes images least. Without the ridge, directions in which images hardly differ would be blown up beyond return; with it their
    variance ends below 1.

    >>> images = torch.rand(50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> white = Whitening(images)
    >>> bool((white.back(white(images)) - images).abs().max() < 1e-5)
    True
    """

    def __init__(self, images: Tensor, ridge: float = 0.1):
        flat = images.flatten(1)
        self.centre = flat.mean(0)
        covariance = torch.zeros(
            flat.shape[1], flat.shape[1], dtype=torch.float64, device=flat.device
        )
        for part in flat.split(10_000):  # so that double precision never holds all images
            part = (part - self.centre).double()
            covariance += part.T @ part / len(flat)
        values, vectors = torch.linalg.eigh(covariance)
        values = (values.clamp(min=0) + ridge * values.mean()).clamp(
            min=1e-12
        )  # images that are all alike have no spread at all
        self.there = ((vectors / values.sqrt()) @ vectors.T).to(flat.dtype)
        self.home = ((vectors * values.sqrt()) @ vectors.T).to(flat.dtype)

    def __call__(self, images: Tensor) -> Tensor:
        """Pixels to whitened."""
        return ((images.flatten(1) - self.centre) @ self.there).view_as(images)

    def back(self, images: Tensor) -> Tensor:
        """Whitened to pixels; they may lie outside the range that pixels have."""
        return (images.flatten(1) @ self.home + self.centre).view_as(images)
