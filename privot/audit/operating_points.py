"""True-positive rates at fixed false-positive rates, with bounds that hold simultaneously."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betaincinv

from privot.audit.result import AttackResult
from privot.audit.roc import FloatArray, check_probability, check_scores
from privot.errors import SettingError

MIN_FALSE_POSITIVES = 20  # with fewer false positives behind it, a rate is not reliable
DEFAULT_FPRS = (1e-4, 1e-3, 1e-2)


def clopper_pearson_lower(successes: Any, trials: Any, alpha: float) -> FloatArray:
    """Compute the Clopper-Pearson lower confidence bound of a success rate, elementwise.

    Args:
        successes: Number of successes.
        trials: Number of trials.
        alpha: Probability that the bound is above the true rate, at most.

    Returns:
        The lower bound; 0 without a success.

    >>> round(float(clopper_pearson_lower(10, 100, 0.025)), 4)
    0.049
    >>> round(float(clopper_pearson_upper(10, 100, 0.025)), 4)
    0.1762
    """
    successes = np.asarray(successes, np.float64)
    trials = np.asarray(trials, np.float64)
    return np.where(
        successes > 0,
        betaincinv(np.maximum(successes, 1), trials - np.maximum(successes, 1) + 1, alpha),
        0.0,
    )


def clopper_pearson_upper(successes: Any, trials: Any, alpha: float) -> FloatArray:
    """Compute the Clopper-Pearson upper confidence bound of a success rate, elementwise.

    Args:
        successes: Number of successes.
        trials: Number of trials.
        alpha: Probability that the bound is below the true rate, at most.

    Returns:
        The upper bound: 1 minus the lower bound of the failure rate.
    """
    return 1 - clopper_pearson_lower(np.asarray(trials) - np.asarray(successes), trials, alpha)


@dataclass(frozen=True)
class OperatingPoint:
    """True-positive rate of an attack at one false-positive rate.

    Attributes:
        target_fpr: The false-positive rate that was aimed at.
        fpr: Measured false-positive rate.
        fpr_upper_bound: Upper confidence bound of the true false-positive rate.
        tpr: Measured true-positive rate.
        tpr_lower_bound: Lower confidence bound of the true true-positive rate.
        tpr_upper_bound: Upper confidence bound of the true true-positive rate.
        num_false_positives: False positives behind the point.
        has_few_false_positives: Whether there are fewer than 20, so that the rate is not reliable.
        perfect_attack_tpr_lower: ``tpr_lower_bound`` of an attack that misses no member.
    """

    target_fpr: float
    fpr: float
    fpr_upper_bound: float
    tpr: float
    tpr_lower_bound: float
    tpr_upper_bound: float
    num_false_positives: int
    has_few_false_positives: bool
    perfect_attack_tpr_lower: float


@dataclass(frozen=True)
class OperatingPoints:
    """Operating points of one attack.

    Attributes:
        points: The points, in the order of the target rates.
        confidence: Level at which **all** bounds of all points hold together (Bonferroni).
        num_members: Number of member candidates.
        num_nonmembers: Number of non-member candidates.
        publishable: Whether the numbers may be published.
    """

    points: tuple[OperatingPoint, ...]
    confidence: float
    num_members: int
    num_nonmembers: int
    publishable: bool = False

    def to_attack_result(self, name: str, **fields: Any) -> AttackResult:
        """Convert the points to the result that reports show.

        Each TPR is placed at the *upper bound* of its FPR, so that chance does not accuse an honest
        release. If that bound is not above the target rate, it is placed at the target rate.
        `judge` uses this rate too, so report and verdict agree.

        Args:
            name: Name of the attack.
            **fields: Further fields of `AttackResult`.

        Returns:
            The result.
        """
        points = self.points
        return AttackResult(
            name,
            tuple(max(point.target_fpr, point.fpr_upper_bound) for point in points),
            tuple(point.tpr for point in points),
            tuple(point.tpr_lower_bound for point in points),
            self.confidence,
            self.publishable,
            perfect_attack_tpr_lower=tuple(point.perfect_attack_tpr_lower for point in points),
            **fields,
        )


def estimate_tpr_at_fpr(
    members: Any,
    nonmembers: Any,
    fprs: Sequence[float] = DEFAULT_FPRS,
    confidence: float = 0.95,
    certify_fpr: bool = False,
    publishable: bool = False,
) -> OperatingPoints:
    """Estimate the TPR at the lowest threshold whose FPR is not above each target rate.

    Candidates count as independent trials. The threshold is the (k+1)-th highest non-member score.
    Whatever the distribution of scores, its true FPR is stochastically at most
    Beta(k+1, nonmembers-k) (Wilks 1941), so the Clopper-Pearson bound of k false positives holds
    although the threshold is chosen on the same scores. Member scores do not influence the
    threshold. The error is shared equally by the three bounds of each point (Bonferroni).

    Args:
        members: Scores of members.
        nonmembers: Scores of non-members.
        fprs: Target false-positive rates.
        confidence: Level at which all bounds hold together.
        certify_fpr: Whether the *upper bound* of the FPR, and not the measured FPR, must not be
            above the target rate. If there are too few non-members for that, nobody is flagged.
        publishable: Whether the result may be published.

    Returns:
        One operating point for each target rate.

    Raises:
        SettingError: If there is no target rate, or a rate is not a probability.

    >>> point = estimate_tpr_at_fpr(range(1000, 2000), range(1200), fprs=(0.01,)).points[0]
    >>> point.num_false_positives, point.tpr, point.has_few_false_positives
    (12, 0.812, True)
    """
    member_scores = check_scores(members, "members")
    nonmember_scores = np.sort(check_scores(nonmembers, "non-members"))[::-1]
    if not fprs:
        raise SettingError("fprs: give at least one false-positive rate")
    alpha = (1 - check_probability(confidence, "confidence")) / (3 * len(fprs))
    points = tuple(
        _estimate_operating_point(
            member_scores, nonmember_scores, check_probability(rate, "fpr"), alpha, certify_fpr
        )
        for rate in fprs
    )
    return OperatingPoints(
        points, confidence, len(member_scores), len(nonmember_scores), publishable
    )


def _estimate_operating_point(
    members: FloatArray, nonmembers: FloatArray, target_fpr: float, alpha: float, certify_fpr: bool
) -> OperatingPoint:
    """Estimate one operating point; ``nonmembers`` are sorted from the highest score down."""
    count = len(nonmembers)
    allowed = int(target_fpr * count + 1e-9)  # 0.29 * 100 is 28.999...
    if certify_fpr:
        bounds = clopper_pearson_upper(np.arange(allowed + 1), count, alpha)
        allowed = int((bounds <= target_fpr).sum()) - 1
    flags_nobody = allowed < 0  # then the false-positive rate is known to be 0
    threshold = np.inf if flags_nobody else nonmembers[allowed]
    hits = int((members > threshold).sum())
    false_positives = int((nonmembers > threshold).sum())
    num_members = len(members)
    return OperatingPoint(
        target_fpr=target_fpr,
        fpr=false_positives / count,
        fpr_upper_bound=(
            0.0 if flags_nobody else float(clopper_pearson_upper(allowed, count, alpha))
        ),
        tpr=hits / num_members,
        tpr_lower_bound=float(clopper_pearson_lower(hits, num_members, alpha)),
        tpr_upper_bound=float(clopper_pearson_upper(hits, num_members, alpha)),
        num_false_positives=false_positives,
        has_few_false_positives=false_positives < MIN_FALSE_POSITIVES,
        perfect_attack_tpr_lower=(
            0.0 if flags_nobody else float(clopper_pearson_lower(num_members, num_members, alpha))
        ),
    )
