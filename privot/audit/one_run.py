"""Lower bounds on epsilon from ONE run: many canaries, each in or out by its own fair coin, and guesses about some of them.

Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run"; Mahloujifar, Melis, Chaudhuri 2024, "Auditing f-differential
privacy in one run". The coins must be independent: a split into exact halves is another experiment, and not covered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, expit, ndtr, ndtri
from scipy.stats import binom

from privot.audit.many_runs import GAUSSIAN, Bound, gaussian_epsilon
from privot.audit.roc import Floats, chance, checked
from privot.errors import DataError, SettingError

Guesses = int | tuple[int, int] | Sequence[tuple[int, int]]
# the search for mu: 4 grids, each of FINER steps in a step of the last, so to 1e-6
LARGEST_MU = 16.0
FINER = 64


def one_run(
    scores: Any,
    included: Any,
    delta: float,
    guesses: Guesses,
    confidence: float = 0.95,
    seed: int = 0,
    publishable: bool = False,
) -> Bound:
    r"""A bound from scores [canaries] of one run and whether each was ``included`` (bool [canaries]).

    ``guesses``: so many of the highest are guessed in and of the lowest out, (in, out) or one number for both together; the others are
    abstained from. Say it before looking at the scores; of several pairs the best counts and each has its share of the error (Bonferroni).
    If v of r guesses are right, epsilon is refuted when, for :math:`W\sim Bin(r, e^\epsilon/(1+e^\epsilon))` and m canaries,
    :math:`P(W\ge v)+2m\delta\max_i P(v-i\le W<v)/i` is no more than the error.

    >>> coins = np.arange(300) % 3 == 0
    >>> found = one_run(coins * 1.0, coins, delta=0, guesses=(100, 200))
    >>> round(found.epsilon, 2), round(found.ceiling, 2)
    (4.6, 4.6)
    """
    chance(delta, "delta", zero=True)
    return _best(
        scores,
        included,
        delta,
        guesses,
        confidence,
        seed,
        publishable,
        lambda *given: _epsilon(*given, delta),
    )


def one_run_gaussian(
    scores: Any,
    included: Any,
    delta: float,
    guesses: Guesses,
    confidence: float = 0.95,
    seed: int = 0,
    publishable: bool = False,
) -> Bound:
    """As `one_run`, with the trade-off curve of a Gaussian mechanism instead of (epsilon, delta): tighter, and for Gaussians alone.

    It stays far from the truth for loud mechanisms, as it allows for one that is Gaussian-private and yet tells all on a rare event.

    >>> coins = np.arange(300) % 3 == 0
    >>> found = one_run_gaussian(coins * 1.0, coins, delta=1e-5, guesses=(100, 200))
    >>> round(found.mu, 2), round(found.epsilon, 1)
    (2.04, 10.2)
    """
    chance(delta, "delta")
    return _best(
        scores, included, delta, guesses, confidence, seed, publishable, _mu, gaussian=True
    )


def _best(
    scores: Any,
    included: Any,
    delta: float,
    guesses: Guesses,
    confidence: float,
    seed: int,
    publishable: bool,
    refuted: Callable[[int, int, int, float], float],
    gaussian: bool = False,
) -> Bound:
    values = checked(scores, "scores")
    coins = np.asarray(included)
    if coins.dtype != bool or coins.shape != values.shape:
        raise DataError("included: one bool for each score")
    pairs = _pairs(guesses, len(values))
    error = (1 - chance(confidence, "confidence")) / len(pairs)
    # Ties are broken by lot: in the caller's order they would tell members from others wherever members come first.
    rng = np.random.default_rng(seed)
    lot = rng.permutation(len(values))
    truth = coins[lot[np.argsort(values[lot], kind="stable")]]  # from the lowest score up
    right = [int(truth[len(truth) - high :].sum() + (~truth[:low]).sum()) for high, low in pairs]
    found = [
        refuted(len(truth), sum(pair), each, error) for pair, each in zip(pairs, right, strict=True)
    ]
    perfect = max(refuted(len(truth), sum(pair), sum(pair), error) for pair in pairs)
    at = int(np.argmax(found))
    how = f"one run, {len(truth)} canaries, {sum(pairs[at])} guesses, " + (
        "said beforehand"
        if len(pairs) == 1
        else f"the best of {len(pairs)} said beforehand, corrected"
    )
    if not gaussian:
        return Bound(found[at], confidence, perfect, how, sum(pairs[at]), delta, None, publishable)
    epsilon = gaussian_epsilon(found[at], delta)
    ceiling = gaussian_epsilon(perfect, delta)
    return Bound(
        epsilon,
        confidence,
        ceiling,
        f"{how}, {GAUSSIAN}",
        sum(pairs[at]),
        delta,
        found[at],
        publishable,
    )


def _pairs(guesses: Guesses, canaries: int) -> list[tuple[int, int]]:
    if isinstance(guesses, int):
        pairs = [(guesses - guesses // 2, guesses // 2)]
    else:
        pairs = [guesses] if guesses and isinstance(guesses[0], int) else list(guesses)  # type: ignore[list-item, arg-type]
    if not pairs or any(min(pair) < 0 or not 0 < sum(pair) <= canaries for pair in pairs):
        raise SettingError(
            f"guesses={guesses}: between 1 and {canaries} guesses, as many as there are canaries, are needed"
        )
    return pairs


def chance_of(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """The largest probability that an (epsilon, delta)-private run lets so many guesses be right."""
    if correct == 0:
        return 1.0
    right = float(expit(epsilon))
    tail = float(betainc(correct, guesses - correct + 1, right))
    if not delta:
        return tail
    below = np.cumsum(
        binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)
    )  # P(v-i <= W < v), i from 1 to v
    return min(1.0, tail + 2 * canaries * delta * float((below / np.arange(1, correct + 1)).max()))


@functools.lru_cache(maxsize=4096)
def _epsilon(canaries: int, guesses: int, correct: int, error: float, delta: float) -> float:
    """By bisection. Any point that is refuted will do: private with less epsilon is private with more, so all below is refuted too."""
    if chance_of(correct, guesses, canaries, 0.0, delta) > error:
        return 0.0
    low = 0.0
    high = 1.0
    while chance_of(correct, guesses, canaries, high, delta) <= error:
        low = high
        high = 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if chance_of(correct, guesses, canaries, middle, delta) <= error
            else (low, middle)
        )
    return low


def refuted(
    canaries: int, guesses: int, correct: int, inverse: Callable[[Floats], Floats], error: float
) -> NDArray[np.bool_]:
    r"""Whether so many right guesses refute a trade-off curve f; elementwise over the curves that ``inverse`` holds.

    ``inverse`` undoes :math:`\bar f(x)=1-f(x)`, the largest TPR at FPR x. The recursion of Mahloujifar et al. (their algorithm 3).

    >>> bool(refuted(100, 100, 90, lambda tpr: tpr / np.e, 0.05)), bool(refuted(100, 100, 70, lambda tpr: tpr / np.e, 0.05))
    (True, False)
    """
    right = np.asarray(error * correct / canaries)
    wrong = np.asarray(error * (guesses - correct) / canaries)
    for at in range(correct - 1, -1, -1):
        higher = np.maximum(wrong, inverse(np.minimum(right, 1.0)))
        right = right + at / (guesses - at) * (higher - wrong)
        wrong = higher
    return np.asarray(right + wrong > guesses / canaries)


@functools.lru_cache(maxsize=4096)
def _mu(canaries: int, guesses: int, correct: int, error: float) -> float:
    """The largest refuted mu, from below; a larger one allows more, so what is refuted is an interval from 0."""
    low = 0.0
    step = LARGEST_MU / FINER
    for _ in range(4):
        mus = np.asarray(low + step * np.arange(FINER), np.float64)
        count = int(
            refuted(canaries, guesses, correct, functools.partial(_shifted, mus=mus), error).sum()
        )
        if not count:
            return 0.0
        low = float(mus[count - 1])
        step = step / FINER
    return low


def _shifted(tpr: Floats, mus: Floats) -> Floats:
    r""":math:`\Phi(\Phi^{-1}(TPR)-\mu)`, the FPR at which a Gaussian mechanism allows this TPR."""
    return ndtr(ndtri(tpr) - mus)
