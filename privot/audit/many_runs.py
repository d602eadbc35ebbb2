r"""Lower bounds on epsilon from many runs with and without a record, each with its ceiling.

:math:`(\epsilon,\delta)`-privacy says :math:`TPR \le e^\epsilon FPR + \delta` and :math:`TNR \le e^\epsilon FNR + \delta` for any test. A
bound above the claim refutes it; a bound below proves nothing but itself, which is why the ceiling is printed beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import dp_accounting as dpa
import numpy as np
from scipy.special import ndtri

from privot.audit.operating_points import least, most
from privot.audit.roc import Floats, chance, checked, cuts, flagged, halves
from privot.errors import ReleaseError, SettingError, refusing

Kind = TypeVar("Kind")
MOST_CUTS = 2000  # thresholds tried on the first half
GAUSSIAN = "read as a Gaussian mechanism, not valid for others"


@dataclass(frozen=True)
class Bound:
    """``epsilon`` at ``delta`` that is not passed by the true one, but with probability 1 - ``confidence``.

    ``ceiling``: what a perfect attack would have proved by the same procedure. ``trials``: runs a side that were counted (the fewer), or
    guesses of one run. ``mu``: of Gaussian privacy, where epsilon is read off it; then it judges Gaussian certificates alone.
    ``highest_fpr`` and ``lowest_tpr`` bound, together, the rates it was read off; ``tpr`` was measured. One run has none.
    """

    epsilon: float
    confidence: float
    ceiling: float
    how: str
    trials: int
    delta: float = 0.0
    mu: float | None = None
    publishable: bool = False
    highest_fpr: float | None = None
    tpr: float | None = None
    lowest_tpr: float | None = None

    @classmethod
    def from_json(cls, value: Any) -> Bound:
        """The inverse of ``dataclasses.asdict``; fields of the wrong kind are refused."""
        return restored(cls, value)


def restored(kind: type[Kind], value: Any) -> Kind:
    """A dataclass of numbers, words and None, from JSON."""
    with refusing(ReleaseError, f"not a {kind.__name__.lower()}"):
        wanted = {each.name: str(each.type) for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
        fields = {
            key: float(each) if type(each) is int and "float" in wanted[key] else each
            for key, each in value.items()
        }
        if any(
            type(each).__name__.removesuffix("Type") not in wanted[key].split(" | ")
            for key, each in fields.items()
        ):
            raise TypeError
        if not all(math.isfinite(each) for each in fields.values() if isinstance(each, float)):
            raise ValueError
        return kind(**fields)


@functools.lru_cache(maxsize=4096)
def gaussian_epsilon(mu: float, delta: float) -> float:
    r"""Epsilon of :math:`\mu`-Gaussian privacy: :math:`\delta=\Phi(\mu/2-\epsilon/\mu)-e^\epsilon\Phi(-\mu/2-\epsilon/\mu)`.

    >>> round(gaussian_epsilon(0.26805, 1e-5), 3)
    1.0
    """
    return float(dpa.get_epsilon_gaussian(1 / mu, delta)) if mu > 1e-9 else 0.0


def ratio(hits: Any, alarms: Any, inside: int, outside: int, delta: float, error: float) -> Floats:
    """The epsilon that so many true and false positives refute, not cut at 0; elementwise.

    Two one-sided bounds with half of the error each. TNR's lower bound is 1 - FPR's upper one, and FNR's upper 1 - TPR's lower, so the
    other direction of the claim follows from the same two bounds and costs nothing more.
    """
    low = least(hits, inside, error / 2)
    high = most(alarms, outside, error / 2)
    with np.errstate(divide="ignore"):
        ways = [
            np.log(np.maximum(top - delta, 0) / bottom)
            for top, bottom in ((low, high), (1 - high, 1 - low))
        ]
    return np.maximum(*ways)


def separation(
    hits: Any, alarms: Any, inside: int, outside: int, delta: float, error: float
) -> Floats:
    r"""The :math:`\mu=\Phi^{-1}(1-FPR)-\Phi^{-1}(FNR)` that is refuted, not cut at 0; elementwise, with the bounds of `ratio`."""
    return ndtri(least(hits, inside, error / 2)) - ndtri(most(alarms, outside, error / 2))


def many_runs(
    inside: Any,
    outside: Any,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
    gaussian: bool = False,
    seed: int = 0,
    publishable: bool = False,
) -> Bound:
    r"""A bound from one score of each independent run with the record (``inside``) and without it (``outside``).

    :math:`\epsilon \ge \ln((TPR_{low}-\delta)/FPR_{high})` or the same of TNR and FNR. ``threshold`` must be known before any of these
    runs is looked at; without it a random half of the runs chooses it and the other half alone is counted. The two worlds must differ as
    the neighbours of the claim do. ``gaussian`` reads :math:`\mu` off the rates and then epsilon: much tighter, and only for Gaussians.

    >>> found = many_runs([1.0] * 1000, [0.0] * 1000, delta=0, threshold=0.5)
    >>> round(found.epsilon, 2), round(found.ceiling, 2), found.trials
    (5.6, 5.6, 1000)
    """
    there = checked(inside, "inside")
    absent = checked(outside, "outside")
    chance(delta, "delta", zero=True)
    if gaussian and not delta:
        raise SettingError(
            "delta=0: a Gaussian mechanism has no epsilon there; give a delta above 0"
        )
    error = 1 - chance(confidence, "confidence")
    refuted = separation if gaussian else ratio
    chosen = threshold
    if chosen is None:
        rng = np.random.default_rng(seed)
        (first, there) = halves(there, rng)
        (second, absent) = halves(absent, rng)
        levels = cuts(first, second)
        levels = levels[np.linspace(0, len(levels) - 1, min(len(levels), MOST_CUTS)).astype(int)]
        promised = refuted(
            flagged(first, levels), flagged(second, levels), len(first), len(second), delta, error
        )
        chosen = float(levels[promised.argmax()])
    hits = int((there > chosen).sum())
    alarms = int((absent > chosen).sum())
    counts = (hits, alarms), (len(there), 0)  # ours, and those of a perfect attack
    found, perfect = (
        max(0.0, float(refuted(*each, len(there), len(absent), delta, error))) for each in counts
    )
    how = [f"{len(there)} runs with the record and {len(absent)} without", "Clopper-Pearson"]
    how.insert(
        1,
        "threshold "
        + ("fixed beforehand" if threshold is not None else "chosen on as many others"),
    )
    trials = min(len(there), len(absent))
    rates = (
        float(most(alarms, len(absent), error / 2)),
        hits / len(there),
        float(least(hits, len(there), error / 2)),
    )
    if not gaussian:
        return Bound(
            found, confidence, perfect, ", ".join(how), trials, delta, None, publishable, *rates
        )
    epsilon = gaussian_epsilon(found, delta)
    ceiling = gaussian_epsilon(perfect, delta)
    return Bound(
        epsilon,
        confidence,
        ceiling,
        ", ".join([*how, GAUSSIAN]),
        trials,
        delta,
        found,
        publishable,
        *rates,
    )
