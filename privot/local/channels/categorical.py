"""What channels for one category of several share: its column, its points, and coins for whole batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from privot.errors import SettingError, refusing
from privot.privacy.plan import Plan, Stage
from privot.privacy.sampling import LOCAL

MOST = 100_000
RAREST = 1e-40  # probability of a coin: coins have 197 binary digits, so this one is exact to 19 decimals


@dataclass(frozen=True, kw_only=True)
class Categories(ABC):
    """A record is the number of a category, 0 to ``categories`` - 1; a point is the vector of their probabilities, so that a generator
    can be unsure and still be differentiated; probabilities 0 and 1 are a record."""

    categories: int

    name: ClassVar[str]
    delta: ClassVar[float] = 0.0
    temperature: ClassVar[float] = 1.0
    columns: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if type(self.categories) is not int or not 2 <= self.categories <= MOST:
            raise SettingError(
                f"categories={self.categories}: a whole number from 2 to {MOST} is needed"
            )

    @property
    @abstractmethod
    def epsilon(self) -> float: ...

    @property
    def dim(self) -> int:
        return self.categories

    @property
    def domain(self) -> tuple[float, float]:
        return 0.0, self.categories - 1.0

    def plan(self) -> Plan:
        return Plan((Stage("category", "privatize", 1 / self.epsilon, law="response"),), LOCAL)

    def points(self, records: Tensor) -> Tensor:
        """[n, 1] to [n, categories], float32."""
        return (
            self._numbers(records)[..., None]
            == torch.arange(self.categories, device=records.device)
        ).float()

    def _numbers(self, records: Tensor) -> Tensor:
        """Whole numbers in the domain, whatever came: int64 [n]."""
        return records[..., 0].nan_to_num(0.0).clamp(*self.domain).round().long()

    def parameters(self) -> dict[str, Any]:
        return {"channel": self.name, **vars(self)}

    @classmethod
    def from_parameters(cls, value: dict[str, Any]) -> Self:
        with refusing(SettingError, f"not a {cls.name} channel"):
            return cls(**value)


def log(values: Tensor) -> Tensor:
    """Logarithms of likelihoods that rounding may have carried to zero or below."""
    return values.clamp(min=torch.finfo(values.dtype).tiny).log()
