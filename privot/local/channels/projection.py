r"""The public linear map before the noise: the record itself, or fewer features of it.

Noise grows with the number of values. So at a small epsilon an image is better privatized as a few
averages or low-frequency DCT coefficients. The map is part of the channel: generated images go
through the same map before they are compared with the clients' outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from privot.errors import SettingError, reraise_as

PROJECTION_KINDS = ("identity", "pooled", "dct")
MAX_RECORD_DIM = 1 << 24  # bounds the memory that a hostile file can make the reader allocate


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A linear map from flat records [input_dim] to [output_dim] features.

    >>> Projection(kind="pooled", shape=(1, 28, 28), side=7).output_dim
    16
    >>> Projection(kind="dct", shape=(1, 2, 2), side=1)(torch.ones(1, 4)).round(decimals=3)
    tensor([[2.]])

    Attributes:
        kind: ``identity``; ``pooled``: means over squares of ``side`` x ``side`` pixels; ``dct``:
            the ``side`` x ``side`` lowest frequencies of an orthonormal cosine transform of each
            colour channel.
        shape: Shape of a record; (channels, height, width) for ``pooled`` and ``dct``.
        side: Pixels or frequencies a side.
    """

    kind: str = "identity"
    shape: tuple[int, ...]
    side: int = 0

    def __post_init__(self) -> None:
        if self.kind not in PROJECTION_KINDS:
            raise SettingError(
                f"projection={self.kind!r}: choose one of {', '.join(PROJECTION_KINDS)}."
            )
        sides_are_whole = all(type(side) is int and side > 0 for side in self.shape)
        if (
            not self.shape
            or not sides_are_whole
            or math.prod(self.shape) > MAX_RECORD_DIM
            or type(self.side) is not int
        ):
            raise SettingError(
                f"shape={list(self.shape)}: give whole numbers above 0, with at most "
                f"{MAX_RECORD_DIM} values a record."
            )
        if self.kind == "identity":
            return
        if len(self.shape) != 3:
            raise SettingError(
                f"projection={self.kind}: it is for images (channels, height, width), not for "
                f"records of shape {list(self.shape)}."
            )
        height, width = self.shape[1:]
        if self.kind == "pooled" and (self.side < 1 or height % self.side or width % self.side):
            raise SettingError(
                f"projection=pooled side={self.side}: give a number that divides {height} and "
                f"{width}."
            )
        if self.kind == "dct" and not 1 <= self.side <= min(height, width):
            raise SettingError(
                f"projection=dct side={self.side}: give a number from 1 to {min(height, width)}."
            )

    @property
    def input_dim(self) -> int:
        """Number of values of a record."""
        return math.prod(self.shape)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the features."""
        if self.kind == "identity":
            return self.shape
        channels, height, width = self.shape
        if self.kind == "pooled":
            return (channels, height // self.side, width // self.side)
        return (channels, self.side, self.side)

    @property
    def output_dim(self) -> int:
        """Number of features, each of which gets noise."""
        return math.prod(self.output_shape)

    def __call__(self, records: Tensor) -> Tensor:
        """Map records [..., input_dim] to features [..., output_dim]; differentiable."""
        if self.kind == "identity":
            return records
        images = records.unflatten(-1, self.shape)
        if self.kind == "pooled":
            squares = images.unflatten(-1, (-1, self.side)).unflatten(-3, (-1, self.side))
            # [..., channels, rows, side, columns, side]
            return squares.mean((-3, -1)).flatten(-3)
        vertical, horizontal = (
            build_dct_projection(side, self.side, records.device, records.dtype)
            for side in self.shape[1:]
        )
        return (vertical @ images @ horizontal.mT).flatten(-3)

    def compute_diameters(self, low: float, high: float, center: float) -> tuple[float, float]:
        r"""Bound the distance of the features of two records with values in [low, high].

        Values of ``identity`` and ``pooled`` stay in [low, high]: :math:`w(high-low)` in L1 and
        :math:`\sqrt w(high-low)` in L2, with :math:`w` features. DCT coefficients are an orthogonal
        projection, so they stay in a ball about those of the centre, of L2 radius
        :math:`\rho=\sqrt{dim}\max(high-c, c-low)`: two records are :math:`2\rho` apart in L2 and,
        by Cauchy and Schwarz, :math:`2\rho\sqrt w` in L1.

        Args:
            low: The smallest value of a record.
            high: The largest value of a record.
            center: A value between them.

        Returns:
            The bounds in L1 and in L2.
        """
        if self.kind != "dct":
            return self.output_dim * (high - low), math.sqrt(self.output_dim) * (high - low)
        diameter = 2 * self.compute_ball_radius(low, high, center)
        return diameter * math.sqrt(self.output_dim), diameter

    def compute_ball_radius(self, low: float, high: float, center: float) -> float:
        """Bound the L2 distance of the features of a record from those of the centre.

        Args:
            low: The smallest value of a record.
            high: The largest value of a record.
            center: A value between them.

        Returns:
            The radius.
        """
        return math.sqrt(self.input_dim) * max(high - center, center - low)

    def to_json(self) -> dict[str, Any]:
        """Describe the projection as plain data; `from_json` gives the same one back."""
        return {"kind": self.kind, "shape": list(self.shape), "side": self.side}

    @classmethod
    def from_json(cls, parameters: Any) -> Projection:
        """Build the projection that `to_json` described."""
        with reraise_as(SettingError, "not a projection"):
            return cls(**{**parameters, "shape": tuple(parameters["shape"])})


@cache
def build_dct_projection(
    num_pixels: int, num_frequencies: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    r"""Build the first rows of the orthonormal cosine transform.

    Row :math:`k` is :math:`\sqrt{2/n}\cos(\pi k(i+1/2)/n)`, divided by :math:`\sqrt 2` for
    :math:`k=0`.

    Args:
        num_pixels: Number of pixels n.
        num_frequencies: Number of rows.
        device: Where the matrix lies.
        dtype: The type of its values.

    Returns:
        [num_frequencies, num_pixels].
    """
    positions = (torch.arange(num_pixels, dtype=torch.float64) + 0.5) * math.pi / num_pixels
    frequencies = torch.arange(num_frequencies, dtype=torch.float64)
    rows = torch.cos(frequencies[:, None] * positions) * math.sqrt(2 / num_pixels)
    rows[0] /= math.sqrt(2)
    return rows.to(device, dtype)
