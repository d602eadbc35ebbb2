r"""Entropic optimal transport between weighted points, in the log domain, many problems at once.

For a cost matrix :math:`c` [..., n, m], weights :math:`a, b` that sum to 1 and a temperature ``blur`` (in units of the cost)

.. math:: W(a, b) = \min_P \sum P_{ij} c_{ij} + blur \cdot KL(P \| a b^T) = \max_{f,g} a \cdot f + b \cdot g

over plans :math:`P` with these weights; at the optimum :math:`P_{ij} = a_i b_j \exp((f_i + g_j - c_{ij}) / blur)`. The number of
iterations is fixed, so the work does not depend on what is in the points, the host is never asked, and a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ITERATIONS = 40  # enough for marginals within 1 % where the cost is some thousand times the blur; see tests/transport
SETTLING = 0.25  # part of the iterations spent at the last temperature


class Potentials(NamedTuple):
    """The two dual functions on the points: ``first`` [..., n], ``second`` [..., m]."""

    first: Tensor
    second: Tensor


def squared_euclidean(x: Tensor, y: Tensor, absolute: float = 0.0) -> Tensor:
    r"""The cost :math:`|x-y|_2^2 + m |x-y|_1` with :math:`m` = ``absolute``: [..., n, dim] and [..., m, dim] to [..., n, m].

    >>> squared_euclidean(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]), absolute=1.0)
    tensor([[32.]])
    """
    # about a common centre, and by products of matrices: differences of all pairs would be dim times as large
    centre = y.detach().mean(-2, keepdim=True)
    left = x - centre
    right = y - centre
    lengths = left.square().sum(-1)[..., :, None] + right.square().sum(-1)[..., None, :]
    cost = (lengths - 2 * left @ right.mT).clamp(min=0)
    return cost + absolute * torch.cdist(x, y, p=1) if absolute else cost


def even(cost: Tensor, dim: int) -> Tensor:
    """Equal weights for the points along one dimension of the cost: [n] or [m]."""
    return cost.new_full((cost.shape[dim],), 1 / cost.shape[dim])


def potentials(
    cost: Tensor,
    blur: float,
    first: Tensor | None = None,
    second: Tensor | None = None,
    iterations: int = ITERATIONS,
) -> Potentials:
    """The dual functions of ``cost`` [..., n, m], for weights ``first`` [..., n] and ``second`` [..., m] (None: equal; zero: not there).

    The temperature falls from the largest cost to ``blur`` in equal ratios, then stays. Both functions move at once, half the way to
    their best answer to each other, so that a symmetric problem has a symmetric solution at every iteration. They carry no gradient.

    >>> f, g = potentials(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), blur=0.01)
    >>> round(float(f.mean() + g.mean()), 3)  # blur * log 2: a plan on two of four pairs is that far from the even one
    0.007
    """
    cost = cost.detach()
    # zero weight: the logarithm is -inf, and the point takes part in no sum
    left, right = (
        (even(cost, dim) if w is None else w).detach().to(cost).log()
        for w, dim in ((first, -2), (second, -1))
    )
    top = cost.amax((-2, -1)).clamp(min=blur)[..., None]  # [..., 1]
    falling = max(1, iterations - int(SETTLING * iterations))
    f = torch.zeros_like(cost[..., :, 0])
    g = torch.zeros_like(cost[..., 0, :])
    for step in range(iterations):
        temperature = top * (blur / top) ** min(1.0, step / max(1, falling - 1))
        new_f = soft_minimum(cost, g, right, temperature)
        new_g = soft_minimum(cost.mT, f, left, temperature)
        f, g = (new_f, new_g) if step == 0 else ((f + new_f) / 2, (g + new_g) / 2)
    return Potentials(f, g)


def soft_minimum(
    cost: Tensor, other: Tensor, weights: Tensor, temperature: Tensor | float
) -> Tensor:
    r"""The best answer to a dual function: :math:`-t \log \sum_j w_j \exp((g_j - c_{ij}) / t)`, with weights as logarithms: [..., n].

    ``cost`` [..., n, m], ``other`` and ``weights`` [..., m], ``temperature`` a number or [..., 1].
    """
    wide = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    return -temperature * torch.logsumexp(
        (other[..., None, :] - cost) / wide + weights[..., None, :], -1
    )


def plan(
    cost: Tensor,
    blur: float,
    first: Tensor | None = None,
    second: Tensor | None = None,
    iterations: int = ITERATIONS,
) -> Tensor:
    """How much of each point of the first side goes to each of the second: [..., n, m]. Rows sum to ``first`` exactly.

    Columns sum to ``second`` as far as the iterations have got.

    >>> plan(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), blur=0.1).sum(1)
    tensor([0.5000, 0.5000])
    """
    first, second = (
        (even(cost, dim) if w is None else w).to(cost) for w, dim in ((first, -2), (second, -1))
    )
    _, g = potentials(cost, blur, first, second, iterations)
    return first[..., :, None] * (
        (g[..., None, :] - cost.detach()) / blur + second.log()[..., None, :]
    ).softmax(-1)


def transport(
    cost: Tensor,
    blur: float,
    first: Tensor | None = None,
    second: Tensor | None = None,
    iterations: int = ITERATIONS,
) -> Tensor:
    r"""The entropic transport cost :math:`W(a, b)`: [...]. Its gradient is that of the cost at the plan.

    The envelope theorem: at the optimum the potentials' own change does not move the value, so it is not followed. Only ``cost`` carries
    a gradient on; weights do not.

    >>> transport(torch.tensor([[0.0, 4.0], [4.0, 0.0]]) + 1, blur=0.01)
    tensor(1.0069)
    """
    first, second = (
        (even(cost, dim) if w is None else w).to(cost) for w, dim in ((first, -2), (second, -1))
    )
    f, g = potentials(cost, blur, first, second, iterations)
    settled = cost.detach()
    # Each potential with the other's best answer to it is a lower bound that is flat at the optimum, so an error of the potentials enters
    # squared; the mean of both is used, and the plan of each has the weights of its own side exactly.
    rows = (g[..., None, :] - settled) / blur + second.log()[..., None, :]
    columns = (f[..., :, None] - settled) / blur + first.log()[..., :, None]
    value = (first * (f - blur * rows.logsumexp(-1))).sum(-1) / 2 + (
        second * (g - blur * columns.logsumexp(-2))
    ).sum(-1) / 2
    weights = (
        first[..., :, None] * rows.softmax(-1) + second[..., None, :] * columns.softmax(-2)
    ) / 2
    moved = (weights * cost).sum((-2, -1))
    return value.detach() + (moved - moved.detach())


def divergence(
    x: Tensor, y: Tensor, blur: float, absolute: float = 0.0, iterations: int = ITERATIONS
) -> Tensor:
    """The debiased Sinkhorn divergence 2 W(x, y) - W(x, x) - W(y, y) of equally weighted points: [..., n, dim], [..., m, dim] to [...].

    Zero where both are equal, and above zero otherwise. It is that of Feydy et al. (2019) times 2.

    >>> bool(divergence(torch.eye(3), torch.eye(3), blur=0.1).abs() < 1e-5)
    True
    """
    across, left, right = (
        transport(squared_euclidean(*pair, absolute), blur, iterations=iterations)
        for pair in ((x, y), (x, x), (y, y))
    )
    return 2 * across - left - right


def semi_debiased(
    x: Tensor,
    other: Tensor,
    y: Tensor,
    blur: float,
    absolute: float = 0.0,
    iterations: int = ITERATIONS,
) -> Tensor:
    """The loss of DP-Sinkhorn (Cao et al. 2021), 2 W(x, y) - W(x, other), where ``other`` is ``x`` with a part of it drawn anew.

    A plan to another draw costs what a perfect generator's draws cost, and taking that away leaves no reason to shrink. The less of
    ``other`` is new, the less is taken away: at a small blur nothing where it is ``x``, all of it where nothing is shared.

    >>> x, y = torch.zeros(2, 1), torch.ones(2, 1)
    >>> semi_debiased(x, x, y, blur=0.01)
    tensor(2.)
    """
    across, within = (
        transport(squared_euclidean(x, each, absolute), blur, iterations=iterations)
        for each in (y, other)
    )
    return 2 * across - within
