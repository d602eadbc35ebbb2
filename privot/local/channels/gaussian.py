r"""Gaussian noise on each value: (epsilon, delta) by the analytic Gaussian mechanism.

The cost of transport is the squared distance, at temperature :math:`2\sigma^2`. Noise and records
lie on a public grid whose spacing is a power of two, as the gate's query results do:
docs/methods/channels.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import dp_accounting as dpa
from torch import Tensor

from privot.errors import SettingError
from privot.local.channels.additive import AdditiveNoiseChannel
from privot.privacy.noise import MAX_NORMAL, SecretRandom, add_noise, choose_grid
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import LOCAL
from privot.transport.sinkhorn import squared_euclidean_cost

TAIL_STDS = 12.0  # standard deviations that the sampled noise does reach
PLACEHOLDER_RELATIVE_STD = 1e6  # noise of a channel that only serves to compute the sensitivity


@dataclass(frozen=True, kw_only=True)
class Gaussian(AdditiveNoiseChannel):
    """Gaussian noise.

    >>> from privot.local.channels import Projection
    >>> pair = Projection(shape=(2,))
    >>> channel = Gaussian.calibrate(5.0, 1e-4, projection=pair, low=-1.0, high=1.0)
    >>> round(channel.noise_std, 4), round(channel.epsilon, 9)
    (2.2513, 5.0)

    Attributes:
        noise_std: Standard deviation of the noise on one value.
        delta: The delta at which epsilon is stated.
    """

    noise_std: float
    delta: float

    name: ClassVar[str] = "gaussian"
    norm_order: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-9 < self.noise_std / (self.high - self.low) < 1e9:
            raise SettingError(
                f"noise_std={self.noise_std}: give a finite number above 0 that is neither tiny "
                "nor huge compared with the domain."
            )
        Budget(1.0, self.delta)
        # privacy: sampled noise is bounded, so some outputs can come from one record only. Their
        # probability must be negligible compared with delta.
        distance = TAIL_STDS - self.coordinate_sensitivity / self.noise_std
        if self.output_dim * math.erfc(distance / math.sqrt(2)) > self.delta / 100:
            raise SettingError(
                f"noise_std={self.noise_std:.4g}: so little noise on one value has no proof at "
                f"delta {self.delta:g}. Choose a smaller epsilon."
            )

    @classmethod
    def calibrate(cls, epsilon: float, delta: float, **fields: Any) -> Gaussian:
        """Build the channel with the least noise for this epsilon and delta.

        Args:
            epsilon: Epsilon of one record.
            delta: Delta of one record.
            fields: The other fields of the channel.

        Returns:
            The channel.
        """
        domain_width = fields.get("high", 1.0) - fields.get("low", 0.0)
        placeholder_std = PLACEHOLDER_RELATIVE_STD * domain_width
        sensitivity = cls(noise_std=placeholder_std, delta=delta, **fields).sensitivity
        multiplier = dpa.get_sigma_gaussian(epsilon, delta, tol=1e-15) * (1 + 1e-14)
        return cls(noise_std=multiplier * sensitivity, delta=delta, **fields)

    @property
    def temperature(self) -> float:
        """The temperature of entropic transport."""
        return 2 * self.noise_std**2

    @property
    def epsilon(self) -> float:
        """Epsilon of one record."""
        return float(self.plan().cost().epsilon(self.delta))

    def plan(self) -> Plan:
        """Give the event of one record, under ``local`` neighbours."""
        return Plan((Stage("values", "privatize", self.noise_std / self.sensitivity),), LOCAL)

    @property
    def grid_spacing(self) -> float:
        """The width of a grid step."""
        return choose_grid(self.high - self.low, self.noise_std)

    def privatize(self, records: Tensor, secret_random: SecretRandom | None = None) -> Tensor:
        """Privatize records [n, record_dim] on the client: outputs [n, output_dim]."""
        grid_steps = self._round_to_grid(records, self.grid_spacing)
        noisy = add_noise(
            grid_steps, self.noise_std, self.grid_spacing, secret_random or SecretRandom()
        )
        return self._grid_to_outputs(noisy / self.grid_spacing, self.grid_spacing)

    def compute_cost_matrix(self, points: Tensor, outputs: Tensor) -> Tensor:
        """Compute the squared distances of projected points and outputs.

        Args:
            points: [..., n, point_dim].
            outputs: [..., m, output_dim].

        Returns:
            [..., n, m]; differentiable in ``points``.
        """
        return squared_euclidean_cost(self.clip_and_project(points), outputs.to(points))

    def compute_expected_cost(self) -> float:
        """Compute the mean cost of a record and its own output."""
        return self.output_dim * self.noise_std**2

    def is_possible_output(self, outputs: Tensor) -> bool:
        """Whether the channel can give these outputs [n, output_dim]."""
        return self._is_within_noise_range(outputs, MAX_NORMAL * self.noise_std)
