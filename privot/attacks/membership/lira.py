r"""LiRA (Carlini et al. 2022): is an observation likelier among shadows that held the candidate, or among those that did not?

Observations are [shadows, candidates] or [shadows, candidates, queries], of any statistic that is about Gaussian: the `confidence` of a
classifier, or a distance to a released set. With the law N(m_in, s_in²) of the shadows that held a candidate and N(m_out, s_out²) of the
others,

    online  log N(x; m_in, s_in²) - log N(x; m_out, s_out²)        offline  (x - m_out) / s_out,

averaged over queries. Offline is one-sided: far *below* the others' law is no sign of membership. Everything is float64 and goes
candidate by candidate in portions, so that matrices may be memory-mapped files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from privot.errors import SettingError

PORTION = 2**21  # observations held in one go
FEW = 64  # shadows: with fewer, a deviation of each candidate's own is noisier than it is telling (Carlini et al., section VI-C)
FLOOR = 1e-6  # the least deviation: logits of single precision are no finer than this


def half(count: int, shadows: int, generator: torch.Generator) -> np.ndarray:
    """Who is a member where, bool [shadows, count]: every candidate in exactly half of the shadows, at random.

    >>> half(5, 4, torch.Generator().manual_seed(0)).sum(0).tolist()
    [2, 2, 2, 2, 2]
    """
    if shadows < 2 or shadows % 2:
        raise SettingError(
            f"shadows={shadows}: an even number is needed, so that each candidate is in half of them"
        )
    members = np.empty((shadows, count), bool)
    for part in _portions(count, shadows):
        draws = torch.rand(
            shadows, part.stop - part.start, dtype=torch.float64, generator=generator
        )
        members[:, part] = (
            draws.argsort(0).argsort(0) < shadows // 2
        ).numpy()  # the rank of each draw within its column
    return members


def lira(
    victim: np.ndarray,
    shadows: np.ndarray,
    members: np.ndarray,
    *,
    offline: bool = False,
    pooled: bool | None = None,
    median: bool = False,
) -> np.ndarray:
    """Scores [candidates] of a victim's observations [candidates(, queries)] by those of shadows [shadows, candidates(, queries)].

    ``members`` is bool [shadows, candidates]. ``pooled`` takes one deviation for all candidates, for each side its own (None: with fewer
    than 64 shadows); it is of the residuals about each candidate's own centre. ``median`` centres the laws on medians instead of means.

    >>> shadows, members = np.array([[1.0], [1.2], [3.0], [3.2]]), np.array([[False], [False], [True], [True]])
    >>> bool(lira(np.array([3.1]), shadows, members)[0] > 0 > lira(np.array([1.1]), shadows, members)[0])
    True
    """
    if np.shape(victim) != np.shape(shadows)[1:]:
        raise SettingError(
            f"the victim has observations {list(np.shape(victim))}, the shadows {list(np.shape(shadows))}"
        )
    return _scores(
        np.asarray(victim)[None],
        shadows,
        members,
        False,
        offline,
        pooled,
        median,
        np.empty((1, members.shape[1])),
    )[0]


def leave_one_out(
    observations: np.ndarray,
    members: np.ndarray,
    *,
    offline: bool = False,
    pooled: bool | None = None,
    median: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Each shadow is the victim once and the others are its shadows: scores [shadows, candidates], as `lira` would give them one by one.

    Sums of all shadows less the victim's own make it one pass, N log N with medians. ``out`` takes the scores, where they are to lie in a
    file. Pairs of one shadow or one candidate are not independent: intervals are to be taken over shadows. Where nothing leaks, scores of
    members come out a little *lower* (AUC 0.49 of 16 shadows), since one shadow fewer is left on their side.

    >>> members = half(3, 8, torch.Generator().manual_seed(0))
    >>> scores = leave_one_out(4 * members + np.random.default_rng(0).normal(size=members.shape), members)
    >>> bool(scores[members].mean() > 0 > scores[~members].mean())
    True
    """
    out = np.empty(np.shape(members)) if out is None else out
    return _scores(observations, observations, members, True, offline, pooled, median, out)


class _Law(NamedTuple):
    """Of one side: how many shadows, their centre and the sum of squares about their mean; [1 or shadows, candidates, queries]."""

    size: np.ndarray
    centre: np.ndarray
    squares: np.ndarray


def _scores(
    victims: Any,
    shadows: Any,
    members: np.ndarray,
    each: bool,
    offline: bool,
    pooled: bool | None,
    median: bool,
    out: np.ndarray,
) -> np.ndarray:
    members = np.asarray(members)
    if (
        members.dtype != bool
        or np.ndim(shadows) not in (2, 3)
        or members.shape != np.shape(shadows)[:2]
        or not members.size
    ):
        raise SettingError(
            f"observations {list(np.shape(shadows))} and members {list(members.shape)}: both begin [shadows, candidates]"
        )
    sides = (False,) if offline else (False, True)
    pooled = len(members) < FEW if pooled is None else pooled
    shared = [_pooled(shadows, members, side, each) if pooled else None for side in sides]
    for part in _portions(
        members.shape[1], max(1, int(np.prod(np.shape(shadows))) // members.shape[1])
    ):
        seen = _read(victims, part)
        values = _read(shadows, part)
        laws = [_law(values, members[:, part] == side, each, median) for side in sides]
        deviations = [
            _deviation(law) if own is None else own for law, own in zip(laws, shared, strict=True)
        ]
        standard = [
            (seen - law.centre) / deviation for law, deviation in zip(laws, deviations, strict=True)
        ]
        if not offline:
            standard[0] = (
                0.5 * (standard[0] ** 2 - standard[1] ** 2)
                + np.log(deviations[0])
                - np.log(deviations[1])
            )
        out[:, part] = standard[0].mean(2)
    return out


def _law(values: np.ndarray, there: np.ndarray, each: bool, median: bool = False) -> _Law:
    """Of ``values`` [shadows, candidates, queries] where ``there`` [shadows, candidates]; with ``each``, of all but each shadow itself."""
    there = there[..., None]
    count = there.sum(0, keepdims=True)
    left = count - there if each else count
    if left.min() < 1:
        raise SettingError(
            "a candidate has no shadow with it, or none without it: more shadows are needed, or the offline attack"
        )
    mean = np.where(there, values, 0).sum(0, keepdims=True) / count
    apart = np.where(there, values - mean, 0)
    squares = (apart**2).sum(0, keepdims=True)
    centre = mean
    if each:  # the sum of squares without x, and the mean: both shrink by what x had added; elsewhere ``apart`` is 0
        squares = np.maximum(squares - apart**2 * count / np.maximum(count - 1, 1), 0)
        centre = mean - apart / np.maximum(count - 1, 1)
    if median:
        centre = _median(np.where(there, values, np.inf), there if each else None, left)
    return _Law(left, centre, squares)


def _median(values: np.ndarray, own: np.ndarray | None, left: np.ndarray) -> np.ndarray:
    """Of the finite values in each column, for each shadow without its own where ``own``; ``left`` counts those that remain."""
    order = values.argsort(0, kind="stable")
    ordered = np.take_along_axis(values, order, 0)
    rank = (
        np.full((1, *values.shape[1:]), len(values))
        if own is None
        else np.where(own, order.argsort(0, kind="stable"), len(values))
    )
    middle = [
        place + (rank <= place) for place in ((left - 1) // 2, left // 2)
    ]  # what is taken out shifts all from its rank on
    return (
        np.take_along_axis(ordered, middle[0], 0) + np.take_along_axis(ordered, middle[1], 0)
    ) / 2


def _deviation(law: _Law) -> np.ndarray:
    if law.size.min() < 2:
        raise SettingError(
            "a deviation of each candidate's own needs at least 2 shadows a side, the victim left out: use pooled ones"
        )
    return np.maximum(np.sqrt(law.squares / (law.size - 1)), FLOOR)


def _pooled(shadows: Any, members: np.ndarray, side: bool, each: bool) -> np.ndarray:
    """One deviation for all candidates, [1 or shadows, 1, queries]."""
    squares = np.zeros(())
    freedom = np.zeros(())
    for part in _portions(
        members.shape[1], max(1, int(np.prod(np.shape(shadows))) // members.shape[1])
    ):
        law = _law(_read(shadows, part), members[:, part] == side, each)
        squares = squares + law.squares.sum(1, keepdims=True)
        freedom = freedom + (law.size - 1).sum(1, keepdims=True)
    if freedom.min() < 1:
        raise SettingError(
            "a deviation needs at least 2 shadows a side, the victim left out: more shadows are needed"
        )
    return np.maximum(np.sqrt(squares / freedom), FLOOR)


def _read(observations: Any, part: slice) -> np.ndarray:
    """Float64 [shadows, some candidates, queries]."""
    values = np.asarray(observations[:, part], np.float64)
    if not np.isfinite(values).all():
        raise SettingError("observations hold NaN or infinite values")
    return values[..., None] if values.ndim == 2 else values


def _portions(candidates: int, each: int) -> Iterator[slice]:
    step = max(1, PORTION // each)
    return (slice(start, min(start + step, candidates)) for start in range(0, candidates, step))
