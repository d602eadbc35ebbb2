r"""Gaussian noise on each value: (epsilon, delta) by the analytic Gaussian mechanism; squared distance, at temperature :math:`2\sigma^2`.

Noise and records lie on a public grid of a power of two, as the gate's answers do: docs/methods/channels.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import dp_accounting as dpa
from torch import Tensor

from privot.errors import SettingError
from privot.local.channels.additive import Additive
from privot.privacy.noise import FARTHEST, Secret, grid_for, noisy
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import LOCAL
from privot.transport.sinkhorn import squared_euclidean

TAIL = 12.0  # deviations that drawn noise does reach
WIDE = 1e6  # noise for a channel of which only the domain is asked


@dataclass(frozen=True, kw_only=True)
class Gaussian(Additive):
    """Gaussian noise of standard deviation ``noise_std``; its epsilon is stated at ``delta``.

    >>> from privot.local.channels import Space
    >>> channel = Gaussian.calibrated(5.0, 1e-4, space=Space(shape=(2,)), low=-1.0, high=1.0)
    >>> round(channel.noise_std, 4), round(channel.epsilon, 9)
    (2.2513, 5.0)
    """

    noise_std: float
    delta: float

    name: ClassVar[str] = "gaussian"
    norm: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-9 < self.noise_std / (self.high - self.low) < 1e9:
            raise SettingError(
                f"noise_std={self.noise_std}: a finite number above 0 is needed, neither tiny nor huge beside the domain"
            )
        Budget(1.0, self.delta)
        # privacy: what one record alone can send, since the drawn noise ends, must be nothing beside delta.
        if (
            self.width * math.erfc((TAIL - self.move / self.noise_std) / math.sqrt(2))
            > self.delta / 100
        ):
            raise SettingError(
                f"noise_std={self.noise_std:.4g}: so little for one value has no proof at delta {self.delta:g}: ask for less epsilon"
            )

    @classmethod
    def calibrated(cls, epsilon: float, delta: float, **public: Any) -> Gaussian:
        """The least noise with this epsilon and delta."""
        reach = cls(
            noise_std=WIDE * (public.get("high", 1.0) - public.get("low", 0.0)),
            delta=delta,
            **public,
        ).sensitivity
        return cls(
            noise_std=dpa.get_sigma_gaussian(epsilon, delta, tol=1e-15) * (1 + 1e-14) * reach,
            delta=delta,
            **public,
        )

    @property
    def temperature(self) -> float:
        return 2 * self.noise_std**2

    @property
    def epsilon(self) -> float:
        return float(self.plan().cost().epsilon(self.delta))

    def plan(self) -> Plan:
        return Plan((Stage("values", "privatize", self.noise_std / self.sensitivity),), LOCAL)

    @property
    def grid(self) -> float:
        return grid_for(self.high - self.low, self.noise_std)

    def privatize(self, records: Tensor, secret: Secret | None = None) -> Tensor:
        """On the client: [n, columns] to [n, width], each record with noise of its own."""
        steps = self._steps(records, self.grid)
        return self._sent(
            noisy(steps, self.noise_std, self.grid, secret or Secret()) / self.grid, self.grid
        )

    def cost(self, x: Tensor, y: Tensor) -> Tensor:
        """:math:`|seen(x)-y|_2^2`: [..., n, dim] and [..., m, width] to [..., n, m]; differentiable in x."""
        return squared_euclidean(self.seen(x), y.to(x))

    def residual(self) -> float:
        """What the cost of a point and its own answer is on average."""
        return self.width * self.noise_std**2

    def holds(self, y: Tensor) -> bool:
        """Whether these can be answers of this channel."""
        return self._near(y, FARTHEST * self.noise_std)
