"""Verdict: a measured bound compared with the certificate of a release."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from privot.audit.many_runs import EpsilonBound, parse_dataclass
from privot.audit.operating_points import OperatingPoints
from privot.errors import SettingError
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.progress import round_up

HOLDS = "holds"
BROKEN = "broken"
NO_CLAIM = "no claim"
NO_VERDICT = "no verdict"
ROUNDING_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Verdict:
    """Comparison of what trials proved with what a certificate claims.

    Attributes:
        status: ``holds``: these trials did not refute the claim, which does not prove that it is
            true. ``broken``: they refuted it. ``no claim``: nothing is claimed. ``no verdict``: the
            trials were not fair, so what they refute is not the claim.
        summary: The comparison as a sentence, which always names the ceiling.
        quantity: What is bounded, such as ``epsilon at delta 1e-05``.
        lower_bound: What was proved.
        ceiling: What a perfect attack would have proved with the same trials.
        claimed: What the certificate claims, or None.
        confidence: Confidence level of the lower bound.
        publishable: Whether the numbers may be published.
    """

    status: str
    summary: str
    quantity: str
    lower_bound: float
    ceiling: float
    claimed: float | None
    confidence: float
    publishable: bool = False

    @property
    def is_broken(self) -> bool:
        """Whether the trials refuted the claim."""
        return self.status == BROKEN

    @property
    def is_inconclusive(self) -> bool:
        """Whether even a perfect attack could not have refuted the claim with these trials."""
        return self.claimed is not None and self.ceiling <= self.claimed

    @classmethod
    def from_json(cls, value: Any) -> Verdict:
        """Build a verdict from plain data, the inverse of ``dataclasses.asdict``.

        Raises:
            ReleaseError: If a field is unknown or of the wrong type.
        """
        return parse_dataclass(cls, value)


def judge(evidence: EpsilonBound | OperatingPoints, guarantee: Guarantee | NoGuarantee) -> Verdict:
    """Compare a measured bound with a certificate.

    Args:
        evidence: A lower bound on epsilon, compared with the claimed epsilon; or the rates of an
            attack, compared with the largest true-positive rates that the certificate states.
        guarantee: The certificate, or the statement that there is none.

    Returns:
        The verdict.

    Raises:
        SettingError: If the bound cannot be compared with the claim: its delta is smaller, or it
            assumes a Gaussian mechanism and the claim is by another accountant.

    >>> claim = Guarantee(1.0, 1e-5, "replace", "analytic Gaussian", 1.1, {"0.001": 0.0024})
    >>> bound = EpsilonBound(0.7, 0.95, 5.6, "1000 runs a side", 1000, 1e-5)
    >>> print(judge(bound, claim).summary)
    proves epsilon of at least 0.7 at 95 %; these trials could prove 5.6 at most; claimed 1
    >>> judge(EpsilonBound(2.5, 0.95, 5.6, "1000 runs a side", 1000, 1e-5), claim).status
    'broken'
    """
    if isinstance(evidence, OperatingPoints):
        return _judge_rates(evidence, guarantee)
    return _judge_epsilon(evidence, guarantee)


@dataclass(frozen=True)
class _Finding:
    """What is compared with a claim.

    Attributes:
        lower_bound: What was proved.
        ceiling: What a perfect attack would have proved.
        claimed: What the certificate claims, or None.
        condition: The delta of an epsilon, or the false-positive rate of a true-positive rate.
        is_epsilon: Whether the quantity is an epsilon.
    """

    lower_bound: float
    ceiling: float
    claimed: float | None
    condition: str
    is_epsilon: bool


def _judge_epsilon(bound: EpsilonBound, guarantee: Guarantee | NoGuarantee) -> Verdict:
    """Compare a lower bound on epsilon with the claimed epsilon."""
    claimed = None
    if isinstance(guarantee, Guarantee) and math.isfinite(guarantee.epsilon):
        claimed = guarantee.epsilon
        # A claim at one delta implies it at every larger delta, but not at a smaller one.
        if bound.delta < guarantee.delta:
            raise SettingError(
                f"delta={bound.delta:g}: the claim is at delta {guarantee.delta:g}. Audit at this "
                "delta or a larger one."
            )
        # Against a Gaussian certificate this comparison is sound for every mechanism, since the
        # certificate is then the very trade-off curve that the bound refutes.
        if bound.mu is not None and guarantee.accountant != "analytic Gaussian":
            raise SettingError(
                "a bound that assumes a Gaussian mechanism cannot judge a claim by "
                f"{guarantee.accountant}. Audit without this assumption."
            )
    finding = _Finding(bound.epsilon, bound.ceiling, claimed, f"{bound.delta:g}", True)
    return _build_verdict(finding, bound, guarantee)


def _judge_rates(points: OperatingPoints, guarantee: Guarantee | NoGuarantee) -> Verdict:
    """Compare true-positive rates with the largest ones that the certificate allows.

    All bounds hold together. So each point may be compared with every stated rate that the upper
    bound of its FPR does not exceed, and the worst comparison is reported.
    """
    max_tpr = (
        {float(fpr): tpr for fpr, tpr in guarantee.max_tpr.items()}
        if isinstance(guarantee, Guarantee)
        else {}
    )
    if not max_tpr:
        best = max(points.points, key=lambda point: point.tpr_lower_bound - point.fpr_upper_bound)
        finding = _Finding(
            best.tpr_lower_bound,
            best.perfect_attack_tpr_lower,
            None,
            round_up(best.fpr_upper_bound, 3),
            False,
        )
        return _build_verdict(finding, points, guarantee)
    comparisons = [
        (point, fpr) for point in points.points for fpr in max_tpr if point.fpr_upper_bound <= fpr
    ]
    if not comparisons:  # too few non-members to bound any false-positive rate by a stated one
        fpr = max(max_tpr)
        return _build_verdict(
            _Finding(0.0, 0.0, max_tpr[fpr], f"{fpr:g}", False), points, guarantee
        )
    point, fpr = max(
        comparisons,
        key=lambda pair: (
            pair[0].tpr_lower_bound / max_tpr[pair[1]],
            pair[0].perfect_attack_tpr_lower / max_tpr[pair[1]],
        ),
    )
    finding = _Finding(
        point.tpr_lower_bound, point.perfect_attack_tpr_lower, max_tpr[fpr], f"{fpr:g}", False
    )
    return _build_verdict(finding, points, guarantee)


def _build_verdict(
    finding: _Finding,
    evidence: EpsilonBound | OperatingPoints,
    guarantee: Guarantee | NoGuarantee,
) -> Verdict:
    """Decide the status of a finding and put it into words.

    Args:
        finding: What was proved and what is claimed.
        evidence: The source of the finding, for its confidence and whether it is publishable.
        guarantee: The certificate.

    Returns:
        The verdict.
    """
    claimed = finding.claimed
    if claimed is None:
        status = NO_CLAIM
    elif finding.lower_bound > claimed + ROUNDING_TOLERANCE:
        status = BROKEN
    else:
        status = HOLDS
    return Verdict(
        status,
        _summarize(finding, status, evidence.confidence, guarantee),
        f"epsilon at delta {finding.condition}"
        if finding.is_epsilon
        else f"true-positive rate at false-positive rate {finding.condition}",
        finding.lower_bound,
        finding.ceiling,
        claimed,
        evidence.confidence,
        evidence.publishable,
    )


def _summarize(
    finding: _Finding, status: str, confidence: float, guarantee: Guarantee | NoGuarantee
) -> str:
    """Describe a finding in one sentence.

    Args:
        finding: What was proved and what is claimed.
        status: Status of the verdict.
        confidence: Confidence level of the lower bound.
        guarantee: The certificate.

    Returns:
        The sentence.
    """
    lower_bound = _format_rounded_down(finding.lower_bound)
    proved = (
        f"epsilon of at least {lower_bound}"
        if finding.is_epsilon
        else f"a true-positive rate of at least {lower_bound} "
        f"at false-positive rate {finding.condition}"
    )
    summary = f"proves {proved} at {100 * confidence:.8g} %"
    summary += f"; these trials could prove {_format_rounded_down(finding.ceiling)} at most"
    if finding.claimed is None:
        reason = f" ({guarantee.reason})" if isinstance(guarantee, NoGuarantee) else ""
        return f"{summary}; nothing is claimed{reason}"
    summary += f"; claimed {round_up(finding.claimed)}"
    if status == BROKEN:
        summary += ": the claim is broken"
        if not finding.is_epsilon:
            summary += ", if the candidates of one release count as independent trials"
    elif finding.ceiling <= finding.claimed:
        summary += ", so they could not have refuted it"
    return summary


def _format_rounded_down(value: float) -> str:
    """Format a lower bound with four digits, rounded down so that "at least" stays true."""
    if value <= 0:
        return "0"
    step = 10.0 ** (3 - math.floor(math.log10(value)))
    return f"{math.floor(value * step * (1 + 1e-12)) / step:.4g}"
