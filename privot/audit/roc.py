"""How well scores tell members from others: the ROC curve, its area, and the advantage of a threshold chosen honestly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from privot.errors import DataError, SettingError

Floats = NDArray[np.float64]


def checked(values: Any, what: str) -> Floats:
    """Scores as float64 [count]; none at all, another shape or a NaN is refused, since a NaN would pass as the lowest score."""
    found = np.asarray(values, np.float64)
    if found.ndim != 1 or not len(found):
        raise DataError(f"{what}: scores come as one row of at least one number")
    if np.isnan(found).any():
        raise DataError(
            f"{what}: a score is NaN; an attack that fails on a candidate must say what it guesses there"
        )
    return found


def chance(value: float, what: str, zero: bool = False) -> float:
    """A probability strictly between 0 and 1, or 0 where that is allowed."""
    if not (0 < value < 1 or (zero and value == 0)):
        raise SettingError(
            f"{what}={value:g}: a probability under 1 and {'not under' if zero else 'above'} 0 is needed"
        )
    return float(value)


@dataclass(frozen=True, eq=False)
class Curve:
    """False- and true-positive rates ``fpr``, ``tpr`` [points] of ``score > threshold``, from (0, 0) to (1, 1), a point a distinct score.

    Candidates of one score are flagged together, so ties make a sloped step and are worth half in the area.

    >>> curve = roc([2, 1, 1], [1, 0])
    >>> curve.fpr.tolist(), curve.tpr.round(2).tolist()
    ([0.0, 0.0, 0.5, 1.0], [0.0, 0.33, 1.0, 1.0])
    >>> round(curve.auc, 4)
    0.8333
    """

    fpr: Floats
    tpr: Floats

    @property
    def auc(self) -> float:
        r"""Mann-Whitney: :math:`P(member > other) + P(member = other)/2`."""
        return float(np.diff(self.fpr) @ (self.tpr[1:] + self.tpr[:-1]) / 2)

    def advantage(self) -> float:
        """The largest TPR - FPR. **Biased upward**: its threshold is the best on the very scores that judge it; see `advantage`."""
        return float((self.tpr - self.fpr).max())

    def at(self, levels: Any) -> Floats:
        """TPR at the largest measured FPR that is not above each level; measured, without any claim to confidence (see `tpr_at`)."""
        return self.tpr[
            np.searchsorted(self.fpr, np.asarray(levels, np.float64) * (1 + 1e-12), side="right")
            - 1
        ]

    def logarithmic(self, count: int = 200) -> tuple[Floats, Floats]:
        """(fpr, tpr) for log axes: ``count`` rates even in their logarithm, from the least that was measured to 1."""
        levels = np.geomspace(self.fpr[self.fpr > 0].min(), 1, count)
        return levels, self.at(levels)


def roc(members: Any, others: Any) -> Curve:
    """The curve of scores [members] and [others], higher for a likelier member."""
    inside = np.sort(checked(members, "members"))
    outside = np.sort(checked(others, "others"))
    values = np.unique(np.concatenate([inside, outside]))[::-1]
    rates = [
        (len(each) - np.searchsorted(each, values, side="right")) / len(each)
        for each in (outside, inside)
    ]
    return Curve(*(np.append(each, 1.0) for each in rates))


def cuts(members: Floats, others: Floats) -> Floats:
    """Every threshold that makes a difference, in the middle of its gap; `score > cut` is flagged. One score alone cannot be cut."""
    values = np.unique(np.concatenate([members, others]))
    if len(values) == 1:
        return values
    below = values[:-1]
    above = values[1:]
    with np.errstate(invalid="ignore"):
        middle = below + (above - below) / 2
    return np.where(np.isfinite(middle) & (middle < above), middle, below)


def flagged(scores: Floats, thresholds: Floats) -> NDArray[np.int64]:
    """How many scores lie above each threshold."""
    return np.asarray(
        len(scores) - np.searchsorted(np.sort(scores), thresholds, side="right"), np.int64
    )


def halves(scores: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """A random half to choose on and the rest to judge by; at random, since a caller's order may mean something."""
    if len(scores) < 2:
        raise DataError(
            "scores: two a side are needed, one to choose a threshold on and one to judge it by"
        )
    mixed = rng.permutation(scores)
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]


@dataclass(frozen=True)
class Advantage:
    """``value`` = TPR - FPR = 2 (accuracy - 1/2) for as many members as others, its standard ``error``, on ``count`` judged candidates."""

    value: float
    error: float
    count: int
    publishable: bool = False


def advantage(members: Any, others: Any, seed: int = 0, publishable: bool = False) -> Advantage:
    """The advantage of a threshold chosen on a random half of each side and judged on the other half: unbiased, so it may be under 0.

    >>> advantage([3, 4, 5, 6], [0, 1, 2, 2]).value
    1.0
    """
    rng = np.random.default_rng(seed)
    first, inside = halves(checked(members, "members"), rng)
    second, outside = halves(checked(others, "others"), rng)
    levels = cuts(first, second)
    gain = flagged(first, levels) / len(first) - flagged(second, levels) / len(second)
    best = levels[gain.argmax()]
    tpr = float((inside > best).mean())
    fpr = float((outside > best).mean())
    error = math.sqrt(tpr * (1 - tpr) / len(inside) + fpr * (1 - fpr) / len(outside))
    return Advantage(tpr - fpr, error, len(inside) + len(outside), publishable)


@dataclass(frozen=True)
class Interval:
    """A mean over ``count`` models with the ends of its confidence interval."""

    value: float
    low: float
    high: float
    confidence: float
    count: int


def mean_auc(
    victims: Sequence[tuple[Any, Any]],
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = 4000,
) -> Interval:
    """The mean AUC over victims, (members, others) each, by a bootstrap over victims: candidates of one model are not independent.

    The percentiles are widened for few victims (Hesterberg 2015, expanded percentiles), or 10 victims would cover about 90 % for 95 %.

    >>> mean_auc([([1, 2], [0, 1]), ([1, 3], [0, 2])]).value
    0.8125
    """
    if len(victims) < 2:
        raise DataError("victims: the spread over models needs at least two")
    found = np.array([roc(*each).auc for each in victims])
    count = len(victims)
    rng = np.random.default_rng(seed)
    means = found[rng.integers(count, size=(resamples, count))].mean(1)
    tail = (1 - chance(confidence, "confidence")) / 2
    wide = special.ndtr(math.sqrt(count / (count - 1)) * special.stdtrit(count - 1, tail))
    low, high = np.quantile(means, [wide, 1 - wide])
    return Interval(float(found.mean()), float(low), float(high), confidence, count)
