"""Wasserstein distances between two sets of points: sliced for any size, exact for small sets."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from privot.errors import SettingError

MAX_EXACT_POINTS = 5000  # per set; the cost matrix of an exact distance grows with the square
MAX_PROJECTIONS_PER_CHUNK = 2**25  # projected values in memory at a time


class WassersteinDistance(NamedTuple):
    """A distance and its standard error, which is 0 for an exact distance."""

    value: float
    standard_error: float


def sliced_wasserstein(
    x: Tensor, y: Tensor, num_projections: int, generator: torch.Generator, p: float = 2
) -> WassersteinDistance:
    r"""Compute the sliced Wasserstein distance SW_p of two sets of points.

    SW_p^p = E_u \int_0^1 |F_x^{-1}(t) - F_y^{-1}(t)|^p dt, with F the distribution of <u, .> and u
    uniform on the sphere.

    The quantile functions are step functions, so the integral is exact for any two sizes. Points of
    equally large sets are sorted and paired. Projections have the precision of ``x``, and sums are
    in float64.

    Args:
        x: Points [n, d].
        y: Points [m, d].
        num_projections: Number of random directions.
        generator: Draws the directions.
        p: Order of the distance, at least 1.

    Returns:
        The distance and its standard error over directions (delta method). The error does not
        include the finite number of points.

    Raises:
        SettingError: The points or the numbers do not fit.

    >>> x = torch.tensor([[0.0], [1.0]])
    >>> sliced_wasserstein(x, x + 3, 4, torch.Generator().manual_seed(0)).value
    3.0
    """
    _check_points(x, y, p)
    if num_projections < 1:
        raise SettingError(f"num_projections={num_projections} must be at least 1.")
    x_indices, y_indices, widths = _align_quantiles(len(x), len(y), x.device)
    chunk_size = max(1, MAX_PROJECTIONS_PER_CHUNK // max(len(x), len(y), x.shape[1]))
    chunks = []
    for start in range(0, num_projections, chunk_size):
        shape = (x.shape[1], min(chunk_size, num_projections - start))
        directions = torch.randn(
            shape, generator=generator, device=generator.device, dtype=torch.float64
        )
        directions = (directions / directions.norm(dim=0)).to(x)
        x_sorted, y_sorted = (
            (points @ directions).double().sort(dim=0).values for points in (x, y.to(x))
        )
        chunks.append(widths @ (x_sorted[x_indices] - y_sorted[y_indices]).abs() ** p)
    powers = torch.cat(chunks)
    mean = powers.mean().item()
    value = mean ** (1 / p)
    spread = math.nan
    if num_projections > 1:
        spread = powers.std().item() / math.sqrt(num_projections)
    return WassersteinDistance(value, spread / p * value / mean if mean else 0.0)


def exact_wasserstein(x: Tensor, y: Tensor, p: float = 2) -> WassersteinDistance:
    r"""Compute the exact Wasserstein distance W_p by linear programming.

    W_p^p = min_P \sum_{ij} P_ij |x_i - y_j|^p over couplings P >= 0 with row sums 1/n and column
    sums 1/m.

    Args:
        x: Points [n, d], at most 5,000.
        y: Points [m, d], at most 5,000.
        p: Order of the distance, at least 1.

    Returns:
        The distance, with a standard error of 0.

    Raises:
        SettingError: The points do not fit, the package POT is missing, or the solver fails.

    >>> x = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    >>> exact_wasserstein(x, x + torch.tensor([3.0, 4.0])).value  # doctest: +SKIP
    5.0
    """
    _check_points(x, y, p)
    if max(len(x), len(y)) > MAX_EXACT_POINTS:
        raise SettingError(
            f"An exact Wasserstein distance takes at most {MAX_EXACT_POINTS:,} points, not "
            f"{max(len(x), len(y)):,}. Use the sliced one."
        )
    try:
        import ot
    except ImportError:
        raise SettingError(
            "An exact Wasserstein distance needs the package POT. "
            "Run pip install 'privot[measures]'."
        ) from None
    distances = torch.cdist(
        x.double(), y.to(x.device).double(), compute_mode="donot_use_mm_for_euclid_dist"
    )
    costs = (distances**p).cpu().numpy()
    total, log = ot.emd2([], [], costs, numItermax=10_000_000, log=True)
    if log["warning"]:
        raise SettingError(
            f"The solver did not find the exact distance of {len(x):,} and {len(y):,} points. "
            "Use fewer points, or the sliced distance."
        )
    return WassersteinDistance(max(float(total), 0.0) ** (1 / p), 0.0)


def _align_quantiles(n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Find the intervals on which the quantile functions of n and of m points are both constant.

    Args:
        n: Number of points of the first set.
        m: Number of points of the second set.
        device: Where the result is put.

    Returns:
        Index of the sorted point in each set, [intervals] twice, and width [intervals] of each
        interval. The ends are computed in integers, so no interval is lost to rounding.
    """
    ends = torch.cat([torch.arange(1, n + 1) * m, torch.arange(1, m + 1) * n]).unique()
    widths = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype)).double() / (n * m)
    return (((ends - 1) // m).to(device), ((ends - 1) // n).to(device), widths.to(device))


def _check_points(x: Tensor, y: Tensor, p: float) -> None:
    """Raise a SettingError for points of wrong shape, infinite points or an order below 1."""
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or not len(x) or not len(y):
        raise SettingError(
            f"The points are {list(x.shape)} and {list(y.shape)}. The shapes [n, d] and [m, d] are "
            "needed, with the same d and at least one point each."
        )
    if p < 1:
        raise SettingError(f"p={p} must be at least 1.")
    if not (x.isfinite().all() and y.isfinite().all()):
        raise SettingError("The points contain NaN or infinite values.")
