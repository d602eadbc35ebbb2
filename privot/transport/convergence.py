"""Sinkhorn iterations until convergence, with Anderson acceleration."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from privot.transport.anderson import AndersonAcceleration
from privot.transport.sinkhorn_iterations import INNER_ITERATIONS, Iteration, IterationResult


def run_iterations(
    iteration: Iteration,
    g: Tensor,
    num_iterations: int | None,
    tolerance: float,
    max_iterations: int,
) -> tuple[IterationResult, int]:
    """Iterate a fixed number of times, or until convergence.

    With a convergence check, a run of iterations starts from the extrapolation of the last ones. If
    after the run the error is no smaller or the dual value is lower, the extrapolation is rejected.
    The more rejections there are in a row, the longer plain iterations continue before the next
    attempt. Plain iterations neither raise the error nor lower the dual value.

    Args:
        iteration: How to compute the iterations.
        g: The potential to start from, [..., m].
        num_iterations: Number of iterations, or None with a convergence check.
        tolerance: Error to stop at.
        max_iterations: Largest number of iterations with a convergence check.

    Returns:
        The result of the last run, and the number of all iterations.
    """
    if num_iterations is not None:
        return iteration.run(g, num_iterations), num_iterations
    acceleration = AndersonAcceleration(g)
    fallback = None  # where to continue if the present extrapolation is rejected
    last_error = math.inf
    min_dual_value = -math.inf
    done = 0
    wait = 1  # runs of plain iterations after the next rejection
    extrapolate_from = 0  # number of iterations from which extrapolations are tried
    while True:
        run_length = min(INNER_ITERATIONS, max_iterations - done)
        result = iteration.run(g, run_length)
        done += run_length
        error, rounding_error, dual_value = acceleration.record(
            g, result.g, result.marginal_error, result.rounding_error, result.dual_value
        )
        is_converged = error <= max(tolerance, rounding_error)
        is_broken = fallback is None and math.isnan(error)
        if is_converged or done == max_iterations or is_broken:
            return result, done
        # "not (<)" and not ">=": NaN must be rejected too.
        if fallback is not None and not (error < last_error and dual_value >= min_dual_value):
            acceleration.reset()
            g = fallback
            fallback = None
            wait = 2 * wait
            extrapolate_from = done + wait * INNER_ITERATIONS
            continue
        wait = wait if fallback is None else 1
        last_error = error
        # Rounding alone may lower the dual value by this much.
        min_dual_value = dual_value - 8 * max(rounding_error, torch.finfo(g.dtype).eps)
        # The last run starts from plain iterations, which cannot be rejected.
        is_last = done + INNER_ITERATIONS >= max_iterations
        extrapolated = (
            acceleration.extrapolate() if done >= extrapolate_from and not is_last else None
        )
        if extrapolated is None:
            g = result.g
            fallback = None
        else:
            g = extrapolated
            fallback = result.g
