"""A measured bound against the certificate: holds, broken, no claim or no verdict; and a sentence that never leaves out the ceiling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from privot.audit.many_runs import Bound, restored
from privot.audit.operating_points import Points
from privot.errors import SettingError
from privot.progress import round_up
from privot.release import Guarantee, NoGuarantee

HOLDS = "holds"
BROKEN = "broken"
NO_CLAIM = "no claim"
NO_VERDICT = "no verdict"
SLACK = 1e-9  # rounding


@dataclass(frozen=True)
class Verdict:
    """``status`` is one of the above; ``wall`` names the number that was ``claimed``, ``proved`` and capped by ``ceiling``.

    "holds" says that these trials did not refute the claim, never that it is true; where ``blind``, they could not have refuted it. "no
    verdict": the trials were not fair, so that what they refute is not the claim.
    """

    status: str
    sentence: str
    wall: str
    proved: float
    ceiling: float
    claimed: float | None
    confidence: float
    publishable: bool = False

    @property
    def broken(self) -> bool:
        return self.status == BROKEN

    @property
    def blind(self) -> bool:
        return self.claimed is not None and self.ceiling <= self.claimed

    @classmethod
    def from_json(cls, value: Any) -> Verdict:
        """The inverse of ``dataclasses.asdict``; fields of the wrong kind are refused."""
        return restored(cls, value)


def judge(found: Bound | Points, guarantee: Guarantee | NoGuarantee) -> Verdict:
    """A bound on epsilon against the claimed epsilon, or rates against the attack power that the certificate states.

    >>> claim = Guarantee(1.0, 1e-5, "replace", "analytic Gaussian", 1.1, {"0.001": 0.0024})
    >>> print(judge(Bound(0.7, 0.95, 5.6, "1000 runs a side", 1000, 1e-5), claim).sentence)
    proves epsilon of at least 0.7 at 95 %; these trials could prove 5.6 at most; claimed 1
    >>> judge(Bound(2.5, 0.95, 5.6, "1000 runs a side", 1000, 1e-5), claim).status
    'broken'
    """
    return _rates(found, guarantee) if isinstance(found, Points) else _epsilon(found, guarantee)


def _epsilon(bound: Bound, guarantee: Guarantee | NoGuarantee) -> Verdict:
    claimed = None
    if isinstance(guarantee, Guarantee) and math.isfinite(guarantee.epsilon):
        claimed = guarantee.epsilon
        if (
            bound.delta < guarantee.delta
        ):  # a larger delta is implied by the claim, a smaller one is not
            raise SettingError(
                f"delta={bound.delta:g}: the claim is made at {guarantee.delta:g}; audit it there or at a larger delta"
            )
        # Against a Gaussian certificate this is sound for any mechanism, as the certificate is then the very curve that was refuted.
        if bound.mu is not None and guarantee.accountant != "analytic Gaussian":
            raise SettingError(
                f"a Gaussian bound cannot judge a claim by {guarantee.accountant}: audit it without the Gaussian reading"
            )
    return _verdict(
        f"{bound.delta:g}",
        bound.epsilon,
        bound.ceiling,
        claimed,
        "epsilon",
        bound.confidence,
        bound.publishable,
        guarantee,
    )


def _rates(found: Points, guarantee: Guarantee | NoGuarantee) -> Verdict:
    """All points hold together, so each may be held against each stated rate that its FPR does not pass; the worst one speaks."""
    about = "a true-positive rate", found.confidence, found.publishable, guarantee
    stated = (
        {float(rate): power for rate, power in guarantee.max_tpr.items()}
        if isinstance(guarantee, Guarantee)
        else {}
    )
    if not stated:
        best = max(found.points, key=lambda each: each.lowest_tpr - each.highest_fpr)
        return _verdict(round_up(best.highest_fpr, 3), best.lowest_tpr, best.ceiling, None, *about)
    pairs = [(each, rate) for each in found.points for rate in stated if each.highest_fpr <= rate]
    if not pairs:  # so few others that no false-positive rate is known to be as low as a stated one
        return _verdict(f"{max(stated):g}", 0.0, 0.0, stated[max(stated)], *about)
    point, rate = max(
        pairs,
        key=lambda pair: (pair[0].lowest_tpr / stated[pair[1]], pair[0].ceiling / stated[pair[1]]),
    )
    return _verdict(f"{rate:g}", point.lowest_tpr, point.ceiling, stated[rate], *about)


def _verdict(
    at: str,
    proved: float,
    ceiling: float,
    claimed: float | None,
    what: str,
    confidence: float,
    publishable: bool,
    guarantee: Guarantee | NoGuarantee,
) -> Verdict:
    """``at``: the delta or the false-positive rate of what was proved."""
    status = NO_CLAIM if claimed is None else BROKEN if proved > claimed + SLACK else HOLDS
    wall = (
        f"epsilon at delta {at}"
        if what == "epsilon"
        else f"true-positive rate at false-positive rate {at}"
    )
    where = "" if what == "epsilon" else f" at false-positive rate {at}"
    words = f"proves {what} of at least {_floor(proved)}{where} at {100 * confidence:.8g} %"
    words += f"; these trials could prove {_floor(ceiling)} at most"
    if claimed is None:
        words += (
            f"; nothing is claimed ({guarantee.reason})"
            if isinstance(guarantee, NoGuarantee)
            else "; nothing is claimed"
        )
    else:
        words += f"; claimed {round_up(claimed)}"
    if status == BROKEN:
        words += ": the claim is broken" + (
            ""
            if what == "epsilon"
            else ", if the candidates of one release count as independent trials"
        )
    elif claimed is not None and ceiling <= claimed:
        words += ", so they could not have refuted it"
    return Verdict(status, words, wall, proved, ceiling, claimed, confidence, publishable)


def _floor(value: float) -> str:
    """Four digits, rounded down: "at least" must stay true."""
    if value <= 0:
        return "0"
    step = 10.0 ** (3 - math.floor(math.log10(value)))
    return f"{math.floor(value * step * (1 + 1e-12)) / step:.4g}"
