"""The objectives that an attack can minimize, by name, and the total variation of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from privot.attacks.inversion.gradient_distances import (
    compute_cosine_gradient_distance,
    compute_l2_gradient_distance,
    compute_squared_gradient_distance,
)
from privot.attacks.inversion.problem_checks import TensorDict
from privot.attacks.inversion.wasserstein_variants import (
    compute_index_value_distance,
    compute_l1_gradient_distance,
    compute_layerwise_gradient_distance,
    compute_sliced_gradient_distance,
    compute_sorted_gradient_distance,
)


class Objective(NamedTuple):
    """What an attack minimizes.

    Attributes:
        title: Title for reports.
        distance: Function from guessed and observed gradients of one victim to a scalar.
        position_information: How far the positions of gradient entries count: all, some or none.
            With none it cannot reconstruct images.
        residual: The observable by which iterates are compared.
        residual_tolerance: a residual below it ends the search; the published value by default.
        uses_critic: Whether a learned critic replaces the distance; see
            `privot.attacks.inversion.wasserstein_variants`.
    """

    title: str
    distance: Callable[[TensorDict, TensorDict], Tensor]
    position_information: str
    residual: Callable[[TensorDict, TensorDict], Tensor] = compute_squared_gradient_distance
    residual_tolerance: float = 1e-6
    uses_critic: bool = False


OBJECTIVES = {
    "squared": Objective("squared distance (DLG)", compute_squared_gradient_distance, "all"),
    "norm": Objective(
        "W1 between two single points, the norm (WDLG)", compute_l2_gradient_distance, "all"
    ),
    "by-layer": Objective(
        "W1 with one critic per tensor", compute_layerwise_gradient_distance, "all"
    ),
    "absolute": Objective(
        "W1 with a linear critic of clipped weights", compute_l1_gradient_distance, "all"
    ),
    "cosine": Objective(
        "cosine", compute_cosine_gradient_distance, "all", compute_cosine_gradient_distance, 1e-9
    ),
    "index-value": Objective("sliced W2 over (index, value)", compute_index_value_distance, "some"),
    "sliced": Objective(
        "sliced W2 over filters",
        compute_sliced_gradient_distance,
        "some",
        compute_sliced_gradient_distance,
    ),
    "sorted": Objective(
        "W2 over entries without index",
        compute_sorted_gradient_distance,
        "none",
        compute_sorted_gradient_distance,
    ),
    "critic": Objective(
        "learned critic over filters (WGAN-GP)",
        compute_l2_gradient_distance,
        "none",
        uses_critic=True,
    ),
}


def compute_total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighboring pixels [..., h, w], vertical plus horizontal.

    >>> import torch
    >>> compute_total_variation(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    tensor(1.)
    """
    return images.diff(dim=-2).abs().mean() + images.diff(dim=-1).abs().mean()
