r"""Several channels side by side, each on columns of its own: the price is that of all of them, and costs add.

The answers of a record are independent given the record, so :math:`-\log K(y|x)=\sum_j -\log K_j(y_j|x_j)`: the cost is
:math:`\sum_j c_j/\lambda_j` at temperature 1. Pure epsilons add up; a Gaussian part's is added to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from privot.errors import SettingError, refusing
from privot.privacy.noise import Secret
from privot.privacy.plan import Plan
from privot.privacy.sampling import LOCAL

if TYPE_CHECKING:
    from privot.local.channels import Channel

MOST = 10_000  # parts


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """``parts`` take the columns of a record from left to right.

    >>> from privot.local.channels import Laplace, RandomizedResponse, Space
    >>> values = Laplace.calibrated(2.0, space=Space(shape=(3,)))
    >>> channel = Mixed(parts=(values, RandomizedResponse.calibrated(1.0, categories=10)))
    >>> channel.columns, channel.dim, channel.width, round(channel.epsilon, 9)
    (4, 13, 4, 3.0)
    """

    parts: tuple[Channel, ...]

    name: ClassVar[str] = "mixed"
    temperature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= MOST or any(isinstance(each, Mixed) for each in self.parts):
            raise SettingError(f"a mixed channel has 1 to {MOST} parts, and none of them is mixed")

    @property
    def delta(self) -> float:
        return max(each.delta for each in self.parts)

    @property
    def epsilon(self) -> float:
        return float(self.plan().cost().epsilon(self.delta))

    @property
    def columns(self) -> int:
        return sum(each.columns for each in self.parts)

    @property
    def dim(self) -> int:
        return sum(each.dim for each in self.parts)

    @property
    def width(self) -> int:
        return sum(each.width for each in self.parts)

    def plan(self) -> Plan:
        """The stages of all parts; names tell the part."""
        own = [
            (place, stage) for place, part in enumerate(self.parts) for stage in part.plan().stages
        ]
        return Plan(
            tuple(dataclasses.replace(stage, name=f"{stage.name}-{place}") for place, stage in own),
            LOCAL,
        )

    def privatize(self, records: Tensor, secret: Secret | None = None) -> Tensor:
        """On the client: [n, columns] to [n, width]."""
        own = records.split([each.columns for each in self.parts], -1)
        return torch.cat(
            [part.privatize(each, secret) for part, each in zip(self.parts, own, strict=True)], -1
        )

    def points(self, records: Tensor) -> Tensor:
        """[n, columns] to [n, dim]."""
        own = records.split([each.columns for each in self.parts], -1)
        return torch.cat(
            [part.points(each) for part, each in zip(self.parts, own, strict=True)], -1
        )

    def cost(self, x: Tensor, y: Tensor) -> Tensor:
        """[..., n, dim] and [..., m, width] to [..., n, m]; differentiable in x."""
        pairs = zip(
            self.parts, x.split([each.dim for each in self.parts], -1), self.answers(y), strict=True
        )
        return torch.stack(
            [part.cost(here, there) / part.temperature for part, here, there in pairs]
        ).sum(0)

    def answers(self, y: Tensor) -> Sequence[Tensor]:
        """The answers [..., m, width] of each part."""
        return y.split([each.width for each in self.parts], -1)

    def residual(self) -> float:
        """What the cost of a record and its own answer is on average."""
        return sum(each.residual() / each.temperature for each in self.parts)

    def holds(self, y: Tensor) -> bool:
        """Whether these can be answers of this channel."""
        return all(part.holds(each) for part, each in zip(self.parts, self.answers(y), strict=True))

    def at(self, epsilon: float) -> Mixed:
        """The same with another epsilon, in the same shares."""
        return Mixed(
            parts=tuple(each.at(each.epsilon * epsilon / self.epsilon) for each in self.parts)
        )

    def signal(self, count: int) -> float:
        """That of the part that shows least."""
        return min(each.signal(count) for each in self.parts)

    def parameters(self) -> dict[str, Any]:
        return {"channel": self.name, "parts": [each.parameters() for each in self.parts]}

    @classmethod
    def from_parameters(cls, value: dict[str, Any]) -> Mixed:
        from privot.local.channels import channel_from

        with refusing(SettingError, "not a mixed channel"):
            if any(each["channel"] == cls.name for each in value["parts"]):
                raise SettingError("a mixed channel cannot be part of another")
            return cls(parts=tuple(channel_from(each) for each in value["parts"]))
