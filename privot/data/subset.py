"""Declarations about a subset of a data set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from privot.data.spec import Spec


def declare_subset(spec: Spec, labels: NDArray[np.int64]) -> Spec:
    """Declare for a subset the same facts that are declared for the whole, with its own counts.

    >>> spec = Spec((1, 8, 8), 2, size=9, class_sizes=(4, 5))
    >>> declare_subset(spec, np.array([0, 1, 1])).class_sizes
    (1, 2)
    """
    class_sizes = None
    if spec.class_sizes is not None:
        class_sizes = tuple(np.bincount(labels, minlength=spec.num_classes).tolist())
    return replace(spec, size=None if spec.size is None else len(labels), class_sizes=class_sizes)
