"""AdaBoost of stumps on images, as fast as counting allows."""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse

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
        if (count := len(self.classes_)) < 2:
            raise ValueError("one class")
        order = np.argsort(labels, kind="stable")
        labels = labels[order]
        pixels = _levels(x)[order]
        histogram = _Histogram(pixels, np.bincount(labels))
        weights = np.full(len(labels), 1 / len(labels))
        self.stumps_: list[
            tuple[int, float, int, int, float]
        ] = []  # pixel, threshold, class up to it, class above, say
        for _ in range(self.rounds):
            weights = np.clip(weights, np.finfo(float).eps, None)
            pixel, threshold, low, high = histogram.stump(weights)
            wrong = np.where(pixels[:, pixel] <= threshold, low, high) != labels
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
        pixels = _levels(x)
        votes = np.zeros((len(x), len(self.classes_)))
        rows = np.arange(len(x))
        for pixel, threshold, low, high, say in self.stumps_:
            votes[rows, np.where(pixels[:, pixel] <= threshold, low, high)] += say
        return self.classes_[votes.argmax(1)]


class _Histogram:
    """Weights of images ``pixels`` [n, pixels], sorted by class in ``sizes``, added up by class, pixel and level.

    For each class a sparse matrix of ones, [pixels * levels, images], sums them. A pixel's commonest level (mostly black) is left
    out of it and found by subtraction: of MNIST a fifth remains.
    """

    def __init__(self, pixels: np.ndarray, sizes: np.ndarray):
        places = np.arange(pixels.shape[1]) * LEVELS
        seen = np.stack([np.bincount(column, minlength=LEVELS) for column in pixels.T])
        self.common = seen.argmax(1) + places
        before = seen.cumsum(1)
        self.useless = (seen == 0) | (before == len(pixels))  # a threshold there splits nothing new
        self.following = np.where(seen > 0, np.arange(LEVELS), LEVELS)
        self.following = np.minimum.accumulate(self.following[:, ::-1], 1)[
            :, ::-1
        ]  # the next level seen, from here on
        self.ends = np.cumsum(sizes)
        self.sums = []
        for part in np.split(pixels, self.ends[:-1]):
            cells = part + places
            kept = cells != self.common
            starts = np.concatenate([[0], kept.sum(1).cumsum()])
            shape = (len(places) * LEVELS, len(part))
            self.sums.append(
                sparse.csc_array(
                    (np.ones(starts[-1]), cells[kept].astype(np.int32), starts.astype(np.int32)),
                    shape,
                ).tocsr()
            )

    def stump(self, weights: np.ndarray) -> tuple[int, float, int, int]:
        """(pixel, threshold, class up to it, class above it) of the purest split; with none to split, one class for all."""
        parts = np.split(weights, self.ends[:-1])
        total = np.array([part.sum() for part in parts])
        below = np.stack([matrix @ part for matrix, part in zip(self.sums, parts, strict=True)])
        below[:, self.common] = total[:, None] - below.reshape(len(total), -1, LEVELS).sum(2)
        below = below.reshape(len(total), -1, LEVELS)
        np.cumsum(below, axis=2, out=below)
        mass = below.sum(0)
        square = np.einsum("cpl,cpl->pl", below, below)
        rest = (total**2).sum() - 2 * np.einsum("c,cpl->pl", total, below) + square
        with np.errstate(divide="ignore", invalid="ignore"):
            purity = square / mass + rest / (
                total.sum() - mass
            )  # highest where the Gini impurity is lowest
        purity[self.useless] = -math.inf
        pixel, level = (int(each) for each in np.unravel_index(purity.argmax(), purity.shape))
        if self.useless[pixel, level]:
            return 0, float(LEVELS), int(total.argmax()), 0
        left = below[:, pixel, level]
        return (
            pixel,
            (level + int(self.following[pixel, level + 1])) / 2,
            int(left.argmax()),
            int((total - left).argmax()),
        )


def _levels(x: np.ndarray) -> np.ndarray:
    return np.rint(np.asarray(x) * (LEVELS - 1)).astype(np.int32)
