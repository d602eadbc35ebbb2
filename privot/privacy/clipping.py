"""Clipping to a norm, rounding to a grid, and exact sums of what was clipped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from privot.runtime.kernels import kernels_available

# privacy: a clipped value has a norm of at most 2^30 grid steps. Below 2^53 steps, a float64 sum of
# integers is exact in any order; an int64 sum always is.
MAX_EXACT_SUM = 2.0**53
NORM_MARGIN = 1 - 1e-12  # so that rounding cannot push a clipped norm above the clip norm


def compute_clip_factors(rows: Tensor, clip_norm: float, unit: float) -> Tensor:
    """Compute the factor that clips each row.

    Args:
        rows: [rows, dim].
        clip_norm: The largest L2 norm of a row.
        unit: The power of two in which the clipped row is expressed.

    Returns:
        float64 [rows]; 0 for a row with a value that is not finite.
    """
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    max_norm = clip_norm * NORM_MARGIN
    scale = torch.where(norms > max_norm, max_norm / norms, 1.0)
    return torch.where(norms.isfinite(), scale / unit, 0.0)


def clip_rows(rows: Tensor, clip_norm: float, unit: float = 1.0) -> Tensor:
    """Scale each row to a norm of at most ``clip_norm``; a row that is not finite becomes zero.

    Args:
        rows: [rows, ...].
        clip_norm: The largest L2 norm of a row.
        unit: The power of two in which the result is expressed.

    Returns:
        float64 [rows, dim].
    """
    rows = flatten_rows(rows)
    factors = compute_clip_factors(rows, clip_norm, unit)[:, None]
    # The factors are float64, and so is the product. A float64 copy of the rows would need twice
    # their memory.
    return torch.where(factors != 0, rows, 0.0) * factors


def clip_to_grid(rows: Tensor, clip_norm: float, grid: float) -> Tensor:
    """Clip each row and round it toward zero, which cannot increase its norm.

    Args:
        rows: [rows, ...].
        clip_norm: The largest L2 norm of a row.
        grid: The grid step, a power of two.

    Returns:
        Integers in steps of the grid, as float64 [rows, dim].
    """
    return clip_rows(rows, clip_norm, grid).trunc_()


def sum_clipped_rows(rows: Tensor, clip_norm: float, grid: float) -> Tensor:
    """Add up what `clip_to_grid` gives, over the rows.

    Args:
        rows: [rows, ...].
        clip_norm: The largest L2 norm of a row.
        grid: The grid step, a power of two.

    Returns:
        Integers in steps of the grid, as float64 [dim].
    """
    if not (rows.is_cuda and kernels_available() and rows.dtype == torch.float32):
        return clip_to_grid(rows, clip_norm, grid).sum(0)
    from privot.privacy.kernels.clipped_sum import sum_truncated_products

    flat_rows = flatten_rows(rows)
    return sum_truncated_products(flat_rows, compute_clip_factors(flat_rows, clip_norm, grid))


def flatten_rows(rows: Tensor) -> Tensor:
    """Reshape [rows, ...] to [rows, dim], without a graph of gradients."""
    return rows.detach().reshape(len(rows), math.prod(rows.shape[1:]))
