r"""The L1 cost :math:`c_{ij} = \sum_k |x_{ik} - y_{jk}|` and its gradient in little memory.

The noise of a privacy mechanism carries most coordinates of y out of the range of the x, where
:math:`|x - y|` is linear. Such coordinates are one matrix product. With :math:`s = 1` above the
range and :math:`-1` elsewhere

.. math::

    c_{ij} = \sum_k s_{jk} (y_{jk} - x_{ik}) + 2 \sum_{k\ inside} \max(y_{jk} - x_{ik}, 0),

and only the second sum, over coordinates inside the range, is computed element by element, in
chunks that fit into a cache. On a GPU a kernel computes the whole cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from privot.runtime.kernels import kernels_available

CHUNK_ROWS = 1024  # rows of x at a time: their coordinates inside the range then fit into a cache
MAX_PLAIN_DIM = 16  # dimensions up to which one pass for each dimension is fastest


def l1_cost(x: Tensor, y: Tensor) -> Tensor:
    """Compute the L1 distance of every pair of points; differentiable once in both.

    Args:
        x: Points, [..., n, dim].
        y: Points, [..., m, dim].

    Returns:
        Distances, [..., n, m].

    >>> l1_cost(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, -4.0]]))
    tensor([[7.]])
    """
    if x.ndim == y.ndim == 2:
        cost: Tensor = _L1Cost.apply(x, y)
        return cost
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x = x.expand(*batch, *x.shape[-2:]).flatten(0, -3)
    y = y.expand(*batch, *y.shape[-2:]).flatten(0, -3)
    return torch.stack([l1_cost(*pair) for pair in zip(x, y, strict=True)]).unflatten(0, batch)


class _L1Cost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        """Compute the L1 distances.

        Args:
            ctx: Stores the points for the gradient.
            x: Points, [n, dim].
            y: Points, [m, dim].

        Returns:
            Distances, [n, m].
        """
        ctx.save_for_backward(x, y)
        return compute_l1_distances(x, y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        return (
            compute_l1_gradient(x, y, grad_output) if ctx.needs_input_grad[0] else None,
            compute_l1_gradient(y, x, grad_output.T) if ctx.needs_input_grad[1] else None,
        )


def has_kernels_for(x: Tensor) -> bool:
    """Return whether the GPU kernels of this package can compute with a tensor."""
    return x.is_cuda and x.dtype == torch.float32 and kernels_available()


def compute_l1_distances(x: Tensor, y: Tensor) -> Tensor:
    """Compute L1 distances without a gradient: [n, dim] and [m, dim] to [n, m]."""
    if has_kernels_for(x):
        from privot.transport.kernels.l1_cost import fused_l1_cost

        return fused_l1_cost(x, y)
    if x.is_cuda:
        return torch.cdist(x, y, p=1)
    if x.shape[1] <= MAX_PLAIN_DIM:
        total = x.new_zeros(len(x), len(y))
        differences = x.new_empty(len(x), len(y))
        for x_column, y_column in zip(x.T, y.T, strict=True):
            total += torch.sub(x_column[:, None], y_column, out=differences).abs_()
        return total
    return _compute_l1_distances_by_range(x, y)


def _compute_l1_distances_by_range(x: Tensor, y: Tensor) -> Tensor:
    """Compute L1 distances by the formula of this module: [n, dim] and [m, dim] to [n, m]."""
    low = x.amin(0)
    high = x.amax(0)
    clamped = y.clamp(low, high)
    is_inside = (y > low) & (y < high)
    sign = torch.where(y >= high, 1.0, -1.0).to(x)
    total = -sign @ x.T  # [m, n]
    inside_per_row = list(_select_per_row(2 * y, is_inside))
    for start in range(0, len(x), CHUNK_ROWS):
        chunk = total[:, start : start + CHUNK_ROWS]
        doubled = (2 * x[start : start + CHUNK_ROWS].T).contiguous()
        buffer = torch.empty_like(doubled)
        ones = x.new_ones(x.shape[1])
        for row, (indices, values) in enumerate(inside_per_row):
            if count := len(indices):
                differences = torch.index_select(doubled, 0, indices, out=buffer[:count])
                differences.sub_(values[:, None])
                chunk[row] -= ones[:count] @ differences.clamp_(max=0)
    # The distances to the range are added last: large noise must not round small differences away.
    total += (sign * clamped).sum(1)[:, None]
    total += (y - clamped).abs().sum(1)[:, None]
    return total.T


def compute_l1_gradient(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    r"""Compute the gradient in x of :math:`\sum w_{ij} c_{ij}`.

    It is :math:`\sum_j w_{ij} sign(x_{ik} - y_{jk})`.

    Args:
        x: Points, [n, dim].
        y: Points, [m, dim].
        weights: Weights of the pairs, [n, m].

    Returns:
        The gradient, [n, dim].
    """
    if has_kernels_for(x):
        from privot.transport.kernels.l1_cost import fused_l1_gradient

        return fused_l1_gradient(x, y, weights)
    if x.is_cuda or x.shape[1] <= MAX_PLAIN_DIM:
        gradient = torch.empty_like(x)
        differences = weights.new_empty(weights.shape)
        for dim, (x_column, y_column) in enumerate(zip(x.T, y.T, strict=True)):
            signs = torch.sub(x_column[:, None], y_column, out=differences).sign_()
            gradient[:, dim] = signs.mul_(weights).sum(1)
        return gradient
    return _compute_l1_gradient_by_range(x, y, weights)


def _compute_l1_gradient_by_range(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Compute the gradient with one matrix product for all coordinates outside the range of x.

    Args:
        x: Points, [n, dim].
        y: Points, [m, dim].
        weights: Weights of the pairs, [n, m].

    Returns:
        The gradient, [n, dim].
    """
    low = x.amin(0)
    high = x.amax(0)
    is_inside = (y >= low) & (y <= high)  # with the ends, where a sign may be 0
    total = ((y < low).to(x) - (y > high).to(x)).T @ weights.T  # [dim, n]
    weight_rows = weights.T.contiguous()
    columns = x.T.contiguous()
    ones = x.new_ones(len(y))
    differences, selected_weights = x.new_empty(2, len(y), len(x))
    for dim, (indices, values) in enumerate(_select_per_row(y.T, is_inside.T)):
        if count := len(indices):
            torch.index_select(weight_rows, 0, indices, out=selected_weights[:count])
            signs = torch.sub(columns[dim], values[:, None], out=differences[:count]).sign_()
            total[dim] += ones[:count] @ signs.mul_(selected_weights[:count])
    return total.T


def _select_per_row(y: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return for each row of y the indices where the mask is set, and the values there."""
    mask = mask.contiguous()
    counts = mask.sum(1).tolist()
    return zip(mask.nonzero()[:, 1].split(counts), y[mask].split(counts), strict=True)
