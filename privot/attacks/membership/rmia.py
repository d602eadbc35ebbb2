r"""RMIA (Zarifzadeh, Liu and Shokri 2024): is the victim surer of a candidate, against references, than of other people's records?

    ratio(x) = p(y | x; victim) / P(x),      score(x) = share of population records z with ratio(x) / ratio(z) > gamma,

P(x) = (mean over references with x + mean over those without) / 2. Where there are none with x, which is always so offline and for the
population, they are taken to have p_in = a p_out + 1 - a, whence P(x) = ((1 + a) mean_out + 1 - a) / 2; where there are none without,
the same line is read the other way. So one reference is enough. Of one victim the score orders candidates as ratio(x) does; the
population makes the scores of several victims comparable.

All that goes in is log p(y | x), see `negative_loss`: [references, candidates], the population's [references, records].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from privot.errors import SettingError

PORTION = 2**21  # probabilities held in one go
LEAST = 1e-300  # a probability that the logarithm still takes


def rmia(
    victim: np.ndarray,
    references: np.ndarray,
    members: np.ndarray,
    population: np.ndarray,
    population_references: np.ndarray,
    population_members: np.ndarray | None = None,
    *,
    offline: bool = False,
    a: float = 0.3,
    gamma: float = 2.0,
) -> np.ndarray:
    """Scores [candidates] of a victim's log p [candidates], by references [references, candidates] with ``members`` bool of that shape.

    ``population`` [records] is the victim's log p of records that it did not learn, ``population_references`` [references, records] that of
    the references; those that learned one, by ``population_members`` of that shape, are left out for it. Defaults of ``a`` and ``gamma``
    are the paper's for CIFAR-10.

    >>> sure, unsure = np.log([0.99, 0.5]), np.log([[0.5, 0.5]])
    >>> rmia(sure, unsure, np.zeros((1, 2), bool), np.log([0.5, 0.6]), np.log([[0.5, 0.6]]), gamma=1.1).tolist()
    [1.0, 0.0]
    """
    inside = (
        np.zeros(np.shape(population_references), bool)
        if population_members is None
        else population_members
    )
    ratios = _ratios(np.asarray(victim)[None], references, members, False, offline, a)
    return _share(
        ratios,
        _ratios(np.asarray(population)[None], population_references, inside, False, True, a),
        gamma,
    )[0]


def leave_one_out(
    observations: np.ndarray,
    members: np.ndarray,
    population: np.ndarray,
    *,
    offline: bool = False,
    a: float = 0.3,
    gamma: float = 2.0,
) -> np.ndarray:
    """Each model is the victim once and the others are its references: log p [models, candidates] to scores of that shape.

    ``population`` is [models, records].
    """
    inside = np.zeros(np.shape(population), bool)
    ratios = _ratios(observations, observations, members, True, offline, a)
    return _share(ratios, _ratios(population, population, inside, True, True, a), gamma)


def _share(ratios: np.ndarray, population: np.ndarray, gamma: float) -> np.ndarray:
    """Of the population, sorted: a search instead of all pairs."""
    if gamma <= 0 or not population.shape[1]:
        raise SettingError(
            f"gamma={gamma} and {population.shape[1]} population records: both must be above 0"
        )
    found = [
        np.searchsorted(np.sort(z), x - np.log(gamma), side="left")
        for x, z in zip(ratios, population, strict=True)
    ]
    return np.stack(found) / population.shape[1]


def _ratios(
    victims: Any, references: Any, members: np.ndarray, each: bool, offline: bool, a: float
) -> np.ndarray:
    """log ratio(x) [1 or models, candidates]; with ``each``, every model is judged by the others."""
    members = np.asarray(members)
    if (
        not 0 < a <= 1
        or members.dtype != bool
        or np.ndim(references) != 2
        or members.shape != np.shape(references)
    ):
        shapes = f"log p {list(np.shape(references))} and members {list(members.shape)}"
        raise SettingError(
            f"a={a}, {shapes}: a lies in 0 to 1, and bool [references, candidates] is needed"
        )
    if np.shape(victims)[1:] != members.shape[1:]:
        raise SettingError(
            f"the victim has {np.shape(victims)[1]} candidates, the references {members.shape[1]}"
        )
    found = np.empty((len(victims), members.shape[1]))
    step = max(1, PORTION // len(members))
    for start in range(0, members.shape[1], step):
        part = slice(start, start + step)
        own = np.asarray(victims[:, part], np.float64)
        values = np.exp(np.asarray(references[:, part], np.float64))
        if not (
            np.isfinite(values).all()
            and np.isfinite(own).all()
            and (own <= 1e-9).all()
            and (values <= 1 + 1e-9).all()
        ):
            raise SettingError("log p must be finite and at most 0")
        found[:, part] = own - np.log(
            np.maximum(_usual(values, members[:, part], each, offline, a), LEAST)
        )
    return found


def _usual(
    values: np.ndarray, members: np.ndarray, each: bool, offline: bool, a: float
) -> np.ndarray:
    """P(x) of probabilities [references, candidates]: [1 or references, candidates]."""
    means = []
    counts = []
    for side in (False, True):
        there = members == side
        summed = np.where(there, values, 0).sum(0, keepdims=True)
        count = there.sum(0, keepdims=True)
        if each:
            summed = np.maximum(summed - np.where(there, values, 0), 0)
            count = count - there
        means.append(summed / np.maximum(count, 1))
        counts.append(count)
    if ((counts[0] if offline else counts[0] + counts[1]) == 0).any():
        raise SettingError(
            "a candidate has no reference: offline one without it is needed, online one of either kind"
        )
    without = np.where(counts[0] > 0, means[0], np.clip((means[1] - 1 + a) / a, 0, 1))
    within = np.where((counts[1] > 0) & (not offline), means[1], a * without + 1 - a)
    return (without + within) / 2
