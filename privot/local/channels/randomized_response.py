r"""k-ary randomized response: the true category, or with a small probability another one.

:math:`\epsilon=\log(K(x|x)/K(y|x))`: each wrong category is sent with probability
:math:`1/(e^\epsilon+k-1)`. The cost is :math:`-\log K(y|x)` at temperature 1: up to a constant, 0
for the true category and epsilon for any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from torch import Tensor

from privot.errors import SettingError
from privot.local.channels.categorical import MIN_COIN_PROBABILITY, CategoricalChannel, safe_log
from privot.privacy.noise import SecretRandom, probability_bits


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse(CategoricalChannel):
    """Randomized response.

    >>> channel = RandomizedResponse.calibrate(math.log(3), num_categories=2)
    >>> round(channel.wrong_category_probability, 6), round(channel.epsilon, 6)
    (0.25, 1.098612)

    Attributes:
        wrong_category_probability: The probability of each wrong category.
    """

    wrong_category_probability: float

    name: ClassVar[str] = "randomized-response"

    def __post_init__(self) -> None:
        super().__post_init__()
        relative = self.wrong_category_probability * self.num_categories
        if not MIN_COIN_PROBABILITY < relative < 1 - 1e-9:
            raise SettingError(
                f"wrong_category_probability={self.wrong_category_probability}: give a probability "
                f"above {MIN_COIN_PROBABILITY:g} and below one over the number of categories."
            )

    @classmethod
    def calibrate(
        cls, epsilon: float, delta: float = 0.0, *, num_categories: int, **fields: Any
    ) -> RandomizedResponse:
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
            wrong_category_probability=1 / (math.exp(min(epsilon, 690.0)) + num_categories - 1),
            **fields,
        )

    @property
    def _excess_probability(self) -> float:
        """The probability of the true category minus that of a wrong one."""
        return 1 - self.num_categories * self.wrong_category_probability

    @property
    def epsilon(self) -> float:
        """Epsilon of one record."""
        return math.log1p(self._excess_probability / self.wrong_category_probability)

    @property
    def output_dim(self) -> int:
        """Number of values that are sent."""
        return 1

    def privatize(self, records: Tensor, secret_random: SecretRandom | None = None) -> Tensor:
        """Privatize indices [n, 1] on the client: indices [n, 1]."""
        secret_random = secret_random or SecretRandom()
        true_indices = self._to_category_indices(records)
        num_wrong = self.num_categories - 1
        is_wrong = secret_random.bernoulli(
            probability_bits(Decimal(self.wrong_category_probability) * num_wrong),
            len(true_indices),
        )
        uniform = secret_random.uniform(len(true_indices))
        shift = 1 + (uniform * num_wrong).long() % num_wrong
        return ((true_indices + is_wrong * shift) % self.num_categories).float()[:, None]

    def compute_cost_matrix(self, points: Tensor, outputs: Tensor) -> Tensor:
        r"""Compute :math:`-\log K(y|x)`.

        Args:
            points: Probabilities x, [..., n, num_categories].
            outputs: Indices y, [..., m, 1].

        Returns:
            [..., n, m]; differentiable in ``points``.
        """
        probability_of_output = points @ self.to_points(outputs).to(points).mT
        return -safe_log(
            self.wrong_category_probability + self._excess_probability * probability_of_output
        )

    def compute_expected_cost(self) -> float:
        """Compute the mean cost of a record and its own output: the entropy of an output."""
        true_probability = 1 - (self.num_categories - 1) * self.wrong_category_probability
        return -true_probability * math.log(true_probability) - (1 - true_probability) * math.log(
            self.wrong_category_probability
        )

    def is_possible_output(self, outputs: Tensor) -> bool:
        """Whether the channel can give these outputs [n, 1]."""
        is_index = (outputs == outputs.round()) & (outputs >= 0) & (outputs < self.num_categories)
        return bool(is_index.all())

    def with_epsilon(self, epsilon: float) -> RandomizedResponse:
        """Build the same channel with another epsilon."""
        return self.calibrate(epsilon, self.delta, num_categories=self.num_categories)

    def predict_signal_to_noise(self, num_records: int) -> float:
        """Predict the ratio of a mean share, 1/k, to the error of its unbiased estimate."""
        return self._excess_probability * math.sqrt(num_records / (self.num_categories - 1))
