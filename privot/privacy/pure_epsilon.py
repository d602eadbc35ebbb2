"""Events of a pure epsilon: Laplace noise and randomized response."""

from __future__ import annotations

import math

import dp_accounting as dpa

PURE_EVENTS = (dpa.LaplaceDpEvent, dpa.RandomizedResponseDpEvent)


def randomized_response_event(inverse_epsilon: float) -> dpa.DpEvent:
    r"""Give the event of a channel of pure epsilon, as binary randomized response.

    No channel of the same epsilon reveals more.

    >>> sum_pure_epsilons([(randomized_response_event(0.5), 1)])
    2.0
    """
    if 1 / inverse_epsilon >= 700:  # exp would overflow
        return dpa.NonPrivateDpEvent()
    return dpa.RandomizedResponseDpEvent(2 / (1 + math.exp(1 / inverse_epsilon)), 2)


def sum_pure_epsilons(leaves: list[tuple[dpa.DpEvent, int]]) -> float:
    """Add up the epsilons of the events that have a pure epsilon."""
    total = 0.0
    for leaf, count in leaves:
        if isinstance(leaf, dpa.LaplaceDpEvent):
            total += count / leaf.noise_multiplier
        elif isinstance(leaf, dpa.RandomizedResponseDpEvent):
            total += count * math.log1p(
                leaf.num_buckets * (1 - leaf.noise_parameter) / leaf.noise_parameter
            )
    return total
