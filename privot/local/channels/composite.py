r"""Several channels, each on its own columns of a record.

Given the record, the outputs of the parts are independent, so
:math:`-\log K(y|x)=\sum_j -\log K_j(y_j|x_j)`: the cost is :math:`\sum_j c_j/\lambda_j` at
temperature 1. Pure epsilons add up; the epsilon of a Gaussian part is added to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.errors import SettingError
from privot.local.channels.protocol import Channel
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Plan
from privot.privacy.sampling import LOCAL

MAX_PARTS = 10_000


@dataclass(frozen=True, kw_only=True)
class Composite:
    """A channel of several parts, which take the columns of a record from left to right.

    >>> from privot.local.channels import Laplace, Projection, RandomizedResponse
    >>> values = Laplace.calibrate(2.0, projection=Projection(shape=(3,)))
    >>> labels = RandomizedResponse.calibrate(1.0, num_categories=10)
    >>> channel = Composite(parts=(values, labels))
    >>> channel.record_dim, channel.point_dim, channel.output_dim, round(channel.epsilon, 9)
    (4, 13, 4, 3.0)

    Attributes:
        parts: The channels; none of them is composite.
    """

    parts: tuple[Channel, ...]

    name: ClassVar[str] = "composite"
    temperature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        has_composite_part = any(isinstance(part, Composite) for part in self.parts)
        if not 1 <= len(self.parts) <= MAX_PARTS or has_composite_part:
            raise SettingError(
                f"A composite channel has 1 to {MAX_PARTS} parts, and none of them is composite."
            )

    @property
    def delta(self) -> float:
        """Delta of one record."""
        return max(part.delta for part in self.parts)

    @property
    def epsilon(self) -> float:
        """Epsilon of one record."""
        return float(self.plan().cost().epsilon(self.delta))

    @property
    def record_dim(self) -> int:
        """Number of values of a record."""
        return sum(part.record_dim for part in self.parts)

    @property
    def point_dim(self) -> int:
        """Number of values of a generated point."""
        return sum(part.point_dim for part in self.parts)

    @property
    def output_dim(self) -> int:
        """Number of values that are sent."""
        return sum(part.output_dim for part in self.parts)

    def plan(self) -> Plan:
        """Give the stages of all parts; the name of a stage ends with the index of its part."""
        stages = tuple(
            dataclasses.replace(stage, name=f"{stage.name}-{index}")
            for index, part in enumerate(self.parts)
            for stage in part.plan().stages
        )
        return Plan(stages, LOCAL)

    def privatize(self, records: Tensor, secret_random: SecretRandom | None = None) -> Tensor:
        """Privatize records [n, record_dim] on the client: outputs [n, output_dim]."""
        columns = records.split([part.record_dim for part in self.parts], -1)
        pairs = zip(self.parts, columns, strict=True)
        return torch.cat([part.privatize(values, secret_random) for part, values in pairs], -1)

    def to_points(self, records: Tensor) -> Tensor:
        """Convert records [n, record_dim] into points [n, point_dim]."""
        columns = records.split([part.record_dim for part in self.parts], -1)
        pairs = zip(self.parts, columns, strict=True)
        return torch.cat([part.to_points(values) for part, values in pairs], -1)

    def compute_cost_matrix(self, points: Tensor, outputs: Tensor) -> Tensor:
        """Compute the cost of points [..., n, point_dim] and outputs [..., m, output_dim].

        Returns:
            [..., n, m]; differentiable in ``points``.
        """
        point_columns = points.split([part.point_dim for part in self.parts], -1)
        output_columns = self.split_outputs(outputs)
        costs = [
            part.compute_cost_matrix(part_points, part_outputs) / part.temperature
            for part, part_points, part_outputs in zip(
                self.parts, point_columns, output_columns, strict=True
            )
        ]
        return torch.stack(costs).sum(0)

    def split_outputs(self, outputs: Tensor) -> Sequence[Tensor]:
        """Split outputs [..., m, output_dim] into those of each part."""
        return outputs.split([part.output_dim for part in self.parts], -1)

    def compute_expected_cost(self) -> float:
        """Compute the mean cost of a record and its own output."""
        return sum(part.compute_expected_cost() / part.temperature for part in self.parts)

    def is_possible_output(self, outputs: Tensor) -> bool:
        """Whether the channel can give these outputs [n, output_dim]."""
        pairs = zip(self.parts, self.split_outputs(outputs), strict=True)
        return all(part.is_possible_output(values) for part, values in pairs)

    def with_epsilon(self, epsilon: float) -> Composite:
        """Build the same channel with another epsilon, in the same shares."""
        return Composite(
            parts=tuple(
                part.with_epsilon(part.epsilon * epsilon / self.epsilon) for part in self.parts
            )
        )

    def predict_signal_to_noise(self, num_records: int) -> float:
        """Predict the signal-to-noise ratio of the part with the least."""
        return min(part.predict_signal_to_noise(num_records) for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Describe the channel as plain data; `channel_from_json` gives it back."""
        return {"channel": self.name, "parts": [part.to_json() for part in self.parts]}
