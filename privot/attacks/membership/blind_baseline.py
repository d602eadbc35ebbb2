"""Blind baseline: separates members from non-members without access to the release.

Members and non-members of one random split differ by membership only. If the two sides differ in
another way (another scanner, later years, other people), anybody can separate them, and an attack
that does so has proved nothing about a release. So every attack is compared with this baseline. It
fits a rule on half of the same candidates and scores the other half (Das, Zhang, Tramer 2024,
"Blind baselines beat membership inference attacks").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.nn.functional import adaptive_avg_pool2d, one_hot

from privot.data.dataset import Records

COARSE_SIDE = 12  # pixels a side of the coarse images
MAX_FIT_RECORDS = 4000  # of each side, that a rule is fitted to
INVERSE_REGULARIZATION = 0.01  # of the weights: a strong regularization, since pixels are many


class BlindScores(NamedTuple):
    """Scores of the blind baseline.

    Attributes:
        members: Scores of members.
        nonmembers: Scores of non-members.
        p_value: Probability of so good a rule if the two sides look alike.
    """

    members: NDArray[np.float64]
    nonmembers: NDArray[np.float64]
    p_value: float


def run_blind_baseline(
    members: Records, nonmembers: Records, num_classes: int, seed: int = 0
) -> BlindScores:
    """Score records by logistic regression on coarse pixels and labels.

    Each record is scored by the rule of the half that it is not in. Scores of both halves together
    are not independent, so the p-value is twice the smaller one of the two halves, each of which is
    a test of its own.

    Args:
        members: Members.
        nonmembers: Non-members.
        num_classes: Number of classes.
        seed: Seed of the halves.

    Returns:
        Scores and p-value.

    >>> import torch
    >>> labels = torch.zeros(60, dtype=torch.int64)
    >>> bright, dark = (Records(torch.rand(60, 1, 4, 4) / divisor, labels) for divisor in (1, 2))
    >>> run_blind_baseline(bright, dark, 1).p_value < 1e-6
    True
    """
    features = np.concatenate(
        [_extract_coarse_features(side, num_classes) for side in (members, nonmembers)]
    )
    is_member = np.arange(len(features)) < len(members.labels)
    rng = np.random.default_rng(seed)
    half = np.empty(len(features), np.int64)
    for side in (is_member, ~is_member):
        half[side] = rng.permutation(int(side.sum())) % 2
    scores = np.zeros(len(features))
    p_values = [0.5]
    for scored_half in (0, 1):
        is_scored = half == scored_half
        fitted = np.concatenate(
            [
                rng.permutation(np.flatnonzero(~is_scored & side))[:MAX_FIT_RECORDS]
                for side in (is_member, ~is_member)
            ]
        )
        scored_members = is_scored & is_member
        scored_nonmembers = is_scored & ~is_member
        has_both_sides = len({*is_member[fitted]}) == 2
        if has_both_sides and scored_members.any() and scored_nonmembers.any():
            rule = make_pipeline(
                StandardScaler(),
                LogisticRegression(C=INVERSE_REGULARIZATION, max_iter=200, class_weight="balanced"),
            )
            rule.fit(features[fitted], is_member[fitted])
            scores[is_scored] = rule.decision_function(features[is_scored])
            test = mannwhitneyu(
                scores[scored_members], scores[scored_nonmembers], alternative="greater"
            )
            p_values.append(float(test.pvalue))
    return BlindScores(scores[is_member], scores[~is_member], 2 * min(p_values))


def _extract_coarse_features(records: Records, num_classes: int) -> NDArray[np.float64]:
    """Compute coarse pixels and one-hot label of each record, [records, features]."""
    images = records.images.cpu().float()
    size = (min(COARSE_SIDE, images.shape[2]), min(COARSE_SIDE, images.shape[3]))
    pixels = adaptive_avg_pool2d(images, size).flatten(1)
    labels = one_hot(records.labels.cpu(), num_classes)
    return np.concatenate([pixels.numpy(), labels.numpy()], 1).astype(np.float64)
