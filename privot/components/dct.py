"""Images as sums of cosines."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosines(side: int, count: int) -> Tensor:
    """The ``count`` lowest cosines on ``side`` pixels, orthonormal: [side, count].

    >>> waves = cosines(8, 3)
    >>> torch.allclose(waves.T @ waves, torch.eye(3), atol=1e-6)
    True
    """
    waves = torch.cos(
        math.pi * (torch.arange(side)[:, None] + 0.5) * torch.arange(count)[None] / side
    )
    return waves / waves.norm(dim=0)


def middle(side: int, window: int, count: int) -> Tensor:
    """The ``count`` lowest cosines on the ``window`` pixels in the middle of ``side``, 0 outside of them: orthonormal, [side, count].

    >>> waves = middle(8, 4, 2)
    >>> torch.allclose(waves.T @ waves, torch.eye(2), atol=1e-6), waves[:2].any().item()
    (True, False)
    """
    before = (side - window) // 2
    return torch.nn.functional.pad(cosines(window, count), (0, 0, before, side - window - before))


class Canvas:
    """Images [count, channels, height, width] that can be optimised: as pixels in [0, 1], or in their lowest frequencies alone.

    ``free`` is what an optimiser moves; ``detail`` is the part of the frequencies of each side that are there.

    >>> images = torch.rand(2, 1, 8, 8)
    >>> torch.allclose(Canvas(images, 1.0).shown(), images), Canvas(images, 0.5).free.shape
    (True, torch.Size([2, 1, 4, 4]))
    """

    def __init__(self, images: Tensor, detail: float):
        self.plain = detail == 1
        if not self.plain:
            self.down, self.across = (
                cosines(side, max(1, round(detail * side))).to(images) for side in images.shape[2:]
            )
            images = self.down.T @ images @ self.across
        self.free = images.detach().clone().requires_grad_()

    def shown(self) -> Tensor:
        """The images; those in frequencies may leave [0, 1]."""
        return self.free if self.plain else self.down @ self.free @ self.across.T

    def bound(self) -> None:
        """Keep pixels in [0, 1]."""
        if self.plain:
            with torch.no_grad():
                self.free.clamp_(0, 1)
