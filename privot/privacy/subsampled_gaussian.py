"""Privacy profiles of the Gaussian mechanism: of all records, and of samples of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy.stats import norm

NEGLIGIBLE_DELTA = 1e-21  # privacy loss beyond the epsilon at this delta counts as infinite

# A root takes milliseconds, and the same arguments come again and again.
_cached_gaussian_epsilon = functools.lru_cache(4096)(dpa.get_epsilon_gaussian)


def gaussian_delta(mu: float, epsilon: Any) -> Any:
    """Give delta of mu-Gaussian DP at epsilon, elementwise; mu is 1 / noise multiplier."""
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Give epsilon of mu-Gaussian DP at delta; mu is 1 / noise multiplier."""
    return float(_cached_gaussian_epsilon(1 / mu, delta))


@functools.lru_cache(maxsize=64)
def poisson_pld(
    sample_rate: float, noise_multiplier: float, grid_step: float
) -> pld.PrivacyLossDistribution:
    r"""Compute the privacy loss of one Gaussian query on a Poisson sample, under add/remove.

    This is what ``pld.from_gaussian_mechanism`` gives, whose loop over the grid takes seconds.

    privacy: with :math:`\delta_{Gauss}` of one query on all records and sample rate q,
    :math:`\delta_{remove}(\epsilon)=q\,\delta_{Gauss}(\log(1+(e^\epsilon-1)/q))` and
    :math:`\delta_{add}(\epsilon)=(1-e^\epsilon(1-q))\,\delta_{Gauss}(-\log(1+(e^{-\epsilon}-1)/q))`
    wherever these logarithms exist; beyond, :math:`1-e^\epsilon` and 0.

    Args:
        sample_rate: The probability of a record.
        noise_multiplier: Standard deviation of the noise over sensitivity.
        grid_step: The step of the grid of privacy losses.

    Returns:
        The distribution, pessimistic on the grid.
    """
    if sample_rate == 1:
        return pld.from_gaussian_mechanism(
            noise_multiplier, value_discretization_interval=grid_step
        )
    pmfs = [
        _connect_poisson_dots(adjacency, sample_rate, noise_multiplier, grid_step)
        for adjacency in (AdjacencyType.REMOVE, AdjacencyType.ADD)
    ]
    return pld.PrivacyLossDistribution(*pmfs)


def _connect_poisson_dots(
    adjacency: AdjacencyType, sample_rate: float, noise_multiplier: float, grid_step: float
) -> pld_pmf.PLDPmf:
    """Put the privacy loss of `poisson_pld` on the grid, for removing or for adding a record.

    Args:
        adjacency: ``REMOVE`` or ``ADD``.
        sample_rate: The probability of a record, below 1.
        noise_multiplier: Standard deviation of the noise over sensitivity.
        grid_step: The step of the grid of privacy losses.

    Returns:
        The distribution, pessimistic on the grid.
    """
    mu = 1 / noise_multiplier
    log_unsampled = math.log1p(-sample_rate)

    def invert_amplification(eps: Any) -> Any:
        """Compute log(1 + (exp(eps) - 1) / sample_rate), for eps above ``log_unsampled``."""
        is_large = eps > 1
        small_branch = np.log1p(np.expm1(np.where(is_large, 0, eps)) / sample_rate)
        large_branch = (
            eps
            - math.log(sample_rate)
            + np.log1p(-np.exp(log_unsampled - np.where(is_large, eps, 1)))
        )
        return np.where(is_large, large_branch, small_branch)

    bounds = GaussianPrivacyLoss(
        noise_multiplier, sampling_prob=sample_rate, adjacency_type=adjacency
    ).connect_dots_bounds()
    first = math.floor(bounds.epsilon_lower / grid_step)
    last = math.ceil(bounds.epsilon_upper / grid_step)
    eps = np.arange(first, last + 1) * grid_step
    deltas = np.zeros(len(eps))
    if adjacency is AdjacencyType.REMOVE:
        exists = eps > log_unsampled
        deltas[exists] = sample_rate * gaussian_delta(mu, invert_amplification(eps[exists]))
        deltas[~exists] = -np.expm1(eps[~exists])
    else:
        exists = eps < -log_unsampled
        deltas[exists] = -np.expm1(eps[exists] + log_unsampled) * gaussian_delta(
            mu, -invert_amplification(-eps[exists])
        )
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        grid_step, first, last, np.clip(deltas, 0, 1)
    )


@functools.lru_cache(maxsize=64)
def without_replacement_pld(
    sample_rate: float, noise_multiplier: float, grid_step: float
) -> pld.PrivacyLossDistribution:
    r"""Compute the privacy loss of one Gaussian query on a sample of fixed size, under replace-one.

    It also holds for one secret shard out of many.

    privacy: for :math:`\epsilon\ge0` and sample rate q,
    :math:`\delta(\epsilon)=q\,\delta_{Gauss}(\log(1+(e^\epsilon-1)/q))` by advanced joint
    convexity. The relation is symmetric, so
    :math:`\delta(-\epsilon)=1-e^{-\epsilon}+e^{-\epsilon}\delta(\epsilon)`.
    See docs/methods/sampling.md.

    Args:
        sample_rate: Sample size over number of records.
        noise_multiplier: Standard deviation of the noise over sensitivity.
        grid_step: The step of the grid of privacy losses.

    Returns:
        The distribution, pessimistic on the grid.
    """
    mu = 1 / noise_multiplier
    max_epsilon = math.log1p(
        sample_rate * math.expm1(min(gaussian_epsilon(mu, NEGLIGIBLE_DELTA), 600))
    )
    top = math.ceil(max_epsilon / grid_step)
    eps = np.arange(top + 1) * grid_step
    unamplified = np.log1p(np.expm1(eps) / sample_rate)
    upper = sample_rate * np.maximum(gaussian_delta(mu, unamplified), 0)
    lower = (-np.expm1(-eps) + np.exp(-eps) * upper)[:0:-1]  # by symmetry, from -top to -1
    deltas = np.minimum.accumulate(np.clip(np.concatenate([lower, upper]), 0, 1))
    return pld.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid_step, -top, top, deltas)
    )
