r"""What channels with additive noise share: a bounded domain, a public space, and what exactly the noise is added to.

A record is clipped to [low, high], mapped to the space, perhaps scaled into a ball about the centre (``radius``, in the norm of the
channel), rounded toward the centre on a public grid, and gets noise that lies on the same grid. Rounding toward the centre lengthens
no difference from it, so bounds that hold before the grid hold on it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from privot.errors import SettingError, refusing
from privot.local.channels.projection import Space

INSIDE = (
    1 - 1e-8
)  # so that rounding cannot carry a record out of its ball: a norm of 2^24 values is off by 2^24 2^-53 at most
FILLED = 10.0  # a record is taken to be a third of the way from the middle to the edge of its domain: a ninth of the squared signal


@dataclass(frozen=True, kw_only=True)
class Additive(ABC):
    """Fields are public: values of a record lie in [low, high]; ``centre`` (None: the middle) is where the ball of ``radius`` lies."""

    space: Space
    low: float = 0.0
    high: float = 1.0
    centre: float | None = None
    radius: float | None = None

    norm: ClassVar[int]  # of the sensitivity, and of the ball
    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.high - self.low) and self.low < self.high):
            raise SettingError(
                f"domain {self.low:g} to {self.high:g}: two finite numbers, the lower one first, are needed"
            )
        if not self.low <= self.middle <= self.high:
            raise SettingError(
                f"centre={self.middle:g}: a number in the domain {self.low:g} to {self.high:g} is needed"
            )
        if self.radius is not None and not 1e-30 < self.radius < 1e30:
            raise SettingError(f"radius={self.radius}: a finite number above 0 is needed")

    @classmethod
    @abstractmethod
    def calibrated(cls, epsilon: float, delta: float, **public: Any) -> Self:
        """The channel with the least noise for this epsilon and delta."""

    if TYPE_CHECKING:  # fields of the one channel, and properties of the other

        @property
        def noise_std(self) -> float:
            """Standard deviation of the noise on one value."""

        @property
        def delta(self) -> float: ...

    def at(self, epsilon: float) -> Self:
        """The same with another epsilon."""
        public = {key: getattr(self, key) for key in ("space", "low", "high", "centre", "radius")}
        return self.calibrated(epsilon, self.delta, **public)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2 if self.centre is None else self.centre

    @property
    def columns(self) -> int:
        """Numbers of a record, as a client holds it."""
        return self.space.dim

    dim = columns  # numbers of a generated point

    @property
    def width(self) -> int:
        """Numbers of what is sent."""
        return self.space.width

    @property
    def domain(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def sensitivity(self) -> float:
        """The largest distance of two records of the domain where the noise is added, in the channel's norm."""
        found = self.space.reach(self.low, self.high, self.middle)[self.norm - 1]
        return found if self.radius is None else min(found, 2 * self.radius)

    @property
    def move(self) -> float:
        """The farthest that one value can lie from that of another record."""
        found = (
            2 * self.space.ball(self.low, self.high, self.middle)
            if self.space.kind == "waves"
            else self.high - self.low
        )
        return found if self.radius is None else min(found, 2 * self.radius)

    def points(self, records: Tensor) -> Tensor:
        """Records [n, columns] as the points [n, dim] that `cost` compares: the same here."""
        return records

    def seen(self, x: Tensor) -> Tensor:
        """What the noise is added to: clipped, mapped, scaled into the ball: [..., dim] to [..., width]; differentiable."""
        offset = self._offset(x)
        return offset + self.space(torch.full_like(x[..., :1, :], self.middle))

    def _offset(self, x: Tensor) -> Tensor:
        """`seen`, counted from the centre."""
        offset = self.space(x.clamp(self.low, self.high) - self.middle)
        if self.space.kind == "waves":  # they are inside but for rounding
            offset = offset * _shrunk(offset, 2, self.space.ball(self.low, self.high, self.middle))
        return offset if self.radius is None else offset * _shrunk(offset, self.norm, self.radius)

    def _steps(self, records: Tensor, grid: float) -> Tensor:
        """Records in whole steps of the grid from the centre, float64 [n, width]; values that are not finite count as the centre."""
        records = records.double()
        offset = self._offset(torch.where(records.isfinite(), records, self.middle))
        steps = (offset / grid).trunc_()
        if self.space.kind == "waves":
            return steps
        # privacy: the bound of each value holds on the grid to the step, however the division was rounded.
        return steps.clamp_(
            math.ceil((self.low - self.middle) / grid * INSIDE),
            math.floor((self.high - self.middle) / grid * INSIDE),
        )

    def _sent(self, steps: Tensor, grid: float) -> Tensor:
        """Steps as numbers, from zero again: float32 [n, width]."""
        origin = self.space(torch.full((1, self.space.dim), self.middle, dtype=torch.float64))
        return (steps * grid + origin).float()

    def _near(self, y: Tensor, noise: float) -> bool:
        """Whether answers [n, width] are finite and as near to the domain as the noise can leave them."""
        wide = (
            self.space.ball(self.low, self.high, self.middle)
            if self.space.kind == "waves"
            else self.high - self.low
        )
        origin = self.space(torch.full((1, self.space.dim), self.middle, dtype=torch.float64))
        # comparisons with NaN are false, so what is not finite does not pass
        return bool(((y.double() - origin).abs() <= (noise + wide) * (1 + 1e-6)).all())

    def parameters(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key != "space"}
        return {"channel": self.name, **plain, "space": self.space.parameters()}

    @classmethod
    def from_parameters(cls, value: dict[str, Any]) -> Self:
        with refusing(SettingError, f"not a {cls.name} channel"):
            return cls(**{**value, "space": Space.from_parameters(value["space"])})

    def signal(self, count: int) -> float:
        r"""Whether ``count`` records could show two groups in the domain, as a ratio to the noise of a variance.

        Two groups at :math:`\pm r` add :math:`r^2` to the variance along the line between them; with noise :math:`\sigma` that variance
        is known to :math:`\sigma^2\sqrt{2/n}`. Here :math:`r` is a third of the way to the edge.
        """
        across = self.space.reach(self.low, self.high, self.middle)[1]
        across = across if self.radius is None else min(across, 2 * self.radius)
        return math.sqrt(count / 2) * (across / 2 / self.noise_std) ** 2 / FILLED


def _shrunk(offset: Tensor, norm: int, radius: float) -> Tensor:
    """The factor that brings rows [..., width] into a ball: [..., 1]."""
    return (
        radius
        * INSIDE
        / torch.linalg.vector_norm(offset, norm, -1, keepdim=True).clamp(min=radius / 2)
    ).clamp(max=1.0)
