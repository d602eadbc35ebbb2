"""Samplers: how the records of a query are drawn.

Each sampler draws, states its event, and names the relations for which that event has a proof. The
three are in one object so that what runs and what is counted cannot differ. Fields are public; the
true number of records is an argument, because it may be secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import dp_accounting as dpa
from torch import Tensor

from privot.errors import PlanError
from privot.privacy.accounting import Neighbours
from privot.privacy.noise import SecretRandom

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours


@dataclass(frozen=True)
class Full:
    """Draws every record, every time.

    >>> Full().event(2.0)
    GaussianDpEvent(noise_multiplier=2.0)
    """

    neighbours: ClassVar[tuple[Neighbours, ...]] = (ADD_REMOVE, REPLACE, LOCAL, CLIENT)

    def draw(self, count: int, rng: SecretRandom) -> Tensor | None:
        """Give the indices of the drawn records in rising order, or None for all of them."""
        return None

    def event(self, noise_multiplier: float) -> dpa.DpEvent:
        """Give the event of one Gaussian query on such a sample."""
        return dpa.GaussianDpEvent(noise_multiplier)


@dataclass(frozen=True)
class Poisson:
    """Draws each record independently with probability ``sample_rate``; a sample may be empty."""

    sample_rate: float
    neighbours: ClassVar[tuple[Neighbours, ...]] = (ADD_REMOVE,)

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise PlanError(f"sample_rate={self.sample_rate}: a probability in (0, 1] is needed.")

    def draw(self, count: int, rng: SecretRandom) -> Tensor | None:
        return (rng.uniform(count) <= self.sample_rate).nonzero().flatten()

    def event(self, noise_multiplier: float) -> dpa.DpEvent:
        return dpa.PoissonSampledDpEvent(self.sample_rate, dpa.GaussianDpEvent(noise_multiplier))


@dataclass(frozen=True)
class Fixed:
    """Draws ``sample_size`` of ``dataset_size`` records without replacement, anew each time."""

    sample_size: int
    dataset_size: int  # declared public
    neighbours: ClassVar[tuple[Neighbours, ...]] = (REPLACE,)

    def __post_init__(self) -> None:
        if not isinstance(self.sample_size, int) or not 0 < self.sample_size <= self.dataset_size:
            raise PlanError(
                f"sample_size={self.sample_size}: an integer from 1 to the size of the data set, "
                f"{self.dataset_size}, is needed."
            )

    def draw(self, count: int, rng: SecretRandom) -> Tensor | None:
        if count != self.dataset_size:
            raise PlanError("The sampler is for a data set of another size.")
        return rng.permutation(count)[: self.sample_size].sort().values

    def event(self, noise_multiplier: float) -> dpa.DpEvent:
        return dpa.SampledWithoutReplacementDpEvent(
            self.dataset_size, self.sample_size, dpa.GaussianDpEvent(noise_multiplier)
        )


@dataclass(frozen=True)
class Shards:
    """Draws one of ``num_shards`` disjoint shards, uniformly and secretly, for each row of a query.

    privacy: replacing a record changes one shard, so a shard is the unit of a sample of 1 from
    ``num_shards`` without replacement. The shard of a record is its position modulo ``num_shards``
    in the gate's secret permutation, which is independent of every record's content. See
    `Gate.query_random_shards`.
    """

    num_shards: int
    neighbours: ClassVar[tuple[Neighbours, ...]] = (REPLACE,)

    def __post_init__(self) -> None:
        if not isinstance(self.num_shards, int) or self.num_shards < 1:
            raise PlanError(f"num_shards={self.num_shards}: at least one shard is needed.")

    def draw(self, count: int, rng: SecretRandom) -> Tensor:
        """Draw a shard for each of ``count`` rows, independently: int64 [count]."""
        return (rng.uniform(count) * self.num_shards).long() % self.num_shards

    def event(self, noise_multiplier: float) -> dpa.DpEvent:
        return dpa.SampledWithoutReplacementDpEvent(
            self.num_shards, 1, dpa.GaussianDpEvent(noise_multiplier)
        )


Sampling = Full | Poisson | Fixed | Shards
SAMPLERS = {kind.__name__.lower(): kind for kind in (Full, Poisson, Fixed, Shards)}
