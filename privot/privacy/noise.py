"""Secret randomness: bytes of the operating system, turned into float64 and rounded to a public grid.

Nothing here can be seeded except by ``insecure_seed``, which exists for tests and marks a release unpublishable.
"""

from __future__ import annotations

import hashlib
import math
import os

import torch
from torch import Tensor


class Secret:
    """The secret stream: noise and sampling. It is never stored, and two of them never agree.

    >>> Secret().normal((2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, insecure_seed: int | None = None):
        self.insecure = insecure_seed is not None
        self._seed, self._count = insecure_seed, 0

    def _bytes(self, count: int) -> bytearray:
        if self._seed is None:
            return bytearray(os.urandom(count))
        self._count += 1
        return bytearray(hashlib.shake_256(f"{self._seed}/{self._count}".encode()).digest(count))

    def uniform(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Float64 in (0, 1], on the 53-bit lattice: [count]."""
        if count == 0:
            return torch.empty(0, dtype=torch.float64, device=device)
        bits = torch.frombuffer(self._bytes(8 * count), dtype=torch.int64)
        if torch.device(device).type == "cuda":
            bits = bits.pin_memory().to(device, non_blocking=True)  # the GPU need not be waited for
        return ((bits >> 11 & (1 << 53) - 1).double() + 1) * 2.0**-53

    def normal(self, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Standard Gaussian, float64, by Box-Muller: no rejection loop whose time could tell, tails to 8.5 deviations."""
        half = (math.prod(shape) + 1) // 2
        radius, angle = self.uniform(2 * half, device).view(2, half)
        radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[: math.prod(shape)].view(shape)

    def order(self, count: int) -> Tensor:
        """A uniform permutation of ``range(count)``; ties among 53-bit keys have probability below count² 2^-54."""
        return self.uniform(count).argsort()


def grid_for(bound: float, noise_std: float) -> float:
    """The public power of two on which an answer lies: 2^-24 of the smaller scale, but never under 2^-30 of the larger.

    With it a float64 sum of 2^22 parts is exact, whatever its order, and so is the sum of answer and noise.
    """
    small, large = sorted(math.floor(math.log2(each)) for each in (bound, noise_std or bound))
    return 2.0 ** max(small - 24, large - 30)


def noisy(steps: Tensor, noise_std: float, grid: float, secret: Secret) -> Tensor:
    """A total, in whole steps of ``grid``, plus Gaussian noise rounded to the grid: multiples of it.

    privacy: the total is on the grid, so this equals rounding the exact sum of total and continuous noise: post-processing.
    """
    if noise_std:
        steps = steps + (secret.normal(tuple(steps.shape), steps.device) * (noise_std / grid)).round()
    return steps * grid
