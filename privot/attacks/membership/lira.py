r"""LiRA (Carlini et al. 2022): likelihood ratio of an observation with and without the candidate.

An observation is any statistic that is about Gaussian over shadows: the confidence of a classifier,
or the distance to a released set. Arrays of shadows are [shadows, candidates] or [shadows,
candidates, queries]. With N(m_in, s_in^2) fitted to the shadows that were made from a candidate,
and N(m_out, s_out^2) to the others, the score of an observation x of the target is

    online   log N(x; m_in, s_in^2) - log N(x; m_out, s_out^2)
    offline  (x - m_out) / s_out

averaged over queries. The offline score is one-sided: a value far *below* m_out is no evidence of
membership. All arithmetic is float64 and in chunks of candidates, so arrays may be memory-mapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from privot.attacks.membership.gaussian_fit import (
    count_per_candidate,
    estimate_deviation,
    estimate_pooled_deviation,
    fit_distribution,
    read_chunk,
    split_chunks,
)
from privot.errors import SettingError

# With fewer shadows, the deviation of a single candidate is too noisy (Carlini et al., VI-C).
MIN_UNPOOLED_SHADOWS = 64


def balanced_membership(
    num_candidates: int, num_shadows: int, generator: torch.Generator
) -> np.ndarray:
    """Draw the members of each shadow so that every candidate is in exactly half of the shadows.

    Args:
        num_candidates: Number of candidates.
        num_shadows: Number of shadows, even.
        generator: Source of randomness.

    Returns:
        Membership, bool [shadows, candidates].

    Raises:
        SettingError: If the number of shadows is odd or below 2.

    >>> balanced_membership(5, 4, torch.Generator().manual_seed(0)).sum(0).tolist()
    [2, 2, 2, 2, 2]
    """
    if num_shadows < 2 or num_shadows % 2:
        raise SettingError(
            f"shadows={num_shadows}: give an even number, so that each candidate is in half of the "
            "shadows"
        )
    membership = np.empty((num_shadows, num_candidates), bool)
    for chunk in split_chunks(num_candidates, num_shadows):
        draws = torch.rand(
            num_shadows, chunk.stop - chunk.start, dtype=torch.float64, generator=generator
        )
        rank = draws.argsort(0).argsort(0)  # of each number within its column
        membership[:, chunk] = (rank < num_shadows // 2).numpy()
    return membership


@dataclass(frozen=True)
class _Estimator:
    """How the two Gaussians of a candidate are estimated.

    Attributes:
        offline: Whether only shadows without the candidate are used.
        pool_variance: Whether all candidates share one deviation a side. None: with fewer than 64
            shadows.
        use_median: Whether a Gaussian is centred on the median instead of the mean.
        exclude_self: Whether each shadow is the target once, with the other shadows around it.
    """

    offline: bool
    pool_variance: bool | None
    use_median: bool
    exclude_self: bool = False


def lira(
    target: np.ndarray,
    shadow_observations: np.ndarray,
    membership: np.ndarray,
    *,
    offline: bool = False,
    pool_variance: bool | None = None,
    use_median: bool = False,
) -> np.ndarray:
    """Score candidates under one target by comparison with shadows.

    Args:
        target: Observations of the target, [candidates] or [candidates, queries].
        shadow_observations: Observations of shadows, [shadows, candidates(, queries)].
        membership: Which shadow was made from which candidate, bool [shadows, candidates].
        offline: Whether to use only shadows that were made without the candidate.
        pool_variance: Whether all candidates share one deviation a side, that of the residuals
            about each candidate's own centre. None: with fewer than 64 shadows.
        use_median: Whether to centre the Gaussians on medians instead of means.

    Returns:
        Scores, [candidates].

    Raises:
        SettingError: If shapes do not fit, there are too few shadows, or a value is not finite.

    >>> shadows = np.array([[1.0], [1.2], [3.0], [3.2]])
    >>> membership = np.array([[False], [False], [True], [True]])
    >>> high, low = (lira(np.array([x]), shadows, membership)[0] for x in (3.1, 1.1))
    >>> bool(high > 0 > low)
    True
    """
    if np.shape(target) != np.shape(shadow_observations)[1:]:
        raise SettingError(
            f"the target has observations {list(np.shape(target))}, the shadows "
            f"{list(np.shape(shadow_observations))}: they must agree but for the first dimension"
        )
    return _score_candidates(
        np.asarray(target)[None],
        shadow_observations,
        membership,
        _Estimator(offline, pool_variance, use_median),
        np.empty((1, membership.shape[1])),
    )[0]


def lira_leave_one_out(
    observations: np.ndarray,
    membership: np.ndarray,
    *,
    offline: bool = False,
    pool_variance: bool | None = None,
    use_median: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Score candidates with each shadow as the target once and the other shadows as its shadows.

    The scores are those of `lira`, called once for each shadow, but need one pass: the target's own
    part is subtracted from sums over all shadows. With medians it takes N log N steps. Pairs of one
    shadow or one candidate are not independent, so intervals must be taken over shadows. Without
    any leak, members score a little *lower* (AUC 0.49 with 16 shadows), since one shadow fewer is
    left on their side.

    Args:
        observations: Observations, [shadows, candidates] or [shadows, candidates, queries].
        membership: Which shadow was made from which candidate, bool [shadows, candidates].
        offline: See `lira`.
        pool_variance: See `lira`.
        use_median: See `lira`.
        out: Array that takes the scores, for example a memory-mapped file.

    Returns:
        Scores, [shadows, candidates].

    Raises:
        SettingError: If shapes do not fit, there are too few shadows, or a value is not finite.

    >>> membership = balanced_membership(3, 8, torch.Generator().manual_seed(0))
    >>> noise = np.random.default_rng(0).normal(size=membership.shape)
    >>> scores = lira_leave_one_out(4 * membership + noise, membership)
    >>> bool(scores[membership].mean() > 0 > scores[~membership].mean())
    True
    """
    out = np.empty(np.shape(membership)) if out is None else out
    estimator = _Estimator(offline, pool_variance, use_median, exclude_self=True)
    return _score_candidates(observations, observations, membership, estimator, out)


def _score_candidates(
    targets: Any,
    shadow_observations: Any,
    membership: np.ndarray,
    estimator: _Estimator,
    out: np.ndarray,
) -> np.ndarray:
    """Score candidates under one or more targets.

    Args:
        targets: Observations, [targets, candidates(, queries)].
        shadow_observations: Observations, [shadows, candidates(, queries)].
        membership: Which shadow was made from which candidate, bool [shadows, candidates].
        estimator: How the Gaussians are estimated.
        out: Array that takes the scores, [targets, candidates].

    Returns:
        ``out``.
    """
    membership = np.asarray(membership)
    shape = np.shape(shadow_observations)
    if (
        membership.dtype != bool
        or len(shape) not in (2, 3)
        or membership.shape != shape[:2]
        or not membership.size
    ):
        raise SettingError(
            f"observations {list(shape)} and membership {list(membership.shape)}: both must begin "
            "with [shadows, candidates], and membership must be bool"
        )
    sides = (False,) if estimator.offline else (False, True)
    pool_variance = estimator.pool_variance
    if pool_variance is None:
        pool_variance = len(membership) < MIN_UNPOOLED_SHADOWS
    pooled_deviations = [
        estimate_pooled_deviation(shadow_observations, membership, side, estimator.exclude_self)
        if pool_variance
        else None
        for side in sides
    ]
    for chunk in split_chunks(membership.shape[1], count_per_candidate(shape)):
        target_values = read_chunk(targets, chunk)
        shadow_values = read_chunk(shadow_observations, chunk)
        z_scores = []
        deviations = []
        for side, pooled_deviation in zip(sides, pooled_deviations, strict=True):
            distribution = fit_distribution(
                shadow_values,
                membership[:, chunk] == side,
                estimator.exclude_self,
                estimator.use_median,
            )
            deviation = (
                estimate_deviation(distribution) if pooled_deviation is None else pooled_deviation
            )
            z_scores.append((target_values - distribution.center) / deviation)
            deviations.append(deviation)
        scores = z_scores[0]
        if not estimator.offline:
            z_out, z_in = z_scores
            scores = 0.5 * (z_out**2 - z_in**2) + np.log(deviations[0]) - np.log(deviations[1])
        out[:, chunk] = scores.mean(2)
    return out
