r"""Lower bounds on epsilon from many runs with and without one record.

:math:`(\epsilon,\delta)`-privacy implies :math:`TPR \le e^\epsilon FPR + \delta` and
:math:`TNR \le e^\epsilon FNR + \delta` for every test. A lower bound above the claimed epsilon
refutes the claim. A lower bound below it proves nothing else, so each bound comes with its ceiling:
what a perfect attack would have proved with the same number of runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import dp_accounting as dpa
import numpy as np
from scipy.special import ndtri

from privot.audit.operating_points import clopper_pearson_lower, clopper_pearson_upper
from privot.audit.roc import (
    FloatArray,
    check_probability,
    check_scores,
    count_above,
    find_thresholds,
    split_in_half,
)
from privot.errors import ReleaseError, SettingError, reraise_as

DataclassT = TypeVar("DataclassT")
MAX_THRESHOLDS = 2000  # thresholds tried on the first half of the runs
GAUSSIAN_NOTE = "read as a Gaussian mechanism, not valid for others"


@dataclass(frozen=True)
class EpsilonBound:
    """Lower confidence bound on the true epsilon.

    Attributes:
        epsilon: The bound, above the true epsilon with probability 1 - ``confidence`` at most.
        confidence: Confidence level.
        ceiling: What a perfect attack would have proved by the same procedure.
        procedure: How the bound was computed, in words.
        num_trials: Evaluated runs a side (the smaller side), or the guesses of one run.
        delta: Delta at which the epsilon holds.
        mu: Lower bound on mu of Gaussian privacy, if epsilon was computed from it. Then the bound
            can judge Gaussian certificates only.
        publishable: Whether the bound may be published.
        fpr_upper_bound: Upper bound of the FPR behind the bound; None for one run.
        tpr: Measured TPR behind the bound; None for one run.
        tpr_lower_bound: Lower bound of the TPR; both rate bounds hold together.
    """

    epsilon: float
    confidence: float
    ceiling: float
    procedure: str
    num_trials: int
    delta: float = 0.0
    mu: float | None = None
    publishable: bool = False
    fpr_upper_bound: float | None = None
    tpr: float | None = None
    tpr_lower_bound: float | None = None

    @classmethod
    def from_json(cls, value: Any) -> EpsilonBound:
        """Build a bound from plain data, the inverse of ``dataclasses.asdict``.

        Raises:
            ReleaseError: If a field is unknown or of the wrong type.
        """
        return parse_dataclass(cls, value)


def parse_dataclass(dataclass_type: type[DataclassT], value: Any) -> DataclassT:
    """Build a dataclass of numbers, strings and None from JSON data, with strict types.

    Raises:
        ReleaseError: If a field is unknown, of the wrong type, or not finite.
    """
    with reraise_as(ReleaseError, f"not a valid {dataclass_type.__name__}"):
        dataclass_fields = dataclasses.fields(dataclass_type)  # type: ignore[arg-type]
        types = {field.name: str(field.type) for field in dataclass_fields}
        fields = {
            key: float(number) if type(number) is int and "float" in types[key] else number
            for key, number in value.items()
        }
        for key, content in fields.items():
            if type(content).__name__.removesuffix("Type") not in types[key].split(" | "):
                raise TypeError
            if isinstance(content, float) and not math.isfinite(content):
                raise ValueError
        return dataclass_type(**fields)


@functools.lru_cache(maxsize=4096)
def compute_gaussian_epsilon(mu: float, delta: float) -> float:
    r"""Convert :math:`\mu`-Gaussian privacy to epsilon at a delta.

    :math:`\delta=\Phi(\mu/2-\epsilon/\mu)-e^\epsilon\Phi(-\mu/2-\epsilon/\mu)`.

    >>> round(compute_gaussian_epsilon(0.26805, 1e-5), 3)
    1.0
    """
    return float(dpa.get_epsilon_gaussian(1 / mu, delta)) if mu > 1e-9 else 0.0


def compute_refuted_epsilon(
    true_positives: Any,
    false_positives: Any,
    num_included: int,
    num_excluded: int,
    delta: float,
    alpha: float,
) -> FloatArray:
    """Compute the epsilon that the counts of a test refute, elementwise.

    Two one-sided Clopper-Pearson bounds have half of the error each. The lower bound of TNR is 1
    minus the upper bound of FPR, and the upper bound of FNR is 1 minus the lower bound of TPR, so
    the second inequality of the claim needs no further bound.

    Args:
        true_positives: Runs with the record that are flagged.
        false_positives: Runs without the record that are flagged.
        num_included: Runs with the record.
        num_excluded: Runs without the record.
        delta: Delta of the claim.
        alpha: Probability of error of both bounds together.

    Returns:
        The refuted epsilon, which can be negative.
    """
    tpr_low = clopper_pearson_lower(true_positives, num_included, alpha / 2)
    fpr_high = clopper_pearson_upper(false_positives, num_excluded, alpha / 2)
    with np.errstate(divide="ignore"):
        by_positives = np.log(np.maximum(tpr_low - delta, 0) / fpr_high)
        by_negatives = np.log(np.maximum((1 - fpr_high) - delta, 0) / (1 - tpr_low))
    return np.maximum(by_positives, by_negatives)


def compute_refuted_mu(
    true_positives: Any,
    false_positives: Any,
    num_included: int,
    num_excluded: int,
    delta: float,
    alpha: float,
) -> FloatArray:
    r"""Compute the :math:`\mu=\Phi^{-1}(1-FPR)-\Phi^{-1}(FNR)` that the counts refute, elementwise.

    Args:
        true_positives: Runs with the record that are flagged.
        false_positives: Runs without the record that are flagged.
        num_included: Runs with the record.
        num_excluded: Runs without the record.
        delta: Not used; it makes the signature that of `compute_refuted_epsilon`.
        alpha: Probability of error of both bounds together.

    Returns:
        The refuted mu, which can be negative.
    """
    return ndtri(clopper_pearson_lower(true_positives, num_included, alpha / 2)) - ndtri(
        clopper_pearson_upper(false_positives, num_excluded, alpha / 2)
    )


def audit_many_runs(
    included_scores: Any,
    excluded_scores: Any,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
    assume_gaussian: bool = False,
    seed: int = 0,
    publishable: bool = False,
) -> EpsilonBound:
    r"""Compute a lower bound on epsilon from one score of each independent run.

    :math:`\epsilon \ge \ln((TPR_{low}-\delta)/FPR_{high})`, or the same with TNR and FNR. The data
    sets with and without the record must be neighbours in the sense of the claim.

    Args:
        included_scores: Scores of runs with the record.
        excluded_scores: Scores of runs without the record.
        delta: Delta at which epsilon is bounded.
        confidence: Confidence level of the bound.
        threshold: Scores above it count as "included". It must be fixed before any run is looked
            at. None: a random half of the runs chooses it, and only the other half is evaluated.
        assume_gaussian: Whether to estimate :math:`\mu` of a Gaussian mechanism and convert it to
            epsilon. The bound is much tighter, and valid for Gaussian mechanisms only.
        seed: Seed of the random halves.
        publishable: Whether the bound may be published.

    Returns:
        The bound with its ceiling.

    Raises:
        SettingError: If ``delta`` or ``confidence`` is out of range.
        DataError: If there are too few scores.

    >>> bound = audit_many_runs([1.0] * 1000, [0.0] * 1000, delta=0, threshold=0.5)
    >>> round(bound.epsilon, 2), round(bound.ceiling, 2), bound.num_trials
    (5.6, 5.6, 1000)
    """
    included = check_scores(included_scores, "scores with the record")
    excluded = check_scores(excluded_scores, "scores without the record")
    check_probability(delta, "delta", allow_zero=True)
    if assume_gaussian and not delta:
        raise SettingError("delta=0: a Gaussian mechanism has no finite epsilon at delta 0")
    alpha = 1 - check_probability(confidence, "confidence")
    compute_refuted = compute_refuted_mu if assume_gaussian else compute_refuted_epsilon
    threshold_source = "fixed beforehand"
    if threshold is None:
        threshold_source = "chosen on as many others"
        rng = np.random.default_rng(seed)
        fit_included, included = split_in_half(included, rng)
        fit_excluded, excluded = split_in_half(excluded, rng)
        threshold = _choose_threshold(fit_included, fit_excluded, delta, alpha, compute_refuted)
    true_positives = int((included > threshold).sum())
    false_positives = int((excluded > threshold).sum())
    measured, perfect = (
        max(0.0, float(compute_refuted(*counts, len(included), len(excluded), delta, alpha)))
        for counts in ((true_positives, false_positives), (len(included), 0))
    )
    procedure = (
        f"{len(included)} runs with the record and {len(excluded)} without, "
        f"threshold {threshold_source}, Clopper-Pearson"
    )
    return EpsilonBound(
        epsilon=compute_gaussian_epsilon(measured, delta) if assume_gaussian else measured,
        confidence=confidence,
        ceiling=compute_gaussian_epsilon(perfect, delta) if assume_gaussian else perfect,
        procedure=f"{procedure}, {GAUSSIAN_NOTE}" if assume_gaussian else procedure,
        num_trials=min(len(included), len(excluded)),
        delta=delta,
        mu=measured if assume_gaussian else None,
        publishable=publishable,
        fpr_upper_bound=float(clopper_pearson_upper(false_positives, len(excluded), alpha / 2)),
        tpr=true_positives / len(included),
        tpr_lower_bound=float(clopper_pearson_lower(true_positives, len(included), alpha / 2)),
    )


def _choose_threshold(
    included: FloatArray,
    excluded: FloatArray,
    delta: float,
    alpha: float,
    compute_refuted: Callable[..., FloatArray],
) -> float:
    """Choose the threshold that refutes most on the first half of the runs.

    Args:
        included: Scores of runs with the record.
        excluded: Scores of runs without the record.
        delta: Delta of the claim.
        alpha: Probability of error.
        compute_refuted: `compute_refuted_epsilon` or `compute_refuted_mu`.

    Returns:
        The threshold.
    """
    thresholds = find_thresholds(included, excluded)
    tried = np.linspace(0, len(thresholds) - 1, min(len(thresholds), MAX_THRESHOLDS)).astype(int)
    thresholds = thresholds[tried]
    refuted = compute_refuted(
        count_above(included, thresholds),
        count_above(excluded, thresholds),
        len(included),
        len(excluded),
        delta,
        alpha,
    )
    return float(thresholds[refuted.argmax()])
