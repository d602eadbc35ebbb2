"""Gaussians of observations over shadows with and without a candidate, for LiRA.

Observations are [shadows, candidates] or [shadows, candidates, queries], and are read in chunks of
candidates, so that they may be memory-mapped files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from privot.errors import SettingError

CHUNK_ELEMENTS = 2**21  # observations in memory at a time
MIN_DEVIATION = 1e-6  # single-precision logits are not more precise


class Distribution(NamedTuple):
    """Gaussians of one side, [1 or shadows, candidates, queries].

    Attributes:
        num_shadows: Number of shadows of the side.
        center: Their mean or median.
        sum_of_squares: Sum of squares about their mean.
    """

    num_shadows: np.ndarray
    center: np.ndarray
    sum_of_squares: np.ndarray


def fit_distribution(
    values: np.ndarray, mask: np.ndarray, exclude_self: bool, use_median: bool = False
) -> Distribution:
    """Fit the Gaussian of one side.

    Args:
        values: Observations, [shadows, candidates, queries].
        mask: Which shadows are on this side, bool [shadows, candidates].
        exclude_self: Whether to fit one Gaussian for each shadow, without this shadow.
        use_median: Whether to centre on the median.

    Returns:
        The Gaussians of all candidates.
    """
    mask = mask[..., None]
    count = mask.sum(0, keepdims=True)
    remaining = count - mask if exclude_self else count
    if remaining.min() < 1:
        raise SettingError(
            "a candidate has no shadow with it, or none without it. Prepare more shadows, or use "
            "the offline attack."
        )
    mean = np.where(mask, values, 0).sum(0, keepdims=True) / count
    residual = np.where(mask, values - mean, 0)
    squares = (residual**2).sum(0, keepdims=True)
    center = mean
    if exclude_self:
        # Leaving out x changes the mean and the sum of squares by what x contributed. For shadows
        # of the other side the residual is 0, so nothing changes.
        squares = np.maximum(squares - residual**2 * count / np.maximum(count - 1, 1), 0)
        center = mean - residual / np.maximum(count - 1, 1)
    if use_median:
        center = _compute_median(
            np.where(mask, values, np.inf), mask if exclude_self else None, remaining
        )
    return Distribution(remaining, center, squares)


def _compute_median(
    values: np.ndarray, self_mask: np.ndarray | None, remaining_counts: np.ndarray
) -> np.ndarray:
    """Compute the median of the finite values in each column.

    Args:
        values: Observations, infinite where a shadow is on the other side.
        self_mask: Shadows whose own value is left out of their median; None: no value is left out.
        remaining_counts: Number of values that each median is over.

    Returns:
        Medians, [1 or shadows, candidates, queries].
    """
    order = values.argsort(0, kind="stable")
    ordered = np.take_along_axis(values, order, 0)
    if self_mask is None:
        rank = np.full((1, *values.shape[1:]), len(values))
    else:
        rank = np.where(self_mask, order.argsort(0, kind="stable"), len(values))
    # Leaving out a value shifts all values from its rank on by one.
    lower, upper = (
        index + (rank <= index) for index in ((remaining_counts - 1) // 2, remaining_counts // 2)
    )
    return (np.take_along_axis(ordered, lower, 0) + np.take_along_axis(ordered, upper, 0)) / 2


def estimate_deviation(distribution: Distribution) -> np.ndarray:
    """Estimate the standard deviation of each candidate on its own."""
    if distribution.num_shadows.min() < 2:
        raise SettingError(
            "the deviation of a single candidate needs at least 2 shadows a side besides the "
            "target. Use pool_variance=True."
        )
    variance = distribution.sum_of_squares / (distribution.num_shadows - 1)
    return np.maximum(np.sqrt(variance), MIN_DEVIATION)


def estimate_pooled_deviation(
    shadow_observations: Any, membership: np.ndarray, is_member: bool, exclude_self: bool
) -> np.ndarray:
    """Estimate one standard deviation for all candidates.

    Args:
        shadow_observations: Observations, [shadows, candidates(, queries)].
        membership: Which shadow was made from which candidate, bool [shadows, candidates].
        is_member: The side.
        exclude_self: Whether to leave out each shadow once.

    Returns:
        Deviations, [1 or shadows, 1, queries].
    """
    squares = np.zeros(())
    degrees_of_freedom = np.zeros(())
    per_candidate = count_per_candidate(np.shape(shadow_observations))
    for chunk in split_chunks(membership.shape[1], per_candidate):
        distribution = fit_distribution(
            read_chunk(shadow_observations, chunk),
            membership[:, chunk] == is_member,
            exclude_self,
        )
        squares = squares + distribution.sum_of_squares.sum(1, keepdims=True)
        degrees_of_freedom = degrees_of_freedom + (distribution.num_shadows - 1).sum(
            1, keepdims=True
        )
    if degrees_of_freedom.min() < 1:
        raise SettingError(
            "a deviation needs at least 2 shadows a side besides the target. Prepare more shadows."
        )
    return np.maximum(np.sqrt(squares / degrees_of_freedom), MIN_DEVIATION)


def read_chunk(observations: Any, chunk: slice) -> np.ndarray:
    """Read some candidates as float64 [shadows, candidates, queries]."""
    values = np.asarray(observations[:, chunk], np.float64)
    if not np.isfinite(values).all():
        raise SettingError("observations contain NaN or infinite values")
    return values[..., None] if values.ndim == 2 else values


def count_per_candidate(shape: tuple[int, ...]) -> int:
    """Count the observations of a candidate in [shadows, candidates(, queries)]."""
    return max(1, int(np.prod(shape)) // shape[1])


def split_chunks(num_candidates: int, elements_per_candidate: int) -> Iterator[slice]:
    """Divide the candidates into chunks of at most `CHUNK_ELEMENTS` observations."""
    step = max(1, CHUNK_ELEMENTS // elements_per_candidate)
    return (
        slice(start, min(start + step, num_candidates)) for start in range(0, num_candidates, step)
    )
