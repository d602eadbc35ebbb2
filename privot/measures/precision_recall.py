"""Fidelity and diversity apart: are the fakes where the real ones are, and are they everywhere there?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from privot.errors import SettingError

PORTION = 2**24  # distances held in one go
SLACK = 1e-12  # of the squared lengths, far above rounding: a point on the rim of a ball, or equal to its centre, is in it


class Quality(NamedTuple):
    """Four shares (density may exceed 1) and their standard errors."""

    precision: float
    recall: float
    density: float
    coverage: float
    precision_error: float
    recall_error: float
    density_error: float
    coverage_error: float


def precision_recall(real: Tensor, fake: Tensor, k: int = 3) -> Quality:
    r"""Of features ``real`` [n, d] and ``fake`` [m, d], with balls B(x) of each point's ``k``-th nearest neighbour in its own set.

    precision = share of fakes in some real ball; recall = share of reals in some fake ball (Kynkäänniemi et al. 2019);
    density = 1/(k m) \sum_j \#{i: fake_j in B(real_i)}; coverage = share of real balls that hold a fake (Naeem et al. 2020).

    Balls are closed. Errors are binomial (for density: the spread over fakes): they count the points asked, not the chance in the
    balls. Numbers of different ``k``, sizes or features do not compare. Computed in float64, in portions, where ``real`` lies.

    >>> real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> precision_recall(real, torch.tensor([[0.5], [0.75], [9.0], [9.5]]), k=1)[:4]
    (0.5, 0.25, 1.0, 0.5)
    """
    if real.ndim != 2 or fake.ndim != 2 or real.shape[1] != fake.shape[1]:
        raise SettingError(
            f"features are {list(real.shape)} and {list(fake.shape)}: [n, d] and [m, d] are needed, with the same d"
        )
    if not 1 <= k < min(len(real), len(fake)):
        raise SettingError(f"k={k}: at least 1, and fewer than the points of either set")
    if not (real.isfinite().all() and fake.isfinite().all()):
        raise SettingError("features hold NaN or infinite values")
    real, fake = real.double(), fake.to(real.device).double()
    centre = real.mean(0)  # far from the origin squares would swamp differences
    real = real - centre
    fake = fake - centre
    real_reach = _reach(real, k)
    fake_reach = _reach(fake, k)
    inside = []
    recalled = torch.zeros_like(real_reach, dtype=torch.bool)
    covered = torch.zeros_like(real_reach, dtype=torch.bool)
    for part, reach in zip(
        _portions(fake, real, SLACK), fake_reach.split(_rows(real)), strict=True
    ):
        near = part <= real_reach
        inside.append(near.sum(1))
        covered |= near.any(0)
        recalled |= (part <= reach[:, None]).any(0)
    balls = torch.cat(inside).double()
    scores = [each.double() for each in (balls > 0, recalled, balls / k, covered)]
    errors = [
        (each.var(correction=0) / len(each)).sqrt().item() for each in scores
    ]  # of zeros and ones the variance is p (1 - p)
    return Quality(*(each.mean().item() for each in scores), *errors)


def _rows(columns: Tensor) -> int:
    return max(1, PORTION // len(columns))


def _portions(rows: Tensor, columns: Tensor, slack: float) -> Iterator[Tensor]:
    """Squared distances of ``rows`` [m, d] to ``columns`` [n, d], a few rows [r, n] at a time."""
    lengths = columns.square().sum(1)
    for part in rows.split(_rows(columns)):
        both = part.square().sum(1, keepdim=True) + lengths
        yield torch.addmm(both, part, columns.T, alpha=-2).sub_(both, alpha=slack).clamp_(min=0)


def _reach(points: Tensor, k: int) -> Tensor:
    """Squared distance to the ``k``-th nearest other point, [n]."""
    return torch.cat(
        [part.topk(k + 1, largest=False).values[:, -1] for part in _portions(points, points, 0)]
    )
