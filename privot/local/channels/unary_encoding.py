r"""Unary encoding: one bit for each category, each of which may be flipped.

The bits of two records differ at two positions, so
:math:`\epsilon=\log\frac{K(1|1)\,K(0|0)}{K(0|1)\,K(1|0)}`. Symmetric (basic RAPPOR): every bit is
flipped with probability :math:`1/(1+e^{\epsilon/2})`. Optimized (OUE): the one is sent as one half
of the time, and a zero becomes a one with probability :math:`1/(1+e^\epsilon)`, which minimizes the
error of estimates of small shares. The cost is :math:`-\log K(y|x)` at temperature 1; for the
symmetric encoding that is, up to a constant, :math:`\epsilon/2` for each bit that differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from privot.errors import SettingError
from privot.local.channels.categorical import MIN_COIN_PROBABILITY, CategoricalChannel, safe_log
from privot.privacy.noise import SecretRandom, probability_bits


@dataclass(frozen=True, kw_only=True)
class UnaryEncoding(CategoricalChannel):
    """Symmetric unary encoding.

    >>> channel = UnaryEncoding.calibrate(2 * math.log(3), num_categories=4)
    >>> round(channel.false_negative_rate, 6), round(channel.false_positive_rate, 6)
    (0.25, 0.25)
    >>> round(channel.epsilon, 6)
    2.197225

    Attributes:
        false_negative_rate: The probability that the one is sent as zero.
        false_positive_rate: The probability that a zero is sent as one.
    """

    false_negative_rate: float
    false_positive_rate: float

    name: ClassVar[str] = "unary"

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = (self.false_negative_rate, self.false_positive_rate)
        if not (min(rates) > MIN_COIN_PROBABILITY and sum(rates) < 1 - 1e-9):
            raise SettingError(
                f"false_negative_rate={rates[0]}, false_positive_rate={rates[1]}: give "
                f"probabilities above {MIN_COIN_PROBABILITY:g} whose sum is below 1."
            )

    @classmethod
    def calibrate(
        cls, epsilon: float, delta: float = 0.0, *, num_categories: int, **fields: Any
    ) -> Self:
        """Build the channel with this epsilon.

        Args:
            epsilon: Epsilon of one record.
            delta: Is not used.
            num_categories: Number of categories.
            fields: The other fields of the channel.

        Returns:
            The channel.
        """
        flip_probability = 1 / (1 + math.exp(min(epsilon, 690.0) / 2))
        return cls(
            num_categories=num_categories,
            false_negative_rate=flip_probability,
            false_positive_rate=flip_probability,
            **fields,
        )

    @property
    def epsilon(self) -> float:
        """Epsilon of one record."""
        return (
            math.log1p(-self.false_negative_rate)
            - math.log(self.false_negative_rate)
            + math.log1p(-self.false_positive_rate)
            - math.log(self.false_positive_rate)
        )

    @property
    def output_dim(self) -> int:
        """Number of bits that are sent."""
        return self.num_categories

    def privatize(self, records: Tensor, secret_random: SecretRandom | None = None) -> Tensor:
        """Privatize indices [n, 1] on the client: bits [n, num_categories]."""
        secret_random = secret_random or SecretRandom()
        true_bits = self.to_points(records).bool()
        is_false_negative, is_false_positive = (
            secret_random.bernoulli(probability_bits(Decimal(rate)), true_bits.numel()).view_as(
                true_bits
            )
            for rate in (self.false_negative_rate, self.false_positive_rate)
        )
        return (true_bits ^ torch.where(true_bits, is_false_negative, is_false_positive)).float()

    def compute_cost_matrix(self, points: Tensor, outputs: Tensor) -> Tensor:
        r"""Compute :math:`-\log K(y|x)`.

        Args:
            points: Probabilities x, [..., n, num_categories].
            outputs: Bits y, [..., m, num_categories].

        Returns:
            [..., n, m]; differentiable in ``points``.
        """
        outputs = outputs.to(points)
        num_ones = outputs.sum(-1)
        # The likelihood of an output if all true bits were zero.
        log_likelihood_of_zeros = num_ones * math.log(self.false_positive_rate) + (
            self.num_categories - num_ones
        ) * math.log1p(-self.false_positive_rate)
        # The factor by which an output is likelier if this bit is the true one:
        # [..., m, num_categories]
        likelihood_ratio = outputs * ((1 - self.false_negative_rate) / self.false_positive_rate) + (
            1 - outputs
        ) * (self.false_negative_rate / (1 - self.false_positive_rate))
        return -safe_log(points @ likelihood_ratio.mT) - log_likelihood_of_zeros[..., None, :]

    def compute_expected_cost(self) -> float:
        """Compute the mean cost of a record and its own output: the entropy of an output."""
        return _compute_bit_entropy(self.false_negative_rate) + (
            self.num_categories - 1
        ) * _compute_bit_entropy(self.false_positive_rate)

    def is_possible_output(self, outputs: Tensor) -> bool:
        """Whether the channel can give these outputs [n, num_categories]."""
        return bool(((outputs == 0) | (outputs == 1)).all())

    def with_epsilon(self, epsilon: float) -> Self:
        """Build the same channel with another epsilon."""
        return self.calibrate(epsilon, self.delta, num_categories=self.num_categories)

    def predict_signal_to_noise(self, num_records: int) -> float:
        """Predict the ratio of a mean share, 1/k, to the error of its unbiased estimate."""
        share = 1 / self.num_categories
        gain = 1 - self.false_negative_rate - self.false_positive_rate
        share_of_ones = self.false_positive_rate + share * gain
        return share * gain * math.sqrt(num_records / (share_of_ones * (1 - share_of_ones)))


@dataclass(frozen=True, kw_only=True)
class OptimizedUnaryEncoding(UnaryEncoding):
    """Unary encoding with the probabilities of OUE.

    >>> channel = OptimizedUnaryEncoding.calibrate(1.0, num_categories=4)
    >>> channel.false_negative_rate, round(channel.false_positive_rate, 6)
    (0.5, 0.268941)
    >>> round(channel.epsilon, 6)
    1.0
    """

    name: ClassVar[str] = "optimized-unary"

    @classmethod
    def calibrate(
        cls, epsilon: float, delta: float = 0.0, *, num_categories: int, **fields: Any
    ) -> Self:
        """Build the channel with this epsilon.

        Args:
            epsilon: Epsilon of one record.
            delta: Is not used.
            num_categories: Number of categories.
            fields: The other fields of the channel.

        Returns:
            The channel.
        """
        return cls(
            num_categories=num_categories,
            false_negative_rate=0.5,
            false_positive_rate=1 / (1 + math.exp(min(epsilon, 690.0))),
            **fields,
        )


def _compute_bit_entropy(flip_probability: float) -> float:
    """Compute the entropy of a bit that is flipped with this probability, in nats."""
    keep_probability = 1 - flip_probability
    return -flip_probability * math.log(flip_probability) - keep_probability * math.log1p(
        -flip_probability
    )
