"""Names of metrics and of groups of metrics."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from privot.errors import SettingError
from privot.measures.downstream import DOWNSTREAM_CLASSIFIERS, GS_WGAN_CLASSIFIERS

FEATURE_METRICS = ("fid", "kid", "precision")  # precision includes recall, density and coverage
OTHER_METRICS = ("is", "imagenet_is", "domain", "sliced", "exact")
METRIC_GROUPS = {
    "gs_wgan": GS_WGAN_CLASSIFIERS,
    "default": (*FEATURE_METRICS, "sliced", "logistic", "mlp", "cnn"),
}


def expand_metrics(metrics: Sequence[str]) -> tuple[str, ...]:
    """Replace groups by their metrics and drop duplicates.

    Args:
        metrics: Names of metrics, classifiers or groups.

    Returns:
        Names of metrics and classifiers.

    Raises:
        SettingError: A name is unknown. The message suggests the closest one.

    >>> expand_metrics(["fid", "cnn"])
    ('fid', 'cnn')
    """
    valid_names = (*FEATURE_METRICS, *OTHER_METRICS, *DOWNSTREAM_CLASSIFIERS, *METRIC_GROUPS)
    for name in metrics:
        if name not in valid_names:
            matches = difflib.get_close_matches(name, valid_names, 1)
            if matches:
                hint = f"Did you mean {matches[0]!r}?"
            else:
                hint = f"Choose from {', '.join(valid_names)}."
            raise SettingError(f"There is no metric {name!r}. {hint}")
    expanded = (metric for name in metrics for metric in METRIC_GROUPS.get(name, (name,)))
    return tuple(dict.fromkeys(expanded))
