"""How an answer's records are drawn. Fields are public; the true count is an argument, since it may be secret.

Each sampler draws, states its event and names the relations for which that event has a proof: three facts in one object,
so that what runs and what is counted cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import dp_accounting as dpa
from torch import Tensor

from privot.errors import PlanError
from privot.privacy.accounting import Neighbours
from privot.privacy.noise import Secret

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours


@dataclass(frozen=True)
class Full:
    """Every record, every time.

    >>> Full().event(2.0)
    GaussianDpEvent(noise_multiplier=2.0)
    """

    neighbours: ClassVar[tuple[Neighbours, ...]] = (ADD_REMOVE, REPLACE, LOCAL, CLIENT)

    def draw(self, count: int, secret: Secret) -> Tensor | None:
        """Indices of the records, in rising order, or None for all of them."""
        return None

    def event(self, noise: float) -> dpa.DpEvent:
        """The event of one Gaussian answer on such a draw."""
        return dpa.GaussianDpEvent(noise)


@dataclass(frozen=True)
class Poisson:
    """Each record on its own with probability ``rate``; an empty draw is a draw."""

    rate: float
    neighbours: ClassVar[tuple[Neighbours, ...]] = (ADD_REMOVE,)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise PlanError(f"rate={self.rate}: a probability in (0, 1] is needed")

    def draw(self, count: int, secret: Secret) -> Tensor | None:
        return (secret.uniform(count) <= self.rate).nonzero().flatten()

    def event(self, noise: float) -> dpa.DpEvent:
        return dpa.PoissonSampledDpEvent(self.rate, dpa.GaussianDpEvent(noise))


@dataclass(frozen=True)
class Fixed:
    """``drawn`` of ``size`` records without replacement, afresh each time; ``size`` is declared public."""

    drawn: int
    size: int
    neighbours: ClassVar[tuple[Neighbours, ...]] = (REPLACE,)

    def __post_init__(self) -> None:
        if not isinstance(self.drawn, int) or not 0 < self.drawn <= self.size:
            raise PlanError(
                f"drawn={self.drawn}: between 1 and the data set's size {self.size} is needed"
            )

    def draw(self, count: int, secret: Secret) -> Tensor | None:
        if count != self.size:
            raise PlanError("the sampler was made for a data set of another size")
        return secret.order(count)[: self.drawn].sort().values

    def event(self, noise: float) -> dpa.DpEvent:
        return dpa.SampledWithoutReplacementDpEvent(
            self.size, self.drawn, dpa.GaussianDpEvent(noise)
        )


@dataclass(frozen=True)
class Shards:
    """One of ``count`` disjoint shards, drawn uniformly and secretly for each answer (`Gate.route`).

    privacy: replacing a record changes one shard, so a shard is the unit of a sample of 1 from ``count`` without replacement. The
    shard of a record is its position modulo ``count`` in the gate's secret permutation, independent of every record's content.
    """

    count: int
    neighbours: ClassVar[tuple[Neighbours, ...]] = (REPLACE,)

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise PlanError(f"count={self.count}: at least one shard is needed")

    def draw(self, count: int, secret: Secret) -> Tensor:
        """A shard for each of ``count`` answers, each drawn on its own: [count]."""
        return (secret.uniform(count) * self.count).long() % self.count

    def event(self, noise: float) -> dpa.DpEvent:
        return dpa.SampledWithoutReplacementDpEvent(self.count, 1, dpa.GaussianDpEvent(noise))


Sampling = Full | Poisson | Fixed | Shards
SAMPLERS = {kind.__name__.lower(): kind for kind in (Full, Poisson, Fixed, Shards)}
