"""Result of a membership attack or an audit, as attacks write it and reports read it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError, reraise_as
from privot.privacy.guarantee import Guarantee
from privot.release import Release
from privot.release.verify import refuse_mismatched_release

MAX_ATTACK_POINTS = 200  # most points of one attack


@dataclass(frozen=True)
class AttackResult:
    """Rates of a membership attack, with confidence bounds.

    Each rate in ``fpr`` must be known or an upper bound. A measured rate of 0 may stand for a small
    true rate and would then accuse an honest release. So an ``fpr`` of 0 with a ``tpr_lower`` above
    0 is refused.

    Attributes:
        name: Name of the attack.
        fpr: False-positive rates, [points].
        tpr: Measured true-positive rates, [points].
        tpr_lower: Lower confidence bounds of ``tpr``, such as Clopper-Pearson, [points].
        confidence: Level at which all bounds hold together.
        publishable: Whether the numbers may be published: no sensitive record influenced them.
        auc: Area under the measured ROC curve.
        perfect_attack_tpr_lower: ``tpr_lower`` of an attack without mistakes, [points], or empty.
        roc_curve: Measured (fpr, tpr), without confidence bounds.
        controls_summary: How the attack performed on its controls.
        warning: What may mislead the reader.
        verdict: What was proved. With a verdict, there may be no rates at all.
        verdict_refutes_guarantee: Whether the verdict contradicts the certificate.

    >>> attack = AttackResult("nearest", (0.01, 0.1), (0.03, 0.2), (0.012, 0.15), 0.95, True)
    >>> attack.exceeds_bound(lambda fpr: 2 * fpr)
    (False, False)
    >>> attack.exceeds_bound(lambda fpr: fpr)
    (True, True)
    """

    name: str
    fpr: tuple[float, ...]
    tpr: tuple[float, ...]
    tpr_lower: tuple[float, ...]
    confidence: float
    publishable: bool
    auc: float | None = None
    perfect_attack_tpr_lower: tuple[float, ...] = ()
    roc_curve: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    controls_summary: str = ""
    warning: str = ""
    verdict: str = ""
    verdict_refutes_guarantee: bool = False

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_values()

    def _check_lengths(self) -> None:
        min_points = 0 if self.verdict else 1
        if not min_points <= len(self.fpr) <= MAX_ATTACK_POINTS or not len(self.fpr) == len(
            self.tpr
        ) == len(self.tpr_lower):
            raise ReleaseError(
                "attack: fpr, tpr and tpr_lower must be of one length, "
                f"1 to {MAX_ATTACK_POINTS} numbers"
            )
        if len(self.perfect_attack_tpr_lower) not in (0, len(self.fpr)):
            raise ReleaseError("attack: perfect_attack_tpr_lower must be empty or as long as fpr")
        if (
            len(self.roc_curve[0]) != len(self.roc_curve[1])
            or len(self.roc_curve[0]) > MAX_ATTACK_POINTS
        ):
            raise ReleaseError(
                "attack: roc_curve must be two rows of one length, "
                f"at most {MAX_ATTACK_POINTS} numbers each"
            )

    def _check_values(self) -> None:
        rates = (
            *self.fpr,
            *self.tpr,
            *self.tpr_lower,
            *self.perfect_attack_tpr_lower,
            *self.roc_curve[0],
            *self.roc_curve[1],
            self.auc or 0.0,
        )
        if (
            not all(math.isfinite(rate) and 0 <= rate <= 1 for rate in rates)
            or not 0 < self.confidence < 1
        ):
            raise ReleaseError(
                "attack: rates must lie in 0 to 1, and the confidence strictly between 0 and 1"
            )
        if any(lower > tpr for lower, tpr in zip(self.tpr_lower, self.tpr, strict=True)):
            raise ReleaseError("attack: a lower bound is above the rate that it bounds")
        if any(fpr == 0 < lower for fpr, lower in zip(self.fpr, self.tpr_lower, strict=True)):
            raise ReleaseError(
                "attack: an fpr of 0 is measured, not known. Give an upper bound of the "
                "false-positive rate."
            )

    def exceeds_bound(self, max_tpr: Callable[[float], float]) -> tuple[bool, ...]:
        """Compare the lower bounds with a bound on the power of every attack.

        Args:
            max_tpr: The largest allowed true-positive rate at a false-positive rate.

        Returns:
            For each point, whether ``tpr_lower`` is above ``max_tpr(fpr)``.
        """
        return tuple(
            lower > max_tpr(fpr) + 1e-9 for fpr, lower in zip(self.fpr, self.tpr_lower, strict=True)
        )

    @classmethod
    def from_json(cls, value: Any) -> AttackResult:
        """Build a result from plain data, the inverse of ``dataclasses.asdict``.

        Fields with a default may be missing.

        Raises:
            ReleaseError: If a field is unknown, missing or of the wrong type.
        """
        with reraise_as(ReleaseError, "not an attack"):
            fields = dict(value)
            required = {"name", "fpr", "tpr", "tpr_lower", "confidence", "publishable"}
            if not required <= fields.keys() <= ATTACK_FIELD_PARSERS.keys():
                raise TypeError
            return cls(**{key: ATTACK_FIELD_PARSERS[key](field) for key, field in fields.items()})


def _parse_real(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError
    return float(value)


def _parse_rates(values: Any) -> tuple[float, ...]:
    return tuple(_parse_real(value) for value in values)


def _parse_curve(value: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    fpr, tpr = value
    return _parse_rates(fpr), _parse_rates(tpr)


def _require_type(expected_type: type) -> Callable[[Any], Any]:
    def check_type(value: Any) -> Any:
        if type(value) is not expected_type:
            raise TypeError
        return value

    return check_type


ATTACK_FIELD_PARSERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("name", "controls_summary", "warning", "verdict"), _require_type(str)),
    **dict.fromkeys(("publishable", "verdict_refutes_guarantee"), _require_type(bool)),
    **dict.fromkeys(("fpr", "tpr", "tpr_lower", "perfect_attack_tpr_lower"), _parse_rates),
    "roc_curve": _parse_curve,
    "confidence": _parse_real,
    "auc": lambda value: None if value is None else _parse_real(value),
}


def load_attack_results(path: Path, release: Release | None = None) -> list[AttackResult]:
    """Read attack results from a JSON file ``{"attacks": [...]}``.

    Args:
        path: The file, as ``privot attack`` or ``privot audit`` writes it.
        release: The release that the results should belong to. An audit belongs to a method: it
            fits a release of the same method and settings that claims the same epsilon.

    Returns:
        The results.

    Raises:
        ReleaseError: If the file is not valid, or belongs to another release.
    """
    message = f'{path}: this is no file of attack results. It must be JSON with a list "attacks".'
    with reraise_as(ReleaseError, message):
        content = json.loads(path.read_text())
        attacks = content["attacks"]
    if release:
        refuse_mismatched_release(release, content, path)
        if "audited" in content:
            _refuse_other_method(release, content["audited"], path)
    try:
        return [AttackResult.from_json(attack) for attack in attacks]
    except (ReleaseError, TypeError) as error:  # an invalid attack, or no list
        raise ReleaseError(f"{message} ({error})") from None


def _refuse_other_method(release: Release, audit_facts: Any, path: Path) -> None:
    """Raise unless an audit is of the release's method, settings and epsilon."""
    release_facts = {key: release.metadata.get(key) for key in ("method", "settings")}
    with reraise_as(ReleaseError, f"{path}: this is no audit"):
        claimed = None if audit_facts["claimed"] is None else _parse_real(audit_facts["claimed"])
        is_same_method = release_facts == {key: audit_facts[key] for key in release_facts}
    guarantee = release.guarantee
    epsilon = guarantee.epsilon if isinstance(guarantee, Guarantee) else None
    is_same_epsilon = (
        claimed == epsilon
        if claimed is None or epsilon is None
        else math.isclose(claimed, epsilon, rel_tol=1e-3)
    )
    if not is_same_method or not is_same_epsilon:
        raise ReleaseError(
            f"{path}: this audit is of another method, other settings or another epsilon than "
            "the release. Audit the release's method with its settings and epsilon."
        )
