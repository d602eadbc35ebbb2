"""AdaBoost of stumps on images, as fast as counting allows."""

from __future__ import annotations

import math

import numpy as np

LEVELS = 256


class StumpBoost:
    r"""AdaBoost (SAMME) of decision stumps, as scikit-learn's AdaBoostClassifier computes it, on pixels of 256 levels.

    Each round takes the pixel and threshold with the lowest weighted Gini impurity, lets both sides vote for their heaviest class,
    and with the weighted error e of that stump gives it the say a = log((1 - e) / e) + log(K - 1) and multiplies the weights of its
    mistakes by exp(a); K classes. An image goes to the class with the most say.

    Values in [0, 1] are rounded to 8 bits first, as in an image file. Then a histogram of the weights by level and class gives all
    thresholds of a pixel at once, and no sorting is needed. On 8-bit images the answer is scikit-learn's, but for exact ties of
    two pixels: the first pixel wins here, a random one there. So this takes no seed.

    >>> x, y = np.array([[0.1, 0.5], [0.2, 0.4], [0.8, 0.5]]), np.array([0, 0, 1])
    >>> StumpBoost(rounds=10).fit(x, y).predict(np.array([[0.3, 0.9], [0.7, 0.1]])).tolist()
    [0, 1]
    """

    def __init__(self, rounds: int = 100):
        self.rounds = rounds

    def fit(self, x: np.ndarray, y: np.ndarray) -> StumpBoost:
        """Images ``x`` [n, pixels] in [0, 1], labels ``y`` [n], whole numbers."""
        self.classes_, labels = np.unique(y, return_inverse=True)
        count = len(self.classes_)
        if count < 2:
            raise ValueError("one class")
        pixels = np.ascontiguousarray(_levels(x).T)
        alive = np.flatnonzero(pixels.min(1) < pixels.max(1))  # a constant pixel cannot split
        cells = pixels[alive] * np.int32(count) + labels.astype(np.int32)
        present = np.stack([np.bincount(row, minlength=LEVELS) > 0 for row in pixels[alive]]) if len(alive) else np.zeros((0, LEVELS), bool)
        weights = np.full(len(labels), 1 / len(labels))
        self.stumps_: list[tuple[int, float, int, int, float]] = []  # pixel, threshold, class up to it, class above, say
        for _ in range(self.rounds):
            weights = np.clip(weights, np.finfo(float).eps, None)
            row, threshold, low, high = _stump(cells, present, weights, labels, count)
            pixel = int(alive[row]) if len(alive) else 0
            wrong = np.where(pixels[pixel] <= threshold, low, high) != labels
            error = float(weights[wrong].sum() / weights.sum())
            if error >= 1 - 1 / count and self.stumps_:
                break
            say = 1.0 if error <= 0 else math.log((1 - error) / error) + math.log(count - 1)
            self.stumps_.append((pixel, threshold, low, high, say))
            if error <= 0:
                break
            weights = np.where(wrong, weights * math.exp(say), weights)
            weights /= weights.sum()
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Labels [n] for images ``x`` [n, pixels]."""
        pixels, votes = _levels(x), np.zeros((len(x), len(self.classes_)))
        rows = np.arange(len(x))
        for pixel, threshold, low, high, say in self.stumps_:
            votes[rows, np.where(pixels[:, pixel] <= threshold, low, high)] += say
        return self.classes_[votes.argmax(1)]


def _levels(x: np.ndarray) -> np.ndarray:
    return np.rint(np.asarray(x) * (LEVELS - 1)).astype(np.int32)


def _stump(cells: np.ndarray, present: np.ndarray, weights: np.ndarray, labels: np.ndarray, count: int) -> tuple[int, float, int, int]:
    """(row of cells, threshold, class up to it, class above it) of the purest split; with no pixel to split, one class for all."""
    total = np.bincount(labels, weights, count)
    best, chosen = -math.inf, (0, float(LEVELS), int(total.argmax()), 0)
    for row, cell in enumerate(cells):
        levels = np.flatnonzero(present[row])
        below = np.bincount(cell, weights, LEVELS * count).reshape(LEVELS, count)[levels[:-1]].cumsum(0)
        above = total - below
        purity = (below**2).sum(1) / below.sum(1) + (above**2).sum(1) / above.sum(1)  # highest where Gini impurity is lowest
        split = int(purity.argmax())
        if purity[split] > best:
            best = float(purity[split])
            threshold = (levels[split] + levels[split + 1]) / 2
            chosen = row, float(threshold), int(below[split].argmax()), int(above[split].argmax())
    return chosen
