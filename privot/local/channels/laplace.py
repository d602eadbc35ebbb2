r"""Laplace noise on each value: pure epsilon, :math:`\epsilon=\Delta_1/b`.

The cost of transport is the L1 distance, at temperature b. The noise is a two-sided geometric
distribution on a grid, sampled exactly: :math:`P(z)\propto\exp(-|z+1/2|\,g/b)`. A move by s steps
changes no probability by more than the factor :math:`e^{sg/b}`, and records are at most
:math:`\Delta_1/g` steps apart: docs/methods/channels.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from privot.errors import SettingError
from privot.local.channels.additive import AdditiveNoiseChannel
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Plan, Stage
from privot.privacy.sampling import LOCAL
from privot.transport.costs import l1_cost

MIN_GRID_BITS = 12  # the grid is 2^-12 of the noise or finer, and of the range of a value
# Scales that one value may move. The sampled noise ends at MAX_NOISE_SCALES, so the outputs that
# only one of two records can give have a probability of e^-64 at most.
MAX_COORDINATE_EPSILON = 64
MAX_NOISE_SCALES = 128
PLACEHOLDER_RELATIVE_SCALE = 1e6  # noise of a channel that only serves to compute the sensitivity


@dataclass(frozen=True, kw_only=True)
class Laplace(AdditiveNoiseChannel):
    """Laplace noise.

    >>> from privot.local.channels import Projection
    >>> channel = Laplace.calibrate(5.0, projection=Projection(shape=(2,)), low=-1.0, high=1.0)
    >>> channel.scale, channel.epsilon
    (0.8, 5.0)

    Attributes:
        scale: The scale b of the noise on one value.
    """

    scale: float

    name: ClassVar[str] = "laplace"
    norm_order: ClassVar[int] = 1
    delta: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-9 < self.scale / (self.high - self.low) < 1e9:
            raise SettingError(
                f"scale={self.scale}: give a finite number above 0 that is neither tiny nor huge "
                "compared with the domain."
            )
        # privacy: beyond this bound, outputs near the end of the sampled noise would distinguish
        # two records with a probability that epsilon does not account for.
        if self.coordinate_sensitivity > MAX_COORDINATE_EPSILON * self.scale:
            raise SettingError(
                f"scale={self.scale:.4g}: epsilon is above {MAX_COORDINATE_EPSILON} for one value, "
                "where this noise has no proof. Choose a smaller epsilon."
            )

    @classmethod
    def calibrate(cls, epsilon: float, delta: float = 0.0, **fields: Any) -> Laplace:
        """Build the channel with this epsilon.

        Args:
            epsilon: Epsilon of one record.
            delta: Is not used.
            fields: The other fields of the channel.

        Returns:
            The channel.
        """
        domain_width = fields.get("high", 1.0) - fields.get("low", 0.0)
        placeholder_scale = PLACEHOLDER_RELATIVE_SCALE * domain_width
        sensitivity = cls(scale=placeholder_scale, **fields).sensitivity
        return cls(scale=sensitivity / epsilon, **fields)

    @property
    def temperature(self) -> float:
        """The temperature of entropic transport."""
        return self.scale

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on one value."""
        return math.sqrt(2) * self.scale

    @property
    def epsilon(self) -> float:
        """Epsilon of one record."""
        return self.sensitivity / self.scale

    def plan(self) -> Plan:
        """Give the event of one record, under ``local`` neighbours."""
        stage = Stage("values", "privatize", self.scale / self.sensitivity, mechanism="laplace")
        return Plan((stage,), LOCAL)

    @property
    def grid_bits(self) -> int:
        """The width of a grid step is ``scale`` over 2 to this power."""
        return MIN_GRID_BITS + max(0, math.ceil(math.log2(self.scale / (self.high - self.low))))

    @property
    def grid_spacing(self) -> float:
        """The width of a grid step."""
        return float(self.scale * 2.0**-self.grid_bits)

    def privatize(self, records: Tensor, secret_random: SecretRandom | None = None) -> Tensor:
        """Privatize records [n, record_dim] on the client: outputs [n, output_dim]."""
        grid_steps = self._round_to_grid(records, self.grid_spacing)
        noise = (secret_random or SecretRandom()).discrete_laplace(
            tuple(grid_steps.shape), self.grid_bits
        )
        return self._grid_to_outputs(grid_steps + noise + 0.5, self.grid_spacing)

    def compute_cost_matrix(self, points: Tensor, outputs: Tensor) -> Tensor:
        """Compute the L1 distances of projected points and outputs.

        Args:
            points: [..., n, point_dim].
            outputs: [..., m, output_dim].

        Returns:
            [..., n, m]; differentiable in ``points``.
        """
        return l1_cost(self.clip_and_project(points), outputs.to(points))

    def compute_expected_cost(self) -> float:
        """Compute the mean cost of a record and its own output."""
        return self.output_dim * self.scale

    def is_possible_output(self, outputs: Tensor) -> bool:
        """Whether the channel can give these outputs [n, output_dim]."""
        return self._is_within_noise_range(outputs, MAX_NOISE_SCALES * self.scale)
