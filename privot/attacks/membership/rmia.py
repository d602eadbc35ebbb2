r"""RMIA (Zarifzadeh, Liu and Shokri 2024): relative membership inference.

The target should be more confident of a member, compared with reference models, than of records
that it was not trained on:

    ratio(x) = p(y | x; target) / P(x)
    score(x) = share of population records z with ratio(x) / ratio(z) > gamma

P(x) = (mean over references with x + mean over references without x) / 2. If there are no
references with x, which is always so offline and for the population, they are assumed to have
p_in = a p_out + 1 - a, so P(x) = ((1 + a) mean_out + 1 - a) / 2. If there are none without x, the
same line is solved for p_out. So one reference is enough. For one target, the score orders
candidates as ratio(x) does. The population makes the scores of several targets comparable.

All inputs are log p(y | x), see `negative_loss`: [references, candidates], and
[references, records] of the population.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from privot.errors import SettingError

CHUNK_ELEMENTS = 2**21  # probabilities in memory at a time
MIN_PROBABILITY = 1e-300  # smaller ones have no finite logarithm
ROUNDING_TOLERANCE = 1e-9  # of a log p of 0


def rmia(
    target: np.ndarray,
    references: np.ndarray,
    membership: np.ndarray,
    population: np.ndarray,
    population_references: np.ndarray,
    population_membership: np.ndarray | None = None,
    *,
    offline: bool = False,
    a: float = 0.3,
    gamma: float = 2.0,
) -> np.ndarray:
    """Score candidates under one target. The defaults of a and gamma are the paper's for CIFAR-10.

    Args:
        target: Log p of the target, [candidates].
        references: Log p of references, [references, candidates].
        membership: Which reference was trained on which candidate, bool [references, candidates].
        population: Log p of the target on records it was not trained on, [records].
        population_references: Log p of references on these records, [references, records].
        population_membership: Which reference was trained on which record, bool
            [references, records]. It is left out for this record.
        offline: Whether to use only references that were trained without the candidate.
        a: Slant of the line between p_in and p_out, above 0 and at most 1.
        gamma: Threshold of the ratio, above 0.

    Returns:
        Scores, [candidates].

    Raises:
        SettingError: If shapes do not fit, a number is out of range, or references are missing.

    >>> target, references = np.log([0.99, 0.5]), np.log([[0.5, 0.5]])
    >>> membership = np.zeros((1, 2), bool)
    >>> population = np.log([0.5, 0.6])
    >>> rmia(target, references, membership, population, population[None], gamma=1.1).tolist()
    [1.0, 0.0]
    """
    if population_membership is None:
        population_membership = np.zeros(np.shape(population_references), bool)
    ratios = _compute_log_ratios(
        np.asarray(target)[None], references, membership, exclude_self=False, offline=offline, a=a
    )
    population_ratios = _compute_log_ratios(
        np.asarray(population)[None],
        population_references,
        population_membership,
        exclude_self=False,
        offline=True,
        a=a,
    )
    return _compute_dominated_share(ratios, population_ratios, gamma)[0]


def rmia_leave_one_out(
    observations: np.ndarray,
    membership: np.ndarray,
    population: np.ndarray,
    *,
    offline: bool = False,
    a: float = 0.3,
    gamma: float = 2.0,
) -> np.ndarray:
    """Score candidates with each model as the target once and the other models as references.

    Args:
        observations: Log p, [models, candidates].
        membership: Which model was trained on which candidate, bool [models, candidates].
        population: Log p of records that no model was trained on, [models, records].
        offline: See `rmia`.
        a: See `rmia`.
        gamma: See `rmia`.

    Returns:
        Scores, [models, candidates].

    Raises:
        SettingError: If shapes do not fit, a number is out of range, or references are missing.
    """
    no_members = np.zeros(np.shape(population), bool)
    ratios = _compute_log_ratios(
        observations, observations, membership, exclude_self=True, offline=offline, a=a
    )
    population_ratios = _compute_log_ratios(
        population, population, no_members, exclude_self=True, offline=True, a=a
    )
    return _compute_dominated_share(ratios, population_ratios, gamma)


def _compute_dominated_share(
    log_ratios: np.ndarray, population_log_ratios: np.ndarray, gamma: float
) -> np.ndarray:
    """Compute the share of the population that each candidate dominates by a factor of gamma.

    The population is sorted and searched, instead of comparing all pairs.

    Args:
        log_ratios: Log ratios of candidates, [targets, candidates].
        population_log_ratios: Log ratios of the population, [targets, records].
        gamma: The factor.

    Returns:
        Shares, [targets, candidates].
    """
    num_records = population_log_ratios.shape[1]
    if gamma <= 0 or not num_records:
        raise SettingError(
            f"gamma={gamma} and {num_records} population records: both must be above 0"
        )
    counts = [
        np.searchsorted(np.sort(population), candidates - np.log(gamma), side="left")
        for candidates, population in zip(log_ratios, population_log_ratios, strict=True)
    ]
    return np.stack(counts) / num_records


def _compute_log_ratios(
    targets: Any,
    references: Any,
    membership: np.ndarray,
    *,
    exclude_self: bool,
    offline: bool,
    a: float,
) -> np.ndarray:
    """Compute log ratio(x).

    Args:
        targets: Log p, [targets, candidates].
        references: Log p, [references, candidates].
        membership: Which reference was trained on which candidate, bool [references, candidates].
        exclude_self: Whether the targets are the references, each left out of its own P(x).
        offline: Whether to use only references that were trained without the candidate.
        a: See `rmia`.

    Returns:
        Log ratios, [targets, candidates].
    """
    membership = np.asarray(membership)
    if (
        not 0 < a <= 1
        or membership.dtype != bool
        or np.ndim(references) != 2
        or membership.shape != np.shape(references)
    ):
        shapes = f"log p {list(np.shape(references))} and membership {list(membership.shape)}"
        raise SettingError(
            f"a={a}, {shapes}: a must lie in 0 to 1, and membership must be bool "
            "[references, candidates]"
        )
    num_candidates = membership.shape[1]
    if np.shape(targets)[1:] != membership.shape[1:]:
        raise SettingError(
            f"the target has {np.shape(targets)[1]} candidates, the references {num_candidates}: "
            "give the same candidates to both"
        )
    log_ratios = np.empty((len(targets), num_candidates))
    step = max(1, CHUNK_ELEMENTS // len(membership))
    for start in range(0, num_candidates, step):
        chunk = slice(start, start + step)
        log_p = np.asarray(targets[:, chunk], np.float64)
        reference_p = np.exp(np.asarray(references[:, chunk], np.float64))
        if not (
            np.isfinite(reference_p).all()
            and np.isfinite(log_p).all()
            and (log_p <= ROUNDING_TOLERANCE).all()
            and (reference_p <= 1 + ROUNDING_TOLERANCE).all()
        ):
            raise SettingError("log p must be finite and at most 0")
        marginal = _estimate_marginal(reference_p, membership[:, chunk], exclude_self, offline, a)
        log_ratios[:, chunk] = log_p - np.log(np.maximum(marginal, MIN_PROBABILITY))
    return log_ratios


def _estimate_marginal(
    probabilities: np.ndarray, membership: np.ndarray, exclude_self: bool, offline: bool, a: float
) -> np.ndarray:
    """Estimate P(x).

    Args:
        probabilities: p of references, [references, candidates].
        membership: Which reference was trained on which candidate, bool [references, candidates].
        exclude_self: Whether to leave out each reference once.
        offline: Whether to use only references that were trained without the candidate.
        a: See `rmia`.

    Returns:
        P(x), [1 or references, candidates].
    """
    means = []
    counts = []
    for is_member in (False, True):
        mask = membership == is_member
        total = np.where(mask, probabilities, 0).sum(0, keepdims=True)
        count = mask.sum(0, keepdims=True)
        if exclude_self:
            total = np.maximum(total - np.where(mask, probabilities, 0), 0)
            count = count - mask
        means.append(total / np.maximum(count, 1))
        counts.append(count)
    mean_out, mean_in = means
    count_out, count_in = counts
    if ((count_out if offline else count_out + count_in) == 0).any():
        raise SettingError(
            "a candidate has no reference: the offline attack needs one without the candidate, the "
            "online attack one of either kind"
        )
    p_out = np.where(count_out > 0, mean_out, np.clip((mean_in - 1 + a) / a, 0, 1))
    p_in = np.where((count_in > 0) & (not offline), mean_in, a * p_out + 1 - a)
    return (p_out + p_in) / 2
