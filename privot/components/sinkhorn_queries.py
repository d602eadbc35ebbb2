"""The queries of DP-Sinkhorn: transport gradients between generated images and records."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from privot.transport.sinkhorn import squared_euclidean_cost, transport_plan

NORM_EPSILON = 1e-6  # added to a squared distance, so that no distance is zero


def project_low_frequencies(images: Tensor, basis: Tensor) -> Tensor:
    """Compute the low DCT coefficients of images, with pixels scaled to [-1, 1].

    The basis is orthonormal, so distances between coefficients are distances between images without
    their high frequencies.

    Args:
        images: Images [..., channels, height, width] in [0, 1].
        basis: DCT basis of a channel [num_pixels, num_coefficients].

    Returns:
        Coefficients of all channels [..., channels * num_coefficients].
    """
    return ((2 * images - 1).flatten(-2) @ basis).flatten(-2)


def group_by_class(rows: Tensor, classes: int) -> Tensor:
    """Group rows whose classes take turns: [classes * count, ...] to [classes, count, ...]."""
    return rows.unflatten(0, (-1, classes)).transpose(0, 1).contiguous()


# The query with clip_unit=batch, as in the paper


def compute_transport_gradient(
    records: Any,
    points: Tensor,
    labels: Tensor,
    basis: Tensor,
    classes: int,
    max_sample_size: int,
    label_distance: float,
    l1_weight: float,
    blur: float,
    sinkhorn_iterations: int,
) -> Tensor:
    r"""Compute the gradient of :math:`\sqrt{n} W(X, Y)` with respect to n generated points X.

    Its norm is the root mean square of the n points' gradients. Each class of the sampled records Y
    has the same mass.

    Args:
        records: The sample, with images and labels.
        points: DCT coefficients of the generated images X [n, dim].
        labels: Their labels [n].
        basis: DCT basis of a channel [num_pixels, num_coefficients].
        classes: Number of classes.
        max_sample_size: Largest number of records to use.
        label_distance: Distance between different labels, over sqrt(2).
        l1_weight: Weight of the L1 distance in the cost.
        blur: Regularization of the transport, in units of the cost.
        sinkhorn_iterations: Number of Sinkhorn iterations.

    Returns:
        The gradient [n, dim].
    """
    record_images, record_labels, weights = _weigh_records(records, classes, max_sample_size)
    points = points.detach().requires_grad_()
    with torch.enable_grad():
        cost = compute_labeled_cost(
            points,
            project_low_frequencies(record_images, basis),
            labels,
            record_labels,
            basis,
            label_distance,
            l1_weight,
        )
        plan = transport_plan(cost, blur, None, weights, sinkhorn_iterations)
        (gradient,) = torch.autograd.grad((plan * cost).sum(), points)
    return gradient * math.sqrt(len(points))


def _weigh_records(
    records: Any, classes: int, max_sample_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose and weigh the records of a sample, so that each class has the same mass.

    Args:
        records: The sample, with images and labels.
        classes: Number of classes.
        max_sample_size: Number of returned records.

    Returns:
        Images, labels and weights of records. Black images of weight 0 fill them up, so that
        every sample gives the same shape.
    """
    count = len(records.labels)
    # privacy: the choice of records and their weights may depend on the sample in any way, because
    # the gate clips the whole result and the sensitivity relies on nothing else. A sample above
    # max_sample_size is thinned evenly, because records come in their own order.
    num_chosen = min(count, max_sample_size)
    chosen = torch.arange(num_chosen, device=records.labels.device) * count // num_chosen
    images = records.images[chosen]
    labels = records.labels[chosen]
    is_of_class = one_hot(labels, classes).to(images.dtype)
    class_counts = is_of_class.sum(0)
    weights = (is_of_class @ (1 / class_counts.clamp(min=1))) / (class_counts > 0).sum()
    num_missing = max_sample_size - num_chosen
    return (
        pad(images, (0, 0, 0, 0, 0, 0, 0, num_missing)),
        pad(labels, (0, num_missing)),
        pad(weights, (0, num_missing)),
    )


def compute_labeled_cost(
    points: Tensor,
    other_points: Tensor,
    labels: Tensor,
    other_labels: Tensor,
    basis: Tensor,
    label_distance: float,
    l1_weight: float,
) -> Tensor:
    """Compute the paper's cost between points whose scaled one-hot labels are further coordinates.

    The L1 distance is that of images without their high frequencies.

    Args:
        points: DCT coefficients [n, dim].
        other_points: DCT coefficients [m, dim].
        labels: Labels of the points [n].
        other_labels: Labels of the other points [m].
        basis: DCT basis of a channel [num_pixels, num_coefficients].
        label_distance: Distance between different labels, over sqrt(2).
        l1_weight: Weight of the L1 distance beside the squared L2 distance.

    Returns:
        The cost matrix [n, m].
    """
    cost = squared_euclidean_cost(points, other_points)
    if l1_weight:
        pixels, other_pixels = (
            (coefficients.unflatten(1, (-1, basis.shape[1])) @ basis.T).flatten(1)
            for coefficients in (points, other_points)
        )
        cost = cost + l1_weight * torch.cdist(pixels, other_pixels, p=1)
    return cost + (2 * label_distance**2 + l1_weight * 2 * label_distance) * (
        labels[:, None] != other_labels
    )


# The query with clip_unit=record


def compute_record_gradient(
    image: Tensor, label: Tensor, points: Tensor, potentials: Tensor, basis: Tensor, blur: float
) -> Tensor:
    """Compute one record's gradient of W with respect to the generated points of its class.

    With the potentials given, the gradient of a record does not depend on other records.

    Args:
        image: One record's image [channels, height, width].
        label: Its label [].
        points: Generated points by class [classes, count, dim].
        potentials: Their potentials [classes, count].
        basis: DCT basis of a channel [num_pixels, num_coefficients].
        blur: Regularization of the transport, a distance.

    Returns:
        The gradient [count, dim], of norm 1 at most.
    """
    class_points, class_potentials = (
        values.index_select(0, label[None])[0] for values in (points, potentials)
    )
    return compute_attraction(
        project_low_frequencies(image, basis), class_points, class_potentials, blur
    )


def compute_attraction(point: Tensor, points: Tensor, potentials: Tensor, blur: float) -> Tensor:
    """Compute the gradient of the cost of transporting a point to generated points.

    Args:
        point: The point [..., dim].
        points: Generated points [..., count, dim].
        potentials: Their potentials [..., count].
        blur: Regularization of the transport, a distance.

    Returns:
        The gradient with respect to the generated points [..., count, dim].
    """
    gaps = points - point[..., None, :]
    distances = (gaps.square().sum(-1) + NORM_EPSILON).sqrt()
    return (((potentials - distances) / blur).softmax(-1) / distances)[..., None] * gaps
