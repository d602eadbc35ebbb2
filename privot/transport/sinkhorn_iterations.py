r"""Sweeps of entropic transport between equally weighted points: each side's best answer to the other, in turn.

For a cost c [..., n, m] over the temperature a sweep is :math:`f_i = \log m - \log \sum_j e^{g_j - c_{ij}}`, then :math:`g` likewise. A
stride is some sweeps from a given g, after which the columns of the plan are exact and the error of its rows is known.

By products: with a kernel :math:`e^{f+g-c}` made at some f and g, a sweep is two products with vectors, several times as quick as
logarithms of sums. It is made anew where the vectors have outgrown it, and a stride's last sweep is done with one that fitted before it.
By logarithms: sums are shifted by their largest part, for costs that are thousands of temperatures.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

STRIDE = 5  # sweeps between two looks at how far it has got
OUTGROWN = 30.0  # e to this is how far vectors may go before the kernel is made anew: 13 digits of the 38 that float32 has
LEAST = -80.0  # exponents below it count as it: e^-80 is nothing beside a row's largest part, and below -86 a CPU is 100 times slower


class Stride(NamedTuple):
    """Potentials [..., n] and [..., m], and three numbers: the largest relative error of a row's weight, what of it may be the potentials'
    rounding, and the dual's value :math:`mean(f) + mean(g)`, which no sweep lowers."""

    first: Tensor
    second: Tensor
    error: Tensor
    rounding: Tensor
    value: Tensor


class Way(Protocol):
    """How sweeps are done for one cost."""

    def stride(self, second: Tensor, times: int) -> Stride: ...


class Products:
    """Sweeps with a kernel. Where they pass the range of the numbers the error is not a number; where they outgrow the kernel in one sweep,
    so that entries counted which are nothing, it is infinite.

    Where it may not ask the host, the kernel is made anew after every few sweeps.
    """

    def __init__(self, cost: Tensor, asking: bool = True):
        self.cost = cost
        self.asking = asking
        self.up = torch.zeros_like(cost[..., 0])
        self.right = torch.zeros_like(cost[..., 0, :])
        self.kernel = (-cost).clamp_(min=LEAST).exp_()

    def stride(self, second: Tensor, times: int) -> Stride:
        n, m = self.cost.shape[-2:]
        v = self._fitting(second)
        for part in (*[STRIDE] * ((times - 1) // STRIDE), (times - 1) % STRIDE):
            for _ in range(part):
                v = n / (self.kernel.mT @ (m / (self.kernel @ v)))
            v = self._fitting(self.right + v.squeeze(-1).log(), v)
        u = m / (self.kernel @ v)
        v = n / (self.kernel.mT @ u)
        error = (u * (self.kernel @ v) / m - 1).abs().amax()
        up = u.squeeze(-1).log()
        right = v.squeeze(-1).log()
        error.masked_fill_(size(right) > OUTGROWN, math.inf)
        first = self.up + up
        second = self.right + right
        return Stride(first, second, error, rounding(first, second), value(first, second))

    def _fitting(self, second: Tensor, v: Tensor | None = None) -> Tensor:
        """e^g relative to the kernel, [..., m, 1], which is made anew if that has outgrown it."""
        # not "greater": what is not a number must not stay in the kernel
        if self.asking and float(size(second - self.right)) <= OUTGROWN:
            return (second - self.right).exp()[..., :, None] if v is None else v
        exponents = second[..., None, :] - self.cost
        self.up = -exponents.amax(-1)
        self.right = second
        self.kernel = exponents.add_(self.up[..., :, None]).clamp_(min=LEAST).exp_()
        return torch.ones_like(second)[..., :, None]


class Logarithms:
    """Sweeps by logarithms of sums."""

    def __init__(self, cost: Tensor):
        self.cost = cost

    def stride(self, second: Tensor, times: int) -> Stride:
        n, m = self.cost.shape[-2:]
        for _ in range(times):
            first = math.log(m) - log_sum(second[..., None, :] - self.cost)
            second = math.log(n) - log_sum(first[..., None, :] - self.cost.mT)
        error = (
            (first - math.log(m) + log_sum(second[..., None, :] - self.cost)).expm1().abs().amax()
        )
        return Stride(first, second, error, rounding(first, second), value(first, second))


def size(numbers: Tensor) -> Tensor:
    """The largest, whatever its sign."""
    return numbers.abs().amax()


def rounding(first: Tensor, second: Tensor) -> Tensor:
    """The least step of numbers as large as these, a number on their device: e to a potential is not known better, relatively.

    >>> rounding(torch.tensor([1.0]), torch.tensor([-1000.0])) < 1.3e-4
    tensor(True)
    """
    return torch.finfo(first.dtype).eps * torch.maximum(size(first), size(second))


def value(first: Tensor, second: Tensor) -> Tensor:
    """Of the dual over the temperature, the mean of all problems."""
    return first.mean() + second.mean()


def log_sum(exponents: Tensor) -> Tensor:
    """Of numbers that are overwritten, along the last dimension."""
    top = exponents.amax(-1, keepdim=True)
    return exponents.sub_(top).clamp_(min=LEAST).exp_().sum(-1).log() + top.squeeze(-1)
