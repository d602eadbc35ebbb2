"""Wasserstein distances between two clouds of points: sliced, for any size, and exact, for small ones."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from privot.errors import SettingError

LARGEST = 5000  # points of a cloud in an exact distance: its cost matrix grows with the square
PORTION = 2**25  # projected values held in one go


class Distance(NamedTuple):
    """``value`` and its standard ``error``, 0 for an exact one."""

    value: float
    error: float


def sliced_wasserstein(
    x: Tensor, y: Tensor, slices: int, generator: torch.Generator, p: float = 2
) -> Distance:
    r"""SW_p of clouds ``x`` [n, d] and ``y`` [m, d]: the mean over directions of the distance of their shadows.

    SW_p^p = E_u \int_0^1 |F_x^{-1}(t) - F_y^{-1}(t)|^p dt, with F the distribution of <u, .> and u uniform on the sphere.

    The quantile functions are steps, so that the integral is exact for any two sizes; equal sizes are simply sorted and paired.
    ``error`` is what the finite number of ``slices`` leaves open (delta method), not what the finite clouds do.
    Directions come from ``generator``, projections have the precision of ``x``, and sums are in float64.

    >>> x = torch.tensor([[0.0], [1.0]])
    >>> sliced_wasserstein(x, x + 3, 4, torch.Generator().manual_seed(0)).value
    3.0
    """
    _check(x, y, p)
    if slices < 1:
        raise SettingError(f"slices={slices}: at least 1 is needed")
    left, right, widths = _steps(len(x), len(y), x.device)
    powers = []
    for start in range(0, slices, portion := max(1, PORTION // max(len(x), len(y), x.shape[1]))):
        shape = (x.shape[1], min(portion, slices - start))
        directions = torch.randn(
            shape, generator=generator, device=generator.device, dtype=torch.float64
        )
        directions = (directions / directions.norm(dim=0)).to(x)
        one, two = ((cloud @ directions).double().sort(dim=0).values for cloud in (x, y.to(x)))
        powers.append(widths @ (one[left] - two[right]).abs() ** p)
    each = torch.cat(powers)
    mean = each.mean().item()
    value = mean ** (1 / p)
    spread = each.std().item() / math.sqrt(slices) if slices > 1 else math.nan
    return Distance(value, spread / p * value / mean if mean else 0.0)


def exact_wasserstein(x: Tensor, y: Tensor, p: float = 2) -> Distance:
    r"""W_p of clouds ``x`` [n, d] and ``y`` [m, d], of up to 5,000 points each, by linear programming; needs the package POT.

    W_p^p = min_P \sum_{ij} P_ij |x_i - y_j|^p over couplings P >= 0 with row sums 1/n and column sums 1/m.

    >>> x = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    >>> exact_wasserstein(x, x + torch.tensor([3.0, 4.0])).value  # doctest: +SKIP
    5.0
    """
    _check(x, y, p)
    if max(len(x), len(y)) > LARGEST:
        raise SettingError(
            f"{max(len(x), len(y)):,} points: an exact distance takes at most {LARGEST:,}; use the sliced one"
        )
    try:
        import ot
    except ImportError:
        raise SettingError(
            "an exact Wasserstein distance needs the package POT: pip install 'privot[measures]'"
        ) from None
    costs = (
        torch.cdist(
            x.double(), y.to(x.device).double(), compute_mode="donot_use_mm_for_euclid_dist"
        )
        ** p
    )
    total, log = ot.emd2([], [], costs.cpu().numpy(), numItermax=10_000_000, log=True)
    if log["warning"]:
        raise SettingError(
            f"{len(x):,} and {len(y):,} points: the exact distance was not found; take fewer points, or the sliced one"
        )
    return Distance(max(float(total), 0.0) ** (1 / p), 0.0)


def _steps(n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The intervals on which two quantile functions are constant: index in each cloud [steps], width [steps]. Whole numbers, so no gap."""
    ends = torch.cat([torch.arange(1, n + 1) * m, torch.arange(1, m + 1) * n]).unique()
    widths = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype)).double() / (n * m)
    return (((ends - 1) // m).to(device), ((ends - 1) // n).to(device), widths.to(device))


def _check(x: Tensor, y: Tensor, p: float) -> None:
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or not len(x) or not len(y):
        raise SettingError(
            f"clouds are {list(x.shape)} and {list(y.shape)}: [n, d] and [m, d] are needed, with the same d"
        )
    if p < 1:
        raise SettingError(f"p={p}: at least 1 is needed")
    if not (x.isfinite().all() and y.isfinite().all()):
        raise SettingError("a cloud holds NaN or infinite values")
