r"""What channels with additive noise share: a bounded domain, a public projection, and a grid.

A record is clipped to [low, high], projected, perhaps scaled into a ball about the centre
(``radius``, in the norm of the channel), rounded toward the centre on a public grid, and gets noise
that lies on the same grid. Rounding toward the centre lengthens no difference from the centre, so
bounds that hold before the rounding hold on the grid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from privot.errors import SettingError, reraise_as
from privot.local.channels.projection import Projection

# Rounding cannot carry a record out of its ball: a norm of 2^24 values is off by 2^24 2^-53 at
# most.
ROUNDING_SAFETY_FACTOR = 1 - 1e-8
# A record is assumed to lie a third of the way from the middle of its domain to the edge, which
# leaves about a ninth of the squared signal.
SQUARED_SIGNAL_DIVISOR = 10.0


@dataclass(frozen=True, kw_only=True)
class AdditiveNoiseChannel(ABC):
    """A channel that adds noise to the projection of a record. All fields are public.

    Attributes:
        projection: The linear map before the noise.
        low: The smallest value of a record.
        high: The largest value of a record.
        center: The centre of the ball, as one value; None: the middle of the domain.
        radius: The radius of the ball in the norm of the channel; None: no ball.
        norm_order: 1 or 2, the norm of the sensitivity and of the ball.
    """

    projection: Projection
    low: float = 0.0
    high: float = 1.0
    center: float | None = None
    radius: float | None = None

    norm_order: ClassVar[int]
    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.high - self.low) and self.low < self.high):
            raise SettingError(
                f"domain {self.low:g} to {self.high:g}: give two finite numbers, the lower first."
            )
        if not self.low <= self.effective_center <= self.high:
            raise SettingError(
                f"center={self.effective_center:g}: give a number in the domain {self.low:g} to "
                f"{self.high:g}."
            )
        if self.radius is not None and not 1e-30 < self.radius < 1e30:
            raise SettingError(f"radius={self.radius}: give a finite number above 0.")

    @classmethod
    @abstractmethod
    def calibrate(cls, epsilon: float, delta: float, **fields: Any) -> Self:
        """Build the channel with the least noise for this epsilon and delta.

        Args:
            epsilon: Epsilon of one record.
            delta: Delta of one record.
            fields: The other fields of the channel.

        Returns:
            The channel.
        """

    if TYPE_CHECKING:  # a field in one subclass, a property or a class variable in the other

        @property
        def noise_std(self) -> float:
            """Standard deviation of the noise on one value."""

        @property
        def delta(self) -> float: ...

    def with_epsilon(self, epsilon: float) -> Self:
        """Build the same channel with another epsilon."""
        return self.calibrate(
            epsilon,
            self.delta,
            projection=self.projection,
            low=self.low,
            high=self.high,
            center=self.center,
            radius=self.radius,
        )

    @property
    def effective_center(self) -> float:
        """The centre of the ball, as one value."""
        return (self.low + self.high) / 2 if self.center is None else self.center

    @property
    def record_dim(self) -> int:
        """Number of values of a record, as a client holds it."""
        return self.projection.input_dim

    point_dim = record_dim  # number of values of a generated point

    @property
    def output_dim(self) -> int:
        """Number of values that are sent."""
        return self.projection.output_dim

    @property
    def domain(self) -> tuple[float, float]:
        """The smallest and the largest value of a record."""
        return self.low, self.high

    @property
    def _ball_radius(self) -> float:
        """L2 radius about the centre that no projected record leaves."""
        return self.projection.compute_ball_radius(self.low, self.high, self.effective_center)

    @property
    def sensitivity(self) -> float:
        """The largest distance of two projected records, in the channel's norm."""
        diameters = self.projection.compute_diameters(self.low, self.high, self.effective_center)
        diameter = diameters[self.norm_order - 1]
        return diameter if self.radius is None else min(diameter, 2 * self.radius)

    @property
    def coordinate_sensitivity(self) -> float:
        """The largest distance of one value from that of another projected record."""
        is_dct = self.projection.kind == "dct"
        distance = 2 * self._ball_radius if is_dct else self.high - self.low
        return distance if self.radius is None else min(distance, 2 * self.radius)

    def to_points(self, records: Tensor) -> Tensor:
        """Give records [n, record_dim] as points [n, point_dim]; they are the same here."""
        return records

    def clip_and_project(self, points: Tensor) -> Tensor:
        """Compute what the noise is added to: clip, project, and scale into the ball.

        Args:
            points: Records or generated points, [..., point_dim].

        Returns:
            [..., output_dim]; differentiable.
        """
        offsets = self._project_relative_to_center(points)
        return offsets + self.projection(torch.full_like(points[..., :1, :], self.effective_center))

    def _project_relative_to_center(self, points: Tensor) -> Tensor:
        """Compute `clip_and_project` minus the projection of the centre."""
        offsets = self.projection(points.clamp(self.low, self.high) - self.effective_center)
        if self.projection.kind == "dct":  # inside the ball except for rounding
            offsets = offsets * _compute_clip_factor(offsets, 2, self._ball_radius)
        if self.radius is None:
            return offsets
        return offsets * _compute_clip_factor(offsets, self.norm_order, self.radius)

    def _round_to_grid(self, records: Tensor, grid_spacing: float) -> Tensor:
        """Round projected records to whole grid steps from the centre.

        Args:
            records: [n, record_dim]; a value that is not finite counts as the centre.
            grid_spacing: The width of a grid step.

        Returns:
            Grid steps, float64 [n, output_dim].
        """
        records = records.double()
        offsets = self._project_relative_to_center(
            torch.where(records.isfinite(), records, self.effective_center)
        )
        steps = (offsets / grid_spacing).trunc_()
        if self.projection.kind == "dct":
            return steps
        # privacy: the bound of each value holds on the grid to the exact step, however the division
        # was rounded.
        return steps.clamp_(
            math.ceil((self.low - self.effective_center) / grid_spacing * ROUNDING_SAFETY_FACTOR),
            math.floor((self.high - self.effective_center) / grid_spacing * ROUNDING_SAFETY_FACTOR),
        )

    def _project_center(self) -> Tensor:
        """Project the centre, float64 [1, output_dim]."""
        return self.projection(
            torch.full((1, self.projection.input_dim), self.effective_center, dtype=torch.float64)
        )

    def _grid_to_outputs(self, grid_steps: Tensor, grid_spacing: float) -> Tensor:
        """Convert grid steps from the centre into values, float32 [n, output_dim]."""
        return (grid_steps * grid_spacing + self._project_center()).float()

    def _is_within_noise_range(self, outputs: Tensor, max_noise: float) -> bool:
        """Whether outputs [n, output_dim] are finite and as near the domain as noise can be."""
        is_dct = self.projection.kind == "dct"
        max_offset = self._ball_radius if is_dct else self.high - self.low
        distances = (outputs.double() - self._project_center()).abs()
        # Comparisons with NaN are false, so values that are not finite fail.
        return bool((distances <= (max_noise + max_offset) * (1 + 1e-6)).all())

    def to_json(self) -> dict[str, Any]:
        """Describe the channel as plain data; `from_json` gives the same one back."""
        fields = {key: value for key, value in vars(self).items() if key != "projection"}
        return {"channel": self.name, **fields, "projection": self.projection.to_json()}

    @classmethod
    def from_json(cls, parameters: dict[str, Any]) -> Self:
        """Build the channel that `to_json` described."""
        with reraise_as(SettingError, f"not a {cls.name} channel"):
            return cls(
                **{**parameters, "projection": Projection.from_json(parameters["projection"])}
            )

    def predict_signal_to_noise(self, num_records: int) -> float:
        r"""Predict whether so many records could show two groups, as a signal-to-noise ratio.

        Two groups at :math:`\pm r` add :math:`r^2` to the variance along the line between them;
        with noise :math:`\sigma` that variance is estimated with an error of
        :math:`\sigma^2\sqrt{2/n}`. Here :math:`r` is a third of the way to the edge.
        """
        diameters = self.projection.compute_diameters(self.low, self.high, self.effective_center)
        diameter = diameters[1] if self.radius is None else min(diameters[1], 2 * self.radius)
        return (
            math.sqrt(num_records / 2)
            * (diameter / 2 / self.noise_std) ** 2
            / SQUARED_SIGNAL_DIVISOR
        )


def _compute_clip_factor(offsets: Tensor, norm_order: int, radius: float) -> Tensor:
    """Compute the factor that brings each row into a ball.

    Args:
        offsets: [..., output_dim].
        norm_order: 1 or 2.
        radius: The radius of the ball.

    Returns:
        Factors of at most 1, [..., 1].
    """
    norms = torch.linalg.vector_norm(offsets, norm_order, -1, keepdim=True)
    return (radius * ROUNDING_SAFETY_FACTOR / norms.clamp(min=radius / 2)).clamp(max=1.0)
