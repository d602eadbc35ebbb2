"""The columns of a release that was made from a privatized table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from privot.errors import ReleaseError, reraise_as
from privot.local.channels import Composite, channel_from_json
from privot.local.channels.additive import AdditiveNoiseChannel
from privot.local.channels.categorical import CategoricalChannel
from privot.release import Release


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: The name that files give it.
        low: The smallest value.
        high: The largest value.
        num_categories: Number of categories; values are then 0 to ``num_categories`` - 1. 0: the
            column holds real numbers.
    """

    name: str
    low: float
    high: float
    num_categories: int = 0

    def cast_values(self, values: np.ndarray) -> np.ndarray:
        """Bring values into the declared range: int64 for categories, float64 for real numbers."""
        if self.num_categories:
            return np.clip(np.rint(values), 0, self.num_categories - 1).astype(np.int64)
        return np.clip(values.astype(np.float64), self.low, self.high)


def infer_table_columns(release: Release) -> tuple[Column, ...] | None:
    """Infer the columns of a table from the channel of a release.

    A release is of a table if the values of its channel have one dimension, and if the channel has
    categories that are no labels.

    Args:
        release: Any release.

    Returns:
        A column for each number of a record, with the domain that the channel declares; None for a
        release of images.
    """
    parameters = release.metadata.get("channel")
    if (
        release.artifact.generator_class != "TabularGenerator"
        or parameters is None
        or release.spec.shape[:2] != (1, 1)
    ):
        return None
    with reraise_as(ReleaseError, "The release names a channel that is not valid"):
        channel = channel_from_json(parameters)
    parts = channel.parts if isinstance(channel, Composite) else (channel,)
    if channel.record_dim != release.spec.num_features:  # the last part is of labels
        return None
    columns: list[Column] = []
    for part in parts:
        if isinstance(part, CategoricalChannel):
            count = part.num_categories
            columns.append(Column(f"column_{len(columns)}", 0.0, count - 1.0, count))
            continue
        if not isinstance(part, AdditiveNoiseChannel) or len(part.projection.shape) != 1:
            return None
        low, high = part.domain
        first = len(columns)
        columns += [Column(f"column_{first + i}", low, high) for i in range(part.record_dim)]
    return tuple(columns)
