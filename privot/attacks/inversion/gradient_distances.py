r"""Distances between a guessed gradient g' and the observed gradient g of one victim.

WDLG (Wang et al. 2023) is the Kantorovich-Rubinstein dual  sup_{|f|_L <= 1} f(g') - f(g). A client
sends one gradient, so both measures are single points, the best critic is linear,
f(z) = <z, (g' - g) / |g' - g|>, and the dual is exactly  |g' - g|_2, the L2 distance. Readings of
the paper that take single entries or filters for the points of the measures are in
`privot.attacks.inversion.wasserstein_variants`; they lose the positions, in part or entirely.
"""

from __future__ import annotations

import torch
from torch import Tensor

from privot.attacks.inversion.problem_checks import TensorDict

NORM_EPSILON = 1e-14  # under square roots: a norm is not differentiable at 0


def flatten_tensor_dict(tensors: TensorDict) -> Tensor:
    """Join all entries in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def compute_squared_gradient_distance(
    guessed_gradient: TensorDict, observed_gradient: TensorDict
) -> Tensor:
    """Compute |g' - g|², the objective of DLG.

    >>> guess, observation = {"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])}
    >>> compute_squared_gradient_distance(guess, observation)
    tensor(25.)
    """
    return torch.stack(
        [
            (guessed_gradient[name] - observed_gradient[name]).square().sum()
            for name in observed_gradient
        ]
    ).sum()


def compute_l2_gradient_distance(
    guessed_gradient: TensorDict, observed_gradient: TensorDict
) -> Tensor:
    """Compute |g' - g|, the objective of WDLG as it is defined.

    >>> guess, observation = {"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])}
    >>> compute_l2_gradient_distance(guess, observation)
    tensor(5.)
    """
    return (
        compute_squared_gradient_distance(guessed_gradient, observed_gradient) + NORM_EPSILON
    ).sqrt()


def compute_cosine_gradient_distance(
    guessed_gradient: TensorDict, observed_gradient: TensorDict
) -> Tensor:
    """Compute 1 - cos(g', g), the objective of Inverting Gradients (Geiping et al. 2020).

    It does not depend on the scale, so clipping does not change it.

    >>> guess, observation = {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])}
    >>> compute_cosine_gradient_distance(guess, observation)
    tensor(1.)
    """
    guess = flatten_tensor_dict(guessed_gradient)
    observation = flatten_tensor_dict(observed_gradient)
    inner_product = guess @ observation
    guess_norm = (guess @ guess + NORM_EPSILON).sqrt()
    observation_norm = (observation @ observation + NORM_EPSILON).sqrt()
    return 1 - inner_product / (guess_norm * observation_norm)
