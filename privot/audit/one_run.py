"""Lower bounds on epsilon from ONE run with many canaries, each included by its own fair coin.

The auditor guesses for some of the canaries whether they were included. Steinke, Nasr, Jagielski
2023, "Privacy auditing with one (1) training run"; Mahloujifar, Melis, Chaudhuri 2024, "Auditing
f-differential privacy in one run". The coins must be independent: a split of the canaries into
exact halves is another experiment, and these bounds do not hold for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, expit, ndtr, ndtri
from scipy.stats import binom

from privot.audit.many_runs import GAUSSIAN_NOTE, EpsilonBound, compute_gaussian_epsilon
from privot.audit.roc import FloatArray, check_probability, check_scores
from privot.errors import DataError, SettingError

GuessCounts = int | tuple[int, int] | Sequence[tuple[int, int]]
EPSILON_PRECISION = 1e-6  # of the bisection
# The search for mu uses 4 grids, each of them within one step of the last one: precise to 1e-6.
MAX_MU = 16.0
GRID_SIZE = 64
NUM_GRIDS = 4


def audit_one_run(
    scores: Any,
    included: Any,
    delta: float,
    guesses: GuessCounts,
    confidence: float = 0.95,
    seed: int = 0,
    publishable: bool = False,
) -> EpsilonBound:
    r"""Compute a lower bound on epsilon from one run.

    If v of r guesses are right, epsilon is refuted when, for
    :math:`W\sim Bin(r, e^\epsilon/(1+e^\epsilon))` and m canaries,
    :math:`P(W\ge v)+2m\delta\max_i P(v-i\le W<v)/i` is not above the error.

    Args:
        scores: Scores of the canaries, [canaries]; higher for a likelier inclusion.
        included: Whether each canary was included, bool [canaries].
        delta: Delta at which epsilon is bounded.
        guesses: How many canaries are guessed: the highest scores as included, the lowest as
            excluded. A pair (included, excluded), or one number for both together. It must be
            fixed before the scores are looked at. With several pairs the best one counts, and each
            has an equal share of the error (Bonferroni).
        confidence: Confidence level of the bound.
        seed: Seed that breaks ties between scores.
        publishable: Whether the bound may be published.

    Returns:
        The bound with its ceiling.

    Raises:
        SettingError: If a number is out of range.
        DataError: If scores and coins do not fit together.

    >>> coins = np.arange(300) % 3 == 0
    >>> bound = audit_one_run(coins * 1.0, coins, delta=0, guesses=(100, 200))
    >>> round(bound.epsilon, 2), round(bound.ceiling, 2)
    (4.6, 4.6)
    """
    check_probability(delta, "delta", allow_zero=True)
    refuted, perfect, procedure, num_guesses = _compute_best_bound(
        scores,
        included,
        guesses,
        confidence,
        seed,
        functools.partial(_search_epsilon, delta=delta),
    )
    return EpsilonBound(
        refuted, confidence, perfect, procedure, num_guesses, delta, None, publishable
    )


def audit_one_run_gaussian(
    scores: Any,
    included: Any,
    delta: float,
    guesses: GuessCounts,
    confidence: float = 0.95,
    seed: int = 0,
    publishable: bool = False,
) -> EpsilonBound:
    """Compute a lower bound on epsilon from one run of a Gaussian mechanism.

    It is like `audit_one_run`, but uses the trade-off curve of a Gaussian mechanism instead of
    (epsilon, delta). This is tighter, and valid for Gaussian mechanisms only. For little noise the
    bound stays far below the true epsilon, since it allows for a Gaussian-private mechanism that
    reveals everything in a rare event.

    Args:
        scores: Scores of the canaries, [canaries]; higher for a likelier inclusion.
        included: Whether each canary was included, bool [canaries].
        delta: Delta at which epsilon is stated, above 0.
        guesses: How many canaries are guessed; see `audit_one_run`.
        confidence: Confidence level of the bound.
        seed: Seed that breaks ties between scores.
        publishable: Whether the bound may be published.

    Returns:
        The bound with its ceiling; ``mu`` is the bound on mu that epsilon is computed from.

    Raises:
        SettingError: If a number is out of range.
        DataError: If scores and coins do not fit together.

    >>> coins = np.arange(300) % 3 == 0
    >>> bound = audit_one_run_gaussian(coins * 1.0, coins, delta=1e-5, guesses=(100, 200))
    >>> round(bound.mu, 2), round(bound.epsilon, 1)
    (2.04, 10.2)
    """
    check_probability(delta, "delta")
    refuted, perfect, procedure, num_guesses = _compute_best_bound(
        scores, included, guesses, confidence, seed, _search_mu
    )
    return EpsilonBound(
        compute_gaussian_epsilon(refuted, delta),
        confidence,
        compute_gaussian_epsilon(perfect, delta),
        f"{procedure}, {GAUSSIAN_NOTE}",
        num_guesses,
        delta,
        refuted,
        publishable,
    )


def _compute_best_bound(
    scores: Any,
    included: Any,
    guesses: GuessCounts,
    confidence: float,
    seed: int,
    search_bound: Callable[[int, int, int, float], float],
) -> tuple[float, float, str, int]:
    """Compute the best bound of several numbers of guesses.

    Args:
        scores: Scores of the canaries.
        included: Whether each canary was included.
        guesses: Numbers of guesses.
        confidence: Confidence level of the bound.
        seed: Seed that breaks ties between scores.
        search_bound: Gives the largest parameter that is refuted by a number of canaries, of
            guesses and of right guesses, at an error probability.

    Returns:
        The bound, its ceiling, the procedure in words, and the number of guesses.
    """
    values = check_scores(scores, "scores")
    coins = np.asarray(included)
    if coins.dtype != bool or coins.shape != values.shape:
        raise DataError("included: give one bool for each score")
    guess_pairs = _parse_guesses(guesses, len(values))
    alpha = (1 - check_probability(confidence, "confidence")) / len(guess_pairs)
    # Ties are broken at random. In the caller's order, they would separate included canaries from
    # the others wherever the included ones come first.
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(values))
    ascending = shuffled[np.argsort(values[shuffled], kind="stable")]
    truth = coins[ascending]
    count = len(truth)
    num_correct = [
        int(truth[count - num_in :].sum() + (~truth[:num_out]).sum())
        for num_in, num_out in guess_pairs
    ]
    bounds = [
        search_bound(count, sum(pair), correct, alpha)
        for pair, correct in zip(guess_pairs, num_correct, strict=True)
    ]
    perfect = max(search_bound(count, sum(pair), sum(pair), alpha) for pair in guess_pairs)
    best = int(np.argmax(bounds))
    num_guesses = sum(guess_pairs[best])
    choice = (
        "fixed beforehand"
        if len(guess_pairs) == 1
        else f"the best of {len(guess_pairs)} numbers fixed beforehand, corrected"
    )
    procedure = f"one run, {count} canaries, {num_guesses} guesses, {choice}"
    return bounds[best], perfect, procedure, num_guesses


def _parse_guesses(guesses: GuessCounts, num_canaries: int) -> list[tuple[int, int]]:
    """Convert the forms of ``guesses`` to a list of pairs (included, excluded)."""
    if isinstance(guesses, int):
        pairs = [(guesses - guesses // 2, guesses // 2)]
    else:
        is_pair = bool(guesses) and isinstance(guesses[0], int)
        pairs = [guesses] if is_pair else list(guesses)  # type: ignore[list-item, arg-type]
    if not pairs or any(min(pair) < 0 or not 0 < sum(pair) <= num_canaries for pair in pairs):
        raise SettingError(
            f"guesses={guesses}: give between 1 and {num_canaries} guesses, the number of canaries"
        )
    return pairs


def compute_guess_p_value(
    num_correct: int, num_guesses: int, num_canaries: int, epsilon: float, delta: float
) -> float:
    """Bound the probability that an (epsilon, delta)-private run allows so many right guesses.

    Args:
        num_correct: Right guesses.
        num_guesses: All guesses.
        num_canaries: Canaries.
        epsilon: Epsilon of the run.
        delta: Delta of the run.

    Returns:
        The largest such probability.
    """
    if num_correct == 0:
        return 1.0
    right_probability = float(expit(epsilon))
    tail = float(betainc(num_correct, num_guesses - num_correct + 1, right_probability))
    if not delta:
        return tail
    below = np.cumsum(
        binom.pmf(np.arange(num_correct - 1, -1, -1), num_guesses, right_probability)
    )  # P(v-i <= W < v), i from 1 to v
    return min(
        1.0, tail + 2 * num_canaries * delta * float((below / np.arange(1, num_correct + 1)).max())
    )


@functools.lru_cache(maxsize=4096)
def _search_epsilon(
    num_canaries: int, num_guesses: int, num_correct: int, alpha: float, delta: float
) -> float:
    """Search the largest refuted epsilon by bisection.

    A run that is private with less epsilon is also private with more. So a refuted epsilon refutes
    all smaller ones, and the lower end of the bisection is always a valid bound.

    Args:
        num_canaries: Canaries.
        num_guesses: All guesses.
        num_correct: Right guesses.
        alpha: Probability of error.
        delta: Delta of the claim.

    Returns:
        The refuted epsilon, 0 if none is refuted.
    """

    def is_refuted(epsilon: float) -> bool:
        p_value = compute_guess_p_value(num_correct, num_guesses, num_canaries, epsilon, delta)
        return p_value <= alpha

    if not is_refuted(0.0):
        return 0.0
    low = 0.0
    high = 1.0
    while is_refuted(high):
        low = high
        high = 2 * high
    while high - low > EPSILON_PRECISION:
        middle = (low + high) / 2
        if is_refuted(middle):
            low = middle
        else:
            high = middle
    return low


def is_tradeoff_refuted(
    num_canaries: int,
    num_guesses: int,
    num_correct: int,
    inverse_curve: Callable[[FloatArray], FloatArray],
    alpha: float,
) -> NDArray[np.bool_]:
    r"""Test whether so many right guesses refute a trade-off curve f.

    This is the recursion of Mahloujifar et al. (their algorithm 3).

    Args:
        num_canaries: Canaries.
        num_guesses: All guesses.
        num_correct: Right guesses.
        inverse_curve: Inverse of :math:`\bar f(x)=1-f(x)`, the largest TPR at FPR x. It may return
            values of several curves.
        alpha: Probability of error.

    Returns:
        For each curve, whether it is refuted.

    >>> bool(is_tradeoff_refuted(100, 100, 90, lambda tpr: tpr / np.e, 0.05))
    True
    >>> bool(is_tradeoff_refuted(100, 100, 70, lambda tpr: tpr / np.e, 0.05))
    False
    """
    right = np.asarray(alpha * num_correct / num_canaries)
    wrong = np.asarray(alpha * (num_guesses - num_correct) / num_canaries)
    for index in range(num_correct - 1, -1, -1):
        next_wrong = np.maximum(wrong, inverse_curve(np.minimum(right, 1.0)))
        right = right + index / (num_guesses - index) * (next_wrong - wrong)
        wrong = next_wrong
    return np.asarray(right + wrong > num_guesses / num_canaries)


@functools.lru_cache(maxsize=4096)
def _search_mu(num_canaries: int, num_guesses: int, num_correct: int, alpha: float) -> float:
    """Search the largest refuted mu on ever finer grids, from below.

    A larger mu allows more right guesses, so the refuted values are an interval from 0.

    Args:
        num_canaries: Canaries.
        num_guesses: All guesses.
        num_correct: Right guesses.
        alpha: Probability of error.

    Returns:
        The refuted mu, 0 if none is refuted.
    """
    low = 0.0
    step = MAX_MU / GRID_SIZE
    for _ in range(NUM_GRIDS):
        mus = np.asarray(low + step * np.arange(GRID_SIZE), np.float64)
        inverse_curve = functools.partial(_invert_gaussian_tradeoff, mus=mus)
        refuted = is_tradeoff_refuted(num_canaries, num_guesses, num_correct, inverse_curve, alpha)
        if not refuted.any():
            return 0.0
        low = float(mus[int(refuted.sum()) - 1])
        step = step / GRID_SIZE
    return low


def _invert_gaussian_tradeoff(tpr: FloatArray, mus: FloatArray) -> FloatArray:
    r"""Compute the FPR at which mu-Gaussian privacy allows a TPR.

    It is :math:`\Phi(\Phi^{-1}(TPR)-\mu)`.
    """
    return ndtr(ndtri(tpr) - mus)
