"""Secret randomness: bytes of the operating system, turned into float64 and rounded to a public grid.

Nothing here can be seeded except by ``insecure_seed``, which exists for tests and marks a release unpublishable.
"""

from __future__ import annotations

import hashlib
import math
import os
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
import torch
from torch import Tensor

FARTHEST = 12.2  # deviations that drawn Gaussian noise never passes: it ends at sqrt(2 * 106 * log 2) = 12.12


class Secret:
    """The secret stream: noise and sampling. It is never stored, and two of them never agree.

    >>> Secret().normal((2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, insecure_seed: int | None = None):
        self.insecure = insecure_seed is not None
        self._seed = insecure_seed
        self._count = 0

    def _bytes(self, count: int) -> bytearray:
        if self._seed is None:
            return bytearray(os.urandom(count))
        self._count += 1
        return bytearray(hashlib.shake_256(f"{self._seed}/{self._count}".encode()).digest(count))

    def uniform(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Float64 in (0, 1], on the 53-bit lattice: [count]."""
        if count == 0:
            return torch.empty(0, dtype=torch.float64, device=device)
        bits = sent(
            torch.frombuffer(self._bytes(8 * count), dtype=torch.int64), torch.device(device)
        )
        return ((bits >> 11 & (1 << 53) - 1).double() + 1) * 2.0**-53

    def normal(self, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Standard Gaussian, float64, by Box-Muller: no rejection loop whose time could tell, tails to 12 deviations."""
        half = (math.prod(shape) + 1) // 2
        radius, angle, rest = self.uniform(3 * half, device).view(3, half)
        # privacy: of 53 bits alone, rare radii would be farther apart than the grid, and an answer would tell of which total it is. So
        # the distance to the nearer end of (0, 1) has 53 bits more: however rare a radius is, it is as fine as float64.
        end = torch.minimum(radius - 2.0**-53, 1 - radius) + rest * 2.0**-53
        radius = (-2 * torch.where(radius > 0.5, (-end).log1p(), end.log())).sqrt()
        angle = 2 * math.pi * angle
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[: math.prod(shape)].view(
            shape
        )

    def order(self, count: int) -> Tensor:
        """A uniform permutation of ``range(count)``; ties among 53-bit keys have probability below count² 2^-54."""
        return self.uniform(count).argsort()

    def coins(self, words: tuple[int, ...], count: int) -> Tensor:
        """Heads with the probability of which ``words`` (see `chance`) are the binary digits: bool [count].

        Digits are compared until they differ, a byte first, so the law is exact to 2^-197 and takes little more than a byte each.
        """
        drawn = np.frombuffer(
            self._bytes(count), np.uint8
        )  # NumPy finds the few ties ten times as fast as torch
        heads = drawn < words[0]
        tied = np.flatnonzero(drawn == words[0])
        for word in words[1:]:
            bits = np.frombuffer(self._bytes(8 * len(tied)), np.int64) & (1 << 63) - 1
            heads[tied] = bits < word
            tied = tied[bits == word]
        return torch.from_numpy(heads)

    def laplace(self, shape: tuple[int, ...], digits: int) -> Tensor:
        r"""Two-sided geometric noise, :math:`P(z)\propto\exp(-|z+1/2|/2^{digits})` on the whole numbers: int64, exact.

        The binary digits of a geometric variable are independent, digit i of probability :math:`1/(1+\exp(2^{i-digits}))`; a fair coin
        chooses the side of -1/2. Magnitudes stay under 128 scales, beyond which lies :math:`e^{-128}` of the law.
        """
        size = torch.zeros(count := math.prod(shape), dtype=torch.int64)
        for digit in range(digits + BEYOND):
            size.add_(self.coins(chance(digit - digits), count), alpha=1 << digit)
        return torch.where(self.coins((128, 0), count), size, -1 - size).view(shape)


def sent(value: Tensor, device: torch.device) -> Tensor:
    """To the device; a GPU is not waited for."""
    there = device.type == "cuda" and not value.is_cuda
    return value.pin_memory().to(device, non_blocking=True) if there else value.to(device)


BEYOND = 7  # digits above the scale: the highest has probability exp(-64)
PRECISION = 120  # decimal digits of a chance while it is computed; 60 of them matter


@cache
def chance(power: int) -> tuple[int, ...]:
    r"""The binary digits of :math:`1/(1+\exp(2^{power}))`: one byte, then words of 63.

    >>> chance(-60)[0], chance(6)[:2]  # nearly one half, and nearly nothing
    (127, (0, 0))
    """
    with localcontext() as context:
        context.prec = PRECISION
        return digits_of(1 / (1 + (Decimal(2) ** power).exp()))


def digits_of(share: Decimal) -> tuple[int, ...]:
    """The binary digits of a probability under 1: one byte, then three words of 63; see `Secret.coins`."""
    with localcontext() as context:
        context.prec = PRECISION
        whole = int(share * 2**197)
    return whole >> 189, *(whole >> 63 * place & (1 << 63) - 1 for place in (2, 1, 0))


def grid_for(bound: float, noise_std: float) -> float:
    """The public power of two on which an answer lies: 2^-24 of the smaller scale, but never under 2^-30 of the larger.

    With it a float64 sum of 2^22 parts is exact, whatever its order, and so is the sum of answer and noise. Larger totals are whole
    numbers of 64 bits: see `noisy`.
    """
    small, large = sorted(math.floor(math.log2(each)) for each in (bound, noise_std or bound))
    return 2.0 ** max(small - 24, large - 30)


def noisy(steps: Tensor, noise_std: float, grid: float, secret: Secret) -> Tensor:
    """Add Gaussian noise, rounded to the grid, to a total in whole steps of ``grid``.

    privacy: the total is on the grid, so this equals rounding the exact sum of total and continuous noise: post-processing. A total that
    float64 may not hold exactly comes as int64; the noise is added to it there, and only the noisy sum is rounded to float64.

    Args:
        steps: The total, float64 or int64.
        noise_std: Standard deviation of the noise.
        grid: The step, a power of two.
        secret: The secret stream.

    Returns:
        The noisy total, float64.
    """
    if noise_std:
        noise = (secret.normal(tuple(steps.shape), steps.device) * (noise_std / grid)).round()
        steps = steps + noise.to(steps.dtype)
    return (
        steps.double() * grid + 0.0
    )  # privacy: else a total of -0.0, and no other, could come out as -0.0, and its sign would tell
