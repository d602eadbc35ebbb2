"""Statistics of held-out records and of transmitted gradients, for attacks on a transcript."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from privot.components.critic_gradients import MIN_NORM, build_gradient_basis
from privot.data.dataset import Records
from privot.federated.messages import Terms


def clip_input_gradients(terms: Terms, input_gradients: Tensor) -> Tensor:
    """Clip or normalize gradients [..., c, h, w] to norm 1, as a client does before its noise."""
    norms = input_gradients.flatten(-3).norm(dim=-1)[..., None, None, None]
    if terms.settings.normalize_gradients:
        return input_gradients / (norms + MIN_NORM)
    return input_gradients / norms.clamp(min=1)


def compute_mean_images(records: Records, classes: int) -> tuple[Tensor, Tensor]:
    """Compute the mean image of each class [classes, c, h, w], and which classes exist [classes].

    A class without records gets the mean of all images.
    """
    is_of_class = nn.functional.one_hot(records.labels, classes).float()
    counts = is_of_class.sum(0)
    class_means = (
        torch.einsum("nk,n...->k...", is_of_class, records.images)
        / counts.clamp(min=1)[:, None, None, None]
    )
    has_class = counts > 0
    mean_image = records.images.mean(0)
    return torch.where(has_class[:, None, None, None], class_means, mean_image), has_class


def sample_same_labels(records: Records, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Sample indices of records with given labels.

    Args:
        records: To sample from.
        labels: [count]; where a label does not exist, a record of any label is sampled.
        generator: Random generator of the random numbers.

    Returns:
        Indices [count].
    """
    keys = torch.rand(len(labels), len(records.labels), generator=generator)
    has_label = labels[:, None] == records.labels
    return torch.where(has_label, keys, keys - 1).argmax(1)


def fit_gradient_scale(true_records: Records, class_means: Tensor, gradient_sums: Tensor) -> float:
    """Fit the s for which m_c + s * sums_c is nearest to the true images.

    Args:
        true_records: The true images.
        class_means: m [classes, c, h, w].
        gradient_sums: Sums of gradients, as pixels [classes, c, h, w].

    Returns:
        s.
    """
    directions = gradient_sums[true_records.labels]
    offsets = true_records.images - class_means[true_records.labels]
    squared_norm = directions.square().sum().clamp(min=1e-30)
    return float((offsets * directions).sum() / squared_norm)


def transform_to_pixels(terms: Terms, coefficients: Tensor) -> Tensor:
    """Transform DCT coefficients [..., h', w'] to pixels [..., h, w]."""
    row_basis, column_basis = (
        build_gradient_basis(side, terms.settings.frequency_fraction, terms.settings.window_size)
        for side in terms.shape[1:]
    )
    return row_basis @ coefficients.float() @ column_basis.T
