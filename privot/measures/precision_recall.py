"""Precision, recall, density and coverage: fidelity and diversity as separate numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from privot.errors import SettingError

MAX_DISTANCES_PER_CHUNK = 2**24
# Relative to the squared lengths, far above rounding errors: a point on the surface of a ball, or
# equal to its centre, counts as inside.
BOUNDARY_TOLERANCE = 1e-12


class PrecisionRecall(NamedTuple):
    """Four scores in [0, 1], except that density may exceed 1, and their standard errors."""

    precision: float
    recall: float
    density: float
    coverage: float
    precision_standard_error: float
    recall_standard_error: float
    density_standard_error: float
    coverage_standard_error: float


def precision_recall(real: Tensor, fake: Tensor, k: int = 3) -> PrecisionRecall:
    r"""Compute precision, recall, density and coverage of two sets of features.

    B(x) is the closed ball around a point whose radius is the distance to its ``k``-th nearest
    neighbour in its own set.

    precision = share of fakes in some real ball; recall = share of reals in some fake ball
    (Kynkäänniemi et al. 2019); density = 1/(k m) \sum_j \#{i: fake_j in B(real_i)};
    coverage = share of real balls that contain a fake (Naeem et al. 2020).

    The errors are binomial (for density: the variance over fakes). They cover the points that are
    tested, not the randomness of the balls. Results with different ``k``, sizes or features are not
    comparable. Runs in float64, in chunks, on the device of ``real``.

    Args:
        real: Features of real images [n, d].
        fake: Features of synthetic images [m, d].
        k: Which neighbour sets the radius.

    Returns:
        The four scores and their standard errors.

    Raises:
        SettingError: The shapes or ``k`` do not fit, or a feature is not finite.

    >>> real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> precision_recall(real, torch.tensor([[0.5], [0.75], [9.0], [9.5]]), k=1)[:4]
    (0.5, 0.25, 1.0, 0.5)
    """
    _check_features(real, fake, k)
    real = real.double()
    fake = fake.to(real.device).double()
    center = real.mean(0)  # far from the origin, squares would lose the precision of differences
    real = real - center
    fake = fake - center
    real_radii = _squared_knn_radii(real, k)
    fake_radii = _squared_knn_radii(fake, k)
    ball_counts = []
    is_recalled = torch.zeros_like(real_radii, dtype=torch.bool)
    is_covered = torch.zeros_like(real_radii, dtype=torch.bool)
    for distances, radii in zip(
        _iterate_squared_distances(fake, real, BOUNDARY_TOLERANCE),
        fake_radii.split(_rows_per_chunk(real)),
        strict=True,
    ):
        is_in_real_ball = distances <= real_radii
        ball_counts.append(is_in_real_ball.sum(1))
        is_covered |= is_in_real_ball.any(0)
        is_recalled |= (distances <= radii[:, None]).any(0)
    num_balls = torch.cat(ball_counts).double()
    scores = [score.double() for score in (num_balls > 0, is_recalled, num_balls / k, is_covered)]
    # For zeros and ones, the variance is p (1 - p).
    errors = [(score.var(correction=0) / len(score)).sqrt().item() for score in scores]
    return PrecisionRecall(*(score.mean().item() for score in scores), *errors)


def _check_features(real: Tensor, fake: Tensor, k: int) -> None:
    """Raise a SettingError for features of wrong shape, infinite features or a wrong ``k``."""
    if real.ndim != 2 or fake.ndim != 2 or real.shape[1] != fake.shape[1]:
        raise SettingError(
            f"The features are {list(real.shape)} and {list(fake.shape)}. The shapes [n, d] and "
            "[m, d] are needed, with the same d."
        )
    if not 1 <= k < min(len(real), len(fake)):
        raise SettingError(
            f"k={k} must be at least 1 and smaller than the number of points of either set."
        )
    if not (real.isfinite().all() and fake.isfinite().all()):
        raise SettingError("The features contain NaN or infinite values.")


def _rows_per_chunk(columns: Tensor) -> int:
    return max(1, MAX_DISTANCES_PER_CHUNK // len(columns))


def _iterate_squared_distances(rows: Tensor, columns: Tensor, tolerance: float) -> Iterator[Tensor]:
    """Compute squared distances of ``rows`` [m, d] to ``columns`` [n, d] in chunks of rows.

    Args:
        rows: Points [m, d].
        columns: Points [n, d].
        tolerance: Share of the squared lengths that is subtracted from each squared distance.

    Yields:
        Squared distances [r, n] of the next r rows.
    """
    column_norms = columns.square().sum(1)
    for chunk in rows.split(_rows_per_chunk(columns)):
        norms = chunk.square().sum(1, keepdim=True) + column_norms
        distances = torch.addmm(norms, chunk, columns.T, alpha=-2)
        yield distances.sub_(norms, alpha=tolerance).clamp_(min=0)


def _squared_knn_radii(points: Tensor, k: int) -> Tensor:
    """Compute the squared distance [n] of each point to its ``k``-th nearest other point."""
    return torch.cat(
        [
            distances.topk(k + 1, largest=False).values[:, -1]
            for distances in _iterate_squared_distances(points, points, 0)
        ]
    )
