r"""Entropic optimal transport between weighted points, in the log domain and batched.

For a cost matrix :math:`c` [..., n, m], weights :math:`a, b` that sum to 1 and a temperature
``blur`` in units of the cost

.. math::

    W(a, b) = \min_P \sum P_{ij} c_{ij} + blur \cdot KL(P \| a b^T)
            = \max_{f,g} a \cdot f + b \cdot g

over plans :math:`P` with these weights. At the optimum
:math:`P_{ij} = a_i b_j \exp((f_i + g_j - c_{ij}) / blur)`. The number of iterations is fixed. The
work therefore does not depend on the points, the host does not wait for the device, and a CUDA
graph can contain the solution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Enough for marginals within 1 % where the cost is some thousand times the blur; see
# tests/transport.
DEFAULT_ITERATIONS = 40
FINAL_TEMPERATURE_FRACTION = 0.25  # of the iterations have the last temperature


class Potentials(NamedTuple):
    """The dual potentials at the points."""

    f: Tensor  # [..., n]
    g: Tensor  # [..., m]


def squared_euclidean_cost(x: Tensor, y: Tensor, l1_weight: float = 0.0) -> Tensor:
    r"""Compute the cost :math:`|x-y|_2^2 + l |x-y|_1` of every pair of points.

    Args:
        x: Points, [..., n, dim].
        y: Points, [..., m, dim].
        l1_weight: Weight :math:`l` of the L1 distance.

    Returns:
        Costs, [..., n, m].

    >>> x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    >>> squared_euclidean_cost(x, y, l1_weight=1.0)
    tensor([[32.]])
    """
    # Matrix products of centered points: the differences of all pairs would need dim times the
    # memory.
    center = y.detach().mean(-2, keepdim=True)
    left = x - center
    right = y - center
    norms = left.square().sum(-1)[..., :, None] + right.square().sum(-1)[..., None, :]
    cost = (norms - 2 * left @ right.mT).clamp(min=0)
    return cost + l1_weight * torch.cdist(x, y, p=1) if l1_weight else cost


def uniform_weights(cost: Tensor, dim: int) -> Tensor:
    """Return equal weights for the points along one dimension of the cost, [n] or [m]."""
    return cost.new_full((cost.shape[dim],), 1 / cost.shape[dim])


def _resolve_weights(cost: Tensor, a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both weights in the precision of the cost, with equal weights for None."""
    a = uniform_weights(cost, -2) if a is None else a
    b = uniform_weights(cost, -1) if b is None else b
    return a.to(cost), b.to(cost)


def solve_potentials(
    cost: Tensor,
    blur: float,
    a: Tensor | None = None,
    b: Tensor | None = None,
    num_iterations: int = DEFAULT_ITERATIONS,
) -> Potentials:
    """Compute the dual potentials of a cost. They carry no gradient.

    The temperature falls geometrically from the largest cost to ``blur`` and then stays. Both
    potentials are updated at once by half a step, so a symmetric problem has a symmetric solution
    at every iteration.

    Args:
        cost: The cost, [..., n, m].
        blur: The last temperature, in units of the cost.
        a: Weights of the rows [..., n]. None: equal; 0: the point is ignored.
        b: Weights of the columns [..., m], likewise.
        num_iterations: Number of iterations.

    Returns:
        The potentials.

    >>> f, g = solve_potentials(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), blur=0.01)
    >>> round(float(f.mean() + g.mean()), 3)  # blur * log 2, the KL of a plan on 2 of 4 pairs
    0.007
    """
    cost = cost.detach()
    a, b = _resolve_weights(cost, a, b)
    # The logarithm of weight 0 is -inf: the point has no part in any sum.
    log_a = a.detach().log()
    log_b = b.detach().log()
    first_temperature = cost.amax((-2, -1)).clamp(min=blur)[..., None]  # [..., 1]
    falling = max(1, num_iterations - int(FINAL_TEMPERATURE_FRACTION * num_iterations))
    f = torch.zeros_like(cost[..., :, 0])
    g = torch.zeros_like(cost[..., 0, :])
    for step in range(num_iterations):
        fraction = min(1.0, step / max(1, falling - 1))
        temperature = first_temperature * (blur / first_temperature) ** fraction
        new_f = soft_minimum(cost, g, log_b, temperature)
        new_g = soft_minimum(cost.mT, f, log_a, temperature)
        f, g = (new_f, new_g) if step == 0 else ((f + new_f) / 2, (g + new_g) / 2)
    return Potentials(f, g)


def soft_minimum(
    cost: Tensor, potential: Tensor, log_weights: Tensor, temperature: Tensor | float
) -> Tensor:
    r"""Compute the optimal potential of one side for a potential g of the other.

    It is :math:`-t \log \sum_j w_j \exp((g_j - c_{ij}) / t)`.

    Args:
        cost: The cost, [..., n, m].
        potential: The other side's potential, [..., m].
        log_weights: Logarithms of the other side's weights, [..., m].
        temperature: The temperature, a number or [..., 1].

    Returns:
        The potential, [..., n].
    """
    divisor = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    exponents = (potential[..., None, :] - cost) / divisor + log_weights[..., None, :]
    return -temperature * torch.logsumexp(exponents, -1)


def transport_plan(
    cost: Tensor,
    blur: float,
    a: Tensor | None = None,
    b: Tensor | None = None,
    num_iterations: int = DEFAULT_ITERATIONS,
) -> Tensor:
    """Compute the transport plan. Rows sum to ``a`` exactly, columns to ``b`` approximately.

    Args:
        cost: The cost, [..., n, m].
        blur: The temperature, in units of the cost.
        a: Weights of the rows [..., n], or None for equal ones.
        b: Weights of the columns [..., m], or None for equal ones.
        num_iterations: Number of iterations.

    Returns:
        The mass between every pair of points, [..., n, m].

    >>> transport_plan(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), blur=0.1).sum(1)
    tensor([0.5000, 0.5000])
    """
    a, b = _resolve_weights(cost, a, b)
    _, g = solve_potentials(cost, blur, a, b, num_iterations)
    exponents = (g[..., None, :] - cost.detach()) / blur + b.log()[..., None, :]
    return a[..., :, None] * exponents.softmax(-1)


def entropic_transport_cost(
    cost: Tensor,
    blur: float,
    a: Tensor | None = None,
    b: Tensor | None = None,
    num_iterations: int = DEFAULT_ITERATIONS,
) -> Tensor:
    r"""Compute the entropic transport cost :math:`W(a, b)`. Its gradient in the cost is the plan.

    By the envelope theorem a change of the potentials does not change the value at the optimum, so
    no gradient goes through them. None goes through the weights either.

    Args:
        cost: The cost, [..., n, m]; may carry a gradient.
        blur: The temperature, in units of the cost.
        a: Weights of the rows [..., n], or None for equal ones.
        b: Weights of the columns [..., m], or None for equal ones.
        num_iterations: Number of iterations.

    Returns:
        The transport cost, [...].

    >>> entropic_transport_cost(torch.tensor([[0.0, 4.0], [4.0, 0.0]]) + 1, blur=0.01)
    tensor(1.0069)
    """
    a, b = _resolve_weights(cost, a, b)
    f, g = solve_potentials(cost, blur, a, b, num_iterations)
    fixed_cost = cost.detach()
    # Each potential with the optimal one of the other side gives a lower bound that is flat at the
    # optimum, so an error of the potentials enters squared. The value is the mean of both bounds.
    # The plan of each bound has the weights of its own side exactly.
    row_exponents = (g[..., None, :] - fixed_cost) / blur + b.log()[..., None, :]
    column_exponents = (f[..., :, None] - fixed_cost) / blur + a.log()[..., :, None]
    row_bound = (a * (f - blur * row_exponents.logsumexp(-1))).sum(-1)
    column_bound = (b * (g - blur * column_exponents.logsumexp(-2))).sum(-1)
    value = row_bound / 2 + column_bound / 2
    row_plan = a[..., :, None] * row_exponents.softmax(-1)
    column_plan = b[..., None, :] * column_exponents.softmax(-2)
    weighted_cost = ((row_plan + column_plan) / 2 * cost).sum((-2, -1))
    # The value, with the gradient of the weighted cost.
    return value.detach() + (weighted_cost - weighted_cost.detach())


def sinkhorn_divergence(
    x: Tensor,
    y: Tensor,
    blur: float,
    l1_weight: float = 0.0,
    num_iterations: int = DEFAULT_ITERATIONS,
) -> Tensor:
    """Compute the debiased Sinkhorn divergence 2 W(x, y) - W(x, x) - W(y, y) of equal weights.

    It is zero for equal point sets and positive otherwise. It is twice the divergence of Feydy et
    al. (2019).

    Args:
        x: Points, [..., n, dim].
        y: Points, [..., m, dim].
        blur: The temperature, in units of the cost.
        l1_weight: Weight of the L1 distance in the cost.
        num_iterations: Number of iterations.

    Returns:
        The divergence, [...].

    >>> bool(sinkhorn_divergence(torch.eye(3), torch.eye(3), blur=0.1).abs() < 1e-5)
    True
    """
    across, within_x, within_y = (
        entropic_transport_cost(
            squared_euclidean_cost(*pair, l1_weight), blur, num_iterations=num_iterations
        )
        for pair in ((x, y), (x, x), (y, y))
    )
    return 2 * across - within_x - within_y


def semi_debiased_loss(
    x: Tensor,
    resampled: Tensor,
    y: Tensor,
    blur: float,
    l1_weight: float = 0.0,
    num_iterations: int = DEFAULT_ITERATIONS,
) -> Tensor:
    """Compute the loss of DP-Sinkhorn (Cao et al. 2021), 2 W(x, y) - W(x, resampled).

    W to another sample is what a perfect generator's samples cost, and without it nothing favours
    shrunken samples. The fewer points of ``resampled`` are new, the less is subtracted: at a small
    blur nothing where it equals ``x``, all of it where it shares no point with ``x``.

    Args:
        x: Generated points, [..., n, dim].
        resampled: The same points, some of them generated again, [..., n, dim].
        y: Real points, [..., m, dim].
        blur: The temperature, in units of the cost.
        l1_weight: Weight of the L1 distance in the cost.
        num_iterations: Number of iterations.

    Returns:
        The loss, [...].

    >>> x, y = torch.zeros(2, 1), torch.ones(2, 1)
    >>> semi_debiased_loss(x, x, y, blur=0.01)
    tensor(2.)
    """
    across, within = (
        entropic_transport_cost(
            squared_euclidean_cost(x, other, l1_weight), blur, num_iterations=num_iterations
        )
        for other in (y, resampled)
    )
    return 2 * across - within
