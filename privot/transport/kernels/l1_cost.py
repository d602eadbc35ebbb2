"""Triton kernels for the L1 cost and its gradient: differences stay in registers.

The cost of a tile of pairs is summed over the dimensions, and the gradient of a tile of coordinates
over the pairs. Each sum has a fixed order, so a run repeats to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

# 1,000 points of 784 coordinates make 400 to 500 tiles of this size, for 132 multiprocessors.
TILE_ROWS = 64
TILE_COLUMNS = 32
UNROLL = 8  # dimensions, or pairs, whose loads are in flight at once
TILE_OPTIONS = {"rows": TILE_ROWS, "columns": TILE_COLUMNS, "unroll": UNROLL, "num_warps": 4}


@triton.jit
def _l1_cost_kernel(
    x, y, cost, n, m, dim, rows: tl.constexpr, columns: tl.constexpr, unroll: tl.constexpr
):
    """Compute the costs of one tile of pairs, for x [dim, n] and y [dim, m]."""
    i = tl.program_id(0) * rows + tl.arange(0, rows)
    j = tl.program_id(1) * columns + tl.arange(0, columns)
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, dim, unroll):
        for step in tl.static_range(unroll):
            k = start + step
            x_values = tl.load(x + k * n + i, mask=i < n, other=0.0)
            y_values = tl.load(y + k * m + j, mask=j < m, other=0.0)
            total += tl.abs(x_values[:, None] - y_values[None, :])
    tl.store(
        cost + i.to(tl.int64)[:, None] * m + j[None, :],
        total,
        mask=(i < n)[:, None] & (j < m)[None, :],
    )


@triton.jit
def _l1_gradient_kernel(
    x,
    y,
    weights,
    gradient,
    n,
    m,
    dim,
    rows: tl.constexpr,
    columns: tl.constexpr,
    unroll: tl.constexpr,
):
    """Compute the gradient of one tile, for x [n, dim], y [m, dim] and weights [m, n]."""
    i = tl.program_id(0) * rows + tl.arange(0, rows)
    k = tl.program_id(1) * columns + tl.arange(0, columns)
    mask = (i < n)[:, None] & (k < dim)[None, :]
    offset = i.to(tl.int64)[:, None] * dim + k[None, :]
    x_values = tl.load(x + offset, mask=mask, other=0.0)
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, m, unroll):
        for step in tl.static_range(unroll):
            j = start + step
            weight = tl.load(weights + j * n + i, mask=i < n, other=0.0)[:, None]
            y_values = tl.load(y + j * dim + k, mask=k < dim, other=0.0)[None, :]
            total += tl.where(
                x_values > y_values, weight, tl.where(x_values < y_values, -weight, 0.0)
            )
    tl.store(gradient + offset, total, mask=mask)


def pad_rows(rows: Tensor) -> Tensor:
    """Append rows of zeros, which add nothing, up to a multiple of `UNROLL`; contiguous."""
    return pad(rows, (0, 0, 0, -len(rows) % UNROLL)).contiguous()


def fused_l1_cost(x: Tensor, y: Tensor) -> Tensor:
    """Compute the L1 distances of points [n, dim] and [m, dim] in float32: [n, m]."""
    (n, dim) = x.shape
    m = len(y)
    cost = x.new_empty(n, m)
    grid = (triton.cdiv(n, TILE_ROWS), triton.cdiv(m, TILE_COLUMNS))
    _l1_cost_kernel[grid](pad_rows(x.T), pad_rows(y.to(x).T), cost, n, m, dim, **TILE_OPTIONS)
    return cost


def fused_l1_gradient(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Compute the gradient in x of the weighted sum of L1 distances, in float32.

    Args:
        x: Points, [n, dim].
        y: Points, [m, dim].
        weights: Weights of the pairs, [n, m].

    Returns:
        The gradient, [n, dim].
    """
    (n, dim) = x.shape
    m = len(y)
    gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(n, TILE_ROWS), triton.cdiv(dim, TILE_COLUMNS))
    _l1_gradient_kernel[grid](
        x.contiguous(),
        pad_rows(y.to(x)),
        pad_rows(weights.to(x).T),
        gradient,
        n,
        m,
        dim,
        **TILE_OPTIONS,
    )
    return gradient
