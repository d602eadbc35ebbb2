"""The weights of a small network as one flat vector: its layout, initialization and Adam.

With one vector for each network, thousands of networks are one tensor [count, num_weights].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from privot.runtime.kernels import kernels_available

Shapes = dict[str, tuple[int, ...]]


def unflatten_weights(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Cut a vector of weights into named parameters."""
    pieces = flat.split([math.prod(shape) for shape in shapes.values()])
    return {
        name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


def draw_weights(count: int, shapes: Shapes, generator: torch.Generator) -> Tensor:
    """Draw weights uniformly within 1 / sqrt(fan-in), which is PyTorch's default. Biases are 0.

    Args:
        count: Number of networks.
        shapes: Shapes of the parameters of one network.
        generator: Source of the random numbers.

    Returns:
        Flat weights, [count, num_weights].
    """
    limits = [
        math.sqrt(1 / math.prod(shape[1:])) if len(shape) > 1 else 0.0 for shape in shapes.values()
    ]
    scale = torch.cat(
        [
            torch.full((math.prod(shape),), limit)
            for limit, shape in zip(limits, shapes.values(), strict=True)
        ]
    )
    return (2 * torch.rand(count, len(scale), generator=generator) - 1) * scale


def adam_step(
    weights: Tensor,
    gradient: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    step: Tensor,
    learning_rate: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply one step of Adam with betas 0.5 and 0.9, as in WGAN-GP.

    Args:
        weights: Flat weights.
        gradient: Their gradient.
        first_moment: Average of the gradients so far.
        second_moment: Average of their squares so far.
        step: Number of this step, from 1.
        learning_rate: Learning rate.

    Returns:
        The new weights and moments, of the same shape.
    """
    if kernels_available() and weights.is_cuda and weights.dtype == torch.float32:
        from privot.nets.kernels.adam import FusedAdamStep

        return FusedAdamStep.apply(
            weights,
            gradient,
            first_moment,
            second_moment,
            1 - 0.5**step,
            1 - 0.9**step,
            learning_rate,
        )
    first_moment = torch.lerp(gradient, first_moment, 0.5)
    second_moment = torch.lerp(gradient.square(), second_moment, 0.9)
    first_corrected = first_moment / (1 - 0.5**step)
    second_corrected = second_moment / (1 - 0.9**step)
    update = first_corrected / (second_corrected.sqrt() + 1e-8)
    return weights - learning_rate * update, first_moment, second_moment
