r"""The city-block cost and its gradient on a GPU: every difference is made in registers and never written.

The cost of a tile of pairs is added up over the coordinates, the gradient of a tile of coordinates over the pairs; a sum has one order, so
that a run repeats to the bit. Imported only where there is Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

# a tile: 1,000 points of 784 coordinates make some 400 to 500 of them, for 132 processors
ROWS = 64
COLUMNS = 32
AHEAD = 8  # coordinates, or pairs, whose loads are under way at once
TILE = {"rows": ROWS, "columns": COLUMNS, "ahead": AHEAD, "num_warps": 4}


@triton.jit
def _distances(
    x, y, cost, n, m, dim, rows: tl.constexpr, columns: tl.constexpr, ahead: tl.constexpr
):  # x [dim, n], y [dim, m]
    i = tl.program_id(0) * rows + tl.arange(0, rows)
    j = tl.program_id(1) * columns + tl.arange(0, columns)
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, dim, ahead):
        for step in tl.static_range(ahead):
            place = start + step
            one = tl.load(x + place * n + i, mask=i < n, other=0.0)
            other = tl.load(y + place * m + j, mask=j < m, other=0.0)
            total += tl.abs(one[:, None] - other[None, :])
    tl.store(
        cost + i.to(tl.int64)[:, None] * m + j[None, :],
        total,
        mask=(i < n)[:, None] & (j < m)[None, :],
    )


@triton.jit
def _signs(
    x, y, weights, found, n, m, dim, rows: tl.constexpr, columns: tl.constexpr, ahead: tl.constexpr
):  # x [n, dim], y [m, dim], weights [m, n]
    i = tl.program_id(0) * rows + tl.arange(0, rows)
    k = tl.program_id(1) * columns + tl.arange(0, columns)
    here = (i < n)[:, None] & (k < dim)[None, :]
    where = i.to(tl.int64)[:, None] * dim + k[None, :]
    point = tl.load(x + where, mask=here, other=0.0)
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, m, ahead):
        for step in tl.static_range(ahead):
            place = start + step
            weight = tl.load(weights + place * n + i, mask=i < n, other=0.0)[:, None]
            other = tl.load(y + place * dim + k, mask=k < dim, other=0.0)[None, :]
            total += tl.where(point > other, weight, tl.where(point < other, -weight, 0.0))
    tl.store(found + where, total, mask=here)


def filled(rows: Tensor) -> Tensor:
    """With rows of zeros, which add nothing, up to a whole number of strides; contiguous."""
    return pad(rows, (0, 0, 0, -len(rows) % AHEAD)).contiguous()


def summed_distances(x: Tensor, y: Tensor) -> Tensor:
    """[n, dim] and [m, dim], float32, to [n, m]."""
    (n, dim) = x.shape
    m = len(y)
    cost = x.new_empty(n, m)
    grid = (triton.cdiv(n, ROWS), triton.cdiv(m, COLUMNS))
    _distances[grid](filled(x.T), filled(y.to(x).T), cost, n, m, dim, **TILE)
    return cost


def summed_signs(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """[n, dim], [m, dim] and [n, m], float32, to [n, dim]."""
    (n, dim) = x.shape
    m = len(y)
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(n, ROWS), triton.cdiv(dim, COLUMNS))
    _signs[grid](x.contiguous(), filled(y.to(x)), filled(weights.to(x).T), found, n, m, dim, **TILE)
    return found
