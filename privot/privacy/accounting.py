r"""Events in, epsilon out: a thin layer on ``dp_accounting``.

A *noise multiplier* here is always (standard deviation) / (sensitivity under the named neighbouring relation), so one Gaussian
answer is ``GaussianDpEvent(noise)`` whatever the relation. Three ways to a number, tried in this order and named in the result:
analytic Gaussian (exact: :math:`\mu^2=\sum 1/noise^2`), PLD (pessimistic grid), Renyi (only when the PLD grid would be too large).
Pure epsilons, of Laplace noise and of randomized response, are added to what the rest comes to.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from privot.errors import PlanError

logging.getLogger("absl").setLevel(
    logging.ERROR
)  # dp_accounting warns about Renyi orders that it leaves out, which is safe

GRIDS = (
    1e-4,
    3e-4,
    1e-3,
    3e-3,
    1e-2,
)  # finer than 1e-4 adds up rounding errors at 10^5 compositions
# The deadline of the PLD is counted in grid points, not in seconds, so that every machine certifies the same number (about 10 s).
MOST_POINTS = 2**22


class Neighbours(StrEnum):
    """Which two data sets must look alike."""

    ADD_REMOVE = "add-remove"
    REPLACE = "replace"
    LOCAL = "local"
    CLIENT = "client"  # all that one owner holds may be anything else, another number of records included

    @property
    def unit(self) -> str:
        """What is protected: all that may differ between two neighbours."""
        return "all records of one owner" if self is Neighbours.CLIENT else "one record"


def _leaves(event: dpa.DpEvent, count: int = 1) -> list[tuple[dpa.DpEvent, int]]:
    if isinstance(event, dpa.SelfComposedDpEvent):
        return _leaves(event.event, count * event.count)
    if isinstance(event, dpa.ComposedDpEvent):
        return [leaf for each in event.events for leaf in _leaves(each, count)]
    return [(event, count)]


def _sampled(event: dpa.DpEvent, neighbours: Neighbours) -> tuple[float, float]:
    """(rate, noise) of one sampled Gaussian, or a refusal: a (sampling, relation) pair without a proof has no epsilon."""
    inner = getattr(event, "event", None)
    if isinstance(inner, dpa.GaussianDpEvent):
        if isinstance(event, dpa.PoissonSampledDpEvent) and neighbours is Neighbours.ADD_REMOVE:
            return event.sampling_probability, inner.noise_multiplier
        if (
            isinstance(event, dpa.SampledWithoutReplacementDpEvent)
            and neighbours is Neighbours.REPLACE
        ):
            return event.sample_size / event.source_dataset_size, inner.noise_multiplier
    raise PlanError(f"no accounting for {type(event).__name__} under {neighbours} neighbours")


@dataclass(frozen=True)
class Cost:
    """What a run of events costs.

    ``delta`` is the privacy profile (``delta(epsilon)``, never optimistic); ``method`` says which accountant gave it.
    ``neighbours`` is the relation for which the sum of a ledger holds (`privot.privacy.ledger.total_cost`).

    >>> cost(dpa.GaussianDpEvent(5.0), Neighbours.REPLACE).epsilon(1e-5).__round__(3)
    0.726
    """

    method: str
    delta: Callable[[Any], Any]  # elementwise on arrays
    epsilon: Callable[[float], float]
    mu: float | None = None  # of Gaussian DP, where that is exact
    neighbours: Neighbours | None = None

    def tpr(self, fpr: float) -> float:
        r"""The largest true-positive rate of any membership attack at this false-positive rate.

        :math:`\min_\epsilon \min(e^\epsilon\,fpr+\delta(\epsilon),\; 1-e^{-\epsilon}(1-fpr-\delta(\epsilon)))`, in closed form if Gaussian.
        """
        if self.mu is not None:
            return float(norm.cdf(norm.ppf(fpr) + self.mu))
        eps, delta = self._curve
        return float(
            min(
                1.0, (np.exp(eps) * fpr + delta).min(), (1 - np.exp(-eps) * (1 - fpr - delta)).min()
            )
        )

    @functools.cached_property
    def _curve(self) -> tuple[Any, Any]:
        eps = np.linspace(
            0, min(self.epsilon(1e-9), 50.0), 500
        )  # beyond 50 the bound is 1 at any rate worth printing
        return eps, self.delta(eps)


PURE = (dpa.LaplaceDpEvent, dpa.RandomizedResponseDpEvent)


def response(noise: float) -> dpa.DpEvent:
    r"""The event of a channel of pure epsilon = 1/noise: a randomized response of two answers, which no such channel exceeds.

    >>> pure_epsilon([(response(0.5), 1)])
    2.0
    """
    return (
        dpa.RandomizedResponseDpEvent(2 / (1 + math.exp(1 / noise)), 2)
        if 1 / noise < 700
        else dpa.NonPrivateDpEvent()
    )


def pure_epsilon(leaves: list[tuple[dpa.DpEvent, int]]) -> float:
    """What the events of a pure epsilon amount to, added up."""
    total = 0.0
    for leaf, count in leaves:
        if isinstance(leaf, dpa.LaplaceDpEvent):
            total += count / leaf.noise_multiplier
        elif isinstance(leaf, dpa.RandomizedResponseDpEvent):
            total += count * math.log1p(
                leaf.num_buckets * (1 - leaf.noise_parameter) / leaf.noise_parameter
            )
    return total


def _added(rest: Cost, pure: float) -> Cost:
    r"""A pure epsilon :math:`E` on top of other events.

    privacy: randomized response with two answers dominates whatever has :math:`E`, and its loss is :math:`\pm E`, so with
    :math:`p=1/(1+e^{-E})` it is :math:`\delta(\epsilon)=p\,\delta_{rest}(\epsilon-E)+(1-p)\,\delta_{rest}(\epsilon+E)`. What is stated
    as epsilon is the plain sum.
    """
    share = 1 / (1 + math.exp(-pure))

    def curve(eps: Any) -> Any:
        """Below zero too, where it is at most 1 - exp(eps) (1 - delta(0))."""
        eps = np.asarray(eps, float)
        return np.where(
            eps < 0,
            1 - np.exp(np.minimum(eps, 0)) * (1 - rest.delta(np.zeros(1))),
            rest.delta(np.maximum(eps, 0)),
        )

    name = "pure epsilons added" if rest.mu == 0 else f"{rest.method}, pure epsilons added"
    return Cost(
        name,
        lambda eps: share * curve(eps - pure) + (1 - share) * curve(eps + pure),
        lambda delta: pure + rest.epsilon(delta),
    )


def cost(event: dpa.DpEvent, neighbours: Neighbours, roughly: bool = False) -> Cost:
    """Account for an event under a neighbouring relation; ``roughly`` on a coarser grid, never optimistic and much quicker."""
    leaves = _leaves(event)
    if any(isinstance(leaf, dpa.NonPrivateDpEvent) for leaf, _ in leaves):
        return Cost("no privacy", np.ones_like, lambda delta: math.inf)
    pure = pure_epsilon(leaves)
    rest = [each for each in leaves if not isinstance(each[0], PURE)]
    if pure:
        others = dpa.ComposedDpEvent([dpa.SelfComposedDpEvent(leaf, count) for leaf, count in rest])
        return _added(cost(others, neighbours, roughly), pure)
    gaussian = [
        (leaf.noise_multiplier, count)
        for leaf, count in leaves
        if isinstance(leaf, dpa.GaussianDpEvent)
    ]
    sampled = [
        (*_sampled(leaf, neighbours), count)
        for leaf, count in leaves
        if not isinstance(leaf, dpa.GaussianDpEvent)
    ]
    mu = math.sqrt(sum(count / noise**2 for noise, count in gaussian))
    if not sampled:
        return _gaussian(mu)
    grid = _grid(sampled, mu, roughly)
    if grid is None:
        return renyi(event, neighbours)
    total = (
        pld.identity(grid)
        if mu == 0
        else pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=grid)
    )
    for rate, noise, count in sampled:
        one = (
            _poisson(rate, noise, grid)
            if neighbours is Neighbours.ADD_REMOVE
            else _symmetric(rate, noise, grid)
        )
        total = total.compose(one.self_compose(count))
    # privacy: against exact Gaussians, powers of a Fourier transform lost up to 0.2 * 2^-52 of delta a step; five times that is added.
    slack = 2.0**-52 * (1000 + sum(count for *_, count in sampled))
    return Cost(
        f"PLD, grid {grid:g}",
        lambda eps: total.get_delta_for_epsilon(eps) + slack,
        lambda target: (
            float(total.get_epsilon_for_delta(target - slack)) if target > slack else math.inf
        ),
    )


_gaussian_epsilon = functools.lru_cache(4096)(
    dpa.get_epsilon_gaussian
)  # a root, some milliseconds, and the same is asked again and again


def _gaussian(mu: float) -> Cost:
    if mu == 0:  # no event at all
        return Cost("analytic Gaussian", np.zeros_like, lambda delta: 0.0, 0.0)

    def delta(eps: Any) -> Any:
        return norm.cdf(mu / 2 - eps / mu) - np.exp(eps + norm.logcdf(-mu / 2 - eps / mu))

    return Cost(
        "analytic Gaussian", delta, lambda target: float(_gaussian_epsilon(1 / mu, target)), mu
    )


def renyi(event: dpa.DpEvent, neighbours: Neighbours) -> Cost:
    """The Renyi bound, printed beside the claim as a check; it is never below a correct one by more than rounding."""
    one = dpa.NeighboringRelation
    relation = one.ADD_OR_REMOVE_ONE if neighbours is Neighbours.ADD_REMOVE else one.REPLACE_ONE
    accountant = RdpAccountant(neighboring_relation=relation).compose(event)
    leaves = _leaves(event)
    pure = pure_epsilon(leaves) if all(isinstance(leaf, PURE) for leaf, _ in leaves) else math.inf

    def epsilon(delta: float) -> float:
        return (
            float(accountant.get_epsilon(delta)) if delta else pure
        )  # the order that delta = 0 needs is infinity, the sum itself

    return Cost(
        "Renyi (the PLD grid would be too large)", np.vectorize(accountant.get_delta), epsilon
    )


def _grid(
    sampled: list[tuple[float, float, int]], mu: float, roughly: bool = False
) -> float | None:
    """The finest grid whose composed distribution stays under `MOST_POINTS`, judged by the moments of one step.

    ``roughly``: of the coarser half of them.
    """
    width = 0.0
    spread = mu**2
    for rate, noise, count in sampled:
        shift = 1 / noise
        x = np.linspace(-10, shift + 10, 4001)
        density = (1 - rate) * norm.pdf(x) + rate * norm.pdf(x - shift)
        loss = np.logaddexp(
            np.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + shift * x - shift**2 / 2
        )
        weight = density / density.sum()
        spread += count * float(weight @ (loss - weight @ loss) ** 2)
        width = max(width, float(loss[-1] - loss[0]))
    return next(
        (
            grid
            for grid in GRIDS[len(GRIDS) // 2 * roughly :]
            if (20 * math.sqrt(spread) + 2 * width) / grid < MOST_POINTS
        ),
        None,
    )


@functools.lru_cache(maxsize=64)
def _poisson(rate: float, noise: float, grid: float) -> pld.PrivacyLossDistribution:
    r"""Poisson draws under add/remove: what ``pld.from_gaussian_mechanism`` gives, whose loop over the grid takes seconds.

    privacy: with :math:`\delta_{Gauss}` of one answer, :math:`\delta_{remove}(\epsilon)=q\,\delta_{Gauss}(\log(1+(e^\epsilon-1)/q))` and
    :math:`\delta_{add}(\epsilon)=(1-e^\epsilon(1-q))\,\delta_{Gauss}(-\log(1+(e^{-\epsilon}-1)/q))`, as far as these logarithms go; beyond,
    :math:`1-e^\epsilon` and 0.
    """
    if rate == 1:
        return pld.from_gaussian_mechanism(noise, value_discretization_interval=grid)
    # the log of what is never drawn
    one = _gaussian(1 / noise)
    end = math.log1p(-rate)

    def grown(eps: Any) -> Any:
        """log(1 + (exp(eps) - 1) / rate), for eps above ``end``."""
        far = eps > 1
        near = np.log1p(np.expm1(np.where(far, 0, eps)) / rate)
        return np.where(
            far, eps - math.log(rate) + np.log1p(-np.exp(end - np.where(far, eps, 1))), near
        )

    def dots(kind: AdjacencyType) -> pld_pmf.PLDPmf:
        ends = GaussianPrivacyLoss(
            noise, sampling_prob=rate, adjacency_type=kind
        ).connect_dots_bounds()
        first = math.floor(ends.epsilon_lower / grid)
        last = math.ceil(ends.epsilon_upper / grid)
        eps = np.arange(first, last + 1) * grid
        deltas = np.zeros(len(eps))
        if kind is AdjacencyType.REMOVE:
            inside = eps > end
            deltas[inside] = rate * one.delta(grown(eps[inside]))
            deltas[~inside] = -np.expm1(eps[~inside])
        else:
            inside = eps < -end
            deltas[inside] = -np.expm1(eps[inside] + end) * one.delta(-grown(-eps[inside]))
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            grid, first, last, np.clip(deltas, 0, 1)
        )

    return pld.PrivacyLossDistribution(dots(AdjacencyType.REMOVE), dots(AdjacencyType.ADD))


@functools.lru_cache(maxsize=64)
def _symmetric(rate: float, noise: float, grid: float) -> pld.PrivacyLossDistribution:
    r"""Sampling without replacement (or one secret shard of many) under replace-one.

    privacy: for :math:`\epsilon\ge0`, :math:`\delta(\epsilon)=q\,\delta_{Gauss}(\log(1+(e^\epsilon-1)/q))` by advanced joint convexity; the
    relation is symmetric, so :math:`\delta(-\epsilon)=1-e^{-\epsilon}+e^{-\epsilon}\delta(\epsilon)`. See docs/methods/sampling.md.
    """
    one = _gaussian(1 / noise)
    top = math.ceil(
        math.log1p(rate * math.expm1(min(one.epsilon(1e-21), 600))) / grid
    )  # what lies beyond counts as lost
    eps = np.arange(top + 1) * grid
    inner = np.log1p(np.expm1(eps) / rate)
    upper = rate * np.maximum(one.delta(inner), 0)
    lower = (-np.expm1(-eps) + np.exp(-eps) * upper)[:0:-1]  # the mirror image, from -top to -1
    deltas = np.minimum.accumulate(np.clip(np.concatenate([lower, upper]), 0, 1))
    return pld.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -top, top, deltas)
    )
