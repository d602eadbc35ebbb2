r"""k-ary randomized response: the true category, or now and then another one; :math:`\epsilon=\log(K(x|x)/K(y|x))`.

Each wrong category is sent with probability :math:`1/(e^\epsilon+k-1)`. The cost is :math:`-\log K(y|x)` at temperature 1: 0 for the true
category and epsilon for any other, but for a constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from torch import Tensor

from privot.errors import SettingError
from privot.local.channels.categorical import RAREST, Categories, log
from privot.privacy.noise import Secret, digits_of


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse(Categories):
    """``lie`` is the probability of each wrong category.

    >>> channel = RandomizedResponse.calibrated(math.log(3), categories=2)
    >>> round(channel.lie, 6), round(channel.epsilon, 6)
    (0.25, 1.098612)
    """

    lie: float

    name: ClassVar[str] = "randomized-response"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not RAREST < self.lie * self.categories < 1 - 1e-9:
            raise SettingError(
                f"lie={self.lie}: a probability over {RAREST:g} and under one over the number of categories is needed"
            )

    @classmethod
    def calibrated(
        cls, epsilon: float, delta: float = 0.0, *, categories: int, **public: Any
    ) -> RandomizedResponse:
        """The channel with this epsilon; ``delta`` is not needed."""
        return cls(
            categories=categories,
            lie=1 / (math.exp(min(epsilon, 690.0)) + categories - 1),
            **public,
        )

    @property
    def epsilon(self) -> float:
        return math.log1p((1 - self.categories * self.lie) / self.lie)

    @property
    def width(self) -> int:
        return 1

    def privatize(self, records: Tensor, secret: Secret | None = None) -> Tensor:
        """On the client: categories [n, 1] to [n, 1]."""
        secret = secret or Secret()
        true = self._numbers(records)
        others = self.categories - 1
        lies = secret.coins(digits_of(Decimal(self.lie) * others), len(true))
        turn = 1 + (secret.uniform(len(true)) * others).long() % others
        return ((true + lies * turn) % self.categories).float()[:, None]

    def cost(self, x: Tensor, y: Tensor) -> Tensor:
        """:math:`-\\log K(y|x)`: probabilities [..., n, categories] and numbers [..., m, 1] to [..., n, m]; differentiable in x."""
        chosen = x @ self.points(y).to(x).mT
        return -log(self.lie + (1 - self.categories * self.lie) * chosen)

    def residual(self) -> float:
        """What the cost of a record and its own answer is on average: the entropy of an answer."""
        keep = 1 - (self.categories - 1) * self.lie
        return -keep * math.log(keep) - (1 - keep) * math.log(self.lie)

    def holds(self, y: Tensor) -> bool:
        """Whether these can be answers of this channel."""
        return bool(((y == y.round()) & (y >= 0) & (y < self.categories)).all())

    def at(self, epsilon: float) -> RandomizedResponse:
        """The same with another epsilon."""
        return self.calibrated(epsilon, self.delta, categories=self.categories)

    def signal(self, count: int) -> float:
        """A mean share, 1/k, over the error of its unbiased estimate."""
        return (1 - self.categories * self.lie) * math.sqrt(count / (self.categories - 1))
