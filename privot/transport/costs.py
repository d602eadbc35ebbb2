r"""The city-block cost :math:`c_{ij} = \sum_k |x_{ik} - y_{jk}|`, and its gradient, without a table of all differences.

Noise that protects carries most coordinates of y out of the range of the x, and there :math:`|x - y|` is linear: such coordinates are one
product of matrices. With :math:`s = 1` above the range and :math:`-1` elsewhere

.. math:: c_{ij} = \sum_k s_{jk} (y_{jk} - x_{ik}) + 2 \sum_{k\ inside} \max(y_{jk} - x_{ik}, 0),

and only the second sum, over coordinates inside the range, is done one by one, in pieces that a cache holds. On a GPU a kernel does it all.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

PIECE = 1024  # rows of x at a time: what lies inside the range then fits into a cache
FEW = 16  # coordinates up to which one plain pass for each is quickest
TRITON = find_spec("triton") is not None


def city_block(x: Tensor, y: Tensor) -> Tensor:
    """[..., n, dim] and [..., m, dim] to [..., n, m]; both may carry a gradient.

    >>> city_block(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, -4.0]]))
    tensor([[7.]])
    """
    if x.ndim == y.ndim == 2:
        made: Tensor = _CityBlock.apply(x, y)
        return made
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x = x.expand(*batch, *x.shape[-2:]).flatten(0, -3)
    y = y.expand(*batch, *y.shape[-2:]).flatten(0, -3)
    return torch.stack([city_block(*pair) for pair in zip(x, y, strict=True)]).unflatten(0, batch)


class _CityBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return distances(x, y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        return (
            signs(x, y, weights) if ctx.needs_input_grad[0] else None,
            signs(y, x, weights.T) if ctx.needs_input_grad[1] else None,
        )


def fused(x: Tensor) -> bool:
    """Whether there are kernels for it."""
    return x.is_cuda and x.dtype == torch.float32 and TRITON


def distances(x: Tensor, y: Tensor) -> Tensor:
    """The cost without a gradient: [n, dim], [m, dim] to [n, m]."""
    if fused(x):
        from privot.transport.kernels.l1_cost import summed_distances

        return summed_distances(x, y)
    if x.is_cuda:
        return torch.cdist(x, y, p=1)
    if x.shape[1] <= FEW:
        total = x.new_zeros(len(x), len(y))
        gap = x.new_empty(len(x), len(y))
        for one, other in zip(x.T, y.T, strict=True):
            total += torch.sub(one[:, None], other, out=gap).abs_()
        return total
    low = x.amin(0)
    high = x.amax(0)
    near = y.clamp(low, high)
    inside = (y > low) & (y < high)
    side = torch.where(y >= high, 1.0, -1.0).to(x)
    # [m, n]
    total = -side @ x.T
    found = list(_inside(2 * y, inside))
    for start in range(0, len(x), PIECE):
        part = total[:, start : start + PIECE]
        columns = (2 * x[start : start + PIECE].T).contiguous()
        room = torch.empty_like(columns)
        ones = x.new_ones(x.shape[1])
        for row, (places, values) in enumerate(found):
            if count := len(places):
                below = torch.index_select(columns, 0, places, out=room[:count]).sub_(
                    values[:, None]
                )
                part[row] -= ones[:count] @ below.clamp_(max=0)
    # what lies beyond the range comes last: large noise must not round small differences away
    total += (side * near).sum(1)[:, None]
    total += (y - near).abs().sum(1)[:, None]
    return total.T


def signs(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    r"""The gradient in x of :math:`\sum w_{ij} c_{ij}`, which is :math:`\sum_j w_{ij} sign(x_{ik} - y_{jk})`: [n, dim]."""
    if fused(x):
        from privot.transport.kernels.l1_cost import summed_signs

        return summed_signs(x, y, weights)
    if x.is_cuda or x.shape[1] <= FEW:
        found = torch.empty_like(x)
        gap = weights.new_empty(weights.shape)
        for dim, (one, other) in enumerate(zip(x.T, y.T, strict=True)):
            found[:, dim] = torch.sub(one[:, None], other, out=gap).sign_().mul_(weights).sum(1)
        return found
    low = x.amin(0)
    high = x.amax(0)
    inside = (y >= low) & (y <= high)  # with the ends, where a sign may be 0
    total = ((y < low).to(x) - (y > high).to(x)).T @ weights.T  # [dim, n]
    rows = weights.T.contiguous()
    columns = x.T.contiguous()
    ones = x.new_ones(len(y))
    gaps, taken = x.new_empty(2, len(y), len(x))
    for dim, (places, values) in enumerate(_inside(y.T, inside.T)):
        if count := len(places):
            torch.index_select(rows, 0, places, out=taken[:count])
            part = (
                torch.sub(columns[dim], values[:, None], out=gaps[:count])
                .sign_()
                .mul_(taken[:count])
            )
            total[dim] += ones[:count] @ part
    return total.T


def _inside(y: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each row of y which places are marked, and the values there."""
    mask = mask.contiguous()
    counts = mask.sum(1).tolist()
    return zip(mask.nonzero()[:, 1].split(counts), y[mask].split(counts), strict=True)
