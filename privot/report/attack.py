"""A measured attack: how well someone told members from others, and how sure that is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError, refusing
from privot.release import Release, refuse_other

MOST = 200  # points of one attack


@dataclass(frozen=True)
class Attack:
    """True-positive rates ``tpr`` of a membership attack at false-positive rates ``fpr``, three tuples of one length.

    ``lower`` holds lower confidence bounds of ``tpr`` (such as Clopper-Pearson), valid together at ``confidence``. A rate in ``fpr``
    must be known or bounded from above: a measured 0 may stand for a small true rate, and would then accuse an honest release, so
    a 0 with a lower bound above 0 is refused.
    ``publishable`` is False when sensitive records had a part in the numbers.

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

    def __post_init__(self) -> None:
        rates = (*self.fpr, *self.tpr, *self.lower)
        if not 0 < len(self.fpr) <= MOST or not len(self.fpr) == len(self.tpr) == len(self.lower):
            raise ReleaseError(f"attack: fpr, tpr and lower need 1 to {MOST} numbers each, and as many as one another")
        if not all(math.isfinite(rate) and 0 <= rate <= 1 for rate in rates) or not 0 < self.confidence < 1:
            raise ReleaseError("attack: rates lie in 0 to 1, the confidence strictly between")
        if any(low > rate for low, rate in zip(self.lower, self.tpr, strict=True)):
            raise ReleaseError("attack: a lower bound lies above the rate that it bounds")
        if any(rate == 0 < low for rate, low in zip(self.fpr, self.lower, strict=True)):
            raise ReleaseError("attack: fpr 0 was measured, not known: give an upper bound of the false-positive rate")

    def over(self, bound: Callable[[float], float]) -> tuple[bool, ...]:
        """For each point, whether even the lower bound lies above ``bound`` at its false-positive rate."""
        return tuple(low > bound(rate) + 1e-9 for rate, low in zip(self.fpr, self.lower, strict=True))

    @classmethod
    def from_json(cls, value: Any) -> Attack:
        """The inverse of ``dataclasses.asdict``; fields of the wrong kind are refused."""
        with refusing(ReleaseError, "not an attack"):
            fields = dict(value)
            if type(fields["name"]) is not str or type(fields["publishable"]) is not bool:
                raise TypeError
            rates: dict[str, Any] = {key: tuple(_real(each) for each in fields.pop(key)) for key in ("fpr", "tpr", "lower")}
            return cls(confidence=_real(fields.pop("confidence")), **rates, **fields)


def _real(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError
    return float(value)


def read(path: Path, release: Release | None = None) -> list[Attack]:
    """Attacks from a JSON file, ``{"attacks": [...]}``; if it says that they are of another than a given ``release``, refused."""
    wrong = f'{path}: not a file of attacks; it is JSON with a list "attacks"'
    with refusing(ReleaseError, wrong):
        said = json.loads(path.read_text())
        found = said["attacks"]
    if release:
        refuse_other(release, said, path)
    try:
        return [Attack.from_json(each) for each in found]
    except (ReleaseError, TypeError) as error:  # of one of them, or of no list at all
        raise ReleaseError(f"{wrong} ({error})") from None
