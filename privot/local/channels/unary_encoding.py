r"""Unary encoding: a bit for each category, each sent wrong now and then.

The bits of two records differ in two places, so :math:`\epsilon=\log\frac{K(1|1)\,K(0|0)}{K(0|1)\,K(1|0)}`. Symmetric (basic RAPPOR): every
bit is wrong with probability :math:`1/(1+e^{\epsilon/2})`. Optimized (OUE): the one is sent half the time, and a zero becomes a one with
probability :math:`1/(1+e^\epsilon)`, which makes estimates of small shares as sharp as they can be. The cost is :math:`-\log K(y|x)` at
temperature 1; for the symmetric one that is :math:`\epsilon/2` for each bit that differs, but for a constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from privot.errors import SettingError
from privot.local.channels.categorical import RAREST, Categories, log
from privot.privacy.noise import Secret, digits_of


@dataclass(frozen=True, kw_only=True)
class Unary(Categories):
    """``miss`` is the probability that the one is sent as zero, ``false`` that a zero is sent as one.

    >>> channel = Unary.calibrated(2 * math.log(3), categories=4)
    >>> round(channel.miss, 6), round(channel.false, 6), round(channel.epsilon, 6)
    (0.25, 0.25, 2.197225)
    """

    miss: float
    false: float

    name: ClassVar[str] = "unary"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (min(self.miss, self.false) > RAREST and self.miss + self.false < 1 - 1e-9):
            raise SettingError(
                f"miss={self.miss}, false={self.false}: probabilities over {RAREST:g} that sum to less than 1 are needed"
            )

    @classmethod
    def calibrated(
        cls, epsilon: float, delta: float = 0.0, *, categories: int, **public: Any
    ) -> Self:
        """The channel with this epsilon; ``delta`` is not needed."""
        wrong = 1 / (1 + math.exp(min(epsilon, 690.0) / 2))
        return cls(categories=categories, miss=wrong, false=wrong, **public)

    @property
    def epsilon(self) -> float:
        return (
            math.log1p(-self.miss)
            - math.log(self.miss)
            + math.log1p(-self.false)
            - math.log(self.false)
        )

    @property
    def width(self) -> int:
        return self.categories

    def privatize(self, records: Tensor, secret: Secret | None = None) -> Tensor:
        """On the client: categories [n, 1] to bits [n, categories]."""
        secret = secret or Secret()
        true = self.points(records).bool()
        missed, made = (
            secret.coins(digits_of(Decimal(each)), true.numel()).view_as(true)
            for each in (self.miss, self.false)
        )
        return (true ^ torch.where(true, missed, made)).float()

    def cost(self, x: Tensor, y: Tensor) -> Tensor:
        r""":math:`-\log K(y|x)`: probabilities [..., n, categories] and bits [..., m, categories] to [..., n, m]; differentiable in x."""
        y = y.to(x)
        ones = y.sum(-1)
        none = ones * math.log(self.false) + (self.categories - ones) * math.log1p(
            -self.false
        )  # of no category at all
        # how much likelier the answer is if this category is the record's: [..., m, categories]
        ratio = y * ((1 - self.miss) / self.false) + (1 - y) * (self.miss / (1 - self.false))
        return -log(x @ ratio.mT) - none[..., None, :]

    def residual(self) -> float:
        """What the cost of a record and its own answer is on average: the entropy of an answer."""
        return _entropy(self.miss) + (self.categories - 1) * _entropy(self.false)

    def holds(self, y: Tensor) -> bool:
        """Whether these can be answers of this channel."""
        return bool(((y == 0) | (y == 1)).all())

    def at(self, epsilon: float) -> Self:
        """The same with another epsilon."""
        return self.calibrated(epsilon, self.delta, categories=self.categories)

    def signal(self, count: int) -> float:
        """A mean share, 1/k, over the error of its unbiased estimate."""
        share = 1 / self.categories
        gain = 1 - self.miss - self.false
        ones = self.false + share * gain
        return share * gain * math.sqrt(count / (ones * (1 - ones)))


@dataclass(frozen=True, kw_only=True)
class OptimizedUnary(Unary):
    """The same with the probabilities of OUE.

    >>> channel = OptimizedUnary.calibrated(1.0, categories=4)
    >>> channel.miss, round(channel.false, 6), round(channel.epsilon, 6)
    (0.5, 0.268941, 1.0)
    """

    name: ClassVar[str] = "optimized-unary"

    @classmethod
    def calibrated(
        cls, epsilon: float, delta: float = 0.0, *, categories: int, **public: Any
    ) -> Self:
        return cls(
            categories=categories, miss=0.5, false=1 / (1 + math.exp(min(epsilon, 690.0))), **public
        )


def _entropy(wrong: float) -> float:
    """Of a bit, in nats."""
    return -wrong * math.log(wrong) - (1 - wrong) * math.log1p(-wrong)
