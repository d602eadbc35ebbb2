"""True-positive rates at fixed false-positive rates, with bounds that hold together, and the way to the report's plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import betaincinv

from privot.audit.roc import Floats, chance, checked
from privot.errors import SettingError

if TYPE_CHECKING:
    from privot.audit.result import Attack

FEW = 20  # false positives, under which a rate is a guess (spec: condensation and membership, 4.6)
RATES = (1e-4, 1e-3, 1e-2)


def least(hits: Any, trials: Any, error: float) -> Floats:
    """The Clopper-Pearson lower bound of a rate seen ``hits`` times in ``trials``; it is above the rate with probability <= ``error``.

    >>> round(float(least(10, 100, 0.025)), 4), round(float(most(10, 100, 0.025)), 4)
    (0.049, 0.1762)
    """
    hits = np.asarray(hits, np.float64)
    trials = np.asarray(trials, np.float64)
    return np.where(
        hits > 0, betaincinv(np.maximum(hits, 1), trials - np.maximum(hits, 1) + 1, error), 0.0
    )


def most(hits: Any, trials: Any, error: float) -> Floats:
    """The Clopper-Pearson upper bound, the mirror image of `least`."""
    return 1 - least(np.asarray(trials) - np.asarray(hits), trials, error)


@dataclass(frozen=True)
class Point:
    """What was measured at one ``level`` of the false-positive rate.

    ``fpr`` and ``tpr`` are measured; ``highest_fpr`` and ``lowest_tpr``, ``highest_tpr`` bound the true ones. ``alarms`` counts the false
    positives behind the point, ``few`` says that they are under 20. ``ceiling`` is the ``lowest_tpr`` of an attack that misses nobody.
    """

    level: float
    fpr: float
    highest_fpr: float
    tpr: float
    lowest_tpr: float
    highest_tpr: float
    alarms: int
    few: bool
    ceiling: float


@dataclass(frozen=True)
class Points:
    """Points of one attack, on ``members`` and ``others`` candidates; **all** their bounds hold together at ``confidence`` (Bonferroni)."""

    points: tuple[Point, ...]
    confidence: float
    members: int
    others: int
    publishable: bool = False

    def attack(self, name: str, **more: Any) -> Attack:
        """For the report's plot: measured and lowest TPR over the *highest* FPR, so that an honest release is not accused by luck.

        Where that is known to be no more than the level, over the level, at which `judge` looks too: report and verdict say the same.
        """
        from privot.audit.result import Attack

        tpr, low, perfect = (
            tuple(getattr(each, key) for each in self.points)
            for key in ("tpr", "lowest_tpr", "ceiling")
        )
        fpr = tuple(max(each.level, each.highest_fpr) for each in self.points)
        return Attack(
            name, fpr, tpr, low, self.confidence, self.publishable, ceiling=perfect, **more
        )


def tpr_at(
    members: Any,
    others: Any,
    fprs: Sequence[float] = RATES,
    confidence: float = 0.95,
    certain: bool = False,
    publishable: bool = False,
) -> Points:
    """The TPR of the lowest threshold whose measured FPR is not above each level; candidates are taken as independent trials.

    A threshold lies on a score of ``others``, the (k+1)-th highest, so its true FPR is no more than Beta(k+1, others-k) in law (Wilks
    1941), whatever the scores' own law: the Clopper-Pearson bound of k holds although the threshold was read off the same scores.
    Members had no part in it. Error is shared out evenly: three bounds a point. ``certain``: the *bound* of the FPR, not the measured
    one, is not above the level; where so few others cannot show that, nobody is flagged.

    >>> found = tpr_at(range(1000, 2000), range(1200), fprs=(0.01,)).points[0]
    >>> found.alarms, found.tpr, found.few
    (12, 0.812, True)
    """
    inside = checked(members, "members")
    outside = np.sort(checked(others, "others"))[::-1]
    if not fprs:
        raise SettingError("fprs: name at least one false-positive rate")
    error = (1 - chance(confidence, "confidence")) / (3 * len(fprs))
    found = tuple(_point(inside, outside, chance(level, "fpr"), error, certain) for level in fprs)
    return Points(found, confidence, len(inside), len(outside), publishable)


def _point(members: Floats, others: Floats, level: float, error: float, certain: bool) -> Point:
    """``others`` come from the highest down."""
    count = len(others)
    allowed = int(level * count + 1e-9)  # 0.29 * 100 is 28.999...
    if certain:
        allowed = int((most(np.arange(allowed + 1), count, error) <= level).sum()) - 1
    threshold = others[allowed] if allowed >= 0 else np.inf
    hits = int((members > threshold).sum())
    alarms = int((others > threshold).sum())
    low, high = (float(each(hits, len(members), error)) for each in (least, most))
    highest = (
        float(most(allowed, count, error)) if allowed >= 0 else 0.0
    )  # of flagging nobody, known to be 0
    ceiling = float(least(len(members), len(members), error)) if allowed >= 0 else 0.0
    return Point(
        level,
        alarms / count,
        highest,
        hits / len(members),
        low,
        high,
        alarms,
        alarms < FEW,
        ceiling,
    )
