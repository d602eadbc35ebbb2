r"""Where noise is added: the records themselves, or fewer numbers made of them by a public linear map that has seen no data.

Noise grows with the number of values, so at an honest epsilon an image is better privatized as a few averages or low waves of it. The map
is part of the channel: generated images go through the same one before they are compared with what the clients sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from privot.errors import SettingError, refusing

KINDS = ("plain", "pooled", "waves")
LARGEST = 1 << 24  # numbers a record: what a hostile file can make us allocate is bounded by this


@dataclass(frozen=True, kw_only=True)
class Space:
    """A linear map from records of ``shape`` (flat: [dim]) to ``width`` numbers.

    ``plain`` leaves them alone; ``pooled`` takes means over squares of ``size`` pixels a side; ``waves`` keeps the ``size`` x ``size``
    lowest frequencies of an orthonormal cosine transform of each colour.

    >>> Space(kind="pooled", shape=(1, 28, 28), size=7).width
    16
    >>> Space(kind="waves", shape=(1, 2, 2), size=1)(torch.ones(1, 4)).round(decimals=3)
    tensor([[2.]])
    """

    kind: str = "plain"
    shape: tuple[int, ...]
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingError(f"space={self.kind!r}: {', '.join(KINDS)} are known")
        whole = all(type(side) is int and side > 0 for side in self.shape)
        if (
            not self.shape
            or not whole
            or math.prod(self.shape) > LARGEST
            or type(self.size) is not int
        ):
            raise SettingError(
                f"shape={list(self.shape)}: whole numbers above 0 are needed, and at most {LARGEST} values a record"
            )
        if self.kind == "plain":
            return
        if len(self.shape) != 3:
            raise SettingError(
                f"{self.kind} is for images (channels, height, width), not for records of shape {list(self.shape)}"
            )
        sides = self.shape[1:]
        if self.kind == "pooled" and (self.size < 1 or any(side % self.size for side in sides)):
            raise SettingError(
                f"pooled size={self.size}: a number that divides {sides[0]} and {sides[1]} is needed"
            )
        if self.kind == "waves" and not 1 <= self.size <= min(sides):
            raise SettingError(f"waves size={self.size}: 1 to {min(sides)} is needed")

    @property
    def dim(self) -> int:
        """Numbers of a record."""
        return math.prod(self.shape)

    @property
    def small(self) -> tuple[int, ...]:
        """The shape of what comes out."""
        if self.kind == "plain":
            return self.shape
        channels, height, width = self.shape
        return (
            (channels, height // self.size, width // self.size)
            if self.kind == "pooled"
            else (channels, self.size, self.size)
        )

    @property
    def width(self) -> int:
        """Numbers that get noise."""
        return math.prod(self.small)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., width]; differentiable."""
        if self.kind == "plain":
            return x
        images = x.unflatten(-1, self.shape)
        if self.kind == "pooled":
            parts = images.unflatten(-1, (-1, self.size)).unflatten(
                -3, (-1, self.size)
            )  # [..., channels, rows, size, columns, size]
            return parts.mean((-3, -1)).flatten(-3)
        down, across = (cosines(side, self.size, x.device, x.dtype) for side in self.shape[1:])
        return (down @ images @ across.mT).flatten(-3)

    def reach(self, low: float, high: float, centre: float) -> tuple[float, float]:
        r"""How far apart two records with values in [low, high] can be here, in L1 and in L2.

        Plain and pooled values keep to [low, high], each: :math:`w(high-low)` and :math:`\sqrt w(high-low)`. Waves are a projection, so
        a record's stay in a ball about the centre's, of L2 radius :math:`\rho=\sqrt{dim}\max(high-c, c-low)`: :math:`2\rho` apart in
        L2 and, by Cauchy and Schwarz, :math:`2\rho\sqrt w` in L1.
        """
        if self.kind != "waves":
            return self.width * (high - low), math.sqrt(self.width) * (high - low)
        ball = 2 * self.ball(low, high, centre)
        return ball * math.sqrt(self.width), ball

    def ball(self, low: float, high: float, centre: float) -> float:
        """The L2 radius about the centre that no record leaves."""
        return math.sqrt(self.dim) * max(high - centre, centre - low)

    def parameters(self) -> dict[str, Any]:
        """Plain data; `from_parameters` gives the same space back."""
        return {"kind": self.kind, "shape": list(self.shape), "size": self.size}

    @classmethod
    def from_parameters(cls, value: Any) -> Space:
        with refusing(SettingError, "not a space"):
            return cls(**{**value, "shape": tuple(value["shape"])})


@cache
def cosines(side: int, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    r"""The first ``count`` rows of the orthonormal cosine transform: :math:`\sqrt{2/n}\cos(\pi k(i+1/2)/n)`: [count, side]."""
    places = (torch.arange(side, dtype=torch.float64) + 0.5) * math.pi / side
    rows = torch.cos(torch.arange(count, dtype=torch.float64)[:, None] * places) * math.sqrt(
        2 / side
    )
    rows[0] /= math.sqrt(2)
    return rows.to(device, dtype)
