"""Input gradients of critics: in which direction an image should change to score higher.

They are computed in low DCT frequencies, since noise grows with the number of dimensions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from privot.components.critic_training import CriticState
from privot.components.dct import centered_dct_basis, dct_basis
from privot.nets.functional_critic import Critic

MIN_NORM = 1e-12  # added to a norm before the division by it


def build_gradient_basis(side: int, frequency_fraction: float, window_size: int = 0) -> Tensor:
    """Build the DCT basis of gradients along one side.

    Args:
        side: Number of pixels of the side.
        frequency_fraction: Fraction of the DCT coefficients to use, in (0, 1].
        window_size: Number of pixels in the middle of the side to use; 0 uses all.

    Returns:
        Orthonormal columns [side, num_frequencies].
    """
    if 0 < window_size < side:
        num_frequencies = max(1, round(frequency_fraction * window_size))
        return centered_dct_basis(side, window_size, num_frequencies)
    return dct_basis(side, max(1, round(frequency_fraction * side)))


def input_gradient(
    state: CriticState,
    image: Tensor,
    label: Tensor,
    critic: Critic,
    row_basis: Tensor,
    column_basis: Tensor,
) -> Tensor:
    """Compute the gradient of a critic's score with respect to an image, in DCT coefficients.

    Args:
        state: State of the critic.
        image: One image [channels, height, width].
        label: Its label [].
        critic: Architecture of the critic.
        row_basis: DCT basis of the height [height, rows].
        column_basis: DCT basis of the width [width, columns].

    Returns:
        The gradient [channels, rows, columns].
    """

    def compute_score(pixels: Tensor) -> Tensor:
        return critic.score(state["weights"], state["left_vectors"], pixels[None], label[None])[0]

    return row_basis.T @ grad(compute_score)(image) @ column_basis


def unit_input_gradient(
    state: CriticState, image: Tensor, label: Tensor, **gradient_kwargs: Any
) -> Tensor:
    """Scale an input gradient to norm 1, since the noise has the same scale for short gradients.

    Args:
        state: State of the critic.
        image: One image [channels, height, width].
        label: Its label [].
        gradient_kwargs: Further arguments of `input_gradient`.

    Returns:
        The gradient [channels, rows, columns], of norm 1.
    """
    gradient = input_gradient(state, image, label, **gradient_kwargs)
    return gradient / (gradient.norm() + MIN_NORM)


def compute_clipped_gradients(
    state: CriticState, images: Tensor, labels: Tensor, **gradient_kwargs: Any
) -> Tensor:
    """Compute the input gradients of many images by one critic, each clipped to norm 1.

    Args:
        state: State of the critic.
        images: Images [rows, channels, height, width].
        labels: Their labels [rows].
        gradient_kwargs: Further arguments of `input_gradient`.

    Returns:
        The gradients [rows, channels, ...], together of norm sqrt(rows) at most.
    """
    gradients = torch.func.vmap(functools.partial(input_gradient, state, **gradient_kwargs))(
        images, labels
    )
    return gradients / gradients.flatten(1).norm(dim=1).clamp(min=1).view(-1, 1, 1, 1)
