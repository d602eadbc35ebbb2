"""Estimates from privatized records without a generator: shares of categories, and fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NUM_EM_STEPS = 1000  # of expectation-maximization


def estimate_frequencies(channel: Any, outputs: Tensor) -> Tensor:
    r"""Estimate the shares of the categories by maximum likelihood.

    Expectation-maximization repeats :math:`p_c \leftarrow mean_j\, p_c K(y_j|c) / \sum_d p_d
    K(y_j|d)`; each step raises the likelihood. Entropic transport has the same solution on
    categories.

    Args:
        channel: A channel for categories.
        outputs: What the clients sent, [n, output_dim].

    Returns:
        Shares that sum to 1, float64 [num_categories].
    """
    num_categories = channel.num_categories
    unique_outputs, counts = outputs.double().cpu().unique(dim=0, return_counts=True)
    one_hot = torch.eye(num_categories, dtype=torch.float64)
    costs = channel.compute_cost_matrix(one_hot, unique_outputs)
    likelihoods = (-costs / channel.temperature).exp().T  # [unique outputs, num_categories]
    weights = counts / counts.sum()
    shares = torch.full((num_categories,), 1 / num_categories, dtype=torch.float64)
    for _ in range(NUM_EM_STEPS):
        shares = shares * ((weights / (likelihoods @ shares)) @ likelihoods)
    return shares


def apportion_labels(frequencies: Tensor, count: int) -> Tensor:
    """Choose labels in given shares, as near as whole numbers can be and without randomness.

    >>> apportion_labels(torch.tensor([0.5, 0.3, 0.2]), 5).bincount().tolist()
    [3, 1, 1]

    Args:
        frequencies: Shares of the classes, [classes].
        count: Number of labels.

    Returns:
        Sorted labels, int64 [count].
    """
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    cumulative = frequencies.double().cumsum(0)
    return torch.searchsorted(cumulative, quantiles).clamp(max=len(frequencies) - 1)


def describe_residual(
    residual: float, noise_residual: float, standard_error: float, plan_error: float
) -> dict[str, Any]:
    """Compare the residual of a fit with that of the noise alone, in numbers and in words.

    >>> describe_residual(1.5, 1.0, 0.01, 0.0)["over_noise"]
    1.5

    Args:
        residual: Mean cost of outputs and generated records under the transport plan.
        noise_residual: Mean cost of a record and its own output.
        standard_error: Standard error of ``residual``.
        plan_error: How far the weights of the transport plan are from their constraints.

    Returns:
        Plain data for the manifest.
    """
    excess = residual - noise_residual
    if abs(excess) <= max(3 * standard_error, 0.01 * abs(noise_residual)):
        meaning = (
            "The outputs are as far from the generated records as the noise explains: the residual "
            "has the distribution of the noise."
        )
    elif excess > 0:
        meaning = (
            "The outputs are farther from the generated records than the noise explains: the "
            "generator misses some of the data."
        )
    else:
        meaning = (
            "The outputs are nearer to the generated records than the noise explains: the "
            "generator learned some of the noise."
        )
    return {
        "residual": residual,
        "residual_of_the_noise": noise_residual,
        "over_noise": residual / noise_residual,
        "standard_error": standard_error,
        "plan_weights_off": plan_error,
        "meaning": meaning,
    }
