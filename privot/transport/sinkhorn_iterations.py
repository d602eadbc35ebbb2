r"""Sinkhorn iterations between equally weighted points.

For a cost c [..., n, m], divided by the temperature, one iteration updates the potentials in turn:
:math:`f_i = \log m - \log \sum_j e^{g_j - c_{ij}}`, then :math:`g` likewise. A run is a number of
iterations from a given g. After it the columns of the plan are exact, and the error of its rows is
known.

`KernelIteration` has a kernel :math:`e^{f+g-c}` for some f and g. An iteration is then two
matrix-vector products, several times as fast as logarithms of sums. The kernel is computed again
when the scaling vectors have outgrown it, and the last iteration of a run uses a kernel that fitted
before it. `LogIteration` computes logarithms of sums, shifted by their largest term, for costs of
thousands of temperatures.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

INNER_ITERATIONS = 5  # iterations between two checks of the error
# Largest logarithm of a scaling vector before the kernel is computed again: 13 of the 38 decimal
# digits of float32's range.
MAX_LOG_SCALING = 30.0
# Smaller exponents count as this one. e^-80 is negligible beside a row's largest term, and below
# -86 a CPU is 100 times slower (subnormal numbers).
MIN_EXPONENT = -80.0


class IterationResult(NamedTuple):
    """The result of a run of iterations. The three scalars lie on the device."""

    f: Tensor  # potentials, [..., n]
    g: Tensor  # potentials, [..., m]
    marginal_error: Tensor  # largest relative error of a row's weight
    rounding_error: Tensor  # how much of it the rounding of the potentials may cause
    dual_value: Tensor  # mean(f) + mean(g); no iteration lowers it


class Iteration(Protocol):
    """How the iterations for one cost are computed."""

    def run(self, g: Tensor, num_iterations: int) -> IterationResult:
        """Run iterations from a potential ``g``."""


class KernelIteration:
    """Iterations by matrix-vector products with a kernel.

    The marginal error is NaN where the products leave the range of the numbers. It is infinite
    where they outgrow the kernel within one iteration, so that negligible entries counted.

    Args:
        cost: The cost over the temperature, [..., n, m].
        allow_host_sync: Whether the host may wait for the device to see if the kernel still fits.
            Otherwise the kernel is computed again after every few iterations.
    """

    def __init__(self, cost: Tensor, allow_host_sync: bool = True):
        self.cost = cost
        self.allow_host_sync = allow_host_sync
        self.f_offset = torch.zeros_like(cost[..., 0])
        self.g_offset = torch.zeros_like(cost[..., 0, :])
        self.kernel = (-cost).clamp_(min=MIN_EXPONENT).exp_()

    def run(self, g: Tensor, num_iterations: int) -> IterationResult:
        n, m = self.cost.shape[-2:]
        v = self._absorb_scaling(g)
        full_blocks, remainder = divmod(num_iterations - 1, INNER_ITERATIONS)
        for block in (*[INNER_ITERATIONS] * full_blocks, remainder):
            for _ in range(block):
                v = n / (self.kernel.mT @ (m / (self.kernel @ v)))
            v = self._absorb_scaling(self.g_offset + v.squeeze(-1).log(), v)
        u = m / (self.kernel @ v)
        v = n / (self.kernel.mT @ u)
        error = (u * (self.kernel @ v) / m - 1).abs().amax()
        log_u = u.squeeze(-1).log()
        log_v = v.squeeze(-1).log()
        error.masked_fill_(max_abs(log_v) > MAX_LOG_SCALING, math.inf)
        return summarize_iterations(self.f_offset + log_u, self.g_offset + log_v, error)

    def _absorb_scaling(self, g: Tensor, scaling: Tensor | None = None) -> Tensor:
        """Return e^g relative to the kernel, and compute the kernel again if it no longer fits.

        Args:
            g: The potential, [..., m].
            scaling: e^g relative to the present kernel if it is known, [..., m, 1].

        Returns:
            The scaling relative to the kernel, [..., m, 1].
        """
        # "<=" and not "not >": NaN must lead to a new kernel.
        if self.allow_host_sync and float(max_abs(g - self.g_offset)) <= MAX_LOG_SCALING:
            return (g - self.g_offset).exp()[..., :, None] if scaling is None else scaling
        exponents = g[..., None, :] - self.cost
        self.f_offset = -exponents.amax(-1)
        self.g_offset = g
        self.kernel = exponents.add_(self.f_offset[..., :, None]).clamp_(min=MIN_EXPONENT).exp_()
        return torch.ones_like(g)[..., :, None]


class LogIteration:
    """Iterations by logarithms of sums.

    Args:
        cost: The cost over the temperature, [..., n, m].
    """

    def __init__(self, cost: Tensor):
        self.cost = cost

    def run(self, g: Tensor, num_iterations: int) -> IterationResult:
        n, m = self.cost.shape[-2:]
        for _ in range(num_iterations):
            f = math.log(m) - log_sum_exp_inplace(g[..., None, :] - self.cost)
            g = math.log(n) - log_sum_exp_inplace(f[..., None, :] - self.cost.mT)
        log_sums = log_sum_exp_inplace(g[..., None, :] - self.cost)
        error = (f - math.log(m) + log_sums).expm1().abs().amax()
        return summarize_iterations(f, g, error)


def summarize_iterations(f: Tensor, g: Tensor, marginal_error: Tensor) -> IterationResult:
    """Add the rounding error and the dual value to a result.

    Args:
        f: Potentials, [..., n].
        g: Potentials, [..., m].
        marginal_error: Largest relative error of a row's weight.

    Returns:
        The result.
    """
    return IterationResult(
        f, g, marginal_error, estimate_rounding_error(f, g), compute_dual_value(f, g)
    )


def max_abs(values: Tensor) -> Tensor:
    """Return the largest absolute value."""
    return values.abs().amax()


def estimate_rounding_error(f: Tensor, g: Tensor) -> Tensor:
    """Return the rounding unit of the largest potential, which is the relative error of its exp.

    >>> estimate_rounding_error(torch.tensor([1.0]), torch.tensor([-1000.0])) < 1.3e-4
    tensor(True)
    """
    return torch.finfo(f.dtype).eps * torch.maximum(max_abs(f), max_abs(g))


def compute_dual_value(f: Tensor, g: Tensor) -> Tensor:
    """Return the value of the dual over the temperature, averaged over all problems."""
    return f.mean() + g.mean()


def log_sum_exp_inplace(exponents: Tensor) -> Tensor:
    """Return log-sum-exp along the last dimension; overwrites its argument."""
    largest = exponents.amax(-1, keepdim=True)
    sums = exponents.sub_(largest).clamp_(min=MIN_EXPONENT).exp_().sum(-1)
    return sums.log() + largest.squeeze(-1)
