"""AdaBoost of decision stumps on 8-bit images, by histograms."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import sparse

PIXEL_LEVELS = 256


class Stump(NamedTuple):
    """A decision stump: one pixel compared with one threshold.

    Attributes:
        pixel: Index of the pixel.
        threshold: In levels of 0 to 255; pixels up to it go to the lower side.
        class_below: Index of the class that the lower side votes for.
        class_above: Index of the class that the upper side votes for.
        vote: Weight of this stump in the ensemble.
    """

    pixel: int
    threshold: float
    class_below: int
    class_above: int
    vote: float


class HistogramAdaBoost:
    r"""AdaBoost (SAMME) of decision stumps, as in scikit-learn's AdaBoostClassifier.

    In each round, the stump with the lowest weighted Gini impurity is added. Each of its sides
    votes for its heaviest class. With the weighted error :math:`e` of the stump and K classes, its
    vote is :math:`a = \log((1 - e) / e) + \log(K - 1)`, and the weights of the misclassified
    images are multiplied by :math:`\exp(a)`. An image gets the class with the largest sum of votes.

    Pixels in [0, 1] are first rounded to 8 bits. A histogram of the weights by level and class then
    gives all thresholds of a pixel at once, without sorting. On 8-bit images the result equals that
    of scikit-learn, except for exact ties of two pixels: here the first pixel wins, there a random
    one. So this class needs no seed.

    >>> x, y = np.array([[0.1, 0.5], [0.2, 0.4], [0.8, 0.5]]), np.array([0, 0, 1])
    >>> HistogramAdaBoost(n_estimators=10).fit(x, y).predict(np.array([[0.3, 0.9], [0.7, 0.1]]))
    array([0, 1])
    """

    def __init__(self, n_estimators: int = 100):
        self.n_estimators = n_estimators

    def fit(self, x: np.ndarray, y: np.ndarray) -> HistogramAdaBoost:
        """Fit stumps to images ``x`` [n, pixels] in [0, 1] with integer labels ``y`` [n]."""
        self.classes_, labels = np.unique(y, return_inverse=True)
        num_classes = len(self.classes_)
        if num_classes < 2:
            raise ValueError("The training labels need at least two classes.")
        order = np.argsort(labels, kind="stable")
        labels = labels[order]
        pixels = _quantize_pixels(x)[order]
        histogram = _WeightHistogram(pixels, np.bincount(labels))
        weights = np.full(len(labels), 1 / len(labels))
        self.stumps_: list[Stump] = []
        for _ in range(self.n_estimators):
            weights = np.clip(weights, np.finfo(float).eps, None)
            pixel, threshold, low, high = histogram.find_best_stump(weights)
            is_wrong = np.where(pixels[:, pixel] <= threshold, low, high) != labels
            error = float(weights[is_wrong].sum() / weights.sum())
            if error >= 1 - 1 / num_classes and self.stumps_:
                break
            vote = 1.0
            if error > 0:
                vote = math.log((1 - error) / error) + math.log(num_classes - 1)
            self.stumps_.append(Stump(pixel, threshold, low, high, vote))
            if error <= 0:
                break
            weights = np.where(is_wrong, weights * math.exp(vote), weights)
            weights /= weights.sum()
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predict labels [n] of images ``x`` [n, pixels] in [0, 1]."""
        pixels = _quantize_pixels(x)
        votes = np.zeros((len(x), len(self.classes_)))
        rows = np.arange(len(x))
        for stump in self.stumps_:
            is_below = pixels[:, stump.pixel] <= stump.threshold
            votes[rows, np.where(is_below, stump.class_below, stump.class_above)] += stump.vote
        return self.classes_[votes.argmax(1)]


class _WeightHistogram:
    """Sums of image weights by class, pixel and level.

    For each class, a sparse matrix of ones, [pixels * levels, images], computes the sums. The most
    common level of each pixel (mostly black) is left out of the matrix: its sum follows by
    subtraction. For MNIST this leaves a fifth of the entries.

    Args:
        pixels: Levels [n, pixels] of images that are sorted by class.
        class_sizes: Number of images of each class.
    """

    def __init__(self, pixels: np.ndarray, class_sizes: np.ndarray):
        offsets = np.arange(pixels.shape[1]) * PIXEL_LEVELS
        counts = np.stack([np.bincount(column, minlength=PIXEL_LEVELS) for column in pixels.T])
        self.most_common_cells = counts.argmax(1) + offsets
        counts_up_to = counts.cumsum(1)
        # A threshold at such a level gives no new split.
        self.is_trivial_split = (counts == 0) | (counts_up_to == len(pixels))
        # The next level that occurs, from each level on.
        next_level = np.where(counts > 0, np.arange(PIXEL_LEVELS), PIXEL_LEVELS)
        self.next_level = np.minimum.accumulate(next_level[:, ::-1], 1)[:, ::-1]
        self.class_ends = np.cumsum(class_sizes)
        self.class_sum_matrices = []
        for class_pixels in np.split(pixels, self.class_ends[:-1]):
            cells = class_pixels + offsets
            is_stored = cells != self.most_common_cells
            starts = np.concatenate([[0], is_stored.sum(1).cumsum()])
            entries = (
                np.ones(starts[-1]),
                cells[is_stored].astype(np.int32),
                starts.astype(np.int32),
            )
            shape = (len(offsets) * PIXEL_LEVELS, len(class_pixels))
            self.class_sum_matrices.append(sparse.csc_array(entries, shape).tocsr())

    def find_best_stump(self, weights: np.ndarray) -> tuple[int, float, int, int]:
        """Find the split with the lowest weighted Gini impurity.

        Args:
            weights: Weight [n] of each image.

        Returns:
            Pixel, threshold, class below and class above. If no pixel can be split, the stump
            gives the heaviest class to every image.
        """
        class_weights = np.split(weights, self.class_ends[:-1])
        total = np.array([part.sum() for part in class_weights])
        below = np.stack(
            [
                matrix @ part
                for matrix, part in zip(self.class_sum_matrices, class_weights, strict=True)
            ]
        )
        pixel_sums = below.reshape(len(total), -1, PIXEL_LEVELS).sum(2)
        below[:, self.most_common_cells] = total[:, None] - pixel_sums
        below = below.reshape(len(total), -1, PIXEL_LEVELS)
        np.cumsum(below, axis=2, out=below)
        mass = below.sum(0)
        squares_below = np.einsum("cpl,cpl->pl", below, below)
        squares_above = (total**2).sum() - 2 * np.einsum("c,cpl->pl", total, below) + squares_below
        with np.errstate(divide="ignore", invalid="ignore"):
            # Highest where the Gini impurity is lowest.
            purity = squares_below / mass + squares_above / (total.sum() - mass)
        purity[self.is_trivial_split] = -math.inf
        pixel, level = (int(index) for index in np.unravel_index(purity.argmax(), purity.shape))
        if self.is_trivial_split[pixel, level]:
            return 0, float(PIXEL_LEVELS), int(total.argmax()), 0
        threshold = (level + int(self.next_level[pixel, level + 1])) / 2
        weights_below = below[:, pixel, level]
        class_above = int((total - weights_below).argmax())
        return pixel, threshold, int(weights_below.argmax()), class_above


def _quantize_pixels(x: np.ndarray) -> np.ndarray:
    return np.rint(np.asarray(x) * (PIXEL_LEVELS - 1)).astype(np.int32)
