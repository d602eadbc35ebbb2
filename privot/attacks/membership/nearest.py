"""Attacks on a released set by distance: a released image near the candidate suggests a member.

The metrics of the distance are those of `privot.measures.nearest`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from privot.errors import SettingError
from privot.measures.nearest import QUERY_BATCH_SIZE, check_label_pair, search_nearest_neighbours


def score_nearest_distance(
    candidates: Tensor,
    released: Tensor,
    metric: str = "pixels",
    *,
    labels: Tensor | None = None,
    released_labels: Tensor | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Score each candidate by minus the distance to the nearest released image.

    Args:
        candidates: Candidates, [candidates, channels, height, width] in [0, 1].
        released: Released images, [released, channels, height, width] in [0, 1].
        metric: ``pixels``, ``features`` or ``lpips``.
        labels: Classes of the candidates, [candidates]. With labels, only released images of the
            candidate's class count.
        released_labels: Classes of the released images, [released].
        seed: Seed of the random ConvNets of ``features``.

    Returns:
        Scores, float64 [candidates].

    >>> score_nearest_distance(torch.zeros(1, 1, 2, 2), torch.ones(3, 1, 2, 2)).tolist()
    [-2.0]
    """
    nearest = search_nearest_neighbours(
        candidates, released, 1, metric, labels=labels, reference_labels=released_labels, seed=seed
    )
    return -nearest.distances[:, 0].numpy()


def calibrate_scores(
    scores: np.ndarray, shadow_scores: np.ndarray, membership: np.ndarray | None = None
) -> np.ndarray:
    """Subtract the mean score under shadow releases: for distances, mean d(x, S') - d(x, S).

    A candidate that is near every release of this kind is no evidence of membership.

    Args:
        scores: Scores under the attacked release, [candidates].
        shadow_scores: Scores under shadow releases, [shadows, candidates].
        membership: Which shadow was made from which candidate, bool [shadows, candidates]. These
            shadows are left out of the candidate's mean.

    Returns:
        Calibrated scores, [candidates].

    Raises:
        SettingError: If shapes do not fit, or every shadow of a candidate was made from it.

    >>> calibrate_scores(np.array([-1.0]), np.array([[-2.0], [-4.0]])).tolist()
    [2.0]
    """
    is_nonmember = (
        np.ones(np.shape(shadow_scores), bool) if membership is None else ~np.asarray(membership)
    )
    if (
        np.shape(shadow_scores)[1:] != np.shape(scores)
        or is_nonmember.shape != np.shape(shadow_scores)
        or not is_nonmember.any(0).all()
    ):
        raise SettingError(
            "shadow_scores must be [shadows, candidates], and each candidate needs at least one "
            "shadow that was made without it"
        )
    return scores - np.where(is_nonmember, shadow_scores, 0).sum(0) / is_nonmember.sum(0)


def score_largest_cosine(
    candidates: Tensor,
    released: Tensor,
    *,
    labels: Tensor | None = None,
    released_labels: Tensor | None = None,
) -> np.ndarray:
    r"""Score each candidate by the largest cosine to a released image, each side minus its mean.

    A set that distribution matching starts from real images is s_i = x_i + mean(T) - mean(S_0)
    (Dong et al. 2022, proposition 4.4): minus its mean, it is those images again. The attack finds
    the records that a set started from, not other members.

    Args:
        candidates: Candidates, [candidates, channels, height, width] in [0, 1].
        released: Released images, [released, channels, height, width] in [0, 1].
        labels: Classes of the candidates, [candidates]. With labels, means and comparisons are
            within a class.
        released_labels: Classes of the released images, [released].

    Returns:
        Scores, float64 [candidates].

    Raises:
        SettingError: If a class has no released image.

    >>> images = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> score_largest_cosine(images, images.roll(1, 0) + 0.1).round(3).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    check_label_pair(labels, released_labels)
    device = released.device
    if labels is None or released_labels is None:
        labels = torch.zeros(len(candidates))
        released_labels = torch.zeros(len(released))
    scores = torch.zeros(len(candidates), dtype=torch.float64)
    for label in labels.unique():
        indices = (labels == label).nonzero().flatten()
        is_released = released_labels == label
        if not is_released.any():
            raise SettingError(f"class {int(label)} has no released image to compare with")
        pixels = released[is_released.to(device)].flatten(1).float()
        centered = pixels - pixels.mean(0) if len(pixels) > 1 else pixels
        directions = normalize(centered, dim=1)
        in_class = candidates[indices.to(candidates.device)]
        mean = sum(
            batch.flatten(1).double().sum(0) for batch in in_class.split(QUERY_BATCH_SIZE)
        ) / len(indices)
        for batch in indices.split(QUERY_BATCH_SIZE):
            rows = (
                candidates[batch.to(candidates.device)].to(device).flatten(1).float()
                - torch.as_tensor(mean, device=device).float()
            )
            cosines = normalize(rows, dim=1) @ directions.T
            scores[batch.cpu()] = cosines.max(1).values.double().cpu()
    return scores.numpy()
