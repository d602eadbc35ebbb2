r"""Laplace noise on each value: pure epsilon, :math:`\epsilon=\Delta_1/b`; the cost of the transport is the L1 distance, at temperature b.

The noise is a two-sided geometric law on a grid, drawn exactly: :math:`P(z)\propto\exp(-|z+1/2|\,g/b)`. A move by s steps changes no
probability by more than :math:`e^{sg/b}`, and records are at most :math:`\Delta_1/g` steps apart: docs/methods/channels.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from privot.errors import SettingError
from privot.local.channels.additive import Additive
from privot.privacy.noise import Secret
from privot.privacy.plan import Plan, Stage
from privot.privacy.sampling import LOCAL
from privot.transport.costs import city_block

FINE = 12  # the grid is 2^-12 of the noise or finer, and of the range of a value
SHARPEST = 64  # scales that one value may move: the drawn law ends at 128 of them, so what one record alone can send has e^-64 at most
WIDE = 1e6  # noise for a channel of which only the domain is asked


@dataclass(frozen=True, kw_only=True)
class Laplace(Additive):
    """Laplace noise of ``scale`` b.

    >>> from privot.local.channels import Space
    >>> channel = Laplace.calibrated(5.0, space=Space(shape=(2,)), low=-1.0, high=1.0)
    >>> channel.scale, channel.epsilon
    (0.8, 5.0)
    """

    scale: float

    name: ClassVar[str] = "laplace"
    norm: ClassVar[int] = 1
    delta: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-9 < self.scale / (self.high - self.low) < 1e9:
            raise SettingError(
                f"scale={self.scale}: a finite number above 0 is needed, neither tiny nor huge beside the domain"
            )
        # privacy: beyond it the end of the drawn law would tell two records apart more often than is ever said.
        if self.move > SHARPEST * self.scale:
            raise SettingError(
                f"scale={self.scale:.4g}: epsilon is over {SHARPEST} for one value, where this noise has no proof: ask for less"
            )

    @classmethod
    def calibrated(cls, epsilon: float, delta: float = 0.0, **public: Any) -> Laplace:
        """The channel with this epsilon; ``delta`` is not needed."""
        reach = cls(
            scale=WIDE * (public.get("high", 1.0) - public.get("low", 0.0)), **public
        ).sensitivity
        return cls(scale=reach / epsilon, **public)

    @property
    def temperature(self) -> float:
        return self.scale

    @property
    def noise_std(self) -> float:
        return math.sqrt(2) * self.scale

    @property
    def epsilon(self) -> float:
        return self.sensitivity / self.scale

    def plan(self) -> Plan:
        return Plan(
            (Stage("values", "privatize", self.scale / self.sensitivity, law="laplace"),), LOCAL
        )

    @property
    def digits(self) -> int:
        """The grid is the scale over 2 to this power."""
        return FINE + max(0, math.ceil(math.log2(self.scale / (self.high - self.low))))

    @property
    def grid(self) -> float:
        return float(self.scale * 2.0**-self.digits)

    def privatize(self, records: Tensor, secret: Secret | None = None) -> Tensor:
        """On the client: [n, columns] to [n, width], each record with noise of its own."""
        steps = self._steps(records, self.grid)
        noise = (secret or Secret()).laplace(tuple(steps.shape), self.digits)
        return self._sent(steps + noise + 0.5, self.grid)

    def cost(self, x: Tensor, y: Tensor) -> Tensor:
        """:math:`|seen(x)-y|_1`: [..., n, dim] and [..., m, width] to [..., n, m]; differentiable in x."""
        return city_block(self.seen(x), y.to(x))

    def residual(self) -> float:
        """What the cost of a point and its own answer is on average."""
        return self.width * self.scale

    def holds(self, y: Tensor) -> bool:
        """Whether these can be answers of this channel: the noise stays under 128 scales."""
        return self._near(y, 128 * self.scale)
