r"""Entropic transport as a loss, fast where the temperature is that of privacy noise.

For a cost :math:`c` [..., n, m] between equally weighted points and a temperature :math:`t`

.. math::

    W_t = \min_P \sum P_{ij} c_{ij} + t\, KL(P \| 1/nm) = \max_{f,g} mean(f) + mean(g),
    \quad P_{ij} = e^{(f_i+g_j-c_{ij})/t} / nm.

If :math:`e^{-c/t}` is the density of a noise, W is smallest in x where x is what the noise was
added to (Rigollet and Weed 2018; Reshetova et al. 2024). The loss is not debiased on purpose: the
debiased divergence is smallest where x is as noisy as y. `likelihood_loss` is a one-sided form.

The minimum of each row and then of each column is subtracted from the cost first. Potentials are
then a few temperatures where costs may be hundreds, and single precision has errors of 1e-6 in the
weights where large potentials would leave 3e-5. The iterations of
`privot.transport.sinkhorn_iterations` are matrix-vector products, or logarithms of sums where
products would leave the range of the numbers. On a GPU, one kernel computes half an iteration. With
a convergence check, Anderson acceleration (`privot.transport.anderson`) chooses where a run of
iterations starts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from privot.transport.convergence import run_iterations
from privot.transport.costs import has_kernels_for
from privot.transport.sinkhorn_iterations import (
    INNER_ITERATIONS,
    MIN_EXPONENT,
    Iteration,
    KernelIteration,
    LogIteration,
)

MAX_ITERATIONS = 1000
TOLERANCE = 1e-6  # largest relative error of the weights of the points


class SinkhornOutput(NamedTuple):
    """Potentials divided by the temperature, and how exact they are."""

    # what was subtracted from the rows and columns of the cost, [..., n] and [..., m]
    offsets: tuple[Tensor, Tensor]
    # the potentials of the reduced cost, [..., n] and [..., m]
    residual_potentials: tuple[Tensor, Tensor]
    # largest relative error of a row's weight, on the device; columns are exact
    marginal_error: Tensor
    num_iterations: int

    @property
    def f(self) -> Tensor:
        """The potential of the rows over the temperature, [..., n]."""
        return self.offsets[0] + self.residual_potentials[0]

    @property
    def g(self) -> Tensor:
        """The potential of the columns over the temperature, [..., m]."""
        return self.offsets[1] + self.residual_potentials[1]

    def compute_plan(self, scaled_cost: Tensor) -> Tensor:
        """Return the plan [..., n, m] for the cost over the temperature."""
        (n, m) = scaled_cost.shape[-2:]
        (f, g) = self.residual_potentials
        exponents = _subtract_potentials(scaled_cost, *self.offsets).neg_()
        exponents.add_(f[..., :, None]).add_(g[..., None, :])
        return exponents.clamp_(min=MIN_EXPONENT).exp_().div_(n * m)


def _subtract_potentials(scaled_cost: Tensor, f: Tensor, g: Tensor) -> Tensor:
    return (scaled_cost - f[..., :, None]).sub_(g[..., None, :])


def count_sufficient_iterations(
    epsilon: float, tolerance: float = TOLERANCE, max_iterations: int = 50
) -> int:
    r"""Count the iterations that suffice for a channel of this epsilon, whatever the data.

    Under epsilon-local privacy :math:`|c(x,y) - c(x',y)| \le t \epsilon`. An iteration therefore
    reduces the error by :math:`tanh(\epsilon/2)^2` (Birkhoff), from at most :math:`2\epsilon`. With
    a delta this holds for all but a few y.

    Args:
        epsilon: Epsilon of the local channel.
        tolerance: Largest relative error of the weights.
        max_iterations: Largest result; experience shows that it is enough.

    Returns:
        The number of iterations.

    >>> [count_sufficient_iterations(epsilon) for epsilon in (0.5, 1.0, 2.0, 348.0)]
    [5, 10, 28, 50]
    """
    log_factor = 2 * math.log(math.tanh(epsilon / 2)) if epsilon < 30 else 0.0
    if not log_factor or tolerance >= 2 * epsilon:
        return max_iterations
    return min(max_iterations, math.ceil(math.log(tolerance / (2 * epsilon)) / log_factor))


def solve_sinkhorn(
    cost: Tensor,
    temperature: float,
    num_iterations: int | None = None,
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
) -> SinkhornOutput:
    """Compute the potentials of a cost. They carry no gradient.

    With a fixed number of iterations the host does not wait for the device, so a CUDA graph can
    contain the solution.

    Args:
        cost: The cost, [..., n, m].
        temperature: Temperature, in units of the cost.
        num_iterations: Number of iterations, or None to iterate until convergence.
        tolerance: Without a fixed number, stop at this error, or at the error that the rounding of
            the potentials may cause.
        max_iterations: Without a fixed number, the largest number of iterations.

    Returns:
        The potentials, their error and the number of iterations.

    >>> solve_sinkhorn(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 0.5).num_iterations
    5
    """
    scaled = cost.detach() / temperature
    row_minima = scaled.amin(-1)
    reduced = scaled - row_minima[..., :, None]
    column_minima = reduced.amin(-2)
    # Every row and every column of the kernel now has an entry of 1.
    reduced.sub_(column_minima[..., None, :])
    tolerance = max(tolerance, 32 * torch.finfo(scaled.dtype).eps)
    allow_host_sync = num_iterations is None or not scaled.is_cuda
    start = torch.zeros_like(column_minima)
    iteration = _select_iteration(reduced, num_iterations, allow_host_sync)
    result, done = run_iterations(iteration, start, num_iterations, tolerance, max_iterations)
    if allow_host_sync and result.marginal_error.isnan():  # products left the range of the numbers
        result, done = run_iterations(
            LogIteration(reduced), start, num_iterations, tolerance, max_iterations
        )
    return SinkhornOutput(
        (row_minima, column_minima), (result.f, result.g), result.marginal_error, done
    )


def _select_iteration(
    reduced_cost: Tensor, num_iterations: int | None, allow_host_sync: bool
) -> Iteration:
    """Choose how to compute the iterations.

    Args:
        reduced_cost: The reduced cost over the temperature, [..., n, m].
        num_iterations: Number of iterations, or None with a convergence check.
        allow_host_sync: Whether the host may wait for the device.

    Returns:
        Kernels on a GPU for one problem in float32, else matrix-vector products.
    """
    if not has_kernels_for(reduced_cost) or reduced_cost.ndim > 2:
        return KernelIteration(reduced_cost, allow_host_sync)
    from privot.transport.kernels.sinkhorn import FusedIteration, GraphedIteration

    if num_iterations is not None:
        return FusedIteration(reduced_cost)
    graphed = GraphedIteration.for_shape(reduced_cost.shape, reduced_cost.device, INNER_ITERATIONS)
    return graphed.set_cost(reduced_cost)


class _Envelope(torch.autograd.Function):
    """A value whose gradient in the cost is the plan (the envelope theorem)."""

    @staticmethod
    def forward(ctx: Any, cost: Tensor, value: Tensor, plan: Tensor) -> Tensor:
        """Return the value.

        Args:
            ctx: Stores the plan for the gradient.
            cost: The cost, [..., n, m].
            value: The value, [...].
            plan: The plan, [..., n, m].

        Returns:
            The value.
        """
        ctx.save_for_backward(plan)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return grad_output[..., None, None] * ctx.saved_tensors[0], None, None


def entropic_loss(
    cost: Tensor,
    temperature: float,
    num_iterations: int | None = None,
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
) -> Tensor:
    """Compute the entropic transport loss W. Its gradient in the cost is the plan.

    Args:
        cost: The cost, [..., n, m]; may carry a gradient.
        temperature: Temperature, in units of the cost.
        num_iterations: Number of iterations, or None to iterate until convergence.
        tolerance: Error to stop at without a fixed number.
        max_iterations: Largest number of iterations without a fixed number.

    Returns:
        The loss, [...].

    >>> cost = torch.tensor([[0.0, 4.0], [4.0, 0.0]], requires_grad=True)
    >>> entropic_loss(cost, 1.0).backward()
    >>> cost.grad
    tensor([[0.4910, 0.0090],
            [0.0090, 0.4910]])
    """
    output = solve_sinkhorn(cost, temperature, num_iterations, tolerance, max_iterations)
    value = temperature * (output.f.mean(-1) + output.g.mean(-1))
    plan = output.compute_plan(cost.detach() / temperature)
    loss: Tensor = _Envelope.apply(cost, value, plan)
    return loss


def likelihood_loss(cost: Tensor, temperature: float) -> Tensor:
    r"""Compute the one-sided loss :math:`-t\, mean_j \log mean_i e^{-c_{ij}/t}`.

    It is W with f = 0 and needs no iterations. It is never above W, and with many points it is
    smallest at the same x. Each y weighs the x on its own, so the x need not have equal weights.

    Args:
        cost: The cost, [..., n, m]; may carry a gradient.
        temperature: Temperature, in units of the cost.

    Returns:
        The loss, [...].

    >>> likelihood_loss(torch.tensor([[0.0, 4.0], [4.0, 0.0]]), 1.0)
    tensor(0.6750)
    """
    scaled = cost.detach() / temperature
    minima = scaled.amin(-2, keepdim=True)
    kernel = (minima - scaled).clamp_(min=MIN_EXPONENT).exp_()
    sums = kernel.sum(-2, keepdim=True)
    n, m = cost.shape[-2:]
    value = temperature * (minima - (sums / n).log()).mean((-2, -1))
    loss: Tensor = _Envelope.apply(cost, value, kernel / (m * sums))
    return loss
