"""Who never saw the release: members told from others by what the two sides look like, and by nothing else.

Members and others of one random split differ by membership alone. Where they do not (another scanner, later years, other people), anybody
can tell them apart, and an attack that does so has proved nothing about a release. So every attack is held beside this one, which reads
its rule off half of the very candidates and judges the other half (Das, Zhang, Tramèr 2024, "Blind baselines beat membership inference
attacks").
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

# pixels of a side, and records of each side of the split, that a rule is read off
SIDE = 12
MOST = 4000
STRENGTH = 0.01  # of the rule's weights: strongly held down, as pixels are many


class Unseen(NamedTuple):
    """Scores [members] and [others], and ``chance``: how probable so good a rule is where both sides look alike."""

    members: NDArray[np.float64]
    others: NDArray[np.float64]
    chance: float


def blind(members: Records, others: Records, classes: int, seed: int = 0) -> Unseen:
    """Of logistic regressions on coarse pixels and labels, each record by the rule of the half it is not in.

    Scores of both halves together are not independent, so the chance is the smaller one of the halves, each a test of its own, twice.

    >>> import torch
    >>> bright, dark = (Records(torch.rand(60, 1, 4, 4) / each, torch.zeros(60, dtype=torch.int64)) for each in (1, 2))
    >>> blind(bright, dark, 1).chance < 1e-6
    True
    """
    rows = np.concatenate([_seen(each, classes) for each in (members, others)])
    side = np.arange(len(rows)) < len(members.labels)
    rng = np.random.default_rng(seed)
    fold = np.empty(len(rows), np.int64)
    for each in (side, ~side):  # halves of each side
        fold[each] = rng.permutation(int(each.sum())) % 2
    scores = np.zeros(len(rows))
    chances = [0.5]
    for half in (0, 1):
        learned = np.concatenate(
            [
                rng.permutation(np.flatnonzero((fold != half) & each))[:MOST]
                for each in (side, ~side)
            ]
        )
        mine = (fold == half) & side
        theirs = (fold == half) & ~side
        if len({*side[learned]}) == 2 and mine.any() and theirs.any():
            rule = make_pipeline(
                StandardScaler(),
                LogisticRegression(C=STRENGTH, max_iter=200, class_weight="balanced"),
            )
            scores[fold == half] = rule.fit(rows[learned], side[learned]).decision_function(
                rows[fold == half]
            )
            chances.append(
                float(mannwhitneyu(scores[mine], scores[theirs], alternative="greater").pvalue)
            )
    return Unseen(scores[side], scores[~side], 2 * min(chances))


def _seen(records: Records, classes: int) -> NDArray[np.float64]:
    """Coarse pixels and the label of each."""
    images = records.images.cpu().float()
    coarse = adaptive_avg_pool2d(
        images, (min(SIDE, images.shape[2]), min(SIDE, images.shape[3]))
    ).flatten(1)
    return np.concatenate(
        [coarse.numpy(), one_hot(records.labels.cpu(), classes).numpy()], 1
    ).astype(np.float64)
