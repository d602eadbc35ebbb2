r"""From events to epsilon: a thin layer on ``dp_accounting``.

A *noise multiplier* is always (standard deviation) / (sensitivity under the named neighbouring
relation), so one Gaussian query is ``GaussianDpEvent(noise_multiplier)`` whatever the relation.
Three accountants are tried in this order, and the result names the one that was used: analytic
Gaussian (exact: :math:`\mu^2=\sum 1/noise^2`), PLD (pessimistic on a grid), Renyi (only if the grid
would be too large). Pure epsilons, of Laplace noise and of randomized response, are added to the
rest.
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
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from privot.errors import PlanError
from privot.privacy.pure_epsilon import PURE_EVENTS, sum_pure_epsilons
from privot.privacy.subsampled_gaussian import (
    gaussian_delta,
    gaussian_epsilon,
    poisson_pld,
    without_replacement_pld,
)

# dp_accounting warns about Renyi orders that it leaves out, which is safe.
logging.getLogger("absl").setLevel(logging.ERROR)

# Steps of the grid of privacy losses. Below 1e-4, rounding errors add up at 10^5 compositions.
GRID_STEPS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
# The work for a PLD (about 10 s) is limited in grid points, not in seconds, so that every machine
# certifies the same number.
MAX_GRID_POINTS = 2**22
MAX_CURVE_EPSILON = 50.0  # beyond it the bound on attacks is 1 at any rate worth printing


class Neighbours(StrEnum):
    """The relation between two data sets that must look alike.

    Under ``client``, all records of one client may be replaced, by another number of records too.
    """

    ADD_REMOVE = "add-remove"
    REPLACE = "replace"
    LOCAL = "local"
    CLIENT = "client"

    @property
    def privacy_unit(self) -> str:
        """What is protected: all that may differ between two neighbours."""
        return "all records of one client" if self is Neighbours.CLIENT else "one record"


@dataclass(frozen=True)
class PrivacyCost:
    """What a run of events costs.

    Attributes:
        accountant: The accountant that was used.
        delta: The privacy profile, delta as a function of epsilon, elementwise on arrays. It is
            never optimistic.
        epsilon: The same the other way round.
        mu: The parameter of Gaussian DP, where that is exact.
        neighbours: The relation for which the sum of a ledger holds
            (`privot.privacy.ledger.compute_total_cost`).

    >>> cost = compute_privacy_cost(dpa.GaussianDpEvent(5.0), Neighbours.REPLACE)
    >>> round(cost.epsilon(1e-5), 3)
    0.726
    """

    accountant: str
    delta: Callable[[Any], Any]
    epsilon: Callable[[float], float]
    mu: float | None = None
    neighbours: Neighbours | None = None

    def max_tpr(self, fpr: float) -> float:
        r"""Bound the true-positive rate of any membership attack at a false-positive rate.

        :math:`\min_\epsilon\min(e^\epsilon\,fpr+\delta(\epsilon),\;`
        :math:`1-e^{-\epsilon}(1-fpr-\delta(\epsilon)))`, in closed form if Gaussian.
        """
        if self.mu is not None:
            return float(norm.cdf(norm.ppf(fpr) + self.mu))
        eps, delta = self._privacy_curve
        bounds = (np.exp(eps) * fpr + delta, 1 - np.exp(-eps) * (1 - fpr - delta))
        return float(min(1.0, *(bound.min() for bound in bounds)))

    @functools.cached_property
    def _privacy_curve(self) -> tuple[Any, Any]:
        eps = np.linspace(0, min(self.epsilon(1e-9), MAX_CURVE_EPSILON), 500)
        return eps, self.delta(eps)


def compute_privacy_cost(
    event: dpa.DpEvent, neighbours: Neighbours, coarse: bool = False
) -> PrivacyCost:
    """Account for an event under a neighbouring relation.

    Args:
        event: The event.
        neighbours: The relation.
        coarse: Whether to use a coarser grid, which is much faster and never optimistic.

    Returns:
        The cost.

    Raises:
        PlanError: If a combination of sampling and relation has no proof.
    """
    leaves = _flatten_events(event)
    if any(isinstance(leaf, dpa.NonPrivateDpEvent) for leaf, _ in leaves):
        return PrivacyCost("no privacy", np.ones_like, lambda delta: math.inf)
    pure_epsilon = sum_pure_epsilons(leaves)
    if pure_epsilon:
        others = [
            dpa.SelfComposedDpEvent(leaf, count)
            for leaf, count in leaves
            if not isinstance(leaf, PURE_EVENTS)
        ]
        other_cost = compute_privacy_cost(dpa.ComposedDpEvent(others), neighbours, coarse)
        return _add_pure_epsilon(other_cost, pure_epsilon)
    inverse_variance = 0.0
    sampled = []
    for leaf, count in leaves:
        if isinstance(leaf, dpa.GaussianDpEvent):
            inverse_variance += count / leaf.noise_multiplier**2
        else:
            sampled.append((*_read_sampled_gaussian(leaf, neighbours), count))
    mu = math.sqrt(inverse_variance)
    if not sampled:
        return _gaussian_cost(mu)
    grid_step = _choose_grid_step(sampled, mu, coarse)
    if grid_step is None:
        return compute_renyi_cost(event, neighbours)
    return _pld_cost(sampled, mu, grid_step, neighbours)


def _flatten_events(event: dpa.DpEvent, count: int = 1) -> list[tuple[dpa.DpEvent, int]]:
    """List the events that an event is composed of, each with its number of repetitions."""
    if isinstance(event, dpa.SelfComposedDpEvent):
        return _flatten_events(event.event, count * event.count)
    if isinstance(event, dpa.ComposedDpEvent):
        return [leaf for part in event.events for leaf in _flatten_events(part, count)]
    return [(event, count)]


def _read_sampled_gaussian(event: dpa.DpEvent, neighbours: Neighbours) -> tuple[float, float]:
    """Give (sample rate, noise multiplier) of one sampled Gaussian.

    Raises:
        PlanError: If the combination of sampling and relation has no proof, so no epsilon.
    """
    inner = getattr(event, "event", None)
    if isinstance(inner, dpa.GaussianDpEvent):
        if isinstance(event, dpa.PoissonSampledDpEvent) and neighbours is Neighbours.ADD_REMOVE:
            return event.sampling_probability, inner.noise_multiplier
        if (
            isinstance(event, dpa.SampledWithoutReplacementDpEvent)
            and neighbours is Neighbours.REPLACE
        ):
            return event.sample_size / event.source_dataset_size, inner.noise_multiplier
    raise PlanError(
        f"There is no accounting for {type(event).__name__} under {neighbours} neighbours."
    )


def _add_pure_epsilon(other_cost: PrivacyCost, pure_epsilon: float) -> PrivacyCost:
    r"""Add a pure epsilon :math:`E` to the cost of other events.

    privacy: binary randomized response dominates every mechanism of epsilon :math:`E`, and its loss
    is :math:`\pm E`. With :math:`p=1/(1+e^{-E})` the profile is
    :math:`\delta(\epsilon)=p\,\delta_{rest}(\epsilon-E)+(1-p)\,\delta_{rest}(\epsilon+E)`. The
    stated epsilon is the plain sum.
    """
    probability = 1 / (1 + math.exp(-pure_epsilon))

    def other_delta(eps: Any) -> Any:
        """Extend the profile below 0, where it is at most 1 - exp(eps) (1 - delta(0))."""
        eps = np.asarray(eps, float)
        return np.where(
            eps < 0,
            1 - np.exp(np.minimum(eps, 0)) * (1 - other_cost.delta(np.zeros(1))),
            other_cost.delta(np.maximum(eps, 0)),
        )

    accountant = "pure epsilons added"
    if other_cost.mu != 0:
        accountant = f"{other_cost.accountant}, {accountant}"
    return PrivacyCost(
        accountant,
        lambda eps: (
            probability * other_delta(eps - pure_epsilon)
            + (1 - probability) * other_delta(eps + pure_epsilon)
        ),
        lambda delta: pure_epsilon + other_cost.epsilon(delta),
    )


# Accountants


def _gaussian_cost(mu: float) -> PrivacyCost:
    if mu == 0:  # no event at all
        return PrivacyCost("analytic Gaussian", np.zeros_like, lambda delta: 0.0, 0.0)
    return PrivacyCost(
        "analytic Gaussian",
        functools.partial(gaussian_delta, mu),
        functools.partial(gaussian_epsilon, mu),
        mu,
    )


def _pld_cost(
    sampled: list[tuple[float, float, int]], mu: float, grid_step: float, neighbours: Neighbours
) -> PrivacyCost:
    """Compose privacy loss distributions.

    Args:
        sampled: Sample rate, noise multiplier and repetitions of each sampled Gaussian.
        mu: The parameter of Gaussian DP of all other events together.
        grid_step: The step of the grid.
        neighbours: The relation, which says how the samples are drawn.

    Returns:
        The cost.
    """
    total = pld.identity(grid_step)
    if mu > 0:
        total = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=grid_step)
    compute_pld = poisson_pld if neighbours is Neighbours.ADD_REMOVE else without_replacement_pld
    for sample_rate, noise_multiplier, count in sampled:
        one = compute_pld(sample_rate, noise_multiplier, grid_step)
        total = total.compose(one.self_compose(count))
    # privacy: measured against exact Gaussians, powers of a Fourier transform lost up to
    # 0.2 * 2^-52 of delta per step. Five times that is added.
    slack = 2.0**-52 * (1000 + sum(count for *_, count in sampled))
    return PrivacyCost(
        f"PLD, grid {grid_step:g}",
        lambda eps: total.get_delta_for_epsilon(eps) + slack,
        lambda target: (
            float(total.get_epsilon_for_delta(target - slack)) if target > slack else math.inf
        ),
    )


def _choose_grid_step(
    sampled: list[tuple[float, float, int]], mu: float, coarse: bool = False
) -> float | None:
    """Choose the finest grid whose composed distribution stays below `MAX_GRID_POINTS`.

    Args:
        sampled: Sample rate, noise multiplier and repetitions of each sampled Gaussian.
        mu: The parameter of Gaussian DP of all other events together.
        coarse: Whether to choose only from the coarser half of the grids.

    Returns:
        The grid step; None if all grids are too large.
    """
    support = 0.0  # width of the privacy loss of one step
    variance = mu**2  # of the composed privacy loss
    for sample_rate, noise_multiplier, count in sampled:
        shift = 1 / noise_multiplier
        x = np.linspace(-10, shift + 10, 4001)
        density = (1 - sample_rate) * norm.pdf(x) + sample_rate * norm.pdf(x - shift)
        loss = np.logaddexp(
            np.log1p(-sample_rate) if sample_rate < 1 else -np.inf,
            math.log(sample_rate) + shift * x - shift**2 / 2,
        )
        weight = density / density.sum()
        variance += count * float(weight @ (loss - weight @ loss) ** 2)
        support = max(support, float(loss[-1] - loss[0]))
    for grid_step in GRID_STEPS[len(GRID_STEPS) // 2 if coarse else 0 :]:
        if (20 * math.sqrt(variance) + 2 * support) / grid_step < MAX_GRID_POINTS:
            return grid_step
    return None


def compute_renyi_cost(event: dpa.DpEvent, neighbours: Neighbours) -> PrivacyCost:
    """Compute the Renyi bound, which a release states beside its claim as a check.

    It is never below a correct bound by more than rounding.
    """
    relations = dpa.NeighboringRelation
    is_add_remove = neighbours is Neighbours.ADD_REMOVE
    relation = relations.ADD_OR_REMOVE_ONE if is_add_remove else relations.REPLACE_ONE
    accountant = RdpAccountant(neighboring_relation=relation).compose(event)
    leaves = _flatten_events(event)
    has_only_pure = all(isinstance(leaf, PURE_EVENTS) for leaf, _ in leaves)
    pure_epsilon = sum_pure_epsilons(leaves) if has_only_pure else math.inf

    def epsilon(delta: float) -> float:
        # At delta = 0 the order would be infinity, which gives the sum of pure epsilons itself.
        return float(accountant.get_epsilon(delta)) if delta else pure_epsilon

    return PrivacyCost(
        "Renyi (the PLD grid would be too large)", np.vectorize(accountant.get_delta), epsilon
    )
