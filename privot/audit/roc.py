"""How well scores separate members from non-members: ROC curve, AUC and unbiased advantage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from privot.errors import DataError, SettingError

FloatArray = NDArray[np.float64]


def check_scores(values: Any, name: str) -> FloatArray:
    """Convert scores to a float64 array [count] and check them.

    A NaN is refused because sorting would treat it as the lowest or the highest score.

    Args:
        values: One score for each candidate.
        name: What the scores are of, for the error message.

    Returns:
        The scores.

    Raises:
        DataError: If there is no score, a score is NaN, or the array has more than one dimension.
    """
    scores = np.asarray(values, np.float64)
    if scores.ndim != 1 or not len(scores):
        raise DataError(f"{name}: scores must be one row of at least one number")
    if np.isnan(scores).any():
        raise DataError(
            f"{name}: a score is NaN. Give every candidate a score, also where the attack fails."
        )
    return scores


def check_probability(value: float, name: str, allow_zero: bool = False) -> float:
    """Check that a setting is a probability strictly between 0 and 1.

    Args:
        value: The setting.
        name: Its name, for the error message.
        allow_zero: Whether 0 is accepted too.

    Returns:
        The value as a float.

    Raises:
        SettingError: If the value is out of range.
    """
    if not (0 < value < 1 or (allow_zero and value == 0)):
        lowest = "at least" if allow_zero else "above"
        raise SettingError(f"{name}={value:g}: it must be {lowest} 0 and below 1")
    return float(value)


@dataclass(frozen=True, eq=False)
class RocCurve:
    """ROC curve of the test ``score > threshold``, from (0, 0) to (1, 1).

    There is one point for each distinct score. Candidates of one score are flagged together, so a
    tie is a diagonal segment of the curve and counts half in the area.

    Attributes:
        fpr: False-positive rates, ascending, [points].
        tpr: True-positive rates, [points].

    >>> curve = compute_roc([2, 1, 1], [1, 0])
    >>> curve.fpr.tolist(), curve.tpr.round(2).tolist()
    ([0.0, 0.0, 0.5, 1.0], [0.0, 0.33, 1.0, 1.0])
    >>> round(curve.auc, 4)
    0.8333
    """

    fpr: FloatArray
    tpr: FloatArray

    @property
    def auc(self) -> float:
        r"""Area under the curve, :math:`P(member > non) + P(member = non)/2` (Mann-Whitney)."""
        return float(np.diff(self.fpr) @ (self.tpr[1:] + self.tpr[:-1]) / 2)

    def max_advantage(self) -> float:
        """Compute the largest TPR - FPR over all thresholds.

        This estimate is **biased upward**: the threshold is chosen on the scores that it is
        evaluated on. `estimate_advantage` is unbiased.
        """
        return float((self.tpr - self.fpr).max())

    def measured_tpr_at(self, fprs: Any) -> FloatArray:
        """Look up the TPR at the largest measured FPR that is not above each given rate.

        These are measured rates without confidence bounds; see `estimate_tpr_at_fpr` for those.
        """
        return self.tpr[
            np.searchsorted(self.fpr, np.asarray(fprs, np.float64) * (1 + 1e-12), side="right") - 1
        ]

    def sample_log_spaced(self, num_points: int = 200) -> tuple[FloatArray, FloatArray]:
        """Sample the curve for a plot with logarithmic axes.

        Args:
            num_points: Number of rates, log-spaced from the lowest measured FPR above 0 to 1.

        Returns:
            FPR and TPR, each [num_points].
        """
        rates = np.geomspace(self.fpr[self.fpr > 0].min(), 1, num_points)
        return rates, self.measured_tpr_at(rates)


def compute_roc(members: Any, nonmembers: Any) -> RocCurve:
    """Compute the ROC curve of scores [members] and [nonmembers]; members should score higher."""
    member_scores = np.sort(check_scores(members, "members"))
    nonmember_scores = np.sort(check_scores(nonmembers, "non-members"))
    thresholds = np.unique(np.concatenate([member_scores, nonmember_scores]))[::-1]
    fpr, tpr = (
        (len(scores) - np.searchsorted(scores, thresholds, side="right")) / len(scores)
        for scores in (nonmember_scores, member_scores)
    )
    return RocCurve(np.append(fpr, 1.0), np.append(tpr, 1.0))


def find_thresholds(members: FloatArray, nonmembers: FloatArray) -> FloatArray:
    """List the thresholds that lead to different decisions, each in the middle of a gap of scores.

    A candidate is flagged if its score is above the threshold. If all scores are equal, the result
    is that score alone, which flags nobody.
    """
    values = np.unique(np.concatenate([members, nonmembers]))
    if len(values) == 1:
        return values
    below = values[:-1]
    above = values[1:]
    with np.errstate(invalid="ignore"):
        middle = below + (above - below) / 2
    return np.where(np.isfinite(middle) & (middle < above), middle, below)


def count_above(scores: FloatArray, thresholds: FloatArray) -> NDArray[np.int64]:
    """Count the scores above each threshold: int64 [thresholds]."""
    return np.asarray(
        len(scores) - np.searchsorted(np.sort(scores), thresholds, side="right"), np.int64
    )


def split_in_half(scores: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Split scores at random: one half to choose a threshold, the other half to evaluate it.

    The split is random because the order of the given scores may carry information.

    Raises:
        DataError: If there are fewer than two scores.
    """
    if len(scores) < 2:
        raise DataError(
            "scores: each side needs at least two, one to choose a threshold and one to evaluate it"
        )
    shuffled = rng.permutation(scores)
    return shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]


@dataclass(frozen=True)
class Advantage:
    """Membership advantage, 2 (accuracy - 1/2) for as many members as non-members.

    Attributes:
        value: TPR - FPR; it can be negative because the estimate is unbiased.
        standard_error: Standard error of the value.
        num_candidates: Candidates that the threshold was evaluated on.
        publishable: Whether the number may be published.
    """

    value: float
    standard_error: float
    num_candidates: int
    publishable: bool = False


def estimate_advantage(
    members: Any, nonmembers: Any, seed: int = 0, publishable: bool = False
) -> Advantage:
    """Estimate the advantage of a threshold that is chosen on one half and evaluated on the other.

    Args:
        members: Scores of members.
        nonmembers: Scores of non-members.
        seed: Seed of the random split.
        publishable: Whether the result may be published.

    Returns:
        The unbiased estimate.

    >>> estimate_advantage([3, 4, 5, 6], [0, 1, 2, 2]).value
    1.0
    """
    rng = np.random.default_rng(seed)
    fit_members, test_members = split_in_half(check_scores(members, "members"), rng)
    fit_nonmembers, test_nonmembers = split_in_half(check_scores(nonmembers, "non-members"), rng)
    thresholds = find_thresholds(fit_members, fit_nonmembers)
    advantages = count_above(fit_members, thresholds) / len(fit_members) - count_above(
        fit_nonmembers, thresholds
    ) / len(fit_nonmembers)
    threshold = thresholds[advantages.argmax()]
    tpr = float((test_members > threshold).mean())
    fpr = float((test_nonmembers > threshold).mean())
    error = math.sqrt(tpr * (1 - tpr) / len(test_members) + fpr * (1 - fpr) / len(test_nonmembers))
    return Advantage(tpr - fpr, error, len(test_members) + len(test_nonmembers), publishable)


@dataclass(frozen=True)
class ConfidenceInterval:
    """Mean over several target models with a confidence interval.

    Attributes:
        mean: The mean.
        low: Lower end of the interval.
        high: Upper end of the interval.
        confidence: Confidence level.
        num_models: Number of target models.
    """

    mean: float
    low: float
    high: float
    confidence: float
    num_models: int


def bootstrap_mean_auc(
    model_scores: Sequence[tuple[Any, Any]],
    confidence: float = 0.95,
    seed: int = 0,
    num_resamples: int = 4000,
) -> ConfidenceInterval:
    """Estimate the mean AUC over target models with a bootstrap over the models.

    Models are resampled and not candidates, since the candidates of one model are not independent.
    For few models the percentiles are widened (Hesterberg 2015, expanded percentiles); without
    that, an interval of 10 models at 95 % would cover the mean in about 90 % of cases.

    Args:
        model_scores: Scores of members and of non-members, a pair for each target model.
        confidence: Confidence level of the interval.
        seed: Seed of the bootstrap.
        num_resamples: Bootstrap samples.

    Returns:
        The mean and its interval.

    Raises:
        DataError: If there are fewer than two models.

    >>> bootstrap_mean_auc([([1, 2], [0, 1]), ([1, 3], [0, 2])]).mean
    0.8125
    """
    count = len(model_scores)
    if count < 2:
        raise DataError("the interval of a mean AUC needs at least two target models")
    aucs = np.array([compute_roc(members, nonmembers).auc for members, nonmembers in model_scores])
    rng = np.random.default_rng(seed)
    means = aucs[rng.integers(count, size=(num_resamples, count))].mean(1)
    tail = (1 - check_probability(confidence, "confidence")) / 2
    wide_tail = special.ndtr(math.sqrt(count / (count - 1)) * special.stdtrit(count - 1, tail))
    low, high = np.quantile(means, [wide_tail, 1 - wide_tail])
    return ConfidenceInterval(float(aucs.mean()), float(low), float(high), confidence, count)
