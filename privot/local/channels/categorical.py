"""What channels for a category share: the record, its point, and the probability of a coin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from privot.errors import SettingError, reraise_as
from privot.privacy.plan import Plan, Stage
from privot.privacy.sampling import LOCAL

MAX_CATEGORIES = 100_000
# Coins have 197 binary digits, so the probability of this coin is exact to 19 decimal digits.
MIN_COIN_PROBABILITY = 1e-40


@dataclass(frozen=True, kw_only=True)
class CategoricalChannel(ABC):
    """A channel for one category.

    A record is the index of a category, 0 to ``num_categories`` - 1. A point is the vector of the
    probabilities of the categories, so that a generator can be differentiated; probabilities of 0
    and 1 are a record.

    Attributes:
        num_categories: Number of categories.
    """

    num_categories: int

    name: ClassVar[str]
    delta: ClassVar[float] = 0.0
    temperature: ClassVar[float] = 1.0
    record_dim: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if type(self.num_categories) is not int or not 2 <= self.num_categories <= MAX_CATEGORIES:
            raise SettingError(
                f"num_categories={self.num_categories}: give a whole number from 2 to "
                f"{MAX_CATEGORIES}."
            )

    @property
    @abstractmethod
    def epsilon(self) -> float:
        """Epsilon of one record."""

    @property
    def point_dim(self) -> int:
        """Number of probabilities of a point."""
        return self.num_categories

    @property
    def domain(self) -> tuple[float, float]:
        """The smallest and the largest index of a category."""
        return 0.0, self.num_categories - 1.0

    def plan(self) -> Plan:
        """Give the event of one record, under ``local`` neighbours."""
        noise_multiplier = 1 / self.epsilon
        stage = Stage("category", "privatize", noise_multiplier, mechanism="randomized_response")
        return Plan((stage,), LOCAL)

    def to_points(self, records: Tensor) -> Tensor:
        """Convert indices [n, 1] into one-hot vectors, float32 [n, num_categories]."""
        indices = self._to_category_indices(records)[..., None]
        return (indices == torch.arange(self.num_categories, device=records.device)).float()

    def _to_category_indices(self, records: Tensor) -> Tensor:
        """Convert any values [n, 1] into valid indices, int64 [n]."""
        return records[..., 0].nan_to_num(0.0).clamp(*self.domain).round().long()

    def to_json(self) -> dict[str, Any]:
        """Describe the channel as plain data; `from_json` gives the same one back."""
        return {"channel": self.name, **vars(self)}

    @classmethod
    def from_json(cls, parameters: dict[str, Any]) -> Self:
        """Build the channel that `to_json` described."""
        with reraise_as(SettingError, f"not a {cls.name} channel"):
            return cls(**parameters)


def safe_log(values: Tensor) -> Tensor:
    """Take the logarithm of likelihoods that rounding may have brought to zero or below."""
    return values.clamp(min=torch.finfo(values.dtype).tiny).log()
