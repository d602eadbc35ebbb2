"""What answers tell of clean records without a generator: shares of categories, and whether a fit has the law of the noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEPS = 1000  # of expectation and maximisation


def shares(channel: Any, answers: Tensor) -> Tensor:
    r"""The likeliest shares of the categories behind ``answers`` [n, width] of a channel: [categories], by expectation and maximisation.

    :math:`p_c \leftarrow mean_j\, p_c K(y_j|c) / \sum_d p_d K(y_j|d)`: each step raises the likelihood. It is what entropic transport finds
    on the categories, without a net.
    """
    answers, counts = (
        answers.double().cpu().unique(dim=0, return_counts=True)
    )  # equal answers, once
    unique = (
        (
            -channel.cost(torch.eye(channel.categories, dtype=torch.float64), answers)
            / channel.temperature
        )
        .exp()
        .T
    )
    weights = counts / counts.sum()
    share = torch.full((channel.categories,), 1 / channel.categories, dtype=torch.float64)
    for _ in range(STEPS):
        share = share * ((weights / (unique @ share)) @ unique)
    return share


def apportioned(share: Tensor, count: int) -> Tensor:
    """``count`` labels in these shares, to the nearest, none of them by chance: [count].

    >>> apportioned(torch.tensor([0.5, 0.3, 0.2]), 5).bincount().tolist()
    [3, 1, 1]
    """
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.searchsorted(share.double().cumsum(0), middles).clamp(max=len(share) - 1)


def meaning(found: float, noise: float, error: float, off: float) -> dict[str, Any]:
    """A residual ``found`` under the plan beside that of the ``noise`` alone, with its standard ``error``, in numbers and in words.

    >>> meaning(1.5, 1.0, 0.01, 0.0)["over_noise"]
    1.5
    """
    far = found - noise
    if abs(far) <= max(3 * error, 0.01 * abs(noise)):
        said = "answers are as far from the generated records as the noise carries them: the fit has the law of the noise"
    elif far > 0:
        said = "answers are farther from the generated records than the noise carries them: the generator misses some of the data"
    else:
        said = "answers are nearer to the generated records than the noise carries them: some of the noise was learned"
    return {
        "residual": found,
        "residual_of_the_noise": noise,
        "over_noise": found / noise,
        "standard_error": error,
        "plan_weights_off": off,
        "meaning": said,
    }
