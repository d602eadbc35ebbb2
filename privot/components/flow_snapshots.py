"""A movie strip: the same few particles at eight times of their flow, kept in a release for its report. All of it is public."""

from __future__ import annotations

import torch
from torch import Tensor

from privot.components.latent_space import Coded
from privot.components.transforms import Space

# pictures of a particle, and particles
TIMES = 8
SHOWN = 10
STRIP = "strip"  # its name among what a release keeps


class Strip:
    """Takes some points of a flow of so many steps where it is time to: at the start, at the end, and more often early, when all moves.

    >>> strip = Strip(200)
    >>> strip.times
    [0, 4, 16, 37, 65, 102, 147, 200]
    >>> strip.see(0, torch.zeros(3, 2)); strip.see(1, torch.ones(3, 2)); strip.see(4, torch.ones(3, 2))
    >>> len(strip.seen)
    2
    """

    def __init__(self, steps: int):
        self.times = sorted({round(steps * (place / (TIMES - 1)) ** 2) for place in range(TIMES)})
        self.seen: list[Tensor] = []

    def see(self, step: int, points: Tensor) -> None:
        """Points [count, dim] after so many steps."""
        if step in self.times:
            self.seen.append(points[:SHOWN].clone())

    def kept(self, here: Space | Coded, channels: int) -> dict[str, Tensor]:
        """As images in half precision, [times, particles, channels, height, width], by the name they have in a release."""
        return (
            {STRIP: here.image(torch.stack(self.seen), channels).clamp(0, 1).half()}
            if self.seen
            else {}
        )
