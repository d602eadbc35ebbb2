"""Secret randomness: bytes of the operating system as float64 numbers, rounded to a public grid.

Nothing here can be seeded except by ``insecure_seed``, which is for tests and marks a release as
unpublishable.
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

# No Gaussian noise exceeds this many standard deviations: it ends at sqrt(2 * 106 * log 2) = 12.12.
MAX_NORMAL = 12.2
EXTRA_DIGITS = 7  # binary digits above the scale; the highest one has probability exp(-64)
DECIMAL_PRECISION = 120  # decimal digits in which a probability is computed; 60 of them matter


class SecretRandom:
    """The secret random stream, for noise and sampling. It is never stored, and no two agree.

    Args:
        insecure_seed: Makes the stream reproducible, for tests. None: bytes of the system.

    >>> SecretRandom().normal((2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, insecure_seed: int | None = None):
        self.insecure = insecure_seed is not None
        self._seed = insecure_seed
        self._num_calls = 0

    def _random_bytes(self, count: int) -> bytearray:
        if self._seed is None:
            return bytearray(os.urandom(count))
        self._num_calls += 1
        return bytearray(
            hashlib.shake_256(f"{self._seed}/{self._num_calls}".encode()).digest(count)
        )

    def uniform(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Draw uniform numbers in (0, 1] on the 53-bit lattice: float64 [count]."""
        if count == 0:
            return torch.empty(0, dtype=torch.float64, device=device)
        bits = to_device(
            torch.frombuffer(self._random_bytes(8 * count), dtype=torch.int64), torch.device(device)
        )
        return ((bits >> 11 & (1 << 53) - 1).double() + 1) * 2.0**-53

    def normal(self, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Draw standard Gaussian numbers by Box-Muller: float64, tails up to 12 deviations.

        There is no rejection loop, whose running time could depend on the numbers.
        """
        num_pairs = (math.prod(shape) + 1) // 2
        radius, angle, extra_bits = self.uniform(3 * num_pairs, device).view(3, num_pairs)
        # privacy: with 53 bits only, rare radii would be farther apart than the grid, and a result
        # would reveal which total it belongs to. So the distance to the nearer end of (0, 1) has 53
        # more bits: however rare a radius is, it is as fine as float64.
        end = torch.minimum(radius - 2.0**-53, 1 - radius) + extra_bits * 2.0**-53
        radius = (-2 * torch.where(radius > 0.5, (-end).log1p(), end.log())).sqrt()
        angle = 2 * math.pi * angle
        numbers = torch.cat([radius * angle.cos(), radius * angle.sin()])
        return numbers[: math.prod(shape)].view(shape)

    def permutation(self, count: int) -> Tensor:
        """Draw a uniform permutation of ``range(count)``: int64 [count].

        Two of the 53-bit sorting keys are equal with probability below count^2 2^-54.
        """
        return self.uniform(count).argsort()

    def bernoulli(self, probability_words: tuple[int, ...], count: int) -> Tensor:
        """Draw Bernoulli variables, exact to 2^-197.

        Binary digits are compared until they differ, a byte first, so that a variable needs little
        more than one byte.

        Args:
            probability_words: Binary digits of the probability, see `probability_bits`.
            count: How many variables.

        Returns:
            bool [count].
        """
        first_bytes = np.frombuffer(self._random_bytes(count), np.uint8)
        result = first_bytes < probability_words[0]
        # NumPy finds the few ties ten times as fast as torch.
        ties = np.flatnonzero(first_bytes == probability_words[0])
        for word in probability_words[1:]:
            bits = np.frombuffer(self._random_bytes(8 * len(ties)), np.int64) & (1 << 63) - 1
            result[ties] = bits < word
            ties = ties[bits == word]
        return torch.from_numpy(result)

    def discrete_laplace(self, shape: tuple[int, ...], log2_scale: int) -> Tensor:
        r"""Draw two-sided geometric noise, exactly.

        :math:`P(z)\propto\exp(-|z+1/2|/2^{s})` on the integers, with s = ``log2_scale``. The binary
        digits of a geometric variable are independent; digit i is 1 with probability
        :math:`1/(1+\exp(2^{i-s}))`. A fair coin chooses the side of -1/2. Magnitudes stay below 128
        scales; :math:`e^{-128}` of the distribution lies beyond.

        Args:
            shape: The shape of the result.
            log2_scale: The logarithm of the scale to base 2.

        Returns:
            int64 [*shape].
        """
        count = math.prod(shape)
        size = torch.zeros(count, dtype=torch.int64)
        for digit in range(log2_scale + EXTRA_DIGITS):
            bits = self.bernoulli(bernoulli_bits(digit - log2_scale), count)
            size.add_(bits, alpha=1 << digit)
        is_positive = self.bernoulli((128, 0), count)
        return torch.where(is_positive, size, -1 - size).view(shape)


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, without waiting for a GPU."""
    if device.type == "cuda" and not value.is_cuda:
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


@cache
def bernoulli_bits(log2_exponent: int) -> tuple[int, ...]:
    r"""Compute the binary digits of :math:`1/(1+\exp(2^{e}))` with e = ``log2_exponent``.

    >>> bernoulli_bits(-60)[0], bernoulli_bits(6)[:2]  # nearly one half, and nearly zero
    (127, (0, 0))
    """
    with localcontext() as context:
        context.prec = DECIMAL_PRECISION
        return probability_bits(1 / (1 + (Decimal(2) ** log2_exponent).exp()))


def probability_bits(probability: Decimal) -> tuple[int, ...]:
    """Give the binary digits of a probability below 1: a word of 8 bits, then three of 63 bits."""
    with localcontext() as context:
        context.prec = DECIMAL_PRECISION
        digits = int(probability * 2**197)
    return digits >> 189, *(digits >> 63 * index & (1 << 63) - 1 for index in (2, 1, 0))


def choose_grid(clip_norm: float, noise_std: float) -> float:
    """Choose the public grid step of a query result.

    It is a power of two: 2^-24 of the smaller of clip norm and noise, but at least 2^-30 of the
    larger one. A float64 sum of 2^22 clipped values is then exact in any order, and so is the sum
    of result and noise. Larger sums are int64, see `add_noise`.
    """
    small, large = sorted(
        math.floor(math.log2(scale)) for scale in (clip_norm, noise_std or clip_norm)
    )
    return 2.0 ** max(small - 24, large - 30)


def add_noise(total: Tensor, noise_std: float, grid: float, rng: SecretRandom) -> Tensor:
    """Add Gaussian noise, rounded to the grid, to a total in integer steps of the grid.

    privacy: the total is on the grid, so this equals rounding the exact sum of the total and
    continuous noise, which is post-processing. A total that float64 may not hold exactly is int64;
    the noise is added to it there, and only the noisy sum is rounded to float64.

    Args:
        total: float64 or int64.
        noise_std: The standard deviation of the noise; 0: none is added.
        grid: The grid step, a power of two.
        rng: The secret stream.

    Returns:
        The noisy total, float64.
    """
    if noise_std:
        noise = (rng.normal(tuple(total.shape), total.device) * (noise_std / grid)).round()
        total = total + noise.to(total.dtype)
    # privacy: a total of -0.0, and no other, could come out as -0.0, and its sign would reveal it.
    return total.double() * grid + 0.0
