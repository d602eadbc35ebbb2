"""A measured attack: how well someone told members from others, and how sure that is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError, refusing
from privot.release import Guarantee, Release, refuse_other

MOST = 200  # points of one attack


@dataclass(frozen=True)
class Attack:
    """True-positive rates ``tpr`` of a membership attack at false-positive rates ``fpr``, three tuples of one length.

    ``lower`` holds lower confidence bounds of ``tpr`` (such as Clopper-Pearson), valid together at ``confidence``. A rate in ``fpr``
    must be known or bounded from above: a measured 0 may stand for a small true rate, and would then accuse an honest release, so
    a 0 with a lower bound above 0 is refused.
    ``publishable`` is False when sensitive records had a part in the numbers. What else is known of it is for the reader: ``ceiling`` holds
    what a perfect attack would have had for ``lower``, ``curve`` the measured rates (fpr, tpr) without a claim to confidence, ``auc`` the
    area under it, ``control`` how the attack proved its power, ``caution`` what may mislead. ``verdict`` says what was proved; with one
    there may be no rates at all, and ``refuted`` tells that it is against the certificate.

    >>> attack = Attack("nearest", (0.01, 0.1), (0.03, 0.2), (0.012, 0.15), 0.95, True)
    >>> attack.over(lambda fpr: 2 * fpr)
    (False, False)
    >>> attack.over(lambda fpr: fpr)
    (True, True)
    """

    name: str
    fpr: tuple[float, ...]
    tpr: tuple[float, ...]
    lower: tuple[float, ...]
    confidence: float
    publishable: bool
    auc: float | None = None
    ceiling: tuple[float, ...] = ()
    curve: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    control: str = ""
    caution: str = ""
    verdict: str = ""
    refuted: bool = False

    def __post_init__(self) -> None:
        rates = (
            *self.fpr,
            *self.tpr,
            *self.lower,
            *self.ceiling,
            *self.curve[0],
            *self.curve[1],
            self.auc or 0.0,
        )
        if not (0 if self.verdict else 1) <= len(self.fpr) <= MOST or not len(self.fpr) == len(
            self.tpr
        ) == len(self.lower):
            raise ReleaseError(
                f"attack: fpr, tpr and lower need 1 to {MOST} numbers each, and as many as one another"
            )
        if (
            len(self.ceiling) not in (0, len(self.fpr))
            or len(self.curve[0]) != len(self.curve[1])
            or len(self.curve[0]) > MOST
        ):
            raise ReleaseError(
                f"attack: ceiling needs as many numbers as fpr, or none, and curve two rows of one length, {MOST} at most"
            )
        if (
            not all(math.isfinite(rate) and 0 <= rate <= 1 for rate in rates)
            or not 0 < self.confidence < 1
        ):
            raise ReleaseError("attack: rates lie in 0 to 1, the confidence strictly between")
        if any(low > rate for low, rate in zip(self.lower, self.tpr, strict=True)):
            raise ReleaseError("attack: a lower bound lies above the rate that it bounds")
        if any(rate == 0 < low for rate, low in zip(self.fpr, self.lower, strict=True)):
            raise ReleaseError(
                "attack: fpr 0 was measured, not known: give an upper bound of the false-positive rate"
            )

    def over(self, bound: Callable[[float], float]) -> tuple[bool, ...]:
        """For each point, whether even the lower bound lies above ``bound`` at its false-positive rate."""
        return tuple(
            low > bound(rate) + 1e-9 for rate, low in zip(self.fpr, self.lower, strict=True)
        )

    @classmethod
    def from_json(cls, value: Any) -> Attack:
        """The inverse of ``dataclasses.asdict``; fields of the wrong kind are refused, those with a default may be missing."""
        with refusing(ReleaseError, "not an attack"):
            given = dict(value)
            if (
                not {"name", "fpr", "tpr", "lower", "confidence", "publishable"}
                <= given.keys()
                <= READ.keys()
            ):
                raise TypeError
            return cls(**{key: READ[key](each) for key, each in given.items()})


def _real(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError
    return float(value)


def _rates(value: Any) -> tuple[float, ...]:
    return tuple(_real(each) for each in value)


def _pair(value: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    fpr, tpr = value
    return _rates(fpr), _rates(tpr)


def _exactly(kind: type) -> Callable[[Any], Any]:
    def same(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return value

    return same


READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("name", "control", "caution", "verdict"), _exactly(str)),
    **dict.fromkeys(("publishable", "refuted"), _exactly(bool)),
    **dict.fromkeys(("fpr", "tpr", "lower", "ceiling"), _rates),
    "curve": _pair,
    "confidence": _real,
    "auc": lambda value: None if value is None else _real(value),
}


def read(path: Path, release: Release | None = None) -> list[Attack]:
    """Attacks from a JSON file, ``{"attacks": [...]}``; if it says that they are of another than a given ``release``, refused.

    An audit is of a method: it stands beside a release of the same method and settings that claims the same epsilon.
    """
    wrong = f'{path}: not a file of attacks; it is JSON with a list "attacks"'
    with refusing(ReleaseError, wrong):
        said = json.loads(path.read_text())
        found = said["attacks"]
    if release:
        refuse_other(release, said, path)
        if "audited" in said:
            _refuse_other_method(release, said["audited"], path)
    try:
        return [Attack.from_json(each) for each in found]
    except (ReleaseError, TypeError) as error:  # of one of them, or of no list at all
        raise ReleaseError(f"{wrong} ({error})") from None


def _refuse_other_method(release: Release, audited: Any, path: Path) -> None:
    mine = {key: release.facts.get(key) for key in ("method", "settings")}
    claim = release.guarantee
    with refusing(ReleaseError, f"{path}: not an audit"):
        claimed = None if audited["claimed"] is None else _real(audited["claimed"])
        same = mine == {key: audited[key] for key in mine}
    epsilon = claim.epsilon if isinstance(claim, Guarantee) else None
    agreed = (
        claimed == epsilon
        if claimed is None or epsilon is None
        else math.isclose(claimed, epsilon, rel_tol=1e-3)
    )
    if not same or not agreed:
        raise ReleaseError(
            f"{path}: this audit is of another method, other settings or another epsilon than the release"
        )
