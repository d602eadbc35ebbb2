"""Report of an attack: rates, verdict, comparison with the blind baseline, and warnings."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import chi2_contingency

from privot.attacks.membership.blind_baseline import BlindScores
from privot.attacks.membership.candidates import AnyDataset
from privot.attacks.membership.controls import ControlResult
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.membership.target import AttackTarget, MembershipScores
from privot.audit import (
    Advantage,
    ConfidenceInterval,
    OperatingPoints,
    Verdict,
    compute_roc,
    estimate_advantage,
    estimate_tpr_at_fpr,
    judge,
)
from privot.audit.verdict import NO_VERDICT
from privot.privacy.guarantee import Guarantee
from privot.release import Release

REPORTED_FPRS = (1e-3, 1e-2, 1e-1)  # false-positive rates at which true-positive rates are stated
NUM_CURVE_POINTS = 60  # points of the ROC curve in a report
MIN_DIVERSITY = 0.3  # a generator whose images differ less, compared with real ones, has collapsed
SHIFT_P_VALUE = 1e-3  # below it, the two sides differ by more than chance
MAX_EXPONENT = 700  # exp of more overflows


@dataclass(frozen=True)
class AttackReport:
    """Result of a membership attack.

    Against a certificate, false-positive rates must be bounded and not only measured. Then
    ``verdict_points`` are other points than ``operating_points``.

    Attributes:
        name: Name of the attack.
        title: Its title, for people.
        control: How the attack performed on its controls.
        auc: Area under the ROC curve; for several targets the mean.
        advantage: Membership advantage.
        operating_points: Measured rates with bounds.
        verdict_points: Rates that the verdict compares with the certificate.
        verdict: Comparison with the certificate of the release.
        publishable: Whether the numbers may be published.
        roc_curve: Measured (fpr, tpr) for logarithmic axes; for several targets that of one.
        blind_auc: AUC of the blind baseline, which has no access to the release.
        auc_interval: For several targets, the interval of the mean AUC.
        warning: What may mislead the reader; empty if nothing is known.
    """

    name: str
    title: str
    control: ControlResult
    auc: float
    advantage: Advantage
    operating_points: OperatingPoints
    verdict_points: OperatingPoints
    verdict: Verdict
    publishable: bool
    roc_curve: tuple[tuple[float, ...], tuple[float, ...]]
    blind_auc: float | None = None
    auc_interval: ConfidenceInterval | None = None
    warning: str = ""

    def to_json(self) -> dict[str, Any]:
        """Convert the report to plain data, with a list ``attacks`` that reports read."""
        result = self.verdict_points.to_attack_result(
            self.title,
            auc=self.auc,
            roc_curve=self.roc_curve,
            controls_summary=self.control.summary,
            warning=self.warning,
            verdict=self.verdict.summary,
        )
        if self.verdict.status == NO_VERDICT:  # rates would accuse a release without proof
            result = replace(result, fpr=(), tpr=(), tpr_lower=(), perfect_attack_tpr_lower=())
        return {"attacks": [asdict(result)], **asdict(self)}


def build_attack_report(
    name: str,
    control: ControlResult,
    scores: MembershipScores,
    release: Release,
    confidence: float,
    seed: int,
    publishable: bool,
) -> AttackReport:
    """Compute what scores prove about a release.

    Args:
        name: Name of the attack.
        control: Result of its controls.
        scores: Scores of members and non-members.
        release: The attacked release.
        confidence: Confidence level of all bounds together.
        seed: Seed of the split for the advantage.
        publishable: Whether the numbers may be published.

    Returns:
        The report, without blind baseline and warning.
    """
    points = estimate_tpr_at_fpr(*scores, REPORTED_FPRS, confidence, publishable=publishable)
    verdict_points = points
    if isinstance(release.guarantee, Guarantee):
        verdict_points = estimate_tpr_at_fpr(
            *scores, REPORTED_FPRS, confidence, certify_fpr=True, publishable=publishable
        )
    roc = compute_roc(*scores)
    fpr, tpr = roc.sample_log_spaced(NUM_CURVE_POINTS)
    return AttackReport(
        name,
        ATTACKS[name].title,
        control,
        roc.auc,
        estimate_advantage(*scores, seed, publishable=publishable),
        points,
        verdict_points,
        judge(verdict_points, release.guarantee),
        publishable,
        (tuple(fpr.tolist()), tuple(tpr.tolist())),
    )


def apply_blind_baseline(
    report: AttackReport, blind_scores: BlindScores, release: Release
) -> AttackReport:
    r"""Compare an attack with the blind baseline, and withdraw a verdict that it could give too.

    A certificate bounds what a *release* reveals. If even the blind baseline exceeds the
    certificate, exceeding it proves nothing. Without the release, an attacker finds a share B of
    the members. With a release that reveals as much of each as it claims, he finds at most
    :math:`e^\epsilon B+\delta`. An attack that finds more keeps its verdict, as far as our blind
    rule is as good as any.

    Args:
        report: The report of the attack.
        blind_scores: Scores of the blind baseline.
        release: The attacked release.

    Returns:
        The report with ``blind_auc``, and perhaps with the status "no verdict".
    """
    sides = (blind_scores.members, blind_scores.nonmembers)
    blind_auc = compute_roc(*sides).auc
    report = replace(report, blind_auc=blind_auc)
    guarantee = release.guarantee
    if not report.verdict.is_broken or not isinstance(guarantee, Guarantee):
        return report
    confidence = report.verdict_points.confidence
    certified = estimate_tpr_at_fpr(*sides, REPORTED_FPRS, confidence, certify_fpr=True)
    if not judge(certified, guarantee).is_broken:
        return report
    blind_points = estimate_tpr_at_fpr(*sides, REPORTED_FPRS, confidence).points
    factor = math.exp(min(guarantee.epsilon, MAX_EXPONENT))
    if any(
        point.tpr_lower_bound > factor * blind.tpr_upper_bound + guarantee.delta
        for point, blind in zip(report.verdict_points.points, blind_points, strict=True)
    ):
        return report
    reason = (
        f"no verdict: the blind baseline, without access to the release, does so too with an AUC "
        f"of {blind_auc:.3f}; take both sides from one random split"
    )
    verdict = replace(
        report.verdict, status=NO_VERDICT, summary=f"{report.verdict.summary}; {reason}"
    )
    return replace(report, verdict=verdict)


def describe_warnings(
    members: AnyDataset, nonmembers: AnyDataset, blind_scores: BlindScores, target: AttackTarget
) -> str:
    """Describe what may mislead the reader of an attack on a release.

    Args:
        members: Members.
        nonmembers: Non-members.
        blind_scores: Scores of the blind baseline.
        target: The attacked release.

    Returns:
        The warnings, empty if there are none.
    """
    warnings = [
        _describe_shift(members, nonmembers, blind_scores),
        _describe_collapse(target, nonmembers),
    ]
    return "; ".join(filter(None, warnings))


def _describe_shift(members: AnyDataset, nonmembers: AnyDataset, blind_scores: BlindScores) -> str:
    """Describe a difference between the sides other than membership, in classes or images."""
    class_counts = np.stack(
        [
            np.bincount(side._labels, minlength=side.spec.num_classes)
            for side in (members, nonmembers)
        ]
    )
    if chi2_contingency(class_counts[:, class_counts.any(0)]).pvalue < SHIFT_P_VALUE:
        return (
            "class shares differ between members and non-members by more than chance: rates may "
            "show the split and not membership"
        )
    if blind_scores.p_value < SHIFT_P_VALUE:
        return (
            "members and non-members can be separated without the release: rates may show the "
            "split and not membership"
        )
    return ""


def _describe_collapse(target: AttackTarget, nonmembers: AnyDataset) -> str:
    """Describe mode collapse: members that a generator does not reproduce are not found."""
    if target.release.artifact.kind != "generator":
        return ""
    diversity = target.measure_diversity(nonmembers)
    if not diversity < MIN_DIVERSITY:
        return ""
    return (
        f"the generator has collapsed: two of its images of a class differ {100 * diversity:.0f} % "
        "as much as two non-members. That few members are found says little about its training"
    )
